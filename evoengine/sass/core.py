"""The C interface of core/api.h: programs decoded from listings, and their launches."""

from __future__ import annotations

import ctypes
import math
import re
import weakref
from collections.abc import Callable, Sequence
from ctypes import POINTER, c_char_p, c_int, c_uint64, c_void_p
from enum import IntEnum
from functools import cache

import numpy as np

from evoengine.devices.base import VISIT, KernelCrashed, KernelHung, KernelRaced
from evoengine.devices.pool import ChosenBlock
from evoengine.errors import UsageError
from evoengine.sass.build import build
from evoengine.sass.launch import Launch, SassLaunch

_PRODUCT = re.compile(r"\b[DHIQ]G?MMA\.[\w.]+", re.ASCII)
LIMIT = 200_000_000
"""warp instructions that one block may execute; a block of a gate case takes a few millions"""
_MESSAGE_BYTES = 4096
_TEXT_BYTES = 1 << 18
_UNSEEN = "unseen: "
_CRASHED, _HUNG, _RACED, _RACED_IN_PARALLEL = 1, 2, 3, 4


class Races(IntEnum):
    """The kinds of races that are looked for, as in core/world.h."""

    NONE = 0
    NO_REPLICAS = 1
    """all but those of warps that compute the same element of a tile, of which one stores it"""
    ALL = 2


class RacedInParallel(KernelRaced):
    """A race that several threads found; of blocks that store the same values to one place it is none."""


class Program:
    """A decoded kernel. `unknown` maps opcodes that cannot be executed, with modifiers, to how often they occur."""

    def __init__(self, listing: str, entry: str) -> None:
        """Decode the kernel `entry` of a listing of `nvdisasm -c -hex`. Raises UsageError where it is none."""
        core = library()
        message = ctypes.create_string_buffer(_MESSAGE_BYTES)
        self.handle = c_void_p(core.sass_decode(listing.encode(), entry.encode(), message, len(message)))
        if not self.handle:
            raise UsageError(f"the listing of {entry} cannot be read: {_text(message)}")
        self._finalizer = weakref.finalize(self, core.sass_free, self.handle)
        self.entry = entry
        self.unknown = self._unknown()
        self.products = frozenset(_PRODUCT.findall(listing))
        """opcodes of tensor cores in the listing, with modifiers"""

    def hazards(self, arch: int, registers: int) -> tuple[list[str], list[str]]:
        """Return what reads or overwrites registers too early on some path, and pairs of units of unknown latency.

        `registers` are those of a thread at launch.
        """
        text = _filled(lambda buffer, size: library().sass_hazards(self.handle, arch, registers, buffer, size))
        lines = text.splitlines()
        found = [line for line in lines if not line.startswith(_UNSEEN)]
        return found, [line.removeprefix(_UNSEEN) for line in lines if line.startswith(_UNSEEN)]

    def latencies(self, arch: int) -> str:
        """Return how far apart ptxas put instructions, as `measure_latencies` in core/hazards.h describes."""
        return _filled(lambda buffer, size: library().sass_latencies(self.handle, arch, buffer, size))

    def _unknown(self) -> dict[str, int]:
        text = _filled(lambda buffer, size: library().sass_unknown(self.handle, buffer, size))
        pairs = (line.rpartition(" ") for line in text.splitlines())
        return {name: int(count) for name, _, count in pairs}


def run(
    program: Program,
    launch: Launch,
    blocks: Sequence[int] = (),
    limit: int = LIMIT,
    races: Races = Races.ALL,
    threads: int = 1,
) -> np.ndarray:
    """Execute the numbered blocks of the grid, whole clusters at a time, or all where none is named.

    `limit` is in warp instructions per block. With several threads a race may be reported that is none, of blocks that
    store the same values to one place; one thread alone can tell. Returns what warps visited, [n] VISIT. Raises
    KernelCrashed and KernelHung with the reason and the place, KernelCrashed for a register hazard too, and KernelRaced
    where nothing orders two accesses, RacedInParallel where several threads ran.
    """
    chosen = (c_uint64 * len(blocks))(*blocks)
    message = ctypes.create_string_buffer(_MESSAGE_BYTES)
    status = library().sass_run(
        program.handle, launch.reference(), chosen, len(blocks), limit, races, threads, message, len(message)
    )
    check(status, message)
    count = c_uint64()
    visits = library().sass_visits(ctypes.byref(count))
    return np.frombuffer(ctypes.string_at(visits, count.value * VISIT.itemsize), VISIT)


