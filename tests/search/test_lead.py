"""The candidate that leads a search without a GPU: judged to the end once it has led for a while."""

from __future__ import annotations

from concurrent.futures import Future
from contextlib import closing
from dataclasses import replace

import pytest

from benchmarks import instant
from evoengine.ledger.store import open_ledger
from evoengine.records import EXECUTOR, Judged, Outcome
from evoengine.search.coordinator import Coordinator
from evoengine.search.finishing import MIN_TRIALS_BEHIND
from evoengine.stages.tasks import Evaluation

TRIALS = 24


class ShortJudge(instant.InstantJudge):
    """Judges short cases alone, as the executor does; `wrong` are refuted where they are judged to the end."""

    def __init__(self, wrong=()) -> None:
        super().__init__(None, 0.0)
        self.wrong = set(wrong)
        self.submitted: list[int] = []
        self.finished: list[tuple[int, int]] = []
        """number, and how many had been submitted"""

    def submit(self, job, workers, whole) -> Future:
        assert not whole
        self.submitted.append(instant.number_of(job.contender.config))
        return super().submit(job, workers, whole)

    def _judge(self, job) -> Evaluation:
        found = super()._judge(job)
        return found._replace(verdicts=(replace(found.verdicts[0], whole=False),), whole=False)

    def finish(self, target, job, known, workers) -> Future:
        number = instant.number_of(job.contender.config)
        self.finished.append((number, len(self.submitted)))
        refuted = replace(instant.verdicts()[0], device=EXECUTOR, outcome=Outcome.INCORRECT, reason="a long case")
        done: Future = Future()
        done.set_result(Judged((refuted,)) if number in self.wrong else Judged(instant.verdicts()))
        return done


@pytest.fixture
def searched(tmp_path):
    """searched(wrong) → the judge, what the search came to, and the ledger's best number."""
    ledger = open_ledger(str(tmp_path / "evo.db"), create=True)

    def search(wrong=()):
        setting = instant.make_setting(tmp_path, TRIALS, TRIALS, 1, "random", 1)
        judge = ShortJudge(wrong)
        begun = instant.start(ledger, setting, lambda line: None)
        with instant.compiling_nothing():
            progress = Coordinator(
                setting, ledger, begun.run, judge, lambda progress: None, lambda trial: None
            ).search()
        best = ledger.best(instant.PROBLEM, instant.GPU, top=TRIALS, run=begun.run)
        return judge, progress, [instant.number_of(c.config) for c in best]

    with closing(ledger):
        yield search


def led(numbers):
    """Numbers that led for MIN_TRIALS_BEHIND ended ones or more."""
    times = [instant.microseconds(n) for n in numbers]
    return [
        n
        for i, n in enumerate(numbers[:-MIN_TRIALS_BEHIND])
        if times[i] < min([*times[:i], *times[i + 1 : i + 1 + MIN_TRIALS_BEHIND], 1e9])
    ]


def test_a_leader_is_judged_to_the_end_before_the_search_is_over_and_who_is_overtaken_is_not(searched):
    judge, progress, ranked = searched()
    early = [number for number, begun in judge.finished if begun < TRIALS]
    assert early == [n for n in led(judge.submitted) if n in early] and early
    assert progress.best is not None and ranked[0] == instant.number_of(progress.best.config)
    assert ranked[0] == min(judge.submitted, key=instant.microseconds)
    assert [n for n, _ in judge.finished] == list(dict.fromkeys(n for n, _ in judge.finished))


def test_a_leader_that_is_refuted_leaves_the_lead_to_the_best_that_is_left(searched):
    judge, _, _ = searched()
    first = judge.finished[0][0]
    again, _, ranked = searched(wrong={first})
    assert again.submitted == judge.submitted and again.finished[0] == judge.finished[0]
    second, begun = again.finished[1]
    left = [n for n in again.submitted[: begun - 1] if n != first]
    assert begun < TRIALS and second == min(left, key=instant.microseconds)
    assert first not in ranked


def test_no_refuted_leader_is_ranked(searched):
    best = sorted(range(TRIALS), key=instant.microseconds)
    judge, progress, ranked = searched(wrong=best[:2])
    assert ranked[0] == best[2] and not set(best[:2]) & set(ranked)
    assert progress.outcomes[Outcome.INCORRECT] == 2
    assert instant.number_of(progress.best.config) == best[2]
