"""How far predictions are from recorded times, as validation.toml has it; people see it beside every prediction."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from evoengine.errors import UsageError

FILE = Path(__file__).with_name("validation.toml")
_FIGURES = ("rho", "within_1_25", "n")


@dataclass(frozen=True, slots=True)
class Row:
    """One kernel on one GPU: rank correlation, share of configurations within a factor of 1.25, configurations."""

    kernel: str
    gpu: str
    rho: float
    within_1_25: float
    n: int


@dataclass(frozen=True, slots=True)
class Validation:
    date: str
    rows: Sequence[Row]
    note: str = ""

    def __str__(self) -> str:
        total = sum(r.n for r in self.rows)
        rho = sum(r.rho for r in self.rows) / len(self.rows)
        share = sum(r.within_1_25 * r.n for r in self.rows) / total
        kernels, gpus = (dict.fromkeys(names) for names in ([r.kernel for r in self.rows], [r.gpu for r in self.rows]))
        return (
            f"checked against {total:,} recorded times ({', '.join(kernels)} on {', '.join(gpus)}; {self.date}): mean "
            f"Spearman's ρ {rho:.2f}, {share:.0%} within 1.25×{f'; {self.note}' if self.note else ''}"
        )


@cache
def read_validation(file: Path = FILE) -> Validation | None:
    """None where nothing has been validated. Raises UsageError naming what is missing or no number."""
    table = tomllib.loads(file.read_text("utf-8"))
    tables = {kernel: gpus for kernel, gpus in table.items() if isinstance(gpus, dict)}
    rows = [_row(file, kernel, gpu, figures) for kernel, gpus in tables.items() for gpu, figures in gpus.items()]
    if rows and "date" not in table:
        raise UsageError(f"{file.name} has no date: say when benchmarks/model_accuracy.py was run")
    return Validation(str(table["date"]), rows, str(table.get("note", ""))) if rows else None


def _row(file: Path, kernel: str, gpu: str, figures: object) -> Row:
    where = f"{file.name}: [{kernel}.{gpu}]"
    if not isinstance(figures, dict) or set(figures) != set(_FIGURES):
        raise UsageError(f"{where} must have {', '.join(_FIGURES)}, as benchmarks/model_accuracy.py gives them")
    if not all(isinstance(v, int | float) for v in figures.values()) or figures["n"] < 1:
        raise UsageError(f"{where} must have numbers, and n of at least 1")
    return Row(kernel, gpu, float(figures["rho"]), float(figures["within_1_25"]), int(figures["n"]))


def error_line() -> str:
    """What is known of the model's error, in a line."""
    found = read_validation()
    return f"model {found}" if found else "model not checked against recorded times: its error is not known"


@dataclass(frozen=True, slots=True)
class ClassError:
    """Measured over predicted time: from `low` to `high` in nine of ten cases."""

    low: float
    high: float


def class_of(counts: Mapping[str, float], shares: Mapping[str, float]) -> str:
    if counts["tensor_clock_columns"]:
        return "wgmma with softmax" if counts["mufu"] > counts["tensor"] else "wgmma"
    if shares["dram"] > 0.6:
        return "memory"
    if counts["hmma"]:
        return "mma.sync"
    return "scalar"


def error_of(kernel_class: str) -> ClassError:
    return ClassError(0.8, 1.25)
