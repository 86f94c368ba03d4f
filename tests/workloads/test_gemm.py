"""The matrix products are right on the emulator, broken ones are not, and figures count what the field counts."""

from __future__ import annotations

import pytest
import torch

from evoengine.cuda_files import disassembler
from evoengine.records import Outcome, Plans, Source
from evoengine.search.evaluators import gate_plan
from evoengine.stages.compile import compile_source
from evoengine.stages.verify import compare
from evoengine.workloads import parse_problem
from evoengine.workloads.base import Case
from tests.support.exhaustive import more, planted, representatives
from tests.support.kernel_gate import KernelGate, execute

PLAIN = "gemm:m4096,n4096,k4096,fp16"
BIAS, RELU = "gemm:m4096,n4096,k4096,bf16,bias", "gemm:m4096,n4096,k4096,bf16,bias_relu"
GELU = "gemm:m4096,n4096,k4096,fp16,bias_gelu"
ODD = "gemm:m1000,n777,k333,fp16,bias"
MMA, DEEP = {"family": "mma"}, {"family": "mma", "stages": 4}
SINGLE = {"family": "mma", "stages": 1}
LARGE = {"family": "mma", "tile_n": 256}
WGMMA, WIDE = {"family": "wgmma", "tile_m": 64}, {"family": "wgmma", "tile_n": 256, "schedule": "none"}
PAIRS = {"family": "wgmma", "schedule": "persistent", "cluster": "2x1", "c_store": "tma", "ping_pong": False}
ODD_SLABS = {"family": "wgmma", "schedule": "persistent", "tile_n": 192, "c_store": "tma"}
NARROW_SLABS = {"family": "wgmma", "tile_n": 160, "c_store": "tma"}
PING_PONG = {"family": "wgmma", "ping_pong": True}
HILBERT = {"family": "wgmma", "raster": "hilbert"}
FOUR = {"family": "wgmma", "split_k": 4}
FEW_ROWS, SPLIT = {"family": "wgmma", "swap": True}, {"family": "wgmma", "split_k": 2}
LINEAR, RESIDUAL = "gemm:m1000,n768,k3000,bf16,b_nk,bias_silu", "gemm:m1000,n768,k3000,fp16,residual"
BATCH, TRANSPOSED = "gemm:b4,m500,n768,k1000,fp16", "gemm:m1000,n768,k3000,fp16,a_km"
DECODE = "gemm:m16,n4096,k4096,bf16,b_nk"
MULTIPLY = "issue<TILE_K>(acc, operand_a,"
ROUND_SUMS = (
    "for (int s = 0; s < STRIPES; ++s) for (int e = 0; e < WARP_COLS / 2; ++e) acc[s].d[e] = to_float(T(acc[s].d[e]));"
)
LOW = "low + low_bias"

