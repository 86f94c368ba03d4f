"""What the model predicts of launches: clusters along each axis, blocks that go on to other tiles, shared loads."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from evoengine.accuracy.compilers import InstalledNvrtc
from evoengine.devices.base import ScalarArgument
from evoengine.sass.chip import find_chip
from evoengine.sass.core import Program
from evoengine.sass.cubin import read_kernel
from evoengine.sass.grid import Work, busiest, grid_of
from evoengine.sass.launch import DrawnArgument, Geometry, prepare
from evoengine.sass.listing import disassemble
from evoengine.sass.predict import (
    TIME_LIMIT,
    Unpredictable,
    _rest,
    blocks_resident,
    context_of,
    predict,
    time_busiest,
)
from tests.support.cluster_kernels import pair_text
from tests.support.exhaustive import more
from tests.support.machine_code import require_tools

H100 = "h100"


def program_of(text: str, entry: str, arch: str = "sm_90a"):
    require_tools()
    cubin = InstalledNvrtc().compile(text, arch, ())
    return Program(disassemble(cubin), entry), read_kernel(cubin, entry)


# ── clusters ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def clusters():
    """The same blocks in clusters along x, y and z: every block does as much, and stores to a place of its own."""

    def predicted(x: int, y: int, z: int, blocks: int = 6 * 132):
        text = pair_text().replace("__cluster_dims__(2, 1, 1)", f"__cluster_dims__({x}, {y}, {z})")
        number = "(blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x"
        program, kernel = program_of(text.replace("blockIdx.x", f"({number})"), "f")
        grid = (blocks // (y * z), y, z)
        out = DrawnArgument("o", 4 * 128 * blocks, "int32", True)
        return predict(program, prepare(kernel, Geometry(grid, (128, 1, 1), 1280), [out], 0), find_chip(H100))

    return predicted


@pytest.mark.parametrize("dims", [(1, 2, 1), (1, 1, 2)])
def test_clusters_along_y_and_z_take_as_long_as_those_along_x(clusters, dims):
    expected, found = clusters(2, 1, 1), clusters(*dims)
    assert found.clocks == pytest.approx(expected.clocks, rel=0.1)
    assert found.counts == pytest.approx(expected.counts, rel=0.1, abs=8)


def test_a_cluster_of_two_by_two_counts_four_blocks(clusters):
    two, four = clusters(2, 1, 1), clusters(2, 2, 1)
    assert four.counts["global_stores"] == pytest.approx(2 * two.counts["global_stores"])
    assert four.clocks == pytest.approx(two.clocks, rel=0.25)


# ── blocks that go on to other tiles, and blocks of unlike length ───────────────────────────────────────────────────

ROWS = """
extern "C" __global__ void __launch_bounds__(128) rows(const float* a, float* o, int tiles, int persistent) {
  __shared__ float held[128];
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    int length = LENGTH;
    float sum = 0;
    for (int k = 0; k < length; k++) {
      held[threadIdx.x] = a[(size_t)tile * 4096 + (k * 128 + threadIdx.x) % 4096];
      __syncthreads();
      #pragma unroll 8
      for (int i = 0; i < 64; i++) sum += held[(threadIdx.x + i) % 128] * held[i];
      __syncthreads();
    }
    o[tile * 128 + threadIdx.x] = sum;
    if (!persistent) return;
  }
}
"""
RESIDENT = 4
"""blocks on an SM, by their shared memory"""


def rows_launch(length: str, persistent: bool, tiles: int):
    """`tiles` are those of each of the blocks that run at once."""
    tiles *= 132 * RESIDENT
    program, kernel = program_of(ROWS.replace("LENGTH", length), "rows")
    a, o = DrawnArgument("a", 4 * 4096 * tiles, "fp32"), DrawnArgument("o", 4 * 128 * tiles, "fp32", True)
    arguments = [a, o, ScalarArgument("tiles", np.int32(tiles)), ScalarArgument("persistent", np.int32(persistent))]
    blocks = 132 * RESIDENT if persistent else tiles
    return program, prepare(kernel, Geometry((blocks, 1, 1), (128, 1, 1), 52 << 10), arguments, 0)


@pytest.mark.parametrize(
    ("length", "persistent", "tiles"),
    [("24", False, 8), ("24", True, 5), ("32 - tile * 24 / tiles", False, 8), ("32 - tile * 24 / tiles", True, 5)],
    ids=["one_tile", "persistent", "longest_first", "persistent_longest_first"],
)
def test_what_is_not_simulated_is_extrapolated_to_what_a_whole_run_takes(length, persistent, tiles):
    program, launch = rows_launch(length, persistent, tiles)
    chip = find_chip(H100)
    context = context_of(program, launch, chip, blocks_resident(launch, chip), cold=True)
    assert 0.7 * context.work.mean * len(context.share.clusters) > TIME_LIMIT
    part, whole = (time_busiest(context, 1.755, limit).clocks for limit in (TIME_LIMIT, 0))
    assert part == pytest.approx(whole, rel=0.03)


def test_a_persistent_grid_takes_as_long_as_the_blocks_that_it_stands_for():
    times = [predict(*rows_launch("24", persistent, 5), find_chip(H100)).clocks for persistent in (False, True)]
    assert times[1] == pytest.approx(times[0], rel=0.1)


# ── shared memory ───────────────────────────────────────────────────────────────────────────────────────────────────

READS = """
extern "C" __global__ void reads(float* o) {
  __shared__ float held[2048];
  for (int i = threadIdx.x; i < 2048; i += 1024) held[i] = i;
  __syncthreads();
  float sum[8] = {};
  #pragma unroll 1
  for (int round = 0; round < 64; round++)
    #pragma unroll
    for (int i = 0; i < 8; i++) sum[i] += held[(threadIdx.x + round * 8 + i) % 1024];
  o[threadIdx.x] = sum[0] + sum[1] + sum[2] + sum[3] + sum[4] + sum[5] + sum[6] + sum[7];
}
"""


@pytest.mark.parametrize(
    ("gpu", "arch", "clocks"), [("h100", "sm_90a", 1), ("a100", "sm_80", 1), ("rtx3090", "sm_86", 2)]
)
def test_a_load_takes_a_clock_of_the_load_store_units_where_there_are_32(gpu, arch, clocks):
    program, kernel = program_of(READS, "reads", arch)
    launch = prepare(kernel, Geometry((1, 1, 1), (1024, 1, 1)), [DrawnArgument("o", 4096, "fp32", True)], 0)
    p = predict(program, launch, find_chip(gpu))
    loads = 64 * 8 * 32
    assert loads * clocks < p.clocks
    assert grid_of(launch).clusters == 1


# ── what the DRAM gives ─────────────────────────────────────────────────────────────────────────────────────────────

PASSES = """
extern "C" __global__ void __launch_bounds__(128) rows(const float* a, float* o) {
  const float* row = a + (SHARED ? 0 : (size_t)blockIdx.x * 2048);
  float sum = 0;
  for (int pass = 0; pass < 3; pass++) {
    for (int col = threadIdx.x; col < 2048; col += 128) sum = sum * 0.5f + row[col];
    __syncthreads();
  }
  o[blockIdx.x * 128 + threadIdx.x] = sum;
}
"""


@pytest.mark.parametrize(("shared", "row_reads"), [(0, 1), (1, 1 / 2112)], ids=["own rows", "one row for all"])
def test_a_row_comes_from_the_dram_once_for_all_blocks_that_read_it(shared, row_reads):
    """Blocks read a row of 8 KB three times: of 3 × 8 KB the DRAM gives a third, and less where blocks share it."""
    blocks = 4096
    program, kernel = program_of(PASSES.replace("SHARED", str(shared)), "rows")
    arguments = [DrawnArgument("a", 8192 * blocks, "fp32"), DrawnArgument("o", 512 * blocks, "fp32", True)]
    launch = prepare(kernel, Geometry((blocks, 1, 1), (128, 1, 1), 0), arguments, 0)
    traffic = context_of(program, launch, find_chip(H100), 16, cold=True).traffic
    assert traffic[0].loads_from_dram == pytest.approx(row_reads / 3, rel=0.02)


TILES = """
extern "C" __global__ void __launch_bounds__(256)
tiles(const float4* a, const float4* b, float* o, int rows, int columns, int group) {
  int first = blockIdx.x / (group * columns) * group, rest = blockIdx.x % (group * columns);
  int size = min(rows - first, group), m = first + rest % size, n = rest / size;
  float sum = 0;
  #pragma unroll 4
  for (int k = threadIdx.x; k < 16384; k += 256) {
    float4 x = a[(size_t)m * 16384 + k], y = b[(size_t)n * 16384 + k];
    sum += x.x * y.x + x.y * y.y + x.z * y.z + x.w * y.w;
  }
  o[blockIdx.x * 256 + threadIdx.x] = sum;
}
"""


@pytest.mark.parametrize(
    ("group", "strips", "within"), [(1, 2 + 512, 1.6), (8, 8 + 99, 1.1), (32, 32 + 25, 1.25)],
)  # fmt: skip
def test_the_order_of_tiles_decides_what_comes_from_the_dram(group, strips, within):
    """Of 512 × 512 tiles, 792 run at once: along a row they touch all of B, in groups of rows a few strips of both.

    A strip has 256 KB, and each matrix 128 MB. `strips` are those of both that a wave touches.
    """
    program, kernel = program_of(TILES, "tiles")
    sizes = {"rows": 512, "columns": 512, "group": group}
    arguments = [DrawnArgument(name, 512 << 18, "fp32") for name in "ab"]
    arguments += [DrawnArgument("o", 1024 * 512 * 512, "fp32", True)]
    arguments += [ScalarArgument(name, np.int32(value)) for name, value in sizes.items()]
    launch = prepare(kernel, Geometry((512 * 512, 1, 1), (256, 1, 1), 0), arguments, 0)
    chip = find_chip(H100)
    assert blocks_resident(launch, chip) == 6
    traffic = context_of(program, launch, chip, 6, cold=True).traffic
    found = 792 * sum(part.loads_from_dram for part in traffic)
    assert strips / within <= found <= strips * within


FLOATS = 1 << 26
STREAMING = {
    "writes alone": (
        "o[i] = 1;", 0, 4 * FLOATS,
    ),
    "a copy": (
        "o[i] = a[i];", 4 * FLOATS, 4 * FLOATS,
    ),
    "a stencil over neighbors and rows": (
        "o[i] = a[i] + a[i + 1] + a[i + 2] + a[i + 8192] + a[i + 16384];", 4 * FLOATS, 4 * FLOATS,
    ),
    "a gather, a piece of 64 bytes a load": (
        "o[i] = a[unsigned(i) * 2654435761u % (1u << 26)];", 64 * FLOATS, 4 * FLOATS,
    ),
    "32 sweeps, each of more than the L2 keeps": (
        "o[i] = a[i * 32 % (1u << 26) + i / (1u << 21)];", 64 * FLOATS, 4 * FLOATS,
    ),
}  # fmt: skip
"""what a thread does → bytes that are loaded from the DRAM and stored there, counted by hand"""


def moving(body, gpu):
    """Return the prediction in µs of a kernel in which each of 2^26 threads does `body`."""
    chip = find_chip(gpu)
    text = f"""extern "C" __global__ void move(const float* a, float* o) {{
        size_t i = (size_t)blockIdx.x * 256 + threadIdx.x; {body} }}"""
    program, kernel = program_of(text, "move", chip.gpu.arch)
    arguments = [DrawnArgument("a", 4 * (FLOATS + 16384), "fp32"), DrawnArgument("o", 4 * FLOATS, "fp32", True)]
    launch = prepare(kernel, Geometry((FLOATS // 256, 1, 1), (256, 1, 1), 0), arguments, 0)
    return predict(program, launch, chip).time_us


@pytest.mark.parametrize("gpu", ["a100", *more(["rtx3090", "rtx4070ti"])])
@pytest.mark.parametrize(("body", "loaded", "stored"), STREAMING.values(), ids=STREAMING)
def test_kernels_that_only_move_data_take_as_long_as_the_dram_does(body, loaded, stored, gpu):
    chip = find_chip(gpu)
    rate = chip.rates["dram_efficiency"] * chip.gpu.memory_gbs
    moved = loaded + stored * (chip.rates["dram_turn_cost"] if loaded else 1)
    assert moving(body, gpu) == pytest.approx(moved / rate / 1e3, rel=0.12)


@pytest.mark.parametrize(
    ("gpu", "reads", "copies"), [("a100-40gb", 1490, 1381), *more([("a40", 679, 652), ("l40s", 846, 770)])]
)
def test_reads_and_copies_of_doubles_take_what_others_measured(gpu, reads, copies):
    """GB/s of gpu-benches' gpu-stream with 1,024 threads a block; it has an L40, whose memory is that of an L40S."""
    chip, doubles = find_chip(gpu), 2**25

    def rate(body, moved):
        text = f"""extern "C" __global__ void move(const double* a, double* o) {{
            size_t i = (size_t)blockIdx.x * 1024 + threadIdx.x; {body} }}"""
        program, kernel = program_of(text, "move", chip.gpu.arch)
        arguments = [DrawnArgument("a", 8 * doubles, "fp32"), DrawnArgument("o", 8 * doubles, "fp32", True)]
        launch = prepare(kernel, Geometry((doubles // 1024, 1, 1), (1024, 1, 1)), arguments, 0)
        return moved * doubles / predict(program, launch, chip, cold=False).time_us / 1e3

    assert rate("if (a[i] == 1.25) o[i] = 1;", 8) == pytest.approx(reads, rel=0.04)
    assert rate("o[i] = a[i] * 1.5;", 16) == pytest.approx(copies, rel=0.04)


@pytest.mark.parametrize(
    ("name", "measured_us"),
    [
        ("writes alone", 161.4), ("a stencil over neighbors and rows", 245.1),
        ("32 sweeps, each of more than the L2 keeps", 1628.2),
    ],
)  # fmt: skip
def test_blocks_of_one_element_a_thread_take_as_long_as_an_h100_took(name, measured_us):
    """By the DRAM's rate alone they would take 87, 174 and 1481 µs: blocks start every 157 clocks on an SM."""
    assert moving(STREAMING[name][0], H100) == pytest.approx(measured_us, rel=0.12)


TOTAL = """
extern "C" __global__ void total(const float4* a, float* o, int n) {
  float sum = 0;
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
    sum += a[i].x + a[i].y + a[i].z + a[i].w;
  atomicAdd(o, sum);
}
"""


@pytest.mark.parametrize(("gpu", "arch"), [("h100", "sm_90a"), ("rtx4070ti", "sm_89")])
def test_a_sum_is_no_faster_than_the_dram_gives_its_terms(gpu, arch):
    terms, chip = 2**22, find_chip(gpu)
    program, kernel = program_of(TOTAL, "total", arch)
    arguments = [DrawnArgument("a", 4 * terms, "fp32"), DrawnArgument("o", 4, "fp32", True)]
    launch = prepare(
        kernel, Geometry((8 * chip.sms, 1, 1), (256, 1, 1)), [*arguments, ScalarArgument("n", np.int32(terms // 4))], 0
    )
    assert predict(program, launch, chip).time_us > 4 * terms / (chip.dram * chip.rates["dram_efficiency"]) * 1e6


ROUNDS = """
extern "C" __global__ void __launch_bounds__(1024, 1) rounds(const float* a, float* o) {
  __shared__ float held[1024];
  float sum = 0;
  for (int round = 0; round < 16; round++) {
    held[threadIdx.x] = a[((SHARED ? 0 : blockIdx.x * 16) + round) * 1024 + threadIdx.x];
    __syncthreads();
    float x = held[threadIdx.x ^ 1];
    #pragma unroll 32
    for (int i = 0; i < 256; i++) sum = fmaf(sum, x, 1.5f);
    __syncthreads();
  }
  o[blockIdx.x * 1024 + threadIdx.x] = sum;
}
"""


def test_sms_that_wait_for_their_loads_in_turns_have_more_than_a_share_of_the_dram():
    """32 warps of an SM load 4 KB, and compute for 2,048 clocks: a share of the DRAM would give them in 700 more."""
    chip = find_chip("rtx3090")
    blocks = 8 * chip.sms

    def clocks_of_round(shared: int) -> float:
        program, kernel = program_of(ROUNDS.replace("SHARED", str(shared)), "rounds", "sm_86")
        arguments = [DrawnArgument("a", 4096 * 16 * blocks, "fp32"), DrawnArgument("o", 4096 * blocks, "fp32", True)]
        launch = prepare(kernel, Geometry((blocks, 1, 1), (1024, 1, 1)), arguments, 0)
        return predict(program, launch, chip).clocks / (8 * 16)

    share_clocks = 4096 * chip.sms * chip.gpu.clock_ghz / (chip.dram * 1e-9 * chip.rates["dram_efficiency"])
    longer = chip.rates["dram_latency"] - chip.rates["l2_latency"]
    assert share_clocks > 600
    assert clocks_of_round(shared=0) - clocks_of_round(shared=1) < longer + 0.5 * share_clocks


HALOS = """
extern "C" __global__ void __launch_bounds__(256) halos(const float* a, float* o) {
  float sum = 0;
  #pragma unroll 1
  for (int n = 0; n < 16; n++) {
    int row = (APART ? blockIdx.x : blockIdx.x / 16 * 16) + n;
    sum = sum * 0.5f + a[(size_t)row * 256 + threadIdx.x];
  }
  o[blockIdx.x * 256 + threadIdx.x] = sum;
}
"""


@pytest.mark.parametrize(("apart", "least", "most"), [(1, 1, 1.5), (0, 12, 18)], ids=["in turn", "at once"])
def test_only_sms_that_ask_for_a_row_at_once_wait_for_it_together(apart, least, most):
    """A block waits for each of 16 rows before it asks for the next; 16 blocks load each row, one a row behind another
    or all in their same step."""
    blocks = 8192
    program, kernel = program_of(HALOS.replace("APART", str(apart)), "halos", "sm_86")
    arguments = [DrawnArgument("a", 1024 * (blocks + 64), "fp32"), DrawnArgument("o", 1024 * blocks, "fp32", True)]
    launch = prepare(kernel, Geometry((blocks, 1, 1), (256, 1, 1), 0), arguments, 0)
    traffic = context_of(program, launch, find_chip("rtx3090"), 1, cold=True).traffic
    assert traffic[0].sharers == pytest.approx(16, rel=0.2)
    assert least <= traffic[0].in_step <= most


CHASE = """
extern "C" __global__ void chase(const int* a, int* o) {
  int at = threadIdx.x;
  for (int n = 0; n < 256; n++) asm volatile("LOAD %0, [%1];" : "=r"(at) : "l"(a + at) : "memory");
  o[threadIdx.x] = at;
}
"""


@pytest.mark.parametrize(
    ("load", "clocks"),
    [("ld.global.ca.s32", 33), ("ld.global.cs.s32", 33), ("ld.global.cg.s32", 222), ("ld.volatile.global.s32", 222)],
)
def test_loads_that_only_an_sm_need_see_hit_its_l1(load, clocks):
    """An RTX 3090's chase takes 23 ns by .ca and .cs, 150 ns by .cg (gpu-micro-bench); 33 and 222 clocks on a 3060."""
    program, kernel = program_of(CHASE.replace("LOAD", load), "chase", "sm_86")
    arguments = [
        DrawnArgument("a", 4096, "int32", contents=np.zeros(1024, np.int32)),
        DrawnArgument("o", 128, "int32", True),
    ]
    launch = prepare(kernel, Geometry((1, 1, 1), (32, 1, 1), 0), arguments, 0)
    found = predict(program, launch, find_chip("rtx3090"), cold=False).clocks / 256
    assert clocks < found < clocks + 30  # with the address


# ── blocks at the end of a tensor ───────────────────────────────────────────────────────────────────────────────────

CUT = """
extern "C" __global__ void cut(float* o, int rows) {
  int row = blockIdx.y * blockDim.y + threadIdx.y;
  float sum = row;
  if (row < rows)
    for (int i = 0; i < 2000; i++) sum = fmaf(sum, sum, 1.5f);
  o[(row * gridDim.x + blockIdx.x) * 32 + threadIdx.x] = sum;
}
"""


def test_of_a_block_that_a_tensors_end_cuts_the_last_warps_do_less():
    """Of two rows of blocks the second has 4 of its 32 warps to run, of which the first is whole."""
    chip = find_chip(H100)
    program, kernel = program_of(CUT, "cut")
    columns = 4 * chip.sms
    out = DrawnArgument("o", 4 * 32 * 64 * columns, "fp32", True)
    launch = prepare(kernel, Geometry((columns, 2, 1), (32, 32, 1)), [out, ScalarArgument("rows", np.int32(36))], 0)
    counts = context_of(program, launch, chip, 2, cold=True).work.counts
    assert counts["fma"] == pytest.approx(2000 * 36 / 2, rel=0.05)


# ── what an H100 showed ─────────────────────────────────────────────────────────────────────────────────────────────

SHARED = """
extern "C" __global__ void latencies(float* o, int turns) {
  __shared__ WORD held[1024];
  for (int i = threadIdx.x; i < 1024; i += blockDim.x) held[i] = WORD{};
  __syncthreads();
  unsigned at = (unsigned)__cvta_generic_to_shared(held) + threadIdx.x % 32 * STRIDE;
  #pragma unroll 1
  for (int turn = 0; turn < turns; turn++)
    #pragma unroll
    for (int i = 0; i < 32; i++) LOAD
  o[threadIdx.x] = at;
}
"""
ONE_WORD = (
    'asm volatile("{.reg .u32 x;\\nld.volatile.shared.u32 x, [%0];\\nadd.u32 %0, %0, x;}" : "+r"(at) :: "memory");'
)


def clocks_of_turn(text, entry, threads=32, words=1 << 12):
    """Return the clocks by which 64 turns are longer than 32, over 32."""
    program, kernel = program_of(text, entry)
    clocks = []
    for turns in (32, 64):
        arguments = [DrawnArgument("o", 4 * words, "fp32", True), ScalarArgument("turns", np.int32(turns))]
        launch = prepare(kernel, Geometry((1, 1, 1), (threads, 1, 1)), arguments, 0)
        clocks.append(predict(program, launch, find_chip(H100)).clocks)
    return (clocks[1] - clocks[0]) / 32


@pytest.mark.parametrize(("ways", "clocks"), [(1, 23), (2, 25), (8, 37), (32, 85)])
def test_a_conflict_lengthens_a_load_from_shared_memory_by_two_clocks(ways, clocks):
    """The addition behind each load takes five clocks more, and the turn of the loop its share."""
    text = SHARED.replace("WORD", "unsigned").replace("STRIDE", str(4 * ways)).replace("LOAD", ONE_WORD)
    assert clocks_of_turn(text, "latencies") / 32 - 5.2 == pytest.approx(clocks, abs=0.6)


BARRIERS = """
extern "C" __global__ void barriers(float* o, int turns) {
  #pragma unroll 1
  for (int turn = 0; turn < turns; turn++)
    #pragma unroll
    for (int i = 0; i < 16; i++) __syncthreads();
  o[threadIdx.x] = turns;
}
"""


@pytest.mark.parametrize(("warps", "clocks"), [(1, 14.6), (8, 28.6), (32, 76.6)])
def test_a_barrier_takes_a_warp_every_two_clocks(warps, clocks):
    assert clocks_of_turn(BARRIERS, "barriers", 32 * warps) / 16 == pytest.approx(clocks, abs=2.5)


ATOMICS = """
extern "C" __global__ void atomics(unsigned* o, int steps) {
  for (int i = 0; i < steps; i++) atomicAdd(&o[WHERE], 1u);
}
"""


def atomics_us(where: str, words: int = 132 * 256, steps: int = 64, gpu: str = H100, arch: str = "sm_90a") -> float:
    """Return the warm time of 132 blocks of 256 threads, each of which adds to words of `o`."""
    program, kernel = program_of(ATOMICS.replace("WHERE", where), "atomics", arch)
    arguments = [DrawnArgument("o", 4 * words, "int32", True), ScalarArgument("steps", np.int32(steps))]
    launch = prepare(kernel, Geometry((132, 1, 1), (256, 1, 1)), arguments, 0)
    return predict(program, launch, find_chip(gpu), cold=False).time_us


OWN_WORDS = "blockIdx.x * 256 + threadIdx.x"
WORD_OF_A_WARP = "(blockIdx.x * 8 + threadIdx.x / 32) * 8"


def test_atomics_on_one_word_take_their_turns():
    assert atomics_us("0") == pytest.approx(53.0, rel=0.15)


@pytest.mark.parametrize(
    ("where", "clocks"), [(OWN_WORDS, 10.4), (WORD_OF_A_WARP, 93.9)], ids=["own words", "one word a warp"]
)
def test_atomics_of_a_warp_take_what_micro_benchmarks_measured_with_all_sms_at_work(where, clocks):
    """By the slope. A word a warp repeated 64 times beside seven others took 273 clocks each, not explained."""
    slope = atomics_us(where, steps=192) - atomics_us(where, steps=64)
    assert slope * 1980 / (128 * 8) == pytest.approx(clocks, rel=0.15)


@pytest.mark.parametrize(("gpu", "arch"), [(H100, "sm_90a"), ("a100", "sm_80"), ("rtx3090", "sm_86")])
def test_words_side_by_side_that_all_sms_add_to_are_added_together(gpu, arch):
    """Measured of no GPU; FlashAttention-2's backward pass adds dQ up so, at 147 words a clock of an H100 or more.
    The L2 of an RTX 3090 bounds both."""
    ours = "(blockIdx.x % BLOCKS * 4096 + i % 16 * 256 + threadIdx.x)"
    own, shared = (atomics_us(ours.replace("BLOCKS", n), 132 * 4096, 256, gpu, arch) for n in ("132", "2"))
    assert 0.99 * own < shared < 2 * own


HISTOGRAM = """
extern "C" __global__ void histogram(const int* a, unsigned* o, int n) {
  for (int i = blockIdx.x * 256 + threadIdx.x; i < n; i += 256 * gridDim.x) atomicAdd(&o[a[i]], 1u);
}
"""


def test_a_histogram_of_64_counters_takes_what_was_measured():
    program, kernel = program_of(HISTOGRAM, "histogram")
    numbers, counters = DrawnArgument("a", 4 << 22, "int32", False), DrawnArgument("o", 256, "int32", True)
    arguments = [numbers, counters, ScalarArgument("n", np.int32(1 << 22))]
    launch = prepare(kernel, Geometry((132 * 8, 1, 1), (256, 1, 1)), arguments, 0)
    assert predict(program, launch, find_chip(H100), cold=False).time_us == pytest.approx(1220, rel=0.15)


PAIRS = """
extern "C" __global__ void pairs(float* o, int steps) {
  for (int i = 0; i < steps; i++) {
    float* at = o + ((blockIdx.x * steps + i) * 256 + threadIdx.x) * WIDTH;
    ADD
  }
}
"""
ONE_BY_ONE = "for (int k = 0; k < WIDTH; k++) atomicAdd(at + k, 1.0f);"
TWO = """asm volatile("red.global.add.v2.f32 [%0], {%1, %1};" :: "l"(at), "f"(1.0f) : "memory");"""
FOUR = """asm volatile("red.global.add.v4.f32 [%0], {%1, %1, %1, %1};" :: "l"(at), "f"(1.0f) : "memory");"""


@pytest.mark.parametrize(("width", "together"), [(2, TWO), (4, FOUR)])
def test_floats_that_one_instruction_adds_cost_a_sector_once(width, together):
    def clocks(add: str, steps: int = 32) -> float:
        program, kernel = program_of(PAIRS.replace("ADD", add).replace("WIDTH", str(width)), "pairs")
        sums = DrawnArgument("o", 4 * width * 132 * 256 * steps, "fp32", True)
        geometry = Geometry((132, 1, 1), (256, 1, 1))
        launch = prepare(kernel, geometry, [sums, ScalarArgument("steps", np.int32(steps))], 0)
        return predict(program, launch, find_chip(H100), cold=False).clocks

    assert clocks(ONE_BY_ONE) == pytest.approx(width * clocks(together), rel=0.2)


BULK = """
extern "C" __global__ void bulk(float* o, int steps) {
  __shared__ alignas(128) float tile[2048];
  for (int i = threadIdx.x; i < 2048; i += 32) tile[i] = i;
  asm volatile("fence.proxy.async;" ::: "memory");
  __syncwarp();
  if (threadIdx.x) return;
  unsigned from = (unsigned)__cvta_generic_to_shared(tile);
  for (int i = 0; i < steps; i++)
    asm volatile("COPY [%0], [%1], 8192;" :: "l"(o + WHERE * 2048), "r"(from) : "memory");
  asm volatile("cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;" ::: "memory");
}
"""
STORES = "cp.async.bulk.global.shared::cta.bulk_group"
ADDS = "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32"


def test_bulk_additions_cost_more_than_stores_and_wait_for_one_another_in_one_place():
    """Measured with all SMs at work, in clocks of an SM: 1.95 and 2.46 a sector, and 3.1 where all add in one place."""

    def clocks_of_a_sector(copy: str, where: str, steps: int = 256) -> float:
        program, kernel = program_of(BULK.replace("COPY", copy).replace("WHERE", where), "bulk")
        arguments = [DrawnArgument("o", 8192 * 132 * 16, "fp32", True), ScalarArgument("steps", np.int32(steps))]
        launch = prepare(kernel, Geometry((132, 1, 1), (32, 1, 1)), arguments, 0)
        return predict(program, launch, find_chip(H100), cold=False).clocks / (256 * steps)

    own = "(blockIdx.x * 16 + i % 16)"
    stored, added = clocks_of_a_sector(STORES, own), clocks_of_a_sector(ADDS, own)
    assert (stored, added) == (pytest.approx(1.95, rel=0.1), pytest.approx(2.46, rel=0.1))
    assert clocks_of_a_sector(ADDS, "0") > added


STORED = """
extern "C" __global__ void __launch_bounds__(128) stored(const float* a, float* o, float* p) {
  for (int i = threadIdx.x; i < 2048; i += 128) o[blockIdx.x * 2048 + i] = 2 * a[blockIdx.x * 2048 + i];
  for (int i = threadIdx.x; i < 2048; i += 128) p[blockIdx.x * 2048 + i] = 2 * o[blockIdx.x * 2048 + i];
}
"""


def test_what_a_block_stored_it_finds_in_the_l2():
    blocks = 16384
    program, kernel = program_of(STORED, "stored")
    arguments = [DrawnArgument(name, 8192 * blocks, "fp32", name != "a") for name in ("a", "o", "p")]
    launch = prepare(kernel, Geometry((blocks, 1, 1), (128, 1, 1)), arguments, 0)
    traffic = context_of(program, launch, find_chip(H100), 16, cold=True).traffic
    from_dram = {a.name: t.loads_from_dram for a, t in zip(launch.allocations, traffic, strict=True)}
    assert from_dram["a"] == pytest.approx(1, rel=0.02)
    assert from_dram["o"] < 0.3


# ── what SMs copy and exchange ──────────────────────────────────────────────────────────────────────────────────────

COPIES = """
extern "C" __global__ void copies(const char* a, float* o, int turns) {
  extern __shared__ __align__(1024) char s[];
  unsigned to = (unsigned)__cvta_generic_to_shared(s) + threadIdx.x / 8 * STRIDE + threadIdx.x % 8 * 16;
  const char* from = a + (size_t)(threadIdx.x / 8) * 8192 + threadIdx.x % 8 * 16;
  #pragma unroll 1
  for (int turn = 0; turn < turns; turn++) {
    #pragma unroll
    for (int i = 0; i < 12; i++)
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
        :: "r"(to + i * 16 * STRIDE), "l"(from + i * 16 * 8192) : "memory");
    asm volatile("cp.async.commit_group;\\ncp.async.wait_group 0;" ::: "memory");
    __syncthreads();
  }
  o[threadIdx.x] = s[threadIdx.x];
}
"""


@pytest.mark.parametrize(("stride", "measured"), [(128, 538), (144, 836)])
def test_rows_16_bytes_apart_tear_the_sectors_that_are_copied_to_them(stride, measured):
    """12 copies of 128 threads, as an H100 took them where one SM was at work; rows of 128 bytes."""
    program, kernel = program_of(COPIES.replace("STRIDE", str(stride)), "copies")
    clocks = []
    for turns in (32, 64):
        arguments = [
            DrawnArgument("a", 2 << 20, "uint8", False), DrawnArgument("o", 512, "fp32", True),
            ScalarArgument("turns", np.int32(turns)),
        ]  # fmt: skip
        launch = prepare(kernel, Geometry((1, 1, 1), (128, 1, 1), 12 * 16 * stride), arguments, 0)
        clocks.append(predict(program, launch, find_chip(H100), cold=False).clocks)
    assert (clocks[1] - clocks[0]) / 32 == pytest.approx(measured, rel=0.08)


NEIGHBORS = """
extern "C" __global__ void __cluster_dims__(2, 1, 1) neighbors(float* o, int turns) {
  __shared__ unsigned words[32];
  unsigned own = (unsigned)__cvta_generic_to_shared(words) + threadIdx.x * 4, mine, x;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mine) : "r"(own), "r"(blockIdx.x));
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(x) : "r"(own), "r"(blockIdx.x ^ 1));
  *(volatile unsigned*)(words + threadIdx.x) = mine;  // so that a load from it gives the address that was loaded from
  asm volatile("barrier.cluster.arrive.aligned;\\nbarrier.cluster.wait.aligned;" ::: "memory");
  #pragma unroll 1
  for (int turn = 0; turn < turns; turn++)
    #pragma unroll
    for (int i = 0; i < 16; i++) asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(x) : "r"(x) : "memory");
  asm volatile("barrier.cluster.arrive.aligned;\\nbarrier.cluster.wait.aligned;" ::: "memory");
  o[threadIdx.x] = x + mine;
}
"""


def clocks_of_cluster(text, entry, blocks=2, threads=32):
    program, kernel = program_of(text, entry)
    clocks = []
    for turns in (16, 48):
        arguments = [DrawnArgument("o", 1 << 20, "fp32", True), ScalarArgument("turns", np.int32(turns))]
        launch = prepare(kernel, Geometry((blocks, 1, 1), (threads, 1, 1)), arguments, 0)
        clocks.append(predict(program, launch, find_chip(H100)).clocks)
    return (clocks[1] - clocks[0]) / 32


def test_a_load_from_a_neighbors_shared_memory_takes_194_clocks():
    assert clocks_of_cluster(NEIGHBORS, "neighbors") / 16 == pytest.approx(194, rel=0.05)


PING = """
extern "C" __global__ void __cluster_dims__(2, 1, 1) ping(float* o, int turns) {
  __shared__ unsigned long long bar[1];
  unsigned own = (unsigned)__cvta_generic_to_shared(bar), there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(own), "r"(blockIdx.x ^ 1));
  if (threadIdx.x == 0) asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(own) : "memory");
  asm volatile("barrier.cluster.arrive.aligned;\\nbarrier.cluster.wait.aligned;" ::: "memory");
  #pragma unroll 1
  for (int turn = 0; turn < turns; turn++) {
    if (threadIdx.x == 0) {
      if (blockIdx.x == 1) WAIT
      asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" :: "r"(there) : "memory");
      if (blockIdx.x == 0) WAIT
    }
    __syncwarp();
  }
  asm volatile("barrier.cluster.arrive.aligned;\\nbarrier.cluster.wait.aligned;" ::: "memory");
  o[threadIdx.x] = turns;
}
"""
WAIT = (
    'asm volatile("{\\n.reg .pred p;\\nW%=:\\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\\n@p bra D%=;\\n'
    'bra W%=;\\nD%=:\\n}" :: "r"(own), "r"(turn & 1) : "memory");'
)


def test_an_arrival_at_another_blocks_mbarrier_takes_as_long_as_was_measured():
    """A fence of 680 clocks, the way to the other SM, and the wake: 938 clocks each way."""
    assert clocks_of_cluster(PING.replace("WAIT", WAIT), "ping") / 2 == pytest.approx(938, rel=0.05)


FENCES = """
extern "C" __global__ void __launch_bounds__(128, 16) fences(float* o, int turns) {
  for (int turn = 0; turn < turns; turn++) asm volatile("fence.acq_rel.gpu;" ::: "memory");
  o[blockIdx.x * 128 + threadIdx.x] = turns;
}
"""


@pytest.mark.parametrize(("blocks", "measured"), [(1, 677), (4, 918)])
def test_fences_that_meet_on_an_sm_take_longer(blocks, measured):
    clocks = clocks_of_cluster(FENCES, "fences", blocks * 132, 128)
    assert clocks == pytest.approx(measured, rel=0.06)


REREAD = """
extern "C" __global__ void reread(const float* a, float* o, int turns) {
  float x = 0, y;
  #pragma unroll 1
  for (int turn = 0; turn < turns; turn++) {
    FENCE
    asm volatile("ld.global.f32 %0, [%1];" : "=f"(y) : "l"(a + threadIdx.x + turn % 4 * 128) : "memory");
    x += y;
  }
  o[threadIdx.x] = x;
}
"""


def test_a_fence_makes_later_loads_go_past_the_l1():
    program, kernel = program_of(REREAD.replace("FENCE", 'asm volatile("fence.acq_rel.gpu;" ::: "memory");'), "reread")
    clocks = []
    for turns in (32, 64):
        arguments = [
            DrawnArgument("a", 1 << 12, "fp32", False), DrawnArgument("o", 512, "fp32", True),
            ScalarArgument("turns", np.int32(turns)),
        ]  # fmt: skip
        launch = prepare(kernel, Geometry((1, 1, 1), (128, 1, 1)), arguments, 0)
        clocks.append(predict(program, launch, find_chip(H100), cold=False).clocks)
    assert (clocks[1] - clocks[0]) / 32 == pytest.approx(1006, rel=0.06)


def test_an_sm_holds_eight_blocks_of_clusters():
    chip, resident = find_chip(H100), {}
    for cluster in ("__cluster_dims__(2, 1, 1)", ""):
        _, kernel = program_of(
            FENCES.replace("__launch_bounds__(128, 16)", f"{cluster} __launch_bounds__(128, 16)"), "fences"
        )
        arguments = [DrawnArgument("o", 1 << 16, "fp32", True), ScalarArgument("turns", np.int32(1))]
        launch = prepare(kernel, Geometry((264, 1, 1), (128, 1, 1)), arguments, 0)
        resident[bool(cluster)] = blocks_resident(launch, chip)
    assert resident == {True: 8, False: 16}


SHORT_BLOCKS = """
extern "C" __global__ void __launch_bounds__(128) blocks(const char* a, float* o) {
  extern __shared__ __align__(1024) char s[];
  unsigned to = (unsigned)__cvta_generic_to_shared(s) + threadIdx.x * 16;
  const char* from = a + (size_t)blockIdx.x * 32768 + threadIdx.x * 16;
  #pragma unroll
  for (int i = 0; i < 16; i++)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(to + i * 2048), "l"(from + i * 2048) : "memory");
  asm volatile("cp.async.commit_group;\\ncp.async.wait_group 0;" ::: "memory");
  __syncthreads();
  if (threadIdx.x == 0) o[blockIdx.x] = s[0];
}
"""


def test_blocks_that_have_ended_at_unlike_times_use_what_the_others_leave_of_the_dram():
    """One block an SM, which waits for its copies: others load meanwhile."""
    program, kernel = program_of(SHORT_BLOCKS, "blocks")
    blocks = 132 * 24
    arguments = [DrawnArgument("a", blocks << 15, "uint8", False), DrawnArgument("o", 4 * blocks, "fp32", True)]
    launch = prepare(kernel, Geometry((blocks, 1, 1), (128, 1, 1), 200 << 10), arguments, 0)
    assert predict(program, launch, find_chip(H100)).shares["dram"] > 0.85


def test_a_single_store_among_the_timed_work_tells_nothing_of_the_rest():
    """Of three timed tiles one stores 64 of 1,536 sectors: the products' own rate holds for what is left."""
    notes = np.arange(64, dtype=float)
    progress = {
        "clocks": notes * 2000 + np.where(notes > 32, 8000, 0), "tensor_work": notes * 1500, "ended": notes * 0,
        "stored": np.where(notes > 32, 64.0, 0.0), "issued": notes * 4000,
    }  # fmt: skip
    values = {name: of[-1] for name, of in progress.items()}
    work = SimpleNamespace(
        alike=True, mean=1e6, instructions=np.array([1e6]),
        counts={
            "tensor_clock_columns": 8 * 10 * values["tensor_work"], "hmma": 0.0, "hmma_fp16": 0.0, "instructions": 1e6,
            "sectors_stored": 1536.0 * 30, "tensor_sectors_stored": 0.0,
        },
    )  # fmt: skip
    grid, share = SimpleNamespace(together=1), SimpleNamespace(clusters=[0])
    context = SimpleNamespace(share=share, work=work, chip=find_chip(H100), grid=grid, resident=1)
    rest = _rest(context, SimpleNamespace(progress=progress, values=values), 1)
    assert rest == pytest.approx(9 * values["clocks"], rel=0.1)


# ── what has no predicted time, and what would take long to predict ─────────────────────────────────────────────────

ENDLESS = {
    "waits for what another block stores": """
    volatile int* there = flags + blockIdx.x + 1;
    if (threadIdx.x == 0) while (*there >= 0);
    __syncthreads();""",
    "computes for hours": "for (long i = 0; i < 1l << 40; i++) x = x * 1.0001f + 0.5f;",
}


@pytest.mark.parametrize("what", ENDLESS)
def test_a_block_without_an_end_is_named(what):
    """20 million instructions of a block that tells nobody anything are executed, in less than a CPU second."""
    text = f'extern "C" __global__ void f(float* o, int* flags) {{ float x = o[threadIdx.x]; {ENDLESS[what]} *o = x; }}'
    program, kernel = program_of(text, "f")
    arguments = [DrawnArgument("o", 4 * 256, "fp32", True), DrawnArgument("flags", 4 * 265, "int32", True)]
    launch = prepare(kernel, Geometry((264, 1, 1), (256, 1, 1)), arguments, 0)
    with pytest.raises(Unpredictable, match=r"it waits for another block.* or its work is too long to be counted$"):
        predict(program, launch, find_chip(H100))


def test_what_a_block_does_is_not_cut_off_where_counting_ends(monkeypatch):
    program, kernel = program_of(STORED, "stored")
    arguments = [DrawnArgument(name, 8192 * 264, "fp32", name != "a") for name in ("a", "o", "p")]
    launch = prepare(kernel, Geometry((264, 1, 1), (128, 1, 1)), arguments, 0)
    assert predict(program, launch, find_chip(H100)).counts["instructions"] > 400
    monkeypatch.setattr("evoengine.sass.grid.WHOLE_LIMIT", 400)
    with pytest.raises(
        Unpredictable, match=r"^more than 400 warp instructions of block 0 and no end: its work is not kno"
    ):
        predict(program, launch, find_chip(H100))


def test_the_largest_grid_is_not_listed_block_by_block():
    grid = SimpleNamespace(clusters=2**31 - 1)
    share = busiest(grid, Work({"instructions": 7.0}, np.array([7.0])), 132, 32)
    assert isinstance(share.clusters, range) and len(share.clusters) == -(-grid.clusters // 132)
    assert share.excess == pytest.approx(1, rel=1e-6)
