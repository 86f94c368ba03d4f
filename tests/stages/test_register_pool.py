"""A block whose warpgroups ask for more registers than it was launched with is screened out before it runs anywhere."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial

import pytest

from evoengine.cuda_files import disassembler
from evoengine.gpu import find_gpu
from evoengine.records import KernelResources, NextKernel, Source
from evoengine.stages.compile import compile_source
from evoengine.stages.screen import screen_binary, why_stuck
from tests.support.exhaustive import more
from tests.support.kernel_gate import KernelGate

pytestmark = pytest.mark.skipif(disassembler() is None, reason="needs nvdisasm")

PROBLEMS = ["b16,h16,s2048,d64,fp16", "b2,h16,s2048,d128,bf16,causal", "b2,h16,s2048,d192,dv128,fp16"]
TAKEN = "warpgroup_reg_alloc<CONSUMER_REGISTERS"


@cache
def found(problem: str, more_registers: int = 0, drop: str = "", timed: bool = False):
    """What the screen says of the first wgmma start point with so many registers more for each that multiplies."""
    gate = KernelGate(problem)
    config = gate.start({"family": "wgmma"})
    source = gate.source(config)
    assert TAKEN in source.text and drop in source.text
    text = source.text.replace(TAKEN, f"{TAKEN} + {more_registers}").replace(drop or "\0", "")
    changed = Source(text, source.entry, source.launch)
    binary = compile_source(changed, "sm_90a")
    return screen_binary(binary, changed, gate.target.gpu, gate.space.cost(config), timed), binary, changed


@pytest.mark.parametrize("problem", [PROBLEMS[0], *more(PROBLEMS[1:])])
def test_a_start_point_asks_for_no_more_than_there_are(problem):
    assert found(problem)[0] is None


@pytest.mark.parametrize("timed", [False, *more([True])])
def test_eight_registers_too_many_for_each_are_screened_out_even_where_a_clock_would_judge(timed):
    reason, *_ = found(PROBLEMS[0], 8, timed=timed)
    assert reason.startswith("setmaxnreg asks for 5") and "waits for ever" in reason


def test_registers_that_nobody_gives_up_are_missed():
    give = "        warpgroup_reg_dealloc<PRODUCER_REGISTERS>();\n"
    reason, *_ = found(PROBLEMS[0], drop=give)
    assert "128 for each of 1 and 160 for each of 3 warpgroups, of 512 that 4 are launched with" in reason


def test_what_is_said_depends_on_how_many_give_registers_up():
    _, binary, source = found(PROBLEMS[0], 8, timed=False)
    stuck = partial(why_stuck, binary, source.entry, source.launch)
    assert stuck(1) and not stuck(2) and not stuck(0) and not stuck(3)


def test_a_kernel_behind_the_first_is_looked_at_too():
    _, binary, source = found(PROBLEMS[0], 8)
    behind = NextKernel(source.entry, source.launch)
    listing = f"{binary.listing}\n{binary.listing.replace(source.entry, 'first').replace('TRY_ALLOC', 'OTHER')}"
    both = replace(binary, listing=listing, others=(KernelResources(source.entry, binary.registers, 0, 0, 0),))
    first = Source(source.text, "first", replace(source.launch, then=(behind,)))
    reason = screen_binary(both, first, find_gpu("h100"), {"producer_warpgroups": 1.0}, timed=True)
    assert reason.startswith(f"kernel {source.entry}: setmaxnreg asks for 5")
