"""The RMS norm kernels are right on the emulator, broken ones are not, and figures count what the field counts."""

from __future__ import annotations

import pytest
import torch

from evoengine.workloads import parse_problem
from evoengine.workloads.base import Case
from evoengine.workloads.rms_norm import EPS
from tests.support.exhaustive import more, planted

BF16, FP16, FP32 = (f"rms_norm:rows4096,hidden4096,{dtype}" for dtype in ("bf16", "fp16", "fp32"))
TAIL = "rms_norm:rows5000,hidden1000,bf16"
WARP, BLOCK = {"family": "warp"}, {"family": "block"}
READ_AGAIN = {"family": "warp", "row_in": "memory"}
TURNS = {"family": "block", "turns": 4, "rows_per_block": 2}
SQUARES = "squares += sum_of_squares(sum);"
MEAN = "row_sum(squares, turn) / HIDDEN + eps"


FAULTS = [
    # name, configuration, problem, text of the good kernel, text of the broken one
    ("missing barrier", BLOCK, BF16, "__syncthreads();", ""),
    ("sums of a row overwritten by the next", TURNS, BF16, "PLACES = TURNS > 1 ? 2 : 1", "PLACES = 1"),
    ("barrier that rows without work never reach", TURNS, BF16, "float scale =", "if (row >= rows) return;\n        float scale ="),
    ("sum of the first row for all", TURNS, BF16, "[threadIdx.x / THREADS_PER_ROW];", "[0];"),
    ("last warp's sum left out", BLOCK, BF16, "warp < WARPS_PER_ROW", "warp < WARPS_PER_ROW - 1"),
    ("shuffle one step short", WARP, BF16, "step = LANES / 2", "step = LANES / 4"),
    ("uninitialised sum", BLOCK, BF16, "float total = 0.0f;", "float total;"),
    ("sum kept in a half", BLOCK, FP16, "return total;", "return to_float(from_float(total));"),
    ("squares kept in halves", WARP, FP16, SQUARES, "squares += to_float(from_float(sum_of_squares(sum)));"),
    ("sum kept in bfloat16", BLOCK, BF16, "return total;", "return to_float(from_float(total));"),
    ("y rounded before the product with the weight", BLOCK, BF16, "to_float(run.element[j]) * scale *", "to_float(from_float(to_float(run.element[j]) * scale)) *"),
    ("eps left out", WARP, BF16, " + eps", ""),
    ("eps outside of the root", WARP, BF16, f"rsqrtf({MEAN})", "(rsqrtf(row_sum(squares, turn) / HIDDEN) + eps)"),
    ("eps added to the sum", BLOCK, FP32, MEAN, "(row_sum(squares, turn) + eps) / HIDDEN"),
    ("another eps", BLOCK, FP32, "+ eps)", "+ 1e-5f)"),
    ("mean over the padded length", READ_AGAIN, TAIL, "/ HIDDEN + eps", "/ (RUNS_PER_THREAD * THREADS_PER_ROW * VECTOR) + eps"),
    ("last columns left out", READ_AGAIN, TAIL, "column_of(i) >= HIDDEN) continue;", "column_of(i) >= HIDDEN - VECTOR) continue;"),
    ("a run too many", BLOCK, TAIL, "column_of(i) >= HIDDEN) continue;", "column_of(i) > HIDDEN) continue;"),
    ("a row too many", WARP, BF16, "row < rows", "row <= rows"),
    ("last row left out", WARP, BF16, "row < rows", "row < rows - 1"),
    ("norm of x alone", BLOCK, BF16, SQUARES, "squares += sum_of_squares(read_run(x + at));"),
    ("residual_out is x", BLOCK, BF16, "write_run(residual_out + at, sum);", "write_run(residual_out + at, read_run(x + at));"),
    ("residual read instead of the sum", READ_AGAIN, BF16, "read_run(residual_out + at)", "read_run(residual + at)"),
    ("residual updated in place", BLOCK, BF16, SQUARES, f"write_run(const_cast<T*>(residual) + at, sum);\n                {SQUARES}"),
    ("weight of the first columns for all", WARP, BF16, "read_run(weight + column_of(i))", "read_run(weight + column_of(0))"),
]  # fmt: skip
FAST = (
    "missing barrier",
    "shuffle one step short",
    "eps added to the sum",
    "a row too many",
)
"""one of synchronisation, of bounds, of what is computed and of precision"""


