"""Blocks of a launch over tensors larger than memory, run by machine code: what each touched, and nothing else."""

from __future__ import annotations

import numpy as np
import pytest

from evoengine.cuda_emulator.build import build
from evoengine.cuda_emulator.run import run_blocks as emulate_blocks
from evoengine.devices.base import KernelCrashed, KernelHung, ScalarArgument, ScratchParameter, TensorParameter
from evoengine.devices.pool import PAGE, BlockLaunch, ChosenBlock, Pool
from evoengine.records import CompiledCandidate, Launch
from evoengine.sass import core
from evoengine.sass.launch import prepare
from evoengine.sass.rounds import run_blocks
from evoengine.search.evaluators import make_plans
from evoengine.stages.compile import compile_source
from evoengine.stages.gate import executor, verify_blocks
from evoengine.stages.verify import verify
from tests.cuda_emulator.test_emulator_sparse import COPY, PLENTY, TERABYTE, WALK, written
from tests.support.exhaustive import more
from tests.support.kernel_gate import KernelGate
from tests.support.machine_code import compiled_kernels

POOL = Pool(np.random.default_rng(3).integers(0, 255, (64, PAGE), np.uint8))


def copied(start, to, blocks=(0,), size=TERABYTE, limit=PLENTY, seed=0, text=COPY, arch="sm_90a"):
    """What each block touched; `start` and `to` count elements of 2 bytes."""
    launch = Launch((1 << 20, 4, 1), 32, 0)
    tensors = (TensorParameter("a", (size,), "uint8"), TensorParameter("o", (size,), "uint8", output=True))
    numbers = (ScalarArgument("from", np.int64(start)), ScalarArgument("to", np.int64(to)))
    asked = BlockLaunch(launch, (*tensors, *numbers), POOL, [ChosenBlock(b, limit, True) for b in blocks])
    return run_blocks(compiled_kernels(text, arch)["f"], asked, seed)


@pytest.mark.parametrize("start", [0, 2047, 3 << 31, TERABYTE // 2 - 1])
def test_an_element_anywhere_in_a_tensor_is_the_one_that_the_pool_says(start):
    (trace,) = copied(start, 12345)
    assert written(trace) == {2 * 12345: int(POOL.read(0, 2 * start, 2 * start + 2).view(np.uint16)[0])}
    assert not trace.given_up and [offset for offset, _ in trace.pages["a"]] == [2 * start // PAGE * PAGE]


def test_each_block_is_reported_for_itself_and_finds_nothing_that_another_wrote():
    traces = copied(0, 0, blocks=[7, 3, 7])
    assert [t.block for t in traces] == [7, 3, 7]
    assert [list(written(t)) for t in traces] == [[14], [6], [14]]


@pytest.mark.parametrize("seed", range(3))
def test_an_offset_that_overflowed_leads_to_no_other_tensor(seed):
    with pytest.raises(KernelCrashed, match="a load of 2 bytes at .*, outside all tensors"):
        copied(-(1 << 31), 0, seed=seed)
    with pytest.raises(KernelCrashed, match="a store of 2 bytes at .*, outside all tensors"):
        copied(0, TERABYTE // 2 + (1 << 31), seed=seed)


def test_a_write_to_an_input_is_caught():
    text = COPY.replace("o[to + blockIdx.x] =", "const_cast<unsigned short*>(a)[to] =")
    with pytest.raises(KernelCrashed, match="a store to a, which is an input"):
        copied(0, 0, text=text)


def test_a_block_that_reads_too_much_is_given_up_and_the_next_one_runs():
    traces = copied(20480, 0, blocks=[1, 3, 2], limit=25 * PAGE, text=WALK)
    assert [t.given_up for t in traces] == [False, True, False]
    assert [len(written(t)) for t in traces] == [2, 1, 2]
    assert len(traces[1].pages["a"]) == 25


WAITING = """
extern "C" __global__ void f(volatile unsigned* flag, unsigned* o) {
    if (blockIdx.x == 0) while (*flag == 0) {}
    o[blockIdx.x] = 1;
}
"""


def test_a_block_that_waits_for_another_one_hangs_by_itself():
    launch = Launch((4, 1, 1), 32, 0)
    arguments = (ScratchParameter("flag", (4,), "int32", zeroed=True), TensorParameter("o", (4,), "int32", output=True))

    kernel = compiled_kernels(WAITING, "sm_90a")["f"]
    first, second = (ChosenBlock(block, PLENTY, True) for block in (0, 1))
    [trace] = run_blocks(kernel, BlockLaunch(launch, arguments, POOL, [second]), 0)
    assert len(trace.pages["o"]) == 1
    with pytest.raises(KernelHung, match="no end after as many instructions as it may take"):
        core.run_blocks(
            kernel.program, prepare(kernel.kernel, launch, arguments, 0), [first], POOL.pages, limit=100_000
        )


PROBLEMS = {
    "attention wgmma": ("b16,h16,s2048,d64,fp16", "wgmma"),
    "gemm mma": ("gemm:m4096,n4096,k4096,fp16", "mma"),
    "attention scalar": ("b16,h16,s2048,d64,bf16,causal", "scalar"),
    "gemm wgmma": ("gemm:m4096,n4096,k4096,fp16,bias", "wgmma"),
    "rms_norm block": ("rms_norm:rows16384,hidden4096,bf16", "block"),
    "convolution shared": ("convolution:w4096,h4096,fw5,fh5", "shared"),
}


@pytest.mark.parametrize("name", ["gemm mma", *more(n for n in PROBLEMS if n != "gemm mma")])
def test_blocks_of_the_problem_itself_write_what_they_do_in_the_emulator(name):
    """First, last, each axis's last and 32 drawn by seed; both judges compare all that these wrote."""
    problem, family = PROBLEMS[name]
    gate = KernelGate(problem)
    config = next(c for c in gate.space.starts if c["family"] == family)
    source, plans = gate.source(config), make_plans(gate.space, gate.target, config)
    binary = compile_source(source, "sm_90a")
    judge, workload = executor(CompiledCandidate(0, source, binary)), gate.target.workload
    short = verify(workload, plans.short[:1], judge.run, judge.device, 1)
    asked, cluster = [], getattr(plans.full[0][0], "cluster", 1)  # of whose blocks the first stands for all

    def both(launch, seed):
        found = judge.run_blocks(launch, seed)
        other = emulate_blocks(build(source, "sm_90a"), source.entry, launch, seed, 60.0)
        asked.append(len(launch.blocks) * cluster)
        for one, two in zip(found, other, strict=True):
            assert (one.block, one.given_up) == (two.block, two.given_up)
            assert one.given_up or {n for n, p in one.pages.items() if p} == {n for n, p in two.pages.items() if p}
        return found

    whole = verify_blocks(short, workload, plans.full, both, 5)
    assert whole.correct and max(asked) >= 32
