"""How well the model of machine code predicts times that real GPUs took, beside simpler predictors.

    python benchmarks/model_accuracy.py --kernels DIR [--nvrtc VERSION=LIB …] [--json OUT] [--samples N] [--jobs N]

DIR holds recorded kernels (benchmarks/recorded_kernels.py). Each is compiled by the NVRTC that its kernel.json names,
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
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import TimeoutError
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
from pebble import ProcessExpired, ProcessPool  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.markup import escape  # noqa: E402
from rich.table import Table  # noqa: E402
from scipy.stats import rankdata  # noqa: E402

from benchmarks.old_nvrtc import compile_and_list, find_nvrtc, parse_option  # noqa: E402
from benchmarks.recorded_kernels import (  # noqa: E402
    Recording,
    RecordedKernel,
    find_kernels,
    find_recordings,
    read_kernel,
    read_recording,
)
from evoengine.errors import EvoengineError, MachineError, UsageError  # noqa: E402
from evoengine.sass.chip import Chip, find_chip  # noqa: E402
from evoengine.sass.core import Program  # noqa: E402
from evoengine.sass.cubin import Kernel, kernel_names  # noqa: E402
from evoengine.sass.cubin import read_kernel as read_binary  # noqa: E402
from evoengine.sass.launch import Launch, prepare  # noqa: E402
from evoengine.sass.listing import instructions  # noqa: E402
from evoengine.sass.predict import Prediction, Unpredictable, predict  # noqa: E402
from evoengine.stages.compile import CompileFailed  # noqa: E402

SHORT_LIST = 10
BOOTSTRAPS = 1000
SPREAD = 1.5
"""slowest tenth over fastest tenth, from which on a recording has something to rank and counts in the mean"""
CANDIDATE_SECONDS = 600
"""for compiling one configuration and predicting it on every GPU"""
PREDICTORS = ("occupancy", "static count", "roofline", "model")
ABSOLUTE = ("roofline", "model")
"""those that predict microseconds; the others only rank"""
UNPREDICTED = math.inf


# ── one configuration ───────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Task:
    """A configuration of a kernel to compile once for GPUs of one architecture."""

    folder: Path
    config: Mapping[str, Any]
    gpus: tuple[str, ...]
    nvrtc: tuple[tuple[str, Path], ...]


@dataclass(frozen=True)
class Answer:
    """Per GPU: predictor → what to rank by, lowest first; microseconds of those in ABSOLUTE."""

    predicted: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)
    """that the model took, reading the listing included"""
    problems: Mapping[str, str] = field(default_factory=dict)
    """per GPU: why the model gave no figure"""
    not_compiled: str | None = None


@cache
def kernel_of(folder: Path) -> RecordedKernel:
    return read_kernel(folder)


def answer(task: Task) -> Answer:
    kernel, chips = kernel_of(task.folder), [find_chip(gpu) for gpu in task.gpus]
    compiler = find_nvrtc(kernel.compiler, task.nvrtc)
    try:
        compiled = compile_and_list(compiler, kernel.source(task.config), chips[0].gpu.arch, kernel.options)
    except CompileFailed as error:
        return Answer(not_compiled=str(error))
    start = time.perf_counter()
    binary = read_binary(compiled.cubin, entry_of(compiled.cubin, kernel.entry))
    program, problem = None, None
    try:
        program = Program(compiled.listing, binary.entry)
        launch = launch_of(kernel, binary, task.config)
    except Exception as error:  # a launch that no GPU takes, an opcode that stops the reader: data, and counted
        problem = _reason(error)
    read_seconds = time.perf_counter() - start
    static = len(instructions(compiled.listing, binary.entry))
    predicted, seconds, problems = {}, {}, {}
    for chip in chips:
        start = time.perf_counter()
        prediction = None
        try:
            if problem:
                raise Unpredictable(problem)
            prediction = predict(program, launch, chip)
        except Exception as error:
            problems[chip.key] = _reason(error)
        seconds[chip.key] = read_seconds + time.perf_counter() - start
        predicted[chip.key] = _all_predictors(kernel, task.config, binary, static, prediction, chip)
    return Answer(predicted, seconds, problems)


def _reason(error: Exception) -> str:
    known = isinstance(error, EvoengineError | Unpredictable) or type(error).__name__.startswith("Kernel")
    return str(error) if known else f"{type(error).__name__}: {error}"


def entry_of(cubin: bytes, entry: str) -> str:
    """The kernel's name in the binary, which C++ has mangled where the text does not say extern "C"."""
    names = kernel_names(cubin)
    if entry in names:
        return entry
    mangled = [name for name in names if name.startswith("_Z") and f"{len(entry)}{entry}" in name]
    if len(mangled) != 1:
        raise UsageError(f"the binary has no kernel {entry}: it has {', '.join(names) or 'none'}")
    return mangled[0]


