"""Shuffles, votes, reductions and atomics against NumPy."""

import numpy as np
import pytest

from tests.support.exhaustive import more

LANES = np.arange(32)
VALUES = np.random.default_rng(3).standard_normal(64).astype(np.float32)


def shuffle(emulate, calls):
    """What each call gives the lanes of both warps."""
    stores = "".join(f"    o[{64 * i} + threadIdx.x] = {call};\n" for i, call in enumerate(calls))
    text = f"""
extern "C" __global__ void f(const float* a, float* o) {{
    float v = a[threadIdx.x];
{stores}}}
"""
    return emulate(text, VALUES, np.zeros((len(calls), 2, 32), np.float32), threads=64)["o"]


@pytest.mark.parametrize("width", [8, 32])
@pytest.mark.parametrize("by", [3, *more([1, 7])])
def test_shuffles_read_the_lane_that_cuda_defines(emulate, by, width):
    rows = VALUES.reshape(2, 32)
    segment, within = LANES // width * width, LANES % width
    sources = {
        f"__shfl_sync(~0u, v, {by}, {width})": segment + by % width,
        f"__shfl_up_sync(~0u, v, {by}, {width})": np.where(within >= by, LANES - by, LANES),
        f"__shfl_down_sync(~0u, v, {by}, {width})": np.where(within + by < width, LANES + by, LANES),
        f"__shfl_xor_sync(~0u, v, {by}, {width})": LANES ^ by,
    }
    for (call, source), seen in zip(sources.items(), shuffle(emulate, sources), strict=True):
        np.testing.assert_array_equal(seen, rows[:, source], err_msg=call)


def test_a_shuffle_from_a_lane_outside_of_the_mask_is_nan(emulate):
    text = """
extern "C" __global__ void f(float* o) {
    if (threadIdx.x < 16) o[threadIdx.x] = __shfl_xor_sync(0xffff, float(threadIdx.x), SOURCE);
}
"""
    inside = emulate(text.replace("SOURCE", "8"), np.zeros(16, np.float32))["o"]
    outside = emulate(text.replace("SOURCE", "16"), np.zeros(16, np.float32))["o"]
    np.testing.assert_array_equal(inside, LANES[:16] ^ 8)
    assert np.isnan(outside).all()


def test_shuffles_carry_every_type_of_up_to_eight_bytes(emulate):
    text = """
#include <cuda_fp16.h>
extern "C" __global__ void f(float* o) {
    int lane = threadIdx.x;
    half2 pair = __shfl_xor_sync(~0u, __floats2half2_rn(lane, -lane), 1);
    double d = __shfl_xor_sync(~0u, double(lane), 2);
    long long l = __shfl_xor_sync(~0u, (long long)lane << 40, 4);
    half h = __shfl_xor_sync(~0u, __float2half(lane), 8);
    o[lane] = __low2float(pair); o[32 + lane] = __high2float(pair); o[64 + lane] = d; o[96 + lane] = l >> 40;
    o[128 + lane] = __half2float(h);
}
"""
    o = emulate(text, np.zeros((5, 32), np.float32))["o"]
    np.testing.assert_array_equal(o, [LANES ^ 1, -(LANES ^ 1), LANES ^ 2, LANES ^ 4, LANES ^ 8])


def test_votes_and_matches_and_reductions(emulate):
    text = """
extern "C" __global__ void f(const int* a, unsigned* o) {
    int v = a[threadIdx.x], lane = threadIdx.x % 32;
    unsigned all[] = {__ballot_sync(~0u, v > 2), (unsigned)__any_sync(~0u, v > 6), (unsigned)__all_sync(~0u, v < 7),
                      __match_any_sync(~0u, v), (unsigned)__reduce_add_sync(~0u, v),
                      (unsigned)__reduce_max_sync(~0u, v), (unsigned)__reduce_min_sync(~0u, -v),
                      __reduce_or_sync(~0u, 1u << v),
                      (unsigned)__any_sync(~0u, v == 2)};
    for (int i = 0; i < 9; ++i) o[i * 64 + threadIdx.x] = all[i];
}
"""
    a = np.random.default_rng(4).integers(0, 7, 64).astype(np.int32)
    o = emulate(text, a, np.zeros((9, 2, 32), np.uint32), threads=64)["o"]
    bit = np.uint32(1) << LANES.astype(np.uint32)
    for warp, v in enumerate(a.reshape(2, 32)):
        right = [
            bit[v > 2].sum(), 0, 1, np.array([bit[v == x].sum() for x in v]), v.sum(), v.max(),
            np.int32(-v.max()).astype(np.uint32), np.bitwise_or.reduce(1 << v), (v == 2).any(),
        ]  # fmt: skip
        for row, expected in zip(o[:, warp], right, strict=True):
            np.testing.assert_array_equal(row, np.broadcast_to(expected, 32))


def test_atomics_over_all_blocks(emulate):
    text = """
extern "C" __global__ void f(float* sum, int* most, int* order) {
    atomicAdd(sum, 0.5f);
    atomicMax(most, int(blockIdx.x * blockDim.x + threadIdx.x));
    order[atomicAdd(order + 256, 1)] = blockIdx.x * blockDim.x + threadIdx.x;
}
"""
    zeros = np.zeros(1, np.float32), np.zeros(1, np.int32), np.zeros(257, np.int32)
    got = emulate(text, *zeros, grid=(4, 1, 1), threads=64)
    assert (got["sum"][0], got["most"][0]) == (128, 255)
    assert sorted(got["order"][:256]) == list(range(256))


def test_activemask_is_no_substitute_for_the_mask_of_the_warp(emulate):
    text = 'extern "C" __global__ void f(unsigned* o) { o[threadIdx.x] = __activemask(); }'
    np.testing.assert_array_equal(emulate(text, np.zeros(32, np.uint32))["o"], 1 << LANES)
