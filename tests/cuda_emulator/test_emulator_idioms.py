"""Idioms by which blocks work together on CUDA: none of them is called a race, and each gives what it should."""

import numpy as np
import pytest

from evoengine.devices.base import KernelCrashed
from tests.support.exhaustive import more

SEEDS = range(3)

# Merrill and Garland, "Single-pass parallel prefix scan with decoupled look-back": value and state in one word.
LOOK_BACK = """
extern "C" __global__ void clear(unsigned long long* state, unsigned* ticket, int blocks) {
    if (threadIdx.x < blocks) state[threadIdx.x] = 0;
    if (threadIdx.x == 0) *ticket = 0;
}
extern "C" __global__ void scan(const int* in, unsigned long long* state, unsigned* ticket, int* out) {
    __shared__ int before, sums[32];
    __shared__ unsigned tile;
    if (threadIdx.x == 0) tile = atomicAdd(ticket, 1u);
    __syncthreads();
    int sum = in[tile * 32 + threadIdx.x];
    for (int below = 1; below < 32; below *= 2) {
        int other = __shfl_up_sync(~0u, sum, below);
        if (threadIdx.x >= below) sum += other;
    }
    if (threadIdx.x == 31) {
        volatile unsigned long long* words = state;
        words[tile] = (tile ? 1ull : 2ull) << 32 | unsigned(sum);
        int exclusive = 0;
        for (int i = int(tile) - 1; i >= 0;) {
            const unsigned long long word = words[i];
            if (word >> 32 == 0) continue;
            exclusive += int(unsigned(word));
            if (word >> 32 == 2) break;
            --i;
        }
        if (tile) words[tile] = 2ull << 32 | unsigned(exclusive + sum);
        before = exclusive;
    }
    __syncthreads();
    out[tile * 32 + threadIdx.x] = before + sum;
}
"""


def test_a_scan_with_decoupled_look_back(emulate_rounds, scratch):
    for seed in SEEDS:
        values = [np.random.default_rng(seed + i).integers(-9, 9, 20 * 32).astype(np.int32) for i in range(2)]
        state, ticket = scratch(160, zeroed=False), scratch(4, zeroed=False)
        calls = [[("clear", state, ticket, np.int32(20)), ("scan", v, state, ticket, np.zeros_like(v))] for v in values]
        done = emulate_rounds(LOOK_BACK, calls, grid=(20, 1, 1), seed=seed)
        for v, tensors in zip(values, done.tensors, strict=True):
            np.testing.assert_array_equal(tensors["out"], np.cumsum(v))


LOCK = """
extern "C" __global__ void f(int* lock, int* sum, int* o) {
    if (threadIdx.x == 0) {
        while (atomicCAS(lock, 0, 1) != 0) {}
        __threadfence();
        o[blockIdx.x] = *sum += 1;
        __threadfence();  // before it is let go
        atomicExch(lock, 0);
    }
}
"""


def test_a_lock(emulate_rounds, scratch):
    def launch(text, seed):
        calls = [[("f", scratch(4), scratch(4), np.zeros(12, np.int32))]] * 2
        return [t["o"] for t in emulate_rounds(text, calls, grid=(12, 1, 1), seed=seed).tensors]

    for seed in SEEDS:
        first, second = launch(LOCK, seed)
        assert sorted(first) == [*range(1, 13)] and sorted(second) == [*range(13, 25)]
        with pytest.raises(KernelCrashed, match="race on sum"):
            launch(LOCK.replace("__threadfence();  // before it is let go", ""), seed)


HISTOGRAM = """
extern "C" __global__ void clear(int* counts) { counts[threadIdx.x] = 0; }
extern "C" __global__ void count(const unsigned char* in, int* counts, int n) {
    __shared__ int own[32];
    own[threadIdx.x] = 0;
    __syncthreads();
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) atomicAdd(&own[in[i]], 1);
    __syncthreads();
    ADD
}
"""


def test_a_histogram_of_two_kernels(emulate_rounds):
    def launch(add, seed):
        values = np.random.default_rng(seed).integers(0, 32, 1000).astype(np.uint8)
        counts = np.zeros(32, np.int32)
        calls = [[("clear", counts), ("count", values, counts, np.int32(1000))]] * 2
        done = emulate_rounds(HISTOGRAM.replace("ADD", add), calls, grid=(5, 1, 1), seed=seed)
        for tensors in done.tensors:
            np.testing.assert_array_equal(tensors["counts"], np.bincount(values, minlength=32))

    for seed in SEEDS:
        launch("atomicAdd(&counts[threadIdx.x], own[threadIdx.x]);", seed)
        with pytest.raises(KernelCrashed, match="race on counts"):
            launch("counts[threadIdx.x] += own[threadIdx.x];", seed)


