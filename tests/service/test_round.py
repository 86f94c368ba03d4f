"""A whole round with real processes: two servers on one database, 20 jobs from 4 clients, kills in the middle."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import ExitStack

import pytest

from evoengine.ledger.store import open_ledger
from evoengine.records import Outcome
from tests.service.conftest import running
from tests.service.test_server import children
from tests.support.postgres import Missing, running_server
from tests.support.waiting import wait_for

CLIENTS, JOBS_EACH, TRIALS = 4, 5, 24


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request, tmp_path):
    if request.param == "sqlite":
        yield str(tmp_path / "evo.db")
        return
    try:
        with running_server() as server:
            yield server.new_database("evoengine")
    except Missing as missing:
        pytest.skip(str(missing))


def follow(client, job, told) -> None:
    told.extend(client.events(job.id, patience=600.0))


@pytest.mark.exhaustive
def test_every_job_ends_every_result_is_told_once_and_no_stream_has_a_gap(database_url, tmp_path, recorded):
    second_folder = tmp_path / "second"
    second_folder.mkdir()
    named = {"db": database_url, "recorded": recorded, "takeover_seconds": 5}
    with running(tmp_path, **named) as first, running(second_folder, **named) as second, ExitStack() as ending:
        clients = [ending.enter_context(one.client()) for one in (first, second, first, second)]
        jobs = {}
        for number, client in enumerate(clients):
            for turn in range(JOBS_EACH):
                device = "recorded:test.json"
                job = client.submit(device=device, trials=TRIALS, idempotency_key=f"{number}-{turn}")
                assert client.submit(device=device, trials=TRIALS, idempotency_key=f"{number}-{turn}").id == job.id
                jobs[job.id] = (client, job, [])
        assert len(jobs) == CLIENTS * JOBS_EACH
        following = [threading.Thread(target=follow, args=each) for each in jobs.values()]
        for thread in following:
            thread.start()
        wait_for(lambda: done_states(jobs).count("done") >= 3)
        kill_a_worker(second, jobs)
        wait_for(lambda: children(first.process.pid))
        first.kill()
        first.start()
        for thread in following:
            thread.join(timeout=600)
        assert done_states(jobs) == ["done"] * len(jobs)
        seen: set[int] = set()
        with open_ledger(database_url, create=False) as ledger:
            for client, job, told in jobs.values():
                ended = client.job(job.id)
                assert [event.number for event in told] == list(range(1, ended.events + 1))
                trials = [event.data["trial"] for event in told if event.event == "trial"]
                own = [c for run in ended.parts[0]["runs"] for c in ledger.candidates(run=run)]
                known = [c.trial for c in own if c.outcome and c.outcome is not Outcome.KILLED]
                assert {c.trial for c in own} - set(known) == {c.retry_of for c in own if c.retry_of}
                assert sorted(trials) == sorted(known) and len(trials) == len(set(trials)) == TRIALS
                assert not seen & set(trials)
                seen |= set(trials)
        assert any("signal SIGKILL" in str(e.data.get("why")) for _, _, told in jobs.values() for e in told)
        assert second.stop() == first.stop() == 0
    for folder in (tmp_path, second_folder):
        assert "Traceback" not in (folder / "server.log").read_text()


def kill_a_worker(serving, jobs) -> None:
    """In the middle of its job: one that had just ended it is not a loss, and another is killed."""
    for _ in range(10):
        wait_for(lambda: children(serving.process.pid))
        worker = children(serving.process.pid)[0]
        os.kill(worker, signal.SIGKILL)
        time.sleep(3)
        if any("signal SIGKILL" in str(event.data.get("why")) for _, _, told in jobs.values() for event in told):
            return


def done_states(jobs) -> list[str]:
    return [client.job(job.id).state for client, job, _ in jobs.values()]
