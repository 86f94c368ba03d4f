"""What is never set, what inline PTX does not read, what a slow lane, warp or warpgroup is still busy with, and where
shared memory begins: one fault each, in every family that can have it, all caught by the gate on the emulator."""

from __future__ import annotations

import pytest

from evoengine.records import Outcome, Source
from tests.support.exhaustive import more, representatives

HALF = "b2,h4,s256,d64,fp16"
BFLOAT = "b2,h8,s256,d64,bf16,causal,kv2"
MANY = "b8,h64,s256,d64,fp16"
SCALAR = {"family": "scalar", "reduction": "shuffle", "o_in": "registers"}
WMMA = {"family": "wmma", "o_in": "registers"}
ALONE = {"family": "wmma", "warps_n": 1}  # a warp's rows are its own: its lanes alone wait for one another
MMA = {"family": "mma", "q_in": "registers"}
WGMMA = {"family": "wgmma", "load": "tma", "tile_m": 128, "tile_n": 128}
SHARED_P = {**WGMMA, "p_in": "shared"}
STAGED = {**WGMMA, "o_store": "shared"}
TMA_STORE = {**WGMMA, "o_store": "tma"}
PERSISTENT = {**STAGED, "schedule": "static"}

STATE = "row_max = MASKED, row_sum = 0.0f;"
STARTS = {
    "scalar": ("rows[i].start();", ";"),
    "wmma": ("rows[pass].start();", ";"),
    "mma": ("rows[i][0].start(), rows[i][1].start(), ", ""),
    "wgmma": ("rows[0].start(), rows[1].start();", ""),
}
OUTPUTS = {
    "scalar": ("float out[ROWS][COLS_O] = {};", "float out[ROWS][COLS_O];"),
    "wmma": ("wmma::fill_fragment(out[i][j], 0.0f);", ";"),
    "mma": (", out[i].clear();", ";"),
    "wgmma": ("    o.clear();", ""),
}
STATIC_BYTES = "__shared__ int before[4];\n    before[threadIdx.x % 4] = 0;\n    extern __shared__ "
FAMILIES = {"scalar": SCALAR, "wmma": WMMA, "mma": MMA, "wgmma": WGMMA}

FAULTS = [
    # name, configuration, pairs of texts of the good kernel and of the broken one
    *(("row_max never set", config, [(STATE, "row_sum = 0.0f;")]) for config in FAMILIES.values()),
    *(("row_sum never set", config, [(STATE, "row_max = MASKED;")]) for config in FAMILIES.values()),
    *(("outputs never set", FAMILIES[f], [pair]) for f, pair in OUTPUTS.items()),
    *(("neither row_max nor row_sum set", FAMILIES[f], [pair]) for f, pair in STARTS.items()),
    ("row_max of half the rows never set", WGMMA, [("rows[1].start();", "rows[1].row_sum = 0.0f;")]),
    ("scores never set", SCALAR, [("s[i][j] = 0.0f;", ";")]),
    ("scores never set", WMMA, [("wmma::fill_fragment(scores[i][j], 0.0f);", ";")]),
    ("the first words of P never set", WGMMA, [("for (int j = 0; j < SIZE / 2; ++j) a[j]", "for (int j = 4; j < SIZE / 2; ++j) a[j]")]),
    ("accumulators of mma.sync only written", MMA, [('"+f"(d[', '"=f"(d[')]),
    ("one accumulator of mma.sync only written", MMA, [('"+f"(d[3])', '"=f"(d[3])')]),
    ("accumulators of wgmma only written", WGMMA, [('"+f"(d[', '"=f"(d[')]),
    ("one accumulator of wgmma only written", WGMMA, [('"+f"(d[5])', '"=f"(d[5])')]),
    ("lanes read scores before all have left theirs", ALONE, [("rows_sync();\n        softmax.update", "softmax.update")]),
    ("lanes read row factors before all have left theirs", {**ALONE, "o_in": "registers"}, [("rows_sync();\n        rescale_o", "rescale_o")]),
    ("lanes stage a block over one that others still read", WMMA, [("            }\n            __syncwarp();\n", "            }\n")]),
    ("lanes read staged outputs before all have left theirs", STAGED, [("// 16 bytes per lane\n    __syncwarp();", "")]),
    ("lane 0 gives Q's place back before the others are done", PERSISTENT, [("        __syncwarp();\n        q.release(0);", "        q.release(0);")]),
    ("barriers not awaited once initialised", WGMMA, [("tiles.init();\n    block_sync();", "tiles.init();")]),
    ("warpgroups share a named barrier", {**TMA_STORE, "tile_m": 192}, [("named_barrier_sync(8 + consumer, 128)", "named_barrier_sync(8, 128)")]),
    ("one warpgroup alone gives places back", WGMMA, [("CLUSTER * consumer_warps : consumer_warps", "CLUSTER * consumer_warps : 4"), ("if (lane() == 0) barrier_arrive(empty_of(i))", "if (lane() == 0 && threadIdx.x < 128) barrier_arrive(empty_of(i))")]),
    ("one warp alone fences P", SHARED_P, [("    async_proxy_fence();\n    __syncwarp();\n}", "    if (warp() % 4 == 0) async_proxy_fence();\n    __syncwarp();\n}")]),
    ("one warp alone fences O", TMA_STORE, [("    async_proxy_fence();\n    tiles.warpgroup_sync();\n    if (threadIdx", "    if (warp() % 4 == 0) async_proxy_fence();\n    tiles.warpgroup_sync();\n    if (threadIdx")]),
    ("shared memory begins where static bytes end", WMMA, [("extern __shared__ __align__(128) ", STATIC_BYTES)]),
    ("shared memory begins where static bytes end", WGMMA, [("extern __shared__ __align__(1024) ", STATIC_BYTES)]),
    ("shared memory aligned for TMA but not for its swizzle", WGMMA, [("extern __shared__ __align__(1024) ", STATIC_BYTES + "__align__(128) ")]),
]  # fmt: skip
PLANTED = [
    pytest.param(config, problem, pairs, id=f"{name}-{config['family']}-{'half' if problem == HALF else 'bfloat'}")
    for name, config, pairs in FAULTS
    for problem in (HALF, BFLOAT)
]
CONFIGS = [*FAMILIES.values(), ALONE, SHARED_P, STAGED, TMA_STORE, PERSISTENT]


