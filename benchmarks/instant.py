"""A search whose kernels are compiled and judged at once, for benchmarks and tests.

Proposals, ledger, claims, study and what goes on after a kill are those of `evoengine search`.

    python -m benchmarks.instant LEDGER [--trials 100] [--size 400] [--seed 1] [--milliseconds 0] [--log FILE]

Nothing is measured: a candidate's time follows from its number. The same command again goes on with a search that was
killed, as `evoengine search` does.
"""

from __future__ import annotations

import argparse
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from evoengine.gpu import find_gpu
from evoengine.ledger.optuna.study import Projection, add_missing, optuna_storage
from evoengine.ledger.store import Ledger, open_ledger
from evoengine.ledger.transactions import Patience
from evoengine.records import (
    EMULATOR,
    EXECUTOR,
    GATE_VERSION,
    Binary,
    CaseResult,
    Config,
    Device,
    Judged,
    Kind,
    Measurement,
    Verdict,
)
from evoengine.search import coordinator
from evoengine.search.coordinator import Coordinator
from evoengine.search.evaluators import Evaluator
from evoengine.search.identity import Identity, Setting
from evoengine.search.progress import Progress
from evoengine.space.space import load_space
from evoengine.stages.tasks import Evaluation
from evoengine.tuning.resume import ActiveRun, SearchRequest, begin
from evoengine.tuning.setup import recording_failure
from evoengine.workloads import parse_problem
from evoengine.workloads.base import Target

PROBLEM = "attention:b1,h1,s64,d32,fp16"
GPU = "h100"
DEVICE = "no device"
SPACE = """\
kernel = "attention"
[knobs]
family = ["numbered"]
{digits}
[cost.numbered]
mufu = 1000
[launch.numbered]
threads = 32
grid = [1, 1, 1]
shared = 0
"""


def digits_of(size: int) -> dict[str, range]:
    """The knobs of `size` numbers, and what each adds to the number: ten values each but the first, as far as `size`
    can be divided. Configurations in their order are the numbers in theirs."""
    one = 1
    digits: dict[str, range] = {}
    while size % (10 * one) == 0 and size > 10 * one:
        digits = {f"digit_of_{one}": range(0, 10 * one, one), **digits}
        one *= 10
    return {f"digit_of_{one}": range(0, size, one), **digits}


def number_of(config: Config) -> int:
    return sum(int(value) for knob, value in config.items() if knob.startswith("digit_of_"))


def microseconds(number: int) -> float:
    """Not measured anywhere: some order for a sampler to find."""
    return 10.0 + (number * 7919) % 1009


class InstantWorkers:
    """Workers that take no time and no process: it is the coordinator that is looked at."""

    def __init__(self, size: int) -> None:
        self.size, self.seconds_busy, self.seconds_starting = size, 0.0, 0.0

    def submit(self, task: Callable[..., Any], *args: Any, **_: Any) -> Future[Any]:
        answer: Future[Any] = Future()
        answer.set_result(task(*args))
        return answer

    def close(self) -> None:
        pass


class InstantCompilers:
    """Stands for what asks the compile workers."""

    workers = SimpleNamespace(size=2)

    def __init__(self, *_: object) -> None: ...

    def recorded(self, source):
        return Binary(b"cubin", "sm_90a", "", "none", 32, 0, 0, 0, (), {}, 1.0)

    def close(self) -> None: ...


def verdicts() -> tuple[Verdict, ...]:
    """Those of both judges on a candidate that passed."""
    case = CaseResult("case", PROBLEM, 1, True, 0.0, 0.0, 1.0)
    return tuple(Verdict(name, None, None, (case,), 1.0, gate_version=GATE_VERSION) for name in (EXECUTOR, EMULATOR))


class InstantJudge(Evaluator):
    """Notes in a file whatever it is given, and takes so many milliseconds for it."""

    def __init__(self, log: Path | None, milliseconds: float) -> None:
        self._log, self._seconds = log, milliseconds / 1e3
        self._threads = ThreadPoolExecutor(2)

    def finish(self, target, job, known, workers) -> Future:
        done: Future = Future()
        done.set_result(Judged(verdicts()))
        return done

    def submit(self, job, workers, whole) -> Future:
        if self._seconds:
            return self._threads.submit(self._judge, job)
        done: Future = Future()
        done.set_result(self._judge(job))
        return done

    def _judge(self, job) -> Evaluation:
        number = number_of(job.contender.config)
        if self._log:
            with self._log.open("a") as log:
                log.write(f"{number}\n")
        time.sleep(self._seconds)
        return Evaluation(
            verdicts(), Measurement(Kind.ESTIMATED, DEVICE, 1e4 / microseconds(number), microseconds(number))
        )

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)


