"""Products by weights of 4 bits: kernels are right on the emulator, broken ones are not, bad problems are refused, and the
layouts are those of GPTQ."""

from __future__ import annotations

import pytest
import torch

from evoengine.cuda_files import disassembler
from evoengine.errors import UsageError
from evoengine.workloads import parse_problem
from evoengine.workloads.base import Case
from tests.support.exhaustive import more, planted
from tests.support.kernel_gate import KernelGate

DECODE, SYMMETRIC = "w4a16:m16,n4096,k4096,fp16,zeros", "w4a16:m16,n4096,k4096,bf16"
MANY_ROWS, SMALL_GROUPS = "w4a16:m300,n520,k1024,fp16,zeros,bias_silu", "w4a16:m300,n520,k1056,bf16,g32,zeros,bias"
SPLIT, STREAM = {"split_k": 4, "tile_n": 128}, {"stream_steps": 8, "tile_n": 128}
ALONE = {"split_k": 1, "tile_k": 64}
WHOLE = {"family": "mma", "tile_m": 64, "tile_n": 64, "split_k": 1}
GROUPED = {"tile_m": 64, "split_k": 1, "group_m": 4}
DEEP = {"tile_m": 64, "tile_n": 64, "tile_k": 128, "split_k": 1}

FAULTS = [
    # name, problem, configuration, text of the good kernel, text of the broken one
    ("zero point of the column beside", DECODE, SPLIT, "zeros >> 4 * j & 15", "zeros >> 4 * (j ^ 1) & 15"),
    ("zero point of four columns further", DECODE, SPLIT, "(row * TILE_N + col) / 2);", "(row * TILE_N + (col ^ 4)) / 2);"),
    ("zero points stored less 1, as in GPTQ's first format", DECODE, SPLIT, "zeros >> 4 * j & 15)", "(zeros >> 4 * j & 15) + 1)"),
    ("zero point of the middle, whatever is stored", DECODE, SPLIT, "zeros >> 4 * j & 15)", "8)"),
    ("zero point of 7 in the place of 8", SYMMETRIC, SPLIT, "zeros = 0x8888u", "zeros = 0x7777u"),
    ("scales of two columns exchanged", DECODE, SPLIT, "j < 2 ? scales.x : scales.y, j % 2", "j < 2 ? scales.x : scales.y, 1 - j % 2"),
    ("scales of the first two columns alone", DECODE, SPLIT, "j < 2 ? scales.x : scales.y", "scales.x"),
    ("scales of the first block of columns", DECODE, ALONE, "from.scales() + 2 * (row * TILE_N + col)", "from.scales() + 2 * (row * TILE_N + col % 32)"),
    ("scales of a step's first group", SMALL_GROUPS, DEEP, "from.scales() + 2 * (row * TILE_N + col)", "from.scales() + 2 * col"),
    ("scales that stay those of the first group", DECODE, ALONE, "scales.from += SCALE_ROWS * scales.stride;", ""),
    ("zero points that stay those of the first group", DECODE, ALONE, "zeros.from += SCALE_ROWS * zeros.stride;", ""),
    ("scales of the next group a step too early", DECODE, ALONE, "if (first % GROUP == 0) {", "if (first % GROUP != 0) {"),
    ("scales of the tile's first group in blocks that begin later", DECODE, SPLIT, "long long group = first_k / GROUP;", "long long group = 0;"),
    ("elements of a pair exchanged", DECODE, SPLIT, "__byte_perm(x.x, x.z, 0x5410)", "__byte_perm(x.z, x.x, 0x5410)"),
    ("elements along k paired as they lie", DECODE, SPLIT, "__byte_perm(x.x, x.z, 0x5410)", "x.x"),
    ("pairs of both products exchanged", DECODE, SPLIT, "word >> 8;", "word >> 12;"),
    ("pairs of both products exchanged, bf16", SYMMETRIC, SPLIT, "word >> 4 * p", "word >> 4 * (p ^ 2)"),
    ("words of the row before", DECODE, SPLIT, "4 * deep + lane() % 4) * Buffer::WORD_STRIDE", "4 * deep + lane() % 4 / 2 * 2) * Buffer::WORD_STRIDE"),
    ("rows of A of the upper half twice", DECODE, SPLIT, "row + 8 * half + lane() / 4", "row + lane() / 4"),
    ("columns of C as the accumulator has them", DECODE, SPLIT, "sum[e % 4 * 4 + e / 4]", "sum[e / 2 * 4 + e % 2]"),
    ("two columns of C exchanged", DECODE, SPLIT, "float low = sum[e % 4 * 4 + e / 4], high = sum[(e + 1) % 4 * 4 + e / 4];", "float high = sum[e % 4 * 4 + e / 4], low = sum[(e + 1) % 4 * 4 + e / 4];"),
    ("C cut off, not rounded", DECODE, SPLIT, "(low, high);\n    return", "(__uint_as_float(__float_as_uint(low) & ~0x1fffu), __uint_as_float(__float_as_uint(high) & ~0x1fffu));\n    return"),
    ("weights rounded before their scale", DECODE, SPLIT, "__hsub2(behind_ones(shifted, 0x000f000fu), zero)", "__hsub2(__hmul2(behind_ones(shifted, 0x000f000fu), __float2half2_rn(1.003f)), zero)"),
    ("sums kept in 16 bits", MANY_ROWS, WHOLE, "multiply(acc,", "for (int s = 0; s < STRIPES; ++s) for (int e = 0; e < WARP_COLS / 2; ++e) acc[s].d[e] = to_float(T(acc[s].d[e]));\n        multiply(acc,"),
    ("a row too many", MANY_ROWS, WHOLE, "row < m &&", "row <= m &&"),
    ("columns behind the last", MANY_ROWS, WHOLE, "&& col < n; }", "&& col < n + 8; }"),
    ("rows of A behind the last read", MANY_ROWS, WHOLE, "a.load(to.a(), rows, left / 8);", "a.load(to.a(), rows + 1, left / 8);"),
    ("words behind the last column read", MANY_ROWS, WHOLE, "left / 8, cols / 4);", "left / 8, cols / 4 + 1);"),
    ("words behind the last row read", SMALL_GROUPS, DEEP, "words.load(to.words(), left / 8,", "words.load(to.words(), left / 8 + 1,"),
    ("scales behind the last group read", SMALL_GROUPS, DEEP, "(left + GROUP - 1) / GROUP", "left / GROUP + 1"),
    ("A behind the last element along k", SMALL_GROUPS, DEEP, "a.load(to.a(), rows, left / 8);", "a.load(to.a(), rows, TILE_K);"),
    ("cp.async waited for too laxly", MANY_ROWS, {**WHOLE, "stages": 4}, "pipeline_wait<STAGES - 2>();", "pipeline_wait<STAGES - 1>();"),
    ("a buffer filled while it is read", MANY_ROWS, {**WHOLE, "stages": 4}, "loader.load(i + STAGES - 1);", "loader.load(i + STAGES);"),
    ("last group of tiles as tall as the others", "w4a16:m1024,n520,k1024,fp16,g64", GROUPED, "min(GROUP_M, tiles_m - group * GROUP_M)", "GROUP_M"),
    ("bias left out", MANY_ROWS, WHOLE, "low + low_bias", "low"),
    ("bias of the column beside", MANY_ROWS, WHOLE, "to.bias_of(col + e + 1)", "to.bias_of(col + e)"),
    ("SiLU of the other sign", MANY_ROWS, WHOLE, "__expf(-x)", "__expf(x)"),
    ("sums of the last block lost", DECODE, SPLIT, "from < share.parts; ++from", "from < share.parts - 1; ++from"),
    ("the last block's own sums twice", DECODE, SPLIT, "    for (int i = 0; i < STRIPES; ++i) acc[i].clear();\n#pragma unroll 1", "#pragma unroll 1"),
    ("sums of another tile", DECODE, SPLIT, "(long long)share.tile * share.most * LEFT", "(long long)share.tile * LEFT"),
    ("a count of blocks that stays raised", DECODE, SPLIT, "if (before == share.parts - 1) *count = 0;", ""),
    ("one count for all tiles", DECODE, SPLIT, "arrived + share.tile * (THREADS / 32)", "arrived"),
    ("sums read before all are there", DECODE, SPLIT, "if (before != share.parts - 1) return", "if (before != share.parts - 2) return"),
    ("counted before all lanes have stored", DECODE, SPLIT, "    __syncwarp();\n    int before", "    int before"),
    ("counted without an order", DECODE, SPLIT, "atom.add.acq_rel.gpu", "atom.add.relaxed.gpu"),
    ("a step that two blocks do", "w4a16:m16,n4096,k4736,fp16", SPLIT, "part * share + min(part, left)", "part * share"),
    ("a stream: buffers filled while another warp reads them", DECODE, STREAM, "__syncthreads();  // all threads are done with the buffers", ""),
    ("a stream: sums of a tile's blocks one too few", DECODE, STREAM, "last - first + 1, (steps", "last - first, (steps"),
    ("a stream: the first block of the tile behind", DECODE, STREAM, "first = tile() * steps / STREAM_STEPS", "first = (tile() * steps + steps - 1) / STREAM_STEPS"),
    ("a stream: a tile's last block one too far", DECODE, STREAM, "((tile() + 1) * steps - 1)", "((tile() + 1) * steps)"),
    ("a stream: room for too few of a tile's blocks", DECODE, STREAM, "(steps + STREAM_STEPS - 2) / STREAM_STEPS + 1}", "(steps + STREAM_STEPS - 2) / STREAM_STEPS}"),
    ("a stream: steps up to the tile's end", DECODE, STREAM, "return min(steps - first_step(), end - at);", "return steps - first_step();"),
    ("a stream: the first tile alone", DECODE, STREAM, "stream.share())) continue;", "stream.share())) return;"),
    ("a stream: steps of the next tile lost", DECODE, STREAM, "at += own_steps();", "at += STREAM_STEPS;"),
    ("a stream: steps behind the last tile", DECODE, STREAM, "min(at + STREAM_STEPS, all);", "at + STREAM_STEPS;"),
    ("a stream: a whole tile's sums not cleared before the next", DECODE, STREAM, "    for (int i = 0; i < STRIPES; ++i) acc[i].clear();\n#pragma unroll\n    for (int i = 0; i < STAGES - 1", "    if (stream.at == int(blockIdx.x) * STREAM_STEPS) for (int i = 0; i < STRIPES; ++i) acc[i].clear();\n#pragma unroll\n    for (int i = 0; i < STAGES - 1"),
]  # fmt: skip
SHORT = {"family": "wgmma", "tile_m": 64}
WIDE = {"family": "wgmma", "tile_m": 64, "tile_n": 128, "consumers": 1, "schedule": "none"}
PARTS = {"family": "wgmma", "split_k": 2}
BESIDE = {"family": "wgmma", "cluster": "1x2"}
PERSISTENT = {"family": "wgmma", "schedule": "persistent"}
RAGGED = "w4a16:m300,n520,k1056,bf16,g32,zeros,bias"
FULL, MEDIUM = "w4a16:m4096,n4096,k1024,fp16,zeros", "w4a16:m256,n4096,k4096,fp16,zeros"
FAULTS += [
    ("wgmma: zero point of the column beside", MEDIUM, WIDE, "zeros[row] >> 4 * j & 15", "zeros[row] >> 4 * (j ^ 1) & 15"),
    ("wgmma: zero points of the column's neighbours", RAGGED, WIDE, "zeros + before / 2", "(zeros + before / 2 - 1)"),
    ("wgmma: scales of two columns exchanged", MEDIUM, WIDE, "word[j / 2], j % 2,", "word[j / 2], 1 - j % 2,"),
    ("wgmma: scales of a step's first group", RAGGED, SHORT, "raw.scales[row]", "raw.scales[0]"),
    ("wgmma: scales of the step before", RAGGED, SHORT, "raw = scales.read(i + 2);", "raw = scales.read(i + 1);"),
    ("wgmma: scales of the tile's first group in blocks that begin later", MEDIUM, PARTS, "(first_k + i * TILE_K) / GROUP", "i * TILE_K / GROUP"),
    ("wgmma: scales behind the last group read", RAGGED, SHORT, "group + row < groups", "group + row <= groups"),
    ("wgmma: scales behind the last column read", RAGGED, SHORT, "col < n ? k / GROUP : 0", "k / GROUP"),
    ("wgmma: scales of the first tile", FULL, PERSISTENT, "{scales + col,", "{scales + own,"),
    ("wgmma: weights of another lane", MEDIUM, WIDE, "lane() % 4 * 0x1111u", "lane() % 4 / 2 * 0x1111u"),
    ("wgmma: weights of the first of two words", RAGGED, SHORT, "+ 0x400u", ""),
    ("wgmma: words exchanged along k", MEDIUM, WIDE, "deep % 2 * 2 + j % 2]", "(1 - deep % 2) * 2 + j % 2]"),
    ("wgmma: columns of a stripe as the accumulator has them", MEDIUM, WIDE, "+ lane() / 4 * EACH", "+ lane() / 4"),
    ("wgmma: both numbers behind ones alike", MEDIUM, WIDE, "two_of(0x2c003c00u)", "two_of(0x3c003c00u)"),
    ("wgmma: two columns of C exchanged", MEDIUM, WIDE, "finish_pair(acc[s].d[i], acc[s].d[i + 2]", "finish_pair(acc[s].d[i + 2], acc[s].d[i]"),
    ("wgmma: bias of the column beside", RAGGED, SHORT, "to.bias_of(col + j)", "to.bias_of(col + (j ^ 1))"),
    ("wgmma: a row too many", RAGGED, SHORT, "row < m &&", "row <= m &&"),
    ("wgmma: weights widened over those of running products", MEDIUM, WIDE, "wgmma_wait<STRIPES>();  //", "wgmma_wait<2 * STRIPES>();  //"),
    ("wgmma: a buffer released that products still read", MEDIUM, SHORT, "if (i > 0) tiles.release(i - 1);", "tiles.release(i);"),
    ("wgmma: words read before they are there", MEDIUM, SHORT, "tiles.wait(i + 1);", ""),
    ("wgmma: words of the next columns", MEDIUM, SHORT, "work.first_col, k / 8)", "work.first_col + 4, k / 8)"),
    ("wgmma: rows of A that the other block brings twice", FULL, BESIDE, "tiles.full_of(i), work.first_row, k)", "tiles.full_of(i), work.first_row + 8, k)"),
    ("wgmma: the other block's buffer released by half of its readers", FULL, BESIDE, "CLUSTER * consumer_warps", "consumer_warps"),
    ("wgmma: a tile's buffers counted from the beginning", FULL, PERSISTENT, "            tiles.advance(work.steps);\n            store", "            store"),
    ("wgmma: sums of the second block lost", MEDIUM, PARTS, "block < SPLIT_K; ++block", "block < SPLIT_K - 1; ++block"),
]  # fmt: skip
FAST = (
    "zero point of the column beside",
    "elements along k paired as they lie",
    "a count of blocks that stays raised",
    "a stream: the first tile",
    "wgmma: weights of another lane",
)
"""one of layouts, of products and of blocks that share a tile; the others run with `make test-all`"""


