"""Blocks that may share a tile through memory: those that differ along some axes of the grid, or neighbours in a row.

Which of these a kernel has is not known from its text. A small launch shows it: groups that give the right results
there, each without all other blocks, have no need of others at full size either.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Literal

import numpy as np

from evoengine.records import Config

Grid = tuple[int, int, int]
MOST = 64
"""limit of the blocks of a group"""
_WAYS = 6
"""limit of the ways that are tried"""


@dataclass(frozen=True, slots=True)
class Grouping:
    """One way to take all blocks of a grid in groups of one size."""

    by: Literal["axis", "neighbours", "stride"]
    number: int
    """`axis`: a group's blocks have the same index along it; else the blocks of a group"""

    def size(self, grid: Grid) -> int:
        """Return the blocks of a group; 0 where the grid cannot be cut so."""
        total = prod(grid)
        size = total // grid[self.number] if self.by == "axis" else self.number
        return size if 1 < size <= MOST and total % size == 0 and total > size else 0

    def members(self, grid: Grid, group: int) -> list[int]:
        """Return the numbers of a group's blocks, x running fastest."""
        if self.by == "axis":
            along = [range(group, group + 1) if axis == self.number else range(n) for axis, n in enumerate(grid)]
            return [(z * grid[1] + y) * grid[0] + x for z, y, x in product(*reversed(along))]
        if self.by == "neighbours":
            return list(range(group * self.number, (group + 1) * self.number))
        return list(range(group, prod(grid), prod(grid) // self.number))


def groupings(small: Grid, grid: Grid, config: Config) -> list[Grouping]:
    """Return ways to group the blocks of a small launch and of a large one, the likeliest first.

    Runs and strides are as long as some knob says.
    """
    lengths = sorted({value for value in config.values() if isinstance(value, int) and 1 < value <= MOST})
    ways = [Grouping("axis", axis) for axis in range(3)]
    for length in lengths:
        ways += [Grouping("neighbours", length), Grouping("stride", length)]
    return [way for way in ways if way.size(small) and way.size(grid)][:_WAYS]


def chosen_groups(groups: int, most: int, seed: int) -> list[int]:
    """Return the last group, the first, and drawn ones, `most` at most."""
    drawn = np.random.default_rng(seed).integers(groups, size=most).tolist()
    return list(dict.fromkeys([groups - 1, 0, groups // 2, *drawn]))[:most]
