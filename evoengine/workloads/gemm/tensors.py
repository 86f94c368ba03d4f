"""The matrix product's tensors: inputs drawn from a seed, the float64 reference, torch's own as baseline.

At full size they are rows of A and columns of B, for the tile of C that a block wrote.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch.nn.functional import gelu, silu

from evoengine.devices.pool import BlockLaunch, ChosenBlock
from evoengine.records import Config, Launch
from evoengine.workloads.base import Case, Drawn, Inputs, Outputs, Sample, Tensors
from evoengine.workloads.coverage import ROUNDINGS, SUMMED_ROWS, Cell
from evoengine.workloads.full_size import FullCase, choose_blocks, chosen_tiles, shared_blocks
from evoengine.workloads.gemm.cases import CUT_OFF
from evoengine.workloads.gemm.coverage import ALIKE
from evoengine.workloads.gemm.problem import (
    BYTES,
    NO_SCALES,
    SCALED_TOGETHER,
    GemmProblem,
    blocks_of_cluster,
    cluster_shape,
    cluster_tiles,
    fills_clusters,
    sharers,
    whole_tiles,
)
from evoengine.workloads.tensors import TORCH_DTYPES, Read, Rectangle, RectangleFullSize, normal_numbers, sampled_rows

SAMPLED_ROWS = 128
"""rows of a whole problem that are compared in float64"""

SUMMED_TOGETHER = 8
"""products that the tensor cores of sm_80 add to a sum at a time; later ones take more"""

Triple = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class GemmTensors(Tensors[GemmProblem]):
    independent = frozenset({"normal"})

    def draw(self, case: Case[GemmProblem], seed: int, device: str = "cpu") -> Drawn:
        problem, normal = case.problem, normal_numbers(seed, device)
        entries = [(normal(problem.m, problem.k), normal(problem.k, problem.n)) for _ in range(problem.batch)]
        bias = normal(problem.n)
        shaped = [shape_of(problem, case.draw)(*entry, bias) for entry in entries]
        a, b = (torch.stack([entry[i] for entry in shaped]) for i in range(2))
        if problem.batch == 1:
            a, b = a[0], b[0]
        bias = shaped[0][2]
        if case.draw == "large products" and problem.dtype == "bf16":
            a, bias = a * BEYOND_HALF, bias * BEYOND_HALF
        if case.draw == "long":
            lessen_curved(problem, a)
        of_c = {"bias": bias}
        up = {}
        if problem.gated:
            drawn = normal(*a.shape[:-2], problem.k, problem.n) / a.norm(dim=-1).mean().clamp(min=1)
            small = 1 / LARGE if case.draw == "large products" else 1.0
            up = {"b_up": stored(small * drawn, problem.b_layout == "kn").to(TORCH_DTYPES[problem.dtype])}
        if problem.residual:
            residual = normal(*problem.shape("c"))
            of_c["residual"] = residual if case.draw in ("normal", CUT_OFF, "long") else whole_numbers(residual)
        inputs = {
            "a": stored(a, problem.a_layout == "mk").to(TORCH_DTYPES[problem.dtype]),
            "b": stored(b, problem.b_layout == "kn").to(TORCH_DTYPES[problem.dtype]),
            **up,
            **{name: tensor.to(TORCH_DTYPES[problem.out_dtype]) for name, tensor in of_c.items()},
            **draw_scales(problem, case.draw, normal),
        }
        return Drawn(inputs, inputs)

    def reference(self, problem: GemmProblem, inputs: Inputs) -> Outputs:
        products = products_of(problem, inputs, torch.float64)
        return {"c": behind_products(problem, products, inputs, torch.float64)}

    def own_dtype(self, problem: GemmProblem, inputs: Inputs) -> Outputs:
        """Compute as a library does: the product summed in float32 and rounded, then each step of the epilogue rounded.

        The product is not left to torch in 16 bits, since it depends on device and settings whether that sums in 16
        bits too.
        """
        out = TORCH_DTYPES[problem.out_dtype]
        products = [product.to(out) for product in products_of(problem, inputs, torch.float32)]
        return {"c": behind_products(problem, products, inputs, out)}

    def rounded_once(self, problem: GemmProblem, inputs: Inputs) -> Outputs:
        products = products_of(problem, inputs, torch.float32)
        return {"c": behind_products(problem, products, inputs, torch.float32).to(TORCH_DTYPES[problem.out_dtype])}

    def shown(self, case: Case[GemmProblem], drawn: Drawn) -> frozenset[Cell]:
        if case.draw in ("normal", CUT_OFF):
            judged = case.draw in self.independent and case.problem.batch * case.problem.m >= SUMMED_ROWS
            return frozenset({Cell("values", ROUNDINGS)} if judged else ())
        a, b = operands(case.problem, drawn.inputs)
        first = (a, b) if case.problem.batch == 1 else (a[0], b[0])
        return frozenset(Cell("values", what) for what in _shown(*first))

    def baselines(self, problem: GemmProblem) -> tuple[str, ...]:
        return ("torch",)

    def baseline(self, name: str, problem: GemmProblem, inputs: Inputs) -> Callable[[], object]:
        """Return torch.matmul, or torch.addmm for one product with a bias, by cuBLAS; then torch's own epilogue.

        Of bytes it is torch's scaled product, or that of integers.
        """
        a, b = operands(problem, inputs)
        bias, residual = inputs["bias"], inputs.get("residual")

        def product() -> torch.Tensor:
            if problem.gated:
                up = inputs["b_up"]
                return silu(torch.matmul(a, b)) * torch.matmul(a, up if problem.b_layout == "kn" else up.mT)
            if problem.scales != NO_SCALES:
                return scaled_by_torch(problem, inputs)
            if problem.out_dtype != problem.dtype:
                return torch.mm(a, b, out_dtype=TORCH_DTYPES[problem.out_dtype]) + (bias if problem.has_bias else 0)
            if not problem.has_bias:
                return torch.matmul(a, b)
            return torch.addmm(bias, a, b) if problem.batch == 1 else torch.matmul(a, b) + bias

        if residual is None:
            return lambda: _activated(problem, product())
        return lambda: _activated(problem, product()) + residual

    def outputs_of(self, problem: GemmProblem, found: torch.Tensor) -> Outputs:
        return {"c": found}

    def samples(self, problem: GemmProblem, inputs: Inputs, seed: int) -> Sequence[Sample[GemmProblem]]:
        """Return some rows of C with all columns, the first and the last among them; of a batch, in each entry."""
        rows = sampled_rows(problem.m, SAMPLED_ROWS, seed, inputs["a"].device)
        a = inputs["a"].index_select(-2 if problem.a_layout == "mk" else -1, rows)
        part = {**inputs, "a": a}
        if problem.scales in ("row", "block"):
            part["scale_a"] = inputs["scale_a"].index_select(-1, rows)
        if problem.residual:
            part["residual"] = inputs["residual"].index_select(-2, rows)
        sampled = replace(problem, m=len(rows))
        return (Sample(sampled, part, lambda outputs: {"c": outputs["c"].index_select(-2, rows)}),)

    def check_bytes(self, problem: GemmProblem) -> int:
        """Return the bytes of A and B in float32 and the product of both, and of B in float64 for a few rows."""
        p = problem
        return p.batch * (4 * p.m * p.k + 8 * p.k * p.n + 8 * p.m * p.n)


def products_of(problem: GemmProblem, inputs: Inputs, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return A·B, and A·b_up where there is one, as `_product` does."""
    return [_product(problem, {**inputs, "b": inputs[name]}, dtype) for name in problem.operands[1:]]


