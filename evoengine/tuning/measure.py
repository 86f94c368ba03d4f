"""Time candidates of searches without a GPU on a GPU, and compute how well estimates ranked them."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from pathlib import Path

from evoengine.devices.driver import GpuDevice, require_arch, resolve_gpu, supports_arch
from evoengine.errors import NothingFound, hint
from evoengine.ledger.rows import most_trusted
from evoengine.ledger.store import Ledger, open_ledger
from evoengine.ledger.transfer import is_elsewhere
from evoengine.records import UNKNOWN_POLICY, AnyBaseline, Candidate, Kind, Outcome, Rejection
from evoengine.sandbox.worker_process import COMPILER_LIMITS
from evoengine.sandbox.workers import WorkerPool
from evoengine.search.compilers import with_machine_code
from evoengine.search.evaluators import GpuEvaluator, end_of, found_baselines, seed_for
from evoengine.search.finishing import FINALISTS, Finisher, record_finals, submit_finals
from evoengine.search.pipeline import Pipeline
from evoengine.search.progress import OnTrial, ignore
from evoengine.search.targets import spaces_of, stored_gpu, stored_target
from evoengine.space.space import SearchSpace
from evoengine.stages.tasks import Evaluation
from evoengine.stages.toolchain import compiler_version
from evoengine.terms import FORMULA, model_of
from evoengine.text import command_line
from evoengine.tuning.boards import custom_definition
from evoengine.tuning.setup import Echo, drawn_seed, ledger_device, lock_gpu, recording_failure, require_gpus, silent
from evoengine.workloads.base import Target


@dataclass(frozen=True, slots=True)
class MeasureResult:
    run: int
    baselines: tuple[AnyBaseline, ...]
    best: tuple[Candidate, ...]
    pairs: tuple[Pair, ...]
    """estimates and measurements that are comparable with those of `best`"""
    agreement: Agreement
    notes: tuple[str, ...]


class MeasureRun:
    """Gate and time the ledger's candidates on a GPU, best estimate first: the first `top`, or all if it is None.

    Raises MachineError if no GPU can run them.
    """

    def __init__(
        self,
        top: int | None,
        gpu: str | None = None,
        problem: str | None = None,
        db: str | None = None,
        echo: Echo = silent,
        on_finish: OnTrial = ignore,
    ) -> None:
        require_gpus(compilers=())
        self._top, self._gpu, self._problem, self._db = top, gpu, problem, db
        self._echo, self._on_finish = echo, on_finish
        self._remeasurer: Remeasurer | None = None
        self.stopped = False

    def stop(self) -> None:
        """Stop after the current candidate."""
        self.stopped = True
        if self._remeasurer:
            self._remeasurer.stop()

    def run(self) -> MeasureResult:
        """Measure the candidates. Raises NothingFound if there is nothing to measure."""
        with open_ledger(self._db, create=False) as ledger:
            gpu, problem = ledger.targets.last(self._gpu, self._problem)
            target = stored_target(ledger, problem, stored_gpu(ledger, gpu))
            left = unmeasured_candidates(ledger, problem, gpu)
            if not left:
                raise NothingFound(
                    f"the ledger holds no correct candidate of {target} that is not measured yet: "
                    f"{hint('history', db=ledger.db, problem=problem, gpu=gpu)} shows the outcomes"
                )
            device = _device_for(target, left)
            with lock_gpu(device, self._echo):
                return self._measure(ledger, target, left, device)

    def _measure(self, ledger: Ledger, target: Target, left: Sequence[Candidate], device: GpuDevice) -> MeasureResult:
        problem, named = str(target.problem), target.gpu
        if device.name != named.name:
            self._echo(f"compiled for {named.name}, timed on {device.name}, of the same architecture")
        chosen = left[: self._top]
        self._echo(f"{len(chosen)} of {len(left)} candidates of {problem}, on {device.name} · ledger {ledger.place}")
        here = replace(target, gpu=resolve_gpu(device, named))
        spaces, seed = spaces_of(ledger, chosen, here), drawn_seed()
        searched = ledger.run(chosen[0].run)
        run = ledger.start_run(
            gpu=named.key,
            problem=problem,
            device=ledger_device(device),
            space=spaces[searched.id],
            sampler="measure",
            seed=seed,
            command=command_line(),
            objectives=searched.objectives,
            definition=searched.definition,
            gpu_definition=custom_definition(named),
            kernel=searched.kernel,
        )
        judge = GpuEvaluator(here, device, seed, long_run_us=partial(ledger.long_run_us, run))
        self._remeasurer = Remeasurer(ledger, run, judge, here, seed, self._on_finish)
        if self.stopped:
            self._remeasurer.stop()
        with recording_failure(ledger, run):
            notes = self._remeasurer.measure(chosen, spaces)
        ledger.finish_run(run, "interrupted" if self.stopped else "all candidates done")
        best = ledger.best(problem, named.key, top=10)
        like = {(m.device, str(m.policy)) for m in (c.ranked_by for c in best)}
        pairs = [p for p in measured_pairs(ledger, problem, named.key) if (p.device, p.policy) in like]
        agreement = rank_agreement([p.figures for p in of_one_model(pairs)])
        return MeasureResult(run, tuple(ledger.baselines(run)), tuple(best), tuple(pairs), agreement, tuple(notes))


def _device_for(target: Target, left: Sequence[Candidate]) -> GpuDevice:
    """Return the GPU that can run the candidates' binaries. Raises MachineError if there is none."""
    compiled = [c for c in left if not is_elsewhere(c.contender.binary)]
    imported = len(compiled) < len(left)
    compilers = {c.contender.binary.compiler for c in compiled} | ({compiler_version()} if imported else set())
    devices = require_gpus(compilers)
    device = next((d for d in devices if supports_arch(d, target.gpu.arch)), devices[0])
    if imported:
        require_arch(device, target.gpu.arch, str(target))
    for candidate in compiled:
        require_arch(device, candidate.contender.binary.arch, f"trial {candidate.trial}")
    return device


