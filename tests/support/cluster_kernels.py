"""Kernels of two blocks in a cluster: each other's shared memory, and a tile that both receive."""

from __future__ import annotations

import jinja2
import numpy as np

from evoengine.devices.base import TensorMapArgument
from evoengine.paths import asset

TEMPLATES = jinja2.Environment(loader=jinja2.FileSystemLoader(asset("templates") / "include"))
FILES = ("address.cuh", "barrier.cuh", "tma.cuh", "cluster.cuh")
VOCABULARY = "".join(TEMPLATES.get_template(f"evo/{name}").render() for name in FILES)
PAIR = """
extern "C" __global__ void __cluster_dims__(2, 1, 1) f(int* o) {
    extern __shared__ __align__(1024) unsigned char shared[];
    unsigned barrier = shared_address(shared + 1024);
    int* number = reinterpret_cast<int*>(shared);
    number[threadIdx.x] = 100 * blockIdx.x + threadIdx.x;
    if (threadIdx.x == 0) barrier_init(barrier, 2);
    barrier_init_fence();
    START
    BODY
    o[blockIdx.x * 128 + threadIdx.x] = number[threadIdx.x];
    END
}
"""


def pair_text(body="", start="cluster_sync();", end="cluster_sync();"):
    return VOCABULARY + PAIR.replace("BODY", body).replace("START", start).replace("END", end)


def pair(emulate, body="", seed=0, blocks=4, **parts):
    o = np.zeros(128 * blocks, np.int32)
    return emulate(pair_text(body, **parts), o, grid=(blocks, 1, 1), threads=128, shared=1280, seed=seed)["o"]


READS = """
    float4 x = read_four_at(1 - cluster_rank(), shared_address(number + threadIdx.x / 4 * 4));
    cluster_sync();
    const float* other = &x.x;
    number[threadIdx.x] = __float_as_int(other[threadIdx.x % 4]);
"""
"""each thread takes the other block's number of the same place"""

MULTICAST = """
extern "C" __global__ void __cluster_dims__(2, 1, 1)
f(const unsigned short* a, const __grid_constant__ TensorMap map, unsigned short* o) {
    extern __shared__ __align__(1024) unsigned short tile[];
    unsigned full = shared_address(tile + 1024);
    if (threadIdx.x == 0) {
        barrier_init(full, 1);
        barrier_init_fence();
    }
    cluster_sync();
    if (threadIdx.x == 0) {
        int first = HALF;
        arrive_expect_tx(full, BYTES);
        tma_load_multicast(shared_address(tile + first * 64), map, full, 0, first, 0);
    }
    barrier_wait(full, 0);
    for (int i = threadIdx.x; i < 1024; i += 128) o[blockIdx.x * 1024 + i] = tile[i];
    cluster_sync();
}
"""


def multicast_text(half="8 * cluster_rank()", expect="2048", blocks="((1 << CLUSTER) - 1)"):
    text = VOCABULARY + MULTICAST.replace("HALF", half).replace("BYTES", expect)
    assert "((1 << CLUSTER) - 1)" in text
    return text.replace("((1 << CLUSTER) - 1)", blocks)


def multicast(emulate, seed=0, text="", **changes):
    a = np.random.default_rng(1).integers(0, 1 << 15, (16, 64), dtype=np.uint16)
    halves = TensorMapArgument("map", "a", "fp16", (64, 16, 1), (128, 2048), (64, 8, 1), 0)
    values = (a, halves, np.zeros((2, 16, 64), np.uint16))
    o = emulate(text or multicast_text(**changes), *values, grid=(2, 1, 1), threads=128, shared=2056, seed=seed)["o"]
    return a, o
