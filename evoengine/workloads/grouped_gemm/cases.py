"""The gate's cases for a grouped matrix product: sizes of groups set against a configuration's tiles."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import prod

import numpy as np

from evoengine.records import Config, Launch
from evoengine.workloads.base import Case
from evoengine.workloads.coverage import (
    GUARD,
    MANY,
    Cell,
    own_tail,
    pipeline_cells,
    remainder_cells,
    visited_remainders,
    visited_steps,
    visits_by_block,
)
from evoengine.workloads.full_size import FullCase, cut, few
from evoengine.workloads.gemm.cases import LONG, MOST_WORK, draw_of, step_of, units
from evoengine.workloads.gemm.coverage import GROUP, VALUES, tile_parts, waits_of
from evoengine.workloads.gemm.problem import blocks_of_cluster, cluster_extents, cluster_shape, tile_sizes
from evoengine.workloads.grouped_gemm.problem import GroupedGemmProblem

MORE_BLOCKS = "more than there are tiles"
FEWER_BLOCKS = "several, with unlike numbers of tiles, of which some have three"
OWN_GROUPS = "as many groups as the problem has"
OWN_COLUMNS = "as many columns as the problem has, or all of them that there is time for"
GROUPS = (
    "a group without rows, before others",
    "the last groups without rows",
    "a group of one row",
    "one large group among small ones",
    "more groups than a warp has lanes",
    "several groups of several tiles of rows and columns",
)


def gate_cases(problem: GroupedGemmProblem, config: Config) -> tuple[Case[GroupedGemmProblem], ...]:
    """Return the gate's cases for a configuration: groups that share the compile-time part of `problem`."""
    found = (*_small_cases(problem, config), *_long_cases(problem, config))
    return tuple(replace(case, config=config, whole=problem, draw=draw_of(case, problem.whole)) for case in found)


