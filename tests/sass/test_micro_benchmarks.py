"""What micro-benchmarks measured on an H100, and what the model predicts of the same loops, in clocks of a turn."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from evoengine.devices.base import ScalarArgument
from evoengine.sass.chip import find_chip
from evoengine.sass.launch import DrawnArgument, Geometry, prepare
from evoengine.sass.predict import (
    _rest,
    blocks_resident,
    predict,
)
from tests.support.machine_code import program_of

H100 = "h100"


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


HALFS = """
extern "C" __global__ void halfs(unsigned* o, int turns) {
  unsigned x[8], y = threadIdx.x * 3, z = threadIdx.x * 5;
  for (int i = 0; i < 8; i++) x[i] = threadIdx.x + i;
  if (turns < FROM)
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {%0, %1}, {%2, %3, %2, %3}, {%2, %3}, {%0, %1};"
                 : "+r"(x[0]), "+r"(x[1]) : "r"(y), "r"(z));
  #pragma unroll 1
  for (int turn = 0; turn < turns; turn++)
    #pragma unroll
    for (int i = 0; i < 64; i++) asm volatile("fma.rn.f16x2 %0, %0, %1, %2;" : "+r"(x[i % 8]) : "r"(y), "r"(z));
  for (int i = 0; i < 8; i++) o[threadIdx.x] = o[threadIdx.x] ^ x[i];
}
"""


@pytest.mark.parametrize(("products", "clocks"), [("-0x7fffffff - 1", 1.05), ("0", 2.1)])
def test_halfs_have_two_pipes_of_which_hfma2_mma_uses_one(products, clocks):
    """ptxas turns every second FMA into HFMA2.MMA, but in kernels that have products of matrices."""
    text = HALFS.replace("FROM", products)
    assert clocks_of_turn(text, "halfs", 512) / 64 / 4 == pytest.approx(clocks, rel=0.08)


LOCAL = """
extern "C" __global__ void spills(WORD* o, int turns) {
  volatile WORD held[64];
  #pragma unroll 1
  for (int turn = 0; turn < turns; turn++)
    #pragma unroll
    for (int i = 0; i < 64; i++) held[i] = (WORD)turn;
  o[threadIdx.x] = held[turns % 64];
}
"""


@pytest.mark.parametrize(("word", "lines"), [("int", 1), ("long long", 2)])
def test_a_store_to_local_memory_costs_what_whole_lines_of_global_memory_do(word, lines):
    """The L2 took a line of one SM in 4.0 clocks; words of 8 bytes lie in two lines."""
    text = LOCAL.replace("WORD", word)
    assert clocks_of_turn(text, "spills", 512) / 64 / 16 / lines == pytest.approx(4.0, rel=0.05)


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

    def clocks_of_a_sector(copy: str, where: str, steps: int = 64) -> float:
        program, kernel = program_of(BULK.replace("COPY", copy).replace("WHERE", where), "bulk")
        arguments = [DrawnArgument("o", 8192 * 132 * 16, "fp32", True), ScalarArgument("steps", np.int32(steps))]
        launch = prepare(kernel, Geometry((132, 1, 1), (32, 1, 1)), arguments, 0)
        return predict(program, launch, find_chip(H100), cold=False).clocks / (256 * steps)

    own = "(blockIdx.x * 16 + i % 16)"
    stored, added = clocks_of_a_sector(STORES, own), clocks_of_a_sector(ADDS, own)
    assert (stored, added) == (pytest.approx(1.95, rel=0.1), pytest.approx(2.46, rel=0.1))
    assert clocks_of_a_sector(ADDS, "0") > added


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
