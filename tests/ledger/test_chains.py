"""A row that another program deleted or inserted shows like a flipped bit; what evoengine does itself is noted."""

from __future__ import annotations

import random
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from click.testing import CliRunner

from evoengine.cli.main import evoengine
from evoengine.errors import MachineError
from evoengine.ledger import integrity
from evoengine.ledger.check import find_faults, prune
from evoengine.ledger.store import Ledger, open_ledger
from evoengine.records import Baseline, Outcome, Profile
from tests.ledger.frozen.freeze import FOLDER, thaw
from tests.support.exhaustive import more
from tests.support.ledger_examples import CONFIG, GPU, POLICY, PROBLEM, a_figure, add_ranked, start_run
from tests.support.recorded import cache

FROZEN = sorted(file.name.removesuffix(".sql.gz") for file in FOLDER.glob("*.sql.gz"))
WITHOUT_CHAINS = [revision for revision in FROZEN if revision < "0011"]
WITH_CHAINS = [revision for revision in FROZEN if revision >= "0011"]


def fill(ledger: Ledger) -> int:
    """Write a run with a row in each table that chains note, and a second run; return the first."""
    run = start_run(ledger)
    ledger.record_baseline(run, Baseline("MATH", "NVIDIA H200", 900.0, 305.0, (900.0,), POLICY))
    first = add_ranked(ledger, run, a_figure(10.0))
    add_ranked(ledger, run, a_figure(11.0), CONFIG | {"tile_m": 32}, "second")
    ledger.record_profile(first, Profile("tool", "NVIDIA H200", {"figure": 1.0}))
    rejected = ledger.add_candidate(run, PROBLEM, GPU, CONFIG, (), None)
    ledger.finish(rejected, Outcome.SCREENED, "too large", None, None)
    ledger.finish_run(run, "all trials done")
    ledger.finish_run(start_run(ledger), "all trials done")
    return run


def faults(place: Path | str) -> list[str]:
    with open_ledger(str(place), create=False) as ledger:
        return [fault.what for fault in find_faults(ledger, lambda stage: None)]


def change(path: Path, *statements: str) -> None:
    """Change the file as another program would, without foreign keys."""
    with closing(sqlite3.connect(path)) as connection:
        for statement in statements:
            assert connection.execute(statement).rowcount > 0, statement
        connection.commit()


@pytest.fixture
def path(new_file) -> Path:
    path: Path = new_file("chained.db")
    with open_ledger(str(path), create=False) as ledger:
        fill(ledger)
        assert [fault.what for fault in find_faults(ledger, lambda stage: None)] == []
    return path


def found_by_opening(path: Path) -> str:
    with pytest.raises(MachineError) as raised:
        faults(path)
    return str(raised.value)


@pytest.mark.parametrize("table", ["baselines", "candidates", "measurements", "profiles", "verdicts"])
def test_a_deleted_row_is_named(path, table):
    last = "(SELECT max(id) FROM candidates)" if table == "candidates" else f"(SELECT min(id) FROM {table})"
    also = ["DELETE FROM standings"] if table == "measurements" else []
    change(path, *also, f"DELETE FROM {table} WHERE id = {last}")
    number = 3 if table == "candidates" else 1
    said = f"row {number} of the table {table} was deleted: the chain of run 1 lists it"
    assert said in found_by_opening(path)


def test_a_deleted_run_is_named(path):
    change(path, "DELETE FROM runs WHERE id = 2", "DELETE FROM heartbeats WHERE run_id = 2")
    assert "row 2 of the table runs was deleted: the chain of the ledger lists it" in found_by_opening(path)


def test_a_row_that_another_program_inserted_is_named(path):
    columns = "candidate_id, kind, device, median_us, samples_us, terms, suspect, policy, taken_at, checksum"
    with closing(sqlite3.connect(path)) as connection:
        known = [row[1] for row in connection.execute("PRAGMA table_info(measurements)") if row[1] != "id"]
    assert set(columns.split(", ")) <= set(known)
    names = ", ".join(known)
    change(path, f"INSERT INTO measurements ({names}) SELECT {names} FROM measurements WHERE id = 1")
    said = "row 3 of the table measurements is in no link of run 1: evoengine did not write it"
    assert said in found_by_opening(path)


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        ("DELETE FROM links WHERE run_id = 1 AND number = 3", "link 3 of run 1 is missing"),
        ("UPDATE links SET rows = 'candidates 1-9' WHERE run_id = 1 AND number = 3", "link 3 of run 1 is not what was"),
        ("UPDATE links SET rows = rows || 'x' WHERE run_id = 1 AND number = 3", "link 3 of run 1 is not what was"),
        (
            "UPDATE links SET at = '2020-01-01 00:00:00.000000' WHERE run_id = 1 AND number = 1",
            "link 1 of run 1 is not",
        ),
        ("UPDATE links SET sum = '00000000' WHERE run_id = 1 AND number = 2", "link 2 of run 1 is not what was"),
        ("UPDATE chains SET sum = '00000000' WHERE run_id = 1", "were written"),
        ("UPDATE chains SET links = links - 1 WHERE run_id = 1", "were written"),
        ("DELETE FROM chains WHERE run_id = 1", "the chain of run 1 is missing"),
        ("DELETE FROM chains WHERE run_id = 0", "the chain of the ledger is missing"),
    ],
)
def test_a_changed_chain_is_named(path, statement, said):
    change(path, statement)
    assert said in found_by_opening(path)


