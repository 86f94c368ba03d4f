"""An upgrade makes exactly the tables the models describe, sees nothing of Optuna's, and keeps what older ones hold."""

from __future__ import annotations

import hashlib
import sqlite3
from contextlib import closing

import pytest
from sqlalchemy import Column, Integer, MetaData, Table

from evoengine.ledger.database import make_engine, parse_url
from evoengine.ledger.optuna.study import optuna_storage
from evoengine.ledger.schema import upgrade
from evoengine.ledger.store import open_ledger
from evoengine.ledger.tables import Base
from evoengine.records import UNKNOWN_POLICY, Kind
from evoengine.views.trials import trial_json
from tests.ledger.ledger_schema import empty_frozen, made_both_ways, schema
from tests.support.ledger_examples import CONFIG, GPU, PROBLEM, a_figure, add_ranked, differences, start_run

SHA256 = hashlib.sha256(b"text").hexdigest()
WRITTEN_BEFORE_POLICIES = f"""
INSERT INTO devices VALUES (1, 'NVIDIA H200', NULL, NULL, NULL, '{{}}');
INSERT INTO runs (id, started_at, status, gpu, problem, device_id, space_name, space_sha256, space_text, sampler, seed,
                  version, host, pid, command)
VALUES
 (1, '2026-01-02 03:04:05', 'all trials done', '{GPU}', '{PROBLEM}', 1, 's', 's', 's', 'tpe', 1, '0', 'h', 1, 'c');
INSERT INTO baselines VALUES (1, 1, 'MATH', 'NVIDIA H200', 900.0, 305.0, '[900.0, "inf"]', '2026-01-02 03:04:05');
INSERT INTO candidates (id, run_id, problem, gpu, config, config_key, parents, created_at, outcome)
VALUES (1, 1, '{PROBLEM}', '{GPU}', '{{"tile": 1}}', '1', '[]', '2026-01-02 03:04:05', 'measured'),
       (2, 1, '{PROBLEM}', '{GPU}', '{{"tile": 2}}', '2', '[]', '2026-01-02 03:04:05', 'estimated'),
       (3, 1, '{PROBLEM}', '{GPU}', '{{"tile": 3}}', '3', '[]', '2026-01-02 03:04:05', 'recorded');
INSERT INTO sources VALUES ('{SHA256}', 'text');
UPDATE candidates SET source_sha256 = '{SHA256}', entry = 'k', grid_x = 1, grid_y = 1, grid_z = 1, threads = 128,
                      shared_bytes = 0 WHERE id = 2;
INSERT INTO measurements VALUES
 (1, 1, 'estimated', 'estimate', 500.0, 20.0, '[]', NULL, '{{}}', NULL, '2026-01-02 03:04:05'),
 (2, 1, 'measured', 'NVIDIA H200', 400.0, 25.0, '[25.0]', 1.5, '{{"place": 1.0}}', NULL, '2026-01-02 03:04:05'),
 (3, 2, 'estimated', 'estimate', 600.0, 15.0, '[]', NULL, '{{}}', NULL, '2026-01-02 03:04:05'),
 (4, 3, 'recorded', 'A100', {{tflops}}, 30.0, '[30.0]', NULL, '{{}}', NULL, '2026-01-02 03:04:05');
"""


def test_tables_equal_models_and_optunas_tables_are_not_proposed_for_dropping(ledger):
    optuna_storage(ledger.url)
    assert differences(ledger, Base.metadata) == []


def test_a_new_ledger_has_the_schema_that_an_upgrade_makes(tmp_path):
    at_once, migrated = made_both_ways(str(tmp_path / "evo.db"))
    assert at_once == migrated


def test_a_column_an_index_or_a_key_that_only_one_way_makes_is_seen(tmp_path):
    engine = make_engine(parse_url(str(tmp_path / "evo.db")))
    upgrade(engine)
    for change in (
        "ALTER TABLE runs ADD COLUMN mood INTEGER",
        "DROP INDEX ix_candidates_binary_id",
        "DROP VIEW trial_list",
        "CREATE TABLE feelings (id INTEGER PRIMARY KEY AUTOINCREMENT)",
    ):
        with engine.connect() as connection, connection.begin() as changing:
            before = schema(connection)
            connection.exec_driver_sql(change)
            assert schema(connection) != before, change
            changing.rollback()
    engine.dispose()


def test_a_model_without_its_migration_and_one_that_went_are_seen(ledger):
    changed = MetaData()
    for table in Base.metadata.sorted_tables:
        table.to_metadata(changed)
    changed.tables["runs"].append_column(Column("mood", Integer))
    Table("feelings", changed, Column("id", Integer, primary_key=True))
    changed.remove(changed.tables["baselines"])
    kinds = {found[0] for found in differences(ledger, changed)}
    assert kinds == {"add_column", "add_table", "remove_index", "remove_table"}


@pytest.mark.parametrize(("schema", "tflops"), [("0003", "300.0"), ("0004", "NULL")])
def test_a_ledger_of_before_policies_keeps_its_figures_and_says_that_their_policy_is_unknown(tmp_path, schema, tflops):
    path = tmp_path / "old.db"
    empty_frozen(schema, path)
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(WRITTEN_BEFORE_POLICIES.replace("{tflops}", tflops))
    with open_ledger(str(path), create=False) as ledger:
        estimate, measured = ledger.measurements(1)
        assert (measured.kind, measured.policy) == (Kind.MEASURED, UNKNOWN_POLICY)
        assert (measured.median_us, measured.samples_us, measured.vs_baseline) == (25.0, (25.0,), 1.5)
        assert measured.normalised_us is None and measured.compared_us == 25.0
        assert {ledger.candidate(n).measurement.policy for n in (2, 3)} == {estimate.policy} == {None}
        assert [(b.name, b.policy) for b in ledger.baselines(1)] == [("MATH", UNKNOWN_POLICY)]
        assert "unknown" in str(measured.policy)
        assert trial_json(ledger.candidate(1))["policy"].launch == "unknown"
        assert ledger.candidate(2).source.launch.block == (128, 1, 1)
        assert differences(ledger, Base.metadata) == []
        new = add_ranked(ledger, start_run(ledger), a_figure(1.0, Kind.MEASURED), CONFIG)
        assert [c.trial for c in ledger.best(PROBLEM, GPU, top=9)] == [new]


def test_a_password_that_a_command_of_before_holds_is_hidden_in_the_file_too(tmp_path):
    path = tmp_path / "old.db"
    empty_frozen("0004", path)
    asked = "evoengine search --db postgresql://u:{}@host/db --trials 4"
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(WRITTEN_BEFORE_POLICIES.replace("{tflops}", "NULL"))
        connection.execute("UPDATE runs SET command = ?", [asked.format("hunter2")])
        connection.commit()
    with open_ledger(str(path), create=False) as ledger:
        assert [run.command for run in ledger.runs()] == [asked.format("***")]
