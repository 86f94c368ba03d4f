"""Right kernels of somebody's own in folders, unlike one another, each with faults that its small sizes hide."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from evoengine.records import Config
from tests.support.folders import write


@dataclass(frozen=True)
class OwnKernel:
    """A folder in short. `tensors` are "dtype[axis, axis]"; the first value of a knob is the configuration's."""

    name: str
    sizes: Mapping[str, int]
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]
    run: str
    """the reference's body; its arguments are the inputs"""
    knobs: Mapping[str, list[Any]]
    threads: list[str]
    grid: list[str]
    kernel: str
    faults: tuple[tuple[str, str, str], ...] = ()
    """name, text of the right kernel, text of the broken one"""
    more: Mapping[str, Any] = field(default_factory=dict)
    """further keys of problem.json"""
    draws: Mapping[str, Any] = field(default_factory=dict)
    constraints: tuple[str, ...] = ()
    then: Mapping[str, tuple[list[str], list[str], list[str]]] = field(default_factory=dict)
    """kernels behind the first: entry → parameters, threads, grid"""

    @property
    def config(self) -> Config:
        return {"family": self.name, **{knob: values[0] for knob, values in self.knobs.items()}}

    def write(self, folder: Path, kernel: str | None = None) -> Path:
        axes = {axis: {"type": "var"} for axis in self.sizes} | self.more.get("axes", {})
        problem = {
            **self.more, "name": self.name, "axes": axes, "inputs": _tensors(self.inputs),
            "outputs": _tensors(self.outputs), "reference": _reference(self.inputs, self.run),
            "workloads": [{"axes": dict(self.sizes), "inputs": dict(self.draws)}],
        }  # fmt: skip
        knobs = "".join(f"{knob} = {values}\n" for knob, values in self.knobs.items())
        rules = "".join(f'[[constraint]]\nexpr = "{expr}"\nwhy = "sizes are multiples"\n' for expr in self.constraints)
        launches = _launch("launch", self.threads, self.grid)
        if self.then:
            problem["kernels"] = {entry: parameters for entry, (parameters, *_) in self.then.items()}
            launches += "".join(_launch(f"kernels.{entry}", *sizes) for entry, (_, *sizes) in self.then.items())
        space = f'kernel = "{self.name}"\n[knobs]\n{knobs}{rules}{launches}'
        return write(folder, problem, space, kernel or self.kernel)

    def broken(self, fault: str) -> str:
        old, new = next((old, new) for name, old, new in self.faults if name == fault)
        assert old in self.kernel, f"{self.name} has no {old!r} any more"
        return self.kernel.replace(old, new)


def _launch(table: str, threads: list[str], grid: list[str]) -> str:
    padded = ([*sizes, *["1"] * (3 - len(sizes))] for sizes in (threads, grid))
    return "[{}]\nthreads = {}\ngrid = {}\nshared = 0\n".format(table, *padded)


