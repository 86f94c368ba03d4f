"""The sizes of one 2-D convolution in float32."""

from __future__ import annotations

from dataclasses import dataclass

from evoengine.errors import UsageError
from evoengine.records import Config, Value
from evoengine.workloads.base import Case
from evoengine.workloads.coverage import Cell, own_tail, remainder_cells, visited_remainders
from evoengine.workloads.problem_text import LARGEST, read_parts

EXAMPLE = "convolution:w4096,h4096,fw17,fh17"
_NUMBERS = {"w": "width", "h": "height", "fw": "filter_w", "fh": "filter_h"}


@dataclass(frozen=True, slots=True)
class ConvolutionProblem:
    """output[y, x] = Σ image[y + v, x + u] · filter[v, u], as in Kernel Tuner's benchmark: the filter is not mirrored.

    image [height + filter_h - 1, width + filter_w - 1], filter [filter_h, filter_w], output [height, width]; float32.
    """

    width: int
    height: int
    filter_w: int
    filter_h: int

    @property
    def image_shape(self) -> tuple[int, int]:
        return self.height + self.filter_h - 1, self.width + self.filter_w - 1

    def __str__(self) -> str:
        return f"convolution:w{self.width},h{self.height},fw{self.filter_w},fh{self.filter_h}"

    def variables(self) -> dict[str, Value]:
        """Return the names that a space's expressions and templates may use, with their values."""
        return {
            "width": self.width,
            "height": self.height,
            "filter_w": self.filter_w,
            "filter_h": self.filter_h,
        }


def parse_problem(text: str) -> ConvolutionProblem:
    """Parse `w4096,h4096,fw17,fh17`. Raises UsageError naming the part that is wrong and what would be right."""
    sizes, _ = read_parts(text, EXAMPLE, _NUMBERS, {})
    problem = ConvolutionProblem(sizes["width"], sizes["height"], sizes["filter_w"], sizes["filter_h"])
    if max(problem.image_shape) > LARGEST:
        raise UsageError(
            f"the problem {text!r} needs an image of more than {LARGEST} rows or columns; take a smaller one"
        )
    return problem


# Cells of a convolution's configuration, and those that a case visits by its sizes.

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
