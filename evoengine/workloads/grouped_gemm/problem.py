"""The groups, shape, layout and dtype of one grouped matrix product."""

from __future__ import annotations

from dataclasses import dataclass

from evoengine.errors import UsageError
from evoengine.records import Value
from evoengine.workloads.gemm.problem import B_LAYOUTS, DTYPES, OUT_DTYPES, SCALES, GemmProblem, why_not
from evoengine.workloads.problem_text import LARGEST, read_parts, read_runs, written_runs

EXAMPLE = "grouped-gemm:rows=512+37+0+2048,n4096,k2048,bf16,b_nk"
MOST_GROUPS = 65_536
TILE_ROWS = (16, 32, 64, 128, 256, 512)
"""heights of tiles for which a space may ask the number of tiles"""


@dataclass(frozen=True, slots=True)
class GroupedGemmProblem:
    """C = A·B[g] for the rows of each group g.

    A is [m, k] and C [m, n]; the rows of group g are those from ends[g - 1] (0 for the first) to ends[g]. `ends` is
    int32 [groups], on the GPU. B is [groups, k, n] or [groups, n, k]. Rows of A behind the last group do not count,
    and those of C are not written. dtypes, sums, roundings and scales are those of a GEMM of each group. Scales of
    bytes: `tensor`: scale_a and scale_b [groups]; `row`: scale_a [m], scale_b [groups, n]; `block`: scale_a [k/128, m]
    and scale_b [groups, n/128, k/128], rounded up.
    """

    rows: tuple[int, ...]
    """rows of each group"""
    n: int
    k: int
    dtype: str
    b_layout: str = "kn"
    out_dtype: str = ""
    """empty for `dtype`, or for bf16 if `dtype` has one byte"""
    scales: str = ""
    """empty for `tensor` if `dtype` has one byte, otherwise for none"""
    m: int = 0
    """rows of A and C; 0 for those that the groups have"""

    def __post_init__(self) -> None:
        if not self.m:
            object.__setattr__(self, "m", self.total)
        object.__setattr__(self, "out_dtype", self.whole.out_dtype)
        object.__setattr__(self, "scales", self.whole.scales)

    def __str__(self) -> str:
        _, _, of_gemm = str(self.whole).partition(",")
        rows = (
            f"m{self.m},rows={written_runs(self.rows)}" if self.m != self.total else f"rows={written_runs(self.rows)}"
        )
        return f"grouped-gemm:{rows},{of_gemm}"

    @property
    def groups(self) -> int:
        return len(self.rows)

    @property
    def total(self) -> int:
        """Return the rows of all groups."""
        return sum(self.rows)

    @property
    def whole(self) -> GemmProblem:
        """Return the GEMM of all rows of A by one entry of B."""
        return self._gemm(self.m)

    def of_group(self, group: int) -> GemmProblem:
        """Return the GEMM of a group's rows by its entry of B."""
        return self._gemm(self.rows[group])

    def rows_of(self, group: int) -> slice:
        first = sum(self.rows[:group])
        return slice(first, first + self.rows[group])

    def scale_shape(self, operand: str) -> tuple[int, ...]:
        """Return the shape of the scales of a or b."""
        own = self.whole.scale_shape(operand)
        if self.scales == "tensor":
            return (self.groups,)
        return own if operand == "a" else (self.groups, *own)

    def row_tiles(self, rows: int) -> int:
        """Return the number of tiles of so many rows of all groups."""
        return sum(-(-own // rows) for own in self.rows)

    def variables(self) -> dict[str, Value]:
        """Return the names that a space's expressions and templates may use: those of a GEMM and of the groups."""
        of_gemm = self.whole.variables()
        tiles = {f"row_tiles_{rows}": self.row_tiles(rows) for rows in TILE_ROWS}
        return {**of_gemm, "groups": self.groups, "total": self.total, **tiles}

    def _gemm(self, rows: int) -> GemmProblem:
        return GemmProblem(
            rows, self.n, self.k, self.dtype, b_layout=self.b_layout, out_dtype=self.out_dtype, scales=self.scales
        )


def parse_problem(text: str) -> GroupedGemmProblem:
    """Parse `rows=512+37+6x128,n4096,k7168,bf16[,b_nk][,m…][,out_fp32][,block_scales]`.

    Raises UsageError naming the part that is wrong and what would be right.
    """
    numbers = {"n": "n", "k": "k", "m": "m"}
    known = {"dtype": DTYPES, "b_layout": tuple(B_LAYOUTS), "out_dtype": tuple(OUT_DTYPES), "scales": tuple(SCALES)}
    sizes, words = read_parts(text, EXAMPLE, numbers, known, ("m", "b_layout", "out_dtype", "scales"), ("rows",))
    rows = tuple(read_runs(words["rows"], "rows", text, "groups", MOST_GROUPS))
    if not 1 <= sum(rows) <= LARGEST:
        raise UsageError(f"the problem {text!r} has {sum(rows)} rows in all groups; they must be from 1 to {LARGEST}")
    if sizes.get("m", sum(rows)) < sum(rows):
        raise UsageError(
            f"the problem {text!r} has groups of {sum(rows)} rows in all, and A has m {sizes['m']}: leave m out, or "
            "make it larger"
        )
    problem = GroupedGemmProblem(
        rows, sizes["n"], sizes["k"], words["dtype"], B_LAYOUTS[words.get("b_layout", "b_kn")],
        OUT_DTYPES.get(words.get("out_dtype", ""), ""), SCALES.get(words.get("scales", ""), ""), sizes.get("m", 0),
    )  # fmt: skip # in the order of the fields
    if why := why_not(problem.whole):
        raise UsageError(f"the problem {text!r} is invalid: {why}")
    return problem