@planted(("problem", "wanted", "old", "new"), FAULTS, *FAST)
def test_a_planted_fault_is_caught(kernel_gate, problem, wanted, old, new):
    gate = kernel_gate(problem)
    assert gate.refutes(gate.configuration(wanted), old, new), "the fault escaped"


@pytest.mark.parametrize(
    ("problem", "wanted"),
    [
        (DECODE, SPLIT),
        (DECODE, STREAM),
        (SMALL_GROUPS, DEEP),
        (RAGGED, SHORT),
        *more([(SYMMETRIC, SPLIT), (MANY_ROWS, WHOLE), (MANY_ROWS, GROUPED)]),
        *more([(MEDIUM, WIDE), (MEDIUM, PARTS), (FULL, BESIDE), (FULL, PERSISTENT)]),
    ],
)
def test_the_good_kernel_passes_with_every_cell_visited(kernel_gate, problem, wanted):
    gate = kernel_gate(problem)
    verdict = gate.judge(gate.configuration(wanted))
    assert verdict.correct, verdict.reason
    assert verdict.coverage is not None and verdict.coverage.missing == ()


EACH = 40
DRAWN = [
    (DECODE, "h100"),
    ("w4a16:m1,n1024,k8192,bf16,g64", "a100"),
    (SMALL_GROUPS, "rtx5090"),
    ("w4a16:m1000,n520,k1024,fp16,zeros,bias_gelu", "a10"),
    ("w4a16:m40,n776,k2048,bf16,zeros,g64,relu", "b200"),
    ("w4a16:m2048,n1024,k512,fp16", "h100"),
]


