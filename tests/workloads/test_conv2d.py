"""Convolutions of channels: kernels are right on the emulator, broken ones are not, bad problems are refused, and samples
and figures are those of the whole."""

from __future__ import annotations

import pytest
import torch

from evoengine.cuda_files import disassembler
from evoengine.errors import UsageError
from evoengine.workloads import parse_problem
from evoengine.workloads.base import Case
from tests.support.exhaustive import more, planted
from tests.support.kernel_gate import KernelGate

SAME = "conv2d:n2,c64,h14,w14,k64,r3,s3,pad1,fp16"
OBLONG = "conv2d:n2,c40,h15,w17,k72,r3,s5,stride2,pad1,dilation2,bf16,bias_relu,residual"
FIRST = "conv2d:n2,c3,h32,w30,k64,r7,s7,stride2,pad3,fp16"
POINTS = "conv2d:n1,c256,h14,w14,k256,r1,s1,bf16,bias"
WIDE_PAD = "conv2d:n1,c16,h9,w8,k32,r2,s1,pad2,fp16"
ODD = "conv2d:n1,c8,h9,w8,k33,r2,s1,fp16"
ODD_FILTERS = "conv2d:n1,c40,h9,w8,k33,r2,s1,pad2,fp16"
MMA, WGMMA = {"family": "mma"}, {"family": "wgmma"}
PLAIN, DEEP = {**MMA, "tile_n": 64}, {**MMA, "tile_n": 128}
SMALL = {**MMA, "tile_m": 64, "tile_n": 64}
ONE_BUFFER = {"stages": 1}
SQUARES = "conv2d:n8,c16,h16,w16,k256,r3,s3,pad1,fp16"
CURVE = {**MMA, "raster": "hilbert"}

