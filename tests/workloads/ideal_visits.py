"""The visits that warps of a right kernel make in a case, as the emulator counts them: to look at many configurations,
which it would take hours to run."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import numpy as np

from evoengine.devices.base import VISIT, VisitKind
from evoengine.records import Config, Launch
from evoengine.workloads.attention import cases as attention
from evoengine.workloads.attention.problem import AttentionProblem
from evoengine.workloads.base import AnyCase
from evoengine.workloads.gemm import coverage as gemm
from evoengine.workloads.gemm.problem import blocks_of_cluster, cluster_tiles, parts, split_k, stream_steps

Row = tuple[int, int, int, int, int, int]
"""block, warp, kind, site, count, true"""
Q_BARRIER, BARRIERS = 1000, 2000


def ideal_visits(case: AnyCase, launch: Launch) -> np.ndarray:
    """Return them as VISIT [n]; none of kernels whose warps neither wait nor multiply nor vote."""
    of = {"attention": _attention, "gemm": _gemm, "conv2d": _conv2d}.get(str(case.problem).partition(":")[0])
    return np.array(of(case, launch) if of else [], VISIT)


def _gemm(case: AnyCase, launch: Launch) -> list[Row]:
    kind, teams = gemm.waits_of(case.config)
    split, steps = split_k(case.config), -(-case.problem.k // int(case.config["tile_k"]))
    together, tiles = blocks_of_cluster(case.config), cluster_tiles(case.problem, case.config)
    clusters = prod(launch.grid) // together

    def waits(block: int, team: int) -> int:
        if stream_steps(case.config):
            return sum(parts(case.problem, case.config, block // together))
        own_tiles = len(range(block // together + team * clusters, tiles, len(teams) * clusters))
        return own_tiles * (steps // split + (block % split < steps % split))

    return [
        (block, warp, kind, BARRIERS, waits(block, team), 0)
        for block in range(prod(launch.grid))
        for team, warps in enumerate(teams)
        for warp in warps
    ]


def _conv2d(case: AnyCase, launch: Launch) -> list[Row]:
    return [] if case.config["family"] == "direct" else _gemm(replace(case, problem=case.problem.gemm), launch)


def _attention(case: AnyCase, launch: Launch) -> list[Row]:
    p, config = case.problem, case.config
    return [
        row
        for block, tiles in enumerate(_row_tiles(p, config, launch))
        for warp in attention._consumers(config)
        for row in _warp(case, block, warp, [_steps(p, config, tile) for tile in tiles])
    ]


def _row_tiles(problem: AttentionProblem, config: Config, launch: Launch) -> list[list[int]]:
    """Return of each block the tiles of rows that it goes through."""
    each = -(-problem.seq_q // int(config["tile_m"]))
    every = [tile for _ in range(problem.heads * problem.batch) for tile in range(each)]
    return [every[block :: prod(launch.grid)] for block in range(prod(launch.grid))]


def _steps(problem: AttentionProblem, config: Config, tile: int) -> int:
    rows = min((tile + 1) * int(config["tile_m"]), problem.seq_q)
    keys = rows + problem.seq_k - problem.seq_q if problem.causal else problem.seq_k
    return -(-keys // int(config["tile_n"]))


def _warp(case: AnyCase, block: int, warp: int, steps: list[int]) -> list[Row]:
    problem, config, total = case.problem, case.config, sum(steps)
    match config["family"]:
        case "wgmma":
            stages = int(config["stages"])
            counts = [(8 * buffer, len(range(buffer, total, stages))) for buffer in range(stages)]
            full = [(BARRIERS + at + kv, count) for at, count in counts if count for kv in (0, 400)]
            waits = [(Q_BARRIER, len(steps)), *full]
            votes = [(block, warp, VisitKind.VOTE, 31, total, int(case.draw == "late maximum"))]
            rows = [(block, warp, VisitKind.WAIT, site, count, 0) for site, count in waits]
            return rows + (votes if attention._votes(config) else [])
        case "mma":
            count = total * (1 if config["v_wait"] == "with_k" else 2) + (config["q_in"] == "registers") * len(steps)
            return [(block, warp, VisitKind.COPY_WAIT, 1, count, 0)]
        case "wmma" if config["stages"] == 1:
            return [(block, warp, VisitKind.PRODUCT, 1, 16 * total * attention._wmma_products(problem, config), 0)]
    return [(block, warp, VisitKind.COPY_WAIT, 1, total, 0)] if config["stages"] > 1 else []
