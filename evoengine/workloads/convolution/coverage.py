"""Cells of a convolution's configuration, and those that a case visits by its sizes."""

from __future__ import annotations

from evoengine.records import Config
from evoengine.workloads.base import Case
from evoengine.workloads.convolution.problem import ConvolutionProblem
from evoengine.workloads.coverage import Cell, own_tail, remainder_cells, visited_remainders

MOST_PRODUCTS = 1 << 28
"""of a case with all rows or columns of the problem, in whole tiles, which takes a second or two"""
FLUSH = 8
"""multiple of floats at which the emulator can end a tensor, so that a read beyond its end is an error"""
ORDINARY_COLUMNS = 63
"""minimum length of rows of ordinary numbers, so that no row's error is near 0 by chance"""
ORDINARY_ROWS = 8
"""of ordinary numbers; fewer where a tile has fewer"""
VALUES = {
    "whole numbers": "whole numbers, whose sums are exact",
    "one weight": "one weight that is not 0",
    "one pixel": "one pixel of each window that is not 0",
    "normal": "ordinary numbers in several rows",
    "positive": "numbers above 0, far apart in size",
}
"""draw → the faults that it shows"""
TOGETHER = ("one output", "one column", "one row", "a whole tile")
OWN_TAILS = "the problem's own tails of height and width"
ENDS = Cell("width", "an image that ends with its last whole 32 bytes")
_KNOBS = {"block_size_x", "block_size_y", "tile_size_x", "tile_size_y"}


def tile_of(config: Config) -> tuple[int, int]:
    """Return the rows and columns of outputs that a block computes."""
    across = int(config.get("block_size_x", 16)) * int(config.get("tile_size_x", 1))
    return int(config.get("block_size_y", 16)) * int(config.get("tile_size_y", 1)), across


def has_own(problem: ConvolutionProblem, config: Config, axis: str) -> bool:
    """Return whether a case has all rows (height) or columns (width) of the problem."""
    tile_h, tile_w = tile_of(config)
    length, tile, other = (problem.width, tile_w, tile_h) if axis == "width" else (problem.height, tile_h, tile_w)
    return -(-length // tile) * tile * other * problem.filter_w * problem.filter_h <= MOST_PRODUCTS


def cells(problem: ConvolutionProblem, config: Config) -> frozenset[Cell]:
    """Return the cells of a configuration; none where it does not say how large tiles are."""
    if not config.keys() >= _KNOBS:
        return frozenset()
    tile_h, tile_w = tile_of(config)
    return frozenset(
        {
            *remainder_cells("height", tile_h, problem.height, near=2),
            *remainder_cells("width", tile_w, problem.width, near=1),
            *(Cell("values", what) for what in VALUES.values()),
            *(Cell("together", what) for what in (*TOGETHER, OWN_TAILS)),
            *(Cell("extents", axis) for axis in ("width", "height") if has_own(problem, config, axis)),
            ENDS,
        }
    )


def visited(case: Case[ConvolutionProblem]) -> frozenset[Cell]:
    """Return the cells that a case visits by its sizes. What it drew is none of this."""
    whole, p = case.whole, case.problem
    if whole is None or not case.config.keys() >= _KNOBS:
        return frozenset()
    tile_h, tile_w = tile_of(case.config)
    holds = (
        p.height == p.width == 1,
        p.width == 1 and p.height > tile_h,
        p.height == 1 and p.width > tile_w,
        (p.height, p.width) == (tile_h, tile_w),
    )
    together = dict(zip(TOGETHER, holds, strict=True))
    tails = own_tail(whole.height, tile_h) % tile_h, own_tail(whole.width, tile_w) % tile_w
    together[OWN_TAILS] = (p.height % tile_h, p.width % tile_w) == tails and p.height > tile_h and p.width > tile_w
    found = {
        *visited_remainders("height", p.height, tile_h, whole.height),
        *visited_remainders("width", p.width, tile_w, whole.width),
        *(Cell("together", what) for what, holds in together.items() if holds),
        *(Cell("extents", axis) for axis in ("width", "height") if getattr(p, axis) == getattr(whole, axis)),
    }
    if not (p.width + p.filter_w - 1) % FLUSH:
        found.add(ENDS)
    return frozenset(found)
