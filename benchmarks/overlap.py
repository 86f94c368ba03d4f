"""Whether a GPU is kept busy: a real search whose compilers and GPU only sleep, as long as theirs take.

    python benchmarks/overlap.py [--compile 2.0] [--gpu 0.5] [--jobs 8] [--trials 120] [--faults 0.3]

Proposals, rendering, ledger, study, processes and the hand-over between them are those of `evoengine search`. Nothing
is measured on a GPU here: the seconds that a candidate takes the compiler and the GPU are given. With `--faults` a
second search has this share of its candidates kill the process that compiles or times them.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

from rich.console import Console
from rich.table import Table

from evoengine.devices.driver import GpuDevice
from evoengine.gpu import find_gpu
from evoengine.ledger.optuna.study import Projection, optuna_storage
from evoengine.ledger.store import Ledger, open_ledger
from evoengine.paths import asset
from evoengine.records import Baseline, Binary, Device, Finals, Kind, Measurement, Verdict
from evoengine.search.coordinator import Coordinator
from evoengine.search.evaluators import GpuEvaluator
from evoengine.search.identity import Setting
from evoengine.search.progress import Progress
from evoengine.space.space import load_space
from evoengine.stages.tasks import Evaluation
from evoengine.workloads import parse_problem
from evoengine.workloads.attention.problem import EXAMPLE
from evoengine.workloads.base import Target

SIMULATED = GpuDevice(0, "no GPU", "GPU-none", 90, 2**36)
LOG, COMPILE, GPU, FAULTS = (f"OVERLAP_{name}" for name in ("LOG", "COMPILE_SECONDS", "GPU_SECONDS", "FAULTS"))
"""variables by which the worker processes are told where to write, how long to sleep and how often to die"""


# ── in the workers ──────────────────────────────────────────────────────────────────────────────────────────────────


def compile_task(source, arch) -> Binary:
    die_sometimes(int(source.sha256, 16))
    time.sleep(float(os.environ[COMPILE]))
    return Binary(b"", arch, "", "none", 128, 0, 0, 0, (), {}, 0.0)


def measure_task(target, contender, *_) -> Evaluation:
    die_sometimes(contender.trial * 387)
    begun = time.monotonic()
    time.sleep(float(os.environ[GPU]))
    with open(os.environ[LOG], "a") as log:
        log.write(f"{begun} {time.monotonic()}\n")
    return Evaluation((Verdict(SIMULATED.name, None, None, (), 0.0),), figure(contender.trial))


def die_sometimes(number: int) -> None:
    """Half of the faults are met by a compiler, half by the GPU's process."""
    if number % 1000 < 1000 * float(os.environ[FAULTS]) / 2:
        os.kill(os.getpid(), signal.SIGKILL)


def figure(trial: int) -> Measurement:
    """Not alike for all, so that the sampler has something to learn from."""
    return Measurement(Kind.MEASURED, SIMULATED.name, 100.0 + trial % 17, 1000.0, (1000.0,))


def baselines_task(*_) -> list[Baseline]:
    return [Baseline("MATH", SIMULATED.name, 1000.0, 1.0, (1000.0,))]


def finals_task(target, contenders, *_) -> Finals:
    trials = tuple(c.trial for c in contenders)
    return Finals(trials, (), {trial: figure(trial) for trial in trials})


def load_cuda() -> None: ...


# ── the search ──────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Outcome:
    faults: float
    progress: Progress
    seconds: float
    idle: float
    """share of the time between the first candidate on the GPU and the last in which none was on it"""


def run(options: argparse.Namespace, faults: float) -> Outcome:
    with tempfile.TemporaryDirectory(prefix="evoengine-") as folder:
        log = Path(folder, "log")
        os.environ |= {LOG: str(log), COMPILE: str(options.compile), GPU: str(options.gpu), FAULTS: str(faults)}
        with open_ledger(str(Path(folder, "evo.db")), create=True) as ledger:
            progress = search(ledger, options.jobs, options.trials)
            return Outcome(faults, progress, progress.elapsed, idle_share(log))


def search(ledger: Ledger, jobs: int, trials: int) -> Progress:
    target = Target(*parse_problem(EXAMPLE), find_gpu("h100"))
    problem, gpu = target.problem, target.gpu
    space = load_space(asset("search_spaces") / "attention.toml", problem, gpu)
    setting = Setting(target, space, asset("templates"), "evolution", 1, trials, None, jobs, timed=True)
    run = ledger.start_run(
        gpu=gpu.key, problem=str(problem), device=Device(SIMULATED.name), space=space, sampler="evolution", seed=1,
        command="overlap",
    )  # fmt: skip
    domains = {knob.name: knob.values for knob in space.knobs}
    study = Projection(optuna_storage(ledger.url), ledger, run, Kind.MEASURED, domains)
    own = ("measure_task", "baselines_task", "finals_task", "load_cuda")
    tasks = SimpleNamespace(**{name: globals()[name] for name in own})
    judge = GpuEvaluator(target, SIMULATED, 1, tasks)
    return Coordinator(setting, ledger, run, judge, lambda _: None, study.add, compile_task).search()


def idle_share(log: Path) -> float:
    """Not a number where none came to its end."""
    if not log.exists():
        return math.nan
    spans = [tuple(map(float, line.split())) for line in log.read_text().splitlines()]
    whole = spans[-1][1] - spans[0][0]
    return 1 - sum(end - begun for begun, end in spans) / whole


def table(outcomes: Sequence[Outcome], options: argparse.Namespace) -> Table:
    given = f"{options.jobs} compile workers, {options.compile:g} s a compile, {options.gpu:g} s a candidate on the GPU"
    out = Table(title=given)
    for name in ("faults", "correct", "s", "times", "GPU busy", "waiting", "starting", "idle between first and last"):
        out.add_column(name, justify="right")
    for o in outcomes:
        p, usage = o.progress, o.progress.usage
        shares = (f"{seconds / o.seconds:.1%}" for seconds in (usage.busy, usage.waiting, usage.starting))
        times = o.seconds / outcomes[0].seconds
        counted = f"{o.faults:.0%}", f"{p.correct} of {p.done}", f"{o.seconds:.0f}", f"{times:.2f}"
        out.add_row(*counted, *shares, f"{o.idle:.1%}")
    return out


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--compile", type=float, default=2.0, metavar="SECONDS", help="a compile takes (default 2)")
    parser.add_argument("--gpu", type=float, default=0.5, metavar="SECONDS", help="a candidate takes (default 0.5)")
    parser.add_argument("--jobs", type=int, default=8, help="compile workers (default 8)")
    parser.add_argument("--trials", type=int, default=120, help="default 120")
    parser.add_argument(
        "--faults", type=float, default=0.0, metavar="SHARE", help="of candidates that kill their process"
    )
    options = parser.parse_args(arguments)
    if min(options.compile, options.gpu) < 0 or min(options.jobs, options.trials) < 1 or not 0 <= options.faults < 1:
        parser.error(
            "--compile and --gpu must not be negative, --jobs and --trials at least 1, --faults from 0 to below 1"
        )
    shares = (0.0, options.faults) if options.faults else (0.0,)
    Console(width=120).print(table([run(options, share) for share in shares], options))
    return 0


if __name__ == "__main__":
    sys.exit(main())
