"""State what RMS normalisation with a residual add costs and the cases a candidate must pass.

Nothing here needs a tensor library; the tensors themselves are drawn and judged in `tensors.py`.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from evoengine.devices.base import DTYPE_BYTES, Parameter, ScalarArgument, TensorParameter
from evoengine.records import Config, Launch, Plan
from evoengine.workloads.base import Case, FullSize, LaunchOf, Tensors, Tolerance, Workload
from evoengine.workloads.coverage import Cell, own_tail, remainder_cells, visited_remainders
from evoengine.workloads.rectangles import FullCase
from evoengine.workloads.rms_norm.problem import (
    DTYPES,
    EPS,
    EXAMPLE,
    EXTREMES,
    INDEPENDENT,
    KINDS,
    TWO_CONSTANTS,
    RmsNormProblem,
    parse_problem,
)

MANY_ROWS = 33
"""enough for sums over the errors of all rows, in the cases where those are independent"""
LATER_TURN = "a turn that is not whole behind a whole one"
MOST_ELEMENTS = 1 << 22
"""of x in a case with all rows of the problem, which takes about a second"""


class RmsNorm(Workload[RmsNormProblem]):
    name = "rms_norm"
    grammar = f"rows…,hidden…,{'|'.join(DTYPES)}"
    example = EXAMPLE
    compile_time = ("hidden", "dtype", "element_bytes")
    # In float32 the GPU's rsqrtf alone is off by up to two spacings; 16 bits are held closer by sums over many rows.
    tolerance = Tolerance(own=2.0, roundings=4.0)
    baseline_label = "torch"

    def parse(self, text: str) -> RmsNormProblem:
        return parse_problem(text)

    def flops(self, problem: RmsNormProblem) -> float:
        """Return five per element: the addition, a square and its sum, two products."""
        return 5.0 * problem.rows * problem.hidden

    def min_dram_bytes(self, problem: RmsNormProblem) -> float:
        """Return the bytes of x, residual and weight read once, and of y and residual_out written once."""
        return float(DTYPE_BYTES[problem.dtype]) * problem.hidden * (4 * problem.rows + 1)

    def cases(self, problem: RmsNormProblem, config: Config) -> tuple[Case[RmsNormProblem], ...]:
        """Return cases with the problem's own hidden, which a template may bake in, and rows set against a block's.

        Every candidate meets one row alone, whole blocks, a last block that is one row short or has one row only,
        what the problem itself leaves for its last block, and rows whose values overflow or vanish in 16 bits.
        """
        block = int(config.get("rows_per_block", 1)) * int(config.get("turns", 1))
        in_turn = int(config.get("rows_per_block", 1))
        own = own_tail(problem.rows, block)
        independent = "normal" if problem.dtype == "fp32" else "16 bits"

        def at(rows: int) -> RmsNormProblem:
            return replace(problem, rows=rows)

        found = [
            Case("one row", at(1)),
            Case("whole blocks", at(2 * block), "extreme rows" if 2 * block < KINDS else "constant rows"),
            Case("one row more", at(-(-MANY_ROWS // block) * block + 1), independent),
            Case("extreme rows, one row short", at(-(-(KINDS + 1) // block) * block - 1), "extreme rows"),
            Case("remainders", at(block + own), "constant rows"),
        ]
        if in_turn < block:
            found.append(Case("turns that have no row", at(block + in_turn + 1), "extreme rows"))
        if problem.rows * problem.hidden <= MOST_ELEMENTS:
            found.append(Case("own rows", at(problem.rows), "extreme rows", long=True))
        return tuple(replace(case, config=config, whole=problem) for case in found)

    def cells(self, problem: RmsNormProblem, config: Config) -> frozenset[Cell]:
        """Return remainders of rows, turns without a row, and what values must show."""
        if not {"rows_per_block", "turns"} <= config.keys():
            return frozenset()
        in_turn, block = int(config["rows_per_block"]), int(config["rows_per_block"]) * int(config["turns"])
        found = {
            *remainder_cells("rows", block, problem.rows, near=1),
            *(Cell("values", what) for what in (*EXTREMES, TWO_CONSTANTS)),
        }
        if problem.dtype != "fp32":
            found.add(Cell("values", INDEPENDENT))
        if in_turn + 1 < block:
            found.add(Cell("rows", LATER_TURN))
        if problem.rows * problem.hidden <= MOST_ELEMENTS:
            found.add(Cell("extents", "rows"))
        return frozenset(found)

    def visited(self, case: Case[RmsNormProblem], launch: Launch, visits: np.ndarray) -> frozenset[Cell]:
        """Return the cells that a case visits by its rows."""
        whole, rows = case.whole, case.problem.rows
        if whole is None or not {"rows_per_block", "turns"} <= case.config.keys():
            return frozenset()
        in_turn = int(case.config["rows_per_block"])
        block = in_turn * int(case.config["turns"])
        found = set(visited_remainders("rows", rows, block, whole.rows))
        if rows > block and rows % block > in_turn and rows % in_turn == 1 % in_turn:
            found.add(Cell("rows", LATER_TURN))
        if rows == whole.rows:
            found.add(Cell("extents", "rows"))
        return frozenset(found)

    def parameters(self, problem: RmsNormProblem, config: Config) -> tuple[Parameter, ...]:
        shape, dtype = (problem.rows, problem.hidden), problem.dtype
        return (
            TensorParameter("x", shape, dtype),
            TensorParameter("residual", shape, dtype),
            TensorParameter("weight", (problem.hidden,), dtype),
            TensorParameter("y", shape, dtype, output=True),
            TensorParameter("residual_out", shape, dtype, output=True),
            ScalarArgument("rows", np.int32(problem.rows)),
            ScalarArgument("eps", np.float32(EPS)),
        )

    def tensors(self) -> Tensors[RmsNormProblem]:
        from evoengine.workloads.rms_norm.tensors import RmsNormTensors

        return RmsNormTensors()

    def full_plan(self, problem: RmsNormProblem, config: Config, launch_of: LaunchOf) -> Plan:
        """Return the problem itself, where the configuration says how many rows are a block's."""
        if not {"rows_per_block", "turns"} <= config.keys():
            return ()
        return [(FullCase("full grid", problem, problem, config), launch_of(problem))]

    def full_size(self) -> FullSize[FullCase[RmsNormProblem]]:
        from evoengine.workloads.rms_norm.tensors import RmsNormFullSize

        return RmsNormFullSize(self)
