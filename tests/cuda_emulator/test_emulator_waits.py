"""Blocks that wait for one another by a flag in memory: how they look, what orders them, when it is a hang."""

import numpy as np
import pytest

from evoengine.devices.base import KernelCrashed, KernelHung
from tests.support.exhaustive import more, representatives

# Each block adds its own to what the block before it has left, as stream-K hands partial tiles on.
CHAIN = """
extern "C" __global__ void f(const float* x, float* partial, unsigned* flag, float* o) {
    const int block = blockIdx.x;
    float sum = x[block * blockDim.x + threadIdx.x];
    if (block > 0) {
        if (threadIdx.x == 0) {
            while (*(volatile unsigned*)&flag[block - 1] == 0) __nanosleep(20);
            __threadfence();  // acquires
        }
        __syncthreads();  // behind the wait
        sum += partial[(block - 1) * blockDim.x + threadIdx.x];
        __syncthreads();
        if (threadIdx.x == 0) *(volatile unsigned*)&flag[block - 1] = 0;
    }
    if (block + 1 == gridDim.x) {
        o[threadIdx.x] = sum;
        return;
    }
    partial[block * blockDim.x + threadIdx.x] = sum;
    __threadfence();  // releases
    __syncthreads();  // before it is raised
    if (threadIdx.x == 0) *(volatile unsigned*)&flag[block] = 1;
}
"""
WAIT = "while (*(volatile unsigned*)&flag[block - 1] == 0) __nanosleep(20);"
RAISE = "*(volatile unsigned*)&flag[block] = 1;"
ACQUIRE = "            __threadfence();  // acquires\n"
RELEASE = "    __threadfence();  // releases\n"
BLOCKS = 24


def by_load(mnemonic):
    load = f'asm volatile("{mnemonic} %0, [%1];" : "=r"(seen) : "l"(&flag[block - 1]) : "memory")'
    return [(WAIT, f"unsigned seen; do {load}; while (seen == 0);")]


def by_store(mnemonic):
    return [(RAISE, f'asm volatile("{mnemonic} [%0], %1;" :: "l"(&flag[block]), "r"(1u) : "memory");')]


def of_ref(scope="device"):
    return f"cuda::atomic_ref<unsigned, cuda::thread_scope_{scope}>"


NO_FENCES = [(ACQUIRE, ""), (RELEASE, "")]
RIGHT = [
    pytest.param([], id="volatile and fences"),
    pytest.param([(WAIT, "while (atomicAdd(&flag[block - 1], 0u) == 0) {}")], id="an atomic that adds nothing"),
    pytest.param([*by_load("ld.acquire.gpu.global.u32"), (ACQUIRE, "")], id="ld.acquire"),
    pytest.param([*by_load("ld.global.acquire.sys.b32"), (ACQUIRE, "")], id="ld with its parts in another order"),
    pytest.param([*by_store("st.release.gpu.global.u32"), (RELEASE, "")], id="st.release"),
    pytest.param([*by_store("red.release.gpu.global.add.u32"), (RELEASE, "")], id="red.release"),
    pytest.param(
        [(ACQUIRE, ACQUIRE.replace("__threadfence()", 'asm volatile("fence.acq_rel.gpu;" ::: "memory")')),
         (RELEASE, RELEASE.replace("__threadfence()", 'asm volatile("membar.gl;" ::: "memory")'))], id="fences of PTX"),
    pytest.param(
        [*NO_FENCES, (WAIT, f"while ({of_ref()}(flag[block - 1]).load(cuda::memory_order_acquire) == 0) {{}}"),
         (RAISE, f"{of_ref()}(flag[block]).store(1, cuda::memory_order_release);")], id="atomic_ref"),
    pytest.param(
        [(ACQUIRE, "            cuda::atomic_thread_fence(cuda::memory_order_acquire, cuda::thread_scope_device);\n"),
         (WAIT, f"while ({of_ref()}(flag[block - 1]).load(cuda::memory_order_relaxed) == 0) {{}}")],
        id="atomic_ref and a fence"),
    pytest.param([("        if (threadIdx.x == 0) {\n            wh", "        {\n            wh")], id="all look"),
]  # fmt: skip
RACES = [
    pytest.param([(ACQUIRE, "")], "partial", id="nothing acquires"),
    pytest.param([(RELEASE, "")], "partial", id="nothing releases"),
    pytest.param([*by_load("ld.relaxed.gpu.global.u32"), (ACQUIRE, "")], "partial", id="ld.relaxed"),
    pytest.param([*by_load("ld.acquire.cta.global.u32"), (ACQUIRE, "")], "flag", id="ld.acquire of the block"),
    pytest.param([(ACQUIRE, ACQUIRE.replace("fence", "fence_block"))], "partial", id="a fence of the block"),
    pytest.param([*by_store("st.relaxed.gpu.global.u32"), (RELEASE, "")], "partial", id="st.relaxed"),
    pytest.param([*by_store("red.relaxed.gpu.global.add.u32"), (RELEASE, "")], "partial", id="red.relaxed"),
    pytest.param([(RAISE, "flag[block] = 1;")], "flag", id="a flag that is raised by a plain store"),
    pytest.param([("__syncthreads();  // before it is raised", "")], "partial", id="raised without a barrier"),
    pytest.param([("__syncthreads();  // behind the wait", "")], "partial", id="read without a barrier"),
    pytest.param(
        [(RAISE, f"{{ {RAISE} partial[block * blockDim.x] = sum; }}"),
         ("    partial[block * blockDim.x + threadIdx.x] = sum;", "    if (threadIdx.x) partial[block * blockDim.x + "
          "threadIdx.x] = sum;")], "partial", id="raised before the last store"),
]  # fmt: skip


