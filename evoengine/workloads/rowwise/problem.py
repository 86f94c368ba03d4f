"""The operators on rows: what each reads and writes, and the shape and dtypes of a problem."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod

from evoengine.devices.base import DTYPE_BYTES
from evoengine.errors import UsageError
from evoengine.records import Value
from evoengine.workloads.problem_text import read_parts

DTYPES = ("fp16", "bf16", "fp32")
EXAMPLE = "rowwise:softmax,rows8192,hidden4096,bf16"
INDEPENDENT = "many ordinary rows"
NORM_ROWS = ("a row of zeros", "a row of one constant", "one element far above all others", "values near 0",
             "a mean far above the deviation", "squares beyond a half")  # fmt: skip
EXPONENTIAL_ROWS = ("one element far above all others", "columns masked by -inf", "all columns masked but one",
                    "a row of one constant", "exponentials that overflow", "exponentials that vanish")  # fmt: skip
"""kinds of rows that cases of extreme rows have in turn"""


@dataclass(frozen=True, slots=True)
class Operator:
    """The tensors of an operator by name, each as `AXES dtype`, where dtype may be that of x or of the output."""

    inputs: Mapping[str, str]
    outputs: Mapping[str, str]
    flops: float
    """per element of x, by the formula: each of + · / exp √ counts"""
    kinds: tuple[str, ...]
    """of extreme rows or values, which cases must show"""
    eps: float = 0.0
    """added to a mean of squares; 0 for operators without one"""
    reduces: bool = True
    """whether an output depends on a whole row"""
    centred: bool = False
    """whether rows have a mean or a maximum, and then a sum of what differs from it"""


OPERATORS: Mapping[str, Operator] = {
    "layer_norm": Operator(
        {"x": "rows,hidden x", "weight": "hidden x", "bias": "hidden x"},
        {"y": "rows,hidden out"}, 8, NORM_ROWS, eps=1e-5, centred=True,
    ),
    "rms_norm": Operator(
        {"x": "rows,hidden x", "weight": "hidden x"}, {"y": "rows,hidden out"}, 4, NORM_ROWS, eps=1e-6
    ),
    "softmax": Operator({"x": "rows,hidden x"}, {"y": "rows,hidden out"}, 5, EXPONENTIAL_ROWS, centred=True),
    "cross_entropy": Operator(
        {"x": "rows,hidden x", "labels": "rows int32"}, {"loss": "rows fp32"}, 4,
        (*EXPONENTIAL_ROWS, "the first and the last label", "labels below 0", "labels beyond the last"), centred=True,
    ),
    "rope": Operator(
        {"x": "rows,hidden x", "positions": "rows int32", "cos_sin": "positions,head_dim fp32"},
        {"y": "rows,hidden out"}, 3, ("the first and the last position", "a position of several rows"), reduces=False,
    ),
    "silu_mul": Operator(
        {"x": "rows,both x"}, {"y": "rows,hidden out"}, 5,
        ("gates whose exponentials overflow", "gates of 0", "large gates"), reduces=False,
    ),
}  # fmt: skip # a table


@dataclass(frozen=True, slots=True)
class RowwiseProblem:
    """An operator on each row of x [rows, hidden], contiguous; of silu_mul x is [rows, 2 · hidden].

    `head_dim` and `positions` are of rope alone: columns of a head, and rows of cos_sin.
    """

    operator: str
    rows: int
    hidden: int
    dtype: str
    out_dtype: str
    head_dim: int = 0
    positions: int = field(default=0)

    def __str__(self) -> str:
        rope = f",d{self.head_dim},positions{self.positions}" if self.operator == "rope" else ""
        out = f",out_{self.out_dtype}" if self.out_dtype != self.dtype and self.operator != "cross_entropy" else ""
        return f"rowwise:{self.operator},rows{self.rows},hidden{self.hidden}{rope},{self.dtype}{out}"

    def variables(self) -> dict[str, Value]:
        """Return the names that a space's expressions and templates may use, with their values."""
        of = OPERATORS[self.operator]
        return {
            "operator": self.operator,
            "reduces": of.reduces,
            "centred": of.centred,
            "rows": self.rows,
            "hidden": self.hidden,
            # a thread turns a column of the first half of a head together with that of the second
            "columns": self.hidden // 2 if self.operator == "rope" else self.hidden,
            "head_dim": self.head_dim,
            "dtype": self.dtype,
            "out_dtype": self.out_dtype,
            "element_bytes": DTYPE_BYTES[self.dtype],
        }

    @property
    def of(self) -> Operator:
        return OPERATORS[self.operator]

    def tensor(self, name: str) -> tuple[tuple[int, ...], str]:
        """Return the shape and dtype of an input or output."""
        axes, _, dtype = {**self.of.inputs, **self.of.outputs}[name].partition(" ")
        sizes = {"rows": self.rows, "hidden": self.hidden, "both": 2 * self.hidden, "positions": self.positions,
                 "head_dim": self.head_dim}  # fmt: skip
        return tuple(sizes[axis] for axis in axes.split(",")), {"x": self.dtype, "out": self.out_dtype}.get(
            dtype, dtype
        )

    def bytes_of(self, name: str) -> int:
        """Return the bytes of a tensor, of cos_sin those of as many rows as there are positions to turn by."""
        shape, dtype = self.tensor(name)
        size = prod(shape) * DTYPE_BYTES[dtype]
        return size * min(self.rows, self.positions) // self.positions if name == "cos_sin" else size


def parse_problem(text: str) -> RowwiseProblem:
    """Parse `OPERATOR,rows8192,hidden4096,bf16`, of rope also `d128` and `positions4096`.

    Raises UsageError naming the part that is wrong and what would be right.
    """
    numbers = {"rows": "rows", "hidden": "hidden", "d": "head_dim", "positions": "positions"}
    words = {"operator": tuple(OPERATORS), "dtype": DTYPES, "out": tuple(f"out_{dtype}" for dtype in DTYPES)}
    sizes, chosen = read_parts(text, EXAMPLE, numbers, words, optional=("head_dim", "positions", "out"))
    operator, dtype = chosen["operator"], chosen["dtype"]
    out = chosen.get("out", f"out_{dtype}").removeprefix("out_")
    if operator == "cross_entropy" and "out" in chosen:
        raise UsageError(f"the problem {text!r} names the dtype of a loss, which is fp32: leave out_{out} out")
    if out not in (dtype, "fp32"):
        raise UsageError(f"the outputs of {dtype} are {dtype} or fp32: leave out_{out} out, or write out_fp32")
    found = RowwiseProblem(operator, sizes["rows"], sizes["hidden"], dtype, out)
    if operator != "rope":
        if extra := next(
            (name for part, name in numbers.items() if part in ("d", "positions") and name in sizes), None
        ):
            raise UsageError(f"the problem {text!r} gives {extra}, which only rope has: leave it out")
        return found
    head = sizes.get("head_dim", 128)
    if head % 2 or sizes["hidden"] % head:
        raise UsageError(
            f"rope turns pairs within heads: the columns of a head, d{head}, must be even and divide "
            f"hidden{sizes['hidden']}; write d and hidden as in rowwise:rope,rows8192,hidden4096,d128,bf16"
        )
    return RowwiseProblem(
        operator, sizes["rows"], sizes["hidden"], dtype, out, head, sizes.get("positions", sizes["rows"])
    )
