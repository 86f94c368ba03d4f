"""Races over shared memory, told by happens-before: the right kernel passes and each fault is one under every seed."""

from __future__ import annotations

import numpy as np
import pytest

from evoengine.devices.base import KernelCrashed, KernelHung
from tests.support.exhaustive import more
from tests.support.mbarrier_kernels import one
from tests.support.wgmma_kernels import CALL, PRODUCT, laid_out, random, vocabulary

SEEDS = range(3)
RACE = "shared address 0x.*, which `.*` at 0x.* (reads|writes) in lane .* of warp .*: nothing orders the two"

TRANSPOSE = """
extern "C" __global__ void f(const float* a, float* o) {
    __shared__ float tile[2][64];
    for (int i = 0; i < 4; ++i) {
        tile[i % BUFFERS][threadIdx.x] = a[64 * i + threadIdx.x];
        WRITTEN
        o[64 * i + threadIdx.x] = tile[i % BUFFERS][63 - threadIdx.x];
        READ
    }
}
"""
BARRIER = "__syncthreads();"


def transposed(execute, buffers=2, written=BARRIER, read="", seed=0):
    a = np.arange(256, dtype=np.float32)
    text = TRANSPOSE.replace("BUFFERS", str(buffers)).replace("WRITTEN", written).replace("READ", read)
    o = execute(text, a, np.zeros_like(a), threads=64, seed=seed)["o"]
    np.testing.assert_array_equal(o.reshape(4, 64), a.reshape(4, 64)[:, ::-1])


@pytest.mark.parametrize("right", [{}, {"buffers": 1, "read": BARRIER}])
def test_a_tile_between_barriers_is_no_race(execute, right):
    for seed in SEEDS:
        transposed(execute, seed=seed, **right)


@pytest.mark.parametrize("fault", [{"written": ""}, {"buffers": 1}, *more([{"written": "", "read": BARRIER}])])
def test_a_missing_barrier_is_a_race_under_every_seed(execute, fault):
    for seed in SEEDS:
        with pytest.raises(KernelCrashed, match=RACE):
            transposed(execute, seed=seed, **fault)


HALVES = """
extern "C" __global__ void f(const int* a, int* o, int n) {
    __shared__ volatile int place[32];
    int mine = a[threadIdx.x], got;
    if (threadIdx.x < 16) {
        for (int i = 0; i < n; ++i) mine += a[(mine + i) & 31];
        place[threadIdx.x] = mine;
        SYNC
        got = 1;
    } else {
        SYNC
        got = place[threadIdx.x - 16];
    }
    o[threadIdx.x] = got;
}
"""


def test_lanes_that_diverge_are_ordered_by_syncwarp_alone(execute):
    a = np.arange(32, dtype=np.int32)
    for seed in SEEDS:
        o = execute(HALVES.replace("SYNC", "__syncwarp();"), a, np.zeros_like(a), np.int32(0), seed=seed)["o"]
        np.testing.assert_array_equal(o, np.r_[np.ones(16, np.int32), a[:16]])
        with pytest.raises(KernelCrashed, match=RACE):
            apart = "__syncwarp(threadIdx.x < 16 ? 0xffff : 0xffff0000);"
            execute(HALVES.replace("SYNC", apart), a, np.zeros_like(a), np.int32(0), seed=seed)


ATOMIC = """
extern "C" __global__ void f(float* o) {
    __shared__ float sum;
    __shared__ int count;
    if (threadIdx.x == 0) sum = 0, count = 0;
    __syncthreads();
    atomicAdd(&sum, 1.0f);
    atomicAdd(&count, 1);
    SYNC
    if (threadIdx.x == 0) o[0] = sum + count;
}
"""


def test_atomics_do_not_race_with_one_another_but_with_a_read_that_nothing_orders(execute):
    for seed in SEEDS:
        o = execute(ATOMIC.replace("SYNC", BARRIER), np.zeros(1, np.float32), threads=96, seed=seed)["o"]
        assert o[0] == 192
        with pytest.raises(KernelCrashed, match=RACE):
            execute(ATOMIC.replace("SYNC", ""), np.zeros(1, np.float32), threads=96, seed=seed)


def test_an_mbarrier_that_a_thread_cannot_know_to_be_initialised_is_a_race(execute):
    body = """
    if (threadIdx.x == 0) barrier_init(b + 8, 64);
    SYNC
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(b + 8) : "memory");
    o[threadIdx.x % 32] = 1;
    """
    for seed in SEEDS:
        assert (initialised(execute, body.replace("SYNC", BARRIER), seed) == 1).all()
        with pytest.raises(KernelCrashed, match="SYNCS"):
            initialised(execute, body.replace("SYNC", ""), seed)


def initialised(execute, body, seed):
    return one(lambda text, *values, **options: execute(text, *values, **{**options, "threads": 64}), body, seed)


