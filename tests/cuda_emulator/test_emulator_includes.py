"""What people include and use in kernels: run in the emulator, compiled by NVRTC, and broken once each."""

from __future__ import annotations

import math

import numpy as np
import pytest

from evoengine.devices.base import KernelCrashed, KernelHung, KernelUnbuildable
from evoengine.records import Launch, Source
from evoengine.stages.compile import compile_source
from tests.support.exhaustive import more

RANDOM = np.random.default_rng(7)
ROWS = 4 * 32


def of_each(function, values):
    return np.array([function(float(v)) for v in values], np.float32)


# ── without any include ─────────────────────────────────────────────────────────────────────────────────────────────

MATH = """
#include <cuda_runtime.h>
#include <cstdint>
#include <math.h>
#include <cfloat>
#include <climits>
#include <stdio.h>
#include <math_constants.h>
constexpr int N = 64;
template <int row> __device__ __forceinline__ void put(float* o, float v) { o[row * N + threadIdx.x] = v; }
extern "C" __global__ void __launch_bounds__(N, 1) f(const float* __restrict__ a, float* o, unsigned* u) {
    const uint3 t = threadIdx;
    const dim3 b = blockDim;
    const float x = __ldg(a + t.x);
    assert(b.x == N && b.y == 1);
    if (t.x > 1000) printf("never %d", t.x);
    put<0>(o, exp(x)); put<1>(o, __expf(x)); put<2>(o, rsqrtf(x)); put<3>(o, tanhf(x)); put<4>(o, erff(x));
    put<5>(o, fminf(x, 1.0f) + fmaxf(x, 1.0f)); put<6>(o, pow(x, 2)); put<7>(o, log1pf(x)); put<8>(o, atan2f(x, 2.0f));
    put<9>(o, __sinf(x)); put<10>(o, roundf(10 * x)); put<11>(o, max(x, 0.5)); put<12>(o, INFINITY);
    put<13>(o, FLT_MAX); put<14>(o, float(M_PI) + CUDART_PI_F); put<15>(o, erfcf(x)); put<16>(o, x < 1.0f ? NAN : 0.0f);
    const uint32_t bits = __float_as_uint(x);
    const unsigned all[] = {__brev(bits), (unsigned)__clz(bits), (unsigned)__ffs(bits),
                            __byte_perm(bits, ~bits, 0x1674),
                            __umulhi(bits, 77u), __funnelshift_l(bits, ~bits, 9), (unsigned)__float2int_rd(-10 * x),
                            (unsigned)__float2uint_rz(1e10f), (unsigned)__dp4a((int)bits, 0x01020304, 5), UINT32_MAX};
    for (int i = 0; i < 10; ++i) u[i * N + t.x] = all[i];
}
"""


def test_functions_that_cuda_has_by_itself_are_those_of_numpy(emulate):
    x = RANDOM.uniform(0.1, 4, 64).astype(np.float32)
    got = emulate(MATH, x, np.zeros((17, 64), np.float32), np.zeros((10, 64), np.uint32), threads=64)
    ones = np.ones(64)
    right = [
        np.exp(x), np.exp(x), 1 / np.sqrt(x), np.tanh(x), of_each(math.erf, x), x + 1, x * x, np.log1p(x),
        np.arctan2(x, 2), np.sin(x), np.rint(10 * x), np.maximum(x, 0.5), np.inf * ones,
        np.finfo(np.float32).max * ones, 2 * np.pi * ones, of_each(math.erfc, x), np.where(x < 1, np.nan, 0),
    ]  # fmt: skip
    np.testing.assert_allclose(got["o"], np.array(right, np.float32), rtol=2e-6)
    for i, bits in enumerate(x.view(np.uint32).tolist()):
        text = f"{bits:032b}"
        chosen = [*bits.to_bytes(4, "little"), *(~bits & 0xFFFFFFFF).to_bytes(4, "little")]
        parts = [b - 256 * (b > 127) for b in bits.to_bytes(4, "little")]
        wide = ((~bits & 0xFFFFFFFF) << 32 | bits) << 9 >> 32
        expected = [
            int(text[::-1], 2), len(text) - len(text.lstrip("0")), 32 - text.rindex("1"),
            int.from_bytes(bytes(chosen[k] for k in (4, 7, 6, 1)), "little"), bits * 77 >> 32, wide & 0xFFFFFFFF,
            math.floor(float(np.float32(-10) * x[i])), 0xFFFFFFFF,
            5 + sum(p * w for p, w in zip(parts, (4, 3, 2, 1), strict=True)), 0xFFFFFFFF,
        ]  # fmt: skip
        assert [int(v) for v in got["u"][:, i]] == [e % 2**32 for e in expected]