@contextmanager
def compiling_nothing() -> Iterator[None]:
    """No kernel of the searches within is compiled."""
    own = coordinator.Compilers
    coordinator.Compilers = InstantCompilers
    try:
        yield
    finally:
        coordinator.Compilers = own


def make_setting(folder: Path, size: int, trials: int, seed: int, sampler: str, jobs: int) -> Setting:
    """Of a search among `size` numbers; writes its space and its template into the folder."""
    (folder / "attention").mkdir(exist_ok=True)
    digits = digits_of(size)
    number = " + ".join(digits)
    (folder / "attention" / "numbered.cu.j2").write_text(f"// candidate {{{{ {number} }}}}\n")
    space_file = folder / "numbers.toml"
    knobs = "\n".join(f"{name} = {list(values)}" for name, values in digits.items())
    space_file.write_text(SPACE.format(digits=knobs))
    target = Target(*parse_problem(PROBLEM.partition(":")[2]), find_gpu(GPU))
    space = load_space(space_file, target.problem, target.gpu)
    return Setting(target, space, folder, sampler, seed, trials, None, jobs, timed=False)


def start(ledger: Ledger, s: Setting, echo: Callable[[str], None] = print) -> ActiveRun:
    """Enters the run, or goes on with the last one of the same setting that was cut short."""
    asked = SearchRequest(
        str(s.target.problem), s.target.gpu.key, s.space.name, s.space.sha256, s.sampler, "tflops", s.trials, s.seconds,
        s.seed, conditions={},
    )  # fmt: skip
    return begin(ledger, asked, None, echo, device=Device(DEVICE), space=s.space, seed=s.seed)


def make_study(ledger: Ledger, run: int, setting: Setting) -> Projection:
    """The run's, and what earlier ones left out of theirs."""
    storage = optuna_storage(ledger.url)
    domains = {knob.name: knob.values for knob in setting.space.knobs}
    made = Projection(storage, ledger, run, Kind.ESTIMATED, domains)
    add_missing(storage, ledger)
    made.complete()
    return made


def search(
    database: str, *, trials: int = 100, size: int = 400, seed: int = 1, sampler: str = "random", jobs: int = 2,
    milliseconds: float = 0.0, log: Path | None = None, study: bool = True, remeasure: bool = False,
    on_change: Callable[[Progress], None] = lambda progress: None, echo: Callable[[str], None] = print,
) -> Progress:  # fmt: skip
    """A whole search, with what a command does of it."""
    with tempfile.TemporaryDirectory() as folder, open_ledger(database, create=True) as ledger:
        ledger.database.patience = Patience(echo)
        setting = replace(make_setting(Path(folder), size, trials, seed, sampler, jobs), remeasure=remeasure)
        begun = start(ledger, setting, echo)
        with recording_failure(ledger, begun.run), compiling_nothing():
            projection = make_study(ledger, begun.run, setting) if study else None
            judge = InstantJudge(log, milliseconds)
            finished = projection.add if projection else lambda trial: None
            searched = Coordinator(
                setting, ledger, begun.run, judge, on_change, finished, identity=Identity(setting, {}),
                workers=InstantWorkers(jobs), spent=begun.spent,
            )  # fmt: skip
            signal.signal(signal.SIGTERM, lambda *_: searched.stop())
            progress = searched.search()
            if projection:
                projection.write()
            ledger.finish_run(begun.run, progress.ended)
            if projection:
                projection.complete()
        return progress


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("ledger")
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--size", type=int, default=400, help="configurations of the space")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--milliseconds", type=float, default=0.0, help="that a candidate takes")
    parser.add_argument("--log", type=Path, help="where each evaluation is noted")
    options = parser.parse_args()

    def say(line: str) -> None:
        print(line, flush=True)

    print(f"process {os.getpid()}", flush=True)
    found = search(
        options.ledger, trials=options.trials, size=options.size, seed=options.seed,
        milliseconds=options.milliseconds, log=options.log, echo=say,
    )  # fmt: skip
    print(f"{found.ended}: {found.done} trials, {found.taken_over} taken over", flush=True)
