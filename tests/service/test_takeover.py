"""Who runs a job: claims, servers that die, late writers, and jobs that nobody can run."""

from __future__ import annotations

from datetime import timedelta

import pytest

from evoengine.devices.driver import GpuDevice
from evoengine.errors import MachineError
from evoengine.ledger.tables import HeartbeatRow
from evoengine.records import KILLED, Outcome
from evoengine.service.executors import MOST_DEATHS, Executors, Slot, offered
from evoengine.service.jobs import CANCELLED, DONE, FAILED, QUEUED, RUNNING, WAITING, Fenced, Jobs
from evoengine.service.tables import ExecutorRow, JobRow
from tests.support.ledger_examples import CONFIG, GPU, PROBLEM, start_run

PATIENCE = 30.0
CPU = Slot(0)
H100 = Slot(1, GpuDevice(0, "NVIDIA H100 80GB HBM3", "GPU-1", 90, 80 << 30))


def request(**changes: object) -> dict[str, object]:
    asked = {"problems": [PROBLEM], "gpu": GPU, "trials": 5, "device": "emulator", "priority": 0}
    return asked | changes


@pytest.fixture
def jobs(ledger) -> Jobs:
    return Jobs(ledger)


@pytest.fixture
def server(ledger):
    """Makes a server by its name and slots, which has said that it lives."""

    def make(name: str, *slots: Slot) -> Executors:
        made = Executors(ledger, name, slots, PATIENCE)
        made.beat(())
        return made

    return make


def grow_old(ledger, row_type, number) -> None:
    """As if it had not beaten for longer than anybody waits."""
    with ledger.database.writing() as session:
        session.get_one(row_type, number).beat_at -= timedelta(seconds=PATIENCE + 1)


def states(jobs: Jobs, number: int) -> list[str]:
    return [event.data["state"] for event in jobs.events(number) if event.event == "state"]


def test_a_job_is_claimed_once_and_by_its_priority(jobs, server):
    one, two = server("one", CPU), server("two", CPU)
    for priority in (0, 5, 0):
        jobs.submit(request(priority=priority), 0, None, 100)
    claimed = [each.claim(CPU) for each in (one, two, one, two)]
    assert [job and (job.id, job.owner) for job in claimed] == [(2, "one"), (1, "two"), (3, "one"), None]
    assert {job.fence for job in claimed if job} == {1}


def test_who_was_thought_dead_finds_its_job_taken_and_writes_no_more(jobs, server, ledger):
    slow, quick = server("slow", CPU), server("quick", CPU)
    jobs.submit(request(), 0, None, 100)
    old = slow.claim(CPU)
    jobs.tell(old.id, old.fence, "message", {"text": "in time"})
    assert quick.claim(CPU) is None  # its server beats
    grow_old(ledger, JobRow, old.id)
    new = quick.claim(CPU)
    assert (new.owner, new.fence) == ("quick", old.fence + 1)
    before = jobs.events(new.id)
    for late in (
        lambda: jobs.tell(old.id, old.fence, "message", {"text": "late"}),
        lambda: jobs.note(old.id, old.fence, []),
        lambda: jobs.finish(old.id, old.fence, DONE),
        lambda: slow.give_back(old.id, old.fence, "late"),
        lambda: slow.died(old.id, old.fence, "late"),
    ):
        with pytest.raises(Fenced, match="taken over by another server"):
            late()
    assert slow.beat([(old.id, old.fence)]) == {old.id}
    assert quick.beat([(new.id, new.fence)]) == set()
    assert jobs.events(new.id) == before
    assert jobs.find(new.id).state == RUNNING


def test_the_runs_of_a_job_that_was_taken_over_are_taken_too(jobs, server, ledger):
    slow, quick = server("slow", CPU), server("quick", CPU)
    jobs.submit(request(), 0, None, 100)
    job, run = slow.claim(CPU), start_run(ledger)
    trial = ledger.add_candidate(run, PROBLEM, GPU, CONFIG, (), None)
    jobs.note(job.id, job.fence, [{**job.parts[0], "runs": [run]}])
    grow_old(ledger, JobRow, job.id)
    quick.claim(CPU)
    with pytest.raises(MachineError, match=f"considered run {run} killed"):
        ledger.finish(trial, Outcome.CRASHED, "late", None, None)
    ledger.database._fences.clear()  # as in the other server, which did not start the run
    assert ledger.runs()[0].status == KILLED
    assert ledger.candidate(trial).outcome is Outcome.KILLED
    with ledger.database.reading() as session:
        assert session.get_one(HeartbeatRow, run).fence == 2


