"""The statistics of timing: how long to repeat, what to drop, which of two kernels is faster. Knows no GPU.

Samples are microseconds. Contenders are timed in rounds, one repetition each in an order drawn anew, so that a drift of
the clocks meets all of them alike; whatever is compared is compared round by round.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache

import numpy as np

from evoengine.devices.nvml import Reading

FEWEST = 10
"""repetitions that a figure to be believed rests on"""
MOST = 300
PRECISE = 0.005
"""a median is settled when its 95 % interval lies within this fraction of it"""
STEADY = (40, 0.9)
"""from this many repetitions on: an interval still this fraction of what the first half gave will not shrink further"""
BUDGET_US = 2e6
"""of one contender's own time, once it has the fewest repetitions"""
RESOLUTION = 0.005
"""smaller differences are not claimed, however many repetitions seem to show them"""
RACE = ((3, 1.5), (5, 1.2), (8, 1.06))
"""(repetitions, factor): beaten when each of the first so many took longer than the incumbent's by the factor"""
_CONFIDENCE = 0.95


@dataclass(slots=True)
class Rounds:
    """Samples by contender, the i-th of each from the same round."""

    samples: dict[str, list[float]]
    readings: list[Reading] = field(default_factory=list)
    throttled: int = 0
    """rounds dropped because the GPU held its clocks back"""
    ended: str = ""


class Comparison(StrEnum):
    FASTER = "faster"
    SLOWER = "slower"
    SAME = "same"
    AMBIGUOUS = "ambiguous"

    @property
    def told_apart(self) -> bool:
        return self in (Comparison.FASTER, Comparison.SLOWER)


def run_rounds(
    contenders: Mapping[str, Callable[[], float]],
    rng: np.random.Generator,
    enough: Callable[[Mapping[str, list[float]]], str | None],
    sense: Callable[[], Reading | None] = lambda: None,
) -> Rounds:
    """Repeats rounds until `enough` gives a reason to end, or as many as MOST were lost to throttling.

    A contender is a call that runs it once and gives its microseconds.
    """
    rounds = Rounds({name: [] for name in contenders})
    names = list(contenders)
    while rounds.throttled < MOST:
        taken = {names[i]: contenders[names[i]]() for i in rng.permutation(len(names))}
        reading = sense()
        if reading and reading.throttled:
            rounds.throttled += 1
            continue
        if reading:
            rounds.readings.append(reading)
        for name, microseconds in taken.items():
            rounds.samples[name].append(microseconds)
        if why := enough(rounds.samples):
            rounds.ended = why
            return rounds
    rounds.ended = "throttled"
    return rounds


def settled(samples: Sequence[float]) -> str | None:
    """Why these samples are enough, or None while they are not."""
    if len(samples) < FEWEST:
        return None
    if (width := spread(samples)) <= PRECISE:
        return "precise"
    if len(samples) >= STEADY[0] and width >= STEADY[1] * spread(samples[: len(samples) // 2]):
        return "steady"
    if len(samples) >= MOST or sum(samples) >= BUDGET_US:
        return "capped"
    return None


def spread(samples: Sequence[float]) -> float:
    """Half the width of the median's 95 % interval over the median."""
    low, high = median_interval(samples)
    return (high - low) / 2 / statistics.median(samples)


def median_interval(samples: Sequence[float]) -> tuple[float, float]:
    """The median's 95 % confidence interval from order statistics, whatever the distribution (the sign test inverted).

    Fewer than six samples give none: 0 to infinity.
    """
    rank = _rank(len(samples))
    if rank == 0:
        return 0.0, math.inf
    ordered = sorted(samples)
    return ordered[rank - 1], ordered[-rank]


@cache
def _rank(count: int) -> int:
    """The largest r for which the r-th smallest and r-th largest of `count` samples hold the median in between."""
    tail, rank = 0.0, 0
    while rank < count:
        tail += math.comb(count, rank) / 2**count
        if 2 * tail > 1 - _CONFIDENCE:
            break
        rank += 1
    return rank


def compare(ours: Sequence[float], theirs: Sequence[float]) -> Comparison:
    """How `ours` compares with `theirs`, sample by sample of the same rounds.

    Faster or slower where the interval of the ratio lies wholly beyond RESOLUTION; the same where it lies within half
    of it around 1; otherwise it cannot be said.
    """
    low, high = median_interval([a / b for a, b in zip(ours, theirs, strict=True)])
    if high < 1 - RESOLUTION:
        return Comparison.FASTER
    if low > 1 + RESOLUTION:
        return Comparison.SLOWER
    if low <= 1 <= high and 1 - RESOLUTION / 2 <= low and high <= 1 + RESOLUTION / 2:
        return Comparison.SAME
    return Comparison.AMBIGUOUS


def beaten(ours: Sequence[float], incumbents: Sequence[float]) -> bool:
    """Whether a candidate is plainly slower than the incumbent, so that more repetitions would be a waste."""
    for count, factor in RACE:
        if len(ours) == count:
            return all(a > factor * b for a, b in zip(ours, incumbents, strict=True))
    return False


@dataclass(frozen=True, slots=True)
class Ranking:
    """Finalists best first; `tied` cannot be told from the fastest; the first is the one of them that takes least."""

    order: tuple[str, ...]
    tied: tuple[str, ...]


def rank(samples: Mapping[str, Sequence[float]], registers: Mapping[str, int]) -> Ranking:
    """Ranks by median; among those that can't be told from the fastest, the one with the fewest registers wins."""
    by_median = sorted(samples, key=lambda name: statistics.median(samples[name]))
    fastest = by_median[0]
    tied = [n for n in by_median if n == fastest or not compare(samples[n], samples[fastest]).told_apart]
    winner = min(tied, key=lambda name: registers[name])
    return Ranking((winner, *(n for n in by_median if n != winner)), tuple(tied) if len(tied) > 1 else ())
