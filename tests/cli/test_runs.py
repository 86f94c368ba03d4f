"""`evoengine runs` lists what the ledger holds and takes runs out of it."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path

import pytest
from click.testing import CliRunner

from evoengine.cli.main import evoengine as commands
from evoengine.errors import NothingFound, UsageError
from evoengine.ledger.store import open_ledger
from evoengine.records import Kind
from tests.support.ledger_examples import GPU, PROBLEM, a_figure, add_ranked, start_run


@pytest.fixture
def db(tmp_path: Path) -> str:
    """A ledger of two runs: one with two ranked trials, one without any."""
    file = str(tmp_path / "evo.db")
    with open_ledger(file, create=True) as ledger:
        run = start_run(ledger)
        add_ranked(ledger, run, a_figure(100.0, Kind.MEASURED), name="slow")
        add_ranked(ledger, run, a_figure(300.0, Kind.MEASURED), name="fast")
        ledger.add_candidate(run, PROBLEM, GPU, {}, (), None)
        ledger.finish_run(run, "budget reached")
        ledger.finish_run(start_run(ledger, gpu="a100", sampler="random"), "interrupted")
    return file


def call(*arguments: object, answer: str = ""):
    return CliRunner().invoke(commands, ["runs", *map(str, arguments)], input=answer)


def test_every_run_is_a_row(db):
    shown = call("--db", db).stdout.splitlines()
    assert len(shown) == 3
    assert "budget reached" in shown[1] and "300" in shown[1] and "measured" in shown[1]
    assert "interrupted" in shown[2] and "random" in shown[2] and "a100" in shown[2]


def test_json_says_of_a_run_what_a_program_asks(db):
    told = json.loads(call("--json", "--db", db).stdout)
    assert told["schema"] == 1
    first, second = told["runs"]
    assert {name: first[name] for name in ("run", "problem", "gpu", "trials", "correct", "best", "tflops")} == {
        "run": 1, "problem": PROBLEM, "gpu": GPU, "trials": 3, "correct": 2, "best": 2, "tflops": 300.0,
    }  # fmt: skip
    assert (first["tflops_kind"], first["status"], first["imported_from"]) == ("measured", "budget reached", None)
    assert datetime.fromisoformat(first["started"]) <= datetime.fromisoformat(first["ended"])
    assert datetime.fromisoformat(first["ended"]).utcoffset().total_seconds() == 0
    assert (second["trials"], second["best"], second["tflops"], second["tflops_kind"]) == (0, None, None, None)


def test_a_ledger_without_runs_is_told_from_one_with_some(tmp_path):
    open_ledger(str(tmp_path / "empty.db"), create=True).close()
    assert isinstance(call("--db", tmp_path / "empty.db").exception, NothingFound)


def numbers(db: str) -> list[int]:
    with open_ledger(db, create=False) as ledger:
        return [run.id for run in ledger.runs()]


def test_removal_asks_and_a_no_changes_nothing(db):
    done = call("remove", 1, "--db", db, answer="n\n")
    assert done.exit_code == 0 and "nothing was removed" in done.output and "3 trials" in done.output
    assert numbers(db) == [1, 2]


def test_removal_with_a_yes_or_unasked(db):
    assert call("remove", 1, "--db", db, answer="y\n").exit_code == 0
    assert numbers(db) == [2]
    assert call("remove", 2, 2, "--yes", "--db", db).exit_code == 0
    assert numbers(db) == []


def test_where_nobody_answers_nothing_goes(db):
    done = call("remove", 1, "--db", db)
    assert isinstance(done.exception, UsageError) and "--yes" in str(done.exception)
    assert numbers(db) == [1, 2]


def test_an_unknown_run_is_refused_before_anything_is_asked(db):
    done = call("remove", 1, 9, "--db", db)
    assert isinstance(done.exception, UsageError) and "no run 9" in str(done.exception)
    assert "Remove" not in done.output and numbers(db) == [1, 2]


def test_options_of_the_list_are_not_taken_for_those_of_a_removal(db):
    """Else the default ledger would lose a run that was meant in another one."""
    done = call("--db", db, "remove", 1, "--yes")
    assert isinstance(done.exception, UsageError) and "go after its name" in str(done.exception)
