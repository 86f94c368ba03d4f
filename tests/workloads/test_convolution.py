"""The convolution kernels are right on the emulator, broken ones are not, and figures count what the field counts."""

from __future__ import annotations

import pytest
import torch

from evoengine.workloads import parse_problem
from evoengine.workloads.base import Case
from tests.support.exhaustive import more, planted

LARGE = "convolution:w4096,h4096,fw17,fh17"
OBLONG = "convolution:w1000,h777,fw3,fh5"
EVEN = "convolution:w999,h500,fw4,fh2"
SHARED, DIRECT = {"family": "shared", "filter_in": "shared"}, {"family": "direct"}
PADDED = {"family": "shared", "use_padding": True}
ADD = "fmaf(pixels[(row_of(i) + v) * STRIDE + column_of(j) + u], weight, sum[i][j])"

FAULTS = [
    # name, configuration, problem, text of the good kernel, text of the broken one
    ("missing barrier", SHARED, LARGE, "__syncthreads();", ""),
    ("missing barrier behind the filter", {"family": "direct", "filter_in": "shared"}, LARGE, "__syncthreads();", ""),
    ("x and y of the filter swapped", DIRECT, LARGE, "v * FILTER_W + u", "u * FILTER_W + v"),
    ("mirrored filter", DIRECT, LARGE, "v * FILTER_W + u", "FILTER_H * FILTER_W - 1 - (v * FILTER_W + u)"),
    ("height and width swapped", SHARED, OBLONG, "height + FILTER_H - 1, width + FILTER_W - 1", "width + FILTER_W - 1, height + FILTER_H - 1"),
    ("border of an even filter as of an odd one", DIRECT, EVEN, "width + FILTER_W - 1", "width + FILTER_W / 2 * 2"),
    ("last row of the filter left out", DIRECT, OBLONG, "v < FILTER_H;", "v < FILTER_H - 1;"),
    ("last column of the filter left out", SHARED, LARGE, "u < FILTER_W;", "u < FILTER_W - 1;"),
    ("wrong padding when read", PADDED, LARGE, "(row_of(i) + v) * STRIDE", "(row_of(i) + v) * IMAGE_W"),
    ("wrong padding when written", PADDED, LARGE, "to[row * STRIDE + column]", "to[row * IMAGE_W + column]"),
    ("an output too many", SHARED, LARGE, "x < width)", "x <= width)"),
    ("last column left out", DIRECT, LARGE, "x < width)", "x < width - 1)"),
    ("a row of the image too many", SHARED, LARGE, "y < image_h &&", "y <= image_h &&"),
    ("a pixel too many", DIRECT, LARGE, "width - 1);", "width);"),
    ("the image's last pixels left out", SHARED, LARGE, "x < image_w;", "x < image_w - 1;"),
    ("rows of the border not loaded", SHARED, LARGE, "row < IMAGE_H", "row < TILE_H"),
    ("the filter loaded by one round of threads", SHARED, LARGE, "for (int i = threadIdx.x; i < FILTER_H * FILTER_W; i += THREADS)", "if (int i = threadIdx.x; i < FILTER_H * FILTER_W)"),
    ("the filter over the image's last pixel", SHARED, LARGE, "shared + IMAGE_H * STRIDE;", "shared + IMAGE_H * STRIDE - 1;"),
    ("shared memory overrun", SHARED, LARGE, "shared + IMAGE_H * STRIDE;", "shared + IMAGE_H * STRIDE + 1;"),
    ("uninitialised sums", DIRECT, LARGE, "[OUTPUTS_X] = {};", "[OUTPUTS_X];"),
    ("a thread's outputs too close", SHARED, LARGE, "+ j * BLOCK_X", "+ j * (BLOCK_X - 1)"),
    ("sums cut off to 16 bits", SHARED, LARGE, ADD, f"__uint_as_float(__float_as_uint({ADD}) & 0xffff0000u)"),
    ("sums four bits short", SHARED, LARGE, ADD, f"__uint_as_float(__float_as_uint({ADD}) & 0xfffffff0u)"),
    ("pixels as TF32", SHARED, LARGE, "fmaf(pixels[(row_of(i) + v) * STRIDE + column_of(j) + u]", "fmaf(__uint_as_float(__float_as_uint(pixels[(row_of(i) + v) * STRIDE + column_of(j) + u]) & 0xffffe000u)"),
    ("input changed", SHARED, LARGE, "__syncthreads();", "if (threadIdx.x == 0) const_cast<float*>(image)[0] = 0.0f;\n    __syncthreads();"),
]  # fmt: skip
FAST = (
    "missing barrier",
    "x and y of the filter swapped",
    "an output too many",
    "sums cut off to 16 bits",
)
"""one of synchronisation, of bounds, of what is computed and of precision"""


@planted(("wanted", "problem", "old", "new"), FAULTS, *FAST)
def test_a_planted_fault_is_caught(kernel_gate, wanted, problem, old, new):
    gate = kernel_gate(problem)
    assert gate.refutes(gate.configuration(wanted), old, new), "the fault escaped"


@pytest.mark.parametrize("number", [1, *more(n for n in range(16) if n != 1)])
@pytest.mark.parametrize(
    "problem", [EVEN, "convolution:w1,h1,fw1,fh1", *more([LARGE, OBLONG, "convolution:w300,h9,fw2,fh33"])]
)
def test_a_valid_configuration_passes(kernel_gate, problem, number):
    """The first start point, and others drawn from the space."""
    gate = kernel_gate(problem)
    config = (*gate.space.starts[:1], *gate.draw(16, seed=5))[number]
    verdict = gate.judge(config, seed=number)
    assert verdict.outcome is None, f"{config}: {verdict.reason}"


def test_the_filter_is_not_mirrored():
    """As in Kernel Tuner's benchmark: the first weight meets the window's first pixel."""
    workload, problem = parse_problem("convolution:w2,h2,fw2,fh2")
    image = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0], [7.0, 8.0, 9.0]])
    first = {"image": image, "filter": torch.tensor([[1.0, 0.0], [0.0, 0.0]])}
    for outputs in (workload.tensors().reference(problem, first), workload.tensors().own_dtype(problem, first)):
        assert outputs["output"].tolist() == [[1.0, 2.0], [4.0, 5.0]]


def test_whole_numbers_leave_no_rounding_errors():
    workload, problem = parse_problem("convolution:w40,h40,fw33,fh33")
    tensors = workload.tensors()
    inputs = tensors.draw(Case("exact", problem, "whole numbers"), seed=1).inputs
    assert torch.equal(
        tensors.reference(problem, inputs)["output"], tensors.own_dtype(problem, inputs)["output"].double()
    )


def test_samples_are_bands_of_the_whole_problem():
    workload, problem = parse_problem("convolution:w20,h100,fw3,fh5")
    tensors = workload.tensors()
    inputs = tensors.draw(Case("whole", problem), seed=1).inputs
    whole = tensors.reference(problem, inputs)
    samples = tensors.samples(problem, inputs, seed=2)
    assert len(samples) == 3
    for sample in samples:
        own, taken = tensors.reference(sample.problem, sample.inputs)["output"], sample.take(whole)["output"]
        assert own.shape == taken.shape and torch.allclose(own, taken, rtol=0, atol=1e-12)


def test_figures_count_the_image_with_its_border():
    workload, problem = parse_problem(OBLONG)
    assert workload.flops(problem) == 2 * 1000 * 777 * 15
    assert workload.min_dram_bytes(problem) == 4 * (1002 * 781 + 15 + 1000 * 777)
