"""2-D convolution at full size: the part of the image on which a block's tile of outputs depends."""

from __future__ import annotations

from dataclasses import replace

import torch

from evoengine.records import Config
from evoengine.workloads.base import Inputs
from evoengine.workloads.convolution.problem import ConvolutionProblem
from evoengine.workloads.convolution.tensors import whole_numbers
from evoengine.workloads.rectangle_tensors import Read, Rectangle, RectangleFullSize
from evoengine.workloads.rectangles import FullCase


class ConvolutionFullSize(RectangleFullSize[ConvolutionProblem]):
    def tile(self, problem: ConvolutionProblem, config: Config) -> tuple[int, int]:
        width = int(config["block_size_x"]) * int(config["tile_size_x"])
        return int(config["block_size_y"]) * int(config["tile_size_y"]), width

    def values(self, case: FullCase[ConvolutionProblem], normal: torch.Tensor) -> torch.Tensor:
        return whole_numbers(normal)

    def part(self, problem: ConvolutionProblem, rectangle: Rectangle, read: Read) -> tuple[ConvolutionProblem, Inputs]:
        p, rows, columns = problem, rectangle.rows, rectangle.columns
        seen_rows = range(rows.start, rows.stop + p.filter_h - 1)
        seen_columns = range(columns.start, columns.stop + p.filter_w - 1)
        inputs = {
            "image": read("image", seen_rows, seen_columns),
            "filter": read("filter", range(p.filter_h), range(p.filter_w)),
        }
        return replace(p, height=len(rows), width=len(columns)), inputs
