"""Kernels as strings, compiled by NVRTC and run by their machine code; arguments are read from their signatures."""

from __future__ import annotations

from functools import cache

import pytest

from evoengine.records import Launch, Source
from evoengine.sass.core import Program, run
from evoengine.sass.cubin import read_kernel
from evoengine.sass.launch import prepare
from evoengine.sass.listing import disassemble
from evoengine.stages.compile import compile_source
from tests.devices.emulator.conftest import SIGNATURE, argument

LIMIT = 1_000_000
"""warp instructions of a block; a test's kernel takes a few thousands"""


@cache
def compiled(text: str, arch: str):
    """The kernel, and its program for the executor."""
    entry = SIGNATURE.search(text)[1]
    cubin = compile_source(Source(text, entry, Launch((1, 1, 1), 32, 0)), arch).cubin
    program = Program(disassemble(cubin), entry)
    assert program.unknown == {}
    return read_kernel(cubin, entry), program


@pytest.fixture(scope="session")
def execute():
    """execute(text, *values, grid, threads, shared, seed, arch) → the tensors by name; a `const T*` is an input."""

    def run_kernel(text, *values, grid=(1, 1, 1), threads=32, shared=0, seed=0, arch="sm_90a"):
        kernel, program = compiled(text, arch)
        parameters = SIGNATURE.search(text)[2].split(",")
        arguments = [argument(p, v) for p, v in zip(parameters, values, strict=True)]
        launch = prepare(kernel, Launch(grid, threads, shared), arguments, seed)
        run(program, launch, limit=LIMIT)
        return launch.results()

    return run_kernel