FAULTS = [
    # name, configuration, problem, text of the good kernel, text of the broken one
    ("missing barrier before a tile is replaced", SINGLE, PLAIN, "__syncthreads();  // all", "// all"),
    ("cp.async waited for too laxly", DEEP, PLAIN, "pipeline_wait<STAGES - 2>();", "pipeline_wait<STAGES - 1>();"),
    ("stage reused while it is read", DEEP, PLAIN, "load(i + STAGES - 1);", "load(i + STAGES);"),
    ("tail of K one element too far", SINGLE, ODD, "left = k - i * TILE_K;", "left = k - i * TILE_K + 1;"),
    ("a ninth element of each chunk", {**MMA, "layout": "swizzle"}, ODD, "for (int e = 0; e < 8; ++e) place[e]", "for (int e = 0; e <= 8; ++e) place[e]"),
    ("tail of K left out", WGMMA, PLAIN, "steps = ceil_div(k, TILE_K);", "steps = k / TILE_K;"),
    ("a row too many", WGMMA, PLAIN, "row < m &&", "row <= m &&"),
    ("an element behind an odd row", SINGLE, ODD, "if (col + 1 < to.n) place[1]", "place[1]"),
    ("words where rows are odd", SINGLE, ODD, "return n % 2 == 0;", "return true;"),
    ("last group of tiles as tall as the others", MMA, PLAIN, "min(GROUP_M, tiles_m - group * GROUP_M)", "GROUP_M"),
    ("uninitialised sums", MMA, PLAIN, "acc[i].clear();", ";"),
    ("sums kept in halves", LARGE, PLAIN, MULTIPLY, f"{ROUND_SUMS}\n        {MULTIPLY}"),
    ("sums rounded once on the way", LARGE, PLAIN, MULTIPLY, f"if (i == 1) {ROUND_SUMS}\n        {MULTIPLY}"),
    ("sums cut off to the dtype, not rounded", MMA, BIAS, LOW, f"__uint_as_float(__float_as_uint({LOW}) & 0xffff0000u)"),
    ("rounded before the bias", MMA, BIAS, LOW, "to_float(T(low)) + low_bias"),
    ("bias left out", WGMMA, BIAS, LOW, "low"),
    ("bias of the column beside", MMA, BIAS, "+ high_bias", "+ low_bias"),
    ("bias behind ReLU", MMA, RELU, f"activate({LOW})", "activate(low) + low_bias"),
    ("ReLU left out", WGMMA, RELU, "fmaxf(x, 0.0f)", "x"),
    ("GELU by a sigmoid", MMA, GELU, "0.5f * x * (1.0f + erff(x * 0.70710678f))", "x / (1.0f + expf(-1.702f * x))"),
    ("large results clamped", WGMMA, PLAIN, "activate(float x) {\n    return x;", "activate(float x) {\n    return fminf(x, 30000.0f);"),
    ("tiles multiplied from the wrong rows", MMA, PLAIN, "element_at(first, chunk)", "element_at(first ^ 1, chunk)"),
    ("buffer not waited for", WGMMA, PLAIN, "tiles.wait(i);", ""),
    ("buffer released too early", WIDE, PLAIN, "tiles.release(i - 1);", "tiles.release(i);"),
    ("a warp's release not waited for", WIDE, PLAIN, "4 * CONSUMERS)", "4 * CONSUMERS - 1)"),
    ("coordinates of a tile swapped", WGMMA, PLAIN, "work.first_row, k)", "k, work.first_row)"),
    ("a turn that is not handed on", PING_PONG, PLAIN, "    turn.end();", ""),
    ("the other consumer's steps not passed by", PING_PONG, PLAIN, "tiles.advance(EVERY * work.steps)", "tiles.advance(work.steps)"),
    ("both consumers begin with the first tile", PING_PONG, PLAIN, "PING_PONG ? consumer : 0, EVERY", "0, EVERY"),
    ("a multicast that leaves the other block out", PAIRS, PLAIN, "(1 << CLUSTER) - 1)", "1 << cluster_rank())"),
    ("both blocks bring the same half", PAIRS, PLAIN, "int first = cluster_rank() *", "int first = 0 *"),
    ("buffers released to the own block alone", PAIRS, PLAIN, "barrier_arrive_at(lane(), empty_of(i))", "barrier_arrive_at(cluster_rank(), empty_of(i))"),
    ("a buffer released before its products are done", PAIRS, PLAIN, "tiles.release(i - 1);", "tiles.release(i);"),
    ("the last step of a tile not released", PAIRS, PLAIN, "tiles.release(work.steps - 1);", ";"),
    ("a block that ends before the other has released", PAIRS, PLAIN, "if (MULTICAST) tiles.drain();", ""),
    ("barriers reached before they are set up", PAIRS, PLAIN, "if (CLUSTER_BLOCKS > 1) cluster_begin();\n    else", ""),
    ("C staged where it is still read", PAIRS, PLAIN, "tma_store_wait<1>();", "tma_store_wait<2>();"),
    ("C staged where the last of an odd number is still read", ODD_SLABS, PLAIN, "SLABS % 2 == 1 && slab == 0", "false"),
    ("narrow slabs of C where wide ones lie", NARROW_SLABS, PLAIN, "first_col + slab * 32", "first_col + slab * 64"),
    ("narrow slabs of C from the sums of wide ones", NARROW_SLABS, PLAIN, "acc.d + 16 * slab", "acc.d + 32 * slab % 80"),
    ("narrow slabs of B in the wrong order", NARROW_SLABS, PLAIN, "map, full, col + slab * CHUNKS * 8, row", "map, full, col + (SLABS - 1 - slab) * CHUNKS * 8, row"),
    ("C staged where the last of five slabs is still read", NARROW_SLABS, PLAIN, "SLABS % 2 == 1 && slab == 0", "false"),
    ("C not fenced before it leaves", PAIRS, PLAIN, "async_proxy_fence();\n        __syncwarp();\n        if (lane() == 0) {", "__syncwarp();\n        if (lane() == 0) {"),
    ("stores that outlive their block", PAIRS, PLAIN, "if (lane() == 0) tma_store_wait<0>();", ""),
    ("a tile too few for the last blocks", PAIRS, PLAIN, "return number < all;", "return number < all - 1;"),
    ("few rows: bias of the neighbour", FEW_ROWS, f"{DECODE},bias", "float bias = to.bias_of(col),", "float bias = to.bias_of(col ^ 1),"),
    ("few rows: a row too many", FEW_ROWS, DECODE, "row < m &&", "row <= m &&"),
    ("partial sums of the last block lost", SPLIT, DECODE, "block < SPLIT_K;", "block < SPLIT_K - 1;"),
    ("partial sums read before they are there", SPLIT, DECODE, "    cluster_sync();\n    if (cluster_rank() > 0) return", "    if (cluster_rank() > 0) return"),
    ("partial sums over tiles that are still multiplied", {**SPLIT, "consumers": 2}, DECODE, "named_barrier_sync(1, 128 * CONSUMERS);", ""),
    ("a step that two blocks do", SPLIT, DECODE, "part * share + min(part, left)", "part * share"),
    ("a block that ends before its sums are read", SPLIT, DECODE, "cluster_sync();  // another", "// another"),
    ("partial sums of the third of four blocks lost", FOUR, DECODE, "block < SPLIT_K; ++block", "block < SPLIT_K; block += 2"),
    ("squares of tiles that lie too near", HILBERT, PLAIN, "square / squares_m * side", "square / squares_m"),
    ("squares of tiles one above the other", HILBERT, PLAIN, "square % squares_m * side", "square % squares_m"),
    ("a curve that lies on itself where it turns", HILBERT, PLAIN, "col = turned;", ""),
    ("a curve that turns a tile too far", HILBERT, PLAIN, "s - 1 - row : row;", "s - row : row;"),
    ("SiLU of the other sign", WGMMA, LINEAR, "__expf(-x)", "__expf(x)"),
    ("rows of B along n where they run along k", WGMMA, LINEAR, "TRANSPOSED = false", "TRANSPOSED = true"),
    ("A along m by mma, a chunk too far", MMA, TRANSPOSED, "first_row / 8}", "first_row / 8 + 2}"),
    ("B along k by mma, not from its own columns", {**MMA, "warps_n": 2}, LINEAR, "tile + TileA::BYTES, first_col}", "tile + TileA::BYTES, 0}"),
    ("A along m, a stripe too far", {"family": "wgmma", "tile_m": 128}, TRANSPOSED, "first / 64 * TILE_K", "first / 64 * 2 * TILE_K"),
    ("residual of the column beside", MMA, RESIDUAL, "+ more.x", "+ more.y"),
    ("residual of the first entry", MMA, f"{BATCH},residual", "residual + before", "residual"),
    ("the batch's entries all of the first B", MMA, BATCH, "b += (long long)work.entry * k * n", "b += 0"),
    ("the batch's entries all of the first A", WGMMA, BATCH, "k, work.entry);\n        TileB", "k, 0);\n        TileB"),
]  # fmt: skip
FAST = (
    "cp.async waited for too laxly",
    "tail of K left out",
    "an element behind an odd row",
    "a warp's release not waited for",
    "a turn that is not handed on",
    "a multicast that leaves the other block out",
    "the batch's entries all of the first B",
)
"""one of synchronisation, of bounds, of what is computed and of precision"""


