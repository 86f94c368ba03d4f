"""The sizes of one 2-D convolution in float32."""

from __future__ import annotations

from dataclasses import dataclass

from evoengine.errors import UsageError
from evoengine.records import Value
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
