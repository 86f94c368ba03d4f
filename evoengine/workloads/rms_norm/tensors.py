"""RMS normalisation's tensors: inputs drawn from a seed, the float64 reference, torch's own as baseline."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch

from evoengine.records import Config
from evoengine.workloads.base import Case, Drawn, Inputs, Outputs, Sample, Tensors
from evoengine.workloads.coverage import Cell
from evoengine.workloads.rms_norm import EPS, EXTREMES, INDEPENDENT, KINDS, TWO_CONSTANTS, RmsNormProblem
from evoengine.workloads.tensors import TORCH_DTYPES, Read, Rectangle, RectangleFullSize, normal_numbers, sampled_rows

SAMPLED_ROWS = 256
"""number of rows of a whole problem that are compared in float64"""

MANY = 33
"""number of rows over whose errors sums are judged"""

Pair = tuple[torch.Tensor, torch.Tensor]


class RmsNormTensors(Tensors[RmsNormProblem]):
    """Tensors of RMS normalisation. The reference norms the sum before it is rounded, as FlashInfer does.

    A kernel may norm the rounded sum, as vLLM does. The tolerance permits both: rounding the sum moves y by at most
    half a spacing.
    """

    independent = frozenset({"16 bits"})

    def draw(self, case: Case[RmsNormProblem], seed: int, device: str = "cpu") -> Drawn:
        problem, normal = case.problem, normal_numbers(seed, device)
        x, residual = normal(problem.rows, problem.hidden), normal(problem.rows, problem.hidden)
        x, residual = _SHAPED[case.draw](problem, x, residual)
        # No weight is near 0, so that an error in any column shows.
        weight = normal(problem.hidden)
        weight = weight + weight.sign()
        dtype = TORCH_DTYPES[problem.dtype]
        inputs = {"x": x.to(dtype), "residual": residual.to(dtype), "weight": weight.to(dtype)}
        return Drawn(inputs, inputs)

    def reference(self, problem: RmsNormProblem, inputs: Inputs) -> Outputs:
        x, residual, weight = (inputs[name].double() for name in ("x", "residual", "weight"))
        total = x + residual
        return {"y": total * _inverse_rms(total) * weight, "residual_out": total}

    def own_dtype(self, problem: RmsNormProblem, inputs: Inputs) -> Outputs:
        """Return the norm in float32, rounded before the product with the weight and after it, as Llama's code does.

        Squares are added sequentially, which is the longest chain of roundings and dominates the error in float32.
        """
        total = inputs["x"] + inputs["residual"]
        squares = total.float().square().cpu().numpy()
        mean = np.add.accumulate(squares, axis=-1)[:, -1:] / np.float32(problem.hidden)
        normed = total.float() * (torch.from_numpy(mean).to(total.device) + EPS).rsqrt()
        return {"y": normed.to(total.dtype) * inputs["weight"], "residual_out": total}

    def rounded_once(self, problem: RmsNormProblem, inputs: Inputs) -> Outputs:
        """Return the norm of the rounded sum, which is the most rounding that a kernel may do."""
        total = inputs["x"] + inputs["residual"]
        y = total.float() * _inverse_rms(total.float()) * inputs["weight"].float()
        return {"y": y.to(total.dtype), "residual_out": total}

    def library(self, problem: RmsNormProblem, inputs: Inputs) -> Outputs:
        return self.rounded_once(problem, inputs)

    def shown(self, case: Case[RmsNormProblem], drawn: Drawn) -> frozenset[Cell]:
        if case.draw == "normal":
            return frozenset()
        return frozenset(Cell("values", what) for what in _shown(case.problem, drawn.inputs))

    def baselines(self, problem: RmsNormProblem) -> tuple[str, ...]:
        return ("torch",)

    def baseline(self, name: str, problem: RmsNormProblem, inputs: Inputs) -> Callable[[], object]:
        """Return an addition and torch.nn.functional.rms_norm, which read and write the sum once more than if fused."""

        def call() -> torch.Tensor:
            total = inputs["x"] + inputs["residual"]
            return torch.nn.functional.rms_norm(total, (problem.hidden,), inputs["weight"], EPS)

        return call

    def outputs_of(self, problem: RmsNormProblem, found: torch.Tensor) -> Outputs:
        return {"y": found}

    def samples(self, problem: RmsNormProblem, inputs: Inputs, seed: int) -> Sequence[Sample[RmsNormProblem]]:
        """Return some rows, including the first and the last."""
        rows = sampled_rows(problem.rows, SAMPLED_ROWS, seed, inputs["x"].device)
        part = {"x": inputs["x"][rows], "residual": inputs["residual"][rows], "weight": inputs["weight"]}

        def take(outputs: Outputs) -> Outputs:
            return {name: tensor[rows] for name, tensor in outputs.items()}

        return (Sample(replace(problem, rows=len(rows)), part, take),)

    def check_bytes(self, problem: RmsNormProblem) -> int:
        """Return the bytes of both inputs in float32, and of four intermediate tensors of that size."""
        return 16 * problem.rows * problem.hidden


def _shown(problem: RmsNormProblem, inputs: Inputs) -> Iterator[str]:
    """Yield what rows show, by their sums and magnitudes."""
    x = inputs["x"].double()
    total = x + inputs["residual"].double()
    size, largest = total.abs(), total.abs().amax(1)
    square = size.square().mean(1)
    rows = {
        EXTREMES[0]: (largest > 500) & (size.median(1).values < 5),
        EXTREMES[1]: largest == 0,
        EXTREMES[2]: (largest > 0) & (square < 10 * EPS),
        EXTREMES[3]: (square > 65504) & (size.median(1).values > 100),
        EXTREMES[4]: (largest > 0) & (largest < x.abs().amax(1) / 64),
        EXTREMES[5]: (total == total[:, :1]).all(1) & (largest > 0),
    }
    yield from (name for name, found in rows.items() if bool(found.any()))
    first, last = size[:, :1], size[:, -1:]
    halves = ((size == first) | (size == last)).all(1) & (first[:, 0] == 2 * last[:, 0])
    if bool(halves.any()) and (problem.rows == 1 or len(largest.unique()) > 1):
        yield TWO_CONSTANTS
    if problem.rows >= MANY and bool(((square > 0.5) & (square < 8)).all()) and not bool(halves.any()):
        yield INDEPENDENT


def _inverse_rms(total: torch.Tensor) -> torch.Tensor:
    return (total.square().mean(-1, keepdim=True) + EPS).rsqrt()


def _normal(problem: RmsNormProblem, x: torch.Tensor, residual: torch.Tensor) -> Pair:
    return x, residual


def _extreme_rows(problem: RmsNormProblem, x: torch.Tensor, residual: torch.Tensor) -> Pair:
    """Draw rows of KINDS kinds in turn, so that neighbours differ.

    The kinds are: ordinary rows; one element far above all others; zeros, for which eps prevents a division by 0;
    values whose squares are as small as eps and have few bits in a half; values whose squares overflow a half (and for
    other dtypes almost overflow float32); sums that almost cancel; and constants whose squares add up to more than a
    half can count.
    """
    large = 300.0 if problem.dtype == "fp16" else 2.0**50
    kind = torch.arange(problem.rows, device=x.device).view(-1, 1) % KINDS
    column = torch.arange(problem.hidden, device=x.device)
    row = torch.arange(problem.rows, device=x.device).view(-1, 1)
    peak = column == row * 7 % problem.hidden
    x = torch.where((kind == 1) & peak, 3000.0, x)
    x = torch.where(kind == 2, 0.0, x)
    x = torch.where(kind == 3, 1e-3 * (x + x.sign()) / 2.0, x)
    x = torch.where(kind == 4, large * x, x)
    x = torch.where(kind == 6, 1.5, x)
    residual = torch.where((kind == 2) | (kind == 3) | (kind == 6), 0.0, residual)
    residual = torch.where(kind == 5, residual / 256.0 - x, residual)
    return x, residual


def _constant_rows(problem: RmsNormProblem, x: torch.Tensor, residual: torch.Tensor) -> Pair:
    """Set each row to one magnitude from 1 to 2, halved in its second half, which exposes sums with wrong columns.

    A sum may miss columns or count some twice. Neighbouring rows differ in magnitude, so that a row's sum in another's
    place is exposed too.
    """
    row = torch.arange(problem.rows, device=x.device).view(-1, 1)
    column = torch.arange(problem.hidden, device=x.device)
    size = (1.0 + row % 16 / 16.0) * torch.where(column < problem.hidden / 2, 1.0, 0.5)
    return size * x.sign(), torch.zeros_like(residual)


_SHAPED: dict[str, Callable[[RmsNormProblem, torch.Tensor, torch.Tensor], Pair]] = {
    "normal": _normal,
    "16 bits": _normal,
    "extreme rows": _extreme_rows,
    "constant rows": _constant_rows,
}


# RMS normalisation at full size: the rows that a block wrote.


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