def launch_of(kernel: RecordedKernel, binary: Kernel, config: Mapping[str, Any]) -> Launch:
    arguments = [argument.argument(config) for argument in kernel.arguments]
    # a configuration that does not use an array leaves it out of the binary
    contents = {c.name: c.contents(config, most=None) for c in kernel.constants if c.name in binary.constants}
    return prepare(binary, kernel.geometry(config), arguments, 0, {name: c.tobytes() for name, c in contents.items()})


# ── simpler predictors ──────────────────────────────────────────────────────────────────────────────────────────────


def _all_predictors(
    kernel: RecordedKernel,
    config: Mapping[str, Any],
    binary: Kernel,
    static: int,
    prediction: Prediction | None,
    chip: Chip,
) -> dict[str, float]:
    geometry = kernel.geometry(config)
    threads, blocks = math.prod(geometry.threads), math.prod(geometry.grid)
    shared = binary.shared_bytes + geometry.shared_bytes
    warps = blocks * math.ceil(threads / 32)
    return {
        "occupancy": -chip.gpu.occupancy(threads, binary.registers, shared),
        "static count": float(static * warps),
        "roofline": roofline_us(prediction, blocks, kernel.buffer_bytes(config), chip) if prediction else UNPREDICTED,
        "model": prediction.time_us if prediction else UNPREDICTED,
    }


def roofline_us(prediction: Prediction, blocks: int, buffer_bytes: int, chip: Chip) -> float:
    """The busiest pipe of all SMs, or the memory, by the instructions that blocks execute: no latency, no waves."""
    n, r = prediction.counts, chip.rates
    pipes = (
        n["instructions"],
        n["fma"] * r["fma_interval"] + n["imad"] * (r["imad_interval"] if r["fma_interval"] > 1 else 1),
        n["alu"] * r["alu_interval"],
        n["mufu"] * r["mufu_interval"],
        n["memory"] * r["memory_interval"],
    )
    sectors = 32 * (n["sectors_loaded"] + n["sectors_stored"])
    clocks_of_block = max(max(pipes) / 4, n["wavefronts"] * r["wavefront_clocks"], sectors / r["l2_bytes_per_clock"])
    return max(
        blocks * clocks_of_block / chip.sms / chip.gpu.clock_ghz / 1e3,
        buffer_bytes / (chip.dram * r["dram_efficiency"]) * 1e6,
    )


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

    def add(self, time_us: float, found: Answer | str) -> None:
        if isinstance(found, str):
            self.problems[f"left out: {found}"] += 1
        elif found.not_compiled:
            self.problems[f"left out, does not compile: {found.not_compiled}"] += 1
        else:
            gpu = self.recording.gpu
            self.measured.append(time_us)
            self.seconds.append(found.seconds[gpu])
            for name, value in found.predicted[gpu].items():
                self.predicted[name].append(value)
            if gpu in found.problems:
                self.problems[f"not predicted: {found.problems[gpu]}"] += 1

    def accuracy(self, predictor: str) -> Accuracy:
        return accuracy(np.array(self.predicted[predictor]), np.array(self.measured), predictor in ABSOLUTE)

    @property
    def has_something_to_rank(self) -> bool:
        slow, fast = np.percentile(self.measured, [90, 10])
        return bool(slow / fast >= SPREAD)


def read_all(folder: Path, samples: int | None) -> tuple[list[tuple[Path, Recording]], list[str]]:
    """Every readable recording with its kernel's folder, and a sentence on each that is not."""
    found, unreadable = [], []
    for kernel_folder in find_kernels(folder):
        try:
            kernel, paths = kernel_of(kernel_folder), find_recordings(kernel_folder)
        except UsageError as error:
            unreadable.append(str(error))
            continue
        for path in paths:
            try:
                recording = read_recording(path, kernel)
                find_chip(recording.gpu)
            except UsageError as error:
                unreadable.append(str(error))
                continue
            found.append((kernel_folder, _sampled(recording, samples)))
    return found, unreadable


