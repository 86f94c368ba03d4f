"""The gate's rule: what an honest attention passes and what each way of being wrong fails on."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from evoengine.devices.base import KernelCrashed, KernelHung
from evoengine.problem import parse_problem
from evoengine.records import Launch, Outcome
from evoengine.stages.verify import case_seeds, verify
from evoengine.workloads import find_tensors, find_workload

ATTENTION, TENSORS = find_workload("attention"), find_tensors("attention")
CONFIG = {"tile_m": 64, "tile_n": 32, "stages": 2}
LAUNCH = Launch((1, 1, 1), 32, 0)


def scores(q, k, scale, causal):
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    found = q @ k.transpose(-1, -2) * scale
    if causal:
        visible = torch.ones(found.shape[-2:], dtype=torch.bool).tril(found.shape[-1] - found.shape[-2])
        found = found.masked_fill(~visible, -1e30)
    return found


def honest(q, k, v, scale, causal):
    """Flash attention's arithmetic: scores in float32, weights rounded to 16 bits, sums in float32."""
    s = scores(q.float(), k.float(), scale, causal)
    p = (s - s.amax(-1, keepdim=True)).exp()
    v = v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)
    return ((p.to(q.dtype).float() @ v.float()) / p.sum(-1, keepdim=True)).to(q.dtype)


def device(problem, compute=honest, after=lambda found: found):
    """A stand-in for a device: runs `compute` on the arguments of a launch, then lets `after` meddle with memory."""

    def run(launch, arguments, seed):
        case = dict(zip(("q", "k", "v", "o", "heads", "kv_heads", "seq_q", "seq_k", "scale"), arguments, strict=True))
        q, k, v = (TENSORS.from_bits(problem, case[n].data.copy()) for n in "qkv")
        out = compute(q, k, v, float(case["scale"].value), problem.causal)
        return after({n: case[n].data.copy() for n in "qkv"} | {"o": TENSORS.bits(out)})

    return run


def judge(problem, run, seed=1):
    plan = [(case, LAUNCH) for case in ATTENTION.cases(problem, CONFIG)]
    return verify(TENSORS, plan, run, "stand-in", seed)


PROBLEMS = [
    "b16,h16,s2048,d64,fp16", "b2,h8,s300,d128,bf16,causal,kv2", "b1,h8,s128,d32,fp16,kv1", "b1,h4,s64,d96,bf16",
]  # fmt: skip


@pytest.mark.parametrize("text", PROBLEMS)
def test_honest_attention_passes_every_case(text):
    problem = parse_problem(text)
    for seed in range(5):
        verdict = judge(problem, device(problem), seed)
        assert verdict.correct, verdict.reason
    assert all(c.allowed > 0 and c.max_error <= c.allowed for c in verdict.cases)


def test_the_cases_cover_what_kernels_get_wrong():
    names = {c.name for c in ATTENTION.cases(parse_problem(PROBLEMS[0]), CONFIG)}
    assert {"one row", "ragged 113x203", "large logits", "constant V", "one-hot rows", "late maximum"} <= names
    assert "permuted K and V" in names


