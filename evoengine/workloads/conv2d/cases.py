"""The gate's cases for a convolution, and the cells that they visit.

Outputs of all images are rows of a product, filters its columns, and the pixels of a window its products; cases are
therefore set against a configuration's tiles like those of a matrix product.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod

import numpy as np

from evoengine.devices.base import DTYPE_BYTES
from evoengine.devices.pool import PAGE
from evoengine.records import Config, Launch, Plan
from evoengine.workloads.base import Case, LaunchOf
from evoengine.workloads.conv2d.problem import CHUNK, Conv2dProblem
from evoengine.workloads.coverage import (
    Cell,
    own_tail,
    pipeline_cells,
    remainder_cells,
    visited_remainders,
    visited_steps,
    visits_by_block,
)
from evoengine.workloads.full_size import FullCase
from evoengine.workloads.gemm.cases import LONG, MOST_TILES, MOST_WORK, SQUARES, planned
from evoengine.workloads.gemm.coverage import (
    A_SQUARE,
    ALIKE,
    GROUP,
    NO_STEP,
    SEVERAL_SQUARES,
    tile_parts,
    visited_squares,
    waits_of,
)
from evoengine.workloads.gemm.problem import split_k, sums_in_memory

VALUES = {
    "whole numbers": "whole numbers, whose sums are exact",
    "positive numbers": "numbers above 0 alone",
    "one weight": "filters of one weight, which shift an image",
    "large products": "sums that overflow a half and cancel out",
    "long": f"{ALIKE:,} products that are alike, and that cancel out",
}
"""draw → what it shows"""
ONE = "one output of one filter"
COLUMN = "outputs one below another, in several tiles"
IMAGES = "a tile of outputs of several rows and images"
LAST_PART = "the last step, which is not whole, in the last of a tile's blocks"
UNSEEN = "last rows and columns of an image that no window sees"


def tile_sizes(config: Config) -> tuple[int, int, int]:
    """Return the outputs and filters that a block computes, and the products of each at a time."""
    tile_n = config.get("filters_each", config.get("tile_n", 64))
    return int(config.get("tile_m", 64)), int(tile_n), int(config.get("tile_k", 64))


def gate_cases(problem: Conv2dProblem, config: Config) -> tuple[Case[Conv2dProblem], ...]:
    """Return the gate's cases for a configuration."""
    found = [*_small_cases(problem, config), *_long_cases(problem, config)]
    found += _last_steps(problem, config, found)
    return tuple(replace(case, config=config, whole=problem) for case in found)


def unit_channels(problem: Conv2dProblem) -> int:
    return CHUNK if problem.chunked else 1


def unit_filters(problem: Conv2dProblem) -> int:
    return math.gcd(problem.filters, CHUNK)


