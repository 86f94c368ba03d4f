"""Barriers and warp collectives: the good kernel passes, its broken twin is caught, whatever the seed."""

import numpy as np
import pytest

from evoengine.devices.base import KernelCrashed, KernelHung

SEEDS = (0, 1, 2)

REVERSE = """
extern "C" __global__ void reverse(const float* a, float* o) {
    __shared__ float tile[128];
    tile[threadIdx.x] = a[threadIdx.x];
    SYNC
    o[threadIdx.x] = tile[127 - threadIdx.x];
}
"""


@pytest.mark.parametrize("seed", SEEDS)
def test_a_barrier_between_write_and_read_makes_all_writes_visible(emulate, floats, seed):
    a = np.arange(128, dtype=np.float32)
    o = emulate(REVERSE.replace("SYNC", "__syncthreads();"), a, floats(128), threads=128, seed=seed)["o"]
    np.testing.assert_array_equal(o, a[::-1])


@pytest.mark.parametrize("seed", SEEDS)
def test_a_missing_barrier_between_write_and_read_shows_as_nan(emulate, floats, seed):
    a = np.arange(128, dtype=np.float32)
    o = emulate(REVERSE.replace("SYNC", ""), a, floats(128), threads=128, seed=seed)["o"]
    assert np.isnan(o).any()


ROTATE = """
extern "C" __global__ void rotate(float* o) {
    __shared__ float tile[64];
    float v = threadIdx.x;
    for (int i = 0; i < 4; ++i) {
        tile[threadIdx.x] = v;
        __syncthreads();
        v = tile[(threadIdx.x + 1) % 64];
        SYNC
    }
    o[threadIdx.x] = v;
}
"""


@pytest.mark.parametrize("seed", SEEDS)
def test_a_missing_barrier_between_read_and_next_write_gives_a_wrong_result(emulate, floats, seed):
    right = (np.arange(64, dtype=np.float32) + 4) % 64
    good = emulate(ROTATE.replace("SYNC", "__syncthreads();"), floats(64), threads=64, seed=seed)["o"]
    bad = emulate(ROTATE.replace("SYNC", ""), floats(64), threads=64, seed=seed)["o"]
    np.testing.assert_array_equal(good, right)
    assert not np.array_equal(bad, right)


WARP_TILE = """
#include <mma.h>
using namespace nvcuda;
extern "C" __global__ void warp_tile(float* o) {
    __shared__ __align__(32) float tile[256];
    for (int i = threadIdx.x; i < 256; i += 32) tile[i] = i;
    SYNC
    wmma::fragment<wmma::accumulator, 16, 16, 16, float> c;
    wmma::load_matrix_sync(c, tile, 16, wmma::mem_row_major);
    wmma::store_matrix_sync(o, c, 16, wmma::mem_row_major);
}
"""


@pytest.mark.parametrize("seed", SEEDS)
def test_a_missing_syncwarp_before_a_fragment_is_loaded_shows_as_nan(emulate, floats, seed):
    good = emulate(WARP_TILE.replace("SYNC", "__syncwarp();"), floats(256), seed=seed)["o"]
    bad = emulate(WARP_TILE.replace("SYNC", ""), floats(256), seed=seed)["o"]
    np.testing.assert_array_equal(good, np.arange(256))
    assert np.isnan(bad).any()


def test_a_barrier_in_a_divergent_branch_is_a_hang_told_with_its_threads_and_lines(emulate, floats):
    text = """
extern "C" __global__ void divergent(float* o) {
    if (threadIdx.x < 32)
        __syncthreads();
    else
        __syncthreads();
    o[threadIdx.x] = 1;
}
"""
    with pytest.raises(KernelHung) as caught:
        emulate(text, floats(128), threads=128)
    assert str(caught.value) == (
        "hang: 32 of 128 threads wait at __syncthreads (line 4, e.g. thread 0), "
        "96 wait at __syncthreads (line 6, e.g. thread 32), kernel divergent, block (0,0,0)"
    )


