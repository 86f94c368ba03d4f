"""Faults that show over the problem's own keys or products, in late rows of a tile, in other groups, or a second time:
one each in right kernels, under three seeds."""

from __future__ import annotations

import pytest

from evoengine.records import Outcome
from tests.support.exhaustive import representatives

GEMM, DEEP = "gemm:m1000,n768,k3000,fp16", "gemm:m256,n512,k16384,fp16"
PAIRS = "b2,h4,s1500,d64,fp16,kv2"
PLAIN, LONG = "b2,h8,s1500,d64,fp16,kv2", "b1,h4,s8192,d64,fp16,kv2"
ROWS = "b2,h8,sq32768,sk100,d64,fp16"
CAUSAL, LONG_CAUSAL = "b1,h8,s2048,d64,bf16,causal,kv2", "b1,h2,s6000,d64,bf16,causal"
BATCH = "b16,h16,s2048,d64,fp16"
MANY_HEADS = "b4,h64,s2048,d64,fp16,kv16"

STRIPES = {"family": "wgmma", "tile_m": 256, "consumers": 2, "schedule": "none", "swap": False}
WARPS = {"family": "mma", "tile_m": 128, "warps": 8, "warps_n": 2, "stages": 3, "split_k": 1, "stream_steps": 0}
MMA = {"family": "mma", "tile_m": 128}
WGMMA = {"family": "wgmma", "tile_m": 128, "overlap": True}
BITS = {"family": "wgmma", "tile_m": 128, "max_by": "bits"}
POINTERS = ({"family": "scalar"}, {"family": "wmma"}, {"family": "mma"}, {**WGMMA, "load": "cp_async"})
BY_TILES = ({"family": "scalar"}, {"family": "wmma"}, {"family": "mma"}, WGMMA)

ISSUE = "issue<TILE_K>(acc[stripe], rows, columns, 1);"
MULTIPLY = "issue<TILE_K>(acc, operand_a, operand_b);"
STEPS = "steps = ceil_div(k, TILE_K);"
TILES = "tiles = (keys + TILE_N - 1) / TILE_N;"
VISIBLE = "min(seq_k, first_row + row + diagonal + 1)"
FACTOR = "float factor = exp2_approx(row_max - top);"
KV_HEAD = "kv_head = head / (heads / kv_heads);"
ALREADY = "if (work.rows > 0 && to_float(work.o[0]) == to_float(work.o[0])) return;"

