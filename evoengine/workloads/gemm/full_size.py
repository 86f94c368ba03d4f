"""The matrix product at full size: rows of A and columns of B for the tile of C that a block wrote."""

from __future__ import annotations

from dataclasses import replace

import torch

from evoengine.records import Config
from evoengine.workloads.base import Inputs
from evoengine.workloads.gemm.problem import GemmProblem
from evoengine.workloads.gemm.tensors import positive_numbers, whole_numbers
from evoengine.workloads.rectangles import FullCase
from evoengine.workloads.tensors import Read, Rectangle, RectangleFullSize

MOST_POSITIVE = 4096
"""number of products of at most 9 whose sum a half can represent"""


class GemmFullSize(RectangleFullSize[GemmProblem]):
    def tile(self, problem: GemmProblem, config: Config) -> tuple[int, int]:
        return int(config["tile_m"]), int(config["tile_n"])

    def values(self, case: FullCase[GemmProblem], normal: torch.Tensor) -> torch.Tensor:
        """Return whole numbers, whose sums are exact.

        They are positive, so that no sum is so small that its relative error is meaningless; over all of K, where sums
        might overflow a half, they have signs.
        """
        return whole_numbers(normal) if case.problem.k > MOST_POSITIVE else positive_numbers(normal)

    def part(self, problem: GemmProblem, rectangle: Rectangle, read: Read) -> tuple[GemmProblem, Inputs]:
        rows, columns, all_k = rectangle.rows, rectangle.columns, range(problem.k)
        inputs = {
            "a": read("a", rows, all_k),
            "b": read("b", all_k, columns),
            "bias": read("bias", range(1), columns)[0],
        }
        return replace(problem, m=len(rows), n=len(columns)), inputs
