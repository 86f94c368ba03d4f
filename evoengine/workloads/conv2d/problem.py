"""The shapes, dtype and epilogue of one 2-D convolution of channels, and the product of matrices that it is."""

from __future__ import annotations

from dataclasses import dataclass, field

from evoengine.errors import UsageError
from evoengine.records import Value, named
from evoengine.workloads.gemm.problem import BEHIND_SUMS, HALVES, NO_EPILOGUE, RESIDUAL, GemmProblem
from evoengine.workloads.problem_text import LARGEST, read_parts

EXAMPLE = "conv2d:n8,c64,h56,w56,k64,r3,s3,pad1,fp16"
NUMBERS = {
    "n": "images", "c": "channels", "h": "height", "w": "width", "k": "filters", "r": "filter_h", "s": "filter_w",
    "stride": "stride", "pad": "pad", "dilation": "dilation",
}  # fmt: skip # a table
OPTIONAL = {"stride": 1, "pad": 0, "dilation": 1}
COUNTED = 4096
"""number of outputs along an axis whose windows are examined one by one; beyond it the result is a lower bound"""
CHUNK = 8
"""channels that are moved together if a pixel's number of channels is a multiple of them"""


@dataclass(frozen=True, slots=True)
class Conv2dProblem:
    """y[i, p, q, f] = g(Σ x[i, at(p, r), at(q, s), c] · weight[f, r, s, c] + bias[f]) + residual[i, p, q, f].

    The sum is over r, s and c, with at(p, r) = p·stride - pad + r·dilation; outside of the image x is 0. x is [images,
    height, width, channels], weight [filters, filter_h, filter_w, channels], bias [filters], residual and y [images,
    out_height, out_width, filters]: torch's channels_last. All are of `dtype`; the sum is float32 and is rounded once,
    behind the epilogue. A bias and a residual that the problem does not have are not parameters.
    """

    images: int
    channels: int
    height: int
    width: int
    filters: int
    filter_h: int
    filter_w: int
    dtype: str
    stride: int = 1
    pad: int = 0
    dilation: int = 1
    epilogue: str = NO_EPILOGUE
    residual: bool = False
    chunked: bool | None = field(default=None)
    """whether kernels move channels by whole chunks; None for what the channels allow"""

    def __post_init__(self) -> None:
        if self.chunked is None:
            object.__setattr__(self, "chunked", self.channels % CHUNK == 0)

    def __str__(self) -> str:
        sizes = [f"{letter}{getattr(self, name)}" for letter, name in NUMBERS.items() if name not in OPTIONAL]
        sizes += [f"{name}{getattr(self, name)}" for name, usual in OPTIONAL.items() if getattr(self, name) != usual]
        words = [self.dtype]
        words += [] if self.epilogue == NO_EPILOGUE else [self.epilogue]
        words += [RESIDUAL] if self.residual else []
        return f"conv2d:{','.join([*sizes, *words])}"

    @property
    def out_height(self) -> int:
        return (self.height + 2 * self.pad - self.dilation * (self.filter_h - 1) - 1) // self.stride + 1

    @property
    def out_width(self) -> int:
        return (self.width + 2 * self.pad - self.dilation * (self.filter_w - 1) - 1) // self.stride + 1

    def seen(self, length: int, outputs: int, of_filter: int) -> int:
        """Return how many of an image's rows (or columns) the windows of its outputs see, among the first COUNTED."""
        first = range(-self.pad, self.stride * min(outputs, COUNTED) - self.pad, self.stride)
        taps = range(0, self.dilation * of_filter, self.dilation)
        return len({at + tap for at in first for tap in taps if 0 <= at + tap < length})

    @property
    def gemm(self) -> GemmProblem:
        """Return the product of windows [outputs, pixels and channels] by filters, stored as [n, k]."""
        return GemmProblem(
            self.images * self.out_height * self.out_width, self.filters, self.filter_h * self.filter_w * self.channels,
            self.dtype, self.epilogue, b_layout="nk", residual=self.residual,
        )  # fmt: skip # in the order of the fields

    @property
    def has_bias(self) -> bool:
        return self.gemm.has_bias

    def shape(self, tensor: str) -> tuple[int, ...]:
        """Return the shape of x, weight, bias, residual or y."""
        match tensor:
            case "x":
                return self.images, self.height, self.width, self.channels
            case "weight":
                return self.filters, self.filter_h, self.filter_w, self.channels
            case "bias":
                return (self.filters,)
        return self.images, self.out_height, self.out_width, self.filters

    def variables(self) -> dict[str, Value]:
        """Return the names that a space's expressions and templates may use: those of the product and its own."""
        return {**self.gemm.variables(), **named(self, NUMBERS.values()), "chunked": bool(self.chunked)}


def parse_problem(text: str) -> Conv2dProblem:
    """Parse `n8,c64,h56,w56,k64,r3,s3,fp16[,stride2][,pad1][,dilation2][,bias_relu][,residual]`.

    Raises UsageError naming the part that is wrong and what would be right.
    """
    known = {"dtype": HALVES, "epilogue": BEHIND_SUMS, RESIDUAL: (RESIDUAL,)}
    sizes, words = read_parts(text, EXAMPLE, NUMBERS, known, (*OPTIONAL, "epilogue", RESIDUAL), from_zero=("pad",))
    given = OPTIONAL | sizes
    problem = Conv2dProblem(
        given["images"], given["channels"], given["height"], given["width"], given["filters"], given["filter_h"],
        given["filter_w"], words["dtype"], given["stride"], given["pad"], given["dilation"],
        words.get("epilogue", NO_EPILOGUE), RESIDUAL in words,
    )  # fmt: skip # in the order of the fields
    if why := _why_not(problem):
        raise UsageError(f"the problem {text!r} is invalid: {why}")
    return problem


def _why_not(p: Conv2dProblem) -> str | None:
    """Return the rule that the sizes of a problem violate, with what would be right."""
    for image, of_filter, letter in ((p.height, p.filter_h, "h"), (p.width, p.filter_w, "w")):
        seen, there = p.dilation * (of_filter - 1) + 1, image + 2 * p.pad
        if seen > there:
            return (
                f"a window sees {seen} pixels along {letter}, and the image has {there} with its padding: take a "
                f"larger {letter} or pad"
            )
    padded = (p.height + 2 * p.pad) * (p.width + 2 * p.pad) * p.channels
    if padded > LARGEST:
        return f"an image with its padding has {padded:,} elements, and may have {LARGEST:,}: take a smaller one"
    outputs, products = p.gemm.m, p.gemm.k
    if max(outputs, products) > LARGEST:
        return (
            f"there are {outputs:,} outputs of a filter, each of {products:,} products, and may be {LARGEST:,} of "
            "both: take fewer images or channels"
        )
    return None
