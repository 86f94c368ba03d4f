"""wgmma against NumPy: operands in every shared memory layout, stated here once more, and how it must be fenced."""

from __future__ import annotations

import jinja2
import numpy as np
import pytest
import torch

from evoengine.devices.base import KernelCrashed, KernelHung
from evoengine.paths import asset
from evoengine.records import Launch, Source
from evoengine.stages.compile import compile_source

EVO = asset("templates") / "include" / "evo"
TORCH = {"fp16": torch.float16, "bf16": torch.bfloat16}


def vocabulary(dtype="fp16", *columns):
    """The device headers that the templates use, with wgmma for these numbers of columns."""
    plain = "".join((EVO / name).read_text() for name in ("address.cuh", "barrier.cuh", "copy_async.cuh"))
    return plain + jinja2.Template((EVO / "wgmma.cuh.j2").read_text(), trim_blocks=True, lstrip_blocks=True).render(
        dtype=dtype, wgmma_n=columns
    )


def random(rows, columns, dtype="fp16", seed=0):
    """A matrix as float64 and its 16-bit patterns."""
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).to(TORCH[dtype])
    return x.double().numpy(), x.view(torch.uint16).numpy()


def laid_out(bits, width):
    """Rows in slabs of width / 2 elements, one slab after the other; chunk c of a row stands at c ^ the row's turn."""
    if width == 16:
        return bits.reshape(bits.shape[0], -1, 8).swapaxes(0, 1).ravel()
    rows, per_row = bits.shape[0], width // 16
    slabs = bits.reshape(rows, -1, per_row, 8).swapaxes(0, 1)
    image = np.empty_like(slabs)
    for row in range(rows):
        turn = row // (8 // per_row) % per_row
        for chunk in range(per_row):
            image[:, row, chunk ^ turn] = slabs[:, row, chunk]
    return image.ravel()


