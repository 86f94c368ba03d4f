"""Kernels that show each part of a binary, and of a launch."""

from __future__ import annotations

from functools import cache

from evoengine.records import Binary, Launch, Source
from evoengine.stages.compile import compile_source

ALL_PARTS = """
__constant__ float table[7] = {1, 2, 3, 4, 5, 6, 7};
__constant__ int other[3];
__device__ float state[1000];
__device__ int start[4] = {9, 8, 7, 6};
struct Three { long long x[3]; };
extern "C" __global__ void CLUSTER __launch_bounds__(128) parts(
    float* out, const float* in, int n, Three three, char c, double d) {
    extern __shared__ float dynamic[];
    __shared__ float fixed[36];
    float stack[40];
    for (int i = 0; i < 40; ++i) stack[i] = in[i * n];
    fixed[threadIdx.x % 36] = in[threadIdx.x % 36];
    dynamic[threadIdx.x] = 1;
    __syncthreads();
    out[threadIdx.x] = fixed[n] + dynamic[n] + table[n] + other[n % 3] + state[n] + start[n & 3] + three.x[n & 1] + c
        + d + stack[in[0] > 0 ? n : 3];
    state[n + 1] = 2;
}
extern "C" __global__ void second(float* out) { out[0] = out[1] / 3.0f; }
"""

COUNTS = """
extern "C" __global__ void counts(int* out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = 3 * i + gridDim.x;
}
"""


@cache
def compiled(text: str, entry: str, arch: str) -> Binary:
    cluster = "__cluster_dims__(2, 1, 1)" if arch.startswith("sm_9") else ""
    return compile_source(Source(text.replace("CLUSTER", cluster), entry, Launch((1, 1, 1), 32, 0)), arch)
