"""Right kernels of somebody's own that are two each, with faults that only the problem's own size shows."""

from __future__ import annotations

from tests.support.own_kernels import BLOCK_SUM, OwnKernel

SPLIT_ROWS = OwnKernel("split_rows", {"rows": 1200000, "cols": 4096}, {"x": "float32[rows, cols]"}, {"out": "float32[rows]"},
    "return x.sum(-1)", {"BLOCK": [128], "SPLITS": [4, 8]}, ["BLOCK"], ["rows", "SPLITS"],
    BLOCK_SUM + """
extern "C" __global__ void split_rows(const float* x, float* partial, int rows, int cols) {
    __shared__ float s[32];
    int row = blockIdx.x, each = (cols + SPLITS - 1) / SPLITS, first = blockIdx.y * each;
    float t = 0;
    for (int i = first + threadIdx.x; i < min(first + each, cols); i += BLOCK) t += x[(long long)row * cols + i];
    t = block_sum(t, s);
    if (threadIdx.x == 0) partial[(long long)blockIdx.y * rows + row] = t;
}
extern "C" __global__ void combine(float* out, const float* partial, int rows) {
    int row = blockIdx.x * 128 + threadIdx.x;
    if (row >= rows) return;
    float t = 0;
    for (int s = 0; s < SPLITS; ++s) t += partial[(long long)s * rows + row];
    out[row] = t;
}
""",
 (("x in 32 bits", "x[(long long)row * cols + i]", "x[(unsigned)row * cols + i]"),
    ("row of the sums in 16 bits", "s * rows + row]", "s * rows + (row & 0xffff)]"),
    ("row stored in 20 bits", "* rows + row] = t", "* rows + (row & 0xfffff)] = t"),
    ("late splits are skipped", "float t = 0;\n    for (int i", "float t = 0;\n    if (row > 70000 && blockIdx.y == SPLITS - 1) cols = first;\n    for (int i"),
    ("the second leaves late rows out", "if (row >= rows) return;", "if (row >= rows || row > 900000 && row % 4 == 1) return;"),
    ("the second's block in 8 bits", "int row = blockIdx.x * 128", "int row = (blockIdx.x & 255) * 128")),
    more={"scratch": {"partial": {"shape": ["SPLITS", "rows"], "dtype": "float32"}}, "parameters": ["x", "partial", "rows", "cols"]},
    then={"combine": (["out", "partial", "rows"], ["128"], ["ceil_div(rows, 128)"])})  # fmt: skip

SPLIT_GEMM = OwnKernel("split_gemm", {"m": 8192, "n": 16384, "k": 512}, {"a": "float16[m, k]", "b": "float16[k, n]", "bias": "float32[n]"}, {"c": "float32[m, n]"},
    "return a.float() @ b.float() + bias", {"SPLITS": [4, 2], "T": [16]}, ["T", "T"], ["ceil_div(n, T)", "ceil_div(m, T)", "SPLITS"],
    """
#include <cuda_fp16.h>
extern "C" __global__ void split_gemm(const half* a, const half* b, float* partial, int m, int n, int k) {
    __shared__ float sa[T][T + 1], sb[T][T + 1];
    int each = (k + SPLITS - 1) / SPLITS, first = blockIdx.z * each, last = min(k, first + each);
    int row = blockIdx.y * T + threadIdx.y, col = blockIdx.x * T + threadIdx.x;
    float t = 0;
    for (int p = first; p < last; p += T) {
        sa[threadIdx.y][threadIdx.x] = row < m && p + threadIdx.x < last ? __half2float(a[(long long)row * k + p + threadIdx.x]) : 0.0f;
        sb[threadIdx.y][threadIdx.x] = col < n && p + threadIdx.y < last ? __half2float(b[(long long)(p + threadIdx.y) * n + col]) : 0.0f;
        __syncthreads();
        for (int q = 0; q < T; ++q) t += sa[threadIdx.y][q] * sb[q][threadIdx.x];
        __syncthreads();
    }
    if (row < m && col < n) partial[((long long)blockIdx.z * m + row) * n + col] = t;
}
extern "C" __global__ void add_up(const float* partial, const float* bias, float* c, int m, int n) {
    long long i = (long long)blockIdx.x * 256 + threadIdx.x;
    if (i >= (long long)m * n) return;
    float t = bias[i % n];
    for (int s = 0; s < SPLITS; ++s) t += partial[(long long)s * m * n + i];
    c[i] = t;
}
""",
 (("the second in 16-bit blocks", "blockIdx.x * 256", "(blockIdx.x & 0xffff) * 256"),
    ("sums of the third split at 2^28", "(long long)s * m * n + i", "(((long long)s * m * n + i) & 0xfffffff)"),
    ("the last split only half for late tiles", "t = 0;\n    for (int p", "t = 0;\n    if (blockIdx.z == SPLITS - 1 && blockIdx.x > 600) last -= each / 2;\n    for (int p"),
    ("row in 12 bits", "* m + row) * n + col] = t", "* m + (row & 4095)) * n + col] = t"),
    ("late columns have no bias", "float t = bias[i % n]", "float t = i % n < 9000 ? bias[i % n] : 0.0f")),
    more={"scratch": {"partial": {"shape": ["SPLITS", "m", "n"], "dtype": "float32"}}, "parameters": ["a", "b", "partial", "m", "n", "k"]},
    then={"add_up": (["partial", "bias", "c", "m", "n"], ["256"], ["ceil_div(m * n, 256)"])})  # fmt: skip

