"""The grouped product's tensors: inputs drawn from a seed, the float64 reference, torch's own as baseline.

Elements that no group owns are NaN: rows of A after the last group, with their scales, and B of a group without rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod

import numpy as np
import torch

from evoengine.devices.pool import BlockLaunch
from evoengine.records import Config
from evoengine.workloads.base import Case, Drawn, Inputs, Outputs, Sample, Tensors
from evoengine.workloads.coverage import Cell
from evoengine.workloads.full_size import FullCase
from evoengine.workloads.gemm.problem import NO_SCALES, SCALED_TOGETHER, GemmProblem, cluster_shape
from evoengine.workloads.gemm.tensors import FULL_SIZE, SAMPLED_ROWS, GemmTensors, draw_scales, numbers_at_full_size
from evoengine.workloads.grouped_gemm.problem import GroupedGemmProblem
from evoengine.workloads.tensors import TORCH_DTYPES, Read, Rectangle, RectangleFullSize, normal_numbers, sampled_rows

SEED_STEP = 7919
"""difference between the seeds of neighbouring groups"""
OfGroup = Callable[[GemmProblem, Inputs], Outputs]


class GroupedGemmTensors(Tensors[GroupedGemmProblem]):
    independent = frozenset({"normal"})

    def draw(self, case: Case[GroupedGemmProblem], seed: int, device: str = "cpu") -> Drawn:
        p, inputs = case.problem, _nothing(case.problem, device)
        for group in _with_rows(p):
            own = Case(case.name, p.of_group(group), case.draw)
            drawn = GemmTensors().draw(own, seed + SEED_STEP * group, device).inputs
            for name, part in _parts(p, inputs, group).items():
                part.copy_(drawn[name].reshape(part.shape))
        return Drawn(inputs, inputs)

    def reference(self, problem: GroupedGemmProblem, inputs: Inputs) -> Outputs:
        return _by_group(problem, inputs, torch.float64, GemmTensors().reference)

    def own_dtype(self, problem: GroupedGemmProblem, inputs: Inputs) -> Outputs:
        return _by_group(problem, inputs, TORCH_DTYPES[problem.out_dtype], GemmTensors().own_dtype)

    def rounded_once(self, problem: GroupedGemmProblem, inputs: Inputs) -> Outputs:
        return _by_group(problem, inputs, TORCH_DTYPES[problem.out_dtype], GemmTensors().rounded_once)

    def shown(self, case: Case[GroupedGemmProblem], drawn: Drawn) -> frozenset[Cell]:
        """Return what the group with the most rows shows."""
        p = case.problem
        group = max(range(p.groups), key=lambda g: p.rows[g])
        one = Case(case.name, p.of_group(group), case.draw)
        inputs = _of_gemm(p, drawn.inputs, group)
        return GemmTensors().shown(one, Drawn(inputs, inputs))

    def baselines(self, problem: GroupedGemmProblem) -> tuple[str, ...]:
        return ("torch",)

    def baseline(self, name: str, problem: GroupedGemmProblem, inputs: Inputs) -> Callable[[], object]:
        """Return torch's own grouped product, which has the same convention of `ends`, or a product for each group.

        The former needs bf16 on Hopper or later; the loop knows the groups' sizes beforehand.
        """
        p, a, b = problem, inputs["a"], inputs["b"]
        ends = inputs["ends"]
        if p.dtype == p.out_dtype == "bf16" and a.is_cuda:
            columns = b if p.b_layout == "kn" else b.mT
            return lambda: torch._grouped_mm(a, columns, offs=ends)  # noqa: SLF001 # it has no other name
        own = [
            GemmTensors().baseline("torch", p.of_group(group), _of_gemm(p, inputs, group)) for group in _with_rows(p)
        ]
        return lambda: torch.cat([torch.as_tensor(call()) for call in own])

    def outputs_of(self, problem: GroupedGemmProblem, found: torch.Tensor) -> Outputs:
        return {"c": found}

    def samples(self, problem: GroupedGemmProblem, inputs: Inputs, seed: int) -> Sequence[Sample[GroupedGemmProblem]]:
        """Return some rows of all groups with all columns, including the first and the last."""
        p, at = problem, sampled_rows(problem.total, SAMPLED_ROWS, seed, inputs["a"].device)
        owner = torch.repeat_interleave(torch.arange(p.groups), torch.tensor(p.rows))[at.cpu()]
        sampled = replace(p, rows=tuple(torch.bincount(owner, minlength=p.groups).tolist()), m=0)
        part = {**inputs, "a": inputs["a"][at], "ends": ends_of(sampled, str(at.device))}
        if p.scales in ("row", "block"):
            part["scale_a"] = inputs["scale_a"].index_select(-1, at)
        return (Sample(sampled, part, lambda outputs: {"c": outputs["c"][at]}),)

    def check_bytes(self, problem: GroupedGemmProblem) -> int:
        """Return the bytes of A in float32, of one entry of B in float64 and of the product in both."""
        p = problem
        return 4 * p.m * p.k + 12 * p.k * p.n + 12 * p.m * p.n


def ends_of(problem: GroupedGemmProblem, device: str = "cpu") -> torch.Tensor:
    return torch.from_numpy(np.cumsum(problem.rows, dtype=np.int32)).to(device)


def _with_rows(problem: GroupedGemmProblem) -> list[int]:
    return [group for group, rows in enumerate(problem.rows) if rows]


def _nothing(problem: GroupedGemmProblem, device: str) -> dict[str, torch.Tensor]:
    """Return the inputs with NaN (-128 for int8) for all elements that a group may own."""
    p = problem

    def full(shape: tuple[int, ...], dtype: str) -> torch.Tensor:
        value = -128.0 if dtype == "int8" else math.nan
        return torch.full(shape, value, device=device).to(TORCH_DTYPES[dtype])

    inputs = {"a": full((p.m, p.k), p.dtype), "b": full((p.groups, *p.whole.shape("b")), p.dtype)}
    if p.scales != NO_SCALES:
        inputs |= {f"scale_{name}": full(p.scale_shape(name), "fp32") for name in "ab"}
    return inputs | {"ends": ends_of(p, device)}


def _parts(problem: GroupedGemmProblem, inputs: Inputs, group: int) -> dict[str, torch.Tensor]:
    """Return views of a group's own part of A, B and the scales."""
    p, rows = problem, problem.rows_of(group)
    parts = {"a": inputs["a"][rows], "b": inputs["b"][group]}
    if p.scales == "tensor":
        return parts | {name: inputs[name][group : group + 1] for name in ("scale_a", "scale_b")}
    if p.scales != NO_SCALES:
        return parts | {"scale_a": inputs["scale_a"][..., rows], "scale_b": inputs["scale_b"][group]}
    return parts


