"""RMS normalisation fused with a residual add: residual_out = x + residual, y = rms_norm(residual_out)·weight.

Nothing here needs a tensor library; the tensors themselves are drawn and judged in `tensors.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from evoengine.devices.base import DTYPE_BYTES, Parameter, ScalarArgument, TensorParameter
from evoengine.records import Config, Plan, Value
from evoengine.space.symbol import int32, symbol
from evoengine.workloads.base import Case, FullSize, LaunchOf, Tensors, Tolerance, Workload
from evoengine.workloads.coverage import Cell
from evoengine.workloads.full_size import FullCase
from evoengine.workloads.problem_text import read_parts
from evoengine.workloads.rows import has_rows, row_cases, row_cells, visited_rows

DTYPES = ("fp16", "bf16", "fp32")
EXAMPLE = "rms_norm:rows4096,hidden4096,bf16"
EPS = 1e-6
"""added to the mean of the squares, as in Llama"""
KINDS = 7
"""number of kinds of rows in the case of extreme rows"""
EXTREMES = (
    "an element far above all others",
    "a row of zeros",
    "squares as small as eps",
    "squares beyond a half",
    "sums that all but cancel out",
    "a row of one constant",
)
TWO_CONSTANTS = "rows of one size in one half and another in the other, unlike their neighbours'"
INDEPENDENT = "many ordinary rows"
"""the faults that the values of cases show"""


@dataclass(frozen=True, slots=True)
class RmsNormProblem:
    """residual_out = x + residual and y = residual_out / √(mean(residual_out²) + eps) · weight, row by row.

    x, residual, y and residual_out are [rows, hidden], weight [hidden], all contiguous and of one dtype.
    """

    rows: int
    hidden: int
    dtype: str

    def __str__(self) -> str:
        return f"rms_norm:rows{self.rows},hidden{self.hidden},{self.dtype}"

    def variables(self) -> dict[str, Value]:
        """Return the names that a space's expressions and templates may use, with their values."""
        return {"rows": self.rows, "hidden": self.hidden, "dtype": self.dtype, "element_bytes": DTYPE_BYTES[self.dtype]}


def parse_problem(text: str) -> RmsNormProblem:
    """Parse `rows4096,hidden4096,bf16`.

    Raises UsageError naming the part that is wrong and what would be right.
    """
    sizes, words = read_parts(text, EXAMPLE, {"rows": "rows", "hidden": "hidden"}, {"dtype": DTYPES})
    return RmsNormProblem(sizes["rows"], sizes["hidden"], words["dtype"])


class RmsNorm(Workload[RmsNormProblem]):
    name = "rms_norm"
    grammar = f"rows…,hidden…,{'|'.join(DTYPES)}"
    example = EXAMPLE
    compile_time = ("hidden", "dtype", "element_bytes")
    # In float32 the GPU's rsqrtf alone is off by up to two spacings; 16 bits are held closer by sums over many rows.
    tolerance = Tolerance(own=2.0, roundings=4.0)
    baseline_label = "torch"

    parse = staticmethod(parse_problem)
    visited = staticmethod(visited_rows)

    def flops(self, problem: RmsNormProblem) -> float:
        """Return five per element: the addition, a square and its sum, two products."""
        return 5.0 * problem.rows * problem.hidden

    def min_dram_bytes(self, problem: RmsNormProblem) -> float:
        """Return the bytes of x, residual and weight read once, and of y and residual_out written once."""
        return float(DTYPE_BYTES[problem.dtype]) * problem.hidden * (4 * problem.rows + 1)

    def cases(self, problem: RmsNormProblem, config: Config) -> tuple[Case[RmsNormProblem], ...]:
        """Return cases with the problem's own hidden, which a template may bake in, and rows set against a block's.

        Some have rows whose values overflow or vanish in 16 bits.
        """
        independent = "normal" if problem.dtype == "fp32" else "16 bits"
        return tuple(
            Case(c.name, replace(problem, rows=c.rows), c.draw, config, c.long, whole=problem)
            for c in row_cases(problem.rows, problem.hidden, config, KINDS, independent)
        )

    def cells(self, problem: RmsNormProblem, config: Config) -> frozenset[Cell]:
        values = (*EXTREMES, TWO_CONSTANTS, *(() if problem.dtype == "fp32" else (INDEPENDENT,)))
        return row_cells(problem.rows, problem.hidden, config, values)

    def parameters(self, problem: RmsNormProblem, config: Config) -> tuple[Parameter, ...]:
        shape, dtype = (problem.rows, problem.hidden), problem.dtype
        return (
            TensorParameter("x", shape, dtype),
            TensorParameter("residual", shape, dtype),
            TensorParameter("weight", (problem.hidden,), dtype),
            TensorParameter("y", shape, dtype, output=True),
            TensorParameter("residual_out", shape, dtype, output=True),
            ScalarArgument("rows", int32(problem.rows)),
            ScalarArgument("eps", np.float32(EPS)),
        )

    def at_run_time(self, problem: RmsNormProblem) -> RmsNormProblem:
        return replace(problem, rows=symbol("rows"))

    def tensors(self) -> Tensors[RmsNormProblem]:
        from evoengine.workloads.rms_norm.tensors import RmsNormTensors

        return RmsNormTensors()

    def full_plan(self, problem: RmsNormProblem, config: Config, launch_of: LaunchOf) -> Plan:
        """Return the problem itself, where the configuration says how many rows are a block's."""
        if not has_rows(config):
            return ()
        return [(FullCase("full grid", problem, problem, config), launch_of(problem))]

    def full_size(self) -> FullSize[FullCase[RmsNormProblem]]:
        from evoengine.workloads.rms_norm.tensors import RmsNormFullSize

        return RmsNormFullSize(self)


WORKLOAD = RmsNorm()
