"""The matrix product's tensors: inputs drawn from a seed, the float64 reference, torch's own as baseline."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch.nn.functional import gelu, silu

from evoengine.workloads.base import Case, Drawn, Inputs, Outputs, Sample, Tensors
from evoengine.workloads.coverage import Cell
from evoengine.workloads.gemm.coverage import ALIKE
from evoengine.workloads.gemm.problem import GemmProblem
from evoengine.workloads.tensors import TORCH_DTYPES

SAMPLED_ROWS = 128
"""rows of a whole problem that are compared in float64"""

Triple = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class GemmTensors(Tensors[GemmProblem]):
    independent = frozenset({"normal"})

    def draw(self, case: Case[GemmProblem], seed: int, device: str = "cpu") -> Drawn:
        problem = case.problem
        generator = torch.Generator(device=device).manual_seed(seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, device=device)

        entries = [(normal(problem.m, problem.k), normal(problem.k, problem.n)) for _ in range(problem.batch)]
        bias = normal(problem.n)
        shaped = [_SHAPED[case.draw](*entry, bias) for entry in entries]
        a, b = (torch.stack([entry[i] for entry in shaped]) for i in range(2))
        if problem.batch == 1:
            a, b = a[0], b[0]
        bias = shaped[0][2]
        if case.draw == "large products" and problem.dtype == "bf16":
            a, bias = a * BEYOND_HALF, bias * BEYOND_HALF
        found = {"a": stored(a, problem.a_layout == "mk"), "b": stored(b, problem.b_layout == "kn"), "bias": bias}
        if problem.residual:
            residual = normal(*problem.shape("c"))
            found["residual"] = residual if case.draw in ("normal", "long") else whole_numbers(residual)
        inputs = {name: tensor.to(TORCH_DTYPES[problem.dtype]) for name, tensor in found.items()}
        return Drawn(inputs, inputs)

    def reference(self, problem: GemmProblem, inputs: Inputs) -> Outputs:
        a, b = operands(problem, inputs)
        return {"c": _epilogue(problem, a.double() @ b.double(), inputs, torch.float64)}

    def own_dtype(self, problem: GemmProblem, inputs: Inputs) -> Outputs:
        """Compute as a library does: the product summed in float32 and rounded, then each step of the epilogue rounded.

        The product is not left to torch in 16 bits, since it depends on device and settings whether that sums in 16
        bits too.
        """
        a, b = operands(problem, inputs)
        return {"c": _epilogue(problem, (a.float() @ b.float()).to(a.dtype), inputs, a.dtype)}

    def rounded_once(self, problem: GemmProblem, inputs: Inputs) -> Outputs:
        a, b = operands(problem, inputs)
        return {"c": _epilogue(problem, a.float() @ b.float(), inputs, torch.float32).to(a.dtype)}

    def shown(self, case: Case[GemmProblem], drawn: Drawn) -> frozenset[Cell]:
        if case.draw == "normal":
            return frozenset()
        a, b = operands(case.problem, drawn.inputs)
        first = (a, b) if case.problem.batch == 1 else (a[0], b[0])
        return frozenset(Cell("values", what) for what in _shown(*first))

    def baselines(self, problem: GemmProblem) -> tuple[str, ...]:
        return ("torch",)

    def baseline(self, name: str, problem: GemmProblem, inputs: Inputs) -> Callable[[], object]:
        """Return torch.matmul, or torch.addmm for one product with a bias, by cuBLAS; then torch's own epilogue."""
        a, b = operands(problem, inputs)
        bias, residual = inputs["bias"], inputs.get("residual")

        def product() -> torch.Tensor:
            if not problem.has_bias:
                return torch.matmul(a, b)
            return torch.addmm(bias, a, b) if problem.batch == 1 else torch.matmul(a, b) + bias

        if residual is None:
            return lambda: _activated(problem, product())
        return lambda: _activated(problem, product()) + residual

    def samples(self, problem: GemmProblem, inputs: Inputs, seed: int) -> Sequence[Sample[GemmProblem]]:
        """Return some rows of C with all columns, the first and the last among them; of a batch, in each entry."""
        generator = torch.Generator().manual_seed(seed)
        some = torch.randperm(problem.m, generator=generator)[:SAMPLED_ROWS]
        rows = torch.unique(torch.cat([some, torch.tensor([0, problem.m - 1])])).to(inputs["a"].device)
        a = inputs["a"].index_select(-2 if problem.a_layout == "mk" else -1, rows)
        part = {**inputs, "a": a}
        if problem.residual:
            part["residual"] = inputs["residual"].index_select(-2, rows)
        sampled = replace(problem, m=len(rows))
        return (Sample(sampled, part, lambda outputs: {"c": outputs["c"].index_select(-2, rows)}),)

    def check_bytes(self, problem: GemmProblem) -> int:
        """Return the bytes of A and B in float32 and the product of both, and of B in float64 for a few rows."""
        p = problem
        return p.batch * (4 * p.m * p.k + 8 * p.k * p.n + 8 * p.m * p.n)


def stored(operand: torch.Tensor, as_is: bool) -> torch.Tensor:
    """Return A [m, k] or B [k, n] as the problem stores it, or the other way round."""
    return operand if as_is else operand.transpose(-1, -2).contiguous()


