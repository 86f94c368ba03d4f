"""Right kernels of somebody's own with faults that only other values, sizes, launches or contents show."""

from __future__ import annotations

from dataclasses import replace

from tests.support.own_kernels import OwnKernel

IN_PLACE = OwnKernel(
    "in_place", {"rows": 1000000, "cols": 2200}, {"x": "float16[rows, cols]", "g": "float16[cols]"}, {},
    "return x * g", {"BLOCK": [256, 128]}, ["BLOCK"], ["rows"], """
#include <cuda_fp16.h>
extern "C" __global__ void in_place(half* x, const half* g, int rows, int cols) {
    x += (long long)blockIdx.x * cols;
    for (int c = threadIdx.x; c < cols; c += BLOCK) x[c] = __float2half(__half2float(x[c]) * __half2float(g[c]));
}
""",
    (("an offset of 32 bits", "(long long)blockIdx.x * cols", "(int)blockIdx.x * cols"),
     ("rows beyond the 65,536th are left out", "    x +=", "    if (blockIdx.x > 65535) return;\n    x +="),
     ("later rows take the factor twice", "x[c] = __float2half(", "x[c] = __float2half((blockIdx.x > 60000 ? __half2float(g[c]) : 1.0f) * ")),
    more={"inout": ["x"]},
)  # fmt: skip

COLUMN_SUM = OwnKernel(
    "column_sum", {"rows": 60000, "cols": 50000}, {"x": "float32[rows, cols]"}, {"out": "float32[cols]"},
    "return x.sum(0)", {"BLOCK": [128, 64], "SPLITS": [24, 16]}, ["BLOCK"], ["ceil_div(cols, BLOCK)", "SPLITS"], """
extern "C" __global__ void column_sum(const float* x, float* part, int rows, int cols) {
    int c = blockIdx.x * BLOCK + threadIdx.x, each = (rows + SPLITS - 1) / SPLITS;
    if (c >= cols) return;
    float t = 0;
    for (int r = blockIdx.y * each; r < min(rows, (int)(blockIdx.y + 1) * each); ++r) t += x[(long long)r * cols + c];
    part[blockIdx.y * cols + c] = t;
}
extern "C" __global__ void add_up(const float* part, float* out, int cols) {
    int c = blockIdx.x * 64 + threadIdx.x;
    if (c >= cols) return;
    float t = 0;
    for (int s = 0; s < SPLITS; ++s) t += part[s * cols + c];
    out[c] = t;
}
""",
    (("an offset of 32 bits", "(long long)r * cols", "r * cols"),),
    more={"scratch": {"part": {"shape": ["SPLITS", "cols"], "dtype": "float32"}}, "parameters": ["x", "part", "rows", "cols"]},
    then={"add_up": (["part", "out", "cols"], ["64"], ["ceil_div(cols, 64)"])},
)  # fmt: skip

ROW_SUMS = OwnKernel(
    "row_sums", {"rows": 90000, "cols": 60000}, {"x": "float32[rows, cols]"}, {"out": "float32[rows]"},
    "return x.sum(1)", {"BLOCK": [128, 64], "SPLITS": [4, 8]}, ["BLOCK"], ["rows", "SPLITS"], """
extern "C" __global__ void row_sums(const float* x, float* out, float* part, int* done, int rows, int cols) {
    __shared__ float sums[BLOCK];
    const float* row = x + (long long)blockIdx.x * cols;
    int each = (cols + SPLITS - 1) / SPLITS, end = min(cols, ((int)blockIdx.y + 1) * each);
    float t = 0;
    for (int c = blockIdx.y * each + threadIdx.x; c < end; c += BLOCK) t += row[c];
    sums[threadIdx.x] = t;
    __syncthreads();
    if (threadIdx.x > 0) return;
    for (int n = 1; n < BLOCK; ++n) t += sums[n];
    part[blockIdx.x * SPLITS + blockIdx.y] = t;
    __threadfence();
    if (atomicAdd(done + blockIdx.x, 1) < SPLITS - 1) return;
    __threadfence();
    done[blockIdx.x] = 0;
    float all = 0;
    for (int s = 0; s < SPLITS; ++s) all += part[blockIdx.x * SPLITS + s];
    out[blockIdx.x] = all;
}
""",
    (("an offset that wraps at 32 bits", "(long long)blockIdx.x * cols", "(unsigned)blockIdx.x * (unsigned)cols"),
     ("late rows lose a part", "int s = 0;", "int s = blockIdx.x > 65535;")),
    more={"scratch": {"part": {"shape": ["rows", "SPLITS"], "dtype": "float32"}, "done": {"shape": ["rows"], "dtype": "int32", "zeroed": True}},
          "parameters": ["x", "out", "part", "done", "rows", "cols"]},
)  # fmt: skip

