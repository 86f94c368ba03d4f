"""Blocks that lag behind others: what the others may see meanwhile decides whether a kernel is right."""

from __future__ import annotations

import numpy as np
import pytest

from evoengine.devices.base import KernelHung
from tests.support.exhaustive import more

SEEDS = range(3)
BLOCKS = 96

# A scan in one pass (Merrill and Garland, "Single-pass Parallel Prefix Scan with Decoupled Look-back", 2016).
SCAN = """
#define STRONG(place) *(volatile unsigned*)&place

extern "C" __global__ void reset(unsigned* ticket, unsigned* flag) {
    flag[blockIdx.x * 32 + threadIdx.x] = 0;
    if (blockIdx.x + threadIdx.x == 0) *ticket = 0;
}

extern "C" __global__ void scan(const unsigned* x, unsigned* ticket, unsigned* flag, unsigned* own, unsigned* all,
                                unsigned* o) {
    const int lane = threadIdx.x;
    unsigned tile = 0;
    if (lane == 0) tile = atomicAdd(ticket, 1u);  // which tile
    tile = __shfl_sync(~0u, tile, 0);
    unsigned value = x[tile * 32 + lane];
    for (int step = 1; step < 32; step *= 2) {
        const unsigned other = __shfl_up_sync(~0u, value, step);
        if (lane >= step) value += other;
    }
    if (lane == 31) {
        (tile ? own : all)[tile] = value;
        __threadfence();
        STRONG(flag[tile]) = tile ? 1 : 2;
    }
    unsigned before = 0;
    for (int first = int(tile) - 1; first >= 0; first -= 32) {
        const int place = first - lane;
        unsigned state;
        do state = place < 0 ? 2 : STRONG(flag[place]); while (__any_sync(~0u, state == 0));
        __threadfence();
        const unsigned found = __ballot_sync(~0u, state == 2);
        unsigned sum = place < 0 || (found && lane >= __ffs(found)) ? 0 : state == 2 ? all[place] : own[place];
        for (int step = 16; step; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
        before += sum;
        if (found) break;  // all before it
    }
    if (tile && lane == 31) {
        all[tile] = before + value;
        __threadfence();
        STRONG(flag[tile]) = 2;
    }
    o[tile * 32 + lane] = before + value;
}
"""
BY_NUMBER = ("if (lane == 0) tile = atomicAdd(ticket, 1u);", "tile = blockIdx.x;")
ONE_WINDOW = ("if (found) break;", "break;")
TWO_WINDOWS = ("if (found) break;", "if (found || first < int(tile) - 32) break;")

# Parts of a sum that are added up by atomics; the last block to count hands it on.
SUM = """
extern "C" __global__ void sum(const unsigned* x, unsigned* total, unsigned* count, unsigned* o) {
    if (threadIdx.x) return;
    atomicAdd(&total[blockIdx.y], x[blockIdx.y * gridDim.x + blockIdx.x]);
    __threadfence();
    const unsigned before = atomicAdd(&count[blockIdx.y], 1u);
    if (before + 1 < gridDim.x) return;
    __threadfence();
    o[blockIdx.y] = atomicExch(&total[blockIdx.y], 0u);
    atomicExch(&count[blockIdx.y], 0u);
}
"""
ADDED = "    atomicAdd(&total[blockIdx.y], x[blockIdx.y * gridDim.x + blockIdx.x]);\n"
COUNTED = "    const unsigned before = atomicAdd(&count[blockIdx.y], 1u);\n"
COUNTED_FIRST = [(ADDED, ""), (COUNTED, COUNTED + ADDED)]

# A barrier of the whole grid, met twice.
MEET = """
__device__ void meet(unsigned* count) {
    __threadfence();
    const unsigned goal = (atomicAdd(count, 1u) / gridDim.x + 1) * gridDim.x;
    while (*(volatile unsigned*)count < goal) {}
    __threadfence();
}

extern "C" __global__ void turn(unsigned* count, const unsigned* x, unsigned* between, unsigned* o) {
    const unsigned last = gridDim.x - 1, block = blockIdx.x;
    if (threadIdx.x == 0) {
        between[block] = x[block];
        meet(count);
        const unsigned own = between[last - block];
        meet(count);
        between[block] = own;
        o[block] = own;
    }
}
"""
RESET_AND_COUNTED_AGAIN = [("    while (", "    if (goal == 2 * gridDim.x) atomicExch(count, 0u);\n    while (")]


