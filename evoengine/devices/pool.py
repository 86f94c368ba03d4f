"""Tensors too large for memory: their contents are pages of a small pool, chosen by a hash of tensor and page.

Any part of such a tensor can be computed without the rest, here and in the emulator, which fills a page when a kernel
first touches it.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from evoengine.devices.base import ConstantArgument, PassedParameter, ScratchParameter, TensorArgument, TensorParameter
from evoengine.records import Launch

PAGE = 4096
"""bytes"""
BlockArgument = PassedParameter | TensorArgument | ConstantArgument


@dataclass(frozen=True, slots=True)
class Pool:
    """`pages` [count, PAGE] uint8."""

    pages: np.ndarray

    def read(self, argument: int, start: int, stop: int) -> np.ndarray:
        """Return bytes `start` to `stop` of a pooled tensor, uint8; `argument` is its number among the launch's."""
        first = start // PAGE
        contents: np.ndarray = self.pages[self._chosen(argument, np.arange(first, -(-stop // PAGE)))].reshape(-1)
        return contents[start - first * PAGE : stop - first * PAGE]

    def read_rows(self, argument: int, starts: np.ndarray, length: int) -> np.ndarray:
        """Return `length` bytes from each of `starts` on, uint8 [len(starts), length]; as `read` does."""
        pages = (length + PAGE - 2) // PAGE + 1
        chosen = self._chosen(argument, (starts // PAGE)[:, None] + np.arange(pages))
        within = (starts % PAGE)[:, None] + np.arange(length)
        return np.take_along_axis(self.pages[chosen].reshape(len(starts), -1), within, axis=1)

    def take(self, argument: int, places: np.ndarray, size: int) -> np.ndarray:
        """Return the elements of `size` bytes at `places`, counted in elements: uint8 [*places.shape, size]."""
        each = PAGE // size
        chosen = self._chosen(argument, places // each)
        found: np.ndarray = self.pages.reshape(-1, size)[chosen * each + places % each]
        return found

    def _chosen(self, argument: int, numbers: np.ndarray) -> np.ndarray:
        """Return which of `pages` each page of a pooled tensor is, in the shape of `numbers`."""
        mixed = _mixed(numbers.astype(np.uint64) ^ np.uint64((argument + 1) << 48))
        chosen: np.ndarray = mixed % np.uint64(len(self.pages))
        return chosen.astype(np.intp)


@dataclass(frozen=True, slots=True)
class ChosenBlock:
    number: int
    """in the grid, x running fastest; in a kernel with clusters it represents its whole cluster"""
    input_limit: int
    """bytes of the inputs, in whole pages, at which it is aborted"""
    ends: bool
    """whether the block of a correct kernel ends before that"""


@dataclass(frozen=True, slots=True)
class BlockLaunch:
    """Some blocks of a launch, each run by itself, or `together` of them in turn over the same memory.

    An input without contents has the pool's, and an output is NaN until it is written.
    """

    launch: Launch
    arguments: Sequence[BlockArgument]
    """tensors by shape, or inputs with their contents; constants after the kernel's parameters"""
    pool: Pool
    blocks: Sequence[ChosenBlock]
    entry: str | None = None
    """the kernel; None for the candidate's first"""
    together: int = 1
    """each so many of `blocks`, one behind the other, find memory as those before left it, and have one trace"""
    held: bytes | None = None
    """pages as earlier kernels left them, by `held_pages`; unless None, traces have marks, as the executor gives"""
    numbers: Mapping[str, int] | None = None
    """the numbers of memory, by which the pool's pages are chosen; None: places among `arguments`"""


@dataclass(frozen=True, slots=True)
class BlockTrace:
    """The memory that one of the blocks touched, or several together."""

    block: int
    """of several the last in the executor, the first in the emulator"""
    given_up: bool
    """it read more of the inputs than allowed, and was aborted"""
    pages: dict[str, list[tuple[int, np.ndarray]]]
    """tensor → offset in bytes of every page that was touched; of an output with the contents [uint8], 0xFF where
    nothing was written, and of zeroed scratch memory with what the block left there"""
    marks: dict[str, list[np.ndarray]] = field(default_factory=dict)
    """of each of these pages in tracked memory, what was done with each byte: WRITTEN and so on [uint8]"""


RunBlocks = Callable[[BlockLaunch, int], list[BlockTrace]]
"""runs the blocks with a seed for the device's own choices; raises KernelFailure"""
WRITTEN, MISSED, WRITTEN_NOW = 1, 2, 4
"""marks of a byte, as in sass/core/sparse.h: written at any time; read before; written by the trace's blocks"""

# Of a device's output: a block, and behind it each page with its contents. BlockHeader and PageHeader of
# cuda_emulator/runtime/pooled.cpp, and write_trace in sass/core/launches.cpp.
_BLOCK = struct.Struct("=QII")
_PAGE = struct.Struct("=QII")


def held_pages(pages: Mapping[str, Mapping[int, tuple[np.ndarray, np.ndarray]]], numbers: Mapping[str, int]) -> bytes:
    """Return pages, by memory and offset, with contents and marks, as `BlockLaunch.held` has them."""
    return b"".join(
        _PAGE.pack(offset, numbers[name], len(contents)) + contents.tobytes() + marks.tobytes()
        for name, of_memory in pages.items()
        for offset, (contents, marks) in of_memory.items()
    )


def read_traces(output: bytes, asked: BlockLaunch) -> list[BlockTrace]:
    """Return the traces of blocks that a device has written one after the other."""
    found, position = [], 0
    numbers = asked.numbers or {a.name: number for number, a in enumerate(asked.arguments)}
    kinds = {a.name: a for a in asked.arguments if isinstance(a, TensorParameter | ScratchParameter)}
    named = {number: name for name, number in numbers.items()}
    while position < len(output):
        block, given_up, pages = _BLOCK.unpack_from(output, position)
        position += _BLOCK.size
        touched: dict[str, list[tuple[int, np.ndarray]]] = {name: [] for name in kinds}
        marks: dict[str, list[np.ndarray]] = {}
        for _ in range(pages):
            offset, argument, size = _PAGE.unpack_from(output, position)
            position += _PAGE.size
            if (name := named[argument]) in touched:
                touched[name].append((offset, np.frombuffer(output, np.uint8, size, position)))
            position += size
            if asked.held is not None and _is_tracked(kinds[name]):
                marks.setdefault(name, []).append(np.frombuffer(output, np.uint8, size, position))
                position += size
        found.append(BlockTrace(block, bool(given_up), touched, marks))
    return found


def _is_tracked(argument: TensorParameter | ScratchParameter) -> bool:
    return isinstance(argument, ScratchParameter) or argument.output


def _mixed(x: np.ndarray) -> np.ndarray:
    """Apply the finaliser of SplitMix64, as in cuda_emulator/runtime/pooled.cpp and sass/core/sparse.cpp.

    See Steele, Lea, Flood, "Fast splittable pseudorandom number generators".
    """
    x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = x ^ x >> np.uint64(31)
    return mixed
