"""How many trials a model's predictions save a search: `python benchmarks/prior.py --kernels DIR`.

The rows of every recording in DIR (evoengine/accuracy/dataset.py) are a space of its own, which the evolutionary
sampler searches twice with each seed: without a prior, and with the model's predictions as one. Counted are the trials
until one is within 5 % of the fastest row. A configuration that the model cannot read has no prediction. Needs no GPU.

With --measured the problems of a file that measured_h100.py wrote, with predictions made before, are such spaces too:
each of at least MIN_KERNELS kernels, cold L2.

The model's predictions take a while; --predictions keeps them. --stand-in puts the measured times with noise in their
place, as much of it as leaves the rank correlation asked for: how good a model must be, and what a wrong one costs.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

# One search keeps one core busy: more threads under each only fight for it.
for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, "1")

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from benchmarks.model_accuracy import checked, read_all, spearman  # noqa: E402
from evoengine.accuracy.dataset import Recording  # noqa: E402
from evoengine.accuracy.predictions import Answer, answer_all, key_of  # noqa: E402
from evoengine.errors import EvoengineError, UsageError  # noqa: E402
from evoengine.search.proposer import Proposer  # noqa: E402
from evoengine.search.recorded import RecordedSpace  # noqa: E402
from evoengine.search.samplers.prior import Prior  # noqa: E402
from evoengine.space.definition import Knob  # noqa: E402

NEAR = 1.05
"""within this of the fastest row a search is done"""
MIN_KERNELS = 8
"""of a measured problem"""
RESAMPLES = 2000
"""bootstrap samples of a ratio's interval"""
NOISES = np.geomspace(1e-3, 1e3, 400)
"""of a stand-in, in deviations of the logarithms of the times"""


@dataclass(frozen=True)
class Pool:
    """A recording as a space; predictions: µs [n], NaN where the model gave none."""

    kernel: str
    gpu: str
    space: RecordedSpace
    predictions: np.ndarray

    @property
    def rho(self) -> float | None:
        known = ~np.isnan(self.predictions)
        return spearman(self.predictions[known], self.space.times[known])


def pool_of(folder: Path, recording: Recording, predictions: np.ndarray) -> Pool:
    configs = [row.config for row in recording.rows]
    knobs = tuple(Knob(name, tuple(sorted({config[name] for config in configs}))) for name in configs[0])
    rows = np.array([[knob.index(config[knob.name]) for knob in knobs] for config in configs], np.int16)
    times = np.array([row.time_us / 1e3 for row in recording.rows])
    space = _space(folder / recording.name, recording.gpu, knobs, rows, times)
    return Pool(folder.name, recording.name, space, predictions)


def _space(path: Path, gpu: str, knobs: tuple[Knob, ...], rows: np.ndarray, times: np.ndarray) -> RecordedSpace:
    return RecordedSpace(path, gpu, knobs, rows, times, np.empty(0), np.zeros(len(rows), int), {}, 0)


def measured_pools(path: Path) -> list[Pool]:
    """Return a pool of each problem of a file of measured_h100.py. Raises UsageError if it is none."""
    try:
        packed = path.read_bytes()
        content = json.loads(gzip.decompress(packed) if path.suffix == ".gz" else packed)
        gpu = content["gpu"][0]["ready"]["gpu"]
        us = {row["id"]: median(row["cold_us"]) for row in content["rows"] if row.get("cold_us")}
        problems: dict[str, dict[str, Any]] = {}
        for kernel in content["kernels"]:
            if kernel["id"] in us and "cold" in kernel["predicted"]:
                problems.setdefault(kernel["problem"], {})[json.dumps(kernel["config"], sort_keys=True)] = kernel
        pools = [_measured(path, gpu, problem, [*of.values()], us) for problem, of in problems.items()]
    except (OSError, EOFError, ValueError, KeyError, TypeError, LookupError) as error:
        raise UsageError(f"{path} is not a file of measured_h100.py with its kernels ({error!r}); give one") from error
    return [pool for pool in pools if len(pool.space) >= MIN_KERNELS]


def _measured(
    path: Path, gpu: str, problem: str, kernels: Sequence[Mapping[str, Any]], us: Mapping[str, float]
) -> Pool:
    configs = [kernel["config"] for kernel in kernels]
    names = dict.fromkeys(name for config in configs for name in config)
    values = {name: {config[name] for config in configs if name in config} for name in names}
    knobs = tuple(Knob(name, tuple(sorted(of, key=lambda v: (isinstance(v, str), v)))) for name, of in values.items())
    rows = [[knob.index(config[knob.name]) if knob.name in config else -1 for knob in knobs] for config in configs]
    times = np.array([us[kernel["id"]] / 1e3 for kernel in kernels])
    predictions = np.array([kernel["predicted"]["cold"]["us"] for kernel in kernels])
    return Pool(problem, gpu, _space(path, gpu, knobs, np.array(rows, np.int16), times), predictions)


