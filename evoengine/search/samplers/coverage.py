"""The coverage of a pool by the trials, in pairs of values.

What a configuration reaches often depends on a few knobs together, and a pair of values that no trial has had together
may be what the best ones share: the idea of combinatorial testing (Kuhn, Wallace & Gallo 2004). Only knobs of few
values take part: of two with many, no search covers the pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import numpy as np

from evoengine.space.definition import Knob

MAX_PAIR_VALUES = 4
"""maximum number of values of a knob that takes part, not counting the inactive one"""
PRIOR = 4.0
"""pseudo-count added to the observed and to the even number of trials of a pair, so that few trials do not decide"""


class Coverage:
    """Rows are int16 [n, knobs], positions in the knobs' domains, -1 where inactive."""

    def __init__(self, knobs: Sequence[Knob]) -> None:
        few = [
            k
            for k, knob in enumerate(knobs)
            if len(knob.values) <= MAX_PAIR_VALUES and (len(knob.values) > 1 or knob.when)
        ]
        self._pairs = np.array([*combinations(few, 2)], int).reshape(-1, 2)
        self._tried = np.zeros((len(self._pairs), (MAX_PAIR_VALUES + 1) ** 2))

    def add(self, row: np.ndarray) -> None:
        """Count a trial [knobs]."""
        self._tried[np.arange(len(self._pairs)), self._cells(row[None])[:, 0]] += 1

    def set_pool(self, pool: np.ndarray) -> None:
        """Set the rows to be scored, at least one."""
        self._pool_cells = self._cells(pool)
        self._share = np.zeros_like(self._tried)
        for share, cells in zip(self._share, self._pool_cells, strict=True):
            share[:] = np.bincount(cells, minlength=len(share)) / len(pool)

    def pair_coverage(self) -> np.ndarray:
        """Return for each row [n] the least coverage of its pairs of values.

        A pair's coverage is the number of trials with it, divided by the number if trials were spread evenly. It is
        below 1 if the trials had one of the row's pairs more rarely than the pool does; never 0, and 1 without pairs.
        """
        even = self._tried.sum(1, keepdims=True) * self._share
        ratio = (self._tried + PRIOR) / (even + PRIOR)
        if not len(ratio):
            return np.ones(self._pool_cells.shape[1])
        least: np.ndarray = ratio[0][self._pool_cells[0]]
        for of_pair, cells in zip(ratio[1:], self._pool_cells[1:], strict=True):
            np.minimum(least, of_pair[cells], out=least)
        return least

    def _cells(self, rows: np.ndarray) -> np.ndarray:
        """Return the cell of each row for every pair of knobs [pairs, n]."""
        first, second = rows.T[self._pairs[:, 0]] + 1, rows.T[self._pairs[:, 1]] + 1
        cells: np.ndarray = (first * (MAX_PAIR_VALUES + 1) + second).astype(np.uint8)
        return cells