@planted(("wanted", "problem", "old", "new"), FAULTS, *FAST)
def test_a_planted_fault_is_caught(kernel_gate, wanted, problem, old, new):
    gate = kernel_gate(problem)
    assert gate.refutes(gate.configuration(wanted), old, new), "the fault escaped"


@pytest.mark.parametrize("number", [1, *more(n for n in range(16) if n != 1)])
@pytest.mark.parametrize(
    "problem",
    [
        ODD,
        "gemm:m1,n1,k1,bf16",
        "gemm:b3,m70,n72,k72,fp16,residual",
        *more([GELU, "gemm:m100,n200,k72,fp16,bias_relu"]),
    ],
)
def test_a_valid_configuration_passes(kernel_gate, problem, number):
    """The first start point, and others drawn from the space."""
    gate = kernel_gate(problem)
    config = (*gate.space.starts[:1], *gate.draw(16, seed=5))[number]
    verdict = gate.judge(config, seed=number)
    assert verdict.outcome is None, f"{config}: {verdict.reason}"


def test_rows_keep_the_alignment_that_the_problem_has():
    """A kernel may copy 16 bytes at once where the problem lets it, and must not where it does not."""
    for text, n_unit, k_unit in ((PLAIN, 8, 8), (ODD, 1, 1), ("gemm:m64,n100,k72,fp16", 4, 8)):
        workload, problem = parse_problem(text)
        cases = workload.cases(problem, {"tile_m": 64, "tile_n": 64, "tile_k": 32, "stages": 3})
        assert all(c.problem.n % n_unit == 0 and c.problem.k % k_unit == 0 for c in cases)
        assert any(c.problem.n % (2 * n_unit) for c in cases) and any(c.problem.k % (2 * k_unit) for c in cases)