def _of_gemm(problem: GroupedGemmProblem, inputs: Inputs, group: int) -> dict[str, torch.Tensor]:
    """Return the inputs of a group's GEMM, whose bias is not read."""
    bias = torch.zeros(problem.n, dtype=TORCH_DTYPES[problem.out_dtype], device=inputs["a"].device)
    return _parts(problem, inputs, group) | {"bias": bias}


def _by_group(problem: GroupedGemmProblem, inputs: Inputs, dtype: torch.dtype, of_group: OfGroup) -> Outputs:
    """Return C [m, n] group by group, with zeros after the last."""
    c = torch.zeros(problem.m, problem.n, dtype=dtype, device=inputs["a"].device)
    for group in _with_rows(problem):
        own = of_group(problem.of_group(group), _of_gemm(problem, inputs, group))
        c[problem.rows_of(group)] = own["c"].to(dtype)
    return {"c": c}


class GroupedGemmFullSize(RectangleFullSize[GroupedGemmProblem]):
    def tile(self, problem: GroupedGemmProblem, config: Config) -> tuple[int, int]:
        return int(config["tile_m"]), int(config["tile_n"])

    def values(self, case: FullCase[GroupedGemmProblem], normal: torch.Tensor) -> torch.Tensor:
        return numbers_at_full_size(case.problem.whole, normal)

    def tiles_of(self, case: FullCase[GroupedGemmProblem], asked: BlockLaunch) -> range:
        """Return the tiles of a cluster, some of which may lie behind the last column or the last group's last row."""
        return range(1, prod(cluster_shape(case.config)) + 1)

    def drawn(self, case: FullCase[GroupedGemmProblem], seed: int) -> Inputs:
        """Return the ends of groups, and the scales."""
        p, normal = case.problem, normal_numbers(seed)
        scales = draw_scales(p.whole, FULL_SIZE, normal)
        for name in ("a", "b") if scales else ():
            shape, own = p.scale_shape(name), scales[f"scale_{name}"]
            if own.shape != shape:  # those of a group, for each
                scales[f"scale_{name}"] = own.expand(shape).contiguous() * torch.exp2(-normal(*shape).abs().round())
        return scales | {"ends": ends_of(p)}

    def part(self, problem: GroupedGemmProblem, rectangle: Rectangle, read: Read) -> tuple[GroupedGemmProblem, Inputs]:
        p, rows, columns = problem, rectangle.rows, rectangle.columns
        group = int(torch.searchsorted(ends_of(p), rows.start, right=True))
        first = group * p.whole.shape("b")[0]
        if p.b_layout == "kn":
            b = read("b", range(first, first + p.k), columns)
        else:
            b = read("b", range(first + columns.start, first + columns.stop), range(p.k))
        own = replace(p, rows=(len(rows),), n=len(columns), m=0)
        inputs = {"a": read("a", rows, range(p.k)), "b": b[None], "ends": ends_of(own)}
        if p.scales == "tensor":
            entry = range(group, group + 1)
            inputs |= {name: read(name, range(1), entry)[0] for name in ("scale_a", "scale_b")}
        elif p.scales == "row":
            inputs["scale_a"] = read("scale_a", range(1), rows)[0]
            inputs["scale_b"] = read("scale_b", range(group, group + 1), columns)
        elif p.scales == "block":
            down, deep = p.whole.scale_shape("b")
            together = range(columns.start // SCALED_TOGETHER, -(-columns.stop // SCALED_TOGETHER))
            inputs["scale_a"] = read("scale_a", range(deep), rows)
            inputs["scale_b"] = read(
                "scale_b", range(group * down + together.start, group * down + together.stop), range(deep)
            )[None]
        return own, inputs
