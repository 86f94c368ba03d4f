"""The tensors of a product with 4-bit weights: inputs drawn from a seed, the float64 reference, torch's baseline."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from evoengine.devices.pool import BlockLaunch, ChosenBlock
from evoengine.records import Config, Launch
from evoengine.workloads.base import Case, Drawn, Inputs, Outputs, Sample, Tensors
from evoengine.workloads.coverage import Cell
from evoengine.workloads.full_size import FullCase
from evoengine.workloads.gemm.tensors import (
    BEYOND_HALF,
    SAMPLED_ROWS,
    GemmTensors,
    blocks_of,
    lessen_curved,
    positive_numbers,
    possible_tiles,
    shape_of,
    whole_numbers,
)
from evoengine.workloads.tensors import TORCH_DTYPES, Read, Rectangle, RectangleFullSize, normal_numbers, sampled_rows
from evoengine.workloads.w4a16.cases import EVERY_WEIGHT
from evoengine.workloads.w4a16.problem import MIDDLE, PACKED, W4A16Problem

DEVIATION = 6.5
"""standard deviation of a drawn weight minus a drawn zero point"""
LARGE_SCALE = 32.0
"""6 and 7 times that, by gemm's LARGE, is more than half of the largest half"""


class Weights(NamedTuple):
    """Weights minus their zero points [k, n], zero points and scales [k / group, n], all as floats."""

    differences: torch.Tensor
    zeros: torch.Tensor
    scales: torch.Tensor


class W4A16Tensors(Tensors[W4A16Problem]):
    independent = frozenset({"normal"})

    def draw(self, case: Case[W4A16Problem], seed: int, device: str = "cpu") -> Drawn:
        p, normal = case.problem, normal_numbers(seed, device)
        a, _, bias = shape_of(p.gemm, case.draw)(normal(p.m, p.k), normal(p.k, 1), normal(p.n))
        if case.draw == "large products" and p.dtype == "bf16":
            a, bias = a * BEYOND_HALF, bias * BEYOND_HALF
        if case.draw == "long":
            lessen_curved(p.gemm, a)
        weights = _weights(p, case.draw, normal)
        dtype = TORCH_DTYPES[p.dtype]
        inputs = {"a": a.to(dtype), **packed(p, weights), "scales": weights.scales.to(dtype)}
        if p.has_bias:
            inputs["bias"] = bias.to(dtype)
        return Drawn(inputs, inputs)

    def reference(self, problem: W4A16Problem, inputs: Inputs) -> Outputs:
        return GemmTensors().reference(problem.gemm, of_gemm(problem, inputs, torch.float64))

    def own_dtype(self, problem: W4A16Problem, inputs: Inputs) -> Outputs:
        return GemmTensors().own_dtype(problem.gemm, of_gemm(problem, inputs, TORCH_DTYPES[problem.dtype]))

    def rounded_once(self, problem: W4A16Problem, inputs: Inputs) -> Outputs:
        """Return the product with rounded weights, because tensor cores take no 32-bit operands."""
        return GemmTensors().rounded_once(problem.gemm, of_gemm(problem, inputs, TORCH_DTYPES[problem.dtype]))

    def shown(self, case: Case[W4A16Problem], drawn: Drawn) -> frozenset[Cell]:
        p, inputs = case.problem, of_gemm(case.problem, drawn.inputs, torch.float64)
        found = GemmTensors().shown(Case(case.name, p.gemm, case.draw), Drawn(inputs, inputs))
        zeros = unpacked(drawn.inputs["qzeros"], 1) if p.zeros else None
        weights = unpacked(drawn.inputs["qweight"], 0)
        if len(weights.unique()) == 16 and (zeros is None or len(zeros.unique()) == 16):
            found |= {Cell("values", EVERY_WEIGHT)}
        return found

    def baselines(self, problem: W4A16Problem) -> tuple[str, ...]:
        return ("torch",)

    def baseline(self, name: str, problem: W4A16Problem, inputs: Inputs) -> Callable[[], object]:
        """Return torch's product with 16-bit weights, which were expanded before."""
        return GemmTensors().baseline(name, problem.gemm, of_gemm(problem, inputs, TORCH_DTYPES[problem.dtype]))

    def outputs_of(self, problem: W4A16Problem, found: torch.Tensor) -> Outputs:
        return {"c": found}

    def samples(self, problem: W4A16Problem, inputs: Inputs, seed: int) -> Sequence[Sample[W4A16Problem]]:
        """Return some rows of C with all columns, the first and the last among them."""
        rows = sampled_rows(problem.m, SAMPLED_ROWS, seed, inputs["a"].device)
        part = {**inputs, "a": inputs["a"][rows]}
        return (Sample(replace(problem, m=len(rows)), part, lambda outputs: {"c": outputs["c"][rows]}),)

    def check_bytes(self, problem: W4A16Problem) -> int:
        """Return the bytes of A in float32, of the product in both, and of four copies of the weights in float64."""
        p = problem
        return 4 * p.m * p.k + 32 * p.k * p.n + 12 * p.m * p.n