POLL_SECONDS = 0.1


def unmeasured_candidates(ledger: Ledger, problem: str, gpu: str) -> list[Candidate]:
    """Return the candidates of the last run's kernel that are neither measured nor refuted, each source once.

    The best prediction comes first, then estimates by formula, those without either last.
    """
    runs = {r.id: r.kernel for r in ledger.runs() if (r.problem, r.gpu) == (problem, gpu)}
    last = runs[max(runs)] if runs else None
    known = [c for c in ledger.candidates(problem=problem, gpu=gpu) if runs.get(c.run) == last]
    measured = {c.source.sha256 for c in known if c.source and c.outcome is Outcome.MEASURED}
    timeable = (Outcome.ESTIMATED, Outcome.UNFINISHED, Outcome.UNRANKED)
    found = [c for c in known if c.outcome in timeable and c.binary]
    by_source: dict[str, Candidate] = {}
    for candidate in sorted(found, key=_estimate_key):
        sha256 = candidate.contender.source.sha256
        if sha256 not in measured:
            by_source.setdefault(sha256, candidate)
    return list(by_source.values())


def _estimate_key(candidate: Candidate) -> tuple[bool, float]:
    m = candidate.measurement
    return (m.by_formula, -m.tflops) if m and m.tflops is not None else (True, inf)


class Remeasurer:
    """Gate and time candidates in the given order; each is in the ledger when `on_finish` is called with it."""

    def __init__(
        self, ledger: Ledger, run: int, judge: GpuEvaluator, target: Target, seed: int, on_finish: OnTrial
    ) -> None:
        self._ledger, self._run, self._judge = ledger, run, judge
        self._target, self._seed, self._on_finish = target, seed, on_finish
        self._stop = False

    def stop(self) -> None:
        """Stop after the current candidate."""
        self._stop = True

    def measure(self, candidates: Sequence[Candidate], spaces: dict[int, SearchSpace]) -> list[str]:
        """Measure candidates; return remarks for people. Closes the evaluator."""
        try:
            for baseline in found_baselines(self._judge.baselines()):
                self._ledger.record_baseline(self._run, baseline)
            waiting = list(candidates)
            in_flight: dict[Future[Evaluation | Rejection], Candidate] = {}
            while (waiting or in_flight) and not self._stop:
                while waiting and len(in_flight) < self._judge.queue_depth:
                    candidate = waiting.pop(0)
                    in_flight[self._evaluate(candidate, spaces[candidate.run])] = candidate
                for future in wait(in_flight, POLL_SECONDS, FIRST_COMPLETED).done:
                    self._record(in_flight.pop(future), future.result())
            return [] if self._stop else [*self._finish_gate(spaces), *self._finals()]
        finally:
            self._judge.close()

    def _evaluate(self, candidate: Candidate, space: SearchSpace) -> Future[Evaluation | Rejection]:
        """Evaluate a candidate from its binary on. No templates are needed; only imported candidates are compiled."""
        known = with_machine_code(self._ledger, candidate.trial)
        if isinstance(known, Rejection):
            rejected: Future[Evaluation | Rejection] = Future()
            rejected.set_result(known)
            return rejected
        pipeline = Pipeline(self._target, space, Path(), self._judge, timed=True)
        return pipeline.evaluate(known.contender, seed_for(self._seed, self._run, candidate.trial), None)

    def _record(self, candidate: Candidate, result: Evaluation | Rejection) -> None:
        """Record the GPU's result in place of the emulator's."""
        end = end_of(result)
        self._ledger.finish(
            candidate.trial, end.outcome, end.reason, candidate.occupancy, end.device, end.verdicts, end.figure
        )
        self._on_finish(self._ledger.candidate(candidate.trial))

    def _finish_gate(self, spaces: dict[int, SearchSpace]) -> list[str]:
        """Finish the gate of the finalists by both judges without a GPU; return remarks for the user."""
        with closing(WorkerPool(1, COMPILER_LIMITS)) as workers:
            return Finisher(
                self._ledger,
                self._run,
                self._target,
                self._seed,
                self._judge,
                workers,
                lambda: not self._stop,
                lambda stage: None,
                lambda before, outcome: None,
                dict(spaces),
            ).finish_finalists(FINALISTS)

    def _finals(self) -> list[str]:
        future = submit_finals(self._ledger, self._judge, str(self._target.problem), self._target.gpu.key)
        return record_finals(self._ledger, self._run, future.result()) if future else []


