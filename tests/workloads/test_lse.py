"""Attention's kernels write a right log-sum-exp where the problem asks for it, and the gate catches a wrong one."""

from __future__ import annotations

import pytest
import torch

from evoengine.errors import UsageError
from evoengine.search.evaluators import make_plans
from evoengine.stages.compile import compile_source
from evoengine.workloads import parse_problem
from evoengine.workloads.base import Case
from tests.support.exhaustive import more, representatives
from tests.support.kernel_gate import execute

FULL = "attention:b2,h4,kv2,s200,d64,fp16,lse"
CAUSAL = "attention:b1,h4,sq90,sk150,d64,bf16,causal,lse"
LARGE = "attention:b4,h16,s1024,d64,fp16,lse"
MANY_HEADS = "attention:b40,h16,s300,d64,fp16,lse"
WGMMA, MMA, SCALAR, WMMA = ({"family": name} for name in ("wgmma", "mma", "scalar", "wmma"))
STATIC = {**WGMMA, "schedule": "static"}
SERIAL, SHARED = {**SCALAR, "reduction": "serial"}, {**WMMA, "o_in": "shared"}


def judged(gate, wanted, old="", new=""):
    """Return the executor's verdict on a configuration's kernel with the text `new` in place of `old`."""
    config = gate.configuration(wanted)
    source = gate.doctored(config, old, new) if old else gate.source(config)
    binary = compile_source(source, gate.target.gpu.arch)
    return execute(gate.target.workload, source, binary, make_plans(gate.space, gate.target, config), 7)


@pytest.mark.parametrize(
    ("problem", "wanted"),
    [
        (CAUSAL, WGMMA),
        *more([(LARGE, STATIC), (f"{LARGE},causal", STATIC)]),
        *more([(p, c) for p in (FULL, CAUSAL) for c in (WGMMA, MMA, SCALAR, SERIAL, WMMA, SHARED)]),
    ],
)
def test_both_judges_call_the_kernels_right(kernel_gate, problem, wanted):
    gate = kernel_gate(problem)
    verdict = judged(gate, wanted)
    assert verdict.correct, verdict.reason
    assert verdict.coverage.missing == ()
    verdict = gate.judge(gate.configuration(wanted))
    assert verdict.correct, verdict.reason


ROW = "lse_ + (long long)head * seq_q + first_row"
FAULTS = [
    ("in base 2", MMA, FULL, "* LN_2;", ";"),
    ("half a percent too small", WGMMA, FULL, "0.6931471805599453f", "0.69f"),
    ("without the maximum", WGMMA, FULL, "(row_max + log2f", "(log2f"),
    ("the sum without its logarithm", WGMMA, FULL, "row_max + log2f(", "row_max + ("),
    ("the sum of one lane's columns", WGMMA, CAUSAL, "log2f(lanes_sum<LANES>(row_sum))", "log2f(row_sum)"),
    ("of the first row for both", WGMMA, CAUSAL, "consumer.rows[half].lse()", "consumer.rows[0].lse()"),
    ("of the first stripe for all", {**MMA, "tile_m": 128, "warps": 4}, FULL, "rows[i][half].lse()", "rows[0][half].lse()"),
    ("of a row too few", WGMMA, FULL, "row < work.rows) work.lse", "row < work.rows - 1) work.lse"),
    ("of rows behind the tile", WGMMA, FULL, "lane() % 4 == 0 && row < work.rows) work.lse", "lane() % 4 == 0) work.lse"),
    ("of rows behind the tile, by mma", MMA, FULL, "lane() % 4 == 0 && row < work.rows) work.lse", "lane() % 4 == 0) work.lse"),
    ("of rows behind the tile, by wmma", WMMA, FULL, "own && softmax_row(pass) < work.rows", "own"),
    ("of rows behind the tile, by scalar", SCALAR, FULL, "if (thread_x() == 0) work.lse", "if (thread_x() == 0) work.lse[row_of(i) + 1] = lse, work.lse"),
    ("written by one lane of eight", WGMMA, FULL, "lane() % 4 == 0 && row", "lane() % 8 == 0 && row"),
    ("at the place of the kv head", WGMMA, FULL, ROW, "lse_ + (long long)(head / (heads / kv_heads)) * seq_q + first_row"),
    ("without the tile's first row", SCALAR, FULL, ROW, "lse_ + (long long)head * seq_q"),
    ("rows as many as keys", MMA, CAUSAL, ROW, "lse_ + (long long)head * seq_k_ + first_row"),
    ("heads of 8 bits", WGMMA, MANY_HEADS, ROW, "lse_ + (long long)(head & 255) * seq_q + first_row"),
    ("with the factor that comes next", WMMA, FULL, "(row_max + log2f", "(row_max - log2f"),
]  # fmt: skip
FAST = ("half a percent too small", "of rows behind the tile", "heads of 8 bits")


@pytest.mark.parametrize(
    ("name", "wanted", "problem", "old", "new"), representatives([pytest.param(*f, id=f[0]) for f in FAULTS], *FAST)
)
def test_a_planted_fault_is_caught(kernel_gate, name, wanted, problem, old, new):
    verdict = judged(kernel_gate(problem), wanted, old, new)
    assert verdict.outcome is not None and verdict.reason, f"{name}: the fault escaped"


@pytest.mark.parametrize("number", more(range(32)))
def test_a_valid_configuration_passes(kernel_gate, number):
    gate = kernel_gate(
        (FULL, CAUSAL, "attention:b1,h3,sq77,sk131,d128,dv64,bf16,lse", "attention:b2,h2,s70,d96,fp16,lse")[number % 4]
    )
    config = gate.draw(32, seed=6)[number]
    source = gate.source(config)
    binary = compile_source(source, gate.target.gpu.arch)
    plans = make_plans(gate.space, gate.target, config)
    verdict = execute(gate.target.workload, source, binary, plans, number)
    assert verdict.outcome is None, f"{gate.problem} {config}: {verdict.reason}"


def test_the_reference_is_the_logarithm_of_the_sum_of_exponentials():
    workload, problem = parse_problem(CAUSAL)
    inputs = workload.tensors().draw(Case("", problem), 5).inputs
    found = workload.tensors().reference(problem, inputs)["lse"]
    row, head = 7, 2
    scores = inputs["q"][0, head, row].double() @ inputs["k"][0, head].double().T / 8
    assert found[0, head, row].item() == pytest.approx(scores[: row + 61].logsumexp(0).item(), rel=1e-12)
    assert found.dtype == torch.float64 and found.shape == (1, 4, 90)


def test_the_word_is_part_of_the_problem_and_changes_no_other():
    workload, problem = parse_problem(FULL)
    assert str(problem) == "attention:b2,h4,s200,d64,fp16,kv2,lse" and problem.variables()["lse"]
    _, without = parse_problem("attention:b2,h4,kv2,s200,d64,fp16")
    assert "lse" not in without.variables() and "lse" not in workload.constants(without)
    assert workload.min_dram_bytes(problem) - workload.min_dram_bytes(without) == 4 * 2 * 4 * 200
    with pytest.raises(UsageError, match="gives lse twice"):
        parse_problem(f"{FULL},lse")
