"""The shape, dtype and cache of one decode attention."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from evoengine.devices.base import DTYPE_BYTES, Parameter, ScalarArgument, ScratchParameter, TensorParameter
from evoengine.errors import UsageError
from evoengine.records import Config, Value, named
from evoengine.workloads.problem_text import LARGEST, read_parts, require_groups

DTYPES = ("fp16", "bf16")
CACHES = {"cache_fp8_e4m3": "fp8_e4m3", "cache_fp8_e5m2": "fp8_e5m2"}
"""dtypes of keys and values that differ from the queries'"""
LATENT, LATENT_V, LATENT_ROOT = 576, 512, 192
"""of latent attention, as DeepSeek has it: the elements of a key, those of its value, and the 128 + 64 of a key whose
matrix is not absorbed into the queries, by whose root logits are divided"""
HEAD_DIMS = (64, 128, 256, LATENT)
MOST = {"batch": 65_535, "heads": 4_095, "seq_q": 16}
"""batch and tiles of rows of heads are sizes of the grid along z and y, of which CUDA has 65,535"""
EXAMPLE = "decode:b32,h32,kv8,s8192,d128,bf16,page16"
WORDS = ("alibi", "sinks")
_NUMBERS = {
    "b": "batch", "h": "heads", "kv": "kv_heads", "sq": "seq_q", "s": "seq_k", "d": "head_dim", "page": "page",
    "window": "window", "softcap": "softcap",
}  # fmt: skip # a table