def _tensors(stated: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    found = {}
    for name, text in stated.items():
        dtype, _, shape = text.partition("[")
        sizes = [size.strip() for size in shape.rstrip("]").split(",") if size.strip()] if shape else None
        found[name] = {"shape": sizes, "dtype": dtype}
    return found


def _reference(inputs: Mapping[str, str], run: str) -> str:
    return f"import torch\n\ndef run({', '.join(inputs)}):\n    {run}\n"


BLOCK_SUM = """
__device__ float block_sum(float v, float* sums) {
    for (int d = 16; d; d /= 2) v += __shfl_xor_sync(~0u, v, d);
    __syncthreads();
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = v;
    __syncthreads();
    v = 0;
    for (int w = 0; w < blockDim.x / 32; ++w) v += sums[w];
    return v;
}
"""

SOFTMAX = OwnKernel(
    "row_softmax", {"rows": 2048, "cols": 6000}, {"x": "float32[rows, cols]"}, {"out": "float32[rows, cols]"},
    "return torch.softmax(x, -1)", {"BLOCK": [256, 128], "VEC": [4, 2]}, ["BLOCK"], ["rows"],
    BLOCK_SUM + """
extern "C" __global__ void row_softmax(const float* x, float* out, int rows, int cols) {
    __shared__ float s[32];
    x += (long long)blockIdx.x * cols, out += (long long)blockIdx.x * cols;
    float m = -1e38f, t = 0;
    for (int i = threadIdx.x * VEC; i < cols; i += BLOCK * VEC)
        for (int j = i; j < min(i + VEC, cols); ++j) m = fmaxf(m, x[j]);
    for (int d = 16; d; d /= 2) m = fmaxf(m, __shfl_xor_sync(~0u, m, d));
    if (threadIdx.x % 32 == 0) s[threadIdx.x / 32] = m;
    __syncthreads();
    for (int w = 0; w < BLOCK / 32; ++w) m = fmaxf(m, s[w]);
    for (int i = threadIdx.x * VEC; i < cols; i += BLOCK * VEC)
        for (int j = i; j < min(i + VEC, cols); ++j) t += expf(x[j] - m);
    t = block_sum(t, s);
    for (int i = threadIdx.x * VEC; i < cols; i += BLOCK * VEC)
        for (int j = i; j < min(i + VEC, cols); ++j) out[j] = expf(x[j] - m) / t;
}
""",
    (("half of each row is skipped", "i += BLOCK * VEC", "i += 2 * BLOCK * VEC"),
     ("four of the warps are summed", "w < blockDim.x / 32", "w < 4"),
     ("the maximum is that of the first turn", "i < cols; i += BLOCK * VEC)\n        for (int j = i; j < min(i + VEC, cols); ++j) m =", "i < min(cols, BLOCK * VEC); i += BLOCK * VEC)\n        for (int j = i; j < min(i + VEC, cols); ++j) m ="),
     ("rows beyond the 1,024th are left out", "    __shared__", "    if (blockIdx.x >= 1024) return;\n    __shared__"),
     ("later rows read the row before", "x += (long long)blockIdx.x", "x += (long long)(blockIdx.x - (blockIdx.x > 700))")),
)  # fmt: skip

ROW_SUM = OwnKernel(
    "row_sum", {"rows": 1000, "cols": 9000}, {"x": "float16[rows, cols]"}, {"out": "float32[rows]"},
    "return x.float().sum(-1)", {"BLOCK": [128, 256]}, ["BLOCK"], ["rows"],
    "#include <cuda_fp16.h>\n" + BLOCK_SUM + """
extern "C" __global__ void row_sum(const half* x, float* out, int rows, int cols) {
    __shared__ float s[32];
    float t = 0;
    for (int chunk = 0; chunk * BLOCK < cols; ++chunk) {
        int i = chunk * BLOCK + threadIdx.x;
        if (i < cols) t += __half2float(x[(long long)blockIdx.x * cols + i]);
    }
    t = block_sum(t, s);
    if (threadIdx.x == 0) out[blockIdx.x] = t;
}
""",
    (("it stops after 40 chunks", "chunk * BLOCK < cols", "chunk * BLOCK < cols && chunk < 40"),
     ("a chunk is counted in six bits", "int i = chunk * BLOCK", "int i = (chunk & 63) * BLOCK"),
     ("the second launch returns early", "    __shared__ float s[32];\n    float t", "    __shared__ float s[32];\n    if (out[blockIdx.x] == out[blockIdx.x]) return;\n    float t"))
)  # fmt: skip

TRANSPOSE = OwnKernel(
    "transpose", {"rows": 3000, "cols": 4100}, {"x": "float32[rows, cols]"}, {"out": "float32[cols, rows]"},
    "return x.t().contiguous()", {"TILE": [32, 16], "STEP": [8, 4]}, ["TILE", "STEP"],
    ["ceil_div(cols, TILE)", "ceil_div(rows, TILE)"], """
extern "C" __global__ void transpose(const float* x, float* out, int rows, int cols) {
    __shared__ float tile[TILE][TILE + 1];
    int bx = blockIdx.x, by = blockIdx.y;
    for (int r = threadIdx.y; r < TILE; r += STEP) {
        int row = by * TILE + r, col = bx * TILE + threadIdx.x;
        if (row < rows && col < cols) tile[r][threadIdx.x] = x[(long long)row * cols + col];
    }
    __syncthreads();
    for (int r = threadIdx.y; r < TILE; r += STEP) {
        int row = bx * TILE + r, col = by * TILE + threadIdx.x;
        if (row < cols && col < rows) out[(long long)row * rows + col] = tile[threadIdx.x][r];
    }
}
""",
    (("tiles of rows in five bits", "by = blockIdx.y", "by = blockIdx.y & 31"),
     ("a tile of columns too few", "int bx = blockIdx.x", "if (blockIdx.x == gridDim.x - 1) return;\n    int bx = blockIdx.x"),
     ("a tenth of the blocks return", "int bx = blockIdx.x", "if (blockIdx.x * gridDim.y % 1000 + blockIdx.y > 1000) return;\n    int bx = blockIdx.x"))
)  # fmt: skip

STENCIL = OwnKernel(
    "stencil", {"height": 2000, "width": 3001}, {"x": "float32[height, width]"}, {"out": "float32[height, width]"},
    "p = torch.nn.functional.pad(x, (1, 1, 1, 1)); return p[1:-1, :-2] + p[1:-1, 2:] + p[:-2, 1:-1] + p[2:, 1:-1] - 4 * x",
    {"BX": [32, 64], "BY": [4, 8]}, ["BX", "BY"], ["ceil_div(width, BX)", "ceil_div(height, BY)"], """
extern "C" __global__ void stencil(const float* x, float* out, int height, int width) {
    __shared__ float t[BY + 2][BX + 2];
    int x0 = blockIdx.x * BX - 1, y0 = blockIdx.y * BY - 1;
    for (int i = threadIdx.y * BX + threadIdx.x; i < (BY + 2) * (BX + 2); i += BX * BY) {
        int r = i / (BX + 2), c = i % (BX + 2), y = y0 + r, z = x0 + c;
        t[r][c] = y >= 0 && y < height && z >= 0 && z < width ? x[(long long)y * width + z] : 0.0f;
    }
    __syncthreads();
    int r = threadIdx.y + 1, c = threadIdx.x + 1, y = y0 + r, z = x0 + c;
    if (y < height && z < width)
        out[(long long)y * width + z] = t[r][c - 1] + t[r][c + 1] + t[r - 1][c] + t[r + 1][c] - 4 * t[r][c];
}
""",
    (("no halo behind column 1,024", "z < width ?", "(z < width && (z != 1024 || c <= BX)) ?"),
     ("rows beyond 1,500 see the row itself below", "t[r + 1][c] -", "t[r + (y < 1500)][c] -"))
)  # fmt: skip

SCAN = OwnKernel(
    "scan", {"rows": 500, "cols": 5000}, {"x": "float32[rows, cols]"}, {"out": "float32[rows, cols]"},
    "return torch.cumsum(x, -1)", {"BLOCK": [256, 128]}, ["BLOCK"], ["rows"], """
extern "C" __global__ void scan(const float* x, float* out, int rows, int cols) {
    __shared__ float s[BLOCK];
    float carry = 0;
    x += (long long)blockIdx.x * cols, out += (long long)blockIdx.x * cols;
    for (int first = 0; first < cols; first += BLOCK) {
        int i = first + threadIdx.x;
        s[threadIdx.x] = i < cols ? x[i] : 0.0f;
        for (int d = 1; d < BLOCK; d *= 2) {
            __syncthreads();
            float v = threadIdx.x >= d ? s[threadIdx.x - d] : 0.0f;
            __syncthreads();
            s[threadIdx.x] += v;
        }
        __syncthreads();
        if (i < cols) out[i] = carry + s[threadIdx.x];
        carry += s[BLOCK - 1];
        __syncthreads();
    }
}
""",
    (("the carry is lost at the 16th chunk", "carry += s[BLOCK - 1]", "carry = first / BLOCK == 15 ? 0.0f : carry + s[BLOCK - 1]"),)
)  # fmt: skip

HISTOGRAM = OwnKernel(
    "histogram", {"n": 300000}, {"x": "int32[n]"}, {"out": "int32[bins]"},
    "return torch.bincount(x.long(), minlength=64).int()", {"BLOCK": [256, 128], "BLOCKS": [12, 24]}, ["BLOCK"],
    ["BLOCKS"], """
extern "C" __global__ void histogram(const int* x, int* out, unsigned* counts, unsigned* done, int n) {
    __shared__ unsigned own[64];
    __shared__ bool last;
    for (int b = threadIdx.x; b < 64; b += BLOCK) own[b] = 0;
    __syncthreads();
    for (int i = blockIdx.x * BLOCK + threadIdx.x; i < n; i += BLOCK * gridDim.x) atomicAdd(&own[x[i]], 1u);
    __syncthreads();
    for (int b = threadIdx.x; b < 64; b += BLOCK) atomicAdd(&counts[b], own[b]);
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) last = atomicAdd(done, 1u) == gridDim.x - 1;
    __syncthreads();
    if (!last) return;
    __threadfence();
    for (int b = threadIdx.x; b < 64; b += BLOCK) out[b] = int(atomicExch(&counts[b], 0u));
    if (threadIdx.x == 0) *done = 0;
}
""",
    (("the counter is never reset", "if (threadIdx.x == 0) *done = 0;", ""),
     ("the counts are never reset", "atomicExch(&counts[b], 0u)", "atomicAdd(&counts[b], 0u)"),
     ("a count in 12 bits", "out[b] = int(", "out[b] = 4095 & int(")),
    more={"axes": {"bins": {"type": "const", "value": 64}}, "compile_time": ["bins"],
          "scratch": {"counts": {"shape": ["bins"], "dtype": "int32", "zeroed": True}, "done": {"shape": [1], "dtype": "int32", "zeroed": True}}},
    draws={"x": {"type": "integers", "low": 0, "high": 64}},
)  # fmt: skip

SPLIT_K = OwnKernel(
    "split_k", {"rows": 300, "cols": 20000}, {"a": "float32[rows, cols]", "x": "float32[cols]"},
    {"out": "float32[rows]"}, "return a @ x", {"BLOCK": [128], "SPLITS": [4, 8]}, ["BLOCK"], ["SPLITS", "rows"],
    BLOCK_SUM + """
extern "C" __global__ void split_k(const float* a, const float* x, float* out, float* partial, unsigned* done, int rows,
                                   int cols) {
    __shared__ float s[32];
    __shared__ bool last;
    int row = blockIdx.y, each = (cols + SPLITS - 1) / SPLITS, first = blockIdx.x * each;
    float t = 0;
    for (int i = first + threadIdx.x; i < min(first + each, cols); i += BLOCK) t += a[(long long)row * cols + i] * x[i];
    t = block_sum(t, s);
    if (threadIdx.x == 0) {
        partial[row * SPLITS + blockIdx.x] = t;
        __threadfence();
        last = atomicAdd(&done[row], 1u) == SPLITS - 1;
    }
    __syncthreads();
    if (!last || threadIdx.x) return;
    __threadfence();
    t = 0;
    for (int i = 0; i < SPLITS; ++i) t += ((volatile float*)partial)[row * SPLITS + i];
    out[row] = t;
    done[row] = 0;
}
""",
    (("the counter is never reset", "    done[row] = 0;\n", ""),
     ("the last split is left out", "i < SPLITS; ++i) t +=", "i < SPLITS - 1; ++i) t +="),
     ("a split ends at 4,096 columns", "i < min(first + each, cols)", "i < min(first + min(each, 4096), cols)")),
    more={"scratch": {"partial": {"shape": ["rows", "SPLITS"], "dtype": "float32"}, "done": {"shape": ["rows"], "dtype": "int32", "zeroed": True}}},
)  # fmt: skip

TWO_KERNELS = OwnKernel(
    "two_kernels", {"rows": 60, "cols": 30000}, {"a": "float32[rows, cols]", "x": "float32[cols]"},
    {"out": "float32[rows]"}, "return a @ x", {"SPLITS": [8, 3], "BLOCK": [128]}, ["BLOCK"], ["SPLITS", "rows"],
    BLOCK_SUM + """
extern "C" __global__ void two_kernels(const float* a, const float* x, float* partial, int rows, int cols) {
    __shared__ float s[32];
    int row = blockIdx.y, each = (cols + SPLITS - 1) / SPLITS, first = blockIdx.x * each;
    float t = 0;
    for (int i = first + threadIdx.x; i < min(first + each, cols); i += BLOCK) t += a[(long long)row * cols + i] * x[i];
    t = block_sum(t, s);
    if (threadIdx.x == 0) partial[row * SPLITS + blockIdx.x] = t;
}
extern "C" __global__ void combine(float* out, const float* partial, int rows) {
    int row = blockIdx.x * 64 + threadIdx.x;
    if (row >= rows) return;
    float t = 0;
    for (int i = 0; i < SPLITS; ++i) t += partial[row * SPLITS + i];
    out[row] = t;
}
""",
    (("the last split is left out", "i < SPLITS; ++i) t +=", "i < SPLITS - 1; ++i) t +="),
     ("a block without columns writes nothing", "if (threadIdx.x == 0) partial", "if (threadIdx.x == 0 && first < cols) partial"),
     ("rows of the second block are left out", "if (row >= rows)", "if (row >= min(rows, 59))"),
     ("partial sums of other rows are read", "t += partial[row * SPLITS + i]", "t += partial[(row & 31) * SPLITS + i]")),
    more={"scratch": {"partial": {"shape": ["rows", "SPLITS"], "dtype": "float32"}}, "parameters": ["a", "x", "partial", "rows", "cols"]},
    then={"combine": (["out", "partial", "rows"], ["64"], ["ceil_div(rows, 64)"])},
)  # fmt: skip

GATHER = OwnKernel(
    "gather", {"rows": 40000, "n": 3000, "width": 256}, {"x": "float32[rows, width]", "at": "int32[n]"},
    {"out": "float32[n, width]"}, "return x[at.long()]", {"BLOCK": [64, 128]}, ["BLOCK"], ["n"], """
extern "C" __global__ void gather(const float* x, const int* at, float* out, int rows, int n, int width) {
    long long from = at[blockIdx.x];
    for (int c = threadIdx.x; c < width; c += BLOCK) out[(long long)blockIdx.x * width + c] = x[from * width + c];
}
""",
    (("an index of 15 bits", "from = at[blockIdx.x]", "from = at[blockIdx.x] & 32767"),
     ("the last row is never read", "from = at[blockIdx.x]", "from = min(at[blockIdx.x], rows - 2 + (rows < 2))")),
    draws={"at": {"type": "integers", "low": 0, "high": "rows"}},
)  # fmt: skip

MASKED = OwnKernel(
    "masked", {"rows": 700, "cols": 4000}, {"x": "float16[rows, cols]", "keep": "bool[rows, cols]"},
    {"out": "float16[rows, cols]"}, "return torch.where(keep, x, torch.zeros_like(x))", {"BLOCK": [128, 256]},
    ["BLOCK"], ["ceil_div(cols, BLOCK)", "rows"], """
#include <cuda_fp16.h>
extern "C" __global__ void masked(const half* x, const bool* keep, half* out, int rows, int cols) {
    int c = blockIdx.x * BLOCK + threadIdx.x;
    long long i = (long long)blockIdx.y * cols + c;
    if (c < cols) out[i] = keep[i] ? x[i] : __float2half(0.0f);
}
""",
    (("what is not kept is not written", "out[i] = keep[i] ? x[i] : __float2half(0.0f)", "{ if (keep[i]) out[i] = x[i]; }"),
     ("columns beyond 2,048 are kept", "keep[i] ?", "keep[i] || c >= 2048 ?")),
)  # fmt: skip

GREATER = OwnKernel(
    "greater", {"n": 5000000}, {"x": "float32[n]", "y": "float32[n]"}, {"out": "bool[n]"}, "return x > y",
    {"BLOCK": [256, 128], "EACH": [4, 1]}, ["BLOCK"], ["ceil_div(n, BLOCK * EACH)"], """
extern "C" __global__ void greater(const float* x, const float* y, bool* out, int n) {
    for (int k = 0; k < EACH; ++k) {
        int i = (blockIdx.x * EACH + k) * BLOCK + threadIdx.x;
        if (i < n) out[i] = x[i] > y[i];
    }
}
""",
    (("only what is true is written", "if (i < n) out[i] = x[i] > y[i]", "if (i < n && x[i] > y[i]) out[i] = true"),
     ("the last eighth is left out", "if (i < n)", "if (i < n && (n < 100000 || i < n / 8 * 7))"))
)  # fmt: skip

ARGMAX = OwnKernel(
    "argmax", {"rows": 600, "cols": 7000}, {"x": "float32[rows, cols]"}, {"out": "int32[rows]"},
    "return x.argmax(-1).int()", {"BLOCK": [128, 64]}, ["BLOCK"], ["rows"], """
extern "C" __global__ void argmax(const float* x, int* out, int rows, int cols) {
    __shared__ float best[BLOCK];
    __shared__ int at[BLOCK];
    float m = -1e38f;
    int where = 0x7fffffff;
    for (int i = threadIdx.x; i < cols; i += BLOCK) {
        float v = x[(long long)blockIdx.x * cols + i];
        if (v > m) m = v, where = i;
    }
    best[threadIdx.x] = m, at[threadIdx.x] = where;
    __syncthreads();
    if (threadIdx.x) return;
    for (int t = 1; t < BLOCK; ++t)
        if (best[t] > m || (best[t] == m && at[t] < where)) m = best[t], where = at[t];
    out[blockIdx.x] = where;
}
""",
    (("columns beyond 4,096 are not looked at", "i < cols; i += BLOCK", "i < min(cols, 4096); i += BLOCK"),
     ("the last of equal ones is taken", "best[t] == m && at[t] < where", "best[t] == m && at[t] > where"),
     ("a thread takes the last of equal ones", "if (v > m) m = v", "if (v >= m) m = v"))
)  # fmt: skip

LAYER_NORM = OwnKernel(
    "layer_norm", {"rows": 900, "cols": 5000},
    {"x": "float32[rows, cols]", "gain": "float32[cols]"},
    {"out": "float32[rows, cols]", "mean": "float32[rows]", "rstd": "float32[rows]"},
    "m = x.mean(-1, keepdim=True); r = (x.var(-1, unbiased=False, keepdim=True) + 1e-5).rsqrt(); return (x - m) * r * gain, m[:, 0], r[:, 0]",
    {"BLOCK": [256, 128]}, ["BLOCK"], ["rows"],
    BLOCK_SUM + """
extern "C" __global__ void layer_norm(const float* x, const float* gain, float* out, float* mean, float* rstd, int rows,
                                      int cols) {
    __shared__ float s[32];
    x += (long long)blockIdx.x * cols, out += (long long)blockIdx.x * cols;
    float t = 0, q = 0;
    for (int i = threadIdx.x; i < cols; i += BLOCK) t += x[i];
    float m = block_sum(t, s) / cols;
    for (int i = threadIdx.x; i < cols; i += BLOCK) q += (x[i] - m) * (x[i] - m);
    float r = rsqrtf(block_sum(q, s) / cols + 1e-5f);
    for (int i = threadIdx.x; i < cols; i += BLOCK) out[i] = (x[i] - m) * r * gain[i];
    if (threadIdx.x == 0) mean[blockIdx.x] = m, rstd[blockIdx.x] = r;
}
""",
    (("the mean of later rows is never stored", "if (threadIdx.x == 0) mean", "if (threadIdx.x == 0 && blockIdx.x < 512) mean"),
     ("the gain is that of the column modulo 4,096", "gain[i]", "gain[i % 4096]"))
)  # fmt: skip

VOLUME = OwnKernel(
    "volume", {"d": 70, "h": 130, "w": 200}, {"x": "float32[d, h, w]", "a": "float32"}, {"out": "float32[w, d, h]"},
    "return (a * x).permute(2, 0, 1).contiguous()", {"BX": [8, 4], "BY": [4, 8], "BZ": [4, 2]}, ["BX", "BY", "BZ"],
    ["ceil_div(w, BX)", "ceil_div(h, BY)", "ceil_div(d, BZ)"], """
extern "C" __global__ void volume(const float* x, float a, float* out, int d, int h, int w) {
    int i = blockIdx.x * BX + threadIdx.x, j = blockIdx.y * BY + threadIdx.y, k = blockIdx.z * BZ + threadIdx.z;
    if (i < w && j < h && k < d) out[((long long)i * d + k) * h + j] = a * x[((long long)k * h + j) * w + i];
}
""",
    (("planes in six bits", "k = blockIdx.z * BZ + threadIdx.z", "k = (blockIdx.z * BZ + threadIdx.z) & 63"),),
    draws={"a": {"type": "scalar", "value": 1.5}},
)  # fmt: skip

MATMUL = OwnKernel(
    "matmul", {"m": 1500, "n": 1600, "k": 3000},
    {"a": "float16[m, k]", "b": "float16[k, n]"}, {"c": "float16[m, n]"},
    "return (a.float() @ b.float()).half()", {"TILE": [16, 32]}, ["TILE", "TILE"],
    ["ceil_div(n, TILE)", "ceil_div(m, TILE)"], """
#include <cuda_fp16.h>
extern "C" __global__ void matmul(const half* a, const half* b, half* c, int m, int n, int k) {
    __shared__ float at[TILE][TILE], bt[TILE][TILE];
    int row = blockIdx.y * TILE + threadIdx.y, col = blockIdx.x * TILE + threadIdx.x;
    float sum = 0;
    for (int first = 0; first < k; first += TILE) {
        int ka = first + threadIdx.x, kb = first + threadIdx.y;
        at[threadIdx.y][threadIdx.x] = row < m && ka < k ? __half2float(a[(long long)row * k + ka]) : 0.0f;
        bt[threadIdx.y][threadIdx.x] = kb < k && col < n ? __half2float(b[(long long)kb * n + col]) : 0.0f;
        __syncthreads();
        for (int i = 0; i < TILE; ++i) sum += at[threadIdx.y][i] * bt[i][threadIdx.x];
        __syncthreads();
    }
    if (row < m && col < n) c[(long long)row * n + col] = __float2half(sum);
}
""",
    (("half of a long sum is left out", "first < k; first += TILE", "first < (k > 2000 ? k / 2 : k); first += TILE"),
     ("columns beyond 1,024 are those of B before", "+ col]) : 0.0f;\n        __sync", "+ (col < 1024 ? col : col - 1024)]) : 0.0f;\n        __sync"),
     ("half of the rows of blocks return", "    float sum = 0;", "    if (blockIdx.y % 2 && gridDim.y > 64 && gridDim.x > 64) return;\n    float sum = 0;")),
    more={"flops": "2 * m * n * k"},
)  # fmt: skip

ROTARY = OwnKernel(
    "rotary", {"tokens": 3000, "half": 512},
    {"x": "float32[tokens, 2 * half]", "cosine": "float32[tokens, half]", "sine": "float32[tokens, half]"},
    {"out": "float32[tokens, 2 * half]"},
    "a, b = x.chunk(2, -1); return torch.cat([a * cosine - b * sine, b * cosine + a * sine], -1)",
    {"BLOCK": [128, 64]}, ["BLOCK"], ["tokens"], """
extern "C" __global__ void rotary(const float* x, const float* cosine, const float* sine, float* out, int tokens,
                                  int half) {
    long long t = blockIdx.x;
    for (int i = threadIdx.x; i < half; i += BLOCK) {
        float a = x[t * 2 * half + i], b = x[t * 2 * half + half + i], c = cosine[t * half + i], s = sine[t * half + i];
        out[t * 2 * half + i] = a * c - b * s;
        out[t * 2 * half + half + i] = b * c + a * s;
    }
}
""",
    (("one angle for all from 256 on", "sine[t * half + i]", "sine[t * half + min(i, 256)]"),)
)  # fmt: skip

DOT = OwnKernel(
    "dot", {"n": 200001}, {"x": "float32[n]", "y": "float32[n]"}, {"out": "float32[]"}, "return (x * y).sum()",
    {"BLOCK": [128], "BLOCKS": [16, 8]}, ["BLOCK"], ["BLOCKS"],
    BLOCK_SUM + """
extern "C" __global__ void dot(const float* x, const float* y, float* out, float* partial, unsigned* turn, int n) {
    __shared__ float s[32];
    __shared__ unsigned place;
    float t = 0;
    for (int i = blockIdx.x * BLOCK + threadIdx.x; i < n; i += BLOCK * gridDim.x) t += x[i] * y[i];
    t = block_sum(t, s);
    if (threadIdx.x == 0) {
        partial[blockIdx.x] = t;
        __threadfence();
        place = atomicInc(turn, gridDim.x - 1);
    }
    __syncthreads();
    if (place != gridDim.x - 1 || threadIdx.x) return;
    __threadfence();
    t = 0;
    for (int b = 0; b < gridDim.x; ++b) t += ((volatile float*)partial)[b];
    *out = t;
}
""",
    (("the counter goes on", "atomicInc(turn, gridDim.x - 1)", "atomicAdd(turn, 1u)"),
     ("one block's share is left out", "b < gridDim.x; ++b", "b < gridDim.x - 1; ++b")),
    more={"scratch": {"partial": {"shape": ["BLOCKS"], "dtype": "float32"}, "turn": {"shape": [1], "dtype": "int32", "zeroed": True}}},
)  # fmt: skip

FILTER = OwnKernel(
    "filtered", {"n": 900000}, {"x": "float32[n + 8]", "taps": "float32[9]"}, {"out": "float32[n]"},
    "return torch.nn.functional.conv1d(x[None, None], taps[None, None])[0, 0]", {"BLOCK": [256, 128]}, ["BLOCK"],
    ["ceil_div(n, BLOCK)"], """
__constant__ float c_taps[9];
extern "C" __global__ void filtered(const float* x, float* out, int n) {
    __shared__ float s[BLOCK + 8];
    int first = blockIdx.x * BLOCK;
    for (int i = threadIdx.x; i < BLOCK + 8; i += BLOCK) s[i] = first + i < n + 8 ? x[first + i] : 0.0f;
    __syncthreads();
    float sum = 0;
    for (int k = 0; k < 9; ++k) sum += c_taps[k] * s[threadIdx.x + k];
    if (first + threadIdx.x < n) out[first + threadIdx.x] = sum;
}
""",
    (("the halo of blocks from the 2,000th on is the block's own", "? x[first + i]", "? x[first + i - (blockIdx.x >= 2000 && i >= BLOCK)]"),
     ("eight of nine taps from the 1,500th block on", "k < 9; ++k", "k < 9 - (blockIdx.x > 1500); ++k")),
    more={"constants": {"c_taps": "taps"}},
)  # fmt: skip

PERSISTENT = OwnKernel(
    "persistent", {"n": 6000000}, {"x": "float32[n]", "y": "float32[n]", "a": "float32"}, {"out": "float32[n]"},
    "return a * x + y", {"BLOCK": [128, 256], "BLOCKS": [132, 264]}, ["BLOCK"], ["BLOCKS"], """
extern "C" __global__ void persistent(const float* x, const float* y, float a, float* out, int n) {
    for (int i = blockIdx.x * BLOCK + threadIdx.x, turn = 0; i < n; i += BLOCK * gridDim.x, ++turn) out[i] = a * x[i] + y[i];
}
""",
    (("it stops after 256 turns", "i < n; i +=", "i < n && turn < 256; i +="),
     ("a turn is counted in eight bits", "out[i] = a * x[i]", "out[i] = (turn & 256 ? a + 1 : a) * x[i]")),
    draws={"a": {"type": "scalar", "value": 2.0}},
)  # fmt: skip

INTEGERS = OwnKernel(
    "int8_product", {"m": 300, "n": 400, "k": 2048}, {"a": "int8[m, k]", "b": "int8[n, k]"}, {"c": "int32[m, n]"},
    "return (a.double() @ b.double().t()).int()", {"BX": [16, 32], "BY": [8, 4]}, ["BX", "BY"],
    ["ceil_div(n, BX)", "ceil_div(m, BY)"], """
extern "C" __global__ void int8_product(const signed char* a, const signed char* b, int* c, int m, int n, int k) {
    int col = blockIdx.x * BX + threadIdx.x, row = blockIdx.y * BY + threadIdx.y, sum = 0;
    if (row >= m || col >= n) return;
    for (int i = 0; i < k; i += 4)
        sum = __dp4a(*(const int*)(a + (long long)row * k + i), *(const int*)(b + (long long)col * k + i), sum);
    c[(long long)row * n + col] = sum;
}
""",
    (("sums beyond 1,024 are cut to 16 bits", "= sum;\n", "= k > 1024 ? int(short(sum)) : sum;\n"),),
    more={"flops": "2 * m * n * k", "constraints": ["k % 4 == 0"]},
)  # fmt: skip

TRIANGLE = OwnKernel(
    "triangle", {"n": 3000}, {"x": "float32[n, n]"}, {"out": "float32[n, n]"}, "return torch.tril(x)",
    {"B": [16, 32]}, ["B", "B"], ["ceil_div(n, B)", "ceil_div(n, B)"], """
extern "C" __global__ void triangle(const float* x, float* out, int n) {
    int c = blockIdx.x * B + threadIdx.x, r = blockIdx.y * B + threadIdx.y;
    if (r < n && c < n) out[(long long)r * n + c] = c <= r ? x[(long long)r * n + c] : 0.0f;
}
""",
    (("tiles above the diagonal are not written", "if (r < n", "if (blockIdx.x <= blockIdx.y + 100 && r < n"),
     ("the diagonal is hidden beyond 2,048", "c <= r ?", "c <= r - (r > 2048) ?"))
)  # fmt: skip

POOLING = OwnKernel(
    "pooling", {"channels": 40, "height": 500, "width": 600},
    {"x": "float32[channels, 2 * height, 2 * width]"},
    {"out": "float32[channels, height, width]", "at": "uint8[channels, height, width]"},
    "b = x.unfold(1, 2, 2).unfold(2, 2, 2).flatten(3); return b.amax(-1), b.argmax(-1).to(torch.uint8)",
    {"BX": [32, 64], "BY": [4, 2]}, ["BX", "BY"], ["ceil_div(width, BX)", "ceil_div(height, BY)", "channels"], """
extern "C" __global__ void pooling(const float* x, float* out, unsigned char* at, int channels, int height, int width) {
    int c = blockIdx.x * BX + threadIdx.x, r = blockIdx.y * BY + threadIdx.y;
    if (r >= height || c >= width) return;
    const float* from = x + ((long long)blockIdx.z * 2 * height + 2 * r) * 2 * width + 2 * c;
    float best = from[0];
    int where = 0;
    if (from[1] > best) best = from[1], where = 1;
    if (from[2 * width] > best) best = from[2 * width], where = 2;
    if (from[2 * width + 1] > best) best = from[2 * width + 1], where = 3;
    long long i = ((long long)blockIdx.z * height + r) * width + c;
    out[i] = best, at[i] = where;
}
""",
    (("channels in five bits", "out[i] = best, at[i] = where;", "out[i] = best, at[i - (blockIdx.z & 32) * (long long)height * width] = where;"),
     ("three of four are looked at in later rows", "if (from[2 * width + 1] > best)", "if (r < 400 && from[2 * width + 1] > best)"))
)  # fmt: skip

STREAM_K = OwnKernel(
    "stream_k", {"m": 500, "n": 600, "k": 2000}, {"a": "float32[m, k]", "b": "float32[k, n]"},
    {"c": "float32[m, n]"}, "return a @ b", {"TILE": [16], "BLOCKS": [37, 20], "STEP": [32, 16]}, ["TILE", "TILE"],
    ["BLOCKS"], """
extern "C" __global__ void stream_k(const float* a, const float* b, float* c, float* partial, int* flags, int m, int n,
                                    int k) {
    __shared__ float at[TILE][STEP], bt[STEP][TILE];
    int tx = threadIdx.x, ty = threadIdx.y;
    int tiles_n = (n + TILE - 1) / TILE, steps = (k + STEP - 1) / STEP;
    long long total = (long long)((m + TILE - 1) / TILE) * tiles_n * steps;
    long long first = total * blockIdx.x / gridDim.x, last = total * (blockIdx.x + 1) / gridDim.x;
    while (first < last) {
        int tile = first / steps, from = first % steps, to = (int)min((long long)steps, from + last - first);
        int row = tile / tiles_n * TILE + ty, col = tile % tiles_n * TILE + tx;
        float sum = 0;
        for (int s = from; s < to; ++s) {
            for (int j = tx; j < STEP; j += TILE)
                at[ty][j] = row < m && s * STEP + j < k ? a[(long long)row * k + s * STEP + j] : 0.0f;
            for (int j = ty; j < STEP; j += TILE)
                bt[j][tx] = s * STEP + j < k && col < n ? b[(long long)(s * STEP + j) * n + col] : 0.0f;
            __syncthreads();
            for (int j = 0; j < STEP; ++j) sum += at[ty][j] * bt[j][tx];
            __syncthreads();
        }
        if (to < steps) {
            partial[(blockIdx.x * TILE + ty) * TILE + tx] = sum;
            __threadfence();
            __syncthreads();
            if (tx == 0 && ty == 0) atomicExch(&flags[blockIdx.x], 1);
        } else {
            long long begin = first - from;
            for (int other = blockIdx.x - 1; begin < first && total * (other + 1) / gridDim.x > begin; --other) {
                if (total * other / gridDim.x == total * (other + 1) / gridDim.x) continue;
                if (tx == 0 && ty == 0) {
                    while (atomicAdd(&flags[other], 0) == 0) {}
                    __threadfence();
                }
                __syncthreads();
                sum += ((volatile float*)partial)[(other * TILE + ty) * TILE + tx];
                __syncthreads();
                if (tx == 0 && ty == 0) atomicExch(&flags[other], 0);
            }
            if (row < m && col < n) c[(long long)row * n + col] = sum;
        }
        first += to - from;
    }
}
""",
    (("flags stay up", "                if (tx == 0 && ty == 0) atomicExch(&flags[other], 0);", ""),
     ("tiles in ten bits", "int row = tile", "tile &= 1023; int row = tile"),
     ("the flag is raised before the partial sum is fenced", "            __threadfence();\n            __sync", "            __sync"),
     ("the flag is raised before all threads have stored", "__threadfence();\n            __syncthreads();", "__threadfence();"),
     ("one other block's share alone is added", "begin < first &&", "other > (int)blockIdx.x - 2 && begin < first &&"),
     ("no barrier behind the wait", "                }\n                __syncthreads();", "                }"),
     ("the last step of a long K is left out", "s < to; ++s", "s < to - (s > 60); ++s")),
    more={"flops": "2 * m * n * k", "parameters": ["a", "b", "c", "partial", "flags", "m", "n", "k"],
          "scratch": {"partial": {"shape": ["BLOCKS", "TILE", "TILE"], "dtype": "float32"}, "flags": {"shape": ["BLOCKS"], "dtype": "int32", "zeroed": True}}},
)  # fmt: skip

LARGEST = OwnKernel(
    "largest", {"n": 700001}, {"x": "float32[n]"}, {"top": "float32[1]", "at": "int32[1]"},
    "v, i = x.max(0); return v[None], i.int()[None]", {"BLOCK": [256], "BLOCKS": [20, 33]}, ["BLOCK"], ["BLOCKS"], """
extern "C" __global__ void largest(const float* x, float* top, int* at, unsigned long long* best, unsigned* done, int n) {
    __shared__ unsigned long long s[BLOCK];
    unsigned long long own = 0;
    for (int i = blockIdx.x * BLOCK + threadIdx.x; i < n; i += BLOCK * gridDim.x) {
        unsigned b = __float_as_uint(x[i] + 0.0f);  // minus zero is no less than zero
        b = b >> 31 ? ~b : b | 0x80000000u;
        unsigned long long key = ((unsigned long long)b << 32) | (0xffffffffu - i);
        own = key > own ? key : own;
    }
    s[threadIdx.x] = own;
    for (int d = BLOCK / 2; d; d /= 2) {
        __syncthreads();
        if (threadIdx.x < d && s[threadIdx.x + d] > s[threadIdx.x]) s[threadIdx.x] = s[threadIdx.x + d];
    }
    if (threadIdx.x) return;
    atomicMax(best, s[0]);
    __threadfence();
    if (atomicAdd(done, 1u) != gridDim.x - 1) return;
    __threadfence();
    unsigned long long found = atomicExch(best, 0ull);
    unsigned b = found >> 32;
    *top = __uint_as_float(b >> 31 ? b ^ 0x80000000u : ~b), *at = 0xffffffffu - (unsigned)found;
    *done = 0;
}
""",
    (("the counter is raised before the maximum", "    atomicMax(best, s[0]);\n    __threadfence();\n    if (atomicAdd(done, 1u) != gridDim.x - 1) return;", "    unsigned place = atomicAdd(done, 1u);\n    atomicMax(best, s[0]);\n    __threadfence();\n    if (place != gridDim.x - 1) return;"),
     ("the maximum stays for the next launch", "atomicExch(best, 0ull)", "atomicAdd(best, 0ull)"),
     ("negative numbers are the least", "b >> 31 ? ~b :", "b >> 31 ? 0u :"),
     ("no barrier in the last steps", "        __syncthreads();\n        if", "        if (d >= 32) __syncthreads();\n        if")),
    more={"scratch": {"best": {"shape": [1], "dtype": "int64", "zeroed": True}, "done": {"shape": [1], "dtype": "int32", "zeroed": True}}},
)  # fmt: skip

KERNELS = (
    SOFTMAX, ROW_SUM, TRANSPOSE, STENCIL, SCAN, HISTOGRAM, SPLIT_K, TWO_KERNELS, GATHER, MASKED, GREATER, ARGMAX, LAYER_NORM, VOLUME,
    MATMUL, ROTARY, DOT, FILTER, PERSISTENT, INTEGERS, TRIANGLE, POOLING, STREAM_K, LARGEST,
)  # fmt: skip
