"""What the model predicts of launches: clusters along each axis, blocks that go on to other tiles, shared loads."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from evoengine.devices.base import ScalarArgument
from evoengine.sass import memory
from evoengine.sass.chip import find_chip
from evoengine.sass.grid import Work, busiest, grid_of
from evoengine.sass.launch import DrawnArgument, Geometry, prepare
from evoengine.sass.predict import (
    TIME_LIMIT,
    Unpredictable,
    blocks_resident,
    context_of,
    predict,
    time_busiest,
)
from tests.support.cluster_kernels import pair_text
from tests.support.exhaustive import more
from tests.support.machine_code import program_of
from tests.support.tma_kernels import store_text, view

H100 = "h100"


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


@pytest.mark.parametrize("surveyed", [128, 129])
def test_what_all_blocks_read_is_seen_in_any_number_of_them(surveyed, monkeypatch):
    """All read one row three times: 128 or 129 of a wave of 2,112 blocks tell that the rest loads nothing more."""
    program, kernel = program_of(PASSES.replace("SHARED", "1"), "rows")
    arguments = [DrawnArgument("a", 8192, "fp32"), DrawnArgument("o", 512 * 4096, "fp32", True)]
    launch = prepare(kernel, Geometry((4096, 1, 1), (128, 1, 1), 0), arguments, 0)
    c = context_of(program, launch, find_chip(H100), 16, cold=True)
    monkeypatch.setattr(memory, "FEWEST", 1)
    monkeypatch.setattr(memory, "SURVEYED", int((surveyed + 0.5) * c.work.mean))
    traffic, *_ = memory.traffic_of(program, launch, c.chip, c.grid, c.work, 2112, cold=True)
    assert traffic[0].loads_from_dram == pytest.approx(1 / 4096 / 3, rel=0.02)


LATE = """
extern "C" __global__ void __launch_bounds__(128) late(const float* q, const float* k, float* o) {
  float sum = 0;
  for (int i = 0; i < 32; i++) sum = sum * 0.5f + q[(blockIdx.x * 32 + i) * 128 + threadIdx.x];
  for (int i = 0; i < FIRST; i++) sum = fmaf(sum, sum, 1.5f);
  for (int i = 0; i < 256; i++) sum = sum * 0.5f + k[(blockIdx.x / TOGETHER * 256 + i) * 128 + threadIdx.x];
  o[blockIdx.x * 128 + threadIdx.x] = sum;
}
"""


@pytest.mark.parametrize("together", [1, 2])
@pytest.mark.parametrize("first", [0, 4096], ids=["soon", "late"])
def test_what_blocks_load_most_is_surveyed_however_late_they_come_to_it(first, together):
    """Blocks load 128 KB of k at once or behind 4,096 FMAs; those that run side by side may have the same k."""
    blocks = 132 * 8
    text = LATE.replace("FIRST", str(first)).replace("TOGETHER", str(together))
    program, kernel = program_of(text, "late")
    sizes = {"q": 1 << 14, "k": 1 << 17, "o": 512}
    arguments = [DrawnArgument(name, size * blocks, "fp32", name == "o") for name, size in sizes.items()]
    launch = prepare(kernel, Geometry((blocks, 1, 1), (128, 1, 1)), arguments, 0)
    traffic = context_of(program, launch, find_chip(H100), 8, cold=True).traffic
    from_dram = {a.name: t.loads_from_dram for a, t in zip(launch.allocations, traffic, strict=True)}
    assert from_dram["k"] == pytest.approx(1 / together, rel=0.05)


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
    ("group", "strips", "within"), [(1, 2 + 512, 1.6), (8, 1.5 + 99, 1.1), (32, 1.5 + 25, 1.6)],
)  # fmt: skip
def test_the_order_of_tiles_decides_what_comes_from_the_dram(group, strips, within):
    """Of 512 × 512 tiles, 792 run at once: along a row they touch all of B, in groups of rows a few strips of both.

    A strip has 256 KB, and each matrix 128 MB. `strips` are those of both that a wave touches and no wave shortly
    before it did: A's 512 strips are loaded once, as the L2 keeps those of a group while its waves go through B.
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


def test_a_stencil_whose_neighbors_the_caches_hold_takes_as_long_as_a_copy():
    """Of a line that it loads again and again in part, the DRAM gives each sector once."""
    stencil, copy = STREAMING["a stencil over neighbors and rows"][0], STREAMING["a copy"][0]
    assert moving(stencil, "a100") == pytest.approx(moving(copy, "a100"), rel=0.06)


