"""Check whether the stores of some blocks can be those of a launch that covers its outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

from evoengine.devices.base import DTYPE_BYTES, TensorParameter
from evoengine.devices.pool import BlockLaunch, BlockTrace
from evoengine.workloads.base import NothingWritten, WrongBlock
from evoengine.workloads.dtypes import TORCH_DTYPES
from evoengine.workloads.folder_definition import FolderProblem, Item, shape_of

BITS: dict[int, type[np.unsignedinteger[Any]]] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_SIGMAS = 4.0
"""standard deviations of the mean by which the blocks' shares of an output may fall short by chance"""
_LEAST_FITTED = 8
"""minimum number of blocks whose places determine those of others"""

Stored = Mapping[str, tuple[np.ndarray, np.ndarray]]
"""stores of one block: output → the elements' places in it, ascending, and their bits"""


def stored_elements(asked: BlockLaunch, one: BlockTrace) -> Stored:
    """Return the elements of each output that a block stored to: those that are no poison any more."""
    found = {}
    for p in asked.arguments:
        if not isinstance(p, TensorParameter) or not p.output:
            continue
        bits = BITS[DTYPE_BYTES[p.dtype]]
        places, values = [np.empty(0, np.int64)], [np.empty(0, bits)]
        for offset, page in sorted(one.pages[p.name], key=lambda page: page[0]):
            stored = page.view(bits)
            own = np.flatnonzero(stored != np.iinfo(bits).max)
            places.append(own + offset // stored.itemsize)
            values.append(stored[own])
        found[p.name] = np.concatenate(places), np.concatenate(values)
    return found


def check_cover(item: Item, problem: FolderProblem, asked: BlockLaunch, found: Sequence[Stored]) -> None:
    """Raise WrongBlock where the blocks' shares of an output leave some of it out, NothingWritten where all are empty.

    Where all blocks were run that is exact. Else the mean share of the chosen ones, times all blocks, must fall short
    of the output by more than chance explains.
    """
    total, size = prod(asked.launch.grid), prod(shape_of(item, problem))
    parts = [own[item.name][0] for own in found]
    shares = np.array([len(places) for places in parts], np.float64)
    if not shares.any():
        raise NothingWritten(f"none of {len(parts)} blocks wrote any of {item.name}", item.name)
    if len(parts) == total:
        missing = size - len(np.unique(np.concatenate(parts)))
        if missing and TORCH_DTYPES[item.dtype].is_floating_point:  # the poison is a valid integer
            raise WrongBlock(f"{missing} of {size} elements of {item.name} were written by no block")
        return
    most = shares.mean() + _SIGMAS * shares.std() / np.sqrt(len(shares))
    if max(most * total, shares.sum()) < size:
        each = f"{shares.mean():.0f} elements of {item.name} each"
        raise WrongBlock(f"{len(parts)} of {total} blocks wrote {each}: all of them cannot cover its {size}")


def check_idle(item: Item, problem: FolderProblem, asked: BlockLaunch, found: Sequence[Stored]) -> None:
    """Raise WrongBlock where a block wrote nothing although the places of others say where its own is.

    That is where the first index along each dimension of the output is a linear function of the block's place in the
    grid. A grid may have blocks beyond an output's end.
    """
    shape = shape_of(item, problem)
    idle = np.array([not any(places.size for places, _ in own.values()) for own in found])
    wrote = np.array([bool(own[item.name][0].size) for own in found])
    if not shape or not idle.any() or wrote.sum() < _LEAST_FITTED:
        return
    numbers = np.array([block.number for block in asked.blocks])
    x, y, _ = asked.launch.grid
    grid = np.stack([np.ones(len(numbers)), numbers % x, numbers // x % y, numbers // (x * y)], axis=1)
    parts = [own[item.name][0] for own in found if own[item.name][0].size]
    firsts = np.array([[axis.min() for axis in np.unravel_index(places, shape)] for places in parts])
    linear = np.linalg.lstsq(grid[wrote], firsts, rcond=None)[0]
    if np.abs(grid[wrote] @ linear - firsts).max() > 1e-3:
        return
    expected = np.rint(grid[idle] @ linear).astype(np.int64)
    within = ((expected >= 0) & (expected < shape)).all(axis=1)
    if within.any():
        number, place = numbers[idle][within][0], ", ".join(map(str, expected[within][0]))
        raise WrongBlock(f"block {number} wrote nothing: by the others' places its part of {item.name} is at [{place}]")
