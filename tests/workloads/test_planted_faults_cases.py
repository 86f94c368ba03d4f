"""Faults that only certain lengths, logits, groups, grids or sums over many errors show, in every family that can have
them; all are caught by the gate on the emulator or by a screen of the binary."""

from __future__ import annotations

import pytest

from evoengine.gpu import find_gpu
from evoengine.paths import asset
from evoengine.records import Outcome
from evoengine.space.space import load_space
from evoengine.stages.compile import compile_source
from evoengine.stages.screen import screen_binary
from tests.support.exhaustive import more, representatives
from tests.support.kernel_gate import KernelGate

PLAIN = "b2,h4,s256,d64,fp16"
BF16 = "b2,h4,s256,d64,bf16"
CAUSAL = "b2,h8,s256,d64,bf16,causal,kv2"
WIDE_GROUP = "b2,h16,s256,d64,fp16,kv2"
ONE_KV_HEAD = "b2,h8,s256,d64,fp16,kv1"
MANY = "b8,h64,s256,d64,fp16"
# what is changed of the family's first start point
CONFIGS = {
    "scalar": {"stages": 2},
    "wmma": {"warps_n": 2, "stages": 2},
    "mma": {"stages": 2, "q_in": "registers", "v_wait": "with_k", "tile_m": 128, "tile_n": 64, "warps": 8},
    "wgmma": {"tile_m": 128, "tile_n": 128, "rescale_above": 8, "exp2_on_fma": 0.5},
}
ALL = tuple(CONFIGS)

EXP2 = 'float y;\n    asm volatile("ex2'
MASKED = "constexpr float MASKED = -1e30f;"
KV_HEAD = "kv_head = head / (heads / kv_heads);"
DIAGONAL = "diagonal = seq_k - seq_q;"
POLYNOMIAL = "fmaf(fmaf(fmaf(0.05517167f, f, 0.24261113f), f, 0.69326097f), f, 0.99992806f)"
HALF = "__half2float(__float2half({}))"
RISEN = "float top = fmaxf(row_max, lanes_max<LANES>(tile_max));"
SCALED = "rescale_o(out[i], rescale);"


def everywhere(name, old, new, problem=PLAIN):
    return [(name, family, problem, old, new) for family in ALL]


def mask_begins_late(name, keys, problem):
    """In wgmma each warpgroup counts the tiles that its rows see wholly."""
    seen, whole = "return visible(0, tile) < TILE_N", "whole = work.visible(first_row, 0)"
    found = [(family, f"{seen};", f"{seen} - {keys};") for family in ALL if family != "wgmma"]
    found.append(("wgmma", f"{whole} / TILE_N", f"whole = (work.visible(first_row, 0) + {keys}) / TILE_N"))
    return [(f"mask begins {name} late", family, problem, old, new) for family, old, new in found]


def lag(powers):
    """A maximum that stays behind by so many powers of two, in families whose P has 16 bits."""
    name = f"maximum lags by 2^{powers}"
    found = [("wgmma", "row_max + float(RESCALE_THRESHOLD)", f"row_max + {powers}.0f")]
    found += [
        (family, RISEN, f"{RISEN} if (top <= row_max + {powers}.0f) top = row_max;") for family in ("wmma", "mma")
    ]
    return [(name, family, PLAIN, old, new) for family, old, new in found]