MEMORY = """
#include <cuda_pipeline.h>
struct alignas(16) Row { float4 v; };
extern "C" __global__ void f(const float4* a, float4* o, unsigned* counts, unsigned long long* wide) {
    extern __shared__ float4 tile[];
    __pipeline_memcpy_async(&tile[threadIdx.x], &a[threadIdx.x], sizeof(float4));
    __pipeline_commit();
    WAIT
    __syncthreads();
    Row r{tile[blockDim.x - 1 - threadIdx.x]};
    float2 half_of_it = make_float2(r.v.x, r.v.y);
    o[threadIdx.x] = make_float4(half_of_it.y, half_of_it.x, r.v.z, r.v.w);
    atomicInc(&counts[0], 9); atomicDec(&counts[1], 9); atomicXor(&counts[2], 1u << threadIdx.x % 32);
    atomicAdd(&wide[0], 1ull << 40); atomicMax(&counts[3], threadIdx.x); atomicCAS(&counts[4], 0u, threadIdx.x + 1);
    int all;
    if (__match_all_sync(~0u, threadIdx.x / 32, &all) == ~0u && all) atomicAdd(&counts[5], 1u);
    if (__match_all_sync(~0u, threadIdx.x, &all) || all) atomicAdd(&counts[5], 1000u);
}
"""


def test_pipelined_copies_and_atomics_and_a_wait_that_is_missing(emulate):
    right = MEMORY.replace("WAIT", "__pipeline_wait_prior(0);")
    a = RANDOM.standard_normal((64, 4)).astype(np.float32)
    state = [np.zeros(8, np.uint32), np.zeros(1, np.uint64)]
    got = emulate(right, a, np.zeros_like(a), *state, threads=64, shared=1024)
    np.testing.assert_array_equal(got["o"], a[::-1][:, [1, 0, 2, 3]])
    assert got["counts"][:4].tolist() == [64 % 10, (0 - 64) % 10, 0, 63] and got["counts"][5] == 64
    assert 1 <= got["counts"][4] <= 64 and got["wide"][0] == 64 << 40
    broken = MEMORY.replace("WAIT", "")
    spoiled = [emulate(broken, a, np.zeros_like(a), *state, threads=64, shared=1024, seed=s)["o"] for s in range(6)]
    assert any(np.isnan(o).any() for o in spoiled)


# ── cooperative groups ──────────────────────────────────────────────────────────────────────────────────────────────

