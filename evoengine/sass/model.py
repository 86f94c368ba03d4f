"""Calls of the core that count and time a launch: what blocks execute and touch, and the clocks of one SM of a chip."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from functools import cache

import numpy as np

from evoengine.sass.chip import Chip
from evoengine.sass.core import Program, check, library
from evoengine.sass.launch import Launch

_DOUBLES = ctypes.POINTER(ctypes.c_double)
_MESSAGE = 512
_MOST_NOTES = 256
"""MOST_PROGRESS of core/timing.h"""


@dataclass(frozen=True, slots=True)
class Traffic:
    """Traffic of an allocation: shares, 0…1, of the bytes that blocks load from it and store to it."""

    loads_from_dram: float = 1.0
    stores_to_dram: float = 1.0
    loads_shared: float = 0.0
    """share of loads that another block of the wave makes as well"""
    sharers: float = 1.0
    """SMs that load, or change by atomics, what one of them does"""
    in_step: float = 1.0
    """SMs of these that load it at the same time"""


class _Traffic(ctypes.Structure):
    _fields_ = [(f.name, ctypes.c_double) for f in fields(Traffic)]


class _Timing(ctypes.Structure):
    _fields_ = [
        ("rates", _DOUBLES),
        ("blocks", ctypes.POINTER(ctypes.c_uint64)),
        ("traffic", ctypes.POINTER(_Traffic)),
        ("block_count", ctypes.c_uint64),
        ("limit", ctypes.c_uint64),
        ("resident", ctypes.c_uint32),
        ("unused", ctypes.c_uint32),
    ]


@dataclass(frozen=True, slots=True)
class Residents:
    """The blocks that share an SM: their number, their order, and where the timing stops."""

    count: int
    blocks: Sequence[int]
    limit: int
    """warp instructions of all blocks; 0 for no limit"""
    traffic: Sequence[Traffic]
    """per allocation of the launch"""


@dataclass(frozen=True, slots=True)
class Timed:
    """Clocks, and what filled them.

    `values` are keyed by the core's names; `progress` has an array [notes] per name, in order of time; `issues` [n] and
    `stalls` [n, reasons] are per instruction.
    """

    values: Mapping[str, float]
    progress: Mapping[str, np.ndarray]
    issues: np.ndarray
    stalls: np.ndarray


@dataclass(frozen=True, slots=True)
class Survey:
    """What some blocks do: `counts` [blocks] by name.

    `touched` [allocations] by name is what they touched of each allocation.
    """

    counts: Mapping[str, np.ndarray]
    touched: Mapping[str, np.ndarray]


@cache
def _names(function: str) -> tuple[str, ...]:
    call = getattr(library(), function)
    call.restype = ctypes.c_char_p
    return tuple(call().decode().splitlines())


def rate_names() -> tuple[str, ...]:
    """Return what a chip must state, in the core's order."""
    return _names("sass_rate_names")


def stall_names() -> tuple[str, ...]:
    return _names("sass_stall_names")


CARVEOUTS_KB = {
    75: (32, 64),
    80: (0, 8, 16, 32, 64, 100, 132, 164),
    86: (0, 8, 16, 32, 64, 100),
    89: (0, 8, 16, 32, 64, 100),
    90: (0, 8, 16, 32, 64, 100, 132, 164, 196, 228),
}
"""by compute capability: what of the L1 can be shared memory (CUDA C++ Programming Guide, shared memory of each)"""


WRITTEN = 0.5
"""of what the L2 keeps, the part that may wait to be written back while loads go on: a round prior"""


L2_BYTES = ("l2_bytes_per_clock", "l2_private_bytes_per_clock", "l2_private_tma_bytes_per_clock")
L2_CLOCKS = (
    "l2_store_clocks", "l2_partial_clocks", "l2_reduce_clocks", "l2_atomic_clocks", "l2_combine_clocks", "l2_latency",
    "dram_latency",
)  # fmt: skip


def rates(chip: Chip, shared_bytes: int, ghz: float) -> dict[str, float]:
    """Return a chip's rates in the form the core takes, at a clock of `ghz`.

    Resident blocks have `shared_bytes` of shared memory together; the driver turns the smallest part of the L1 that
    holds them into shared memory.
    """
    sizes = CARVEOUTS_KB[chip.gpu.capability]
    carveout = next((kb * 1024 for kb in sizes if kb * 1024 >= shared_bytes), sizes[-1] * 1024)
    dram = chip.rates["dram_efficiency"] * chip.gpu.memory_gbs / ghz / chip.sms
    faster = chip.l2_clocks(ghz)
    return {
        **chip.rates,
        "l1_bytes": chip.rates["l1_kb"] * 1024 - carveout,
        "dram_bytes_per_clock": dram,
        **{name: chip.rates[name] * faster for name in L2_BYTES},
        **{name: chip.rates[name] / faster for name in L2_CLOCKS},
        "local_from_dram": 0.0,  # where the L2 holds all of it; see evoengine.sass.memory.local_from_dram
        "l2_written_bytes": WRITTEN * chip.l2_kept_bytes / chip.sms,
    }


def addresses(program: Program) -> list[int]:
    """Return the offset in bytes of each instruction of the program."""
    size = library().sass_size(program.handle, None)
    found = (ctypes.c_int32 * size)()
    library().sass_size(program.handle, found)
    return list(found)