def _at(
    problem: Conv2dProblem, outputs: tuple[int, int, int], channels: int, filters: int, unseen: int = 0
) -> Conv2dProblem:
    """Return a problem with these outputs (images, rows, columns), or more if the padding alone yields more.

    So many rows and columns of the image are seen by no window. Channels and filters are rounded up to what all cases
    share.
    """
    p, (images, *sides) = problem, outputs
    seen = (p.dilation * (length - 1) + 1 - 2 * p.pad for length in (p.filter_h, p.filter_w))
    height, width = (max(1, (side - 1) * p.stride + each + unseen) for side, each in zip(sides, seen, strict=True))
    unit_c, unit_f = unit_channels(p), unit_filters(p)
    channels, filters = -(-max(1, channels) // unit_c) * unit_c, -(-max(1, filters) // unit_f) * unit_f
    return replace(p, images=images, height=height, width=width, channels=channels, filters=filters)


def _deep(problem: Conv2dProblem, config: Config, steps: int) -> int:
    """Return the largest number of channels whose windows take each block so many steps, or as few more as possible."""
    unit = unit_channels(problem)
    return max(unit, steps * split_k(config) * tile_sizes(config)[2] // _taps(problem) // unit * unit)


def _taps(problem: Conv2dProblem) -> int:
    return problem.filter_h * problem.filter_w


def _small_cases(problem: Conv2dProblem, config: Config) -> Iterator[Case[Conv2dProblem]]:
    """Yield cases whose sizes are set against the configuration's tiles.

    Outputs end up to 3 before and after a tile's end, filters up to two units, channels one before, at and after a
    step; tiles of outputs span rows and images. A pipeline passes its buffers three times.
    """
    p, (tile_m, tile_n, tile_k), stages = problem, tile_sizes(config), int(config.get("stages", 1))
    unit_c, unit_f, group = unit_channels(p), unit_filters(p), int(config.get("group_m", 1))
    own_m, own_n = own_tail(p.gemm.m, tile_m), own_tail(p.filters, tile_n, unit_f)
    own_c = own_tail(p.channels, tile_k, unit_c)
    some, half = _deep(p, config, 4), tile_m // 2

    def at(images: int, rows: int, columns: int, channels: int, filters: int, unseen: int = 0) -> Conv2dProblem:
        return _at(p, (images, rows, columns), channels, filters, unseen)

    yield Case("one output", at(1, 1, 1, 1, 1), "positive numbers")
    yield Case("one column", at(1, tile_m + 1, 1, some, 1), "positive numbers")
    yield Case("one row", at(1, 1, tile_m + 2, _tail_of_all(p, config), tile_n + 2 * unit_f), "whole numbers")
    whole = tile_k * split_k(config) * -(-max(2, stages) // _taps(p))
    yield Case("whole tiles", at(2, 2, tile_m // 4, whole, tile_n))
    yield Case("remainders", at(1, 1, tile_m + own_m, own_c, tile_n + own_n))
    yield Case("several images", at(3, 5, 7, tile_k - unit_c, tile_n + 1, unseen=p.stride - 1), "one weight")
    yield Case("groups of tiles", at(1, 1, group * tile_m + 1, 1, tile_n + 1), "whole numbers")
    yield Case("pipeline wraps", at(1, tile_m - 1, 1, _deep(p, config, 3 * stages), tile_n - unit_f))
    yield Case("one weight", at(1, 1, tile_m + 3, some, tile_n - 2 * unit_f), "one weight")
    yield Case("sums that overflow a half", at(2, half - 1, 1, max(CHUNK, some), tile_n), "large products")


def _tail_of_all(problem: Conv2dProblem, config: Config) -> int:
    """Return channels that end a unit after a step, and give each of the blocks of a tile at least one step."""
    (_, _, tile_k), split, unit = tile_sizes(config), split_k(config), unit_channels(problem)
    few = tile_k + unit
    return few if steps_of(problem, config, few) >= split else split * tile_k + unit


def _ends(problem: Conv2dProblem, config: Config) -> dict[int, int]:
    """Return the buffers that the last step may be in, each with the fewest channels."""
    stages, unit = int(config.get("stages", 1)), unit_channels(problem)
    found: dict[int, int] = {}
    for channels in range(unit, stages * split_k(config) * tile_sizes(config)[2] + 1, unit):
        for own in _own_steps(problem, config, channels):
            found.setdefault((own - 1) % stages, channels)
    return found


def _last_steps(
    problem: Conv2dProblem, config: Config, others: Sequence[Case[Conv2dProblem]]
) -> Iterator[Case[Conv2dProblem]]:
    """Yield a case for each possible buffer of the last step that the other cases do not have."""
    stages = int(config.get("stages", 1))
    seen = {(own - 1) % stages for case in others for own in _own_steps(problem, config, case.problem.channels)}
    for buffer, channels in _ends(problem, config).items():
        if buffer not in seen:
            yield Case(f"last step in buffer {buffer}", _at(problem, (1, 1, 1), channels, 1), "whole numbers")


def steps_of(problem: Conv2dProblem, config: Config, channels: int) -> int:
    """Return the steps of a window of so many channels."""
    return -(-_taps(problem) * channels // tile_sizes(config)[2])


def _own_steps(problem: Conv2dProblem, config: Config, channels: int) -> set[int]:
    """Return the steps of the blocks of a tile that have any."""
    share, left = divmod(steps_of(problem, config, channels), split_k(config))
    return {share + (block < left) for block in range(split_k(config))} - {0}


def _long_cases(problem: Conv2dProblem, config: Config) -> Iterator[Case[Conv2dProblem]]:
    """Yield cases of candidates that may rank: the problem's own channels, images and filters."""
    p, (tile_m, tile_n, _), unit_f = problem, tile_sizes(config), unit_filters(problem)
    channels = deepest(p, config)
    part = None if channels >= p.channels else f"{channels:,} of {p.channels:,} channels"
    long = _at(p, (1, tile_m - 3, 1), channels, max(3, tile_n - unit_f))  # one for each kind of filter
    yield Case("long", long, "long", long=True, part=part)
    if has_own_outputs(p, config):
        one = _at(p, (1, 1, 1), 1, tile_n // 2 + 1)
        own = replace(one, images=p.images, height=p.height, width=p.width)
        yield Case("own outputs", own, "whole numbers", long=True)
    if has_own_filters(p, config):
        yield Case("own filters", _at(p, (1, 1, tile_m // 2 + 1), 1, p.filters), "whole numbers", long=True)
    if config.get("raster") == "hilbert":
        for name, (down, across) in SQUARES.items():
            squares = _at(p, (1, 1, down * tile_m - 1), 1, across * tile_n - unit_f)
            yield Case(name, squares, "whole numbers", long=True)


def deepest(problem: Conv2dProblem, config: Config) -> int:
    """Return the channels of the longest case: the problem's own or more, at most what takes a block a second."""
    tile_m, tile_n, _ = tile_sizes(config)
    unit, taps = unit_channels(problem), _taps(problem)
    most = max(unit, MOST_WORK // (tile_m * tile_n * taps) // unit * unit)
    wanted = -(-max(problem.channels, -(-LONG // taps)) // unit) * unit
    if wanted <= most:
        return wanted
    return most - (most - problem.channels) % tile_sizes(config)[2]  # all of them end a step


def has_own_outputs(problem: Conv2dProblem, config: Config) -> bool:
    return problem.gemm.m <= MOST_TILES * tile_sizes(config)[0]


def has_own_filters(problem: Conv2dProblem, config: Config) -> bool:
    return problem.filters <= MOST_TILES * tile_sizes(config)[1]


# ── cells ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def cells(problem: Conv2dProblem, config: Config) -> frozenset[Cell]:
    """Return the cells of a configuration; none if it does not state tile sizes."""
    if "tile_m" not in config:
        return frozenset()
    p, (tile_m, tile_n, tile_k) = problem, tile_sizes(config)
    found = {
        *remainder_cells("columns", tile_n, p.filters, unit_filters(p), 2),
        *remainder_cells("channels", tile_k, p.channels, unit_channels(p), 1),
        *(_steps(p, config) if "stages" in config else ()),
        *(Cell("values", what) for what in VALUES.values()),
        *(Cell("together", what) for what in (IMAGES, *([UNSEEN] if p.stride > 1 else []))),
        Cell("extents", "channels"),
    }
    if _at(p, (1, 1, 1), 1, 1).gemm.m == 1:  # otherwise the padding alone makes outputs, and not any number of them
        found |= {*remainder_cells("rows", tile_m, p.gemm.m), Cell("together", ONE), Cell("together", COLUMN)}
    if int(config.get("group_m", 1)) > 1:
        found.add(Cell("together", GROUP))
    if config.get("raster") == "hilbert":
        found |= {Cell("together", what) for what in (A_SQUARE, SEVERAL_SQUARES)}
    if steps_of(p, config, unit_channels(p)) < split_k(config):
        found.add(Cell("together", NO_STEP))
    if split_k(config) > 1 and unit_channels(p) * _taps(p) % tile_k:
        found.add(Cell("together", LAST_PART))
    if has_own_outputs(p, config):
        found.add(Cell("extents", "outputs"))
    if has_own_filters(p, config):
        found.add(Cell("extents", "filters"))
    return frozenset(found)


def _steps(problem: Conv2dProblem, config: Config) -> Iterator[Cell]:
    """Yield the steps of a pipeline; if windows have many pixels, its last step is not in every buffer."""
    tile_m, tile_n, _ = tile_sizes(config)
    ends = {f"the last in buffer {buffer}" for buffer in _ends(problem, config)}
    for cell in pipeline_cells(tile_parts(config, tile_m, tile_n), int(config["stages"])):
        if cell.what in ends or not cell.what.startswith("the last"):
            yield cell


def visited(case: Case[Conv2dProblem], visits: np.ndarray) -> frozenset[Cell]:
    """Return the cells that a case visits by its sizes and by the device's count, regardless of its values."""
    whole, p, config = case.whole, case.problem, case.config
    if whole is None or "tile_m" not in config:
        return frozenset()
    tile_m, tile_n, tile_k = tile_sizes(config)
    rows = p.gemm.m
    own = {
        "channels": p.channels >= deepest(whole, config),
        "outputs": (p.images, p.height, p.width) == (whole.images, whole.height, whole.width),
        "filters": p.filters == whole.filters,
    }
    found = {
        *visited_remainders("rows", rows, tile_m, whole.gemm.m),
        *visited_remainders("columns", p.filters, tile_n, whole.filters, unit_filters(whole)),
        *visited_remainders("channels", p.channels, tile_k, whole.channels, unit_channels(whole)),
        *(Cell("extents", axis) for axis, holds in own.items() if holds),
        *(Cell("together", what) for what in _together(p, config)),
    }
    if "stages" not in config:
        return frozenset(found)
    # a warp's visits count only if all tiles have rows and columns of its own
    parts = tile_parts(config, (rows - 1) % tile_m + 1, (p.filters - 1) % tile_n + 1)
    kind, (warps,) = waits_of(config)
    for count in visits_by_block(visits, kind, warps).values():
        found |= set(visited_steps(parts, int(config["stages"]), count))
    return frozenset(found)


def _together(p: Conv2dProblem, config: Config) -> Iterator[str]:
    tile_m, tile_n, tile_k = tile_sizes(config)
    if p.gemm.m == 1 and p.filters == unit_filters(p):
        yield ONE
    if steps_of(p, config, p.channels) < split_k(config):
        yield NO_STEP
    elif _taps(p) * p.channels % tile_k:
        yield LAST_PART
    if p.images > 1 and p.out_height > 1 and p.out_width > 1 and p.out_height * p.out_width < tile_m:
        yield IMAGES
    if (p.height + 2 * p.pad - p.dilation * (p.filter_h - 1) - 1) % p.stride:
        yield UNSEEN
    if p.out_width == 1 and p.gemm.m > tile_m:
        yield COLUMN
    group = int(config.get("group_m", 1))
    if -(-p.gemm.m // tile_m) % group and p.filters > tile_n and p.gemm.m > group * tile_m:
        yield GROUP
    yield from visited_squares(-(-p.gemm.m // tile_m), -(-p.filters // tile_n))


# ── at full size ──────────────────────────────────────────────────────────────────────────────────────────────────────


MOST_PAGES = 1 << 15
"""limit of the pages of inputs of tiles that are run together, half of what the emulator has"""


def full_plan(problem: Conv2dProblem, config: Config, launch_of: LaunchOf) -> Plan:
    """Return the whole grid over few steps, and one block, or all of some tiles, over as many channels as affordable.

    All of x exists if offsets into it may need more than 32 bits.
    """
    if "tile_m" not in config:
        return []
    p, channels = problem, min(problem.channels, deepest(problem, config))
    part = None if channels == p.channels else f"{channels:,} of {p.channels:,} channels"
    few, deep = replace(p, channels=min(p.channels, _deep(p, config, 2))), replace(p, channels=channels)
    cases = [FullCase("full grid", few, p, config), FullCase("own channels", deep, p, config, "one drawn", part)]
    if DTYPE_BYTES[p.dtype] * prod(p.shape("x")) >= 1 << 31:
        cases.append(FullCase("all of x", deep, p, config, "last", part))
    return [(replace(case, tiles=_shared_tiles(case)), launch_of(case.problem)) for case in cases]


def _shared_tiles(case: FullCase[Conv2dProblem]) -> int:
    """Return how many tiles are run by all their blocks, as of the product, if windows are not spread over too much."""
    p, config = case.problem, case.config
    if not sums_in_memory(config):
        return 0
    of_product, _ = planned(FullCase(case.name, p.gemm, p.gemm, config, case.blocks), Launch((1, 1, 1), 1, 0))
    (rows, columns, _), pixel = tile_sizes(config), DTYPE_BYTES[p.dtype] * p.channels
    pages = _taps(p) * rows * (pixel // PAGE + 2) + columns * (_taps(p) * pixel // PAGE + 2)
    return max(1, min(of_product.tiles, MOST_PAGES // pages))
