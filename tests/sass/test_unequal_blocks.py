"""Blocks as long as a launch's indices say: one long sequence among short ones decides how long the launch takes."""

from __future__ import annotations

import numpy as np
import pytest

from evoengine.accuracy.compilers import InstalledNvrtc
from evoengine.devices.base import KernelFailure
from evoengine.sass import grid
from evoengine.sass.chip import find_chip
from evoengine.sass.core import Program
from evoengine.sass.cubin import read_kernel
from evoengine.sass.launch import DrawnArgument, Geometry, ScalarArgument, prepare
from evoengine.sass.listing import disassemble
from evoengine.sass.model import count_block
from evoengine.sass.predict import blocks_resident, context_of, predict
from tests.support.machine_code import require_tools

require_tools()
SECTIONS, TILES, IN_SECTION = 8, 32, 4
LONGEST_FIRST = """
extern "C" __global__ void sums(const float* x, float* o) {
  extern __shared__ float sums_of[];
  float sum = 0;
  for (int i = 0; i < 8 * (%d - blockIdx.x %% %d / %d); i++) sum += x[(i * 128 + threadIdx.x) & 0xffff];
  sums_of[threadIdx.x] = sum;
  __syncthreads();
  o[blockIdx.x * 128 + threadIdx.x] = sums_of[threadIdx.x ^ 1];
}
"""
"""in sections of so many rows of tiles, as kernels under a causal mask have them"""
BLOCKS, HEADS, SHORT, LONG, AT = 64, 2, 8, 800, 37
CHIP = find_chip("h100")
SUMS = """
extern "C" __global__ void sums(const float* x, const int* lengths, float* o) {
  __shared__ int length;
  if (threadIdx.x == 64) length = lengths[blockIdx.x];
  %s
  float sum = 0;
  for (int i = 0; i < length; i++) sum += x[(i * 128 + threadIdx.x) & 0xffff];
  o[(blockIdx.y * gridDim.x + blockIdx.x) * 128 + threadIdx.x] = sum;
}
"""
TOLD = "__syncthreads();"
"""by a warp that is neither the first nor the last, so that no warp alone finds how long its block is"""
PERSISTENT = """
extern "C" __global__ void sums(const float* x, float* o, int tiles) {
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    float sum = 0;
    for (int i = 0; i < 64; i++) sum += x[((tile * 64 + i) * 128 + threadIdx.x) & 0xffff];
    o[tile * 128 + threadIdx.x] = sum;
  }
}
"""
PARTS, ROWS, NEVER = 4, 16, 5
SHARED_ROWS = """
extern "C" __global__ void sums(const float* x, float* o, int* arrived, int who) {
  __shared__ int before;
  float sum = 0;
  for (int i = 0; i < 8; i++) sum += x[((blockIdx.x * 8 + i) * 128 + threadIdx.x) & 0xffff];
  o[blockIdx.x * 128 + threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.x == 0) before = atomicAdd(arrived + blockIdx.x / 4, 1);
  __syncthreads();
  if (before != who) return;
  for (int i = 0; i < 800; i++) sum += x[((blockIdx.x * 8 + i) * 128 + threadIdx.x) & 0xffff];
  o[blockIdx.x * 128 + threadIdx.x] = sum;
}
"""
"""of the four blocks of a row the one that finds `who` others there goes on"""
TAKEN = """
extern "C" __global__ void sums(const float* x, float* o, int* taken, int tiles) {
  __shared__ int tile;
  for (;;) {
    if (threadIdx.x == 0) tile = atomicAdd(taken, 1);
    __syncthreads();
    if (tile >= tiles) return;
    o[tile * 128 + threadIdx.x] = x[(tile * 128 + threadIdx.x) & 0xffff];
    __syncthreads();
  }
}
"""
READ = "length = lengths[blockIdx.x]; __syncwarp();"


def launch_of(how: str, lengths: np.ndarray):
    cubin = InstalledNvrtc().compile(SUMS % how, "sm_90a", ())
    arguments = [
        DrawnArgument("x", 4 << 16, "fp32"),
        DrawnArgument("lengths", lengths.nbytes, "int32", contents=lengths.view(np.uint8)),
        DrawnArgument("o", 4 * BLOCKS * HEADS * 128, "fp32", output=True),
    ]
    launch = prepare(read_kernel(cubin, "sums"), Geometry((BLOCKS, HEADS, 1), (128, 1, 1), 0), arguments, 0)
    return Program(disassemble(cubin), "sums"), launch


