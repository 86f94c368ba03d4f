"""The stream of a job's events, and what it tells of a search in this process."""

from __future__ import annotations

import json

import pytest

from evoengine.devices.driver import GpuDevice
from evoengine.errors import MachineError, NothingFound
from evoengine.service.executors import MOST_DEATHS, Executors, Slot
from evoengine.service.jobs import DONE, FAILED, RUNNING
from evoengine.service.work import CPU, Work
from evoengine.service.work import run_job as run

RECORDED = {"device": "recorded:test.json", "trials": 12, "seed": 3}


def run_job(parts, monkeypatch, ledger, stop_after: int | None = None) -> None:
    """Runs the next job in this process; with `stop_after` trials it is told to stop there."""
    monkeypatch.setenv("EVOENGINE_DB", ledger.url)
    parts.executors.beat(())
    job = parts.executors.claim(Slot(0))
    work = Work(parts.jobs, job, CPU, parts.state.settings)
    if stop_after is not None:
        tell, left = work._log.trial, [stop_after]

        def trial(candidate) -> None:
            tell(candidate)
            left[0] -= 1
            if not left[0]:
                work.stop()

        work._log.trial = trial
    work.run()
    if work.stopped:
        parts.executors.give_back(job.id, job.fence, "its server was shut down")


def stream(http, number: int, after: int | None = None) -> list[tuple[int, str, dict]]:
    headers = {} if after is None else {"Last-Event-ID": str(after)}
    text = http.get(f"/v1/jobs/{number}/events", headers=headers).text
    blocks = [
        dict(line.split(": ", 1) for line in block.splitlines()) for block in text.split("\n\n") if "id:" in block
    ]
    return [(int(block["id"]), block["event"], json.loads(block["data"])) for block in blocks]


def test_a_stream_tells_all_that_happened_ends_with_the_job_and_goes_on_where_it_was_left(service, ledger, monkeypatch):
    parts = service()
    parts.http.post("/v1/jobs", json=RECORDED)
    run_job(parts, monkeypatch, ledger)
    told = stream(parts.http, 1)
    assert [number for number, _, _ in told] == list(range(1, len(told) + 1))
    trials = [data["trial"] for _, event, data in told if event == "trial"]
    assert trials == [c.trial for c in ledger.candidates(run=1)] and len(trials) == 12
    assert [data["ended"] for _, event, data in told if event == "end"] == ["all trials done"]
    assert told[-1][2] == {"state": DONE, "why": None}
    job = parts.http.get("/v1/jobs/1").json()
    [part] = job["parts"]
    assert (part["runs"], part["done"], part["ended"]) == ([1], 12, "all trials done")
    best = ledger.best("recorded:test", "TEST GPU", top=1)[0]
    assert (job["progress"]["done"], job["progress"]["best"]["trial"]) == (12, best.trial)
    assert parts.http.get("/v1/best").json()["trial"] == best.trial
    for after in (0, 1, 7, len(told)):
        assert stream(parts.http, 1, after) == told[after:]


@pytest.mark.parametrize("given", ["-1", "x", "1.5", "9" * 30])
def test_what_is_no_number_of_an_event_is_refused(service, given):
    parts = service()
    parts.http.post("/v1/jobs", json=RECORDED)
    answer = parts.http.get("/v1/jobs/1/events", headers={"Last-Event-ID": given})
    assert (answer.status_code, "must be the number of an event" in answer.json()["detail"]) == (422, True)


def test_a_job_that_goes_on_elsewhere_spends_its_budget_once(service, ledger, monkeypatch):
    parts = service()
    parts.http.post("/v1/jobs", json=RECORDED)
    run_job(parts, monkeypatch, ledger, stop_after=5)
    between = parts.http.get("/v1/jobs/1").json()
    assert (between["state"], between["progress"]["done"]) == ("queued", 5)
    run_job(parts, monkeypatch, ledger)
    [part] = parts.http.get("/v1/jobs/1").json()["parts"]
    assert (part["runs"], part["done"]) == ([1], 12), "it goes on with the run that was cut short"
    trials = [data["trial"] for _, event, data in stream(parts.http, 1) if event == "trial"]
    assert sorted(trials) == sorted(c.trial for c in ledger.candidates(run=1))
    assert len(trials) == len(set(trials)) == 12


