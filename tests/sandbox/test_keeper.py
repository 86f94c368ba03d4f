"""Whatever a worker starts ends with it, and all of it with the search, however that ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from evoengine.errors import MachineError
from evoengine.records import Outcome, Rejection
from evoengine.sandbox import kept_process
from evoengine.sandbox.worker_process import MAX_PROCESSES, WorkerLimits
from evoengine.sandbox.workers import WorkerPool
from tests.support import faulty_device
from tests.support.exhaustive import more
from tests.support.waiting import is_alive, wait_for

MIB = 1 << 20


@pytest.fixture
def pool():
    pool = WorkerPool(1, WorkerLimits(seconds=20, memory_bytes=128 * MIB, forked=False))
    yield pool
    pool.close()


def left_by(pool, path, then):
    pool.submit(faulty_device.leave_behind, str(path), then, on_crash=Outcome.CRASHED, returns=int).result()
    return int(path.read_text())


def test_a_process_in_a_session_of_its_own_does_not_outlive_the_task_that_left_it(pool, tmp_path):
    pid = left_by(pool, tmp_path / "pid", "return")
    wait_for(lambda: not is_alive(pid))


@pytest.mark.parametrize("fault", ["kill", *more(["segv", "exit"])])
def test_nor_a_worker_that_dies_at_once(pool, tmp_path, fault):
    pid = left_by(pool, tmp_path / "pid", fault)
    pool.close()
    assert not is_alive(pid)


def test_a_worker_that_starts_more_processes_than_it_may_is_ended_with_all_of_them():
    pool = WorkerPool(1, WorkerLimits(seconds=20))
    rejection = pool.submit(faulty_device.start_many, MAX_PROCESSES, on_crash=Outcome.CRASHED, returns=int).result()
    pool.close()
    why = f"the worker process was ended: it started more than {MAX_PROCESSES} processes"
    assert rejection == Rejection(Outcome.CRASHED, why)


def test_processes_that_take_too_much_memory_together_are_ended(pool):
    rejection = pool.submit(faulty_device.hold_together, 90 * MIB, 4, on_crash=Outcome.CRASHED, returns=int).result()
    assert rejection.reason == (
        "the worker process was ended: it and its descendants took more than 0.25 GiB of memory"
    )


def test_temporary_files_of_a_worker_go_with_it(pool):
    file = pool.submit(faulty_device.scratch_file, on_crash=Outcome.CRASHED, returns=str).result()
    assert Path(file).exists()
    pool.close()
    assert not Path(file).parent.exists()


def test_so_they_do_where_the_keeper_itself_was_killed(pool):
    file = pool.submit(faulty_device.scratch_file, on_crash=Outcome.CRASHED, returns=str).result()
    keeper = kept_process._KEEPERS[False]._process
    keeper.kill()
    keeper.wait()
    assert Path(file).exists()
    pool.close()
    assert not Path(file).parent.exists()


def test_where_no_folder_can_be_made_for_a_worker_it_is_the_machine(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    with pytest.raises(MachineError, match=r"a worker process cannot be started: No such file or directory: .*gone"):
        WorkerPool(1)


SEARCH = """
import sys
from evoengine.records import Outcome
from evoengine.sandbox.workers import WorkerPool
from tests.support import faulty_device

if __name__ == "__main__":
    pools = [WorkerPool(2), WorkerPool(1)]
    pools[0].submit(faulty_device.leave_behind, sys.argv[1], on_crash=Outcome.CRASHED, returns=int).result()
    pools[1].submit(faulty_device.start_and_wait, sys.argv[2], on_crash=Outcome.CRASHED, returns=int)
    while True:
        signal = input()
"""


def started(tmp_path):
    """A program with workers whose temporary folders are in `tmp_path / "temporary"`."""
    (temporary := tmp_path / "temporary").mkdir(exist_ok=True)
    script = tmp_path / "search.py"
    script.write_text(SEARCH)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "TMPDIR": str(temporary)}
    files = tmp_path / "left", tmp_path / "started"
    return subprocess.Popen([sys.executable, script, *files], stdin=subprocess.PIPE, env=environment)


@pytest.mark.parametrize("number", [signal.SIGKILL, *more([signal.SIGTERM])])
def test_a_search_that_is_killed_leaves_no_process_and_no_folder(tmp_path, number):
    search, pids = started(tmp_path), [tmp_path / "left", tmp_path / "started"]
    wait_for(lambda: all(path.exists() and path.read_text() for path in pids))
    assert any((tmp_path / "temporary").iterdir())
    search.send_signal(number)
    search.wait()
    wait_for(lambda: not any(is_alive(int(path.read_text())) for path in pids))
    wait_for(lambda: not any((tmp_path / "temporary").iterdir()))


def test_a_search_that_is_killed_while_its_workers_start_leaves_nothing_either(tmp_path):
    """The folder is made by the process that will remove it."""
    for delay in (0.3, 0.6):
        search = started(tmp_path)
        time.sleep(delay)
        search.kill()
        search.wait()
    wait_for(lambda: not any((tmp_path / "temporary").iterdir()))
