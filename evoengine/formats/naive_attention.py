"""A plain, correct attention kernel for FlashInfer-Trace's definitions: paged, ragged, grouped heads, and MLA.

The kind of attention is recognized by the names that these definitions give to their tensors.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from evoengine.formats.folder import space_text

_TEXT = """{headers}// A block for each query token and head; softmax over its keys one by one, as they come.
#ifndef block_size_x
#define block_size_x 128
#endif
#define WARPS_ (block_size_x / 32)
#define HELD_ (({width} + block_size_x - 1) / block_size_x)

extern "C" __global__ void __launch_bounds__(block_size_x) {entry}({parameters}) {{
    __shared__ float partial_[WARPS_];
    const int token_ = blockIdx.x, head_ = blockIdx.y;
{range}
    float held_[HELD_], max_ = -INFINITY, sum_ = 0.0f;
    for (int i_ = 0; i_ < HELD_; ++i_) held_[i_] = 0.0f;
    for (int j_ = 0; j_ < keys_; ++j_) {{
        const long long at_ = {place};
        float product_ = 0.0f;
{products}
        for (int step_ = 16; step_ > 0; step_ /= 2) product_ += __shfl_xor_sync(0xffffffffu, product_, step_);
        __syncthreads();
        if (threadIdx.x % 32 == 0) partial_[threadIdx.x / 32] = product_;
        __syncthreads();
        float logit_ = 0.0f;
        for (int warp_ = 0; warp_ < WARPS_; ++warp_) logit_ += partial_[warp_];
        logit_ *= {scale};
        const float above_ = fmaxf(max_, logit_), kept_ = expf(max_ - above_), weight_ = expf(logit_ - above_);
        max_ = above_;
        sum_ = sum_ * kept_ + weight_;
        for (int i_ = 0, d_ = threadIdx.x; d_ < {width}; d_ += block_size_x, ++i_)
            held_[i_] = held_[i_] * kept_ + weight_ * {value};
    }}
    const long long row_ = (long long)token_ * {heads} + head_;
    for (int i_ = 0, d_ = threadIdx.x; d_ < {width}; d_ += block_size_x, ++i_)
        {out}[row_ * {width} + d_] = {store};
{lse}}}
"""
_TO = {"float32": "{}", "float16": "__half2float({})", "bfloat16": "__bfloat162float({})"}
_FROM = {"float32": "{}", "float16": "__float2half({})", "bfloat16": "__float2bfloat16({})"}


def naive_attention(problem: Mapping[str, Any], headers: str, parameters: str) -> tuple[str, str, str] | None:
    """Return the kernel's text, its space and its operations; None if the tensors are not those of an attention."""
    inputs, outputs = problem.get("inputs"), problem.get("outputs")
    if not _is_plain(inputs) or not _is_plain(outputs):
        return None
    assert isinstance(inputs, dict) and isinstance(outputs, dict)
    queries = [name for name in ("q", "q_nope", "q_pe") if name in inputs]
    keys = _first(inputs, ("k", "k_cache"), ("ckv_cache", "kpe_cache"), ("ckv", "kpe"), ("k_nope", "k_pe"))
    values = _first(inputs, ("v", "v_cache"), ("ckv_cache",), ("ckv",))
    output = next((name for name in outputs if name != "lse"), None)
    indptr = next((name for name in ("kv_indptr", "seq_indptr") if name in inputs), None)
    if not queries or len(queries) != len(keys) or not values or output is None or indptr is None:
        return None
    kinds = {str(item["dtype"]) for name, item in inputs.items() if name in (*queries, *keys, *values)}
    if any(len(inputs[name]["shape"] or ()) < 3 for name in (*queries, *keys, *values)):
        return None
    shape = inputs[queries[0]]["shape"]
    if not kinds <= _TO.keys() or len(shape) != 3 or "sm_scale" not in inputs or outputs[output]["dtype"] not in _FROM:
        return None
    heads, width = str(shape[1]), str(inputs[values[0]]["shape"][-1])
    paged = "kv_indices" in inputs
    products = "\n".join(_product(inputs, q, k, heads) for q, k in zip(queries, keys, strict=True))
    text = _TEXT.format(
        headers=headers,
        entry=problem["name"],
        parameters=parameters,
        width=width,
        heads=heads,
        range=_range(problem, indptr, paged),
        place=_page(inputs, keys[0], indptr) if paged else "start_ + j_",
        products=products,
        scale="sm_scale" if inputs["sm_scale"]["shape"] is None else "sm_scale[0]",
        value=_TO[inputs[values[0]]["dtype"]].format(f"{values[0]}[{_row(inputs[values[0]], heads)} + d_]"),
        out=output,
        store=_FROM[outputs[output]["dtype"]].format("sum_ > 0.0f ? held_[i_] / sum_ : 0.0f"),
        lse=_lse(problem),
    )
    space = space_text(
        problem["name"], {"block_size_x": [32, 64, 128, 256]}, [], "block_size_x", (str(shape[0]), heads, "1"),
        starts=[{"block_size_x": 128}],
    )  # fmt: skip # one argument a kind
    of_key = [inputs[name]["shape"][-1] for name in (*queries, *values)]
    return text, space, _operations(problem, keys[0], indptr, heads, " + ".join(map(str, of_key)))


