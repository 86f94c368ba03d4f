"""Common types of all devices that run kernels: the arguments of a launch, and the ways in which it can fail."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from math import prod
from typing import Any, NamedTuple

import numpy as np

from evoengine.records import Launch, Outcome

LAUNCH_SECONDS = 10.0
"""time limit of a launch on a GPU in addition to its work; a gate case takes milliseconds"""
SLOWEST_TFLOPS = 0.5
"""rate below which a kernel is aborted after LAUNCH_SECONDS"""


def launch_seconds(flops: float) -> float:
    """Return the time limit in seconds of one launch of `flops` operations on a GPU."""
    return LAUNCH_SECONDS + flops / SLOWEST_TFLOPS / 1e12


DTYPE_BYTES = {
    "fp64": 8, "fp32": 4, "fp16": 2, "bf16": 2, "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
    "fp8_e4m3": 1, "fp8_e5m2": 1,
}  # fmt: skip # a table
"""dtype of a tensor parameter → bytes per element"""


@dataclass(frozen=True, slots=True)
class TensorParameter:
    """A pointer parameter of a kernel: a contiguous tensor that is not yet allocated."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """one of DTYPE_BYTES"""
    output: bool = False
    """whether the kernel writes it; writing any other is an error"""
    inout: bool = False
    """whether an output has contents before each launch, which the kernel may read"""
    writes: tuple[range, ...] | None = None
    """the indices along each dimension of an output that the kernel writes; None for all"""
    passed: bool = True
    """whether it is a parameter itself; else only tensor maps and structs point to it"""

    @property
    def bytes(self) -> int:
        return prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class ConstantParameter:
    """An input that the kernel reads in the `__constant__` variable of that name.

    It is not one of the kernel's parameters, and listed after them.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    contents: str
    """the input tensor that it holds, whose name may differ"""

    @property
    def bytes(self) -> int:
        return prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class ConstantArgument:
    """The contents of a `__constant__` variable from its start; listed after all of the kernel's parameters."""

    name: str
    data: np.ndarray


@dataclass(frozen=True, slots=True)
class TensorArgument:
    """A pointer argument. `data` is contiguous; floats of 16 and 8 bits are passed as uint16 and uint8 patterns."""

    name: str
    data: np.ndarray
    output: bool = False
    """whether the kernel may write it; writing any other is an error"""
    inout: bool = False
    """whether an output has these contents before each launch, and no poison"""
    passed: bool = True
    """whether it is a parameter itself; else only tensor maps and structs point to it"""


@dataclass(frozen=True, slots=True)
class ScalarArgument:
    """A by-value argument; the NumPy type of `value` (int32, int64, float32) is its C type, np.void its bytes."""

    name: str
    value: np.int32 | np.int64 | np.float32 | np.void


@dataclass(frozen=True, slots=True)
class TensorMapArgument:
    """A `const __grid_constant__` parameter of 128 bytes: how TMA cuts tiles out of a tensor. See tensor_map.py.

    `dims` and `box` count elements, innermost first, as CUDA does; `strides_bytes` leaves out the innermost.
    """

    name: str
    tensor: str
    """the name of the tensor argument it is a view of"""
    dtype: str
    """uint8, uint16, uint32, int32, uint64, int64, fp16, bf16, fp32 or fp64"""
    dims: tuple[int, ...]
    strides_bytes: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int
    """bytes: 0, 32, 64 or 128"""
    offset: int = 0
    """bytes from the tensor's start to the view's"""
    nan: bool = False
    """whether what lies outside of the tensor reads as NaN; else as zero"""