FAULTS = [
    # name, problem, configuration, text of the good kernel, text of the broken one
    ("padding one row too many", SAME, PLAIN, "/ out_width * STRIDE - PAD", "/ out_width * STRIDE - PAD - 1"),
    ("padding of columns left out", SAME, PLAIN, "% out_width * STRIDE - PAD", "% out_width * STRIDE"),
    ("padding read from the rows above and below", SAME, PLAIN, "|= window.has_row(image, r) ? 0u : 1u << r;", "|= 0;"),
    ("padding read from the row before's end", SAME, PLAIN, "|= window.has_column(image, s) ? 0u : 0x10000u << s;", "|= 0;"),
    ("padding on the left and above alone", SAME, PLAIN, "unsigned(left + s * DILATION) < unsigned(image.width)", "left + s * DILATION >= 0"),
    ("the image's last row taken for padding", SAME, PLAIN, "< unsigned(image.height);", "< unsigned(image.height - 1);"),
    ("stride of rows alone", OBLONG, DEEP, "% out_width * STRIDE - PAD", "% out_width - PAD"),
    ("stride of columns alone", OBLONG, DEEP, "/ out_width * STRIDE - PAD", "/ out_width - PAD"),
    ("outputs counted without the stride", OBLONG, DEEP, "(FILTER_W - 1) - 1) / STRIDE + 1", "(FILTER_W - 1) - 1) + 1"),
    ("outputs counted by a stride that is rounded up", OBLONG, DEEP, "(FILTER_H - 1) - 1) / STRIDE + 1", "(FILTER_H - 1) - 2 + STRIDE) / STRIDE + 1"),
    ("dilation ignored along a row", OBLONG, DEEP, "2ll * (DILATION - 1) * image.channels;", "0;"),
    ("dilation ignored from row to row", OBLONG, DEEP, "2ll * DILATION * image.channels * (image.width - FILTER_W);", "2ll * image.channels * (image.width - DILATION * FILTER_W);"),
    ("dilation ignored for what lies outside", OBLONG, DEEP, "unsigned(left + s * DILATION)", "unsigned(left + s)"),
    ("rows and columns of a filter exchanged", OBLONG, DEEP, "if (pixel & 0x10000u << FILTER_W) {", "if (pixel & 0x10000u << FILTER_H) {"),
    ("rows and columns of an image exchanged", OBLONG, DEEP, "const Image image = {height, width, channels};", "const Image image = {width, height, channels};"),
    ("rows of an image without its last columns", SAME, PLAIN, "* image.width + left) * image.channels;", "* (image.width - 1) + left) * image.channels;"),
    ("a filter that goes on behind its last row", SAME, {**PLAIN, "tile_k": 64}, "0xffffu << FILTER_H & 0xffffu : ~0u", "0 : ~0u"),
    ("rows behind the last output", SAME, PLAIN, "beyond = own < m - first_row ?", "beyond = own <= m - first_row ?"),
    ("the next pixel a channel too late", SAME, PLAIN, "while (channel >= image.channels)", "while (channel > image.channels)"),
    ("one pixel further at most in a step", SAME, PLAIN, "while (channel >= image.channels)", "if (channel >= image.channels)"),
    ("images one after the other without their rows", SAME, PLAIN, "(long long)entry * image.height + top", "(long long)entry * (image.height - 1) + top"),
    ("every image's windows from the first", SAME, PLAIN, "(long long)entry * image.height", "0ll * image.height"),
    ("a thread's rows too close", SAME, PLAIN, "row + (j + chunk) * STEP;", "row + (j + chunk) * (STEP - 1);"),
    ("a chunk that is placed without its exchange", SAME, PLAIN, "(chunk ^ swizzle(row))) * 8;", "chunk) * 8;"),
    ("cp.async waited for too laxly", SAME, PLAIN, "pipeline_wait<STAGES - 2>();", "pipeline_wait<STAGES - 1>();"),
    ("no barrier behind the wait", SAME, PLAIN, "copy_async_wait<PENDING>();\n    __syncthreads();", "copy_async_wait<PENDING>();"),
    ("a buffer filled while it is read", SAME, PLAIN, "loader.load(i + STAGES - 1);", "loader.load(i + STAGES);"),
    ("one buffer filled while it is read", SAME, ONE_BUFFER, "__syncthreads();  // all threads are done with the tiles before", ""),
    ("filters behind the last read", OBLONG, DEEP, "b + i * TILE_K, k, cols, left)", "b + i * TILE_K, k, cols + 1, left)"),
    ("squares of tiles one above the other", SQUARES, CURVE, "square % squares_m * side", "square % squares_m"),
    ("a curve that lies on itself where it turns", SQUARES, CURVE, "col = turned;", ""),
    ("filters of the first tile alone", SAME, {**MMA, "tile_n": 32}, "b += (long long)work.first_col * k;", ""),
    ("bias of the filter beside", OBLONG, DEEP, "high_bias = to.bias_of(col + 1)", "high_bias = to.bias_of(col)"),
    ("residual left out", OBLONG, DEEP, "activate(low + low_bias) + more.x", "activate(low + low_bias)"),
    ("sums kept in 16 bits", SAME, PLAIN, "issue<TILE_K>(acc,", "for (int s = 0; s < STRIPES; ++s) for (int e = 0; e < WARP_COLS / 2; ++e) acc[s].d[e] = to_float(T(acc[s].d[e]));\n        issue<TILE_K>(acc,"),
    ("single elements: the window's last rows repeated", FIRST, PLAIN, "1u << min(r, FILTER_H)", "1u << min(r, FILTER_H - 1)"),
    ("single elements: channels of the pixel before", FIRST, PLAIN, "(channel + e) % image.channels;", "channel % image.channels;"),
    ("single elements: columns of another row", FIRST, PLAIN, "r = number / FILTER_W, s = number % FILTER_W", "r = number / FILTER_H, s = number % (FILTER_W - 1)"),
    ("single elements: padding read", FIRST, PLAIN, "outside[j] & pixel ? T(0.0f) :", "outside[j] == ~0u ? T(0.0f) :"),
    ("single elements: the first step's again", FIRST, PLAIN, "        channel += TILE_K;\n", ""),
]  # fmt: skip
DIRECT = {"family": "direct"}
FAULTS += [
    ("direct: padding read above and below", SAME, DIRECT, "if (!window.has_row(image, r)) continue;", ""),
    ("direct: padding read on both sides", SAME, DIRECT, "if (!window.has_column(image, s)) continue;", ""),
    ("direct: dilation ignored", OBLONG, DIRECT, "(long long)DILATION * (r * width + s) * channels", "(long long)(r * width + s) * channels"),
    ("direct: stride of rows alone", OBLONG, DIRECT, "% out_width * STRIDE - PAD", "% out_width - PAD"),
    ("direct: rows and columns of a filter exchanged", OBLONG, DIRECT, "+ r * FILTER_W + s) * channels", "+ s * FILTER_H + r) * channels"),
    ("direct: filters behind the last read", POINTS, {**DIRECT, "filters_each": 8}, "min(f, filters - 1 - col)", "f + 1"),
    ("direct: a filter too many", ODD, {**DIRECT, "filters_each": 8}, "if (col + f < filters) y", "if (col + f <= filters) y"),
    ("direct: the last channels left out", OBLONG, DIRECT, "c < channels; c += CHUNK", "c + CHUNK < channels; c += CHUNK"),
    ("direct: outputs behind the last", SAME, DIRECT, "if (unsigned(row) >= unsigned(m)) return;", "if (row > m) return;"),
    ("direct: sums kept in 16 bits", SAME, DIRECT, "sum[f] = multiplied(sum[f], value, factor);", "sum[f] = to_float(T(multiplied(sum[f], value, factor)));"),
]  # fmt: skip
HALF, PAIR = {**WGMMA, "tile_m": 64, "tile_n": 64}, {**WGMMA, "tile_m": 128, "tile_n": 64, "consumers": 2}
WIDE = {**WGMMA, "tile_m": 128, "tile_n": 128, "consumers": 2, "c_store": "tma"}
FAULTS += [
    ("wgmma: padding read from the rows above and below", SAME, HALF, "|= window.has_row(image, r) ? 0u : 1u << r;", "|= 0;"),
    ("wgmma: rows behind the last output", SAME, PAIR, "beyond = own < m - first_row ?", "beyond = own <= m - first_row ?"),
    ("wgmma: the next pixel a channel too late", SAME, PAIR, "while (channel >= image.channels)", "while (channel > image.channels)"),
    ("wgmma: a filter that goes on behind its last row", OBLONG, WIDE, "0xffffu << FILTER_H & 0xffffu : ~0u", "0 : ~0u"),
    ("wgmma: a thread's rows too close", SAME, HALF, "row + (j + chunk) * STEP;", "row + (j + chunk) * (STEP - 1);"),
    ("wgmma: chunks placed without their exchange", SAME, HALF, "return offset(row, 0, chunk) / 2;", "return (row * WIDTH + chunk) * 8;"),
    ("wgmma: a lane's row told to no other", SAME, HALF, "begin, j % Tile::WIDTH, Tile::WIDTH)", "begin, chunk, Tile::WIDTH)"),
    ("wgmma: channels of the chunk before", SAME, PAIR, "channel = first_k + chunk * 8;", "channel = first_k + max(chunk - 1, 0) * 8;"),
    ("wgmma: copies not waited for", SAME, HALF, "copy_async_arrive(full_of(i));", "barrier_arrive(full_of(i));"),
    ("wgmma: no proxy fence behind the copies", SAME, HALF, "        if (!BY_TMA) async_proxy_fence();\n", ""),
    ("wgmma: filters not waited for", SAME, HALF, "arrive_expect_tx(tiles.full_of(i), TileB::BYTES);", "barrier_arrive(tiles.full_of(i));"),
    ("wgmma: bytes of the windows announced too", SAME, HALF, "arrive_expect_tx(tiles.full_of(i), TileB::BYTES);", "arrive_expect_tx(tiles.full_of(i), TileA::BYTES + TileB::BYTES);"),
    ("wgmma: the arrival of filters not counted", SAME, HALF, "tiles.init(PING_PONG ? 4 : 4 * CONSUMERS, 1);", "tiles.init(PING_PONG ? 4 : 4 * CONSUMERS);"),
    ("wgmma: a buffer filled while it is read", SAME, HALF, "        tiles.acquire(i);\n", ""),
    ("wgmma: a buffer given back while products run", SAME, PAIR, "tiles.release(i - 1);", "tiles.release(i);"),
    ("wgmma: filters of the first tile alone", POINTS, HALF, "work.first_col, (work.first_step", "0, (work.first_step"),
    ("wgmma: filters of the step before", SAME, PAIR, "(work.first_step + i) * TILE_K);", "max(work.first_step + i - 1, 0) * TILE_K);"),
    ("wgmma: both consumers multiply the first rows", SAME, PAIR, "(first_stripe + stripe) * 64, 1)", "stripe * 64, 1)"),
    ("wgmma: outputs stored before they are in shared memory", OBLONG, WIDE, "        async_proxy_fence();\n        __syncwarp();\n        if (lane() == 0) {", "        if (lane() == 0) {"),
    ("wgmma: the end without the last stores", OBLONG, WIDE, "    if (lane() == 0) tma_store_wait<0>();\n}", "}"),
    ("wgmma: bias of the filter beside", OBLONG, WIDE, "to.bias_of(col + 1), row", "to.bias_of(col), row"),
]  # fmt: skip
FAST = (
    "padding read from the row before's end",
    "the next pixel a channel too late",
    "direct: padding read on both sides",
    "wgmma: filters not waited for",
)
"""two of bounds, one of what is computed and one of what is waited for, each found by the first case; the others run with `make test-all`"""


