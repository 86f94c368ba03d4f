"""Choose the blocks of a launch that are run at full size, and lengths that represent longer ones.

Faults in offsets beyond 32 bits, in indices of 8 or 16 bits, and in the mapping of block numbers to positions occur
only at the problem's own size. Blocks of the problem itself are therefore run, over tensors that exist in part.
`FullCase` is for kernels whose blocks write rectangles of every output, usually one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import prod
from typing import Any, Generic, Literal

import numpy as np

from evoengine.devices.pool import ChosenBlock
from evoengine.records import Config, Launch
from evoengine.workloads.base import P

Grid = tuple[int, int, int]

DRAWN = 32
"""number of blocks drawn by seed, in addition to those at the ends of the grid"""
_ALIASES = (1 << 8, 1 << 16)
"""numbers of values of an 8-bit and a 16-bit index"""


def chosen_blocks(grid: Grid, seed: int, drawn: int = DRAWN, step: int = 1) -> list[int]:
    """Return numbers of blocks, x running fastest, in whole clusters of `step`.

    They are the last, the first, the last along each axis, those that an index truncated to 8 or 16 bits confuses with
    the last, the middle one, and `drawn` by seed.
    """
    x, y, _ = grid
    total = prod(grid)
    strides = (1, x, x * y)
    ends = [total - 1, 0, *(size * stride - stride for size, stride in zip(grid, strides, strict=True))]
    aliases = [total - 1 - values * stride for stride in strides for values in _ALIASES]
    wanted = [*ends, *(block for block in aliases if block >= 0), total // 2, *draw_blocks(grid, seed, drawn)]
    return in_clusters(wanted, step)


def draw_blocks(grid: Grid, seed: int, count: int) -> list[int]:
    """Return that many distinct blocks, or all if there are no more."""
    total, rng = prod(grid), np.random.default_rng(seed)
    if total <= 4 * count:
        return [int(block) for block in rng.permutation(total)[:count]]
    found: dict[int, None] = {}
    while len(found) < count:
        found[int(rng.integers(total))] = None
    return list(found)


def in_clusters(blocks: Iterable[int], step: int) -> list[int]:
    """Return the first block of each block's cluster, every cluster once."""
    return list(dict.fromkeys(block // step * step for block in blocks))


def few(length: int, tile: int, tiles: int) -> int:
    """Return a length of at most so many tiles, whose last tile ends as that of `length` does."""
    return length if length <= tiles * tile else (tiles - 1) * tile + 1 + (length - 1) % tile


def cut(length: int, most: int) -> int:
    """Return a length of at most `most`; a longer one is cut to one that differs from others cut likewise."""
    return length if length <= most else most - most // 2 + length % max(1, most // 2)


_INPUT_LIMIT = 1 << 28
"""bytes of inputs after which a block is aborted, far more than its work needs"""


@dataclass(frozen=True, slots=True)
class FullCase(Generic[P]):
    """Some blocks of a launch for `problem`, which has the grid of `whole` or all of one of its tensors."""

    name: str
    problem: P
    whole: P
    config: Config = field(hash=False)
    blocks: Literal["many", "last", "one drawn"] = "many"
    part: str | None = None
    """the part of the problem's own extent that it has if all of it takes too long"""
    cluster: int = 1
    """number of blocks that run together; the first of them represents all"""
    visits: int = 1
    """maximum number of rectangles that a block writes, one after the other"""
    tile_bytes: int = 0
    """bytes of inputs for one of several rectangles, including those that are read ahead"""
    many_pages: bool = False
    """whether its blocks may touch more pages than the emulator holds, so that only the executor judges it"""
    tiles: int = 0
    """number of tiles that are run, each by all the blocks that share it; 0 where no tile has several blocks"""


def shared_blocks(numbers: Iterable[int], seed: int) -> list[ChosenBlock]:
    """Return blocks that run over the same memory, in an order by seed."""
    order = np.random.default_rng(seed).permutation(sorted(numbers))
    return [ChosenBlock(int(number), _INPUT_LIMIT, ends=True) for number in order]


def chosen_tiles(total: int, count: int, seed: int) -> list[int]:
    """Return at most `count` of `total` tiles, as a kernel counts them.

    They are the last, those that an index truncated to 16 or 8 bits confuses with it, the first, and others by seed.
    """
    aliases = [total - 1 - values for values in reversed(_ALIASES) if values < total]
    return list(dict.fromkeys([total - 1, *aliases, 0, *draw_blocks((total, 1, 1), seed, count)]))[:count]


def choose_blocks(case: FullCase[Any], launch: Launch, seed: int) -> list[ChosenBlock]:
    """Return the blocks to run, each with the limit of its reads: enough for all its rectangles, or for the first."""
    match case.blocks:
        case "last":
            numbers = [prod(launch.grid) - 1]
        case "one drawn":
            numbers = draw_blocks(launch.grid, seed, 1)
        case "many":
            numbers = chosen_blocks(launch.grid, seed)
    first, *others = in_clusters(numbers, case.cluster)
    if case.visits == 1:
        return [ChosenBlock(number, _INPUT_LIMIT, ends=True) for number in (first, *others)]
    # the last block processes all its rectangles
    follow = case.blocks == "many"
    limit = case.visits * case.tile_bytes if follow else case.tile_bytes
    return [ChosenBlock(first, limit, follow), *(ChosenBlock(number, case.tile_bytes, False) for number in others)]
