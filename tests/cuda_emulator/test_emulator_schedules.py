"""Which thread is ahead of which is drawn per launch: what only some orders show, some of 24 launches show."""

import numpy as np
import pytest

from tests.support.exhaustive import more

SEEDS = range(24)


def seen(emulate, text, floats, count, **options):
    return np.array([emulate(text, floats(count), seed=seed, **options)["o"] for seed in SEEDS])


GROUPS = """
extern "C" __global__ void f(float* o) {
    __shared__ volatile float done;
    if (threadIdx.x == 0) done = 0;
    __syncthreads();
    const unsigned lanes = threadIdx.x & 16 ? 0xffff0000u : 0xffffu;
    for (int i = 0; i < 20; ++i) __syncwarp(lanes);
    if (threadIdx.x / SIZE == 1) done = 1;
    for (int i = 0; i < 20; ++i) __syncwarp(lanes);
    o[threadIdx.x] = done;
}
"""


@pytest.mark.parametrize(("size", "groups"), [(16, 2), *more([(32, 8), (128, 3)])])
def test_half_a_warp_or_a_warp_or_a_warpgroup_may_lag_far_behind_the_others(emulate, floats, size, groups):
    threads = size * groups
    o = seen(emulate, GROUPS.replace("SIZE", str(size)), floats, threads, threads=threads)
    others = np.delete(o.reshape(len(SEEDS), groups, size), 1, axis=1)
    assert (others == 0).any()  # forty meetings were not enough


FIRST = """
extern "C" __global__ void f(float* o) {
    __shared__ volatile float prepared;
    for (int i = 0; i < 4; ++i) __syncwarp();
    if (threadIdx.x == 0) prepared = 1;
    for (int i = 0; i < 8; ++i) __syncwarp();
    o[threadIdx.x] = prepared;
}
"""


def test_what_the_first_thread_prepares_is_often_not_there_without_a_barrier(emulate, floats):
    o = seen(emulate, FIRST, floats, 256, threads=256)
    assert np.isnan(o).any(axis=1).sum() > len(SEEDS) / 4


WGMMA = """
extern "C" __global__ void __launch_bounds__(128) f(float* o) {
    extern __shared__ __align__(1024) unsigned char tile[];
    volatile float* flag = reinterpret_cast<float*>(tile + 4096);
    for (int i = threadIdx.x; i < 4096; i += 128) tile[i] = 0;
    if (threadIdx.x == 0) *flag = 0;
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    unsigned long long at = (unsigned)__cvta_generic_to_shared(tile) >> 4 | 8ull << 16 | 16ull << 32;
    float d[4] = {};
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    asm volatile("wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%0, %1, %2, %3}, %4, %4, 1, 1, 1, 0, 0;"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "l"(at));
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    for (int i = 0; i < 8; ++i) __syncwarp();
    if (threadIdx.x == 96) *flag = 1;
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    o[threadIdx.x] = *flag + d[0];
}
"""


def test_a_product_may_be_there_for_others_while_a_warp_that_began_it_lags(emulate, floats):
    o = seen(emulate, WGMMA, floats, 128, threads=128, shared=8192)
    assert (o[:, :96] == 0).any() and (o[:, :96] == 1).any()
    assert (o[:, 96] == 1).all()
