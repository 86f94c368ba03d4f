"""The shape, dtype and mask of one attention backward pass, and the parameters of its kernels."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from evoengine.devices.base import (
    DTYPE_BYTES,
    PassedParameter,
    ScalarArgument,
    ScratchParameter,
    TensorMapArgument,
    TensorParameter,
)
from evoengine.errors import UsageError
from evoengine.records import Config, Value, named
from evoengine.workloads.problem_text import both_lengths, read_parts, require_groups

DTYPES = ("fp16", "bf16")
HEAD_DIMS = (64, 128)
MOST_HEADS = 65_535
"""batch and heads are sizes of the grid along y and z, of which CUDA has so many"""
EXAMPLE = "attention-backward:b16,h16,s2048,d64,fp16"
VALUES = (
    "logits above 90 and below -90 of a whole row",
    "rows whose weight is one key's",
    "the last key that a row sees takes all weight",
    "rows that see no key",
)
"""the faults that the values of cases show"""
_NUMBERS = {"b": "batch", "h": "heads", "kv": "kv_heads", "s": "seq", "sq": "seq_q", "sk": "seq_k", "d": "head_dim"}


@dataclass(frozen=True, slots=True)
class BackwardProblem:
    """The gradients dQ, dK and dV of O = softmax(Q Kᵀ / √head_dim) V, given dO (`dout`), O and LSE.

    Q, O, dO and dQ are [batch, heads, seq_q, head_dim], K, V, dK and dV [batch, kv_heads, seq_k, head_dim], all
    contiguous and of `dtype`. LSE [batch, heads, seq_q], float32, is the natural logarithm of the sum of the
    exponentials of a row's scaled logits. With `causal`, query i sees keys up to i + seq_k - seq_q. A row that sees
    none has an O of 0 and an LSE of -inf.
    """

    batch: int
    heads: int
    kv_heads: int
    seq_q: int
    seq_k: int
    head_dim: int
    dtype: str
    causal: bool = False

    def __str__(self) -> str:
        seq = f"s{self.seq_q}" if self.seq_q == self.seq_k else f"sq{self.seq_q},sk{self.seq_k}"
        parts = [f"b{self.batch}", f"h{self.heads}", seq, f"d{self.head_dim}", self.dtype]
        parts += ["causal"] if self.causal else []
        parts += [f"kv{self.kv_heads}"] if self.kv_heads != self.heads else []
        return "attention-backward:" + ",".join(parts)

    def variables(self) -> Mapping[str, Value]:
        """Return the names that a space's expressions and templates may use, with their values."""
        sizes = "batch heads kv_heads seq_q seq_k head_dim dtype".split()
        return named(self, sizes) | {"element_bytes": DTYPE_BYTES[self.dtype], "causal": self.causal}


def parse_problem(text: str) -> BackwardProblem:
    """Parse `b16,h16,s2048,d64,fp16[,causal][,kv4]`; `sq…,sk…` in place of `s…` for different lengths.

    Raises UsageError naming the part that is wrong and what would be right.
    """
    optional = ("kv_heads", "seq", "seq_q", "seq_k", "mask")
    sizes, words = read_parts(text, EXAMPLE, _NUMBERS, {"dtype": DTYPES, "mask": ("causal",)}, optional)
    both_lengths(sizes, text, EXAMPLE)
    sizes.setdefault("kv_heads", sizes["heads"])
    problem = BackwardProblem(**sizes, dtype=words["dtype"], causal="mask" in words)
    _check(problem, text)
    return problem


def _check(problem: BackwardProblem, text: str) -> None:
    for name in ("batch", "heads", "kv_heads"):
        if (size := getattr(problem, name)) > MOST_HEADS:
            raise UsageError(f"the problem {text!r} has {name} {size}; it must be from 1 to {MOST_HEADS}")
    if problem.head_dim not in HEAD_DIMS:
        known = " and ".join(map(str, HEAD_DIMS))
        raise UsageError(f"the problem {text!r} has head_dim {problem.head_dim}; the templates cover {known}")
    require_groups(text, problem.heads, problem.kv_heads)


