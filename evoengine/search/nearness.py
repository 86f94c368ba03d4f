"""The distance between two tuned problems: what was best for a near one is worth trying first."""

from __future__ import annotations

import math
from collections.abc import Iterable

from evoengine.errors import UsageError
from evoengine.gpu import Gpu, known_gpus
from evoengine.workloads import parse_problem

OTHER_WORD = 8.0
"""for a data type or a flag that differs; sizes count by their binary logarithm"""
OTHER_BOARD, OTHER_ARCHITECTURE = 1.0, 32.0
"""for another GPU of the same architecture, and one of another"""


def nearest_first(problem: str, gpu: Gpu, others: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return those of `others` (problem, key of the GPU) with the same workload, nearest first.

    Ties keep their order. One that cannot be compared comes last.
    """
    kernel = problem.partition(":")[0]
    alike = [other for other in others if other[0].partition(":")[0] == kernel]
    return sorted(alike, key=lambda other: distance(problem, other[0]) + _gpu_distance(gpu, other[1]))


def distance(problem: str, other: str) -> float:
    """Return a distance between problems: 0 for the same problem, infinite if one of them cannot be parsed here."""
    if problem == other:
        return 0.0
    try:
        (_, one), (_, two) = parse_problem(problem), parse_problem(other)
    except UsageError:
        return math.inf
    ours, theirs = one.variables(), two.variables()
    if ours.keys() != theirs.keys():
        return math.inf
    return sum(_size_distance(ours[name], theirs[name]) for name in ours)


def _size_distance(one: object, two: object) -> float:
    if one == two:
        return 0.0
    ours, theirs = _size(one), _size(two)
    return OTHER_WORD if ours is None or theirs is None else abs(math.log2(ours / theirs))


def _size(value: object) -> float | None:
    """Return a positive number, or None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if value > 0 else None


def _gpu_distance(gpu: Gpu, other: str) -> float:
    if other == gpu.key:
        return 0.0
    known = known_gpus().get(other)
    return OTHER_BOARD if known is not None and known.arch == gpu.arch else OTHER_ARCHITECTURE
