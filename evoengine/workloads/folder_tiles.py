"""Find which elements of outputs and scratch memory belong to a block: what it stored to, and the rest of its tile."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import Any

import numpy as np

from evoengine.devices.base import DTYPE_BYTES, TensorArgument, TensorParameter
from evoengine.devices.pool import BlockLaunch, BlockTrace
from evoengine.workloads.base import NothingWritten, WrongBlock
from evoengine.workloads.folder_definition import Definition, FolderProblem, Item, shape_of
from evoengine.workloads.tensors import TORCH_DTYPES

BITS: dict[int, type[np.unsignedinteger[Any]]] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_SIGMAS = 4.0
"""standard deviations of the mean by which the blocks' shares of an output may fall short by chance"""
_LEAST_FITTED = 8
"""minimum number of blocks whose places determine those of others"""
_TRIES = 64
"""number of samples of blocks by which their places are fitted"""
_LATER = 0.8
"""largest share of blocks whose first stored element may come after the start of their tile. In place, an element that
keeps its value looks as if it was not stored: half of the first ones, more where late blocks omit some"""
_OTHERS = 0.5
"""largest share of blocks whose first stored element may be anywhere in a loose tiling"""
_LARGEST_TILE = 1 << 20
"""limit of the elements of an output that a block may omit"""

Stored = Mapping[str, tuple[np.ndarray, np.ndarray]]
"""stores of one block: output → the elements' positions in it, ascending, and their bits"""


