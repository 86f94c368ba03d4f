"""Summarise rows of predicted and measured times: errors by class and by set, and the page that shows them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import rankdata, t

from evoengine.sass.predict import CLASSES, ClassError

SHOWN_WHOLE = 30
"""number of rows up to which a set is listed completely"""
WORST = 12
"""number of rows with the largest errors that the page lists, of those that no constant was fitted on"""
BOOTSTRAPS = 2000
NINE_OF_TEN = 0.9
LEAST = 3
"""smallest number of rows of a set for which a rank correlation is computed"""


@dataclass(frozen=True, slots=True)
class Row:
    """A kernel's measured and predicted time on a GPU."""

    set: str
    """name of the set of measurements"""
    kernel: str
    problem: str
    gpu: str
    clock: str
    measured_us: float
    predicted_us: float
    kernel_class: str
    bound: str
    fitted: bool = False
    """whether a constant of the model was fitted to it, so that no error includes it"""

    @property
    def error(self) -> float:
        return self.predicted_us / self.measured_us - 1

    @property
    def log_ratio(self) -> float:
        return math.log(self.predicted_us / self.measured_us)


@dataclass(frozen=True, slots=True)
class Summary:
    """Errors of some rows; `interval` holds the mean error with 95 %, by resampling."""

    n: int
    mean_error: float
    interval: tuple[float, float]
    worst: float
    """signed"""
    rho: float | None
    """Spearman's rank correlation of predicted and measured times; None for fewer than LEAST"""

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Summary:
        errors = np.array([row.error for row in rows])
        absolute = np.abs(errors)
        drawn = np.random.default_rng(0).integers(0, len(rows), (BOOTSTRAPS, len(rows)))
        low, high = np.percentile(absolute[drawn].mean(axis=1), [2.5, 97.5])
        worst = float(errors[absolute.argmax()])
        return cls(len(rows), float(absolute.mean()), (float(low), float(high)), worst, _rho(rows))


def _rho(rows: Sequence[Row]) -> float | None:
    predicted, measured = (np.array([getattr(r, name) for r in rows]) for name in ("predicted_us", "measured_us"))
    if len(rows) < LEAST or np.ptp(predicted) == 0 or np.ptp(measured) == 0:
        return None
    return float(np.corrcoef(rankdata(predicted), rankdata(measured))[0, 1])


def by(rows: Iterable[Row], *names: str) -> dict[tuple[str, ...], list[Row]]:
    """Return the rows grouped by some of their fields, in the order of their first."""
    groups: dict[tuple[str, ...], list[Row]] = defaultdict(list)
    for row in rows:
        groups[tuple(str(getattr(row, name)) for name in names)].append(row)
    return dict(groups)


def class_errors(rows: Iterable[Row]) -> dict[str, ClassError]:
    """Return the error of each class, by the rows that no constant was fitted on."""
    groups = by((row for row in rows if not row.fitted), "kernel_class")
    found = {}
    for name in CLASSES:
        if of_class := groups.get((name,)):
            n = len(of_class)
            factor = math.exp(_nine_of_ten([abs(row.log_ratio) for row in of_class]))
            mean_error = sum(abs(row.error) for row in of_class) / n
            data = "; ".join(f"{name} on {gpu}" for name, gpu in by(of_class, "set", "gpu"))
            found[name] = ClassError(name, n, mean_error, factor, data)
    return found


def _nine_of_ten(errors: Sequence[float]) -> float:
    """Return the bound below which the error of another row of the kind lies with a probability of 0.9.

    It is the error of rank ceil(0.9 (n + 1)), for any distribution; if n is below that rank, the end of the interval
    for normally distributed errors.
    """
    n = len(errors)
    rank = math.ceil(NINE_OF_TEN * (n + 1))
    if rank <= n:
        return sorted(errors)[rank - 1]
    return float(t.ppf((1 + NINE_OF_TEN) / 2, n)) * math.sqrt(sum(error**2 for error in errors) / n)


def as_toml(errors: Mapping[str, ClassError]) -> str:
    """Return the tables of validation.toml."""
    return "\n".join(
        f'["{e.name}"]\nn = {e.n}\nmean_error = {e.mean_error:.4f}\nfactor = {e.factor:.4f}\ndata = "{e.data}"\n'
        for e in errors.values()
    )


# ── the page ────────────────────────────────────────────────────────────────────────────────────────────────────────


def page(rows: Sequence[Row], remarks: Sequence[str] = ()) -> str:
    """Return Markdown: errors by class and by set, the worst rows, and small sets row by row."""
    parts = ["## By class of kernel", *_by_class(rows), "", "## By set", *_by_set(rows), "", "## Largest errors"]
    judged = [row for row in rows if not row.fitted] or rows
    parts += [*_table(sorted(judged, key=lambda row: -abs(row.log_ratio))[:WORST], with_set=True), ""]
    for (name, gpu), of_set in by(rows, "set", "gpu").items():
        if len(of_set) <= SHOWN_WHOLE:
            parts += [f"## {name} on {gpu}", *_table(of_set, with_set=False), ""]
    if remarks:
        parts += ["## Left out", "", *(f"- {remark}" for remark in remarks), ""]
    return "\n".join(parts)


def _by_class(rows: Sequence[Row]) -> Iterator[str]:
    yield "\nOf rows that no constant was fitted on.\n"
    yield "| class | rows | mean error | 95 % | worst | nine of ten within |"
    yield "|---|---:|---:|---:|---:|---:|"
    groups = by((row for row in rows if not row.fitted), "kernel_class")
    for name, error in class_errors(rows).items():
        s = Summary.of(groups[name,])
        yield f"| {name} | {s.n:,} | {s.mean_error:.1%} | {_interval(s)} | {s.worst:+.0%} | {error.factor:.2f}× |"


def _by_set(rows: Sequence[Row]) -> Iterator[str]:
    yield "\nρ is Spearman's rank correlation of predicted and measured times.\n"
    yield "| set | GPU | clock | rows | mean error | 95 % | worst | ρ |"
    yield "|---|---|---|---:|---:|---:|---:|---:|"
    for (name, gpu, clock, fitted), of_set in by(rows, "set", "gpu", "clock", "fitted").items():
        s = Summary.of(of_set)
        rho = "–" if s.rho is None else f"{s.rho:.2f}"
        said = f"{name} (a constant was fitted on these)" if fitted == "True" else name
        yield f"| {said} | {gpu} | {clock} | {s.n:,} | {s.mean_error:.1%} | {_interval(s)} | {s.worst:+.0%} | {rho} |"


def _interval(s: Summary) -> str:
    return f"{s.interval[0]:.1%}…{s.interval[1]:.1%}"


def _table(rows: Sequence[Row], with_set: bool) -> Iterator[str]:
    yield f"\n|{' set |' * with_set} kernel | problem | clock | measured, µs | predicted, µs | error | bound by |"
    yield f"|{'---|' * with_set}---|---|---|---:|---:|---:|---|"
    for r in rows:
        of_set = f" {r.set}, {r.gpu} |" * with_set
        times = f"{r.measured_us:,.1f} | {r.predicted_us:,.1f} | {r.error:+.1%}"
        yield f"|{of_set} {r.kernel} | {r.problem} | {r.clock} | {times} | {r.bound} |"
