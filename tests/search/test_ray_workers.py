"""Workers on a real Ray cluster, of nodes that are all on this machine: what a local search promises holds there, and
a node that is lost costs no candidate."""

from __future__ import annotations

import errno
import os
import signal
import time
from collections import Counter
from contextlib import contextmanager

import pytest

from evoengine.errors import MachineError, UsageError
from evoengine.records import Outcome
from evoengine.sandbox.worker_process import WorkerLimits
from tests.support import faulty_device
from tests.support.exhaustive import more
from tests.support.faulty_device import expected, fault_of
from tests.support.numbered_search import GPU, limits
from tests.support.waiting import wait_for

ray = pytest.importorskip("ray", reason="needs Ray: pip install 'evoengine[ray]'")

from evoengine.search.ray_workers import RETRIES, ActorOptions, RayWorkers  # noqa: E402 - there is Ray
from evoengine.tuning import ray_cluster  # noqa: E402
from evoengine.tuning.fleet import Fleet  # noqa: E402
from evoengine.tuning.ray_cluster import LOCAL, connected, require_fit, survey  # noqa: E402
from tests.support.fleet import FAKE, find_fake, nodes  # noqa: E402

QUICK = WorkerLimits(seconds=60, memory_bytes=512 << 20, forked=False)
"""of workers that import nothing before their first task"""


@contextmanager
def workers(count, said=None, worker_limits=None, options=None):
    heard = said if said is not None else []
    made = RayWorkers(count, worker_limits or limits(), heard.append, options or ActorOptions())
    try:
        yield made
    finally:
        made.close()


def run(pool, task, *args, returns=int):
    return pool.submit(task, *args, on_crash=Outcome.CRASHED, returns=returns).result()


def parent_of(pid):
    with open(f"/proc/{pid}/stat") as file:
        return int(file.read().rpartition(")")[2].split()[1])


def actor_of(worker):
    """Return the process of the actor that asked for a worker: the parent of its keeper's guard."""
    return parent_of(parent_of(parent_of(worker)))


def test_an_actor_that_is_killed_costs_no_task_and_a_machine_that_fails_ends_the_search_with_its_reason(tmp_path):
    said: list[str] = []
    with connected(LOCAL), workers(1, said, QUICK) as pool:
        worker = run(pool, os.getpid)
        noted = pool.submit(note_and_wait, tmp_path, on_crash=Outcome.CRASHED, returns=int)
        wait_for(lambda: list(tmp_path.iterdir()))
        os.kill(actor_of(worker), signal.SIGKILL)
        assert noted.result() != worker and len(list(tmp_path.iterdir())) == 2  # it ran again, in another process
        assert len([line for line in said if "was lost" in line and "retried on another" in line]) == 1
        died = run(pool, faulty_device.run_fault, "segv")
        assert (
            died.outcome is Outcome.CRASHED and "SIGSEGV" in died.reason
        )  # its worker alone: that is not a lost actor
        with pytest.raises(UsageError, match="no such space"):
            run(pool, faulty_device.refuse)
        with pytest.raises(MachineError, match="no node of the cluster is left to run on: .*No space left on device"):
            run(pool, faulty_device.machine_says, errno.ENOSPC)
    assert not os.path.exists(f"/proc/{worker}")
    assert len([line for line in said if "is excluded, the others continue" in line]) == 1


def note_and_wait(folder):
    """Never ends the first time."""
    first = not list(folder.iterdir())
    (folder / str(os.getpid())).touch()
    while first:
        time.sleep(0.1)
    return os.getpid()


# ── several nodes ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.exhaustive
@pytest.mark.parametrize("cpus", [(1, 1), (1, 1, 1, 1)], ids=["two nodes", "four nodes"])
def test_a_node_that_is_killed_in_the_middle_of_a_search_costs_no_candidate_and_none_counts_twice(numbered, cpus):
    said: list[str] = []
    with nodes(*cpus, h100=1) as (cluster, (doomed, *others)), connected(cluster.address):
        require_fit(survey())
        fleet = Fleet(said.append, finder=FAKE)
        device = fleet.choose_device("cuda", GPU, said.append)
        assert fleet.ledger_device(device).name == device.name
        left = [doomed]

        def kill_one(progress):
            if progress.done >= 6 and left:
                cluster.kill(left.pop())

        with workers(len(cpus), said) as compilers:
            numbered.coordinator(
                range(40), fault_of, seconds=5, runners=fleet.runners, workers=compilers, on_change=kill_one
            ).search()
    assert not left
    found = numbered.candidates()
    assert Counter(c.config["number"] for c in found) == Counter(range(40))
    wrong = {c.config["number"]: (c.outcome, c.reason) for c in found if c.outcome is not expected(c.config["number"])}
    assert wrong == {}
    measured = [c for c in found if c.outcome is Outcome.MEASURED]
    assert all(c.measurement.tflops == 1.0 + c.config["number"] for c in measured)
    assert sorted(numbered.finished) == sorted(c.trial for c in found)
    assert any("was lost" in line and "runs again on another" in line for line in said)


