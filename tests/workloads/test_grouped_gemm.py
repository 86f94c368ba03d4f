"""Grouped matrix products: kernels are right on the emulator, broken ones are not, bad problems are refused, and figures
count the groups' own rows."""

from __future__ import annotations

import pytest
import torch

from evoengine.errors import UsageError
from evoengine.workloads import parse_problem
from evoengine.workloads.base import Case
from tests.support.exhaustive import more, planted

HALVES = "grouped-gemm:rows=100+0+37+1,n136,k200,bf16,b_nk"
ROWS_OF_N = "grouped-gemm:rows=100+0+37+1,n101,k77,fp16,out_fp32"
BYTES = "grouped-gemm:rows=100+0+37+1,n136,k336,fp8_e4m3,b_nk,block_scales"
INTEGERS = "grouped-gemm:m200,rows=100+0+37+1,n136,k336,int8,b_nk,row_scales"
BY_TENSOR = "grouped-gemm:rows=100+0+37+1,n136,k336,fp8_e5m2,b_nk"
SMALL = {"family": "mma", "tile_m": 64, "tile_n": 64}
GROUPED = {**SMALL, "group_m": 4}

FAULTS = [
    # name, problem, configuration, text of the good kernel, text of the broken one
    ("a group's begin one row too far", HALVES, SMALL, "? ends[group - 1] : 0;", "? ends[group - 1] + 1 : 0;"),
    ("a group begins where its own rows end", HALVES, SMALL, "? ends[group - 1] : 0;", "? ends[group] : 0;"),
    ("ends taken for sizes", HALVES, SMALL, "ends[group] - begin : 0;", "ends[group] : 0;"),
    ("a group's last row lost", HALVES, SMALL, "ends[group] - begin : 0;", "max(0, ends[group] - begin - 1) : 0;"),
    ("a group one row too long", HALVES, SMALL, "ends[group] - begin : 0;", "ends[group] - begin + 1 : 0;"),
    ("a group's tail of rows has no tile", HALVES, SMALL, "return ceil_div(rows, CLUSTER_M * TILE_M) *", "return rows / (CLUSTER_M * TILE_M) *"),
    ("one column of tiles for each group", HALVES, SMALL, "* ceil_div(n, CLUSTER_N * TILE_N);", ";"),
    ("groups behind the 32nd lost", HALVES, SMALL, "left < upto);\n            if (behind) break;", "left < upto);\n            break;"),
    ("groups behind the 32nd counted from 0", HALVES, SMALL, "first += 32, left -= __shfl_sync(0xffffffffu, upto, 31)", "first += 32"),
    ("the group before where a group begins", HALVES, SMALL, "behind = __ballot_sync(0xffffffffu, left < upto)", "behind = __ballot_sync(0xffffffffu, left <= upto)"),
    ("tiles counted from the first group's", HALVES, SMALL, "left -= __shfl_sync(0xffffffffu, upto - tiles, found);", ""),
    ("B of the first of 32 groups", HALVES, SMALL, "uniform(first + found), begin", "uniform(first), begin"),
    ("B of the first 32 groups alone", HALVES, SMALL, "uniform(first + found), begin", "uniform(found), begin"),
    ("one B for all groups", HALVES, SMALL, "all_b + (long long)work.entry * k * n;", "all_b;"),
    ("B of groups before, by their rows", HALVES, SMALL, "all_b + (long long)work.entry * k * n;", "all_b + (long long)work.begin * k * n;"),
    ("A of the first group", HALVES, SMALL, "all_a + (long long)work.begin * k;", "all_a;"),
    ("C of the first group", HALVES, SMALL, "before = (long long)work.begin * n;", "before = 0;"),
    ("stored past the group's end", HALVES, SMALL, "m = work.rows;", "m = work.rows + 1;"),
    ("rows of all groups multiplied and stored", HALVES, SMALL, "m = work.rows;", "m = all_rows;"),
    ("no barrier between a block's tiles", HALVES, SMALL, "__syncthreads();  // all threads are done with the tiles before", ""),
    ("a block's tiles one too far apart", HALVES, SMALL, "stride = gridDim.x / CLUSTER_BLOCKS;", "stride = gridDim.x / CLUSTER_BLOCKS + 1;"),
    ("a block's first tile alone", HALVES, SMALL, "number += stride;", "number += 1 << 20;"),
    ("as many tiles a block as the launch of the search has", HALVES, SMALL, "number += stride;", "number += 3 * stride;"),
    ("the last group's rows up to A's end", HALVES, SMALL, "ends[group] - begin : 0;", "(group + 1 < groups ? ends[group] : ends[group] + 3) - begin : 0;"),
    ("a group's tiles walked as all groups' would be", HALVES, GROUPED, "order = {ceil_div(rows, CLUSTER_M * TILE_M),", "order = {ceil_div(ends[groups - 1], CLUSTER_M * TILE_M),"),
    ("rows and columns of tiles exchanged", HALVES, SMALL, "return {row * TILE_M, col * TILE_N", "return {col * TILE_M, row * TILE_N"),
    ("B's rows read as columns", ROWS_OF_N, SMALL, "b += work.first_col;", "b += work.first_col * k;"),
    ("scales of the first group's rows", INTEGERS, SMALL, "of_a += work.begin, of_b", "of_b"),
    ("scales of another group's columns", INTEGERS, SMALL, "of_b += (long long)work.entry * n;", "of_b += (long long)work.begin;"),
    ("one pair of scales for all groups", BY_TENSOR, SMALL, "of_a += work.entry, of_b += work.entry;", ""),
    ("scales of A in steps of the group's rows", BYTES, SMALL, "(long long)block * scales.stride;", "(long long)block * scales.m;"),
    ("scales of B of the first group", BYTES, SMALL, "of_b += (long long)work.entry * ((n + 127) / 128) * blocks(k);", "of_b += 0;"),
    ("scales of A of the first group", BYTES, SMALL, "of_a += work.begin, of_b", "of_b"),
]  # fmt: skip
FAST = ("ends taken for sizes", "groups behind the 32nd lost", "stored past the group's end")
"""one of offsets, of many groups and of rows; the others run with `make test-all`"""
BOARD = {BYTES: "rtx5090", BY_TENSOR: "rtx5090"}
"""of products of FP8 by mma.sync"""


