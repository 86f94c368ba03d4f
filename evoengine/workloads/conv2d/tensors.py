"""2-D convolution's tensors: inputs drawn from a seed, the float64 reference, torch's own as baseline."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch.nn.functional import conv2d, pad

from evoengine.devices.pool import BlockLaunch, BlockTrace, ChosenBlock
from evoengine.records import Config, Launch
from evoengine.workloads.base import Case, Drawn, Inputs, Outputs, Sample, Tensors, WrittenPart
from evoengine.workloads.conv2d.cases import VALUES, tile_sizes
from evoengine.workloads.conv2d.problem import Conv2dProblem
from evoengine.workloads.coverage import Cell
from evoengine.workloads.full_size import FullCase
from evoengine.workloads.gemm.coverage import ALIKE
from evoengine.workloads.gemm.tensors import (
    BEYOND_HALF,
    LARGE,
    behind_products,
    blocks_of,
    positive_numbers,
    possible_tiles,
    whole_numbers,
)
from evoengine.workloads.tensors import TORCH_DTYPES, Read, Rectangle, RectangleFullSize

SAMPLED_ROWS = 4
"""rows of outputs in each of the bands of a whole problem that are compared in float64"""


class Conv2dTensors(Tensors[Conv2dProblem]):
    independent = frozenset({"normal"})

    def draw(self, case: Case[Conv2dProblem], seed: int, device: str = "cpu") -> Drawn:
        p, generator = case.problem, torch.Generator(device=device).manual_seed(seed)

        def normal(name: str) -> torch.Tensor:
            return torch.randn(p.shape(name), generator=generator, device=device)

        drawn = _SHAPED[case.draw](normal("x"), normal("weight"))
        found = {"x": drawn[0], "weight": drawn[1]}
        exact = case.draw not in ("normal", "long")
        for name in (*(["bias"] if p.has_bias else []), *(["residual"] if p.residual else [])):
            found[name] = whole_numbers(normal(name)) if exact else normal(name)
        if case.draw == "large products":
            if p.dtype == "bf16":
                found["x"] = found["x"] * BEYOND_HALF
            found |= {name: found[name] * float(found["x"].max()) for name in found.keys() & {"bias", "residual"}}
        inputs = {name: tensor.to(TORCH_DTYPES[p.dtype]) for name, tensor in found.items()}
        return Drawn(inputs, inputs)

    def reference(self, problem: Conv2dProblem, inputs: Inputs) -> Outputs:
        return _finished(problem, _sums(problem, inputs, torch.float64), inputs, torch.float64)

    def own_dtype(self, problem: Conv2dProblem, inputs: Inputs) -> Outputs:
        """Compute as a library does: sums in float32 and rounded, then each step of the epilogue rounded."""
        out = TORCH_DTYPES[problem.dtype]
        return _finished(problem, _sums(problem, inputs, torch.float32).to(out), inputs, out)

    def rounded_once(self, problem: Conv2dProblem, inputs: Inputs) -> Outputs:
        found = _finished(problem, _sums(problem, inputs, torch.float32), inputs, torch.float32)
        return {"y": found["y"].to(TORCH_DTYPES[problem.dtype])}

    def shown(self, case: Case[Conv2dProblem], drawn: Drawn) -> frozenset[Cell]:
        x, weight = drawn.inputs["x"].float(), drawn.inputs["weight"].float()
        whole = bool((x == x.round()).all() and (weight == weight.round()).all() and (weight != 0).all())
        positive = bool((x > 0).all() and (weight > 0).all())
        each = weight.flatten(1)
        cancel = each.sum(1).abs() <= 0.05 * each.abs().sum(1)
        alike = (each == 1).all(1)
        halfway = weight.cumsum(-1).abs().amax() * x.abs().amax()
        holds = {
            "whole numbers": whole and not positive,
            "positive numbers": whole and positive,
            "one weight": bool(((each != 0).sum(1) == 1).all()) and each.shape[1] > 1,
            "large products": case.draw == "large products" and float(halfway) > 65504,
            "long": case.draw == "long" and each.shape[1] >= ALIKE and bool((cancel & alike.roll(1)).any()),
        }  # fmt: skip # a table
        return frozenset(Cell("values", VALUES[draw]) for draw, shows in holds.items() if shows)

    def baselines(self, problem: Conv2dProblem) -> tuple[str, ...]:
        return ("torch",)

    def baseline(self, name: str, problem: Conv2dProblem, inputs: Inputs) -> Callable[[], object]:
        """Return torch.nn.functional.conv2d of channels_last tensors, by cuDNN, then torch's own epilogue."""
        x, weight = inputs["x"].movedim(-1, 1), inputs["weight"].movedim(-1, 1)
        bias, residual, p = inputs.get("bias"), inputs.get("residual"), problem
        function = {"relu": torch.relu, "gelu": torch.nn.functional.gelu, "silu": torch.nn.functional.silu}.get(
            p.gemm.activation
        )

        def call() -> torch.Tensor:
            y = conv2d(x, weight, bias, p.stride, p.pad, p.dilation)
            y = function(y) if function else y
            y = y if residual is None else y + residual.movedim(-1, 1)
            return y.movedim(1, -1)

        return call

    def outputs_of(self, problem: Conv2dProblem, found: torch.Tensor) -> Outputs:
        return {"y": found}

    def samples(self, problem: Conv2dProblem, inputs: Inputs, seed: int) -> Sequence[Sample[Conv2dProblem]]:
        """Return three bands of whole rows of outputs: the first, the last, and one between."""
        band, rows = min(SAMPLED_ROWS, problem.out_height), problem.out_height
        last = problem.images * (rows - band + 1) - 1
        between = int(torch.randint(last + 1, (), generator=torch.Generator().manual_seed(seed)))
        places = sorted({0, between, last})
        return [_band(problem, inputs, *divmod(place, rows - band + 1), band) for place in places]

    def check_bytes(self, problem: Conv2dProblem) -> int:
        """Return the bytes of x, weights and outputs in float32, of each of the latter two twice."""
        p = problem
        return 4 * math.prod(p.shape("x")) + 8 * (math.prod(p.shape("weight")) + math.prod(p.shape("y")))