@pytest.mark.parametrize(("apart", "loaded"), [(1 << 18, 1), (1 << 24, 3)], ids=["of the next wave", "sixty waves on"])
def test_what_later_waves_load_again_is_in_the_l2_if_it_keeps_what_lies_between(apart, loaded):
    """Of three elements that a thread loads; a wave on an H100 has 270,336 threads, its L2 keeps 38 MB."""
    text = f"""extern "C" __global__ void move(const float* a, float* o) {{
        size_t i = (size_t)blockIdx.x * 256 + threadIdx.x; o[i] = a[i] + a[i + {apart}] + a[i + {2 * apart}]; }}"""
    program, kernel = program_of(text, "move", "sm_90a")
    arguments = [DrawnArgument("a", 4 * (FLOATS + 2 * apart), "fp32"), DrawnArgument("o", 4 * FLOATS, "fp32", True)]
    launch = prepare(kernel, Geometry((FLOATS // 256, 1, 1), (256, 1, 1), 0), arguments, 0)
    traffic = context_of(program, launch, find_chip(H100), 8, cold=True).traffic
    assert 3 * traffic[0].loads_from_dram == pytest.approx(loaded, rel=0.1)


TWICE = """extern "C" __global__ void twice(const float4* a, float* o, int length) {
    const float4* row = a + (size_t)blockIdx.x * length;
    float sum = 0, scaled = 0;
    for (int i = threadIdx.x; i < length; i += 64) sum += row[i].x + row[i].y + row[i].z + row[i].w;
    for (int i = threadIdx.x; i < length; i += 64) scaled += row[i].x / sum;
    o[blockIdx.x * 64 + threadIdx.x] = scaled; }"""


@pytest.mark.parametrize(("kilobytes", "loaded"), [(4, 1), (32, 2)], ids=["17 MB at once", "138 MB at once"])
def test_a_row_that_a_block_loads_twice_is_in_the_l2_if_it_keeps_the_rows_of_all_blocks(kilobytes, loaded):
    """Of 4,224 blocks that an H100 runs at once; its L2 keeps 38 MB."""
    program, kernel = program_of(TWICE, "twice", "sm_90a")
    arguments = [
        DrawnArgument("a", (kilobytes << 10) * 8448, "fp32"),
        DrawnArgument("o", 4 * 64 * 8448, "fp32", True),
        ScalarArgument("length", np.int32(kilobytes << 6)),
    ]
    launch = prepare(kernel, Geometry((8448, 1, 1), (64, 1, 1), 0), arguments, 0)
    traffic = context_of(program, launch, find_chip(H100), 32, cold=True).traffic
    assert 2 * traffic[0].loads_from_dram == pytest.approx(loaded, rel=0.05)


SCALED = """extern "C" __global__ void scaled(const float4* a, float4* o, int length) {
    const float4* row = a + (size_t)blockIdx.x * length;
    float4* out = o + (size_t)blockIdx.x * length;
    float sum = 0;
    for (int i = threadIdx.x; i < length; i += 64) sum += row[i].x + row[i].y + row[i].z + row[i].w;
    for (int i = threadIdx.x; i < length; i += 64) {
        float4 v = row[i];
        out[i] = make_float4(v.x / sum, v.y / sum, v.z / sum, v.w / sum);
    } }"""


def test_a_kernel_of_which_only_the_first_loads_are_timed_takes_what_the_dram_needs_for_all():
    """8,448 blocks load 16 KB of their own twice and store as much; only their first instructions are timed."""
    program, kernel = program_of(SCALED, "scaled", "sm_90a")
    size = 8448 << 14
    arguments = [DrawnArgument("a", size, "fp32"), DrawnArgument("o", size, "fp32", True)]
    arguments.append(ScalarArgument("length", np.int32(1024)))
    launch, chip = prepare(kernel, Geometry((8448, 1, 1), (64, 1, 1), 0), arguments, 0), find_chip(H100)
    run = time_busiest(context_of(program, launch, chip, 32, cold=True), 1.755, limit=8_000)
    moved = 3 * size - chip.l2_kept_bytes
    assert run.clocks / 1.755e9 >= moved / chip.dram


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


def test_a_block_that_ends_before_its_stores_by_tma_has_a_time():
    """The executor refuses that; a model takes no results, so that it may leave them out."""
    program, kernel = program_of(store_text(WAIT=""), "f")
    blocks, box = 264, (16, 64)
    arguments = [
        DrawnArgument("a", 2048, "fp16"),
        DrawnArgument("o", 2 * 64 * 128, "fp16", True),
        view((64, 128), box, tensor="o"),
        ScalarArgument("count", np.int32(16 * 64)),
    ]
    launch = prepare(kernel, Geometry((blocks, 1, 1), (64, 1, 1), 2048), arguments, 0)
    assert 1 < predict(program, launch, find_chip(H100)).time_us < 100