def test_the_product_behind_an_epilogue_is_what_torch_computes():
    workload, problem = parse_problem("gemm:m5,n7,k3,fp16,bias_gelu")
    tensors = workload.tensors()
    inputs = tensors.draw(Case("one", problem), seed=1).inputs
    wide = {name: tensor.double() for name, tensor in inputs.items()}
    by_torch = torch.nn.functional.gelu(torch.addmm(wide["bias"], wide["a"], wide["b"]))
    assert torch.allclose(tensors.reference(problem, inputs)["c"], by_torch, rtol=1e-12)


def test_large_products_overflow_a_half_on_the_way_and_not_at_the_end():
    workload, problem = parse_problem("gemm:m4,n16,k64,fp16")
    tensors = workload.tensors()
    inputs = tensors.draw(Case("large", problem, "large products"), seed=1).inputs
    a, b = inputs["a"].double(), inputs["b"].double()
    partial = (a[:, :, None] * b[None]).cumsum(1)
    assert partial.abs().max() > 4 * 65504
    assert partial[:, -1].abs().max() < 65504


def test_samples_are_rows_of_the_whole_problem():
    workload, problem = parse_problem("gemm:m1000,n8,k16,fp16,bias")
    tensors = workload.tensors()
    inputs = tensors.draw(Case("whole", problem), seed=1).inputs
    whole = tensors.reference(problem, inputs)
    (sample,) = tensors.samples(problem, inputs, seed=2)
    assert 1 < sample.problem.m < problem.m
    own, taken = tensors.reference(sample.problem, sample.inputs)["c"], sample.take(whole)["c"]
    assert own.shape == taken.shape and torch.allclose(own, taken, rtol=1e-12)


def test_figures_count_the_product_alone():
    workload, problem = parse_problem("gemm:m10,n20,k30,bf16,bias_gelu")
    assert workload.flops(problem) == 2 * 10 * 20 * 30
    assert workload.min_dram_bytes(problem) == 2 * (10 * 30 + 30 * 20 + 10 * 20)


# ---- bytes

