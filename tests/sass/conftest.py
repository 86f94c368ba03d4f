"""Kernels of the emulator's tests, run by their machine code; arguments are read from their signatures."""

from __future__ import annotations

import pytest

from evoengine.devices.base import KernelCall, ScratchArgument
from evoengine.records import Launch
from evoengine.sass.rounds import run_rounds
from tests.support.kernel_arguments import SIGNATURE, argument
from tests.support.machine_code import compiled_kernels, ran


@pytest.fixture(scope="session")
def execute():
    """execute(text, *values, grid, threads, shared, seed, arch) → the tensors by name; a `const T*` is an input."""

    def run_kernel(text, *values, grid=(1, 1, 1), threads=32, shared=0, seed=0, arch="sm_90a"):
        parameters = SIGNATURE.search(text)[2].split(",")
        arguments = [argument(p, v) for p, v in zip(parameters, values, strict=True)]
        return ran(text, arch, arguments, grid, threads, shared, seed)

    return run_kernel


@pytest.fixture(scope="session")
def execute_rounds():
    """execute_rounds(text, rounds, grid, threads, shared, seed, arch) → Executed.

    A round is a list of calls, a call the kernel's name and its values: arrays, numbers and `scratch`.
    """

    def run_calls(text, rounds, grid=(1, 1, 1), threads=32, shared=0, seed=0, arch="sm_90a"):
        parameters = {name: found.split(",") for name, found in SIGNATURE.findall(text)}
        launch = Launch(grid, threads, shared)

        def call(entry, *values):
            return KernelCall(entry, launch, [argument(p, v) for p, v in zip(parameters[entry], values, strict=True)])

        return run_rounds(compiled_kernels(text, arch), [[call(*c) for c in calls] for calls in rounds], seed)

    return run_calls


@pytest.fixture
def scratch():
    """scratch(bytes) → scratch memory that is zeroed; scratch(bytes, zeroed=False) → poisoned."""
    return lambda size, zeroed=True: ScratchArgument("", size, zeroed)