def gate_of(kernel_gate, problem):
    return kernel_gate(problem, BOARD[problem]) if problem in BOARD else kernel_gate(problem)


@planted(("problem", "wanted", "old", "new"), FAULTS, *FAST)
def test_a_planted_fault_is_caught(kernel_gate, problem, wanted, old, new):
    gate = gate_of(kernel_gate, problem)
    assert gate.refutes(gate.configuration(wanted), old, new), "the fault escaped"


PAIRS = {"family": "wgmma", "tile_m": 128, "cluster": "2x1", "c_store": "tma"}
FEW_ROWS = {"family": "wgmma", "swap": True}
MANY_TILES = "grouped-gemm:rows=9x300+0+37+1+4000,n1000,k512,bf16,b_nk"
WGMMA_BYTES = "grouped-gemm:rows=9x300+0+37+1+4000,n1000,k512,fp8_e4m3,b_nk,block_scales"
WGMMA_FAULTS = [
    # name, problem, configuration, text of the good kernel, text of the broken one
    ("A of the first group", MANY_TILES, PAIRS, "work.begin + work.first_row, k", "work.first_row, k"),
    ("B of the first group", MANY_TILES, PAIRS, "work.first_col, k, work.entry", "work.first_col, k, 0"),
    ("C of the first group, where a stripe is stored by TMA", MANY_TILES, PAIRS, "first, begin + row", "first, row"),
    ("C of the first group, where it is not", MANY_TILES, PAIRS, "all_c + (long long)work.begin * n", "all_c"),
    ("a stripe that ends with the group's rows stored by TMA one too far", MANY_TILES, PAIRS, "+ first + 16 > work.rows", "+ first + 15 > work.rows"),
    ("all stripes stored by TMA", MANY_TILES, PAIRS, "+ first + 16 > work.rows", "+ first >= work.rows"),
    ("pairs of tiles counted as tiles", MANY_TILES, PAIRS, "return ceil_div(rows, CLUSTER_M * TILE_M)", "return ceil_div(rows, TILE_M)"),
    ("both blocks of a pair at one tile", MANY_TILES, PAIRS, "order.row * CLUSTER_M + rank % CLUSTER_M", "order.row * CLUSTER_M"),
    ("tiles dealt out to blocks in place of pairs", MANY_TILES, PAIRS, "number = blockIdx.x / CLUSTER_BLOCKS;", "number = blockIdx.x;"),
    ("tiles counted by one lane", MANY_TILES, PAIRS, "all = uniform(all);", "all = tiles_of(0, number, number);"),
    ("the pipeline begun anew with each tile, by its producer", MANY_TILES, PAIRS, "__syncwarp();\n                tiles.advance(work.steps);", "__syncwarp();"),
    ("columns of C stored past the group's rows", MANY_TILES, FEW_ROWS, "if (to.exists(row, col))", "if (col < to.n)"),
    ("scales of A of the first group", WGMMA_BYTES, {"family": "wgmma", "tile_m": 128}, "of_a += work.begin, of_b", "of_b"),
    ("scales of B of the first group", WGMMA_BYTES, {"family": "wgmma", "tile_m": 128}, "of_b += (long long)work.entry", "of_b += 0ll"),
]  # fmt: skip


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("problem", "wanted", "old", "new"), [pytest.param(*fault[1:], id=fault[0]) for fault in WGMMA_FAULTS]
)
def test_a_fault_planted_in_a_kernel_by_wgmma_is_caught(kernel_gate, problem, wanted, old, new):
    gate = kernel_gate(problem)
    assert gate.refutes(gate.configuration(wanted), old, new), "the fault escaped"