def trials(pool: Pool, predictions: np.ndarray | None, seed: int) -> int:
    """Until one is within NEAR of the fastest row; `predictions` [n], in µs, are the prior; None: there is none."""
    space, prior = pool.space, None
    if predictions is not None:
        prior = Prior(space)
        for config, us in zip(space.enumerate(), predictions.tolist(), strict=True):
            if not math.isnan(us):
                prior.predict(config, us)
    proposer = Proposer(space, "evolution", seed, prior=prior)
    for trial in range(1, len(space) + 1):
        proposal = proposer.propose()
        ms = space.time(proposal.config)
        if ms <= NEAR * space.optimum:
            return trial
        proposer.tell(proposal, [space.optimum / ms])
    raise AssertionError("the fastest row was tried, and is within reach of itself")


def stand_in(times: np.ndarray, rho: float, seed: int) -> np.ndarray:
    """The times [n] with log-normal noise, slow and fast exchanged where `rho`, the rank correlation, is negative."""
    logs, noise = np.log(times), np.random.default_rng(seed).normal(size=len(times))
    turned = math.copysign(1.0, rho) * (logs - logs.mean()) / logs.std()
    found = [turned + deviation * noise for deviation in NOISES]
    closest = min(found, key=lambda made: abs((spearman(made, times) or 0.0) - rho))
    return np.exp(closest * logs.std() / closest.std() + logs.mean())


# ── predictions ─────────────────────────────────────────────────────────────────────────────────────────────────────


def read_pools(options: argparse.Namespace, nvrtc: tuple[tuple[str, Path], ...]) -> list[Pool]:
    recordings, unreadable = read_all(options.kernels, None)
    for sentence in unreadable:
        print(f"left out: {sentence}", file=sys.stderr)
    recordings = [(folder, recording) for folder, recording in recordings if recording.rows]
    kept = options.predictions
    if options.stand_in:
        predicted = [np.full(len(recording.rows), np.nan) for _, recording in recordings]
    elif kept and kept.exists():
        predicted = _kept(kept, recordings)
    else:
        predicted = _predicted(recordings, nvrtc, options.jobs)
        if kept:
            _keep(kept, recordings, predicted)
    return [pool_of(*of, predictions) for of, predictions in zip(recordings, predicted, strict=True)]


def _predicted(
    recordings: Sequence[tuple[Path, Recording]], nvrtc: tuple[tuple[str, Path], ...], jobs: int
) -> list[np.ndarray]:
    answers = answer_all(recordings, nvrtc, jobs)
    found = []
    for folder, recording in recordings:
        of_rows = (answers[key_of(folder, row.config, recording.gpu)] for row in recording.rows)
        found.append(np.array([_microseconds(answer, recording.gpu) for answer in of_rows]))
    return found


def _microseconds(answer: Answer, gpu: str) -> float:
    us = math.inf if answer.failure else answer.predicted[gpu]["model"]
    return us if math.isfinite(us) else math.nan


def _keep(path: Path, recordings: Sequence[tuple[Path, Recording]], predicted: Sequence[np.ndarray]) -> None:
    table: dict[str, dict[str, list[float | None]]] = {}
    for (folder, recording), of in zip(recordings, predicted, strict=True):
        table.setdefault(folder.name, {})[recording.name] = [None if math.isnan(us) else us for us in of.tolist()]
    path.write_text(json.dumps(table) + "\n")


def _kept(path: Path, recordings: Sequence[tuple[Path, Recording]]) -> list[np.ndarray]:
    try:
        table = json.loads(path.read_text())
        found = [np.array(table[folder.name][recording.name], float) for folder, recording in recordings]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path} has not the predictions of every recording ({error!r}); remove it") from error
    for (folder, recording), of in zip(recordings, found, strict=True):
        if of.shape != (len(recording.rows),):
            raise UsageError(f"{path} has not one prediction per row of {folder.name} on {recording.name}; remove it")
    return found


# ── the comparison ──────────────────────────────────────────────────────────────────────────────────────────────────


