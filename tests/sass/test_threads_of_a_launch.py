"""Blocks that cannot tell each other anything run on several threads; what is found and computed is the same."""

from __future__ import annotations

import numpy as np
import pytest

from evoengine.devices.base import KernelCrashed, KernelRaced, TensorArgument
from evoengine.sass import core
from evoengine.sass.core import Races
from evoengine.sass.launch import Geometry, prepare
from tests.support.machine_code import compiled_kernels

BLOCKS, THREADS = 40, 64
TEXT = r"""
extern "C" __global__ void reversed(const int* in, int* out) {
  __shared__ int part[64];
  part[threadIdx.x] = in[blockIdx.x * 64 + threadIdx.x];
  __syncthreads();
  out[blockIdx.x * 64 + threadIdx.x] = part[63 - threadIdx.x] * 3;
  if (threadIdx.x == 0 && in[0] == -1) printf("block %d\n", blockIdx.x);
}
extern "C" __global__ void overlapping(const int* in, int* out) { out[blockIdx.x * 63 + threadIdx.x] = blockIdx.x; }
extern "C" __global__ void flagged(const int* in, int* out) {
  out[blockIdx.x * 64 + threadIdx.x] = in[0];
  out[2560] = 1;
}
extern "C" __global__ void reading(const int* in, int* out) {
  if (blockIdx.x == 39) out[0] = 4;
  out[blockIdx.x * 64 + threadIdx.x + 1] = blockIdx.x == 2 ? out[0] : 0;
}
extern "C" __global__ void unordered(const int* in, int* out) {
  __shared__ int part[64];
  part[threadIdx.x] = in[threadIdx.x];
  if (blockIdx.x != 17) __syncthreads();
  out[blockIdx.x * 64 + threadIdx.x] = part[63 - threadIdx.x];
}
extern "C" __global__ void outside(const int* in, int* out) {
  out[blockIdx.x == 30 ? 100000 : blockIdx.x * 64 + threadIdx.x] = 1;
}
extern "C" __global__ void counted(const int* in, int* out) { atomicAdd(out + 2560, 1); }
"""


def ran(entry: str, threads: int, first: int = 5, races: Races = Races.ALL) -> np.ndarray:
    kernel, program = compiled_kernels(TEXT, "sm_90a")[entry]
    values = np.arange(BLOCKS * THREADS, dtype=np.int32)
    values[0] = first
    out = np.empty(BLOCKS * THREADS + 1, np.int32)
    arguments = [TensorArgument("in", values), TensorArgument("out", out, output=True)]
    launch = prepare(kernel, Geometry((BLOCKS, 1, 1), (THREADS, 1, 1)), arguments, 3)
    core.run(program, launch, races=races, threads=threads)
    return launch.results()["out"]


def test_results_and_what_is_printed_do_not_depend_on_the_number_of_threads():
    alone = ran("reversed", 1)
    assert all(np.array_equal(ran("reversed", threads), alone) for threads in (2, 3, 16))
    ran("reversed", 3, first=-1)
    assert core.printed() == "".join(f"block {n}\n" for n in range(BLOCKS))


@pytest.mark.parametrize("entry", ["overlapping", "reading"])
def test_a_race_of_blocks_that_different_threads_run_is_found(entry):
    with pytest.raises(KernelRaced):
        ran(entry, 1)
    for threads in (2, 5):
        with pytest.raises(KernelRaced):
            ran(entry, threads)
        ran(entry, threads, races=Races.NONE)


def test_one_thread_tells_that_blocks_store_the_same():
    with pytest.raises(KernelRaced, match="blocks touch the same memory"):
        ran("flagged", 4)
    assert ran("flagged", 1)[2560] == 1


def test_a_fault_within_a_block_is_that_of_the_first_block_that_has_one():
    for threads in (1, 4):
        with pytest.raises(KernelRaced, match=r"block \(17, 0, 0\)"):
            ran("unordered", threads)
        with pytest.raises(KernelCrashed, match=r"block \(30, 0, 0\).*outside all tensors"):
            ran("outside", threads)


def test_blocks_that_may_talk_run_on_one_thread():
    assert ran("counted", 8)[2560] == ran("counted", 1)[2560] == BLOCKS * THREADS - 1