def _operations(problem: Mapping[str, Any], key: str, indptr: str, heads: str, of_key: str) -> str:
    """Return the operations of both products as an expression of the axes, for sequences of equal length.

    `of_key` is the number of multiplications of a query's head with one key.
    """
    inputs = problem["inputs"]
    tokens = str(next(iter(inputs.values()))["shape"][0])
    segments = f"max(1, ({inputs[indptr]['shape'][0]}) - 1)"
    paged = "kv_indices" in inputs
    seen = f"({inputs['kv_indices' if paged else key]['shape'][0]})"
    if paged:
        seen += f" * ({inputs[key]['shape'][1]})"
    if _is_causal(problem):
        seen = f"({seen} - max(0, ({tokens}) - {segments}) // 2)"
    return f"2 * ({heads}) * ({of_key}) * ({tokens}) * {seen} // {segments}"


def _is_causal(problem: Mapping[str, Any]) -> bool:
    """Return whether earlier tokens of several see fewer keys than the last one."""
    has_queries = any(name in problem["inputs"] for name in ("qo_indptr", "seq_indptr"))
    return has_queries and bool(
        re.search(r"causal", str(problem["reference"]) + str(problem.get("description")), re.IGNORECASE)
    )


def _is_plain(items: object) -> bool:
    """Return whether all tensors have a dtype and a shape of names and numbers, or none."""
    if not isinstance(items, dict):
        return False
    for item in items.values():
        shape = item.get("shape", 0) if isinstance(item, dict) else 0
        sizes = shape if isinstance(shape, list) else [] if shape is None else [None]
        if not isinstance(item.get("dtype") if isinstance(item, dict) else None, str) or not all(
            isinstance(size, str | int) for size in sizes
        ):
            return False
    return True


def _first(inputs: Mapping[str, Any], *choices: tuple[str, ...]) -> list[str]:
    """Return the first choice of tensors that exists: one of two names, or both parts of a pair."""
    for choice in choices:
        found = [name for name in choice if name in inputs]
        if found and (len(found) == len(choice) or choice[0] in ("k", "v")):
            return found
    return []


def _row(item: Mapping[str, Any], heads: str) -> str:
    """Return the offset of a key's row: of its own head, of a group of heads, or of all heads."""
    shape = [str(size) for size in item["shape"]]
    own = shape[-2] if len(shape) in (3, 4) and shape[-2] != "page_size" else "1"
    if own == "1":
        return f"at_ * {shape[-1]}"
    return f"(at_ * {own} + head_ / ({heads} / {own})) * {shape[-1]}"


def _product(inputs: Mapping[str, Any], query: str, key: str, heads: str) -> str:
    size = inputs[query]["shape"][-1]
    q = _TO[inputs[query]["dtype"]].format(f"{query}[((long long)token_ * {heads} + head_) * {size} + d_]")
    k = _TO[inputs[key]["dtype"]].format(f"{key}[{_row(inputs[key], heads)} + d_]")
    return f"        for (int d_ = threadIdx.x; d_ < {size}; d_ += block_size_x) product_ += {q} * {k};"


def _page(inputs: Mapping[str, Any], key: str, indptr: str) -> str:
    """Return the position of a key in a paged cache."""
    size = str(inputs[key]["shape"][1])
    return f"(long long)kv_indices[{indptr}[segment_] + j_ / {size}] * {size} + j_ % {size}"


def _range(problem: Mapping[str, Any], indptr: str, paged: bool) -> str:
    """Return the statements that find a token's segment and the number of keys it sees."""
    inputs = problem["inputs"]
    queries = next((name for name in ("qo_indptr", "seq_indptr") if name in inputs), None)
    lines = []
    if queries is None:
        lines.append("const int segment_ = token_;")
    else:
        lines += ["int segment_ = 0;", f"while ({queries}[segment_ + 1] <= token_) ++segment_;"]
    lines += [f"const int start_ = {indptr}[segment_];", f"int keys_ = {indptr}[segment_ + 1] - start_;"]
    if paged:
        key = next(name for name in ("k_cache", "ckv_cache") if name in inputs)
        size = str(inputs[key]["shape"][1])
        named = str(problem["reference"])
        last = next((name for name in inputs if name.endswith("last_page_len")), None)
        if last is not None and re.search(rf"\b{re.escape(last)}\s*\[", named):
            lines.append(f"keys_ = keys_ ? (keys_ - 1) * {size} + {last}[segment_] : 0;")
        else:
            lines.append(f"keys_ *= {size};")
    if queries is not None and _is_causal(problem):
        tokens = f"{queries}[segment_ + 1] - {queries}[segment_]"
        lines.append(f"keys_ = max(0, min(keys_, token_ - {queries}[segment_] + 1 + keys_ - ({tokens})));")
    return "\n".join(f"    {line}" for line in lines)


def _lse(problem: Mapping[str, Any]) -> str:
    """Return the statement that writes the logarithm of the sum, in the reference's base."""
    if "lse" not in problem["outputs"]:
        return ""
    base_2 = re.search(r"log\s*\(\s*2|log2|1\.4426", str(problem["reference"]))
    factor = " * 1.4426950408889634f" if base_2 else ""
    return f"    if (threadIdx.x == 0) lse[row_] = sum_ > 0.0f ? (max_ + logf(sum_)){factor} : -INFINITY;\n"
