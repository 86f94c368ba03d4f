"""A ledger is checked whole, repaired from itself, copied while it is written, and made smaller."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from datetime import timedelta
from pathlib import Path

import optuna
import pytest
from click.testing import CliRunner
from sqlalchemy import text

from evoengine.cli.main import evoengine
from evoengine.errors import EvoengineError
from evoengine.ledger.check import prune
from evoengine.ledger.optuna.study import Projection, optuna_storage
from evoengine.ledger.runs import KILLED_AFTER_SECONDS
from evoengine.ledger.store import Ledger, open_ledger
from evoengine.ledger.tables import Base, CandidateRow, HeartbeatRow
from evoengine.records import KILLED, Kind, Outcome
from evoengine.views.trials import trial_json
from tests.ledger.frozen.freeze import FOLDER, thaw
from tests.support.exhaustive import more
from tests.support.ledger_examples import (
    CONFIG,
    DOMAINS,
    GPU,
    PROBLEM,
    a_binary,
    a_figure,
    a_source,
    a_verdict,
    add_ranked,
    start_run,
)
from tests.support.vouch import vouch

TRIALS = 4


@pytest.fixture(scope="module")
def searched_file(empty_ledger_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A search of four kernels, each faster than the one before, with its study."""
    path = Path(shutil.copy(empty_ledger_file, tmp_path_factory.mktemp("searched")))
    with open_ledger(str(path), create=False) as ledger:
        search(ledger)
    return path


@pytest.fixture
def searched(searched_file: Path, tmp_path: Path) -> Iterator[Ledger]:
    """A copy of it, which the test may change."""
    with open_ledger(str(shutil.copy(searched_file, tmp_path / "ledger.db")), create=False) as ledger:
        yield ledger


def search(ledger: Ledger) -> None:
    run = start_run(ledger)
    projection = Projection(optuna_storage(ledger.url), ledger, run, Kind.ESTIMATED, DOMAINS)
    for number in range(1, TRIALS + 1):
        trial = ledger.add_candidate(run, PROBLEM, GPU, CONFIG, (), "sampler", a_source(f"kernel{number}"))
        ledger.record_binary(trial, a_source(f"kernel{number}"), a_binary(cubin=f"cubin {number}".encode()))
        ledger.record_verdict(trial, a_verdict())
        ledger.record_measurement(trial, a_figure(float(number)))
        ledger.finish(trial, Outcome.ESTIMATED, None, 0.25, "emulator")
        projection.add(trial)
    ledger.finish_run(run, "all trials done")
    projection.complete()
    assert projection.missed == {}


def call(db: object, *arguments: object) -> tuple[int, str]:
    """Exit code, and all that was said."""
    done = CliRunner().invoke(evoengine, ["db", *map(str, arguments), "--db", str(db)])
    if isinstance(done.exception, EvoengineError):
        return done.exception.exit_code, f"{done.output} {done.exception}"
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.output


def execute(ledger: Ledger, *changes: str) -> None:
    with closing(sqlite3.connect(ledger.place)) as connection:
        for change in changes:
            connection.execute(change)
        connection.commit()


# ── check ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_sound_ledger_is_said_to_be_sound(searched):
    code, said = call(searched.place, "check")
    assert (code, "no fault found: 4 trials" in said) == (0, True), said


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("UPDATE measurements SET samples_us = '[1.0]' WHERE id = 2", "row 2 of the table measurements is not what"),
        ("UPDATE candidates SET problem = 'attention:other' WHERE id = 3", "row 3 of the table candidates is not what"),
        (
            "UPDATE candidates SET created_at = 'yesterday' WHERE id = 3",
            "row 3 of the table candidates is not what",
        ),
        *more([("UPDATE sources SET packed = x'00' WHERE rowid = 1", "of the table sources is not what was written")]),
        ("UPDATE machine_code SET packed = x'00' WHERE rowid = 1", "of the table machine_code is not what was written"),
        ("DELETE FROM devices", "refers to a row of devices that does not exist"),
        (
            "INSERT INTO devices (name, uuid, arch, driver, versions, checksum)"
            " SELECT name, uuid, arch, driver, versions, checksum FROM devices",
            "device 2 violates an invariant: a device belongs to a run",
        ),
    ],
)
def test_damage_anywhere_is_named_and_not_repaired(searched, change, named):
    execute(searched, change)
    code, said = call(searched.place, "check", "--repair")
    assert (code, named in said, "restore it from a copy" in said) == (3, True, True), said


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("DROP TABLE trial_params", "the table trial_params of Optuna's, which keeps the studies, is missing"),
        *more([("DROP TABLE studies", "the table studies of Optuna's, which keeps the studies, is missing")]),
        ("DROP TABLE tokens", "the table tokens is missing"),
        ("ALTER TABLE runs DROP COLUMN pid", "the column pid of the table runs is missing"),
        (
            "ALTER TABLE trial_params DROP COLUMN distribution_json",
            "the column distribution_json of the table trial_params is missing",
        ),
    ],
)
def test_a_table_or_column_that_was_dropped_is_named_by_every_check_and_made_by_none(searched, change, named):
    execute(searched, change)
    for arguments in (["check"], ["check", "--repair"], ["check"]):
        code, said = call(searched.place, *arguments)
        assert (code, named in said, "restore it from a copy" in said) == (3, True, True), said


