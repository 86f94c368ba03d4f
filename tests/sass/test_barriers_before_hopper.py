"""mbarriers of sm_80 to sm_89, whose words the program itself stores, adds to and compares, in place of SYNCS."""

from __future__ import annotations

import numpy as np
import pytest

from evoengine.devices.base import KernelCrashed, KernelRaced
from tests.support.exhaustive import more

SEEDS = range(3)

# Two warps hand tiles of 64 numbers on: the first copies them, the second waits for them and gives the place back.
RING = """
__device__ bool passed(unsigned barrier, unsigned parity) {
    int p;
    asm volatile("{ .reg .pred q; mbarrier.test_wait.parity.shared.b64 q, [%1], %2; selp.s32 %0, 1, 0, q; }"
                 : "=r"(p) : "r"(barrier), "r"(parity) : "memory");
    return p;
}
__device__ void arrive(unsigned barrier) {
    unsigned long long state;
    asm volatile("mbarrier.arrive.shared.b64 %0, [%1];" : "=l"(state) : "r"(barrier) : "memory");
}
extern "C" __global__ void __launch_bounds__(64) f(const float* a, float* o, int tiles) {
    __shared__ __align__(16) float place[64];
    __shared__ unsigned long long barriers[2];
    const unsigned full = unsigned(__cvta_generic_to_shared(barriers)), empty = full + 8, lane = threadIdx.x % 32;
    if (threadIdx.x < 2)
        asm volatile("mbarrier.init.shared.b64 [%0], COUNT;" :: "r"(full + 8 * threadIdx.x) : "memory");
    __syncthreads();
    for (int t = 0; t < tiles; ++t)
        if (threadIdx.x < 32) {
            while (!passed(empty, t % 2 ^ 1)) {}
            asm volatile("cp.async.ca.shared.global [%0], [%1], 8;"
                         :: "r"(unsigned(__cvta_generic_to_shared(place + 2 * lane))), "l"(a + 64 * t + 2 * lane));
            asm volatile("cp.async.mbarrier.arrive.NOINC.shared.b64 [%0];" :: "r"(full) : "memory");
            ARRIVE
        } else {
            WAIT
            o[64 * t + lane] = 2 * place[lane], o[64 * t + 32 + lane] = 2 * place[32 + lane];
            GIVE_BACK
        }
}
"""
COUNTED = {"COUNT": "32", ".NOINC": ".noinc", "ARRIVE": ""}
"""a lane's copies are the arrival that is expected of it"""
ADDED = {"COUNT": "32", ".NOINC": "", "ARRIVE": "arrive(full);"}
"""they are one that is expected beside its own"""
RIGHT = {"WAIT": "while (!passed(full, t % 2)) {}", "GIVE_BACK": "arrive(empty);"}
NO_COPIES = {
    "COUNT": "32",
    'asm volatile("cp.async.mbarrier.arrive.NOINC.shared.b64 [%0];" :: "r"(full) : "memory");': "",
}
TILES = 5


def run(execute, changes, arch="sm_86", seed=0):
    text = RING
    for name, by in changes.items():
        text = text.replace(name, by)
    a = np.arange(64 * TILES, dtype=np.float32)
    found = execute(text, a, np.zeros_like(a), np.int32(TILES), threads=64, seed=seed, arch=arch)
    return a, found["o"]


@pytest.mark.parametrize("arrivals", [COUNTED, ADDED])
@pytest.mark.parametrize("arch", ["sm_86", *more(["sm_80", "sm_89"])])
def test_each_tile_is_handed_on_and_its_place_given_back(execute, arch, arrivals):
    for seed in SEEDS:
        a, o = run(execute, arrivals | RIGHT, arch, seed)
        np.testing.assert_array_equal(o, 2 * a)


@pytest.mark.parametrize(
    "fault", [COUNTED | {"WAIT": "", "GIVE_BACK": "arrive(empty);"}, NO_COPIES | {"ARRIVE": "arrive(full);"} | RIGHT]
)
def test_what_is_read_before_its_copy_is_known_is_a_race_under_every_seed(execute, fault):
    for seed in SEEDS:
        with pytest.raises(KernelRaced):
            run(execute, fault, seed=seed)


def test_an_arrival_where_no_barrier_was_initialised_is_refused(execute):
    with pytest.raises(KernelCrashed, match="none was initialised"):
        run(
            execute, COUNTED | RIGHT | {"mbarrier.init.shared.b64 [%0], 32;": "", "COUNT": "32", "threadIdx.x < 2": "0"}
        )
