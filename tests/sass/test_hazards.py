"""Register hazards: what ptxas writes has none, and a wait that is taken out of a control word is missed."""

from __future__ import annotations

import numpy as np
import pytest

from evoengine.devices.base import KernelCrashed, TensorArgument
from evoengine.errors import UsageError
from evoengine.paths import asset
from evoengine.records import Launch, Source
from evoengine.sass.core import Program, run
from evoengine.sass.cubin import Kernel, read_kernel
from evoengine.sass.launch import Geometry, prepare
from evoengine.stages.compile import compile_source
from evoengine.stages.render import render
from tests.support.control_words import Edit, edited, edits
from tests.support.exhaustive import more
from tests.support.kernel_gate import attention_space, attention_target
from tests.support.machine_code import compiled, require_tools

GPUS = {"sm_75": "rtx2080ti", "sm_80": "a100", "sm_90a": "h100"}
PROBLEM = "b2,h4,s256,d64,fp16"
FAST = ["mma-sm_80", "wgmma-sm_90a"]
ALL = ["wmma-sm_75", "scalar-sm_80", "mma-sm_90a"]
EDITS = 40
"""of each binary, drawn by seed"""


def compiled_start(family: str, arch: str) -> tuple[Kernel, str]:
    """The kernel and the listing of a family's first start point."""
    require_tools()
    space, target = attention_space(PROBLEM, GPUS[arch], (family,)), attention_target(PROBLEM, GPUS[arch])
    binary = compile_source(render(target, space, space.starts[0], asset("templates")), arch)
    return read_kernel(binary.cubin, "attention"), binary.listing


@pytest.mark.parametrize("binary", [*FAST, *more(ALL)])
def test_a_wait_that_is_taken_away_is_reported_and_nothing_else(binary):
    kernel, listing = compiled_start(*binary.split("-"))
    assert hazards(kernel, listing) == []
    possible = list(edits(listing, kernel.entry))
    drawn = [possible[i] for i in np.random.default_rng(5).permutation(len(possible))[:EDITS]]
    assert {edit.kind for edit in drawn} >= {"mask", "stall"}
    missed = [edit for edit in drawn if not hazards(kernel, edited(listing, kernel.entry, edit))]
    assert len(missed) <= len(drawn) // 20, missed


def hazards(kernel: Kernel, listing: str) -> list[str]:
    return Program(listing, kernel.entry).hazards(kernel.arch, kernel.registers)[0]


SUM = """
extern "C" __global__ void kernel(const float* x, float* o) { o[threadIdx.x] = x[threadIdx.x] + x[threadIdx.x + 32]; }
"""


def test_a_hazard_names_both_instructions_and_the_register_and_nothing_is_executed():
    kernel, _ = compiled(SUM, "sm_80")
    listing = compiled_listing(SUM)
    edit = next(e for e in edits(listing, "kernel") if e.kind == "mask")
    program = Program(edited(listing, "kernel", edit), "kernel")
    x = TensorArgument("x", np.zeros(64, np.float32))
    o = TensorArgument("o", np.zeros(32, np.float32), output=True)
    launch = prepare(kernel, Geometry((1, 1, 1), (32, 1, 1)), [x, o], seed=1)
    with pytest.raises(
        KernelCrashed, match=r"reads R\d+, which `.*` at 0x.* may not have written: nothing .* waits for"
    ):
        run(program, launch)
    assert np.isnan(launch.results()["o"]).all()


def compiled_listing(text: str) -> str:
    return compile_source(Source(text, "kernel", Launch((1, 1, 1), 32, 0)), "sm_80").listing


def test_registers_beyond_those_that_the_binary_declares_are_reported():
    kernel, program = compiled(SUM, "sm_80")
    found, _ = program.hazards(kernel.arch, 4)
    assert any("a thread has 4 registers there" in line for line in found)
    assert program.hazards(kernel.arch, kernel.registers)[0] == []


def test_an_edit_of_an_instruction_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match="has no instruction at 0xffff0"):
        edited(compiled_listing(SUM), "kernel", Edit("mask", 0xFFFF0, -1, 0))
    with pytest.raises(UsageError, match="has no kernel"):
        list(edits(compiled_listing(SUM), "other"))


FENCES = """
extern "C" __global__ void kernel(float* o) {
  __shared__ float s[32];
  s[threadIdx.x] = threadIdx.x;
  asm volatile("fence.proxy.async.shared::cta;\\nfence.proxy.async.global;" ::: "memory");
  __syncthreads();
  o[threadIdx.x] = s[31 - threadIdx.x];
}
"""


def test_a_fence_need_not_wait_for_another():
    kernel, program = compiled(FENCES, "sm_90a")
    assert program.hazards(kernel.arch, kernel.registers)[0] == []


def written_out(*instructions: tuple[str, int, int, int], stall: int = 15) -> str:
    """A listing of instructions: text, scoreboards set when it has written and read, mask that it waits for.

    A label stands before the text, with a colon. Each instruction stalls for so many clocks.
    """
    lines = ['\t.section\t.text.kernel,"ax",@progbits', ".text.kernel:"]
    for n, (given, write, read, mask) in enumerate(instructions):
        label, colon, text = given.rpartition(": ")
        lines += [label + ":"] if colon else []
        control = 0x10 | stall | write << 5 | read << 8 | mask << 11
        lines += [f"        /*{16 * n:04x}*/  {text} ; /* 0x{0:016x} */", f"  /* 0x{control << 41:016x} */"]
    return "\n".join(lines)