LOOK = """
    if (threadIdx.x < 32) {
        for (volatile int i = 0; i < 300; ++i) {}
        barrier_arrive(b + 8);
    } else {
        asm volatile("{\\n.reg .pred p;\\nlook: mbarrier.test_wait.parity.shared::cta.b64 p, [%0], 0;\\n"
                     "@!p bra look;\\n}" :: "r"(b + 8) : "memory");
    }
    o[threadIdx.x % 32] = 1;
"""


def test_a_loop_of_failed_looks_is_no_hung_kernel_and_one_in_vain_is(execute):
    right = f"if (threadIdx.x == 0) barrier_init(b + 8, 32); __syncthreads(); {LOOK}"
    for seed in SEEDS:
        assert (initialised(execute, right, seed) == 1).all()
    with pytest.raises(KernelHung):
        initialised(execute, right.replace("b + 8, 32", "b + 8, 33"), 0)


def product(execute, seed, **changes):
    """A product of 64 x 16 x 16 whose operands are stored by ordinary stores."""
    a, a_bits = random(64, 16)
    b, b_bits = random(16, 16, seed=1)
    text = PRODUCT.replace("PRODUCT;", f"{CALL};").replace("WIDTH_A", "32").replace("WIDTH_B", "32")
    text = text.replace("TRANS_B", "false").replace("N / 2", "8")
    for old, new in changes.values():
        assert old in text, old
        text = text.replace(old, new)
    images = laid_out(a_bits, 32), laid_out(b_bits, 32)
    sizes = [np.int32(image.nbytes) for image in images]
    values = [*images, np.zeros((128, 8), np.float32), np.zeros((128, 8), np.float32), *sizes]
    strides = [np.int32(v) for v in (0, 0, 256, 256, 0, 0, 1, 0)]
    return a @ b.T, execute(vocabulary("fp16", 16) + text, *values, *strides, threads=128, shared=8192, seed=seed)["o"]


PROXY_FENCE = "    async_proxy_fence();\n"


def test_a_product_of_what_ordinary_stores_wrote_needs_a_proxy_fence_and_a_barrier(execute):
    for seed in SEEDS:
        right, o = product(execute, seed)
        assert np.isfinite(o).all() and abs(np.abs(o).sum() - np.abs(right).sum()) < 1e-2 * np.abs(right).sum()
        with pytest.raises(KernelCrashed, match=r"HGMMA.* no proxy fence \(fence.proxy.async\) lies between"):
            product(execute, seed, fence=(PROXY_FENCE, ""))
        with pytest.raises(KernelCrashed, match="HGMMA.* nothing orders the two"):
            product(execute, seed, barrier=("    __syncthreads();\n", ""))


PLACE_OF_A_BARRIER = """
__device__ unsigned at(const void* p) { return (unsigned)__cvta_generic_to_shared(p); }
extern "C" __global__ void f(const int* a, int* o) {
    __shared__ alignas(128) int place[32];
    __shared__ unsigned long long bar;
    if (threadIdx.x == 0) asm volatile("mbarrier.init.shared.b64 [%0], 1;" :: "r"(at(&bar)) : "memory");
    asm volatile("fence.proxy.async;" ::: "memory");
    __syncthreads();
    FIRST
    BETWEEN
    if (threadIdx.x == 0) {
        asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], 128;" :: "r"(at(&bar)) : "memory");
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], 128, [%2];"
                     :: "r"(at(place)), "l"(a), "r"(at(&bar)) : "memory");
    }
    asm volatile("{ .reg .pred p; W: mbarrier.try_wait.parity.shared.b64 p, [%0], 0; @!p bra W; }"
                 :: "r"(at(&bar)) : "memory");
    o[threadIdx.x] = place[threadIdx.x];
}
"""
INIT = """if (threadIdx.x == 0) asm volatile("mbarrier.init.shared.b64 [%0], 7;" :: "r"(at(place)) : "memory");"""
STORE = "place[threadIdx.x] = threadIdx.x;"
FENCED = 'asm volatile("fence.proxy.async;" ::: "memory"); __syncthreads();'


def loaded_over(execute, first, between, seed=0):
    a = np.arange(32, dtype=np.int32)
    text = PLACE_OF_A_BARRIER.replace("FIRST", first).replace("BETWEEN", between)
    return (execute(text, a, np.zeros_like(a), threads=32, seed=seed)["o"] == a).all()


@pytest.mark.parametrize(("first", "between"), [(STORE, FENCED), (INIT, FENCED), (INIT, BARRIER)])
def test_tma_may_load_over_what_was_fenced_and_over_the_init_of_an_mbarrier_behind_a_barrier(execute, first, between):
    for seed in SEEDS:
        assert loaded_over(execute, first, between, seed)


@pytest.mark.parametrize(("first", "between"), [(STORE, BARRIER), (INIT, "")])
def test_tma_may_not_load_over_a_store_without_a_fence_nor_over_an_init_of_the_same_thread(execute, first, between):
    for seed in SEEDS:
        with pytest.raises(KernelCrashed, match=r"UBLKCP.* no proxy fence \(fence.proxy.async\) lies between"):
            loaded_over(execute, first, between, seed)
