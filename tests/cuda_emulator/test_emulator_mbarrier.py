"""mbarriers and what goes with them: phases, arrivals after copies, rings, register budgets, elected lanes."""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import pytest

from evoengine.devices.base import KernelCrashed, KernelHung
from evoengine.records import Launch, Source
from evoengine.stages.compile import compile_source
from tests.support.exhaustive import each_nth, more
from tests.support.mbarrier_kernels import RIGHT, SOURCES, VOCABULARY, one, one_text, registers_text, ring, ring_text

SEEDS = [0, 1, *more([2])]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("source", SOURCES)
def test_a_ring_of_two_places_passes_all_tiles_on(emulate, source, seed):
    assert ring(emulate, source, seed)
    every_thread = {"CONSUMERS": "64", "SYNC": "", "RELEASE": "barrier_arrive(empty + t % 2 * 8);"}
    assert ring(emulate, source, seed, **every_thread)


FAULTS = {
    "the producer does not wait for the first round to be read": {"PARITY_EMPTY": "t / 2 % 2 ^ 1 ^ (t > 1)"},
    "the consumer's parity is off by one": {"WAIT_FULL": "barrier_wait(full + t % 2 * 8, t / 2 % 2 ^ 1);"},
    "the consumer does not wait": {"WAIT_FULL": ""},
    "the consumer waits for the other place": {"WAIT_FULL": "barrier_wait(full + (t + 1) % 2 * 8, t / 2 % 2);"},
    "the consumer asks once and takes no for an answer": {
        "WAIT_FULL": """asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1; }"
                                     :: "r"(full + t % 2 * 8), "r"(t / 2 % 2) : "memory");"""
    },
    "one thread releases before all have read": {"SYNC": ""},
    "the place is released before it is read": {"WAIT_FULL": RIGHT["WAIT_FULL"] + RIGHT["RELEASE"], "RELEASE": ""},
    "more arrivals are expected than come": {"CONSUMERS": "2"},
    "more arrivals come than are expected": {"RELEASE": "if (threadIdx.x < 34) barrier_arrive(empty + t % 2 * 8);"},
    "the place is never released": {"RELEASE": ""},
}


# of two neighbouring faults, one in a ring filled by TMA and one in a ring filled by cp.async
FAULTY = [(fault, source) for n, fault in enumerate(FAULTS) for source in (*SOURCES, *SOURCES)[n % 2 : n % 2 + 2]]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("fault", "source"), each_nth(2, FAULTY))
def test_a_fault_in_a_ring_is_caught_whatever_the_order(emulate, source, fault, seed):
    with suppress(KernelCrashed, KernelHung):
        assert not ring(emulate, source, seed, **FAULTS[fault])


def test_a_ring_that_cannot_go_on_is_told_with_its_barriers(emulate):
    # The empty barrier of the first place is the third of four: 16 bytes on in the first static variable, at 1 MiB.
    message = (
        r"hang: 1 of 96 threads wait at mbarrier at shared address 1048592, whose phase 0 \(parity 0\) lacks 1 of 2 "
        r"arrivals and 0 bytes \(line \d+, e\.g\. thread \d+\)|"
        r"hang: 32 of 96 threads wait at mbarrier at shared address 1048592, whose phase 0 \(parity 0\) lacks 1 of 2 "
        r"arrivals and 0 bytes \(line \d+, e\.g\. thread 0\), 64 wait at mbarrier at shared address 1048576"
    )
    with pytest.raises(KernelHung, match=message):
        ring(emulate, "cp.async", CONSUMERS="2")


ARRIVE_AND_WAIT = """
    unsigned long long state;
    asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 %0, [%1];" : "=l"(state) : "r"(b) : "memory");
    unsigned done = 0;
    while (!done)
        asm volatile("{ .reg .pred %%p; mbarrier.test_wait.acquire.cta.shared::cta.b64 %%p, [%1], %2; "
                     "selp.b32 %0, 1, 0, %%p; }"
                     : "=r"(done) : "r"(b), "l"(state) : "memory");
    o[threadIdx.x] = 1;
    __syncthreads();
    if (threadIdx.x == 0) asm volatile("mbarrier.inval.shared::cta.b64 [%0];" :: "r"(b) : "memory");
"""


@pytest.mark.parametrize("seed", SEEDS)
def test_states_and_test_wait_serve_as_well(emulate, seed):
    assert (one(emulate, ARRIVE_AND_WAIT, seed) == 1).all()