def printed() -> str:
    """Return what kernels printed in the calling thread's last run."""
    size = c_uint64()
    text = library().sass_printed(ctypes.byref(size))
    return ctypes.string_at(text, size.value).decode(errors="replace")


def blocks_ended(launch: Launch) -> int:
    """Return how many blocks of the launch that runs, in whatever thread, have come to their end."""
    return int(library().sass_clusters_ended()) * math.prod(launch.cluster)


def run_blocks(
    program: Program,
    launch: Launch,
    blocks: Sequence[ChosenBlock],
    pool: np.ndarray,
    together: int = 1,
    held: bytes | None = None,
    limit: int = LIMIT,
) -> bytes:
    """Execute blocks by themselves (of a cluster: all of it) over sparse memory and return their traces.

    Each `together` of them run in turn over the same memory, with one trace. Unless `held` is None, bytes of what
    kernels may write are tracked, and memory has those pages of earlier traces.
    `pool` [pages, PAGE] uint8 has the pages of sparse inputs. Raises as `run` does.
    """
    numbers = (c_uint64 * len(blocks))(*(b.number for b in blocks))
    limits = (c_uint64 * len(blocks))(*(b.input_limit for b in blocks))
    message = ctypes.create_string_buffer(_MESSAGE_BYTES)
    pages = np.ascontiguousarray(pool)
    status = library().sass_run_blocks(
        program.handle,
        launch.reference(),
        numbers,
        limits,
        len(blocks),
        together,
        pages.ctypes.data,
        len(pages),
        held is not None,
        held or b"",
        len(held or b""),
        limit,
        message,
        len(message),
    )
    check(status, message)
    size = c_uint64()
    traces = library().sass_traces(ctypes.byref(size))
    return ctypes.string_at(traces, size.value)


def check(status: int, message: ctypes.Array[ctypes.c_char]) -> None:
    """Raise KernelCrashed, KernelHung or KernelRaced with the message where the core's status says so."""
    if status == _CRASHED:
        raise KernelCrashed(_text(message))
    if status == _HUNG:
        raise KernelHung(_text(message))
    if status == _RACED:
        raise KernelRaced(_text(message))
    if status == _RACED_IN_PARALLEL:
        raise RacedInParallel(_text(message))


def _filled(fill: Callable[[ctypes.Array[ctypes.c_char], int], int]) -> str:
    """Return the text that a function of the core puts into a buffer."""
    buffer = ctypes.create_string_buffer(_TEXT_BYTES)
    fill(buffer, len(buffer))
    return _text(buffer)


def _text(buffer: ctypes.Array[ctypes.c_char]) -> str:
    return buffer.value.decode(errors="replace")


@cache
def library() -> ctypes.CDLL:
    """Return the core, built first if this machine does not have it. Raises MachineError if it cannot be built."""
    core = ctypes.CDLL(str(build()))
    core.sass_decode.argtypes = (c_char_p, c_char_p, c_char_p, c_int)
    core.sass_decode.restype = c_void_p
    core.sass_free.argtypes = (c_void_p,)
    core.sass_free.restype = None
    core.sass_unknown.argtypes = (c_void_p, c_char_p, c_int)
    core.sass_hazards.argtypes = (c_void_p, c_int, c_int, c_char_p, c_int)
    core.sass_latencies.argtypes = (c_void_p, c_int, c_char_p, c_int)
    core.sass_run.argtypes = (
        c_void_p,
        POINTER(SassLaunch),
        POINTER(c_uint64),
        c_int,
        c_uint64,
        c_int,
        c_int,
        c_char_p,
        c_int,
    )
    core.sass_printed.argtypes = (POINTER(c_uint64),)
    core.sass_printed.restype = c_void_p
    core.sass_clusters_ended.restype = c_uint64
    core.sass_run_blocks.argtypes = (
        c_void_p,
        POINTER(SassLaunch),
        POINTER(c_uint64),
        POINTER(c_uint64),
        c_int,
        c_int,
        c_void_p,
        c_uint64,
        c_int,
        c_char_p,
        c_uint64,
        c_uint64,
        c_char_p,
        c_int,
    )
    core.sass_traces.argtypes = (POINTER(c_uint64),)
    core.sass_traces.restype = c_void_p
    core.sass_visits.argtypes = (POINTER(c_uint64),)
    core.sass_visits.restype = c_void_p
    return core