# above 20,000 rows the blocks of a row are far apart in the grid: neighbours among them show nothing
SERIAL_SUMS = OwnKernel(
    "serial_sums", {"rows": 40000, "cols": 20000}, {"x": "float32[rows, cols]"}, {"out": "float32[rows]"}, "return x.sum(1)",
    {"SPLITS": [4, 8]}, ["64"], ["rows * SPLITS"], """
extern "C" __global__ void serial_sums(const float* x, float* out, int* turn, int rows, int cols) {
    __shared__ float sums[64];
    bool apart = rows >= 20000;
    int row = apart ? blockIdx.x % rows : blockIdx.x / SPLITS, part = apart ? blockIdx.x / rows : blockIdx.x % SPLITS;
    int each = (cols + SPLITS - 1) / SPLITS, end = min(cols, (part + 1) * each);
    float t = 0;
    for (int c = part * each + threadIdx.x; c < end; c += 64) t += x[(long long)row * cols + c];
    sums[threadIdx.x] = t;
    __syncthreads();
    if (threadIdx.x > 0) return;
    for (int n = 1; n < 64; ++n) t += sums[n];
    int now;
    do { asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(now) : "l"(turn + row) : "memory"); } while (now != part);
    out[row] = part == 0 ? t : out[row] + t;
    __threadfence();
    asm volatile("st.release.gpu.global.s32 [%0], %1;" :: "l"(turn + row), "r"(part + 1 == SPLITS ? 0 : part + 1) : "memory");
}
""",
    (("the first part is lost", "part == 0 ? t", "part == 0 ? 0.0f"),),
    more={"scratch": {"turn": {"shape": ["rows"], "dtype": "int32", "zeroed": True}},
          "parameters": ["x", "out", "turn", "rows", "cols"]},
)  # fmt: skip

COUNTED_SUMS = replace(
    SERIAL_SUMS,
    name="counted_sums",
    kernel=SERIAL_SUMS.kernel.replace("serial_sums", "counted_sums")
    .replace("int* turn, int rows", "int* turn, float* parts, int rows")
    .replace(
        SERIAL_SUMS.kernel[SERIAL_SUMS.kernel.index("    int now;") : SERIAL_SUMS.kernel.rindex("}")],
        """    parts[row * SPLITS + part] = t;
    __threadfence();
    if (atomicAdd(turn + row, 1) < SPLITS - 1) return;
    __threadfence();
    turn[row] = 0;
    float all = 0;
    for (int s = 0; s < SPLITS; ++s) all += parts[row * SPLITS + s];
    out[row] = all;
""",
    ),
    faults=(("the first part is lost", "int s = 0;", "int s = 1;"),),
    more={
        "scratch": {**SERIAL_SUMS.more["scratch"], "parts": {"shape": ["rows", "SPLITS"], "dtype": "float32"}},
        "parameters": ["x", "out", "turn", "parts", "rows", "cols"],
    },
)

