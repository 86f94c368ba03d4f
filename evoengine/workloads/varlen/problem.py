"""The lengths, heads, dtype, mask and layout of one attention forward pass over packed sequences."""

from __future__ import annotations

from dataclasses import dataclass, field

from evoengine.devices.base import DTYPE_BYTES
from evoengine.errors import UsageError
from evoengine.records import Value, named
from evoengine.workloads.attention.problem import DTYPES, HEAD_DIMS
from evoengine.workloads.problem_text import LARGEST, read_parts, read_runs, require_groups, written_runs

EXAMPLE = "varlen:h32,kv8,d128,bf16,causal,lens=512+37+2048"
MOST_HEADS = 65_535
"""limit of the heads, which are a size of the grid along y"""
MOST_ROW = 1 << 23
"""limit of the elements of a row of all heads: kernels compute offsets within a tile in int32"""
MOST_SEQUENCES = 65_536
TILE_ROWS = (64, 128, 192)
"""heights of tiles for which a space may ask the number of tiles"""

_NUMBERS = {"h": "heads", "kv": "kv_heads", "d": "head_dim", "page": "page", "pool": "pool"}
_LISTS = ("lens", "kvlens")
_KNOWN = {"dtype": DTYPES, "mask": ("causal",)}
_OPTIONAL = ("kv_heads", "page", "pool", "mask", "kvlens")