GROUPS = """
#include <cooperative_groups.h>
#include <cooperative_groups/memcpy_async.h>
#include <cooperative_groups/reduce.h>
#include <cooperative_groups/scan.h>
namespace cg = cooperative_groups;
template <class Group> __device__ float first_of(Group group, float* scratch, float v) {
    if (group.thread_rank() == 0) *scratch = v;
    SYNC
    return *scratch;
}
extern "C" __global__ void f(const float* a, float* o, int* i) {
    __shared__ alignas(16) float copied[64];
    __shared__ float scratch[8];
    cg::thread_block block = cg::this_thread_block();
    cg::memcpy_async(block, copied, a, sizeof(copied));
    WAIT
    const unsigned rank = block.thread_rank(), n = block.size();
    cg::thread_block_tile<8> tile = cg::tiled_partition<8>(block);
    const float v = copied[n - 1 - rank];
    const float4 moved = tile.shfl_xor(make_float4(v, 2 * v, 3 * v, 4 * v), 5);
    float summed = v;
    for (int d = FIRST; d > 0; d /= 2) summed += tile.shfl_down(summed, d);
    const float all[] = {cg::reduce(tile, v, cg::plus<float>()), cg::reduce(tile, v, cg::greater<float>()),
                         cg::reduce(tile, v, cg::less<float>()), moved.z, tile.shfl(v, 3), tile.shfl(summed, 0),
                         first_of(tile, scratch + tile.meta_group_rank(), v), cg::inclusive_scan(tile, v)};
    for (int k = 0; k < 8; ++k) o[k * n + rank] = all[k];
    auto pair = cg::tiled_partition<2>(tile);
    cg::thread_group four = cg::tiled_partition(block, 4);
    cg::sync(four);
    const int whole[] = {(int)tile.ballot(v > 0), tile.any(v > 0), tile.all(v > 0), (int)tile.meta_group_size(),
                         (int)(10 * pair.meta_group_rank() + pair.thread_rank()), (int)four.thread_rank(),
                         cg::exclusive_scan(tile, 2), (int)cg::this_grid().thread_rank(),
                         (int)(block.thread_index().y + 100 * block.group_index().x)};
    for (int k = 0; k < 9; ++k) i[(blockIdx.x * 9 + k) * n + rank] = whole[k];
    MORE
}
"""
PARTS = {"SYNC": "group.sync();", "WAIT": "cg::wait(block);", "FIRST": "tile.size() / 2", "MORE": ""}


def with_parts(text, parts, **changes):
    for name, part in (parts | changes).items():
        text = text.replace(name, part)
    return text


def run_groups(emulate, seed=0, **changes):
    a = np.random.default_rng(1).standard_normal(64).astype(np.float32)
    outputs = np.zeros((8, 8, 8), np.float32), np.zeros((2, 9, 64), np.int32)
    text = with_parts(GROUPS, PARTS, **changes)
    got = emulate(text, a, *outputs, grid=(2, 1, 1), threads=(16, 4, 1), seed=seed)
    return a[::-1].reshape(8, 8), got


def right_groups(v):
    rows = [v.sum(1), v.max(1), v.min(1), None, v[:, 3], v.sum(1), v[:, 0], None]
    right = [np.repeat(row, 8).reshape(8, 8) if row is not None else v for row in rows]
    right[3], right[7] = 3 * v[:, np.arange(8) ^ 5], v.cumsum(1)
    return np.array(right)


def test_groups_of_a_block_and_their_collectives(emulate):
    v, got = run_groups(emulate)
    np.testing.assert_allclose(got["o"], right_groups(v), rtol=1e-5, atol=1e-6)
    rank = np.arange(64)
    above = (v > 0) @ (1 << np.arange(8))
    for block in range(2):
        right = [
            above[rank // 8], above[rank // 8] > 0, above[rank // 8] == 255, np.full(64, 8),
            10 * (rank % 8 // 2) + rank % 2, rank % 4, 2 * (rank % 8), 64 * block + rank, rank // 16 + 100 * block,
        ]  # fmt: skip
        np.testing.assert_array_equal(got["i"][block], right)


BROKEN_GROUPS = {
    "no barrier of the tile": {"SYNC": ""},
    "no wait for the copy": {"WAIT": "block.sync();"},
    "a reduction that begins too low": {"FIRST": "tile.size() / 4"},
}


@pytest.mark.parametrize("name", BROKEN_GROUPS)
def test_a_kernel_that_uses_groups_wrongly_gives_a_wrong_result(emulate, name):
    ran = [run_groups(emulate, seed, **BROKEN_GROUPS[name]) for seed in range(4)]
    assert any(not np.allclose(got["o"], right_groups(v), rtol=1e-5, atol=1e-6) for v, got in ran)


def test_a_tile_that_not_all_threads_bring_to_its_barrier_hangs(emulate):
    with pytest.raises(KernelHung, match="tile.sync"):
        run_groups(emulate, MORE="if (tile.thread_rank()) tile.sync();")


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ("cg::this_grid().sync();", "needs a cooperative launch"),
        ("auto wide = cg::tiled_partition<64>(block);", "tiles of 1, 2, 4, 8, 16 or 32 threads"),
    ],
)
def test_what_the_emulator_cannot_do_with_groups_is_said(emulate, more, why):
    with pytest.raises(KernelUnbuildable, match=why):
        run_groups(emulate, MORE=more)


