"""The shape, dtype and mask of one attention forward pass."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from evoengine.devices.base import DTYPE_BYTES, PassedParameter, ScalarArgument, TensorMapArgument, TensorParameter
from evoengine.errors import UsageError
from evoengine.records import Config, Value, named
from evoengine.workloads.problem_text import LARGEST, both_lengths, read_parts, require_groups

DTYPES = ("fp16", "bf16")
HEAD_DIMS = (32, 64, 96, 128, 192, 256)
MOST = {"batch": 65_535, "heads": 65_535, "kv_heads": 65_535, "seq_q": LARGEST, "seq_k": LARGEST}
"""batch and heads are sizes of the grid along y and z, of which CUDA has so many; lengths travel to kernels as int32"""
EXAMPLE = "b16,h16,s2048,d64,fp16"
OUTPUT, LSE = "o", "lse"
"""the outputs; the second is also the word of problems that have it"""

_FIELDS = {
    "b": "batch", "h": "heads", "kv": "kv_heads", "s": "seq", "sq": "seq_q", "sk": "seq_k",
    "d": "head_dim", "dv": "head_dim_v",
}  # fmt: skip # a table


@dataclass(frozen=True, slots=True)
class AttentionProblem:
    """Attention forward: O = softmax(Q Kᵀ / √head_dim) V.

    Q [batch, heads, seq_q, head_dim], K [batch, kv_heads, seq_k, head_dim], V [batch, kv_heads, seq_k, head_dim_v], O
    [batch, heads, seq_q, head_dim_v], all contiguous. With `lse` the kernel also writes LSE [batch, heads, seq_q],
    float32: the natural logarithm of the sum of the exponentials of a row's scaled logits. With `causal`, query i sees
    keys up to i + seq_k - seq_q (the mask is aligned to the lower right corner, as FlashAttention has it since 2.1).
    """

    batch: int
    heads: int
    kv_heads: int
    seq_q: int
    seq_k: int
    head_dim: int
    head_dim_v: int
    dtype: str
    causal: bool = False
    lse: bool = False

    def __str__(self) -> str:
        seq = f"s{self.seq_q}" if self.seq_q == self.seq_k else f"sq{self.seq_q},sk{self.seq_k}"
        parts = [f"b{self.batch}", f"h{self.heads}", seq, f"d{self.head_dim}"]
        if self.head_dim_v != self.head_dim:
            parts.append(f"dv{self.head_dim_v}")
        parts.append(self.dtype)
        if self.causal:
            parts.append("causal")
        if self.kv_heads != self.heads:
            parts.append(f"kv{self.kv_heads}")
        if self.lse:
            parts.append(LSE)
        return "attention:" + ",".join(parts)

    def variables(self) -> Mapping[str, Value]:
        """Return the names that a space's expressions and templates may use, with their values."""
        sizes = "batch heads kv_heads seq_q seq_k head_dim head_dim_v dtype".split()
        with_lse = {LSE: True} if self.lse else {}
        return named(self, sizes) | {"element_bytes": DTYPE_BYTES[self.dtype], "causal": self.causal} | with_lse


def parse_problem(text: str) -> AttentionProblem:
    """Parse `b16,h16,s2048,d64[,dv32],fp16[,causal][,kv4][,lse]`; `sq…,sk…` in place of `s…` for different lengths.

    Raises UsageError naming the part that is wrong and what would be right.
    """
    optional = ("kv_heads", "seq", "seq_q", "seq_k", "head_dim_v", "mask", LSE)
    known = {"dtype": DTYPES, "mask": ("causal",), LSE: (LSE,)}
    sizes, words = read_parts(text, f"attention:{EXAMPLE}", _FIELDS, known, optional)
    both_lengths(sizes, text, EXAMPLE)
    sizes.setdefault("kv_heads", sizes["heads"])
    sizes.setdefault("head_dim_v", sizes["head_dim"])
    problem = AttentionProblem(**sizes, dtype=words["dtype"], causal="mask" in words, lse=LSE in words)
    _check(problem, text)
    return problem