@dataclass(frozen=True, slots=True)
class ScratchParameter:
    """A pointer parameter to memory that carries nothing into a problem or out of it: partial results, counters.

    It is poisoned before the first launch, or zeroed where `zeroed`, and keeps its contents from launch to launch, as a
    workspace that a host program allocates once does. A kernel that leaves a counter raised is wrong the second time.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    """one of DTYPE_BYTES"""
    zeroed: bool = False
    passed: bool = True
    """as of TensorParameter"""

    @property
    def bytes(self) -> int:
        return prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class ScratchArgument:
    """A pointer argument to scratch memory of `bytes` bytes, zeroed before the first launch or poisoned."""

    name: str
    bytes: int
    zeroed: bool = False
    passed: bool = True
    """as of TensorParameter"""


@dataclass(frozen=True, slots=True)
class PointerArgument:
    """A pointer `offset` bytes into the tensor or the scratch memory of that name."""

    name: str
    memory: str
    offset: int = 0


@dataclass(frozen=True, slots=True)
class StructArgument:
    """A struct parameter of `bytes` bytes: each part lies at its offset, all else is zero.

    A part is a scalar, a pointer or a tensor map, and in the executor's own launches also memory.
    """

    name: str
    bytes: int
    parts: tuple[tuple[int, Any], ...]


PassedParameter = TensorParameter | ScratchParameter | ScalarArgument | TensorMapArgument | StructArgument
Parameter = PassedParameter | ConstantParameter
"""one of a kernel's parameters, in its order; tensors by their shapes"""
PassedArgument = TensorArgument | ScratchArgument | ScalarArgument | TensorMapArgument | StructArgument
Argument = PassedArgument | ConstantArgument
Arguments = Sequence[Argument]
"""in the order of the kernel's parameters, followed by constants"""


def viewed(argument: object) -> tuple[str, ...]:
    """Return the names of the tensors and the scratch memory to which an argument or a field points by itself."""
    if isinstance(argument, TensorMapArgument):
        return (argument.tensor,)
    if isinstance(argument, PointerArgument):
        return (argument.memory,)
    if isinstance(argument, StructArgument):
        return tuple(name for _, part in argument.parts for name in viewed(part))
    return ()


def is_passed(argument: object) -> bool:
    """Return whether an argument is one of the kernel's parameters: no constant, and not viewed alone."""
    return not isinstance(argument, ConstantArgument | ConstantParameter) and getattr(argument, "passed", True)


Tensors = Mapping[str, np.ndarray]
"""every tensor argument by name, in its state after the launch"""


class KernelCall(NamedTuple):
    """One kernel of a round."""

    entry: str
    launch: Launch
    arguments: Arguments


Round = Sequence[KernelCall]
"""kernels in stream order: each begins when its predecessor has ended. Arguments of one name are one tensor"""


class VisitKind(IntEnum):
    """What a warp did at a site."""

    WAIT = 0
    """a wait for an mbarrier that succeeded; the site is the barrier's address in shared memory"""
    COPY_WAIT = 1
    """a wait for groups of cp.async; the site is the source line, or the instruction's address"""
    PRODUCT = 2
    """a matrix product (wmma, mma.sync, wgmma), counted by products of 8 × 8 × 4, of which instructions have unlike
    numbers; the site is the source line, or the instruction's address"""
    VOTE = 3
    """a vote or a reduction of a warp; `true` counts those that came out true in the warp's first lane"""


VISIT = np.dtype([("block", "u8"), ("warp", "u4"), ("kind", "u1"), ("site", "u8"), ("count", "u8"), ("true", "u8")])
"""how often a warp of a block (by its number in the grid) was at a site in the first round"""


@dataclass(frozen=True, slots=True)
class Executed:
    """The results of some rounds on a device."""

    tensors: Sequence[Tensors]
    """for each round, every tensor argument by name in its state after the round"""
    unwritten: Mapping[str, int] = field(default_factory=dict)
    """output → number of elements to which the first round did not store; complete outputs are left out"""
    visits: np.ndarray = field(default_factory=lambda: np.empty(0, VISIT))
    """[n] VISIT; empty for a device that does not count"""


RunRounds = Callable[[Sequence[Round], int], Executed]
"""Runs rounds over the same memory with a seed for the device's own choices; raises KernelFailure.

Before each round inputs get the contents that its arguments give. Outputs and scratch memory are poisoned (scratch
zeroed where it says so) before the first round alone: later rounds find what earlier ones left.
"""


class KernelFailure(Exception):
    """A launch without a result. The message is the device's reason, with kernel, block and thread."""

    outcome: Outcome


class KernelCrashed(KernelFailure):
    outcome = Outcome.CRASHED


class KernelRaced(KernelCrashed):
    """Nothing orders two accesses to memory of which one is a write; on a GPU the launch may seem to succeed."""


class KernelHung(KernelFailure):
    outcome = Outcome.HUNG


class KernelUnbuildable(KernelFailure):
    """The device cannot even load or build the source."""

    outcome = Outcome.UNCOMPILABLE
