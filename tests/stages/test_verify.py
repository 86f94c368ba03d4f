"""The gate's rule: what an honest attention passes and what each way of being wrong fails on."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from evoengine.devices.base import KernelCrashed, KernelHung
from evoengine.devices.cuda import rounds_by_launches
from evoengine.records import Launch, Outcome
from evoengine.stages.verify import by_own_error, case_seeds, compare, make_arguments, verify
from evoengine.workloads import find_workload
from evoengine.workloads.attention.cases import RISES
from evoengine.workloads.attention.problem import parse_problem
from evoengine.workloads.attention.tensors import TORCH_DTYPES
from evoengine.workloads.base import Case, Drawn, Tolerance
from tests.support.exhaustive import each_nth

ATTENTION = find_workload("attention")
TENSORS = ATTENTION.tensors()
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

    def launch(call, seed):
        names = ("q", "k", "v", "o", "heads", "kv_heads", "seq_q", "seq_k", "scale")
        case = dict(zip(names, call.arguments, strict=True))
        q, k, v = (torch.from_numpy(case[n].data.copy()).view(TORCH_DTYPES[problem.dtype]) for n in "qkv")
        out = compute(q, k, v, float(case["scale"].value), problem.causal)
        return after({n: case[n].data.copy() for n in "qkv"} | {"o": out.view(torch.uint16).numpy()})

    return rounds_by_launches(launch)


def judge(problem, run, seed=1):
    plan = [(case, LAUNCH) for case in ATTENTION.cases(problem, CONFIG)]
    return verify(ATTENTION, plan, run, "stand-in", seed)


PROBLEMS = [
    "b16,h16,s2048,d64,fp16", "b2,h8,s300,d128,bf16,causal,kv2", "b1,h8,s128,d32,fp16,kv1", "b1,h4,s64,d96,bf16",
    "b1,h4,s150,d192,dv128,bf16,causal",
]  # fmt: skip


@pytest.mark.parametrize("text", each_nth(2, PROBLEMS))
def test_honest_attention_passes_every_case(text):
    problem = parse_problem(text)
    for seed in range(5):
        verdict = judge(problem, device(problem), seed)
        assert verdict.correct, verdict.reason
    assert all(c.allowed > 0 and c.max_error <= c.allowed for c in verdict.cases)


def cases_of(text):
    return ATTENTION.cases(parse_problem(text), CONFIG)


@pytest.mark.parametrize("text", PROBLEMS)
def test_the_cases_keep_the_problems_mask_head_dim_and_dtype(text):
    problem = parse_problem(text)
    for case in cases_of(text):
        assert case.problem.causal == problem.causal
        assert (case.problem.head_dim, case.problem.head_dim_v) == (problem.head_dim, problem.head_dim_v)
        assert case.problem.dtype == problem.dtype


@pytest.mark.parametrize("text", [*PROBLEMS, "b1,h64,s256,d64,fp16,kv8", "b1,h71,s256,d64,fp16,kv1"])
def test_one_case_has_the_problems_own_heads_per_kv_head_in_more_than_one_batch_entry(text):
    problem = parse_problem(text)
    own = [c for c in cases_of(text) if c.problem.heads // c.problem.kv_heads == problem.heads // problem.kv_heads]
    assert any(c.problem.batch > 1 for c in own)


@pytest.mark.parametrize("text", PROBLEMS)
def test_lengths_leave_remainders_just_below_and_above_whole_tiles(text):
    cases = cases_of(text)
    keys = {c.problem.seq_k % CONFIG["tile_n"] - CONFIG["tile_n"] for c in cases}
    assert {-1, -2, -3, 1 - CONFIG["tile_n"], -CONFIG["tile_n"]} <= keys
    rows = {c.problem.seq_q % CONFIG["tile_m"] for c in cases}
    assert {0, 1} <= rows and any(c.problem.seq_q > CONFIG["tile_m"] for c in cases)


@pytest.mark.parametrize("text", ["b1,h2,s1999,d64,fp16", "b1,h2,sq77,sk203,d64,bf16", "b1,h2,s2047,d64,fp16,causal"])
def test_a_case_leaves_the_remainders_that_the_problem_leaves(text):
    problem = parse_problem(text)
    own = (problem.seq_q % CONFIG["tile_m"], problem.seq_k % CONFIG["tile_n"])
    assert own[1] in {c.problem.seq_k % CONFIG["tile_n"] for c in cases_of(text)}
    if not problem.causal:
        assert own in {(c.problem.seq_q % CONFIG["tile_m"], c.problem.seq_k % CONFIG["tile_n"]) for c in cases_of(text)}


def test_a_causal_case_has_as_many_queries_as_keys_over_several_tiles_of_both():
    square = [c.problem for c in cases_of(PROBLEMS[1]) if c.problem.seq_q == c.problem.seq_k > 1]
    assert any(p.seq_q > CONFIG["tile_m"] and p.seq_k > CONFIG["tile_n"] for p in square)


@pytest.mark.parametrize("text", ["b1,h2,s2047,d64,fp16,causal", "b1,h2,sq1,sk300,d64,bf16,causal"])
def test_under_a_mask_the_first_row_sees_whole_tiles_and_1_to_3_keys_fewer(text):
    diagonals = {(c.problem.seq_k - c.problem.seq_q) % CONFIG["tile_n"] - CONFIG["tile_n"] for c in cases_of(text)}
    assert {-1, -2, -3, -4, -CONFIG["tile_n"]} <= diagonals


@pytest.mark.parametrize("text", ["b1,h8,s256,d64,fp16,kv2", "b1,h6,s256,d64,fp16,kv2", "b1,h4,s256,d64,fp16,kv1"])
def test_a_case_groups_heads_as_the_problem_does_not(text):
    problem = parse_problem(text)
    groups = {c.problem.heads // c.problem.kv_heads for c in cases_of(text) if c.problem.kv_heads > 1}
    assert any(group % 2 and group > 1 and group != problem.heads // problem.kv_heads for group in groups)


@pytest.mark.parametrize("text", PROBLEMS)
def test_a_case_wraps_around_the_pipeline_with_all_warps_rows_and_one_is_long(text):
    cases = cases_of(text)
    wraps = [c for c in cases if not c.long and c.problem.seq_k > (2 * CONFIG["stages"] + 1) * CONFIG["tile_n"]]
    assert any(c.problem.seq_q > CONFIG["tile_m"] - 16 for c in wraps)
    assert max(c.problem.seq_k for c in cases if c.long) >= 4096


@pytest.mark.parametrize("text", ["b3,h40,sq5000,sk9000,d64,fp16,kv8", "b1,h2,s7001,d128,bf16,causal"])
def test_each_axis_has_the_problems_own_length_in_some_long_case(text):
    problem = parse_problem(text)
    own = [c.problem for c in cases_of(text) if c.long]
    for axis in ("batch", "heads", "kv_heads", "seq_k", *([] if problem.causal else ["seq_q"])):
        if getattr(problem, axis) > 2:
            assert getattr(problem, axis) in {getattr(p, axis) for p in own}, axis
    assert {c.draw for c in cases_of(text) if c.problem.seq_k == problem.seq_k} >= {"long", "late maximum"}


def test_a_number_of_keys_that_takes_too_long_is_cut_and_says_so():
    (case,) = [c for c in cases_of("b1,h1,s1000003,d256,fp16") if c.name == "own keys"]
    assert case.problem.seq_k % CONFIG["tile_n"] == 1000003 % CONFIG["tile_n"]
    assert case.part == f"{case.problem.seq_k:,} of 1,000,003 keys"


def test_the_gate_chooses_the_blocks_of_a_persistent_kernel_and_no_others():
    natural = Launch((132, 1, 1), 384, 1024)
    persistent, other = ({**CONFIG, "schedule": schedule} for schedule in ("static", "none"))
    problem = parse_problem(PROBLEMS[0])
    assert all(ATTENTION.gate_launch(c, natural) == natural for c in ATTENTION.cases(problem, other))
    rounds = []
    for case in (c for c in ATTENTION.cases(problem, persistent) if not c.long):
        blocks, p = ATTENTION.gate_launch(case, natural).grid[0], case.problem
        row_tiles = -(-p.seq_q // CONFIG["tile_m"]) * p.heads * p.batch
        assert blocks == 1 or (row_tiles >= 2 * blocks and row_tiles % blocks)
        rounds.append((blocks, row_tiles))
    assert max(rounds) == (3, 8)


# ---- how inputs are drawn ----

DRAWN = [f"b1,h1,sq40,sk200,{kind}" for kind in ("d32,bf16", "d64,fp16", "d96,bf16", "d256,fp16")]


def logits(name, text):
    """Scaled scores in powers of two of the first head [rows, keys] of a case drawn so."""
    problem = parse_problem(text)
    q, k = (TENSORS.draw(Case(name, problem, name), 1).inputs[n][0, 0].double() for n in "qk")
    return q @ k.T / problem.head_dim**0.5 * np.log2(np.e)


@pytest.mark.parametrize("text", DRAWN)
def test_extreme_logits_lie_below_what_exp_and_masks_stand_for(text):
    found = logits("extreme logits", text)
    below_masks = found.amax(1) < -65504
    first = int(below_masks.nonzero()[0]) - 2  # the kinds follow one another, from any on
    kinds = [found[(np.arange(len(found)) - first) % 5 == kind] for kind in range(5)]
    assert kinds[1].max() < -126  # exp2 is 0 under a maximum of 0
    assert kinds[2].max() < -65504 < 65504 < kinds[3].min()
    assert kinds[0].std() > 8 and kinds[4].std() < 2


@pytest.mark.parametrize("text", DRAWN)
def test_a_maximum_rises_by_just_what_a_half_holds_and_a_little_more(text):
    found = logits("late maximum", text)[1::2]
    rises = (found.max(-1).values - found[:, 0]).tolist()
    assert rises == pytest.approx([RISES[i % len(RISES)] for i in range(len(rises))], rel=1e-5)
    assert torch.isinf(torch.tensor(2.0 ** min(r for r in rises if r > 15)).half())
    assert min(r for r in rises if r > 15) < 16


def test_rows_that_fall_lie_in_one_half_of_a_stripe_and_in_the_other_of_the_next():
    drawn = set()
    for seed in range(8):
        case = Case("late maximum", parse_problem("b1,h1,sq64,sk200,d64,fp16"), "late maximum")
        q, k = (TENSORS.draw(case, seed).inputs[n][0, 0].double() for n in "qk")
        falling = ((q @ k.T).amax(1) < 0).nonzero().flatten()
        halves = falling // 8 % 2
        assert len(falling) == 4 and (halves[:-1] != halves[1:]).all()
        drawn.update(falling.tolist())
    assert len(drawn) > 8


def test_one_hot_rows_and_those_of_the_long_case_point_at_early_and_late_keys():
    for name in ("one-hot rows", "long"):
        found = logits(name, "b1,h1,sq64,sk4159,d64,fp16").argmax(1) / 4159
        assert found[3::4].min() < 0.1 and found[3::4].max() > 0.9


def test_long_rows_weigh_all_keys_alike_or_a_few_of_each_tile_or_one_alone():
    found = logits("long", "b1,h1,sq24,sk4159,d64,fp16")
    weights = 2 ** (found - found.amax(-1, keepdim=True))
    faint, few, alike, one = (
        weights[rows] for rows in (slice(0, None, 8), slice(1, None, 4), slice(2, None, 4), slice(3, None, 4))
    )
    torch.testing.assert_close(faint[:, 1:], torch.full_like(faint[:, 1:], 2**-15.5), rtol=0.02, atol=0)
    torch.testing.assert_close(alike[:, 1:], torch.full_like(alike[:, 1:], 2 / 3), rtol=1e-3, atol=0)
    assert (one.max(-1).values / one.sum(-1)).min() > 0.999
    by_tile = (few / few.sum(-1, keepdim=True))[:, :4096].unflatten(1, (64, 64)).amax((0, 2))
    assert by_tile.min() > 5e-4


def test_only_a_kernel_for_bfloat16_gets_values_beyond_a_half():
    halves, bfloats = (
        [TENSORS.draw(case, 1).inputs["v"].abs().max() > 65504 for case in cases_of(f"b1,h2,s100,d64,{dtype}")]
        for dtype in ("fp16", "bf16")
    )
    assert any(bfloats) and not any(halves)


# ---- what is wrong is incorrect ----


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


def cut(p, bits):
    """P with so many significant bits, the rest cut off."""
    return (p.view(torch.int32) >> (24 - bits) << (24 - bits)).view(torch.float32)


def rounded(p, bits):
    return cut((p.view(torch.int32) + (1 << (23 - bits))).view(torch.float32), bits)


LOSSES = {
    "P through bf16": lambda p: p.bfloat16().float(),
    **{f"P cut to {bits} bits": lambda p, bits=bits: cut(p, bits) for bits in (5, 6, 7, 8)},
    **{f"P rounded to {bits} bits": lambda p, bits=bits: rounded(p, bits) for bits in (5, 6, 7)},
    "P a little too large": lambda p: p * 1.002,
}


BELOW_BF16 = ("P through bf16", "P a little too large")


@pytest.mark.parametrize(
    ("text", "loss"),
    each_nth(3, [(t, name) for t in PROBLEMS for name in LOSSES if "fp16" in t or name not in BELOW_BF16]),
)
def test_a_loss_of_precision_in_p_is_incorrect(text, loss):
    problem = parse_problem(text)

    def lossy(q, k, v, scale, causal):
        s = scores(q.float(), k.float(), scale, causal)
        p = (s - s.amax(-1, keepdim=True)).exp()
        v = v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)
        return ((LOSSES[loss](p).to(q.dtype).float() @ v.float()) / p.sum(-1, keepdim=True)).to(q.dtype)

    assert judge(problem, device(problem, lossy)).outcome is Outcome.INCORRECT


# with 32 columns their own rounding errors hide in part what is wrong with the row
@pytest.mark.parametrize("text", [text for text in PROBLEMS if "d32" not in text])
@pytest.mark.parametrize("inverted", [False, True], ids=["row_sum", "one over row_sum"])
def test_a_row_sum_rounded_to_the_dtype_is_incorrect(text, inverted):
    problem = parse_problem(text)

    def lossy(q, k, v, scale, causal):
        s = scores(q.float(), k.float(), scale, causal)
        p = (s - s.amax(-1, keepdim=True)).exp()
        total = p.sum(-1, keepdim=True)
        share = (1 / total).to(q.dtype).float() if inverted else 1 / total.to(q.dtype).float()
        return (p @ v.float().repeat_interleave(q.shape[1] // v.shape[1], dim=1) * share).to(q.dtype)

    assert judge(problem, device(problem, lossy)).outcome is Outcome.INCORRECT


def test_a_row_of_small_outputs_does_not_hide_behind_a_large_one():
    problem = parse_problem("b1,h1,sq2,sk64,d64,fp16")
    case = Case("one row is a thousandth", problem)
    q, k, v = (TENSORS.draw(case, 1).inputs[n].clone() for n in "qkv")
    k[:, :, 0], k[:, :, 1:] = 30.0, -0.5 * k[:, :, 1:].abs()
    v[:, :, 0] *= 1000.0
    q[:, :, 0], q[:, :, 1] = 1.0, -1.0
    drawn = Drawn({"q": q, "k": k, "v": v}, {"q": q, "k": k, "v": v})
    result = honest(q, k, v, 64**-0.5, False)
    assert compare(ATTENTION, case, drawn, {"o": result}, 1).correct
    result[:, :, 1] += 0.05
    found = compare(ATTENTION, case, drawn, {"o": result}, 1)
    assert not found.correct and found.max_error < found.allowed
    assert found.reason.startswith("error of one row")


@pytest.mark.parametrize("short", [(40, 1), (8, 5, 1), (10, 2, 2)])
def test_rows_of_few_elements_are_judged_together_as_one_may_cancel_to_nothing(short):
    exact = torch.linspace(1, 2, 40, dtype=torch.float64).view(short)
    exact.view(-1)[3] = 1e-6  # what is left of sums whose terms are about 1, in float32
    error, tolerance = torch.full_like(exact, 1e-6), Tolerance(roundings=32)
    found = by_own_error("", error, exact, torch.zeros_like(exact), 2**-23, tolerance)
    assert all(bound.error <= bound.allowed for bound in found)
    error.view(-1)[3] = 1e-5
    found = by_own_error("", error, exact, torch.zeros_like(exact), 2**-23, tolerance)
    assert any(bound.error > bound.allowed for bound in found)


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
    def run(rounds, seed):
        raise failure("block (0, 0, 0), thread 7")

    verdict = judge(parse_problem(PROBLEMS[0]), run)
    assert verdict.outcome is failure.outcome
    assert "thread 7" in verdict.reason
    assert len(verdict.cases) == 1


def test_stores_that_do_not_cover_an_output_are_wrong_whatever_the_device_returns():
    problem = parse_problem(PROBLEMS[0])
    right = device(problem)

    def run(rounds, seed):
        return replace(right(rounds, seed), unwritten={"o": 3})

    verdict = judge(problem, run)
    assert verdict.outcome is Outcome.INCORRECT
    assert "3 of 4224 outputs were never written" in verdict.reason


def test_one_case_with_several_blocks_is_launched_twice_on_new_inputs_over_the_old_outputs():
    problem = parse_problem(PROBLEMS[0])
    seen = []

    def run(rounds, seed):
        seen.append([calls[0].arguments for calls in rounds])
        return device(problem)(rounds, seed)

    plan = [(case, Launch((1 + n // 2, 1, 1), 32, 0)) for n, case in enumerate(ATTENTION.cases(problem, CONFIG))]
    assert verify(ATTENTION, plan, run, "stand-in", 1).correct
    twice = [n for n, rounds in enumerate(seen) if len(rounds) == 2]
    assert len(twice) == 1 and twice[0] >= 2
    first, second = seen[twice[0]]
    assert not np.array_equal(first[0].data, second[0].data)


def test_a_kernel_that_is_right_once_and_returns_early_later_is_incorrect():
    problem = parse_problem(PROBLEMS[0])

    def run(rounds, seed):
        done = device(problem)(rounds, seed)
        return replace(done, tensors=[tensors | {"o": done.tensors[0]["o"]} for tensors in done.tensors])

    verdict = judge(problem, run)
    assert verdict.outcome is Outcome.INCORRECT
    assert "in the second launch" in verdict.reason


def test_inputs_are_fresh_for_every_candidate_and_case_and_repeat_from_their_seed():
    seeds = case_seeds(1, 12) + case_seeds(2, 12)
    assert len(set(seeds)) == 24
    case = ATTENTION.cases(parse_problem(PROBLEMS[0]), CONFIG)[2]
    once, again, other = (TENSORS.draw(case, s).inputs["q"] for s in (5, 5, 6))
    assert torch.equal(once, again)
    assert not torch.equal(once, other)


def test_the_output_is_poisoned_before_every_launch():
    case = ATTENTION.cases(parse_problem(PROBLEMS[0]), CONFIG)[2]
    parameters = ATTENTION.parameters(case.problem, {})
    out = make_arguments(parameters, TENSORS.draw(case, 1).inputs)[3]
    assert out.output
    assert np.isnan(out.data.view(np.float16)).all()


def test_the_reference_does_not_depend_on_the_batch():
    problem = parse_problem("b3,h4,s40,d32,bf16,causal,kv2")
    inputs = TENSORS.draw(Case("all", problem), 3).inputs
    whole = TENSORS.reference(problem, inputs)["o"]
    one = TENSORS.reference(replace(problem, batch=1), {n: t[1:2] for n, t in inputs.items()})["o"]
    assert whole.dtype is torch.float64
    torch.testing.assert_close(whole[1:2], one)