def _sampled(recording: Recording, samples: int | None) -> Recording:
    if samples is None or samples >= len(recording.rows):
        return recording
    chosen = np.sort(np.random.default_rng(0).choice(len(recording.rows), samples, replace=False))
    return replace(recording, rows=tuple(recording.rows[i] for i in chosen))


Key = tuple[Path, str, str]
"""kernel's folder, configuration as JSON, architecture"""


def run_all(
    recordings: Sequence[tuple[Path, Recording]], nvrtc: tuple[tuple[str, Path], ...], jobs: int
) -> list[Result]:
    answers = answer_all(recordings, nvrtc, jobs)
    results = []
    for folder, recording in recordings:
        result = Result(folder.name, recording)
        result.problems.update(f"left out, unreadable: {reason}" for reason in recording.unreadable)
        for row in recording.rows:
            result.add(row.time_us, answers[key_of(folder, row.config, recording.gpu)])
        results.append(result)
    return results


def answer_all(
    recordings: Sequence[tuple[Path, Recording]], nvrtc: tuple[tuple[str, Path], ...], jobs: int
) -> dict[Key, Answer | str]:
    """Each configuration is compiled once for all GPUs of an architecture; a process that dies costs that one alone."""
    with ProcessPool(max_workers=jobs) as pool:
        tasks = tasks_of(recordings, nvrtc)
        futures = {key: pool.schedule(answer, (task,), timeout=CANDIDATE_SECONDS) for key, task in tasks.items()}
        return {key: _outcome(future) for key, future in futures.items()}


def tasks_of(recordings: Sequence[tuple[Path, Recording]], nvrtc: tuple[tuple[str, Path], ...]) -> dict[Key, Task]:
    gpus: dict[Key, list[str]] = {}
    configs = {}
    for folder, recording in recordings:
        for row in recording.rows:
            key = key_of(folder, row.config, recording.gpu)
            configs[key] = row.config
            if recording.gpu not in gpus.setdefault(key, []):
                gpus[key].append(recording.gpu)
    return {key: Task(key[0], configs[key], tuple(names), nvrtc) for key, names in gpus.items()}


def key_of(folder: Path, config: Mapping[str, Any], gpu: str) -> Key:
    return folder, json.dumps(config, sort_keys=True), find_chip(gpu).gpu.arch


def _outcome(future: Any) -> Answer | str:
    """What came of a task, or why nothing did. What the machine lacks ends the benchmark."""
    try:
        return future.result()
    except MachineError:
        raise
    except TimeoutError:
        return f"took longer than {CANDIDATE_SECONDS} s"
    except ProcessExpired as error:
        return f"its process ended: {error}"
    except Exception as error:
        return _reason(error)


# ── what is shown ───────────────────────────────────────────────────────────────────────────────────────────────────


def table(results: Sequence[Result]) -> Table:
    out = Table(caption="first, best of 10: their time over the fastest row's; /opt.: the first's over all valid ones'")
    columns = ("kernel", "GPU", "n", "predictor", "ρ", "95 %", "first", "best of 10", "/opt.", "≤1.25×", "≤2×", "s each")
    for name in columns:
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


def remarks(results: Sequence[Result], unreadable: Sequence[str]) -> Iterator[str]:
    for sentence in unreadable:
        yield f"left out: {sentence}"
    for result in results:
        for problem, count in result.problems.most_common():
            yield f"{result.kernel} on {result.recording.name}: {count} {problem}"
        if result.measured and not result.has_something_to_rank:
            yield f"{result.kernel} on {result.recording.name}: times vary too little to rank, not in the mean"


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
    for remark in remarks(results, unreadable):
        print(remark, file=sys.stderr)
    usable = [result for result in results if result.measured]
    if usable:
        Console(width=160).print(table(usable))
    if options.json:
        options.json.write_text(json.dumps(as_json(usable), indent=1) + "\n")
    return 0 if usable else 1


if __name__ == "__main__":
    sys.exit(main())
