"""The gate's cases for a matrix product.

They are small problems set against a configuration's tiles, and the problem's own extents; at full size, blocks of the
problem itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import prod
from typing import Any, Literal

from evoengine.devices.base import DTYPE_BYTES
from evoengine.devices.pool import PAGE
from evoengine.records import Config, Launch
from evoengine.workloads.base import Case
from evoengine.workloads.coverage import SUMMED_ROWS, own_tail
from evoengine.workloads.full_size import DRAWN, FullCase, few
from evoengine.workloads.gemm.problem import (
    HALVES,
    GemmProblem,
    blocks_of_cluster,
    cluster_extents,
    cluster_shape,
    cluster_tiles,
    most_sharers,
    parts,
    split_k,
    stream_steps,
    sums_in_memory,
    tile_sizes,
    tile_steps,
)

LONG = 4096
"""minimum K of the longest case, over which errors of sums in 16 bits accumulate"""
CUT_OFF = "normal, cut off"
"""draws as "normal", but the errors of rows are not independent"""
MOST_WORK = 1 << 29
"""limit of a block's products over all of K, which take about a second"""
MOST_ROWS = 24576
"""limit of the rows of B that a block reads, each of which takes a page or two in the emulator"""
MOST_ROWS_OF_EXECUTOR = 1 << 17
"""the same of the executor, which has memory for more"""
MOST_BYTES = 1 << 27
"""limit of the bytes of A and B, in whole pages, for tiles that are run over the same memory: half of the emulator's"""
MOST_TILES = 256
"""limit of tiles of a case with all rows or columns of the problem"""
SQUARES = {"squares of tiles": (6, 4), "a square of tiles": (4, 4)}
"""case → tiles down and across: three by two squares along a Hilbert curve, and one in which the curve turns

It turns in squares of four tiles a side or more, and the problem's own tiles may be squares of either kind.
"""
CHUNK_BYTES = 16
"""of the widest load; rows that are multiples of it remain so in all cases"""


def gate_cases(problem: GemmProblem, config: Config) -> tuple[Case[GemmProblem], ...]:
    """Return the gate's cases for a configuration."""
    small = (*_small_cases(problem, config), *_stream_cases(problem, config))
    found = (*small, *_last_steps(problem, config, small), *_long_cases(problem, config))
    return tuple(replace(case, config=config, whole=problem, draw=draw_of(case, problem)) for case in found)


EXACT_CASE = "whole tiles"
"""the case whose sums of products of FP8 are exact, so that roundings of C alone are left, which are independent"""


def draw_of(case: Case[Any], problem: GemmProblem) -> str:
    """Return how a case of that product is drawn: what its space's cases state, but for sums that are cut off."""
    exact = problem.dtype.startswith("fp8") and problem.out_dtype in HALVES and case.name == EXACT_CASE
    return CUT_OFF if case.draw == "normal" and cuts_off(problem) and not exact else case.draw


def cuts_off(problem: GemmProblem) -> bool:
    """Return whether what tensor cores cut off from sums of normal numbers shows beside the roundings of C."""
    return problem.dtype.startswith("fp8") or (problem.dtype in HALVES and problem.out_dtype == "fp32")


def units(problem: GemmProblem) -> tuple[int, int, int]:
    """Return what m, n and k are multiples of in all cases: kernels may rely on what the problem's share with a chunk.

    No row of a tensor in memory is of m elements, unless A is stored so; rows of C, and of most B, are of n.
    """
    chunk = chunk_elements(problem.dtype)
    unit_m = math.gcd(problem.m, chunk) if problem.a_layout == "km" else 1
    return unit_m, math.gcd(problem.n, chunk_elements("fp16")), math.gcd(problem.k, chunk)


def chunk_elements(dtype: str) -> int:
    return CHUNK_BYTES // DTYPE_BYTES[dtype]


