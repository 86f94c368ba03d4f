"""Visits: how often each warp waited, multiplied and voted, by block and site, in the first round."""

from collections import Counter

import numpy as np

from evoengine.devices.base import VisitKind


def line_of(part, text):
    return 1 + text[: text.index(part)].count("\n")


VOTES = """
extern "C" __global__ void f(const int* n, int* o) {
    for (int i = 0; i < n[threadIdx.x / 32]; ++i)
        if (__any_sync(~0u, i == 3 && threadIdx.x % 32 == 9)) o[blockIdx.x * blockDim.x + threadIdx.x] = i;
    __syncthreads_or(threadIdx.x == 0);
}
"""


def found(visits, kind):
    """(block, warp, site) → count and how many came out true."""
    rows = visits[visits["kind"] == kind]
    counts = {(int(v["block"]), int(v["warp"]), int(v["site"])): (int(v["count"]), int(v["true"])) for v in rows}
    assert len(counts) == len(rows)
    return counts


def test_votes_are_counted_by_block_warp_and_line_with_those_that_came_out_true(emulate_rounds):
    def call(*n):
        return [("f", np.array(n, np.int32), np.zeros(192, np.int32))]

    done = emulate_rounds(VOTES, [call(2, 4, 7), call(9, 9, 9)], grid=(2, 1, 1), threads=96)
    in_loop = {(block, warp, 4): (n, int(n > 3)) for block in (0, 1) for warp, n in enumerate((2, 4, 7))}
    behind = {(block, warp, 5): (1, 1) for block in (0, 1) for warp in range(3)}
    assert found(done.visits, VisitKind.VOTE) == in_loop | behind


PIPELINE = """
extern "C" __global__ void f(const float* a, float* o, int steps) {
    extern __shared__ __align__(16) unsigned char shared[];
    auto tile = reinterpret_cast<float (*)[32]>(shared);
    auto full = reinterpret_cast<unsigned long long*>(shared + 256);
    unsigned at = (unsigned)__cvta_generic_to_shared(full), to = (unsigned)__cvta_generic_to_shared(tile);
    if (threadIdx.x == 0)
        for (int i = 0; i < 2; ++i) asm volatile("mbarrier.init.shared.b64 [%0], 1;" :: "r"(at + 8 * i));
    asm volatile("fence.mbarrier_init.release.cluster;");
    __syncthreads();
    float sum = 0;
    for (int i = 0; i < steps; ++i) {
        if (threadIdx.x == 0) {
            unsigned long long state;
            asm volatile("fence.proxy.async.shared::cta;");
            asm volatile("mbarrier.arrive.expect_tx.shared.b64 %0, [%1], 128;" : "=l"(state) : "r"(at + 8 * (i % 2)));
            asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], 128, [%2];"
                         :: "r"(to + 128 * (i % 2)), "l"(a + 32 * i), "r"(at + 8 * (i % 2)));
        }
        unsigned done = 0;
        while (!done)
            asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.b32 %0, 1, 0, p;}"
                         : "=r"(done) : "r"(at + 8 * (i % 2)), "r"(i / 2 % 2));
        sum += tile[i % 2][threadIdx.x % 32];
        __syncthreads();
    }
    o[threadIdx.x] = sum;
}
"""


def test_waits_for_mbarriers_that_succeeded_are_counted_by_address(emulate_rounds):
    a = np.arange(160, dtype=np.float32)
    done = emulate_rounds(PIPELINE, [[("f", a, np.zeros(64, np.float32), np.int32(5))]], threads=64, shared=272)
    np.testing.assert_array_equal(done.tensors[0]["o"][:32], a.reshape(5, 32).sum(0))
    waits = found(done.visits, VisitKind.WAIT)
    sites = sorted({site for _, _, site in waits})
    assert len(sites) == 2 and sites[1] == sites[0] + 8
    assert waits == {(0, warp, site): (count, 0) for warp in (0, 1) for site, count in zip(sites, (3, 2), strict=True)}


PRODUCTS = """
#include <mma.h>
#include <cuda_pipeline.h>
using namespace nvcuda;
extern "C" __global__ void f(const __half* a, float* o) {
    __shared__ __align__(32) __half tile[256];
    for (int i = threadIdx.x; i < 32; i += 32) __pipeline_memcpy_async(&tile[8 * i], &a[8 * i], 16);
    __pipeline_commit();
    __pipeline_wait_prior(0);
    __syncthreads();
    wmma::fragment<wmma::matrix_a, 16, 16, 16, __half, wmma::row_major> x;
    wmma::fragment<wmma::matrix_b, 16, 16, 16, __half, wmma::row_major> y;
    wmma::fragment<wmma::accumulator, 16, 16, 16, float> sum;
    wmma::fill_fragment(sum, 0);
    wmma::load_matrix_sync(x, tile, 16);
    wmma::load_matrix_sync(y, tile, 16);
    for (int i = 0; i < 3; ++i)
        wmma::mma_sync(sum, x, y, sum);
    unsigned r[6] = {};
    float d[4] = {};
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]), "r"(r[4]), "r"(r[5]));
    wmma::store_matrix_sync(o, sum, 16, wmma::mem_row_major);
}
"""


def test_products_and_waits_for_copies_are_counted_by_line(emulate_rounds):
    a = np.zeros(256, np.uint16)
    visits = emulate_rounds(PRODUCTS, [[("f", a, np.zeros(256, np.float32))]]).visits
    lines = Counter({line: count for (_, _, line), (count, _) in found(visits, VisitKind.PRODUCT).items()})
    assert sorted(lines.values()) == [8, 3 * 16] and lines[line_of("wmma::mma_sync", PRODUCTS)] == 3 * 16
    assert found(visits, VisitKind.COPY_WAIT) == {(0, 0, line_of("__pipeline_wait", PRODUCTS)): (1, 0)}


def test_a_launch_without_any_has_none(emulate_rounds, floats):
    text = 'extern "C" __global__ void f(float* o) { o[threadIdx.x] = 0; __syncthreads(); }'
    assert len(emulate_rounds(text, [[("f", floats(32))]]).visits) == 0
