"""The decode kernels are right in the executor and the emulator, broken ones are not; problems, figures and cells."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from evoengine.errors import UsageError
from evoengine.records import CompiledCandidate, Outcome, Plans
from evoengine.search.evaluators import full_plan, gate_plan, make_plans
from evoengine.stages.compile import compile_source
from evoengine.stages.gate import executor, judge_whole
from evoengine.stages.predict import predict_binary
from evoengine.workloads import parse_problem
from evoengine.workloads.base import Case
from evoengine.workloads.decode.tensors import OUTSIDE
from tests.support.exhaustive import more, planted, representatives
from tests.support.kernel_gate import execute

PAGED, PLAIN = "decode:b4,h8,kv2,s1000,d64,fp16,page16", "decode:b4,h8,kv2,s1000,d64,fp16"
QUERIES = "decode:b2,h12,kv2,s777,sq5,d128,bf16,page7"
WINDOW = "decode:b2,h8,kv2,s600,sq3,d64,fp16,page16,window70"
CAPPED = "decode:b2,h8,kv2,s300,sq2,d64,fp16,page16,softcap30,alibi,sinks"
BYTES = "decode:b4,h8,kv2,s1000,d128,bf16,cache_fp8_e4m3,page16"
HALVES = "decode:b3,h8,kv4,s500,d64,fp16,cache_fp8_e4m3"
LATENT = "decode:b2,h24,kv1,s300,d576,bf16,page64"
ROWS = "decode:b2,h70,s200,sq2,d576,fp16"
LATENT_CAPPED = "decode:b2,h20,kv1,s300,sq2,d576,bf16,page16,window70,softcap30,alibi,sinks"
LATENT_WIDE = "decode:b2,h40,kv1,s300,sq3,d576,bf16,page64"
LATENT_WIDE_CAPPED = "decode:b2,h64,kv1,s300,sq2,d576,bf16,page7,window70,softcap30,alibi,sinks"
SHARED = {"family": "last_block", "tile_m": 16, "tile_n": 16, "warps": 4, "row_warps": 1, "stages": 2, "splits": 3}
GROUPS = {"family": "two_kernels", "tile_m": 32, "tile_n": 16, "warps": 4, "row_warps": 2, "stages": 2, "splits": 2}
WIDE = {"family": "wgmma", "tile_m": 64, "tile_n": 64, "stages": 2, "splits": 2}
NARROW = {"family": "wgmma", "tile_m": 64, "tile_n": 32, "stages": 3, "splits": 1}
ONE = {"family": "last_block", "splits": 1, "warps": 2, "tile_n": 16, "stages": 3}
LAST = {"family": "last_block", "splits": 4, "warps": 2, "tile_n": 32, "stages": 2}
TWO = {"family": "two_kernels", "splits": 3, "warps": 2, "tile_n": 16, "stages": 2}

FAULTS = [
    # name, configuration, problem, text of the good kernel, text of the broken one
    ("mask lost at the length", ONE, PAGED, "first + TILE_N > work.seen", "false"),
    ("mask one key too late", ONE, PLAIN, "return key >= visible", "return key > visible"),
    ("mask of the last query for all", ONE, QUERIES, "length - seq_q + 1 + (first_row + row) / group", "length"),
    ("mask of a query too early", TWO, QUERIES, "length - seq_q + 1 +", "length - seq_q +"),
    ("keys behind the length read", ONE, PLAIN, "k, lane(), work.length - first, offset_of", "k, lane(), TILE_N, offset_of"),
    ("values behind the length read", LAST, PAGED, "v, lane(), work.length - first, offset_of", "v, lane(), TILE_N, offset_of"),
    ("page of the key before", TWO, PAGED, "pages[key / PAGE] * PAGE", "pages[max(0, key - 1) / PAGE] * PAGE"),
    ("pages in order", ONE, PAGED, "pages[key / PAGE] * PAGE", "(pages[0] + key / PAGE) * PAGE"),
    ("table of the first sequence for all", LAST, PAGED, "block_table + (long long)work.sequence * slots", "block_table"),
    ("place in a page taken for a power of two", ONE, QUERIES, "key % PAGE", "(key & 7)"),
    ("slots of the tile before", ONE, PAGED, "        find(i + 1);", "        find(i);"),
    ("cache of another KV head", TWO, PAGED, "long long own = work.kv_head * HEAD_DIM;", "long long own = 0;"),
    ("head off by one in its group", ONE, PAGED, "q + work.row_index(row) *", "q + work.row_index(min(row + 1, work.rows - 1)) *"),
    ("queries and heads exchanged in a tile", ONE, QUERIES, "seq_q + i / group) * heads + head + i % group", "seq_q + i % seq_q) * heads + head + i / seq_q"),
    ("rows of the second tile are the first's", ONE, "decode:b1,h19,kv1,s300,d64,bf16,page16", "int i = first_row + row;", "int i = row;"),
    ("tile read before it has landed", ONE, PAGED, "copy_async_wait<STAGES - 2>();", "copy_async_wait<STAGES - 1>();"),
    ("buffer filled while it is read", ONE, PAGED, "        request(i + STAGES - 1);\n    }", "        request(i + STAGES);\n    }"),
    ("warps merge before they are done", LAST, PAGED, "__syncthreads();  // no copy", "// no copy"),
    ("merge reads what is not written yet", ONE, PAGED, "    __syncthreads();\n#pragma unroll 2", "#pragma unroll 2"),
    ("outputs of earlier tiles not rescaled", ONE, PAGED, "    out.scale_rows(rescale);\n", ""),
    ("stale maximum", ONE, PAGED, "row_max = top;\n        row_sum *= factor", "row_sum *= factor"),
    ("warps merged without their maxima", ONE, PAGED, "exp2_approx(state.x - top) : 0.0f;\n            float4", "1.0f : 0.0f;\n            float4"),
    ("last warp left out", ONE, PAGED, "for (int w = 0; w < WARPS; ++w) {", "for (int w = 0; w < WARPS - 1; ++w) {"),
    ("splits combined without their maxima", TWO, PAGED, "exp2_approx(state.x - top) : 0.0f;\n    float sum", "1.0f : 0.0f;\n    float sum"),
    ("last split left out", TWO, PAGED, "split < SPLITS; ++split", "split < SPLITS - 1; ++split"),
    ("steps lost where splits do not divide them", LAST, PLAIN, "int((blockIdx.x + 1) * (long long)all / SPLITS) - first_step", "all / SPLITS"),
    ("a split without keys is not told", TWO, PAGED, "if (column == 0) states[place]", "if (column == 0 && sum > 0.0f) states[place]"),
    ("count of splits never set back", LAST, PAGED, "if (count == SPLITS - 1) *arrived = 0;", ""),
    ("last but one block combines", LAST, PAGED, "return *before == SPLITS - 1;", "return *before == SPLITS - 2;"),
    ("parts not made visible", LAST, PAGED, "atom.add.acq_rel", "atom.add.relaxed"),
    ("sums in a half", TWO, PLAIN, "float2(top, sum);", "float2(top, __half2float(__float2half(sum)));"),
    ("window a key too wide", ONE, WINDOW, "key < visible - WINDOW", "key < visible - WINDOW - 1"),
    ("window a key too narrow", ONE, WINDOW, "key < visible - WINDOW", "key <= visible - WINDOW"),
    ("window of the first row for the last too", ONE, WINDOW, " || first < work.unseen", ""),
    ("a step too many left out before the window", TWO, WINDOW, "max(0, seen - WINDOW) / (WARPS * TILE_N)", "(max(0, seen - WINDOW) + WARPS * TILE_N - 1) / (WARPS * TILE_N)"),
    ("cap of twice the height", ONE, CAPPED, "(scale * (2.0f * LOG2_E / 30.0f))) + 1.0f;\n        s.d[i] = 30.0f * LOG2_E - __fdividef(60.0f * LOG2_E, cut);", "(scale * (2.0f * LOG2_E / 60.0f))) + 1.0f;\n        s.d[i] = 60.0f * LOG2_E - __fdividef(120.0f * LOG2_E, cut);"),
    ("no cap", ONE, CAPPED, "s.d[i] = 30.0f * LOG2_E - __fdividef(60.0f * LOG2_E, cut);", "s.d[i] *= scale * LOG2_E;"),
    ("slope of the first head for all", ONE, CAPPED, "slopes[work.head_of(", "slopes[work.head + 0 * work.head_of("),
    ("distance from the last query for all", TWO, CAPPED, "int position = work.visible(first_row + s.row(s.half(i))) - 1;", "int position = work.length - 1;"),
    ("sink in every split", TWO, CAPPED, "if (blockIdx.x == 0) {\n            float sink", "{\n            float sink"),
    ("sink of another head", ONE, CAPPED, "sinks[work.head_of(row)]", "sinks[work.head]"),
    ("scale of the first head's keys for all", ONE, BYTES, "k_scale[work.kv_head]", "k_scale[0]"),
    ("scale of the first head's values for all", TWO, BYTES, "v_scale[work.kv_head]", "v_scale[0]"),
    ("scale of the values for keys", ONE, BYTES, "scale *= k_scale[", "scale *= v_scale["),
    ("bias of the exponents added, not multiplied", ONE, BYTES, "even = unbiased(even), odd = unbiased(odd);", "even += 0x3c003c00u, odd += 0x3c003c00u;"),
    ("bias of the exponents left in halves", TWO, HALVES, "WIDENED = 256.0f", "WIDENED = 128.0f"),
    ("signs of even columns lost", ONE, HALVES, "even = (bytes << 8 & SIGN) | ", "even = "),
    ("even and odd columns of values exchanged", ONE, BYTES, "widen(bytes[0], b[0], b[2]);", "widen(bytes[0], b[2], b[0]);"),
    ("queries in another order than keys", ONE, BYTES, "__byte_perm(x.word[0], x.word[1], 0x5410)", "x.word[0]"),
    ("outputs in the order of the tiles", ONE, HALVES, "make_float4(d[0], d[4], d[1], d[5])", "make_float4(d[0], d[1], d[4], d[5])"),
    ("latent: maxima of a warp's own keys alone", SHARED, LATENT, "* WARPS + lane() % WARPS] * scale", "* WARPS + place.part] * scale"),
    ("latent: maxima read before they are told", SHARED, LATENT, "place.meet();  // maxima are told", ""),
    ("latent: P read before it is written", GROUPS, ROWS, "place.meet();  // P is written", ""),
    ("latent: tile filled while warps read the one before", SHARED, LATENT, "        __syncthreads();\n        request(", "        request("),
    ("latent: columns of the first warp for all", SHARED, LATENT, "{tile, place.part * (COLUMNS / 8)}", "{tile, 0}"),
    ("latent: keys of the first warp for all", GROUPS, ROWS, "{tile, place.part * TILE_N}", "{tile, 0}"),
    ("latent: values begin behind the positions", SHARED, LATENT, "{tile, place.part * (COLUMNS / 8)}", "{tile, place.part * (COLUMNS / 8) + 8}"),
    ("latent: positions left out of the scores", SHARED, LATENT, "issue<KEY_DIM>(s,", "issue<HEAD_DIM>(s,"),
    ("latent: queries of the first rows for all", GROUPS, ROWS, "{shared_address(tile_q), place.first_row}", "{shared_address(tile_q), 0}"),
    ("latent: weights of the first rows for all", GROUPS, ROWS, "{shared_address(tile_p), place.first_row}", "{shared_address(tile_p), 0}"),
    ("latent: one barrier for all rows", GROUPS, ROWS, "named_barrier_sync(1 + row_warp,", "named_barrier_sync(1,"),
    ("latent: sums of a warp's own keys alone", SHARED, LATENT, "sum += sums[row * WARPS + part]", "sum += sums[row * WARPS + place.part]"),
    ("latent: slot of the key before", SHARED, LATENT, "int key = own + n * STEP;", "int key = max(0, own + n * STEP - 1);"),
    ("latent: keys behind the length read", GROUPS, ROWS, "threadIdx.x, work.length - first_key(i), offset_of", "threadIdx.x, STEP_KEYS, offset_of"),
    ("latent: sink added to sums of another unit", SHARED | {"splits": 1}, LATENT_CAPPED, "sum = sum * factor + exp2", "sum = sum + exp2"),
    ("latent: a split without keys is not told", GROUPS, ROWS, "if (place.part == 0 && lane() % 4 == 0) states", "if (place.part == 0 && lane() % 4 == 0 && sum > 0.0f) states"),
    ("wgmma: mask lost at the length", NARROW, ROWS, "first + TILE_N > work.seen", "false"),
    ("wgmma: P not fenced for products", WIDE, ROWS, "        async_proxy_fence();\n        named_barrier_arrive", "        named_barrier_arrive"),
    ("wgmma: P read before it is written", NARROW, ROWS, "named_barrier_sync(3 + (own ^ 1), 128 * CONSUMERS);", ""),
    ("wgmma: P in the place of values", WIDE, ROWS, "TILE_N * HEAD_DIM * sizeof(T);  // of P", "TILE_N * (HEAD_DIM - 64) * sizeof(T);  // of P"),
    ("wgmma: keys behind the length read", NARROW, ROWS, "work.first_key(i) + row(n) < work.length);", "true);"),
    ("wgmma: slots of the tile before", WIDE, LATENT_WIDE, "            find(i + 1);", "            find(i);"),
    ("wgmma: slot of the key before", NARROW, LATENT_WIDE, "cache.slot(key) : 0", "cache.slot(max(0, key - 1)) : 0"),
    ("wgmma: columns of the other warpgroup", WIDE, ROWS, "own * (COLUMNS / 64) * TILE_N", "(own ^ 1) * (COLUMNS / 64) * TILE_N"),
    ("wgmma: columns of the first warpgroup for both", NARROW, ROWS, "own * (COLUMNS / 64) * TILE_N", "0 * TILE_N"),
    ("wgmma: outputs of earlier tiles not rescaled", WIDE, ROWS, "        out.scale_rows(rescale);\n", ""),
    ("wgmma: maxima of the own tile for the other's", WIDE, ROWS, "rescale(told[(own ^ 1) * TILE_M", "rescale(told[own * TILE_M"),
    ("wgmma: sums of one warpgroup alone", NARROW, ROWS, "sums[half] + told[(own ^ 1) * TILE_M + row]", "sums[half]"),
    ("wgmma: sums told while maxima are read", NARROW, ROWS, "named_barrier_sync(5, 128 * CONSUMERS);  // maxima are read", ""),
    ("wgmma: buffer released while it is multiplied", WIDE, ROWS, "        wait_for<0>(out);\n        tiles.release(i);", "        tiles.release(i);\n        wait_for<0>(out);"),
    ("wgmma: buffer released by one warpgroup", WIDE, ROWS, "tiles.init(4 * CONSUMERS);", "tiles.init(4);"),
    ("wgmma: buffer filled while it is read", NARROW, ROWS, "            tiles.acquire(i);\n", ""),
    ("wgmma: tile read before it has landed", WIDE, ROWS, "tiles.wait(i);\n        issue<KEY_DIM>", "issue<KEY_DIM>"),
    ("wgmma: positions left out of the scores", NARROW, ROWS, "issue<KEY_DIM>(s,", "issue<HEAD_DIM>(s,"),
    ("wgmma: weights of a row that has seen no key", NARROW, LATENT_WIDE, "top[half] = rows[half].row_max > MASKED * 1e-3f ? rows[half].row_max : 0.0f;", "top[half] = rows[half].row_max;"),
    ("wgmma: a split without keys is not told", WIDE, ROWS, "if (own == 0 && lane() % 4 == 0) states", "if (own == 0 && lane() % 4 == 0 && sum > 0.0f) states"),
    ("wgmma: first row not combined", WIDE, ROWS, "int row = warp(); row < work.rows", "int row = warp() + 1; row < work.rows"),
    ("a division by no keys", ONE, PAGED, "sum > 0.0f ? __fdividef(1.0f, sum) : 0.0f;\n        total", "__fdividef(1.0f, sum);\n        total"),
]  # fmt: skip
FAST = (
    "mask lost at the length",
    "pages in order",
    "buffer filled while it is read",
    "last split left out",
    "count of splits never set back",
    "scale of the first head's keys",
    "bias of the exponents added",
    "latent: maxima of",
    "latent: P read",
)


def completed(gate, wanted):
    of_mma = {} if wanted["family"] == "wgmma" else {"tile_m": 16, "layout": "swizzle", "min_blocks": 1}
    config = of_mma | ({"combine_warps": 4} if wanted["family"] == "two_kernels" else {}) | wanted
    config = {k.name: config[k.name] for k in gate.space.knobs if k.name in config}
    assert gate.space.why_invalid(config) is None
    return config


@planted(("wanted", "problem", "old", "new"), FAULTS, *FAST)
def test_a_planted_fault_is_caught(kernel_gate, wanted, problem, old, new):
    gate = kernel_gate(problem)
    config = completed(gate, wanted)
    assert gate.refutes(config, old, new), "the fault escaped"


DRAWN_FROM = (
    PAGED, QUERIES, WINDOW, CAPPED, "decode:b3,h6,s500,d256,fp16,page64", "decode:b2,h32,kv4,s3000,sq16,d128,bf16", "decode:b9,h4,kv1,s70,d64,bf16,page1",
    "decode:b3,h8,kv2,s900,sq2,d64,bf16,cache_fp8_e5m2,page16,window300", BYTES, HALVES, "decode:b2,h6,kv2,s700,d256,fp16,cache_fp8_e5m2,page7,softcap30,alibi,sinks",
    LATENT, LATENT_CAPPED, ROWS, LATENT_WIDE, LATENT_WIDE_CAPPED,
)  # fmt: skip


@pytest.mark.parametrize("number", [0, 1, *more(range(2, 100))])
def test_a_valid_configuration_passes_both_judges_and_visits_every_cell(kernel_gate, number):
    gate = kernel_gate(DRAWN_FROM[number % len(DRAWN_FROM)])
    config = gate.draw(100, seed=5)[number]
    source = gate.source(config)
    verdict = gate.judge(config, source, seed=number)
    assert verdict.outcome is None, f"{config}: {verdict.reason}"
    assert verdict.coverage.missing == ()
    binary = compile_source(source, gate.target.gpu.arch)
    candidate = CompiledCandidate(0, source, binary, config)
    verdict = judge_whole(
        executor(candidate), gate.target.workload, make_plans(gate.space, gate.target, config), number
    )
    assert verdict.outcome is None, f"{config}: {verdict.reason}"


def test_slopes_beside_large_scores_are_rounded_once(kernel_gate):
    """Rounding scores both in units of e and of 2 exceeds what is allowed in a third of the draws."""
    gate = kernel_gate("decode:b2,h8,kv8,s1024,d64,fp16,alibi")
    config = completed(gate, LAST)
    large = Plans([one for one in gate_plan(gate.space, gate.target, config) if one[0].draw == "logits"])
    source = gate.source(config)
    binary = compile_source(source, gate.target.gpu.arch)
    for seed in range(8):
        verdict = execute(gate.target.workload, source, binary, large, seed)
        assert verdict.outcome is None, verdict.reason


# --- keys beyond 16 bits

FAR = "decode:b4,h8,kv2,s200000,d128,bf16"
FAR_LATENT, FAR_WIDE = "decode:b2,h24,s200000,d576,bf16,page64", "decode:b2,h70,s200000,d576,bf16"
FAR_FAULTS = [
    ("keys of 16 bits", ONE, FAR, "return first + key;", "return first + (key & 0xffff);"),
    ("keys of 15 bits", ONE, FAR.replace("200000", "40000"), "return first + key;", "return first + (key & 0x7fff);"),
    ("places in the table of 16 bits", TWO, f"{FAR},page1", "pages[key / PAGE] * PAGE", "pages[(key & 0xffff) / PAGE] * PAGE"),
    ("the first key of a step of 16 bits", LAST, f"{FAR},page16", "* TILE_N; }\n\n    // A row of q", "* TILE_N & 0xffff; }\n\n    // A row of q"),
    ("latent: the first key of a step of 16 bits", SHARED, FAR_LATENT, "* STEP_KEYS; }", "* STEP_KEYS & 0xffff; }"),
    ("latent: keys of 16 bits", GROUPS, FAR_WIDE, "return first + key;", "return first + (key & 0xffff);"),
    ("wgmma: places in the table of 16 bits", WIDE, f"{FAR_WIDE},page1", "pages[key / PAGE] * PAGE", "pages[(key & 0xffff) / PAGE] * PAGE"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("wanted", "problem", "old", "new"),
    representatives([pytest.param(*f[1:], id=f[0]) for f in FAR_FAULTS], "keys of 15 bits"),
)
def test_a_key_numbered_by_too_few_bits_is_caught_where_a_sequence_has_as_many_keys(
    kernel_gate, wanted, problem, old, new
):
    gate = kernel_gate(problem)
    config = completed(gate, wanted)
    plan = Plans([one for one in gate_plan(gate.space, gate.target, config) if one[0].name == "far keys"])
    for source, outcome in (
        (gate.source(config), None),
        (gate.doctored(config, old, new), Outcome.INCORRECT),
    ):
        binary = compile_source(source, gate.target.gpu.arch)
        found = execute(gate.target.workload, source, binary, plan, 7)
        assert found.outcome == outcome, found.reason


# --- blocks of the problem's own launch

LARGE = "decode:b512,h32,kv8,s8192,d128,bf16,page16"
LARGE_LATENT = "decode:b512,h16,s8192,d576,bf16,page64"
LARGE_WIDE = "decode:b128,h64,s32768,d576,bf16,page16"
LARGE_WINDOW = "decode:b2,h8,kv2,s1500000,d128,bf16,page16,window4000"
FULL_FAULTS = [
    ("offsets of 32 bits", ONE, LARGE, "long long stride;", "int stride;"),
    ("pages of 16 bits", LAST, LARGE, "pages[key / PAGE] * PAGE", "(pages[key / PAGE] & 0xffff) * PAGE"),
    ("sequences of 8 bits", TWO, LARGE, "sequence = blockIdx.z;", "sequence = blockIdx.z & 255;"),
    ("combined rows of 12 bits", TWO, LARGE, "(long long)blockIdx.z * gridDim.y + blockIdx.y) * heads", "(long long)(blockIdx.z & 127) * gridDim.y + blockIdx.y) * heads"),
    ("states of combined rows of 12 bits", TWO, LARGE, "states + row * SPLITS", "states + (row & 4095) * SPLITS"),
    ("outputs of combined rows of 12 bits", TWO, LARGE, "partial + (row * SPLITS + split) * HEAD_DIM", "partial + ((row & 4095) * SPLITS + split) * HEAD_DIM"),
    ("lengths of 12 bits", ONE, LARGE, "length = lengths[sequence];", "length = lengths[sequence] & 4095;"),
    ("wgmma: offsets of latent keys of 32 bits", WIDE, LARGE_WIDE, "(long long)slots[n] * KEY_DIM", "slots[n] * KEY_DIM"),
    ("wgmma: pages of 16 bits", NARROW, LARGE_WIDE, "pages[key / PAGE] * PAGE", "(pages[key / PAGE] & 0xffff) * PAGE"),
    ("offsets of latent keys of 32 bits", SHARED, LARGE_LATENT, "slots[row / STEP] * (long long)KEY_DIM", "slots[row / STEP] * KEY_DIM"),
    ("places in the table of 16 bits", LAST, LARGE_WINDOW, "pages[key / PAGE] * PAGE", "pages[(key / PAGE) & 0xffff] * PAGE"),
    ("places in the table of 20 bits", ONE, LARGE_WINDOW.replace("page16", "page1"), "pages[key / PAGE] * PAGE", "pages[(key / PAGE) & 0xfffff] * PAGE"),
]  # fmt: skip


def full_size(gate, config, source):
    binary = compile_source(source, gate.target.gpu.arch)
    plans = Plans((), (), full_plan(gate.space, gate.target, config))
    return judge_whole(executor(CompiledCandidate(0, source, binary, config)), gate.target.workload, plans, 5)


@pytest.mark.parametrize(
    ("wanted", "problem", "old", "new"),
    representatives([pytest.param(*f[1:], id=f[0]) for f in FULL_FAULTS], "pages of 16 bits"),
)
def test_a_fault_that_no_small_case_shows_is_caught_at_full_size(kernel_gate, wanted, problem, old, new):
    gate = kernel_gate(problem)
    config = completed(gate, wanted)
    found = full_size(gate, config, gate.doctored(config, old, new))
    assert found.outcome in (Outcome.INCORRECT, Outcome.CRASHED) and found.reason


@pytest.mark.parametrize(
    ("wanted", "problem"),
    [
        (TWO, LARGE),
        *more(
            [
                (ONE, LARGE),
                (LAST, "decode:b512,h70,kv7,s4000,sq3,d128,fp16,softcap30,alibi,sinks,window600"),
                (ONE, "decode:b300,h32,kv8,s8192,d128,bf16,cache_fp8_e4m3,page16"),
                (ONE, f"{LARGE_WINDOW},alibi".replace("b2,h8,kv2", "b9,h64,kv64")),
                (SHARED, LARGE_LATENT),
                (WIDE, LARGE_WIDE),
                (NARROW, "decode:b9,h70,s3000,sq2,d576,fp16"),
                (GROUPS, "decode:b9,h70,s3000,sq2,d576,fp16"),
            ]
        ),
    ],
)
def test_a_right_kernel_passes_at_full_size(kernel_gate, wanted, problem):
    gate = kernel_gate(problem)
    config = completed(gate, wanted)
    found = full_size(gate, config, gate.source(config))
    assert found.outcome is None, found.reason
    combined = ["full grid, combined"] if wanted["family"] == "two_kernels" else []
    assert [case.name for case in found.cases] == ["full grid", *combined] and "blocks" in found.cases[0].part


# --- problems


@pytest.mark.parametrize(
    "text",
    [PAGED, PLAIN, QUERIES, "decode:b1,h4,kv4,s9,d256,bf16", WINDOW, CAPPED, BYTES, HALVES, LATENT, LATENT_CAPPED],
)
def test_a_problem_is_read_as_it_is_written(text):
    workload, problem = parse_problem(text)
    assert str(problem) == text and workload.parse(str(problem)) == problem


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("decode:b1,h4,s64,d64,fp16,page0", "pages of 0 keys; give the page at least one, or leave it out"),
        ("decode:b1,h4,s64,d64,fp16,page-4", "part 'page-4' that is not b, h, kv, sq, s, d, page, window, softcap with a number"),
        ("decode:b1,h4,kv3,s64,d64,fp16", "4 heads over 3 kv heads; heads must be a multiple of kv heads"),
        ("decode:b1,h4,s64,d96,fp16", "head_dim 96; the templates cover 64, 128, 256, 576"),
        ("decode:b1,h4,kv2,s64,d576,fp16", "head_dim 576, of latent attention, which has one KV head and a cache of the queries' dtype"),
        ("decode:b1,h4,s64,d576,fp16,cache_fp8_e4m3", "leave out kv and the cache's dtype"),
        ("decode:b1,h4,s64,sq17,d64,fp16", "seq_q 17; it must be from 1 to 16"),
        ("decode:b1,h4,s3,sq4,d64,fp16", "4 queries of each sequence and 3 keys"),
        ("decode:b1,h4,s64,d64,fp16,rope", "part 'rope' that is not b, h, kv, sq, s, d, page, window, softcap with a number, or fp16 or bf16 or cache_fp8_e4m3 or cache_fp8_e5m2 or alibi or sinks"),
        ("decode:b60000,h4,s65536,d64,fp16", "a cache of 3,932,160,000 keys; kernels number them by int32"),
    ],
)  # fmt: skip
def test_a_problem_that_cannot_be_is_refused_in_a_sentence(text, message):
    with pytest.raises(UsageError) as refused:
        parse_problem(text)
    assert message in str(refused.value)


def test_splits_beyond_the_steps_are_no_configurations(kernel_gate):
    space = kernel_gate("decode:b1,h4,s64,d64,fp16").space
    config = {"family": "two_kernels", "tile_m": 16, "tile_n": 32, "warps": 1, "stages": 2, "layout": "swizzle"}
    config |= {"splits": 3, "combine_warps": 4, "min_blocks": 1}
    assert space.why_invalid(config) == "splits beyond the steps of the longest sequence have no key"
    assert space.why_invalid({**config, "splits": 2}) is None


# --- what is drawn, and what is expected


def drawn(problem, draw="unequal", seed=3):
    workload, problem = parse_problem(problem)
    return workload.tensors(), problem, workload.tensors().draw(Case("any", problem, draw), seed).inputs


@pytest.mark.parametrize("draw", ["unequal", "one long", "shared", "pointing"])
def test_whatever_is_no_key_of_a_sequence_is_nan(draw):
    _, problem, inputs = drawn("decode:b9,h4,kv2,s130,sq2,d64,fp16,page16", draw)
    lengths, table = inputs["lengths"], inputs["block_table"]
    finite = ~inputs["k"].isnan().any(-1).any(-1)
    for page in range(problem.pages):
        used = [
            int(n) - 16 * j
            for n, row in zip(lengths, table, strict=True)
            for j in range(9)
            if row[j] == page and n > 16 * j
        ]
        assert int(finite[page].sum()) == min(16, max(used, default=0))
    behind = torch.arange(9) * 16 >= lengths[:, None]
    assert (table[behind] == OUTSIDE).all() and (table[~behind] < problem.pages).all()


@pytest.mark.parametrize("problem", [QUERIES, "decode:b3,h4,kv2,s50,sq4,d64,fp16"])
def test_the_reference_is_attention_over_each_sequence_s_own_keys(problem):
    tensors, problem, inputs = drawn(problem)
    found = tensors.reference(problem, inputs)["o"]
    caches = {name: inputs[name].view(-1, problem.kv_heads, problem.head_dim).double() for name in "kv"}
    for b, length in enumerate(inputs["lengths"].tolist()):
        for i in range(problem.seq_q):
            seen = max(0, length - problem.seq_q + i + 1)
            slots = [
                int(inputs["block_table"][b, j // problem.page]) * problem.page + j % problem.page
                if problem.page
                else b * problem.seq_k + j
                for j in range(seen)
            ]
            for head in (0, problem.heads - 1):
                k, v = (caches[name][slots, head // problem.group] for name in "kv")
                weights = torch.softmax(k @ inputs["q"][b, i, head].double() / math.sqrt(problem.head_dim), 0)
                assert torch.allclose(found[b, i, head], weights @ v)


def test_the_reference_of_a_cache_in_fp8_is_that_of_its_codes_times_their_scales():
    tensors, problem, inputs = drawn(HALVES)
    plain = replace(problem, cache="")
    scaled = {name: inputs[name].double() * inputs[f"{name}_scale"].double()[:, None] for name in "kv"}
    assert len({*inputs["k_scale"].tolist(), *inputs["v_scale"].tolist()}) > 2
    expected = tensors.reference(plain, inputs | scaled)["o"]
    assert torch.allclose(tensors.reference(problem, inputs)["o"], expected)


def test_the_reference_of_latent_attention_has_values_in_its_keys():
    tensors, problem, inputs = drawn("decode:b3,h4,s50,sq2,d576,fp16,page16")
    found = tensors.reference(problem, inputs)["o"]
    cache = inputs["kv"].view(-1, 576).double()
    for b, length in enumerate(inputs["lengths"].tolist()):
        slots = [int(inputs["block_table"][b, j // 16]) * 16 + j % 16 for j in range(length)]
        if length:
            weights = torch.softmax(inputs["q"][b, 1].double() @ cache[slots].T / math.sqrt(192), 1)
            assert torch.allclose(found[b, 1], weights @ cache[slots, :512])


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("kv2,s40,sq3,d64,fp16", "SDPA"),
        ("kv2,s40,d64,fp16,cache_fp8_e5m2", "SDPA"),
        ("kv2,s40,sq2,d64,fp16,window9,alibi", "SDPA"),
        ("s40,sq2,d576,fp16", "matmul and softmax"),
        ("kv2,s40,d64,fp16,softcap5,sinks,alibi", "matmul and softmax"),
        ("kv2,s40,sq3,d64,fp16,sinks,window9", "matmul and softmax"),
    ],
)
def test_a_baseline_has_the_values_of_the_reference_on_the_gathered_cache(kind, name):
    tensors, problem, inputs = drawn(f"decode:b2,h4,{kind},page16", "normal")
    assert tensors.baselines(problem) == (name,)
    found = tensors.baseline(name, problem, inputs)().transpose(1, 2)
    assert torch.allclose(found.double(), tensors.reference(problem, inputs)["o"], atol=2e-3)


@pytest.mark.parametrize("kind", ["s40,sq2,d576,fp16", "kv2,s40,sq3,d64,fp16,softcap5,sinks,alibi,window9"])
def test_a_baseline_reads_nothing_back_from_the_gpu(kind):
    """A GPU is timed only while the CPU is ahead of it; a tensor without data stands for one on a GPU."""
    tensors, problem, inputs = drawn(f"decode:b2,h4,{kind},page16", "normal")
    call = tensors.baseline("matmul and softmax", problem, inputs)
    _, *given = call.args
    without_data = [
        {name: x.to("meta") for name, x in one.items()} if isinstance(one, dict) else one.to("meta") for one in given
    ]
    assert call.func(problem, *without_data).shape == (2, 4, problem.seq_q, problem.head_dim_v)


def test_a_prediction_has_full_lengths_and_every_page_once():
    workload, problem = parse_problem(PAGED)
    made = {name: data.view(np.int32) for name, data in workload.indices(problem, {}, 0).items()}
    assert (made["lengths"] == 1000).all() and sorted(made["block_table"]) == [*range(problem.pages)]


# --- figures


def test_figures_count_each_key_and_value_once():
    workload, problem = parse_problem("decode:b32,h32,kv8,s8192,d128,bf16,page16")
    assert workload.flops(problem) == 4 * 32 * 32 * 8192 * 128
    cache, queries, table = 2 * 32 * 8192 * 8 * 128, 2 * 32 * 32 * 128, 32 * (512 + 1)
    assert workload.min_dram_bytes(problem) == 2 * (cache + queries) + 4 * table


def test_latent_attention_reads_a_key_with_its_value():
    workload, problem = parse_problem("decode:b32,h16,s8192,d576,bf16,page64")
    assert workload.min_dram_bytes(problem) == 2 * 32 * (8192 * 576 + 16 * (576 + 512)) + 4 * 32 * (128 + 1)
    assert workload.flops(problem) == 2 * 32 * 16 * 8192 * (576 + 512)


def test_a_cache_in_fp8_has_half_the_bytes():
    workload, problem = parse_problem("decode:b32,h32,kv8,s8192,d128,bf16,cache_fp8_e4m3,page16")
    cache, queries, table = 2 * 32 * 8192 * 8 * 128, 2 * 32 * 32 * 128, 32 * (512 + 1)
    assert workload.min_dram_bytes(problem) == cache + 2 * queries + 4 * table


def test_a_text_names_the_cache_only_where_it_has_a_dtype_of_its_own(kernel_gate):
    plain, fp8 = (kernel_gate(p) for p in (PAGED, PAGED + ",cache_fp8_e4m3"))
    first_lines = [g.source(g.start(ONE | {"warps": 4, "tile_n": 32})).text.partition("\n")[0] for g in (plain, fp8)]
    assert "cache" not in first_lines[0] and "cache fp8_e4m3" in first_lines[1]


COPY_GBS = 2760
"""of a large copy on an H100 (chips.toml: dram_turn_cost)"""


@pytest.mark.parametrize(
    ("batch", "cache", "config", "share"),
    [
        (32, "", {"family": "last_block", "splits": 1, "stages": 3}, 0.85),
        *more(
            [
                (4, "", {"family": "two_kernels", "splits": 4}, 0.7),
                (1, "", {"family": "last_block", "splits": 16}, 0.7),
                (32, "cache_fp8_e4m3,", {"family": "last_block", "splits": 1, "stages": 3}, 0.85),
                (4, "cache_fp8_e4m3,", {"family": "last_block", "splits": 8}, 0.7),
            ]
        ),
    ],
)
def test_starts_reach_the_memory_s_rate(kernel_gate, batch, cache, config, share):
    gate = kernel_gate(f"decode:b{batch},h32,kv8,s8192,d128,bf16,{cache}page16")
    config = gate.start(config)
    source = gate.source(config)
    candidate = CompiledCandidate(0, source, compile_source(source, gate.target.gpu.arch), config)
    found = predict_binary(gate.target, candidate)
    assert gate.target.min_dram_bytes / found.time_us / 1e3 > share * COPY_GBS
