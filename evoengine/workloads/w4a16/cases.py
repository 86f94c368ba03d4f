"""The gate's cases for a product with 4-bit weights, and the cells that they visit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from evoengine.records import Config, Launch
from evoengine.workloads.base import Case
from evoengine.workloads.coverage import (
    ROUNDINGS,
    Cell,
    own_tail,
    remainder_cells,
    visited_remainders,
    visited_steps,
    visits_by_block,
)
from evoengine.workloads.full_size import FullCase, few
from evoengine.workloads.gemm.cases import LONG, MOST_TILES, MOST_WORK, few_steps, planned, step_of, summed_rows
from evoengine.workloads.gemm.coverage import (
    GROUP,
    NO_STEP,
    PERSISTENT,
    STREAM,
    TOGETHER,
    VALUES,
    own_extents,
    pipeline_steps,
    tile_parts,
    together,
    waits_of,
)
from evoengine.workloads.gemm.problem import (
    cluster_shape,
    most_sharers,
    parts,
    split_k,
    stream_steps,
    tile_sizes,
)
from evoengine.workloads.w4a16.problem import PACKED, W4A16Problem

EVERY_WEIGHT = "all weights of 4 bits, and all zero points that there are"


def gate_cases(problem: W4A16Problem, config: Config) -> tuple[Case[W4A16Problem], ...]:
    """Return the gate's cases for a configuration."""
    found = (*_small_cases(problem, config), *_long_cases(problem, config))
    return tuple(replace(case, config=config, whole=problem) for case in found)