def _product(problem: GemmProblem, inputs: Inputs, dtype: torch.dtype) -> torch.Tensor:
    """Return A·B by its scales, [batch, m, n], all in that dtype; int8 in float64 first, which has all its sums.

    In float32 it is summed as tensor cores do where C's dtype shows that.
    """
    a, b = operands(problem, inputs)
    if problem.scales == NO_SCALES:
        if dtype == torch.float32 == TORCH_DTYPES[problem.out_dtype]:
            return summed_in_steps(a, b)
        return a.to(dtype) @ b.to(dtype)
    of_a, of_b = (inputs[f"scale_{name}"].to(dtype) for name in "ab")
    if problem.scales == "block":
        together, n, k = SCALED_TOGETHER, problem.n, problem.k
        each_a = of_a.mT.repeat_interleave(together, -1)[..., :k]
        each_b = of_b.mT.repeat_interleave(together, -2).repeat_interleave(together, -1)[..., :k, :n]
        return (a.to(dtype) * each_a) @ (b.to(dtype) * each_b)
    exact = torch.float64 if problem.dtype == "int8" else dtype
    product = (a.to(exact) @ b.to(exact)).to(dtype)
    if problem.scales == "row":
        return product * (of_a[..., :, None] * of_b[..., None, :])
    return product * (of_a * of_b)[..., None, None] if problem.batch > 1 else product * (of_a * of_b)


