"""Time on a GPU the candidates that a search without one left in the ledger."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from math import inf
from pathlib import Path

from evoengine.ledger.store import Ledger
from evoengine.records import Candidate, Outcome, Rejection
from evoengine.sandbox.worker_process import COMPILER_LIMITS
from evoengine.sandbox.workers import WorkerPool
from evoengine.search.evaluators import GpuEvaluator, end_of, seed_for, timed_baselines
from evoengine.search.finishing import FINALISTS, Finisher, record_finals, submit_finals
from evoengine.search.pipeline import Pipeline
from evoengine.search.recompile import with_machine_code
from evoengine.space.space import SearchSpace
from evoengine.stages.tasks import Evaluation
from evoengine.workloads.base import Target

POLL_SECONDS = 0.1


def unmeasured_candidates(ledger: Ledger, problem: str, gpu: str) -> list[Candidate]:
    """Return the candidates of the last run's kernel that no GPU has timed and nothing refuted, each source once.

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
    """Gates and times candidates in the given order; each is in the ledger when `on_finish` is called with it."""

    def __init__(
        self,
        ledger: Ledger,
        run: int,
        judge: GpuEvaluator,
        target: Target,
        seed: int,
        on_finish: Callable[[Candidate], None],
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
            for baseline in timed_baselines(self._judge.baselines()):
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
        workers = WorkerPool(1, COMPILER_LIMITS)
        try:
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
        finally:
            workers.close()

    def _finals(self) -> list[str]:
        future = submit_finals(self._ledger, self._judge, str(self._target.problem), self._target.gpu.key)
        return record_finals(self._ledger, self._run, future.result()) if future else []