FAULTS = [
    # name, family, problem, text of the good kernel, text of the broken one
    *everywhere("maximum starts at 0", "row_max = MASKED, ", "row_max = 0.0f, "),
    *everywhere("mask of -100", MASKED, MASKED.replace("-1e30f", "-100.0f")),
    *everywhere("mask of -1e4", MASKED, MASKED.replace("-1e30f", "-1e4f")),
    *everywhere("mask of a half's lowest number", MASKED, MASKED.replace("-1e30f", "-65504.0f"), CAUSAL),
    *lag(16),
    *lag(20),
    ("maximum lags by 2^128", "wgmma", BF16, "row_max + float(RESCALE_THRESHOLD)", "row_max + 128.0f"),
    ("sum in 16 bits", "scalar", PLAIN, "rows[i].row_sum += p_ij;", f"rows[i].row_sum = {HALF.format('rows[i].row_sum + p_ij')};"),
    ("sum in 16 bits", "wmma", PLAIN, "rows[pass].row_sum += sum_four(x[j]);", f"rows[pass].row_sum = {HALF.format('rows[pass].row_sum + sum_four(x[j])')};"),
    ("sum in 16 bits", "mma", PLAIN, "row.row_sum += s.d[i] + s.d[i + 1];", f"row.row_sum = {HALF.format('row.row_sum + s.d[i] + s.d[i + 1]')};"),
    ("sum in 16 bits", "wgmma", PLAIN, "row.row_sum += s.d[i] + s.d[i + 1];", f"row.row_sum = {HALF.format('row.row_sum + s.d[i] + s.d[i + 1]')};"),
    ("outputs in 16 bits", "scalar", PLAIN, "out[i][j] = out[i][j] * rescale[i];", f"out[i][j] = {HALF.format('out[i][j] * rescale[i]')};"),
    ("outputs in 16 bits", "wmma", PLAIN, "out[i][j].x[e] *= factor.x[e];", f"out[i][j].x[e] = {HALF.format('out[i][j].x[e] * factor.x[e]')};"),
    ("outputs in 16 bits", "mma", PLAIN, SCALED, f"for (int e = 0; e < out[i].SIZE; ++e) out[i].d[e] = {HALF.format('out[i].d[e] * rescale[out[i].half(e)]')};"),
    ("outputs in 16 bits", "wgmma", PLAIN, "        rescale_o(o, rescale);\n", f"        for (int i = 0; i < o.SIZE; ++i) o.d[i] = {HALF.format('o.d[i] * rescale[o.half(i)]')};\n"),
    *everywhere("weights never below 2^-20", EXP2, "x = fmaxf(x, -20.0f);\n    " + EXP2),
    *mask_begins_late("one key", 1, PLAIN),
    *mask_begins_late("two keys", 2, BF16),
    *mask_begins_late("one key, of a causal mask,", 1, CAUSAL),
    *everywhere("causal diagonal hidden among as many queries as keys", DIAGONAL, f"{DIAGONAL} diagonal -= seq_k == seq_q;", CAUSAL),
    *everywhere("causal diagonal one too far among as many queries as keys", DIAGONAL, f"{DIAGONAL} diagonal += seq_k == seq_q;", CAUSAL),
    *everywhere("at most four heads per KV head", KV_HEAD, "kv_head = head / min(heads / kv_heads, 4);", WIDE_GROUP),
    *everywhere("KV heads beyond a group of four taken from the next batch entry", KV_HEAD, "kv_head = head * kv_heads / heads + (heads / kv_heads > 4 && head == heads - 1);", ONE_KV_HEAD),
    ("weights of the polynomial never below 2^-24", "wgmma", PLAIN, "LEAST = -126.0f", "LEAST = -24.0f"),
    ("polynomial of degree 2", "wgmma", PLAIN, POLYNOMIAL, "fmaf(fmaf(0.24022651f, f, 0.69314718f), f, 1.0f)"),
]  # fmt: skip

KEEP = "__device__ __forceinline__ float keep(float x) {{ return __int_as_float((__float_as_int(x) + {}) & {}); }}\n"


def cut_to(bits):
    return KEEP.format(0, hex(2**32 - 2 ** (24 - bits)))


def rounded_to(bits):
    return KEEP.format(hex(2 ** (23 - bits)), hex(2**32 - 2 ** (24 - bits)))


# where P goes to the product; the sum keeps what is lost here
P = {
    "scalar": ("col_of(j)] = p_ij;", "col_of(j)] = keep(p_ij);"),
    "wmma": (
        "write_four(p + row * STRIDE_P + first",
        "x[j] = make_float4(keep(x[j].x), keep(x[j].y), keep(x[j].z), keep(x[j].w));\n"
        "                write_four(p + row * STRIDE_P + first",
    ),
    "mma": ("pack(d[2 * j], d[2 * j + 1])", "pack(keep(d[2 * j]), keep(d[2 * j + 1]))"),
    "wgmma": ("pack(d[2 * j], d[2 * j + 1])", "pack(keep(d[2 * j]), keep(d[2 * j + 1]))"),
}
LOSSES = [
    ("P cut to 5 bits", PLAIN, cut_to(5)),
    ("P cut to 6 bits", BF16, cut_to(6)),
    ("P cut to 7 bits", PLAIN, cut_to(7)),
    ("P cut to 7 bits", BF16, cut_to(7)),
    ("P through bf16", PLAIN, rounded_to(8)),
    ("P rounded to 7 bits", BF16, rounded_to(7)),
]


def variant(gate, family):
    """The family's first start point, moved to the values of CONFIGS."""
    config = {**gate.start({"family": family}), **CONFIGS[family]}
    assert gate.space.why_invalid(config) is None
    return config


def is_caught(found):
    assert found.outcome in (Outcome.INCORRECT, Outcome.CRASHED, Outcome.HUNG), "the fault escaped"
    assert found.reason