def run(pool: Pool, seeds: int, correlations: Sequence[float], jobs: int) -> dict[str, list[int]]:
    """Trials of every seed: without a prior, and with each."""
    priors: dict[str, list[np.ndarray | None]] = {"none": [None] * seeds}
    for rho in correlations:
        priors[f"ρ {rho:g}"] = [stand_in(pool.space.times, rho, seed) for seed in range(seeds)]
    if not correlations:
        priors["model"] = [pool.predictions] * seeds
    with ProcessPoolExecutor(jobs) as executor:
        futures = {
            name: [executor.submit(trials, pool, predictions, seed) for seed, predictions in enumerate(of)]
            for name, of in priors.items()
        }
        return {name: [future.result() for future in of] for name, of in futures.items()}


def figures(found: dict[str, list[int]]) -> dict[str, dict[str, Any]]:
    """Return per prior mean, median and quartiles of the trials, their mean over that without a prior, its interval."""
    base = np.mean(found["none"])
    return {
        name: {
            "mean": float(np.mean(of)),
            **dict(zip(("lower", "median", "upper"), np.percentile(of, [25, 50, 75]).tolist(), strict=True)),
            "ratio": float(np.mean(of) / base),
            "interval": _interval(of, found["none"]),
            "seeds": len(of),
        }
        for name, of in found.items()
    }


def _interval(of: Sequence[int], none: Sequence[int]) -> list[float]:
    """Return the 95 % bootstrap interval of the ratio of the means."""
    rng = np.random.default_rng(0)
    means = [rng.choice(some, (RESAMPLES, len(some))).mean(1) for some in (of, none)]
    return np.percentile(means[0] / means[1], [2.5, 97.5]).tolist()


def table(pools: Sequence[Pool], found: Sequence[dict[str, dict[str, Any]]]) -> Table:
    out = Table(
        title=f"trials until one is within {NEAR - 1:.0%} of the fastest row",
        caption="ratio: of the means, with its 95 % bootstrap interval",
    )
    for name in ("kernel", "GPU", "ρ", "prior", "mean", "lower quartile", "median", "upper quartile", "ratio"):
        out.add_column(name, justify="left" if name in ("kernel", "GPU", "prior") else "right")
    for pool, of in zip(pools, found, strict=True):
        for name, f in of.items():
            rho = f"{pool.rho:.2f}" if name == "model" and pool.rho is not None else ""
            where = (pool.kernel, pool.gpu) if name == "none" else ("", "")
            at = [f"{f[key]:.1f}" for key in ("mean", "lower", "median", "upper")]
            between = "" if name == "none" else f" ({f['interval'][0]:.2f}–{f['interval'][1]:.2f})"
            out.add_row(*where, rho, name, *at, f"{f['ratio']:.2f}{between}")
        out.add_section()
    for name in found[0]:
        means = [of[name]["mean"] for of in found]
        ratio = np.sum(means) / np.sum([of["none"]["mean"] for of in found])
        out.add_row("mean" if name == "none" else "", "", "", name, f"{np.mean(means):.1f}", "", "", "", f"{ratio:.2f}")
    return out


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kernels", type=Path, metavar="DIR", help="folder of recorded kernels")
    parser.add_argument("--measured", type=Path, metavar="FILE", help="kernels timed by measured_h100.py")
    parser.add_argument("--nvrtc", action="append", nargs="+", default=[], metavar="VERSION=LIB", help="11.8=PATH")
    parser.add_argument("--predictions", type=Path, metavar="FILE", help="kept from an earlier run, or to be kept here")
    parser.add_argument("--stand-in", type=float, nargs="+", default=[], metavar="RHO", help="in the model's place")
    parser.add_argument("--seeds", type=int, default=30, help="searches of each kind (default 30)")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the figures here")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default one per CPU)")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parsed(arguments)
    options.samples = None
    try:
        if options.seeds < 1:
            raise UsageError("--seeds must be at least 1")
        if not all(-1 <= rho <= 1 for rho in options.stand_in):
            raise UsageError("--stand-in takes rank correlations, from -1 to 1")
        if options.predictions and not options.predictions.parent.is_dir():
            raise UsageError(f"cannot write {options.predictions}: there is no folder {options.predictions.parent}")
        if not options.kernels and not options.measured:
            raise UsageError("nothing to search; give --kernels DIR or --measured FILE")
        nvrtc = checked(options)
        pools = read_pools(options, nvrtc) if options.kernels else []
        pools += measured_pools(options.measured) if options.measured else []
        if not pools:
            raise UsageError(f"{options.measured or options.kernels} has nothing that can be searched")
    except EvoengineError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    found = [figures(run(pool, options.seeds, options.stand_in, options.jobs)) for pool in pools]
    Console(width=160).print(table(pools, found))
    if options.json:
        kept: dict[str, dict[str, object]] = {}
        for pool, of in zip(pools, found, strict=True):
            kept.setdefault(pool.kernel, {})[pool.gpu] = of
        options.json.write_text(json.dumps(kept, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