def _sums(problem: Conv2dProblem, inputs: Inputs, dtype: torch.dtype) -> torch.Tensor:
    """Return [images, out_height, out_width, filters] in that dtype, without the epilogue."""
    p, (x, weight) = problem, (inputs[name].to(dtype).movedim(-1, 1) for name in ("x", "weight"))
    return conv2d(x.contiguous(), weight.contiguous(), None, p.stride, p.pad, p.dilation).movedim(1, -1)


def _finished(problem: Conv2dProblem, sums: torch.Tensor, inputs: Inputs, dtype: torch.dtype) -> Outputs:
    return {"y": behind_products(problem.gemm, [sums], inputs, dtype).contiguous()}


def _band(problem: Conv2dProblem, inputs: Inputs, image: int, first: int, rows: int) -> Sample[Conv2dProblem]:
    """Return some rows of an image's outputs as a problem without padding, whose image includes it."""
    p, taken = problem, slice(first, first + rows)
    height = (rows - 1) * p.stride + p.dilation * (p.filter_h - 1) + 1
    padded = pad(inputs["x"][image : image + 1], (0, 0, p.pad, p.pad, p.pad, p.pad))
    part = {**inputs, "x": padded[:, first * p.stride : first * p.stride + height]}
    if p.residual:
        part["residual"] = inputs["residual"][image : image + 1, taken]
    own = replace(p, images=1, height=height, width=p.width + 2 * p.pad, pad=0)
    return Sample(own, part, lambda outputs: {"y": outputs["y"][image : image + 1, taken]})


# ── draws, of x [images, height, width, channels] and weights [filters, filter_h, filter_w, channels] ──


Pair = tuple[torch.Tensor, torch.Tensor]


def _normal(x: torch.Tensor, weight: torch.Tensor) -> Pair:
    """Scale sums to unit variance, where activations are not linear."""
    return x, weight / math.sqrt(weight[0].numel())


def _whole(x: torch.Tensor, weight: torch.Tensor) -> Pair:
    """Draw numbers whose sums are exact, so that the smallest fault shows."""
    return whole_numbers(x), whole_numbers(weight)


def _positive(x: torch.Tensor, weight: torch.Tensor) -> Pair:
    return positive_numbers(x), positive_numbers(weight)


def _one_weight(x: torch.Tensor, weight: torch.Tensor) -> Pair:
    """Set all weights of a filter but one to 0, each filter's at a different position, so that y is x shifted."""
    filters, each = weight.shape[0], weight[0].numel()
    one = torch.zeros(filters, each, device=weight.device)
    place = torch.arange(filters, device=weight.device)
    one[place, place * 7 % each] = 1.0
    return x, one.view_as(weight)


def _signs(weight: torch.Tensor, left: int) -> torch.Tensor:
    """Return 1 for the first half of the channels and -1 for the second except `left`; 0 for the rest."""
    channel, half = torch.arange(weight.shape[-1], device=weight.device), weight.shape[-1] // 2
    return torch.where(channel < half, 1.0, -1.0) * (channel < 2 * half - left)


