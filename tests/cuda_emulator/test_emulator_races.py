"""Blocks that combine their results by a counter: right kernels pass under every seed, and what lacks an order is a
race under every seed, named with both places."""

import numpy as np
import pytest

from evoengine.devices.base import KernelCrashed, KernelFailure
from evoengine.records import Launch, Source
from evoengine.stages.compile import compile_source
from tests.support.exhaustive import representatives

# Sums of rows, each split over several blocks; the last one of a row adds their parts up, and resets the counter.
SPLIT = """
extern "C" __global__ void f(const float* x, float* partial, unsigned* counter, float* o, int n) {
    __shared__ float sums[64];
    __shared__ bool last;
    const int row = blockIdx.y, part = blockIdx.x, parts = gridDim.x;
    float sum = 0;
    for (int i = part * n / parts + threadIdx.x; i < (part + 1) * n / parts; i += blockDim.x) sum += x[row * n + i];
    sums[threadIdx.x] = sum;
    __syncthreads();
    for (int half = blockDim.x / 2; half; half /= 2) {
        if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
        __syncthreads();
    }
    if (threadIdx.x < 4) partial[(row * parts + part) * 4 + threadIdx.x] = sums[0] * (threadIdx.x + 1);
    __threadfence();  // of all threads
    __syncthreads();  // before one counts
    if (threadIdx.x == 0) {
        unsigned before = atomicAdd(&counter[row], 1u);
        last = before == parts - 1;
    }
    __syncthreads();
    if (!last) return;
    // the last one
    if (threadIdx.x < 4) {
        float total = 0;
        for (int p = 0; p < parts; ++p) total += partial[(row * parts + p) * 4 + threadIdx.x];
        o[row * 4 + threadIdx.x] = total;
    }
    if (threadIdx.x == 0) counter[row] = 0;
}
"""
COUNT = "atomicAdd(&counter[row], 1u)"
ALL_FENCE = "    __threadfence();  // of all threads\n"
STORE = "    if (threadIdx.x < 4) partial[(row * parts + part) * 4 + threadIdx.x] = sums[0] * (threadIdx.x + 1);\n"
RESET = "    if (threadIdx.x == 0) counter[row] = 0;\n"
ROWS, PARTS, N = 3, 6, 256


def by_ref(order, scope="device"):
    counted = f"cuda::atomic_ref<unsigned, cuda::thread_scope_{scope}>(counter[row])"
    return [("__threadfence();  // of", "// of"), (COUNT, f"{counted}.fetch_add(1u, cuda::memory_order_{order})")]


def by_ptx(mnemonic):
    assembly = f'asm volatile("{mnemonic} %0, [%1], 1;" : "=r"(before) : "l"(&counter[row]) : "memory")'
    return [(f"unsigned before = {COUNT};", f"unsigned before; {assembly};"), ("__threadfence();  // of", "// of")]