def edited(text, edits):
    for old, new in edits:
        assert old in text, old
        text = text.replace(old, new)
    return text


@pytest.fixture
def scan(execute_rounds, scratch):
    """scan(edits, seed, blocks) → prefix sums and what they should be."""

    def launch(edits, seed, blocks=BLOCKS):
        x = np.random.default_rng(seed).integers(0, 99, blocks * 32).astype(np.uint32)
        ticket, flag, own, al = (scratch(4 * n, zeroed=False) for n in (1, blocks * 32, blocks, blocks))
        calls = [("reset", ticket, flag), ("scan", x, ticket, flag, own, al, np.zeros_like(x))]
        done = execute_rounds(edited(SCAN, edits), [calls], grid=(blocks, 1, 1), seed=seed)
        return done.tensors[0]["o"], x.cumsum(dtype=np.uint32)

    return launch


@pytest.fixture
def sum_up(execute_rounds, scratch):
    def launch(edits, seed, parts):
        x = [np.random.default_rng(seed + n).integers(1, 99, (8, parts)).astype(np.uint32) for n in range(2)]
        buffers = scratch(32), scratch(32)
        calls = [[("sum", one, *buffers, np.zeros(8, np.uint32))] for one in x]
        done = execute_rounds(edited(SUM, edits), calls, grid=(parts, 8, 1), seed=seed)
        return [t["o"] for t in done.tensors], [one.sum(1) for one in x]

    return launch


@pytest.fixture
def turn(execute_rounds, scratch):
    def launch(edits, seed, blocks=6, shared=0):
        x = np.arange(blocks, dtype=np.uint32)
        calls = [[("turn", scratch(4), x, scratch(4 * blocks, zeroed=False), np.zeros_like(x))]]
        done = execute_rounds(edited(MEET, edits), calls, grid=(blocks, 1, 1), shared=shared, seed=seed)
        return done.tensors[0]["o"], x[::-1]

    return launch


@pytest.mark.parametrize("edits", [[], [BY_NUMBER]], ids=["ticket", "by number"])
def test_a_scan_that_looks_back_as_far_as_it_must_is_right(scan, edits):
    for seed in SEEDS:
        np.testing.assert_array_equal(*scan(edits, seed))


def test_a_long_scan_is_right(scan):
    for seed in SEEDS:
        np.testing.assert_array_equal(*scan([], seed, blocks=512))


@pytest.mark.parametrize("fault", [ONE_WINDOW, TWO_WINDOWS], ids=["32 tiles", "64 tiles"])
@pytest.mark.parametrize("edits", [[], [BY_NUMBER]], ids=["ticket", "by number"])
def test_a_scan_that_stops_looking_back_is_wrong(scan, edits, fault):
    """In one of four launches at least, as the gate makes of a long problem; in the others few blocks run at once."""
    for seed in SEEDS:
        with pytest.raises(AssertionError, match="Mismatched elements"):
            for launch in range(4):
                np.testing.assert_array_equal(*scan([*edits, fault], 10 * seed + launch))


@pytest.mark.parametrize("parts", [2, 5, 40])
def test_a_counter_that_is_raised_before_an_atomic_result_is_wrong(sum_up, parts):
    for seed in SEEDS:
        np.testing.assert_array_equal(*sum_up([], seed, parts))
        with pytest.raises(AssertionError, match="Mismatched elements"):
            for launch in range(4):
                np.testing.assert_array_equal(*sum_up(COUNTED_FIRST, 10 * seed + launch, parts))


def test_a_barrier_that_is_reset_before_all_have_seen_it_is_one_that_some_never_pass(turn):
    for seed in SEEDS:
        np.testing.assert_array_equal(*turn([], seed))
    with pytest.raises(KernelHung):
        turn(RESET_AND_COUNTED_AGAIN, SEEDS[0])


@pytest.mark.parametrize(("blocks", "ends"), more([(132, True), (133, False)]))
def test_a_barrier_of_more_blocks_than_a_gpu_holds_is_a_deadlock(turn, blocks, ends):
    """An SM has room for one block with so much shared memory, and no GPU of sm_90 has more than 132."""
    if ends:
        np.testing.assert_array_equal(*turn([], 1, blocks, shared=200 << 10))
        return
    with pytest.raises(KernelHung, match=r"132 blocks wait for others, which cannot begin: no GPU of sm_90 holds more"):
        turn([], 1, blocks, shared=200 << 10)
