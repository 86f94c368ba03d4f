"""Clusters of two blocks: each has its own shared memory and reaches the other's, while that one lives."""

from __future__ import annotations

import numpy as np
import pytest

from evoengine.devices.base import KernelCrashed, KernelHung, KernelUnbuildable
from evoengine.records import Launch, Source
from evoengine.stages.compile import compile_source
from tests.support.cluster_kernels import READS, multicast, multicast_text, pair, pair_text
from tests.support.exhaustive import more

SEEDS = [0, 1, *more([2, 3])]


@pytest.mark.parametrize("seed", SEEDS)
def test_blocks_of_a_cluster_have_shared_memory_and_numbers_of_their_own(emulate, seed):
    o = pair(emulate, "number[threadIdx.x] = number[threadIdx.x] * 10 + cluster_rank();", seed)
    block, thread = np.divmod(np.arange(512), 128)
    np.testing.assert_array_equal(o, 10 * (100 * block + thread) + block % 2)


def test_syncthreads_is_each_blocks_own(emulate):
    once_more = "if (cluster_rank()) { __syncthreads(); number[threadIdx.x] = 7; __syncthreads(); }"
    assert (pair(emulate, once_more).reshape(4, 128)[1::2] == 7).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_both_blocks_arrive_at_the_barriers_of_both(emulate, seed):
    body = "if (threadIdx.x < 2) barrier_arrive_at(threadIdx.x, barrier); barrier_wait(barrier, 0);"
    assert pair(emulate, body, seed).any()
    with pytest.raises(KernelHung, match=r"mbarrier at shared address 1024, whose phase 0 .* lacks 1 of 2"):
        pair(emulate, body.replace("threadIdx.x < 2", "threadIdx.x == cluster_rank()"), seed)


def test_a_thread_waits_in_its_own_block_alone(emulate):
    body = 'unsigned there; asm volatile("mapa.shared::cluster.u32 %0, %1, 1;" : "=r"(there) : "r"(barrier));'
    with pytest.raises(KernelCrashed, match=r"mbarrier.try_wait at line \d+: a thread waits in its own block alone"):
        pair(emulate, body + "barrier_wait(there, 0);")
    with pytest.raises(KernelCrashed, match="mapa at line .*: block 2 of a cluster of 2"):
        pair(emulate, body.replace("%1, 1;", "%1, 2;"))


def test_a_block_reached_before_it_has_set_up_its_barrier_is_named(emulate):
    with pytest.raises(KernelCrashed, match="there is no mbarrier .* not initialised yet, or overwritten"):
        for seed in range(64):  # until the other block is the slower one
            pair(emulate, "if (threadIdx.x == 0) barrier_arrive_at(1 - cluster_rank(), barrier);", seed, start="")


def test_a_block_reached_after_it_has_ended_is_named(emulate):
    late = "if (cluster_rank() == 1) { for (int i = 0; i < 99; ++i) __syncthreads(); barrier_arrive_at(0, barrier); }"
    with pytest.raises(KernelCrashed, match="mbarrier.arrive at line .*: the mbarrier is of a block that has ended"):
        pair(emulate, end=late)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_block_reads_the_others_shared_memory(emulate, seed):
    block, thread = np.divmod(np.arange(512), 128)
    np.testing.assert_array_equal(pair(emulate, READS, seed), 100 * (block ^ 1) + thread)


def test_threads_that_have_ended_are_not_waited_for_by_the_cluster(emulate):
    assert pair(emulate, end="if (threadIdx.x % 3) return; cluster_sync();").any()


@pytest.mark.parametrize(
    ("body", "failure", "message"),
    [
        ("if (blockIdx.x % 2) cluster_sync(); else barrier_wait(barrier, 0);", KernelHung, "at barrier.cluster.wait"),
        ('asm volatile("barrier.cluster.arrive.release;"); cluster_sync();', KernelCrashed, "has arrived before"),
        ('asm volatile("barrier.cluster.wait.acquire;");', KernelCrashed, "the thread has not arrived"),
        ("__shared__ int x; x = 1;", KernelCrashed, "shared variable x: the emulator's clusters have dynamic"),
    ],
)  # fmt: skip
def test_a_cluster_used_as_none_can_be_is_named(emulate, body, failure, message):
    with pytest.raises(failure, match=message):
        pair(emulate, body)


def test_what_cannot_be_launched_is_named(emulate):
    with pytest.raises(KernelCrashed, match="a grid of 3 blocks along x, which clusters of 2 do not divide"):
        pair(emulate, blocks=3)
    o = np.zeros(256, np.int32)
    with pytest.raises(KernelCrashed, match="clusters of 16 blocks: the emulator runs 8 at most"):
        emulate(pair_text().replace("(2, 1, 1)", "(16, 1, 1)"), o, grid=(16, 1, 1), threads=128, shared=1280)
    with pytest.raises(KernelUnbuildable, match=r"__cluster_dims__\(1, 2, 1\), where the emulator wants"):
        emulate(pair_text().replace("(2, 1, 1)", "(1, 2, 1)"), o, grid=(2, 2, 1), threads=128, shared=1280)
    with pytest.raises(KernelCrashed, match="a cluster of 2 blocks of 64 threads"):
        emulate(pair_text(), o, grid=(2, 1, 1), threads=64, shared=1280)


@pytest.mark.parametrize("seed", SEEDS)
def test_half_a_tile_from_each_block_makes_a_whole_one_in_both(emulate, seed):
    a, o = multicast(emulate, seed)
    np.testing.assert_array_equal(o, [a, a])


def test_bytes_for_a_block_count_at_its_own_barrier_alone(emulate):
    with pytest.raises(KernelHung, match="mbarrier at shared address 2048, whose phase 0 .* and 1024 bytes"):
        multicast(emulate, blocks="(1 << cluster_rank())")
    with pytest.raises(KernelCrashed, match="a TMA load at line .*: to blocks 0x4 of a cluster of 2"):
        multicast(emulate, blocks="4")
    with pytest.raises((KernelHung, KernelCrashed)):
        multicast(emulate, expect="4096")


def test_a_wait_for_half_of_the_bytes_does_not_wait_for_all(emulate):
    def whole(seed):
        try:
            a, o = multicast(emulate, seed, expect="1024")
        except (KernelCrashed, KernelHung):
            return False
        return (o == a).all()

    assert not all(whole(seed) for seed in range(8))


@pytest.mark.parametrize(
    ("text", "instruction"),
    [(pair_text("barrier_arrive_at(0, barrier);"), "UCGABAR_WAIT"), *more([(multicast_text(), "UTMALDG")])],
)
def test_the_instructions_are_spelt_as_the_real_compiler_takes_them(text, instruction):
    mix = compile_source(Source(text, "f", Launch((2, 1, 1), 128, 0)), "sm_90a").mix
    assert instruction in mix or not mix
