"""A run that goes on: what it had counts, what was in flight is tried again, and what may be to blame for kills runs
alone."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from datetime import timedelta
from threading import Event

import pytest

from benchmarks import instant
from evoengine.ledger import runs
from evoengine.ledger.store import open_ledger
from evoengine.records import Outcome
from evoengine.search.coordinator import Coordinator
from tests.ledger.test_processes import stand_still

SIZE = 20


class CountingJudge(instant.InstantJudge):
    """Notes how many candidates are in flight whenever one comes."""

    def __init__(self) -> None:
        super().__init__(None, 1.0)
        self._threads = ThreadPoolExecutor(8)
        self._shared = Event()
        self.in_flight: list[Future] = []
        self.seen: list[tuple[int, int]] = []
        """number, and how many others were in flight"""

    queue_depth = 4

    def submit(self, job, workers, whole) -> Future:
        others = sum(not future.done() for future in self.in_flight)
        self.seen.append((instant.number_of(job.contender.config), others))
        if others:
            self._shared.set()
        future = super().submit(job, workers, whole)
        self.in_flight.append(future)
        return future

    def _judge(self, job):
        may_run_alone = len(self.seen) <= 2
        if not may_run_alone:
            self._shared.wait(60)  # on a busy machine each would be over before the next comes
        return super()._judge(job)


class Run:
    """A run of all numbers, of which some processes have come to an end."""

    def __init__(self, folder):
        self.path = str(folder / "evo.db")
        self.ledger = open_ledger(self.path, create=True)
        self.setting = instant.make_setting(folder, SIZE, SIZE, 1, "random", 4)
        self.configs = list(self.setting.space.enumerate())
        self.begun = instant.start(self.ledger, self.setting, lambda line: None)

    def begin(self, number, retry_of=None) -> int:
        target = (self.begun.run, instant.PROBLEM, instant.GPU)
        return self.ledger.add_candidate(*target, self.configs[number], (), "random", None, retry_of)

    def kill(self) -> None:
        self.ledger.database._fences.clear()
        stand_still(self.path, self.begun.run)
        self.ledger.look_for_killed()

    def goes_on(self, judge=None, **changes):
        setting = replace(self.setting, **changes)
        begun = instant.start(self.ledger, self.setting, lambda line: None)
        assert begun.run == self.begun.run
        with instant.compiling_nothing():
            searched = Coordinator(
                setting, self.ledger, begun.run, judge or CountingJudge(), lambda progress: None, lambda trial: None,
                spent=begun.spent,
            )  # fmt: skip
            return searched.search()

    def judged(self) -> list[int]:
        return sorted(instant.number_of(c.config) for c in self.ledger.candidates() if c.outcome and c.outcome.judged)


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "LOOK_AGAIN_SECONDS", 0.0)
    run = Run(tmp_path)
    with closing(run.ledger):
        yield run


def test_what_was_under_way_comes_first_and_every_number_is_judged_once(run):
    trials = {run.begin(n): n for n in (5, 7)}
    run.kill()
    judge = CountingJudge()
    assert run.goes_on(judge).done == SIZE
    assert run.judged() == list(range(SIZE))
    assert {n for n, _ in judge.seen[:2]} == {5, 7}
    again = {c.retry_of: instant.number_of(c.config) for c in run.ledger.candidates() if c.retry_of}
    assert again == trials


def test_what_was_killed_twice_runs_with_nothing_beside_it(run):
    first = run.begin(5)
    run.kill()
    instant.start(run.ledger, run.setting, lambda line: None)
    run.begin(5, retry_of=first)
    run.begin(7)
    run.kill()
    judge = CountingJudge()
    run.goes_on(judge)
    assert judge.seen[0] == (5, 0)
    others_when_the_next_came = judge.seen[1][1]
    assert others_when_the_next_came == 0
    assert max(others for _, others in judge.seen) > 0  # later ones share the workers
    assert run.judged() == list(range(SIZE))


def test_a_number_that_its_search_was_killed_over_too_often_is_not_tried_again_and_has_no_verdict(run):
    trial = None
    for _ in range(runs.RETRIES + 1):
        trial = run.begin(5, retry_of=trial)
        run.kill()
        instant.start(run.ledger, run.setting, lambda line: None)
    run.ledger.finish_run(run.begun.run, "interrupted")
    judge = CountingJudge()
    progress = run.goes_on(judge)
    assert 5 not in [n for n, _ in judge.seen]
    assert progress.outcomes == {Outcome.ESTIMATED: SIZE - 1}
    assert run.judged() == [n for n in range(SIZE) if n != 5]


def test_trials_and_minutes_of_before_count(run):
    with run.ledger.database.writing() as session:
        session.get_one(runs.HeartbeatRow, run.begun.run).began_at -= timedelta(seconds=100)
    run.ledger.finish_run(run.begun.run, "interrupted")
    progress = run.goes_on(seconds=90.0)
    assert (progress.ended, progress.done) == ("time is up", 0)


def test_a_duplicate_of_what_was_under_way_does_not_stand_for_it(run):
    """Its twin has to be evaluated all the same."""
    first = run.begin(5)
    twin = run.begin(6)
    run.ledger.finish(twin, Outcome.DUPLICATE, f"renders the same source as trial {first}", None, None)
    run.kill()
    run.goes_on()
    ends = {instant.number_of(c.config): c.outcome for c in run.ledger.candidates() if c.outcome.judged}
    assert ends[5] is Outcome.ESTIMATED
