"""Kernels of the emulator's tests, run by their machine code; arguments are read from their signatures."""

from __future__ import annotations

import pytest

from tests.support.kernel_arguments import SIGNATURE, argument
from tests.support.machine_code import ran


@pytest.fixture(scope="session")
def execute():
    """execute(text, *values, grid, threads, shared, seed, arch) → the tensors by name; a `const T*` is an input."""

    def run_kernel(text, *values, grid=(1, 1, 1), threads=32, shared=0, seed=0, arch="sm_90a"):
        parameters = SIGNATURE.search(text)[2].split(",")
        arguments = [argument(p, v) for p, v in zip(parameters, values, strict=True)]
        return ran(text, arch, arguments, grid, threads, shared, seed)

    return run_kernel
