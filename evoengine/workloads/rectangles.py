"""Cases at full size for kernels each of whose blocks writes rectangles of every output, mostly a single one.

Offsets beyond 32 bits, indices of 8 or 16 bits, and the way from a block's number to its place show at the problem's
own size alone. So blocks of the problem itself are run, over tensors that exist in part.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import Any, Generic, Literal

from evoengine.devices.pool import ChosenBlock
from evoengine.records import Config, Launch
from evoengine.workloads.base import P
from evoengine.workloads.blocks import chosen_blocks, draw_blocks, in_clusters

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
    """the part of the problem's own extent that it has, where all of it takes too long"""
    cluster: int = 1
    """number of blocks that run together; the first of them stands for all"""
    visits: int = 1
    """rectangles at most that a block writes, one after the other"""
    tile_bytes: int = 0
    """of inputs for one of several rectangles, with those that are read ahead"""


def choose_blocks(case: FullCase[Any], launch: Launch, seed: int) -> list[ChosenBlock]:
    """Return the blocks to run, each with what it may read: enough for all its rectangles, or for the first."""
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
    # the last block goes through all its rectangles
    follow = case.blocks == "many"
    limit = case.visits * case.tile_bytes if follow else case.tile_bytes
    return [ChosenBlock(first, limit, follow), *(ChosenBlock(number, case.tile_bytes, False) for number in others)]
