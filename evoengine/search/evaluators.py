"""Evaluators of a compiled candidate: executor and emulator with a prediction, or a GPU that times it.

Anything that submits a candidate and returns a future of its verdict and figure can take their place.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, TypeVar

import numpy as np

from evoengine.devices.base import LAUNCH_SECONDS, launch_seconds
from evoengine.devices.driver import GpuDevice
from evoengine.errors import MachineError
from evoengine.records import (
    AnyBaseline,
    Baseline,
    CompiledCandidate,
    Config,
    Finals,
    Judged,
    Measurement,
    Outcome,
    Plan,
    Plans,
    RefusedBaseline,
    Rejection,
    Verdict,
)
from evoengine.sandbox.worker_process import TaskArguments, WorkerLimits
from evoengine.sandbox.workers import Deferred, WorkerPool, Workers
from evoengine.sass.launch import is_executable
from evoengine.search.first_build import FirstBuild
from evoengine.space.space import SearchSpace
from evoengine.stages import tasks
from evoengine.stages.tasks import Evaluation
from evoengine.workloads.base import Target
from evoengine.workloads.packages import PACKAGES, any_installed

Argument = TypeVar("Argument")

QUEUE_DEPTH = 4
"""candidates in flight in addition to one per compile worker: enough that the GPU need not wait, few enough that
proposals use recent results. A limit on the GPU's queue alone would stop the compilers whenever it is full, and restart
them too late to keep it busy"""
NO_COST = "correct; its family states no [cost] for an estimate by formula before a GPU times it"
NOT_FINISHED = "not ranked: gate not finished"
RUNNER_LIMITS = WorkerLimits(memory_bytes=None, forked=False, spare=True)
"""of the process that runs on a GPU; CUDA reserves hundreds of gigabytes of address space, so no memory limit"""
GPU_SECONDS = 180.0
"""time limit of gate and timing of one candidate, without its launches at full size"""
LAUNCHES = 20
"""launches at full size within the time limit of the slowest candidate: checks, warm-up, minimal repetitions"""


@dataclass(frozen=True, slots=True)
class Job:
    """A compiled candidate with its gate cases, its cost by the space's own count, and the seed of its inputs."""

    contender: CompiledCandidate
    plans: Plans
    cost: Mapping[str, float]
    seed: int


def gate_plan(space: SearchSpace, target: Target, config: Config) -> Plan:
    """Return the workload's cases for the configuration, each with its launch."""
    workload = target.workload
    cases = workload.cases(target.problem, config)
    return [(case, workload.gate_launch(case, space.launch(config, case.problem))) for case in cases]


def full_plan(space: SearchSpace, target: Target, config: Config) -> Plan:
    """Return the workload's cases at full size for the judges on the CPU; a GPU runs the problem itself."""
    return target.workload.full_plan(target.problem, config, lambda of: space.launch(config, of))


def make_plans(space: SearchSpace, target: Target, config: Config) -> Plans:
    cases = gate_plan(space, target, config)
    short, long = ([part for part in cases if part[0].long is of] for of in (False, True))
    return Plans(short, long, full_plan(space, target, config))


def seed_for(seed: int, run: int, trial: int) -> int:
    """Return the seed of a trial's inputs, which differs between trials and is the same when the run is repeated."""
    return int(np.random.SeedSequence([seed, run, trial]).generate_state(1)[0])


def found_baselines(answer: Future[list[AnyBaseline] | Rejection]) -> list[AnyBaseline]:
    """Wait for the result of `Evaluator.baselines`. Raises MachineError if the device could time none."""
    found = answer.result()
    if isinstance(found, Rejection):
        raise MachineError(f"no baseline can be timed on the GPU, so neither can candidates: {found.reason}")
    return found


