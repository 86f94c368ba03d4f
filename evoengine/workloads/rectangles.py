"""Cases at full size for kernels each of whose blocks writes one rectangle of every output.

Offsets beyond 32 bits, indices of 8 or 16 bits, and the way from a block's number to its place show at the problem's
own size alone. So a few blocks of the problem itself are run, over tensors that exist in part.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import Any, Generic

import numpy as np

from evoengine.devices.pool import ChosenBlock
from evoengine.records import Config, Launch
from evoengine.workloads.base import P

_ALIASES = (1 << 8, 1 << 16)
"""values of an index of 8 and of 16 bits"""
_RANDOM_BLOCKS = 2
_INPUT_LIMIT = 1 << 28
"""bytes of inputs after which a block is given up: far more than the work of one takes"""


@dataclass(frozen=True, slots=True)
class FullCase(Generic[P]):
    """Some blocks of a launch for `problem`, which has the grid of `whole`, or the last block alone."""

    name: str
    problem: P
    whole: P
    config: Config = field(hash=False)
    last_alone: bool = False


def choose_blocks(case: FullCase[Any], launch: Launch, seed: int) -> list[ChosenBlock]:
    """The last, those that 8 or 16 bits take for it, the last of the first row, the one in the middle, two at
    random."""
    x, y, z = launch.grid
    total = prod(launch.grid)
    aliases = [total - 1 - values * step for step in (1, x, x * y) for values in _ALIASES]
    between = [int(b) for b in np.random.default_rng(seed).integers(total, size=_RANDOM_BLOCKS)]
    wanted = (
        [total - 1] if case.last_alone else [total - 1, *(b for b in aliases if b >= 0), x - 1, total // 2, *between]
    )
    return [ChosenBlock(number, _INPUT_LIMIT, ends=True) for number in dict.fromkeys(wanted)]


def few(length: int, tile: int, tiles: int) -> int:
    """At most so many tiles, the last of which ends as that of `length` does."""
    return length if length <= tiles * tile else (tiles - 1) * tile + 1 + (length - 1) % tile
