"""Ledgers that each schema's own code wrote open in this one, and rank, export and replay.

`frozen/freeze.py` made them. Of schema 0002, which no version ended with, it is a ledger of 0001 that was upgraded.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from evoengine.cli.main import evoengine
from evoengine.ledger.schema import REVISIONS as PRESENT
from evoengine.ledger.store import open_ledger
from evoengine.ledger.tables import Base
from evoengine.records import Kind, Outcome
from tests.ledger.frozen.freeze import FOLDER, GPU, INCORRECT, MEASURED, SLOWER, UNFINISHED, thaw
from tests.support.exhaustive import more
from tests.support.ledger_examples import differences

REVISIONS = sorted(file.name.removesuffix(".sql.gz") for file in FOLDER.glob("*.sql.gz"))
ENDS = (REVISIONS[0], REVISIONS[-1])
Call = Callable[..., Result]


@pytest.fixture(params=REVISIONS)
def frozen(request, tmp_path) -> Path:
    path = tmp_path / "frozen.db"
    thaw(FOLDER / f"{request.param}.sql.gz", path)
    return path


@pytest.fixture
def call(frozen) -> Call:
    """Calls a command on the frozen ledger; it must succeed."""

    def run(*arguments: object) -> Result:
        done = CliRunner().invoke(evoengine, [*map(str, arguments), "--db", str(frozen)])
        assert done.exit_code == 0, (done.output, done.exception)
        return done

    return run


def unfrozen(present: list[str], frozen: list[str]) -> list[str]:
    """Schemas before the present one of which no ledger is kept."""
    return sorted(set(present[:-1]) - set(frozen))


def test_every_schema_before_the_present_one_is_frozen():
    assert unfrozen(PRESENT, REVISIONS) == []


def test_a_schema_that_nobody_froze_is_named():
    assert unfrozen(["0001", "0002", "0003"], ["0001"]) == ["0002"]


@pytest.mark.parametrize("frozen", [REVISIONS[0], *more(REVISIONS[1:-1]), REVISIONS[-1]], indirect=True)
def test_a_frozen_ledger_is_upgraded_and_keeps_what_it_holds(frozen):
    with open_ledger(str(frozen), create=False) as ledger:
        assert differences(ledger, Base.metadata) == []
        problem = ledger.candidate(MEASURED).problem
        assert [c.trial for c in ledger.best(problem, "h100", 9)] == [MEASURED, SLOWER]
        best = ledger.candidate(MEASURED, with_cubin=True)
        assert (best.measurement.kind, best.measurement.device, best.measurement.median_us) == (Kind.MEASURED, GPU, 5.0)
        assert best.measurement.vs_baseline == 1.5
        assert best.binary.cubin.startswith(b"\x7fELF") and best.source.entry in best.source.text
        rejected, unfinished = (ledger.candidate(trial) for trial in (INCORRECT, UNFINISHED))
        assert (rejected.outcome, rejected.reason, rejected.verdict.correct) == (Outcome.INCORRECT, "off by 1", False)
        assert unfinished.outcome is None and ledger.candidate(SLOWER).parents == (MEASURED,)
        searched = ledger.candidates(run=1)
        assert len(searched) == 4 and {c.outcome for c in searched} == {Outcome.ESTIMATED}
        assert all(c.verdict.correct and c.measurement.median_us > 0 for c in searched)


@pytest.mark.parametrize("frozen", REVISIONS[:1], indirect=True)  # its machine code is executed, which takes seconds
def test_the_oldest_ledgers_best_is_exported(call, tmp_path):
    found = json.loads(call("best", "--json").stdout)
    assert (found["trial"], found["tflops_kind"]) == (MEASURED, "measured")
    call("best", "--export", tmp_path / "out")
    assert found["config"].items() <= json.loads((tmp_path / "out" / "kernel.json").read_text())["config"].items()
    assert (tmp_path / "out" / "kernel.cubin").read_bytes().startswith(b"\x7fELF")


@pytest.mark.parametrize("frozen", [*ENDS, *more(r for r in REVISIONS if r not in ENDS)], indirect=True)
def test_a_frozen_run_is_exported_and_replayed(call, tmp_path):
    call("export", tmp_path / "run.json", "--run", 100)
    db = tmp_path / "replayed.db"
    replay = ["search", "--device", f"recorded:{tmp_path / 'run.json'}", "--trials", "9", "--db", str(db), "--json"]
    done = CliRunner().invoke(evoengine, replay)
    assert done.exit_code == 0, (done.output, done.exception)
    best = json.loads(done.stdout)["best"][0]
    assert (best["median_us"], best["tflops_kind"]) == (5.0, "recorded")
