"""The machine code of every family is executed and right, for each architecture; faults planted in it are caught there.

The emulator has no part in this: what is compiled by NVRTC is executed, and nothing else.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from evoengine.paths import asset
from evoengine.records import EXECUTOR, Outcome, Plans, Source
from evoengine.search.evaluators import gate_plan
from evoengine.stages.compile import compile_source
from evoengine.stages.render import render
from evoengine.stages.verify import CannotJudge
from evoengine.workloads.base import Target
from tests.support.exhaustive import representatives
from tests.support.kernel_gate import attention_space, attention_target, execute
from tests.workloads import test_planted_faults as classic
from tests.workloads import test_planted_faults_mma as mma
from tests.workloads import test_planted_faults_more as more
from tests.workloads import test_planted_faults_registers_and_races as races
from tests.workloads import test_planted_faults_wgmma as wgmma

GPUS = {"sm_80": "a100", "sm_89": "l4", "sm_90a": "h100"}
PROBLEMS = (
    "b2,h4,s256,d64,fp16", "b2,h8,s256,d64,bf16,causal,kv2", "b1,h4,s256,d128,bf16", "b1,h4,s256,d128,fp16,causal",
)  # fmt: skip
FAMILIES = ("scalar", "wmma", "mma", "wgmma")


def executed(target: Target, space, config, source: Source, arch: str):
    binary = compile_source(source, arch)
    return execute(target.workload, source, binary, Plans(gate_plan(space, target, config)), seed=7)


def starts():
    """Each family on each architecture that it has, with one of the problems; wgmma, which has one, with all of
    them."""
    for number, (arch, gpu) in enumerate(GPUS.items()):
        for place, family in enumerate(FAMILIES):
            problems = PROBLEMS if family == "wgmma" else [PROBLEMS[(number + place) % len(PROBLEMS)]]
            for problem in problems:
                if family != "wgmma" or arch == "sm_90a":
                    yield pytest.param(family, arch, gpu, problem, id=f"{family}-{arch}-{problem}")


# each way to multiply, each architecture, with a mask and without
FAST_STARTS = ("scalar-sm_80", "mma-sm_89", "wgmma-sm_90a-b2,h4,s256,d64,fp16")


@pytest.mark.parametrize(("family", "arch", "gpu", "problem"), representatives(starts(), *FAST_STARTS))
def test_the_machine_code_of_every_family_is_right(attention_gate, family, arch, gpu, problem):
    space, target = attention_space(problem, gpu, (family,)), attention_target(problem, gpu)
    config = space.starts[0]
    verdict = executed(target, space, config, render(target, space, config, asset("templates")), arch)
    assert verdict.correct, verdict.reason
    assert verdict.device == EXECUTOR
    assert len(verdict.cases) == len(gate_plan(space, target, config))


# ── faults of the other files, compiled ─────────────────────────────────────────────────────────────────────────────

CHOSEN = {
    classic: [
        ("missing barrier before a tile is read", "wmma"), ("missing barrier before a tile is read", "scalar"),
        ("missing barrier between scores and softmax", "wmma"), ("missing barrier between softmax and product", "wmma"),
        ("O not rescaled when the maximum moves", "scalar"), ("tail mask one key too far", "scalar"),
        ("heads and batch swapped in the stride", "wmma"), ("cp.async not waited for", "scalar"),
        ("cp.async waited for too laxly", "wmma"), ("read past the end of the tensors", "scalar"),
        ("write past the end of O", "wmma"), ("shared memory overrun", "scalar"), ("input changed", "wmma"),
    ],
    mma: [
        ("K waited for too laxly", "mma"), ("V not waited for at all", "mma"),
        ("swizzle by the wrong bits of the row", "mma"),
        ("V not transposed", "mma"), ("P packed in the wrong order", "mma"), ("a row too many written", "mma"),
        ("causal mask one off where lengths differ", "mma"),
    ],
    wgmma: [
        ("wrong stride in a descriptor", "wgmma"), ("tiles not swizzled", "wgmma"), ("V not transposed", "wgmma"),
        ("full barrier's parity off by one", "wgmma"), ("place never given back", "wgmma"),
        ("empty barrier counts too many", "wgmma"), ("too few bytes announced", "wgmma"),
        ("rounds too far apart", "wgmma"), ("only the block's own half of the bytes announced", "wgmma"),
        ("halves change places", "wgmma"), ("registers never given up", "wgmma"),
    ],
    races: [("accumulators of mma.sync only written", "mma"), ("accumulators of wgmma only written", "wgmma")],
    more: [("bfloat16 by way of half", "mma")],
}  # fmt: skip


def planted(module, name: str, family: str):
    """(configuration as the module's file has it, problem, pairs of good and broken text) of the first that fits."""
    for entry in module.FAULTS:
        if entry[0] != name:
            continue
        configs = entry[1] if isinstance(entry[1], list | tuple) else [entry[1]]
        for config in configs:
            if config.get("family", "wgmma") == family:
                return config, *_problem_and_pairs(module, entry)
    raise AssertionError(f"there is no fault {name!r} of the family {family}")


def _problem_and_pairs(module, entry):
    if module is races:
        return races.HALF, entry[2]
    return (entry[2], entry[3]) if module is more else (entry[2], [entry[3:]])


FAULTS = [
    pytest.param(module, name, family, id=f"{name}-{family}")
    for module, chosen in CHOSEN.items()
    for name, family in chosen
]


# one fault of each class; the others of a class run with `make test-all`
FAST = (
    "cp.async waited for too laxly-wmma",
    "swizzle by the wrong bits of the row-mma",
    "too few bytes announced-wgmma",
)


@pytest.mark.parametrize(("module", "name", "family"), representatives(FAULTS, *FAST))
def test_a_planted_fault_is_caught_in_the_machine_code(attention_gate, module, name, family):
    wanted, problem, pairs = planted(module, name, family)
    gate = attention_gate(problem)
    config = gate.start(wanted) if module in (classic, mma) else module.variant(gate, wanted)
    source = gate.source(config)
    for old, new in pairs:
        assert old in source.text, f"the template has no {old!r} any more"
        source = replace(source, text=source.text.replace(old, new))
    verdict = executed(gate.target, gate.space, config, source, "sm_90a")
    assert verdict.outcome in (Outcome.INCORRECT, Outcome.CRASHED, Outcome.HUNG), "the fault escaped"
    assert verdict.reason


def test_at_least_thirty_faults_of_all_families_are_planted():
    assert len(FAULTS) >= 30
    assert {family for chosen in CHOSEN.values() for _, family in chosen} == set(FAMILIES)


@pytest.fixture(scope="module")
def right():
    """A right kernel: its space, target, configuration, source and binary."""
    space, target = attention_space(PROBLEMS[0]), attention_target(PROBLEMS[0])
    config = next(c for c in space.starts if c["family"] == "mma")
    source = render(target, space, config, asset("templates"))
    return space, target, config, source, compile_source(source, "sm_90a")


def test_an_unknown_opcode_is_named_and_fails_nothing(right):
    space, target, config, source, binary = right
    strange = replace(binary, listing=binary.listing.replace(" MUFU.EX2 ", " MUFU.EX9 ").replace(" LDSM.", " LDSX."))
    with pytest.raises(CannotJudge, match=r"LDSX\.[^)]*.*MUFU\.EX9"):
        execute(target.workload, source, strange, Plans(gate_plan(space, target, config)), seed=7)


def test_a_binary_read_back_without_its_listing_is_executed_too(right):
    space, target, config, source, binary = right
    plan = gate_plan(space, target, config)[:2]
    verdict = execute(target.workload, source, replace(binary, listing=""), Plans(plan), seed=7)
    assert verdict.correct and len(verdict.cases) == 2


def test_a_binary_of_other_parameters_crashes(right):
    """As on a GPU, which would read what is not there."""
    space, target, config, source, _ = right
    other = replace(source, text='extern "C" __global__ void attention(int* x) { *x = 1; }')
    verdict = executed(target, space, config, other, "sm_90a")
    assert verdict.outcome is Outcome.CRASHED
    assert "kernel attention has 1 parameters" in verdict.reason


def test_a_launch_that_the_binary_was_not_made_for_crashes(right):
    """Its launch bounds are the compiled ones, whatever the source's launch says."""
    space, target, config, source, _ = right
    bound = replace(source, text=source.text.replace("__launch_bounds__(THREADS", "__launch_bounds__(32"))
    assert bound != source
    verdict = executed(target, space, config, bound, "sm_90a")
    assert verdict.outcome is Outcome.CRASHED
    assert "the binary was made for 32 at most" in verdict.reason