def said_of_baselines(found: Sequence[AnyBaseline]) -> str:
    """Return a line with the time of each baseline, the fastest first, and the names of those that were not timed."""
    timed = sorted((b for b in found if isinstance(b, Baseline)), key=lambda b: b.median_us)
    refused = [b.name for b in found if isinstance(b, RefusedBaseline)]
    line = f"baselines: {', '.join(f'{b.name} {b.median_us:,.1f} µs' for b in timed)}"
    return f"{line}; not timed: {', '.join(refused)} (show says why)" if refused else line


@dataclass(frozen=True, slots=True)
class End:
    """How a candidate ends, and by what, as `Ledger.finish` takes it."""

    outcome: Outcome
    reason: str | None = None
    device: str | None = None
    verdicts: tuple[Verdict, ...] = ()
    figure: Measurement | None = None
    evidence: Mapping[str, Any] | None = None


def end_of(result: Evaluation | Rejection) -> End:
    """Return the end of a candidate by its evaluation or rejection."""
    if isinstance(result, Rejection):
        verdicts = (result.verdict,) if result.verdict else ()
        device = result.verdict.device if result.verdict else None
        return End(result.outcome, result.reason, device, verdicts, evidence=result.evidence)
    figure, device, judged = result.figure, result.verdicts[-1].device, Judged(result.verdicts)
    if wrong := judged.wrong:
        assert wrong.outcome is not None  # it refutes
        return End(wrong.outcome, judged.why_wrong, wrong.device, result.verdicts)
    if figure is None:
        outcome, said = Outcome.UNRANKED, [NO_COST, result.model_error, judged.alone]
    elif figure.suspect:
        outcome, said = Outcome.SUSPECT, [figure.suspect]
    elif not result.whole:
        outcome, said = Outcome.UNFINISHED, [NOT_FINISHED]
    else:
        outcome, said = Outcome(str(figure.kind)), [result.model_error, judged.alone, why_dropped(figure)]
    return End(outcome, "; ".join(filter(None, said)) or None, device, result.verdicts, figure)


def why_dropped(figure: Measurement) -> str | None:
    """Return the remark for a candidate that was timed only a few times, because it was clearly slower."""
    terms = figure.terms
    if "dropped_after" not in terms:
        return None
    return (
        f"dropped after {terms['dropped_after']:.0f} repetitions: {terms['times_incumbent']:.2f} times the time of "
        f"trial {terms['incumbent']:.0f}"
    )


@dataclass(frozen=True, slots=True)
class Usage:
    """Where a device's wall time went, in seconds, summed over several devices."""

    busy: float
    """verifying or timing"""
    starting: float
    """starting runner processes, at first and after failures"""
    waiting: float
    """for a compiled candidate"""


class Evaluator(ABC):
    _tasks: ModuleType = tasks
    queue_depth: int = 0
    """candidates in flight in addition to one per compile worker; 0 where the evaluator shares those"""

    @abstractmethod
    def submit(self, job: Job, workers: Workers | None, whole: bool = True) -> Future[Evaluation | Rejection]:
        """Gate the candidate and give its figure.

        `workers` are those of the compilers, for a judge that has none of its own. Unless `whole`, a judge that
        predicts runs the short cases alone, and leaves the rest to `finish`; a judge that times runs all.
        """

    def finish(
        self, target: Target, job: Job, known: tuple[Verdict, ...], workers: Workers
    ) -> Future[Judged | Rejection]:
        """Run those cases of the gate, without a GPU, that the verdicts `known` of a candidate leave open."""
        return self._finish((target.workload, job.contender, job.plans, job.seed, known), workers)

    def _finish(self, arguments: TaskArguments, workers: Workers) -> Future[Judged | Rejection]:
        return workers.submit(
            self._tasks.finish_task,
            *arguments,
            on_crash=Outcome.CRASHED,
            returns=Judged,
            retry=without_executor(arguments),
        )

    def baselines(self) -> Future[list[AnyBaseline] | Rejection] | None:
        """Start timing the baselines before the first candidate; pass the result to `found_baselines`."""
        return None

    def finals(self, contenders: Sequence[CompiledCandidate]) -> Future[Finals | Rejection] | None:
        """Time the contenders against each other; None if the evaluator does not time."""
        return None

    def first_stage(self) -> str:
        """Return a description of the first stage for the user."""
        return "gating the first candidates"

    def usage(self, seconds: float) -> Usage | None:
        """Return how the device spent `seconds` of a search."""
        return None

    @abstractmethod
    def close(self) -> None:
        """End what the evaluator started."""