def test_a_chain_that_lost_its_end_with_the_rows_that_it_notes_is_named(path):
    """Who deletes the last rows, and the links that note them."""
    change(path, "DELETE FROM links WHERE run_id = 1 AND number = (SELECT max(number) FROM links WHERE run_id = 1)")
    assert "were written" in found_by_opening(path)


# ── what evoengine does itself ──────────────────────────────────────────────────────────────────────────────────────


def notes(path: Path) -> list[str]:
    """Return what the links say was done, beside writing."""
    with closing(sqlite3.connect(path)) as connection:
        return [what for (what,) in connection.execute("SELECT what FROM links WHERE what <> 'written'")]


def test_a_removal_is_noted(path):
    with open_ledger(str(path), create=False) as ledger:
        ledger.remove_runs([1])
    assert (faults(path), notes(path)) == ([], ["removed"])


def test_a_prune_is_noted(path):
    with open_ledger(str(path), create=False) as ledger:
        prune(ledger, 0, None)
    assert (faults(path), notes(path)) == ([], ["pruned"])


def test_an_import_is_noted_and_begins_a_chain(path, tmp_path):
    done = CliRunner().invoke(evoengine, ["import", str(cache(tmp_path / "t4.json")), "--db", str(path)])
    assert done.exit_code == 0, done.output
    assert (faults(path), set(notes(path))) == ([], {"imported"})
    with closing(sqlite3.connect(path)) as connection:
        run = connection.execute("SELECT max(id) FROM runs").fetchone()[0]
    change(path, "DELETE FROM standings", "DELETE FROM measurements WHERE id = (SELECT max(id) FROM measurements)")
    assert f"the chain of run {run} lists it" in found_by_opening(path)


def test_a_revoked_claim_is_noted(path):
    with open_ledger(str(path), create=False) as ledger:
        ledger.claims.claim("key", 1)
        assert ledger.claims.revoke(1)
    assert (faults(path), notes(path)) == ([], ["revoked"])


@pytest.mark.parametrize("revision", [WITHOUT_CHAINS[-1], *more(WITHOUT_CHAINS[:-1])])
def test_an_older_ledger_begins_its_chains_at_the_upgrade(tmp_path, revision):
    path = tmp_path / "old.db"
    thaw(FOLDER / f"{revision}.sql.gz", path)
    with open_ledger(str(path), create=False):
        pass
    assert set(notes(path)) == {integrity.UPGRADED}
    with open_ledger(str(path), create=False) as ledger, ledger.database.reading() as session:
        assert list(integrity.broken(session)) == []
    change(path, "DELETE FROM standings", "DELETE FROM measurements WHERE id = (SELECT max(id) FROM measurements)")
    assert "of the table measurements was deleted: the chain of run" in found_by_opening(path)


def test_a_ledger_that_was_frozen_with_chains_keeps_them(tmp_path):
    path = tmp_path / "old.db"
    thaw(FOLDER / f"{WITH_CHAINS[0]}.sql.gz", path)
    with open_ledger(str(path), create=False) as ledger, ledger.database.reading() as session:
        assert list(integrity.broken(session)) == []
    assert integrity.UPGRADED not in notes(path)


def test_a_row_that_was_damaged_before_the_upgrade_stays_damaged(tmp_path):
    path = tmp_path / "old.db"
    thaw(FOLDER / "0009.sql.gz", path)
    change(path, "UPDATE runs SET seed = seed + 1 WHERE id = 1")
    assert faults(path) == ["row 1 of the table runs is not what was written"]


def test_numbers_are_read_as_they_were_written():
    draw = random.Random(12)
    for _ in range(50):
        numbers = {name: set(draw.sample(range(1, 60), draw.randrange(1, 40))) for name in ("candidates", "verdicts")}
        assert integrity.read(integrity.spelt(numbers)) == numbers
    assert integrity.spelt({"verdicts": {2}, "candidates": {1, 2, 3, 7}}) == "candidates 1-3,7; verdicts 2"