# ── CCCL: cuda::std and CUB ─────────────────────────────────────────────────────────────────────────────────────────

STANDARD = """
#include <cuda/functional>
#include <cuda/std/array>
#include <cuda/std/bit>
#include <cuda/std/cmath>
#include <cuda/std/cstdint>
#include <cuda/std/functional>
#include <cuda/std/limits>
#include <cuda/std/span>
#include <cuda/std/tuple>
#include <cuda/std/type_traits>
#include <cuda/std/utility>
extern "C" __global__ void f(const float* a, float* o) {
    cuda::std::array<float, 4> row{};
    for (auto& x : row) x = a[threadIdx.x] * (&x - row.data() + 1);
    const cuda::std::span<const float> view(a, 32);
    auto [first, last] = cuda::std::make_tuple(view.front(), view[LAST]);
    static_assert(cuda::std::is_same_v<cuda::std::remove_cvref_t<const float&>, float>);
    cuda::std::swap(first, last);
    const auto bits = cuda::std::bit_cast<cuda::std::uint32_t>(row[0]);
    o[threadIdx.x] = cuda::std::plus<>()(row[0], row[3]) + 2 * first + last + cuda::std::popcount(bits)
                     + cuda::maximum<>()(row[0], row[1]) + cuda::std::exp(row[0])
                     + (cuda::std::numeric_limits<float>::max() > row[2]);
}
"""