@pytest.mark.exhaustive
@pytest.mark.parametrize("number", range(EACH))
def test_a_valid_configuration_passes(kernel_gate, number):
    gate = kernel_gate(*DRAWN[number % len(DRAWN)])
    config = gate.draw(1, seed=number)[0]
    verdict = gate.judge(config, seed=number)
    assert verdict.outcome is None, f"{gate.problem} {config}: {verdict.reason}"


WGMMA_DRAWN = [
    "w4a16:m1000,n776,k1056,bf16,g32,zeros,bias_silu", "w4a16:m4096,n4096,k4096,fp16,zeros", "w4a16:m60,n520,k2048,fp16,g64,relu",
    "w4a16:m256,n4096,k4096,bf16", "w4a16:m3000,n1032,k544,fp16,g32,bias",
]  # fmt: skip # a list


@pytest.mark.exhaustive
@pytest.mark.parametrize("wanted", [{"family": "mma", "tile_m": 128}, {"family": "wgmma", "tile_m": 256}])
def test_no_alarm_where_silu_of_sums_far_below_0_magnifies_their_errors(kernel_gate, wanted):
    gate = kernel_gate("w4a16:m300,n520,k1056,bf16,g32,zeros,bias_silu")
    verdict = gate.judge(gate.configuration(wanted), seed=8)
    assert verdict.correct, verdict.reason