@planted(("problem", "wanted", "old", "new"), FAULTS, *FAST)
def test_a_planted_fault_is_caught(kernel_gate, problem, wanted, old, new):
    gate = kernel_gate(problem)
    assert gate.refutes(gate.configuration(wanted), old, new), "the fault escaped"


@pytest.mark.parametrize(
    ("problem", "wanted"),
    [
        ("conv2d:n2,c16,h9,w10,k24,r2,s3,stride2,pad1,fp16", {**MMA, "tile_m": 64}),
        *more(
            [
                (OBLONG, SMALL),
                (OBLONG, DIRECT),
                (FIRST, DIRECT),
                (SAME, PLAIN),
                (SAME, ONE_BUFFER),
                (OBLONG, DEEP),
                (FIRST, PLAIN),
                (POINTS, MMA),
                (WIDE_PAD, MMA),
                (SAME, HALF),
                (OBLONG, WIDE),
                (POINTS, WGMMA),
                (ODD_FILTERS, WGMMA),
                (SQUARES, {**WGMMA, "raster": "hilbert"}),
            ]
        ),
        *more([(POINTS, {**MMA, "group_m": 4}), (SAME, {"layout": "pad"})]),
    ],
)
def test_the_good_kernel_passes_with_every_cell_visited(kernel_gate, problem, wanted):
    gate = kernel_gate(problem)
    verdict = gate.judge(gate.configuration(wanted))
    assert verdict.correct, verdict.reason
    assert verdict.coverage is not None and verdict.coverage.missing == ()


