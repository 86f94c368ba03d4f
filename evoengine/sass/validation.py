"""Errors of predictions against measured times, by class of kernel, from validation.toml.

The error of a class comes from measured kernels that chose none of the model's constants; benchmarks/accuracy_page.py
writes the file. It is the range of every prediction of the class, and stands beside it wherever one is shown.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from evoengine.errors import UsageError

FILE = Path(__file__).with_name("validation.toml")
CLASSES = ("wgmma with softmax", "wgmma", "mma.sync", "memory", "scalar")
WHERE_UNKNOWN = 2.0
"""factor of a class without measured times"""
MEMORY_BOUND = 0.6
"""busy share of the DRAM from which on a kernel counts as memory-bound"""
_FIGURES = {"n": int, "mean_error": float, "factor": float, "data": str}


@dataclass(frozen=True, slots=True)
class ClassError:
    """The error of predictions of one class against measured times."""

    name: str
    n: int = 0
    mean_error: float = 0.0
    """mean of |predicted / measured - 1|"""
    factor: float = WHERE_UNKNOWN
    """nine of ten measured times lie within this factor of the predicted one"""
    data: str = ""
    """which kernels, on which GPUs"""

    def __str__(self) -> str:
        if not self.n:
            return f"no {self.name} kernel was held against a GPU: the error is not known"
        return (
            f"{self.name} kernels: mean error {self.mean_error:.0%}, nine of ten within {self.factor:.2f}×, by "
            f"{self.n:,} measured times ({self.data})"
        )


def class_of(counts: Mapping[str, float], shares: Mapping[str, float]) -> str:
    """Return the class of a kernel by what a block executes and by the busy shares of pipes and memories."""
    if counts["tensor_clock_columns"]:
        return "wgmma with softmax" if counts["mufu"] > counts["tensor"] else "wgmma"
    if shares["dram"] > MEMORY_BOUND:
        return "memory"
    return "mma.sync" if counts["hmma"] + counts["hmma_fp16"] else "scalar"


@cache
def read_errors(file: Path = FILE) -> Mapping[str, ClassError]:
    """Return the errors by class. Raises UsageError naming what is missing or malformed."""
    table = tomllib.loads(file.read_text("utf-8"))
    errors = {}
    for name, figures in table.items():
        where = f"{file.name}: [{name}]"
        if name not in CLASSES:
            raise UsageError(f"{where} is no class of kernels; known are {', '.join(CLASSES)}")
        if not isinstance(figures, dict) or {n: type(v) for n, v in figures.items()} != _FIGURES:
            raise UsageError(f"{where} must have {', '.join(_FIGURES)}, as benchmarks/accuracy_page.py writes them")
        if figures["n"] < 1 or figures["factor"] < 1 or figures["mean_error"] < 0:
            raise UsageError(f"{where} must have n and factor of at least 1, and no mean_error below 0")
        errors[name] = ClassError(name, **figures)
    return errors


def error_of(kernel_class: str) -> ClassError:
    return read_errors().get(kernel_class, ClassError(kernel_class))
