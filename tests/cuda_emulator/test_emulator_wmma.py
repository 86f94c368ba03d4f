"""nvcuda::wmma against NumPy, for every shape, layout and type."""

import numpy as np
import pytest
import torch

from evoengine.devices.base import KernelCrashed
from tests.support.exhaustive import more

SHAPES = [(16, 16, 16), (32, 8, 16), (8, 32, 16)]

LAYOUTS = [(a, b, c) for a in ("row", "col") for b in ("row", "col") for c in ("row", "col")]

# d = 2 a b + 3 c, for the layouts whose number is asked for
PRODUCT = """
#include <cuda_bf16.h>
#include <mma.h>
using namespace nvcuda;

template <class A, class B, wmma::layout_t layout>
__device__ void product(const T* a, const T* b, const ACC* c, ACC* d, int lda, int ldb, int ldc) {
    wmma::fragment<wmma::matrix_a, SHAPE, T, A> fa;
    wmma::fragment<wmma::matrix_b, SHAPE, T, B> fb;
    wmma::fragment<wmma::accumulator, SHAPE, ACC> fc;
    LOAD_A;
    wmma::load_matrix_sync(fb, b, ldb);
    wmma::load_matrix_sync(fc, c, ldc, layout);
    for (int i = 0; i < fa.num_elements; ++i) fa.x[i] = fa.x[i] * T(2.0f);
    for (int i = 0; i < fc.num_elements; ++i) fc.x[i] = fc.x[i] * ACC(3.0f);
    wmma::mma_sync(fc, fa, fb, fc);
    wmma::store_matrix_sync(d, fc, ldc, layout);
}

extern "C" __global__ void f(const T* a, const T* b, const ACC* c, ACC* d, int lda, int ldb, int ldc, int which) {
    CALLS
}
"""


def product_text(shape, name, accumulator, load="wmma::load_matrix_sync(fa, a, lda)"):
    calls = "".join(
        f"if (which == {i}) product<wmma::{a}_major, wmma::{b}_major, wmma::mem_{c}_major>(a, b, c, d, lda, ldb, ldc);"
        for i, (a, b, c) in enumerate(LAYOUTS)
    )
    text = PRODUCT.replace("SHAPE", ", ".join(map(str, shape))).replace("CALLS", calls).replace("LOAD_A", load)
    for after in "*,(":
        text = text.replace(f"T{after}", f"{name}{after}")
    return text.replace("ACC", accumulator)


def laid_out(matrix, layout):
    """The matrix in memory, with 8 elements of padding after every row or column."""
    matrix = matrix if layout == "row" else matrix.T
    return np.pad(matrix, [(0, 0), (0, 8)])


def product(emulate, text, layouts, a, b, c):
    a, b, c = map(laid_out, (a, b, c), layouts)
    strides = (np.int32(m.shape[1]) for m in (a, b, c))
    d = emulate(text, a, b, c, np.zeros_like(c), *strides, np.int32(LAYOUTS.index(layouts)))["d"][:, :-8]
    return d if layouts[2] == "row" else d.T


def random(seed, *shape):
    return np.random.default_rng(seed).integers(-8, 9, shape).astype(np.float16)


CASES = [(shape, accumulator) for shape in SHAPES for accumulator in ("float", "half")]
SOME_CASES = [(SHAPES[0], "float"), (SHAPES[2], "half")]


@pytest.mark.parametrize(
    ("shape", "accumulator"), [*SOME_CASES, *more(c for c in CASES if c not in SOME_CASES)], ids=str
)
def test_half_products_of_small_integers_are_exact_in_every_layout(emulate, shape, accumulator):
    m, n, k = shape
    a, b = random(1, m, k), random(2, k, n)
    c = random(3, m, n).astype(np.float32 if accumulator == "float" else np.float16)
    text = product_text(shape, "half", accumulator)
    for layouts in LAYOUTS:
        d = product(emulate, text, layouts, a, b, c)
        right = 2 * a.astype(np.float32) @ b.astype(np.float32) + 3 * c.astype(np.float32)
        np.testing.assert_array_equal(d, right, err_msg=str(layouts))