def test_a_test_wait_for_what_never_comes_is_a_hang_too(emulate):
    body = ARRIVE_AND_WAIT.replace('asm volatile("mbarrier.arrive', 'if (threadIdx.x) asm volatile("mbarrier.arrive', 1)
    with pytest.raises(
        KernelHung, match=r"mbarrier at shared address 1048576, whose phase 0 \(parity 0\) lacks 1 of 32"
    ):
        one(emulate, body.replace("state;", "state = 0;"))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("barrier_arrive(b + 8);", "mbarrier.arrive at line .*: there is no mbarrier at shared address 1048584"),
        (
            "barrier_arrive(b + 4);",
            "misaligned mbarrier.arrive at line .*: shared address 1048580 is not a multiple of 8",
        ),
        ("barriers[0] = 0; barrier_arrive(b);", "there is no mbarrier .*: not initialised yet, or overwritten"),
        ("FORTY", "mbarrier.arrive at line .*: 40 arrivals at shared address 1048576, where phase 0 lacks 32 of 32"),
        ("barrier_wait(b, 2);", "mbarrier.try_wait at line .*: parity 2, which must be 0 or 1"),
        ("barrier_init(b, 1);", "mbarrier.init at line .*: there is an mbarrier at shared address 1048576 already"),
        ("barrier_init(b + 8, 0);", "mbarrier.init at line .*: 0 arrivals, of 1 to 1048575"),
    ],
)
def test_a_barrier_used_as_none_can_be_is_named(emulate, body, message):
    forty = 'asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], 40;" :: "r"(b) : "memory");'
    with pytest.raises(KernelCrashed, match=message):
        one(emulate, body.replace("FORTY", forty))


@pytest.mark.parametrize("seed", SEEDS)
def test_warpgroups_that_share_what_there_is_all_get_it(emulate, seed):
    assert emulate(registers_text(24, 240), np.zeros(384, np.int32), threads=384, seed=seed)["o"].all()


@pytest.mark.parametrize("seed", SEEDS)
def test_asking_for_more_registers_than_there_are_is_a_hang(emulate, seed):
    message = (
        r"hang: \d+ of 384 threads wait at setmaxnreg.inc for 72 more registers per thread, of which the block has \d+"
    )
    with pytest.raises(KernelHung, match=message):
        emulate(registers_text(40, 240), np.zeros(384, np.int32), threads=384, seed=seed)


def test_two_blocks_per_multiprocessor_have_half_the_registers_each(emulate):
    text = registers_text(24, 104).replace("(384, 1)", "(384, 1 + 1)")
    assert emulate(text, np.zeros(384, np.int32), threads=384)["o"].all()
    with pytest.raises(KernelHung, match="setmaxnreg.inc for 32 more registers"):
        emulate(text.replace("104", "112"), np.zeros(384, np.int32), threads=384)


@pytest.mark.parametrize(
    ("producer", "message"), [(20, "20 registers, which must be a multiple of 8"), (232, "to 232 registers from 168")]
)
def test_a_register_count_that_cannot_be_is_named(emulate, producer, message):
    with pytest.raises(KernelCrashed, match=f"setmaxnreg.dec at line .*: {message}"):
        emulate(registers_text(producer, 240), np.zeros(384, np.int32), threads=384)


def test_one_lane_is_elected_and_not_always_the_first(emulate):
    text = VOCABULARY + 'extern "C" __global__ void f(int* o) { o[threadIdx.x] = elect_one() + elect_one(); }'
    leaders = set()
    for seed in range(4):
        o = emulate(text, np.zeros(64, np.int32), threads=64, seed=seed)["o"].reshape(2, 32)
        assert (o.sum(axis=1) == 2).all() and (o.max(axis=1) == 2).all()
        leaders.add(int(o[0].argmax()))
    assert len(leaders) > 1


@pytest.mark.parametrize(
    ("text", "threads"),
    each_nth(
        4,
        [
            (ring_text("cp.async"), 96),
            (ring_text("tma"), 96),
            (one_text(ARRIVE_AND_WAIT), 32),
            (registers_text(24, 240), 384),
            *((ring_text("tma", **changes), 96) for changes in FAULTS.values()),
        ],
    ),
)
def test_the_instructions_are_spelt_as_the_real_compiler_takes_them(text, threads):
    binary = compile_source(Source(text, "f", Launch((1, 1, 1), threads, 0)), "sm_90a")
    assert {"SYNCS", "USETMAXREG"} & binary.mix.keys() or not binary.mix