class CpuEvaluator(Evaluator):
    """Gates by executor and emulator, on the compile workers, and ranks by the prediction."""

    def __init__(self, target: Target, build: FirstBuild | None = None) -> None:
        """Create an evaluator that submits nothing to the workers before `build` has built what judges it.

        None if nothing needs to be built.
        """
        self._target, self._build = target, build

    def first_stage(self) -> str:
        building = self._build is not None and self._build.is_running
        return "building executor and emulator" if building else super().first_stage()

    def submit(self, job: Job, workers: Workers | None, whole: bool = True) -> Future[Evaluation | Rejection]:
        assert workers is not None  # it has none of its own

        after_build = Deferred(lambda: self._after_build(whole, whole))
        arguments = (self._target, job.contender, job.plans, job.seed, job.cost, after_build)
        return workers.submit(
            tasks.estimate_task,
            *arguments,
            on_crash=Outcome.CRASHED,
            returns=Evaluation,
            retry=without_executor(arguments),
        )

    def finish(
        self, target: Target, job: Job, known: tuple[Verdict, ...], workers: Workers
    ) -> Future[Judged | Rejection]:
        after_build = Deferred(lambda: self._after_build(known, both=True))
        arguments = (target.workload, job.contender, job.plans, job.seed, after_build)
        return self._finish(arguments, workers)

    def _after_build(self, argument: Argument, both: bool) -> Argument:
        """Wait until the executor is built, and the emulator if it may be needed, and return the argument."""
        if self._build:
            self._build.wait(both or not is_executable(self._target.gpu.capability))
        return argument

    def close(self) -> None:
        """End the build, for which the workers' threads may wait; the workers are the compilers'."""
        if self._build:
            self._build.close()


def without_executor(arguments: TaskArguments) -> Callable[[Rejection], TaskArguments | None]:
    """Return a function that retries a task once whose process ended, with the reason as its last argument.

    The gate reports what a kernel does wrong. A process that dies shows a fault of the executor or
    the model, which run in it, and not of the kernel.
    """
    failed: list[str] = []

    def retry(rejection: Rejection) -> TaskArguments | None:
        if failed or rejection.outcome not in (Outcome.CRASHED, Outcome.HUNG):
            return None
        failed.append(rejection.reason)
        return *(a.ask() if isinstance(a, Deferred) else a for a in arguments), rejection.reason

    return retry


def single_worker(limits: WorkerLimits) -> Workers:
    return WorkerPool(1, limits)