@pytest.mark.parametrize("shape", [SHAPES[1], *more([(s,) for s in SHAPES if s != SHAPES[1]])], ids=str)
def test_bfloat16_products_accumulate_in_float(emulate, shape):
    m, n, k = shape
    rng = np.random.default_rng(5)
    a, b = (torch.from_numpy(rng.standard_normal(s)).to(torch.bfloat16) for s in ((m, k), (k, n)))
    c = rng.standard_normal((m, n)).astype(np.float32)
    bits = [t.view(torch.int16).numpy().view(np.uint16) for t in (a, b)]
    d = product(emulate, product_text(shape, "__nv_bfloat16", "float"), ("row", "col", "row"), *bits, c)
    np.testing.assert_allclose(d, 2 * a.double().numpy() @ b.double().numpy() + 3 * c, atol=1e-5)


def test_a_half_accumulator_rounds_to_half(emulate):
    text = product_text(SHAPES[0], "half", "half")
    a, b, c = np.full((16, 16), 16, np.float16), np.full((16, 16), 16, np.float16), np.ones((16, 16), np.float16)
    d = product(emulate, text, LAYOUTS[0], a, b, c)
    assert (d == np.float16(2 * 4096 + 3)).all()  # 8195 lies between the halves 8192 and 8200
    assert np.isinf(product(emulate, text, LAYOUTS[0], a * 4, b * 4, c)).all()


def test_a_fragment_that_is_never_filled_spoils_the_product(emulate):
    a, c = np.ones((16, 16), np.float16), np.zeros((16, 16), np.float32)
    text = product_text(SHAPES[0], "half", "float", load="")
    assert np.isnan(product(emulate, text, LAYOUTS[0], a, a, c)).all()


LAYOUT = """
#include <mma.h>
using namespace nvcuda;
extern "C" __global__ void f(const half* a, half* o, float* where) {
    wmma::fragment<wmma::matrix_a, 16, 16, 16, half, wmma::row_major> fa;
    wmma::fragment<wmma::accumulator, 16, 16, 16, float> fc;
    wmma::load_matrix_sync(fa, a, 16);
    for (int i = 0; i < 8; ++i) fc.x[i] = i;
    wmma::store_matrix_sync(where, fc, 16, wmma::mem_row_major);
    for (int i = 0; i < fa.num_elements; ++i) o[threadIdx.x * 16 + i] = fa.x[i];
}
"""


def test_half_operands_hold_sixteen_elements_as_on_hardware_and_every_row_is_spread(emulate, floats):
    a = np.arange(256, dtype=np.float16).reshape(16, 16)
    got = emulate(LAYOUT, a, np.zeros((32, 16), np.float16), floats(16, 16))
    np.testing.assert_array_equal(np.sort(got["o"].ravel()), np.repeat(np.arange(256), 2))
    rows_of_a_lane = got["o"][:, :8] // 16
    assert all(len(set(rows)) == 8 for rows in rows_of_a_lane.tolist())


def test_a_fragment_loaded_from_a_misaligned_address_is_refused(emulate, floats):
    text = LAYOUT.replace("fa, a, 16", "fa, a + 8, 16")
    with pytest.raises(KernelCrashed, match="misaligned wmma::load_matrix_sync at line 7: .* multiple of 32 bytes"):
        emulate(text, np.zeros(512, np.float16), np.zeros((32, 16), np.float16), floats(16, 16))


def test_a_leading_dimension_that_is_no_multiple_of_16_bytes_is_refused(emulate, floats):
    text = LAYOUT.replace("fa, a, 16", "fa, a, 20")
    with pytest.raises(KernelCrashed, match="line 7: leading dimension 20 is not a multiple of 8 elements"):
        emulate(text, np.zeros(512, np.float16), np.zeros((32, 16), np.float16), floats(16, 16))