NORM_IN_PLACE = OwnKernel("norm_in_place", {"rows": 200000, "cols": 2048}, {"x": "float32[rows, cols]"}, {},
    "return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt()", {"BLOCK": [128]}, ["BLOCK"], ["rows"],
    BLOCK_SUM + """
extern "C" __global__ void norm_in_place(const float* x, float* scale, int rows, int cols) {
    __shared__ float s[32];
    float t = 0;
    for (int i = threadIdx.x; i < cols; i += BLOCK) { float v = x[(long long)blockIdx.x * cols + i]; t += v * v; }
    t = block_sum(t, s);
    if (threadIdx.x == 0) scale[blockIdx.x] = rsqrtf(t / cols + 1e-5f);
}
extern "C" __global__ void apply(float* x, const float* scale, int rows, int cols) {
    int i = blockIdx.y * 256 + threadIdx.x;
    if (i < cols) x[(long long)blockIdx.x * cols + i] *= scale[blockIdx.x];
}
""",
 (("scale of row in 16 bits", "*= scale[blockIdx.x]", "*= scale[blockIdx.x & 0xffff]"),
    ("late rows are left", "if (i < cols) x", "if (i < cols && blockIdx.x < 150000) x"),
    ("the first skips late rows", "    float t = 0;\n", "    if (blockIdx.x > 100000) return;\n    float t = 0;\n"),
    ("the last column block of late rows", "if (i < cols) x", "if (i < cols && (blockIdx.x < 150000 || blockIdx.y < 7)) x")),
    more={"inout": ["x"], "scratch": {"scale": {"shape": ["rows"], "dtype": "float32"}}, "parameters": ["x", "scale", "rows", "cols"]},
    then={"apply": (["x", "scale", "rows", "cols"], ["256"], ["rows", "ceil_div(cols, 256)"])}, constraints=("rows < 60000000",))  # fmt: skip

GAMMA_GRAD = OwnKernel("gamma_grad", {"rows": 16384, "cols": 8192}, {"dy": "float32[rows, cols]", "x": "float32[rows, cols]"}, {"dg": "float32[cols]"},
    "return (dy * x).sum(0)", {"ROWS": [128], "BX": [64, 32]}, ["BX"], ["ceil_div(cols, BX)", "ceil_div(rows, ROWS)"],
    """
extern "C" __global__ void gamma_grad(const float* dy, const float* x, float* partial, int rows, int cols) {
    int c = blockIdx.x * BX + threadIdx.x;
    if (c >= cols) return;
    float t = 0;
    for (int r = blockIdx.y * ROWS; r < min(rows, (int)(blockIdx.y + 1) * ROWS); ++r) t += dy[(long long)r * cols + c] * x[(long long)r * cols + c];
    partial[(long long)blockIdx.y * cols + c] = t;
}
extern "C" __global__ void gamma_sum(const float* partial, float* dg, int parts, int cols) {
    int c = blockIdx.x * 32 + threadIdx.x;
    if (c >= cols) return;
    float t = 0;
    for (int p = 0; p < parts; ++p) t += partial[(long long)p * cols + c];
    dg[c] = t;
}
""",
 (("parts in 6 bits", "p < parts", "p < min(parts, 64)"), ("columns in 12 bits", "int c = blockIdx.x * 32 + threadIdx.x", "int c = (blockIdx.x * 32 + threadIdx.x) & 4095"),
    ("the first's late columns", "= t;\n}\nextern", "= blockIdx.x > 100 ? 0 : t;\n}\nextern"), ("late parts are of row before", "* cols + c] = t", "* cols + c] = blockIdx.y > 70 && blockIdx.x > 70 ? t / 2 : t")),
    more={"axes": {"parts": {"type": "expr", "expression": "ceil_div(rows, 128)"}}, "scratch": {"partial": {"shape": ["parts", "cols"], "dtype": "float32"}}, "parameters": ["dy", "x", "partial", "rows", "cols"]},
    then={"gamma_sum": (["partial", "dg", "parts", "cols"], ["32"], ["ceil_div(cols, 32)"])})  # fmt: skip