RIGHT = [
    pytest.param([], id="as the programming guide has it"),
    pytest.param([(COUNT, "atomicInc(&counter[row], parts - 1)"), (RESET, "")], id="a counter that wraps"),
    pytest.param([("    // the last", "    __threadfence();  // the last")], id="a fence before the parts are read"),
    pytest.param([(ALL_FENCE, ""), ("        unsigned", "        __threadfence();\n        unsigned")], id="one fence"),
    pytest.param([(RESET, RESET.replace("counter[row] = 0", "atomicExch(&counter[row], 0u)"))], id="reset atomically"),
    pytest.param([("__threadfence()", "__threadfence_system()")], id="a fence of the system"),
    pytest.param(by_ref("acq_rel"), id="atomic_ref"),
    pytest.param(by_ref("seq_cst", "system"), id="atomic_ref of the system"),
    pytest.param(by_ptx("atom.acq_rel.gpu.global.add.u32"), id="atom.acq_rel"),
    pytest.param(by_ptx("atom.global.gpu.add.acq_rel.u32"), id="atom with its parts in another order"),
    pytest.param(
        [("extern", "__device__ unsigned count[8];\nextern"), (COUNT, "atomicAdd(&count[row], 1u)"),
         (RESET, RESET.replace("counter[row]", "count[row]"))], id="a counter of the device"),
    pytest.param([("const float* x, float* partial", "const float* x, volatile float* partial")], id="volatile parts"),
]  # fmt: skip
RACES = [
    pytest.param([(ALL_FENCE, "")], "partial", id="no fence"),
    pytest.param([("__threadfence()", "__threadfence_block()")], "partial", id="a fence of the block"),
    pytest.param([("    __syncthreads();  // before one counts\n", "")], "partial", id="no barrier before the count"),
    pytest.param(
        [(STORE, ""), ("    __syncthreads();\n    if (!last)", f"{STORE}    __syncthreads();\n    if (!last)")],
        "partial", id="counted before the parts are stored"),
    pytest.param([(ALL_FENCE, ""), ("        last =", "        __threadfence();\n        last =")], "partial",
                 id="a fence behind the count"),
    pytest.param(
        [(ALL_FENCE, "    if (threadIdx.x == 0) __threadfence();\n")], "partial", id="one thread's fence too early"),
    pytest.param([("atomicAdd(", "atomicAdd_block(")], "counter", id="a counter of the block"),
    pytest.param([(COUNT, "counter[row]++")], "counter", id="a counter that is not atomic"),
    pytest.param([("        last =", "        if (before == parts - 2) counter[row] = 0;\n        last =")], "counter",
                 id="reset by another block"),
    pytest.param([("    float sum = 0;", "    if (part == 0) counter[row] = 0;\n    float sum = 0;")], "counter",
                 id="reset as the first block begins"),
    pytest.param(by_ref("relaxed"), "partial", id="a relaxed atomic_ref"),
    pytest.param(by_ref("release"), "partial", id="an atomic_ref that only releases"),
    pytest.param(by_ref("acquire"), "partial", id="an atomic_ref that only acquires"),
    pytest.param(by_ref("acq_rel", "block"), "counter", id="an atomic_ref of the block"),
    pytest.param(by_ptx("atom.relaxed.gpu.global.add.u32"), "partial", id="atom.relaxed"),
    pytest.param(by_ptx("atom.acq_rel.cta.global.add.u32"), "counter", id="atom of the block"),
    pytest.param([("o[row * 4 + threadIdx.x] = total", "o[row * 4] = total")], "o", id="all store to one place"),
    pytest.param([("extern", "__device__ float part_of[256];\nextern"), (ALL_FENCE, ""), ("partial[", "part_of[")],
                 "part_of", id="no fence for a variable of the device"),
]  # fmt: skip


@pytest.fixture
def launched(emulate_rounds, scratch):
    """launched(text, seed, rounds) → the outputs and what they should be, of each round."""

    def launch(text, seed, count=2):
        rng = np.random.default_rng(seed)
        rows = [rng.integers(-8, 8, (ROWS, N)).astype(np.float32) for _ in range(count)]
        buffers = scratch(ROWS * PARTS * 16, zeroed=False), scratch(ROWS * 4)
        calls = [[("f", x, *buffers, np.zeros((ROWS, 4), np.float32), np.int32(N))] for x in rows]
        done = emulate_rounds(text, calls, grid=(PARTS, ROWS, 1), threads=64, seed=seed)
        assert not done.unwritten
        return [t["o"] for t in done.tensors], [x.sum(1)[:, None] * np.arange(1, 5) for x in rows]

    return launch


def edited(edits, text=SPLIT):
    for old, new in edits:
        assert old in text, old
        text = text.replace(old, new)
    return text if "atomic_ref" not in text else "#include <cuda/atomic>" + text


@pytest.mark.parametrize("edits", representatives(RIGHT, "as the", "atomic_ref", "a counter of the device"))
def test_blocks_that_combine_by_a_counter_are_right(launched, edits):
    for seed in range(3):
        for found, right in zip(*launched(edited(edits), seed), strict=True):
            np.testing.assert_array_equal(found, right)