BLOCKS = "gemm:m1000,n768,k2048,fp8_e4m3,b_nk,block_scales"
ROWS, INTEGERS = "gemm:m1000,n768,k2048,fp8_e5m2,b_nk,row_scales,bias", "gemm:m1000,n768,k2048,int8,b_nk,row_scales"
SMALL = {"family": "wgmma", "tile_m": 64, "swap": False}
CONVERT, CUT = "__floats2bfloat162_rn(low, high)", "__uint_as_float(__float_as_uint({}) & 0xffff0000u)"
BYTE_FAULTS = [
    ("scales of the other row", BLOCKS, "i % 2 * 8;", "(i + 1) % 2 * 8;"),
    ("scales of the step before", BLOCKS, "load(step + TOGETHER);", "load(step + TOGETHER - 1);"),
    ("scales of the same step for all four", BLOCKS, "lane() / 4 * 4 + step % 4", "lane() / 4 * 4"),
    ("scales of the first four of eight steps", BLOCKS, "EACH == 1 || step % TOGETHER < 4", "true"),
    ("scales of the first columns", BLOCKS, "of_b + (col * (last + 1) + block)", "of_b + block"),
    ("scales of columns left out", BLOCKS, "rows[each][i / 2][i % 2] * columns[each]", "rows[each][i / 2][i % 2]"),
    ("a step released before its products are done", BLOCKS, "wait_for<1>(sums);\n            tiles.release(i);", "tiles.release(i);\n            wait_for<1>(sums);"),
    ("a step's products not waited for", BLOCKS, "wait_for<1>(sums);", "warpgroup_fence_operand(sums.d);"),
    ("the last step's products not waited for", BLOCKS, "wait_for<0>(sums);\n            tiles", "warpgroup_fence_operand(sums.d);\n            tiles"),
    ("sums of a step added to those before", BLOCKS, "begin_step(sums, tiles, i, first, 0);", "begin_step(sums, tiles, i, first, i > 1);"),
    ("the next step's products in the same sums", BLOCKS, "add_beside(even, i + at, odd);", "add_beside(even, i + at, even);"),
    ("factors of rows and columns exchanged", ROWS, "__ldg(of_a + row)", "__ldg(of_b + min(row, n - 1))"),
    ("factors behind the bias", ROWS, "float(sum) * (row_scale * col_scale)", "float(sum)"),
    ("half of K", ROWS, "    k /= 2;\n", "    k /= 4;\n"),
    ("sums of integers in 16 bits", INTEGERS, "float(sum) * (", "float((short)sum) * ("),
    ("C cut off, not rounded", ROWS, CONVERT, CONVERT.replace("(low, high)", f"({CUT.format('low')}, {CUT.format('high')})")),
    ("C cut off, not rounded, by blocks of scales", BLOCKS, CONVERT, CONVERT.replace("(low, high)", f"({CUT.format('low')}, {CUT.format('high')})")),
    ("factors of the next column", INTEGERS, "__ldg(of_b + col)", "__ldg(of_b + (col ^ 1))"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("problem", "old", "new"),
    representatives([pytest.param(*f[1:], id=f[0]) for f in BYTE_FAULTS], "scales of the step before", "sums of int"),
)
def test_a_fault_planted_in_products_of_bytes_is_caught(kernel_gate, problem, old, new):
    gate = kernel_gate(problem)
    assert gate.refutes(gate.configuration(SMALL), old, new), "the fault escaped"


RELEASE = "if (stripe == STRIPES - 1) tiles.release(i);"


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("old", "new"),
    [
        (f"wait_for<0>(sums);\n                {RELEASE}", f"{RELEASE}\n                wait_for<0>(sums);"),
        ("wait_for<0>(sums);\n                if", "warpgroup_fence_operand(sums.d);\n                if"),
        ("first + stripe * 64, 0);", "first + stripe * 64, stripe > 0);"),
        ("add(sums, i, stripe);", "add(sums, i, 0);"),
    ],
    ids=["released early", "not waited for", "added to those of the rows before", "scales of the first rows"],
)
def test_a_fault_planted_in_products_of_bytes_of_128_rows_is_caught(kernel_gate, old, new):
    gate = kernel_gate(BLOCKS)
    config = gate.configuration({"family": "wgmma", "tile_m": 128, "consumers": 1})
    assert gate.refutes(config, old, new), "the fault escaped"


