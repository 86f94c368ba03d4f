"""Searches that are killed and go on judge each kernel once; and who checks that sees where it is not so."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks import instant, torture
from evoengine.ledger.store import open_ledger
from evoengine.ledger.tables import CandidateRow, MeasurementRow
from evoengine.records import Outcome

SIZE = 20
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("kills", "size"), [(2, 20), pytest.param(100, 200, marks=pytest.mark.exhaustive, id="a hundred")]
)
def test_every_kernel_is_judged_once_by_the_figure_of_an_undisturbed_search(tmp_path, kills, size):
    # from a process that has imported little else, of which each search is a copy
    command = [
        sys.executable,
        "-m",
        "benchmarks.torture",
        "--kills",
        str(kills),
        "--size",
        str(size),
        "--longest",
        "0.4",
    ]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "TMPDIR": str(tmp_path)}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{kills} kills, " in done.stdout


@pytest.fixture(scope="module")
def searched(tmp_path_factory):
    """A run that was cut short, and came to its end."""
    folder = tmp_path_factory.mktemp("searched")
    path, log = folder / "evo.db", folder / "log"
    cut_short(path, log)
    instant.search(str(path), trials=SIZE, size=SIZE, log=log, echo=lambda line: None)
    return folder


def cut_short(path, log):
    """With one trial in flight, as a kill leaves it."""
    with open_ledger(str(path), create=True) as ledger:
        setting = instant.make_setting(path.parent, SIZE, SIZE, 1, "random", 2)
        run = instant.start(ledger, setting, lambda line: None).run
        config = setting.space.sample(np.random.default_rng(1))[0]
        ledger.add_candidate(run, instant.PROBLEM, instant.GPU, config, (), None)
        ledger.finish_run(run, "interrupted")


@pytest.fixture
def copied(searched, tmp_path):
    for file in searched.iterdir():
        if file.is_file():
            (tmp_path / file.name).write_bytes(file.read_bytes())
    with open_ledger(str(tmp_path / "evo.db"), create=False) as ledger:
        yield ledger


def checked(ledger, folder) -> list[str]:
    found = torture.Found()
    torture.check_run(ledger, 1, SIZE, found)
    torture.check_evaluations(ledger, folder / "log", found)
    torture.check_studies(ledger, found)
    return found.wrong


def test_nothing_is_wrong_with_a_run_that_was_cut_short_and_went_on(copied, tmp_path):
    assert checked(copied, tmp_path) == []
    assert [c.outcome for c in copied.candidates() if c.outcome is not Outcome.ESTIMATED] == [Outcome.INTERRUPTED]


def change(ledger, table, wanted, **values):
    with ledger.database.writing() as session:
        row = session.query(table).filter_by(**wanted).order_by(table.id.desc()).first()
        for name, value in values.items():
            setattr(row, name, value)


FAULTS = {
    "never ended": lambda ledger, folder: change(ledger, CandidateRow, {"outcome": "estimated"}, outcome=None),
    "another one's": lambda ledger, folder: change(ledger, MeasurementRow, {}, median_us=1.0),
    "not judged once": lambda ledger, folder: change(
        ledger, CandidateRow, {"outcome": "estimated"}, config=ledger.candidate(5).config
    ),
    "tried again 0 times": lambda ledger, folder: change(
        ledger, CandidateRow, {"outcome": "estimated", "retry_of": None}, outcome="killed"
    ),
    "without just one figure": lambda ledger, folder: change(
        ledger, CandidateRow, {"outcome": "estimated"}, outcome="crashed"
    ),
    "evaluated 2 times": lambda ledger, folder: (folder / "log").write_text((folder / "log").read_text() * 2),
    "the study": lambda ledger, folder: ledger.add_candidate(
        1, instant.PROBLEM, instant.GPU, {"digit_of_1": 1}, (), None
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_wrong_is_seen(copied, tmp_path, fault):
    FAULTS[fault](copied, tmp_path)
    assert any(fault in line for line in checked(copied, tmp_path))
