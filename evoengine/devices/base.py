"""What every device that runs kernels shares: the arguments of a launch and the ways a launch can fail."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from evoengine.records import Outcome

LAUNCH_SECONDS = 10.0
"""what a launch on a GPU may take beside its work: a gate case takes milliseconds"""
SLOWEST_TFLOPS = 0.5
"""a kernel that does less for longer than LAUNCH_SECONDS is given up"""


def launch_seconds(flops: float) -> float:
    """How long one launch of so much work may take on a GPU before it is given up."""
    return LAUNCH_SECONDS + flops / SLOWEST_TFLOPS / 1e12


DTYPE_BYTES = {
    "fp64": 8, "fp32": 4, "fp16": 2, "bf16": 2, "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip
"""dtype of a tensor parameter → bytes per element"""


@dataclass(frozen=True, slots=True)
class TensorParameter:
    """A pointer parameter of a kernel: a contiguous tensor that nobody has allocated yet."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """one of DTYPE_BYTES"""
    output: bool = False
    """whether the kernel writes it; writing any other is an error"""

    @property
    def bytes(self) -> int:
        return prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class ConstantParameter:
    """An input that the kernel reads in the `__constant__` variable of that name. It is none of the kernel's
    parameters, and listed behind them."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    contents: str
    """the input tensor that it holds; it may have a name of its own"""

    @property
    def bytes(self) -> int:
        return prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class ConstantArgument:
    """The contents of a `__constant__` variable from its start on; behind all of the kernel's parameters."""

    name: str
    data: np.ndarray


@dataclass(frozen=True, slots=True)
class TensorArgument:
    """A pointer argument. `data` is contiguous; 16-bit floats travel as their uint16 bit patterns."""

    name: str
    data: np.ndarray
    output: bool = False
    """whether the kernel may write it; writing any other is an error"""


@dataclass(frozen=True, slots=True)
class ScalarArgument:
    """A by-value argument; the NumPy type of `value` (int32, int64, float32) is its C type."""

    name: str
    value: np.int32 | np.int64 | np.float32


@dataclass(frozen=True, slots=True)
class TensorMapArgument:
    """A `const __grid_constant__` parameter of 128 bytes: how TMA cuts tiles out of a tensor. See tensor_map.py.

    `dims` and `box` count elements, innermost first, as CUDA does; `strides_bytes` leaves out the innermost.
    """

    name: str
    tensor: str
    """the name of the tensor argument it is a view of"""
    dtype: str
    """fp16, bf16 or fp32"""
    dims: tuple[int, ...]
    strides_bytes: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int
    """bytes: 0, 32, 64 or 128"""


PassedParameter = TensorParameter | ScalarArgument | TensorMapArgument
Parameter = PassedParameter | ConstantParameter
"""one of a kernel's parameters, in its order; tensors by their shapes"""
PassedArgument = TensorArgument | ScalarArgument | TensorMapArgument
Argument = PassedArgument | ConstantArgument
Arguments = Sequence[Argument]
"""in the order of the kernel's parameters, constants behind them"""
Tensors = Mapping[str, np.ndarray]
"""every tensor argument by name, as it stood after the launch"""


class KernelFailure(Exception):
    """A launch that gave no result. The message says why, in the device's own words, with kernel, block and thread."""

    outcome: Outcome


class KernelCrashed(KernelFailure):
    outcome = Outcome.CRASHED


class KernelHung(KernelFailure):
    outcome = Outcome.HUNG


class KernelUnbuildable(KernelFailure):
    """The device cannot even load or build the source."""

    outcome = Outcome.UNCOMPILABLE
