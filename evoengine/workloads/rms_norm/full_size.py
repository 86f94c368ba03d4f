"""RMS normalisation at full size: the rows that a block wrote."""

from __future__ import annotations

from dataclasses import replace

from evoengine.records import Config
from evoengine.workloads.base import Inputs
from evoengine.workloads.rectangle_tensors import Read, Rectangle, RectangleFullSize
from evoengine.workloads.rms_norm.problem import RmsNormProblem


class RmsNormFullSize(RectangleFullSize[RmsNormProblem]):
    def tile(self, problem: RmsNormProblem, config: Config) -> tuple[int, int]:
        return int(config["rows_per_block"]) * int(config["turns"]), problem.hidden

    def part(self, problem: RmsNormProblem, rectangle: Rectangle, read: Read) -> tuple[RmsNormProblem, Inputs]:
        rows, columns = rectangle.rows, rectangle.columns
        inputs = {
            "x": read("x", rows, columns),
            "residual": read("residual", rows, columns),
            "weight": read("weight", range(1), columns)[0],
        }
        return replace(problem, rows=len(rows)), inputs