def fragment(matrix):
    """An accumulator of 64 x n as the 128 threads hold it."""
    thread, i = np.mgrid[:128, : matrix.shape[1] // 2]
    warp, lane = thread // 32, thread % 32
    return matrix[16 * warp + lane // 4 + 8 * (i // 2 % 2), 8 * (i // 4) + 2 * (lane % 4) + i % 2]


PRODUCT = """
extern "C" __global__ void __launch_bounds__(128)
f(const uint4* a, const uint4* b, const float* c, float* o, int bytes_a, int bytes_b, int slab_a, int slab_b,
  int group_a, int group_b, int step_a, int step_b, int steps, int accumulate) {
    extern __shared__ __align__(1024) unsigned char shared[];
    for (int i = threadIdx.x; i < bytes_a / 16; i += 128) reinterpret_cast<uint4*>(shared)[i] = a[i];
    unsigned char* there = shared + (bytes_a + 1023) / 1024 * 1024;
    for (int i = threadIdx.x; i < bytes_b / 16; i += 128) reinterpret_cast<uint4*>(there)[i] = b[i];
    async_proxy_fence();
    __syncthreads();
    float d[N / 2];
    for (int i = 0; i < N / 2; ++i) d[i] = c[threadIdx.x * (N / 2) + i];
    warpgroup_fence_operand(d);
    wgmma_fence();
    for (int k = 0; k < steps; ++k) {
        unsigned long long of_a = matrix_descriptor<WIDTH_A>(shared_address(shared) + k * step_a, slab_a, group_a);
        unsigned long long of_b = matrix_descriptor<WIDTH_B>(shared_address(there) + k * step_b, slab_b, group_b);
        PRODUCT;
    }
    wgmma_commit();
    wgmma_wait<0>();
    warpgroup_fence_operand(d);
    for (int i = 0; i < N / 2; ++i) o[threadIdx.x * (N / 2) + i] = d[i];
}
"""
CALL = "wgmma_ss<TRANS_B>(d, of_a, of_b, k > 0 || accumulate)"
# The same in one piece, as kernels elsewhere write it, for what the vocabulary leaves out.
INLINE = """asm volatile("{\\n.reg .pred %%p;\\nsetp.ne.u32 %%p, %6, 0;\\n"
    "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%0, %1, %2, %3}, %4, %5, %%p, "
    "SCALE_A, SCALE_B, TRANS_A, TRANS_B;}\\n"
    : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "l"(of_a), "l"(of_b), "r"(int(k > 0 || accumulate)))"""


def product_text(n, width_a, width_b, trans_b, dtype="fp16", call=CALL):
    text = PRODUCT.replace("PRODUCT", call).replace("TRANS_B", str(trans_b)).replace("(N / 2)", f"{n // 2}")
    text = text.replace("N / 2", f"{n // 2}").replace("WIDTH_A", str(width_a)).replace("WIDTH_B", str(width_b))
    return vocabulary(dtype, n) + text


def strides(rows, width, trans):
    """slab, group and k16 step in bytes, of `rows` rows laid out by laid_out()."""
    if width == 16:
        # slabs of 8 elements: rows * 16 bytes from one to the next, 128 from 8 rows to the next 8
        return (128, rows * 16, 256) if trans else (rows * 16, 128, rows * 32)
    return rows * width, 8 * width, 16 * width if trans else 32


def multiply(
    emulate, n, width_a, width_b, trans_b, *, trans_a=0, dtype="fp16", k=None, accumulate=1, call=CALL, sign=1
):
    k = k or max(32, width_a) // 2
    a, bits_a = random(64, k, dtype, 1)
    b, bits_b = random(n, k, dtype, 2)
    c = np.random.default_rng(3).standard_normal((64, n)).astype(np.float32)
    image_a, image_b = (
        laid_out(bits_a.T if trans_a else bits_a, width_a),
        laid_out(bits_b.T if trans_b else bits_b, width_b),
    )
    slab_a, group_a, step_a = strides(k if trans_a else 64, width_a, trans_a)
    slab_b, group_b, step_b = strides(k if trans_b else n, width_b, trans_b)
    numbers = (image_a.nbytes, image_b.nbytes, slab_a, slab_b, group_a, group_b, step_a, step_b, k // 16, accumulate)
    o = emulate(
        product_text(n, width_a, width_b, trans_b, dtype, call),
        image_a, image_b, fragment(c), np.zeros((128, n // 2), np.float32), *map(np.int32, numbers),
        threads=128, shared=-(-image_a.nbytes // 1024) * 1024 + image_b.nbytes,
    )["o"]  # fmt: skip
    np.testing.assert_allclose(o, fragment(sign * a @ b.T + accumulate * c), rtol=0, atol=1e-4)


@pytest.mark.parametrize("width", [16, 32, 64, 128])
@pytest.mark.parametrize("trans_b", [0, 1])
def test_operands_are_found_in_every_layout(emulate, width, trans_b):
    multiply(emulate, 64, width, width, trans_b)


def test_columns_beyond_a_slab_are_found_by_its_stride(emulate):
    multiply(emulate, 128, 128, 128, 1, k=64)
    multiply(emulate, 96, 128, 64, 1, k=64)


@pytest.mark.parametrize(("n", "dtype"), [(8, "fp16"), (24, "bf16"), (176, "fp16"), (256, "bf16")])
def test_every_multiple_of_8_columns_is_a_shape(emulate, n, dtype):
    multiply(emulate, n, 128, 128, 0, dtype=dtype)


def test_without_accumulation_what_was_there_does_not_matter(emulate):
    multiply(emulate, 8, 128, 128, 0, accumulate=0)


@pytest.mark.parametrize(("scale_a", "scale_b"), [(1, -1), (-1, 1), (-1, -1)])
def test_signs_and_a_transposed_a_are_immediates(emulate, scale_a, scale_b):
    call = INLINE.replace("SCALE_A", str(scale_a)).replace("SCALE_B", str(scale_b)).replace("TRANS_A", "1")
    multiply(emulate, 8, 128, 128, 0, trans_a=1, call=call, sign=scale_a * scale_b, k=64)


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


@pytest.mark.parametrize("seed", [0, 1])
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
            r"wgmma's B at line \d+ reaches from 16384 to 16400 in 16384 bytes",
        ),
    ],
)
def test_an_operand_where_none_can_be_is_named(emulate, old, new, message):
    with pytest.raises(KernelCrashed, match=message):
        run_chain(emulate, chain_text().replace(old, new))


@pytest.mark.parametrize(
    "text",
    [
        product_text(64, 128, 128, 1),
        product_text(256, 64, 32, 0, "bf16"),
        product_text(
            8, 128, 128, 0, call=INLINE.replace("SCALE_A", "-1").replace("SCALE_B", "1").replace("TRANS_A", "1")
        ),
        chain_text(),
    ],
)
def test_the_instructions_are_spelt_as_the_real_compiler_takes_them(text):
    binary = compile_source(Source(text, "f", Launch((1, 1, 1), 128, 0)), "sm_90a")
    assert "HGMMA" in binary.mix or not binary.mix
