"""Several processes at one ledger, and processes that die in the middle."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import optuna
import pytest
from filelock import FileLock

from evoengine.errors import UsageError
from evoengine.ledger import database, heartbeat
from evoengine.ledger.heartbeat import KILLED_AFTER_SECONDS
from evoengine.ledger.models import RunRow
from evoengine.ledger.runs import KILLED, RUNNING
from evoengine.ledger.store import open_ledger
from evoengine.ledger.study import optuna_storage
from evoengine.records import Outcome
from tests.support.ledger_examples import CONFIG, GPU, PROBLEM, a_figure, a_source, a_verdict, add_ranked, start_run
from tests.support.waiting import wait_for

WRITER = """
import sys
from datetime import UTC, datetime
from evoengine.ledger.models import VerdictRow
from evoengine.ledger.rows import verdict_values
from evoengine.ledger.store import open_ledger
from tests.support.ledger_examples import *
ledger = open_ledger(sys.argv[1], create=True)
run = start_run(ledger)
"""
WRITES = """
from evoengine.ledger.study import Projection, optuna_storage
study = Projection(optuna_storage(ledger.url), ledger, run, Kind.ESTIMATED, DOMAINS)
for i in range(15): study.add(add_ranked(ledger, run, a_figure(i), name=f"kernel_{run}_{i}"))
assert not study.missed, study.missed
"""
WRITES_WHEN_TOLD = """
from evoengine.ledger.study import Projection, optuna_storage
study = Projection(optuna_storage(ledger.url), ledger, run, Kind.ESTIMATED, DOMAINS)
for i in range(1, 5):
    study.add(add_ranked(ledger, run, a_figure(i), name=f"kernel_{i}"))
    print(i, flush=True)
    sys.stdin.readline()
"""
STOPS_MID_WAY = """
add_ranked(ledger, run, a_figure(1.0))
trial = ledger.add_candidate(run, PROBLEM, GPU, CONFIG, (1,), "mutation")
ledger.record_source(trial, a_source("second"))
ledger.record_binary(trial, a_source("second"), a_binary())
print("committed", flush=True)
with ledger._writing() as session:
    session.add(VerdictRow(candidate_id=trial, taken_at=datetime.now(UTC), **verdict_values(a_verdict())))
    session.flush()
    print("under way", flush=True)
    sys.stdin.readline()
"""

WRITES_AFTER_A_PAUSE = """
from evoengine.errors import MachineError
trial = ledger.add_candidate(run, PROBLEM, GPU, CONFIG, (), None)
print("committed", flush=True)
sys.stdin.readline()
try:
    ledger.finish(trial, Outcome.CRASHED, "late", None, None)
    print("written", flush=True)
except MachineError as error:
    print(error, flush=True)
"""


def stand_still(path: str | Path, run: int) -> None:
    """Sets the last beat of a run back by as long as makes it look killed."""
    with closing(sqlite3.connect(path, timeout=30)) as plain:
        back = f"-{KILLED_AFTER_SECONDS + 1:g} seconds"
        change = "UPDATE heartbeats SET beat_at = strftime('%Y-%m-%d %H:%M:%f', 'now', ?) WHERE run_id = ?"
        assert plain.execute(change, (back, run)).rowcount == 1
        plain.commit()


@contextmanager
def writer(path: Path, script: str) -> Iterator[subprocess.Popen]:
    """A process that runs it, and is killed at the end if it has not ended by then."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", WRITER + script, str(path)]
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture(scope="module")
def killed_folder(tmp_path_factory):
    """What a process left that was killed with a verdict written and not committed."""
    folder = tmp_path_factory.mktemp("killed")
    with writer(folder / "killed.db", STOPS_MID_WAY) as process:
        assert process.stdout.readline() == "committed\n"
        assert process.stdout.readline() == "under way\n"
    assert process.returncode == -signal.SIGKILL
    return folder


@pytest.fixture
def killed(killed_folder, tmp_path):
    """The ledger of a killed process, opened again; the log it left is still to be taken in."""
    for name in ("killed.db", "killed.db-wal"):
        shutil.copy(killed_folder / name, tmp_path)
    stand_still(tmp_path / "killed.db", 1)
    with open_ledger(str(tmp_path / "killed.db"), create=False) as ledger:
        yield ledger


