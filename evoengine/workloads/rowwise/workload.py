"""State what operators on rows cost and the cases a candidate must pass.

Nothing here needs a tensor library; the tensors themselves are drawn and judged in `tensors.py`.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from evoengine.devices.base import Parameter, ScalarArgument, TensorParameter
from evoengine.records import Config, Launch, Plan
from evoengine.space.symbol import int32, symbol
from evoengine.workloads.base import Case, FullSize, LaunchOf, Tensors, Tolerance, Workload
from evoengine.workloads.coverage import Cell
from evoengine.workloads.rectangles import FullCase
from evoengine.workloads.rows import has_rows, row_cases, row_cells, visited_rows
from evoengine.workloads.rowwise.problem import (
    DTYPES,
    EXAMPLE,
    INDEPENDENT,
    OPERATORS,
    RowwiseProblem,
    parse_problem,
)

FEW_POSITIONS = 24
"""of the cases, so that several rows have the same"""
MOST_DRAWN = 1 << 26
"""elements of labels, of positions and of cos_sin, up to which the problem itself is judged"""


class Rowwise(Workload[RowwiseProblem]):
    name = "rowwise"
    grammar = f"{'|'.join(OPERATORS)},rows…,hidden…,[d…,positions…,]{'|'.join(DTYPES)}[,out_fp32]"
    example = EXAMPLE
    compile_time = ("operator", "reduces", "centred", "hidden", "columns", "head_dim", "dtype", "out_dtype")
    # In float32 rsqrtf and ex2.approx alone are off by up to two spacings.
    tolerance = Tolerance(own=2.0, roundings=4.0)
    baseline_label = "torch"

    def parse(self, text: str) -> RowwiseProblem:
        return parse_problem(text)

    def flops(self, problem: RowwiseProblem) -> float:
        return problem.of.flops * problem.rows * problem.hidden

    def min_dram_bytes(self, problem: RowwiseProblem) -> float:
        """Return the bytes of every input read once, and of every output written once."""
        return float(sum(map(problem.bytes_of, (*problem.of.inputs, *problem.of.outputs))))

    def cases(self, problem: RowwiseProblem, config: Config) -> tuple[Case[RowwiseProblem], ...]:
        """Return cases with the problem's own columns, which a template bakes in, and rows set against a block's."""
        independent = "normal" if problem.out_dtype == "fp32" else "16 bits"

        def at(rows: int) -> RowwiseProblem:
            return replace(problem, rows=rows, positions=min(problem.positions, FEW_POSITIONS))

        kinds = len(problem.of.kinds) + 1
        return tuple(
            Case(c.name, at(c.rows), c.draw, config, c.long, whole=problem)
            for c in row_cases(problem.rows, problem.hidden, config, kinds, independent)
        )

    def cells(self, problem: RowwiseProblem, config: Config) -> frozenset[Cell]:
        """Return remainders of rows, turns without a row, and what values must show."""
        if not has_rows(config):
            return frozenset()
        values = (*problem.of.kinds, INDEPENDENT)
        return frozenset({*row_cells(problem.rows, problem.hidden, config), *(Cell("values", what) for what in values)})

    def visited(self, case: Case[RowwiseProblem], launch: Launch, visits: np.ndarray) -> frozenset[Cell]:
        """Return the cells that a case visits by its rows."""
        if case.whole is None or not has_rows(case.config):
            return frozenset()
        return frozenset(visited_rows(case.problem.rows, case.whole.rows, case.config))

    def parameters(self, problem: RowwiseProblem, config: Config) -> tuple[Parameter, ...]:
        of = problem.of
        tensors = [TensorParameter(n, *problem.tensor(n), output=n in of.outputs) for n in (*of.inputs, *of.outputs)]
        eps = (ScalarArgument("eps", np.float32(of.eps)),) if of.eps else ()
        return (*tensors, ScalarArgument("rows", int32(problem.rows)), *eps)

    def at_run_time(self, problem: RowwiseProblem) -> RowwiseProblem:
        return replace(problem, rows=symbol("rows"))

    def tensors(self) -> Tensors[RowwiseProblem]:
        from evoengine.workloads.rowwise.tensors import RowwiseTensors

        return RowwiseTensors()

    def full_plan(self, problem: RowwiseProblem, config: Config, launch_of: LaunchOf) -> Plan:
        """Return the problem itself, where the configuration says how many rows are a block's."""
        drawn = max(problem.rows, problem.positions * problem.head_dim)
        if not has_rows(config) or (set(problem.of.inputs) & {"labels", "positions"} and drawn > MOST_DRAWN):
            return ()
        whole = FullCase("full grid", problem, problem, config, cluster=int(config.get("cluster", 1)))
        return [(whole, launch_of(problem))]

    def full_size(self) -> FullSize[FullCase[RowwiseProblem]]:
        from evoengine.workloads.rowwise.tensors import RowwiseFullSize

        return RowwiseFullSize(self)