def count_block(program: Program, launch: Launch, block: int, limit: int) -> dict[str, float]:
    """Return what a block does within `limit` warp instructions; raises KernelFailure where it cannot run.

    If it has not ended by then (`complete` is 0), `end` is at how many instructions it would, should its loops go on
    as they did; 0 if they do not tell.
    """
    names = _names("sass_count_names")
    counts, end = (ctypes.c_double * len(names))(), ctypes.c_double()
    message = ctypes.create_string_buffer(_MESSAGE)
    status = library().sass_count(
        program.handle, launch.reference(), ctypes.c_uint64(block), ctypes.c_uint64(limit), counts, ctypes.byref(end),
        message, _MESSAGE,
    )  # fmt: skip
    check(status, message)
    found = dict(zip(names, counts, strict=True))
    return found if found["complete"] else found | {"end": end.value}


def count_lone_warp(program: Program, launch: Launch, block: int, warp: int, limit: int) -> int:
    """Return the number of instructions of one of a block's warps as if the others had ended.

    Raises KernelFailure where it waits for them.
    """
    found = ctypes.c_uint64()
    message = ctypes.create_string_buffer(_MESSAGE)
    status = library().sass_count_lone_warp(
        program.handle, launch.reference(), ctypes.c_uint64(block), warp, ctypes.c_uint64(limit),
        ctypes.byref(found), message, _MESSAGE,
    )  # fmt: skip
    check(status, message)
    return found.value


def compared(program: Program, launch: Launch, blocks: Sequence[int], limit: int, at: int | None = None) -> np.ndarray:
    """Return what integer comparisons compared when each block first came to them, as float64.

    The result is [blocks, instructions, 3], or [blocks, 3] of the instruction with number `at` alone: both operands of
    the first lane, and after how many warp instructions of the block that was; NaN where a block does not come to it
    within `limit` of them. Raises KernelFailure where a block cannot run.
    """
    size = library().sass_size(program.handle, None) if at is None else 1
    values = np.full((len(blocks), size, 3), np.nan)
    message = ctypes.create_string_buffer(_MESSAGE)
    status = library().sass_compared(
        program.handle, launch.reference(), (ctypes.c_uint64 * len(blocks))(*blocks), len(blocks),
        ctypes.c_uint64(limit), -1 if at is None else at, values.ctypes.data_as(_DOUBLES), message, _MESSAGE,
    )  # fmt: skip
    check(status, message)
    return values if at is None else values[:, 0]


def survey(
    program: Program, launch: Launch, blocks: Sequence[int], limit: int, whole_limit: int, kept: float
) -> Survey:
    """Run each block for at most `limit` warp instructions, and the middle one again for `whole_limit`.

    The L2 keeps the last `kept` bytes of what each block loads and stores.
    Raises KernelFailure where one cannot run.
    """
    names, touched_names = _names("sass_count_names"), _names("sass_touched_names")
    counts = np.zeros((len(blocks), len(names)))
    touched = np.zeros((launch.allocation_count, len(touched_names)))
    message = ctypes.create_string_buffer(_MESSAGE)
    status = library().sass_survey(
        program.handle, launch.reference(), (ctypes.c_uint64 * len(blocks))(*blocks), len(blocks),
        ctypes.c_uint64(limit), ctypes.c_uint64(whole_limit), ctypes.c_double(kept), counts.ctypes.data_as(_DOUBLES),
        touched.ctypes.data_as(_DOUBLES), message, _MESSAGE,
    )  # fmt: skip
    check(status, message)
    return Survey(dict(zip(names, counts.T, strict=True)), dict(zip(touched_names, touched.T, strict=True)))


def time_sm(program: Program, launch: Launch, numbers: Mapping[str, float], residents: Residents) -> Timed:
    """Time one SM; raises KernelFailure where a block cannot run."""
    ordered = (ctypes.c_double * len(rate_names()))(*(numbers[name] for name in rate_names()))
    blocks = (ctypes.c_uint64 * len(residents.blocks))(*residents.blocks)
    of_each = [_Traffic(*astuple(t)) for t in residents.traffic]
    traffic = (_Traffic * len(of_each))(*of_each)
    asked = _Timing(ordered, blocks, traffic, len(blocks), residents.limit, residents.count, 0)
    size = library().sass_size(program.handle, None)
    time_names, progress_names = _names("sass_time_names"), _names("sass_progress_names")
    times, notes = (ctypes.c_double * len(time_names))(), ctypes.c_int32()
    progress = np.zeros((_MOST_NOTES, len(progress_names)))
    issues, stalls = np.zeros(size, np.uint64), np.zeros((size, len(stall_names())))
    message = ctypes.create_string_buffer(_MESSAGE)
    status = library().sass_time(
        program.handle, launch.reference(), ctypes.byref(asked), times, progress.ctypes.data_as(_DOUBLES),
        ctypes.byref(notes), issues.ctypes.data_as(ctypes.POINTER(ctypes.c_uint64)), stalls.ctypes.data_as(_DOUBLES),
        message, _MESSAGE,
    )  # fmt: skip
    check(status, message)
    noted = progress[: notes.value].T
    return Timed(
        dict(zip(time_names, times, strict=True)), dict(zip(progress_names, noted, strict=True)), issues, stalls
    )