def _large_products(x: torch.Tensor, weight: torch.Tensor) -> Pair:
    """Draw products near the largest half, whose sums exceed it over half of a pixel's channels and then cancel.

    One product remains for the window's first pixel, and none for the others.
    """
    signs = _signs(weight, 0).expand_as(weight).clone()
    signs[:, 0, 0] = _signs(weight, 1)
    return LARGE + (x[..., :1] > 0).expand_as(x), LARGE * signs


def _long(x: torch.Tensor, weight: torch.Tensor) -> Pair:
    """Draw filters of three kinds in turn, which expose sums kept in 16 bits.

    They are ordinary; or give sums of 2/3 and similar, which in 16 bits are rounded in the same direction while their
    exponent stays; or give such sums that almost cancel, which leaves the accumulated rounding errors.
    """
    kind = (torch.arange(weight.shape[0], device=weight.device) % 3).view(-1, 1, 1, 1)
    alike = torch.where(kind == 1, torch.ones_like(weight), _signs(weight, 0).expand_as(weight))
    return (2.0 + x / 4.0) / 3.0, torch.where(kind == 0, weight, alike)


_SHAPED: dict[str, Callable[[torch.Tensor, torch.Tensor], Pair]] = {
    "normal": _normal,
    "whole numbers": _whole,
    "positive numbers": _positive,
    "one weight": _one_weight,
    "large products": _large_products,
    "long": _long,
}


# ── at full size ──────────────────────────────────────────────────────────────────────────────────────────────────────


class Conv2dFullSize(RectangleFullSize[Conv2dProblem]):
    def tile(self, problem: Conv2dProblem, config: Config) -> tuple[int, int]:
        return tile_sizes(config)[:2]

    def values(self, case: FullCase[Conv2dProblem], normal: torch.Tensor) -> torch.Tensor:
        """Return whole numbers, whose sums are exact."""
        return whole_numbers(normal)

    def blocks(self, case: FullCase[Conv2dProblem], launch: Launch, seed: int) -> list[ChosenBlock]:
        return blocks_of(case, case.problem.gemm, launch, seed)

    def tiles_of(self, case: FullCase[Conv2dProblem], asked: BlockLaunch) -> range:
        return possible_tiles(case, case.problem.gemm, asked)

    def written_parts(
        self, case: FullCase[Conv2dProblem], asked: BlockLaunch, traces: Sequence[BlockTrace]
    ) -> list[WrittenPart]:
        found = super().written_parts(case, asked, traces)
        return [replace(part, outputs={"y": part.outputs["y"][:, None, None]}) for part in found]

    def part(self, problem: Conv2dProblem, rectangle: Rectangle, read: Read) -> tuple[Conv2dProblem, Inputs]:
        """Return the outputs as those of images of one window each, with zeros where it lies outside."""
        p, rows, columns = problem, rectangle.rows, rectangle.columns
        weights = range(p.filter_h * columns.start * p.filter_w, p.filter_h * columns.stop * p.filter_w)
        inputs = {
            "x": torch.stack([_window(p, row, read) for row in rows]),
            "weight": read("weight", weights, range(p.channels)).view(-1, p.filter_h, p.filter_w, p.channels),
        }
        if p.has_bias:
            inputs["bias"] = read("bias", range(1), columns)[0]
        if p.residual:
            inputs["residual"] = read("residual", rows, columns)[:, None, None]
        own = replace(
            p, images=len(rows), height=p.filter_h, width=p.filter_w, filters=len(columns), stride=1, pad=0, dilation=1
        )
        return own, inputs


def _window(p: Conv2dProblem, output: int, read: Read) -> torch.Tensor:
    """Return what an output, by its number in all images, sees of its image: [filter_h, filter_w, channels]."""
    image, place = divmod(output, p.out_height * p.out_width)
    top, left = (p.stride * at - p.pad for at in divmod(place, p.out_width))
    window = torch.zeros(p.filter_h, p.filter_w, p.channels, dtype=TORCH_DTYPES[p.dtype])
    columns = [s for s in range(p.filter_w) if 0 <= left + s * p.dilation < p.width]
    for r in range(p.filter_h) if columns else ():
        y = top + r * p.dilation
        if 0 <= y < p.height:
            row, first = (image * p.height + y) * p.width, left + columns[0] * p.dilation
            seen = range(row + first, row + first + len(columns) * p.dilation, p.dilation)
            window[r, columns] = read("x", seen, range(p.channels))
    return window
