"""2-D convolution in float32, "valid": every output sees a whole window of the image.

Nothing here needs a tensor library; the tensors themselves are drawn and judged in `tensors.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

import numpy as np

from evoengine.devices.base import Parameter, ScalarArgument, TensorParameter
from evoengine.errors import UsageError
from evoengine.records import Config, Launch, Plan, Value
from evoengine.space.symbol import int32, symbol
from evoengine.workloads.base import Case, FullSize, LaunchOf, Tensors, Tolerance, Workload
from evoengine.workloads.coverage import Cell, own_tail, remainder_cells, visited_remainders
from evoengine.workloads.full_size import FullCase
from evoengine.workloads.problem_text import LARGEST, read_parts

EXAMPLE = "convolution:w4096,h4096,fw17,fh17"
_NUMBERS = {"w": "width", "h": "height", "fw": "filter_w", "fh": "filter_h"}


@dataclass(frozen=True, slots=True)
class ConvolutionProblem:
    """output[y, x] = Σ image[y + v, x + u] · filter[v, u]; as in Kernel Tuner's benchmark the filter is not mirrored.

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
        return {"width": self.width, "height": self.height, "filter_w": self.filter_w, "filter_h": self.filter_h}


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
"""limit of a case with all rows or columns of the problem, in whole tiles, which takes a second or two"""
FLUSH = 8
"""multiple of floats at which the emulator can end a tensor, so that a read beyond its end is an error"""
ORDINARY_COLUMNS = 63
"""minimum length of rows of ordinary numbers, so that no row's error is near 0 by chance"""
ORDINARY_ROWS = 8
"""number of rows of ordinary numbers; fewer if a tile has fewer"""
VALUES = {
    "whole numbers": "whole numbers, whose sums are exact",
    "one weight": "one weight that is not 0",
    "one pixel": "one pixel of each window that is not 0",
    "normal": "ordinary numbers in several rows",
    "positive": "numbers above 0, far apart in size",
}
"""draw → the values that it shows"""
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
    """Return the cells of a configuration; none if it does not state tile sizes."""
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
    """Return the cells that a case visits by its sizes, regardless of its values."""
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


class Convolution(Workload[ConvolutionProblem]):
    name = "convolution"
    grammar = "w…,h…,fw…,fh…"
    example = EXAMPLE
    compile_time = ("filter_w", "filter_h")
    # Sums in another order err by as much again, and by chance several times as much in a single row.
    tolerance = Tolerance(own=4.0, roundings=4.0)
    baseline_label = "torch"

    parse = staticmethod(parse_problem)
    cells = staticmethod(cells)

    def flops(self, problem: ConvolutionProblem) -> float:
        """Return the operations: a product and a sum per weight and output."""
        return 2.0 * problem.width * problem.height * problem.filter_w * problem.filter_h

    def min_dram_bytes(self, problem: ConvolutionProblem) -> float:
        """Return the bytes of image and filter read once and the output written once."""
        floats = prod(problem.image_shape) + problem.filter_w * problem.filter_h + problem.width * problem.height
        return 4.0 * floats

    def cases(self, problem: ConvolutionProblem, config: Config) -> tuple[Case[ConvolutionProblem], ...]:
        """Return cases with the problem's own filter size, which a template may use as a constant.

        They are sized for a block's tile. Most draw small integers, whose sums float32 represents exactly in any order,
        so that the smallest fault shows. Cases with ordinary numbers have long rows, so that no row's error is near 0
        by chance. Some end where an image's bytes do, so that a read one pixel further is detected.
        """
        tile_h, tile_w = tile_of(config)
        own_w, own_h = own_tail(problem.width, tile_w), own_tail(problem.height, tile_h)

        def at(height: int, width: int) -> ConvolutionProblem:
            return replace(problem, height=max(1, height), width=max(1, width))

        def flush(height: int, width: int) -> ConvolutionProblem:
            return at(height, width - (width + problem.filter_w - 1) % FLUSH)

        found = [
            Case("one output", at(1, 1), "whole numbers"),
            Case("one column", at(tile_h + 1, 1), "whole numbers"),
            Case("one row", at(1, -(-ORDINARY_COLUMNS // tile_w) * tile_w + 1)),
            Case("whole tile", at(tile_h, tile_w), "whole numbers"),
            Case("one short", at(tile_h - 1, 2 * tile_w - 1), "whole numbers"),
            Case("remainders", at(tile_h + own_h, tile_w + own_w), "whole numbers"),
            Case("one weight", flush(tile_h + 2, tile_w - 2), "one weight"),
            Case("one pixel", flush(tile_h - 2, tile_w + 2), "one pixel"),
            Case("ordinary numbers", flush(min(tile_h, ORDINARY_ROWS), max(tile_w - 1, 71))),
            Case("positive numbers", at(min(tile_h, 4), max(tile_w, 64)), "positive"),
        ]
        if has_own(problem, config, "width"):
            found.append(Case("own width", at(tile_h // 2 + 1, problem.width), "whole numbers", long=True))
        if has_own(problem, config, "height"):
            found.append(Case("own height", at(problem.height, tile_w // 2 + 1), "whole numbers", long=True))
        return tuple(replace(case, config=config, whole=problem) for case in found)

    def visited(self, case: Case[ConvolutionProblem], launch: Launch, visits: np.ndarray) -> frozenset[Cell]:
        return visited(case)

    def parameters(self, problem: ConvolutionProblem, config: Config) -> tuple[Parameter, ...]:
        return (
            TensorParameter("image", problem.image_shape, "fp32"),
            TensorParameter("filter", (problem.filter_h, problem.filter_w), "fp32"),
            TensorParameter("output", (problem.height, problem.width), "fp32", output=True),
            ScalarArgument("height", int32(problem.height)),
            ScalarArgument("width", int32(problem.width)),
        )

    def at_run_time(self, problem: ConvolutionProblem) -> ConvolutionProblem:
        return replace(problem, width=symbol("width"), height=symbol("height"))

    def tensors(self) -> Tensors[ConvolutionProblem]:
        from evoengine.workloads.convolution.tensors import ConvolutionTensors

        return ConvolutionTensors()

    def full_plan(self, problem: ConvolutionProblem, config: Config, launch_of: LaunchOf) -> Plan:
        """Return the problem itself, if the configuration states the size of a block's tile."""
        if not {"block_size_x", "block_size_y", "tile_size_x", "tile_size_y"} <= config.keys():
            return ()
        return [(FullCase("full grid", problem, problem, config), launch_of(problem))]

    def full_size(self) -> FullSize[FullCase[ConvolutionProblem]]:
        from evoengine.workloads.convolution.tensors import ConvolutionFullSize

        return ConvolutionFullSize(self)


WORKLOAD = Convolution()