def _at(problem: W4A16Problem, m: int, n: int, k: int) -> W4A16Problem:
    group = problem.group
    return replace(problem, m=m, n=-(-n // PACKED) * PACKED, k=-(-k // group) * group)


def _small_cases(problem: W4A16Problem, config: Config) -> Iterator[Case[W4A16Problem]]:
    """Yield cases whose sizes are set against the configuration's tiles.

    Rows end up to 3 before and after a tile's end, columns up to two words of 8; products a group before, at and after
    one. A pipeline passes its buffers three times, also if blocks share a tile; some of those have nothing to do.
    """
    (tile_m, tile_n, tile_k), group_m = tile_sizes(config), int(config.get("group_m", 1))
    stages, step, unit = int(config.get("stages", 1)), step_of(config), problem.group
    own_m, own_n = own_tail(problem.m, tile_m), own_tail(problem.n, tile_n, PACKED)
    own_k = own_tail(problem.k, tile_k, unit)

    def at(m: int, n: int, k: int) -> W4A16Problem:
        return _at(problem, m, n, k)

    yield Case("one element", at(1, 1, 1), "positive numbers")
    yield Case("one column", at(tile_m + 1, 1, 4 * step), "positive numbers")
    yield Case("one row", at(1, tile_n + 2 * PACKED, 4 * step + 1), "whole numbers")
    yield Case("whole tiles", at(summed_rows(tile_m), tile_n, max(2, stages) * step))
    yield Case("remainders", at(tile_m + own_m, tile_n + own_n, step + own_k))
    across = cluster_shape(config)[1]
    yield Case("groups of tiles", at(group_m * tile_m + 2, across * tile_n + 1, 1), "whole numbers")
    if _persistent(config):
        several = at(2 * tile_m + 2, 2 * across * tile_n + 1, stages * tile_k + 1)
        yield Case("several tiles", several, "whole numbers")
        yield Case("one buffer not filled", at(tile_m, tile_n, (stages - 1) * step), "whole numbers")
    yield Case("pipeline wraps", at(tile_m - 1, tile_n - PACKED, 3 * stages * step - unit))
    yield Case("one-hot rows", at(tile_m + 3, tile_n - 2 * PACKED, 2 * step + 1), "one-hot rows")
    yield Case("sums that overflow a half", at(tile_m - 2, tile_n, 2 * step), "large products")
    if each := stream_steps(config):
        yield Case("a tile of three blocks", at(1, 1, (2 * each + 1) * tile_k), "whole numbers")
        yield Case("blocks of two tiles", at(tile_m, tile_n + 1, (each + 1) * tile_k), "whole numbers")
        yield Case("a tile for each block", at(tile_m + 1, 1, each * tile_k), "whole numbers")
    for buffer, k in _ends(problem, config).items():
        yield Case(f"last step in buffer {buffer}", at(1, 1, k), "whole numbers")


def _ends(problem: W4A16Problem, config: Config) -> dict[int, int]:
    """Return the buffers that some block's last step may be in, each with the least k: a group may be several steps."""
    tile_k, stages, split, unit = tile_sizes(config)[2], int(config.get("stages", 1)), split_k(config), problem.group
    found: dict[int, int] = {}
    for k in range(unit, 2 * stages * split * max(tile_k, unit) + 1, unit):
        one = _at(problem, 1, 1, k)
        for own in {next(parts(one.gemm, config, block), 0) for block in range(most_sharers(one.gemm, config))} - {0}:
            found.setdefault((own - 1) % stages, k)
    return found


def _long_cases(problem: W4A16Problem, config: Config) -> Iterator[Case[W4A16Problem]]:
    """Yield cases of candidates that may rank: the problem's own k, m and n."""
    tile_m, tile_n, tile_k = tile_sizes(config)
    k = _deepest(problem, config)
    part = None if k >= problem.k else f"{k:,} of {problem.k:,} products of each sum"
    yield Case("long", _at(problem, tile_m - 3, tile_n - PACKED, k), "long", long=True, part=part)
    if problem.m <= MOST_TILES * tile_m:
        yield Case("own m", _at(problem, problem.m, tile_n // 2 + 1, tile_k), "whole numbers", long=True)
    if problem.n <= MOST_TILES * tile_n:
        yield Case("own n", _at(problem, tile_m // 2 + 1, problem.n, tile_k), "whole numbers", long=True)


def full_plan(
    problem: W4A16Problem, config: Config, launch_of: Callable[[W4A16Problem], Launch]
) -> list[tuple[FullCase[W4A16Problem], Launch]]:
    """Return the whole grid over few steps of K, and one block, or all blocks of one or two tiles, over all of K."""
    if not {"tile_m", "tile_n", "tile_k"} <= config.keys():
        return []
    p, k = problem, min(problem.k, _deepest(problem, config))
    part = None if k == p.k else f"{k:,} of {p.k:,} products of each sum"
    step = max(tile_sizes(config)[2], p.group)
    shallow = replace(p, k=few(p.k, step, few_steps(config)) // p.group * p.group or p.group)
    return [
        _at_full_size(FullCase("full grid", shallow, p, config), launch_of(shallow)),
        _at_full_size(
            FullCase("own k", own := replace(p, k=k // p.group * p.group), p, config, "one drawn", part), launch_of(own)
        ),
    ]


def _at_full_size(case: FullCase[W4A16Problem], launch: Launch) -> tuple[FullCase[W4A16Problem], Launch]:
    """Return the case with what its blocks do, as the product's with 16-bit weights, which have more bytes."""
    of_gemm = FullCase(case.name, case.problem.gemm, case.whole.gemm, case.config, case.blocks)
    found, launch = planned(of_gemm, launch)
    case = replace(case, cluster=found.cluster, visits=found.visits, tile_bytes=found.tile_bytes, tiles=found.tiles)
    return case, launch


def _deepest(problem: W4A16Problem, config: Config) -> int:
    """Return the k of the longest case: at least LONG, and at most what a block may take a second for."""
    tile_m, tile_n, tile_k = tile_sizes(config)
    step = max(tile_k, problem.group)
    most = max(2, MOST_WORK // (tile_m * tile_n * step))
    return few(problem.k, step, most) if problem.k >= LONG else LONG - problem.group


def cells(problem: W4A16Problem, config: Config) -> frozenset[Cell]:
    """Return the cells of a configuration; none if it does not state tile sizes."""
    if not {"tile_m", "tile_n", "tile_k"} <= config.keys():
        return frozenset()
    tile_m, tile_n, tile_k = tile_sizes(config)
    found = {
        *remainder_cells("rows", tile_m, problem.m),
        *remainder_cells("columns", tile_n, problem.n, PACKED, 2),
        *remainder_cells("products", tile_k, problem.k, problem.group, 1),
        *_steps(problem, config),
        *(Cell("values", what) for what in (*VALUES, EVERY_WEIGHT, ROUNDINGS)),
        *(Cell("together", what) for what in TOGETHER.values()),
        *(Cell("extents", axis) for axis in own_extents(problem.gemm, config)),
    }
    if int(config.get("group_m", 1)) > 1:
        found.add(Cell("together", GROUP))
    if split_k(config) > -(-problem.group // tile_k):
        found.add(Cell("together", NO_STEP))
    if each := stream_steps(config):
        # k is whole groups, which may not be a whole tile for each block
        found |= {Cell("together", what) for what in STREAM[: 2 if each * tile_k % problem.group else 3]}
    if _persistent(config):
        found |= {Cell("together", what) for what in PERSISTENT}
    return frozenset(found)


def _steps(problem: W4A16Problem, config: Config) -> Iterator[Cell]:
    """Yield what a block's pipeline goes through: of a stream, no more than it has steps."""
    tile_m, tile_n, _ = tile_sizes(config)
    ends = {f"the last in buffer {buffer}" for buffer in _ends(problem, config)}
    for cell in pipeline_steps(config, tile_parts(config, tile_m, tile_n)):
        if cell.what in ends or not cell.what.startswith("the last"):
            yield cell


def visited(case: Case[W4A16Problem], launch: Launch, visits: np.ndarray) -> frozenset[Cell]:
    """Return the cells that a case visits by its sizes and by the device's count, regardless of its values."""
    whole, p, config = case.whole, case.problem, case.config
    if whole is None or not {"tile_m", "tile_n", "tile_k"} <= config.keys():
        return frozenset()
    tile_m, tile_n, tile_k = tile_sizes(config)
    own = {"rows": p.m == whole.m, "columns": p.n == whole.n, "products": p.k >= _deepest(whole, config)}
    found = {
        *visited_remainders("rows", p.m, tile_m, whole.m),
        *visited_remainders("columns", p.n, tile_n, whole.n, PACKED),
        *visited_remainders("products", p.k, tile_k, whole.k, whole.group),
        *(Cell("together", what) for what in together(p.gemm, config, launch, (1, PACKED, p.group))),
        *(Cell("extents", axis) for axis in own_extents(whole.gemm, config) if own[axis]),
    }
    # a warp's visits count only if all tiles have rows and columns of its own
    of_tile = tile_parts(config, (p.m - 1) % tile_m + 1, (p.n - 1) % tile_n + 1)
    kind, (warps,) = waits_of(config)
    for block, count in visits_by_block(visits, kind, warps).items():
        done = [count] if _persistent(config) else list(parts(p.gemm, config, block))
        for steps in done if sum(done) == count else ():
            found |= set(visited_steps(of_tile, int(config["stages"]), steps))
    return frozenset(found)


def _persistent(config: Config) -> bool:
    """Return whether blocks process several tiles, whose steps pass through their buffers consecutively."""
    return config.get("schedule") == "persistent"