@pytest.mark.exhaustive
@pytest.mark.parametrize("number", range(25))
def test_a_valid_configuration_by_wgmma_passes(kernel_gate, number):
    gate = kernel_gate(WGMMA_DRAWN[number % len(WGMMA_DRAWN)])
    config = next(c for c in gate.draw(100, seed=number) if c["family"] == "wgmma")
    verdict = gate.judge(config, seed=number)
    assert verdict.outcome is None, f"{gate.problem} {config}: {verdict.reason}"


@pytest.mark.skipif(disassembler() is None, reason="needs nvdisasm")
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("gpu", "problem", "wanted"),
    [
        ("h100", RAGGED, SHORT),
        ("h100", MEDIUM, PARTS),
        ("h100", FULL, BESIDE),
        ("h100", FULL, PERSISTENT),
        ("h100", DECODE, SPLIT),
        ("h100", DECODE, STREAM),
        ("a100", SMALL_GROUPS, {}),
        ("l4", MANY_ROWS, {}),
    ],
)
def test_the_kernel_is_right_as_machine_code(gpu, problem, wanted):
    gate = KernelGate(problem, gpu)
    verdict = gate.judge_binary(gate.configuration(wanted))
    assert verdict.correct, verdict.reason


@pytest.mark.parametrize(
    ("given", "written"),
    [
        ("m16,n4096,k4096,fp16,g128,zeros", "w4a16:m16,n4096,k4096,fp16,zeros"),
        ("w4a16:bias_silu,bf16,g32,k64,n8,m1", "w4a16:m1,n8,k64,bf16,g32,bias_silu"),
    ],
)
def test_a_problem_is_written_as_it_is_read(given, written):
    problem = parse_problem(given if given.startswith("w4a16") else f"w4a16:{given}")[1]
    assert str(problem) == written
    assert parse_problem(written)[1] == problem


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("m16,n4096,k4000,fp16", "k 4000 is not a multiple of the group of 128: the nearest are k3968 and k4096"),
        (
            "m16,n4092,k4096,fp16",
            "n 4092 is not a multiple of the 8 columns of a word: the nearest are n4088 and n4096",
        ),
        ("m16,n5,k4096,fp16", "the nearest is n8"),
        (
            "m16,n4096,k4096,fp16,g48",
            "groups are of 32, 64, 128 weights along k, not of 48: write one of these behind g",
        ),
        ("m16,n4096,k4096,int8", "has a part 'int8' that is not m, n, k, g with a number"),
        ("m16,n4096,k4096,fp16,swiglu", "has a part 'swiglu'"),
        ("m16,n4096,k4096", "does not give dtype"),
    ],
)
def test_a_bad_problem_is_refused_by_what_is_wrong(text, says):
    with pytest.raises(UsageError) as refused:
        parse_problem(f"w4a16:{text}")
    assert says in str(refused.value) and "\n" not in str(refused.value)


