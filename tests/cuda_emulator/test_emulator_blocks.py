"""Blocks of up to three dimensions, and blocks that are not of whole warps."""

import resource

import numpy as np
import pytest

from evoengine.devices.base import KernelCrashed, KernelHung
from evoengine.sandbox.worker_process import WorkerLimits

INDICES = """
extern "C" __global__ void f(int* o, int* lane, int* count) {
    int rank = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
    o[rank] = threadIdx.x + 100 * threadIdx.y + 10000 * threadIdx.z;
    unsigned own;
    asm volatile("mov.u32 %0, %%laneid;" : "=r"(own));
    lane[rank] = own;
    count[rank] = __popc(__ballot_sync(~0u, threadIdx.x == 1));
}
"""
TRANSPOSE = """
extern "C" __global__ void f(const float* a, float* o) {
    __shared__ float tile[8][9];
    tile[threadIdx.y][threadIdx.x] = a[threadIdx.y * 8 + threadIdx.x];
    SYNC
    o[threadIdx.y * 8 + threadIdx.x] = tile[threadIdx.x][threadIdx.y];
}
"""


@pytest.mark.parametrize("block", [(4, 3, 8), (5, 3, 2), (1, 64, 1), (7, 1, 1)])
def test_x_runs_fastest_then_y_and_warps_are_32_threads_in_that_order(emulate, block):
    x, y, z = block
    ints = [np.zeros(x * y * z, np.int32) for _ in range(3)]
    got = emulate(INDICES, *ints, threads=block)
    rank = np.arange(x * y * z)
    of_x = rank % x
    np.testing.assert_array_equal(got["o"], of_x + 100 * (rank // x % y) + 10000 * (rank // x // y))
    np.testing.assert_array_equal(got["lane"], rank % 32)
    ones = [np.count_nonzero(of_x[rank // 32 == r // 32] == 1) for r in rank]
    np.testing.assert_array_equal(got["count"], ones)


def test_a_missing_barrier_of_a_block_of_two_dimensions_is_seen(emulate):
    a = np.random.default_rng(1).standard_normal((8, 8)).astype(np.float32)
    right = TRANSPOSE.replace("SYNC", "__syncthreads();")
    np.testing.assert_array_equal(emulate(right, a, np.zeros_like(a), threads=(8, 8, 1))["o"], a.T)
    racing = [
        emulate(TRANSPOSE.replace("SYNC", ""), a, np.zeros_like(a), threads=(8, 8, 1), seed=s)["o"] for s in range(4)
    ]
    assert all((o != a.T).any() for o in racing)


def test_reductions_over_the_last_warp_do_without_the_lanes_that_no_thread_has(emulate):
    text = """
extern "C" __global__ void f(int* o) {
    int v = threadIdx.y + 1;
    o[threadIdx.y * 4 + threadIdx.x] = __reduce_add_sync(~0u, v) * 10 + __all_sync(~0u, v > 0);
    __syncwarp();
}
"""
    o = emulate(text, np.zeros(40, np.int32), threads=(4, 10, 1))["o"]
    whole, rest = 4 * sum(range(1, 9)), 4 * (9 + 10)
    assert (o == [whole * 10 + 1] * 32 + [rest * 10 + 1] * 8).all()


def test_reports_name_all_three_indices_of_a_thread(emulate):
    text = 'extern "C" __global__ void f(int* o) { assert(threadIdx.y != 2 || threadIdx.x != 3); o[0] = 1; }'
    with pytest.raises(KernelCrashed, match=r"threadIdx.*block \(0,0,0\), thread \(3,2,0\)"):
        emulate(text, np.zeros(1, np.int32), threads=(4, 4, 1))
    text = 'extern "C" __global__ void f(int* o) { if (threadIdx.z) __syncthreads(); o[0] = 1; }'
    with pytest.raises(KernelHung, match=r"32 of 64 threads wait .*e\.g\. thread \(0,0,1\)"):
        emulate(text, np.zeros(1, np.int32), threads=(4, 8, 2))


def test_a_block_of_more_threads_than_a_gpu_allows_is_refused(emulate):
    with pytest.raises(KernelCrashed, match="a block of 2048 threads"):
        emulate(INDICES, *[np.zeros(2048, np.int32)] * 3, threads=(32, 32, 2))


MEETING = """
extern "C" __global__ void f(unsigned* come, int* o) {
    if (threadIdx.x == 0) {
        atomicAdd(come, 1u);
        while (*reinterpret_cast<volatile unsigned*>(come) < gridDim.x) {}
    }
    __syncthreads();
    o[blockIdx.x * blockDim.x + threadIdx.x] = 1;
}
"""


def test_as_many_threads_as_the_emulator_runs_at_once_fit_the_memory_of_a_worker(emulate):
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (WorkerLimits().memory_bytes, hard))
    try:
        found = emulate(MEETING, np.zeros(1, np.uint32), np.zeros(24576, np.int32), grid=(24, 1, 1), threads=1024)
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
    assert found["o"].all()
