"""Matrix instructions as ptxas writes them, against NumPy: fragments of the PTX ISA, wgmma in every layout.

The kernels are the emulator's, compiled by NVRTC here.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from evoengine.devices.base import KernelCrashed
from tests.support.exhaustive import more
from tests.support.mma_kernels import MMA, STORE, TYPES, G, T, move_text, pairs
from tests.support.wgmma_kernels import PRODUCTS, multiply, of_bytes


@pytest.mark.parametrize("trans", ["", ".trans"])
@pytest.mark.parametrize("count", [4, *more([1, 2])])
def test_ldmatrix_gives_each_lane_two_neighbours_of_its_row_or_column(execute, count, trans):
    matrices = np.random.default_rng(5).integers(0, 1 << 15, (4, 8, 8), dtype=np.uint16)
    o = execute(move_text(count, trans), matrices, np.zeros((32, 4), np.uint32), arch="sm_80")["o"]
    seen = matrices.transpose(0, 2, 1) if trans else matrices
    for j in range(count):
        np.testing.assert_array_equal(o[:, j], pairs(seen[j], G, 2 * T))
    assert not o[:, count:].any()


def test_ldmatrix_at_a_row_that_is_not_a_multiple_of_16_is_named(execute):
    matrices = np.zeros((4, 8, 8), np.uint16)
    text = move_text(4, "").replace("+ 48 * threadIdx.x", "+ 48 * threadIdx.x + 8")
    with pytest.raises(KernelCrashed, match=r"LDSM.* at shared address 0x\w+: not a multiple of 16"):
        execute(text, matrices, np.zeros((32, 4), np.uint32))


def test_ldmatrix_by_a_part_of_the_warp_is_named(execute):
    text = move_text(4, "").replace("asm volatile", "if (a[threadIdx.x] < 9) asm volatile")
    matrices = np.arange(256, dtype=np.uint16).reshape(4, 8, 8)
    with pytest.raises(KernelCrashed, match=r"LDSM.*: executed by a part of the warp's lanes"):
        execute(text, matrices, np.zeros((32, 4), np.uint32))


@pytest.mark.parametrize("trans", ["", ".trans"])
def test_stmatrix_puts_the_words_where_ldmatrix_finds_them(execute, trans):
    words = np.random.default_rng(6).integers(0, 1 << 31, (32, 4), dtype=np.uint32)
    expected = np.empty((4, 8, 8), np.uint16)
    for j in range(4):
        seen = expected[j].T if trans else expected[j]
        seen[G, 2 * T], seen[G, 2 * T + 1] = words[:, j] & 0xFFFF, words[:, j] >> 16
    text = STORE.replace("TRANS", trans).replace("SYNC", "__syncwarp();")
    o = execute(text, words, np.zeros((32, 8), np.uint16))["o"]
    np.testing.assert_array_equal(o[::-1].reshape(4, 8, 8), expected)


def test_movmatrix_transposes(execute):
    text = """extern "C" __global__ void f(const unsigned* a, unsigned* o) {
        asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(o[threadIdx.x]) : "r"(a[threadIdx.x])); }"""
    matrix = np.random.default_rng(5).integers(0, 1 << 15, (8, 8), dtype=np.uint16)
    o = execute(text, pairs(matrix, G, 2 * T), np.zeros(32, np.uint32))["o"]
    np.testing.assert_array_equal(o, pairs(matrix.T, G, 2 * T))


def sums(matrix):
    """16 x 8 sums as a lane holds four of them."""
    return np.stack([matrix[G + r, 2 * T + k] for r, k in ((0, 0), (0, 1), (8, 0), (8, 1))], axis=1)


def halves(rows, columns, name, seed):
    """A matrix as float64 and its 16-bit patterns."""
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).to(TYPES[name])
    return x.double().numpy(), x.view(torch.uint16).numpy()


@pytest.mark.parametrize(
    ("name", "arch"), [("f16", "sm_80"), ("bf16", "sm_90a"), *more([("f16", "sm_90a"), ("bf16", "sm_80")])]
)
def test_mma_of_16_by_8_by_16_multiplies_what_the_lanes_hold(execute, name, arch):
    (a, a_bits), (b, b_bits) = halves(16, 16, name, 1), halves(8, 16, name, 2)
    c = np.random.default_rng(3).standard_normal((16, 8)).astype(np.float32)
    words_a = np.stack([pairs(a_bits, G + r, 2 * T + k) for r, k in ((0, 0), (8, 0), (0, 8), (8, 8))], axis=1)
    words_b = np.stack([pairs(b_bits, G, 2 * T), pairs(b_bits, G, 2 * T + 8)], axis=1)
    o = execute(MMA.replace("TYPE", name), words_a, words_b, sums(c), np.zeros((32, 4), np.float32), arch=arch)["o"]
    np.testing.assert_allclose(o, sums(a @ b.T + c), rtol=0, atol=2e-5)


OTHERS = """
extern "C" __global__ void f(const unsigned* a, const unsigned* b, const unsigned* c, unsigned* o) {
    unsigned d[4], x[4], y[2];
    for (int i = 0; i < 4; ++i) d[i] = c[4 * threadIdx.x + i], x[i] = a[4 * threadIdx.x + i];
    for (int i = 0; i < 2; ++i) y[i] = b[2 * threadIdx.x + i];
    asm volatile("mma.sync.aligned.PRODUCT;" : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
                 : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "r"(y[0]), "r"(y[1]));
    for (int i = 0; i < 4; ++i) o[4 * threadIdx.x + i] = d[i];
}
"""
FOUR = "{%0, %1, %2, %3}"


def other(execute, product, a, b, c, arch="sm_80"):
    values = (np.ascontiguousarray(x).view(np.uint32) for x in (a, b, c))
    return execute(OTHERS.replace("PRODUCT", product), *values, np.zeros((32, 4), np.uint32), arch=arch)["o"]


def test_mma_of_half_the_depth(execute):
    (a, a_bits), (b, b_bits) = halves(16, 8, "f16", 1), halves(8, 8, "f16", 2)
    c = np.random.default_rng(3).standard_normal((16, 8)).astype(np.float32)
    words_a = np.stack([pairs(a_bits, G + r, 2 * T) for r in (0, 8, 0, 0)], axis=1)
    words_b = np.stack([pairs(b_bits, G, 2 * T)] * 2, axis=1)
    product = f"m16n8k8.row.col.f32.f16.f16.f32 {FOUR}, {{%4, %5}}, {{%8}}, {FOUR}"
    o = other(execute, product, words_a, words_b, sums(c))
    np.testing.assert_allclose(o.view(np.float32), sums(a @ b.T + c), rtol=0, atol=2e-5)


def test_mma_with_sums_in_half(execute):
    (a, a_bits), (b, b_bits), (c, c_bits) = halves(16, 16, "f16", 1), halves(8, 16, "f16", 2), halves(16, 8, "f16", 3)
    words_a = np.stack([pairs(a_bits, G + r, 2 * T + k) for r, k in ((0, 0), (8, 0), (0, 8), (8, 8))], axis=1)
    words_b = np.stack([pairs(b_bits, G, 2 * T), pairs(b_bits, G, 2 * T + 8)], axis=1)
    words_c = np.stack([pairs(c_bits, G + r, 2 * T) for r in (0, 8, 0, 0)], axis=1)
    product = "m16n8k16.row.col.f16.f16.f16.f16 {%0, %1}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1}"
    o = other(execute, product, words_a, words_b, words_c)
    expected = (a @ b.T + c).astype(np.float16)
    seen = np.ascontiguousarray(o[:, :2]).view(np.float16)
    np.testing.assert_allclose(seen, sums(expected), rtol=2e-3, atol=2e-3)


def test_mma_of_tf32_takes_the_upper_19_bits(execute):
    random = np.random.default_rng(4)
    a, b, c = (random.standard_normal(shape).astype(np.float32) for shape in ((16, 8), (8, 8), (16, 8)))
    cut_a, cut_b = ((x.view(np.uint32) & 0xFFFFE000).view(np.float32).astype(np.float64) for x in (a, b))
    words_a = np.stack([a[G + r, T + k] for r, k in ((0, 0), (8, 0), (0, 4), (8, 4))], axis=1)
    words_b = np.stack([b[G, T], b[G, T + 4]], axis=1)
    product = f"m16n8k8.row.col.f32.tf32.tf32.f32 {FOUR}, {{%4, %5, %6, %7}}, {{%8, %9}}, {FOUR}"
    o = other(execute, product, words_a, words_b, sums(c))
    np.testing.assert_allclose(o.view(np.float32), sums(cut_a @ cut_b.T + c), rtol=0, atol=2e-5)


def test_mma_of_bytes_with_and_without_sign(execute):
    random = np.random.default_rng(4)
    a, b = random.integers(-128, 128, (16, 32), dtype=np.int8), random.integers(0, 256, (8, 32), dtype=np.uint8)
    c = random.integers(-(1 << 20), 1 << 20, (16, 8), dtype=np.int32)

    words_a = np.stack([four(a, G + r, 4 * T + k) for r, k in ((0, 0), (8, 0), (0, 16), (8, 16))], axis=1)
    words_b = np.stack([four(b, G, 4 * T), four(b, G, 4 * T + 16)], axis=1)
    product = f"m16n8k32.row.col.s32.s8.u8.s32 {FOUR}, {{%4, %5, %6, %7}}, {{%8, %9}}, {FOUR}"
    o = other(execute, product, words_a, words_b, sums(c))
    np.testing.assert_array_equal(o.view(np.int32), sums(a.astype(np.int32) @ b.T.astype(np.int32) + c))


def four(matrix, row, column):
    return np.stack([matrix[row, column + k] for k in range(4)], axis=1).view(np.uint32)[:, 0]


def small_floats(execute, types, a, b, c):
    """A product of FP8 on sm_89, which has the instruction."""
    dtypes = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
    a, b = (torch.from_numpy(x).to(dtypes[t]).view(torch.uint8).numpy() for x, t in zip((a, b), types, strict=True))
    words_a = np.stack([four(a, G + r, 4 * T + k) for r, k in ((0, 0), (8, 0), (0, 16), (8, 16))], axis=1)
    words_b = np.stack([four(b, G, 4 * T), four(b, G, 4 * T + 16)], axis=1)
    product = f"m16n8k32.row.col.f32.{types[0]}.{types[1]}.f32 {FOUR}, {{%4, %5, %6, %7}}, {{%8, %9}}, {FOUR}"
    return other(execute, product, words_a, words_b, sums(c), "sm_89").view(np.float32)


@pytest.mark.parametrize("types", [("e4m3", "e4m3"), ("e5m2", "e4m3")])
def test_mma_of_small_floats(execute, types):
    random = np.random.default_rng(5)
    a, b, c = (random.integers(-3, 4, shape).astype(np.float32) for shape in ((16, 32), (8, 32), (16, 8)))
    np.testing.assert_array_equal(small_floats(execute, types, a, b, c), sums(a @ b.T + c))


def test_sums_of_small_floats_keep_14_bits(execute):
    """Beside 16,385 nothing below 2 is left, neither of the products nor of itself."""
    ones = np.ones((16, 32), np.float32)
    o = small_floats(execute, ("e4m3", "e4m3"), ones, ones[:8], np.full((16, 8), 16385, np.float32))
    np.testing.assert_array_equal(o, np.full((32, 4), 16384, np.float32))


SOME_PRODUCTS = list(PRODUCTS)[1::5]


@pytest.mark.parametrize("name", [*SOME_PRODUCTS, *more(n for n in PRODUCTS if n not in SOME_PRODUCTS)])
def test_a_wgmma_product_is_that_of_numpy(execute, name):
    multiply(execute, **PRODUCTS[name])


@pytest.mark.parametrize("types", [("e4m3", "e5m2"), ("e5m2", "e4m3")])
def test_a_wgmma_product_of_bytes_is_that_of_numpy(execute, types):
    multiply(execute, **of_bytes(*types))