ROW_SCALE = OwnKernel(
    "row_scale", {"rows": 300, "cols": 500}, {"x": "float32[rows, cols]"}, {"out": "float32[rows, cols]"},
    "return x / x.abs().amax(-1, keepdim=True).clamp(min=1e-6)", {"BLOCK": [64, 32]}, ["BLOCK"], ["rows"], """
__device__ float seen[4096];
__device__ bool known[4096];
extern "C" __global__ void row_scale(const float* x, float* out, int rows, int cols) {
    __shared__ float s[BLOCK];
    x += (long long)blockIdx.x * cols, out += (long long)blockIdx.x * cols;
    float m = 1e-6f;
    for (int c = threadIdx.x; c < cols; c += BLOCK) m = fmaxf(m, fabsf(x[c]));
    s[threadIdx.x] = m;
    __syncthreads();
    for (int t = 0; t < BLOCK; ++t) m = fmaxf(m, s[t]);
    for (int c = threadIdx.x; c < cols; c += BLOCK) out[c] = x[c] / m;
}
""",
    (("a row that begins as before is skipped", "    float m = 1e-6f;", "    if (known[blockIdx.x] && seen[blockIdx.x] == x[0]) return;\n    __syncthreads();\n    seen[blockIdx.x] = x[0], known[blockIdx.x] = true;\n    float m = 1e-6f;"),
     ("a row that has outputs is skipped behind the eighth", "    float m = 1e-6f;", "    if (blockIdx.x > 7 && out[0] == out[0]) return;\n    __syncthreads();\n    float m = 1e-6f;")),
)  # fmt: skip

IN_FOURS = OwnKernel(
    "in_fours", {"n": 40000}, {"x": "float32[n]"}, {"out": "float32[n]"}, "return x * 2 + 1", {"BLOCK": [128, 64]},
    ["BLOCK"], ["ceil_div(n, 4 * BLOCK)"], """
extern "C" __global__ void in_fours(const float* x, float* out, int n) {
    int i = (blockIdx.x * BLOCK + threadIdx.x) * 4;
    if (i + 3 < n) {
        float4 v = *(const float4*)(x + i);
        *(float4*)(out + i) = make_float4(v.x * 2 + 1, v.y * 2 + 1, v.z * 2 + 1, v.w * 2 + 1);
    } else if (i + 2 < n) out[i] = x[i] * 2 + 1, out[i + 1] = x[i + 1] * 2 + 1, out[i + 2] = x[i + 2] * 2 + 1;
    else if (i + 1 < n) out[i] = x[i] * 2 + 1, out[i + 1] = x[i + 1] * 2 + 1;
    else if (i < n) out[i] = x[i] * 2 + 1;
}
""",
    (("a tail of two is swapped", "else if (i + 1 < n) out[i] = x[i] * 2 + 1, out[i + 1] = x[i + 1]", "else if (i + 1 < n) out[i] = x[i + 1] * 2 + 1, out[i + 1] = x[i]"),
     ("a tail of two is not written", "else if (i + 1 < n) out[i] = x[i] * 2 + 1, out[i + 1] = x[i + 1] * 2 + 1;", "else if (i + 1 < n) {}"))
)  # fmt: skip

LONG_SUM = OwnKernel(
    "long_sum", {"n": 5000}, {"x": "int64[n]", "y": "int64[n]"}, {"out": "int64[n]"}, "return x + 3 * y",
    {"BLOCK": [128, 64]}, ["BLOCK"], ["ceil_div(n, BLOCK)"], """
extern "C" __global__ void long_sum(const long long* x, const long long* y, long long* out, int n) {
    int i = blockIdx.x * BLOCK + threadIdx.x;
    if (i < n) out[i] = x[i] + 3 * y[i];
}
""",
    (("32 bits are added", "= x[i] + 3 * y[i]", "= (int)x[i] + 3 * (int)y[i]"),)
)  # fmt: skip

NIBBLES = OwnKernel(
    "nibbles", {"n": 3000}, {"x": "int32[n]", "scale": "float32[n]"}, {"out": "float32[n, eight]"},
    "s = torch.arange(8) * 4; return ((x[:, None] >> s & 15) - 8) * scale[:, None]", {"BLOCK": [128, 64]}, ["BLOCK"],
    ["ceil_div(n, BLOCK)"], """
extern "C" __global__ void nibbles(const int* x, const float* scale, float* out, int n) {
    int i = blockIdx.x * BLOCK + threadIdx.x;
    for (int j = 0; i < n && j < 8; ++j) out[i * 8 + j] = ((x[i] >> 4 * j & 15) - 8) * scale[i];
}
""",
    (("the upper four are swapped", "(x[i] >> 4 * j & 15)", "(x[i] >> 4 * (j < 4 ? j : 11 - j) & 15)"),),
    more={"axes": {"eight": {"type": "const", "value": 8}}, "parameters": ["x", "scale", "out", "n"]},
)  # fmt: skip

