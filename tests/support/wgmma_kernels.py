"""One wgmma product from operands in any shared memory layout, compared with NumPy."""

from __future__ import annotations

import jinja2
import numpy as np
import torch

from evoengine.paths import asset

EVO = asset("templates") / "include" / "evo"
TORCH = {"fp16": torch.float16, "bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def vocabulary(dtype="fp16", *columns):
    """The device headers that the templates use, with wgmma for these numbers of columns."""
    plain = "".join((EVO / name).read_text() for name in ("address.cuh", "barrier.cuh", "copy_async.cuh"))
    return plain + jinja2.Template((EVO / "wgmma.cuh.j2").read_text(), trim_blocks=True, lstrip_blocks=True).render(
        dtype=dtype, wgmma_n=columns
    )


def random(rows, columns, dtype="fp16", seed=0):
    """A matrix as float64 and its 16-bit patterns, [rows, columns] uint16, each of two elements if these are bytes."""
    columns *= 2 // TORCH[dtype].itemsize
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
    emulate, n, width_a, width_b, trans_b, *, trans_a=0, dtype="fp16", dtype_b=None, k=None, accumulate=1, call=CALL,
    sign=1,
):  # fmt: skip
    k = k or max(32, width_a) // 2
    a, bits_a = random(64, k, dtype, 1)
    b, bits_b = random(n, k, dtype_b or dtype, 2)
    c = np.random.default_rng(3).standard_normal((64, n)).astype(np.float32)
    image_a, image_b = (
        laid_out(bits_a.T if trans_a else bits_a, width_a),
        laid_out(bits_b.T if trans_b else bits_b, width_b),
    )
    slab_a, group_a, step_a = strides(k if trans_a else 64, width_a, trans_a)
    slab_b, group_b, step_b = strides(k if trans_b else n, width_b, trans_b)
    numbers = (image_a.nbytes, image_b.nbytes, slab_a, slab_b, group_a, group_b, step_a, step_b, k // 16, accumulate)
    o = emulate(
        product_text(n, width_a, width_b, trans_b, "fp16" if dtype_b else dtype, call),
        image_a, image_b, fragment(c), np.zeros((128, n // 2), np.float32), *map(np.int32, numbers),
        threads=128, shared=-(-image_a.nbytes // 1024) * 1024 + image_b.nbytes,
    )["o"]  # fmt: skip
    expected = sign * a @ b.T + accumulate * c
    # of bytes each step cuts 32 products and the sum 13 bits below the largest: test_hardware_bits.py has bits
    atol = k // 16 * 34 * 2.0**-13 * np.abs(expected).max() if dtype_b else 1e-4
    np.testing.assert_allclose(o, fragment(expected), rtol=0, atol=atol)


def signed(scale_a, scale_b):
    """A product of negated operands and a transposed A, which only instructions written out have."""
    call = INLINE.replace("SCALE_A", str(scale_a)).replace("SCALE_B", str(scale_b)).replace("TRANS_A", "1")
    sizes = dict(n=8, width_a=128, width_b=128, trans_b=0, trans_a=1, k=64)
    return dict(**sizes, call=call, sign=scale_a * scale_b)


def of_bytes(dtype_a, dtype_b):
    """A product of FP8 operands, 64 bytes deep."""
    call = INLINE.replace("m64n8k16.f32.f16.f16", f"m64n8k32.f32.{dtype_a}.{dtype_b}")
    call = call.replace("SCALE_A, SCALE_B, TRANS_A, TRANS_B", "1, 1")
    return dict(n=8, width_a=128, width_b=128, trans_b=0, dtype=dtype_a, dtype_b=dtype_b, call=call)


PRODUCTS = {
    **{
        f"operands of {width} bytes{', B transposed' * trans_b}": dict(
            n=64, width_a=width, width_b=width, trans_b=trans_b
        )
        for width in (16, 32, 64, 128)
        for trans_b in (0, 1)
    },
    "columns beyond a slab": dict(n=128, width_a=128, width_b=128, trans_b=1, k=64),
    "columns beyond a narrow slab": dict(n=96, width_a=128, width_b=64, trans_b=1, k=64),
    **{
        f"{n} columns of {dtype}": dict(n=n, width_a=128, width_b=128, trans_b=0, dtype=dtype)
        for n, dtype in ((8, "fp16"), (24, "bf16"), (176, "fp16"), (256, "bf16"))
    },
    "no accumulation": dict(n=8, width_a=128, width_b=128, trans_b=0, accumulate=0),
    **{f"A transposed, signs {a} and {b}": signed(a, b) for a, b in ((1, -1), (-1, 1), (-1, -1))},
}
"""name → what `multiply` is asked for; every executor of kernels must get all of them right"""
