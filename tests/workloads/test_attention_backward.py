"""The backward kernels are right, broken ones are not, and the reference is what autograd computes in float64."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import chain

import pytest
import torch

from evoengine.devices.base import ScratchParameter
from evoengine.errors import UsageError
from evoengine.records import CompiledCandidate, Kind, Outcome, Plans
from evoengine.search.evaluators import full_plan, gate_plan, make_plans
from evoengine.stages.compile import compile_source
from evoengine.stages.predict import predict_figure
from evoengine.stages.verify import bounds
from evoengine.workloads import parse_problem
from evoengine.workloads.attention_backward.problem import (
    GRADIENTS,
    GRADIENTS_BY_TMA,
    LAST,
    PREPARE,
    TAKEN,
    BackwardProblem,
)
from evoengine.workloads.attention_backward.tensors import forward
from evoengine.workloads.base import Case
from tests.support.exhaustive import more, representatives
from tests.support.kernel_gate import KernelGate, execute

FULL = "attention-backward:b1,h2,s200,d64,fp16"
CAUSAL = "attention-backward:b1,h4,sq90,sk150,d64,bf16,causal,kv2"
ATOMIC = {"family": "mma", "tile_m": 32, "tile_n": 64, "warps": 4, "stages": 2, "dq": "atomic", "layout": "swizzle", "min_blocks": 1}  # fmt: skip
PASS, BULK = {**ATOMIC, "dq": "second_pass"}, {**ATOMIC, "dq": "bulk"}
WGMMA = {"family": "wgmma", "tile_m": 64, "tile_n": 128, "stages": 2, "dq": "bulk", "ds_stages": 2, "split_q": 1, "min_blocks": 1}  # fmt: skip
ONE_DS, SPLIT = {**WGMMA, "ds_stages": 1}, {**WGMMA, "split_q": 2}
SCALAR = {"family": "scalar", "tile_m": 16, "tile_n": 16, "warps": 8}

# ── what the kernels compute ────────────────────────────────────────────────────────────────────────────────────────


def judged(gate: KernelGate, config, old: str = "", new: str = "", seed: int = 7):
    """Return the executor's verdict on a configuration's kernels with the text `new` in place of `old`."""
    source = gate.doctored(config, old, new) if old else gate.source(config)
    binary = compile_source(source, gate.target.gpu.arch)
    return execute(gate.target.workload, source, binary, make_plans(gate.space, gate.target, config), seed)


@pytest.mark.parametrize(
    ("problem", "config"),
    [
        (CAUSAL, ATOMIC),
        (CAUSAL, WGMMA),
        *more(
            [
                (FULL, ATOMIC),
                (FULL, BULK),
                (CAUSAL, BULK),
                (FULL, PASS),
                (CAUSAL, PASS),
                (FULL, WGMMA),
                (FULL, ONE_DS),
                (FULL, SPLIT),
                (CAUSAL, {**SPLIT, "tile_n": 64, "split_q": 4}),
                (FULL, SCALAR),
                (CAUSAL, SCALAR),
            ]
        ),
    ],
)
def test_both_judges_call_the_kernels_right(kernel_gate, problem, config):
    gate = kernel_gate(problem)
    assert gate.space.why_invalid(config) is None
    verdict = judged(gate, config)
    assert verdict.correct, verdict.reason
    assert verdict.coverage.missing == ()
    verdict = gate.judge(config)
    assert verdict.correct, verdict.reason


PROBLEMS = [
    "attention-backward:b1,h2,sq77,sk203,d64,fp16",
    "attention-backward:b2,h4,s101,d64,bf16,causal,kv2",
    "attention-backward:b1,h6,sq45,sk131,d128,fp16,causal,kv2",
    "attention-backward:b1,h2,sq119,sk67,d128,bf16,causal",
    "attention-backward:b1,h2,s1,d64,bf16",
]


@pytest.mark.parametrize("number", [1, *more(n for n in range(100) if n != 1)])
def test_a_valid_configuration_passes(kernel_gate, number):
    gate = kernel_gate(PROBLEMS[number % len(PROBLEMS)])
    config = gate.draw(100, seed=number)[number]
    verdict = judged(gate, config, seed=number)
    assert verdict.outcome is None, f"{gate.problem} {config}: {verdict.reason}"


FAULTS = [
    # name, configuration, problem, text of the good kernels, text of the broken ones
    ("scale left out of dK", ATOMIC, FULL, "store(sum_k, scale,", "store(sum_k, 1.0f,"),
    ("scale left out of dQ", ATOMIC, FULL, "+ e * 32] * scale", "+ e * 32]"),
    ("scale left out of the logits", ATOMIC, FULL, "scale * LOG2_E", "LOG2_E"),
    ("dP without delta", ATOMIC, FULL, "(ds[i].d[j] - less.x)", "ds[i].d[j]"),
    ("delta of another row", ATOMIC, FULL, "of_rows + TILE_M + p[0].column(e)", "of_rows + TILE_M"),
    ("LSE in base 2", ATOMIC, FULL, "-LOG2_E * top.x", "-top.x"),
    ("dK and dV exchanged", ATOMIC, FULL, "store(sum_k, scale, tiles.owned[0], dk + own", "store(sum_k, scale, tiles.owned[0], dv + own"),
    ("dQ added up without atomics", ATOMIC, FULL, "atomicAdd(sums + place_of(turn) + e * 32, part[0].d[e])", "sums[place_of(turn) + e * 32] += part[0].d[e]"),
    ("sums of dQ not zeroed", ATOMIC, FULL, "write_four(zeros + i, make_float4(0, 0, 0, 0));", ";"),
    ("half of the sums of dQ zeroed", ATOMIC, FULL, "i < TILE_M * HEAD_DIM; i += THREADS * 4", "i < TILE_M * HEAD_DIM / 2; i += THREADS * 4"),
    ("barrier between dS and its readers dropped", ATOMIC, FULL, "        __syncthreads();\n        if (row >= seq_q) break;\n        const long long head", "        const long long head"),
    ("barrier before K's place is reused dropped", ATOMIC, FULL, "    __syncthreads();\n    store(sum_k", "    store(sum_k"),
    ("a step's tile read before it is there", ATOMIC, FULL, "pipeline_wait<STAGES - 2>();", "__syncthreads();"),
    ("a buffer filled while it is read", ATOMIC, FULL, "request(step + STAGES - 1);", "request(step + STAGES);"),
    ("last tile of queries left out", ATOMIC, FULL, "turns = query_tiles - first_tile", "turns = query_tiles - first_tile - (query_tiles > 1)"),
    ("keys behind the last not masked", ATOMIC, FULL, "first_key + TILE_N > seq_k ||", ""),
    ("mask aligned to the upper left", ATOMIC, CAUSAL, "key - diagonal - row : 0", "key - row : 0"),
    ("mask one query too late", ATOMIC, CAUSAL, "key - diagonal - row : 0", "key - diagonal - row + 1 : 0"),
    ("mask one query too early", ATOMIC, CAUSAL, "key - diagonal - row : 0", "key - diagonal - row - 1 : 0"),
    ("tiles of queries skipped that see a key", ATOMIC, CAUSAL, "max(0, first_key - diagonal) / TILE_M", "min(query_tiles - 1, (max(0, first_key - diagonal) + TILE_M - 1) / TILE_M)"),
    ("first head of a group alone", ATOMIC, CAUSAL, "steps = group * turns", "steps = turns"),
    ("same head for all of a group", ATOMIC, CAUSAL, "(kv_head * group + step / turns) * seq_q", "(kv_head * group) * seq_q"),
    ("delta of half of the columns", ATOMIC, FULL, "for (int w = 0; w < 4; ++w) {", "for (int w = 0; w < 2; ++w) {"),
    ("a row of dK too many", ATOMIC, FULL, "if (row >= rows) break;", "if (row > rows) break;"),
    ("the diagonal a key short of a tile taken for below it", ATOMIC, CAUSAL, "first_key + TILE_N - 1 > row + diagonal", "first_key + TILE_N - 2 > row + diagonal"),
    ("dQ of the pass masked one key too late", PASS, CAUSAL, "row + diagonal + 1) : seq_k) - step", "row + diagonal + 2) : seq_k) - step"),
    ("dQ of the pass without its last keys", PASS, FULL, "steps = (keys + TILE_M - 1) / TILE_M", "steps = (keys + TILE_M - 2) / TILE_M"),
    ("KV head of another query head", PASS, CAUSAL, "kv_head = head / (heads / kv_heads);", "kv_head = head % kv_heads;"),
    ("bulk addition that is not fenced", BULK, FULL, "        async_proxy_fence();\n", ""),
    ("sums overwritten before they were read", BULK, FULL, "if (lane() == 0) bulk_add_read();", ""),
    ("block that ends before its sums were added", BULK, FULL, "if (lane() == 0) bulk_add_wait();", ""),
    ("tiles stored in bulk and not added", BULK, FULL, "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32", "cp.async.bulk.global.shared::cta.bulk_group"),
    ("half of a warp's sums added", BULK, FULL, "TURNS * 16 * PART_COLS * sizeof(float)", "TURNS * 8 * PART_COLS * sizeof(float)"),
    ("wgmma: scale left out of dK", WGMMA, FULL, "store_rows(sum_k, scale,", "store_rows(sum_k, 1.0f,"),
    ("wgmma: scale left out of dQ", WGMMA, FULL, "four.x * scale, four.y * scale", "four.x, four.y"),
    ("wgmma: LSE in base e", WGMMA, FULL, "-LOG2_E * lse[at + row]", "-lse[at + row]"),
    ("wgmma: LSE in delta's place", WGMMA, FULL, "derive(ds, p, tiles.delta(step))", "derive(ds, p, tiles.lse(step))"),
    ("wgmma: LSE of the first head", WGMMA, FULL, "delta + work.tile(step) * PAIR", "delta + work.query_tile(step) * PAIR"),
    ("wgmma: dO not transposed", WGMMA, FULL, "weights_p, Walked::mn_major(", "weights_p, Walked::k_major("),
    ("wgmma: dS of the first part of the queries for all", WGMMA, FULL, "tiles.ds(step) + part * TileDS::BYTES", "tiles.ds(step)"),
    ("wgmma: dV begun anew at each step", WGMMA, FULL, "Walked::mn_major(tiles.gradients(step)), 1)", "Walked::mn_major(tiles.gradients(step)), 0)"),
    ("wgmma: dS not fenced", WGMMA, FULL, "        async_proxy_fence();\n        named_barrier_sync(1", "        named_barrier_sync(1"),
    ("wgmma: barrier between dS and its readers dropped", WGMMA, FULL, "        named_barrier_sync(1, 128 * CONSUMERS);\n        issue", "        issue"),
    ("wgmma: one dS, overwritten while it is read", ONE_DS, FULL, "        named_barrier_sync(2, 128 * CONSUMERS);", "        //"),
    ("wgmma: scores read before their product ends", WGMMA, FULL, "wait_for<1>(p)", "wait_for<2>(p)"),
    ("wgmma: dP read before its product ends", WGMMA, FULL, "wait_for<0>(ds)", "wait_for<1>(ds)"),
    ("wgmma: dQ read before its product ends", WGMMA, FULL, "wait_for<1>(part_q)", "wait_for<2>(part_q)"),
    ("wgmma: a buffer handed back before dK's product ends", WGMMA, FULL, "wait_for<0>(sum_k)", "wait_for<1>(sum_k)"),
    ("wgmma: products never committed", WGMMA, FULL, "    wgmma_commit();\n}", "}"),
    ("wgmma: a buffer filled while it is read", WGMMA, FULL, "tiles.walked.acquire(step);", "arrive_expect_tx(tiles.walked.full_of(step), 2 * Walked::BYTES + PAIR * sizeof(float));"),
    ("wgmma: a step's tile read before it is there", WGMMA, FULL, "        tiles.walked.wait(step);", "        //"),
    ("wgmma: sums of other blocks read before they are there", SPLIT, FULL, "leave_rows(sum_v, sums_v);\n    cluster_sync();", "cluster_sync();\n    leave_rows(sum_v, sums_v);"),
    ("wgmma: a block that ends while others read its sums", SPLIT, FULL, "    cluster_sync();  // another block may still read sums here\n", ""),
    ("wgmma: the last block's sums left out", SPLIT, FULL, "block < SPLIT_Q; ++block", "block < SPLIT_Q - 1; ++block"),
    ("wgmma: own sums in place of another block's", SPLIT, FULL, "read_four_at(block, ", "read_four_at(cluster_rank(), "),
    ("wgmma: the first rows of a tile stored by all blocks", SPLIT, FULL, "row = cluster_rank() * ROWS + i / FOURS", "row = i / FOURS"),
    ("wgmma: all blocks begin with the first query", SPLIT, FULL, "first_step = min(all, int(cluster_rank()) * part)", "first_step = 0"),
    ("wgmma: the last step of each block left out", SPLIT, FULL, "steps = min(all - first_step, part)", "steps = min(all - first_step, part) - (all > part)"),
    ("wgmma: scale left out of summed dK", SPLIT, FULL, "store_sums(sums_k, scale,", "store_sums(sums_k, 1.0f,"),
    ("wgmma: K read before it is there", WGMMA, FULL, "    tiles.owned.wait(0);", "    //"),
    ("wgmma: barriers not fenced", WGMMA, FULL, "        barrier_init_fence();\n", ""),
    ("wgmma: sums of dQ overwritten before they were read", WGMMA, FULL, "if (lane() == 0) bulk_add_read();", ""),
    ("wgmma: a block that ends before its sums were added", WGMMA, FULL, "if (lane() == 0) bulk_add_wait();", ""),
    ("wgmma: bulk addition that is not fenced", WGMMA, FULL, "    async_proxy_fence();\n    __syncwarp();\n    const int first", "    __syncwarp();\n    const int first"),
    ("wgmma: sums of dQ not zeroed", WGMMA, FULL, "write_four(zeros + i, make_float4(0, 0, 0, 0));", ";"),
    ("wgmma: K's place overwritten while it is read", WGMMA, FULL, "    named_barrier_sync(1, 128 * CONSUMERS);  // no product", "    // no product"),
    ("wgmma: keys behind the last not masked", WGMMA, FULL, "first_key + 64 <= work.seq_k && ", ""),
    ("wgmma: LSE of queries behind the last", WGMMA, CAUSAL, "exists ? -LOG2_E * lse[at + row] : 0.0f", "-LOG2_E * lse[at + row]"),
    ("wgmma: mask aligned to the upper left", WGMMA, CAUSAL, "key - work.diagonal - row : 0", "key - row : 0"),
    ("wgmma: mask one query too late", WGMMA, CAUSAL, "key - work.diagonal - row : 0", "key - work.diagonal - row + 1 : 0"),
    ("wgmma: mask one query too early", WGMMA, CAUSAL, "key - work.diagonal - row : 0", "key - work.diagonal - row - 1 : 0"),
    ("wgmma: the diagonal taken for below it", WGMMA, CAUSAL, "first_key + 63 <= row + work.diagonal", "first_key + 61 <= row + work.diagonal"),
    ("wgmma: the diagonal a key short of a tile taken for below it", WGMMA, CAUSAL, "first_key + 63 <= row + work.diagonal", "first_key + 62 <= row + work.diagonal"),
    ("wgmma: tiles of queries skipped that see a key", WGMMA, CAUSAL, "max(0, first_key - diagonal) / TILE_M", "min(query_tiles - 1, (max(0, first_key - diagonal) + TILE_M - 1) / TILE_M)"),
    ("wgmma: first head of a group alone", WGMMA, CAUSAL, "steps(group * turns)", "steps(turns)"),
    ("wgmma: more registers asked for than there are", WGMMA, FULL, "= SHARE < 256 ? SHARE : 256", "= 248"),
    ("P where dS belongs", SCALAR, FULL, "sum_k[r].add(p * (gradient.dot(value[r]) - less), query)", "sum_k[r].add(p, query)"),
    ("rows that see no key count", SCALAR, CAUSAL, "return seen ?", "return seen || lse < -1e30f ?"),
]  # fmt: skip
BY_TEXT = (
    "sums overwritten before they were read", "block that ends before its sums were added",
    "wgmma: scores read before their product ends", "wgmma: dP read before its product ends",
    "wgmma: dQ read before its product ends", "wgmma: products never committed", "wgmma: barriers not fenced",
)  # fmt: skip
"""faults that the emulator alone sees: ptxas gives cp.async and bulk additions one scoreboard, so that in machine code a
wait for copies waits for the additions too; and it waits for products itself where the text does not"""
FAST = ("dQ added up without atomics", "sums of dQ not zeroed", "mask one query too late", "wgmma: dS not fenced")


@pytest.mark.parametrize(
    ("name", "config", "problem", "old", "new"), representatives([pytest.param(*f, id=f[0]) for f in FAULTS], *FAST)
)
def test_a_planted_fault_is_caught(kernel_gate, name, config, problem, old, new):
    gate = kernel_gate(problem)
    if name in BY_TEXT:
        assert gate.refutes(config, old, new), "the fault escaped"
        return
    verdict = judged(gate, config, old, new)
    assert verdict.outcome is not None and verdict.reason, "the fault escaped"


# ── blocks of the problem's own launches ────────────────────────────────────────────────────────────────────────────

LARGE = "attention-backward:b128,h64,s8192,d128,fp16"
LARGE_CAUSAL = "attention-backward:b9,h12,sq60000,sk90000,d128,bf16,causal,kv4"
PASS_128, BULK_128 = ({**ATOMIC, "tile_n": 128, "warps": 8, "dq": dq} for dq in ("second_pass", "bulk"))
FULL_FAULTS = [
    ("offsets of queries of 32 bits", BULK_128, LARGE, "const long long at = (long long)(kv_head * group", "const unsigned at = (kv_head * group"),
    ("offsets of keys of 32 bits", BULK_128, LARGE, "const long long own = ((long long)kv_head * seq_k", "const unsigned own = (kv_head * seq_k"),
    ("offsets of sums of 32 bits", BULK_128, LARGE, "const long long head = kv_head", "const unsigned head = kv_head"),
    ("offsets of rows of O of 32 bits", BULK_128, LARGE, "at = (long long)head * seq_q + first;", "at = unsigned((head * seq_q + first) * HEAD_DIM) / HEAD_DIM;"),
    ("offsets of dQ of 32 bits", BULK_128, LARGE, "dq + ((long long)head * seq_q + first) * HEAD_DIM", "dq + (head * seq_q + first) * HEAD_DIM"),
    ("sums of dQ not zeroed from a head on", BULK_128, LARGE, "float* zeros = dq_sum + ((long long)head ", "float* zeros = dq_sum + ((long long)(head & 2047) "),
    ("sums of dQ read of another head", BULK_128, LARGE, "float* const sums = dq_sum + ((long long)head * gridDim.x", "float* const sums = dq_sum + ((long long)(head & 2047) * gridDim.x"),
    ("heads of 16 bits in the pass", PASS_128, LARGE, "head = blockIdx.z * heads + blockIdx.y, kv_head", "head = (blockIdx.z * heads + blockIdx.y) & 0xffff, kv_head"),
    ("offsets of the pass of 32 bits", PASS_128, LARGE, "at = (long long)head * seq_q + first_row, of_keys", "at = unsigned((head * seq_q + first_row) * HEAD_DIM) / HEAD_DIM, of_keys"),
    ("keys of the first heads in the pass", PASS_128, LARGE_CAUSAL, "of_keys = (long long)kv_head * seq_k * HEAD_DIM", "of_keys = (kv_head & 3) * seq_k * HEAD_DIM"),
    ("wgmma: heads of 16 bits", WGMMA, LARGE, "kv_head = number / tiles;", "kv_head = number / tiles & 0xffff;"),
    ("wgmma: batch entries of 8 bits", WGMMA, LARGE_CAUSAL, "kv_head = first_head + place % among;", "kv_head = first_head + place % among & 1023;"),
    ("wgmma: the first heads in place of those handed out together", WGMMA, LARGE_CAUSAL, "kv_head = first_head + place % among;", "kv_head = place % among;"),
    ("as many heads handed out together in the end", BULK_128, LARGE_CAUSAL, "among = min(at_once, all_heads - first_head)", "among = at_once"),
    ("wgmma: LSE of heads of 10 bits", WGMMA, LARGE, "delta + work.tile(step) * PAIR", "delta + ((work.head(step) & 1023) * work.query_tiles + work.query_tile(step)) * PAIR"),
    ("wgmma: sums of heads of 10 bits", WGMMA, LARGE, "dq_sum + work.tile(step) * TILE_M", "dq_sum + ((work.head(step) & 1023) * work.query_tiles + work.query_tile(step)) * TILE_M"),
    ("wgmma: gradients of 32 bits", WGMMA, LARGE, "own = ((long long)work.kv_head * work.seq_k + work.first_key) * HEAD_DIM", "own = (work.kv_head * work.seq_k + work.first_key) * HEAD_DIM"),
    ("wgmma: LSE prepared for heads of 10 bits", WGMMA, LARGE, "float* of_tile = delta + ((long long)head *", "float* of_tile = delta + ((long long)(head & 1023) *"),
    ("scalar: offsets of 32 bits", SCALAR, LARGE, "const long long at = (long long)head * seq_q + row;", "const int at = head * seq_q + row;"),
]  # fmt: skip


def full_size(gate, config, source):
    binary = compile_source(source, gate.target.gpu.arch)
    plans = Plans((), (), full_plan(gate.space, gate.target, config))
    return execute(gate.target.workload, source, binary, plans, 5)


@pytest.mark.parametrize(
    ("config", "problem", "old", "new"),
    representatives([pytest.param(*f[1:], id=f[0]) for f in FULL_FAULTS], "wgmma: sums of heads"),
)
def test_a_fault_that_no_small_case_shows_is_caught_at_full_size(kernel_gate, config, problem, old, new):
    gate = kernel_gate(problem)
    assert gate.space.why_invalid(config) is None
    found = full_size(gate, config, gate.doctored(config, old, new))
    assert found.outcome in (Outcome.INCORRECT, Outcome.CRASHED) and found.reason, "the fault escaped"


@pytest.mark.parametrize(
    ("config", "problem"),
    more(
        [
            (config, problem)
            for problem in (LARGE, LARGE_CAUSAL)
            for config in (WGMMA, ONE_DS, BULK_128, {**BULK_128, "dq": "atomic"}, PASS_128, SCALAR)
        ]
    ),
)
def test_a_right_kernel_passes_at_full_size(kernel_gate, config, problem):
    gate = kernel_gate(problem)
    found = full_size(gate, config, gate.source(config))
    assert found.outcome is None, found.reason
    assert [case.name for case in found.cases] == [
        "full size, sums of dO O", "full size, dK and dV", "full size, dQ",
    ]  # fmt: skip


# ── the reference, and the tolerance ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("draw", ["normal", "large logits", "one-hot rows", "diagonal"])
@pytest.mark.parametrize("causal", [False, True])
def test_the_reference_is_autograds_gradient_in_float64(draw, causal):
    """Of lengths that leave eight rows without a key under a mask."""
    workload, problem = parse_problem("attention-backward:b2,h6,kv2,sq37,sk29,d64,fp16")
    problem = replace(problem, causal=causal)
    tensors = workload.tensors()
    inputs = {name: x.double() for name, x in tensors.draw(Case("", problem, draw), 3).inputs.items()}
    leaves = {name: inputs[name].clone().requires_grad_() for name in "qkv"}
    o, lse = forward(problem, {**inputs, **leaves})
    wanted = torch.autograd.grad(o, list(leaves.values()), inputs["dout"])
    found = tensors.reference(problem, {**inputs, "o": o.detach(), "lse": lse.detach()})
    assert (lse.isinf().sum() > 0) == causal
    for name, gradient in zip(("dq", "dk", "dv"), wanted, strict=True):
        assert float((found[name] - gradient).abs().max()) < 1e-12


def test_rows_without_a_key_have_no_gradient():
    workload, problem = parse_problem("attention-backward:b1,h1,sq9,sk4,d64,fp16,causal")
    tensors = workload.tensors()
    inputs = tensors.draw(Case("", problem), 1).inputs
    assert inputs["lse"][0, 0, :5].eq(-math.inf).all() and inputs["o"][0, 0, :5].eq(0).all()
    assert tensors.reference(problem, inputs)["dq"][0, 0, :5].eq(0).all()


@pytest.mark.parametrize("text", ["attention-backward:b1,h4,kv2,sq300,sk200,d64,fp16", *more([CAUSAL])])
def test_the_best_kernel_is_within_the_tolerance(text):
    """P and dS rounded, and the gradients: all that a kernel must round."""
    workload, problem = parse_problem(text)
    tensors = workload.tensors()
    for seed, draw in enumerate(("normal", "large logits", "one-hot rows", "diagonal") * 3):
        case = Case("", problem, draw if draw != "normal" or problem.seq_k > problem.seq_q else "ordinary")
        drawn = tensors.draw(case, seed)
        best, exact = tensors.rounded_once(problem, drawn.inputs), tensors.reference(problem, drawn.inputs)
        errors = {name: best[name].double() - exact[name] for name in best}
        for bound in chain.from_iterable(bounds(workload, case, drawn, best, errors, exact).values()):
            assert bound.error <= bound.allowed, f"{draw}: {bound}"


def test_samples_are_heads_of_the_whole_problem():
    workload, problem = parse_problem("attention-backward:b2,h6,kv2,sq9,sk14,d64,fp16")
    tensors = workload.tensors()
    inputs = tensors.draw(Case("", problem), 1).inputs
    whole = tensors.reference(problem, inputs)
    samples = tensors.samples(problem, inputs, 1)
    assert len(samples) == 2
    for sample in samples:
        part = sample.take(whole)
        for name, gradient in tensors.reference(sample.problem, sample.inputs).items():
            assert torch.allclose(part[name], gradient)


# ── problems, figures, parameters ───────────────────────────────────────────────────────────────────────────────────


def test_a_problem_is_read_back_as_it_is_written():
    for text in (*PROBLEMS, FULL, CAUSAL):
        assert str(parse_problem(text)[1]) == text
    assert parse_problem("attention-backward:d64,causal,bf16,h4,b1,s8,kv2")[1] == BackwardProblem(1, 4, 2, 8, 8, 64, "bf16", True)  # fmt: skip


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("b1,h2,s8,d96,fp16", "head_dim 96; the templates cover 64 and 128"),
        ("b1,h3,kv2,s8,d64,fp16", "heads must be a multiple of kv heads"),
        ("b1,h2,s8,sq4,d64,fp16", "gives both s… and sq…/sk…"),
        ("b1,h2,sq8,d64,fp16", "does not give seq_k"),
        ("b1,h2,d64,fp16", "does not give seq_q"),
        ("b1,h2,s8,d64", "does not give dtype"),
        ("b1,h2,s8,d64,fp16,window128", "a part 'window128' that is not b, h, kv, s, sq, sk, d with a number"),
        ("b70000,h2,s8,d64,fp16", "batch 70000; it must be from 1 to 65535"),
        ("b1,h0,s8,d64,fp16", "heads 0; it must be from 1"),
    ],
)
def test_a_wrong_problem_gets_a_sentence(text, said):
    with pytest.raises(UsageError, match="^[^\n]*$") as error:
        parse_problem(f"attention-backward:{text}")
    assert said in str(error.value)


def test_flops_are_two_and_a_half_times_those_of_the_forward_pass():
    for mask in ("", ",causal"):
        backward, problem = parse_problem(f"attention-backward:b2,h8,s512,d128,bf16{mask}")
        forwards, own = parse_problem(f"attention:b2,h8,s512,d128,bf16{mask}")
        assert backward.flops(problem) == 2.5 * forwards.flops(own)


@pytest.mark.parametrize("config", [ATOMIC, WGMMA])
def test_every_kernel_takes_parameters_that_there_are_and_all_are_taken(kernel_gate, config):
    workload, problem = parse_problem(FULL)
    launch = kernel_gate(FULL).source(config).launch
    names = {p.name for p in workload.parameters(problem, config)}
    taken = set().union(*(TAKEN[entry] for entry, _ in launch.kernels(PREPARE)))
    assert workload.entry == PREPARE and taken == names


def test_sums_of_dq_have_scratch_memory_where_they_are_added_up():
    workload, problem = parse_problem(FULL)
    (sums,) = (p for p in workload.parameters(problem, ATOMIC) if p.name == "dq_sum")
    assert isinstance(sums, ScratchParameter) and sums.shape == (1, 2, 7, 32 * 64)
    (none,) = (p for p in workload.parameters(problem, PASS) if p.name == "dq_sum")
    assert none.shape == (1,)


@pytest.mark.parametrize("config", [PASS, *more([ATOMIC, BULK, SCALAR, WGMMA])])
def test_the_time_is_predicted_from_all_three_kernels(kernel_gate, config):
    gate = kernel_gate(FULL)
    source = gate.source(config)
    binary = compile_source(source, gate.target.gpu.arch)
    found = predict_figure(gate.target, CompiledCandidate(0, source, binary, config), {})
    assert found.by_model and found.figure.kind is Kind.ESTIMATED
    second = GRADIENTS_BY_TMA if config["family"] == "wgmma" else GRADIENTS
    assert [entry for entry, _ in source.launch.kernels(source.entry)] == [PREPARE, second, LAST]


@pytest.mark.parametrize("problem", [CAUSAL, *more(PROBLEMS)])
def test_cases_keep_what_is_compiled_in(kernel_gate, problem):
    gate = kernel_gate(problem)
    for config in (ATOMIC, WGMMA, SCALAR):
        for case, _ in gate_plan(gate.space, gate.target, config):
            own, whole = case.problem, gate.problem
            assert (own.head_dim, own.dtype, own.causal) == (whole.head_dim, whole.dtype, whole.causal)


def test_the_second_pass_gives_the_same_bits_each_time_and_says_so(kernel_gate):
    assert "atomicAdd" not in kernel_gate(FULL).source(PASS).text
    assert "atomicAdd" in kernel_gate(FULL).source(ATOMIC).text
    assert "cp.reduce.async.bulk" in kernel_gate(FULL).source(BULK).text


def test_only_boards_whose_copy_engine_adds_are_offered_bulk_additions():
    assert any(c.get("dq") == "bulk" for c in KernelGate(FULL, "h100").space.starts)
    assert "copy engine" in (KernelGate(FULL, "a100").space.why_invalid(BULK) or "")
