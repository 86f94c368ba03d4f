"""wgmma against NumPy: operands in every shared memory layout, stated here once more, and how it must be fenced."""

from __future__ import annotations

import numpy as np
import pytest

from evoengine.devices.base import KernelCrashed, KernelHung
from evoengine.records import Launch, Source
from evoengine.stages.compile import compile_source
from tests.support.exhaustive import each_nth, more
from tests.support.wgmma_kernels import (
    INLINE,
    PRODUCTS,
    fragment,
    laid_out,
    multiply,
    product_text,
    random,
    vocabulary,
)


@pytest.mark.parametrize("name", each_nth(4, PRODUCTS))
def test_a_product_is_that_of_numpy(emulate, name):
    multiply(emulate, **PRODUCTS[name])


CHAIN = """
extern "C" __global__ void __launch_bounds__(128) f(const uint4* b, const uint4* v, const unsigned* a, float* o) {
    extern __shared__ __align__(1024) unsigned char shared[];
    for (int i = threadIdx.x; i < 1024; i += 128) {
        reinterpret_cast<uint4*>(shared)[i % 512 + i / 512 * 512] = i < 512 ? b[i] : v[i - 512];
    }
    PROXY
    __syncthreads();
    unsigned words[16];
    for (int i = 0; i < 16; ++i) words[i] = a[threadIdx.x * 16 + i];
    float s[32], d[32];
    for (int i = 0; i < 32; ++i) d[i] = 0.0f;
    FENCE
    for (int k = 0; k < 4; ++k)
        wgmma_rs<false>(s, words + 4 * k, matrix_descriptor<128>(shared_address(shared) + 32 * k, 0, 1024), k > 0);
    wgmma_commit();
    EARLY
    WAIT
    warpgroup_fence_operand(s);
    unsigned p[16];
    for (int i = 0; i < 16; ++i) p[i] = pack(s[2 * i], s[2 * i + 1]);
    for (int i = 0; i < 32; ++i) d[i] += 1.0f;
    AGAIN
    for (int k = 0; k < 4; ++k)
        wgmma_rs<true>(d, p + 4 * k, matrix_descriptor<128>(shared_address(shared) + 8192 + 2048 * k, 8192, 1024), 1);
    wgmma_commit();
    LATE
    wgmma_wait<0>();
    warpgroup_fence_operand(d);
    for (int i = 0; i < 32; ++i) o[threadIdx.x * 32 + i] = d[i];
}
"""
PACK = """#include <cuda_fp16.h>
__device__ __forceinline__ unsigned pack(float low, float high) {
    half2 both = __floats2half2_rn(low, high);
    return *reinterpret_cast<const unsigned*>(&both);
}
"""
RIGHT = {
    "PROXY": "async_proxy_fence();", "FENCE": "wgmma_fence();", "AGAIN": "wgmma_fence();", "WAIT": "wgmma_wait<0>();",
    "EARLY": "", "LATE": "",
}  # fmt: skip


def chain_text(**changes):
    text = CHAIN
    for name, right in RIGHT.items():
        text = text.replace(name, changes.get(name, right))
    return vocabulary("fp16", 64) + PACK + text


def chain(emulate, seed=0, **changes):
    """O = 1 + (A B^T as fp16) V, by two products with A in registers; the largest error."""
    (a, bits_a), (b, bits_b), (v, bits_v) = (random(64, 64, seed=s) for s in (4, 5, 6))
    words = fragment(bits_a).astype(np.uint32)
    words = words[:, ::2] | words[:, 1::2] << 16
    images = (laid_out(bits_b, 128), laid_out(bits_v, 128))
    o = emulate(
        chain_text(**changes), *images, words, np.zeros((128, 32), np.float32), threads=128, shared=16384, seed=seed
    )["o"]
    right = fragment(1 + (a @ b.T).astype(np.float16).astype(float) @ v)
    error = np.abs(o - right).max()
    return np.inf if np.isnan(error) else error


@pytest.mark.parametrize("seed", [0, *more([1])])
def test_an_accumulator_packed_is_the_a_operand_of_the_next_product(emulate, seed):
    assert chain(emulate, seed) < 0.2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"PROXY": ""},
            r"wgmma's B at line \d+ reads shared memory at offset \d+, which a store .* without a fence.proxy",
        ),
        ({"FENCE": ""}, r"wgmma at line \d+: no wgmma.fence has come before the thread's first"),
        ({"AGAIN": ""}, r"wgmma at line \d+: \w+ register \d+ has been written since the thread's last wgmma.fence"),
        ({"AGAIN": "wgmma_fence(); p[3] ^= 1;"}, r"A register 0 has been written since the thread's last wgmma.fence"),
        ({"AGAIN": "wgmma_fence(); d[3] += 1;"}, r"accumulator register 3 has been written since"),
        ({"EARLY": "s[5] = 0;"}, r"accumulators have been written before they were waited for"),
        ({"EARLY": "words[5] = 0;"}, r"A register 1 of thread \d+ has been written before the wait for it"),
        (
            {"LATE": "if (threadIdx.x == 0) shared[9000] ^= 1;"},
            r"wgmma's B at line \d+ reads shared memory at offset 9000, .* or too early",
        ),
    ],
)
def test_a_product_that_is_not_fenced_as_it_must_be_is_named(emulate, changes, message):
    with pytest.raises(KernelCrashed, match=message):
        chain(emulate, **changes)


LATE_WARP = "if (threadIdx.x >= 96) for (int i = 0; i < 32; ++i) __syncwarp();\n    "