@pytest.mark.exhaustive
@pytest.mark.parametrize("edits", RIGHT)
def test_nvrtc_takes_them_too(edits):
    compile_source(Source(edited(edits), "f", Launch((1, 1, 1), 64, 0)), "sm_90a")


@pytest.mark.parametrize(
    ("edits", "tensor"), representatives(RACES, "no fence", "counted before", "a counter of the block", "a relaxed")
)
def test_what_nothing_orders_is_a_race_under_every_seed(launched, edits, tensor):
    places = r"line \d+ and .* at line \d+ by block \(\d,\d,0\), thread \d+, which nothing orders"
    for seed in range(3):
        with pytest.raises(KernelCrashed, match=rf"race on {tensor} at byte \d+: .* at {places}, kernel f, block"):
            launched(edited(edits), seed)


def test_a_race_is_told_with_the_lines_of_both_accesses(launched):
    text = edited([(ALL_FENCE, "")])
    read, write = (1 + text[: text.index(part)].count("\n") for part in ("total += partial", STORE.strip()))
    with pytest.raises(KernelCrashed, match=rf"read at line {read} and write at line {write} by block"):
        launched(text, seed=1)


def test_a_counter_that_is_never_reset_is_seen_by_the_second_launch(launched):
    for seed in range(3):
        with pytest.raises((AssertionError, KernelFailure)):
            np.testing.assert_array_equal(*launched(edited([(RESET, "")]), seed))
        np.testing.assert_array_equal(*launched(edited([(RESET, "")]), seed, count=1))


SAME = """
extern "C" __global__ void f(const int* n, int* found, int* o) {
    if (n[blockIdx.x * 32 + threadIdx.x] == 7) found[0] = VALUE;
    __threadfence();
    o[blockIdx.x * 32 + threadIdx.x] = 0;
}
"""


def test_threads_may_store_the_same_value_to_one_place_and_not_different_ones(emulate_rounds, scratch):
    def launch(value):
        calls = [[("f", np.full(128, 7, np.int32), scratch(4), np.zeros(128, np.int32))]]
        return emulate_rounds(SAME.replace("VALUE", value), calls, grid=(4, 1, 1))

    launch("1")
    with pytest.raises(KernelCrashed, match="race on found at byte 0: write at line 3 and write at line 3"):
        launch("1 + threadIdx.x")


READ_ONLY = """
extern "C" __global__ void f(float* part, float* o) {
    part[threadIdx.x] = 1 + threadIdx.x;
    __threadfence();
    o[threadIdx.x] = LOAD;
}
"""


@pytest.mark.parametrize(
    "load",
    representatives(
        [
            pytest.param("__ldg(&part[threadIdx.x])", id="ldg"),
            pytest.param(
                '[&] { float v; asm("ld.global.nc.f32 %0, [%1];" : "=f"(v) : "l"(part + threadIdx.x)); return v; }()',
                id="ld.global.nc",
            ),
        ],
        "ldg",
    ),
)
def test_what_the_kernel_writes_is_not_read_by_the_read_only_cache(emulate_rounds, scratch, floats, load):
    text = READ_ONLY.replace("LOAD", load)
    with pytest.raises(KernelCrashed, match="part at byte 0 is read through the read-only cache at line 5, .* line 3"):
        emulate_rounds(text, [[("f", scratch(4), floats(1))]], threads=1)


PASTED = """
#define GLUE(a, b) a##b
extern "C" __global__ void f(unsigned* counter, unsigned* o) {
    o[blockIdx.x] = GLUE(ato, micAdd_block)(counter, 1u);
}
"""


def test_an_atomic_that_a_macro_pastes_together_is_found(emulate_rounds, scratch):
    with pytest.raises(KernelCrashed, match="race on counter"):
        emulate_rounds(PASTED, [[("f", scratch(4), np.zeros(4, np.uint32))]], grid=(4, 1, 1), threads=1)
