"""State what a 2-D convolution costs and the cases a candidate must pass.

Nothing here needs a tensor library; the tensors themselves are drawn and judged in `tensors.py`.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

import numpy as np

from evoengine.devices.base import Parameter, ScalarArgument, TensorParameter
from evoengine.records import Config, Launch, Plan
from evoengine.space.symbol import int32, symbol
from evoengine.workloads.base import Case, FullSize, LaunchOf, Tensors, Tolerance, Workload
from evoengine.workloads.convolution.problem import (
    EXAMPLE,
    FLUSH,
    ORDINARY_COLUMNS,
    ORDINARY_ROWS,
    ConvolutionProblem,
    cells,
    has_own,
    parse_problem,
    tile_of,
    visited,
)
from evoengine.workloads.coverage import Cell, own_tail
from evoengine.workloads.rectangles import FullCase


class Convolution(Workload[ConvolutionProblem]):
    name = "convolution"
    grammar = "w…,h…,fw…,fh…"
    example = EXAMPLE
    compile_time = ("filter_w", "filter_h")
    # Sums in another order err by as much again, by chance several times as much in a single row.
    tolerance = Tolerance(own=4.0, roundings=4.0)
    baseline_label = "torch"

    def parse(self, text: str) -> ConvolutionProblem:
        return parse_problem(text)

    def flops(self, problem: ConvolutionProblem) -> float:
        """Return the operations: a product and a sum per weight and output."""
        return 2.0 * problem.width * problem.height * problem.filter_w * problem.filter_h

    def min_dram_bytes(self, problem: ConvolutionProblem) -> float:
        """Return the bytes of image and filter read once and the output written once."""
        floats = prod(problem.image_shape) + problem.filter_w * problem.filter_h + problem.width * problem.height
        return 4.0 * floats

    def cases(self, problem: ConvolutionProblem, config: Config) -> tuple[Case[ConvolutionProblem], ...]:
        """Return cases of the problem's own filter size, which a template may bake in, sized against a block's tile.

        Most are of small whole numbers, whose sums float32 holds exactly in any order, so that the smallest fault
        shows. Those of ordinary numbers have long rows, so that no row's error is near 0 by chance. Some end where an
        image's bytes do, so that a read one pixel further is seen.
        """
        tile_h, tile_w = tile_of(config)
        own_w, own_h = own_tail(problem.width, tile_w), own_tail(problem.height, tile_h)

        def at(height: int, width: int) -> ConvolutionProblem:
            return replace(problem, height=max(1, height), width=max(1, width))

        def flush(height: int, width: int) -> ConvolutionProblem:
            return at(height, width - (width + problem.filter_w - 1) % FLUSH)

        found = [
            Case("one output", at(1, 1), "whole numbers"),
            Case("one column", at(tile_h + 1, 1), "whole numbers"),
            Case("one row", at(1, -(-ORDINARY_COLUMNS // tile_w) * tile_w + 1)),
            Case("whole tile", at(tile_h, tile_w), "whole numbers"),
            Case("one short", at(tile_h - 1, 2 * tile_w - 1), "whole numbers"),
            Case("remainders", at(tile_h + own_h, tile_w + own_w), "whole numbers"),
            Case("one weight", flush(tile_h + 2, tile_w - 2), "one weight"),
            Case("one pixel", flush(tile_h - 2, tile_w + 2), "one pixel"),
            Case("ordinary numbers", flush(min(tile_h, ORDINARY_ROWS), max(tile_w - 1, 71))),
            Case("positive numbers", at(min(tile_h, 4), max(tile_w, 64)), "positive"),
        ]
        if has_own(problem, config, "width"):
            found.append(Case("own width", at(tile_h // 2 + 1, problem.width), "whole numbers", long=True))
        if has_own(problem, config, "height"):
            found.append(Case("own height", at(problem.height, tile_w // 2 + 1), "whole numbers", long=True))
        return tuple(replace(case, config=config, whole=problem) for case in found)

    def cells(self, problem: ConvolutionProblem, config: Config) -> frozenset[Cell]:
        return cells(problem, config)

    def visited(self, case: Case[ConvolutionProblem], launch: Launch, visits: np.ndarray) -> frozenset[Cell]:
        return visited(case)

    def parameters(self, problem: ConvolutionProblem, config: Config) -> tuple[Parameter, ...]:
        return (
            TensorParameter("image", problem.image_shape, "fp32"),
            TensorParameter("filter", (problem.filter_h, problem.filter_w), "fp32"),
            TensorParameter("output", (problem.height, problem.width), "fp32", output=True),
            ScalarArgument("height", int32(problem.height)),
            ScalarArgument("width", int32(problem.width)),
        )

    def at_run_time(self, problem: ConvolutionProblem) -> ConvolutionProblem:
        return replace(problem, width=symbol("width"), height=symbol("height"))

    def tensors(self) -> Tensors[ConvolutionProblem]:
        from evoengine.workloads.convolution.tensors import ConvolutionTensors

        return ConvolutionTensors()

    def full_plan(self, problem: ConvolutionProblem, config: Config, launch_of: LaunchOf) -> Plan:
        """Return the problem itself, where the configuration says how large a block's tile is."""
        if not {"block_size_x", "block_size_y", "tile_size_x", "tile_size_y"} <= config.keys():
            return ()
        return [(FullCase("full grid", problem, problem, config), launch_of(problem))]

    def full_size(self) -> FullSize[FullCase[ConvolutionProblem]]:
        from evoengine.workloads.convolution.tensors import ConvolutionFullSize

        return ConvolutionFullSize(self)
