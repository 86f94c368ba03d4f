"""Blocks of the last of several kernels at full size, with all blocks of earlier kernels whose results they read.

Which blocks these are is determined by running: first a sample of each kernel's blocks, which shows where a block
stores; then blocks of the last kernel, which shows what they read that nothing has stored.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TypeGuard

import numpy as np

from evoengine.devices.base import DTYPE_BYTES, ScratchParameter, TensorParameter
from evoengine.devices.pool import (
    MISSED,
    WRITTEN_NOW,
    BlockArgument,
    BlockLaunch,
    BlockTrace,
    ChosenBlock,
    RunBlocks,
    held_pages,
)
from evoengine.workloads.folder_tiles import BITS, Tiling, fit_tiling, require_apart
from evoengine.workloads.full_size import chosen_blocks

Places = tuple[np.ndarray, np.ndarray]
"""positions of elements, ascending, and their bits"""
Pages = dict[str, dict[int, tuple[np.ndarray, np.ndarray]]]
"""memory → offset of a page → its contents and marks"""
_ALL = 64
"""number of blocks up to which all of a kernel are sampled"""
_SAMPLED = 32
"""blocks that are drawn for the sample of a larger grid"""
_CONFORMING = 0.5
"""least share of sampled blocks that store in their tiles alone"""
_TURNS = 64
"""limit of the tiles that a block's stores reach over"""
_INPUT_LIMIT = 1 << 28
"""bytes of inputs, in whole pages, at which a block is aborted"""


class Unclear(Exception):
    """It is not known which blocks store what others read, or these are too many."""


@dataclass(frozen=True)
class _Writers:
    """The blocks of one kernel that store to one piece of memory."""

    sampled: Mapping[int, np.ndarray]
    """block → the positions that it stored to; of a kernel with a tiling only of blocks that stored elsewhere"""
    tiling: Tiling | None
    """of most of the others; None if all were sampled"""
    exact: Tiling | None
    """of all blocks"""
    clear: bool = True
    """whether no other blocks store to it"""

    def of(self, places: np.ndarray) -> set[int]:
        if not self.clear:
            raise Unclear
        found = {block for block, own in self.sampled.items() if np.isin(own, places).any()}
        return found | (set(self.tiling.holders(places).tolist()) if self.tiling else set())


