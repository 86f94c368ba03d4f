"""ldmatrix, stmatrix and mma.sync against the layouts of the PTX ISA, stated here once more in NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from evoengine.devices.base import KernelCrashed, KernelHung
from evoengine.records import Launch, Source
from evoengine.stages.compile import compile_source

LANE = np.arange(32)
G, T = LANE // 4, LANE % 4

MOVE = """
extern "C" __global__ void f(const unsigned short* a, unsigned* o) {
    __shared__ __align__(16) unsigned short tile[32 * 24];
    for (int i = threadIdx.x; i < 32 * 8; i += 32) tile[i / 8 * 24 + i % 8] = a[i];
    SYNC
    unsigned r[4] = {0, 0, 0, 0};
    unsigned row = (unsigned)__cvta_generic_to_shared(tile) + 48 * LANE_ROW;
    LOAD
    for (int i = 0; i < 4; ++i) o[4 * threadIdx.x + i] = r[i];
}
"""
COUNTS = {1: "{%0}, [%1]", 2: "{%0, %1}, [%2]", 4: "{%0, %1, %2, %3}, [%4]"}


def load(count, trans, space="shared"):
    outputs = ", ".join(f'"=r"(r[{i}])' for i in range(count))
    name = f"ldmatrix.sync.aligned.m8n8.x{count}{trans}.{space}.b16"
    return f'asm volatile("{name} {COUNTS[count]};" : {outputs} : "r"(row) : "memory");'


def move_text(count, trans, space="shared", sync="__syncwarp();", row="threadIdx.x"):
    return MOVE.replace("LOAD", load(count, trans, space)).replace("SYNC", sync).replace("LANE_ROW", row)


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


STORE = """
extern "C" __global__ void f(const unsigned* a, unsigned short* o) {
    __shared__ __align__(16) unsigned short tile[32 * 8];
    unsigned r[4];
    for (int i = 0; i < 4; ++i) r[i] = a[4 * threadIdx.x + i];
    unsigned row = (unsigned)__cvta_generic_to_shared(tile + 8 * threadIdx.x);
    asm volatile("stmatrix.sync.aligned.m8n8.x4TRANS.shared.b16 [%0], {%1, %2, %3, %4};"
                 :: "r"(row), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]) : "memory");
    SYNC
    for (int i = 0; i < 8; ++i) o[8 * threadIdx.x + i] = tile[8 * (31 - threadIdx.x) + i];
}
"""


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


MMA = """
extern "C" __global__ void f(const unsigned* a, const unsigned* b, const float* c, float* o) {
    float d[4];
    unsigned x[4], y[2];
    for (int i = 0; i < 4; ++i) d[i] = c[4 * threadIdx.x + i], x[i] = a[4 * threadIdx.x + i];
    for (int i = 0; i < 2; ++i) y[i] = b[2 * threadIdx.x + i];
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.TYPE.TYPE.f32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "r"(y[0]), "r"(y[1]));
    for (int i = 0; i < 4; ++i) o[4 * threadIdx.x + i] = d[i];
}
"""
TYPES = {"f16": torch.float16, "bf16": torch.bfloat16}


def pairs(matrix, row, column):
    """Words of two elements that follow one another in a row; `matrix` holds 16-bit patterns."""
    return matrix[row, column].astype(np.uint32) | matrix[row, column + 1].astype(np.uint32) << 16


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


@pytest.mark.parametrize(
    "text",
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
)
def test_the_instructions_are_spelt_as_the_real_compiler_takes_them(text):
    mix = compile_source(Source(text, "f", Launch((1, 1, 1), 32, 0)), "sm_90a").mix
    assert {"LDSM", "STSM", "HMMA"} & mix.keys() or not mix
