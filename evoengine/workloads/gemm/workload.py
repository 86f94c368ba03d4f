"""State what a matrix product costs and the cases that a candidate must pass.

Nothing here needs a tensor library; the tensors themselves are drawn and judged in `tensors.py`.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from evoengine.devices.base import DTYPE_BYTES, Parameter, ScalarArgument, TensorMapArgument, TensorParameter
from evoengine.records import Config, Launch, Plan
from evoengine.workloads.base import Case, FullSize, LaunchOf, Tensors, Workload
from evoengine.workloads.blocks import few
from evoengine.workloads.coverage import Cell
from evoengine.workloads.gemm.cases import CHUNK, deepest, gate_cases
from evoengine.workloads.gemm.coverage import cells, visited
from evoengine.workloads.gemm.problem import DTYPES, EPILOGUES, EXAMPLE, GemmProblem, parse_problem
from evoengine.workloads.rectangles import FullCase

SWIZZLED = 64
"""elements of 16 bits that TMA swizzles together"""


class Gemm(Workload[GemmProblem]):
    name = "gemm"
    grammar = f"m…,n…,k…,{'|'.join(DTYPES)}[,{'|'.join(EPILOGUES)}]"
    example = EXAMPLE
    compile_time = ("dtype", "element_bytes", "epilogue")
    baseline_label = "torch"

    def parse(self, text: str) -> GemmProblem:
        return parse_problem(text)

    def flops(self, problem: GemmProblem) -> float:
        """Return 2·m·n·k, the usual count; the epilogue is left out."""
        return 2.0 * problem.m * problem.n * problem.k

    def min_dram_bytes(self, problem: GemmProblem) -> float:
        """Return the bytes of A and B read once and C written once; the bias is too small to count."""
        p = problem
        return float(DTYPE_BYTES[p.dtype]) * (p.m * p.k + p.k * p.n + p.m * p.n)

    def cases(self, problem: GemmProblem, config: Config) -> tuple[Case[GemmProblem], ...]:
        return gate_cases(problem, config)

    def cells(self, problem: GemmProblem, config: Config) -> frozenset[Cell]:
        return cells(problem, config)

    def visited(self, case: Case[GemmProblem], launch: Launch, visits: np.ndarray) -> frozenset[Cell]:
        return visited(case, launch, visits)

    def parameters(self, problem: GemmProblem, config: Config) -> tuple[Parameter, ...]:
        p = problem
        return (
            TensorParameter("a", (p.m, p.k), p.dtype),
            TensorParameter("b", (p.k, p.n), p.dtype),
            TensorParameter("bias", (p.n,), p.dtype),
            TensorParameter("c", (p.m, p.n), p.dtype, output=True),
            *(ScalarArgument(name, np.int32(getattr(p, name))) for name in ("m", "n", "k")),
            *_tensor_maps(p, config),
        )

    def tensors(self) -> Tensors[GemmProblem]:
        from evoengine.workloads.gemm.tensors import GemmTensors

        return GemmTensors()

    def full_plan(self, problem: GemmProblem, config: Config, launch_of: LaunchOf) -> Plan:
        """Return the whole grid over few steps of K, and one block over all of K.

        All of A and of B follow where offsets into them may need more than 32 bits.
        """
        if not {"tile_m", "tile_n", "tile_k"} <= config.keys():
            return ()
        p = problem
        cases = [FullCase("full grid", replace(p, k=few(p.k, int(config["tile_k"]), 2)), p, config)]
        k = deepest(p, config)
        part = None if k == p.k else f"{k:,} of {p.k:,} products of each sum"
        cases.append(FullCase("own k", replace(p, k=k), p, config, "one drawn", part))
        if DTYPE_BYTES[p.dtype] * p.m * p.k >= 1 << 31:
            own = replace(p, n=few(p.n, int(config["tile_n"]), 1))
            cases.append(FullCase("full A", _less_deep(own, config, "m"), p, config, "last"))
        if DTYPE_BYTES[p.dtype] * p.k * p.n >= 1 << 31:
            own = replace(p, m=few(p.m, int(config["tile_m"]), 1))
            cases.append(FullCase("full B", _less_deep(own, config, "n"), p, config, "last"))
        return [(case, launch_of(case.problem)) for case in cases]

    def full_size(self) -> FullSize[FullCase[GemmProblem]]:
        from evoengine.workloads.gemm.full_size import GemmFullSize

        return GemmFullSize(self)


def _less_deep(problem: GemmProblem, config: Config, side: str) -> GemmProblem:
    """Return the problem with the deepest K.

    Where that is less than its own, the other side of A (m) or B (n) grows in proportion.
    """
    k, length = deepest(problem, config), getattr(problem, side)
    longer = length + (length * problem.k // k - length) // CHUNK * CHUNK
    return replace(problem, k=k, **{side: longer})


def _tensor_maps(problem: GemmProblem, config: Config) -> tuple[TensorMapArgument, ...]:
    """Return the tensor maps of A and B for kernels that load by TMA.

    A box is a tile's rows by the columns that are swizzled together.
    """
    if config.get("family") != "wgmma":
        return ()

    def over(name: str, rows: int, columns: int, box_rows: int) -> TensorMapArgument:
        row = DTYPE_BYTES[problem.dtype] * columns
        return TensorMapArgument(
            f"map_{name}", name, problem.dtype, (columns, rows), (row,), (SWIZZLED, box_rows), swizzle=2 * SWIZZLED
        )

    a = over("a", problem.m, problem.k, int(config["tile_m"]))
    return a, over("b", problem.k, problem.n, int(config["tile_k"]))
