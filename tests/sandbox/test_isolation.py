"""A candidate can do anything at all, and the search goes on: one outcome each, nothing lost, no process left."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from evoengine.errors import MachineError, UsageError
from evoengine.records import Outcome, Rejection
from evoengine.sandbox.deaths import EXCLUSIVE_DEATHS
from evoengine.sandbox.worker_process import COMPILER_LIMITS, WorkerLimits
from evoengine.sandbox.workers import WorkerPool
from evoengine.search import evaluators
from evoengine.tuning.setup import default_jobs
from tests.support import faulty_device
from tests.support.exhaustive import more
from tests.support.faulty_device import (
    FAULTS,
    KINDS,
    expected,
    fault_of,
    has_torch_compiler,
    no_library,
    note_warm,
    rank_of_process,
    refuse,
    run_fault,
    start_and_wait,
    was_warm,
)
from tests.support.waiting import is_alive, wait_for


def children() -> set[tuple[int, str]]:
    """Every process below this one with its command, zombies too; those aside that Python keeps as long as it runs, and
    keepers with their guards."""
    listed = subprocess.run(["ps", "-wweo", "pid=,ppid=,args="], capture_output=True, text=True).stdout.splitlines()
    rows = [line.split(None, 2) for line in listed]
    found, new, own = set(), {os.getpid()}, ("resource_tracker", "keeper.py", "ps -wweo")
    for level in range(len(rows)):
        below = {(int(pid), args) for pid, parent, args in rows if int(parent) in new}
        found |= {(pid, args) for pid, args in below if level > 1 or not any(name in args for name in own)}
        new = {pid for pid, _ in below}
    return found


@pytest.mark.parametrize(("count", "forked"), [(60, True), *more([(60, False), (200, False)])])
def test_three_in_ten_candidates_misbehave_and_every_one_has_its_outcome(numbered, monkeypatch, count, forked):
    monkeypatch.setattr(evaluators, "RUNNER_LIMITS", replace(evaluators.RUNNER_LIMITS, forked=forked))
    before = children()
    numbers = range(count)
    assert sum(fault_of(n) is not None for n in numbers) == 0.3 * count and {fault_of(n) for n in numbers} > set(KINDS)
    own = set(multiprocessing.active_children())
    numbered.coordinator(numbers, fault_of, seconds=8.0).search()
    found = numbered.candidates()
    assert Counter(c.config["number"] for c in found) == Counter(numbers)  # none twice, none lost
    wrong = {c.config["number"]: (c.outcome, c.reason) for c in found if c.outcome is not expected(c.config["number"])}
    assert wrong == {}
    assert sorted(numbered.finished) == sorted(c.trial for c in found)
    good = [c for c in found if c.outcome is Outcome.MEASURED]
    assert len(good) == 0.7 * count and all(c.measurement.tflops == 1.0 + c.config["number"] for c in good)
    assert all(c.reason for c in found if c.outcome is not Outcome.MEASURED)
    assert children() <= before
    assert set(multiprocessing.active_children()) <= own


def test_compilers_see_no_gpu_and_give_way_to_what_times_on_one():
    pool = WorkerPool(1, COMPILER_LIMITS)
    try:
        niceness, visible = pool.submit(rank_of_process, on_crash=Outcome.CRASHED, returns=tuple).result()
    finally:
        pool.close()
    assert niceness == min(os.nice(0) + 10, 19) and visible == ""  # 19 is the most there is


@pytest.mark.parametrize("workload", ["attention", "gemm", None])
def test_a_worker_that_gates_spends_no_second_on_torchs_compiler(workload):
    if workload is None:
        pytest.importorskip("triton", reason="Triton is not installed")
    pool = WorkerPool(1)
    try:
        assert pool.submit(has_torch_compiler, workload, on_crash=Outcome.CRASHED, returns=bool).result() is False
    finally:
        pool.close()


def test_a_gpu_is_timed_on_with_two_cores_left_free(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    assert (default_jobs(timed=False), default_jobs(timed=True)) == (16, 14)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    assert default_jobs(timed=True) == 1


SAID = {
    "segv": "SIGSEGV", "kill": "SIGKILL", "abort": "SIGABRT): free(): invalid pointer", "loop": "no end after 1 s",
    "memory": "MemoryError", "flood": "File too large", "late": "no end after 1 s", "exit": "ended without an answer",
    "garbage": "of type list", "unreadable": "cannot be read", "unpicklable": "Can't pickle",
    "sticky": "cudaErrorIllegalAddress",
}  # fmt: skip


@pytest.fixture(scope="module")
def pool():
    pool = WorkerPool(1, WorkerLimits(seconds=1, memory_bytes=512 << 20, file_bytes=1 << 20, warm_up=note_warm))
    yield pool
    pool.close()


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_becomes_a_rejection_that_says_why_and_the_next_task_runs_in_a_new_process(pool, fault):
    before = pool.submit(os.getpid, on_crash=Outcome.CRASHED, returns=int).result()
    rejection = pool.submit(run_fault, fault, on_crash=Outcome.CRASHED, returns=int).result()
    assert rejection.outcome is faulty_device.end_of(fault)
    assert SAID[fault] in rejection.reason
    after = pool.submit(os.getpid, on_crash=Outcome.CRASHED, returns=int).result()
    assert after != before
    assert not Path(f"/proc/{before}").exists()


def test_a_reason_is_no_longer_than_a_person_reads(pool):
    found = pool.submit(faulty_device.explain_at_length, on_crash=Outcome.CRASHED, returns=int).result()
    assert found.reason == "x" * 1000 + " …"


def test_what_a_killed_worker_started_dies_with_it(pool, tmp_path):
    rejection = pool.submit(start_and_wait, str(tmp_path / "pid"), on_crash=Outcome.CRASHED, returns=int).result()
    assert rejection.outcome is Outcome.HUNG
    wait_for(lambda: not is_alive(int((tmp_path / "pid").read_text())))


def test_a_worker_killed_while_idle_costs_no_candidate(pool):
    pid = pool.submit(os.getpid, on_crash=Outcome.CRASHED, returns=int).result()
    os.kill(pid, signal.SIGKILL)
    again = pool.submit(os.getpid, on_crash=Outcome.CRASHED, returns=int).result()
    assert isinstance(again, int) and again != pid


def test_a_machine_that_lacks_something_ends_the_search_not_one_candidate(pool):
    with pytest.raises(UsageError, match="no such space"):
        pool.submit(refuse, on_crash=Outcome.CRASHED, returns=int).result()


def test_processes_that_cannot_start_are_the_machines_fault():
    pool = WorkerPool(1, WorkerLimits(warm_up=no_library))
    try:
        with pytest.raises(MachineError, match="no libcuda"):
            pool.submit(os.getpid, on_crash=Outcome.CRASHED, returns=int).result()
    finally:
        pool.close()


def test_a_compiler_that_hangs_is_uncompilable_and_does_not_hold_up_the_other_worker():
    pool = WorkerPool(2, WorkerLimits(seconds=2))
    try:
        for _ in range(2):
            pool.submit(
                os.getpid, on_crash=Outcome.UNCOMPILABLE, returns=int
            ).result()  # each worker in turn: both are up
        stuck = pool.submit(run_fault, "late", on_crash=Outcome.UNCOMPILABLE, returns=int)
        others = [pool.submit(os.getpid, on_crash=Outcome.UNCOMPILABLE, returns=int) for _ in range(20)]
        assert all(isinstance(f.result(), int) for f in others)
        assert not stuck.done()
        assert stuck.result() == Rejection(Outcome.UNCOMPILABLE, "no end after 2 s")
    finally:
        pool.close()


def test_closing_a_pool_ends_tasks_under_way_at_once_and_those_waiting(tmp_path):
    before = children()
    pool = WorkerPool(2, WorkerLimits(seconds=300))
    files = [tmp_path / name for name in "abcde"]
    for file in files:
        pool.submit(start_and_wait, str(file), on_crash=Outcome.CRASHED, returns=int)
    wait_for(lambda: all(file.exists() for file in files[:2]))
    pool.close()
    assert children() <= before
    assert not any(file.exists() for file in files[2:])


def test_a_worker_that_several_threads_kill_at_once_is_killed_once():
    """As when a pool is closed while one of its threads replaces a worker that died."""
    for _ in range(4):
        pool = WorkerPool(1)
        pool.submit(os.getpid, on_crash=Outcome.CRASHED, returns=int).result()
        [worker] = pool._all
        together = threading.Barrier(4)

        def kill(worker=worker, together=together):
            together.wait()
            worker.kill()

        with ThreadPoolExecutor(4) as threads:
            killings = [threads.submit(kill) for _ in range(4)]
        assert [killing.exception() for killing in killings] == [None] * 4
        pool.close()


def test_a_worker_that_starts_while_the_pool_is_closed_ends_with_it(monkeypatch):
    before, replacing, new = children(), threading.Event(), WorkerPool._new
    pool = WorkerPool(1)

    def slow(pool):
        replacing.set()
        time.sleep(1)
        return new(pool)

    monkeypatch.setattr(WorkerPool, "_new", slow)
    pool.submit(run_fault, "segv", on_crash=Outcome.CRASHED, returns=int)
    replacing.wait()
    pool.close()
    assert children() <= before


def test_a_spare_takes_over_with_everything_loaded():
    pool = WorkerPool(1, WorkerLimits(warm_up=note_warm, spare=True))
    try:
        for _ in range(3):
            assert pool.submit(was_warm, on_crash=Outcome.CRASHED, returns=bool).result() is True
            pool.submit(run_fault, "segv", on_crash=Outcome.CRASHED, returns=int).result()
        # or more: where Pebble has not noted that a process took the task before it died, the task runs once more
        assert pool.replaced >= 3 * (1 + EXCLUSIVE_DEATHS)
    finally:
        pool.close()
