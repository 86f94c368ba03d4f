"""Faults that show at the whole problem's size alone are caught by a few of its blocks, in each workload that has
them."""

from __future__ import annotations

import numpy as np
import pytest

from evoengine.devices.pool import PAGE, BlockTrace
from evoengine.records import Launch
from evoengine.workloads.base import WrongBlock
from evoengine.workloads.full_size import FullCase, choose_blocks, few
from tests.support.exhaustive import planted, representatives

GEMM, DEEP = "gemm:m65600,n65600,k64,fp16", "gemm:m1000,n66048,k33000,fp16"
TALL = "gemm:m66048,n1001,k33000,fp16"
RMS = "rms_norm:rows600000,hidden4096,bf16"
CONVOLUTION = "convolution:w50000,h50000,fw3,fh3"
SMALL_TILES = {"family": "mma", "tile_m": 64, "tile_n": 64, "stages": 1}

FAULTS = [
    # name, configuration, problem, text of the good kernel, text of the broken one
    ("offset into C of 32 bits", SMALL_TILES, GEMM, "(long long)row * to.n", "row * to.n"),
    ("offset into B of 32 bits", SMALL_TILES, DEEP, "(long long)i * TILE_K * n", "i * TILE_K * n"),
    ("offset into A of 32 bits", SMALL_TILES, TALL, "(long long)work.first_row * k", "work.first_row * k"),
    ("number of a block of 16 bits", SMALL_TILES, GEMM, "blockIdx.x", "(unsigned short)blockIdx.x"),
    ("offset into a row of 32 bits", {"family": "block"}, RMS, "long long start = (long long)row", "int start = row"),
    ("number of a row of 16 bits", {"family": "warp"}, RMS, "int row = ", "unsigned short row = "),
    ("offset into the output of 32 bits", {"family": "direct"}, CONVOLUTION, "output[(long long)y", "output[y"),
    ("offset into the image of 32 bits", {"family": "shared"}, CONVOLUTION, "image + (long long)y", "image + y"),
    ("row of a tile of 8 bits", {"family": "shared"}, CONVOLUTION, "int y = blockIdx.y * TILE_H", "int y = (unsigned char)blockIdx.y * TILE_H"),
]  # fmt: skip


# one fault of each class; the others of a class run with `make test-all`
FAST = ("offset into C", "number of a row", "offset into the image")


@planted(("wanted", "problem", "old", "new"), FAULTS, *FAST)
def test_a_fault_that_no_small_case_shows_is_caught(kernel_gate, wanted, problem, old, new):
    gate = kernel_gate(problem)
    config = gate.configuration(wanted)
    found = gate.judge(config, gate.doctored(config, old, new))
    assert not found.correct, "the fault escaped"
    assert found.reason.startswith("full ")


GOOD = dict.fromkeys((tuple(wanted.items()), problem) for _, wanted, problem, *_ in FAULTS)
GOOD = [pytest.param(*good, id=f"{good[1]}-{good[0][0][1]}") for good in GOOD]


@pytest.mark.parametrize(("wanted", "problem"), representatives(GOOD, GEMM, RMS, CONVOLUTION))
def test_the_good_kernel_beside_it_passes(kernel_gate, wanted, problem):
    gate = kernel_gate(problem)
    verdict = gate.judge(gate.configuration(dict(wanted)))
    assert verdict.correct, verdict.reason


def test_the_last_block_and_those_that_8_and_16_bits_take_for_it_are_among_the_chosen():
    case = FullCase("full grid", None, None, {})
    chosen = {b.number for b in choose_blocks(case, Launch((1000, 1000, 1), 32, 0), seed=1)}
    assert {0, 999_999, 999_999 - 256, 999_999 - 65536, 999_999 - 256_000, 999, 999_000} <= chosen
    assert all(0 <= number < 1_000_000 for number in chosen)
    assert len(chosen) >= 7 + 32
    alone = FullCase("full tensors", None, None, {}, "last")
    assert [b.number for b in choose_blocks(alone, Launch((7, 3, 1), 32, 0), seed=1)] == [20]


def test_few_tiles_end_as_the_whole_length_does():
    assert [few(n, 64, 2) for n in (1, 128, 129, 4096, 4097)] == [1, 128, 65, 128, 65]


class Written:
    """What blocks of a convolution of 40 x 64 outputs in tiles of 8 x 16 wrote, and what is said of that."""

    def __init__(self, gate):
        workload, problem = gate.target.workload, gate.problem
        self.config = {"block_size_x": 16, "block_size_y": 8, "tile_size_x": 1, "tile_size_y": 1}
        self.case = FullCase("full grid", problem, problem, self.config)
        self.full_size = workload.full_size()
        self.asked = self.full_size.draw_blocks(self.case, Launch((4, 5, 1), 128, 0), seed=1)

    def said(self, *blocks, given_up=False):
        """Each block as slices of rows and columns that it wrote."""
        traces = []
        for number, (rows, columns) in enumerate(blocks):
            output = np.full((40, 64), 0xFFFFFFFF, np.uint32)
            output[rows, columns] = 0
            pages = np.split(output.view(np.uint8).reshape(-1), range(PAGE, output.nbytes, PAGE))
            touched = [(i * PAGE, page) for i, page in enumerate(pages) if (page != 0xFF).any()]
            traces.append(BlockTrace(number, given_up, {"output": touched}))
        try:
            return self.full_size.written_parts(self.case, self.asked, traces)
        except WrongBlock as wrong:
            return str(wrong)


@pytest.fixture
def written(kernel_gate):
    return Written(kernel_gate("convolution:w64,h40,fw3,fh3"))


def test_blocks_that_wrote_one_tile_each_are_compared(written):
    parts = written.said((slice(0, 8), slice(16, 32)), (slice(32, 40), slice(48, 64)))
    assert [(p.case.problem.height, p.case.problem.width) for p in parts] == [(8, 16)] * 2
    assert parts[0].drawn.inputs["image"].shape == (10, 18)


@pytest.mark.parametrize(
    ("blocks", "said"),
    [
        ([(slice(0, 8), slice(0, 16))] * 2, "blocks 0 and 1 both wrote rows 0 to 8 and columns 0 to 16 of output"),
        ([(slice(0, 0), slice(0, 0))], "block 0 wrote nothing of output"),
        ([(slice(0, 7), slice(0, 16))], "which is not one of its tiles of 8 x 16"),
        ([(slice(4, 12), slice(0, 16))], "which is not one of its tiles of 8 x 16"),
        (
            [(slice(0, 8, 2), slice(0, 16))],
            "block 0 wrote 64 elements of rows 0 to 7 and columns 0 to 16 of output, not all",
        ),
    ],
)
def test_blocks_that_wrote_anything_else_are_wrong(written, blocks, said):
    assert said in written.said(*blocks)


def test_a_block_that_was_given_up_is_wrong(written):
    assert "block 0 read far more" in written.said((slice(0, 8), slice(0, 16)), given_up=True)