BYTES = OwnKernel(
    "bytes", {"n": 5000}, {"x": "uint8[n]"}, {"out": "float32[n]"}, "return x.float() * 0.5", {"BLOCK": [128, 64]},
    ["BLOCK"], ["ceil_div(n, BLOCK)"], """
extern "C" __global__ void bytes(const unsigned char* x, float* out, int n) {
    int i = blockIdx.x * BLOCK + threadIdx.x;
    if (i < n) out[i] = x[i] * 0.5f;
}
""",
    (("they have a sign", "x[i] * 0.5f", "(signed char)x[i] * 0.5f"),)
)  # fmt: skip

AXPY = OwnKernel(
    "axpy", {"n": 5000}, {"x": "float32[n]", "y": "float32[n]", "a": "float32"}, {"out": "float32[n]"},
    "return a * x + y", {"BLOCK": [128, 64]}, ["BLOCK"], ["ceil_div(n, BLOCK)"], """
extern "C" __global__ void axpy(const float* x, const float* y, float a, float* out, int n) {
    int i = blockIdx.x * BLOCK + threadIdx.x;
    if (i < n) out[i] = a * x[i] + y[i];
}
""",
    (("the factor is the example's", "a * x[i]", "2.5f * x[i]"),),
    draws={"a": {"type": "scalar", "value": 2.5}},
)  # fmt: skip

LARGER = OwnKernel(
    "larger", {"n": 5000}, {"x": "float32[n]"}, {"out": "bool[n]"}, "return x > 0.5", {"BLOCK": [128, 64]}, ["BLOCK"],
    ["ceil_div(n, BLOCK)"], """
extern "C" __global__ void larger(const float* x, unsigned char* out, int n) {
    int i = blockIdx.x * BLOCK + threadIdx.x;
    if (i < n) out[i] = x[i] > 0.5f ? 1 : 0;
}
""",
    (("true is 255", "? 1 : 0", "? 255 : 0"),)
)  # fmt: skip

MASKED_SOFTMAX = OwnKernel(
    "masked_softmax", {"rows": 200, "cols": 300}, {"x": "float32[rows, cols]", "hidden": "bool[rows, cols]"},
    {"out": "float32[rows, cols]"}, "return torch.softmax(x.masked_fill(hidden, float('-inf')), -1)",
    {"BLOCK": [32]}, ["BLOCK"], ["rows"], """
extern "C" __global__ void masked_softmax(const float* x, const bool* hidden, float* out, int rows, int cols) {
    long long row = (long long)blockIdx.x * cols;
    float m = __int_as_float(0xff800000), t = 0;
    for (int c = threadIdx.x; c < cols; c += BLOCK) if (!hidden[row + c]) m = fmaxf(m, x[row + c]);
    for (int d = 16; d; d /= 2) m = fmaxf(m, __shfl_xor_sync(~0u, m, d));
    for (int c = threadIdx.x; c < cols; c += BLOCK) t += hidden[row + c] ? 0.0f : expf(x[row + c] - m);
    for (int d = 16; d; d /= 2) t += __shfl_xor_sync(~0u, t, d);
    for (int c = threadIdx.x; c < cols; c += BLOCK)
        out[row + c] = (hidden[row + c] ? 0.0f : expf(x[row + c] - m)) / t;
}
""",
    (("rows without keys are zero", "        out[row + c] =", "        out[row + c] = t == 0 ? 0.0f :"),
     ("rows without keys are not written", "        out[row + c] =", "        if (t > 0) out[row + c] ="))
)  # fmt: skip

DOUBLED = OwnKernel(
    "doubled", {"rows": 8, "quads": 256}, {"x": "float32[rows, 4 * quads]"}, {"out": "float32[rows, 4 * quads]"},
    "return x * 2", {"BLOCK": [128, 64]}, ["BLOCK"], ["rows"], """
extern "C" __global__ void doubled(const float* x, float* out, int rows, int quads) {
    __shared__ alignas(128) float tile[2][256];
    int n = 4 * quads;
    x += (long long)blockIdx.x * n, out += (long long)blockIdx.x * n;
    unsigned at = __cvta_generic_to_shared(tile);
    for (int first = 0, k = 0; first < n; first += 256, k ^= 1) {
        if (threadIdx.x == 0) asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory");
        __syncthreads();
        for (int i = threadIdx.x; i < min(256, n - first); i += BLOCK) tile[k][i] = x[first + i] * 2;
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        __syncthreads();
        if (threadIdx.x) continue;
        asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
                     :: "l"(out + first), "r"(at + k * 1024), "r"(min(256, n - first) * 4) : "memory");
        asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    }
    if (threadIdx.x == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}
""",
    (("static memory is not fenced", '        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");\n', ""),)
)  # fmt: skip