@pytest.mark.exhaustive
def test_whatever_a_candidate_does_to_its_worker_the_actor_stays():
    limits = WorkerLimits(seconds=1, memory_bytes=512 << 20, file_bytes=1 << 20, warm_up=faulty_device.note_warm)
    said: list[str] = []
    with connected(LOCAL), workers(1, said, limits) as pool:
        actor = actor_of(run(pool, os.getpid))
        for fault in faulty_device.FAULTS:
            rejection = run(pool, faulty_device.run_fault, fault)
            assert rejection.outcome is faulty_device.end_of(fault), fault
            assert actor_of(run(pool, os.getpid)) == actor
    assert not [line for line in said if "lost" in line or "taken out" in line]


@pytest.mark.exhaustive
def test_a_candidate_that_takes_its_actor_down_every_time_is_rejected_after_some(tmp_path):
    with connected(LOCAL), workers(1, [], QUICK) as pool:
        rejection = run(pool, kill_actor, tmp_path)
        assert rejection.outcome is Outcome.CRASHED and f"was lost {RETRIES + 1} times" in rejection.reason
        assert len(list(tmp_path.iterdir())) == RETRIES + 1
        assert isinstance(run(pool, os.getpid), int)


def kill_actor(folder):
    (folder / str(time.monotonic_ns())).touch()
    os.kill(actor_of(os.getpid()), signal.SIGKILL)
    time.sleep(60)


@pytest.mark.exhaustive
def test_a_node_whose_machine_fails_is_taken_out_and_the_others_go_on():
    said: list[str] = []
    with nodes(1, 1) as (cluster, _), connected(cluster.address), workers(2, said, QUICK) as pool:
        bad = run(pool, node_of)
        (other,) = {run(pool, fail_on, bad) for _ in range(4)}  # whoever was on the bad node ran again
        assert other != bad
        assert {run(pool, node_of) for _ in range(4)} == {other}
    (line,) = [line for line in said if "taken out" in line]
    assert "Read-only file system" in line


def node_of():
    """The process of the node's raylet, which starts the actors."""
    return parent_of(actor_of(os.getpid()))


def fail_on(node):
    if node_of() == node:
        faulty_device.machine_says(errno.EROFS)
    return node_of()


@pytest.mark.exhaustive
def test_a_node_that_joins_takes_up_the_work_of_one_that_was_lost():
    said: list[str] = []
    with nodes(1) as (cluster, (only,)), connected(cluster.address), workers(1, said, QUICK) as pool:
        before = run(pool, os.getpid)
        waiting = pool.submit(time.sleep, 2, on_crash=Outcome.CRASHED, returns=type(None))
        cluster.kill(only)
        cluster.add(1)
        assert waiting.result() is None
        assert run(pool, os.getpid) != before


@pytest.mark.exhaustive
def test_every_gpu_is_held_by_one_actor_and_a_binary_is_put_into_the_object_store_once(numbered, monkeypatch):
    put: Counter[int] = Counter()
    real = ray.put
    monkeypatch.setattr(ray, "put", lambda value: (put.update([value.trial]), real(value))[1])
    with nodes(2, 2, h100=2) as (cluster, _), connected(cluster.address):
        fleet = Fleet(lambda line: None, finder=FAKE)
        fleet.choose_device("auto", GPU, lambda line: None)
        compilers = fleet.compilers(2, limits())
        numbered.coordinator(range(24), runners=fleet.runners, workers=compilers).search()
    found = numbered.candidates()
    assert Counter(c.config["number"] for c in found) == Counter(range(24))
    assert put and max(put.values()) == 1


@pytest.mark.exhaustive
@pytest.mark.parametrize("board", more(["NVIDIA Other"]))
def test_a_board_of_another_name_is_left_out(board):
    said: list[str] = []
    options = ActorOptions(0.0, 1.0, {"gpu:h100": 1.0}, find_h100, board)
    with nodes(1, h100=1) as (cluster, _), connected(cluster.address), workers(1, said, QUICK, options) as pool:
        ended = pool.submit(os.getpid, on_crash=Outcome.CRASHED, returns=int).exception()
    assert isinstance(ended, MachineError) and "no node of the cluster is left to run on" in str(ended)
    assert any("figures are of an NVIDIA Other" in line for line in said)


def find_h100():
    return find_fake(GPU)


@pytest.mark.parametrize(
    ("token", "named"), [(None, "there is no token here"), ("a" * 64, "the token here may be another")]
)
def test_a_cluster_that_refuses_a_machine_names_the_token(monkeypatch, tmp_path, token, named):
    """As Ray says it of a node whose token is missing, and of one whose token is another."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("RAY_AUTH_TOKEN_PATH", raising=False)
    if token:
        monkeypatch.setenv("RAY_AUTH_TOKEN", token)
    said = ray_cluster._why_not_connected(
        "head:6379", ConnectionError("Failed to connect to Ray cluster at 10.0.0.1:6379")
    )
    assert named in said and "~/.ray/auth_token" in said and "\n" not in said
