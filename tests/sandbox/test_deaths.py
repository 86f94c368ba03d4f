"""A worker that somebody kills costs nothing; one whose task kills it, alone, twice, is a verdict with its evidence."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import pytest

from evoengine.cuda_emulator import run as emulator
from evoengine.errors import MachineError
from evoengine.records import Launch, Outcome
from evoengine.sandbox import kept_process
from evoengine.sandbox import workers as pools
from evoengine.sandbox.deaths import EXCLUSIVE_DEATHS, MOST_DEATHS, Death, TaskLock, retry_deaths
from evoengine.sandbox.kept_process import KeptProcess
from evoengine.sandbox.worker_process import WorkerLimits
from evoengine.sandbox.workers import WorkerPool
from tests.support import faulty_device
from tests.support.exhaustive import more
from tests.support.waiting import is_alive, wait_for

SIGNALS = [signal.SIGKILL, *more([signal.SIGTERM, signal.SIGHUP, signal.SIGSEGV, signal.SIGABRT, signal.SIGUSR1])]


@pytest.fixture
def pool():
    pool = WorkerPool(2, WorkerLimits(seconds=60))
    yield pool
    pool.close()


def submit(pool, task, *args, returns=int):
    return pool.submit(task, *args, on_crash=Outcome.UNCOMPILABLE, returns=returns)


def attempts(folder: Path) -> list[Path]:
    """The notes of a task's attempts, in their order."""
    return sorted(folder.glob("*.begun"), key=lambda path: path.stat().st_mtime_ns)


def begin(folder: Path) -> Path:
    """Notes that an attempt of a task begins in this process."""
    note = folder / f"{os.getpid()}.begun"
    note.touch()
    return note


def wait_at_first(folder: Path) -> int:
    """Never ends at its first attempt."""
    begin(folder)
    while len(attempts(folder)) == 1:
        time.sleep(0.01)
    return 7


def die_soon(folder: Path) -> int:
    note, start = begin(folder), time.monotonic_ns()
    time.sleep(0.05)
    note.write_text(f"{start} {time.monotonic_ns()}")
    os.kill(os.getpid(), signal.SIGSEGV)
    return 0


def note_span(folder: Path, number: int) -> int:
    """Another task: notes from when to when it ran."""
    start = time.monotonic_ns()
    time.sleep(0.02)
    (folder / f"{number}.span").write_text(f"{start} {time.monotonic_ns()}")
    return number


def span(note: Path) -> range:
    return range(*map(int, note.read_text().split()))


def overlap(one: range, other: range) -> bool:
    return one.start < other.stop and other.start < one.stop


@pytest.mark.parametrize("number", SIGNALS)
def test_a_busy_worker_that_somebody_kills_is_no_verdict_on_its_task(pool, tmp_path, number):
    task = submit(pool, wait_at_first, tmp_path)
    wait_for(lambda: attempts(tmp_path))
    os.kill(int(attempts(tmp_path)[0].stem), number)
    assert task.result() == 7


def test_nor_is_one_that_somebody_stopped_for_all_of_its_time(tmp_path):
    pool = WorkerPool(1, WorkerLimits(seconds=3))
    task = submit(pool, wait_at_first, tmp_path)
    wait_for(lambda: attempts(tmp_path))
    os.kill(int(attempts(tmp_path)[0].stem), signal.SIGSTOP)
    assert task.result() == 7
    pool.close()


def test_the_second_and_third_attempt_run_alone_and_then_it_is_the_tasks_doing(pool, tmp_path):
    others_ended = threading.Event()

    def keep_busy(number):
        while not others_ended.is_set():
            submit(pool, note_span, tmp_path, number).result()
            number += 1000

    with ThreadPoolExecutor(2) as threads:
        busy = [threads.submit(keep_busy, n) for n in range(2)]
        rejection = submit(pool, die_soon, tmp_path).result()
        others_ended.set()
    first, *alone = [span(note) for note in attempts(tmp_path)]
    beside = [span(note) for note in tmp_path.glob("*.span")]
    assert len(alone) == EXCLUSIVE_DEATHS and beside
    assert not any(overlap(one, other) for one in alone for other in beside)
    assert [thread.result() for thread in busy] == [None, None]
    assert rejection.outcome is Outcome.CRASHED
    assert rejection.reason == (
        "the worker process died (SIGSEGV); the task's worker died 3 times, 2 of them while it ran alone"
    )
    deaths = rejection.evidence["deaths"]
    assert [(d["how"], d["alone"], d["oom_kills"]) for d in deaths] == [
        ("SIGSEGV", False, 0), ("SIGSEGV", True, 0), ("SIGSEGV", True, 0),
    ]  # fmt: skip


def wait_until_killed_often_enough(folder: Path, enough: int) -> int:
    """Ends at that attempt, before which somebody kills it."""
    begin(folder)
    while len(attempts(folder)) < enough:
        time.sleep(0.01)
    return 7


@pytest.mark.parametrize("number", [signal.SIGKILL, *more([signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])])
@pytest.mark.parametrize("kills", [MOST_DEATHS - 1, *more([MOST_DEATHS])])
def test_signals_that_only_others_send_are_no_verdict_however_often_they_come(pool, tmp_path, number, kills):
    task = submit(pool, wait_until_killed_often_enough, tmp_path, kills + 1)
    for nth in range(kills):
        wait_for(lambda nth=nth: len(attempts(tmp_path)) == nth + 1)
        os.kill(int(attempts(tmp_path)[-1].stem), number)
    if kills < MOST_DEATHS:
        assert task.result() == 7
        return
    rejection = task.result()
    assert rejection.outcome is Outcome.KILLED and not rejection.outcome.judged
    assert rejection.reason.endswith("died 6 times, by signals that other processes send: no verdict")
    assert [death["alone"] for death in rejection.evidence["deaths"]] == [False, *[True] * 5]


