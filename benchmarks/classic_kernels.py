"""Kernels with a known bottleneck each: copies, reductions, transposes, tiles, and chains of an instruction."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from string import Template

import numpy as np

from evoengine.devices.base import ScalarArgument
from evoengine.sass.launch import DrawnArgument

BYTES = {"fp32": 4, "fp16": 2, "int32": 4, "fp64": 8}
WAVES = 132 * 8


@dataclass(frozen=True)
class Classic:
    """A kernel and one launch of it. `tensors` are name → (elements, dtype), outputs begin with `o`."""

    set: str
    name: str
    problem: str
    text: str
    grid: tuple[int, int, int]
    threads: tuple[int, int, int]
    tensors: Mapping[str, tuple[int, str]]
    scalars: Mapping[str, int | float] = field(default_factory=dict)
    shared: int = 0
    dram_bytes: float = 0.0
    flops: float = 0.0

    def arguments(self) -> list[DrawnArgument | ScalarArgument]:
        found: list[DrawnArgument | ScalarArgument] = []
        for name, (count, dtype) in self.tensors.items():
            drawn = "fp32" if dtype == "fp64" else dtype  # pairs of drawn words are finite as doubles
            found.append(DrawnArgument(name, count * BYTES[dtype], drawn, output=name.startswith("o")))
        for name, value in self.scalars.items():
            kind = np.float32 if isinstance(value, float) else np.int32
            found.append(ScalarArgument(name, kind(value)))
        return found


def _fill(text: str, **values: object) -> str:
    return Template(text).substitute({name: str(value) for name, value in values.items()})


HEAD = '#include <cuda_fp16.h>\nextern "C" __global__ void '
STREAM = (
    HEAD
    + """kernel(const $T* a, $T* o) {
  size_t i = (size_t)blockIdx.x * 256 + threadIdx.x;
  $BODY
}
"""
)


def all_of_them() -> Iterator[Classic]:
    yield from streaming()
    yield from shapes()
    yield from tiles()
    yield from chains()
    yield from latencies()


# ── what moves data ─────────────────────────────────────────────────────────────────────────────────────────────────


def streaming() -> Iterator[Classic]:
    for floats in (1 << 22, 1 << 27):
        for kind, width in (("float", 1), ("float2", 2), ("float4", 4)):
            yield Classic(
                "streaming", f"copy {4 * width} B", f"{floats * 4 >> 20} MB",
                _fill(STREAM, T=kind, BODY="o[i] = a[i];"), (floats // width // 256, 1, 1), (256, 1, 1),
                {"a": (floats, "fp32"), "o": (floats, "fp32")}, dram_bytes=8.0 * floats,
            )  # fmt: skip
    floats = 1 << 26
    bodies = {
        "fill": ("o[i] = 1;", 4),
        "stencil of rows": ("o[i] = a[i] + a[i + 1] + a[i + 2] + a[i + 8192] + a[i + 16384];", 8),
        "random gather": ("o[i] = a[unsigned(i) * 2654435761u % (1u << 26)];", 36),
        "strided gather": ("o[i] = a[i * 32 % (1u << 26) + i / (1u << 21)];", 36),
        "stride 2": ("o[i] = a[2 * i % (1u << 26)];", 8), "half the threads": ("if (i & 1) o[i] = a[i];", 8),
        "misaligned": ("o[i] = a[i + 1];", 8),
    }  # fmt: skip
    for name, (body, each) in bodies.items():
        yield Classic(
            "streaming", name, "256 MB", _fill(STREAM, T="float", BODY=body), (floats // 256, 1, 1), (256, 1, 1),
            {"a": (floats + 16384, "fp32"), "o": (floats, "fp32")}, dram_bytes=float(each * floats),
        )  # fmt: skip
    total = (
        HEAD
        + """kernel(const float4* a, float* o, int n) {
  float sum = 0;
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
    sum += a[i].x + a[i].y + a[i].z + a[i].w;
  for (int d = 16; d; d /= 2) sum += __shfl_xor_sync(~0u, sum, d);
  $STORE
}
"""
    )
    for name, store in (
        ("sum, atomic a warp", "if (threadIdx.x % 32 == 0) atomicAdd(o, sum);"),
        ("sum, store a warp", "if (threadIdx.x % 32 == 0) o[(blockIdx.x * blockDim.x + threadIdx.x) / 32] = sum;"),
    ):
        for count in (1 << 22, 1 << 27):
            yield Classic(
                "streaming", name, f"{count * 4 >> 20} MB", _fill(total, STORE=store), (WAVES, 1, 1), (256, 1, 1),
                {"a": (count, "fp32"), "o": (WAVES * 8, "fp32")}, {"n": count // 4}, dram_bytes=4.0 * count,
            )  # fmt: skip
    axpy = (
        HEAD
        + """kernel(const float4* a, const float4* b, float4* o, int n) {
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {
    float4 x = a[i], y = b[i];
    o[i] = make_float4(2 * x.x + y.x, 2 * x.y + y.y, 2 * x.z + y.z, 2 * x.w + y.w);
  }
}
"""
    )
    for count in (1 << 21, 1 << 26):
        yield Classic(
            "streaming", "triad", f"{count * 12 >> 20} MB", axpy, (WAVES, 1, 1), (256, 1, 1),
            {"a": (count, "fp32"), "b": (count, "fp32"), "o": (count, "fp32")}, {"n": count // 4},
            dram_bytes=12.0 * count,
        )  # fmt: skip


# ── what moves data in two dimensions, and counts ───────────────────────────────────────────────────────────────────

TRANSPOSE = (
    HEAD
    + """kernel(const float* a, float* o, int n) {
  __shared__ float tile[32][32 + $PAD];
  int x = blockIdx.x * 32 + threadIdx.x, y = blockIdx.y * 32 + threadIdx.y;
  for (int r = 0; r < 32; r += 8) tile[threadIdx.y + r][threadIdx.x] = a[(size_t)(y + r) * n + x];
  __syncthreads();
  x = blockIdx.y * 32 + threadIdx.x, y = blockIdx.x * 32 + threadIdx.y;
  for (int r = 0; r < 32; r += 8) o[(size_t)(y + r) * n + x] = tile[threadIdx.x][threadIdx.y + r];
}
"""
)
NAIVE_TRANSPOSE = (
    HEAD
    + """kernel(const float* a, float* o, int n) {
  int x = blockIdx.x * 32 + threadIdx.x, y = blockIdx.y * 32 + threadIdx.y;
  for (int r = 0; r < 32; r += 8) o[(size_t)x * n + y + r] = a[(size_t)(y + r) * n + x];
}
"""
)
HISTOGRAM = (
    HEAD
    + """kernel(const int* a, unsigned* o, int n) {
  __shared__ unsigned own[64];
  if (threadIdx.x < 64) own[threadIdx.x] = 0;
  __syncthreads();
  for (int i = blockIdx.x * 256 + threadIdx.x; i < n; i += 256 * gridDim.x) atomicAdd(&$TO[a[i]], 1u);
  __syncthreads();
  if ($MERGE && threadIdx.x < 64) atomicAdd(&o[threadIdx.x], own[threadIdx.x]);
}
"""
)
STENCIL_3D = (
    HEAD
    + """kernel(const float* a, float* o, int n) {
  int x = blockIdx.x * 32 + threadIdx.x + 1, y = blockIdx.y * 8 + threadIdx.y + 1, z = blockIdx.z + 1;
  size_t i = ((size_t)z * n + y) * n + x, p = (size_t)n * n;
  o[i] = a[i - 1] + a[i + 1] + a[i - n] + a[i + n] + a[i - p] + a[i + p] - 6 * a[i];
}
"""
)
ROWS = (
    HEAD
    + """kernel(const float* a, float* o, int cols) {
  __shared__ float s[32];
  const float* x = a + (size_t)blockIdx.x * cols;
  float* y = o + (size_t)blockIdx.x * cols;
  float m = -1e38f, t = 0;
  for (int i = threadIdx.x; i < cols; i += 256) m = fmaxf(m, x[i]);
  for (int d = 16; d; d /= 2) m = fmaxf(m, __shfl_xor_sync(~0u, m, d));
  if (threadIdx.x % 32 == 0) s[threadIdx.x / 32] = m;
  __syncthreads();
  for (int w = 0; w < 8; ++w) m = fmaxf(m, s[w]);
  for (int i = threadIdx.x; i < cols; i += 256) t += __expf(x[i] - m);
  for (int d = 16; d; d /= 2) t += __shfl_xor_sync(~0u, t, d);
  __syncthreads();
  if (threadIdx.x % 32 == 0) s[threadIdx.x / 32] = t;
  __syncthreads();
  t = 0;
  for (int w = 0; w < 8; ++w) t += s[w];
  for (int i = threadIdx.x; i < cols; i += 256) y[i] = __expf(x[i] - m) / t;
}
"""
)
SCAN = (
    HEAD
    + """kernel(const float* a, float* o, int cols) {
  __shared__ float s[256];
  float carry = 0;
  const float* x = a + (size_t)blockIdx.x * cols;
  float* y = o + (size_t)blockIdx.x * cols;
  for (int first = 0; first < cols; first += 256) {
    s[threadIdx.x] = x[first + threadIdx.x];
    for (int d = 1; d < 256; d *= 2) {
      __syncthreads();
      float v = threadIdx.x >= d ? s[threadIdx.x - d] : 0.0f;
      __syncthreads();
      s[threadIdx.x] += v;
    }
    __syncthreads();
    y[first + threadIdx.x] = carry + s[threadIdx.x];
    carry += s[255];
    __syncthreads();
  }
}
"""
)
GEMV = (
    HEAD
    + """kernel(const float4* a, const float4* x, float* o, int n4) {
  __shared__ float s[8];
  float t = 0;
  for (int i = threadIdx.x; i < n4; i += 256) {
    float4 v = a[(size_t)blockIdx.x * n4 + i], w = x[i];
    t += v.x * w.x + v.y * w.y + v.z * w.z + v.w * w.w;
  }
  for (int d = 16; d; d /= 2) t += __shfl_xor_sync(~0u, t, d);
  if (threadIdx.x % 32 == 0) s[threadIdx.x / 32] = t;
  __syncthreads();
  if (threadIdx.x == 0) o[blockIdx.x] = s[0] + s[1] + s[2] + s[3] + s[4] + s[5] + s[6] + s[7];
}
"""
)


def shapes() -> Iterator[Classic]:
    for n in (1024, 8192):
        square = {"a": (n * n, "fp32"), "o": (n * n, "fp32")}
        texts = {
            "transpose, naive": NAIVE_TRANSPOSE, "transpose, tile": _fill(TRANSPOSE, PAD=0),
            "transpose, padded tile": _fill(TRANSPOSE, PAD=1),
        }  # fmt: skip
        for name, text in texts.items():
            yield Classic(
                "two dimensions", name, f"{n}^2", text, (n // 32, n // 32, 1), (32, 8, 1), square, {"n": n},
                dram_bytes=8.0 * n * n,
            )  # fmt: skip
    count = 1 << 25
    for name, to, merge in (("shared", "own", 1), ("global", "o", 0)):
        yield Classic(
            "two dimensions", f"histogram, {name} atomics", "128 MB" if merge else "16 MB",
            _fill(HISTOGRAM, TO=to, MERGE=merge), (WAVES, 1, 1), (256, 1, 1),
            {"a": (count if merge else count // 8, "int32"), "o": (64, "int32")}, {"n": count if merge else count // 8},
            dram_bytes=4.0 * count,
        )  # fmt: skip
    for n in (130, 514):
        yield Classic(
            "two dimensions", "stencil of 7", f"{n}^3", STENCIL_3D, ((n - 2) // 32, (n - 2) // 8, n - 2), (32, 8, 1),
            {"a": (n**3, "fp32"), "o": (n**3, "fp32")}, {"n": n}, dram_bytes=8.0 * n**3,
        )  # fmt: skip
    for rows, cols in ((512, 4096), (16384, 4096), (131072, 512)):
        tensors = {"a": (rows * cols, "fp32"), "o": (rows * cols, "fp32")}
        for name, text in (("softmax", ROWS), ("scan", SCAN)):
            yield Classic(
                "two dimensions", name, f"{rows}x{cols}", text, (rows, 1, 1), (256, 1, 1), tensors, {"cols": cols},
                dram_bytes=8.0 * rows * cols,
            )  # fmt: skip
    for rows, cols in ((1024, 8192), (16384, 8192)):
        yield Classic(
            "two dimensions", "matrix times vector", f"{rows}x{cols}", GEMV, (rows, 1, 1), (256, 1, 1),
            {"a": (rows * cols, "fp32"), "x": (cols, "fp32"), "o": (rows, "fp32")}, {"n4": cols // 4},
            dram_bytes=4.0 * rows * cols,
        )  # fmt: skip


# ── products in tiles ───────────────────────────────────────────────────────────────────────────────────────────────

NAIVE_GEMM = (
    HEAD
    + """kernel(const $T* a, const $T* b, $T* o, int n) {
  int x = blockIdx.x * 32 + threadIdx.x, y = blockIdx.y * 8 + threadIdx.y;
  $T sum = 0;
  for (int k = 0; k < n; ++k) sum += a[(size_t)y * n + k] * b[(size_t)k * n + x];
  o[(size_t)y * n + x] = sum;
}
"""
)
SHARED_GEMM = (
    HEAD
    + """kernel(const $T* a, const $T* b, $T* o, int n) {
  __shared__ $T sa[$TILE][$TILE], sb[$TILE][$TILE];
  int x = threadIdx.x, y = threadIdx.y, col = blockIdx.x * $TILE + x, row = blockIdx.y * $TILE + y;
  $T sum = 0;
  for (int k = 0; k < n; k += $TILE) {
    sa[y][x] = a[(size_t)row * n + k + x];
    sb[y][x] = b[(size_t)(k + y) * n + col];
    __syncthreads();
    #pragma unroll
    for (int i = 0; i < $TILE; ++i) sum += sa[y][i] * sb[i][x];
    __syncthreads();
  }
  o[(size_t)row * n + col] = sum;
}
"""
)
BLOCK_GEMM = (
    HEAD
    + """__launch_bounds__(256) kernel(const $T* a, const $T* b, $T* o, int n) {
  __shared__ $T sa[8][128 + $PAD], sb[8][128];
  int tid = threadIdx.x, tx = tid % 16, ty = tid / 16;
  size_t row = (size_t)blockIdx.y * 128, col = blockIdx.x * 128;
  $T sum[8][8] = {};
  for (int k = 0; k < n; k += 8) {
    #pragma unroll
    for (int i = tid; i < 1024; i += 256) {
      sa[i % 8][i / 8] = a[(row + i / 8) * n + k + i % 8];
      sb[i / 128][i % 128] = b[(size_t)(k + i / 128) * n + col + i % 128];
    }
    __syncthreads();
    #pragma unroll
    for (int kk = 0; kk < 8; ++kk) {
      $T x[8], y[8];
      #pragma unroll
      for (int i = 0; i < 8; ++i) x[i] = sa[kk][ty * 8 + i], y[i] = sb[kk][tx * 8 + i];
      #pragma unroll
      for (int i = 0; i < 8; ++i)
        #pragma unroll
        for (int j = 0; j < 8; ++j) sum[i][j] += x[i] * y[j];
    }
    __syncthreads();
  }
  #pragma unroll
  for (int i = 0; i < 8; ++i)
    #pragma unroll
    for (int j = 0; j < 8; ++j) o[(row + ty * 8 + i) * n + col + tx * 8 + j] = sum[i][j];
}
"""
)


def tiles() -> Iterator[Classic]:
    for kind, dtype in (("float", "fp32"), ("double", "fp64")):
        for n in (1024, 4096) if dtype == "fp32" else (1024,):
            matrices = {name: (n * n, dtype) for name in "abo"}
            work = {"flops": 2.0 * n**3 if dtype == "fp32" else 0.0, "dram_bytes": 3.0 * n * n * BYTES[dtype]}
            if n == 1024:
                yield Classic(
                    "scalar products", f"naive {dtype}", f"{n}^3", _fill(NAIVE_GEMM, T=kind), (n // 32, n // 8, 1),
                    (32, 8, 1), matrices, {"n": n}, **work,
                )  # fmt: skip
            for tile in (16, 32):
                yield Classic(
                    "scalar products", f"tile {tile} {dtype}", f"{n}^3", _fill(SHARED_GEMM, T=kind, TILE=tile),
                    (n // tile, n // tile, 1), (tile, tile, 1), matrices, {"n": n}, **work,
                )  # fmt: skip
            for pad in (0, 4):
                yield Classic(
                    "scalar products", f"tile 128, 8x8 a thread, pad {pad}, {dtype}", f"{n}^3",
                    _fill(BLOCK_GEMM, T=kind, PAD=pad), (n // 128, n // 128, 1), (256, 1, 1), matrices, {"n": n},
                    **work,
                )  # fmt: skip


# ── one kind of instruction ─────────────────────────────────────────────────────────────────────────────────────────

CHAIN = (
    HEAD
    + """kernel(float* o, int steps) {
  $BEFORE
  for (int i = 0; i < steps; i++) {
    #pragma unroll
    for (int u = 0; u < 8; u++) { $STEP }
  }
  $AFTER
}
"""
)
PLACE = "o[blockIdx.x * blockDim.x + threadIdx.x]"
EIGHT = "for (int j = 0; j < 8; j++) "


def _chain(kind: str, start: str, step: str) -> tuple[str, str, str]:
    """Eight independent chains of `step` on v[j]."""
    before = f"{kind} v[8]; {EIGHT}v[j] = {start};"
    return before, f'_Pragma("unroll") {EIGHT}{{ {step} }}', f"float t = 0; {EIGHT}t += float(v[j]); {PLACE} = t;"


CHAINS = {
    "fp32 fma": _chain("float", "threadIdx.x + j", "v[j] = fmaf(v[j], 0.5f, 1.5f);"),
    "fp32 mul, add": _chain("float", "threadIdx.x + j", "v[j] = __fadd_rn(__fmul_rn(v[j], 0.5f), 1.5f);"),
    "fp64 fma": _chain("double", "threadIdx.x + j", "v[j] = fma(v[j], 0.5, 1.5);"),
    "fp16 fma": (
        f"__half2 v[8]; {EIGHT}v[j] = __float2half2_rn(threadIdx.x + j);",
        f"_Pragma(\"unroll\") {EIGHT}v[j] = __hfma2(v[j], __float2half2_rn(0.5f), __float2half2_rn(1.5f));",
        f"float t = 0; {EIGHT}t += __low2float(v[j]); {PLACE} = t;",
    ),
    "exp2": _chain("float", "threadIdx.x + j", 'asm volatile("ex2.approx.ftz.f32 %0, %0;" : "+f"(v[j]));'),
    "rsqrt": _chain("float", "threadIdx.x + j + 1", 'asm volatile("rsqrt.approx.ftz.f32 %0, %0;" : "+f"(v[j]));'),
    "int mad": _chain("int", "threadIdx.x + j", "v[j] = v[j] * v[j] + j;"),
    "int add": _chain("int", "threadIdx.x + j", "v[j] = (v[j] + i) ^ (v[j] >> 3);"),
    "int to float": _chain("float", "threadIdx.x + j", "v[j] = float(int(v[j]) ^ u);"),
    "shuffle": _chain("int", "threadIdx.x + j", "v[j] = __shfl_xor_sync(~0u, v[j], 1 + u);"),
    "vote": _chain("unsigned", "threadIdx.x + j", "v[j] += __ballot_sync(~0u, v[j] & 1);"),
}  # fmt: skip
SHARED_CHAIN = (
    HEAD
    + """kernel(float* o, int steps) {
  __shared__ float s[4096];
  for (int i = threadIdx.x; i < 4096; i += blockDim.x) s[i] = i;
  __syncthreads();
  float t[4] = {};
  for (int i = 0; i < steps; i++) {
    #pragma unroll
    for (int u = 0; u < 8; u++)
      #pragma unroll
      for (int j = 0; j < 4; j++) t[j] += $READ;
  }
  o[blockIdx.x * blockDim.x + threadIdx.x] = t[0] + t[1] + t[2] + t[3];
}
"""
)
SHARED_READS = {
    "shared, 4 B": "s[(threadIdx.x + i * 8 + u * 128 + j * 32) & 4095]",
    "shared, broadcast": "s[(i * 8 + u * 4 + j) & 4095]",
    "shared, 2-way conflict": "s[(threadIdx.x * 2 + i + u * 64 + j * 256) & 4095]",
    "shared, 8-way conflict": "s[(threadIdx.x * 8 + i + u + j) & 4095]",
    "shared, 32-way conflict": "s[(threadIdx.x * 32 + i + u + j) & 4095]",
    "shared, 16 B": "((const float4*)s)[(threadIdx.x + i * 8 + u * 128 + j * 32) & 1023].x"
    " + ((const float4*)s)[(threadIdx.x + i * 8 + u * 128 + j * 32) & 1023].w",
}
BARRIERS = (
    HEAD
    + """kernel(float* o, int steps) {
  float v = threadIdx.x;
  for (int i = 0; i < steps; i++) { v = fmaf(v, 0.5f, 1.0f); __syncthreads(); }
  o[blockIdx.x * blockDim.x + threadIdx.x] = v;
}
"""
)
MMA = {
    "mma f32.f16": ("m16n8k16", "f32.f16.f16.f32", "float", 4, 4, 2),
    "mma f16.f16": ("m16n8k16", "f16.f16.f16.f16", "unsigned", 2, 4, 2),
    "mma f32.bf16": ("m16n8k16", "f32.bf16.bf16.f32", "float", 4, 4, 2),
    "mma f32.tf32": ("m16n8k8", "f32.tf32.tf32.f32", "float", 4, 4, 2),
    "mma s32.s8": ("m16n8k32", "s32.s8.s8.s32", "int", 4, 4, 2),
    "mma f32.f16 k8": ("m16n8k8", "f32.f16.f16.f32", "float", 4, 2, 1),
}


def mma_text(kind: str, chains: int) -> str:
    shape, types, sum_type, sums, left, right = MMA[kind]
    letter = "f" if sum_type == "float" else "r"
    numbers = iter(range(sums + left + right))
    out, one, two = ("{" + ", ".join(f"%{next(numbers)}" for _ in range(count)) + "}" for count in (sums, left, right))
    instruction = f"mma.sync.aligned.{shape}.row.col.{types} {out}, {one}, {two}, {out};"
    operands = ", ".join(f'"r"(a[{i}])' for i in range(left + right))
    results = [", ".join(f'"+{letter}"(c[{n}][{i}])' for i in range(sums)) for n in range(chains)]
    products = "".join(f'asm volatile("{instruction}" : {of_chain} : {operands});\n' for of_chain in results)
    return f"""extern "C" __global__ void kernel({sum_type}* o, int steps) {{
        {sum_type} c[{chains}][{sums}] = {{}}; unsigned a[6] = {{threadIdx.x, 1, 2, 3, 4, 5}};
        for (int i = 0; i < steps; i++) {{ {products} }}
        {sum_type} t = 0;
        for (int i = 0; i < {chains * sums}; i++) t += c[i / {sums}][i % {sums}];
        o[blockIdx.x * blockDim.x + threadIdx.x] = t;
    }}"""


def chains() -> Iterator[Classic]:
    def one(name: str, text: str, blocks: int, threads: int, steps: int) -> Classic:
        out = {"o": (blocks * threads, "fp32")}
        named = f"{blocks} blocks of {threads}, {steps} steps"
        return Classic("one instruction", name, named, text, (blocks, 1, 1), (threads, 1, 1), out, {"steps": steps})

    for name, (before, step, after) in CHAINS.items():
        yield one(name, _fill(CHAIN, BEFORE=before, STEP=step, AFTER=after), WAVES, 256, 64)
    for name, read in SHARED_READS.items():
        yield one(name, _fill(SHARED_CHAIN, READ=read), 132 * 4, 256, 64)
    for threads in (128, 1024):
        yield one("barriers", BARRIERS, 132, threads, 2048)
    for name in MMA:
        yield one(name, mma_text(name, 4), 528, 256, 512)
    yield one("mma f32.f16, one chain of a warp", mma_text("mma f32.f16", 1), 132, 32, 2048)
    yield one("mma f32.f16, two chains of four warps", mma_text("mma f32.f16", 2), 132, 128, 2048)
    yield one(
        "fp32 fma, one warp",
        _fill(CHAIN, **dict(zip(("BEFORE", "STEP", "AFTER"), CHAINS["fp32 fma"], strict=True))),
        132,
        32,
        256,
    )


# ── latencies and launches ──────────────────────────────────────────────────────────────────────────────────────────

CHASE = (
    HEAD
    + """kernel(const int* a, int* o, int steps, int mask) {
  unsigned at = threadIdx.x;
  for (int i = 0; i < steps; i++) at = (at + (unsigned)a[at] + $STRIDE) & mask;
  o[threadIdx.x] = at;
}
"""
)
ATOMICS = (
    HEAD
    + """kernel(unsigned* o, int steps) {
  for (int i = 0; i < steps; i++) atomicAdd(&o[$WHERE], 1u);
}
"""
)


def latencies() -> Iterator[Classic]:
    yield Classic(
        "latency", "empty", "1 block", HEAD + "kernel(float* o) {}", (1, 1, 1), (32, 1, 1), {"o": (32, "fp32")}
    )
    yield Classic(
        "latency", "empty", "132 x 32 blocks of 256", HEAD + "kernel(float* o) {}", (132 * 32, 1, 1), (256, 1, 1),
        {"o": (32, "fp32")},
    )  # fmt: skip
    yield Classic(
        "latency", "empty", "2^20 blocks of 64", HEAD + "kernel(float* o) {}", (1 << 20, 1, 1), (64, 1, 1),
        {"o": (32, "fp32")},
    )  # fmt: skip
    for name, stride, words in (
        ("L1", 64, 1 << 13), ("L2", 64 + 4096, 1 << 21), ("DRAM", 64 + (1 << 20), 1 << 28)
    ):  # fmt: skip
        yield Classic(
            "latency", f"chase through {name}", f"{words * 4 >> 10} KB, 8192 loads", _fill(CHASE, STRIDE=stride),
            (1, 1, 1), (1, 1, 1), {"a": (words, "int32"), "o": (32, "int32")}, {"steps": 8192, "mask": words - 1},
        )  # fmt: skip
    for name, where in (
        ("one word", "0"),
        ("a word a warp", "(blockIdx.x * 8 + threadIdx.x / 32) * 8"),
        ("a word a thread", "blockIdx.x * 256 + threadIdx.x"),
    ):
        yield Classic(
            "latency", f"atomics on {name}", "132 blocks of 256, 64 each", _fill(ATOMICS, WHERE=where), (132, 1, 1),
            (256, 1, 1), {"o": (132 * 256, "int32")}, {"steps": 64},
        )  # fmt: skip
