"""The clock and a block's SM are drawn: a kernel that computes by them is wrong, one that waits by them ends."""

from __future__ import annotations

import numpy as np
import pytest

from evoengine.devices.base import TensorArgument
from evoengine.sass import core
from evoengine.sass.core import Races
from evoengine.sass.launch import Geometry, prepare
from tests.support.machine_code import compiled_kernels

BLOCKS, THREADS = 24, 64
TEXT = r"""
extern "C" __global__ void by_clock(unsigned* out) { out[blockIdx.x * 64 + threadIdx.x] = (unsigned)clock64(); }
extern "C" __global__ void by_timer(unsigned* out) {
  unsigned long long t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
  out[blockIdx.x * 64 + threadIdx.x] = (unsigned)t;
}
extern "C" __global__ void by_date(unsigned* out) {
  unsigned long long t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
  out[blockIdx.x * 64 + threadIdx.x] = t / 1000000000;
}
extern "C" __global__ void by_sm(unsigned* out) {
  unsigned sm;
  asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
  out[blockIdx.x * 64 + threadIdx.x] = sm;
}
extern "C" __global__ void by_slot(unsigned* out) {
  unsigned warp;
  asm volatile("mov.u32 %0, %%warpid;" : "=r"(warp));
  out[blockIdx.x * 64 + threadIdx.x] = warp;
}
extern "C" __global__ void by_launch(unsigned* out) {
  unsigned long long number;
  asm volatile("mov.u64 %0, %%gridid;" : "=l"(number));
  out[blockIdx.x * 64 + threadIdx.x] = (unsigned)number;
}
extern "C" __global__ void by_count(unsigned* out) {
  unsigned sms;
  asm volatile("mov.u32 %0, %%nsmid;" : "=r"(sms));
  out[blockIdx.x * 64 + threadIdx.x] = sms;
}
extern "C" __global__ void waiting(unsigned* out) {
  const long long begin = clock64();
  while (clock64() - begin < 20000) {}
  out[blockIdx.x * 64 + threadIdx.x] = 7;
}
"""


def ran(entry: str, seed: int, threads: int = 1) -> np.ndarray:
    kernel, program = compiled_kernels(TEXT, "sm_90a")[entry]
    out = TensorArgument("out", np.zeros(BLOCKS * THREADS, np.uint32), output=True)
    launch = prepare(kernel, Geometry((BLOCKS, 1, 1), (THREADS, 1, 1)), [out], seed)
    core.run(program, launch, races=Races.ALL, threads=threads)
    return launch.results()["out"]


@pytest.mark.parametrize("entry", ["by_clock", "by_timer", "by_sm", "by_slot", "by_launch"])
def test_a_result_by_clock_or_place_differs_from_launch_to_launch(entry):
    assert not np.array_equal(ran(entry, 1), ran(entry, 2))
    assert np.array_equal(ran(entry, 1), ran(entry, 1)), "a seed repeats a launch"


def test_an_sm_is_one_of_those_that_the_chip_has():
    found = ran("by_sm", 3)
    assert found.max() < 132 and len(np.unique(found)) > BLOCKS // 2


def test_the_number_of_sms_is_that_of_a_chip():
    assert (ran("by_count", 3) == 132).all()


def test_the_global_timer_counts_nanoseconds_since_1970_as_that_of_a_gpu():
    assert (ran("by_date", 6) > 1_700_000_000).all()


def test_a_wait_for_some_clocks_ends():
    assert (ran("waiting", 4) == 7).all()


def test_the_number_of_threads_decides_nothing():
    assert np.array_equal(ran("by_clock", 5, threads=2), ran("by_clock", 5, threads=3))