@dataclass(frozen=True, slots=True)
class DecodeProblem:
    """o = softmax(q kᵀ / √head_dim) v for each sequence, over as many of its cached keys as its length says.

    q and o are [batch, seq_q, heads, head_dim]. Without pages (`page` 0) k and v are [batch, seq_k, kv_heads,
    head_dim]; with them [pages, page, kv_heads, head_dim], and key j of sequence b is slot j % page of page
    block_table[b, j // page]. lengths [batch] and block_table [batch, ⌈seq_k / page⌉] are int32; lengths are from 0 to
    seq_k. Query i sees the keys up to i + length - seq_q, and of those the last `window`, if that is not 0; a query
    that sees none has an output of zeros. Heads that share a KV head are neighbours.

    With head_dim 576 attention is latent: there is one KV head, in place of k and v one cache kv, a value is the first
    512 elements of its key, o is [batch, seq_q, heads, 512], and logits are divided by √192.

    With `cache` the elements of k and v are of that FP8, and the keys and values of a KV head are those times
    k_scale[head] and v_scale[head], float32 [kv_heads].

    With `softcap` c a logit x is c·tanh(x / c) instead. With `alibi` slopes[head] times the distance from the query to
    the key, 0 or negative, is added to it. With `sinks` the sum of each head's weights has exp(sinks[head]) in
    addition. slopes and sinks are float32 [heads].
    """

    batch: int
    heads: int
    kv_heads: int
    seq_q: int
    seq_k: int
    head_dim: int
    dtype: str
    page: int = 0
    cache: str = ""
    window: int = 0
    softcap: int = 0
    alibi: bool = False
    sinks: bool = False

    def __str__(self) -> str:
        queries = f",sq{self.seq_q}" if self.seq_q > 1 else ""
        sizes = "".join(f",{n}{getattr(self, n)}" for n in ("page", "window", "softcap") if getattr(self, n))
        words = "".join(f",{word}" for word in WORDS if getattr(self, word))
        return (
            f"decode:b{self.batch},h{self.heads},kv{self.kv_heads},s{self.seq_k}{queries},d{self.head_dim},"
            f"{self.dtype}{f',cache_{self.cache}' if self.cache else ''}{sizes}{words}"
        )

    @property
    def latent(self) -> bool:
        """Return whether a value is a part of its key."""
        return self.head_dim == LATENT

    @property
    def head_dim_v(self) -> int:
        """Return the elements of a value, and of a row of o."""
        return LATENT_V if self.latent else self.head_dim

    @property
    def root(self) -> int:
        """Return the number by whose root products of queries and keys are divided."""
        return LATENT_ROOT if self.latent else self.head_dim

    @property
    def caches(self) -> tuple[str, ...]:
        """Return the names of the caches."""
        return ("kv",) if self.latent else ("k", "v")

    @property
    def key_bytes(self) -> int:
        """Return the bytes of an element of k or v."""
        return DTYPE_BYTES[self.cache or self.dtype]

    @property
    def keys(self) -> int:
        """Return the keys of a sequence that some query sees, of one that is as long as may be."""
        return min(self.seq_k, self.window + self.seq_q - 1) if self.window else self.seq_k

    @property
    def group(self) -> int:
        """Return the number of heads that share a KV head."""
        return self.heads // self.kv_heads

    @property
    def table_width(self) -> int:
        """Return the pages of the longest sequence; 0 without pages."""
        return -(-self.seq_k // self.page) if self.page else 0

    @property
    def pages(self) -> int:
        """Return the pages of the pool, which has room for sequences that are all as long as may be."""
        return self.batch * self.table_width

    def variables(self) -> dict[str, Value]:
        """Return the names that a space's expressions and templates may use, with their values."""
        sizes = "batch heads kv_heads group seq_q seq_k head_dim head_dim_v latent dtype".split()
        features = "cache key_bytes page keys window softcap alibi sinks".split()
        return named(self, sizes) | {"element_bytes": DTYPE_BYTES[self.dtype]} | named(self, features)


def parse_problem(text: str) -> DecodeProblem:
    """Parse `b32,h32,kv8,s8192[,sq4],d128,bf16[,cache_fp8_e4m3][,page16][,window1024][,softcap30][,alibi][,sinks]`.

    Raises UsageError naming the part that is wrong and what would be right.
    """
    if "page0" in [part.strip() for part in text.split(",")]:
        raise UsageError(
            f"the problem {text!r} has pages of 0 keys; give the page at least one, or leave it out for a cache "
            "without pages"
        )
    known = {"dtype": DTYPES, "cache": tuple(CACHES)} | {word: (word,) for word in WORDS}
    optional = ("seq_q", "page", "cache", "kv_heads", "window", "softcap", *WORDS)
    sizes, words = read_parts(text, EXAMPLE, _NUMBERS, known, optional)
    sizes.setdefault("kv_heads", 1 if sizes["head_dim"] == LATENT else sizes["heads"])
    sizes.setdefault("seq_q", 1)
    cache = CACHES[words["cache"]] if "cache" in words else ""
    problem = DecodeProblem(**sizes, dtype=words["dtype"], cache=cache, alibi="alibi" in words, sinks="sinks" in words)
    _check(problem, text)
    return problem


def _check(problem: DecodeProblem, text: str) -> None:
    for name, most in MOST.items():
        if getattr(problem, name) > most:
            raise UsageError(f"the problem {text!r} has {name} {getattr(problem, name)}; it must be from 1 to {most:,}")
    if problem.head_dim not in HEAD_DIMS:
        known = ", ".join(map(str, HEAD_DIMS))
        raise UsageError(f"the problem {text!r} has head_dim {problem.head_dim}; the templates cover {known}")
    if problem.latent and (problem.kv_heads > 1 or problem.cache):
        raise UsageError(
            f"the problem {text!r} has head_dim {LATENT}, of latent attention, which has one KV head and a cache of "
            "the queries' dtype; leave out kv and the cache's dtype"
        )
    require_groups(text, problem.heads, problem.kv_heads)
    if problem.seq_q > problem.seq_k:
        raise UsageError(
            f"the problem {text!r} has {problem.seq_q} queries of each sequence and {problem.seq_k} keys; keys, which "
            "include those of the queries, must be at least as many"
        )
    slots = problem.pages * problem.page or problem.batch * problem.seq_k
    if slots > LARGEST:
        raise UsageError(
            f"the problem {text!r} has a cache of {slots:,} keys; kernels number them by int32, of which the largest "
            f"is {LARGEST:,}"
        )


SCALES = ("k_scale", "v_scale")
"""inputs of a cache in FP8, with a number for each KV head"""


def of_heads(problem: DecodeProblem) -> list[str]:
    """Return the names of the inputs that have a number for each head."""
    return [name for name, asked in (("slopes", problem.alibi), ("sinks", problem.sinks)) if asked]


COMBINED = ("partial", "states", "o", "heads")
"""parameters of the kernel that combines splits"""


def parameters(problem: DecodeProblem, config: Config) -> tuple[Parameter, ...]:
    """Return the parameters of the first kernel, which are all that a candidate has, in order."""
    p = problem
    queries = (p.batch, p.seq_q, p.heads)
    cache = (p.pages, p.page) if p.page else (p.batch, p.seq_k)
    table = [TensorParameter("block_table", (p.batch, p.table_width), "int32")] if p.page else []
    return (
        TensorParameter("q", (*queries, p.head_dim), p.dtype),
        *(TensorParameter(name, (*cache, p.kv_heads, p.head_dim), p.cache or p.dtype) for name in p.caches),
        *table,
        TensorParameter("lengths", (p.batch,), "int32"),
        *(TensorParameter(name, (p.kv_heads,), "fp32") for name in SCALES if p.cache),
        *(TensorParameter(name, (p.heads,), "fp32") for name in of_heads(p)),
        TensorParameter("o", (*queries, p.head_dim_v), p.dtype, output=True),
        *_scratch(p, config),
        ScalarArgument("heads", np.int32(p.heads)),
        ScalarArgument("kv_heads", np.int32(p.kv_heads)),
        ScalarArgument("seq_q", np.int32(p.seq_q)),
        ScalarArgument("slots", np.int32(p.table_width or p.seq_k)),
        ScalarArgument("scale", np.float32(1.0 / math.sqrt(p.root))),
    )


def block_rows(config: Config) -> int:
    """Return the rows of a block; 16 where the configuration does not say."""
    return int(config.get("tile_m", 16)) * int(config.get("row_warps", 1))


def _scratch(problem: DecodeProblem, config: Config) -> tuple[ScratchParameter, ...]:
    """Return what splits leave for whoever combines them: outputs, states, and how many have arrived."""
    splits = int(config.get("splits", 1))
    if splits == 1:
        return ()
    rows = problem.batch * problem.seq_q * problem.heads
    parts = (
        ScratchParameter("partial", (rows, splits, problem.head_dim_v), "fp32"),
        ScratchParameter("states", (rows, splits, 2), "fp32"),
    )
    if "combine_warps" in config:
        return parts
    row_tiles = -(-problem.group * problem.seq_q // block_rows(config))
    return *parts, ScratchParameter("arrived", (problem.batch, problem.kv_heads * row_tiles), "int32", zeroed=True)
