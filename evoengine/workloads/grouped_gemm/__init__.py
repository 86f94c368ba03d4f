"""A matrix product for each group of rows, as in a mixture of experts, with the groups' sizes on the GPU.

Nothing here needs a tensor library; the tensors themselves are drawn and judged in `tensors.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod

import numpy as np

from evoengine.devices.base import DTYPE_BYTES, Parameter, ScalarArgument, TensorParameter
from evoengine.records import Config, Launch
from evoengine.workloads.base import Case, FullSize, IndexBound, Tensors, Workload
from evoengine.workloads.full_size import FullCase
from evoengine.workloads.gemm import tensor_maps
from evoengine.workloads.gemm.problem import DTYPES, NO_SCALES, OUT_DTYPES, SCALES
from evoengine.workloads.grouped_gemm.cases import cells, full_plan, gate_blocks, gate_cases, visited
from evoengine.workloads.grouped_gemm.problem import EXAMPLE, GroupedGemmProblem, parse_problem


class GroupedGemm(Workload[GroupedGemmProblem]):
    name = "grouped-gemm"
    grammar = (
        f"rows=…+…,n…,k…,{'|'.join(DTYPES)}[,b_nk][,m…][,{'|'.join(OUT_DTYPES)}][,{'|'.join(SCALES)}]; "
        "8x128 for 8 groups of 128 rows"
    )
    example = EXAMPLE
    compile_time = (
        "dtype", "element_bytes", "epilogue", "a_layout", "b_layout", "residual", "batched", "out_dtype", "scales",
        "byte_product", "promoted", "gated",
    )  # fmt: skip # a list
    baseline_label = "torch"

    parse = staticmethod(parse_problem)
    cases = staticmethod(gate_cases)
    cells = staticmethod(cells)
    visited = staticmethod(visited)
    full_plan = staticmethod(full_plan)

    @property
    def entry(self) -> str:
        return "gemm"

    def flops(self, problem: GroupedGemmProblem) -> float:
        """Return 2·n·k for each row of a group, the usual count."""
        return 2.0 * problem.total * problem.n * problem.k

    def min_dram_bytes(self, problem: GroupedGemmProblem) -> float:
        """Return the bytes of the groups' rows of A and C, of B of groups with rows, and of the scales of both."""
        p, groups = problem, sum(rows > 0 for rows in problem.rows)
        operands = DTYPE_BYTES[p.dtype] * (p.total * p.k + groups * p.k * p.n)
        scales = 0 if p.scales == NO_SCALES else 4 * sum(prod(p.scale_shape(name)) for name in "ab")
        return float(operands + scales + DTYPE_BYTES[p.out_dtype] * p.total * p.n)

    def gate_launch(self, case: Case[GroupedGemmProblem], launch: Launch) -> Launch:
        """Return the launch of a case with another number of blocks, because a kernel must be correct with any number.

        There are more blocks than tiles, or so few that each has several tiles and the last round is not filled.
        """
        return replace(launch, grid=(gate_blocks(case), 1, 1))

    def parameters(self, problem: GroupedGemmProblem, config: Config) -> tuple[Parameter, ...]:
        p = problem
        written = None if p.total == p.m else (range(p.total), range(p.n))
        scaled = () if p.scales == NO_SCALES else ("a", "b")
        return (
            TensorParameter("a", (p.m, p.k), p.dtype),
            TensorParameter("b", (p.groups, *p.whole.shape("b")), p.dtype),
            TensorParameter("ends", (p.groups,), "int32"),
            *(TensorParameter(f"scale_{name}", p.scale_shape(name), "fp32") for name in scaled),
            TensorParameter("c", (p.m, p.n), p.out_dtype, output=True, writes=written),
            *(ScalarArgument(name, np.int32(getattr(p, name))) for name in ("groups", "m", "n", "k")),
            *tensor_maps(p.whole, config, {"a": 0, "b": p.groups, "c": 0}),
        )

    def indices(self, problem: GroupedGemmProblem, config: Config, seed: int) -> Mapping[str, np.ndarray]:
        """Return the ends of groups, on which the work of a block depends."""
        return {"ends": np.cumsum(problem.rows, dtype=np.int32).view(np.uint8)}

    def index_bounds(self, problem: GroupedGemmProblem) -> tuple[IndexBound, ...]:
        return (IndexBound("ends", problem.m, rising=True),)

    def tensors(self) -> Tensors[GroupedGemmProblem]:
        from evoengine.workloads.grouped_gemm.tensors import GroupedGemmTensors

        return GroupedGemmTensors()

    def full_size(self) -> FullSize[FullCase[GroupedGemmProblem]]:
        from evoengine.workloads.grouped_gemm.tensors import GroupedGemmFullSize

        return GroupedGemmFullSize(self)


WORKLOAD = GroupedGemm()
