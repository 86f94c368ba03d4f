"""Products of which A has two of each four elements (of TF32 one of two), as ptxas writes them, against NumPy.

Metadata stand where the PTX ISA's figures for mma.sp put them; wgmma's refer to the same ones.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.support.exhaustive import more
from tests.support.mma_kernels import LANE, G, T
from tests.support.wgmma_kernels import PRODUCT, fragment, laid_out, vocabulary

TORCH = {
    "f16": torch.float16, "bf16": torch.bfloat16, "tf32": torch.float32, "s8": torch.int8, "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
}  # fmt: skip
BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32}


def values(rows, columns, dtype, seed):
    """A matrix as float64, and its bits."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == "s8":
        x = torch.randint(-128, 128, (rows, columns), generator=generator, dtype=torch.int8)
    else:
        x = torch.randn(rows, columns, generator=generator).to(TORCH[dtype])
    if dtype == "tf32":
        x = (x.view(torch.int32) & ~0x1FFF).view(torch.float32)
    return x.double().numpy(), x.contiguous().view(torch.uint8).numpy().view(BITS[x.element_size()])


def sparse(rows, k, dtype, seed=1):
    """The whole matrix, the bits of what is there of it, and a nibble for each four columns (of TF32 each two)."""
    there, bits = values(rows, k // 2, dtype, seed)
    together = 2 if dtype == "tf32" else 4
    draw = np.random.default_rng(seed).integers
    if together == 2:
        chosen = draw(0, 2, (rows, k // 2, 1))
        nibbles = np.where(chosen[..., 0] == 1, 0b1110, 0b0100)
    else:
        pairs = np.array([(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)])
        chosen = pairs[draw(0, 6, (rows, k // 4))]
        nibbles = chosen[..., 0] | chosen[..., 1] << 2
    whole = np.zeros((rows, k // together, together))
    np.put_along_axis(whole, chosen, there.reshape(rows, k // together, -1), 2)
    return whole.reshape(rows, k), bits, nibbles.astype(np.uint32)


def packed(nibbles):
    """Words of nibbles that follow one another."""
    return (nibbles << (4 * np.arange(nibbles.shape[-1], dtype=np.uint32))).sum(-1, dtype=np.uint32)


def metadata(nibbles, dtype, selector):
    """A word for each lane of a warp; other bits in those that are not chosen."""
    words = np.random.default_rng(9).integers(0, 1 << 32, 32, dtype=np.uint32)
    count = nibbles.shape[1]
    for row in range(8):
        if dtype in ("s8", "e4m3", "e5m2"):
            for part in range(count // 8):
                lane = 4 * row + 2 * (part if count == 16 else selector)
                words[lane] = packed(nibbles[row, 8 * part : 8 * part + 8])
                words[lane + 1] = packed(nibbles[row + 8, 8 * part : 8 * part + 8])
        else:
            for part in range(count // 4):
                lane = 4 * row + (2 * selector + part if count == 8 else selector)
                own, below = (packed(nibbles[r, 4 * part : 4 * part + 4]) for r in (row, row + 8))
                words[lane] = own | below << 16
    return words


def words(bits, row, column):
    """Words of elements that follow one another along a row."""
    per = 4 // bits.itemsize
    parts = [bits[row, column + n].astype(np.uint32) << (8 * bits.itemsize * n) for n in range(per)]
    return np.bitwise_or.reduce(parts)


MMA = """
extern "C" __global__ void f(const unsigned* a, const unsigned* b, const unsigned* c, const unsigned* e, unsigned* o) {
    unsigned d[4], x[4], y[4];
    for (int i = 0; i < 4; ++i) d[i] = c[4 * threadIdx.x + i];
    for (int i = 0; i < 4; ++i) x[i] = a[4 * threadIdx.x + i], y[i] = b[4 * threadIdx.x + i];
    asm volatile("mma.sp.sync.aligned.SHAPE.row.col.SUM.TYPE.TYPE.SUM "
                 "{%0, %1, %2, %3}, A, B, {%0, %1, %2, %3}, %12, SELECTOR;"
                 : "+FORM"(d[0]), "+FORM"(d[1]), "+FORM"(d[2]), "+FORM"(d[3])
                 : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "r"(y[0]), "r"(y[1]), "r"(y[2]), "r"(y[3]),
                   "r"(e[threadIdx.x]));
    for (int i = 0; i < 4; ++i) o[4 * threadIdx.x + i] = d[i];
}
"""
CASES = [
    # type, depth, selector
    ("f16", 32, 0), ("f16", 32, 1), ("bf16", 32, 1), ("f16", 16, 2), ("bf16", 16, 3), ("tf32", 16, 1), ("tf32", 8, 3),
    ("s8", 64, 0), ("s8", 32, 1),
]  # fmt: skip


@pytest.mark.parametrize("arch", ["sm_90a", *more(["sm_80"])])
@pytest.mark.parametrize(("dtype", "k", "selector"), CASES)
def test_a_warps_product_is_that_of_the_whole_matrix(execute, dtype, k, selector, arch):
    whole, bits, nibbles = sparse(16, k, dtype)
    right, bits_b = values(8, k, dtype, 2)
    per, four = 4 // bits.itemsize, k * bits.itemsize == 64
    a, b = np.zeros((32, 4), np.uint32), np.zeros((32, 4), np.uint32)
    for n in range(4 if four else 2):
        a[:, n] = words(bits, G + n % 2 * 8, n // 2 * 4 * per + T * per)
        b[:, n] = words(bits_b, G, n * 4 * per + T * per)
    integers = dtype == "s8"
    sums = np.random.default_rng(3).integers(-99, 99, (16, 8)).astype(np.int32 if integers else np.float32)
    own = np.stack([sums[G + n // 2 * 8, 2 * T + n % 2] for n in range(4)], 1)
    text = MMA.replace("SHAPE", f"m16n8k{k}").replace("SUM", "s32" if integers else "f32").replace("TYPE", dtype)
    text = text.replace(
        "{%0, %1, %2, %3}, A, B,",
        "{%0, %1, %2, %3}, " + ("{%4, %5, %6, %7}, {%8, %9, %10, %11}," if four else "{%4, %5}, {%8, %9},"),
    )
    text = text.replace("SELECTOR", str(selector)).replace("FORM", "r" if integers else "f")
    if not integers:
        text = text.replace("unsigned d[4],", "float d[4]; unsigned").replace("const unsigned* c", "const float* c")
        text = text.replace("unsigned* o", "float* o")
    o = execute(text, a, b, own, metadata(nibbles, dtype, selector), np.zeros((32, 4), sums.dtype), arch=arch)["o"]
    found = np.empty((16, 8))
    for n in range(4):
        found[G + n // 2 * 8, 2 * T + n % 2] = o[LANE, n]
    np.testing.assert_allclose(found, whole @ right.T + sums, rtol=0, atol=0 if integers else 1e-4)


GROUP = """asm volatile("wgmma.mma_async.sp.sync.aligned.m64n8kDEPTH.f32.TYPE.TYPE "
    "{%0, %1, %2, %3}, %4, %5, %6, SELECTOR, 1, 1, 1TRANS;"
    : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "l"(of_a), "l"(of_b), "r"(e[threadIdx.x]))"""


@pytest.mark.parametrize(
    ("dtype", "selector", "width_a", "width_b"),
    [
        ("f16", 1, 32, 64),
        ("e4m3", 0, 32, 64),
        *more([("bf16", 0, 16, 128), ("tf32", 1, 32, 16), ("e5m2", 0, 128, 128)]),
    ],
)
def test_a_warpgroups_product_is_that_of_the_whole_matrix(execute, dtype, selector, width_a, width_b):
    size = TORCH[dtype].itemsize
    k = 64 // size
    whole, bits, nibbles = sparse(64, k, dtype)
    right, bits_b = values(8, k, dtype, 2)
    wide = [
        np.pad(x.view(np.uint16), ((0, 0), (0, max(0, w // 2 - x.view(np.uint16).shape[1]))))
        for x, w in ((bits, width_a), (bits_b, width_b))
    ]
    images = [laid_out(x, w) for x, w in zip(wide, (width_a, width_b), strict=True)]
    slabs = [len(x) * w for x, w in zip(wide, (width_a, width_b), strict=True)]
    call = GROUP.replace("DEPTH", str(k)).replace("TYPE", dtype).replace("SELECTOR", str(selector))
    call = call.replace("TRANS", ", 0, 0" if size == 2 else "")
    text = vocabulary("fp16", 8) + PRODUCT.replace("PRODUCT", call).replace("(N / 2)", "4").replace("N / 2", "4")
    text = text.replace("WIDTH_A", str(width_a)).replace("WIDTH_B", str(width_b))
    text = text.replace("int accumulate)", "int accumulate, const unsigned* e)")
    sums = np.random.default_rng(3).standard_normal((64, 8)).astype(np.float32)
    numbers = (
        images[0].nbytes,
        images[1].nbytes,
        *slabs,
        128 if width_a == 16 else 8 * width_a,
        128 if width_b == 16 else 8 * width_b,
        0,
        0,
        1,
        1,
    )
    e = np.concatenate([metadata(nibbles[16 * warp : 16 * warp + 16], dtype, selector) for warp in range(4)])
    o = execute(
        text, *images, fragment(sums), np.zeros((128, 4), np.float32), *map(np.int32, numbers), e,
        threads=128, shared=-(-images[0].nbytes // 1024) * 1024 + images[1].nbytes,
    )["o"]  # fmt: skip
    expected = whole @ right.T + sums
    atol = 66 * 2.0**-13 * np.abs(expected).max() if size == 1 else 1e-4
    np.testing.assert_allclose(o, fragment(expected), rtol=0, atol=atol)