@planted(("wanted", "problem", "old", "new"), FAULTS, *FAST)
def test_a_planted_fault_is_caught(kernel_gate, wanted, problem, old, new):
    gate = kernel_gate(problem)
    assert gate.refutes(gate.configuration(wanted), old, new), "the fault escaped"


@pytest.mark.parametrize("number", [1, *more(n for n in range(16) if n != 1)])
@pytest.mark.parametrize(
    "problem", [TAIL, "rms_norm:rows3,hidden1,fp32", *more([BF16, FP16, FP32, "rms_norm:rows9,hidden37,fp16"])]
)
def test_a_valid_configuration_passes(kernel_gate, problem, number):
    """The first start point, and others drawn from the space."""
    gate = kernel_gate(problem)
    config = (*gate.space.starts[:1], *gate.draw(16, seed=5))[number]
    verdict = gate.judge(config, seed=number)
    assert verdict.outcome is None, f"{config}: {verdict.reason}"


def test_the_norm_of_the_rounded_sum_and_of_the_sum_itself_both_pass(kernel_gate):
    """vLLM norms the rounded sum, as the templates do; FlashInfer the sum in float32."""
    gate = kernel_gate(BF16)
    config = gate.configuration(READ_AGAIN)
    exact = """for (int j = 0; j < VECTOR; ++j) {
                    float s = to_float(read_run(x + at).element[j]) + to_float(read_run(residual + at).element[j]);
                    squares = fmaf(s, s, squares);
                }"""
    assert gate.judge(config).correct
    verdict = gate.judge(config, gate.doctored(config, SQUARES, exact))
    assert verdict.correct, verdict.reason


def test_a_long_chain_of_sums_in_float32_is_no_fault(kernel_gate):
    """Four threads for a row add 1,280 squares each, behind one that is a million times as large."""
    gate = kernel_gate("rms_norm:rows100000,hidden5120,fp32")
    config = gate.configuration({"family": "warp", "threads_per_row": 4, "vector": 1})
    for seed in range(3):
        verdict = gate.judge(config, seed=seed)
        assert verdict.correct, verdict.reason


def test_eps_is_judged_by_rows_of_zeros_and_of_values_as_small():
    workload, problem = parse_problem("rms_norm:rows14,hidden64,fp16")
    x = workload.tensors().draw(Case("extreme", problem, "extreme rows"), seed=1).inputs["x"]
    squares = x.double().square().mean(-1)
    assert (squares == 0).sum() == 2
    assert ((squares > 0) & (squares < 4 * EPS)).sum() == 2


def test_samples_are_rows_of_the_whole_problem():
    workload, problem = parse_problem("rms_norm:rows1000,hidden8,fp32")
    tensors = workload.tensors()
    inputs = tensors.draw(Case("whole", problem), seed=1).inputs
    whole = tensors.reference(problem, inputs)
    (sample,) = tensors.samples(problem, inputs, seed=2)
    assert 1 < sample.problem.rows < problem.rows
    own, taken = tensors.reference(sample.problem, sample.inputs), sample.take(whole)
    assert all(torch.equal(own[name], taken[name]) for name in ("y", "residual_out"))


def test_figures_count_both_inputs_both_outputs_and_the_weight():
    workload, problem = parse_problem(BF16)
    assert workload.min_dram_bytes(problem) == 2 * 4096 * (4 * 4096 + 1)
    assert workload.flops(problem) == 5 * 4096 * 4096