def test_the_standard_library_of_cuda(emulate):
    right = STANDARD.replace("LAST", "31")
    a = RANDOM.standard_normal(32).astype(np.float32)
    bits = np.array([bin(b).count("1") for b in a.view(np.uint32).tolist()])
    expected = 5 * a + 2 * a[31] + a[0] + bits + np.maximum(a, 2 * a) + np.exp(a) + 1
    np.testing.assert_allclose(emulate(right, a, np.zeros(32, np.float32))["o"], expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(KernelCrashed, match="out-of-bounds read"):
        emulate(STANDARD.replace("LAST", "32"), a, np.zeros(32, np.float32))


CUB = """
#include <cub/block/block_load.cuh>
#include <cub/block/block_reduce.cuh>
#include <cub/block/block_scan.cuh>
#include <cub/block/block_store.cuh>
#include <cub/warp/warp_reduce.cuh>
#include <cub/warp/warp_scan.cuh>
extern "C" __global__ void f(const float* a, float* o, float* stored, int* counts) {
    using Load = cub::BlockLoad<float, 24, 3, cub::BLOCK_LOAD_TRANSPOSE, 4>;
    using Store = cub::BlockStore<float, 24, 3, cub::BLOCK_STORE_TRANSPOSE, 4>;
    using Reduce = cub::BlockReduce<float, 24, cub::BLOCK_REDUCE_WARP_REDUCTIONS, 4>;
    using Scan = cub::BlockScan<int, 24, cub::BLOCK_SCAN_WARP_SCANS, 4>;
    using OfWarp = cub::WarpReduce<float, 16>;
    using Prefix = cub::WarpScan<int, 8>;
    __shared__ union {
        typename Load::TempStorage load;
        Store::TempStorage store;
        Reduce::TempStorage reduce;
        Scan::TempStorage scan;
    } shared;
    __shared__ OfWarp::TempStorage of_warp[6];
    __shared__ Prefix::TempStorage prefix[12];
    const int rank = threadIdx.x + 24 * threadIdx.y;
    float items[3];
    Load(shared.load).Load(a, items, 280, -1.0f);
    AGAIN
    const float total = Reduce(shared.reduce).Sum(items);
    __syncthreads();
    const float most = Reduce(shared.reduce).Reduce(items[0], cuda::maximum<>(), 70);
    __syncthreads();
    int ones[2] = {1, rank}, upto[2], whole, before, within;
    Scan(shared.scan).InclusiveSum(ones, upto, whole);
    __syncthreads();
    Scan(shared.scan).ExclusiveScan(rank, before, -5, cuda::maximum<>());
    Prefix(prefix[rank / 8]).ExclusiveSum(rank, within);
    const float of_sixteen = OfWarp(of_warp[rank / 16]).Sum(items[1], 10);
    if (WHO) { o[0] = total; o[1] = most; }
    if (rank % 16 == 0) o[2 + rank / 16] = of_sixteen;
    const int found[] = {upto[0], upto[1], whole, before, within};
    for (int i = 0; i < 5; ++i) counts[i * 96 + rank] = found[i];
    __syncthreads();
    Store(shared.store).Store(stored, items, 285);
}
"""
CUB_PARTS = {"AGAIN": "__syncthreads();", "WHO": "rank == 0"}


def run_cub(emulate, seed=0, **changes):
    a = np.random.default_rng(2).standard_normal(288).astype(np.float32)
    outputs = np.zeros(8, np.float32), np.zeros(288, np.float32), np.zeros((5, 96), np.int32)
    return a, emulate(with_parts(CUB, CUB_PARTS, **changes), a, *outputs, threads=(24, 4, 1), seed=seed)


def right_cub(a):
    items = np.where(np.arange(288) < 280, a, -1).reshape(96, 3)
    of_sixteen = items[:, 1].reshape(6, 16)[:, :10].sum(1)
    return items, np.array([items.sum(), items[:70, 0].max(), *of_sixteen])


def test_primitives_of_cub_for_blocks_and_warps(emulate):
    a, got = run_cub(emulate)
    items, right = right_cub(a)
    np.testing.assert_allclose(got["o"], right, rtol=1e-5)
    np.testing.assert_array_equal(got["stored"][:285], items.ravel()[:285])
    rank = np.arange(96)
    sums = np.stack([np.ones(96, int), rank], axis=1).ravel().cumsum().reshape(96, 2)
    right = [sums[:, 0], sums[:, 1], np.full(96, sums[-1, 1]), np.maximum.accumulate(np.concatenate([[-5], rank[:-1]]))]
    right.append(rank // 8 * 8 * (rank % 8) + (rank % 8) * (rank % 8 - 1) // 2)
    np.testing.assert_array_equal(got["counts"], right)


BROKEN_CUB = {
    "storage used again without a barrier": {"AGAIN": ""},
    "the result read by a thread without one": {"WHO": "rank == 1"},
}


@pytest.mark.parametrize("name", BROKEN_CUB)
def test_a_kernel_that_uses_cub_wrongly_gives_a_wrong_result(emulate, name):
    found = []
    for seed in range(6):
        a, got = run_cub(emulate, seed, **BROKEN_CUB[name])
        items, right = right_cub(a)
        found.append(
            np.allclose(got["o"], right, rtol=1e-5) and np.array_equal(got["stored"][:285], items.ravel()[:285])
        )
    assert not all(found)


def test_a_block_of_another_size_than_the_primitive_was_made_for_is_said(emulate):
    text = with_parts(CUB, CUB_PARTS).replace("BlockLoad<float, 24,", "BlockLoad<float, 12,")
    with pytest.raises(KernelCrashed, match="BlockLoad at line .* is for blocks of 48 threads, this one has 96"):
        run_of = [np.zeros(288, np.float32), np.zeros(8, np.float32), np.zeros(288, np.float32)]
        emulate(text, *run_of, np.zeros((5, 96), np.int32), threads=(24, 4, 1))


# ── what the emulator runs is what the real compiler takes ──────────────────────────────────────────────────────────

ALL = {
    "math": MATH,
    "memory": MEMORY.replace("WAIT", "__pipeline_wait_prior(0);"),
    "groups": with_parts(GROUPS, PARTS),
    "standard": STANDARD.replace("LAST", "31"),
    "cub": with_parts(CUB, CUB_PARTS),
}


@pytest.mark.parametrize("name", ["memory", *more(name for name in ALL if name != "memory")])
def test_nvrtc_compiles_it_too(name):
    assert compile_source(Source(ALL[name], "f", Launch((1, 1, 1), 32, 0)), "sm_90a").registers > 0
