"""Barriers that a binary declares are compared with those that its code uses."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from evoengine.devices.base import KernelCrashed, TensorArgument
from evoengine.records import Launch
from evoengine.sass.core import Program, run
from evoengine.sass.launch import prepare
from tests.support.exhaustive import more
from tests.support.machine_code import compiled

NAMED = """
extern "C" __global__ void kernel(const int* a, int* o) {
    __shared__ int held[64];
    held[threadIdx.x] = a[threadIdx.x];
    asm volatile("bar.sync NUMBER, 64;" ::: "memory");
    o[threadIdx.x] = held[63 - threadIdx.x];
}
"""
COMPUTED = NAMED.replace(
    'asm volatile("bar.sync NUMBER, 64;" ::: "memory")',
    'asm volatile("bar.sync %0, 64;" :: "r"(a[64] + NUMBER) : "memory")',
)
INITIALISED = """
extern "C" __global__ void kernel(const int* a, int* o) {
    __shared__ unsigned long long barriers[2];
    unsigned first = __cvta_generic_to_shared(barriers);
    if (threadIdx.x == 0) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 64;" :: "r"(first) : "memory");
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 32;" :: "r"(first + 8) : "memory");
    }
    __syncthreads();
    o[threadIdx.x] = a[threadIdx.x];
}
"""


def launch(kernel, program: Program) -> None:
    values = np.zeros(65, np.int32)
    arguments = [TensorArgument("a", values), TensorArgument("o", np.zeros(64, np.int32), output=True)]
    run(program, prepare(kernel, Launch((1, 1, 1), 64, 0), arguments, 0))


@pytest.mark.parametrize("arch", ["sm_90a", *more(["sm_75", "sm_80"])])
@pytest.mark.parametrize("number", [0, 5])
def test_a_named_barrier_beyond_those_that_are_declared_is_reported(number, arch):
    kernel, program = compiled(NAMED.replace("NUMBER", str(number)), arch)
    assert kernel.barriers == number + 1
    launch(kernel, program)
    with pytest.raises(KernelCrashed, match=f"names barrier {number}, and the binary declares {number} barriers"):
        launch(replace(kernel, barriers=number), program)


@pytest.mark.parametrize("arch", ["sm_90a", *more(["sm_75"])])
def test_so_is_one_whose_number_is_computed(arch):
    kernel, program = compiled(COMPUTED.replace("NUMBER", "7"), arch)
    assert kernel.barriers == 16
    launch(kernel, program)
    with pytest.raises(KernelCrashed, match="BAR with barrier 7: the binary declares 7"):
        launch(replace(kernel, barriers=7), program)


def test_an_mbarrier_beyond_those_that_are_declared_is_reported():
    kernel, program = compiled(INITIALISED, "sm_90a")
    assert kernel.mbarriers == 2
    launch(kernel, program)
    launch(replace(kernel, mbarriers=None), program)
    with pytest.raises(KernelCrashed, match="initialises an mbarrier beyond the 1 that the binary declares"):
        launch(replace(kernel, mbarriers=1), program)
