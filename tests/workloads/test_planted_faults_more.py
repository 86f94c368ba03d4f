"""Faults that got through until the gate asked for what shows them: products of a warpgroup begun before all of it is
ready, pipelines that go wrong after many tiles, values that only some lengths, sizes or formats take. One fault each,
all caught by the gate on the emulator."""

from __future__ import annotations

import pytest

from evoengine.records import Outcome
from tests.support.exhaustive import representatives

HALF = "b2,h4,s256,d64,fp16"
BFLOAT = "b2,h4,s256,d64,bf16"
MANY_KEYS = "b2,h8,s80000,d64,fp16"
KEYS_BEYOND_L2 = "b1,h256,s70000,d128,bf16,causal"

SCALAR = {"family": "scalar", "reduction": "shuffle", "tile_m": 64}
WMMA = {"family": "wmma", "tile_m": 64}
MMA = {"family": "mma", "tile_m": 128}
COPIES = {"family": "wgmma", "load": "cp_async", "overlap": True, "tile_m": 128}
TMA = {"family": "wgmma", "load": "tma", "overlap": False, "tile_m": 192, "ping_pong": True}
SHARED_P = {"family": "wgmma", "load": "tma", "overlap": True, "tile_m": 128, "p_in": "shared"}
STATIC = {"family": "wgmma", "load": "tma", "schedule": "static"}
SORTED = {"family": "wgmma", "schedule": "longest_first"}
ALONE = ({"family": "scalar", "stages": 1}, {"family": "wmma", "stages": 1})
FAMILIES = (SCALAR, WMMA, MMA, COPIES)

PACK = "__floats2bfloat162_rn(low, high)"
EXP2 = 'float y;\n    asm volatile("ex2'
STORED = "    async_proxy_fence();\n    __syncwarp();\n}"
LOADED = "__syncthreads();\n        load_k"

FAULTS = [
    # name, configurations, problem, pairs of texts of the good kernel and of the broken one
    ("product begun before all lanes have left P", [SHARED_P], HALF, [(STORED, STORED.replace("    __syncwarp();\n", ""))]),
    ("Q awaited by one warpgroup", [COPIES], HALF, [("    tiles.q.wait(0);", "    if (warpgroup() == 0) tiles.q.wait(0);")]),
    ("Q awaited by one warp of each warpgroup", [COPIES], HALF, [("    tiles.q.wait(0);", "    if (warp() % 4 == 0) tiles.q.wait(0);")]),
    ("Q not awaited", [COPIES, TMA], HALF, [("    tiles.q.wait(0);", "")]),
    ("phases wrong from the eighth tile on", [COPIES, TMA], HALF, [("(before + i) / STAGES", "(before + i) / STAGES + (before + i >= 8)")]),
    ("every fourth tile takes its place too early", ALONE, HALF, [(LOADED, "if (tile % 4) " + LOADED)]),
    ("bfloat16 by way of half", FAMILIES, BFLOAT, [("#include <cuda_bf16.h>", "#include <cuda_bf16.h>\n#include <cuda_fp16.h>"), (PACK, "__floats2bfloat162_rn(__half2float(__float2half(low)), __half2float(__float2half(high)))")]),
    ("weights below 2^-14 lost", FAMILIES, BFLOAT, [(EXP2, "if (x < -14.0f) return 0.0f;\n    " + EXP2)]),
    ("weights below 2^-14 lost", FAMILIES, HALF, [(EXP2, "if (x < -14.0f) return 0.0f;\n    " + EXP2)]),
    ("row_sum rounded in the end", [SCALAR], HALF, [("lanes_sum<LANES>(row_sum))", "to_float((T)lanes_sum<LANES>(row_sum)))")]),
    ("row_sum rounded in the end", [SCALAR], BFLOAT, [("lanes_sum<LANES>(row_sum))", "to_float((T)lanes_sum<LANES>(row_sum)))")]),
    ("row_sum rounded in the end", [MMA], HALF, [("lanes_sum<LANES>(row_sum))", "to_float((T)lanes_sum<LANES>(row_sum)))")]),
    ("number of keys in 16 bits", [MMA, COPIES, TMA], MANY_KEYS, [("seq_k = seq_k_;", "seq_k = (unsigned short)seq_k_;")]),
    ("keys that a row sees in 16 bits", [SCALAR, WMMA], MANY_KEYS, [("return limit - tile * TILE_N;", "return (short)(limit - tile * TILE_N);")]),
    ("no head at once where one's keys are too many for the L2", [STATIC, SORTED], KEYS_BEYOND_L2, [("max(1, KEYS / opaque(seq_k))", "(KEYS / opaque(seq_k))")]),
]  # fmt: skip


def title(config):
    return "-".join(map(str, config.values()))


PLANTED = [
    pytest.param(config, problem, pairs, id=f"{name}-{title(config)}-{problem}")
    for name, configs, problem, pairs in FAULTS
    for config in configs
]
GOOD = {(title(config), problem): (config, problem) for _, configs, problem, _ in FAULTS for config in configs}
GOOD = [pytest.param(*good, id="-".join(name)) for name, good in GOOD.items()]


def variant(gate, wanted):
    """A valid configuration with the wanted values: a start point, moved, or one drawn."""
    start = gate.start({"family": wanted["family"]})
    drawn = gate.draw(400, seed=3)
    moved = (c for c in [{**start, **wanted}, *drawn] if wanted.items() <= c.items())
    return next(c for c in moved if gate.space.why_invalid(c) is None)


# one fault of each class; the others of a class run with `make test-all`
FAST = (
    "product begun before all lanes have left P",
    "weights below 2^-14 lost-mma",
)


@pytest.mark.parametrize(("config", "problem", "pairs"), representatives(PLANTED, *FAST))
def test_a_planted_fault_is_caught(attention_gate, config, problem, pairs):
    gate = attention_gate(problem)
    config = variant(gate, config)
    source = gate.source(config)
    for old, new in pairs:
        assert old in source.text, f"the template has no {old!r} any more"
        source = type(source)(source.text.replace(old, new), source.entry, source.launch)
    found = gate.judge(config, source)
    assert found.outcome in (Outcome.INCORRECT, Outcome.CRASHED, Outcome.HUNG), "the fault escaped"
    assert found.reason


@pytest.mark.parametrize(("config", "problem"), representatives(GOOD, "scalar"))
def test_the_good_kernel_beside_it_passes(attention_gate, config, problem):
    gate = attention_gate(problem)
    verdict = gate.judge(variant(gate, config))
    assert verdict.correct, verdict.reason