@pytest.mark.parametrize("mask", [8, 4, 0])
def test_what_the_last_of_several_barriers_has_read_tells_of_those_before(mask):
    """As ptxas has it in a kernel that initialises six of them: it waits for the read of the third alone."""
    listing = written_out(
        ("SYNCS.EXCH.64 URZ, [UR4], UR8", 2, 7, 0),
        ("@UP1 SYNCS.EXCH.64 URZ, [UR4+0x8], UR10", 2, 3, 0),
        ("UMOV UR8, UR5", 7, 7, mask),
        ("EXIT", 7, 7, 0),
    )
    found, _ = Program(listing, "kernel").hazards(90, 32)
    assert not found if mask else "overwrites UR8, which `SYNCS.EXCH.64" in found[0]


@pytest.mark.parametrize(
    ("second", "found"), [("DMMA.16x8x16 R32, R32, R16, RZ", False), ("IADD3 R32, R1, R2, RZ", True)]
)
def test_a_product_of_doubles_reads_before_the_next_one_writes(second, found):
    """Products go through one unit in their order; an addition overtakes them."""
    listing = written_out(("DMMA.16x8x16 R8, R32, R8, RZ", 0, 7, 0), (second, 1, 7, 0), ("EXIT", 7, 7, 3))
    hazards, _ = Program(listing, "kernel").hazards(90, 64)
    assert ("overwrites R32" in " ".join(hazards)) == found


@pytest.mark.parametrize("mask", [1, 0])
def test_the_check_of_a_division_ends_before_the_next_exponential(mask):
    """As ptxas has it in a naive softmax: the check sets no scoreboard, and the wait for MUFU behind it is for both."""
    listing = written_out(
        ("FCHK P0, RZ, R17", 7, 7, 0),
        ("MUFU.EX2 R3, R3", 0, 7, 0),
        ("FFMA R13, R2, R3, R13", 7, 7, mask),
        ("MOV R17, R15", 7, 7, 0),
        ("@!P0 BRA `(.L_x_1)", 7, 7, 0),
        (".L_x_1: EXIT", 7, 7, 0),
    )
    found = " ".join(Program(listing, "kernel").hazards(90, 64)[0])
    assert not found if mask else "overwrites R17, which `FCHK" in found


@pytest.mark.parametrize("mask", [2, 0])
def test_a_routine_returns_to_its_caller_however_often_a_call_without_return_has_left_a_loop(mask):
    """As ptxas leaves the loop over k, of tiles one after the other: by a call to the next instruction."""
    listing = written_out(
        (".L_x_1: FADD R8, R1, R2", 7, 7, 0),
        ("@P0 CALL.REL.NOINC `(.L_x_2)", 7, 7, 0),
        ("BRA `(.L_x_1)", 7, 7, 0),
        (".L_x_2: CALL.REL.NOINC `(.L_x_3)", 7, 7, 0),
        ("IMAD.MOV.U32 R9, RZ, RZ, R8", 7, 7, mask),
        ("@P1 BRA `(.L_x_1)", 7, 7, 0),
        ("EXIT", 7, 7, 0),
        (".L_x_3: MUFU.RSQ R8, R3", 1, 7, 0),
        ("RET.REL.NODEC R20 `(kernel)", 7, 7, 0),
    )
    found, _ = Program(listing, "kernel").hazards(89, 64)
    assert not found if mask else "`IMAD.MOV.U32 R9, RZ, RZ, R8` at 0x40 reads R8, which `MUFU.RSQ" in " ".join(found)


@pytest.mark.parametrize("stall", [1, 2])
@pytest.mark.parametrize("atomic", ["RED.E.ADD.STRONG.GPU [R2.64], R5", "ATOMG.E.ADD.STRONG.GPU PT, R4, [R2.64], R5"])
def test_an_atomic_reads_its_value_later_than_its_address(atomic, stall):
    """As ptxas has it in 82 of 100 places of w4a16's kernels for sm_80 to sm_89 (benchmarks/fixed_latencies.py)."""

    def hazards_of(written: str) -> str:
        move = (f"IMAD.MOV.U32 {written}, RZ, RZ, 0x1", 7, 7, 0)
        listing = written_out(move, (atomic, 0, 1, 0), ("EXIT", 7, 7, 3), stall=stall)
        return " ".join(Program(listing, "kernel").hazards(80, 32)[0])

    assert ("reads R5 1 clocks after" in hazards_of("R5")) == (stall == 1)
    assert "reads R3" in hazards_of("R3")


@pytest.mark.parametrize(("branch", "goes_on"), [("BRX R4 -0x20", False), ("BRXU UR4 -0x20", False), ("NOP", True)])
def test_a_branch_to_the_address_in_a_register_does_not_go_on_behind_it(branch, goes_on):
    """As ptxas has BRXU in kernels that return from a part of their own by uniform registers."""
    listing = written_out(
        ("MUFU.EX2 R3, R3", 0, 7, 0), (branch, 7, 7, 0), ("FADD R5, R3, R3", 7, 7, 0), ("EXIT", 7, 7, 1)
    )
    program = Program(listing, "kernel")
    assert not program.unknown
    assert bool(program.hazards(80, 32)[0]) == goes_on