def operands(problem: GemmProblem, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Return views of A [batch, m, k] and B [batch, k, n], whatever their layouts."""
    a, b = inputs["a"], inputs["b"]
    return a if problem.a_layout == "mk" else a.mT, b if problem.b_layout == "kn" else b.mT


def _shown(a: torch.Tensor, b: torch.Tensor) -> Iterator[str]:
    """Yield what A [m, k] and B [k, n] show, by some rows of A and the first column of B."""
    a, b = a[:6].float(), b.float()
    products = a * b[:, 0]
    sums = products.cumsum(1).abs()
    if bool(((sums.amax(1) > 65504) & (sums[:, -1] < sums.amax(1) / 4)).any()):
        yield "sums that overflow a half and cancel out"
    if bool(((a != 0).sum(1) == 1).all()) and a.shape[1] > 1:
        yield "rows that point at one row of B"
    if bool((a == a.round()).all()) and bool((b == b.round()).all()) and bool((a != 0).all()):
        yield (
            "numbers above 0 alone" if bool((a > 0).all() and (b > 0).all()) else "whole numbers, whose sums are exact"
        )
    if products.shape[1] < ALIKE:
        return
    alike = (products / products.mean(1, keepdim=True) - 1).abs().amax(1) < 1.0
    if bool(alike.any()):
        yield f"{ALIKE:,} products that are alike"
    if bool(
        ((products.sum(1).abs() < 0.05 * products.abs().sum(1)) & (sums.amax(1) > 0.4 * products.abs().sum(1))).any()
    ):
        yield f"{ALIKE:,} products that cancel out"


def _activated(problem: GemmProblem, x: torch.Tensor) -> torch.Tensor:
    match problem.activation:
        case "relu":
            return x.relu()
        case "gelu":
            return gelu(x)
        case "silu":
            return silu(x)
    return x


def _epilogue(problem: GemmProblem, product: torch.Tensor, inputs: Inputs, dtype: torch.dtype) -> torch.Tensor:
    """Return the epilogue of a product, each step of it in that dtype."""
    x = product + inputs["bias"].to(dtype) if problem.has_bias else product
    x = _activated(problem, x)
    return x + inputs["residual"].to(dtype) if problem.residual else x


BEYOND_HALF = 2.0**30
"""times ordinary values: what a kernel for bfloat16 must not keep in halves on its way"""


def _normal(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor) -> Triple:
    """Scale products to unit variance, as large as the bias, where ReLU and GELU are not linear."""
    return a, b / math.sqrt(a.shape[1]), bias


def positive_numbers(normal: torch.Tensor) -> torch.Tensor:
    """Return whole numbers from 1 to 3, whose sums are exact."""
    return (2.0 * normal.abs()).ceil().clamp(1, 3)


def whole_numbers(normal: torch.Tensor) -> torch.Tensor:
    """Return whole numbers from -3 to 3, none of them 0, whose sums are exact."""
    return normal.sign() * positive_numbers(normal)


def _whole(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor) -> Triple:
    """Draw numbers whose sums are exact, so that the smallest fault shows."""
    return whole_numbers(a), whole_numbers(b), whole_numbers(bias)


def _positive(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor) -> Triple:
    """Draw positive whole numbers, for rows so short that GELU of negative sums might leave only erf's rounding."""
    return positive_numbers(a), positive_numbers(b), positive_numbers(bias)


def _one_hot(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor) -> Triple:
    """Point every row of A at one row of B, in an order of its own.

    Rows and columns that land in the wrong place show.
    """
    k = a.shape[1]
    row = torch.arange(a.shape[0], device=a.device)
    pointed = torch.zeros_like(a)
    pointed[row, row * 7 % k] = 1.0
    return pointed, b, bias


LARGE = 192.0
"""its square exceeds half of the largest half, and sums of many of its squares are exact in float32"""


def _large_products(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor) -> Triple:
    """Draw products near the largest half that exceed it over the first half of K and cancel over the second.

    About LARGE² or -LARGE² is left, in whole multiples of LARGE, exact in float32.
    """
    k, half = torch.arange(a.shape[1], device=a.device), a.shape[1] // 2
    sign = torch.where(k < half, 1.0, -1.0) * (k < 2 * half - 1)
    rows = torch.where(torch.arange(a.shape[0], device=a.device) % 2 == 0, LARGE, -LARGE)
    return rows[:, None] * sign, LARGE + (b > 0), bias * LARGE


def _long(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor) -> Triple:
    """Draw rows of three kinds in turn, which show sums kept in 16 bits.

    Ordinary rows; sums of 2/3 and the like, which in 16 bits are rounded the same way for as long as their exponent
    stays; and such sums that all but cancel out, which leaves the accumulated rounding errors.
    """
    k = torch.arange(a.shape[1], device=a.device)
    row = torch.arange(a.shape[0], device=a.device).view(-1, 1)
    sign = torch.where(k < a.shape[1] // 2, 1.0, -1.0)
    ones = torch.where(row % 3 == 1, 1.0, sign)
    return torch.where(row % 3 == 0, a, ones), (2.0 + b / 4.0) / 3.0, bias


_SHAPED: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Triple]] = {
    "normal": _normal,
    "whole numbers": _whole,
    "positive numbers": _positive,
    "one-hot rows": _one_hot,
    "large products": _large_products,
    "long": _long,
}