QUEUE = """
extern "C" __global__ void f(const float* in, unsigned* next, unsigned* finished, float* o, int tiles) {
    __shared__ unsigned tile;
    for (;;) {
        if (threadIdx.x == 0) tile = atomicAdd(next, 1u);
        __syncthreads();
        const unsigned own = tile;
        __syncthreads();
        if (own >= tiles) break;
        o[own * 32 + threadIdx.x] = 2 * in[own * 32 + threadIdx.x];
    }
    if (threadIdx.x == 0) {
        __threadfence();
        if (atomicInc(finished, gridDim.x - 1) == gridDim.x - 1) *next = 0;
    }
}
"""


@pytest.mark.parametrize("blocks", [3, *more([1, 40])])
def test_persistent_blocks_that_take_their_tiles_from_a_queue(emulate_rounds, scratch, blocks):
    x = np.arange(17 * 32, dtype=np.float32)
    for seed in SEEDS:
        calls = [[("f", x + i, scratch(4), scratch(4), x, np.int32(17))] for i in range(2)]
        done = emulate_rounds(QUEUE, calls, grid=(blocks, 1, 1), seed=seed)
        for i, tensors in enumerate(done.tensors):
            np.testing.assert_array_equal(tensors["o"], 2 * (x + i))


IN_A_BLOCK = """
extern "C" __global__ void f(const float* in, float* o, float* between) {
    __shared__ volatile int ready;
    if (threadIdx.x == 0) ready = 0;
    __syncthreads();
    if (threadIdx.x < 32) {
        between[threadIdx.x] = 3 * in[threadIdx.x];
        FENCE
        __syncwarp();
        if (threadIdx.x == 0) ready = 1;
    } else {
        while (ready == 0) {}
        FENCE
        o[threadIdx.x - 32] = between[threadIdx.x - 32];
    }
}
"""


def test_warps_of_a_block_that_wait_for_one_another_by_a_flag_in_shared_memory(emulate_rounds, scratch):
    x = np.arange(32, dtype=np.float32)
    calls = [[("f", x, x, scratch(128, zeroed=False))]]
    for seed in SEEDS:
        done = emulate_rounds(IN_A_BLOCK.replace("FENCE", "__threadfence_block();"), calls, threads=64, seed=seed)
        np.testing.assert_array_equal(done.tensors[0]["o"], 3 * x)
        with pytest.raises(KernelCrashed, match="race on between"):
            emulate_rounds(IN_A_BLOCK.replace("FENCE", ""), calls, threads=64, seed=seed)


NAMED = """
extern "C" __global__ void f(const float* in, float* between, float* o) {
    const int lane = threadIdx.x % 32;
    if (threadIdx.x < 32) {
        between[lane] = in[lane] + 1;
        __threadfence_block();
        asm volatile("bar.arrive 1, 64;" ::: "memory");
    } else {
        asm volatile("bar.sync 1, 64;" ::: "memory");
        o[lane] = between[lane];
    }
}
"""


def test_a_named_barrier_at_which_one_warp_arrives_and_the_other_waits(emulate_rounds, scratch):
    x = np.arange(32, dtype=np.float32)
    calls = [[("f", x, scratch(128, zeroed=False), x)]]
    for seed in SEEDS:
        done = emulate_rounds(NAMED, calls, threads=64, seed=seed)
        np.testing.assert_array_equal(done.tensors[0]["o"], x + 1)
        with pytest.raises(KernelCrashed, match="race on between"):
            emulate_rounds(NAMED.replace("bar.sync 1, 64;", ""), calls, threads=64, seed=seed)


STORED_BY_TMA = """
extern "C" __global__ void f(const float* in, float* between, unsigned* flag, float* o) {
    extern __shared__ __align__(128) float tile[];
    if (blockIdx.x == 0) {
        tile[threadIdx.x] = 5 * in[threadIdx.x];
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        __syncthreads();
        if (threadIdx.x == 0) {
            asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], 128;"
                         :: "l"(between), "r"((unsigned)__cvta_generic_to_shared(tile)) : "memory");
            asm volatile("cp.async.bulk.commit_group;" ::: "memory");
            asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
            asm volatile("st.release.gpu.global.u32 [%0], 1;" :: "l"(flag) : "memory");
        }
        return;
    }
    if (threadIdx.x == 0) {
        unsigned seen;
        do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(flag) : "memory");
        while (seen == 0);
        *(volatile unsigned*)flag = 0;
    }
    __syncthreads();
    o[threadIdx.x] = between[threadIdx.x];
}
"""


def test_a_bulk_store_that_another_block_reads(emulate_rounds, scratch):
    x = np.arange(32, dtype=np.float32)
    calls = [[("f", x + i, scratch(128, zeroed=False), scratch(4), x)] for i in range(2)]
    for seed in SEEDS:
        done = emulate_rounds(STORED_BY_TMA, calls, grid=(2, 1, 1), shared=128, seed=seed)
        np.testing.assert_array_equal([t["o"] for t in done.tensors], [5 * x, 5 * (x + 1)])
        with pytest.raises(KernelCrashed, match="bulk store at line 9 .* whose end nobody has waited for"):
            text = STORED_BY_TMA.replace("wait_group 0", "wait_group.read 0")  # shared memory alone may be used again
            emulate_rounds(text, calls, grid=(2, 1, 1), shared=128, seed=seed)
