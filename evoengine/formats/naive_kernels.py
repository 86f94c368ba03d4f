"""Simple and correct kernels for imported problems without one, and a skeleton for unknown operations."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from evoengine.formats.folder import Rule, space_text
from evoengine.formats.naive_attention import naive_attention

_TYPES = {"float32": "float", "float16": "__half", "bfloat16": "__nv_bfloat16"}
_HEADERS = {"float16": "#include <cuda_fp16.h>\n", "bfloat16": "#include <cuda_bf16.h>\n"}
_C_TYPES = {
    **_TYPES, "float64": "double", "int64": "long long", "int32": "int", "int16": "short", "int8": "signed char",
    "uint8": "unsigned char", "bool": "bool",
}  # fmt: skip # a table
_TO = {"float32": "{}", "float16": "__half2float({})", "bfloat16": "__bfloat162float({})"}
_FROM = {"float32": "{}", "float16": "__float2half({})", "bfloat16": "__float2bfloat16({})"}

_GEMM = """{headers}// C = A · transposed B, with tiles in shared memory.
// A [{m}, {k}], B [{n}, {k}], C [{m}, {n}], row after row.
#ifndef block_size_x
#define block_size_x 16
#endif
#ifndef block_size_y
#define block_size_y 16
#endif
#ifndef tile_k
#define tile_k 16
#endif
#ifndef rows_per_thread
#define rows_per_thread 2
#endif
#define TILE_M (block_size_y * rows_per_thread)
#define TILE_N block_size_x

extern "C" __global__ void {entry}({parameters}) {{
    __shared__ float a_tile_[TILE_M][tile_k + 1];
    __shared__ float b_tile_[TILE_N][tile_k + 1];
    const int m0_ = blockIdx.y * TILE_M, n0_ = blockIdx.x * TILE_N;
    const int thread_ = threadIdx.y * block_size_x + threadIdx.x;
    float sum_[rows_per_thread];
    for (int r_ = 0; r_ < rows_per_thread; ++r_) sum_[r_] = 0.0f;
    for (int k0_ = 0; k0_ < {k}; k0_ += tile_k) {{
        for (int i_ = thread_; i_ < TILE_M * tile_k; i_ += block_size_x * block_size_y) {{
            const int row_ = i_ / tile_k, col_ = i_ % tile_k;
            const bool inside_ = m0_ + row_ < {m} && k0_ + col_ < {k};
            a_tile_[row_][col_] = inside_ ? {load_a} : 0.0f;
        }}
        for (int i_ = thread_; i_ < TILE_N * tile_k; i_ += block_size_x * block_size_y) {{
            const int row_ = i_ / tile_k, col_ = i_ % tile_k;
            const bool inside_ = n0_ + row_ < {n} && k0_ + col_ < {k};
            b_tile_[row_][col_] = inside_ ? {load_b} : 0.0f;
        }}
        __syncthreads();
        for (int k_ = 0; k_ < tile_k; ++k_)
            for (int r_ = 0; r_ < rows_per_thread; ++r_)
                sum_[r_] += a_tile_[threadIdx.y + r_ * block_size_y][k_] * b_tile_[threadIdx.x][k_];
        __syncthreads();
    }}
    for (int r_ = 0; r_ < rows_per_thread; ++r_) {{
        const int row_ = m0_ + threadIdx.y + r_ * block_size_y, col_ = n0_ + threadIdx.x;
        if (row_ < {m} && col_ < {n}) {c}[(long long)row_ * {n} + col_] = {store};
    }}
}}
"""

_RMS_NORM = """{headers}// y = x / sqrt(mean(x²) + eps) · weight: a block for each row of [{rows}, {cols}].
#ifndef block_size_x
#define block_size_x 128
#endif
#ifndef unroll
#define unroll 1
#endif

extern "C" __global__ void __launch_bounds__(block_size_x) {entry}({parameters}) {{
    __shared__ float partial_[block_size_x / 32];
    const long long begin_ = (long long)blockIdx.x * {cols};
    float sum_ = 0.0f;
    #pragma unroll unroll
    for (int i_ = threadIdx.x; i_ < {cols}; i_ += block_size_x) {{
        const float value_ = {load_x};
        sum_ += value_ * value_;
    }}
    for (int step_ = 16; step_ > 0; step_ /= 2) sum_ += __shfl_xor_sync(0xffffffffu, sum_, step_);
    if (threadIdx.x % 32 == 0) partial_[threadIdx.x / 32] = sum_;
    __syncthreads();
    sum_ = 0.0f;
    for (int warp_ = 0; warp_ < block_size_x / 32; ++warp_) sum_ += partial_[warp_];
    const float scale_ = 1.0f / sqrtf(sum_ / {cols} + {eps});
    #pragma unroll unroll
    for (int i_ = threadIdx.x; i_ < {cols}; i_ += block_size_x)
        {y}[begin_ + i_] = {store};
}}
"""

_SKELETON = """{headers}// Write the kernel here.
// Every knob of space.toml is a #define; so is every constant axis of problem.json.
#ifndef block_size_x
#define block_size_x 128
#endif