EACH = 28
DRAWN = [
    (SAME, "h100"), (OBLONG, "a100"), (FIRST, "l4"), (POINTS, "rtx5090"), ("conv2d:n1,c16,h9,w8,k33,r2,s1,pad2,fp16", "a10"),
    ("conv2d:n4,c512,h7,w7,k512,r3,s3,pad1,bf16,bias_gelu", "b200"), ("conv2d:n1,c5,h40,w40,k7,r5,s5,pad2,fp16,silu", "h100"),
]  # fmt: skip # a list


@pytest.mark.exhaustive
@pytest.mark.parametrize("number", range(EACH))
def test_a_valid_configuration_passes(kernel_gate, number):
    gate = kernel_gate(*DRAWN[number % len(DRAWN)])
    config = gate.draw(1, seed=number)[0]
    verdict = gate.judge(config, seed=number)
    assert verdict.outcome is None, f"{gate.problem} {config}: {verdict.reason}"


@pytest.mark.skipif(disassembler() is None, reason="needs nvdisasm")
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("gpu", "problem", "wanted"),
    [
        ("h100", SAME, PLAIN),
        ("h100", SAME, HALF),
        ("h100", OBLONG, WIDE),
        ("a100", OBLONG, DEEP),
        ("l4", FIRST, PLAIN),
        ("h100", POINTS, DIRECT),
        ("rtx2080ti", FIRST, DIRECT),
    ],
)
def test_the_kernel_is_right_as_machine_code(gpu, problem, wanted):
    gate = KernelGate(problem, gpu)
    verdict = gate.judge_binary(gate.configuration(wanted))
    assert verdict.correct, verdict.reason