def test_the_cases_use_the_problems_mask_and_head_grouping():
    for text in PROBLEMS:
        problem = parse_problem(text)
        for case in ATTENTION.cases(problem, CONFIG):
            assert case.problem.causal == problem.causal
            grouped = case.problem.heads // case.problem.kv_heads
            assert grouped == min(problem.heads // problem.kv_heads, 3)
            assert (case.problem.head_dim, case.problem.dtype) == (problem.head_dim, problem.dtype)


def test_a_case_wraps_around_the_pipeline():
    longest = max(c.problem.seq_k for c in ATTENTION.cases(parse_problem(PROBLEMS[0]), CONFIG))
    assert longest > (2 * CONFIG["stages"] + 1) * CONFIG["tile_n"]


def wrong_scale(q, k, v, scale, causal):
    return honest(q, k, v, scale * 0.97, causal)


def swapped(q, k, v, scale, causal):
    return honest(q, v, k, scale, causal)


def one_key_too_many(q, k, v, scale, causal):
    pad = [torch.cat([t, torch.zeros_like(t[:, :, :1])], dim=2) for t in (k, v)]
    return honest(q, *pad, scale, causal)


def one_key_too_few(q, k, v, scale, causal):
    few = k[:, :, :-1] if k.shape[2] > 1 else k, v[:, :, :-1] if v.shape[2] > 1 else v
    return honest(q, *few, scale, causal)


def half_accumulation(q, k, v, scale, causal):
    return honest(q, k, v, scale, causal) if q.abs().max() < 8 else (q @ k.transpose(-1, -2)).exp() @ v


def never_the_last_row(q, k, v, scale, causal):
    out = honest(q, k, v, scale, causal)
    out[:, :, -1] = float("nan")
    return out


def first_head_for_all(q, k, v, scale, causal):
    out = honest(q, k, v, scale, causal)
    return out[:, :1].expand_as(out).contiguous()


@pytest.mark.parametrize(
    "wrong",
    [
        wrong_scale, swapped, one_key_too_many, one_key_too_few, half_accumulation, never_the_last_row,
        first_head_for_all,
    ],
)  # fmt: skip
def test_a_wrong_result_is_incorrect(wrong):
    problem = parse_problem(PROBLEMS[0])
    verdict = judge(problem, device(problem, wrong))
    assert verdict.outcome is Outcome.INCORRECT
    assert verdict.reason
    assert len(verdict.cases) == len(ATTENTION.cases(problem, CONFIG))  # a wrong result hides no other


@pytest.mark.parametrize("wrong", ["diagonal hidden", "diagonal one too far", "aligned to the upper left"])
def test_a_wrong_causal_mask_is_incorrect(wrong):
    problem = parse_problem(PROBLEMS[1])

    def compute(q, k, v, scale, causal):
        shift = {"diagonal hidden": -1, "diagonal one too far": 1}.get(wrong, q.shape[2] - k.shape[2])
        s = scores(q.float(), k.float(), scale, False)
        visible = torch.ones(s.shape[-2:], dtype=torch.bool).tril(k.shape[2] - q.shape[2] + shift)
        s = s.masked_fill(~visible, -1e30)
        v = v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)
        return (s.softmax(-1) @ v.float()).to(q.dtype)

    assert judge(problem, device(problem, compute)).outcome is Outcome.INCORRECT


def test_a_changed_input_is_incorrect():
    def meddle(found):
        found["k"][0] ^= 1
        return found

    problem = parse_problem(PROBLEMS[0])
    verdict = judge(problem, device(problem, after=meddle))
    assert verdict.outcome is Outcome.INCORRECT
    assert "changed its input k" in verdict.reason


@pytest.mark.parametrize("failure", [KernelCrashed, KernelHung])
def test_a_crash_or_hang_ends_the_gate_with_its_reason(failure):
    def run(launch, arguments, seed):
        raise failure("block (0, 0, 0), thread 7")

    verdict = judge(parse_problem(PROBLEMS[0]), run)
    assert verdict.outcome is failure.outcome
    assert "thread 7" in verdict.reason
    assert len(verdict.cases) == 1


def test_inputs_are_fresh_for_every_candidate_and_case_and_repeat_from_their_seed():
    seeds = case_seeds(1, 12) + case_seeds(2, 12)
    assert len(set(seeds)) == 24
    case = ATTENTION.cases(parse_problem(PROBLEMS[0]), CONFIG)[2]
    once, again, other = (TENSORS.draw(case, s).inputs["q"] for s in (5, 5, 6))
    assert torch.equal(once, again)
    assert not torch.equal(once, other)


def test_the_output_is_poisoned_before_every_launch():
    case = ATTENTION.cases(parse_problem(PROBLEMS[0]), CONFIG)[2]
    out = TENSORS.arguments(case.problem, TENSORS.draw(case, 1).inputs, {})[3]
    assert out.output
    assert np.isnan(out.data.view(np.float16)).all()


def test_the_reference_does_not_depend_on_the_batch():
    problem = parse_problem("b3,h4,s40,d32,bf16,causal,kv2")
    inputs = TENSORS.draw(ATTENTION.Case("all", problem), 3).inputs
    whole = TENSORS.reference(problem, inputs)
    one = TENSORS.reference(replace(problem, batch=1), {n: t[1:2] for n, t in inputs.items()})
    assert whole.dtype is torch.float64
    torch.testing.assert_close(whole[1:2], one)
