"""Warps in machine code: shuffles, votes, matches, reductions, divergence, calls, special registers."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.exhaustive import more
from tests.support.machine_code import SOME_ARCHS, execute

LANES = 32
KERNEL = 'extern "C" __global__ void kernel'
every_arch = pytest.mark.parametrize("arch", SOME_ARCHS)


def drawn(count, seed=0, low=-1000, high=1000):
    return np.random.default_rng(seed).integers(low, high, count).astype(np.int32)


@every_arch
def test_shuffles(arch):
    text = (
        KERNEL
        + """(const int* a, int* out) {
      int i = threadIdx.x, x = a[i];
      out[i] = __shfl_sync(~0u, x, 5);
      out[32 + i] = __shfl_up_sync(~0u, x, 3);
      out[64 + i] = __shfl_down_sync(~0u, x, 7);
      out[96 + i] = __shfl_xor_sync(~0u, x, 9);
      out[128 + i] = __shfl_sync(~0u, x, i * 3, 8);
      out[160 + i] = __shfl_up_sync(~0u, x, 2, 16);
      out[192 + i] = __shfl_down_sync(~0u, x, i & 3, 4);
      out[224 + i] = (int)__shfl_xor_sync(~0u, (long long)x << 32 | (unsigned)x, 1);
      out[256 + i] = __shfl_sync(~0u, x, a[(i + 1) & 31]);
    }"""
    )
    a = drawn(LANES)
    lane = np.arange(LANES)
    out = execute(text, arch, {"a": a}, {"out": (np.int32, (9, LANES))})["out"]
    expected = [
        a[np.full(LANES, 5)], a[np.where(lane >= 3, lane - 3, lane)], a[np.where(lane + 7 < 32, lane + 7, lane)],
        a[lane ^ 9], a[lane // 8 * 8 + lane * 3 % 8], a[np.where(lane % 16 >= 2, lane - 2, lane)],
        a[np.where(lane % 4 + lane % 4 < 4, lane + lane % 4, lane)], a[lane ^ 1], a[a[(lane + 1) % 32] % 32],
    ]  # fmt: skip
    np.testing.assert_array_equal(out, expected)


@every_arch
def test_votes(arch):
    text = (
        KERNEL
        + """(const int* a, unsigned* out) {
      int i = threadIdx.x, x = a[i];
      out[i] = __ballot_sync(~0u, x > 0);
      out[32 + i] = __any_sync(~0u, x == a[3]);
      out[64 + i] = __all_sync(~0u, x > -2000);
      out[96 + i] = __all_sync(~0u, x > 0);
      out[128 + i] = __activemask();
      out[160 + i] = 7;
      if (i % 3 == 1) out[160 + i] = __ballot_sync(0x92492492u, x & 1);
    }"""
    )
    a = drawn(LANES)
    lane = np.arange(LANES)
    out = execute(text, arch, {"a": a}, {"out": (np.uint32, (6, LANES))})["out"]
    third = lane % 3 == 1
    ballots = [mask(a > 0), 1, 1, 0, 2**32 - 1]
    np.testing.assert_array_equal(out[:5], np.repeat(np.array(ballots, np.uint32)[:, None], LANES, axis=1))
    np.testing.assert_array_equal(out[5], np.where(third, mask(third & (a % 2 == 1)), 7))


def mask(lanes):
    return sum(1 << int(lane) for lane in np.flatnonzero(lanes))


@every_arch
def test_matches(arch):
    text = (
        KERNEL
        + """(const int* a, unsigned* out) {
      int i = threadIdx.x, x = a[i], same;
      out[i] = __match_any_sync(~0u, x);
      out[32 + i] = __match_any_sync(~0u, (long long)x << 33 | 5);
      out[64 + i] = __match_all_sync(~0u, x, &same);
      out[96 + i] = same;
      out[128 + i] = __match_all_sync(~0u, x >> 4, &same);
      out[160 + i] = same;
    }"""
    )
    a = drawn(LANES, low=0, high=6)
    out = execute(text, arch, {"a": a}, {"out": (np.uint32, (6, LANES))})["out"]
    equal = np.array([mask(a == x) for x in a], np.uint32)
    np.testing.assert_array_equal(out[:2], [equal, equal])
    np.testing.assert_array_equal(out[2:], np.repeat(np.array([[0], [0], [2**32 - 1], [1]], np.uint32), LANES, axis=1))


@pytest.mark.parametrize("arch", ["sm_90a", *more(["sm_80", "sm_89"])])  # sm_75 has no instruction for it
def test_reductions(arch):
    text = (
        KERNEL
        + """(const int* a, int* out) {
      int i = threadIdx.x, x = a[i];
      out[i] = __reduce_add_sync(~0u, x);
      out[32 + i] = __reduce_min_sync(~0u, x);
      out[64 + i] = __reduce_max_sync(~0u, x);
      out[96 + i] = (int)__reduce_max_sync(~0u, (unsigned)x);
      out[128 + i] = (int)__reduce_and_sync(~0u, (unsigned)x);
      out[160 + i] = (int)__reduce_or_sync(~0u, (unsigned)x);
      out[192 + i] = (int)__reduce_xor_sync(~0u, (unsigned)x);
      out[224 + i] = 0;
      if (i < 11) out[224 + i] = __reduce_add_sync(0x7ffu, x);
    }"""
    )
    a = drawn(LANES)
    out = execute(text, arch, {"a": a}, {"out": (np.int32, (8, LANES))})["out"]
    whole = [a.sum(), a.min(), a.max(), a.view(np.uint32).max().view(np.int32), np.bitwise_and.reduce(a)]
    whole += [np.bitwise_or.reduce(a), np.bitwise_xor.reduce(a)]
    np.testing.assert_array_equal(out[:7], np.repeat(np.array(whole)[:, None], LANES, axis=1))
    np.testing.assert_array_equal(out[7], np.where(np.arange(LANES) < 11, a[:11].sum(), 0))


@every_arch
def test_lanes_diverge_and_meet_again(arch):
    text = (
        KERNEL
        + """(const int* a, int* out) {
      int i = blockIdx.x * blockDim.x + threadIdx.x, x = a[i], steps = 0;
      unsigned v = (unsigned)(x < 0 ? -x : x) + 1;
      while (v != 1) {
        if (v & 1) v = 3 * v + 1;
        else v >>= 1;
        if (++steps > 500) break;
      }
      int kind;
      switch (x & 7) {
        case 0: kind = x * 3; break;
        case 1: kind = steps - x; break;
        case 2: kind = x ^ 0x55; break;
        case 3: kind = 17; break;
        case 4: kind = x / 3; break;
        case 5: for (kind = 0; kind * kind < steps; ++kind) {} break;
        default: kind = -1;
      }
      __syncwarp();
      int sum = steps;
      for (int d = 16; d; d >>= 1) sum += __shfl_xor_sync(~0u, sum, d);
      if (i == 5) { out[3 * i] = steps; out[3 * i + 1] = kind; out[3 * i + 2] = sum; return; }
      __syncthreads();
      out[3 * i] = steps; out[3 * i + 1] = kind; out[3 * i + 2] = sum;
    }"""
    )
    a = drawn(128)
    out = execute(text, arch, {"a": a}, {"out": (np.int32, (128, 3))}, threads=64, grid=2)["out"]
    steps = np.array([collatz(abs(int(x)) + 1) for x in a])
    kinds = [
        a * 3, steps - a, a ^ 0x55, np.full(128, 17), (a / 3).astype(int), np.ceil(np.sqrt(steps)).astype(int),
        np.full(128, -1), np.full(128, -1),
    ]  # fmt: skip
    np.testing.assert_array_equal(out[:, 0], steps)
    np.testing.assert_array_equal(out[:, 1], np.choose(a & 7, kinds))
    np.testing.assert_array_equal(out[:, 2], np.repeat(steps.reshape(4, LANES).sum(axis=1), LANES))


def collatz(v):
    steps = 0
    while v != 1 and steps <= 500:
        v = 3 * v + 1 if v & 1 else v // 2
        steps += 1
    return steps


@every_arch
def test_functions_are_called(arch):
    text = (
        """
    __device__ __noinline__ int add3(int a, int b, int c) { return a + 2 * b + 3 * c; }
    __device__ __noinline__ int steps(int a, int n) { for (int k = 0; k < n; ++k) a = add3(a, k, n); return a; }
    """
        + KERNEL
        + """(const int* a, int* out) {
      int i = threadIdx.x, x = a[i];
      out[i] = add3(x, i, 7);
      if (i % 3) out[32 + i] = steps(x, i % 5);
      else out[32 + i] = steps(i, 4) - add3(i, x, 2);
    }"""
    )
    a = drawn(LANES)
    lane = np.arange(LANES)
    out = execute(text, arch, {"a": a}, {"out": (np.int32, (2, LANES))})["out"]

    def steps(x, n):
        for k in range(n):
            x = x + 2 * k + 3 * n
        return x

    expected = [
        steps(x, i % 5) if i % 3 else steps(i, 4) - (i + 2 * x + 6)
        for i, x in zip(range(LANES), a.tolist(), strict=True)
    ]
    np.testing.assert_array_equal(out, [a + 2 * lane + 21, expected])


@every_arch
@pytest.mark.parametrize("threads", [32, 80])
def test_barriers_that_reduce(arch, threads):
    text = (
        KERNEL
        + """(const int* a, int* out) {
      int i = threadIdx.x, x = a[i];
      for (int k = 0; k < 3; ++k) {
        out[(3 * k) * blockDim.x + i] = __syncthreads_count(x > k);
        out[(3 * k + 1) * blockDim.x + i] = __syncthreads_and(x > k - 2);
        out[(3 * k + 2) * blockDim.x + i] = __syncthreads_or(x > k + 1);
      }
      if (i >= 32) return;
      int one;  // of one warp, by a barrier of its own
      asm volatile("{.reg .pred p; setp.gt.s32 p, %1, 1; bar.red.popc.u32 %0, 3, 32, p;}" : "=r"(one) : "r"(x));
      if (i < 32) out[9 * blockDim.x + i] = one;
    }"""
    )
    a = drawn(threads, low=0, high=4)
    out = execute(text, arch, {"a": a}, {"out": (np.int32, (10, threads))}, threads)["out"]
    for k in range(3):
        np.testing.assert_array_equal(out[3 * k], np.full(threads, (a > k).sum()))
        np.testing.assert_array_equal(out[3 * k + 1] != 0, np.full(threads, (a > k - 2).all()))
        np.testing.assert_array_equal(out[3 * k + 2] != 0, np.full(threads, (a > k + 1).any()))
    np.testing.assert_array_equal(out[9, :32], np.full(32, (a[:32] > 1).sum()))


@every_arch
def test_special_registers(arch):
    text = (
        KERNEL
        + """(unsigned* out) {
      unsigned lane, warp, below;
      asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
      asm volatile("mov.u32 %0, %%warpid;" : "=r"(warp));
      asm volatile("mov.u32 %0, %%lanemask_lt;" : "=r"(below));
      unsigned thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
      unsigned block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
      unsigned* mine = out + (block * blockDim.x * blockDim.y * blockDim.z + thread) * 6;
      mine[0] = threadIdx.x | threadIdx.y << 8 | threadIdx.z << 16;
      mine[1] = blockIdx.x | blockIdx.y << 8 | blockIdx.z << 16;
      mine[2] = blockDim.x | blockDim.y << 8 | blockDim.z << 16;
      mine[3] = gridDim.x | gridDim.y << 8 | gridDim.z << 16;
      mine[4] = lane | warp << 8;
      mine[5] = below;
    }"""
    )
    threads, grid = (5, 4, 3), (2, 3, 2)
    out = execute(text, arch, {}, {"out": (np.uint32, (12, 60, 6))}, threads, grid)["out"]

    def packed(sizes):
        z, y, x = np.indices(sizes[::-1])
        return (x | y << 8 | z << 16).reshape(-1)

    thread = np.arange(60)
    np.testing.assert_array_equal(out[:, :, 0], np.tile(packed(threads), (12, 1)))
    np.testing.assert_array_equal(out[:, :, 1], np.tile(packed(grid)[:, None], (1, 60)))
    np.testing.assert_array_equal(out[:, :, 2], np.full((12, 60), 5 | 4 << 8 | 3 << 16))
    np.testing.assert_array_equal(out[:, :, 3], np.full((12, 60), 2 | 3 << 8 | 2 << 16))
    np.testing.assert_array_equal(out[:, :, 4] % 256, np.tile(thread % 32, (12, 1)))
    slot = out[:, :, 4] // 256  # where the SM has a place
    np.testing.assert_array_equal((slot - slot[:, :1]) % 32, np.tile(thread // 32, (12, 1)))
    np.testing.assert_array_equal(out[:, :, 5], np.tile((1 << thread % 32) - 1, (12, 1)))