def test_two_processes_that_make_and_fill_the_same_ledger_and_its_studies_lose_nothing(tmp_path):
    path = tmp_path / "shared.db"
    with writer(path, WRITES) as first, writer(path, WRITES) as second:
        assert [first.wait(), second.wait()] == [0, 0]
    with open_ledger(str(path), create=False) as ledger:
        candidates = ledger.candidates()
    assert [c.trial for c in candidates] == list(range(1, 31))
    for run in (1, 2):
        assert [c.measurement.tflops for c in candidates if c.run == run] == list(range(15))
    assert [s.n_trials for s in optuna.get_all_study_summaries(f"sqlite:///{path}")] == [15, 15]


def test_what_is_written_is_seen_at_once_by_others_and_outlives_the_writer(tmp_path):
    """Whoever reads in between is the last to close the file, as far as it can tell by the writer's locks."""
    path = tmp_path / "watched.db"
    with writer(path, WRITES_WHEN_TOLD) as process:
        for expected in range(1, 4):
            assert process.stdout.readline() == f"{expected}\n"
            assert finished_as_others_see_it(path) == expected
            process.stdin.write("go on\n")
            process.stdin.flush()
        assert process.stdout.readline() == "4\n"
    assert finished_as_others_see_it(path) == 4


def finished_as_others_see_it(path: Path) -> int:
    count = "import sys; from evoengine.ledger.store import open_ledger\n"
    count += "with open_ledger(sys.argv[1], create=False) as ledger: print(len(ledger.candidates()))"
    return int(subprocess.run([sys.executable, "-c", count, path], capture_output=True, text=True, check=True).stdout)


def test_a_write_holds_others_off_from_its_beginning(ledger):
    """SQLite would refuse it at once, whatever the busy timeout, had another written after its first read."""
    with ledger._writing() as session, closing(sqlite3.connect(ledger.place, timeout=0)) as other:
        session.connection()
        with pytest.raises(sqlite3.OperationalError, match="locked"):
            other.execute("DELETE FROM devices")


def test_reading_holds_nobody_off(ledger):
    with ledger._reading() as session, closing(sqlite3.connect(ledger.place, timeout=0)) as other:
        session.connection()
        other.execute("DELETE FROM devices")
        other.rollback()


def test_studies_are_set_up_by_one_process_at_a_time(ledger, monkeypatch):
    monkeypatch.setattr(database, "BUSY_SECONDS", 0.1)
    with FileLock(f"{ledger.place}.lock"), pytest.raises(UsageError, match="held by another evoengine"):
        optuna_storage(ledger.url)
    optuna_storage(ledger.url)


def test_a_killed_process_loses_only_the_stage_under_way(killed):
    whole, broken = killed.candidates()
    assert whole.outcome is Outcome.ESTIMATED
    assert (broken.outcome, broken.parents, broken.operator) == (None, (1,), "mutation")
    assert broken.source == a_source("second")
    assert broken.binary.registers == 57
    assert broken.verdict is None
    with closing(sqlite3.connect(killed.place)) as plain:
        assert plain.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_what_a_killed_run_left_is_adopted_by_the_next_and_goes_on(killed):
    run = start_run(killed)
    assert [r.status for r in killed.runs()] == [KILLED, RUNNING]
    [left] = killed.unfinished(GPU, PROBLEM)
    assert killed.adopt([left.trial], run) == [left.trial]
    assert killed.unfinished(GPU, PROBLEM) == []
    killed.record_verdict(left.trial, a_verdict())
    killed.record_measurement(left.trial, a_figure(7.0))
    killed.finish(left.trial, Outcome.ESTIMATED, None, 0.25, "emulator")
    adopted = killed.candidate(left.trial)
    assert (adopted.run, adopted.source, adopted.verdict.correct) == (run, left.source, True)


def test_only_one_of_two_runs_adopts_a_candidate(killed):
    first, second = start_run(killed), start_run(killed)
    assert killed.adopt([2], first) == [2]
    assert killed.adopt([2], second) == []
    assert killed.candidate(2).run == first


def test_what_is_finished_is_not_adopted(killed):
    run = start_run(killed)
    assert killed.adopt([1, 2], run) == [2]


