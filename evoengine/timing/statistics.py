"""Statistics of samples: intervals of medians, comparison of two kernels, stopping rules. Independent of a GPU.

Samples are microseconds. Two contenders are compared by the ratios of samples of the same rounds, so that a drift of
the clocks, which affects both alike, cancels.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache

import numpy as np

MIN_SAMPLES = 10
"""minimum number of repetitions of a trusted figure"""
MOST = 300
TARGET_REL_CI = 0.005
"""a median is final when its 95 % interval lies within this fraction of it"""
PLATEAU = (40, 0.9)
"""from this many repetitions on: an interval still this fraction of what the first half gave will not shrink further"""
BUDGET_US = 2e6
"""limit of one contender's own time, once it has MIN_SAMPLES repetitions"""
SAME_WITHIN = 0.0025
"""two kernels whose ratio lies within this fraction of 1 are the same: registers then say more than time"""
EARLY_STOP = ((3, 1.5), (5, 1.2), (8, 1.06))
"""(repetitions, factor): beaten when each of the first so many took longer than the incumbent's by the factor"""
ERROR_RATE = 0.05
"""how often an interval may miss the truth: they are 95 % intervals"""


def median_interval(samples: Sequence[float], error_rate: float = ERROR_RATE, tick: float = 0.0) -> tuple[float, float]:
    """Return the median's confidence interval from order statistics, for any distribution (the sign test inverted).

    `tick` is the step of the timer in units of a sample: rounding moves a median by at most half of it, by which the
    interval is widened. Too few samples (six for 95 %) give the interval from 0 to infinity.
    """
    rank = _rank(len(samples), error_rate)
    if rank == 0:
        return 0.0, math.inf
    ordered = np.sort(samples)
    return float(ordered[rank - 1]) - tick / 2, float(ordered[-rank]) + tick / 2


@cache
def _rank(count: int, error_rate: float) -> int:
    """Return the largest r for which the r-th smallest and r-th largest of `count` samples enclose the median."""
    tail, rank = 0.0, 0
    while rank < count:
        tail += math.comb(count, rank) / 2**count
        if 2 * tail > error_rate:
            break
        rank += 1
    return rank


def spread(samples: Sequence[float], tick: float = 0.0) -> float:
    """Return half the width of the median's 95 % interval over the median; `tick` as in `median_interval`."""
    low, high = median_interval(samples, tick=tick)
    return (high - low) / 2 / statistics.median(samples)


def stop_reason(samples: Sequence[float], tick: float = 0.0) -> str | None:
    """Return why these samples are enough, or None if they are not; `tick` as in `median_interval`."""
    if len(samples) < MIN_SAMPLES:
        return None
    if (width := spread(samples, tick)) <= TARGET_REL_CI:
        return "precise"
    if len(samples) >= PLATEAU[0] and width >= PLATEAU[1] * spread(samples[: len(samples) // 2], tick):
        return "steady"
    if len(samples) >= MOST or sum(samples) >= BUDGET_US:
        return "capped"
    return None


def clearly_slower(ours: Sequence[float], incumbents: Sequence[float]) -> bool:
    """Return whether a candidate is clearly slower than the incumbent, so that more repetitions would be wasted."""
    for count, factor in EARLY_STOP:
        if len(ours) == count:
            return all(a > factor * b for a, b in zip(ours, incumbents, strict=True))
    return False


# ── figures within their rounds ─────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Estimate:
    """A median with its interval."""

    median: float
    low: float
    high: float


def paired_ratio(ours: Sequence[float], theirs: Sequence[float], error_rate: float = ERROR_RATE) -> Estimate:
    """Return the median of `ours` over `theirs`, sample by sample of the same rounds: below 1 if ours is faster.

    Raises ValueError if their numbers differ, since they are then not of the same rounds.
    """
    if len(ours) != len(theirs):
        raise ValueError(f"paired samples must be equally many, not {len(ours)} and {len(theirs)}")
    ratios: list[float] = np.divide(ours, theirs).tolist()
    return Estimate(float(np.median(ratios)), *median_interval(ratios, error_rate))


def normalised_median(
    samples: Sequence[float], baseline_samples: Sequence[float], baseline_long_run_us: float
) -> Estimate:
    """Return the time in microseconds by which figures of different moments are compared, with its 95 % interval.

    It is the paired ratio to a baseline of the same rounds, times the baseline's long-run median: variations of the
    clock during these rounds cancel out, as if both had been timed over the long run.
    """
    ratio = paired_ratio(samples, baseline_samples)
    return Estimate(*(value * baseline_long_run_us for value in (ratio.median, ratio.low, ratio.high)))


class Comparison(StrEnum):
    FASTER = "faster"
    SLOWER = "slower"
    SAME = "same"
    NOT_DISTINGUISHED = "not distinguished"


def compare(ratio: Estimate) -> Comparison:
    """Classify a paired ratio.

    The result is "same" if the whole interval lies within SAME_WITHIN of 1, and faster or slower if it excludes 1.
    """
    if ratio.low >= 1 - SAME_WITHIN and ratio.high <= 1 + SAME_WITHIN:
        return Comparison.SAME
    if ratio.high < 1:
        return Comparison.FASTER
    if ratio.low > 1:
        return Comparison.SLOWER
    return Comparison.NOT_DISTINGUISHED