@pytest.mark.exhaustive
@pytest.mark.parametrize(("problem", "wanted"), [(MANY_TILES, PAIRS), (MANY_TILES, FEW_ROWS), (WGMMA_BYTES, PAIRS)])
def test_a_good_kernel_by_wgmma_passes_with_every_cell_visited(kernel_gate, problem, wanted):
    gate = kernel_gate(problem)
    verdict = gate.judge(gate.configuration(wanted))
    assert verdict.correct, verdict.reason
    assert verdict.coverage is not None and verdict.coverage.missing == ()


@pytest.mark.parametrize("problem", [HALVES, *more([ROWS_OF_N, BYTES, INTEGERS, BY_TENSOR])])
def test_the_good_kernel_passes_with_every_cell_visited(kernel_gate, problem):
    gate = gate_of(kernel_gate, problem)
    config = gate.configuration(SMALL)
    verdict = gate.judge(config, beside=[Case("the problem itself", gate.problem, config=config)])
    assert verdict.correct, verdict.reason
    assert verdict.coverage is not None and verdict.coverage.missing == ()


EACH = 48
DRAWN = [
    (HALVES, "h100"),
    (ROWS_OF_N, "a100"),
    (BYTES, "rtx5090"),
    (INTEGERS, "a10"),
    ("grouped-gemm:rows=8x17+0+129,n264,k512,fp16", "b200"),
    (BY_TENSOR, "l4"),
    ("grouped-gemm:rows=300+0+37+1,n264,k512,fp8_e4m3,b_nk,block_scales", "h100"),
    ("grouped-gemm:rows=300+0+37+1,n264,k200,fp16", "h100"),
]


@pytest.mark.exhaustive
@pytest.mark.parametrize("number", range(EACH))
def test_a_valid_configuration_passes(kernel_gate, number):
    gate = kernel_gate(*DRAWN[number % len(DRAWN)])
    config = gate.draw(1, seed=number)[0]
    verdict = gate.judge(config, seed=number, beside=[Case("the problem itself", gate.problem, config=config)])
    assert verdict.outcome is None, f"{gate.problem} {config}: {verdict.reason}"


