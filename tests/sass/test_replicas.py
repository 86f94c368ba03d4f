"""Races of warps that load the same element, of which one stores it, are let pass where that is asked for."""

from __future__ import annotations

import numpy as np
import pytest

from evoengine.devices.base import KernelRaced, PointerArgument
from evoengine.sass.core import Races, run
from evoengine.sass.launch import Geometry, HostMemory, prepare
from tests.support.machine_code import compiled, require_tools

# what the second warp loads decides about a store that never happens, so that the compiler keeps the load
DOUBLE = """
extern "C" __global__ void kernel(float* x) {
  float v = x[threadIdx.x % 32];
  if (threadIdx.x < 32) x[threadIdx.x] = 2 * v;
  else if (v == -1) x[threadIdx.x] = v;
}
"""
# the second warp loads what is stored by an instruction of its own
APART = """
extern "C" __global__ void kernel(float* x) {
  if (threadIdx.x < 32) x[threadIdx.x] = 2 * x[threadIdx.x];
  else x[threadIdx.x] = 3 * x[threadIdx.x - 32];
}
"""
# all load by one instruction, and the first warp stores what it has not loaded
SHIFTED = """
extern "C" __global__ void kernel(float* x) {
  float v = x[threadIdx.x];
  if (threadIdx.x < 32) x[threadIdx.x + 32] = 2 * v;
  else if (v == -1) x[threadIdx.x] = v;
}
"""
# both warps store by one instruction what they have loaded by another one: the second needs what the first one replaces
SPREAD = """
extern "C" __global__ void kernel(float* x) { x[threadIdx.x] = 2 * x[threadIdx.x % 32]; }
"""
# one number for all, on which a branch of the second warp depends
FLAG = """
extern "C" __global__ void kernel(float* x) {
  float v = x[0];
  if (threadIdx.x == 0) x[0] = v + 1;
  else if (threadIdx.x >= 32 && v == 0) x[threadIdx.x] = -1;
}
"""

# one number for all, which every warp loads and the first thread alone adds to, as Triton compiles it
COUNTED = """
extern "C" __global__ void kernel(float* x) {
  float v;
  asm volatile("ld.global.f32 %0, [%1];" : "=f"(v) : "l"(x));
  v = v * 2 + 1;
  asm volatile("{ .reg .pred p; setp.eq.u32 p, %2, 0; @p st.global.f32 [%0], %1; }"
               :: "l"(x), "f"(v), "r"(threadIdx.x));
  REST
}
"""


def launched(text: str, races: Races, seed: int) -> np.ndarray:
    require_tools()
    kernel, program = compiled(text, "sm_90a")
    x = np.arange(64, dtype=np.float32)
    memory, arguments = [HostMemory("x", x.view(np.uint8))], [PointerArgument("x", "x")]
    launch = prepare(kernel, Geometry((1, 1, 1), (64, 1, 1)), arguments, seed, mapped=memory)
    run(program, launch, races=races)
    return x


@pytest.mark.parametrize("seed", range(4))
def test_replicas_race_only_where_all_races_are_looked_for(seed):
    assert launched(DOUBLE, Races.NO_REPLICAS, seed).tolist() == [*range(0, 64, 2), *range(32, 64)]
    with pytest.raises(KernelRaced, match="nothing orders the two"):
        launched(DOUBLE, Races.ALL, seed)
    launched(APART, Races.NONE, seed)


@pytest.mark.parametrize("seed", range(4))
def test_a_number_that_all_load_goes_nowhere_where_one_store_alone_uses_it(seed):
    assert launched(COUNTED.replace("REST", ""), Races.NO_REPLICAS, seed).tolist() == [1, *range(1, 64)]
    for use in ("if (threadIdx.x == 40) x[9] = v;", "if (v > 4) x[9] = 0;", "x[9 + int(v) % 2] = 0;"):
        with pytest.raises(KernelRaced, match="nothing orders the two"):
            launched(COUNTED.replace("REST", use), Races.NO_REPLICAS, seed)


@pytest.mark.parametrize("seed", range(4))
def test_a_store_races_with_a_load_that_is_no_replica_of_its_own(seed):
    for text in (APART, SHIFTED, SPREAD, FLAG):
        with pytest.raises(KernelRaced, match="nothing orders the two"):
            launched(text, Races.NO_REPLICAS, seed)