def variant(gate, wanted):
    """A valid configuration with the wanted values: a start point, moved."""
    start = next(c for c in gate.space.starts if c["family"] == wanted["family"])
    valid = ({**c, **wanted} for c in (start, *gate.draw(400, seed=3)) if c["family"] == wanted["family"])
    return next(c for c in valid if gate.space.why_invalid(c) is None)


def broken(gate, config, pairs) -> Source:
    source = gate.source(config)
    for old, new in pairs:
        assert old in source.text, f"the template has no {old!r} any more"
        source = Source(source.text.replace(old, new), source.entry, source.launch)
    return source


# one fault of each class; the others of a class run with `make test-all`
FAST = (
    "row_max never set-scalar",
    "outputs never set-mma",
    "lanes read scores before all have left theirs",
    "warpgroups share a named barrier",
)


@pytest.mark.parametrize(("config", "problem", "pairs"), representatives(PLANTED, *FAST))
def test_a_planted_fault_is_caught(attention_gate, config, problem, pairs):
    gate = attention_gate(MANY if config.get("schedule") else problem)
    config = variant(gate, config)
    found = gate.judge(config, broken(gate, config, pairs))
    assert found.outcome in (Outcome.INCORRECT, Outcome.CRASHED, Outcome.HUNG), "the fault escaped"
    assert found.reason


@pytest.mark.parametrize("problem", [BFLOAT, *more([HALF])])
@pytest.mark.parametrize(
    "config",
    [CONFIGS[1], *more(c for c in CONFIGS if c is not CONFIGS[1])],
    ids=lambda c: "-".join(map(str, c.values())),
)
def test_the_good_kernel_beside_it_passes(attention_gate, config, problem):
    gate = attention_gate(MANY if config.get("schedule") else problem)
    verdict = gate.judge(variant(gate, config))
    assert verdict.correct, verdict.reason


@pytest.mark.parametrize("config", [WGMMA, *more([SCALAR, WMMA, MMA])], ids=["wgmma", "scalar", "wmma", "mma"])
def test_static_bytes_before_shared_memory_of_a_declared_alignment_are_no_fault(attention_gate, config):
    gate = attention_gate(HALF)
    config = variant(gate, config)
    verdict = gate.judge(config, broken(gate, config, [("extern __shared__ ", STATIC_BYTES)]))
    assert verdict.correct, verdict.reason