def test_figures_count_the_product_and_the_bytes_of_packed_weights():
    workload, problem = parse_problem("w4a16:m3,n64,k256,fp16,g64,zeros,bias")
    assert workload.flops(problem) == 2 * 3 * 64 * 256
    assert (
        workload.min_dram_bytes(problem) == 2 * 3 * 256 + 64 * 256 / 2 + 4 * 64 * 2 + 4 * 64 / 2 + 2 * 64 + 2 * 3 * 64
    )


@pytest.mark.parametrize("zeros", [False, True])
def test_the_reference_reads_weights_as_gptq_stores_them(zeros):
    """One word by hand, and the same product by AutoGPTQ's own way of unpacking all of them."""
    workload, p = parse_problem(f"w4a16:m5,n16,k64,fp16,g32{',zeros' * zeros}")
    drawn = dict(workload.tensors().draw(Case("", p), 3).inputs)
    drawn["qweight"][2, 5] = 0x76543210
    if zeros:
        drawn["qzeros"][0, 0] = -0x10000000  # 15 of column 7, 0 of the others
    shifts = torch.arange(0, 32, 4)
    q = (drawn["qweight"][:, None] >> shifts[None, :, None] & 15).reshape(64, 16)
    z = (drawn["qzeros"][:, :, None] >> shifts & 15).reshape(2, 16) if zeros else torch.full((2, 16), 8)
    assert q[16:24, 5].tolist() == list(range(8)) and (not zeros or z[0, :8].tolist() == [*7 * [0], 15])
    group = torch.arange(64) // 32
    weights = (q - z[group]).double() * drawn["scales"].double()[group]
    found = workload.tensors().reference(p, drawn)["c"]
    assert torch.allclose(found, drawn["a"].double() @ weights, rtol=1e-12)


def test_samples_are_rows_of_the_whole_problem():
    workload, problem = parse_problem("w4a16:m500,n24,k128,bf16,zeros,bias")
    tensors = workload.tensors()
    inputs = tensors.draw(Case("", problem), seed=1).inputs
    (sample,) = tensors.samples(problem, inputs, seed=2)
    assert 1 < sample.problem.m < problem.m
    whole, part = tensors.reference(problem, inputs), tensors.reference(sample.problem, sample.inputs)
    assert torch.allclose(sample.take(whole)["c"], part["c"], rtol=1e-12)
