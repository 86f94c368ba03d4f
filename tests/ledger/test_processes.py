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
from datetime import timedelta
from pathlib import Path

import optuna
import pytest
from filelock import FileLock

from evoengine.errors import UsageError
from evoengine.ledger import database, runs
from evoengine.ledger.optuna.study import optuna_storage
from evoengine.ledger.runs import KILLED_AFTER_SECONDS, RETRIES, WHY_KILLED
from evoengine.ledger.store import open_ledger
from evoengine.ledger.tables import HeartbeatRow, RunRow
from evoengine.records import KILLED, RUNNING, Outcome
from tests.support.ledger_examples import CONFIG, GPU, PROBLEM, a_source, start_run
from tests.support.waiting import wait_for

WRITER = """
import sys
from datetime import UTC, datetime
from evoengine.ledger.tables import VerdictRow
from evoengine.ledger.rows import record_values
from evoengine.ledger.store import open_ledger
from tests.support.ledger_examples import *
ledger = open_ledger(sys.argv[1], create=True)
run = start_run(ledger)
"""
WRITES = """
from evoengine.ledger.optuna.study import Projection, optuna_storage
study = Projection(optuna_storage(ledger.url), ledger, run, Kind.ESTIMATED, DOMAINS)
for i in range(15): study.add(add_ranked(ledger, run, a_figure(i), name=f"kernel_{run}_{i}"))
study.complete()
assert not study.missed, study.missed
"""
WRITES_WHEN_TOLD = """
from evoengine.ledger.optuna.study import Projection, optuna_storage
study = Projection(optuna_storage(ledger.url), ledger, run, Kind.ESTIMATED, DOMAINS)
for i in range(1, 4):
    study.add(add_ranked(ledger, run, a_figure(i), name=f"kernel_{i}"))
    print(i, flush=True)
    sys.stdin.readline()
"""
STOPS_MID_WAY = """
add_ranked(ledger, run, a_figure(1.0))
trial = ledger.add_candidate(run, PROBLEM, GPU, CONFIG, (1,), "mutation", a_source("second"))
ledger.record_binary(trial, a_source("second"), a_binary())
print("committed", flush=True)
with ledger.database.writing() as session:
    session.add(VerdictRow(candidate_id=trial, taken_at=datetime.now(UTC), **record_values(a_verdict())))
    session.flush()
    print("in flight", flush=True)
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
        assert process.stdout.readline() == "in flight\n"
    assert process.returncode == -signal.SIGKILL
    return folder


@pytest.fixture
def at_once(monkeypatch):
    """One look decides whether a run was killed."""
    monkeypatch.setattr(runs, "LOOK_AGAIN_SECONDS", 0.0)


@pytest.fixture
def killed(killed_folder, tmp_path, at_once):
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
        for expected in range(1, 3):
            assert process.stdout.readline() == f"{expected}\n"
            assert finished_as_others_see_it(path) == expected
            process.stdin.write("go on\n")
            process.stdin.flush()
        assert process.stdout.readline() == "3\n"
    assert finished_as_others_see_it(path) == 3


def finished_as_others_see_it(path: Path) -> int:
    count = "import sys; from evoengine.ledger.store import open_ledger\n"
    count += "with open_ledger(sys.argv[1], create=False) as ledger: print(len(ledger.candidates()))"
    return int(subprocess.run([sys.executable, "-c", count, path], capture_output=True, text=True, check=True).stdout)


def test_a_write_holds_others_off_from_its_beginning(ledger):
    """SQLite would refuse it at once, whatever the busy timeout, had another written after its first read."""
    with ledger.database.writing() as session, closing(sqlite3.connect(ledger.place, timeout=0)) as other:
        session.connection()
        with pytest.raises(sqlite3.OperationalError, match="locked"):
            other.execute("DELETE FROM devices")


def test_reading_holds_nobody_off(ledger):
    with ledger.database.reading() as session, closing(sqlite3.connect(ledger.place, timeout=0)) as other:
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


def test_what_was_under_way_in_a_killed_run_ends_as_killed_and_is_left_to_try_again(killed):
    run = start_run(killed)
    assert [r.status for r in killed.runs()] == [KILLED, RUNNING]
    ended = killed.candidate(2)
    assert (ended.outcome, ended.reason, ended.run) == (Outcome.KILLED, WHY_KILLED, 1)
    assert ended.finished_at is not None
    assert (killed.left_over(1), killed.left_over(run)) == ({2: 1}, {})
    assert killed.done(1) == 1


def test_what_was_tried_again_is_not_left(killed):
    start_run(killed)
    assert killed.resume_run(1, 60, None) is not None
    killed.add_candidate(1, PROBLEM, GPU, CONFIG, (1,), "mutation", None, 2)
    assert killed.left_over(1) == {}


def kill(ledger, run):
    """As if the process had ended without a word."""
    ledger.database._fences.clear()
    stand_still(ledger.place, run)
    ledger.look_for_killed()


def test_kills_of_a_search_are_no_verdict_on_what_was_under_way_however_many_there_are(ledger, at_once):
    run, trial = start_run(ledger), None
    for kills in range(RETRIES + 1):
        trial = ledger.add_candidate(run, PROBLEM, GPU, CONFIG, (), None, None, trial)
        kill(ledger, run)
        assert ledger.left_over(run) == {trial: kills + 1}
        assert ledger.resume_run(run, 60, None) is not None
    reasons = [WHY_KILLED] * RETRIES + [f"{WHY_KILLED}, for the 5th time: it is not tried again"]
    assert [(c.outcome, c.reason) for c in ledger.candidates()] == [(Outcome.KILLED, reason) for reason in reasons]


def test_being_interrupted_says_nothing_against_a_candidate(ledger):
    run, trial = start_run(ledger), None
    for _ in range(RETRIES + 2):
        trial = ledger.add_candidate(run, PROBLEM, GPU, CONFIG, (), None, None, trial)
        ledger.finish_run(run, "interrupted")
        assert ledger.left_over(run) == {trial: 0}
        assert ledger.resume_run(run, 60, None) is not None
    assert {c.outcome for c in ledger.candidates()} == {Outcome.INTERRUPTED}


def test_only_one_of_two_processes_goes_on_with_a_run(ledger):
    run = start_run(ledger)
    ledger.finish_run(run, "interrupted")
    with closing(open_ledger(ledger.place, create=False)) as other:
        assert ledger.resume_run(run, 60, None) is not None
        assert other.resume_run(run, 60, None) is None


def test_the_time_that_a_runs_processes_took_adds_up(ledger):
    run = start_run(ledger)
    with ledger.database.writing() as session:
        session.get_one(HeartbeatRow, run).began_at -= timedelta(seconds=40)
    ledger.finish_run(run, "interrupted")
    assert 40 <= ledger.resume_run(run, 60, None) < 100
    assert 40 <= ledger.seconds_spent(run) < 100


def test_a_run_whose_process_lives_is_left_alone(tmp_path):
    path = tmp_path / "alive.db"
    with writer(path, STOPS_MID_WAY.partition("with ledger")[0] + "sys.stdin.readline()") as process:
        assert process.stdout.readline() == "committed\n"
        with open_ledger(str(path), create=False) as ledger:
            start_run(ledger)
            assert [r.status for r in ledger.runs()] == [RUNNING, RUNNING]
            assert ledger.candidate(2).outcome is None


def test_a_run_whose_process_was_on_this_machine_and_ended_is_killed_at_once(tmp_path):
    path = tmp_path / "gone.db"
    with writer(path, STOPS_MID_WAY) as process:
        assert process.stdout.readline() == "committed\n"
        process.kill()
        process.wait()
        with open_ledger(str(path), create=False) as ledger:
            start_run(ledger)
            assert [r.status for r in ledger.runs()] == [KILLED, RUNNING]
            assert ledger.candidate(2).outcome is Outcome.KILLED


# ── heartbeats ──────────────────────────────────────────────────────────────────────────────────────────────────────


def beats(path: str | Path) -> list[tuple[int, int, str]]:
    with closing(sqlite3.connect(path)) as plain:
        return plain.execute("SELECT run_id, fence, beat_at FROM heartbeats ORDER BY run_id").fetchall()


def test_a_running_search_beats_until_it_ends(ledger, monkeypatch):
    monkeypatch.setattr(runs, "BEAT_SECONDS", 0.02)
    run = start_run(ledger)
    first = beats(ledger.place)
    wait_for(lambda: beats(ledger.place) > first)
    ledger.finish_run(run, "all trials done")
    last = beats(ledger.place)
    time.sleep(0.1)
    assert beats(ledger.place) == last


def test_a_run_lives_by_its_beats_whatever_its_host_and_process_are_called(ledger, at_once):
    """In containers the host has another name, or process 1 of both is a search."""
    run = start_run(ledger)
    with ledger.database.writing() as session:
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


def test_a_process_that_stood_still_writes_no_more_once_its_run_was_taken_over(tmp_path, at_once):
    path = tmp_path / "paused.db"
    with writer(path, WRITES_AFTER_A_PAUSE) as process:
        assert process.stdout.readline() == "committed\n"
        os.kill(process.pid, signal.SIGSTOP)
        stand_still(path, 1)
        with open_ledger(str(path), create=False) as ledger:
            start_run(ledger)
            os.kill(process.pid, signal.SIGCONT)
            process.stdin.write("go on\n")
            process.stdin.flush()
            assert "was suspended for more than 60 s, so another search considered run 1" in process.stdout.readline()
            assert (ledger.candidate(1).outcome, len(ledger.candidates())) == (Outcome.KILLED, 1)


def test_a_run_that_beats_again_while_somebody_looks_is_not_killed(ledger, monkeypatch):
    """As where the database was away for longer than a beat may be old: all beats are old when it comes back."""
    monkeypatch.setattr(runs, "BEAT_SECONDS", 3600.0)
    run = start_run(ledger)
    stand_still(ledger.place, run)
    with closing(open_ledger(ledger.place, create=False)) as other:
        assert other.look_for_killed() == [run]
        ledger.database._beat()
        monkeypatch.setattr(runs, "LOOK_AGAIN_SECONDS", 0.0)
        assert other.look_for_killed() == []
        assert other.runs()[0].status == RUNNING


def test_a_process_that_stood_still_and_was_not_missed_goes_on(tmp_path):
    path = tmp_path / "paused.db"
    with writer(path, WRITES_AFTER_A_PAUSE) as process:
        assert process.stdout.readline() == "committed\n"
        stand_still(path, 1)
        process.stdin.write("go on\n")
        process.stdin.flush()
        assert process.stdout.readline() == "written\n"