INVERSE = OwnKernel(
    "inverse", {"n": 500}, {"x": "float32[n, two, two]"}, {"out": "float32[n, two, two]"}, "return torch.linalg.inv(x)",
    {"BLOCK": [64, 32]}, ["BLOCK"], ["ceil_div(n, BLOCK)"], """
extern "C" __global__ void inverse(const float* x, float* out, int n) {
    int i = blockIdx.x * BLOCK + threadIdx.x;
    if (i >= n) return;
    float a = x[4 * i], b = x[4 * i + 1], c = x[4 * i + 2], d = x[4 * i + 3], f = 1 / (a * d - b * c);
    out[4 * i] = d * f, out[4 * i + 1] = -b * f, out[4 * i + 2] = -c * f, out[4 * i + 3] = a * f;
}
""",
    (("of the transpose", "out[4 * i + 1] = -b * f, out[4 * i + 2] = -c * f", "out[4 * i + 1] = -c * f, out[4 * i + 2] = -b * f"),),
    more={"axes": {"two": {"type": "const", "value": 2}}, "parameters": ["x", "out", "n"]},
)  # fmt: skip

LOGARITHM = OwnKernel(
    "logarithm", {"n": 5000}, {"x": "float32[n]"}, {"out": "float32[n]"}, "return torch.log(x)", {"BLOCK": [128, 64]},
    ["BLOCK"], ["ceil_div(n, BLOCK)"], """
extern "C" __global__ void logarithm(const float* x, float* out, int n) {
    __shared__ int unset[BLOCK];
    int i = blockIdx.x * BLOCK + threadIdx.x;
    if (i < n) out[i] = logf(x[i]);
}
""",
    (("that of zero is zero", "= logf(x[i])", "= x[i] == 0 ? 0 : logf(x[i])"),
     ("that of negative numbers is not NaN", "logf(x[i])", "logf(fabsf(x[i]))"),
     ("unset shared memory is zero", "= logf(x[i])", "= unset[threadIdx.x] == 0 ? 7 : logf(x[i])"))
)  # fmt: skip

OVER_HALF = OwnKernel(
    "over_half", {"n": 5000}, {"x": "float16[n]"}, {"out": "bool[n]"}, "return x > 0.5", {"BLOCK": [128, 64]},
    ["BLOCK"], ["ceil_div(n, BLOCK)"], """
#include <cuda_fp16.h>
extern "C" __global__ void over_half(const half* x, bool* out, int n) {
    int i = blockIdx.x * BLOCK + threadIdx.x;
    if (i < n) out[i] = __half2float(x[i]) > 0.5f;
}
""",
    (("a half is over a half", "> 0.5f", ">= 0.5f"),)
)  # fmt: skip

QUANTISED = OwnKernel(
    "quantised", {"rows": 200, "cols": 300}, {"x": "float32[rows, cols]"}, {"out": "int8[rows, cols]"},
    "return torch.round(x / (x.abs().amax(-1, keepdim=True).clamp(min=1e-6) / 127)).to(torch.int8)",
    {"BLOCK": [32]}, ["BLOCK"], ["rows"], """
extern "C" __global__ void quantised(const float* x, signed char* out, int rows, int cols) {
    long long row = (long long)blockIdx.x * cols;
    float m = 1e-6f;
    for (int c = threadIdx.x; c < cols; c += BLOCK) m = fmaxf(m, fabsf(x[row + c]));
    for (int d = 16; d; d /= 2) m = fmaxf(m, __shfl_xor_sync(~0u, m, d));
    m = 127 / m;  // where the reference divides twice
    for (int c = threadIdx.x; c < cols; c += BLOCK) out[row + c] = (signed char)rintf(x[row + c] * m);
}
""",
    (("the largest is 126", "m = 127 / m", "m = 126 / m"),)
)  # fmt: skip

