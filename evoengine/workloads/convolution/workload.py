"""State what a 2-D convolution costs and the cases a candidate must pass.

Nothing here needs a tensor library; the tensors themselves are drawn and judged in `tensors.py`.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

import numpy as np

from evoengine.devices.base import Parameter, ScalarArgument, TensorParameter
from evoengine.records import Config, Plan
from evoengine.workloads.base import Case, FullSize, LaunchOf, Tensors, Tolerance, Workload
from evoengine.workloads.convolution.problem import EXAMPLE, ConvolutionProblem, parse_problem
from evoengine.workloads.rectangles import FullCase

MOST_PRODUCTS = 1 << 28
"""of a case with all rows or columns of the problem, in whole tiles, which takes a second or two"""
FLUSH = 8
"""floats after which the emulator can end a tensor, so that what is read behind it is an error"""


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
        """A product and a sum per weight and output."""
        return 2.0 * problem.width * problem.height * problem.filter_w * problem.filter_h

    def min_dram_bytes(self, problem: ConvolutionProblem) -> float:
        """Image and filter read once, the output written once."""
        floats = prod(problem.image_shape) + problem.filter_w * problem.filter_h + problem.width * problem.height
        return 4.0 * floats

    def cases(self, problem: ConvolutionProblem, config: Config) -> tuple[Case[ConvolutionProblem], ...]:
        """Return cases with the problem's own filter size, which a template may bake in, and sizes set against a
        block's tile.

        Most are of small whole numbers, whose sums float32 holds exactly in any order: the smallest fault shows. Those
        of ordinary numbers have long rows, so that no row's error is near 0 by chance. Some end where an image's bytes
        do, so that a read one pixel further is seen.
        """
        tile_w = int(config.get("block_size_x", 16)) * int(config.get("tile_size_x", 1))
        tile_h = int(config.get("block_size_y", 16)) * int(config.get("tile_size_y", 1))
        own_w, own_h = problem.width % tile_w or tile_w // 3 + 1, problem.height % tile_h or tile_h // 3 + 1

        def at(height: int, width: int) -> ConvolutionProblem:
            return replace(problem, height=max(1, height), width=max(1, width))

        def flush(height: int, width: int) -> ConvolutionProblem:
            return at(height, width - (width + problem.filter_w - 1) % FLUSH)

        found = [
            Case("one output", at(1, 1), "whole numbers"),
            Case("one column", at(tile_h + 1, 1), "whole numbers"),
            Case("one row", at(1, max(tile_w + 1, 64))),
            Case("whole tile", at(tile_h, tile_w), "whole numbers"),
            Case("one short", flush(tile_h - 1, tile_w - 1), "whole numbers"),
            Case("remainders", at(tile_h + own_h, tile_w + own_w), "whole numbers"),
            Case("one weight", flush(tile_h + 2, tile_w - 2), "one weight"),
            Case("one pixel", flush(tile_h - 2, tile_w + 2), "one pixel"),
            Case("ordinary numbers", flush(min(tile_h, 8), max(tile_w - 1, 71))),
            Case("positive numbers", at(min(tile_h, 4), max(tile_w, 64)), "positive"),
        ]
        whole_w, whole_h = (
            -(-size // tile) * tile for size, tile in ((problem.width, tile_w), (problem.height, tile_h))
        )
        products = problem.filter_w * problem.filter_h
        if whole_w * tile_h * products <= MOST_PRODUCTS:
            found.append(Case("own width", at(tile_h // 2 + 1, problem.width), "whole numbers", long=True))
        if whole_h * tile_w * products <= MOST_PRODUCTS:
            found.append(Case("own height", at(problem.height, tile_w // 2 + 1), "whole numbers", long=True))
        return tuple(replace(case, config=config) for case in found)

    def parameters(self, problem: ConvolutionProblem, config: Config) -> tuple[Parameter, ...]:
        return (
            TensorParameter("image", problem.image_shape, "fp32"),
            TensorParameter("filter", (problem.filter_h, problem.filter_w), "fp32"),
            TensorParameter("output", (problem.height, problem.width), "fp32", output=True),
            ScalarArgument("height", np.int32(problem.height)),
            ScalarArgument("width", np.int32(problem.width)),
        )

    def tensors(self) -> Tensors[ConvolutionProblem]:
        from evoengine.workloads.convolution.tensors import ConvolutionTensors

        return ConvolutionTensors()

    def full_plan(self, problem: ConvolutionProblem, config: Config, launch_of: LaunchOf) -> Plan:
        """Return the problem itself, where the configuration says how large a block's tile is."""
        if not {"block_size_x", "block_size_y", "tile_size_x", "tile_size_y"} <= config.keys():
            return ()
        return [(FullCase("full grid", problem, problem, config), launch_of(problem))]

    def full_size(self) -> FullSize[FullCase[ConvolutionProblem]]:
        from evoengine.workloads.convolution.full_size import ConvolutionFullSize

        return ConvolutionFullSize(self)
