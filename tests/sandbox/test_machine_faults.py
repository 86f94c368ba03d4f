"""What fails because of the machine ends the search with its reason; no candidate is recorded as failed for it."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from evoengine.errors import MachineError
from evoengine.ledger.store import open_ledger
from evoengine.records import Outcome
from evoengine.sandbox import machine, workers
from evoengine.sandbox.worker_process import WorkerLimits
from evoengine.sandbox.workers import WorkerPool
from evoengine.search.proposer import Proposer
from evoengine.tuning.setup import recording_failure
from tests.support import faulty_device
from tests.support.exhaustive import more
from tests.support.faulty_device import run_fault
from tests.support.ledger_examples import a_figure, add_ranked, start_run

ROOT = Path(__file__).parents[2]


@pytest.fixture
def pool():
    pool = WorkerPool(1, WorkerLimits(seconds=10, memory_bytes=512 << 20, forked=False))
    yield pool
    pool.close()


def result(pool, task, *arguments):
    return pool.submit(task, *arguments, on_crash=Outcome.CRASHED, returns=int).result()


NUMBERS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EMFILE, errno.EAGAIN, errno.ENOENT, errno.EACCES)


def test_an_error_of_the_system_is_the_machines_and_names_its_file(pool):
    for number in NUMBERS:
        with pytest.raises(MachineError, match=f"this machine failed: {os.strerror(number)}: /some/file"):
            result(pool, faulty_device.machine_says, number)


def test_so_are_too_many_open_files(pool):
    with pytest.raises(MachineError, match="Too many open files"):
        result(pool, faulty_device.open_everything)


def test_memory_that_the_machine_does_not_have_is_its_fault(pool):
    with pytest.raises(MachineError, match="this machine has no memory left"):
        result(pool, faulty_device.no_more_memory)


def test_memory_beyond_a_workers_own_limit_is_the_candidates_and_the_reason_names_it(pool):
    assert re.search(
        r"MemoryError.*\(the limit of a worker is 0\.5 GiB of memory\)", result(pool, run_fault, "memory").reason
    )


def test_a_file_beyond_a_workers_own_limit_is_the_candidates():
    pool = WorkerPool(1, WorkerLimits(file_bytes=1 << 20, forked=False))
    assert "(the limit of a worker is 0.000977 GiB in a file)" in result(pool, run_fault, "flood").reason
    pool.close()


def test_a_worker_that_the_kernel_ended_for_want_of_memory_is_the_machines(pool, monkeypatch):
    counts = iter(range(10))
    monkeypatch.setattr(workers, "oom_kills", lambda: next(counts))
    with pytest.raises(MachineError, match="no memory left: the kernel ended a worker process"):
        result(pool, run_fault, "kill")


def test_one_that_was_killed_otherwise_is_the_candidates(pool):
    assert "SIGKILL" in result(pool, run_fault, "kill").reason
    assert machine.oom_kills() >= 0


@pytest.mark.parametrize("fault", ["segv", *more(["exit"])])
def test_a_worker_that_dies_on_a_machine_that_can_write_nothing_is_the_machines(pool, monkeypatch, tmp_path, fault):
    result(pool, os.getpid)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    with pytest.raises(MachineError, match=r"No such file or directory.*gone|gone: No such file"):
        result(pool, run_fault, fault)


FULL = """
import sys
from evoengine.errors import MachineError
from evoengine.records import Outcome
from evoengine.sandbox.worker_process import WorkerLimits
from evoengine.sandbox.workers import WorkerPool
from tests.support.faulty_device import run_fault

if __name__ == "__main__":
    pool = WorkerPool(1, WorkerLimits(forked=False))
    pool.submit(run_fault, "garbage", on_crash=Outcome.CRASHED, returns=list).result()
    with open(sys.argv[1] + "/fill", "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            pass
    try:
        pool.submit(run_fault, "segv", on_crash=Outcome.CRASHED, returns=int).result()
    except MachineError as error:
        print(error)
    pool.close()
"""


def test_a_full_disk(tmp_path):
    script = tmp_path / "full.py"
    script.write_text(FULL)
    (disk := tmp_path / "disk").mkdir()
    mounted = f"mount -t tmpfs -o size=2m none {disk} 2> {tmp_path}/refused || exit 77"
    command = f"{mounted}; TMPDIR={disk} exec {sys.executable} {script} {disk}"
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", command], capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    if done.returncode == 77 or "unshare" in done.stderr:
        pytest.skip("mounting a file system of its own needs rights that this user does not have")
    assert done.stdout == f"this machine failed: a file cannot be written in {disk}: No space left on device\n", done


# ── in a search ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_what_was_under_way_ends_as_interrupted_and_untold_and_the_run_says_why(numbered, monkeypatch):
    told, tell = [], Proposer.tell

    def noted(self, proposal, values):
        told.append(proposal)
        tell(self, proposal, values)

    monkeypatch.setattr(Proposer, "tell", noted)
    coordinator = numbered.coordinator(range(12), compiler=faulty_device.compile_on_full_disk)
    with (
        pytest.raises(MachineError, match="No space left on device: /some/file"),
        recording_failure(numbered.ledger, coordinator.run),
    ):
        coordinator.search()
    ended = [c for c in numbered.candidates() if c.outcome.judged]
    assert {c.outcome for c in ended} <= {Outcome.MEASURED} and len(told) == len(ended)
    assert 3 in [c.config["number"] for c in numbered.candidates() if c.outcome is Outcome.INTERRUPTED]
    [run] = numbered.ledger.runs()
    assert run.status == "stopped: this machine failed: No space left on device: /some/file"
    numbered.coordinator(range(12), run=run.id).search()
    measured = [c.config["number"] for c in numbered.candidates() if c.outcome is Outcome.MEASURED]
    assert sorted(measured) == list(range(12))


def test_an_error_of_the_system_in_the_program_itself_is_no_traceback(numbered):
    _, run = numbered.begin(range(2))
    with pytest.raises(MachineError, match="Too many open files"), recording_failure(numbered.ledger, run):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    assert numbered.ledger.runs()[-1].status.startswith("stopped: ")


LEFT = """
import os, resource, sys
from evoengine.cli.main import main

left, *sys.argv[1:] = sys.argv[1:]
{before}
highest = max(map(int, os.listdir("/proc/self/fd")))
resource.setrlimit(resource.RLIMIT_NOFILE, (highest + int(left), highest + int(left)))
sys.exit(main())
"""
"""a command that may open so many files more than its interpreter has"""
LOADED = "import sqlite3, evoengine.cli.history, evoengine.cli.console, evoengine.cli.options, evoengine.ledger.store"


@pytest.mark.parametrize(("before", "left"), [("", 0), (LOADED, 1), *more([(LOADED, 0), (LOADED, 3)])])
def test_a_command_that_can_open_no_file_says_so_and_blames_no_ledger(tmp_path, before, left):
    with open_ledger(str(tmp_path / "ledger.db"), create=True) as ledger:
        add_ranked(ledger, start_run(ledger), a_figure(1.0))
    arguments = [str(left), "history", "--json", "--db", str(tmp_path / "ledger.db")]
    done = subprocess.run(
        [sys.executable, "-c", LEFT.format(before=before), *arguments], cwd=ROOT, capture_output=True, text=True
    )
    said = done.stderr.splitlines()[-1] if done.stderr else ""
    assert done.returncode == 0 or (done.returncode, said.count("Too many open files")) == (3, 1), done.stderr
    assert done.returncode == 3 or left > 1
    assert "Traceback" not in done.stderr