@pytest.mark.parametrize("barrier", ["__syncthreads();", ""])
def test_a_product_may_read_its_tiles_when_the_first_thread_begins_it(emulate, barrier):
    text = chain_text().replace("for (int i = threadIdx.x; i < 1024", LATE_WARP + "for (int i = threadIdx.x; i < 1024")
    text = text.replace("__syncthreads();", barrier)
    caught = 0
    for seed in range(8):
        try:
            caught += np.isnan(run_chain(emulate, text, seed)["o"]).any()
        except KernelCrashed as crash:
            assert "wgmma's B" in str(crash)
            caught += 1
    assert caught == 0 if barrier else caught >= 4


OWN_ROWS = """
extern "C" __global__ void __launch_bounds__(128) f(const uint4* a, const uint4* b, float* o) {
    extern __shared__ __align__(1024) unsigned char shared[];
    for (int i = threadIdx.x; i < 512; i += 128) reinterpret_cast<uint4*>(shared + 8192)[i] = b[i];
    async_proxy_fence();
    __syncthreads();
    int warp = threadIdx.x / 32 ROWS;
    LATE
    for (int i = threadIdx.x % 32; i < 128; i += 32)
        reinterpret_cast<uint4*>(shared)[warp * 128 + i] = a[warp * 128 + i];
    async_proxy_fence();
    __syncwarp();
    float d[32] = {};
    wgmma_fence();
    for (int k = 0; k < 4; ++k)
        wgmma_ss<false>(d, matrix_descriptor<128>(shared_address(shared) + 32 * k, 0, 1024),
                        matrix_descriptor<128>(shared_address(shared + 8192) + 32 * k, 0, 1024), k > 0);
    wgmma_commit();
    wgmma_wait<0>();
    warpgroup_fence_operand(d);
    for (int i = 0; i < 32; ++i) o[threadIdx.x * 32 + i] = d[i];
}
"""


@pytest.mark.parametrize(("rows", "own"), [("", True), ("^ 1", False)])
def test_a_warp_needs_its_own_rows_of_a_and_no_others(emulate, rows, own):
    """It stores its 16 rows, or its neighbour's, and waits for no other warp."""
    (a, bits_a), (b, bits_b) = random(64, 64, seed=4), random(64, 64, seed=5)
    text = vocabulary("fp16", 64) + OWN_ROWS.replace("ROWS", rows).replace("LATE", LATE_WARP)
    images = laid_out(bits_a, 128), laid_out(bits_b, 128)
    right, wrong = fragment(a @ b.T), 0
    for seed in range(8):
        try:
            o = emulate(text, *images, np.zeros((128, 32), np.float32), threads=128, shared=16384, seed=seed)["o"]
            wrong += not np.allclose(o, right, rtol=0, atol=1e-3)
        except KernelCrashed as crash:
            assert "wgmma's A" in str(crash)
            wrong += 1
    assert wrong == 0 if own else wrong >= 4


@pytest.mark.parametrize("wait", ["", "wgmma_wait<1>();"])
def test_accumulators_are_nan_until_the_wait_that_covers_them(emulate, wait):
    assert chain(emulate, WAIT=wait, LATE="") == np.inf


def test_a_product_that_was_not_committed_is_not_covered_by_any_wait(emulate):
    text = chain_text().replace("wgmma_commit();", "")
    o = run_chain(emulate, text)["o"]
    assert np.isnan(o).all()


def run_chain(emulate, text, seed=0):
    zeros = np.zeros(4096, np.uint16)
    numbers = (np.zeros((128, 16), np.uint32), np.zeros((128, 32), np.float32))
    return emulate(text, zeros, zeros, *numbers, threads=128, shared=16384, seed=seed)


def test_a_warpgroup_of_which_a_warp_is_missing_hangs_and_says_so(emulate):
    text = chain_text(FENCE="if (threadIdx.x >= 96) return; wgmma_fence();")
    with pytest.raises(
        KernelHung, match=r"96 of 128 threads wait at wgmma.wait_group for the wgmma of line \d+, begun by 96"
    ):
        run_chain(emulate, text)


def test_a_warpgroup_that_has_diverged_is_named(emulate):
    other = "matrix_descriptor<128>(shared_address(shared) + 32 * k + threadIdx.x / 64 * 1024, 0, 1024)"
    text = chain_text().replace("matrix_descriptor<128>(shared_address(shared) + 32 * k, 0, 1024)", other)
    with pytest.raises(KernelCrashed, match="other threads of the warpgroup are at the same line with other operands"):
        run_chain(emulate, text)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "+ 32 * k, 0, 1024",
            "+ 32 * k + 128, 0, 1024",
            "with a 128-byte swizzle its shared address 128 must be at the start",
        ),
        (
            "+ 8192 + 2048 * k",
            "+ 14336 + 2048 * k",
            r"wgmma's B at line \d+ reaches from \d+ to \d+ in 16384 bytes",
        ),
    ],
)
def test_an_operand_where_none_can_be_is_named(emulate, old, new, message):
    with pytest.raises(KernelCrashed, match=message):
        run_chain(emulate, chain_text().replace(old, new))


@pytest.mark.parametrize(
    "text",
    [
        chain_text(),
        *more(
            [
                product_text(64, 128, 128, 1),
                product_text(256, 64, 32, 0, "bf16"),
                product_text(
                    8, 128, 128, 0, call=INLINE.replace("SCALE_A", "-1").replace("SCALE_B", "1").replace("TRANS_A", "1")
                ),
            ]
        ),
    ],
)
def test_the_instructions_are_spelt_as_the_real_compiler_takes_them(text):
    binary = compile_source(Source(text, "f", Launch((1, 1, 1), 128, 0)), "sm_90a")
    assert "HGMMA" in binary.mix or not binary.mix
