"""Choose the blocks of a launch that are run at full size, and lengths that represent longer ones."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

import numpy as np

Grid = tuple[int, int, int]

DRAWN = 32
"""number of blocks drawn by seed, in addition to those at the ends of the grid"""
_ALIASES = (1 << 8, 1 << 16)
"""numbers of values of an 8-bit and a 16-bit index"""


def chosen_blocks(grid: Grid, seed: int, drawn: int = DRAWN, step: int = 1) -> list[int]:
    """Return numbers of blocks, x running fastest, in whole clusters of `step`.

    These are the last, the first, the last along each axis, those that an index truncated to 8 or 16 bits confuses with
    the last, the one in the middle, and `drawn` by seed.
    """
    x, y, _ = grid
    total = prod(grid)
    strides = (1, x, x * y)
    ends = [total - 1, 0, *(size * stride - stride for size, stride in zip(grid, strides, strict=True))]
    aliases = [total - 1 - values * stride for stride in strides for values in _ALIASES]
    wanted = [*ends, *(block for block in aliases if block >= 0), total // 2, *draw_blocks(grid, seed, drawn)]
    return in_clusters(wanted, step)


def draw_blocks(grid: Grid, seed: int, count: int) -> list[int]:
    """Return that many unlike blocks, or all where there are no more."""
    total, rng = prod(grid), np.random.default_rng(seed)
    if total <= 4 * count:
        return [int(block) for block in rng.permutation(total)[:count]]
    found: dict[int, None] = {}
    while len(found) < count:
        found[int(rng.integers(total))] = None
    return list(found)


def in_clusters(blocks: Iterable[int], step: int) -> list[int]:
    """Return the first block of each one's cluster, every cluster once."""
    return list(dict.fromkeys(block // step * step for block in blocks))


def few(length: int, tile: int, tiles: int) -> int:
    """Return a length of at most so many tiles, the last of which ends as that of `length` does."""
    return length if length <= tiles * tile else (tiles - 1) * tile + 1 + (length - 1) % tile
