"""Blocks that tell each other something through global memory, as ptxas compiles them: right kernels pass under every
seed, what lacks an order is a race under every seed, and a hang is one whatever the time."""

from __future__ import annotations

import numpy as np
import pytest

from evoengine.devices.base import KernelCrashed, KernelFailure, KernelHung
from tests.cuda_emulator import test_emulator_races as combining
from tests.cuda_emulator import test_emulator_waits as waiting
from tests.support.exhaustive import more, representatives

SEEDS = range(3)
IN_ONE_WARP = ("no barrier before the count", "one thread's fence too early", "all store to one place")
"""faults of the text that are none of this machine code: the threads run together"""
RACES = [p for p in combining.RACES if p.id not in IN_ONE_WARP]
RACE = r"byte \d+ of .*, which `.*` at 0x\w+ (reads|writes) in block .*: nothing orders the two"


def edited(edits, text):
    for old, new in edits:
        assert old in text, old
        text = text.replace(old, new)
    return text if "cuda::atomic" not in text else "#include <cuda/atomic>" + text


@pytest.fixture
def combine(execute_rounds, scratch):
    """combine(edits, seed, rounds) → the sums of rows and what they should be, of each round."""

    def launch(edits, seed, count=2):
        rows, parts, n = combining.ROWS, combining.PARTS, combining.N
        rng = np.random.default_rng(seed)
        x = [rng.integers(-8, 8, (rows, n)).astype(np.float32) for _ in range(count)]
        buffers = scratch(rows * parts * 16, zeroed=False), scratch(rows * 4)
        calls = [[("f", a, *buffers, np.zeros((rows, 4), np.float32), np.int32(n))] for a in x]
        text = edited(edits, combining.SPLIT)
        done = execute_rounds(text, calls, grid=(parts, rows, 1), threads=64, seed=seed)
        assert not done.unwritten
        return [t["o"] for t in done.tensors], [a.sum(1)[:, None] * np.arange(1, 5) for a in x]

    return launch


@pytest.fixture
def chain(execute_rounds, scratch):
    """chain(edits, seed, blocks) → what the last block stores and what it should, of two rounds."""

    def launch(edits, seed, blocks=waiting.BLOCKS, threads=64):
        rng = np.random.default_rng(seed)
        x = [rng.integers(-8, 8, (blocks, threads)).astype(np.float32) for _ in range(2)]
        buffers = scratch(blocks * threads * 4, zeroed=False), scratch(blocks * 4)
        calls = [[("f", a, *buffers, np.zeros(threads, np.float32))] for a in x]
        text = edited(edits, waiting.CHAIN)
        done = execute_rounds(text, calls, grid=(blocks, 1, 1), threads=threads, seed=seed)
        return [t["o"] for t in done.tensors], [a.sum(0) for a in x]

    return launch


@pytest.mark.parametrize("edits", representatives(combining.RIGHT, "as the", "a counter of the device"))
def test_blocks_that_combine_by_a_counter_are_right(combine, edits):
    for seed in SEEDS:
        np.testing.assert_array_equal(*combine(edits, seed))


@pytest.mark.parametrize("edits", representatives(waiting.RIGHT, "volatile", "ld.acquire"))
def test_blocks_that_wait_for_one_another_come_to_their_end(chain, edits):
    for seed in SEEDS:
        np.testing.assert_array_equal(*chain(edits, seed))


@pytest.mark.parametrize(
    ("edits", "tensor"), representatives(RACES, "no fence", "counted before", "an atomic_ref that only releases")
)
def test_results_that_nothing_orders_are_a_race_under_every_seed(combine, edits, tensor):
    for seed in SEEDS:
        with pytest.raises(KernelCrashed, match=RACE):
            combine(edits, seed)


@pytest.mark.parametrize(("edits", "tensor"), representatives(waiting.RACES, "nothing acquires", "red.relaxed"))
def test_a_flag_that_orders_nothing_is_a_race_under_every_seed(chain, edits, tensor):
    for seed in SEEDS:
        with pytest.raises(KernelCrashed, match=RACE):
            chain(edits, seed)


