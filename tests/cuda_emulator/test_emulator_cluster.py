"""Clusters of two blocks: each has its own shared memory and reaches the other's, while that one lives."""

from __future__ import annotations

import numpy as np
import pytest

from evoengine.devices.base import KernelCrashed, KernelHung, KernelUnbuildable
from evoengine.records import Launch, Source
from evoengine.stages.compile import compile_source
from tests.support.cluster_kernels import READS, multicast, multicast_text, pair, pair_text
from tests.support.exhaustive import more, representatives

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


WORD = """unsigned there; asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
    : "=r"(there) : "r"(shared_address(number + threadIdx.x)), "r"(1 - cluster_rank()));"""
GENERIC = "int* there = cooperative_groups::this_cluster().map_shared_rank(number, 1 - cluster_rank()) + threadIdx.x;"
MAPPED = """unsigned long long to; asm volatile("mapa.u64 %0, %1, %2;"
    : "=l"(to) : "l"(number + threadIdx.x), "r"(1 - cluster_rank())); volatile int* there = (int*)to;"""
ACCESSES = {
    "load": WORD + 'asm volatile("ld.shared::cluster.s32 %0, [%1];" : "=r"(number[threadIdx.x]) : "r"(there));',
    "store": WORD + 'asm volatile("st.shared::cluster.s32 [%0], %1;" :: "r"(there), "r"(7));',
    "reduction": WORD + 'asm volatile("red.relaxed.cluster.shared::cluster.add.s32 [%0], %1;" :: "r"(there), "r"(7));',
    "atomic": GENERIC + "atomicAdd(there, 7);",
    "generic load": GENERIC + "number[threadIdx.x] = *there;",
    "generic store": GENERIC + "*there = 7;",
    "volatile load": MAPPED + "number[threadIdx.x] = *there;",
    "generic load by the address": WORD + "number[threadIdx.x] = *(int*)__cvta_shared_to_generic(there);",
    "arrival": "if (threadIdx.x == 0) barrier_arrive_at(1 - cluster_rank(), barrier);",
}
"""a thread's access to the other block's shared memory"""


def reach(emulate, body, seed=0, **parts):
    o = np.zeros(256, np.int32)
    text = "#include <cooperative_groups.h>\n" + pair_text(body, **parts)
    return emulate(text, o, grid=(2, 1, 1), threads=128, shared=1280, seed=seed)["o"]


TALKS = representatives(
    [pytest.param(body, id=name) for name, body in ACCESSES.items()], "load", "generic store", "arrival"
)
ENDED = (
    r"block \d of the cluster ends, .* reached by .* at line \d+, block \d, thread \d+: nothing orders the two|"
    r"at line \d+ reaches shared memory of block \d of the cluster, which has ended"
)
NOT_BEGUN = r"at line \d+ reaches shared memory of block \d of the cluster, which may not have begun"


@pytest.mark.parametrize("body", TALKS)
def test_a_block_is_reached_between_its_begin_and_its_end(emulate, body):
    assert reach(emulate, body).any()


@pytest.mark.parametrize("body", TALKS)
def test_a_block_that_may_not_have_begun_is_named_under_every_schedule(emulate, body):
    for seed in range(3):
        with pytest.raises(KernelCrashed, match=NOT_BEGUN):
            reach(emulate, body, seed, start="__syncthreads();")


@pytest.mark.parametrize("body", TALKS)
def test_a_block_that_may_have_ended_is_named_under_every_schedule(emulate, body):
    for seed in range(3):
        with pytest.raises(KernelCrashed, match=ENDED):
            reach(emulate, body, seed, end="")


ANSWERED = ACCESSES["load"] + "barrier_arrive_at(1 - cluster_rank(), barrier); barrier_wait(barrier, 0);"
FLAG = """if (threadIdx.x == 0) number[128] = 0;
cluster_sync();
__syncthreads();
unsigned flag; asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
    : "=r"(flag) : "r"(shared_address(number + 128)), "r"(1 - cluster_rank()));
if (threadIdx.x == 0) {
    asm volatile("st.release.cluster.shared::cluster.s32 [%0], 1;" :: "r"(flag) : "memory");
    for (int there = 0; !there;)
        asm volatile("ld.acquire.cluster.shared::cta.s32 %0, [%1];"
            : "=r"(there) : "r"(shared_address(number + 128)) : "memory");
}
__syncthreads();"""


@pytest.mark.parametrize("body", [ANSWERED, *more([ACCESSES["load"] + FLAG])])
def test_any_order_keeps_a_block_from_ending_too_early(emulate, body):
    """By an mbarrier of each block at which all threads of the other one arrive, and by a word that one stores."""
    count = "barrier_init(barrier, 2)"
    assert count in pair_text()
    for seed in range(3):
        text = "#include <cooperative_groups.h>\n" + pair_text(body, end="").replace(
            count, "barrier_init(barrier, 128)"
        )
        assert emulate(text, np.zeros(256, np.int32), grid=(2, 1, 1), threads=128, shared=1280, seed=seed)["o"].any()


def test_a_tile_for_a_block_that_may_not_have_begun_is_named(emulate):
    text = multicast_text()
    begin = text.index("cluster_sync();\n    if (threadIdx.x == 0)")
    early = text[:begin] + "__syncthreads();" + text[begin + len("cluster_sync();") :]
    for seed in range(3):
        with pytest.raises(KernelCrashed, match=rf"a TMA load {NOT_BEGUN}"):
            multicast(emulate, seed, text=early)


def test_a_barrier_that_nothing_orders_behind_its_init_is_named(emulate):
    """The block has begun, but the thread that arrives does not know that the other one has set up the barrier."""
    early = "cluster_sync(); if (threadIdx.x == 0 && !cluster_rank()) barrier_arrive_at(1, barrier); cluster_sync();"
    set_up = "if (threadIdx.x == 0) barrier_init(barrier, 2);"
    assert set_up in pair_text()
    text = pair_text(start=f"{early}").replace(set_up, "")
    late = text.replace("cluster_sync(); if", f"cluster_sync(); if (cluster_rank()) {{ {set_up} }} if")
    with pytest.raises(KernelCrashed, match="there is no mbarrier|nothing orders it behind the mbarrier.init"):
        for seed in range(3):
            emulate(late, np.zeros(256, np.int32), grid=(2, 1, 1), threads=128, shared=1280, seed=seed)


RELAXED = """
    asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
    asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
"""


@pytest.mark.parametrize("seed", SEEDS)
def test_a_relaxed_meeting_orders_the_barriers_behind_whose_init_there_was_a_fence(emulate, seed):
    arrive = "if (threadIdx.x == 0) barrier_arrive_at(1 - cluster_rank(), barrier), barrier_arrive(barrier);"
    own = f"{arrive} barrier_wait(barrier, 0);"
    assert pair(emulate, own, seed, start=RELAXED, end="").any()
    unfenced = pair_text(own, start=RELAXED, end="").replace("    barrier_init_fence();\n", "")
    with pytest.raises(KernelCrashed, match="nothing orders it behind the mbarrier.init"):
        emulate(unfenced, np.zeros(256, np.int32), grid=(2, 1, 1), threads=128, shared=1280, seed=seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_relaxed_meeting_orders_no_read_before_the_end_of_the_block(emulate, seed):
    assert pair(emulate, READS, seed, end="").any()
    with pytest.raises(KernelCrashed, match="nothing orders the two"):
        pair(emulate, READS.replace("cluster_sync();", RELAXED), seed, end="")


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
    with pytest.raises(KernelUnbuildable, match=r"__cluster_dims__\(1, 2, 1\), where the emulator requires"):
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
