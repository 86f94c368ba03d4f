"""No right kernel is called wrong: 300 valid configurations drawn at random, 30 of each family, pass the gate on the
emulator; those of attention also compute the problem they were drawn for, whose lengths no tile divides."""

from __future__ import annotations

import pytest

from evoengine.workloads.base import Case
from tests.support.exhaustive import more

FAMILIES = ["scalar", "wmma", "mma", "wgmma"]
EACH, FAST = 30, 1
"""configurations of a family, and how many of them `make test` draws"""
PROBLEMS = [
    "b1,h2,sq77,sk203,d64,fp16",
    "b2,h4,s101,d64,bf16,causal,kv2",
    "b1,h4,sq45,sk131,d96,fp16,causal,kv1",
    "b1,h2,sq119,sk67,d128,bf16",
    "b1,h6,s59,d128,fp16,causal,kv2",
    "b2,h2,s83,d256,bf16,causal",
    "b1,h3,sq33,sk149,d256,fp16,kv1",
    "b3,h2,s139,d32,bf16,kv1",
    "b1,h2,s157,d96,bf16",
    "b2,h16,s67,d64,fp16,kv2",
    "b1,h8,s131,d128,bf16,causal,kv1",
    "b1,h2,s1,d64,bf16",
    "b2,h4,sq1,sk203,d96,fp16,causal",
]


@pytest.mark.parametrize("number", [*range(FAST), *more(range(FAST, EACH))])
@pytest.mark.parametrize("family", ["scalar", "mma", *more(["wmma", "wgmma"])])
def test_a_valid_configuration_passes(attention_gate, family, number):
    gate = attention_gate(PROBLEMS[number % len(PROBLEMS)])
    config = next(c for c in gate.draw(100, seed=number) if c["family"] == family)
    verdict = gate.judge(config, seed=number, beside=[Case("the problem itself", gate.problem, config=config)])
    assert verdict.outcome is None, f"{config}: {verdict.reason}"
    assert "the problem itself" in [case.name for case in verdict.cases]


OTHERS = {
    "gemm": ("gemm:m1000,n777,k333,fp16,bias", "gemm:m257,n1304,k5000,bf16", "gemm:m64,n64,k64,fp16,bias_relu", "gemm:m5000,n40,k1000,bf16,bias_gelu"),
    "gemm wgmma": ("gemm:m1000,n776,k336,fp16,bias", "gemm:m257,n1304,k5000,bf16", "gemm:m4096,n4096,k4096,fp16,bias_gelu"),
    "rms_norm": ("rms_norm:rows1000,hidden520,bf16", "rms_norm:rows77777,hidden96,fp32", "rms_norm:rows33,hidden4100,fp16", "rms_norm:rows5,hidden8192,bf16"),
    "convolution": ("convolution:w301,h77,fw5,fh7", "convolution:w4096,h4096,fw3,fh3", "convolution:w33,h999,fw17,fh1", "convolution:w1000,h40,fw2,fh9"),
    "conv2d": ("conv2d:n3,c72,h28,w28,k200,r3,s3,pad1,fp16,bias_gelu", "conv2d:n2,c24,h40,w30,k48,r5,s3,stride2,pad2,bf16", "conv2d:n1,c3,h96,w96,k64,r7,s7,stride2,pad3,fp16", "conv2d:n16,c512,h7,w7,k2048,r1,s1,bf16,bias,residual"),
    "conv2d wgmma": ("conv2d:n3,c72,h28,w28,k200,r3,s3,pad1,fp16,bias_gelu", "conv2d:n2,c24,h40,w30,k48,r5,s3,stride2,pad2,bf16", "conv2d:n16,c512,h7,w7,k2048,r1,s1,bf16,bias,residual"),
}  # fmt: skip
OTHER_FAMILIES = {
    "gemm": ("mma",), "gemm wgmma": ("wgmma",), "rms_norm": ("warp", "block"), "convolution": ("shared", "direct"),
    "conv2d": ("mma", "direct"), "conv2d wgmma": ("wgmma",),
}  # fmt: skip


@pytest.mark.exhaustive  # tests of each workload show it of one or two
@pytest.mark.parametrize("number", range(EACH))
@pytest.mark.parametrize(("name", "family"), [(name, family) for name, own in OTHER_FAMILIES.items() for family in own])
def test_a_valid_configuration_of_another_workload_passes(kernel_gate, name, family, number):
    gate = kernel_gate(OTHERS[name][number % len(OTHERS[name])])
    config = next(c for c in gate.draw(100, seed=number) if c["family"] == family)
    verdict = gate.judge(config, seed=number)
    assert verdict.outcome is None, f"{gate.problem} {config}: {verdict.reason}"


@pytest.mark.parametrize("problem", [PROBLEMS[1], *more(p for p in PROBLEMS if p != PROBLEMS[1])])
def test_the_problems_are_possible_in_every_family_and_no_tile_divides_their_lengths(attention_gate, problem):
    gate = attention_gate(problem)
    assert set(gate.space.families) - gate.space.empty_families.keys() == set(FAMILIES)
    tiles = {"tile_m": gate.problem.seq_q, "tile_n": gate.problem.seq_k}
    for knob in (k for k in gate.space.knobs if k.name in tiles):
        assert all(tiles[knob.name] % size for size in knob.values)


# problems with so many tiles of rows that schedules have something to say; the gate's cases are small all the same
SCHEDULED = ["b8,h64,s250,d64,fp16", "b8,h64,s250,d64,bf16,causal,kv32", "b4,h128,s250,d128,fp16,causal"]


@pytest.mark.exhaustive  # tests/workloads/test_planted_faults_wgmma.py shows it of one that goes round, and one sorted
@pytest.mark.parametrize("number", range(15))
def test_a_valid_configuration_whose_blocks_go_round_or_begin_with_the_longest_rows_passes(attention_gate, number):
    gate = attention_gate(SCHEDULED[number % len(SCHEDULED)])
    config = next(c for c in gate.draw(200, seed=number) if c.get("schedule", "none") != "none")
    verdict = gate.judge(config, seed=number)
    assert verdict.outcome is None, f"{config}: {verdict.reason}"
