"""Kernels as strings, run as they stand: names and directions of the arguments are read from the kernel's signature."""

from __future__ import annotations

import math

import numpy as np
import pytest

from evoengine.cuda_emulator.build import build
from evoengine.cuda_emulator.run import run, run_rounds
from evoengine.devices.base import KernelCall, ScratchArgument
from evoengine.records import Launch, Source
from tests.support.kernel_arguments import SIGNATURE, argument


@pytest.fixture(scope="session")
def emulate():
    """emulate(text, *values, grid, threads, shared, seed, timeout) → the tensors by name; a `const T*` is an input.

    `threads` of a block: their number, or those along x, y and z.
    """

    def run_kernel(text, *values, grid=(1, 1, 1), threads=32, shared=0, seed=0, timeout=20.0):
        entry, parameters = SIGNATURE.search(text).groups()
        x, *yz = (threads, 1, 1) if isinstance(threads, int) else threads
        launch = Launch(grid, x * math.prod(yz), shared, tuple(yz))
        arguments = [argument(p, v) for p, v in zip(parameters.split(","), values, strict=True)]
        return run(build(Source(text, entry, launch), "sm_90a"), entry, launch, arguments, seed, timeout)

    return run_kernel


@pytest.fixture(scope="session")
def emulate_rounds():
    """emulate_rounds(text, rounds, grid, threads, shared, seed, arch) → Executed.

    A round is a list of calls, a call the kernel's name and its values: arrays, numbers and `scratch`.
    """

    def run_calls(text, rounds, grid=(1, 1, 1), threads=32, shared=0, seed=0, arch="sm_90a"):
        launch = Launch(grid, threads, shared)
        parameters = {name: found.split(",") for name, found in SIGNATURE.findall(text)}

        def call(entry, *values):
            return KernelCall(entry, launch, [argument(p, v) for p, v in zip(parameters[entry], values, strict=True)])

        executable = build(Source(text, next(iter(parameters)), launch), arch)
        return run_rounds(executable, [[call(*c) for c in calls] for calls in rounds], seed, 60.0)

    return run_calls


@pytest.fixture
def scratch():
    """scratch(bytes) → scratch memory that is zeroed; scratch(bytes, zeroed=False) → poisoned."""
    return lambda size, zeroed=True: ScratchArgument("", size, zeroed)


@pytest.fixture
def floats():
    """floats(n, …) → zeros to be written, float32."""
    return lambda *shape: np.zeros(shape, np.float32)