def test_trials_that_a_killed_process_did_not_tell_are_told_by_the_next(service, ledger, monkeypatch):
    parts = service()
    parts.http.post("/v1/jobs", json=RECORDED)
    tell = parts.jobs.tell

    def killed(number, fence, event, *rest) -> None:
        if event == "trial" and ledger.count("recorded:test", "TEST GPU") == 4:
            raise KeyboardInterrupt  # after the trial's own transaction, before its event
        tell(number, fence, event, *rest)

    monkeypatch.setattr(parts.jobs, "tell", killed)
    with pytest.raises(KeyboardInterrupt):
        run_job(parts, monkeypatch, ledger)
    monkeypatch.undo()
    parts.executors.give_back(1, 1, "its server was lost")
    assert len([event for event in parts.jobs.events(1) if event.event == "trial"]) == 3
    run_job(parts, monkeypatch, ledger)
    told = [event.data["trial"] for event in parts.jobs.events(1) if event.event == "trial"]
    assert sorted(told) == sorted(c.trial for c in ledger.candidates()) and len(told) == 12


def test_a_search_that_cannot_begin_fails_the_job_with_its_sentence(service, ledger, monkeypatch, recorded):
    parts = service()
    parts.http.post("/v1/jobs", json=RECORDED)
    recorded.joinpath("test.json").write_text("no JSON")
    monkeypatch.setenv("EVOENGINE_DB", ledger.url)
    monkeypatch.setenv("EVOENGINE_RECORDED", str(recorded))
    parts.executors.beat(())
    job = parts.executors.claim(Slot(0))
    assert parts.jobs.find(1).state == RUNNING
    run(ledger, job.id, job.fence, CPU, parts.state.settings)
    found = parts.jobs.find(1)
    assert found.state == FAILED and "test.json is not a recorded space" in found.why


def test_a_fault_of_the_machine_has_the_job_tried_again_and_fails_it_in_the_end(service, ledger, monkeypatch):
    parts = service()
    parts.http.post("/v1/jobs", json=RECORDED)
    monkeypatch.setenv("EVOENGINE_DB", ledger.url)

    def fail(*_: object) -> None:
        raise MachineError("the disk is full")

    monkeypatch.setattr("evoengine.service.work.prepare", fail)
    parts.executors.beat(())
    for _ in range(MOST_DEATHS):
        job = parts.executors.claim(Slot(0))
        run(ledger, job.id, job.fence, CPU, parts.state.settings)
    found = parts.jobs.find(1)
    assert (found.state, found.why) == (FAILED, f"tried {MOST_DEATHS} times, the last time: the disk is full")


@pytest.mark.parametrize("predicted_before", [True, False])
def test_what_was_predicted_before_there_was_a_gpu_is_timed_and_nothing_else(
    service, ledger, monkeypatch, predicted_before
):
    """On no GPU: what times is replaced, as it needs one."""
    parts = service()
    parts.http.post("/v1/jobs", json={"problems": ["gemm:m64,n64,k64,fp16"], "gpu": "h100", "device": "auto"})
    monkeypatch.setenv("EVOENGINE_DB", ledger.url)
    timed: list[tuple] = []

    class Measuring:
        def __init__(self, *asked: object, **options: object) -> None:
            timed.append(asked)

        def run(self) -> None:
            raise NothingFound("all of it was timed")

    def search(work, part) -> None:
        work._log.end_part(part, "all trials done")

    monkeypatch.setattr("evoengine.service.work.MeasureRun", Measuring)
    monkeypatch.setattr("evoengine.service.work.Work._search", search)
    parts.executors.beat(())
    if predicted_before:
        job = parts.executors.claim(Slot(0))
        run(ledger, job.id, job.fence, CPU, parts.state.settings)
        assert (parts.jobs.find(1).state, timed) == ("waiting", [])
    h100 = Slot(1, GpuDevice(0, "NVIDIA H100 80GB HBM3", "GPU-1", 90, 80 << 30))
    with_gpu = Executors(ledger, "gpu", [h100], 30.0)
    with_gpu.beat(())
    job = with_gpu.claim(h100)
    run(ledger, job.id, job.fence, "GPU-1", parts.state.settings)
    assert parts.jobs.find(1).state == DONE
    assert [asked[1:3] for asked in timed] == [("h100", "gemm:m64,n64,k64,fp16")] * predicted_before