def _check(problem: AttentionProblem, text: str) -> None:
    for name, most in MOST.items():
        size = getattr(problem, name)
        if not 1 <= size <= most:
            raise UsageError(f"the problem {text!r} has {name} {size}; it must be from 1 to {most}")
    for name in ("head_dim", "head_dim_v"):
        if getattr(problem, name) not in HEAD_DIMS:
            known = ", ".join(map(str, HEAD_DIMS))
            raise UsageError(f"the problem {text!r} has {name} {getattr(problem, name)}; the templates cover {known}")
    require_groups(text, problem.heads, problem.kv_heads)
    if problem.causal and problem.seq_q > problem.seq_k:
        raise UsageError(
            f"the problem {text!r} is causal with more queries than keys, which leaves rows that see no key; "
            "seq_q must not exceed seq_k"
        )


# The parameters of an attention kernel, in order: q, k, v, o, lse where it is asked for, its scalars, and tensor maps
# for TMA.


def parameters(problem: AttentionProblem, config: Config) -> tuple[PassedParameter, ...]:
    p = problem
    queries = (p.batch, p.heads, p.seq_q, p.head_dim)
    keys = (p.batch, p.kv_heads, p.seq_k, p.head_dim)
    values = (p.batch, p.kv_heads, p.seq_k, p.head_dim_v)
    inputs = [TensorParameter(name, shape, p.dtype) for name, shape in (("q", queries), ("k", keys), ("v", values))]
    outputs = [TensorParameter(OUTPUT, (*queries[:3], p.head_dim_v), p.dtype, output=True)]
    if p.lse:
        outputs.append(TensorParameter(LSE, queries[:3], "fp32", output=True))
    return (*inputs, *outputs, *_scalars(p, config), *_tensor_maps(p, config))


def _scalars(problem: AttentionProblem, config: Config) -> tuple[ScalarArgument, ...]:
    """Return the kernel's by-value parameters, in order, after its pointers.

    `batch` is among them if the grid, which then depends on the GPU, does not state it.
    """
    batch = (ScalarArgument("batch", np.int32(problem.batch)),) if config.get("schedule") == "static" else ()
    return (
        *batch,
        ScalarArgument("heads", np.int32(problem.heads)),
        ScalarArgument("kv_heads", np.int32(problem.kv_heads)),
        ScalarArgument("seq_q", np.int32(problem.seq_q)),
        ScalarArgument("seq_k", np.int32(problem.seq_k)),
        ScalarArgument("scale", np.float32(1.0 / math.sqrt(problem.head_dim))),
    )


def _tensor_maps(problem: AttentionProblem, config: Config) -> tuple[TensorMapArgument, ...]:
    """Return the tensor maps of Q, K and V, and of O if it is stored by TMA.

    Each is of [heads of the batch, seq, head_dim or head_dim_v]. A box holds a tile's rows (for O a warpgroup's; for K
    and V the part of one of a cluster's blocks) by the 64 or 32 columns that the kernel swizzles together; beyond a
    head's end it reads zeros and writes nothing.
    """
    if config.get("load") != "tma":
        return ()

    def over(name: str, width: int, heads: int, seq: int, rows: int) -> TensorMapArgument:
        columns, row = 64 if width % 64 == 0 else 32, 2 * width
        dims = (width, seq, heads * problem.batch)
        return TensorMapArgument(
            f"map_{name}", name, problem.dtype, dims, (row, row * seq), (columns, rows, 1), swizzle=2 * columns
        )

    tile_m, tile_n = int(config["tile_m"]), int(config["tile_n"]) // int(config.get("cluster", 1))
    queries, keys = (problem.heads, problem.seq_q), (problem.kv_heads, problem.seq_k, tile_n)
    width, width_v = problem.head_dim, problem.head_dim_v
    maps = over("q", width, *queries, tile_m), over("k", width, *keys), over("v", width_v, *keys)
    return (*maps, over(OUTPUT, width_v, *queries, 64)) if config["o_store"] == "tma" else maps
