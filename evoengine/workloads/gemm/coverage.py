"""Cells of a matrix product's configuration, and those that a case visits by its sizes and by what warps did."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import numpy as np

from evoengine.devices.base import VisitKind
from evoengine.records import Config, Launch
from evoengine.workloads.base import Case
from evoengine.workloads.coverage import (
    ROUNDINGS,
    Cell,
    pipeline_cells,
    remainder_cells,
    visited_remainders,
    visited_steps,
    visits_by_block,
)
from evoengine.workloads.gemm.cases import MOST_TILES, deepest, last_buffers, units
from evoengine.workloads.gemm.problem import (
    HALVES,
    GemmProblem,
    blocks_of_cluster,
    cluster_extents,
    cluster_tiles,
    most_sharers,
    parts,
    split_k,
    stream_steps,
    sums_in_memory,
    tile_steps,
)

ALIKE = 2000
"""number of equal products over whose sum errors of 16 bits accumulate"""
TOGETHER = {
    "a single element": "one row and one column of C, of one product",
    "a column": "one column and several tiles of rows",
    "a row": "one row and several tiles of columns",
    "a whole tile": "whole tiles of rows, columns and products",
}
GROUP = "a group of tiles of rows that is not whole, beside others"
A_SQUARE = "a square of tiles that a curve turns in"
SEVERAL_SQUARES = "several squares of tiles, more of them down than across"
BATCH = "several tiles of several entries of the batch"
PERSISTENT = (
    "several blocks with unlike numbers of tiles",
    "a third tile of a block, behind a pipeline that has wrapped around",
)
NO_STEP = "a block without a step, beside others of its tile"
STREAM = (
    "a tile that three blocks share",
    "a block with the end of a tile and the begin of the next",
    "several tiles, each of which is all that a block has steps for",
)
VALUES = (
    "sums that overflow a half and cancel out",
    "rows that point at one row of B",
    "whole numbers, whose sums are exact",
    "numbers above 0 alone",
    f"{ALIKE:,} products that are alike",
    f"{ALIKE:,} products that cancel out",
)


def cells(problem: GemmProblem, config: Config) -> frozenset[Cell]:
    """Return the cells of a configuration; none where it does not say how large tiles are."""
    if not {"tile_m", "tile_n", "tile_k"} <= config.keys():
        return frozenset()
    tile_m, tile_n, tile_k = (int(config[name]) for name in ("tile_m", "tile_n", "tile_k"))
    unit_m, unit_n, unit_k = units(problem)
    found = {
        *remainder_cells("rows", tile_m, problem.m, unit_m),
        *remainder_cells("columns", tile_n, problem.n, unit_n, 2),
        *remainder_cells("products", tile_k, problem.k, unit_k, 1),
        *pipeline_steps(config, tile_parts(config, tile_m, tile_n)),
        *(Cell("values", what) for what in VALUES),
        *(Cell("together", what) for what in TOGETHER.values()),
        *(Cell("extents", axis) for axis in own_extents(problem, config)),
    }
    if problem.out_dtype in HALVES:
        found.add(Cell("values", ROUNDINGS))
    if int(config.get("group_m", 1)) > 1:
        found.add(Cell("together", GROUP))
    if config.get("raster") == "hilbert":
        found |= {Cell("together", what) for what in (A_SQUARE, SEVERAL_SQUARES)}
    if config.get("schedule") == "persistent":
        found |= {Cell("together", what) for what in PERSISTENT}
    if sums_in_memory(config):
        found |= {Cell("together", what) for what in (STREAM if stream_steps(config) else (NO_STEP,))}
    if problem.batch > 1:
        found.add(Cell("together", BATCH))
    return frozenset(found)


def visited(case: Case[GemmProblem], launch: Launch, visits: np.ndarray) -> frozenset[Cell]:
    """Return the cells that a case visits by its sizes and by the device's count. What it drew is none of this."""
    whole, p, config = case.whole, case.problem, case.config
    if whole is None or not {"tile_m", "tile_n", "tile_k"} <= config.keys():
        return frozenset()
    tile_m, tile_n, tile_k = (int(config[name]) for name in ("tile_m", "tile_n", "tile_k"))
    unit_m, unit_n, unit_k = units(whole)
    found = {
        *visited_remainders("rows", p.m, tile_m, whole.m, unit_m),
        *visited_remainders("columns", p.n, tile_n, whole.n, unit_n),
        *visited_remainders("products", p.k, tile_k, whole.k, unit_k),
        *(Cell("together", what) for what in together(p, config, launch, (unit_m, unit_n, unit_k))),
        *(Cell("extents", axis) for axis in own_extents(whole, config) if _has_own(p, whole, config, axis)),
    }
    # a warp's visits count only where all tiles have rows and columns of its own
    of_tile = tile_parts(config, (p.m - 1) % tile_m + 1, (p.n - 1) % tile_n + 1)
    kind, teams = waits_of(config)
    each = -(-p.k // tile_k)
    for number, warps in enumerate(teams):
        for block, count in visits_by_block(visits, kind, warps).items():
            steps = [(i // each * len(teams) + number) * each + i % each for i in range(count)]
            refills = stream_steps(config) and config["family"] == "mma"  # its pipeline, for each tile
            for own in [range(of) for of in parts(p, config, block)] if refills else [steps]:
                found |= set(visited_steps(of_tile, int(config["stages"]), own))
    return frozenset(found)


def pipeline_steps(config: Config, of_tile: list[str]) -> Iterator[Cell]:
    """Yield what a block's pipeline goes through: of a stream, no more than it has steps."""
    stages, most = int(config["stages"]), stream_steps(config)
    passed = set(visited_steps(of_tile, stages, most)) | {
        Cell("steps", f"the last in buffer {buffer}") for buffer in range(last_buffers(config))
    }
    for cell in pipeline_cells(of_tile, stages):
        if not most or cell in passed:
            yield cell


def of_stream(problem: GemmProblem, config: Config) -> Iterator[str]:
    """Yield those of STREAM that a case meets by its sizes."""
    each = stream_steps(config)
    if each and most_sharers(problem, config) > 2 and tile_steps(problem, config) > 2 * each:
        yield STREAM[0]
    if each and len(list(parts(problem, config, 1))) > 1:
        yield STREAM[1]
    if each == tile_steps(problem, config) and cluster_tiles(problem, config) > 1:
        yield STREAM[2]


def tile_parts(config: Config, rows: int, columns: int) -> list[str]:
    """Return the stripes of 16 rows, by each warp's columns, that begin within so many rows and columns."""
    each = int(config["tile_n"]) // int(config.get("warps_n", 1))
    return [
        f"rows {row} to {row + 15}, columns {column} to {column + each - 1}"
        for row in range(0, rows, 16)
        for column in range(0, columns, each)
    ]


def waits_of(config: Config) -> tuple[VisitKind, list[range]]:
    """Return what the warps that multiply do once in each step, and which of them multiply the same tiles of C.

    Of several such teams each does every second tile, with the steps of the others' between its own.
    """
    if config.get("family") != "wgmma":
        return VisitKind.COPY_WAIT, [range(int(config["warps"]))]
    warps = 4 * int(config["consumers"])
    return VisitKind.WAIT, [range(0, 4), range(4, 8)] if config.get("ping_pong") else [range(warps)]


def together(problem: GemmProblem, config: Config, launch: Launch, units_of: tuple[int, int, int]) -> Iterator[str]:
    p, tile_m, tile_n, tile_k = problem, *(int(config[name]) for name in ("tile_m", "tile_n", "tile_k"))
    unit_m, unit_n, _ = units_of
    if (p.m, p.n, p.k) == units_of:
        yield TOGETHER["a single element"]
    if p.n == unit_n and p.m > tile_m:
        yield TOGETHER["a column"]
    if p.m == unit_m and p.n > tile_n:
        yield TOGETHER["a row"]
    if not (p.m % tile_m or p.n % tile_n or p.k % tile_k):
        yield TOGETHER["a whole tile"]
    group, (rows, columns) = int(config.get("group_m", 1)), cluster_extents(config)
    if -(-p.m // rows) % group and p.n > columns and p.m > group * rows:
        yield GROUP
    yield from visited_squares(-(-p.m // rows), -(-p.n // columns))
    tiles, clusters = cluster_tiles(p, config), prod(launch.grid) // blocks_of_cluster(config)
    if tiles > clusters > 1 and tiles % clusters:
        yield PERSISTENT[0]
    if tiles > 2 * clusters and p.k > int(config["stages"]) * tile_k:
        yield PERSISTENT[1]
    if tile_steps(p, config) < split_k(config):
        yield NO_STEP
    yield from of_stream(p, config)
    if p.batch > 1 and p.m > tile_m and p.n > tile_n:
        yield BATCH


def visited_squares(down: int, across: int) -> Iterator[str]:
    """Yield what so many tiles show of a curve through squares, whose side is the largest power of two that fits."""
    side = (down | across) & -(down | across)
    if side > 2:
        yield A_SQUARE
    if side > 1 and down > across > side:
        yield SEVERAL_SQUARES


def own_extents(problem: GemmProblem, config: Config) -> Iterator[str]:
    """Yield the axes whose own length some case has, or all of it that there is time for."""
    yield "products"
    if problem.m <= MOST_TILES * int(config["tile_m"]):
        yield "rows"
    if problem.n <= MOST_TILES * int(config["tile_n"]):
        yield "columns"


def _has_own(problem: GemmProblem, whole: GemmProblem, config: Config, axis: str) -> bool:
    match axis:
        case "rows":
            return problem.m == whole.m
        case "columns":
            return problem.n == whole.n
    return problem.k >= deepest(whole, config)