class GpuEvaluator(Evaluator):
    """Gates and times in the runner process of one GPU, or of several of a kind.

    Each candidate is timed beside the best so far and the fastest baseline.
    """

    def __init__(
        self,
        target: Target,
        device: GpuDevice,
        seed: int,
        tasks: ModuleType = tasks,
        seconds: float | None = None,
        long_run_us: Callable[[Baseline], float] = lambda baseline: baseline.median_us,
        runners: Callable[[WorkerLimits], Workers] = single_worker,
    ) -> None:
        """Create an evaluator that times on GPUs.

        `tasks` has measure_task, baselines_task, finals_task and load_cuda; tests replace it. `seconds` is the time
        limit of one candidate, by default derived from the problem's work. `long_run_us` returns a baseline's time over
        all known measurements. `runners` starts the processes that time, by default one.
        """
        slowest = launch_seconds(target.flops) - LAUNCH_SECONDS
        seconds = seconds or GPU_SECONDS + LAUNCHES * slowest
        self._target, self._seed, self._tasks = target, seed, tasks
        environment = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": device.uuid}
        limits = replace(RUNNER_LIMITS, seconds=seconds, environment=environment, warm_up=tasks.load_cuda)
        self._runner = runners(limits)
        self.queue_depth = QUEUE_DEPTH + self._runner.size - 1
        self._baselines: Future[list[AnyBaseline] | Rejection] | None = None
        self._best: tuple[float, CompiledCandidate] | None = None
        self._long_run_us = long_run_us
        self._scaled: Baseline | None = None

    def baselines(self) -> Future[list[AnyBaseline] | Rejection]:
        """Time every baseline that supports the problem; the fastest is timed beside every candidate.

        One that crashes or hangs is left out, and all kernels of packages if the process ends for another reason.
        """
        failed: dict[str, str] = {}

        def without(rejection: Rejection) -> TaskArguments | None:
            named = rejection.baseline
            if named is None and (rejection.outcome is Outcome.UNRANKED or PACKAGES in failed or not any_installed()):
                return None
            failed[named or PACKAGES] = rejection.reason
            return self._target, self._seed, dict(failed)

        self._baselines = self._runner.submit(
            self._tasks.baselines_task,
            self._target,
            self._seed,
            {},
            on_crash=Outcome.CRASHED,
            returns=list,
            retry=without,
        )
        return self._baselines

    def first_stage(self) -> str:
        timed = self._baselines is None or self._baselines.done()
        return "gating and timing the first candidates" if timed else "timing the baselines"

    def _fastest(self) -> Baseline:
        """Return the fastest baseline with its long-run time, the common scale of all figures of the search."""
        if self._scaled is None:
            assert self._baselines is not None  # they are asked for before the first candidate
            timed = [b for b in found_baselines(self._baselines) if isinstance(b, Baseline)]
            fastest = min(timed, key=lambda b: b.median_us)
            self._scaled = replace(fastest, median_us=self._long_run_us(fastest))
        return self._scaled

    def submit(self, job: Job, workers: Workers | None, whole: bool = True) -> Future[Evaluation | Rejection]:
        incumbent = Deferred(lambda: self._best[1] if self._best else None)
        future: Future[Evaluation | Rejection] = self._runner.submit(
            self._tasks.measure_task,
            self._target,
            job.contender,
            [*job.plans.short, *job.plans.long],
            job.seed,
            incumbent,
            Deferred(self._fastest),
            on_crash=Outcome.CRASHED,
            returns=Evaluation,
        )
        future.add_done_callback(lambda done: self._remember(job.contender, done))
        return future

    def _remember(self, contender: CompiledCandidate, done: Future[Evaluation | Rejection]) -> None:
        if done.cancelled() or done.exception():
            return
        result = done.result()
        if isinstance(result, Rejection) or result.figure is None or result.figure.suspect:
            return
        figure = result.figure
        assert figure.tflops is not None  # the problem's operations are known
        if self._best is None or figure.tflops > self._best[0]:
            self._best = figure.tflops, contender

    def finals(self, contenders: Sequence[CompiledCandidate]) -> Future[Finals | Rejection]:
        return self._runner.submit(
            self._tasks.finals_task,
            self._target,
            tuple(contenders),
            self._seed,
            Deferred(self._fastest),
            on_crash=Outcome.CRASHED,
            returns=Finals,
        )

    def usage(self, seconds: float) -> Usage:
        busy, starting = self._runner.seconds_busy, self._runner.seconds_starting
        return Usage(busy, starting, max(0.0, seconds * self._runner.size - busy - starting))

    def close(self) -> None:
        self._runner.close()


def make_evaluator(
    target: Target,
    device: GpuDevice | None,
    seed: int,
    long_run_us: Callable[[Baseline], float] = lambda baseline: baseline.median_us,
    runners: Callable[[WorkerLimits], Workers] = single_worker,
    build: FirstBuild | None = None,
) -> Evaluator:
    """Return the evaluator for the GPU if there is one to time on.

    Otherwise it is that of executor and emulator, which waits for their `build`.
    """
    if device is None:
        return CpuEvaluator(target, build)
    return GpuEvaluator(target, device, seed, long_run_us=long_run_us, runners=runners)
