"""What the core counts and times of a launch: per block, and on one SM of a chip."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from evoengine.sass.chip import Chip
from evoengine.sass.core import Program, check, library
from evoengine.sass.launch import Launch

_DOUBLES = ctypes.POINTER(ctypes.c_double)
_MESSAGE = 512


class _Timing(ctypes.Structure):
    _fields_ = [
        ("rates", _DOUBLES),
        ("blocks", ctypes.POINTER(ctypes.c_uint64)),
        ("block_count", ctypes.c_uint64),
        ("limit", ctypes.c_uint64),
        ("resident", ctypes.c_uint32),
        ("tensor_excludes_mufu", ctypes.c_uint32),
        ("dram_share", ctypes.c_double),
        ("issue_lost", ctypes.c_double),
    ]


@dataclass(frozen=True, slots=True)
class Residents:
    """How blocks share an SM: their number, in which order it gets them, and where the timing stops."""

    count: int
    blocks: Sequence[int]
    limit: int
    """warp instructions of all blocks"""
    dram_share: float
    """of what is asked of the L1, or by TMA, that comes from the DRAM"""


@dataclass(frozen=True, slots=True)
class Overlap:
    """How the tensor pipe and other work get in each other's way: two hypotheses differ in these."""

    tensor_excludes_mufu: bool = False
    issue_lost: float = 0.0
    """share of arithmetic issue lost while wgmma runs"""


@dataclass(frozen=True, slots=True)
class Timed:
    """Clocks and what filled them: `values` by the core's names; `issues` [n], `stalls` [n, reasons] by instruction."""

    values: Mapping[str, float]
    issues: np.ndarray
    stalls: np.ndarray


@cache
def _names(function: str) -> tuple[str, ...]:
    call = getattr(library(), function)
    call.restype = ctypes.c_char_p
    return tuple(call().decode().split())


def rate_names() -> tuple[str, ...]:
    """What a chip must state, in the core's order."""
    return _names("sass_rate_names")


def rates(chip: Chip, shared_bytes: int) -> dict[str, float]:
    """A chip's rates as the core wants them, where resident blocks have so much shared memory together.

    The driver makes the smallest part of the L1 that holds them shared memory.
    """
    sizes = CARVEOUTS_KB[chip.gpu.capability]
    carveout = next((kb * 1024 for kb in sizes if kb * 1024 >= shared_bytes), sizes[-1] * 1024)
    return {**chip.rates, "l1_bytes": chip.rates["l1_bytes"] - carveout}


CARVEOUTS_KB = {
    75: (32, 64),
    80: (0, 8, 16, 32, 64, 100, 132, 164),
    86: (0, 8, 16, 32, 64, 100),
    89: (0, 8, 16, 32, 64, 100),
    90: (0, 8, 16, 32, 64, 100, 132, 164, 196, 228),
}
"""by compute capability: what of the L1 can be shared memory (CUDA C++ Programming Guide, shared memory of each)"""


def stall_names() -> tuple[str, ...]:
    call = library().sass_stall_names
    call.restype = ctypes.c_char_p
    return tuple(call().decode().splitlines())


def addresses(program: Program) -> list[int]:
    """The offset in bytes of each instruction of the program."""
    size = library().sass_size(program.handle, None)
    found = (ctypes.c_int32 * size)()
    library().sass_size(program.handle, found)
    return list(found)


def count_block(program: Program, launch: Launch, block: int, limit: int) -> dict[str, float]:
    """What a block does within `limit` warp instructions; raises KernelFailure where it cannot run."""
    counts = (ctypes.c_double * len(_names("sass_count_names")))()
    message = ctypes.create_string_buffer(_MESSAGE)
    status = library().sass_count(
        program.handle, launch.reference(), ctypes.c_uint64(block), ctypes.c_uint64(limit), counts, message, _MESSAGE
    )
    check(status, message)
    return dict(zip(_names("sass_count_names"), counts, strict=True))


def footprint(program: Program, launch: Launch, blocks: Sequence[int], limit: int) -> np.ndarray:
    """Lines of 128 bytes [allocations, 3]: how many the first of three blocks touches, and each other touches too."""
    lines = (ctypes.c_double * (3 * launch.allocation_count))()
    message = ctypes.create_string_buffer(_MESSAGE)
    three = (ctypes.c_uint64 * 3)(*blocks)
    status = library().sass_footprint(
        program.handle, launch.reference(), three, ctypes.c_uint64(limit), lines, message, _MESSAGE
    )
    check(status, message)
    return np.array(lines).reshape(-1, 3)


def time_sm(
    program: Program, launch: Launch, numbers: Mapping[str, float], residents: Residents, overlap: Overlap
) -> Timed:
    """Times one SM; raises KernelFailure where a block cannot run."""
    ordered = (ctypes.c_double * len(rate_names()))(*(numbers[name] for name in rate_names()))
    blocks = (ctypes.c_uint64 * len(residents.blocks))(*residents.blocks)
    asked = _Timing(
        ordered, blocks, len(blocks), residents.limit, residents.count,
        overlap.tensor_excludes_mufu, residents.dram_share, overlap.issue_lost,
    )  # fmt: skip
    size = library().sass_size(program.handle, None)
    times = (ctypes.c_double * len(_names("sass_time_names")))()
    issues, stalls = np.zeros(size, np.uint64), np.zeros((size, len(stall_names())))
    message = ctypes.create_string_buffer(_MESSAGE)
    status = library().sass_time(
        program.handle, launch.reference(), ctypes.byref(asked), times,
        issues.ctypes.data_as(ctypes.POINTER(ctypes.c_uint64)), stalls.ctypes.data_as(_DOUBLES), message, _MESSAGE,
    )  # fmt: skip
    check(status, message)
    return Timed(dict(zip(_names("sass_time_names"), times, strict=True)), issues, stalls)
