"""The cases of a matrix product at full size: blocks of the problem itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import Literal

from evoengine.devices.base import DTYPE_BYTES
from evoengine.devices.pool import PAGE
from evoengine.records import Config, Launch
from evoengine.workloads.full_size import FullCase, few
from evoengine.workloads.gemm.cases import chunk_elements, deepest
from evoengine.workloads.gemm.problem import GemmProblem
from evoengine.workloads.gemm.tiles import blocks_of_cluster, cluster_extents, cluster_tiles

MOST_VISITS, FEW_VISITS = 64, 8
"""limit of the tiles of a persistent block that is followed to its end; beyond it the grid is larger, so that they are
the second"""
Planned = list[tuple[FullCase[GemmProblem], Launch]]


def full_plan(problem: GemmProblem, config: Config, launch_of: Callable[[GemmProblem], Launch]) -> Planned:
    """Return the whole grid over few steps of K, and one block over all of K.

    All of A and of B follow where offsets into them may need more than 32 bits.
    """
    if not {"tile_m", "tile_n", "tile_k"} <= config.keys():
        return []
    p, k = problem, deepest(problem, config)

    def case(
        name: str, own: GemmProblem, blocks: Literal["many", "last", "one drawn"] = "many", part: str | None = None
    ) -> tuple[FullCase[GemmProblem], Launch]:
        return _planned(FullCase(name, own, p, config, blocks, part), launch_of(own))

    part = None if k == p.k else f"{k:,} of {p.k:,} products of each sum"
    cases = [case("full grid", replace(p, k=few(p.k, int(config["tile_k"]), 2)))]
    cases.append(case("own k", replace(p, k=k), "one drawn", part))
    if DTYPE_BYTES[p.dtype] * prod(p.shape("a")) >= 1 << 31:
        own = replace(p, n=few(p.n, int(config["tile_n"]), 1))
        cases.append(case("full A", _less_deep(own, config, "m"), "last"))
    if DTYPE_BYTES[p.dtype] * prod(p.shape("b")) >= 1 << 31:
        own = replace(p, m=few(p.m, int(config["tile_m"]), 1))
        cases.append(case("full B", _less_deep(own, config, "n"), "last"))
    return cases


def _less_deep(problem: GemmProblem, config: Config, side: str) -> GemmProblem:
    """Return the problem with the deepest K.

    Where that is less than its own, the other side of A (m) or B (n) grows in proportion.
    """
    chunk = chunk_elements(problem.dtype)
    k, length = deepest(problem, config), getattr(problem, side)
    longer = length + (length * problem.k // k - length) // chunk * chunk
    return replace(problem, k=k, **{side: longer})


def _planned(case: FullCase[GemmProblem], launch: Launch) -> tuple[FullCase[GemmProblem], Launch]:
    """Return the case with what its blocks do: one tile each, or several where the kernel is persistent."""
    p, config, together = case.problem, case.config, blocks_of_cluster(case.config)
    if config.get("schedule") != "persistent":
        return replace(case, cluster=together), launch
    tiles = cluster_tiles(p, config)
    clusters = prod(launch.grid) // together
    if case.blocks == "many" and tiles > MOST_VISITS * clusters:
        clusters = -(-tiles // FEW_VISITS)
        launch = replace(launch, grid=(clusters * together, 1, 1))
    ahead = -(-(int(config["stages"]) + 1) // -(-p.k // int(config["tile_k"])))
    return replace(
        case, cluster=together, visits=-(-tiles // clusters), tile_bytes=(1 + ahead) * _bytes(p, config)
    ), launch


def _bytes(problem: GemmProblem, config: Config) -> int:
    """Return the bytes of A and B, in whole pages, that a cluster reads for its tiles, or some more."""
    rows, columns = cluster_extents(config)
    own = replace(problem, m=rows, n=columns, batch=1)
    size = DTYPE_BYTES[problem.dtype]
    return sum(PAGE * outer * (size * inner // PAGE + 2) for outer, inner in map(own.shape, own.operands))