def stored_elements(asked: BlockLaunch, one: BlockTrace) -> Stored:
    """Return the elements of each output that a block stored to, which are those that changed."""
    found = {}
    for number, p in enumerate(asked.arguments):
        if not isinstance(p, TensorParameter) or not p.output:
            continue
        bits = BITS[DTYPE_BYTES[p.dtype]]
        places, values = [np.empty(0, np.int64)], [np.empty(0, bits)]
        for offset, page in sorted(one.pages[p.name], key=lambda page: page[0]):
            stored = page.view(bits)
            before = asked.pool.read(number, offset, offset + page.nbytes).view(bits) if p.inout else np.iinfo(bits).max
            own = np.flatnonzero(stored != before)
            places.append(own + offset // stored.itemsize)
            values.append(stored[own])
        found[p.name] = np.concatenate(places), np.concatenate(values)
    return found


def check_cover(item: Item, problem: FolderProblem, asked: BlockLaunch, found: Sequence[Stored]) -> None:
    """Raise WrongBlock if the blocks' shares leave out some of an output, NothingWritten if all shares are empty.

    If all blocks were run the check is exact. Otherwise the mean share of the chosen blocks, times the number of
    blocks, must fall short of the output by more than chance explains. For integers and in-place outputs only
    NothingWritten is raised, because a kernel may have written the value that was there.
    """
    total, size = prod(asked.launch.grid), prod(shape_of(item, problem))
    parts = [own[item.name][0] for own in found]
    shares = np.array([len(places) for places in parts], np.float64)
    parameter = next(p for p in asked.arguments if p.name == item.name)
    kept = isinstance(parameter, TensorParameter | TensorArgument) and parameter.inout
    if not shares.any() and not kept:
        raise NothingWritten(f"none of {len(parts)} blocks wrote any of {item.name}", item.name)
    if kept or not TORCH_DTYPES[item.dtype].is_floating_point:
        return
    if len(parts) == total:
        missing = size - len(np.unique(np.concatenate(parts)))
        if missing:
            raise WrongBlock(f"{missing} of {size} elements of {item.name} were written by no block")
        return
    most = shares.mean() + _SIGMAS * shares.std() / np.sqrt(len(shares))
    if max(most * total, shares.sum()) < size:
        each = f"{shares.mean():.0f} elements of {item.name} each"
        raise WrongBlock(f"{len(parts)} of {total} blocks wrote {each}: all of them cannot cover its {size}")


def with_tiles(
    definition: Definition, problem: FolderProblem, asked: BlockLaunch, found: Sequence[Stored]
) -> list[Stored]:
    """Return the stores with those added that a block omitted in its tile: the present value counts as written.

    An omission by a late block is thus compared: the poison, or the previous contents of an in-place tensor. Raises
    WrongBlock if a block wrote nothing.
    """
    more: list[dict[str, tuple[np.ndarray, np.ndarray]]] = [dict(own) for own in found]
    numbers = np.array([block.number for block in asked.blocks[: len(found)]])
    for number, p in enumerate(asked.arguments):
        if not isinstance(p, TensorParameter) or not p.output:
            continue
        item = next(item for item in definition.outputs if item.name == p.name)
        tiles = tiles_of(shape_of(item, problem), asked.launch.grid, numbers, [own[p.name][0] for own in found])
        if tiles is None:
            continue
        bits, idle = BITS[DTYPE_BYTES[p.dtype]], TORCH_DTYPES[item.dtype].is_floating_point and not p.inout
        for block, own, tile in zip(numbers, more, tiles, strict=True):
            places, values = own[p.name]
            if idle and tile.size and not any(stored.size for stored, _ in own.values()):
                first = ", ".join(map(str, np.unravel_index(tile[0], shape_of(item, problem))))
                raise WrongBlock(
                    f"block {block} wrote nothing: by the others' places its part of {p.name} is at [{first}]"
                )
            left = np.setdiff1d(tile, places, assume_unique=True)
            held = np.full(len(left), np.iinfo(bits).max, bits)
            if p.inout:
                held = asked.pool.take(number, left, DTYPE_BYTES[p.dtype]).reshape(-1).view(bits)
            own[p.name] = np.concatenate([places, left]), np.concatenate([values, held])
    return list(more)


def tiles_of(
    shape: Sequence[int], grid: tuple[int, int, int], numbers: np.ndarray, stored: Sequence[np.ndarray]
) -> list[np.ndarray] | None:
    """Return the elements of an output in each block's tile, determined by where others stored; None if unclear.

    A grid may have blocks beyond an output's end, whose tiles are empty.
    """
    tiling = fit_tiling(shape, grid, numbers, stored)
    return None if tiling is None else [tiling.tile(int(number)) for number in numbers]


@dataclass(frozen=True, slots=True)
class Tiling:
    """Map each block of a grid to its tile of a tensor, whose first indices are linear in the block's position."""

    dimensions: tuple[int, ...]
    """those of the tensor, some of which may be joined"""
    linear: np.ndarray
    """[1 + axes of the grid of more than one block, dimensions]: the first tile's place, and steps along each axis"""
    lengths: np.ndarray
    """of a tile, along each dimension"""
    grid: tuple[int, int, int]
    turns: tuple[int, ...] = ()
    """by dimension, how many lengths a block may reach from its tile's start; () where its tile is all that it has"""

    def as_wide_as(self, stored: Mapping[int, np.ndarray]) -> Tiling:
        """Return the tiling for blocks that reach as far as most of these, by number, store from their tiles' start."""
        reached = [self._turns(block, places).max(axis=0) for block, places in stored.items()]
        return replace(self, turns=tuple(np.quantile(reached, 0.5, axis=0, method="higher").astype(int) + 1))

    def reaches(self, number: int, places: np.ndarray) -> bool:
        """Return whether all these places are where the block may store."""
        turns = self._turns(number, places)
        return bool(((turns >= 0) & (turns < self.turns)).all())

    def _turns(self, number: int, places: np.ndarray) -> np.ndarray:
        at = np.stack(np.unravel_index(places, self.dimensions), axis=1)
        found: np.ndarray = (at - self._start(number)) // self.lengths
        return found

    def _start(self, number: int) -> np.ndarray:
        found: np.ndarray = (_positions(self.grid, np.array([number])) @ self.linear)[0]
        return found

    def tile(self, number: int) -> np.ndarray:
        """Return the flat positions of a block's tile, ascending."""
        start = self._start(number)
        end = np.minimum(start + self.lengths, self.dimensions)
        return flat_places(self.dimensions, [np.arange(max(0, a), b) for a, b in zip(start, end, strict=True)])

    def holders(self, places: np.ndarray) -> np.ndarray:
        """Return the numbers of the blocks that may store to any of these flat positions."""
        at = np.stack(np.unravel_index(np.unique(places), self.dimensions), axis=1)
        starts = np.unique((at - self.linear[0]) // self.lengths * self.lengths, axis=0)
        back = np.stack(np.unravel_index(np.arange(prod(self.turns)), self.turns), axis=1) * self.lengths
        left = np.unique((starts[:, None] - back[None]).reshape(-1, len(self.dimensions)), axis=0)
        numbers: np.ndarray = np.zeros(len(left), np.int64)
        axes = [axis for axis in range(3) if self.grid[axis] > 1]
        steps = dict(zip(axes, self.linear[1:], strict=True))
        every: list[np.ndarray] = [np.zeros(1, np.int64)]
        # of axes that step along one dimension, the one with the longest step first
        for axis in sorted(axes, key=lambda axis: -np.abs(steps[axis]).max()):
            stride = prod(self.grid[:axis])
            if not steps[axis].any():  # along it all blocks have the same tile
                every.append(np.arange(self.grid[axis]) * stride)
                continue
            dimension = int(np.flatnonzero(steps[axis])[0])
            index = np.clip(left[:, dimension] // steps[axis][dimension], 0, self.grid[axis] - 1)
            left[:, dimension] -= index * steps[axis][dimension]
            numbers += index * stride
        numbers = numbers[(left == 0).all(axis=1)]
        for alike in every:
            numbers = (numbers[:, None] + alike[None, :]).reshape(-1)
        return numbers


def fit_tiling(
    shape: Sequence[int],
    grid: tuple[int, int, int],
    numbers: np.ndarray,
    stored: Sequence[np.ndarray],
    loose: bool = False,
) -> Tiling | None:
    """Return the tiles of blocks, determined by where some of them stored; None if unclear.

    They are clear if the first index along each dimension, or along neighbouring ones taken as one, is a linear
    function of the block's position in the grid, each axis of which steps along one dimension. A block's tile is then
    as long as the step. With `loose` that holds for most blocks, others may store anywhere, and an axis may step along
    no dimension: blocks along it have one tile in common.
    """
    wrote = np.array([bool(places.size) for places in stored])
    if wrote.sum() < _LEAST_FITTED:
        return None
    at = _positions(grid, numbers)
    for dimensions in _joined(tuple(shape)):
        unravelled = (np.unravel_index(places, dimensions) for places in stored if places.size)
        firsts = np.array([[along.min() for along in place] for place in unravelled])
        linear = _steps(at[wrote], firsts, loose)
        if linear is None:
            continue
        along = zip(np.abs(linear[1:]).T, dimensions, strict=True)
        lengths = np.array([min((step for step in each if step), default=size) for each, size in along], np.int64)
        starts = at @ linear
        if prod(lengths.tolist()) > _LARGEST_TILE or (not loose and (firsts >= starts[wrote] + lengths).any()):
            continue
        return Tiling(dimensions, linear, lengths, grid)
    return None


def require_apart(blocks: Sequence[int], stored: Sequence[Sequence[np.ndarray]]) -> None:
    """Raise WrongBlock if two blocks stored to the same elements of all pieces of memory, which are not the last ones.

    Blocks beyond the end of the last axis may all have its last tile.
    """
    lasts = [max((places[-1] for places in own if places.size), default=0) for own in zip(*stored, strict=True)]
    seen: dict[tuple[bytes, ...], int] = {}
    for number, every in zip(blocks, stored, strict=True):
        wrote = [places[-1] == last for places, last in zip(every, lasts, strict=True) if places.size]
        if not wrote or any(wrote):
            continue
        first = seen.setdefault(tuple(places.tobytes() for places in every), number)
        if first != number:
            a, b = sorted((first, number))
            raise WrongBlock(f"blocks {a} and {b} store to the same elements, and to no others")


def _positions(grid: tuple[int, int, int], numbers: np.ndarray) -> np.ndarray:
    """Return 1 and the position of each block along the axes of more than one block, int64 [blocks, 1 + axes]."""
    x, y, _ = grid
    at = np.stack([np.ones(len(numbers), np.int64), numbers % x, numbers // x % y, numbers // (x * y)], axis=1)
    chosen: np.ndarray = at[:, [True, *(size > 1 for size in grid)]]
    return chosen


def _steps(at: np.ndarray, firsts: np.ndarray, loose: bool) -> np.ndarray | None:
    """Return integers whose product with `at` is at most `firsts`, and equal to it for a fifth of the blocks.

    With `loose`, equal for most blocks, whatever the others have. None if there are none, or if an axis of the grid
    steps along several dimensions, or, unless `loose`, along none. Some first elements come after the start of their
    tile, if the value there did not change.
    """
    random = np.random.default_rng(0)
    for _ in range(_TRIES):
        some = random.choice(len(at), at.shape[1], replace=False)
        found = np.rint(np.linalg.lstsq(at[some], firsts[some], rcond=None)[0]).astype(np.int64)
        later = firsts - at @ found
        others = later.any(axis=1).mean()
        if others > _OTHERS if loose else (later < 0).any() or others > _LATER:
            continue
        along = (found[1:] != 0).sum(axis=1)
        return found if ((along == 1) | (loose & (along == 0))).all() else None
    return None


def _joined(shape: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yield the shape, and those in which neighbouring dimensions are joined, down to a single dimension."""
    for cuts in sorted(product((True, False), repeat=len(shape) - 1), key=sum, reverse=True) if shape else ():
        sizes = [shape[0]]
        for size, cut in zip(shape[1:], cuts, strict=True):
            if cut:
                sizes.append(size)
            else:
                sizes[-1] *= size
        yield tuple(sizes)


def flat_places(shape: Sequence[int], at: Sequence[np.ndarray]) -> np.ndarray:
    """Return the flat positions of the elements at the product of indices, in row-major order."""
    places = np.zeros((1,), np.int64)
    for size, one in zip(shape, at, strict=True):
        places = (places[:, None] * size + one[None, :]).reshape(-1)
    return places
