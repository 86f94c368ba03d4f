"""Kernels of one warp around ldmatrix, stmatrix and mma.sync, and what each lane holds."""

from __future__ import annotations

import numpy as np
import torch

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
