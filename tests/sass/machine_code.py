"""What tests of the executor share: CUDA text compiled by NVRTC and executed on NumPy arrays as machine code."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import numpy as np

from evoengine import records
from evoengine.devices.base import TensorArgument
from evoengine.records import Binary, Source
from evoengine.sass.core import Program, run
from evoengine.sass.cubin import read_kernel
from evoengine.sass.launch import Geometry, prepare
from evoengine.stages.compile import compile_source

ARCHS = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90a")
ENTRY = "kernel"


@cache
def compiled(text: str, arch: str) -> Binary:
    return compile_source(Source(text, ENTRY, records.Launch((1, 1, 1), 32, 0)), arch)


@cache
def program(text: str, arch: str) -> Program:
    return Program(compiled(text, arch).listing, ENTRY)


def execute(
    text: str, arch: str, inputs: Mapping[str, np.ndarray], outputs: Mapping[str, tuple[type, tuple[int, ...]]],
    threads: int | tuple[int, int, int] = 32, grid: int | tuple[int, int, int] = 1, shared_bytes: int = 0,
) -> dict[str, np.ndarray]:  # fmt: skip
    """The outputs of `kernel(inputs…, outputs…)`, all of them pointers; every opcode must be known."""
    code = program(text, arch)
    assert code.unknown == {}, code.unknown
    arguments = [TensorArgument(name, data) for name, data in inputs.items()]
    arguments += [TensorArgument(name, np.empty(shape, dtype), output=True) for name, (dtype, shape) in outputs.items()]
    geometry = Geometry(_three(grid), _three(threads), shared_bytes)
    launch = prepare(read_kernel(compiled(text, arch).cubin, ENTRY), geometry, arguments, seed=0)
    run(code, launch)
    return {name: array for name, array in launch.results().items() if name in outputs}


def _three(sizes: int | tuple[int, int, int]) -> tuple[int, int, int]:
    return (sizes, 1, 1) if isinstance(sizes, int) else sizes


def elementwise(arguments: Mapping[str, str], result: str, expressions: list[str], before: str = "") -> str:
    """A kernel that writes each expression of its arguments' elements, [expression][element]: argument → C type."""
    parameters = ", ".join(f"const {kind}* {name}_" for name, kind in arguments.items())
    reads = " ".join(f"{kind} {name} = {name}_[i];" for name, kind in arguments.items())
    writes = "\n".join(f"  out[{k} * n + i] = {expression};" for k, expression in enumerate(expressions))
    return f"""{before}
extern "C" __global__ void {ENTRY}({parameters}, {result}* out) {{
  int n = gridDim.x * blockDim.x, i = blockIdx.x * blockDim.x + threadIdx.x;
  {reads}
{writes}
}}
"""