def test_every_index_that_was_dropped_is_named_and_made_again(searched):
    def made() -> set[str]:
        declared = (
            "SELECT name FROM sqlite_master WHERE type = 'index' AND sql IS NOT NULL"  # others are of constraints
        )
        with closing(sqlite3.connect(searched.place)) as connection:
            return {name for (name,) in connection.execute(declared)}

    indexes = made()
    assert indexes >= {"ix_trials_study_id", "ix_studies_study_name"}  # of Optuna's tables
    assert indexes > {index.name for table in Base.metadata.tables.values() for index in table.indexes}
    execute(searched, *(f"DROP INDEX {name}" for name in indexes))
    code, said = call(searched.place, "check")
    assert (code, [name for name in indexes if f"the index {name} of the table" not in said]) == (1, []), said
    assert call(searched.place, "check", "--repair")[0] == 0
    assert made() == indexes
    assert call(searched.place, "check")[0] == 0


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("DROP VIEW best_trials", "the view best_trials is missing"),
        (
            "PRAGMA writable_schema = ON;"
            " UPDATE sqlite_master SET sql = sql || ' WHERE c.id > 1' WHERE name = 'trial_figures'",
            "the view trial_figures is not the one that this evoengine makes",
        ),
        *more([("DELETE FROM standings WHERE candidate_id = 2", "the stored ranking does not match the figures")]),
        ("UPDATE standings SET us = 1.0 WHERE candidate_id = 1", "the stored ranking does not match the figures"),
        *more([("DELETE FROM trial_user_attributes WHERE trial_id = 2", "has 4 trials, 3 of the 4 that ended")]),
        (
            "UPDATE trial_user_attributes SET value_json = '1' WHERE key = 'trial'",
            "has 4 trials, 1 of the 4 that ended",
        ),
    ],
)
def test_what_follows_from_the_rest_is_repaired(searched, change, named):
    def best() -> list[int]:
        with open_ledger(searched.place, create=False) as ledger:
            return [c.trial for c in ledger.best(PROBLEM, GPU, 9)]

    assert best() == [4, 3, 2, 1]
    execute(searched, *change.split("; "))
    code, said = call(searched.place, "check")
    assert (code, named in said, "db check --repair" in said) == (1, True, True), said
    code, said = call(searched.place, "check", "--repair")
    assert (code, "repaired: 4 trials" in said) == (0, True), said
    assert call(searched.place, "check")[0] == 0
    assert best() == [4, 3, 2, 1]
    [name] = optuna.get_all_study_names(searched.url)
    assert [t.value for t in optuna.load_study(study_name=name, storage=searched.url).trials] == [1.0, 2.0, 3.0, 4.0]


def test_a_run_whose_process_is_gone_is_marked_as_killed(searched):
    run = start_run(searched)
    assert call(searched.place, "check")[0] == 0  # it lives
    searched.database._heart.stop()
    with searched.database.writing() as session:
        session.get_one(HeartbeatRow, run).beat_at -= timedelta(seconds=KILLED_AFTER_SECONDS + 5)
    code, said = call(searched.place, "check", "--repair")
    assert (code, f"run {run} is marked as running" in said) == (0, True), said
    with open_ledger(searched.place, create=False) as ledger:
        assert ledger.runs()[-1].status == KILLED


def test_an_older_ledger_is_not_upgraded_by_a_check_or_a_copy(tmp_path):
    old = tmp_path / "old.db"
    thaw(FOLDER / "0008.sql.gz", old)
    code, said = call(old, "check")
    assert (code, "has schema 0008" in said, "db upgrade" in said) == (2, True, True), said
    assert call(old, "backup", tmp_path / "copy.db")[0] == 0
    code, said = call(old, "upgrade")
    assert (code, "from schema 0008 to 00" in said) == (0, True), said
    assert call(old, "check")[0] == 0
    with closing(sqlite3.connect(tmp_path / "copy.db")) as copy:
        assert copy.execute("SELECT version_num FROM evoengine_alembic_version").fetchone() == ("0008",)


# ── backup ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_copy_holds_what_was_written_and_is_a_ledger(searched, tmp_path):
    later = start_run(searched)  # still in the log, and going on
    code, said = call(searched.place, "backup", tmp_path / "copy.db")
    assert (code, "copy.db" in said) == (0, True), said
    searched.add_candidate(later, PROBLEM, GPU, CONFIG, (), None)
    with open_ledger(str(tmp_path / "copy.db"), create=False) as copy:
        assert ([r.id for r in copy.runs()], copy.count()) == ([1, later], TRIALS)
        assert copy.candidate(1, with_cubin=True) == searched.candidate(1, with_cubin=True)


