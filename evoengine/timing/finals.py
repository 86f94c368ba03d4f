"""Decide finals among the best: who is retired early, when to stop, and who wins. Independent of a GPU.

Samples are examined after fixed numbers of rounds (LOOKS). Every interval is so wide that all of them together, over
all pairs and all looks, miss a true value in at most 5 % of finals (Bonferroni's inequality): repeated examination
would otherwise find a winner among equals.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from evoengine.devices.nvml import Reading
from evoengine.timing.rounds import Rounds, Timed, run_rounds
from evoengine.timing.statistics import ERROR_RATE, Comparison, Estimate, compare, paired_ratio

LOOKS = (14, 20, 30, 45, 68, 102, 153, 230, 345, 518, 777, 1166, 1749)
"""rounds after which the samples are examined. At the first, the sign test can show a difference among eight finalists;
each is half again as many as the one before, so that at most a third of the time comes after the decision"""
BUDGET_US = 20e6
"""GPU time for all repetitions together; it ends finals of slow kernels, but not before the first look"""


def error_rate(finalists: int) -> float:
    """Return the error rate of the interval of one pair at one look."""
    pairs = max(1, finalists * (finalists - 1) // 2)
    return ERROR_RATE / pairs / len(LOOKS)


@dataclass(frozen=True, slots=True)
class Ranking:
    """Finalists best first. All that is said of pairs holds together with 95 % confidence.

    `tied` are the fastest and those shown to be the same; of these the first of `order` has the fewest registers.
    `open` could not be distinguished from the fastest within the budget. `lead` is the time of the first over that of
    the second; None if there is one finalist alone.
    """

    order: tuple[str, ...]
    tied: tuple[str, ...]
    open: tuple[str, ...]
    lead: Estimate | None


class SuccessiveRejects:
    """Retire a finalist once another is shown to be faster; end when the fastest is distinguished from the rest.

    Audibert, Bubeck and Munos, "Best arm identification in multi-armed bandits" (COLT 2010), reject the worst arm after
    each of several phases; here an arm is rejected when it is shown to be slower, so that equals stay.
    `retire` and `enough` go to `run_rounds`, where samples of more than the finalists may be taken: the baseline's.
    """

    def __init__(self, finalists: Sequence[str]) -> None:
        self._active = list(finalists)
        self._error_rate = error_rate(len(finalists))
        self._ended: str | None = None

    def retire(self, samples: Mapping[str, Sequence[float]]) -> list[str]:
        """Return the finalists shown at this look to be slower than the fastest."""
        rounds = len(samples[self._active[0]])
        if rounds not in LOOKS:
            return []
        fastest = fastest_of({name: samples[name] for name in self._active})
        found = {
            name: compare(paired_ratio(samples[name], samples[fastest], self._error_rate))
            for name in self._active
            if name != fastest
        }
        slower = [name for name, comparison in found.items() if comparison is Comparison.SLOWER]
        self._active = [name for name in self._active if name not in slower]
        self._ended = self._why_ended(samples, rounds, Comparison.NOT_DISTINGUISHED in found.values())
        return slower

    def enough(self, samples: Mapping[str, Sequence[float]]) -> str | None:
        """Return why the finals end, or None. Call it after `retire`, as `run_rounds` does."""
        return self._ended

    def _why_ended(self, samples: Mapping[str, Sequence[float]], rounds: int, undecided: bool) -> str | None:
        if not undecided:
            return "decided"
        if rounds == LOOKS[-1]:
            return "capped"
        further = LOOKS[LOOKS.index(rounds) + 1] - rounds
        spent = sum(map(sum, samples.values()))
        a_round = sum(own[-1] for own in samples.values() if len(own) == rounds)
        return "capped" if spent + further * a_round > BUDGET_US else None


def run_finals(
    contenders: Mapping[str, Timed],
    finalists: Sequence[str],
    rng: np.random.Generator,
    sense: Callable[[], Reading | None] = lambda: None,
    sleep: Callable[[float], None] = time.sleep,
) -> Rounds:
    """Run the rounds that decide among `finalists`; further contenders, such as a baseline, take part in each round.

    If the output of a finalist is wrong, the finals start again without it: `wrong` lists all such finalists, and
    `samples` has none of theirs.
    """
    wrong: dict[str, str] = {}
    while True:
        left = [name for name in finalists if name not in wrong]
        timed = {name: contender for name, contender in contenders.items() if name not in wrong}
        if not left:
            return Rounds({name: [] for name in timed}, wrong=wrong, ended="wrong")
        rejects = SuccessiveRejects(left)
        rounds = run_rounds(timed, rng, rejects.enough, sense, rejects.retire, sleep)
        wrong |= rounds.wrong
        if not rounds.wrong:
            rounds.wrong = wrong
            return rounds


def fastest_of(samples: Mapping[str, Sequence[float]]) -> str:
    """Return the fastest by the median of its times, each divided by the geometric mean of its round.

    All must have the same number of samples.
    """
    logs = np.log(np.array(list(samples.values())))
    normalised = logs - logs.mean(axis=0)
    return list(samples)[int(np.argmin(np.median(normalised, axis=1)))]


def rank(samples: Mapping[str, Sequence[float]], registers: Mapping[str, int]) -> Ranking:
    """Return the ranking at the end of the finals, from the finalists' samples as `run_rounds` leaves them.

    They are ranked by the median ratio to the fastest in the rounds that both took part in. Among those shown to be as
    fast as the fastest, fewer registers win.
    """
    rate = error_rate(len(samples))
    most = max(map(len, samples.values()))
    remaining = {name: own for name, own in samples.items() if len(own) == most}
    fastest = fastest_of(remaining)
    ratios = {n: _ratio(samples[n], samples[fastest], rate) for n in samples if n != fastest}
    by_ratio = [fastest, *sorted(ratios, key=lambda n: (n not in remaining, ratios[n].median))]
    shown = {n: compare(ratios[n]) for n in by_ratio if n in remaining and n != fastest}
    tied = [fastest, *(n for n, comparison in shown.items() if comparison is Comparison.SAME)]
    winner = min(tied, key=lambda n: registers[n])
    order = (winner, *(n for n in by_ratio if n != winner))
    return Ranking(
        order,
        tuple(tied) if len(tied) > 1 else (),
        tuple(n for n, comparison in shown.items() if comparison is Comparison.NOT_DISTINGUISHED),
        _ratio(samples[winner], samples[order[1]], rate) if len(order) > 1 else None,
    )


def _ratio(ours: Sequence[float], theirs: Sequence[float], rate: float) -> Estimate:
    """Return the ratio over the rounds that both took part in, which are the first ones."""
    both = min(len(ours), len(theirs))
    return paired_ratio(ours[:both], theirs[:both], rate)