def test_a_thread_that_ends_before_a_barrier_never_arrives(emulate, floats):
    text = """
extern "C" __global__ void early(float* o) {
    if (threadIdx.x == 40) return;
    __syncthreads();
    o[threadIdx.x] = 1;
}
"""
    message = (
        r"hang: 127 of 128 .* \(line 4, e.g. thread 0\), 1 have ended \(e.g. thread 40\), "
        r"kernel early, block \(1,0,0\)"
    )
    with pytest.raises(KernelHung, match=message):
        emulate(text.replace("== 40", "== 40 && blockIdx.x == 1"), floats(128), threads=128, grid=(2, 1, 1))


SHUFFLE = """
extern "C" __global__ void lanes(float* o) {
    float v = threadIdx.x;
    CONDITION v += __shfl_xor_sync(0xffffffff, v, 1);
    o[threadIdx.x] = v;
}
"""


def test_a_lane_missing_from_a_collective_is_a_hang(emulate, floats):
    good = emulate(SHUFFLE.replace("CONDITION", ""), floats(64), threads=64)["o"]
    np.testing.assert_array_equal(good, np.arange(64) + (np.arange(64) ^ 1))
    with pytest.raises(KernelHung, match=r"31 of 64 threads wait at __shfl_xor_sync \(line 4, .* 33 have ended"):
        emulate(SHUFFLE.replace("CONDITION", "if (threadIdx.x != 5)"), floats(64), threads=64)


def test_lanes_at_different_lines_do_not_meet(emulate, floats):
    text = """
extern "C" __global__ void split(float* o) {
    if (threadIdx.x < 16)
        __syncwarp();
    else
        __syncwarp();
}
"""
    with pytest.raises(KernelHung, match=r"16 of 32 threads wait at __syncwarp \(line 4.*16 wait at .* \(line 6"):
        emulate(text, floats(1))
    emulate(text.replace("__syncwarp()", "__syncwarp(threadIdx.x < 16 ? 0xffff : 0xffff0000)"), floats(1))


def test_a_mask_without_the_caller_is_named(emulate, floats):
    text = 'extern "C" __global__ void f(float* o) {\n if (threadIdx.x == 7) __syncwarp(1); }'
    with pytest.raises(KernelCrashed, match=r"__syncwarp at line 2: its mask 0x00000001 lacks the calling lane 7"):
        emulate(text, floats(1))


def test_syncthreads_votes_over_the_block(emulate):
    text = """
extern "C" __global__ void votes(int* o) {
    int odd = threadIdx.x & 1;
    o[threadIdx.x] = __syncthreads_count(odd) + 1000 * __syncthreads_or(odd) + 10000 * __syncthreads_and(odd)
                     + 100000 * __syncthreads_and(1) + 1000000 * __syncthreads_or(0);
}
"""
    o = emulate(text, np.zeros(96, np.int32), threads=96)["o"]
    assert set(o.tolist()) == {48 + 1000 + 100000}


NAMED = """
extern "C" __global__ void named(float* o) {
    __shared__ float tile[32];
    if (threadIdx.x < 32) {
        tile[threadIdx.x] = threadIdx.x;
        asm volatile("ARRIVE 3, 64;" ::: "memory");
    } else {
        SYNC
        o[threadIdx.x - 32] = tile[63 - threadIdx.x];
    }
}
"""
WAIT = 'asm volatile("bar.sync %0, %1;" :: "r"(3), "n"(64) : "memory");'


@pytest.mark.parametrize("arrive", ["bar.sync", "bar.arrive"])
@pytest.mark.parametrize("seed", SEEDS)
def test_named_barriers_join_two_warps_from_different_lines(emulate, floats, seed, arrive):
    good = NAMED.replace("ARRIVE", arrive).replace("SYNC", WAIT)
    o = emulate(good, floats(32), threads=64, seed=seed)["o"]
    np.testing.assert_array_equal(o, np.arange(32)[::-1])


def test_a_named_barrier_nobody_else_comes_to_is_a_hang(emulate, floats):
    bad = NAMED.replace("ARRIVE 3", "bar.sync 2").replace("SYNC", WAIT)
    with pytest.raises(KernelHung, match=r"32 of 64 threads wait at bar.sync 2 .*32 wait at bar.sync 3"):
        emulate(bad, floats(32), threads=64)