def test_deaths_by_others_between_do_not_acquit_a_task_that_dies_by_itself_twice():
    ways = iter(("SIGSEGV", "SIGKILL", "SIGSEGV", "SIGTERM", "SIGSEGV"))

    def attempt(lock):
        with lock:
            return Death(next(ways), "the worker process died", 0.1)

    rejection = retry_deaths(attempt)
    assert rejection.outcome is Outcome.CRASHED
    assert len(rejection.evidence["deaths"]) == 5


def test_a_task_that_wants_to_run_alone_waits_for_running_tasks_and_precedes_later_ones():
    lock, order, started = TaskLock(), [], threading.Event()
    release = threading.Event()

    def shared(name):
        with lock.shared():
            order.append(name)
            if name == "first":
                started.set()
                release.wait()

    def alone():
        with lock.exclusive():
            order.append("alone")
            assert lock._running == 0

    threads = [threading.Thread(target=shared, args=("first",))]
    threads[0].start()
    started.wait()
    threads.append(threading.Thread(target=alone))
    threads[1].start()
    wait_for(lambda: lock._waiting_exclusive)
    threads.append(threading.Thread(target=shared, args=("behind",)))
    threads[2].start()
    release.set()
    for thread in threads:
        thread.join()
    assert order == ["first", "alone", "behind"]


@pytest.mark.parametrize("part", ["keeper", *more(["guard"])])
def test_a_keeper_that_is_killed_is_no_verdict_either_and_leaves_nothing(pool, tmp_path, part):
    left = tmp_path / "left"
    submit(pool, faulty_device.leave_behind, left).result()
    task = submit(pool, wait_at_first, tmp_path)
    wait_for(lambda: attempts(tmp_path))
    guard = kept_process._KEEPERS[True]._process.pid
    os.kill(guard if part == "guard" else child_of(guard), signal.SIGKILL)
    assert task.result() == 7
    pool.close()
    assert not is_alive(int(left.read_text()))


def child_of(pid: int) -> int:
    return int(subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True).stdout)


def test_workers_that_are_killed_as_they_start_are_started_again(pool, monkeypatch):
    kill_first(monkeypatch, 5)
    os.kill(submit(pool, os.getpid).result(), signal.SIGKILL)
    os.kill(submit(pool, os.getpid).result(), signal.SIGKILL)
    assert isinstance(submit(pool, os.getpid).result(), int)


def test_where_all_of_them_are_the_search_ends_and_names_the_signal(monkeypatch):
    monkeypatch.setattr(pools, "PAUSE_SECONDS", 0.001)
    kill_first(monkeypatch, 1000)
    pool = WorkerPool(1)
    with pytest.raises(MachineError, match=r"worker processes die as they start: SIGKILL; something on this machine k"):
        submit(pool, os.getpid).result()
    pool.close()


def kill_first(monkeypatch, count):
    """Has so many of the processes that start from now on killed at once."""
    started, start = [], KeptProcess.__init__

    def killed(process, *args, **kwargs):
        start(process, *args, **kwargs)
        started.append(process)
        if len(started) <= count:
            os.kill(process.pid, signal.SIGKILL)

    monkeypatch.setattr(KeptProcess, "__init__", killed)


def test_a_tool_that_somebody_kills_counts_as_its_workers_death(pool, tmp_path):
    """A compiler, the emulator's process: the task runs again, and a second time alone."""
    executable = tmp_path / "kernel"
    executable.write_text(f"#!/bin/sh\n[ -e {tmp_path}/again ] && exit 3\ntouch {tmp_path}/again\nkill -9 $$\n")
    executable.chmod(0o755)
    assert submit(pool, exit_of, executable).result() == 3
    assert (tmp_path / "again").exists()


def exit_of(executable: Path) -> int:
    try:
        emulator.run(executable, "f", Launch((1, 1, 1), 32, 0), [], 0, 20)
    except emulator.KernelCrashed as crashed:
        return int(str(crashed).split("exit code ")[1].split()[0])
    return 0


def test_a_folder_that_a_killed_keeper_left_is_removed_by_the_next_and_no_other(tmp_path, monkeypatch):
    orphan, foreign = tmp_path / "evoengine-worker-0123456789abcdef", tmp_path / "evoengine"
    orphan.mkdir()
    foreign.mkdir()
    (orphan / "output").touch()
    monkeypatch.setattr(kept_process.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(kept_process, "_KEEPERS", {True: kept_process._Keeper(), False: kept_process._Keeper()})
    first = KeptProcess(kept_process.Held(10, 1 << 30), ["/bin/sleep", "300"], environment={})
    assert not orphan.exists() and foreign.exists() and first.folder.exists()
    monkeypatch.setattr(kept_process, "_KEEPERS", {True: kept_process._Keeper(), False: kept_process._Keeper()})
    second = KeptProcess(kept_process.Held(10, 1 << 30), ["/bin/sleep", "300"], environment={})
    assert first.folder.exists()  # its keeper lives
    first.close()
    second.close()
    assert [path.name for path in tmp_path.iterdir()] == ["evoengine"]


def test_a_process_that_ends_before_its_first_task_is_noticed_though_its_pool_does_not_say(monkeypatch):
    monkeypatch.setattr(pools, "START_SECONDS", 3600.0)
    worker = pools._Worker(WorkerLimits(seconds=60))
    worker._started.result(60)
    worker._started = Future()  # as a pool that has lost the task leaves it
    worker._processes.end()
    with pytest.raises(BrokenProcessPool, match="SIGKILL|SIGTERM|exit"):
        worker.await_start()
    worker._give_up(worker._pool)