@pytest.mark.parametrize(
    ("given", "written"),
    [
        ("rows=3+3+3+5,n8,k16,fp16", "grouped-gemm:rows=3x3+5,n8,k16,fp16"),
        ("grouped-gemm:out_fp32,b_nk,bf16,k7,n5,rows=2x7+0,m20", "grouped-gemm:m20,rows=2x7+0,n5,k7,bf16,b_nk,out_fp32"),
        ("m14,rows=7+7,n8,k16,fp8_e4m3,b_nk,block_scales,out_fp16", "grouped-gemm:rows=2x7,n8,k16,fp8_e4m3,b_nk,out_fp16,block_scales"),
    ],
)  # fmt: skip
def test_a_problem_is_written_as_it_is_read(given, written):
    problem = parse_problem(given if given.startswith("grouped-gemm") else f"grouped-gemm:{given}")[1]
    assert str(problem) == written
    assert parse_problem(written)[1] == problem


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("rows=3+-5,n8,k16,fp16", "of which '-5' is not a length: write numbers from 0 on with + between them, and 16x2048 for 16 groups"),
        ("rows=,n8,k16,fp16", "of which '' is not a length"),
        ("rows=0+0,n8,k16,fp16", "has 0 rows in all groups; they must be from 1 to"),
        ("rows=2147483647+1,n8,k16,fp16", "has 2147483648 rows in all groups"),
        ("m10,rows=8+3,n8,k16,fp16", "has groups of 11 rows in all, and A has m 10: leave m out, or make it larger"),
        ("n8,k16,fp16", "does not give rows; write it like grouped-gemm:rows=512+37"),
        ("rows=3,rows=4,n8,k16,fp16", "gives rows twice"),
        ("rows=3,n8,k16,fp16,bias", "has a part 'bias' that is not n, k, m with a number, rows=…, or fp16 or"),
        ("rows=3,n8,k16,int8", "along k alone"),
        ("rows=3,n8,k16,bf16,block_scales", "bf16 has no scales"),
        ("rows=70000x1,n8,k16,fp16", "has rows of 70000 groups; they must be from 1 to 65536"),
    ],
)  # fmt: skip
def test_a_bad_problem_is_refused_by_what_is_wrong(text, says):
    with pytest.raises(UsageError) as refused:
        parse_problem(f"grouped-gemm:{text}")
    assert says in str(refused.value) and "\n" not in str(refused.value)


def test_figures_count_the_rows_of_groups_and_the_entries_of_b_that_are_read():
    workload, problem = parse_problem("grouped-gemm:m90,rows=30+0+20,n8,k16,fp16")
    assert workload.flops(problem) == 2 * 50 * 8 * 16
    assert workload.min_dram_bytes(problem) == 2 * (50 * 16 + 2 * 16 * 8 + 50 * 8)
    bytes_of, scaled = parse_problem("grouped-gemm:rows=30+0+20,n256,k512,fp8_e4m3,b_nk,block_scales")
    scales = 4 * (4 * 50 + 3 * 2 * 4)
    assert bytes_of.min_dram_bytes(scaled) == 50 * 512 + 2 * 512 * 256 + scales + 2 * 50 * 256


@pytest.mark.parametrize("problem", [HALVES, ROWS_OF_N, INTEGERS])
def test_the_reference_is_a_product_of_each_group(problem):
    workload, p = parse_problem(problem)
    drawn = workload.tensors().draw(Case("", p), 3).inputs
    found = workload.tensors().reference(p, drawn)["c"]
    assert drawn["ends"].tolist() == [100, 100, 137, 138] and found.shape == (p.m, p.n)
    b = drawn["b"][2].double()
    expected = drawn["a"][100:137].double() @ (b.T if p.b_layout == "nk" else b)
    if p.scales == "row":
        expected *= drawn["scale_a"][100:137, None].double() * drawn["scale_b"][2].double()
    assert torch.allclose(found[100:137], expected) and found[:138].all(dim=1).all() and not found[138:].any()


def test_what_no_group_owns_is_nan():
    workload, p = parse_problem("grouped-gemm:m9,rows=3+0+4,n8,k16,fp8_e4m3,b_nk,block_scales")
    drawn = workload.tensors().draw(Case("", p), 3).inputs
    assert drawn["a"].float().isnan().all(1).tolist() == 7 * [False] + 2 * [True]
    assert drawn["b"].float().isnan().flatten(1).all(1).tolist() == [False, True, False]
    assert drawn["scale_a"].isnan()[0].tolist() == 7 * [False] + 2 * [True]


def test_samples_are_rows_of_all_groups():
    workload, p = parse_problem("grouped-gemm:m500,rows=300+0+100+1,n24,k16,bf16")
    tensors = workload.tensors()
    drawn = tensors.draw(Case("", p), 3).inputs
    (sample,) = tensors.samples(p, drawn, 5)
    assert 128 <= sample.problem.total <= 130 and sample.problem.rows[1] == 0 < sample.problem.rows[3]
    whole, part = tensors.reference(p, drawn), tensors.reference(sample.problem, sample.inputs)
    assert torch.equal(sample.take(whole)["c"], part["c"])