def tiles_of(problem: GroupedGemmProblem, config: Config) -> int:
    """Return the number of tiles, of clusters where the kernel has some."""
    rows, columns = cluster_extents(config)
    return problem.row_tiles(rows) * -(-problem.n // columns)


def gate_blocks(case: Case[GroupedGemmProblem]) -> int:
    """Return the blocks of a case, of whose clusters some have three tiles and others two, or some none."""
    tiles, together = tiles_of(case.problem, case.config), blocks_of_cluster(case.config)
    return together * next((n for n in range((tiles - 1) // 2, 1, -1) if tiles % n), tiles + 2)


def _at(problem: GroupedGemmProblem, rows: Sequence[int], n: int, k: int) -> GroupedGemmProblem:
    _, unit_n, unit_k = units(problem.whole)
    n, k = -(-n // unit_n) * unit_n, -(-k // unit_k) * unit_k
    return replace(problem, rows=tuple(rows), n=n, k=k, m=sum(rows) + GUARD)


def _small_cases(problem: GroupedGemmProblem, config: Config) -> Iterator[Case[GroupedGemmProblem]]:
    """Yield cases that every candidate meets.

    Groups are of 0 and 1 row, of whole tiles and of up to 3 rows more or less, before, between and behind large ones;
    columns and products end likewise, and a pipeline wraps around twice.
    """
    (tile_m, tile_n, tile_k), (_, unit_n, unit_k) = tile_sizes(config), units(problem.whole)
    stages, group, step = int(config.get("stages", 1)), int(config.get("group_m", 1)), step_of(config)
    down, across = cluster_shape(config)
    tails = ((max(problem.rows), tile_m, 1), (problem.n, tile_n, unit_n), (problem.k, tile_k, unit_k))
    own_m, own_n, own_k = (own_tail(*of) for of in tails)

    def at(rows: Sequence[int], n: int, k: int) -> GroupedGemmProblem:
        return _at(problem, rows, n, k)

    yield Case("one element", at([1], 1, 1), "positive numbers")
    yield Case("one column", at([tile_m + 1, 0], 1, 4 * step), "positive numbers")
    yield Case("one row each", at([0, 1, 1, 0, 1], tile_n + 2 * unit_n, 4 * step + 1), "whole numbers")
    yield Case("one large among small", at([0, 3, 2 * tile_m + 2, 0, 1], tile_n + 1, step + 1), "whole numbers")
    some = [1 + i * 7 % 5 for i in range(1, MANY)]
    yield Case("many groups", at([tile_m + 1, *some], 3, 2 * step + 1), "one-hot rows")
    yield Case("whole tiles", at([tile_m, 2 * tile_m], tile_n, max(2, stages) * step))
    yield Case("remainders", at([tile_m + own_m, 0, own_m], tile_n + own_n, step + own_k))
    yield Case("groups of tiles", at([2, group * down * tile_m + 2], across * tile_n + 1, 1), "whole numbers")
    yield Case(
        "several tiles",
        at([tile_m + 3, 2 * down * tile_m - 3], 2 * across * tile_n + 1, stages * tile_k + 1),
        "whole numbers",
    )
    wrapped = (2 * stages + 2) * step - unit_k
    yield Case("pipeline wraps", at([tile_m - 1, tile_m], tile_n - unit_n, wrapped))
    yield Case("one-hot rows", at([tile_m + 3, 2], tile_n - 2 * unit_n, 2 * step + 1), "one-hot rows")
    yield Case("sums that overflow a half", at([tile_m - 2, 4], tile_n, 2 * step - unit_k), "large products")


def _long_cases(problem: GroupedGemmProblem, config: Config) -> Iterator[Case[GroupedGemmProblem]]:
    """Yield cases of candidates that may rank: the problem's own k, groups and n."""
    (tile_m, tile_n, tile_k), (_, unit_n, unit_k) = tile_sizes(config), units(problem.whole)
    steps = max(2, MOST_WORK // (tile_m * tile_n * tile_k))
    k = few(problem.k, tile_k, steps) if problem.k >= LONG else LONG - unit_k
    part = None if k >= problem.k else f"{k:,} of {problem.k:,} products of each sum"
    yield Case("long", _at(problem, [0, tile_m - 3], tile_n - unit_n, k), "long", long=True, part=part)
    own, rows = own_rows(problem, config), "short of the groups' rows"
    all_rows = own == problem.rows
    yield Case(
        "own groups",
        _at(problem, own, tile_n // 2 + 1, tile_k),
        "whole numbers",
        long=True,
        part=None if all_rows else rows,
    )
    n = _own_columns(problem, config)
    of_n = None if n == problem.n else f"{n:,} of {problem.n:,} columns"
    yield Case("own n", _at(problem, [tile_m // 2 + 1, 1], n, tile_k), "whole numbers", long=True, part=of_n)


def own_rows(problem: GroupedGemmProblem, config: Config) -> tuple[int, ...]:
    """Return the rows of all groups; large ones are cut where there is no time for all of their tiles."""
    tile, most = tile_sizes(config)[0], max(problem.rows)
    while most > 1 and sum(-(-cut(rows, most) // tile) for rows in problem.rows) > MOST_TILES:
        most //= 2
    return tuple(cut(rows, most) for rows in problem.rows)


def _own_columns(problem: GroupedGemmProblem, config: Config) -> int:
    tile = tile_sizes(config)[1]
    return few(problem.n, tile, MOST_TILES) if problem.n > MOST_TILES * tile else problem.n


def full_plan(
    problem: GroupedGemmProblem, config: Config, launch_of: Callable[[GroupedGemmProblem], Launch]
) -> list[tuple[FullCase[GroupedGemmProblem], Launch]]:
    """Return all groups, each of whole tiles of rows but the last, over few steps of K, and a tile for each cluster.

    Tiles of rows then begin at multiples of their length, so that it shows which of them a block wrote.
    """
    if not {"tile_m", "tile_n", "tile_k"} <= config.keys():
        return []
    p, (tile_rows, _) = problem, cluster_extents(config)
    last = max(group for group, rows in enumerate(p.rows) if rows)
    rows = tuple(-(-own // tile_rows) * tile_rows if group != last else own for group, own in enumerate(p.rows))
    own = replace(p, rows=rows, m=sum(rows), k=few(p.k, int(config["tile_k"]), 2))
    together = blocks_of_cluster(config)
    launch = replace(launch_of(own), grid=(tiles_of(own, config) * together, 1, 1))
    return [(FullCase("full grid", own, p, config, cluster=together), launch)]


MOST_TILES = 128
"""limit of tiles of a case with all groups or columns of the problem"""


def cells(problem: GroupedGemmProblem, config: Config) -> frozenset[Cell]:
    """Return the cells of a configuration; none where it does not say how large tiles are."""
    if not {"tile_m", "tile_n", "tile_k"} <= config.keys():
        return frozenset()
    (tile_m, tile_n, tile_k), (_, unit_n, unit_k) = tile_sizes(config), units(problem.whole)
    found = {
        *remainder_cells("rows", tile_m, max(problem.rows)),
        *remainder_cells("columns", tile_n, problem.n, unit_n, 2),
        *remainder_cells("products", tile_k, problem.k, unit_k, 1),
        *pipeline_cells(tile_parts(config, tile_m, tile_n), int(config["stages"])),
        *(Cell("values", what) for what in VALUES),
        *(Cell("groups", what) for what in GROUPS),
        *(Cell("blocks", what) for what in (MORE_BLOCKS, FEWER_BLOCKS)),
        Cell("extents", OWN_GROUPS),
        Cell("extents", OWN_COLUMNS),
    }
    if int(config.get("group_m", 1)) > 1:
        found.add(Cell("together", GROUP))
    return frozenset(found)


def visited(case: Case[GroupedGemmProblem], launch: Launch, visits: np.ndarray) -> frozenset[Cell]:
    """Return the cells that a case visits by its sizes and by the device's count. What it drew is none of this."""
    whole, p, config = case.whole, case.problem, case.config
    if whole is None or not {"tile_m", "tile_n", "tile_k"} <= config.keys():
        return frozenset()
    (tile_m, tile_n, tile_k), (_, unit_n, unit_k) = tile_sizes(config), units(whole.whole)
    found = {
        *visited_remainders("columns", p.n, tile_n, whole.n, unit_n),
        *visited_remainders("products", p.k, tile_k, whole.k, unit_k),
        *(Cell("groups", what) for what in _groups(p, tile_m, tile_n)),
    }
    for rows in filter(None, p.rows):
        found |= set(visited_remainders("rows", rows, tile_m, max(whole.rows)))
    group, (of_rows, of_columns) = int(config.get("group_m", 1)), cluster_extents(config)
    tiles, clusters = [-(-rows // of_rows) for rows in p.rows], prod(launch.grid) // blocks_of_cluster(config)
    if clusters > tiles_of(p, config):
        found.add(Cell("blocks", MORE_BLOCKS))
    if 1 < clusters < tiles_of(p, config) / 2 and tiles_of(p, config) % clusters:
        found.add(Cell("blocks", FEWER_BLOCKS))
    if group > 1 and p.n > of_columns and any(of > group and of % group for of in tiles):
        found.add(Cell("together", GROUP))
    if p.rows == own_rows(whole, config):
        found.add(Cell("extents", OWN_GROUPS))
    if p.n == _own_columns(whole, config):
        found.add(Cell("extents", OWN_COLUMNS))
    return frozenset(found | _visited_steps(p, config, visits))


def _visited_steps(problem: GroupedGemmProblem, config: Config, visits: np.ndarray) -> set[Cell]:
    """Return the steps that warps were counted at, of those that have rows and columns of their own in all tiles.

    With cp.async a pipeline starts again with each tile of a block; with TMA it goes on.
    """
    p, (tile_m, tile_n, tile_k) = problem, tile_sizes(config)
    parts = tile_parts(config, min((r - 1) % tile_m + 1 for r in p.rows if r), (p.n - 1) % tile_n + 1)
    kind, (warps,) = waits_of(config)
    found: set[Cell] = set()
    for count in visits_by_block(visits, kind, warps).values():
        steps = count if config.get("family") == "wgmma" else min(count, -(-p.k // tile_k))
        found |= set(visited_steps(parts, int(config["stages"]), steps))
    return found


def _groups(problem: GroupedGemmProblem, tile_m: int, tile_n: int) -> Iterator[str]:
    rows = problem.rows
    last = max(g for g, of in enumerate(rows) if of)
    if 0 in rows[:last]:
        yield GROUPS[0]
    if last < len(rows) - 1:
        yield GROUPS[1]
    if 1 in rows and len(rows) > 1:
        yield GROUPS[2]
    if max(rows) > 2 * tile_m and len([of for of in rows if 0 < of < 8]) > 1:
        yield GROUPS[3]
    if len(rows) > 32:
        yield GROUPS[4]
    if len([of for of in rows if of > tile_m]) > 1 and problem.n > tile_n:
        yield GROUPS[5]