def summed_in_steps(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return A·B in float32 as tensor cores sum it: eight products at a time, each sum cut off, not rounded."""
    total = torch.zeros(*a.shape[:-1], b.shape[-1], dtype=torch.float64, device=a.device)
    for k in range(0, a.shape[-1], SUMMED_TOGETHER):
        total += a[..., k : k + SUMMED_TOGETHER].double() @ b[..., k : k + SUMMED_TOGETHER, :].double()
        fraction, exponent = torch.frexp(total)
        total = torch.ldexp((fraction * 2.0**24).trunc(), exponent - 24)
    return total.float()


def scaled_by_torch(problem: GemmProblem, inputs: Inputs) -> torch.Tensor:
    """Return C without its epilogue by torch's own product of bytes; raises RuntimeError where it has none."""
    a, b = operands(problem, inputs)
    of_a, of_b = inputs["scale_a"], inputs["scale_b"]
    if problem.batch > 1 or problem.scales == "block":
        raise RuntimeError("torch has no such product of bytes")
    if problem.scales == "row":
        of_a, of_b = of_a[:, None], of_b[None, :]
    out = TORCH_DTYPES[problem.out_dtype]
    bias = inputs["bias"] if problem.has_bias else None
    # both have no other name
    if problem.dtype != "int8":
        return torch._scaled_mm(a, b, scale_a=of_a, scale_b=of_b, bias=bias, out_dtype=out)  # noqa: SLF001
    product = (torch._int_mm(a, b) * (of_a * of_b)).to(out)  # noqa: SLF001
    return product if bias is None else product + bias


def draw_scales(problem: GemmProblem, draw: str, normal: Callable[..., torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the scales of A and B, fp32; none where the problem has none.

    They are at most 1 and differ from one another by powers of two, so that exact sums remain so; those of "normal"
    draws by any factor, and A·B has unit variance then. Where products cancel out over all of K they are 1.
    """
    if problem.scales == NO_SCALES:
        return {}
    found = {}
    for name in ("a", "b"):
        drawn = -normal(*problem.scale_shape(name)).abs().clamp(max=2)
        exponent = drawn if draw in ("normal", CUT_OFF) else drawn.round()
        found[f"scale_{name}"] = torch.ones_like(drawn) if draw in CANCELLING else torch.exp2(exponent)
    if draw in ("normal", CUT_OFF):
        found["scale_b"] /= math.sqrt(problem.k) * _variance(problem, draw)
    elif problem.dtype == "int8" and draw in ("long", FULL_SIZE):
        found["scale_b"] /= 4096.0  # sums of many large numbers, which halves hold then
    return found


def _variance(problem: GemmProblem, draw: str) -> float:
    """Return that of one product of A and B of bytes, by how they are drawn."""
    if problem.dtype == "int8":
        return INTEGER_SPREAD**2
    return (exact_spread(problem) + 1) * (2 * exact_spread(problem) + 1) / 6 if draw == "normal" else 1.0


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


def behind_products(
    problem: GemmProblem, products: Sequence[torch.Tensor], inputs: Inputs, dtype: torch.dtype
) -> torch.Tensor:
    """Return the epilogue of a product, of two with swiglu, each step of it in that dtype."""
    x = products[0] + inputs["bias"].to(dtype) if problem.has_bias else products[0]
    x = silu(x) * products[1] if problem.gated else _activated(problem, x)
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


CURVED = 16.0
"""what makes sums of 4,096 ordinary products a few units large"""


def lessen_curved(problem: GemmProblem, a: torch.Tensor) -> None:
    """Lessen the ordinary rows of A [..., m, k] as `_long` draws it, in place, where GELU or SiLU follows.

    Far below 0 these functions magnify an error of their argument without limit: what tensor cores cut off from sums of
    bytes there is more than the rule allows. Sums of integers have no error.
    """
    if problem.dtype != "int8" and (problem.gated or problem.activation in ("gelu", "silu")):
        a[..., ::3, :] /= CURVED


INTEGER_SPREAD = 32.0
"""standard deviation of whole numbers of one byte that stand for normal ones"""
FULL_SIZE = "full size"
"""draws of blocks of the problem itself, for which there is no `shape_of`"""
CANCELLING = ("large products", "long")


EXACT = {"fp8_e4m3": 16, "fp8_e5m2": 8}
"""dtype → numbers up to which it has all whole ones"""
LARGEST_SUM = 1 << 13
"""up to which tensor cores cut nothing off from sums of whole products of FP8 (docs/the-gate.md)"""


def exact_spread(problem: GemmProblem) -> int:
    """Return the largest of whole numbers, each as frequent, whose sums stay exact up to six standard deviations."""
    widest = math.isqrt(int(LARGEST_SUM / (2.0 * math.sqrt(problem.k))))
    return max(1, min(EXACT[problem.dtype], widest))


def _normal_bytes(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor) -> Triple:
    """Leave it to scales to bring products to unit variance."""
    return a, b, bias


def _exact_bytes(spread: int) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Triple]:
    """Return a draw of whole numbers up to `spread`, so that C is rounded once, after the scales."""

    def evenly(normal: torch.Tensor) -> torch.Tensor:
        return normal.sign() * (torch.erf(normal.abs() / math.sqrt(2.0)) * spread).ceil().clamp(1, spread)

    return lambda a, b, bias: (evenly(a), evenly(b), bias)


def _normal_integers(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor) -> Triple:
    return _integers(a), _integers(b), bias


def _integers(normal: torch.Tensor) -> torch.Tensor:
    return (normal * INTEGER_SPREAD).round().clamp(-127, 127)


def _one_hot_integers(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor) -> Triple:
    return _one_hot(a, _integers(b), bias)


def _large_bytes(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor) -> Triple:
    """Draw as `_large_products` does, of factors that bytes have, whose products over 128 of K 14 bits can hold.

    One product is left of two that are possible, those of 128 and of 160, as columns of B repeat themselves.
    """
    k, half = torch.arange(a.shape[1], device=a.device), max(a.shape[1] // 2, 1)
    sign = torch.where(k < half, 1.0, -1.0) * (k < 2 * half - 1)
    rows = torch.where(torch.arange(a.shape[0], device=a.device) % 2 == 0, 256.0, -256.0)
    return rows[:, None] * sign, 128.0 + 32.0 * (b > 0)[k % half], bias * 256.0


def _large_integers(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor) -> Triple:
    a, b, bias = _large_products(a, b, bias)
    return a * (127.0 / LARGE), b - LARGE + 126.0, bias


def _long_integers(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor) -> Triple:
    """Draw as `_long` does, large enough that sums overflow 16 bits, and 24 of a float over all of a deep K."""
    a, b, bias = _long(a, b, bias)
    row = torch.arange(a.shape[0], device=a.device).view(-1, 1)
    return torch.where(row % 3 == 0, _integers(a), a * 127.0), (b * 100.0).round().clamp(-127, 127), bias


_SHAPED: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Triple]] = {
    "normal": _normal,
    "whole numbers": _whole,
    "positive numbers": _positive,
    "one-hot rows": _one_hot,
    "large products": _large_products,
    "long": _long,
}
_SHAPED_BYTES = {**_SHAPED, "normal": _normal_bytes, "large products": _large_bytes}
_SHAPED_INTEGERS = {
    **_SHAPED,
    "normal": _normal_integers,
    "one-hot rows": _one_hot_integers,
    "large products": _large_integers,
    "long": _long_integers,
}


def shape_of(problem: GemmProblem, draw: str) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Triple]:
    """Return what makes A, B and the bias of normal numbers."""
    if problem.dtype == "int8":
        return _SHAPED_INTEGERS[draw]
    if problem.dtype in BYTES and draw == "normal":
        return _exact_bytes(exact_spread(problem))
    draw = "normal" if draw == CUT_OFF else draw
    return (_SHAPED_BYTES if problem.dtype in BYTES else _SHAPED)[draw]


# ── at full size ──────────────────────────────────────────────────────────────────────────────────────────────────────


MOST_POSITIVE = 4096
"""number of products of at most 9 whose sum a half can represent"""


INTEGERS = (60.0, 64.0, 65.0)
"""in place of 1 to 3: two of them are an ordinary half, which the residual is read as"""


def blocks_of(case: FullCase[Any], problem: GemmProblem, launch: Launch, seed: int) -> list[ChosenBlock]:
    """Return the blocks of a case of `problem` to run: of shared tiles all, in one order for all of them."""
    if not case.tiles:
        return choose_blocks(case, launch, seed)
    tiles = chosen_tiles(cluster_tiles(problem, case.config), case.tiles, seed)
    return shared_blocks({block for tile in tiles for block in sharers(problem, case.config, tile)}, seed)


def possible_tiles(case: FullCase[Any], problem: GemmProblem, asked: BlockLaunch) -> range:
    """Return how many tiles a cluster gets when they are dealt out in turn, or how many have all their blocks.

    Some tiles of a cluster's blocks may lie outside of C.
    """
    config = case.config
    together = prod(cluster_shape(config))
    if case.tiles:
        share = most = len(whole_tiles(problem, config, {block.number for block in asked.blocks}))
    else:
        clusters = prod(asked.launch.grid) // blocks_of_cluster(config)
        share, left = divmod(cluster_tiles(problem, config), clusters)
        most = share + bool(left)
    if fills_clusters(problem, config):
        return range(share * together, most * together + 1, together)
    return range(share, most * together + 1)


def numbers_at_full_size(problem: GemmProblem, normal: torch.Tensor) -> torch.Tensor:
    """Return whole numbers, whose sums are exact.

    They are positive, so that no sum is so small that its relative error is meaningless; over all of K, where sums
    might overflow a half, they have signs. Of a gated product, which multiplies two sums, they are normal, and the sums
    of unit variance.
    """
    if problem.gated:
        return normal / math.sqrt(math.sqrt(problem.k))
    numbers = whole_numbers(normal) if problem.k > MOST_POSITIVE else positive_numbers(normal)
    if problem.dtype == "int8":
        return numbers.sign() * torch.tensor(INTEGERS)[numbers.abs().long() - 1]
    return numbers


class GemmFullSize(RectangleFullSize[GemmProblem]):
    def tile(self, problem: GemmProblem, config: Config) -> tuple[int, int]:
        return int(config["tile_m"]), int(config["tile_n"])

    def values(self, case: FullCase[GemmProblem], normal: torch.Tensor) -> torch.Tensor:
        return numbers_at_full_size(case.problem, normal)

    def blocks(self, case: FullCase[GemmProblem], launch: Launch, seed: int) -> list[ChosenBlock]:
        return blocks_of(case, case.problem, launch, seed)

    def tiles_of(self, case: FullCase[GemmProblem], asked: BlockLaunch) -> range:
        return possible_tiles(case, case.problem, asked)

    def drawn(self, case: FullCase[GemmProblem], seed: int) -> Inputs:
        """Return the scales, and a bias of another dtype than A's; a residual is what the pool holds in its dtype."""
        p, normal = case.problem, normal_numbers(seed)
        found = draw_scales(p, FULL_SIZE, normal)
        if p.out_dtype != p.dtype:
            found["bias"] = whole_numbers(normal(p.n)).to(TORCH_DTYPES[p.out_dtype])
        return found

    def part(self, problem: GemmProblem, rectangle: Rectangle, read: Read) -> tuple[GemmProblem, Inputs]:
        p, entry = problem, rectangle.rows.start // problem.m
        rows = range(rectangle.rows.start % p.m, rectangle.rows.start % p.m + len(rectangle.rows))
        of = {"m": rows, "n": rectangle.columns, "k": range(p.k)}
        sizes = {"m": p.m, "n": p.n, "k": p.k}

        def part_of(name: str) -> torch.Tensor:
            rows_in_memory, columns_in_memory = (of[axis] for axis in p.axes(name))
            before = entry * sizes[p.axes(name)[0]]
            return read(name, range(before + rows_in_memory.start, before + rows_in_memory.stop), columns_in_memory)

        names = (*p.operands, "residual") if p.residual else p.operands
        inputs = {name: part_of(name) for name in names} | {"bias": read("bias", range(1), rectangle.columns)[0]}
        inputs |= self._scales(p, rows, rectangle.columns, entry, read)
        return replace(p, batch=1, m=len(rows), n=len(rectangle.columns)), inputs

    def _scales(self, problem: GemmProblem, rows: range, columns: range, entry: int, read: Read) -> Inputs:
        if problem.scales == "tensor":
            own = range(entry, entry + 1)
            return {f"scale_{name}": read(f"scale_{name}", range(1), own)[0] for name in "ab"}
        if problem.scales == "row":
            own = range(entry, entry + 1)
            return {"scale_a": read("scale_a", own, rows)[0], "scale_b": read("scale_b", own, columns)[0]}
        if problem.scales == "block":
            deep, first = problem.scale_shape("b")[-1], columns.start // SCALED_TOGETHER
            after = -(-columns.stop // SCALED_TOGETHER)
            before = entry * problem.scale_shape("b")[-2]
            return {
                "scale_a": read("scale_a", range(entry * deep, (entry + 1) * deep), rows),
                "scale_b": read("scale_b", range(before + first, before + after), range(deep)),
            }
        return {}
