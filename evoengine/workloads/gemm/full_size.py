"""The matrix product at full size: rows of A and columns of B for the tile of C that a block wrote."""

from __future__ import annotations

import math
from dataclasses import replace
from math import prod

import torch

from evoengine.records import Config, Launch
from evoengine.workloads.base import Inputs
from evoengine.workloads.full_size import FullCase
from evoengine.workloads.gemm.problem import SCALED_TOGETHER, GemmProblem
from evoengine.workloads.gemm.tensors import FULL_SIZE, draw_scales, positive_numbers, whole_numbers
from evoengine.workloads.gemm.tiles import blocks_of_cluster, cluster_shape, cluster_tiles, fills_clusters
from evoengine.workloads.tensors import TORCH_DTYPES, Read, Rectangle, RectangleFullSize

MOST_POSITIVE = 4096
"""number of products of at most 9 whose sum a half can represent"""


INTEGERS = (60.0, 64.0, 65.0)
"""in place of 1 to 3: two of them are an ordinary half, which the residual is read as"""


class GemmFullSize(RectangleFullSize[GemmProblem]):
    def tile(self, problem: GemmProblem, config: Config) -> tuple[int, int]:
        return int(config["tile_m"]), int(config["tile_n"])

    def values(self, case: FullCase[GemmProblem], normal: torch.Tensor) -> torch.Tensor:
        """Return whole numbers, whose sums are exact.

        They are positive, so that no sum is so small that its relative error is meaningless; over all of K, where sums
        might overflow a half, they have signs. Of a gated product, which multiplies two sums, they are normal, and the
        sums of unit variance.
        """
        if case.problem.gated:
            return normal / math.sqrt(math.sqrt(case.problem.k))
        numbers = whole_numbers(normal) if case.problem.k > MOST_POSITIVE else positive_numbers(normal)
        if case.problem.dtype == "int8":
            return numbers.sign() * torch.tensor(INTEGERS)[numbers.abs().long() - 1]
        return numbers

    def tiles_of(self, case: FullCase[GemmProblem], launch: Launch) -> range:
        """Return what a cluster gets when tiles are dealt out in turn; some of its blocks' may lie outside of C."""
        p, config, together = case.problem, case.config, prod(cluster_shape(case.config))
        clusters = prod(launch.grid) // blocks_of_cluster(config)
        share, left = divmod(cluster_tiles(p, config), clusters)
        most = share + bool(left)
        if fills_clusters(p, config):
            return range(share * together, most * together + 1, together)
        return range(share, most * together + 1)

    def drawn(self, case: FullCase[GemmProblem], seed: int) -> Inputs:
        """Return the scales, and a bias of another dtype than A's; a residual is what the pool holds in its dtype."""
        p, generator = case.problem, torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator)

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
