"""ldmatrix, stmatrix and mma.sync against the layouts of the PTX ISA, stated here once more in NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from evoengine.devices.base import KernelCrashed, KernelHung
from evoengine.records import Launch, Source
from evoengine.stages.compile import compile_source
from tests.support.exhaustive import each_nth
from tests.support.mma_kernels import MMA, STORE, TYPES, G, T, move_text, pairs


@pytest.fixture
def matrices():
    return np.random.default_rng(5).integers(0, 1 << 15, (4, 8, 8), dtype=np.uint16)


@pytest.mark.parametrize("trans", ["", ".trans"])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_ldmatrix_gives_each_lane_two_neighbours_of_its_row_or_column(emulate, matrices, count, trans):
    o = emulate(move_text(count, trans), matrices, np.zeros((32, 4), np.uint32))["o"]
    seen = matrices.transpose(0, 2, 1) if trans else matrices
    for j in range(count):
        np.testing.assert_array_equal(o[:, j] & 0xFFFF, seen[j][G, 2 * T])
        np.testing.assert_array_equal(o[:, j] >> 16, seen[j][G, 2 * T + 1])
    assert not o[:, count:].any()


def test_ldmatrix_takes_no_notice_of_addresses_it_does_not_need(emulate, matrices):
    wild = move_text(2, "", row="(threadIdx.x < 16 ? threadIdx.x : 0x1234567)")
    right = emulate(move_text(2, ""), matrices, np.zeros((32, 4), np.uint32))["o"]
    np.testing.assert_array_equal(emulate(wild, matrices, np.zeros((32, 4), np.uint32))["o"], right)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_missing_syncwarp_before_ldmatrix_shows(emulate, matrices, seed):
    o = emulate(move_text(4, "", sync=""), matrices, np.zeros((32, 4), np.uint32), seed=seed)["o"]
    assert (o == 0xFFFFFFFF).any()


def test_a_row_that_is_not_a_multiple_of_16_bytes_is_named(emulate, matrices):
    with pytest.raises(
        KernelCrashed, match=r"misaligned ldmatrix at line 8: shared address \d+ is not a multiple of 16"
    ):
        emulate(move_text(4, "", row="threadIdx.x + 8"), matrices, np.zeros((32, 4), np.uint32))


def test_a_lane_that_does_not_come_to_ldmatrix_is_a_hang(emulate, matrices):
    text = move_text(4, "").replace("asm volatile", "if (threadIdx.x != 9) asm volatile")
    with pytest.raises(KernelHung, match=r"31 of 32 threads wait at ldmatrix \(line 8"):
        emulate(text, matrices, np.zeros((32, 4), np.uint32))


@pytest.mark.parametrize("trans", ["", ".trans"])
def test_stmatrix_puts_the_words_where_ldmatrix_finds_them(emulate, trans):
    words = np.random.default_rng(6).integers(0, 1 << 31, (32, 4), dtype=np.uint32)
    text = STORE.replace("TRANS", trans)
    expected = np.empty((4, 8, 8), np.uint16)
    for j in range(4):
        seen = expected[j].T if trans else expected[j]
        seen[G, 2 * T], seen[G, 2 * T + 1] = words[:, j] & 0xFFFF, words[:, j] >> 16
    o = emulate(text.replace("SYNC", "__syncwarp();"), words, np.zeros((32, 8), np.uint16))["o"]
    np.testing.assert_array_equal(o[::-1].reshape(4, 8, 8), expected)
    o = emulate(text.replace("SYNC", ""), words, np.zeros((32, 8), np.uint16))["o"]
    assert (o == 0xFFFF).any()


@pytest.mark.parametrize("name", TYPES)
def test_mma_multiplies_what_the_lanes_hold_between_them(emulate, name):
    generator = torch.Generator().manual_seed(7)
    a, b = (torch.randn(shape, generator=generator).to(TYPES[name]) for shape in ((16, 16), (8, 16)))
    c = torch.randn(16, 8, generator=generator).numpy()
    a_bits, b_bits = (x.view(torch.uint16).numpy() for x in (a, b))
    words_a = np.stack([pairs(a_bits, G + r, 2 * T + k) for r, k in ((0, 0), (8, 0), (0, 8), (8, 8))], axis=1)
    words_b = np.stack([pairs(b_bits, G, 2 * T), pairs(b_bits, G, 2 * T + 8)], axis=1)

    def fragment(matrix):
        return np.stack([matrix[G + r, 2 * T + k] for r, k in ((0, 0), (0, 1), (8, 0), (8, 1))], axis=1)

    o = emulate(MMA.replace("TYPE", name), words_a, words_b, fragment(c), np.zeros((32, 4), np.float32))["o"]
    expected = a.double().numpy() @ b.double().numpy().T + c
    np.testing.assert_allclose(o, fragment(expected), rtol=0, atol=2e-5)


BYTES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "s8": torch.int8}


@pytest.mark.parametrize("name", BYTES)
def test_mma_multiplies_bytes(emulate, name):
    """Whole numbers, whose sums are exact; of s8 sums are whole numbers of 32 bits."""
    random = np.random.default_rng(8)
    a, b = (random.integers(-3, 4, shape) for shape in ((16, 32), (8, 32)))
    c = random.integers(-(1 << 20), 1 << 20, (16, 8))
    a_bits, b_bits = (torch.from_numpy(x).to(BYTES[name]).view(torch.uint8).numpy() for x in (a, b))

    def word(matrix, row, column):
        return np.stack([matrix[row, column + k] for k in range(4)], axis=1).view(np.uint32)[:, 0]

    words_a = np.stack([word(a_bits, G + r, 4 * T + k) for r, k in ((0, 0), (8, 0), (0, 16), (8, 16))], axis=1)
    words_b = np.stack([word(b_bits, G, 4 * T), word(b_bits, G, 4 * T + 16)], axis=1)

    def fragment(matrix):
        return np.stack([matrix[G + r, 2 * T + k] for r, k in ((0, 0), (0, 1), (8, 0), (8, 1))], axis=1)

    whole = name == "s8"
    text = MMA.replace(
        "k16.row.col.f32.TYPE.TYPE.f32", f"k32.row.col.{'s32.s8.s8.s32' if whole else f'f32.{name}.{name}.f32'}"
    )
    text = text.replace("float", "int").replace("+f", "+r") if whole else text
    dtype = np.int32 if whole else np.float32
    o = emulate(text, words_a, words_b, fragment(c.astype(dtype)), np.zeros((32, 4), dtype))["o"]
    np.testing.assert_array_equal(o, fragment(a @ b.T + c).astype(dtype))


@pytest.mark.parametrize(
    "text",
    each_nth(
        16,
        [
            *(
                move_text(n, trans, space)
                for n in (1, 2, 4)
                for trans in ("", ".trans")
                for space in ("shared", "shared::cta")
            ),
            *(STORE.replace("TRANS", trans).replace("SYNC", "__syncwarp();") for trans in ("", ".trans")),
            *(MMA.replace("TYPE", name) for name in TYPES),
        ],
    ),
)
def test_the_instructions_are_spelt_as_the_real_compiler_takes_them(text):
    mix = compile_source(Source(text, "f", Launch((1, 1, 1), 32, 0)), "sm_90a").mix
    assert {"LDSM", "STSM", "HMMA"} & mix.keys() or not mix
