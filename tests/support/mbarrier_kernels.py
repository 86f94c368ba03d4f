"""Kernels around mbarriers: a ring of two stages, one barrier, and register budgets."""

from __future__ import annotations

import jinja2
import numpy as np

from evoengine.devices.base import TensorMapArgument
from evoengine.paths import asset

EVO = asset("templates") / "include" / "evo"
HEADERS = ("address.cuh", "barrier.cuh", "copy_async.cuh", "tma.cuh")
VOCABULARY = "".join(jinja2.Template((EVO / name).read_text()).render() for name in HEADERS)
TILES = 13

# One warp brings tiles of 128 floats into two places, two warps read them. SOURCE is cp.async or TMA.
RING = """
extern "C" __global__ void __launch_bounds__(96)
f(const float* a, const __grid_constant__ TensorMap map, float* o, int tiles) {
    extern __shared__ __align__(128) float place[];
    __shared__ unsigned long long barriers[4];
    unsigned full = shared_address(barriers), empty = full + 16;
    if (threadIdx.x == 0) {
        for (int i = 0; i < 2; ++i) barrier_init(full + 8 * i, PRODUCERS), barrier_init(empty + 8 * i, CONSUMERS);
        barrier_init_fence();
    }
    __syncthreads();
    if (threadIdx.x < 32) {
        for (int t = 0; t < tiles; ++t) {
            barrier_wait(empty + t % 2 * 8, PARITY_EMPTY);
            SOURCE
        }
    } else {
        for (int t = 0; t < tiles; ++t) {
            WAIT_FULL
            for (int i = threadIdx.x - 32; i < 128; i += 64) o[128 * t + i] = place[t % 2 * 128 + i];
            SYNC
            RELEASE
        }
    }
}
"""
CP_ASYNC = """copy_async<16>(place + t % 2 * 128 + 4 * threadIdx.x, a + 128 * t + 4 * threadIdx.x, 16);
            copy_async_arrive(full + t % 2 * 8);"""
TMA = """if (elect_one()) {
                arrive_expect_tx(full + t % 2 * 8, 512);
                tma_load(shared_address(place + t % 2 * 128), map, full + t % 2 * 8, 0, 4 * t);
            }"""
RIGHT = {
    "PARITY_EMPTY": "t / 2 % 2 ^ 1",
    "WAIT_FULL": "barrier_wait(full + t % 2 * 8, t / 2 % 2);",
    "SYNC": "named_barrier_sync(1, 64);",
    "RELEASE": "if (threadIdx.x == 32) barrier_arrive(empty + t % 2 * 8);",
    "CONSUMERS": "1",
}
SOURCES = {"cp.async": {"SOURCE": CP_ASYNC, "PRODUCERS": "32"}, "tma": {"SOURCE": TMA, "PRODUCERS": "1"}}


def ring_text(source, **changes):
    text = RING
    for name, right in {**RIGHT, **SOURCES[source]}.items():
        text = text.replace(name, changes.get(name, right))
    return VOCABULARY + text


def ring(emulate, source, seed=0, text=None, **changes):
    """Whether all tiles came through whole."""
    a = np.random.default_rng(2).standard_normal(TILES * 128).astype(np.float32)
    tensor_map = TensorMapArgument("map", "a", "fp32", (32, TILES * 4), (128,), (32, 4), 0)
    text = text or ring_text(source, **changes)
    o = emulate(text, a, tensor_map, np.zeros_like(a), np.int32(TILES), threads=96, shared=1024, seed=seed)["o"]
    return np.array_equal(o, a)


ONE = """
extern "C" __global__ void f(int* o) {
    __shared__ unsigned long long barriers[2];
    unsigned b = shared_address(barriers);
    if (threadIdx.x == 0) barrier_init(b, 32);
    __syncthreads();
    BODY
}
"""


def one_text(body):
    return VOCABULARY + ONE.replace("BODY", body)


def one(emulate, body, seed=0):
    return emulate(one_text(body), np.zeros(32, np.int32), threads=32, seed=seed)["o"]


REGISTERS = """
extern "C" __global__ void __launch_bounds__(384, 1) f(int* o) {
    if (threadIdx.x < 128) warpgroup_reg_dealloc<PRODUCER>();
    else warpgroup_reg_alloc<CONSUMER>();
    o[threadIdx.x] = 1;
}
"""


def registers_text(producer, consumer):
    return VOCABULARY + REGISTERS.replace("PRODUCER", str(producer)).replace("CONSUMER", str(consumer))
