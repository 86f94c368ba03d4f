"""State what a matrix product costs and the cases that a candidate must pass.

Nothing here needs a tensor library; the tensors themselves are drawn and judged in `tensors.py`.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from evoengine.devices.base import DTYPE_BYTES, Parameter, ScalarArgument, TensorMapArgument, TensorParameter
from evoengine.records import Config, Plan
from evoengine.workloads.base import Case, FullSize, LaunchOf, Tensors, Workload
from evoengine.workloads.blocks import few
from evoengine.workloads.gemm.problem import DTYPES, EPILOGUES, EXAMPLE, GemmProblem, parse_problem
from evoengine.workloads.rectangles import FullCase

LONG = 4096
"""K at least of the longest case, over which errors of sums kept in 16 bits add up"""
MOST_WORK = 1 << 29
"""products of a block over all of K, which take about a second"""
MOST_ROWS = 24576
"""of B that a block reads, each of which takes a page or two of the emulator's"""
MOST_TILES = 256
"""of a case with all rows or columns of the problem"""
CHUNK = 8
"""elements of 16 bits in the widest load; rows that are multiples of it stay such in all cases"""
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
        """2·m·n·k, as the field counts; the epilogue is left out."""
        return 2.0 * problem.m * problem.n * problem.k

    def min_dram_bytes(self, problem: GemmProblem) -> float:
        """A and B read once, C written once; the bias is too small to count."""
        p = problem
        return float(DTYPE_BYTES[p.dtype]) * (p.m * p.k + p.k * p.n + p.m * p.n)

    def cases(self, problem: GemmProblem, config: Config) -> tuple[Case[GemmProblem], ...]:
        """Return cases whose sizes are set against the configuration's tiles.

        Every candidate meets one element, whole tiles, tails that end just before and behind a tile's end, the
        remainders that the problem itself leaves, tiles of rows behind a whole group of them, a last step in each
        buffer, and with all rows of its tile a pipeline that wraps around twice (2·stages + 1 steps) and more. n and k
        keep what they share with CHUNK: kernels may rely on it. Those that may rank meet the problem's own m, n and k.
        """
        tile_m, tile_n, tile_k = (int(config.get(name, 64)) for name in ("tile_m", "tile_n", "tile_k"))
        stages, group = int(config.get("stages", 1)), int(config.get("group_m", 1))
        unit_n, unit_k = math.gcd(problem.n, CHUNK), math.gcd(problem.k, CHUNK)
        own_m, own_n, own_k = (
            size % tile or tile // 3 + 1
            for size, tile in ((problem.m, tile_m), (problem.n, tile_n), (problem.k, tile_k))
        )
        deepest = max(2 * tile_k, MOST_WORK // (tile_m * tile_n))
        long = min(deepest, max(LONG, problem.k + unit_k))

        def at(m: int, n: int, k: int) -> GemmProblem:
            return replace(problem, m=m, n=-(-n // unit_n) * unit_n, k=-(-k // unit_k) * unit_k)

        part = None if long > problem.k else f"{long - unit_k:,} of {problem.k:,} products of each sum"
        found = [
            Case("one element", at(1, 1, 1), "positive numbers"),
            Case("one column", at(tile_m + 1, 1, 4 * tile_k), "positive numbers"),
            Case("one row", at(1, tile_n + 1, 4 * tile_k + 1), "whole numbers"),
            Case("whole tiles", at(tile_m, tile_n, max(2, stages) * tile_k)),
            Case("remainders", at(tile_m + own_m, tile_n + own_n, tile_k + own_k)),
            Case("groups of tiles", at(group * tile_m + 1, tile_n + 1, 1), "whole numbers"),
            Case("pipeline wraps", at(tile_m - 1, tile_n - unit_n, (2 * stages + 2) * tile_k - unit_k)),
            Case("one-hot rows", at(tile_m + 3, tile_n - 2 * unit_n, 2 * tile_k + 1), "one-hot rows"),
            Case("sums that overflow a half", at(tile_m - 2, tile_n, 2 * tile_k - unit_k), "large products"),
            Case("long", at(tile_m, tile_n - unit_n, long - unit_k), "long", long=True, part=part),
        ]
        if problem.m <= MOST_TILES * tile_m:
            found.append(Case("own m", at(problem.m, tile_n // 2 + 1, tile_k), "whole numbers", long=True))
        if problem.n <= MOST_TILES * tile_n:
            found.append(Case("own n", at(tile_m // 2 + 1, problem.n, tile_k), "whole numbers", long=True))
        return tuple(replace(case, config=config) for case in found)

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
        """Return the whole grid over few steps of K, one block over all of K, and all of A and of B where offsets into
        them may need more than 32 bits."""
        if not {"tile_m", "tile_n", "tile_k"} <= config.keys():
            return ()
        p = problem
        cases = [FullCase("full grid", replace(p, k=few(p.k, int(config["tile_k"]), 2)), p, config)]
        deepest = _deepest(p, config)
        part = None if deepest == p.k else f"{deepest:,} of {p.k:,} products of each sum"
        cases.append(FullCase("own k", replace(p, k=deepest), p, config, "one drawn", part))
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


def _deepest(problem: GemmProblem, config: Config) -> int:
    """Return the problem's own k, or one that ends as it does where a block over all of it takes too long."""
    steps = min(MOST_WORK // (int(config["tile_m"]) * int(config["tile_n"])), MOST_ROWS) // int(config["tile_k"])
    return few(problem.k, int(config["tile_k"]), steps)


def _less_deep(problem: GemmProblem, config: Config, side: str) -> GemmProblem:
    """Return the problem with the deepest K, and so much more of the other side of A (m) or B (n) where that is less
    than its own."""
    k, length = _deepest(problem, config), getattr(problem, side)
    longer = length + (length * problem.k // k - length) // CHUNK * CHUNK
    return replace(problem, k=k, **{side: longer})


def _tensor_maps(problem: GemmProblem, config: Config) -> tuple[TensorMapArgument, ...]:
    """A and B for kernels that load tiles by TMA: a box is a tile's rows by the columns that are swizzled together."""
    if config.get("family") != "wgmma":
        return ()

    def over(name: str, rows: int, columns: int, box_rows: int) -> TensorMapArgument:
        row = DTYPE_BYTES[problem.dtype] * columns
        return TensorMapArgument(
            f"map_{name}", name, problem.dtype, (columns, rows), (row,), (SWIZZLED, box_rows), swizzle=2 * SWIZZLED
        )

    a = over("a", problem.m, problem.k, int(config["tile_m"]))
    return a, over("b", problem.k, problem.n, int(config["tile_k"]))
