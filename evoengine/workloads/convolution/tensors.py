"""2-D convolution's tensors: inputs drawn from a seed, the float64 reference, torch's own as baseline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch.nn.functional import conv2d

from evoengine.records import Config
from evoengine.workloads.base import Case, Drawn, Inputs, Outputs, Sample, Tensors
from evoengine.workloads.convolution import ORDINARY_COLUMNS, ORDINARY_ROWS, VALUES, ConvolutionProblem, tile_of
from evoengine.workloads.coverage import Cell
from evoengine.workloads.full_size import FullCase
from evoengine.workloads.tensors import Read, Rectangle, RectangleFullSize

SAMPLED_ROWS = 16
"""rows of a whole problem's output in each of the bands that are compared in float64"""
WHOLE = 8
"""largest drawn integer: products up to 64, sums exact in float32 for filters of up to 2^18 weights"""

Pair = tuple[torch.Tensor, torch.Tensor]


class ConvolutionTensors(Tensors[ConvolutionProblem]):
    def draw(self, case: Case[ConvolutionProblem], seed: int, device: str = "cpu") -> Drawn:
        problem = case.problem
        generator = torch.Generator(device=device).manual_seed(seed)
        image = torch.randn(problem.image_shape, generator=generator, device=device)
        weights = torch.randn(problem.filter_h, problem.filter_w, generator=generator, device=device)
        image, weights = _SHAPED[case.draw](image, weights, generator)
        inputs = {"image": image, "filter": weights}
        return Drawn(inputs, inputs)

    def reference(self, problem: ConvolutionProblem, inputs: Inputs) -> Outputs:
        return {"output": _convolved(inputs["image"].double(), inputs["filter"].double())}

    def own_dtype(self, problem: ConvolutionProblem, inputs: Inputs) -> Outputs:
        """Add products sequentially, rounding each product and each sum: the longest chain of roundings."""
        image, weights = inputs["image"], inputs["filter"]
        output = torch.zeros(problem.height, problem.width, device=image.device)
        for v in range(problem.filter_h):
            for u in range(problem.filter_w):
                output += image[v : v + problem.height, u : u + problem.width] * weights[v, u]
        return {"output": output}

    def shown(self, case: Case[ConvolutionProblem], drawn: Drawn) -> frozenset[Cell]:
        image, weights = drawn.inputs["image"], drawn.inputs["filter"]
        found = {
            "whole numbers": bool((image == image.round()).all() and (weights == weights.round()).all()),
            "one weight": int((weights != 0).sum()) == 1,
            "one pixel": bool(((image == 0) | (image == 1)).all()),
            "positive": bool((image > 0).all() and (weights > 0).all()) and float(image.max()) > 1e5,
        }
        rows, columns = min(ORDINARY_ROWS, tile_of(case.config)[0]), ORDINARY_COLUMNS
        large = case.problem.width > columns and case.problem.height >= rows
        ordinary = {"normal": not any(found.values()) and large}
        return frozenset(Cell("values", VALUES[draw]) for draw, holds in (found | ordinary).items() if holds)

    def baselines(self, problem: ConvolutionProblem) -> tuple[str, ...]:
        return ("torch",)

    def baseline(self, name: str, problem: ConvolutionProblem, inputs: Inputs) -> Callable[[], object]:
        """Return torch.nn.functional.conv2d by cuDNN in float32, without TF32, which torch uses by default."""

        def call() -> torch.Tensor:
            with torch.backends.cudnn.flags(allow_tf32=False):
                return _convolved(inputs["image"], inputs["filter"])

        return call

    def outputs_of(self, problem: ConvolutionProblem, found: torch.Tensor) -> Outputs:
        return {"output": found}

    def samples(self, problem: ConvolutionProblem, inputs: Inputs, seed: int) -> Sequence[Sample[ConvolutionProblem]]:
        """Return three bands of whole rows: the first, the last, and one between."""
        band = min(SAMPLED_ROWS, problem.height)
        last = problem.height - band
        between = int(torch.randint(last + 1, (), generator=torch.Generator().manual_seed(seed)))
        return [_band(problem, inputs, first, band) for first in sorted({0, between, last})]

    def check_bytes(self, problem: ConvolutionProblem) -> int:
        """Return the bytes of the library's output and of one product of the same size."""
        return 8 * problem.width * problem.height


def _convolved(image: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return conv2d(image[None, None], weights[None, None])[0, 0]


def _band(problem: ConvolutionProblem, inputs: Inputs, first: int, rows: int) -> Sample[ConvolutionProblem]:
    part = {"image": inputs["image"][first : first + rows + problem.filter_h - 1], "filter": inputs["filter"]}
    return Sample(
        replace(problem, height=rows), part, lambda outputs: {"output": outputs["output"][first : first + rows]}
    )


def _normal(image: torch.Tensor, weights: torch.Tensor, generator: torch.Generator) -> Pair:
    return image, weights


def whole_numbers(normal: torch.Tensor) -> torch.Tensor:
    """Return integers from -WHOLE to WHOLE without 0."""
    return normal.sign() * (4.0 * normal.abs()).ceil().clamp(1, WHOLE)


def _whole(image: torch.Tensor, weights: torch.Tensor, generator: torch.Generator) -> Pair:
    return whole_numbers(image), whole_numbers(weights)


def _one_weight(image: torch.Tensor, weights: torch.Tensor, generator: torch.Generator) -> Pair:
    """Set all weights but one to 0, so that the output is the shifted image; exposes mirrored or transposed filters."""
    one = torch.zeros_like(weights).view(-1)
    one[torch.randint(one.numel(), (), generator=generator, device=one.device)] = 1.0
    return image, one.view_as(weights)


def _one_pixel(image: torch.Tensor, weights: torch.Tensor, generator: torch.Generator) -> Pair:
    """Set all but one pixel in every window to 0, so that every output is one weight."""
    grid = torch.zeros_like(image)
    grid[weights.shape[0] - 1 :: weights.shape[0], weights.shape[1] - 1 :: weights.shape[1]] = 1.0
    return grid, weights


def _positive(image: torch.Tensor, weights: torch.Tensor, generator: torch.Generator) -> Pair:
    """Draw positive numbers of very different magnitudes; exposes roundings of a large sum, and 16-bit storage."""
    return image.abs() * 1e6, weights.abs() * 1e-6


_SHAPED: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Generator], Pair]] = {
    "normal": _normal,
    "whole numbers": _whole,
    "one weight": _one_weight,
    "one pixel": _one_pixel,
    "positive": _positive,
}


# 2-D convolution at full size: the part of the image on which a block's tile of outputs depends.


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