def of_lengths(*, at: int = AT, long: int = LONG) -> np.ndarray:
    lengths = np.full(BLOCKS, SHORT, np.int32)
    lengths[at] = long
    return lengths


@pytest.mark.parametrize("how", [READ, TOLD])
def test_the_one_long_block_is_found_wherever_it_stands(how):
    program, launch = launch_of(how, of_lengths())
    work = context_of(program, launch, CHIP, blocks_resident(launch, CHIP), True).work
    found = work.instructions.reshape(HEADS, BLOCKS)
    assert (found.argmax(axis=1) == AT).all()
    assert found.max() > 40 * np.median(found)
    assert work.mean == pytest.approx(found.mean(), rel=1e-6)


def test_a_launch_takes_as_long_as_its_longest_block_whatever_the_others_do():
    one = predict(*launch_of(TOLD, of_lengths()), CHIP).clocks
    first = predict(*launch_of(TOLD, of_lengths(at=0)), CHIP).clocks
    all_long = predict(*launch_of(TOLD, np.full(BLOCKS, LONG, np.int32)), CHIP).clocks
    all_short = predict(*launch_of(TOLD, np.full(BLOCKS, SHORT, np.int32)), CHIP).clocks
    assert one == pytest.approx(first, rel=0.02)
    assert 10 * all_short < one <= 1.02 * all_long


@pytest.mark.parametrize(
    ("values", "unequal"),
    [
        ([], False),
        ([5, 5, 5, 5], False),
        ([0, 4, 8, 12], False),
        ([0, 0, 1, 1, 2, 2], False),
        ([3, 0, 2, 1], False),
        ([5, 5, 9, 5], True),
        ([0, 4, 5, 12], True),
        ([0, 0, 0, 1, 2, 2], True),
    ],
)
def test_offsets_of_equal_parts_and_tables_say_nothing_of_unequal_blocks(values, unequal):
    assert launch_of(READ, np.array(values, np.int32))[1].unequal_indices is unequal


def work_of():
    """Return the work that is found of the blocks, and their instructions as each counts them, of every 37th."""
    cubin = InstalledNvrtc().compile(LONGEST_FIRST % (TILES, TILES * IN_SECTION, IN_SECTION), "sm_90a", ())
    blocks = SECTIONS * TILES * IN_SECTION
    arguments = [DrawnArgument("x", 4 << 16, "fp32"), DrawnArgument("o", 512 * blocks, "fp32", output=True)]
    launch = prepare(read_kernel(cubin, "sums"), Geometry((blocks, 1, 1), (128, 1, 1), 100_000), arguments, 0)
    program = Program(disassemble(cubin), "sums")
    work = context_of(program, launch, CHIP, blocks_resident(launch, CHIP), True).work
    counted = [count_block(program, launch, block, 10**6)["instructions"] for block in range(0, blocks, 37)]
    return work, np.array(counted)


def test_blocks_of_an_order_of_their_own_are_as_long_as_what_they_compare_at_first():
    work, counted = work_of()
    assert work.instructions[::37] == pytest.approx(counted, rel=0.03)
    assert work.mean == pytest.approx(work.instructions.mean(), rel=0.01)


def test_lengths_of_more_blocks_than_may_be_looked_at_are_interpolated_between_samples(monkeypatch):
    monkeypatch.setattr(grid, "MOST_KNOWN", 100)
    work, counted = work_of()
    assert work.instructions.size == SECTIONS * TILES * IN_SECTION
    assert np.abs(work.instructions[::37] / counted - 1).max() > 1


def with_number(text: str, blocks: int, tiles: int, number: int, counters: int = 0):
    """Return program and launch of a text that takes x, o [tiles, 128], counters if it has any, and a number."""
    arguments = [
        DrawnArgument("x", 4 << 16, "fp32"),
        DrawnArgument("o", 512 * tiles, "fp32", output=True),
        *([DrawnArgument("n", 4 * counters, "int32", True, np.zeros(4 * counters, np.uint8))] if counters else []),
        ScalarArgument("number", np.int32(number)),
    ]
    cubin = InstalledNvrtc().compile(text, "sm_90a", ())
    launch = prepare(read_kernel(cubin, "sums"), Geometry((blocks, 1, 1), (128, 1, 1), 0), arguments, 0)
    return Program(disassemble(cubin), "sums"), launch