class Chain:
    """The kernels of one launch. `kernels` are without blocks; `seconds` is a limit of CPU time for each step."""

    def __init__(
        self, kernels: Sequence[BlockLaunch], numbers: Mapping[str, int], run: RunBlocks, seed: int, seconds: float
    ) -> None:
        self._kernels = [replace(one, numbers=numbers, held=b"") for one in kernels]
        self._numbers, self._run, self._seed, self._seconds = numbers, run, seed, seconds
        self._memory = {a.name: a for one in kernels for a in one.arguments if _is_written(a)}
        self._each = [0.0] * len(kernels)
        """CPU seconds of a block of each kernel"""

    def stored(self) -> list[dict[str, Places]]:
        """Return what blocks of the last kernel, each with those that it needs, stored to each piece of memory.

        Only what the last kernel that writes a tensor stored to it, and with what a block left out in its tile, which
        counts as written. Empty where it is not known which blocks store what others read.
        """
        try:
            return list(self._stored())
        except Unclear:
            return []

    def _stored(self) -> Iterator[dict[str, Places]]:
        samples = [self._sample(number) for number in range(len(self._kernels))]
        for sample in samples:
            self._require_apart(*sample)
        writers = [self._writers(number, *sample) for number, sample in enumerate(samples)]
        final = {name: max(k for k, own in enumerate(writers) if name in own) for own in writers for name in own}
        spent, first = time.process_time(), True
        for block in samples[-1][0]:
            if not first and time.process_time() - spent > self._seconds:
                return
            try:
                needed, traces = self._run_with_needed(block, writers)
            except Unclear:
                if first:
                    raise
                continue
            first = False
            pages: Pages = {}
            found: dict[str, Places] = {}
            for number, trace in enumerate(traces):
                if trace is None:
                    continue
                _keep(pages, trace)
                for name in (name for name, last in final.items() if last == number):
                    own = self._places(name, _pages_of(trace, name), WRITTEN_NOW)
                    left = self._left_out(writers[number][name].exact, needed[number], own)
                    found[name] = self._with_bits(name, pages.get(name, {}), np.concatenate([own, left]))
            yield found

    def _sample(self, number: int) -> tuple[list[int], list[BlockTrace]]:
        """Return sampled blocks of a kernel, the last first, and their traces, each run by itself."""
        asked = self._kernels[number]
        total = prod(asked.launch.grid)
        blocks = list(range(total))[::-1] if total <= _ALL else chosen_blocks(asked.launch.grid, self._seed, _SAMPLED)
        before = time.process_time()
        traces = self._run(replace(asked, blocks=_chosen(blocks[:1])), self._seed)
        each = time.process_time() - before
        blocks = blocks[: max(1, int(self._seconds / max(each, 1e-3)))]
        traces += self._run(replace(asked, blocks=_chosen(blocks[1:])), self._seed) if blocks[1:] else []
        self._each[number] = (time.process_time() - before) / len(blocks)
        if any(trace.given_up for trace in traces):
            raise Unclear
        return blocks, traces

    def _require_apart(self, blocks: Sequence[int], traces: Sequence[BlockTrace]) -> None:
        """Raise WrongBlock if two blocks store to the same elements, and do not add to what is there."""
        every = []
        for trace in traces:
            places = []
            for name in self._memory:
                own = self._places(name, _pages_of(trace, name), WRITTEN_NOW)
                adds = np.isin(own, self._places(name, _pages_of(trace, name), MISSED)).any()
                places.append(own[:0] if adds else own)
            every.append(places)
        require_apart(blocks, every)

    def _writers(self, number: int, blocks: Sequence[int], traces: Sequence[BlockTrace]) -> dict[str, _Writers]:
        """Return the blocks that store to each piece of memory to which any sampled block of a kernel stored."""
        grid, found = self._kernels[number].launch.grid, {}
        for name in self._memory:
            stored = [self._places(name, _pages_of(trace, name), WRITTEN_NOW) for trace in traces]
            own = {block: places for block, places in zip(blocks, stored, strict=True) if places.size}
            if not own:
                continue
            shape = self._memory[name].shape
            at = shape, grid, np.array(blocks), stored
            tiling, loose = fit_tiling(*at), fit_tiling(*at, loose=True)
            if len(blocks) == prod(grid):
                found[name] = _Writers(own, None, tiling)
                continue
            loose = loose and loose.as_wide_as(own)
            others = {b: p for b, p in own.items() if loose is None or not loose.reaches(b, p)}
            clear = loose is not None and prod(loose.turns) <= _TURNS and len(others) <= (1 - _CONFORMING) * len(own)
            found[name] = _Writers(others, loose if clear else None, tiling, clear)
        return found

    def _run_with_needed(
        self, block: int, writers: Sequence[Mapping[str, _Writers]]
    ) -> tuple[list[set[int]], list[BlockTrace | None]]:
        """Run a block of the last kernel behind all blocks that store what it reads, and so on.

        Returns the blocks of each kernel and their trace. Raises Unclear if these are too many.
        """
        needed: list[set[int]] = [set() for _ in self._kernels]
        needed[-1].add(block)
        for _ in range(2 * len(self._kernels) + 1):
            time_needed = sum(len(own) * each for own, each in zip(needed, self._each, strict=True))
            if time_needed > self._seconds:
                raise Unclear
            pages: Pages = {}
            traces: list[BlockTrace | None] = []
            added = False
            for number, own in enumerate(needed):
                if not own:
                    traces.append(None)
                    continue
                trace = self._run_together(number, sorted(own), pages)
                traces.append(trace)
                _keep(pages, trace)
                for name in trace.marks:
                    missed = self._places(name, _pages_of(trace, name), MISSED)
                    for earlier in range(number + 1 if missed.size else 0):
                        more = writers[earlier][name].of(missed) if name in writers[earlier] else set()
                        added |= not more <= needed[earlier]
                        needed[earlier] |= more
            if not added:
                return needed, traces
        raise Unclear

    def _run_together(self, number: int, blocks: Sequence[int], pages: Pages) -> BlockTrace:
        asked = self._kernels[number]
        taken = {a.name for a in asked.arguments}
        held = held_pages({name: own for name, own in pages.items() if name in taken}, self._numbers)
        order = np.random.default_rng(self._seed).permutation(blocks).tolist()
        (trace,) = self._run(replace(asked, blocks=_chosen(order), together=len(order), held=held), self._seed)
        if trace.given_up:
            raise Unclear
        return trace

    def _places(self, name: str, pages: Mapping[int, tuple[np.ndarray, np.ndarray]], mark: int) -> np.ndarray:
        """Return the elements with a byte that has the mark, ascending."""
        size = DTYPE_BYTES[self._memory[name].dtype]
        found = [
            np.flatnonzero((marks.reshape(-1, size) & mark).any(axis=1)) + offset // size
            for offset, (_, marks) in sorted(pages.items())
        ]
        return np.concatenate(found) if found else np.empty(0, np.int64)

    def _left_out(self, tiling: Tiling | None, blocks: Iterable[int], stored: np.ndarray) -> np.ndarray:
        """Return the elements of the blocks' tiles that they did not store to; none where tiles may be shared."""
        if tiling is None or not (tiling.linear[1:] != 0).any(axis=1).all():
            return np.empty(0, np.int64)
        tiles = [tiling.tile(block) for block in blocks]
        return np.setdiff1d(np.concatenate(tiles), stored)

    def _with_bits(self, name: str, pages: Mapping[int, tuple[np.ndarray, np.ndarray]], places: np.ndarray) -> Places:
        """Return elements with what they hold, ascending; in a page that nothing touched, what they held at first."""
        memory = self._memory[name]
        size = DTYPE_BYTES[memory.dtype]
        bits = BITS[size]
        places = np.sort(places)
        held = np.full(len(places), np.iinfo(bits).max, bits)
        if isinstance(memory, TensorParameter) and memory.inout:
            pool = self._kernels[0].pool
            held = pool.take(self._numbers[name], places, size).reshape(-1).view(bits).copy()
        for offset, (contents, _) in pages.items():
            own = (places * size >= offset) & (places * size < offset + len(contents))
            held[own] = contents.view(bits)[places[own] - offset // size]
        return places, held


def nothing_of(memory: BlockArgument) -> Places:
    """Return that nothing was stored."""
    assert isinstance(memory, TensorParameter)
    return np.empty(0, np.int64), np.empty(0, BITS[DTYPE_BYTES[memory.dtype]])


def _is_written(argument: BlockArgument) -> TypeGuard[TensorParameter | ScratchParameter]:
    return isinstance(argument, ScratchParameter) or (isinstance(argument, TensorParameter) and argument.output)


def _chosen(blocks: Iterable[int]) -> list[ChosenBlock]:
    return [ChosenBlock(int(block), _INPUT_LIMIT, ends=True) for block in blocks]


def _pages_of(trace: BlockTrace, name: str) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    pages, marks = trace.pages.get(name, []), trace.marks.get(name, [])
    return {offset: (contents, own) for (offset, contents), own in zip(pages, marks, strict=True)}


def _keep(pages: Pages, trace: BlockTrace) -> None:
    """Put the pages of tracked memory in the place of those before."""
    for name in trace.marks:
        pages.setdefault(name, {}).update(_pages_of(trace, name))