@pytest.mark.parametrize(
    ("given", "written"),
    [
        ("n2,c8,h9,w10,k16,r3,s1,pad0,stride1,dilation1,fp16", "conv2d:n2,c8,h9,w10,k16,r3,s1,fp16"),
        ("residual,bias_silu,bf16,dilation2,pad3,stride2,s3,r3,k16,w10,h9,c8,n2", "conv2d:n2,c8,h9,w10,k16,r3,s3,stride2,pad3,dilation2,bf16,bias_silu,residual"),
    ],
)  # fmt: skip # a list
def test_a_problem_is_written_as_it_is_read(given, written):
    problem = parse_problem(f"conv2d:{given}")[1]
    assert str(problem) == written
    assert parse_problem(written)[1] == problem


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("n1,c8,h4,w9,k8,r5,s5,fp16", "sees 5 pixels along h, and the image has 4 with its padding: take a larger h or pad"),
        ("n1,c8,h9,w4,k8,r3,s3,dilation2,fp16", "sees 5 pixels along w, and the image has 4"),
        ("n1,c8,h9,w9,k8,r3,s3,stride0,fp16", "stride 0; it must be from 1 to 2147483647"),
        ("n1,c4096,h1024,w1024,k8,r3,s3,fp16", "an image with its padding has 4,294,967,296 elements, and may have 2,147,483,647"),
        ("n65536,c8,h256,w256,k8,r1,s1,fp16", "there are 4,294,967,296 outputs of a filter"),
        ("n1,c8,h9,w9,k8,r3,s3,int8", "has a part 'int8' that is not n, c, h, w, k, r, s, stride, pad, dilation with a number"),
        ("n1,c8,h9,w9,k8,r3,s3,swiglu,fp16", "has a part 'swiglu'"),
        ("n1,c8,h9,w9,k8,r3,fp16", "does not give filter_w"),
    ],
)  # fmt: skip # a list
def test_a_bad_problem_is_refused_by_what_is_wrong(text, says):
    with pytest.raises(UsageError) as refused:
        parse_problem(f"conv2d:{text}")
    assert says in str(refused.value)


def test_large_filters_are_left_to_the_direct_family(kernel_gate):
    space = kernel_gate("conv2d:n1,c8,h40,w40,k8,r17,s17,pad8,fp16").space
    assert "r and s of 15 at most" in str(space.empty_families["mma"])
    assert {c["family"] for c in space.starts} == {"direct"}


@pytest.mark.parametrize("text", [SAME, OBLONG, FIRST])
def test_samples_are_bands_of_the_whole_problem(text):
    workload, problem = parse_problem(text)
    tensors = workload.tensors()
    inputs = tensors.draw(Case("whole", problem), seed=1).inputs
    whole = tensors.reference(problem, inputs)
    samples = tensors.samples(problem, inputs, seed=2)
    assert 2 <= len(samples) <= 3  # the one between may be the first or the last
    for sample in samples:
        own, taken = tensors.reference(sample.problem, sample.inputs)["y"], sample.take(whole)["y"]
        assert own.shape == taken.shape and torch.allclose(own, taken, rtol=0, atol=1e-12)


def test_figures_count_all_products_and_each_byte_once():
    workload, problem = parse_problem(OBLONG)
    assert problem.shape("y") == (2, 7, 6, 72)
    assert workload.flops(problem) == 2 * (2 * 7 * 6) * 72 * (3 * 5 * 40)
    # windows see every second pixel, but neither the first row and column nor the last
    assert workload.min_dram_bytes(problem) == 2 * (2 * 7 * 8 * 40 + 72 * 15 * 40 + 72 + 2 * 2 * 7 * 6 * 72)