@dataclass(frozen=True, slots=True)
class VarlenProblem:
    """Attention forward of each sequence by itself: O = softmax(Q Kᵀ / √head_dim) V.

    Q and O are [total_q, heads, head_dim], the rows of sequence s from cu_q[s] to cu_q[s + 1]. K and V are [pool,
    kv_heads, head_dim], packed likewise by cu_kv, or with pages [pool, page, kv_heads, head_dim]: key i of sequence s
    is row i % page of page table[s, i // page]. With `causal`, query i of a sequence sees keys up to i + kv_len -
    q_len: its queries are the last rows. A query that sees no key has zeros for output. `order` lists the sequences,
    those with most queries first.
    """

    heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    lens: tuple[int, ...]
    """queries of each sequence"""
    kv_lens: tuple[int, ...]
    causal: bool = False
    page: int = 0
    """rows of a page of K and V; 0 if they are packed"""
    pool: int = field(default=0)
    """rows of K and V, or pages; 0 for as many as the sequences need"""

    def __post_init__(self) -> None:
        if not self.pool:
            object.__setattr__(self, "pool", self.needed)

    def __str__(self) -> str:
        parts = [f"h{self.heads}"]
        parts += [] if self.kv_heads == self.heads else [f"kv{self.kv_heads}"]
        parts += [f"d{self.head_dim}", self.dtype]
        parts += ["causal"] if self.causal else []
        parts.append(f"lens={written_runs(self.lens)}")
        parts += [] if self.kv_lens == self.lens else [f"kvlens={written_runs(self.kv_lens)}"]
        parts += [f"page{self.page}"] if self.page else []
        parts += [f"pool{self.pool}"] if self.pool != self.needed else []
        return f"varlen:{','.join(parts)}"

    @property
    def sequences(self) -> int:
        return len(self.lens)

    @property
    def total_q(self) -> int:
        return sum(self.lens)

    @property
    def total_kv(self) -> int:
        return sum(self.kv_lens)

    @property
    def needed(self) -> int:
        """Return the rows of K and V that the sequences have, or the pages that they need, at least one."""
        return max(1, sum(self.pages_of(s) for s in range(self.sequences)) if self.page else self.total_kv)

    @property
    def table_width(self) -> int:
        """Return the pages of the longest sequence, at least one; for problems with pages."""
        return max(1, *(self.pages_of(s) for s in range(self.sequences)))

    def pages_of(self, sequence: int) -> int:
        return -(-self.kv_lens[sequence] // self.page)

    @property
    def order(self) -> tuple[int, ...]:
        """Return the sequences, those with the most queries first, and among equal ones those with the most keys."""
        return tuple(sorted(range(self.sequences), key=lambda s: (-self.lens[s], -self.kv_lens[s])))

    def row_tiles(self, rows: int) -> int:
        """Return the number of tiles of so many rows of all sequences, of one head."""
        return sum(-(-length // rows) for length in self.lens)

    @property
    def scores(self) -> float:
        """Return the scores of one head that are not masked, counted by area: half of a square's under a mask."""
        return sum(_area(q, k) if self.causal else q * k for q, k in zip(self.lens, self.kv_lens, strict=True))

    def variables(self) -> dict[str, Value]:
        """Return the names that a space's expressions and templates may use, with their values."""
        return {
            **named(self, ("heads", "kv_heads", "head_dim")),
            "head_dim_v": self.head_dim,
            "dtype": self.dtype,
            "element_bytes": DTYPE_BYTES[self.dtype],
            **named(self, ("causal", "page")),
            "most_rows": max(self.total_q, self.pool * max(1, self.page)),
            **named(self, ("sequences", "total_q", "total_kv")),
            "mean_keys": max(1, round(self.scores / max(1, self.total_q))),
            **{f"row_tiles_{rows}": self.row_tiles(rows) for rows in TILE_ROWS},
        }


def _area(q: int, k: int) -> float:
    return q * k - q * q / 2 if k >= q else k * k / 2


def parse_problem(text: str) -> VarlenProblem:
    """Parse `h32[,kv8],d128,bf16[,causal],lens=512+37+16x2048[,kvlens=…][,page16][,pool…]`.

    `16x2048` are 16 sequences of that length. Raises UsageError naming the part that is wrong and what would be right.
    """
    sizes, words = read_parts(text, EXAMPLE, _NUMBERS, _KNOWN, _OPTIONAL, _LISTS)
    lists = {
        name: tuple(read_runs(words[name], name, text, "sequences", MOST_SEQUENCES)) for name in _LISTS if name in words
    }
    require_groups(text, sizes["heads"], sizes.get("kv_heads", sizes["heads"]))
    if why := _why_not(sizes, lists):
        raise UsageError(f"the problem {text!r} is invalid: {why}")
    problem = VarlenProblem(
        sizes["heads"], sizes.get("kv_heads", sizes["heads"]), sizes["head_dim"], words["dtype"], lists["lens"],
        lists.get("kvlens", lists["lens"]), "mask" in words, sizes.get("page", 0), sizes.get("pool", 0),
    )  # fmt: skip # in the order of the fields
    if problem.pool < problem.needed:
        unit = f"pages of {problem.page}" if problem.page else "rows"
        raise UsageError(
            f"the problem {text!r} has a pool of {problem.pool} {unit}, and its sequences need {problem.needed}: "
            "leave pool out, or make it larger"
        )
    return problem


def _why_not(sizes: dict[str, int], lists: dict[str, tuple[int, ...]]) -> str | None:
    """Return the rule that the parts of a problem break, with what would be right."""
    heads, kv_heads = sizes["heads"], sizes.get("kv_heads", sizes["heads"])
    for name, size in (("heads", heads), ("kv_heads", kv_heads)):
        if size > MOST_HEADS:
            return f"{name} is {size}; it must be from 1 to {MOST_HEADS}"
    if sizes["head_dim"] not in HEAD_DIMS:
        return f"head_dim is {sizes['head_dim']}; the templates cover {', '.join(map(str, HEAD_DIMS))}"
    if heads * sizes["head_dim"] > MOST_ROW:
        return f"a row of all heads has {heads * sizes['head_dim']} elements; it may have {MOST_ROW}"
    lens, kv_lens = lists["lens"], lists.get("kvlens", lists["lens"])
    if len(lens) != len(kv_lens):
        return f"lens names {len(lens)} lengths and kvlens {len(kv_lens)}; each sequence has one of either"
    for name, own in (("lens", lens), ("kvlens", kv_lens)):
        if sum(own) > LARGEST:
            return f"{name} add up to {sum(own)} rows; they must be at most {LARGEST}, as cumulative lengths are int32"
    if not sum(lens):
        return "no sequence has a query; at least one of lens must be 1 or more"
    return None