def test_a_copy_replaces_nothing_and_a_failed_one_leaves_nothing(searched, tmp_path):
    (tmp_path / "there.db").write_text("mine")
    code, said = call(searched.place, "backup", tmp_path / "there.db")
    assert (code, "is there already" in said) == (2, True)
    assert call(searched.place, "backup", tmp_path / "nowhere" / "copy.db")[0] == 2
    assert call(tmp_path / "no.db", "backup", tmp_path / "copy.db")[0] == 1
    assert (tmp_path / "there.db").read_text() == "mine"
    assert {p.name for p in tmp_path.iterdir() if "copy" in p.name or "part" in p.name} == set()


# ── prune ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_losers_lose_sources_and_machine_code_and_nothing_else(searched):
    before = [trial_json(c) for c in searched.candidates()]
    code, said = call(searched.place, "prune", "--keep", "2", "--yes")
    assert (code, "deleted 2 sources and 2 binaries" in said) == (0, True), said
    with open_ledger(searched.place, create=False) as ledger:
        after = {c.trial: c for c in ledger.candidates(with_cubin=True)}
        assert [t for t, c in after.items() if c.source and c.binary.cubin] == [3, 4]
        assert [t for t in after if ledger.is_pruned(t)] == [1, 2]
        without = ("source_sha256", "shared_bytes")
        for told, candidate in zip(before, after.values(), strict=True):
            now = trial_json(candidate)
            assert {k: v for k, v in now.items() if k not in without} == {
                k: v for k, v in told.items() if k not in without
            }
        assert [c.trial for c in ledger.best(PROBLEM, GPU, 9)] == [4, 3, 2, 1]
    assert call(searched.place, "check")[0] == 0
    shown = CliRunner().invoke(evoengine, ["show", "1", "--source", "--db", searched.place])
    assert "db prune deleted it" in str(shown.exception)


def test_what_was_pruned_is_kept_again_where_a_search_comes_to_it_again(searched):
    key = (a_source("kernel1").sha256, a_binary().options, a_binary().arch, a_binary().compiler)
    prune(searched, 1, None)
    assert searched.find_binary(*key) is None
    trial = searched.add_candidate(start_run(searched), PROBLEM, GPU, CONFIG, (), None, a_source("kernel1"))
    searched.record_binary(trial, a_source("kernel1"), a_binary(cubin=b"cubin 1"))
    assert searched.find_binary(*key).cubin == b"cubin 1"
    assert searched.candidate(1, with_cubin=True).source == a_source("kernel1")


def test_runs_that_go_on_and_recent_trials_keep_theirs(searched):
    with searched.database.writing() as session:
        session.execute(text("UPDATE candidates SET finished_at = datetime(finished_at, '-9 days') WHERE id = 1"))
        vouch(session.connection(), CandidateRow)
    assert "deleted 1 sources" in call(searched.place, "prune", "--keep", "1", "--older-than", "7", "--yes")[1]
    running = start_run(searched)
    add_ranked(searched, running, a_figure(0.5), name="slow")
    assert "deleted 2 sources" in call(searched.place, "prune", "--keep", "1", "--yes")[1]


def test_nothing_is_pruned_where_nobody_agrees(searched):
    code, said = call(searched.place, "prune")
    assert (code, "--yes" in said) == (2, True), said
    assert not searched.is_pruned(1)


def test_a_pruned_file_is_smaller(searched):
    run = start_run(searched)
    for number in range(40):
        add_ranked(searched, run, a_figure(0.1), name="".join(chr(97 + (number * k) % 26) for k in range(20_000)))
    searched.finish_run(run, "all trials done")
    searched.close()
    before = Path(searched.place).stat().st_size
    assert call(searched.place, "prune", "--keep", "1", "--yes")[0] == 0
    assert Path(searched.place).stat().st_size < before


# ── studies ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_deleted_study_is_made_again_by_one_command(searched):
    [name] = optuna.get_all_study_names(searched.url)
    before = optuna.load_study(study_name=name, storage=searched.url).trials
    optuna.delete_study(study_name=name, storage=searched.url)
    code, said = call(searched.place, "rebuild-study", "1")
    assert (code, f"rebuilt the study {name}" in said) == (0, True), said
    after = optuna.load_study(study_name=name, storage=searched.url).trials
    assert [(t.number, t.value, t.params, t.user_attrs) for t in after] == [
        (t.number, t.value, t.params, t.user_attrs) for t in before
    ]


def test_a_study_that_cannot_be_made_again_says_why(searched):
    empty, running = start_run(searched), start_run(searched)
    searched.finish_run(empty, "all trials done")
    for run, code, why in ((9, 2, "there is no run 9"), (running, 2, "is in progress"), (empty, 1, "no trial of run")):
        said = call(searched.place, "rebuild-study", run)
        assert (said[0], why in said[1]) == (code, True), said