def test_candidates_are_reclaimed_for_their_own_gpu_and_problem_alone(killed):
    start_run(killed)
    assert killed.unfinished("a100", PROBLEM) == killed.unfinished(GPU, "attention:other") == []


def test_a_run_whose_process_lives_is_left_alone(tmp_path):
    path = tmp_path / "alive.db"
    with writer(path, STOPS_MID_WAY.partition("with ledger")[0] + "sys.stdin.readline()") as process:
        assert process.stdout.readline() == "committed\n"
        with open_ledger(str(path), create=False) as ledger:
            run = start_run(ledger)
            assert ledger.unfinished(GPU, PROBLEM) == []
            assert ledger.adopt([2], run) == []
            assert [r.status for r in ledger.runs()] == [RUNNING, RUNNING]


def test_what_an_interrupted_run_of_this_very_process_left_is_adopted(ledger):
    first = start_run(ledger)
    trial = ledger.add_candidate(first, PROBLEM, GPU, CONFIG, (), None)
    add_ranked(ledger, first, a_figure(1.0))
    ledger.finish_run(first, "interrupted")
    assert ledger.adopt([c.trial for c in ledger.unfinished(GPU, PROBLEM)], start_run(ledger)) == [trial]
    assert ledger.runs()[0].status == "interrupted"


# ── heartbeats ──────────────────────────────────────────────────────────────────────────────────────────────────────


def beats(path: str | Path) -> list[tuple[int, int, str]]:
    with closing(sqlite3.connect(path)) as plain:
        return plain.execute("SELECT run_id, fence, beat_at FROM heartbeats ORDER BY run_id").fetchall()


def test_a_running_search_beats_until_it_ends(ledger, monkeypatch):
    monkeypatch.setattr(heartbeat, "BEAT_SECONDS", 0.02)
    run = start_run(ledger)
    first = beats(ledger.place)
    wait_for(lambda: beats(ledger.place) > first)
    ledger.finish_run(run, "all trials done")
    last = beats(ledger.place)
    time.sleep(0.1)
    assert beats(ledger.place) == last


def test_a_run_lives_by_its_beats_whatever_its_host_and_process_are_called(ledger):
    """In containers the host has another name, or process 1 of both is a search."""
    run = start_run(ledger)
    with ledger._writing() as session:
        row = session.get_one(RunRow, run)
        row.host, row.pid = "another.host", 2**22 + 1
    start_run(ledger)
    assert ledger.runs()[0].status == RUNNING
    stand_still(ledger.place, run)
    with closing(open_ledger(ledger.place, create=False)) as other:
        start_run(other)
        assert [r.status for r in other.runs()] == [KILLED, RUNNING, RUNNING]


def test_a_run_without_any_beat_is_of_an_older_evoengine_and_killed(killed):
    with closing(sqlite3.connect(killed.place)) as plain:
        plain.execute("DELETE FROM heartbeats")
        plain.commit()
    start_run(killed)
    assert killed.runs()[0].status == KILLED


def test_a_process_that_stood_still_writes_no_more_once_its_run_was_taken_over(tmp_path):
    path = tmp_path / "paused.db"
    with writer(path, WRITES_AFTER_A_PAUSE) as process:
        assert process.stdout.readline() == "committed\n"
        os.kill(process.pid, signal.SIGSTOP)
        stand_still(path, 1)
        with open_ledger(str(path), create=False) as ledger:
            run = start_run(ledger)
            assert ledger.adopt([1], run) == [1]
            os.kill(process.pid, signal.SIGCONT)
            process.stdin.write("go on\n")
            process.stdin.flush()
            assert "stood still for more than 60 s, so another search took run 1" in process.stdout.readline()
            assert ledger.candidate(1).outcome is None
            assert len(ledger.candidates()) == 1
            ledger.finish(1, Outcome.SCREENED, "too large", None, None)
            assert ledger.candidate(1).outcome is Outcome.SCREENED


def test_a_process_that_stood_still_and_was_not_missed_goes_on(tmp_path):
    path = tmp_path / "paused.db"
    with writer(path, WRITES_AFTER_A_PAUSE) as process:
        assert process.stdout.readline() == "committed\n"
        stand_still(path, 1)
        process.stdin.write("go on\n")
        process.stdin.flush()
        assert process.stdout.readline() == "written\n"
