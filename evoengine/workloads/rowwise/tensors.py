"""The tensors of operators on rows: inputs drawn from a seed, references in float64, torch's own as baseline."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch.nn import functional

from evoengine.records import Config
from evoengine.workloads.base import Case, Drawn, Inputs, Outputs, Sample, Tensors
from evoengine.workloads.coverage import Cell
from evoengine.workloads.full_size import FullCase
from evoengine.workloads.rows import MANY_ROWS, rows_of
from evoengine.workloads.rowwise import EXPONENTIAL_ROWS, INDEPENDENT, NORM_ROWS, RowwiseProblem
from evoengine.workloads.tensors import TORCH_DTYPES, Read, Rectangle, RectangleFullSize, normal_numbers, sampled_rows

SAMPLED_ROWS = 256
"""number of rows of a whole problem that are compared in float64"""
LABELS = 5
"""number of kinds of labels in turn in extreme rows"""
IGNORED = -100
"""label of rows whose loss is 0 in torch; here every label that is not a column has this loss"""
Normal = Callable[..., torch.Tensor]


# Results in the dtype of the inputs, with sums over a row by `total`.

Total = Callable[[torch.Tensor], torch.Tensor]


def _sum(x: torch.Tensor) -> torch.Tensor:
    return x.sum(-1, keepdim=True)


def _sum_in_turn(x: torch.Tensor) -> torch.Tensor:
    """Add float32 values sequentially, which is the longest chain of roundings."""
    return torch.from_numpy(np.add.accumulate(x.cpu().numpy(), axis=-1)[:, -1:]).to(x.device)


def _sum_off(x: torch.Tensor) -> torch.Tensor:
    """Return sums of float64 values, each larger by the standard deviation of the error of `_sum_in_turn`.

    Each of its additions is rounded by at most half a spacing of the sum so far, uniformly: u²·sum²/3 is the variance.
    """
    unit = torch.finfo(torch.float32).eps / 2
    return _sum(x) + unit * (x.cumsum(-1).square().sum(-1, keepdim=True) / 3.0).sqrt()


def _layer_norm(p: RowwiseProblem, of: Inputs, total: Total) -> torch.Tensor:
    centred = of["x"] - total(of["x"]) / p.hidden
    deviation = (total(centred.square()) / p.hidden + p.of.eps).sqrt()
    return centred / deviation * of["weight"] + of["bias"]


def _rms_norm(p: RowwiseProblem, of: Inputs, total: Total) -> torch.Tensor:
    return of["x"] / (total(of["x"].square()) / p.hidden + p.of.eps).sqrt() * of["weight"]


def _softmax(p: RowwiseProblem, of: Inputs, total: Total) -> torch.Tensor:
    powers = (of["x"] - of["x"].amax(-1, keepdim=True)).exp()
    return powers / total(powers)


def _cross_entropy(p: RowwiseProblem, of: Inputs, total: Total) -> torch.Tensor:
    largest, labels = of["x"].amax(-1, keepdim=True), of["labels"].long()
    there = (labels >= 0) & (labels < p.hidden)
    own = of["x"].gather(-1, torch.where(there, labels, 0)[:, None])
    loss = total((of["x"] - largest).exp()).log() + (largest - own)
    return torch.where(there, loss[:, 0], 0.0)


def _rope(p: RowwiseProblem, of: Inputs, total: Total) -> torch.Tensor:
    first, second = of["x"].view(p.rows, -1, p.head_dim).chunk(2, -1)
    cos, sin = of["cos_sin"][of["positions"].long()][:, None].chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).view(p.rows, p.hidden)


def _silu_mul(p: RowwiseProblem, of: Inputs, total: Total) -> torch.Tensor:
    gate, up = of["x"].chunk(2, -1)
    return gate / (1.0 + (-gate).exp()) * up


_RESULT: Mapping[str, Callable[[RowwiseProblem, Inputs, Total], torch.Tensor]] = {
    "layer_norm": _layer_norm, "rms_norm": _rms_norm, "softmax": _softmax, "cross_entropy": _cross_entropy,
    "rope": _rope, "silu_mul": _silu_mul,
}  # fmt: skip # a table


def _rounded_twice(p: RowwiseProblem, of: Inputs, dtype: torch.dtype) -> torch.Tensor:
    """Return outputs of operators without a sum, each product and the activation rounded to the dtype."""
    if p.operator == "silu_mul":
        gate, up = of["x"].chunk(2, -1)
        return functional.silu(gate.float()).to(dtype) * up.to(dtype)
    first, second = of["x"].float().view(p.rows, -1, p.head_dim).chunk(2, -1)
    cos, sin = of["cos_sin"][of["positions"].long()][:, None].chunk(2, -1)
    products = [(a * b).to(dtype) for a, b in ((first, cos), (second, sin), (second, cos), (first, sin))]
    return torch.cat([products[0] - products[1], products[2] + products[3]], -1).view(p.rows, p.hidden)


class RowwiseTensors(Tensors[RowwiseProblem]):
    independent = frozenset({"16 bits"})

    def draw(self, case: Case[RowwiseProblem], seed: int, device: str = "cpu") -> Drawn:
        p, normal = case.problem, normal_numbers(seed, device)
        inputs = {}
        for name in p.of.inputs:
            shape, dtype = p.tensor(name)
            if name == "x":
                drawn = _SHAPED[case.draw](p, normal(*shape)) if case.draw in _SHAPED else normal(*shape)
            else:
                drawn = _beside_x(p, name, normal, case.draw == "extreme rows")
            inputs[name] = drawn.to(TORCH_DTYPES[dtype])
        return Drawn(inputs, inputs)

    def reference(self, problem: RowwiseProblem, inputs: Inputs) -> Outputs:
        return self._computed(problem, inputs, torch.float64, _sum)

    def own_dtype(self, problem: RowwiseProblem, inputs: Inputs) -> Outputs:
        """Return sums added sequentially in float32; operators without a sum are rounded after each product."""
        if problem.of.reduces:
            return self._rounded(problem, self._computed(problem, inputs, torch.float32, _sum_in_turn))
        out = TORCH_DTYPES[problem.out_dtype]
        return {"y": _rounded_twice(problem, inputs, out)}

    def nudged(self, case: Case[RowwiseProblem], inputs: Inputs) -> Outputs | None:
        """Return outputs of sums that are off by what float32 may cause.

        `own_dtype` has one sample of that error, which by chance is near zero in some rows.
        """
        if not case.problem.of.reduces:
            return None
        return self._computed(case.problem, inputs, torch.float64, _sum_off)

    def rounded_once(self, problem: RowwiseProblem, inputs: Inputs) -> Outputs:
        return self._rounded(problem, self._computed(problem, inputs, torch.float32, _sum))

    def _computed(self, problem: RowwiseProblem, inputs: Inputs, dtype: torch.dtype, total: Total) -> Outputs:
        (name,) = problem.of.outputs
        floats = {n: t.to(dtype) if t.is_floating_point() else t for n, t in inputs.items()}
        return {name: _RESULT[problem.operator](problem, floats, total)}

    def _rounded(self, problem: RowwiseProblem, outputs: Outputs) -> Outputs:
        return {name: value.to(TORCH_DTYPES[problem.tensor(name)[1]]) for name, value in outputs.items()}

    def library(self, problem: RowwiseProblem, inputs: Inputs) -> Outputs:
        return self.rounded_once(problem, inputs)

    def shown(self, case: Case[RowwiseProblem], drawn: Drawn) -> frozenset[Cell]:
        shown = set(_shown(case.problem, drawn.inputs))
        if case.draw not in _SHAPED and case.problem.rows >= MANY_ROWS:
            shown.add(INDEPENDENT)
        return frozenset(Cell("values", what) for what in shown)

    def baselines(self, problem: RowwiseProblem) -> tuple[str, ...]:
        return ("torch",)

    def baseline(self, name: str, problem: RowwiseProblem, inputs: Inputs) -> Callable[[], object]:
        """Return torch's own function; for rope and silu_mul the usual few operations."""
        p, x, shape = problem, inputs["x"], (problem.hidden,)
        out = TORCH_DTYPES[p.out_dtype]
        match p.operator:
            case "layer_norm":
                return lambda: functional.layer_norm(x, shape, inputs["weight"], inputs["bias"], p.of.eps).to(out)
            case "rms_norm":
                return lambda: functional.rms_norm(x, shape, inputs["weight"], p.of.eps).to(out)
            case "softmax":
                return lambda: functional.softmax(x, -1, dtype=out)
            case "cross_entropy":
                labels = inputs["labels"].long()
                labels = torch.where((labels >= 0) & (labels < p.hidden), labels, IGNORED)
                return lambda: functional.cross_entropy(x.float(), labels, reduction="none", ignore_index=IGNORED)
            case "rope":
                return lambda: _rope(p, {**inputs, "cos_sin": inputs["cos_sin"].to(x.dtype)}, _sum).to(out)
        gate, up = x.chunk(2, -1)
        return lambda: (functional.silu(gate) * up).to(out)

    def outputs_of(self, problem: RowwiseProblem, found: torch.Tensor) -> Outputs:
        (name,) = problem.of.outputs
        return {name: found}

    def samples(self, problem: RowwiseProblem, inputs: Inputs, seed: int) -> Sequence[Sample[RowwiseProblem]]:
        """Return some rows, including the first and the last."""
        rows = sampled_rows(problem.rows, SAMPLED_ROWS, seed, inputs["x"].device)
        of_rows = {name for name, shape in problem.of.inputs.items() if shape.startswith("rows")}
        part = {name: tensor[rows] if name in of_rows else tensor for name, tensor in inputs.items()}

        def take(outputs: Outputs) -> Outputs:
            return {name: tensor[rows] for name, tensor in outputs.items()}

        return (Sample(replace(problem, rows=len(rows)), part, take),)

    def check_bytes(self, problem: RowwiseProblem) -> int:
        """Return the bytes of x in float32, and of two intermediate tensors of that size."""
        return 16 * problem.rows * problem.hidden