@pytest.mark.parametrize("tiles", [128, 133, 200, 263])
def test_persistent_blocks_differ_by_a_tile_from_the_block_on_that_has_one_less(tiles):
    program, launch = with_number(PERSISTENT, CHIP.sms, tiles, tiles)
    context = context_of(program, launch, CHIP, blocks_resident(launch, CHIP), True)
    counted = [count_block(program, launch, block, 10**6)["instructions"] for block in range(CHIP.sms)]
    assert context.work.instructions == pytest.approx(counted)
    assert context.work.mean == pytest.approx(np.mean(counted))
    most = -(-tiles // CHIP.sms)
    assert all(cluster < tiles - (most - 1) * CHIP.sms for cluster in context.share.clusters), "a block with less work"
    assert context.share.excess == pytest.approx(most * CHIP.sms / tiles, rel=0.03), "the memory that others leave"


def test_a_launch_ends_with_the_block_that_finds_all_others_of_its_row_there():
    never, last = (
        predict(*with_number(SHARED_ROWS, PARTS * ROWS, PARTS * ROWS, who, ROWS), CHIP).clocks
        for who in (NEVER, PARTS - 1)
    )
    assert last > 5 * never


def test_a_block_that_takes_tiles_by_a_counter_is_not_taken_for_the_last_that_comes():
    blocks, tiles = 8, 25
    program, launch = with_number(TAKEN, blocks, tiles, tiles, 1)
    assert predict(program, launch, CHIP).timed.values["stored"] == 4 * 512 / 32, "of tiles 0, 8, 16, 24"


HALF, DEEP = 16, 4
BELOW_DIAGONAL = """
extern "C" __global__ void sums(const float* x, float* o) {
  if (blockIdx.y > blockIdx.x) return;
  float sum = 0;
  for (int i = 0; i < 256; i++) sum += x[(i * 128 + threadIdx.x) & 0xffff];
  o[((blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x) * 128 + threadIdx.x] = sum;
}
"""


def test_of_blocks_of_half_a_matrix_as_many_have_work_as_lie_on_one_side_of_its_diagonal():
    blocks = HALF * HALF * DEEP
    arguments = [DrawnArgument("x", 4 << 16, "fp32"), DrawnArgument("o", 512 * blocks, "fp32", output=True)]
    cubin = InstalledNvrtc().compile(BELOW_DIAGONAL, "sm_86", ())
    launch = prepare(read_kernel(cubin, "sums"), Geometry((HALF, HALF, DEEP), (128, 1, 1), 0), arguments, 0)
    chip = find_chip("rtx3060-laptop")
    context = context_of(Program(disassemble(cubin), "sums"), launch, chip, 1, True)
    busy = context.work.instructions > context.work.mean
    assert (busy.reshape(DEEP, HALF, HALF) == np.triu(np.ones((HALF, HALF)))).all()
    assert context.work.counts["sectors_stored"] == pytest.approx(16 * busy.mean())


LONG_BLOCKS = """
extern "C" __global__ void sums(const float* x, float* o, int rows) {
  __shared__ float row[128];
  float sum = 0;
  for (int r = 0; r < rows; r++) {
    __syncthreads();
    row[threadIdx.x] = x[(r * 128 + threadIdx.x) & 0xffff];
    __syncthreads();
    for (int i = 0; i < 128; i++) sum += row[i] * row[(i + threadIdx.x) % 128];
    END
  }
  o[blockIdx.x * 128 + threadIdx.x] = sum;
}
"""


@pytest.mark.parametrize("blocks", [2, 2000])
def test_the_work_of_blocks_too_long_to_be_counted_is_told_by_their_outermost_loop(monkeypatch, blocks):
    counted = count_block(*with_number(LONG_BLOCKS.replace("END", ""), blocks, blocks, 600), 0, 10**7)
    monkeypatch.setattr(grid, "WHOLE_LIMIT", 200_000)
    monkeypatch.setattr(grid, "EXTRAPOLATED", 100_000)
    program, launch = with_number(LONG_BLOCKS.replace("END", ""), blocks, blocks, 600)
    work = context_of(program, launch, CHIP, blocks_resident(launch, CHIP), True).work
    for name in ("instructions", "fma", "wavefronts", "barriers"):
        assert work.counts[name] == pytest.approx(counted[name], rel=0.02)


def test_where_data_end_the_loop_a_long_block_has_no_known_work(monkeypatch):
    monkeypatch.setattr(grid, "WHOLE_LIMIT", 100_000)
    program, launch = with_number(LONG_BLOCKS.replace("r < rows", "").replace("END", "if (sum < 0) break;"), 2, 2, 600)
    with pytest.raises(KernelFailure, match="no end"):
        context_of(program, launch, CHIP, blocks_resident(launch, CHIP), True)