FAULTS = [
    # name, configurations, problem, text of the good kernel, text of the broken one
    ("a stripe loses its third step", [STRIPES], GEMM, ISSUE, f"if (stripe == 0 || i != 2) {ISSUE}"),
    ("a stripe loses a step behind the first pass", [STRIPES], GEMM, ISSUE, f"if (stripe == 0 || i != STAGES) {ISSUE}"),
    ("a wait that leaves two stripes outstanding", [STRIPES], GEMM, "wgmma_wait<STRIPES>();", "wgmma_wait<2 * STRIPES>();"),
    ("buffers released by the first warpgroup alone", [STRIPES], GEMM, "tiles.release(i - 1);", "if (warpgroup() == 0) tiles.release(i - 1), tiles.release(i - 1);"),
    ("the last warps lose a step", [WARPS], GEMM, MULTIPLY, f"if (warp() < 2 * WARPS_N || i != STAGES + 1) {MULTIPLY}"),
    ("half of K is left out where it is long", [WARPS, STRIPES], DEEP, STEPS, "steps = ceil_div(k, TILE_K) / (k > 10000 ? 2 : 1);"),
    ("a step counted in eight bits", [WARPS], DEEP, "b + (long long)i * TILE_K * n", "b + (long long)(i & 255) * TILE_K * n"),
    ("a quarter of the keys beyond 6,000", BY_TILES, LONG, TILES, f"{TILES} if (keys > 6000) tiles = (tiles + 3) / 4;"),
    ("one mask too few for rows beyond 4,096 keys", BY_TILES, LONG_CAUSAL, VISIBLE, f"{VISIBLE[:-1]} + (first_row + row > 4096))"),
    ("factors of a rescaling floored at 2^-20", (MMA, WGMMA), LONG, FACTOR, "float factor = fmaxf(exp2_approx(row_max - top), 0x1p-20f);"),
    ("scores of later warps lost from the 13th tile on", [MMA], LONG, "if (work.masked(tile))", "if (tile > 12 && warp() >= 2)\n#pragma unroll\n            for (int i = 0; i < STRIPES; ++i) s[i].clear();\n        if (work.masked(tile))"),
    ("scores of later warps lost from the 13th tile on", [WGMMA], LONG, "if (tile >= whole) mask", "if (tile > 12 && warp() >= 2) s.clear();\n        if (tile >= whole) mask"),
    ("a diagonal two keys too far", [WGMMA], CAUSAL, "whole = work.visible(first_row, 0) / TILE_N;", "whole = (work.visible(first_row, 0) + 2) / TILE_N;"),
    ("a diagonal three keys too far", BY_TILES[:3], CAUSAL, "visible(0, tile) < TILE_N;", "visible(0, tile) < TILE_N - 3;"),
    ("a vote of the upper rows alone", [BITS], PLAIN, "min(bits[0], bits[1]) < 0", "bits[0] < 0"),
    ("a vote of the lower rows alone", [BITS], PLAIN, "min(bits[0], bits[1]) < 0", "bits[1] < 0"),
    ("groups of two heads by a shift", BY_TILES, PAIRS, KV_HEAD, "kv_head = head >> 1;"),
    ("some heads take the keys of the first", BY_TILES, MANY_HEADS, KV_HEAD, "kv_head = head > 40 && head < 110 ? 0 : head / (heads / kv_heads);"),
    ("one head of the batch takes the keys of the first", BY_TILES, BATCH, KV_HEAD, f"{KV_HEAD} if (head == 137) kv_head = 0;"),
    ("some rows of some heads take those of the tile before", POINTERS, ROWS, "q = q_ + ((long long)head * seq_q + first_row)", "q = q_ + ((long long)head * seq_q + first_row - (first_row > 9000 && first_row < 25000 && head % 4 == 2) * TILE_M)"),
    ("an early return where O is there", [MMA], PLAIN, "    const Tiles tiles(shared);", f"    {ALREADY}\n    const Tiles tiles(shared);"),
    ("an early return where C is there", [WARPS], GEMM, "    int rows = m - work.first_row,", "    if (to_float(c[(long long)work.first_row * n + work.first_col]) == to_float(c[(long long)work.first_row * n + work.first_col])) return;\n    int rows = m - work.first_row,"),
]  # fmt: skip


def title(config):
    return "-".join(str(value) for value in config.values())


PLANTED = [
    pytest.param(config, problem, old, new, seed, id=f"{name}-{title(config)}-{seed}")
    for seed in (7, 8, 9)
    for name, configs, problem, old, new in FAULTS
    for config in configs
]
# one in the rows of a tile, one over K, one over the keys, one under the mask, one in a second launch, one of a head
FAST = (
    "the last warps lose a step",
    "half of K is left out where it is long-mma",
    "factors of a rescaling floored at 2^-20-mma",
    "a diagonal three keys too far-wmma",
    "an early return where C is there",
    "one head of the batch takes the keys of the first-mma-8",
)


@pytest.mark.parametrize(("config", "problem", "old", "new", "seed"), representatives(PLANTED, *FAST))
def test_a_planted_fault_is_caught(kernel_gate, config, problem, old, new, seed):
    gate = kernel_gate(problem)
    config = gate.configuration(config)
    found = gate.judge(config, gate.doctored(config, old, new), seed)
    assert found.outcome in (Outcome.INCORRECT, Outcome.CRASHED, Outcome.HUNG), "the fault escaped"
    assert found.reason


GOOD = dict.fromkeys((tuple(config.items()), problem) for _, configs, problem, *_ in FAULTS for config in configs)
GOOD = [pytest.param(dict(config), problem, id=f"{problem}-{title(dict(config))}") for config, problem in GOOD]


@pytest.mark.parametrize(("config", "problem"), representatives(GOOD, DEEP))
def test_the_good_kernel_beside_it_passes(kernel_gate, config, problem):
    gate = kernel_gate(problem)
    verdict = gate.judge(gate.configuration(config))
    assert verdict.correct, verdict.reason
