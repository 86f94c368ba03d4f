"""Operators on the rows of a tensor: norms, softmax, cross-entropy, rotary positions, gated activations.

Nothing here needs a tensor library; the tensors themselves are drawn and judged in `tensors.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod

import numpy as np

from evoengine.devices.base import DTYPE_BYTES, Parameter, ScalarArgument, TensorParameter
from evoengine.errors import UsageError
from evoengine.records import Config, Plan, Value
from evoengine.space.symbol import int32, symbol
from evoengine.workloads.base import Case, FullSize, LaunchOf, Tensors, Tolerance, Workload
from evoengine.workloads.coverage import Cell
from evoengine.workloads.full_size import FullCase
from evoengine.workloads.problem_text import read_parts
from evoengine.workloads.rows import has_rows, row_cases, row_cells, visited_rows

DTYPES = ("fp16", "bf16", "fp32")
EXAMPLE = "rowwise:softmax,rows8192,hidden4096,bf16"
INDEPENDENT = "many ordinary rows"
NORM_ROWS = ("a row of zeros", "a row of one constant", "one element far above all others", "values near 0",
             "a mean far above the deviation", "squares beyond a half")  # fmt: skip
EXPONENTIAL_ROWS = ("one element far above all others", "columns masked by -inf", "all columns masked but one",
                    "a row of one constant", "exponentials that overflow", "exponentials that vanish")  # fmt: skip
"""number of kinds of rows that follow one another in cases of extreme rows"""


@dataclass(frozen=True, slots=True)
class Operator:
    """The tensors of an operator by name, each as `AXES dtype`, where dtype may be that of x or of the output."""

    inputs: Mapping[str, str]
    outputs: Mapping[str, str]
    flops: float
    """operations per element of x by the formula: each of + · / exp √ counts"""
    kinds: tuple[str, ...]
    """kinds of extreme rows or values that cases must show"""
    eps: float = 0.0
    """added to a mean of squares; 0 for operators without one"""
    reduces: bool = True
    """whether an output depends on a whole row"""
    centred: bool = False
    """whether rows have a mean or a maximum, and then a sum of the differences from it"""


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
    """An operator on each row of x [rows, hidden], contiguous; for silu_mul x is [rows, 2 · hidden].

    `head_dim` and `positions` exist only for rope: columns of a head, and rows of cos_sin.
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
            # a thread rotates a column of the first half of a head together with that of the second
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
        """Return the bytes of a tensor; for cos_sin, those of the rows that x can use."""
        shape, dtype = self.tensor(name)
        size = prod(shape) * DTYPE_BYTES[dtype]
        return size * min(self.rows, self.positions) // self.positions if name == "cos_sin" else size


def parse_problem(text: str) -> RowwiseProblem:
    """Parse `OPERATOR,rows8192,hidden4096,bf16`, for rope also `d128` and `positions4096`.

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


PREDICTED_BELOW = 64
"""integers of a prediction's inputs that no workload gives"""
FEW_POSITIONS = 24
"""positions in cases, few enough that several rows have the same"""
MOST_DRAWN = 1 << 26
"""limit of the elements of labels, of positions and of cos_sin, up to which the problem itself is judged"""


class Rowwise(Workload[RowwiseProblem]):
    name = "rowwise"
    grammar = f"{'|'.join(OPERATORS)},rows…,hidden…,[d…,positions…,]{'|'.join(DTYPES)}[,out_fp32]"
    example = EXAMPLE
    compile_time = ("operator", "reduces", "centred", "hidden", "columns", "head_dim", "dtype", "out_dtype")
    # In float32 rsqrtf and ex2.approx alone are off by up to two spacings.
    tolerance = Tolerance(own=2.0, roundings=4.0)
    baseline_label = "torch"

    parse = staticmethod(parse_problem)
    visited = staticmethod(visited_rows)

    def flops(self, problem: RowwiseProblem) -> float:
        return problem.of.flops * problem.rows * problem.hidden

    def min_dram_bytes(self, problem: RowwiseProblem) -> float:
        """Return the bytes of every input read once, and of every output written once."""
        return float(sum(map(problem.bytes_of, (*problem.of.inputs, *problem.of.outputs))))

    def cases(self, problem: RowwiseProblem, config: Config) -> tuple[Case[RowwiseProblem], ...]:
        """Return cases with the problem's own columns, which are constants of a template, and rows for a block's."""
        independent = "normal" if problem.out_dtype == "fp32" else "16 bits"

        def at(rows: int) -> RowwiseProblem:
            return replace(problem, rows=rows, positions=min(problem.positions, FEW_POSITIONS))

        kinds = len(problem.of.kinds) + 1
        return tuple(
            Case(c.name, at(c.rows), c.draw, config, c.long, whole=problem)
            for c in row_cases(problem.rows, problem.hidden, config, kinds, independent)
        )

    def cells(self, problem: RowwiseProblem, config: Config) -> frozenset[Cell]:
        return row_cells(problem.rows, problem.hidden, config, (*problem.of.kinds, INDEPENDENT))

    def parameters(self, problem: RowwiseProblem, config: Config) -> tuple[Parameter, ...]:
        of = problem.of
        tensors = [TensorParameter(n, *problem.tensor(n), output=n in of.outputs) for n in (*of.inputs, *of.outputs)]
        eps = (ScalarArgument("eps", np.float32(of.eps)),) if of.eps else ()
        return (*tensors, ScalarArgument("rows", int32(problem.rows)), *eps)

    def indices(self, problem: RowwiseProblem, config: Config, seed: int) -> Mapping[str, np.ndarray]:
        """Return positions or labels that lie within few rows of cos_sin, or few columns.

        A prediction draws integers below PREDICTED_BELOW itself.
        """
        most = {"positions": problem.positions, "labels": problem.hidden}
        rng = np.random.default_rng(seed)
        return {
            name: rng.integers(0, most[name], problem.rows, np.int32).view(np.uint8)
            for name in problem.of.inputs
            if most.get(name, PREDICTED_BELOW) < PREDICTED_BELOW
        }

    def at_run_time(self, problem: RowwiseProblem) -> RowwiseProblem:
        return replace(problem, rows=symbol("rows"))

    def tensors(self) -> Tensors[RowwiseProblem]:
        from evoengine.workloads.rowwise.tensors import RowwiseTensors

        return RowwiseTensors()

    def full_plan(self, problem: RowwiseProblem, config: Config, launch_of: LaunchOf) -> Plan:
        """Return the problem itself, if the configuration states how many rows a block has."""
        drawn = max(problem.rows, problem.positions * problem.head_dim)
        if not has_rows(config) or (set(problem.of.inputs) & {"labels", "positions"} and drawn > MOST_DRAWN):
            return ()
        whole = FullCase("full grid", problem, problem, config, cluster=int(config.get("cluster", 1)))
        return [(whole, launch_of(problem))]

    def full_size(self) -> FullSize[FullCase[RowwiseProblem]]:
        from evoengine.workloads.rowwise.tensors import RowwiseFullSize

        return RowwiseFullSize(self)


WORKLOAD = Rowwise()