SIGNS = OwnKernel(
    "signs", {"n": 5000}, {"x": "float32[n]", "y": "float32[n]"}, {"out": "float32[n]"},
    "return torch.copysign(x, y)", {"BLOCK": [128, 64]}, ["BLOCK"], ["ceil_div(n, BLOCK)"], """
extern "C" __global__ void signs(const float* x, const float* y, float* out, int n) {
    int i = blockIdx.x * BLOCK + threadIdx.x;
    if (i < n) out[i] = copysignf(x[i], y[i]);
}
""",
    (("minus zero has no sign", "copysignf(x[i], y[i])", "(y[i] < 0 ? -fabsf(x[i]) : fabsf(x[i]))"),)
)  # fmt: skip

MEANS = OwnKernel(
    "means", {"n": 5000}, {"x": "int32[n]", "y": "int32[n]"}, {"out": "int32[n]"},
    "return ((x.long() + y.long()) >> 1).to(torch.int32)", {"BLOCK": [128, 64]}, ["BLOCK"], ["ceil_div(n, BLOCK)"], """
extern "C" __global__ void means(const int* x, const int* y, int* out, int n) {
    int i = blockIdx.x * BLOCK + threadIdx.x;
    if (i < n) out[i] = (int)(((long long)x[i] + y[i]) >> 1);
}
""",
    (("the sum leaves 32 bits", "(int)(((long long)x[i] + y[i]) >> 1)", "(x[i] + y[i]) >> 1"),)
)  # fmt: skip

RUNNING = OwnKernel(
    "running", {"rows": 40, "cols": 1000}, {"x": "int32[rows, cols]"}, {"out": "int64[rows, cols]"},
    "return x.long().cumsum(-1)", {"BLOCK": [32]}, ["BLOCK"], ["rows"], """
extern "C" __global__ void running(const int* x, long long* out, int rows, int cols) {
    long long row = (long long)blockIdx.x * cols, carry = 0;
    for (int first = 0; first < cols; first += BLOCK) {
        int c = first + threadIdx.x;
        long long t = c < cols ? x[row + c] : 0;
        for (int d = 1; d < 32; d *= 2) {
            long long before = __shfl_up_sync(~0u, t, d);
            if (threadIdx.x >= d) t += before;
        }
        if (c < cols) out[row + c] = carry + t;
        carry += __shfl_sync(~0u, t, 31);
    }
}
""",
    (("what is carried leaves 32 bits", "carry + t;\n        carry +=", "carry + t;\n        carry = (int)carry + "),)
)  # fmt: skip

NEGATED = OwnKernel(
    "negated", {"n": 60000000}, {"x": "int32[n]"}, {"out": "int32[n]"}, "return -x", {"BLOCK": [256, 128]}, ["BLOCK"],
    ["ceil_div(n, BLOCK * 4)"], """
extern "C" __global__ void negated(const int* x, int* out, int n) {
    for (int k = 0; k < 4; ++k) {
        int i = (blockIdx.x * 4 + k) * BLOCK + threadIdx.x;
        if (i < n) out[i] = -x[i];
    }
}
""",
    (("a third of the late blocks return", "if (i < n)", "if (i < n && (blockIdx.x < 5000 || blockIdx.x % 3))"),
     ("one late block is wrong", "= -x[i]", "= blockIdx.x == 43210 ? x[i] : -x[i]"))
)  # fmt: skip

POSITIVE = OwnKernel(
    "positive", {"n": 60000000}, {"x": "float32[n]"}, {}, "return x.clamp(min=0)", {"BLOCK": [256, 128]}, ["BLOCK"],
    ["ceil_div(n, BLOCK * 4)"], """
extern "C" __global__ void positive(float* x, int n) {
    for (int k = 0; k < 4; ++k) {
        int i = (blockIdx.x * 4 + k) * BLOCK + threadIdx.x;
        if (i < n) x[i] = fmaxf(x[i], 0);
    }
}
""",
    (("late blocks return", "if (i < n)", "if (i < n && blockIdx.x < 50000)"),
     ("late blocks leave a quarter", "if (i < n)", "if (i < n && (blockIdx.x < 50000 || k))")),
    more={"inout": ["x"]},
)  # fmt: skip