extern "C" __global__ void __launch_bounds__(block_size_x) {entry}({parameters}) {{
}}
"""


@dataclass(frozen=True)
class NaiveKernel:
    text: str
    space: str
    flops: str | None = None
    is_skeleton: bool = False


def naive_kernel(problem: Mapping[str, Any]) -> NaiveKernel:
    """Return a correct kernel for `gemm`, `rmsnorm` and attention, and a skeleton for other operations.

    Tensors are those of FlashInfer-Trace.
    """
    operation = str(problem.get("op_type", "")).lower()
    if operation == "gemm" and (made := _gemm(problem)):
        return made
    if operation in ("rmsnorm", "rms_norm") and (made := _rms_norm(problem)):
        return made
    items = [*_shapes(problem, "inputs"), *_shapes(problem, "outputs")]
    headers = "#include <math.h>\n" + _headers(*(dtype for *_, dtype in items))
    if found := naive_attention(problem, headers, parameters(problem)):
        return NaiveKernel(*found)
    return skeleton(problem)


def _shapes(problem: Mapping[str, Any], key: str) -> list[tuple[str, list[str], str]]:
    """Return name, shape and dtype of each tensor; values that are passed directly have the shape []."""
    items = problem.get(key)
    entries = items.items() if isinstance(items, dict) else ()
    return [(n, _sizes(i.get("shape")), str(i.get("dtype"))) for n, i in entries if isinstance(i, dict)]


def _sizes(shape: Any) -> list[str]:
    return [str(size) for size in shape] if isinstance(shape, list) else []


def parameters(problem: Mapping[str, Any]) -> str:
    """Return the kernel's parameters in the default order of problem.json: inputs, outputs, var axes."""
    inputs, outputs = problem.get("inputs") or {}, problem.get("outputs") or {}
    found = []
    for name, item in [*inputs.items(), *outputs.items()]:
        kind = _C_TYPES.get(str(item.get("dtype")) if isinstance(item, dict) else "", "void")
        by_value = name in inputs and isinstance(item, dict) and item.get("shape", ()) is None
        const = "" if name in outputs or by_value else "const "
        found.append(f"{const}{kind}{' ' if by_value else '* __restrict__ '}{name}")
    axes = problem.get("axes") or {}
    found += [f"int {axis}" for axis, entry in axes.items() if isinstance(entry, dict) and entry.get("type") == "var"]
    return ", ".join(found)


def _headers(*dtypes: str) -> str:
    return "".join(dict.fromkeys(_HEADERS.get(dtype, "") for dtype in dtypes))


def _is_plain(size: str) -> bool:
    """Return whether a size is one name or number, as the kernels' texts require."""
    return re.fullmatch(r"\w+", size) is not None


def _gemm(problem: Mapping[str, Any]) -> NaiveKernel | None:
    inputs, outputs = _shapes(problem, "inputs"), _shapes(problem, "outputs")
    if len(inputs) != 2 or len(outputs) != 1:
        return None
    (a, a_shape, a_type), (b, b_shape, b_type), (c, c_shape, c_type) = *inputs, *outputs
    is_product = len(a_shape) == len(b_shape) == 2 and a_shape[1] == b_shape[1] and c_shape == [a_shape[0], b_shape[0]]
    if not is_product or not {a_type, b_type, c_type} <= _TYPES.keys() or not all(map(_is_plain, (*a_shape, *b_shape))):
        return None
    m, n, k = a_shape[0], b_shape[0], a_shape[1]
    text = _GEMM.format(
        headers=_headers(a_type, b_type, c_type),
        m=m,
        n=n,
        k=k,
        c=c,
        entry=problem["name"],
        parameters=parameters(problem),
        load_a=_TO[a_type].format(f"{a}[(long long)(m0_ + row_) * {k} + k0_ + col_]"),
        load_b=_TO[b_type].format(f"{b}[(long long)(n0_ + row_) * {k} + k0_ + col_]"),
        store=_FROM[c_type].format("sum_[r_]"),
    )
    knobs = {
        "block_size_x": [8, 16, 32],
        "block_size_y": [4, 8, 16],
        "tile_k": [8, 16, 32],
        "rows_per_thread": [1, 2, 4, 8],
    }
    rule = Rule(
        "block_size_x * block_size_y % 32 == 0 and block_size_x * block_size_y <= 512", "a block has whole warps"
    )
    grid = (f"ceil_div({n}, block_size_x)", f"ceil_div({m}, block_size_y * rows_per_thread)", "1")
    start = {"block_size_x": 16, "block_size_y": 16, "tile_k": 16, "rows_per_thread": 2}
    space = space_text(problem["name"], knobs, [rule], ("block_size_x", "block_size_y", "1"), grid, starts=[start])
    return NaiveKernel(text, space, flops=f"2 * {m} * {n} * {k}")


