"""Every family of every workload on a board of each architecture: it compiles, fits its shared memory, and is right.

A kernel's text says nothing of the GPU; its configurations do, by the space's rules. The fast run has the boards of the
newest architectures and one family of each, the exhaustive one all.
"""

from __future__ import annotations

import numpy as np
import pytest

from evoengine.gpu import known_gpus
from evoengine.stages.compile import compile_source
from evoengine.stages.screen import screen_binary, screen_launch
from evoengine.tuning.boards import fitting_families
from tests.support.exhaustive import more
from tests.support.kernel_gate import KernelGate

BOARDS = ("a100", "a10", "l4", "h100", "b200", "rtx5090")
"""one of each architecture from sm_80 on"""
PROBLEMS = {
    "attention": "attention:b1,h2,s160,d64,fp16",
    "attention-backward": "attention-backward:b1,h2,s160,d64,fp16",
    "decode": "decode:b2,h4,kv2,s200,d64,fp16,page16",
    "gemm": "gemm:m256,n256,k256,fp16",
    "grouped-gemm": "grouped-gemm:rows=100+0+37+1,n136,k256,bf16,b_nk",
    "rms_norm": "rms_norm:rows40,hidden512,bf16",
    "rowwise": "rowwise:softmax,rows40,hidden512,bf16",
    "conv2d": "conv2d:n1,c64,h12,w12,k64,r3,s3,pad1,fp16",
    "convolution": "convolution:w96,h64,fw5,fh5",
    "w4a16": "w4a16:m40,n264,k512,fp16,zeros",
    "varlen": "varlen:h2,d64,fp16,causal,lens=100+3,page16",
}
OF_FAMILY = {("decode", "wgmma"): "decode:b2,h64,s200,d576,bf16,page64"}
"""a problem for a family that has none of those"""
FAST = {("b200", "rms_norm", "warp"), ("rtx5090", "convolution", "direct")}


def combinations():
    fitting = fitting_families(known_gpus()[key] for key in BOARDS)
    every = [(key, f.workload, family) for key in BOARDS for f in fitting[key] for family in f.families]
    assert len(every) > 40 and set(every) >= FAST
    return [case for case in every if case in FAST] + more(case for case in every if case not in FAST)


@pytest.fixture(scope="module")
def gate_of():
    made: dict[tuple[str, str], KernelGate] = {}

    def gate(board: str, workload: str, family: str = "") -> KernelGate:
        problem = OF_FAMILY.get((workload, family), PROBLEMS[workload])
        if (board, problem) not in made:
            made[board, problem] = KernelGate(problem, board)
        return made[board, problem]

    return gate


@pytest.mark.parametrize(("board", "workload", "family"), combinations())
def test_a_family_compiles_for_the_board_and_is_right(gate_of, board, workload, family):
    gate = gate_of(board, workload, family)
    config = gate.configuration({"family": family})
    gpu, source = known_gpus()[board], gate.source(config)
    binary = compile_source(source, gpu.arch)
    assert screen_launch(source.launch, gpu) is None
    assert screen_binary(binary, source, gpu, gate.space.cost(config), timed=False) is None
    verdict = gate.judge(config, source)
    assert verdict.correct, verdict.reason


@pytest.mark.parametrize("workload", PROBLEMS)
@pytest.mark.parametrize("board", [*BOARDS, "rtx2080ti"])
def test_no_configuration_asks_for_more_shared_memory_than_the_board_has(gate_of, board, workload):
    gpu = known_gpus()[board]
    if gpu.capability < 80 and workload in ("decode", "gemm", "grouped-gemm", "varlen", "w4a16"):
        pytest.skip("no family of it fits")
    space = gate_of(board, workload).space
    launches = [space.launch(config) for config in space.sample(np.random.default_rng(0), 100)]
    assert max(launch.shared_bytes for launch in launches) <= gpu.shared_per_block
    assert all(screen_launch(launch, gpu) is None for launch in launches)


@pytest.mark.parametrize("workload", ["attention", "gemm", "grouped-gemm", "varlen", "w4a16"])
@pytest.mark.parametrize("board", ["a10", "l4", "b200", "rtx5090"])
def test_wgmma_is_left_out_with_its_reason_but_on_hopper(gate_of, board, workload):
    space = gate_of(board, workload).space
    assert space.empty_families["wgmma"].startswith("wgmma is an instruction of Hopper (sm_90a) alone")
    assert "wgmma" not in gate_of("h100", workload).space.empty_families


def test_what_a_99_kb_board_cannot_hold_a_227_kb_board_can(gate_of):
    """The limit is the board's: the largest launches differ as their shared memory does."""

    def largest(board: str) -> int:
        space = gate_of(board, "attention").space
        drawn = (c for c in space.sample(np.random.default_rng(1), 400) if c["family"] == "mma")
        return max(space.launch(c).shared_bytes for c in drawn)

    assert largest("rtx5090") <= 101_376 < largest("a100") <= 166_912
    assert largest("b200") <= 232_448
