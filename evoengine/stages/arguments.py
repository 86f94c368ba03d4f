"""Create a kernel's arguments from host memory, tensors as bit patterns, outputs poisoned, and read outputs back."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from evoengine.devices.base import (
    Argument,
    ConstantArgument,
    ConstantParameter,
    KernelCall,
    Parameter,
    ScratchArgument,
    ScratchParameter,
    TensorArgument,
    TensorParameter,
    Tensors,
)
from evoengine.records import Launch
from evoengine.workloads.base import AnyWorkload, Inputs, Outputs, taken
from evoengine.workloads.dtypes import TORCH_DTYPES

POISON = 0xFF
"""bytes of NaN in every floating-point type, of -1 in signed integers"""


def make_arguments(parameters: Sequence[Parameter], inputs: Inputs) -> tuple[Argument, ...]:
    """Return all parameters with contents: inputs by name, outputs filled with POISON, scratch memory by its size."""
    return tuple(_argument(p, inputs) for p in parameters)


def make_round(workload: AnyWorkload, launch: Launch, arguments: Sequence[Argument]) -> list[KernelCall]:
    """Return the kernels of a launch in stream order, each with those of a candidate's arguments that it takes."""
    return [
        KernelCall(entry, geometry, taken(workload, entry, arguments))
        for entry, geometry in launch.kernels(workload.entry)
    ]


def _argument(parameter: Parameter, inputs: Inputs) -> Argument:
    if isinstance(parameter, ConstantParameter):
        return ConstantArgument(parameter.name, as_bytes(inputs[parameter.name]))
    if isinstance(parameter, ScratchParameter):
        return ScratchArgument(parameter.name, parameter.bytes, parameter.zeroed)
    if not isinstance(parameter, TensorParameter):
        return parameter
    data = np.full(parameter.bytes, POISON, np.uint8) if parameter.output else as_bytes(inputs[parameter.name])
    bits = np.uint16 if parameter.dtype in ("fp16", "bf16") else np.dtype(_NUMPY[parameter.dtype])
    return TensorArgument(parameter.name, data.view(bits).reshape(parameter.shape), parameter.output)


_NUMPY = {
    "fp64": "f8", "fp32": "f4", "int64": "i8", "int32": "i4", "int16": "i2", "int8": "i1", "uint8": "u1", "bool": "u1",
}  # fmt: skip # a table


def as_bytes(tensor: torch.Tensor) -> np.ndarray:
    """Return a tensor's contents, uint8 [bytes], wherever it lies."""
    return tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def read_outputs(parameters: Sequence[Parameter], after: Tensors) -> Outputs:
    """Return the outputs after a launch as torch tensors."""
    outputs = [p for p in parameters if isinstance(p, TensorParameter) and p.output]
    return {p.name: _tensor(p, after[p.name]) for p in outputs}


def _tensor(parameter: TensorParameter, data: np.ndarray) -> torch.Tensor:
    flat = torch.from_numpy(np.ascontiguousarray(data).reshape(-1).view(np.uint8).copy())
    return flat.view(TORCH_DTYPES[parameter.dtype]).reshape(parameter.shape)
