"""Tensors larger than memory: contents where a kernel looks, and what each chosen block touched."""

from __future__ import annotations

import numpy as np
import pytest

from evoengine.cuda_emulator.build import build
from evoengine.cuda_emulator.run import run_blocks
from evoengine.devices.base import KernelCrashed, KernelUnbuildable, ScalarArgument, TensorMapArgument, TensorParameter
from evoengine.devices.pool import PAGE, BlockLaunch, ChosenBlock, Pool
from evoengine.records import Launch, Source

TERABYTE = 1 << 40
PLENTY = 1 << 20
COPY = """
extern "C" __global__ void f(const unsigned short* a, unsigned short* o, long long from, long long to) {
    if (threadIdx.x == 5) o[to + blockIdx.x] = a[from + blockIdx.x];
}
"""


@pytest.fixture(scope="module")
def pool():
    return Pool(np.random.default_rng(3).integers(0, 255, (64, PAGE), np.uint8))


@pytest.fixture
def copied(pool):
    """copied(from, to, blocks, …) → what each block touched; `from` and `to` count elements of 2 bytes."""

    def run_copy(start, to, blocks=(0,), size=TERABYTE, limit=PLENTY, seed=0, text=COPY):
        launch = Launch((1 << 20, 4, 1), 32, 0)
        tensors = (TensorParameter("a", (size,), "uint8"), TensorParameter("o", (size,), "uint8", output=True))
        numbers = (ScalarArgument("from", np.int64(start)), ScalarArgument("to", np.int64(to)))
        asked = BlockLaunch(launch, (*tensors, *numbers), pool, [ChosenBlock(b, limit, True) for b in blocks])
        return run_blocks(build(Source(text, "f", launch), "sm_90a"), "f", asked, seed, 20.0)

    return run_copy


def written(trace):
    """Offset in bytes → element, of every element that is not as it was."""
    found = {}
    for offset, page in trace.pages["o"]:
        elements = page.view(np.uint16)
        found |= {offset + 2 * int(i): int(elements[i]) for i in np.flatnonzero(elements != 0xFFFF)}
    return found


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("start", [0, 2047, 3 << 31, TERABYTE // 2 - 1])
def test_an_element_anywhere_in_a_tensor_is_the_one_that_the_pool_says(copied, pool, start, seed):
    (trace,) = copied(start, 12345, seed=seed)
    assert written(trace) == {2 * 12345: int(pool.read(0, 2 * start, 2 * start + 2).view(np.uint16)[0])}
    assert not trace.given_up


def test_tensors_of_one_pool_differ_and_so_do_their_pages(pool):
    q, k = (pool.read(argument, 0, 64 * PAGE).reshape(64, PAGE) for argument in (0, 1))
    assert (q != k).any(axis=1).sum() > 50
    assert len(np.unique(q, axis=0)) > 32


def test_any_part_of_a_tensor_is_that_part_of_the_whole(pool):
    whole = pool.read(2, 0, 10 * PAGE)
    np.testing.assert_array_equal(pool.read(2, 4000, 30001), whole[4000:30001])


def test_each_block_is_reported_for_itself_and_finds_nothing_that_another_wrote(copied):
    traces = copied(0, 0, blocks=[7, 3, 7])
    assert [t.block for t in traces] == [7, 3, 7]
    assert [list(written(t)) for t in traces] == [[14], [6], [14]]


def test_blocks_count_along_x_then_y(copied):
    text = COPY.replace("o[to + blockIdx.x]", "o[to + 10 * blockIdx.y + blockIdx.x]")
    (trace,) = copied(0, 0, blocks=[2 * (1 << 20) + 3], text=text)
    assert list(written(trace)) == [46]


@pytest.mark.parametrize("seed", [0, 1])
def test_an_offset_that_overflowed_is_named_with_its_distance(copied, seed):
    with pytest.raises(KernelCrashed, match="out-of-bounds read of a: 4294967296 bytes before its start, kernel f"):
        copied(-(1 << 31), 0, seed=seed)
    with pytest.raises(KernelCrashed, match="out-of-bounds write of o: .* bytes past its end, kernel f"):
        copied(0, TERABYTE // 2 + (1 << 31), seed=seed)


def test_a_write_just_outside_of_an_output_is_caught_on_a_page_that_it_shares(copied):
    for seed, to in ((0, 5000), (1, -1)):
        with pytest.raises(KernelCrashed, match="out-of-bounds write of o"):
            copied(0, to, size=10000, seed=seed)
    # the other seeds leave a rest of the page there
    for seed, to in ((1, 5000), (0, -1)):
        with pytest.raises(KernelCrashed, match="out-of-bounds write of o"):
            copied(0, to, size=10000, seed=seed)


def test_a_write_to_an_input_is_caught(copied):
    text = COPY.replace("o[to + blockIdx.x] =", "const_cast<unsigned short*>(a)[to] =")
    with pytest.raises(KernelCrashed, match="write to read-only input a"):
        copied(0, 0, text=text)


def test_what_was_never_written_is_nan(copied):
    text = COPY.replace("a[from + blockIdx.x]", "o[from] == 0xffff")
    (trace,) = copied(99, 0, text=text)
    assert written(trace) == {0: 1}


WALK = """
extern "C" __global__ void f(const unsigned short* a, unsigned short* o, long long from, long long to) {
    unsigned sum = 0;
    o[blockIdx.x] = 1;
    for (long long i = 0; i < from * blockIdx.x; i += 2048) sum += a[i];
    if (threadIdx.x == 0) o[64 + blockIdx.x] = sum ? 2 : 3;
}
"""


def test_a_block_that_reads_too_much_is_given_up_and_the_next_one_runs(copied):
    traces = copied(20480, 0, blocks=[1, 3, 2], limit=25 * PAGE, text=WALK)
    assert [t.given_up for t in traces] == [False, True, False]
    assert [len(written(t)) for t in traces] == [2, 1, 2]
    assert len(traces[1].pages["a"]) == 25


def test_a_crash_in_a_chosen_block_names_that_block(copied):
    with pytest.raises(KernelCrashed, match=r"block \(4,0,0\), thread 5"):
        copied(-5 - 16, 0, blocks=[4], text=COPY.replace("from + blockIdx.x", "from * 4096"))


def test_a_tensor_map_that_reaches_beyond_a_pooled_tensor_is_refused(pool):
    rows = TERABYTE // 128
    launch = Launch((1, 1, 1), 32, 0)

    def ask(count):
        one = TensorMapArgument("m", "a", "fp16", (64, count), (128,), (64, 64), swizzle=128)
        arguments = (TensorParameter("a", (TERABYTE,), "uint8"), one)
        return BlockLaunch(launch, arguments, pool, [ChosenBlock(0, PLENTY, True)])

    with pytest.raises(KernelUnbuildable, match="a dim of"):
        run_blocks(build(Source(COPY, "f", launch), "sm_90a"), "f", ask(rows), 0, 20.0)
    with pytest.raises(KernelUnbuildable, match="reaches"):
        small = TensorMapArgument("m", "a", "fp16", (64, 1 << 20), (128,), (64, 64), swizzle=128)
        asked = BlockLaunch(
            launch, (TensorParameter("a", (1 << 20,), "uint8"), small), pool, [ChosenBlock(0, PLENTY, True)]
        )
        run_blocks(build(Source(COPY, "f", launch), "sm_90a"), "f", asked, 0, 20.0)