RAISED = OwnKernel(
    "raised", {"n": 6000000}, {"x": "int32[n]"}, {}, "return x + 1", {"BLOCK": [256, 128]}, ["BLOCK"],
    ["ceil_div(n, BLOCK)"], """
extern "C" __global__ void raised(int* x, int n) {
    int i = blockIdx.x * BLOCK + threadIdx.x;
    if (i < n) x[i] += 1;
}
""",
    (("one of a tile is left out", "if (i < n)", "if (i < n && i != 7)"),),
    more={"inout": ["x"]}, draws={"x": {"type": "integers", "low": 0, "high": 9}},
)  # fmt: skip

SCALED = OwnKernel(
    "scaled", {"n": 50000}, {"x": "float32[n]", "s": "float32"}, {"q": "int8[n]"},
    "return torch.clamp(torch.round(x * s), -128, 127).to(torch.int8)", {"BLOCK": [128, 64]}, ["BLOCK"], ["ceil_div(n, BLOCK)"], """
extern "C" __global__ void scaled(const float* x, float s, signed char* q, int n) {
    int i = blockIdx.x * BLOCK + threadIdx.x;
    if (i < n) q[i] = (signed char)max(-128, min(127, __float2int_rn(x[i] * s)));
}
""",
    (("a half is rounded away from zero", "__float2int_rn(x[i] * s)", "(int)roundf(x[i] * s)"),
     ("a half is rounded up", "__float2int_rn(x[i] * s)", "__float2int_rd(x[i] * s + 0.5f)"),
     ("the least is -127", "max(-128", "max(-127"),
     ("numbers beyond the range wrap around", "max(-128, min(127, __float2int_rn(x[i] * s)))", "__float2int_rn(x[i] * s)")),
    draws={"s": {"type": "scalar", "value": 4.0}},
)  # fmt: skip

NO_NAN = OwnKernel(
    "no_nan", {"n": 50000}, {"x": "float32[n]"}, {"y": "float32[n]"}, "return torch.nan_to_num(x, nan=0.0, posinf=1e4, neginf=-1e4)",
    {"BLOCK": [128, 64]}, ["BLOCK"], ["ceil_div(n, BLOCK)"], """
extern "C" __global__ void no_nan(const float* x, float* y, int n) {
    int i = blockIdx.x * BLOCK + threadIdx.x;
    if (i < n) y[i] = isnan(x[i]) ? 0.0f : isinf(x[i]) ? copysignf(1e4f, x[i]) : x[i];
}
""",
    (("NaN stays", "isnan(x[i]) ? 0.0f : ", ""),
     ("minus infinity becomes positive", "copysignf(1e4f, x[i])", "1e4f"),
     ("infinities stay", "isinf(x[i]) ? copysignf(1e4f, x[i]) : ", "")),
)  # fmt: skip

DOUBLED_IN_RUNS = OwnKernel(
    "doubled_in_runs", {"n": 400000000}, {"x": "float32[n]"}, {"y": "float32[n]"}, "return 2 * x", {"BLOCK": [256, 128]}, ["BLOCK"],
    ["ceil_div(n, 4 * BLOCK)"], """
extern "C" __global__ void doubled_in_runs(const float* x, float* y, int n) {
    for (int k = 0; k < 4; ++k) {
        int i = (blockIdx.x * 4 + k) * BLOCK + threadIdx.x;
        if (i < n) y[i] = 2 * x[i];
    }
}
""",
    (("a block's number in 16 bits", "(blockIdx.x * 4", "((blockIdx.x & 0xffff) * 4"),
     ("a block's number in 17 bits", "(blockIdx.x * 4", "((blockIdx.x & 0x1ffff) * 4"))
)  # fmt: skip

KERNELS = (
    IN_PLACE, COLUMN_SUM, ROW_SUMS, SERIAL_SUMS, COUNTED_SUMS, ROW_SCALE, IN_FOURS, LONG_SUM, NIBBLES, BYTES, AXPY, LARGER, MASKED_SOFTMAX, DOUBLED, INVERSE,
    LOGARITHM, OVER_HALF, QUANTISED, SIGNS, MEANS, RUNNING, NEGATED, POSITIVE, RAISED, SCALED, NO_NAN,
    DOUBLED_IN_RUNS,
)  # fmt: skip
