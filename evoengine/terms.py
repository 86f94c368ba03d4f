"""Interpret an estimate's terms, which are numbers by name: µs (`low_us`), busy shares (`tensor_share`), counts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from evoengine.text import DIGITS

Terms = Mapping[str, float]
FORMULA, MACHINE_CODE = "formula", "machine code"
SAME_WITHIN = 0.02
"""Predictions that exceed the fastest one by no more than this do not tell which kernel is the fastest. By times of an
H100, the simplest of them is as fast on average; from 5 % on it is slower (benchmarks/notes/model-accuracy.md)."""


def model_of(terms: Terms) -> str:
    """Return the model behind an estimate."""
    return MACHINE_CODE if terms.get("predicted") else FORMULA


def model_version(terms: Terms) -> int | None:
    """Return the version of the model that predicted; 1 is the one of two hypotheses about wgmma, `A_us` and `B_us`."""
    return int(terms.get("model_version", 1)) if terms.get("predicted") else None


def clock(terms: Terms) -> str | None:
    """Return the clock of a prediction: boost, sustained or locked:MHZ; None if it was not kept."""
    named = (name.removeprefix("clock_") for name in terms if name.startswith("clock_"))
    return next((name for name in named if name != "ghz"), None)


def kernel_class(terms: Terms) -> str | None:
    """Return the class of kernels whose error is a prediction's range; None if it was not kept."""
    return next((name.removeprefix("class_") for name in terms if name.startswith("class_")), None)


def range_us(terms: Terms) -> list[float] | None:
    """Return the ends of a prediction's range in µs."""
    return [terms["low_us"], terms["high_us"]] if "low_us" in terms else None


def digits(us: float, ends: Sequence[float] | None) -> int:
    """Return how many significant digits of a time mean something: of one with a range those above its error."""
    if ends is None or ends[1] <= us:
        return DIGITS
    return min(DIGITS, max(2, 1 + math.ceil(-math.log10(ends[1] / us - 1))))


def bound(terms: Terms) -> str | None:
    """Return the pipe or memory that bounds a prediction, or `latency`."""
    return next((name.removeprefix("bound_") for name in terms if name.startswith("bound_")), None)


def utilisation(terms: Terms) -> dict[str, float] | None:
    """Return the busy share of each pipe and memory of a prediction, 0…1."""
    return {n.removesuffix("_share"): value for n, value in terms.items() if n.endswith("_share")} or None


def peak_percent(terms: Terms, us: float) -> float | None:
    """Return the percentage of the chip's peak that a kernel of `us` µs reaches; None if it is unknown.

    The larger of the shares of arithmetic and memory; for a prediction, the roofline's time over its own.
    """
    if "roofline_us" in terms:
        return 100 * terms["roofline_us"] / us if terms["roofline_us"] else None  # 0 where the work is not known
    shares = [terms[name] for name in ("peak_tflops_percent", "peak_gbs_percent") if name in terms]
    return max(shares, default=None)