def _beside_x(p: RowwiseProblem, name: str, normal: Normal, extreme: bool) -> torch.Tensor:
    """Draw an input other than x: a weight or bias, labels, positions, or cosines and sines of arbitrary angles."""
    shape, _ = p.tensor(name)
    drawn = normal(*shape)
    row = torch.arange(p.rows, device=drawn.device)
    if name == "labels":
        labels = _whole(drawn, p.hidden)
        if extreme:
            for kind, label in enumerate((0, p.hidden - 1, IGNORED, p.hidden if p.rows % 2 else 2**31 - 1)):
                labels = torch.where(row % LABELS == kind, label, labels)
        return labels
    if name == "positions":
        positions = _whole(drawn, p.positions)
        if extreme:
            positions = torch.where(row % 3 == 0, p.positions - 1, torch.where(row % 3 == 1, 0, positions))
        return positions
    if name == "cos_sin":
        angles = 3.0 * drawn[:, : p.head_dim // 2]
        return torch.cat([angles.cos(), angles.sin()], -1)
    # No weight is near 0, so that an error in any column shows.
    return drawn + drawn.sign()


def _whole(normal: torch.Tensor, count: int) -> torch.Tensor:
    """Return evenly distributed integers from 0 to `count` - 1."""
    even: torch.Tensor = torch.special.ndtr(normal.double())
    return (even * count).long().clamp(0, count - 1)


def _constant_rows(p: RowwiseProblem, x: torch.Tensor) -> torch.Tensor:
    """Set each row to one number, halved in its second half; for operators with e^x, the power is halved.

    This exposes sums that miss columns or count some twice. Neighbouring rows differ, so that a row's sum in another's
    place is exposed too.
    """
    row = torch.arange(p.rows, device=x.device).view(-1, 1)
    column = torch.arange(x.shape[1], device=x.device)
    half = column < x.shape[1] / 2
    if p.of.kinds[: len(EXPONENTIAL_ROWS)] == EXPONENTIAL_ROWS:
        return row % 16 / 4.0 - torch.where(half, 0.0, 0.69314718)
    return (1.0 + row % 16 / 16.0) * torch.where(half, 1.0, 0.5) * x.sign()


def _extreme_rows(p: RowwiseProblem, x: torch.Tensor) -> torch.Tensor:
    """Draw rows of the operator's kinds in turn, including ordinary ones, so that neighbours differ."""
    row = torch.arange(p.rows, device=x.device).view(-1, 1)
    column = torch.arange(x.shape[1], device=x.device)
    last = column == x.shape[1] - 1 - row * 5 % min(x.shape[1], 16)
    made: tuple[torch.Tensor, ...]
    if p.of.kinds[: len(EXPONENTIAL_ROWS)] == EXPONENTIAL_ROWS:
        middle = (column >= x.shape[1] // 3) & (column <= x.shape[1] // 3 + x.shape[1] // 4)
        one = column == row * 7 % x.shape[1]
        made = (
            torch.where(last, 25.0, x),
            torch.where(middle, x, -torch.inf),
            torch.where(one, x, -torch.inf),
            torch.full_like(x, 1.5),
            200.0 + 100.0 * x,
            x - 300.0,
        )
    elif p.operator == "silu_mul":
        gate = column < p.hidden
        made = (
            torch.where(gate, -900.0 - x.abs(), x), torch.where(gate, 0.0, x), torch.where(gate, 900.0 + x, x / 16.0)
        )  # fmt: skip # a table
    elif p.of.reduces:
        large = 300.0 if p.dtype == "fp16" else 2.0**50
        made = (
            torch.zeros_like(x), torch.full_like(x, 1.5), torch.where(last, 3000.0, x), 1e-3 * (x + x.sign()) / 2.0,
            100.0 + x, large * (x + x.sign()),
        )  # fmt: skip # a table
    else:
        return x
    for kind, rows in enumerate(made, 1):
        x = torch.where(row % (len(made) + 1) == kind, rows, x)
    return x


_SHAPED = {"extreme rows": _extreme_rows, "constant rows": _constant_rows}


def _shown(p: RowwiseProblem, inputs: Inputs) -> Iterator[str]:
    """Yield the kinds of rows, labels and positions that inputs contain."""
    x = inputs["x"].double()
    size, finite = x.abs(), x.isfinite()
    constant = (x == x[:, :1]).all(1)
    found: dict[str, torch.Tensor] = {}
    if p.of.kinds == NORM_ROWS:
        square, median, deviation = size.square().mean(1), size.median(1).values, x.std(1, correction=0)
        holds = (
            size.amax(1) == 0, constant & (size[:, 0] > 0), (size.amax(1) > 500) & (median < 5),
            (square > 0) & (square < 1e-5), (deviation > 0) & (x.mean(1).abs() > 30 * deviation),
            (square > 65504) & (median > 100),
        )  # fmt: skip # a table
        found = dict(zip(NORM_ROWS, holds, strict=True))
    elif "labels" in p.of.inputs or p.operator == "softmax":
        largest = x.amax(1, keepdim=True)
        alone = (x > largest - 10).sum(1) == 1
        count = finite.sum(1)
        holds = (
            finite.all(1) & alone & (largest[:, 0] < 100), (count > 1) & (count < x.shape[1]),
            (count == 1) & (x.shape[1] > 1), constant, largest[:, 0] > 100, largest[:, 0] < -100,
        )  # fmt: skip # a table
        found = dict(zip(EXPONENTIAL_ROWS, holds, strict=True))
    elif p.operator == "silu_mul":
        gate = x[:, : p.hidden]
        found = dict(zip(p.of.kinds, (gate.amax(1) < -100, (gate == 0).all(1), gate.amin(1) > 100), strict=True))
    if "labels" in inputs:
        labels = inputs["labels"]
        of_labels = (_both(labels, 0, p.hidden - 1), labels < 0, labels >= p.hidden)
        found |= dict(zip(p.of.kinds[len(EXPONENTIAL_ROWS) :], of_labels, strict=True))
    if "positions" in inputs:
        positions = inputs["positions"]
        several = positions.unique(return_counts=True)[1] > 1
        found |= dict(zip(p.of.kinds, (_both(positions, 0, p.positions - 1), several), strict=True))
    yield from (name for name, rows in found.items() if bool(rows.any()))


def _both(values: torch.Tensor, first: int, second: int) -> torch.Tensor:
    return (values == first).any() & (values == second).any()


# Operators on rows at full size: the rows that a block or a cluster wrote.


class RowwiseFullSize(RectangleFullSize[RowwiseProblem]):
    def tile(self, problem: RowwiseProblem, config: Config) -> tuple[int, int]:
        columns = problem.hidden
        if (
            config.get("family") == "block" and int(config.get("cluster", 1)) > 1
        ):  # blocks have consecutive columns of a row
            run = int(config["threads_per_row"]) * int(config["vector"])
            columns = -(-columns // (run * int(config["cluster"]))) * run
        return rows_of(config)[1], columns

    def drawn(self, case: FullCase[RowwiseProblem], seed: int) -> Inputs:
        """Return labels, positions, and the cosines and sines."""
        p, normal = case.problem, normal_numbers(seed)
        own = [name for name in p.of.inputs if name in ("labels", "positions", "cos_sin")]
        return {name: _beside_x(p, name, normal, False).to(TORCH_DTYPES[p.tensor(name)[1]]) for name in own}

    def part(self, problem: RowwiseProblem, rectangle: Rectangle, read: Read) -> tuple[RowwiseProblem, Inputs]:
        inputs = {}
        if problem.operator == "silu_mul":
            gate, up = read("x", rectangle.rows, range(2 * problem.hidden)).chunk(2, -1)
            own = slice(rectangle.columns.start, rectangle.columns.stop)
            x = torch.cat([gate[:, own], up[:, own]], -1)
            return replace(problem, rows=len(rectangle.rows), hidden=len(rectangle.columns)), {"x": x}
        for name in problem.of.inputs:
            shape, _ = problem.tensor(name)
            of_rows = problem.of.inputs[name].startswith("rows")
            if len(shape) == 1:
                inputs[name] = read(name, range(1), rectangle.rows if of_rows else range(shape[0]))[0]
            else:
                inputs[name] = read(name, rectangle.rows if of_rows else range(shape[0]), range(shape[1]))
        return replace(problem, rows=len(rectangle.rows)), inputs