def test_a_job_that_is_given_back_or_whose_process_died_is_claimed_again(jobs, server):
    one = server("one", CPU)
    jobs.submit(request(), 0, None, 100)
    job = one.claim(CPU)
    one.give_back(job.id, job.fence, "its server was shut down")
    again = one.claim(CPU)
    one.died(again.id, again.fence, "signal SIGKILL")
    assert (jobs.find(job.id).state, jobs.find(job.id).owner) == (QUEUED, None)
    assert states(jobs, job.id) == [QUEUED, RUNNING, QUEUED, RUNNING, QUEUED]


def test_a_job_whose_process_always_dies_fails_with_the_reason(jobs, server):
    one = server("one", CPU)
    jobs.submit(request(), 0, None, 100)
    for _ in range(MOST_DEATHS):
        job = one.claim(CPU)
        one.died(job.id, job.fence, "signal SIGSEGV")
    found = jobs.find(job.id)
    assert (found.state, found.why) == (
        FAILED,
        f"tried {MOST_DEATHS} times, the last time: signal SIGSEGV",
    )
    assert one.claim(CPU) is None


def test_a_job_for_a_gpu_that_nobody_has_waits_says_so_and_goes_on_when_there_is_one(jobs, server):
    one = server("one", CPU)
    jobs.submit(request(device="cuda"), 0, None, 100)
    one.beat(())
    waiting = jobs.find(1)
    assert waiting.state == WAITING and "no running server has a GPU for h100" in waiting.why
    assert one.claim(CPU) is None
    two = server("two", H100)
    assert (jobs.find(1).state, jobs.find(1).why) == (QUEUED, None)
    assert two.claim(H100).id == 1


def test_a_job_may_be_predicted_now_and_timed_when_there_is_a_gpu(jobs, server):
    one = server("one", CPU)
    jobs.submit(request(device="auto"), 0, None, 100)
    job = one.claim(CPU)
    jobs.note(job.id, job.fence, [{**job.parts[0], "ended": "all trials done"}])
    jobs.wait(job.id, job.fence, "to be timed")
    one.beat(())
    assert jobs.find(1).state == WAITING and "it is timed when a server has a GPU for h100" in jobs.find(1).why
    assert one.claim(CPU) is None
    assert server("two", H100).claim(H100).id == 1


def test_where_there_is_such_a_gpu_it_is_timed_at_once(jobs, server):
    one, two = server("one", CPU), server("two", H100)
    jobs.submit(request(device="auto"), 0, None, 100)
    one.beat(())
    assert one.claim(CPU) is None
    assert two.claim(H100).id == 1


def test_without_any_server_for_the_cpu_a_job_says_so(jobs, server):
    api_alone = server("api")
    jobs.submit(request(), 0, None, 100)
    api_alone.beat(())
    assert (jobs.find(1).state, "EVOENGINE_CPU_JOBS" in jobs.find(1).why) == (WAITING, True)


def test_a_server_that_no_longer_beats_offers_nothing(jobs, server, ledger):
    one, two = server("one", CPU), server("two", H100)
    grow_old(ledger, ExecutorRow, "two")
    jobs.submit(request(device="cuda"), 0, None, 100)
    one.beat(())
    assert jobs.find(1).state == WAITING
    assert [(each["owner"], each["alive"]) for each in one.known()] == [("one", True), ("two", False)]
    two.leave()
    assert [each["owner"] for each in one.known()] == ["one"]


def test_a_cancelled_job_is_no_longer_its_servers(jobs, server):
    one = server("one", CPU)
    jobs.submit(request(), 0, None, 100)
    job = one.claim(CPU)
    assert jobs.cancel(job.id).state == CANCELLED
    assert one.beat([(job.id, job.fence)]) == {job.id}
    with pytest.raises(Fenced):
        jobs.finish(job.id, job.fence, DONE)
    assert jobs.find(job.id).state == CANCELLED


def test_events_are_numbered_from_1_without_a_gap(jobs, server):
    one = server("one", CPU)
    jobs.submit(request(), 0, None, 100)
    job = one.claim(CPU)
    for text in "abc":
        jobs.tell(job.id, job.fence, "message", {"text": text})
    jobs.finish(job.id, job.fence, DONE)
    found = jobs.events(job.id)
    assert [event.number for event in found] == list(range(1, jobs.find(job.id).events + 1))
    assert jobs.events(job.id, after=4) == found[4:]
    assert states(jobs, job.id) == [QUEUED, RUNNING, DONE]


def test_a_gpu_is_offered_by_its_name_and_an_unknown_board_for_its_architecture():
    assert H100.gpus == ("h100",)
    unknown = GpuDevice(0, "NVIDIA H100 NVL", "GPU-2", 90, 94 << 30)
    assert {"h100", "h200"} <= set(offered(unknown)) and "a100" not in offered(unknown)
