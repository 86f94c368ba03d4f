"""What tests of the executor share: CUDA text compiled by NVRTC and run on machine code, NumPy arrays in and out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from evoengine import records
from evoengine.cuda_files import disassembler
from evoengine.devices.base import Argument, TensorArgument, Tensors
from evoengine.errors import MachineError
from evoengine.records import Source
from evoengine.sandbox.host_compiler import find_compiler
from evoengine.sass.core import Program, run
from evoengine.sass.cubin import Kernel, read_kernel
from evoengine.sass.launch import Geometry, prepare
from evoengine.sass.rounds import Executable
from evoengine.stages.compile import compile_source
from tests.support.exhaustive import more
from tests.support.kernel_arguments import SIGNATURE

ARCHS = ("sm_75", "sm_80", "sm_89", "sm_120", "sm_90a")
"""one of each generation: sm_86 has the instructions of sm_80"""
SOME_ARCHS = ["sm_90a", *more(ARCHS[:-1])]
"""as cases: what one test shows of every generation, `make test` shows of others in one"""
ENTRY = "kernel"
LIMIT = 1_000_000
"""warp instructions of a block; a test's kernel takes a few thousands"""


def require_tools() -> None:
    """Skips the test where this machine cannot execute machine code."""
    if disassembler() is None:
        pytest.skip("needs nvdisasm")
    require_compiler()


def require_compiler() -> None:
    """Skips the test where this machine cannot build the executor."""
    try:
        find_compiler()
    except MachineError as error:
        pytest.skip(f"needs a C++ compiler: {error}")


def compiled(text: str, arch: str) -> tuple[Kernel, Program]:
    """The text's first kernel, and its program; every opcode must be known."""
    return next(iter(compiled_kernels(text, arch).values()))


def program_of(text: str, entry: str, arch: str = "sm_90a") -> tuple[Program, Kernel]:
    """Return what the model times of the text's kernel of that name."""
    kernel, program = compiled_kernels(text, arch)[entry]
    return program, kernel


@cache
def compiled_kernels(text: str, arch: str) -> dict[str, Executable]:
    """The text's kernels by name; every opcode must be known."""
    require_tools()
    entries = [name for name, _ in SIGNATURE.findall(text)]
    binary = compile_source(Source(text, entries[0], launch_of(entries)), arch)
    programs = {entry: Program(binary.listing, entry) for entry in entries}
    assert not any(program.unknown for program in programs.values()), programs
    return {entry: Executable(read_kernel(binary.cubin, entry), program) for entry, program in programs.items()}


def launch_of(entries: Sequence[str]) -> records.Launch:
    """A launch of kernels one after the other, whose sizes do not matter."""
    one = records.Launch((1, 1, 1), 32, 0)
    return replace(one, then=tuple(records.NextKernel(entry, one) for entry in entries[1:]))


def ran(
    text: str, arch: str, arguments: Sequence[Argument], grid: int | tuple[int, int, int],
    threads: int | tuple[int, int, int], shared_bytes: int, seed: int,
) -> Tensors:  # fmt: skip
    """The tensors that the kernel's launch with these arguments leaves, by name."""
    kernel, program = compiled(text, arch)
    launch = prepare(kernel, Geometry(_three(grid), _three(threads), shared_bytes), arguments, seed)
    run(program, launch, limit=LIMIT)
    return launch.results()


def execute(
    text: str, arch: str, inputs: Mapping[str, np.ndarray], outputs: Mapping[str, tuple[type, tuple[int, ...]]],
    threads: int | tuple[int, int, int] = 32, grid: int | tuple[int, int, int] = 1, shared_bytes: int = 0,
) -> dict[str, np.ndarray]:  # fmt: skip
    """The outputs of `kernel(inputs…, outputs…)`, all of them pointers."""
    arguments = [TensorArgument(name, data) for name, data in inputs.items()]
    arguments += [TensorArgument(name, np.empty(shape, dtype), output=True) for name, (dtype, shape) in outputs.items()]
    results = ran(text, arch, arguments, grid, threads, shared_bytes, seed=0)
    return {name: array for name, array in results.items() if name in outputs}


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