def of_gemm(problem: W4A16Problem, inputs: Inputs, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return the inputs of the product with weights of that dtype. Their differences from zero points are exact."""
    p = problem
    zeros = unpacked(inputs["qzeros"], 1) if p.zeros else torch.full_like(inputs["scales"], MIDDLE, dtype=torch.int32)
    differences = unpacked(inputs["qweight"], 0) - zeros.repeat_interleave(p.group, 0)
    b = differences.to(dtype) * inputs["scales"].to(dtype).repeat_interleave(p.group, 0)
    bias = inputs["bias"] if p.has_bias else torch.zeros(p.n, dtype=TORCH_DTYPES[p.dtype], device=b.device)
    return {"a": inputs["a"], "b": b, "bias": bias}


def packed(problem: W4A16Problem, weights: Weights) -> dict[str, torch.Tensor]:
    """Return qweight, and qzeros if the problem has zero points."""
    whole = (weights.differences + weights.zeros.repeat_interleave(problem.group, 0)).to(torch.int64)
    words = {"qweight": _words(whole.view(-1, PACKED, problem.n), 1)}
    if problem.zeros:
        words["qzeros"] = _words(weights.zeros.to(torch.int64).view(-1, problem.n // PACKED, PACKED), 2)
    return words


def unpacked(words: torch.Tensor, axis: int) -> torch.Tensor:
    """Return the eight 4-bit numbers of each int32 in order along an axis, the lowest first."""
    return torch.stack([words >> 4 * e & 15 for e in range(PACKED)], axis + 1).flatten(axis, axis + 1)


def _words(numbers: torch.Tensor, axis: int) -> torch.Tensor:
    shifts = torch.arange(0, 4 * PACKED, 4, device=numbers.device).view([-1 if i == axis else 1 for i in range(3)])
    word = (numbers << shifts).sum(axis)
    return torch.where(word >= 1 << 31, word - (1 << 32), word).to(torch.int32)


def _weights(p: W4A16Problem, draw: str, normal: Callable[..., torch.Tensor]) -> Weights:
    """Draw weights, zero points and scales.

    Scales are powers of two if sums are to be exact. If products cancel over all of K, all weights have one scale, and
    the second half of K repeats the first.
    """
    groups, half = p.shape("scales")[0], p.k // 2
    drawn, exponent = normal(p.k, p.n), normal(groups, p.n).abs().clamp(max=2)
    match draw:
        case "whole numbers" | "positive numbers":
            differences = (whole_numbers if draw == "whole numbers" else positive_numbers)(drawn)
            zeros = _between(normal(groups, p.n), 3, 12) if p.zeros else _middle(exponent)
            return Weights(differences, zeros, torch.exp2(exponent.clamp(max=1).round()))
        case "large products":
            zeros = torch.zeros_like(exponent) if p.zeros else _middle(exponent)
            differences = 6.0 + (drawn > 0)[torch.arange(p.k, device=drawn.device) % max(half, 1)]
            return Weights(differences, zeros, torch.full_like(exponent, LARGE_SCALE))
        case "long":
            zeros = _between(normal(groups, p.n), 0, 8) if p.zeros else _middle(exponent)
            return Weights(6.0 + (drawn > 0), zeros, torch.full_like(exponent, 0.1))
    zeros = _between(normal(groups, p.n), 0, 15) if p.zeros else _middle(exponent)
    differences = _between(drawn, 0, 15) - zeros.repeat_interleave(p.group, 0)
    if draw == "one-hot rows":
        return Weights(differences, zeros, torch.exp2(-exponent.round()))
    return Weights(differences, zeros, torch.exp2(-exponent) / (DEVIATION * math.sqrt(p.k)))


def _between(normal: torch.Tensor, least: int, most: int) -> torch.Tensor:
    """Return integers, all equally likely."""
    share: torch.Tensor = torch.special.ndtr(normal).clamp(max=1 - 1e-6)
    return least + (share * (most - least + 1)).floor()


def _middle(like: torch.Tensor) -> torch.Tensor:
    return torch.full_like(like, float(MIDDLE))


# The product at full size: words and zero points are whatever bits the pool has, whose numbers are A's and the scales'.


class W4A16FullSize(RectangleFullSize[W4A16Problem]):
    def tile(self, problem: W4A16Problem, config: Config) -> tuple[int, int]:
        return int(config["tile_m"]), int(config["tile_n"])

    def values(self, case: FullCase[W4A16Problem], normal: torch.Tensor) -> torch.Tensor:
        """Return numbers whose sums over K have about unit variance."""
        return normal / math.sqrt(DEVIATION * math.sqrt(case.problem.k))

    def blocks(self, case: FullCase[W4A16Problem], launch: Launch, seed: int) -> list[ChosenBlock]:
        return blocks_of(case, case.problem.gemm, launch, seed)

    def tiles_of(self, case: FullCase[W4A16Problem], asked: BlockLaunch) -> range:
        return possible_tiles(case, case.problem.gemm, asked)

    def part(self, problem: W4A16Problem, rectangle: Rectangle, read: Read) -> tuple[W4A16Problem, Inputs]:
        p, rows, columns = problem, rectangle.rows, rectangle.columns
        groups = range(p.k // p.group)
        inputs = {
            "a": read("a", rows, range(p.k)),
            "qweight": read("qweight", range(p.k // PACKED), columns),
            "scales": read("scales", groups, columns),
        }
        if p.zeros:
            inputs["qzeros"] = read("qzeros", groups, range(columns.start // PACKED, columns.stop // PACKED))
        if p.has_bias:
            inputs["bias"] = read("bias", range(1), columns)[0]
        return replace(p, m=len(rows), n=len(columns)), inputs