SHORT_LIST = 10
"""number of best estimates for which the regret of timing only these is computed"""


@dataclass(frozen=True, slots=True)
class Pair:
    """One candidate's last estimate beside its last measurement, both in TFLOPS.

    A prediction takes precedence over an estimate by formula.
    """

    trial: int
    problem: str
    gpu: str
    """GPU for which it was compiled and estimated"""
    device: str
    """GPU on which it was measured"""
    family: str
    estimated: float
    measured: float
    policy: str = str(UNKNOWN_POLICY)
    """by which it was measured"""
    model: str = FORMULA
    """the source of the estimate: the model of machine code, or a formula"""

    @property
    def figures(self) -> tuple[float, float]:
        return self.estimated, self.measured


@dataclass(frozen=True, slots=True)
class Agreement:
    candidates: int
    spearman: float | None
    """rank correlation, 1 for the same order; None for fewer than three pairs, or if one side is constant"""
    regret: float | None
    """by how much the best of all is faster than the best of the SHORT_LIST best estimates: 0.05 is 5 %; None if no
    others were measured"""


def measured_pairs(ledger: Ledger, problem: str | None = None, gpu: str | None = None) -> list[Pair]:
    """Return the ledger's candidates that have an estimate and a trusted measurement, filtered by problem and GPU."""
    pairs = []
    for c in ledger.candidates(problem=problem, gpu=gpu):
        if c.outcome is Outcome.MEASURED:
            estimate = most_trusted([m for m in ledger.measurements(c.trial) if m.kind is Kind.ESTIMATED])
            measured = c.measurement
            if estimate and measured and estimate.tflops is not None and measured.tflops is not None:
                of = (c.trial, c.problem, c.gpu, measured.device, str(c.config["family"]))
                pairs.append(
                    Pair(*of, estimate.tflops, measured.tflops, str(measured.policy), model_of(estimate.terms))
                )
    return pairs


def of_one_model(pairs: Sequence[Pair]) -> list[Pair]:
    """Return the pairs whose estimates were predicted from machine code; those by formula if there are no others."""
    predicted = [p for p in pairs if p.model != FORMULA]
    return predicted or list(pairs)


def rank_agreement(pairs: Sequence[tuple[float, float]]) -> Agreement:
    """Compute the agreement of (estimated, measured) pairs in which greater is faster."""
    if not pairs:
        return Agreement(0, None, None)
    ordered = sorted(pairs, key=lambda pair: -pair[0])
    measured = [m for _, m in ordered]
    regret = max(measured) / max(measured[:SHORT_LIST]) - 1 if len(measured) > SHORT_LIST else None
    spearman = None
    if len(pairs) > 2:
        from scipy.stats import spearmanr  # takes longer to load than the rest of the command

        sides = list(zip(*pairs, strict=True))
        if all(len(set(side)) > 1 for side in sides):
            spearman = float(spearmanr(*sides).statistic)
    return Agreement(len(pairs), spearman, regret)