def summed_rows(tile_m: int) -> int:
    """Return the rows of a tile, or of as many tiles as have so many that sums of their errors are judged."""
    return tile_m * max(1, -(-SUMMED_ROWS // tile_m))


def step_of(config: Config) -> int:
    """Return the products of each sum that a cluster does at a time: a tile for each of the blocks that share them."""
    return tile_sizes(config)[2] * split_k(config)


def _at(problem: GemmProblem, m: int, n: int, k: int) -> GemmProblem:
    unit_m, unit_n, unit_k = units(problem)
    return replace(problem, batch=1, m=-(-m // unit_m) * unit_m, n=-(-n // unit_n) * unit_n, k=-(-k // unit_k) * unit_k)


def _small_cases(problem: GemmProblem, config: Config) -> Iterator[Case[GemmProblem]]:
    """Yield cases whose sizes are set against the configuration's tiles.

    Every candidate meets one element, whole tiles, tails that end just before and behind a tile's end, the remainders
    that the problem itself leaves, tiles of rows behind a whole group of them, and with all rows of its tile a pipeline
    that wraps around twice (2·stages + 1 steps) and more.
    """
    (tile_m, tile_n, tile_k), (unit_m, unit_n, unit_k) = tile_sizes(config), units(problem)
    stages, group, step = int(config.get("stages", 1)), int(config.get("group_m", 1)), step_of(config)
    down, across = cluster_shape(config)
    tails = ((problem.m, tile_m, unit_m), (problem.n, tile_n, unit_n), (problem.k, tile_k, unit_k))
    own_m, own_n, own_k = (own_tail(*of) for of in tails)

    def at(m: int, n: int, k: int) -> GemmProblem:
        return _at(problem, m, n, k)

    yield Case("one element", at(1, 1, 1), "positive numbers")
    yield Case("one column", at(tile_m + unit_m, 1, 4 * step), "positive numbers")
    yield Case("one row", at(1, tile_n + 2 * unit_n, 4 * step + 1), "whole numbers")
    yield Case("whole tiles", at(summed_rows(tile_m), tile_n, max(2, stages) * step))
    yield Case("remainders", at(tile_m + own_m, tile_n + own_n, step + own_k))
    yield Case("groups of tiles", at(group * down * tile_m + 2 * unit_m, across * tile_n + 1, 1), "whole numbers")
    if config.get("schedule") == "persistent" or problem.batch > 1:
        several = at(2 * down * tile_m + 2 * unit_m, 2 * across * tile_n + 1, stages * tile_k + 1)
        yield Case("several tiles", replace(several, batch=min(problem.batch, 2)), "whole numbers")
    if config.get("schedule") == "persistent" and stages > 2:
        yield Case("one buffer not filled", at(tile_m, tile_n, (stages - 1) * step), "whole numbers")
    yield Case("pipeline wraps", at(tile_m - unit_m, tile_n - unit_n, (2 * stages + 2) * step - unit_k))
    yield Case("one-hot rows", at(tile_m + 3 * unit_m, tile_n - 2 * unit_n, 2 * step + 1), "one-hot rows")
    yield Case("sums that overflow a half", at(tile_m - 2 * unit_m, tile_n, 2 * step - unit_k), "large products")


def _last_steps(
    problem: GemmProblem, config: Config, others: Sequence[Case[GemmProblem]]
) -> Iterator[Case[GemmProblem]]:
    """Yield a case for each buffer in which no block of the others has its last step."""
    seen = {buffer for case in others for buffer in ends(case.problem, config)}
    for buffer in range(last_buffers(config)):
        if buffer not in seen:
            own = _at(problem, 1, 1, (buffer + 1) * step_of(config))
            yield Case(f"last step in buffer {buffer}", own, "whole numbers")


def last_buffers(config: Config) -> int:
    """Return the number of buffers that a last step may be in: a stream's blocks may have fewer steps than stages."""
    stages = int(config.get("stages", 1))
    return min(stages, stream_steps(config) or stages)


def ends(problem: GemmProblem, config: Config) -> Iterator[int]:
    """Yield the buffers in which the blocks of a case have their last steps.

    A persistent block goes on through its buffers from tile to tile. Of two teams each does every second tile. A stream
    by mma.sync fills its pipeline again for each tile, one by wgmma goes on.
    """
    stages, steps, each = int(config.get("stages", 1)), tile_steps(problem, config), stream_steps(config)
    if config.get("schedule") != "persistent":
        for block in range(-(-cluster_tiles(problem, config) * steps // each) if each else split_k(config)):
            of_tiles = list(parts(problem, config, block))
            goes_on = each and config["family"] == "wgmma"
            yield from ((of - 1) % stages for of in ([sum(of_tiles)] if goes_on else of_tiles) if of)
        return
    clusters, tiles = persistent_clusters(problem, config), cluster_tiles(problem, config)
    teams = 2 if config.get("ping_pong") else 1
    for first in range(min(tiles, teams * clusters)):
        own = len(range(first, tiles, teams * clusters))
        yield (((own - 1) * teams + first // clusters + 1) * steps - 1) % stages


def persistent_clusters(problem: GemmProblem, config: Config) -> int:
    """Return the clusters of a case's launch where each goes through several tiles.

    A kernel must be right with any number. It gets the most that leave each at least two tiles and the last round not
    filled, or one.
    """
    tiles = cluster_tiles(problem, config)
    return next((n for n in range(tiles // 2, 1, -1) if tiles % n), 1)


def _stream_cases(problem: GemmProblem, config: Config) -> Iterator[Case[GemmProblem]]:
    """Yield cases of a stream: parts that begin or end within a tile, that are all of it, and a middle one."""
    each, (tile_m, tile_n, tile_k), (down, across) = stream_steps(config), tile_sizes(config), cluster_shape(config)
    if each:
        yield Case("a tile of three blocks", _at(problem, 1, 1, (2 * each + 1) * tile_k), "whole numbers")
        two = _at(problem, down * tile_m, across * tile_n + 1, (each + 1) * tile_k)
        yield Case("blocks of two tiles", two, "whole numbers")
        yield Case("a tile for each block", _at(problem, down * tile_m + 1, 1, each * tile_k), "whole numbers")


def _long_cases(problem: GemmProblem, config: Config) -> Iterator[Case[GemmProblem]]:
    """Yield cases of candidates that may rank: the problem's own k, m and n."""
    (tile_m, tile_n, tile_k), (unit_m, unit_n, unit_k) = tile_sizes(config), units(problem)
    steps = max(2, MOST_WORK // (tile_m * tile_n * tile_k))
    k = few(problem.k, tile_k, steps) if problem.k >= LONG else LONG - unit_k
    part = None if k >= problem.k else f"{k:,} of {problem.k:,} products of each sum"
    short = 3 if unit_m == 1 else unit_m  # so that the last warp's rows are among them
    yield Case("long", _at(problem, tile_m - short, tile_n - unit_n, k), "long", long=True, part=part)
    if problem.m <= MOST_TILES * tile_m:
        yield Case("own m", _at(problem, problem.m, tile_n // 2 + 1, tile_k), "whole numbers", long=True)
    if problem.n <= MOST_TILES * tile_n:
        rows = tile_m // 2 + 1 if unit_m == 1 else tile_m - 3 * unit_m
        yield Case("own n", _at(problem, rows, problem.n, tile_k), "whole numbers", long=True)
    if config.get("raster") == "hilbert":
        down, across = cluster_shape(config)
        for name, (rows, columns) in SQUARES.items():
            squares = _at(problem, rows * down * tile_m - unit_m, columns * across * tile_n - unit_n, 1)
            yield Case(name, squares, "whole numbers", long=True)


def deepest(problem: GemmProblem, config: Config) -> int:
    """Return the problem's own k, or one that ends as it does where a block over all of it takes too long."""
    tile_m, tile_n, tile_k = tile_sizes(config)
    return few(problem.k, tile_k, min(MOST_WORK // (tile_m * tile_n), MOST_ROWS) // tile_k)


# ── at full size ──────────────────────────────────────────────────────────────────────────────────────────────────────


MOST_VISITS, FEW_VISITS = 64, 8
"""limit of the tiles of a persistent block that is followed to its end; beyond it the grid is larger, so that they are
the second"""
Planned = list[tuple[FullCase[GemmProblem], Launch]]


def full_plan(problem: GemmProblem, config: Config, launch_of: Callable[[GemmProblem], Launch]) -> Planned:
    """Return the whole grid over few steps of K, and one block, or all blocks of one or two tiles, over all of K.

    All of A and of B follow where offsets into them may need more than 32 bits.
    """
    if not {"tile_m", "tile_n", "tile_k"} <= config.keys():
        return []
    p, tile_k, most = problem, int(config["tile_k"]), _most_steps(problem, config, MOST_ROWS)
    many_pages = most < 2
    if many_pages and _most_steps(problem, config, MOST_ROWS_OF_EXECUTOR) < 2:
        return []
    k = few(deepest(p, config), tile_k, max(2, most))

    def case(
        name: str, own: GemmProblem, blocks: Literal["many", "last", "one drawn"] = "many", part: str | None = None
    ) -> tuple[FullCase[GemmProblem], Launch]:
        return planned(FullCase(name, own, p, config, blocks, part, many_pages=many_pages), launch_of(own))

    part = None if k == p.k else f"{k:,} of {p.k:,} products of each sum"
    cases = [case("full grid", replace(p, k=few(k, tile_k, few_steps(config))))]
    if not many_pages:
        cases.append(case("own k", replace(p, k=k), "one drawn", part))
    if DTYPE_BYTES[p.dtype] * prod(p.shape("a")) >= 1 << 31:
        own = replace(p, n=few(p.n, int(config["tile_n"]), 1))
        cases.append(case("full A", _less_deep(own, k, "m"), "last"))
    if DTYPE_BYTES[p.dtype] * prod(p.shape("b")) >= 1 << 31:
        own = replace(p, m=few(p.m, int(config["tile_m"]), 1))
        cases.append(case("full B", _less_deep(own, k, "n"), "last"))
    return cases


def few_steps(config: Config) -> int:
    """Return the steps of a tile over few products: two of each block, or more than a block of a stream has."""
    return stream_steps(config) + 1 if stream_steps(config) else 2 * split_k(config) if sums_in_memory(config) else 2


def _most_steps(problem: GemmProblem, config: Config, rows: int) -> int:
    """Return how many steps of a tile there is memory of `rows` for, where each is so many rows of A or of B in memory.

    The first and the last block of a stream's tile have rows of other tiles too.
    """
    p, steps = problem, rows // tile_sizes(config)[2]
    if not stream_steps(config) or (p.a_layout, p.b_layout) == ("mk", "nk"):
        return max(2, steps)
    return steps // (len(p.operands) - 1) - 2 * stream_steps(config)


def _shared_tiles(case: FullCase[GemmProblem]) -> int:
    """Return how many tiles are run by all their blocks: as many as there is time and memory for, and one at least."""
    p, config, (rows, columns) = case.problem, case.config, cluster_extents(case.config)
    steps, each = tile_steps(p, config), stream_steps(config)
    done = max(steps, most_sharers(p, config) * each)
    work = done * rows * columns * int(config["tile_k"]) * (len(p.operands) - 1)
    affordable = min(MOST_WORK // work, MOST_BYTES * steps // (_bytes(p, config) * done))
    return max(1, min(affordable, {"many": DRAWN, "one drawn": 2, "last": 1}[case.blocks]))


def _less_deep(problem: GemmProblem, k: int, side: str) -> GemmProblem:
    """Return the problem with another K.

    Where that is less than its own, the other side of A (m) or B (n) grows in proportion.
    """
    chunk = chunk_elements(problem.dtype)
    length = getattr(problem, side)
    longer = length + (length * problem.k // k - length) // chunk * chunk
    return replace(problem, k=k, **{side: longer})


def planned(case: FullCase[GemmProblem], launch: Launch) -> tuple[FullCase[GemmProblem], Launch]:
    """Return the case with what its blocks do: one tile each, or several where the kernel is persistent."""
    p, config, together = case.problem, case.config, blocks_of_cluster(case.config)
    if sums_in_memory(config):
        return replace(case, cluster=together, tiles=_shared_tiles(case)), launch
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