def test_a_counter_that_is_never_reset_is_seen_by_the_second_launch(combine):
    for seed in SEEDS:
        with pytest.raises((AssertionError, KernelFailure)):
            np.testing.assert_array_equal(*combine([(combining.RESET, "")], seed))
        np.testing.assert_array_equal(*combine([(combining.RESET, "")], seed, count=1))


def test_threads_may_store_the_same_value_to_one_place_and_not_different_ones(execute_rounds, scratch):
    def launch(value):
        calls = [[("f", np.full(128, 7, np.int32), scratch(4), np.zeros(128, np.int32))]]
        return execute_rounds(combining.SAME.replace("VALUE", value), calls, grid=(4, 1, 1))

    launch("1")
    with pytest.raises(KernelCrashed, match="writes byte 0 of found, which .* writes in block"):
        launch("1 + threadIdx.x + 32 * blockIdx.x")


@pytest.mark.parametrize("edits", [[(waiting.RAISE, ";")], *more([[(waiting.WAIT, "while (true) {}")]])])
def test_a_flag_that_nobody_raises_is_a_hang_whatever_the_time(chain, edits):
    found = []
    for _ in range(2):
        with pytest.raises(KernelHung, match="warps wait for what never comes") as raised:
            chain(edits, seed=1, blocks=3)
        found.append(str(raised.value))
    assert found[0] == found[1]


@pytest.mark.parametrize("blocks", [3, *more([40, 132])])
def test_a_barrier_of_the_whole_grid_is_met_by_blocks_that_were_not_there_yet(execute_rounds, scratch, blocks):
    values = np.arange(blocks * 128, dtype=np.int32).reshape(blocks, 128)
    outputs = np.zeros_like(values), np.zeros_like(values)
    for seed in range(2):
        calls = [[("f", scratch(4), values + i, *outputs)] for i in range(2)]
        done = execute_rounds(waiting.GRID, calls, grid=(blocks, 1, 1), threads=128, seed=seed)
        for i, tensors in enumerate(done.tensors):
            np.testing.assert_array_equal(tensors["o"], np.roll(values + i + 1, -1, axis=0))


IN_ORDER = """
extern "C" __global__ void first(const int* x, int* between) { between[threadIdx.x] = x[threadIdx.x] + 1; }
extern "C" __global__ void second(const int* between, int* o) {
    if (threadIdx.x < 24) o[threadIdx.x] = between[31 - threadIdx.x];
}
"""


def test_kernels_run_in_stream_order_and_what_they_do_not_store_is_counted(execute_rounds, scratch):
    x = np.arange(32, dtype=np.int32)
    between, o = scratch(128), np.zeros(32, np.int32)
    done = execute_rounds(IN_ORDER, [[("first", x, between), ("second", between, o)]])
    np.testing.assert_array_equal(done.tensors[0]["o"][:24], x[::-1][:24] + 1)
    assert done.unwritten == {"o": 8}


SWAPPED = """
extern "C" __global__ void f(const float* x, unsigned* total, float* beside) {
    if (threadIdx.x) return;
    unsigned old = *total, seen;
    do {
        seen = old;
        old = atomicCAS(total, seen, __float_as_uint(__uint_as_float(seen) + x[blockIdx.x] + OTHER));
    } while (old != seen);
    if (blockIdx.x == 1) beside[0] = 1;
}
"""


def test_the_load_that_begins_a_swap_races_with_nothing_and_one_beside_it_does(execute_rounds, scratch):
    x = np.arange(6, dtype=np.float32)

    def launch(other, seed):
        calls = [[("f", x, np.zeros(1, np.uint32), np.zeros(1, np.float32))]]
        done = execute_rounds(SWAPPED.replace("OTHER", other), calls, grid=(6, 1, 1), seed=seed)
        return done.tensors[0]["total"]

    for seed in SEEDS:
        launch("0", seed)
        with pytest.raises(KernelCrashed, match=RACE):
            launch("beside[0] * 0", seed)