SPLIT_DECODE = OwnKernel("split_decode", {"heads": 4096, "keys": 8192}, {"q": "float32[heads, d]", "k": "float32[heads, keys, d]", "v": "float32[heads, keys, d]"}, {"o": "float32[heads, d]"},
    "w = torch.softmax((q[:, None] * k).sum(-1) / 8, -1); return (w[..., None] * v).sum(1)", {"SPLITS": [8, 4]}, ["64"], ["SPLITS", "heads"],
    """
extern "C" __global__ void split_decode(const float* q, const float* k, const float* v, float* acc, float* ml, int heads, int keys) {
    __shared__ float s[2];
    int head = blockIdx.y, each = (keys + SPLITS - 1) / SPLITS, first = blockIdx.x * each, last = min(keys, first + each), lane = threadIdx.x;
    float m = -1e30f, l = 0, o = 0;
    for (int j = first; j < last; ++j) {
        float t = q[head * 64 + lane] * k[((long long)head * keys + j) * 64 + lane];
        for (int x = 16; x; x /= 2) t += __shfl_xor_sync(~0u, t, x);
        if (lane % 32 == 0) s[lane / 32] = t;
        __syncthreads();
        t = (s[0] + s[1]) / 8;
        __syncthreads();
        float n = fmaxf(m, t), e = expf(m - n), w = expf(t - n);
        o = o * e + w * v[((long long)head * keys + j) * 64 + lane], l = l * e + w, m = n;
    }
    long long at = (long long)head * SPLITS + blockIdx.x;
    acc[at * 64 + lane] = o;
    if (lane == 0) ml[at * 2] = m, ml[at * 2 + 1] = l;
}
extern "C" __global__ void merge(float* o, const float* acc, const float* ml, int heads) {
    int head = blockIdx.x, lane = threadIdx.x;
    float m = -1e30f, l = 0, t = 0;
    for (int s = 0; s < SPLITS; ++s) m = fmaxf(m, ml[(head * SPLITS + s) * 2]);
    for (int s = 0; s < SPLITS; ++s) {
        float w = expf(ml[(head * SPLITS + s) * 2] - m);
        l += w * ml[(head * SPLITS + s) * 2 + 1], t += w * acc[((long long)head * SPLITS + s) * 64 + lane];
    }
    o[head * 64 + lane] = t / l;
}
""",
    (("values in 30 bits", "v[((long long)head * keys + j) * 64 + lane]", "v[(((long long)head * keys + j) * 64 + lane) & 0x3fffffff]"),
    ("head of the sums in 10 bits", "acc[((long long)head * SPLITS + s)", "acc[((long long)(head & 1023) * SPLITS + s)"),
    ("maximum of late heads of the first split", "float w = expf(ml[(head * SPLITS + s) * 2] - m);", "float w = expf(ml[(head * SPLITS + (head > 3000 ? 0 : s)) * 2] - m);"),
    ("the last split of late heads is left out", "for (int s = 0; s < SPLITS; ++s) {", "for (int s = 0; s < SPLITS - (head > 2000); ++s) {")),
    more={"axes": {"d": {"type": "const", "value": 64}}, "scratch": {"acc": {"shape": ["heads", "SPLITS", "d"], "dtype": "float32"}, "ml": {"shape": ["heads * SPLITS * 2"], "dtype": "float32"}}, "parameters": ["q", "k", "v", "acc", "ml", "heads", "keys"]},
    then={"merge": (["o", "acc", "ml", "heads"], ["64"], ["heads"])})  # fmt: skip

SOFTMAX_TWICE = OwnKernel("softmax_twice", {"rows": 100000, "cols": 4000}, {"x": "float16[rows, cols]"}, {"out": "float32[rows, cols]"},
    "return torch.softmax(x.float(), -1)", {"BLOCK": [128]}, ["BLOCK"], ["rows", "4"],
    BLOCK_SUM + """
#include <cuda_fp16.h>
extern "C" __global__ void softmax_twice(const half* x, float* out, float* sums, int rows, int cols) {
    __shared__ float s[32];
    long long row = blockIdx.x;
    float t = 0;
    for (int i = blockIdx.y * BLOCK + threadIdx.x; i < cols; i += 4 * BLOCK) {
        float e = expf(__half2float(x[row * cols + i]));
        out[row * cols + i] = e, t += e;
    }
    t = block_sum(t, s);
    if (threadIdx.x == 0) sums[row * 4 + blockIdx.y] = t;
}
extern "C" __global__ void divide(float* out, const float* sums, int rows, int cols) {
    long long row = blockIdx.x;
    float t = sums[row * 4] + sums[row * 4 + 1] + sums[row * 4 + 2] + sums[row * 4 + 3];
    for (int i = threadIdx.x; i < cols; i += 256) out[row * cols + i] /= t;
}
""",
 (("late rows are not divided", "i += 256) out", "i += 256) if (row < 80000) out"), ("sums of 16 bits", "float t = sums[row * 4]", "row &= 0xffff; float t = sums[row * 4]"),
    ("a late sum is left out", "+ sums[row * 4 + 3]", "+ (row > 70000 ? 0 : sums[row * 4 + 3])"), ("late ends of rows are not divided", "i < cols; i += 256) out", "i < cols - (row > 70000); i += 256) out")),
    more={"scratch": {"sums": {"shape": ["rows * 4"], "dtype": "float32"}}, "parameters": ["x", "out", "sums", "rows", "cols"]},
    then={"divide": (["out", "sums", "rows", "cols"], ["256"], ["rows"])}, draws={})  # fmt: skip

KERNELS = (SPLIT_ROWS, SPLIT_GEMM, NORM_IN_PLACE, GAMMA_GRAD, SPLIT_DECODE, SOFTMAX_TWICE)