@pytest.fixture
def launched(emulate_rounds, scratch):
    def launch(edits, seed, blocks=BLOCKS, threads=64):
        text = CHAIN
        for old, new in edits:
            assert old in text, old
            text = text.replace(old, new)
        text = text if "cuda::atomic" not in text else "#include <cuda/atomic>" + text
        rng = np.random.default_rng(seed)
        x = [rng.integers(-8, 8, (blocks, threads)).astype(np.float32) for _ in range(2)]
        buffers = scratch(blocks * threads * 4, zeroed=False), scratch(blocks * 4)
        calls = [[("f", a, *buffers, np.zeros(threads, np.float32))] for a in x]
        done = emulate_rounds(text, calls, grid=(blocks, 1, 1), threads=threads, seed=seed)
        return [t["o"] for t in done.tensors], [a.sum(0) for a in x]

    return launch


@pytest.mark.parametrize("edits", representatives(RIGHT, "volatile", "ld.acquire", "red.release"))
def test_blocks_that_wait_for_one_another_come_to_their_end(launched, edits):
    for seed in range(3):
        np.testing.assert_array_equal(*launched(edits, seed))


@pytest.mark.parametrize(("edits", "tensor"), representatives(RACES, "nothing acquires", "ld.acquire", "red.relaxed"))
def test_what_nothing_orders_is_a_race_under_every_seed(launched, edits, tensor):
    for seed in range(3):
        with pytest.raises(KernelCrashed, match=rf"race on {tensor} at byte \d+: .* which nothing orders"):
            launched(edits, seed)


@pytest.mark.parametrize(
    ("edits", "more_text"),
    [
        ([(RAISE, ";")], "wait at __syncthreads"),
        *more([([("&flag[block - 1] == 0", "&flag[(block + 1) % gridDim.x] == 0")], "wait at __syncthreads")]),
    ],
)
def test_a_flag_that_nobody_raises_is_a_hang_whatever_the_time(launched, edits, more_text):
    found = []
    for _ in range(2):
        with pytest.raises(KernelHung, match=rf"look at memory that does not change \(line 7, e.g. .*{more_text}") as e:
            launched(edits, seed=1, blocks=4)
        found.append(str(e.value))
    assert found[0] == found[1]


GRID = """
extern "C" __global__ void f(unsigned* arrived, const int* in, int* between, int* o) {
    const int at = blockIdx.x * blockDim.x + threadIdx.x;
    between[at] = in[at] + 1;
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        const unsigned before = atomicAdd(arrived, 1u), goal = (before / gridDim.x + 1) * gridDim.x;
        while (*(volatile unsigned*)arrived < goal) {}
        __threadfence();
    }
    __syncthreads();
    o[at] = between[(at + blockDim.x) % (gridDim.x * blockDim.x)];
}
"""


@pytest.mark.parametrize("blocks", [3, *more([40, 132])])
def test_a_barrier_of_the_whole_grid_is_met_by_blocks_that_were_not_there_yet(emulate_rounds, scratch, blocks):
    values = np.arange(blocks * 128, dtype=np.int32).reshape(blocks, 128)
    outputs = np.zeros_like(values), np.zeros_like(values)
    for seed in range(2):
        calls = [[("f", scratch(4), values + i, *outputs)] for i in range(2)]
        done = emulate_rounds(GRID, calls, grid=(blocks, 1, 1), threads=128, seed=seed)
        for i, tensors in enumerate(done.tensors):
            np.testing.assert_array_equal(tensors["o"], np.roll(values + i + 1, -1, axis=0))


def test_a_barrier_of_the_whole_grid_without_its_fence_is_a_race(emulate_rounds, scratch):
    values = np.zeros((3, 32), np.int32)
    text = GRID.replace("        __threadfence();\n        const", "        const")
    with pytest.raises(KernelCrashed, match="race on between"):
        emulate_rounds(text, [[("f", scratch(4), values, values, values)]], grid=(3, 1, 1))
