"""Whether a GPU is kept busy: a real search whose compilers and GPU only sleep, as long as theirs take.

    python benchmarks/overlap.py [--compile 2.0] [--gpu 0.5] [--jobs 8] [--trials 120]

Proposals, rendering, ledger, study, processes and the hand-over between them are those of `evoengine search`. Nothing is
measured on a GPU here: the seconds that a candidate takes the compiler and the GPU are given.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

from rich.console import Console
from rich.table import Table

from evoengine.devices.driver import GpuDevice
from evoengine.gpu import find_gpu
from evoengine.ledger.runs import Device
from evoengine.ledger.store import Ledger, open_ledger
from evoengine.ledger.study import Projection, optuna_storage
from evoengine.paths import asset
from evoengine.problem import EXAMPLE, parse_problem
from evoengine.records import Baseline, Binary, Finals, Kind, Measurement, Verdict
from evoengine.search.coordinator import Coordinator, Progress, Setting
from evoengine.search.judges import GpuJudge
from evoengine.space.space import load_space
from evoengine.stages.pipeline import Judged

SIMULATED = GpuDevice(0, "no GPU", "GPU-none", 90, 2**36)
LOG, COMPILE, GPU = "OVERLAP_LOG", "OVERLAP_COMPILE_SECONDS", "OVERLAP_GPU_SECONDS"
"""variables by which the worker processes are told where to write and how long to sleep"""


# ── in the workers ──────────────────────────────────────────────────────────────────────────────────────────────────


def compile_task(source, arch) -> Binary:
    time.sleep(float(os.environ[COMPILE]))
    return Binary(b"", arch, "", "none", 128, 0, 0, 0, (), {}, 0.0)


def measure_task(kernel, contender, *_) -> Judged:
    begun = time.monotonic()
    time.sleep(float(os.environ[GPU]))
    with open(os.environ[LOG], "a") as log:
        log.write(f"{begun} {time.monotonic()}\n")
    return Judged(Verdict(SIMULATED.name, None, None, (), 0.0), figure(contender.trial))


def figure(trial: int) -> Measurement:
    """All but alike, so that the sampler has something to learn from."""
    return Measurement(Kind.MEASURED, SIMULATED.name, 100.0 + trial % 17, 1000.0, (1000.0,))


def baselines_task(*_) -> list[Baseline]:
    return [Baseline("MATH", SIMULATED.name, 1000.0, 1.0, (1000.0,))]


def finals_task(kernel, contenders, *_) -> Finals:
    trials = tuple(c.trial for c in contenders)
    return Finals(trials, (), {trial: figure(trial) for trial in trials})


def load_cuda() -> None: ...


# ── the search ──────────────────────────────────────────────────────────────────────────────────────────────────────


def search(ledger: Ledger, jobs: int, trials: int) -> Progress:
    problem, gpu = parse_problem(EXAMPLE), find_gpu("h100")
    space = load_space(asset("search_spaces") / "attention.toml", problem, gpu)
    setting = Setting(problem, gpu, space, asset("templates"), "evolution", 1, trials, None, jobs, timed=True)
    run = ledger.start_run(
        gpu=gpu.key, problem=str(problem), device=Device(SIMULATED.name), space=space, sampler="evolution", seed=1,
        command="overlap",
    )  # fmt: skip
    domains = {knob.name: knob.values for knob in space.knobs}
    study = Projection(optuna_storage(ledger.url), ledger, run, Kind.MEASURED, domains)
    own = ("measure_task", "baselines_task", "finals_task", "load_cuda")
    tasks = SimpleNamespace(**{name: globals()[name] for name in own})
    judge = GpuJudge(space.kernel, problem, gpu, SIMULATED, 1, tasks)
    return Coordinator(setting, ledger, run, judge, lambda _: None, study.add, compile_task).search()


def idle_share(log: Path) -> float:
    """Of the time between the first candidate on the GPU and the last, what no candidate was on it."""
    spans = [tuple(map(float, line.split())) for line in log.read_text().splitlines()]
    whole = spans[-1][1] - spans[0][0]
    return 1 - sum(end - begun for begun, end in spans) / whole


def table(progress: Progress, idle: float, options: argparse.Namespace) -> Table:
    usage, whole = progress.usage, progress.elapsed
    out = Table(title=f"{options.jobs} compile workers, {options.compile:g} s a compile, {options.gpu:g} s a candidate on the GPU")
    for name in ("trials", "s", "GPU busy", "waiting", "starting", "idle between first and last"):
        out.add_column(name, justify="right")
    shares = (f"{seconds / whole:.1%}" for seconds in (usage.busy, usage.waiting, usage.starting))
    out.add_row(str(progress.done), f"{whole:.0f}", *shares, f"{idle:.1%}")
    return out


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--compile", type=float, default=2.0, metavar="SECONDS", help="a compile takes (default 2)")
    parser.add_argument("--gpu", type=float, default=0.5, metavar="SECONDS", help="a candidate takes the GPU (default 0.5)")
    parser.add_argument("--jobs", type=int, default=8, help="compile workers (default 8)")
    parser.add_argument("--trials", type=int, default=120, help="default 120")
    options = parser.parse_args(arguments)
    if min(options.compile, options.gpu) < 0 or min(options.jobs, options.trials) < 1:
        parser.error("--compile and --gpu must not be negative, --jobs and --trials at least 1")
    with tempfile.TemporaryDirectory(prefix="evoengine-") as folder:
        log = Path(folder, "log")
        os.environ |= {LOG: str(log), COMPILE: str(options.compile), GPU: str(options.gpu)}
        with open_ledger(str(Path(folder, "evo.db")), create=True) as ledger:
            progress = search(ledger, options.jobs, options.trials)
        idle = idle_share(log)
    Console(width=120).print(table(progress, idle, options))
    return 0


if __name__ == "__main__":
    sys.exit(main())
