"""How well the model of machine code predicts times that real GPUs took, beside simpler predictors.

    python benchmarks/model_accuracy.py --kernels DIR [--nvrtc VERSION=LIB …] [--json OUT] [--samples N] [--jobs N]

DIR holds recorded kernels (evoengine/accuracy/dataset.py). Each is compiled by the NVRTC that its kernel.json names,
where --nvrtc gives it (--nvrtc 11.8=PATH), else by the installed one. Nothing is fitted to a kernel. Needs no GPU.

ρ is Spearman's rank correlation with a 95 % bootstrap interval. `first` and `best of 10` are the measured time of the
predictor's first choice, and of the best of its first ten, over the fastest of the rows. A configuration that cannot be
predicted is ranked last; one that does not compile is left out and counted.

JSON: {kernel: {gpu: {"rho": …, "top1": …, "top10": …, "within2": …, "n": …}}}, of the model.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.markup import escape  # noqa: E402
from rich.table import Table  # noqa: E402
from scipy.stats import rankdata  # noqa: E402

from evoengine.accuracy.compilers import find_nvrtc, parse_option  # noqa: E402
from evoengine.accuracy.dataset import Recording  # noqa: E402
from evoengine.accuracy.predictions import (  # noqa: E402
    ABSOLUTE,
    PREDICTORS,
    Answer,
    answer_all,
    kernel_of,
    key_of,
)
from evoengine.accuracy.rows import grouped, read_all  # noqa: E402
from evoengine.errors import EvoengineError, UsageError  # noqa: E402

SHORT_LIST = 10
BOOTSTRAPS = 1000
SPREAD = 1.5
"""slowest tenth over fastest tenth, from which on a recording has something to rank and counts towards the average"""


# ── statistics ──────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Accuracy:
    """Of one predictor on one recording; None where it cannot be told."""

    n: int
    rho: float | None
    interval: tuple[float, float] | None
    top1: float
    top10: float
    within125: float | None
    within2: float | None

    def as_json(self) -> dict[str, float | int | None]:
        return {"rho": self.rho, "top1": self.top1, "top10": self.top10, "within2": self.within2, "n": self.n}


def accuracy(predicted: np.ndarray, measured: np.ndarray, absolute: bool = True) -> Accuracy:
    """`predicted` [n] ranks lowest first and may be infinite, `measured` [n] is in microseconds.

    Equal predictions keep the order of the rows, as a tuner that tries them in that order would.
    """
    order = np.argsort(predicted, kind="stable")
    best = measured.min()
    ratio = np.where(np.isfinite(predicted), np.maximum(predicted, 1e-9) / measured, np.inf) if absolute else None
    return Accuracy(
        n=len(measured),
        rho=spearman(predicted, measured),
        interval=_bootstrap(predicted, measured),
        top1=float(measured[order[0]] / best),
        top10=float(measured[order[:SHORT_LIST]].min() / best),
        within125=None if ratio is None else float(np.mean(np.abs(np.log(ratio)) <= math.log(1.25))),
        within2=None if ratio is None else float(np.mean(np.abs(np.log(ratio)) <= math.log(2))),
    )


def spearman(a: np.ndarray, b: np.ndarray) -> float | None:
    """None for fewer than three, or where one side is all alike."""
    if len(a) < 3 or a.min() == a.max() or b.min() == b.max():
        return None
    return float(np.corrcoef(rankdata(a), rankdata(b))[0, 1])


def _bootstrap(predicted: np.ndarray, measured: np.ndarray) -> tuple[float, float] | None:
    random = np.random.default_rng(0)
    drawn = (random.integers(0, len(measured), len(measured)) for _ in range(BOOTSTRAPS))
    found = [rho for rows in drawn if (rho := spearman(predicted[rows], measured[rows])) is not None]
    return (float(np.percentile(found, 2.5)), float(np.percentile(found, 97.5))) if found else None


# ── all of them ─────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class Result:
    """One kernel on one GPU."""

    kernel: str
    recording: Recording
    measured: list[float] = field(default_factory=list)
    predicted: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in PREDICTORS})
    seconds: list[float] = field(default_factory=list)
    problems: Counter[str] = field(default_factory=Counter)
    """why rows were left out or could not be predicted → how many"""

    def add(self, time_us: float, found: Answer) -> None:
        gpu = self.recording.gpu
        if found.failure:
            self.problems[f"left out, {found.failure}"] += 1
            return
        self.measured.append(time_us)
        self.seconds.append(found.seconds[gpu])
        for name, value in found.predicted[gpu].items():
            self.predicted[name].append(value)
        if gpu in found.problems:
            self.problems[f"ranked last, not predicted: {found.problems[gpu]}"] += 1

    def accuracy(self, predictor: str) -> Accuracy:
        return accuracy(np.array(self.predicted[predictor]), np.array(self.measured), predictor in ABSOLUTE)

    @property
    def has_something_to_rank(self) -> bool:
        slow, fast = np.percentile(self.measured, [90, 10])
        return bool(slow / fast >= SPREAD)


def run_all(
    recordings: Sequence[tuple[Path, Recording]], nvrtc: tuple[tuple[str, Path], ...], jobs: int
) -> list[Result]:
    found = answer_all(recordings, nvrtc, jobs)
    results = []
    for folder, recording in recordings:
        result = Result(folder.name, recording)
        result.problems.update(f"left out, unreadable: {reason}" for reason in recording.unreadable)
        for row in recording.rows:
            result.add(row.time_us, found[key_of(folder, row.config, recording.gpu)])
        results.append(result)
    return results


# ── what is shown ───────────────────────────────────────────────────────────────────────────────────────────────────


def table(results: Sequence[Result]) -> Table:
    out = Table(caption="first, best of 10: their time over the fastest row's; /opt.: the first's over all valid ones'")
    shares = ("≤1.25×", "≤2×")
    for name in ("kernel", "GPU", "n", "predictor", "ρ", "95 %", "first", "best of 10", "/opt.", *shares, "CPU s"):
        out.add_column(name, no_wrap=True, justify="left" if name in ("kernel", "GPU", "predictor") else "right")
    for result in results:
        for predictor in PREDICTORS:
            out.add_row(*_cells(result, predictor))
        out.add_section()
    ranked = [r for r in results if r.has_something_to_rank]
    for predictor in PREDICTORS if ranked else ():
        out.add_row(*_mean_cells(ranked, predictor))
    return out


def _cells(result: Result, predictor: str) -> list[str]:
    a = result.accuracy(predictor)
    first_row = predictor == PREDICTORS[0]
    optimum = result.recording.optimum_us
    against = a.top1 * min(result.measured) / optimum if optimum else None
    return [
        *((escape(result.kernel), result.recording.name, str(a.n)) if first_row else ("", "", "")),
        predictor,
        _figure(a.rho),
        f"{a.interval[0]:.2f}…{a.interval[1]:.2f}" if a.interval else "–",
        _figure(a.top1),
        _figure(a.top10),
        _figure(against),
        _share(a.within125),
        _share(a.within2),
        _figure(float(np.median(result.seconds))) if predictor == "model" else "",
    ]


def _mean_cells(results: Sequence[Result], predictor: str) -> list[str]:
    found = [r.accuracy(predictor) for r in results]
    first_row = predictor == PREDICTORS[0]
    rhos = [a.rho or 0.0 for a in found]
    shares = [[a.within125 for a in found], [a.within2 for a in found]]
    return [
        *((f"mean of {len(results)}", "", str(sum(a.n for a in found))) if first_row else ("", "", "")),
        predictor,
        _figure(float(np.mean(rhos))),
        "",
        *(_figure(float(np.mean(values))) for values in ([a.top1 for a in found], [a.top10 for a in found])),
        "",
        *(_share(None if None in share else float(np.mean(share))) for share in shares),
        _figure(float(np.median([s for r in results for s in r.seconds]))) if predictor == "model" else "",
    ]


def _figure(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.0%}"


def other_compilers(recordings: Sequence[tuple[Path, Recording]], nvrtc: tuple[tuple[str, Path], ...]) -> Iterator[str]:
    for folder in dict.fromkeys(folder for folder, _ in recordings):
        named = kernel_of(folder).compiler
        if named and named not in dict(nvrtc):
            used = find_nvrtc(None, ()).name
            how = f"--nvrtc {named}=PATH gives it"
            yield f"{folder.name}: compiled by {used}, not by NVRTC {named} as its file says; {how}"


def remarks(results: Sequence[Result], unreadable: Sequence[str]) -> Iterator[str]:
    for sentence in unreadable:
        yield f"left out: {sentence}"
    for result in results:
        if result.recording.stated_clock is None:
            yield f"{result.kernel} on {result.recording.name}: states no clock, taken as not locked"
        for problem, count in grouped(result.problems).most_common():
            yield f"{result.kernel} on {result.recording.name}: {count} {problem}"
        if result.measured and not result.has_something_to_rank:
            yield f"{result.kernel} on {result.recording.name}: times vary too little to rank; left out of the average"


def as_json(results: Sequence[Result]) -> dict[str, dict[str, dict[str, float | int | None]]]:
    found: dict[str, dict[str, dict[str, float | int | None]]] = {}
    for result in results:
        found.setdefault(result.kernel, {})[result.recording.name] = result.accuracy("model").as_json()
    return found


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kernels", type=Path, required=True, metavar="DIR", help="folder of recorded kernels")
    parser.add_argument("--nvrtc", action="append", nargs="+", default=[], metavar="VERSION=LIB", help="11.8=PATH")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the model's figures here")
    parser.add_argument("--samples", type=int, metavar="N", help="rows of each GPU, drawn (default all)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default one per CPU)")
    return parser.parse_args(arguments)


def checked(options: argparse.Namespace) -> tuple[tuple[str, Path], ...]:
    """The compilers named, loaded once so that a wrong path is told before hours of work."""
    if min(options.jobs, 1 if options.samples is None else options.samples) < 1:
        raise UsageError("--samples and --jobs must be at least 1")
    if options.json and not options.json.parent.is_dir():
        raise UsageError(f"cannot write {options.json}: there is no folder {options.json.parent}; name a file in one")
    nvrtc = tuple(parse_option(text) for texts in options.nvrtc for text in texts)
    for version, _ in nvrtc:
        find_nvrtc(version, nvrtc)
    return nvrtc


def main(arguments: Sequence[str] | None = None) -> int:
    options = parsed(arguments)
    try:
        nvrtc = checked(options)
        recordings, unreadable = read_all(options.kernels, options.samples)
        results = run_all(recordings, nvrtc, options.jobs)
    except EvoengineError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    for remark in (*other_compilers(recordings, nvrtc), *remarks(results, unreadable)):
        print(remark, file=sys.stderr)
    usable = [result for result in results if result.measured]
    if usable:
        Console(width=160).print(table(usable))
    if options.json:
        options.json.write_text(json.dumps(as_json(usable), indent=1) + "\n")
    return 0 if usable and len(usable) == len(recordings) and not unreadable else 1


if __name__ == "__main__":
    sys.exit(main())
