"""The shape, dtype, groups and epilogue of one product with 4-bit weights."""

from __future__ import annotations

from dataclasses import dataclass

from evoengine.errors import UsageError
from evoengine.records import Value
from evoengine.workloads.gemm.problem import BEHIND_SUMS, HALVES, NO_EPILOGUE, GemmProblem
from evoengine.workloads.problem_text import read_parts

EXAMPLE = "w4a16:m16,n4096,k4096,fp16,zeros"
GROUPS = (32, 64, 128)
USUAL_GROUP = 128
ZEROS = "zeros"
PACKED = 8
"""weights in a word, and a divisor of the columns of a problem"""
MIDDLE = 8
"""zero point of weights without a tensor of zero points"""


@dataclass(frozen=True, slots=True)
class W4A16Problem:
    """C = f(A·W + bias) with W[i, j] = (q[i, j] - z[i / group, j]) · scales[i / group, j].

    A is [m, k] and C [m, n], both of `dtype`, as are scales [k / group, n] and the bias [n], which is not a parameter
    where the epilogue has none. q has 4 bits, 0 to 15: `qweight` is int32 [k / 8, n], with q[8 r + e, j] in bits 4 e to
    4 e + 3 of element [r, j]. z has 4 bits, 0 to 15: `qzeros` is int32 [k / group, n / 8], with z[g, 8 c + e] in bits
    4 e to 4 e + 3 of element [g, c]; without `zeros` every z is 8. Weights may be rounded to `dtype`; the sum is
    float32 and is rounded once, behind the epilogue.
    """

    m: int
    n: int
    k: int
    dtype: str
    group: int = USUAL_GROUP
    zeros: bool = False
    epilogue: str = NO_EPILOGUE

    def __str__(self) -> str:
        words = [self.dtype]
        words += [] if self.group == USUAL_GROUP else [f"g{self.group}"]
        words += [ZEROS] if self.zeros else []
        words += [] if self.epilogue == NO_EPILOGUE else [self.epilogue]
        return f"w4a16:m{self.m},n{self.n},k{self.k},{','.join(words)}"

    @property
    def gemm(self) -> GemmProblem:
        """Return the product with 16-bit weights, [k, n]."""
        return GemmProblem(self.m, self.n, self.k, self.dtype, self.epilogue)

    @property
    def has_bias(self) -> bool:
        return self.gemm.has_bias

    def shape(self, tensor: str) -> tuple[int, ...]:
        """Return the shape of a, qweight, scales, qzeros, bias or c."""
        groups = self.k // self.group
        shapes: dict[str, tuple[int, ...]] = {
            "a": (self.m, self.k), "qweight": (self.k // PACKED, self.n), "scales": (groups, self.n),
            "qzeros": (groups, self.n // PACKED), "bias": (self.n,), "c": (self.m, self.n),
        }  # fmt: skip # a table
        return shapes[tensor]

    def variables(self) -> dict[str, Value]:
        """Return the names that a space's expressions and templates may use: those of a GEMM and of the weights."""
        return {**self.gemm.variables(), "group": self.group, "zeros": self.zeros}


def parse_problem(text: str) -> W4A16Problem:
    """Parse `m16,n4096,k4096,fp16[,g64][,zeros][,bias]`.

    Raises UsageError naming the part that is wrong and what would be right.
    """
    numbers = {"m": "m", "n": "n", "k": "k", "g": "group"}
    known = {"dtype": HALVES, ZEROS: (ZEROS,), "epilogue": BEHIND_SUMS}
    sizes, words = read_parts(text, EXAMPLE, numbers, known, ("group", ZEROS, "epilogue"))
    problem = W4A16Problem(
        sizes["m"], sizes["n"], sizes["k"], words["dtype"], sizes.get("group", USUAL_GROUP), ZEROS in words,
        words.get("epilogue", NO_EPILOGUE),
    )  # fmt: skip # in the order of the fields
    if why := _why_not(problem):
        raise UsageError(f"the problem {text!r} is invalid: {why}")
    return problem


def _why_not(p: W4A16Problem) -> str | None:
    """Return the rule that the sizes of a problem violate, with what would be right."""
    if p.group not in GROUPS:
        known = ", ".join(map(str, GROUPS))
        return f"groups are of {known} weights along k, not of {p.group}: write one of these behind g"
    if p.k % p.group:
        return f"k {p.k} is not a multiple of the group of {p.group}: {_nearest('k', p.k, p.group)}"
    if p.n % PACKED:
        return f"n {p.n} is not a multiple of the {PACKED} columns of a word: {_nearest('n', p.n, PACKED)}"
    return None


def _nearest(name: str, length: int, unit: int) -> str:
    below, above = length // unit * unit, -(-length // unit) * unit
    return f"the nearest are {name}{below} and {name}{above}" if below else f"the nearest is {name}{above}"