def _rms_norm(problem: Mapping[str, Any]) -> NaiveKernel | None:
    """Return a kernel for x [rows, cols], maybe a residual of that shape, and weight [cols] → [rows, cols], or None.

    eps is an input, or a literal of the reference.
    """
    inputs, outputs = _shapes(problem, "inputs"), _shapes(problem, "outputs")
    tensors = [item for item in inputs if item[1]]
    values = [item[0] for item in inputs if not item[1]]
    if len(tensors) not in (2, 3) or len(outputs) != 1 or len(values) > 1:
        return None
    *added, (weight, w_shape, w_type), (y, _, y_type) = *tensors, *outputs
    if len(added) == 2 and ("residual" not in added[1][0] or not _adds(str(problem["reference"]), *added)):
        return None
    found = re.search(
        r"\beps\w*\s*(?::\s*float\s*)?=\s*([0-9][0-9.]*(?:e-?\d+)?)", str(problem["reference"]), re.IGNORECASE
    )
    shape = added[0][1]
    fits = len(shape) == 2 and w_shape == shape[1:] and all(own == shape for _, own, _ in (*added, outputs[0]))
    types = {w_type, y_type, *(kind for *_, kind in added)}
    if not fits or not types <= _TYPES.keys() or not (values or found) or not all(map(_is_plain, shape)):
        return None
    rows, cols = shape
    eps = values[0] if values else f"{float(found[1])!r}f" if found else ""
    load = " + ".join(_TO[kind].format(f"{name}[begin_ + i_]") for name, _, kind in added)
    value = f"({load}) * scale_ * {_TO[w_type].format(f'{weight}[i_]')}"
    text = _RMS_NORM.format(
        headers=_headers(*sorted(types)),
        rows=rows,
        cols=cols,
        entry=problem["name"],
        y=y,
        eps=eps,
        parameters=parameters(problem),
        load_x=load,
        store=_FROM[y_type].format(value),
    )
    knobs = {"block_size_x": [32, 64, 128, 256, 512], "unroll": [1, 2, 4, 8]}
    space = space_text(
        problem["name"], knobs, [], "block_size_x", (rows, "1", "1"), starts=[{"block_size_x": 128, "unroll": 1}]
    )
    return NaiveKernel(text, space, flops=f"4 * {rows} * {cols}")


def _adds(reference: str, *tensors: tuple[str, list[str], str]) -> bool:
    """Return whether the text adds the two tensors, with or without casts."""
    cast = r"(?:\.\w+\([\w.]*\))?"
    return any(
        re.search(rf"\b{re.escape(one)}{cast}\s*\+\s*{re.escape(other)}\b", reference)
        for one, other in ((tensors[0][0], tensors[1][0]), (tensors[1][0], tensors[0][0]))
    )


def skeleton(problem: Mapping[str, Any]) -> NaiveKernel:
    """Return a kernel with the right parameters and an empty body, which the gate rejects for writing nothing."""
    items = [*_shapes(problem, "inputs"), *_shapes(problem, "outputs")]
    text = _SKELETON.format(
        headers=_headers(*(dtype for *_, dtype in items)), entry=problem["name"], parameters=parameters(problem)
    )
    elements = (
        " * ".join(f"({size})" for size in _shapes(problem, "outputs")[0][1]) if _shapes(problem, "outputs") else ""
    )
    grid = (f"ceil_div({elements or '1'}, block_size_x)", "1", "1")
    space = space_text(problem["name"], {"block_size_x": [64, 128, 256]}, [], "block_size_x", grid)
    return NaiveKernel(text, space, is_skeleton=True)