@pytest.mark.parametrize("problem", [BLOCKS, ROWS, "grouped-gemm:rows=300+1,n264,k512,fp8_e4m3,b_nk,block_scales"])
def test_roundings_of_products_of_bytes_are_judged_where_their_sums_are_exact(problem):
    """C as it is rounded passes under every seed, and never where it is cut off to bfloat16."""
    workload, parsed = parse_problem(problem)
    cases = workload.cases(parsed, {"family": "wgmma", "tile_m": 64, "tile_n": 128, "tile_k": 128, "stages": 4})
    case = next(case for case in cases if case.draw in workload.tensors().independent)
    for seed in range(20):
        drawn = workload.tensors().draw(case, seed)
        expected = workload.tensors().reference(case.problem, drawn.expected)
        cut = (expected["c"].float().view(torch.int32) & -0x10000).view(torch.float32)
        for found, correct in ((expected["c"], True), (cut, False)):
            result = compare(workload, case, drawn, {"c": found.to(torch.bfloat16)}, seed, expected)
            assert result.correct == correct, result.reason


# ---- SwiGLU

GATED = "gemm:m1000,n768,k1024,bf16,b_nk,swiglu"
GATED_FAULTS = [
    ("gate and up exchanged", "acc.d[i] / (1.0f + __expf(-acc.d[i])) * acc.d[i + found.SIZE]", "acc.d[i + found.SIZE] / (1.0f + __expf(-acc.d[i + found.SIZE])) * acc.d[i]"),
    ("up of the column beside", "* acc.d[i + found.SIZE]", "* acc.d[(i ^ 1) + found.SIZE]"),
    ("no SiLU", "/ (1.0f + __expf(-acc.d[i]))", ""),
    ("the first B twice", "map_b_up, tiles.full_of(i)", "map_b, tiles.full_of(i)"),
    ("the second B from the first one's place", "+ Half::BYTES, map_b_up", ", map_b_up"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("old", "new"), representatives([pytest.param(*f[1:], id=f[0]) for f in GATED_FAULTS], "up of the column")
)
def test_a_fault_planted_in_a_gated_product_is_caught(kernel_gate, old, new):
    gate = kernel_gate(GATED)
    assert gate.refutes(gate.configuration({"family": "wgmma", "tile_m": 64, "tile_n": 64}), old, new), "it escaped"


TWO = {"family": "mma", "tile_m": 64, "tile_n": 64}
ROWS_OF_N = "gemm:b3,m300,n201,k77,fp16,swiglu,residual"
MMA_GATED_FAULTS = [
    ("the first B twice", GATED, "else second.read(b,", "else first.read(b,"),
    ("both B exchanged", GATED, "if (j < WARP_COLS / 8) first", "if (j >= WARP_COLS / 8) first"),
    ("columns of the second B that begin where the first one's end", GATED, "j - WARP_COLS / 8);", "j);"),
    ("the second B's tile in the first one's place", GATED, "tile_b + TileB::BYTES / sizeof(T);", "tile_b;"),
    ("a step of the second B behind", GATED, "b_up + i * TILE_K, k", "b_up + max(i - 1, 0) * TILE_K, k"),
    ("the second B of the first columns", GATED, "b_up += (long long)work.first_col * k;", ""),
    ("the second B's rows one too far apart", ROWS_OF_N, "load<TileB>(tile_up, b_up + (long long)i * TILE_K * n, n,", "load<TileB>(tile_up, b_up + (long long)i * TILE_K * n, n + 1,"),
    ("the second B of the first entry", ROWS_OF_N, "b_up += (long long)work.entry * k * n;", ""),
    ("buffers as of one B", GATED, "TileA::BYTES + 2 * TileB::BYTES> Tiles", "TileA::BYTES + TileB::BYTES> Tiles"),
    ("gate and up exchanged", GATED, "acc.d[i] / (1.0f + __expf(-acc.d[i])) * acc.d[i + found.SIZE]", "acc.d[i + found.SIZE] / (1.0f + __expf(-acc.d[i + found.SIZE])) * acc.d[i]"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("problem", "old", "new"),
    representatives([pytest.param(*f[1:], id=f[0]) for f in MMA_GATED_FAULTS], "both B exch"),
)
def test_a_fault_planted_in_a_gated_product_by_mma_is_caught(kernel_gate, problem, old, new):
    gate = kernel_gate(problem, "a100")
    assert gate.refutes(gate.configuration(TWO), old, new), "it escaped"


def test_a_pipeline_of_twelve_buffers_passes_with_every_cell_visited(kernel_gate):
    gate = kernel_gate("gemm:m64,n8192,k8192,bf16")
    verdict = gate.judge(gate.start({"stages": 12}))
    assert verdict.correct, verdict.reason
    assert verdict.coverage is not None and verdict.coverage.missing == ()


@pytest.mark.parametrize(
    ("problem", "gpu", "wanted"),
    [
        ("gemm:m300,n200,k328,fp16,swiglu,residual", "h100", {**TWO, "family": "wgmma"}),
        ("gemm:m300,n200,k328,fp16,swiglu,residual", "a100", TWO),
        *more([(GATED, "h100", {**TWO, "family": "wgmma"}), (GATED, "l4", TWO), (ROWS_OF_N, "rtx5090", TWO)]),
    ],
)
def test_a_gated_product_passes(kernel_gate, problem, gpu, wanted):
    gate = kernel_gate(problem, gpu)
    verdict = gate.judge(gate.configuration(wanted))
    assert verdict.correct, verdict.reason
    assert verdict.coverage is not None and verdict.coverage.missing == ()


@pytest.mark.exhaustive
@pytest.mark.parametrize("number", range(12))
def test_a_drawn_gated_product_by_mma_passes(kernel_gate, number):
    problem, gpu = [(GATED, "a100"), (ROWS_OF_N, "a10"), ("gemm:m700,n520,k1024,bf16,swiglu", "b200")][number % 3]
    gate = kernel_gate(problem, gpu)
    config = gate.draw(1, seed=number)[0]
    verdict = gate.judge(config, seed=number)
    assert verdict.outcome is None, f"{config}: {verdict.reason}"


@pytest.mark.skipif(disassembler() is None, reason="needs nvdisasm")
@pytest.mark.exhaustive
def test_sums_of_fp8_that_the_tensor_cores_keep_are_refuted_by_the_machine_code(kernel_gate):
    """The emulator sums in float; only the executor cuts off sums of FP8 as tensor cores do."""
    gate = kernel_gate("gemm:m1000,n768,k4096,fp8_e4m3,b_nk")
    config = gate.configuration(SMALL)
    good = gate.source(config)
    text = good.text
    for old, new in (
        ("StepSums even, odd;", "StepSums even;\n        StepSums& odd = even;"),
        ("begin_step(sums, tiles, i, first, 0);", "begin_step(sums, tiles, i, first, i > 0);"),
        ("wait_for<1>(sums);", "wait_for<0>(sums);"),
        ("            add(sums, i, 0);", "            if (i + 1 == work.steps) add(sums, i, 0);"),
    ):
        assert old in text
        text = text.replace(old, new)
    plan = gate_plan(gate.space, gate.target, config)
    found = execute_source(gate, Source(text, good.entry, good.launch), plan)
    assert found.outcome is Outcome.INCORRECT and "long" in found.reason
    assert execute_source(gate, good, plan).correct


@pytest.mark.skipif(disassembler() is None, reason="needs nvdisasm")
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("gpu", "problem"),
    [
        ("l4", "gemm:m300,n520,k1024,fp8_e4m3,b_nk,block_scales"),
        ("a100", "gemm:m300,n520,k1024,int8,b_nk,row_scales,bias_relu,residual"),
        ("h100", "gemm:b3,m300,n520,k1024,fp8_e5m2,b_nk,row_scales,out_fp16,bias"),
    ],
)
def test_products_of_bytes_are_right_as_machine_code(gpu, problem):
    gate = KernelGate(problem, gpu)
    config = gate.space.starts[-1]
    plan = gate_plan(gate.space, gate.target, config)
    assert execute_source(gate, gate.source(config), plan).correct


def execute_source(gate, source, plan):
    binary = compile_source(source, gate.target.gpu.arch)
    return execute(gate.target.workload, source, binary, Plans(plan), seed=7)
