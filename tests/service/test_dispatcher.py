"""The thread that runs jobs outlives whatever one of its steps raises; a job that it cannot start goes back."""

from __future__ import annotations

import errno
import os
import subprocess
import sys

import pytest

from evoengine.errors import MachineError
from evoengine.service import executors as dispatching
from evoengine.service.executors import Dispatcher, Executors, Slot
from evoengine.service.jobs import QUEUED, RUNNING, Jobs
from tests.service.test_takeover import PATIENCE, request, states
from tests.support.waiting import wait_for

SLEEPER = [sys.executable, "-c", "import time; time.sleep(300)"]


@pytest.fixture
def jobs(ledger) -> Jobs:
    return Jobs(ledger)


@pytest.fixture
def dispatch(ledger, monkeypatch):
    """Starts a dispatcher of two slots whose jobs' processes `start` starts, and ends it after the test."""
    monkeypatch.setattr(dispatching, "TICK_SECONDS", 0.01)
    monkeypatch.setattr(dispatching, "GIVE_BACK_SECONDS", 0.1)
    started, said = [], []

    def make(start=lambda job, slot: sleeper(), say=said.append):
        monkeypatch.setattr(Dispatcher, "_start", lambda self, job, slot: start(job, slot))
        made = Dispatcher(ledger, [Slot(0), Slot(1)], PATIENCE, say)
        started.append(made)
        made.said = said
        made.start()
        return made

    yield make
    for each in started:
        each.stop()
        each.executors.leave()


def sleeper() -> subprocess.Popen:
    return subprocess.Popen(SLEEPER)


def fail(number):
    raise OSError(number, os.strerror(number))


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.ENOSPC])
def test_a_job_that_cannot_be_started_goes_back_and_the_rest_goes_on(jobs, dispatch, number):
    bad = jobs.submit(request(), 0, None, 100).id
    dispatcher = dispatch(lambda job, slot: fail(number) if job.id == bad else sleeper())
    wait_for(lambda: QUEUED in states(jobs, bad)[1:])
    assert states(jobs, bad)[:3] == [QUEUED, RUNNING, QUEUED]
    told = [event.data["why"] for event in jobs.events(bad) if event.event == "state" and event.data["why"]]
    assert set(told) == {f"its process could not be started: {os.strerror(number)}"}
    good = jobs.submit(request(priority=5), 0, None, 100).id
    wait_for(lambda: jobs.find(good).state == RUNNING)
    assert dispatcher.is_alive() and dispatcher.works


def test_a_slot_rests_longer_each_time_and_is_tried_again(jobs, dispatch, monkeypatch):
    monkeypatch.setattr(dispatching, "REST_SECONDS", 0.02)
    failures = iter(range(4))
    number = jobs.submit(request(), 0, None, 100).id
    dispatcher = dispatch(lambda job, slot: fail(errno.EAGAIN) if next(failures, None) is not None else sleeper())
    wait_for(lambda: jobs.find(number).state == RUNNING and dispatcher._running)
    assert states(jobs, number) == [QUEUED, *[RUNNING, QUEUED] * 4, RUNNING]
    rested = [rest.seconds for rest in dispatcher._rests.values()]
    assert all(seconds <= 0.04 for seconds in rested)  # the other slot's; the one that started it rests no more


def test_what_the_database_could_not_be_told_is_told_when_it_is_back(jobs, dispatch, monkeypatch):
    number, away = jobs.submit(request(), 0, None, 100).id, [True]
    give_back = Executors.give_back

    def give_back_later(self, *args):
        if away:
            raise MachineError("the database is away")
        give_back(self, *args)

    monkeypatch.setattr(Executors, "give_back", give_back_later)
    dispatcher = dispatch(lambda job, slot: fail(errno.EAGAIN))
    wait_for(lambda: dispatcher._owed)
    wait_for(lambda: "cannot take jobs: the database is away" in dispatcher.said)
    assert jobs.find(number).state == RUNNING
    away.clear()
    wait_for(lambda: QUEUED in states(jobs, number)[1:])


@pytest.mark.parametrize("step", ["_reap", "_beat", "_fill_one"])
def test_whatever_a_step_raises_the_next_one_follows(jobs, dispatch, monkeypatch, step):
    left, real = [1, 2, 3], getattr(Dispatcher, step)

    def failing(self, *args):
        if left:
            left.pop()
            raise RuntimeError("nobody thought of this")
        return real(self, *args)

    monkeypatch.setattr(Dispatcher, step, failing)
    number = jobs.submit(request(), 0, None, 100).id
    dispatcher = dispatch()
    wait_for(lambda: not left and jobs.find(number).state == RUNNING)
    assert dispatcher.said.count("cannot take jobs: RuntimeError: nobody thought of this") == 1


def test_a_standard_error_on_a_full_disk_ends_no_dispatcher(jobs, dispatch):
    number = jobs.submit(request(), 0, None, 100).id
    dispatcher = dispatch(say=lambda line: fail(errno.ENOSPC))
    wait_for(lambda: jobs.find(number).state == RUNNING)
    assert dispatcher.works


def test_a_job_whose_process_is_killed_by_a_signal_without_a_name_is_tried_again(jobs, dispatch):
    number = jobs.submit(request(), 0, None, 100).id
    dispatcher = dispatch()
    wait_for(lambda: dispatcher._running)
    dispatcher._running[number].process.send_signal(35)
    wait_for(lambda: states(jobs, number).count(RUNNING) == 2)
    assert f"job {number}: its process ended by signal 35" in dispatcher.said


def test_a_server_is_ready_only_as_long_as_its_dispatcher_works(service, dispatch, monkeypatch):
    dispatcher = dispatch()
    app = service()
    app.state.dispatches = lambda: dispatcher.works
    assert app.http.get("/readyz").status_code == 200
    monkeypatch.setattr(dispatching, "STILL_SECONDS", -1.0)
    answer = app.http.get("/readyz")
    assert (answer.status_code, answer.json()["detail"]) == (
        503, "the dispatcher, which runs jobs, has stopped or is stuck",
    )  # fmt: skip
    assert app.http.get("/livez").status_code == 200
    monkeypatch.setattr(dispatching, "STILL_SECONDS", 60.0)
    monkeypatch.setattr(dispatcher, "is_alive", lambda: False)
    assert app.http.get("/readyz").status_code == 503


def test_a_jobs_process_whose_server_was_killed_while_it_started_does_nothing(tmp_path):
    """Of a ledger that is not there it would have to say so."""
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    command = [sys.executable, "-m", "evoengine.service.work", "1", "1", "cpu"]
    environment = {**os.environ, "EVOENGINE_DB": str(tmp_path / "none.db")}
    ended, living = (
        subprocess.run([*command, str(server)], env=environment, capture_output=True, text=True)
        for server in (gone.pid, os.getpid())
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert living.returncode != 0 and "none.db" in living.stderr