PREPARE, GRADIENTS, LAST = "attention_backward", "attention_backward_kv", "attention_backward_q"
"""the kernels in stream order: sums of dO·O and zeros in the scratch memory; dK and dV; dQ"""
GRADIENTS_BY_TMA = "attention_backward_kv_tma"
"""that of dK and dV where TMA brings its tiles"""
MAPPED = ("q", "k", "v", "dout")
"""what has a tensor map there"""
PAIR = 256
"""numbers of LSE and delta that a tile of queries has there, half each, whatever its rows are"""
SCALARS = ("heads", "kv_heads", "seq_q", "seq_k", "scale")
TAKEN = {
    PREPARE: ("o", "dout", "lse", "delta", "dq_sum", "seq_q"),
    GRADIENTS: ("q", "k", "v", "dout", "lse", "delta", "dq_sum", "dk", "dv", *SCALARS),
    GRADIENTS_BY_TMA: ("delta", "dq_sum", "dk", "dv", *SCALARS, *(f"map_{name}" for name in MAPPED)),
    LAST: ("q", "k", "v", "dout", "lse", "delta", "dq_sum", "dq", *SCALARS),
}
"""names of the parameters that each kernel takes, in order"""


def parameters(problem: BackwardProblem, config: Config) -> tuple[PassedParameter, ...]:
    """Return all parameters, of which each kernel takes those of TAKEN.

    Where dQ is added up by atomics or in bulk, `dq_sum` [batch, heads, tiles of tile_m rows, tile_m · head_dim] holds
    the sums, each tile in the order in which the lanes of a block hold it. Elsewhere it has one element and is not
    touched. `delta` [batch, heads, seq_q] is, where TMA brings tiles, [batch, heads, tiles, PAIR]: a head's rows need
    not begin at a multiple of 16 bytes, which hardware asks of each copy.
    """
    p = problem
    queries, keys = (p.batch, p.heads, p.seq_q, p.head_dim), (p.batch, p.kv_heads, p.seq_k, p.head_dim)
    rows, step = queries[:3], int(config.get("tile_m", 1))
    tiles = (p.batch, p.heads, -(-p.seq_q // step))
    sums = (*tiles, step * p.head_dim) if config.get("dq") in ("atomic", "bulk") else (1,)
    delta = (*tiles, PAIR) if config.get("family") == "wgmma" else rows
    shapes = {"q": queries, "k": keys, "v": keys, "o": queries, "dout": queries}
    return (
        *(TensorParameter(name, shape, p.dtype) for name, shape in shapes.items()),
        TensorParameter("lse", rows, "fp32"),
        TensorParameter("dq", queries, p.dtype, output=True),
        TensorParameter("dk", keys, p.dtype, output=True),
        TensorParameter("dv", keys, p.dtype, output=True),
        ScratchParameter("delta", delta, "fp32"),
        ScratchParameter("dq_sum", sums, "fp32"),
        ScalarArgument("heads", np.int32(p.heads)),
        ScalarArgument("kv_heads", np.int32(p.kv_heads)),
        ScalarArgument("seq_q", np.int32(p.seq_q)),
        ScalarArgument("seq_k", np.int32(p.seq_k)),
        ScalarArgument("scale", np.float32(1.0 / math.sqrt(p.head_dim))),
        *(_tensor_maps(p, config) if config.get("family") == "wgmma" else ()),
    )


def _tensor_maps(problem: BackwardProblem, config: Config) -> tuple[TensorMapArgument, ...]:
    """Return the tensor maps of MAPPED, [heads of the batch, seq, head_dim].

    A box is a tile's rows by 64 columns; beyond a head's end it reads zeros.
    """
    p, row = problem, 2 * problem.head_dim

    def matrix(name: str, heads: int, seq: int, rows: int) -> TensorMapArgument:
        dims = (p.head_dim, seq, heads * p.batch)
        return TensorMapArgument(f"map_{name}", name, p.dtype, dims, (row, row * seq), (64, rows, 1), swizzle=128)

    queries = (p.heads, p.seq_q, int(config["tile_m"]))
    keys = (p.kv_heads, p.seq_k, int(config["tile_n"]))
    return matrix("q", *queries), matrix("k", *keys), matrix("v", *keys), matrix("dout", *queries)