PLANTED = [pytest.param(*f[1:], id=f"{f[0]}-{f[1]}-{f[2][-4:]}") for f in FAULTS]
# one fault of each class; the others of a class run with `make test-all`
FAST = (
    "maximum starts at 0-scalar",
    "mask of -1e4-wmma",
)


@pytest.mark.parametrize(("family", "problem", "old", "new"), representatives(PLANTED, *FAST))
def test_a_planted_fault_is_caught(attention_gate, family, problem, old, new):
    gate = attention_gate(problem)
    config = variant(gate, family)
    is_caught(gate.judge(config, gate.doctored(config, old, new)))


LOST = [pytest.param(*x[1:], id=f"{x[0]}-{x[1][-4:]}") for x in LOSSES]


@pytest.mark.parametrize(("problem", "keep"), representatives(LOST, "P through bf16"))
@pytest.mark.parametrize("family", ["mma", *more(family for family in ALL if family != "mma")])
def test_a_loss_of_precision_in_p_is_caught(attention_gate, family, problem, keep):
    gate = attention_gate(problem)
    config = variant(gate, family)
    old, new = P[family]
    first = "// ---- online_softmax: "
    source = gate.doctored(config, old, new)
    assert first in source.text
    is_caught(gate.judge(config, type(source)(source.text.replace(first, keep + first), source.entry, source.launch)))


@pytest.mark.parametrize("problem", [CAUSAL, PLAIN, BF16, WIDE_GROUP, ONE_KV_HEAD])
@pytest.mark.exhaustive  # tests/workloads/test_planted_faults.py and its like show it of each family
@pytest.mark.parametrize("family", ALL)
def test_the_good_kernel_beside_it_passes(attention_gate, family, problem):
    gate = attention_gate(problem)
    verdict = gate.judge(variant(gate, family))
    assert verdict.outcome is None, verdict.reason


# ---- what the space says of the grid is not what the gate launches ----


@pytest.fixture
def natural_gate(tmp_path):
    """A gate whose space gives a persistent kernel as many blocks as it has tiles of rows, up to what runs at once."""
    text = (asset("search_spaces") / "attention.toml").read_text()
    assert "min(at_once, ceil_div(row_tiles, 3))" in text
    file = tmp_path / "space.toml"
    file.write_text(text.replace("min(at_once, ceil_div(row_tiles, 3))", "min(at_once, row_tiles)"))
    gate = KernelGate(MANY)
    gate.space = load_space(file, gate.problem, find_gpu("h100"), ("wgmma",))
    return gate


ROUNDS = [
    pytest.param("number += opaque(gridDim.x)", "number = all_heads * row_tiles()", id="one round only"),
    pytest.param("(before + i) / STAGES", "i / STAGES", id="phases begin at 0 again"),
    pytest.param("number += opaque(gridDim.x)", "number += opaque(gridDim.x) + 1", id="rounds too far apart"),
]


@pytest.mark.parametrize(("old", "new"), representatives(ROUNDS, "one round only"))
def test_a_persistent_kernel_is_judged_over_several_rounds_whatever_the_space_says(natural_gate, old, new):
    config = {**variant(natural_gate, "wgmma"), "schedule": "static"}
    assert natural_gate.judge(config).correct
    is_caught(natural_gate.judge(config, natural_gate.doctored(config, old, new)))


# ---- what only the binary shows ----


def screened(gate, config, source):
    gpu = find_gpu("h100")
    return screen_binary(compile_source(source, gpu.arch), source, gpu, gate.space.cost(config), timed=True)


@pytest.mark.parametrize("family", ["wgmma", *more(["mma"])])
def test_an_accumulator_that_the_compiler_takes_for_overwritten_is_caught(attention_gate, family):
    gate = attention_gate(PLAIN)
    config = variant(gate, family)
    found = screened(gate, config, gate.doctored(config, '"+f"(d[', '"=f"(d['))
    assert "tensor-core instructions" in found


LARGE_HEADS = ["b2,h64,s2048,d128,bf16,causal", "b2,h64,s2048,d256,fp16"]


HEADS = ["b2,h64,s2048,d32,fp16", *LARGE_HEADS]
COMPILED = [("wgmma", HEADS[0], 1), *more((family, problem, 2) for family in ALL for problem in HEADS)]
"""family, problem, and how many of its starts are compiled"""


@pytest.mark.parametrize(("family", "problem", "count"), COMPILED)
def test_a_good_binary_holds_all_products_of_a_tile(attention_gate, family, problem, count):
    gate = attention_gate(problem)
    for config in [c for c in gate.space.starts if c["family"] == family][:count]:
        assert screened(gate, config, gate.source(config)) is None
