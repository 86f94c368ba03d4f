"""The pipeline of a candidate: config → source → binary → verdict → figure.

A search drives it for many candidates at once, `verify` for one, `measure` from the binary on. The type of a candidate
states which stage it reached; any stage may end it with a Rejection.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path

from evoengine.errors import MachineError, UsageError
from evoengine.ledger.rows import last_verdicts
from evoengine.records import Binary, Candidate, CompiledCandidate, Config, Outcome, Plans, Rejection, Source
from evoengine.sandbox.workers import Workers
from evoengine.search.compilers import compile_in
from evoengine.search.evaluators import End, Evaluator, Job, make_plans
from evoengine.space.space import SearchSpace
from evoengine.stages.render import Fill, fill, render
from evoengine.stages.screen import screen_binary, screen_launch
from evoengine.stages.tasks import Evaluation
from evoengine.workloads.base import Target


@dataclass(frozen=True, slots=True)
class Proposed:
    trial: int
    config: Config


@dataclass(frozen=True, slots=True)
class Rendered(Proposed):
    source: Source


@dataclass(frozen=True, slots=True)
class Compiled(Rendered):
    binary: Binary
    occupancy: float

    @property
    def contender(self) -> CompiledCandidate:
        return CompiledCandidate(self.trial, self.source, self.binary, self.config)


@dataclass(frozen=True, slots=True)
class Pipeline:
    """The stages for one target; `timed` where a GPU times candidates, so that spills are left to the timing."""

    target: Target
    space: SearchSpace
    templates: Path
    judge: Evaluator
    timed: bool
    fill: Fill = fill

    def render(self, candidate: Proposed) -> Rendered | Rejection:
        """Render a candidate.

        Returns a Rejection if the template fails. Raises MachineError if the templates are gone.
        """
        try:
            source = render(self.target, self.space, candidate.config, self.templates, self.fill)
        except UsageError as error:
            folder = self.target.workload.templates() or self.templates
            if not folder.is_dir():
                raise MachineError(f"the templates folder {folder} is no longer there") from error
            return Rejection(Outcome.UNCOMPILABLE, str(error))
        return Rendered(candidate.trial, candidate.config, source)

    def screen_launch(self, candidate: Rendered) -> Rejection | None:
        """Reject a launch that cannot succeed on the GPU."""
        why = screen_launch(candidate.source.launch, self.target.gpu)
        return Rejection(Outcome.SCREENED, why) if why else None

    def compile(self, candidate: Rendered, workers: Workers) -> Compiled | Rejection:
        """Screen the launch, then compile the source in a worker process and wait for the binary."""
        found = self.screen_launch(candidate) or compile_in(workers, candidate.source, self.target.gpu.arch)
        return found if isinstance(found, Rejection) else self.compiled(candidate, found)

    def compiled(self, candidate: Rendered, binary: Binary) -> Compiled:
        """Return the candidate with the binary that a compiler made of its source, and its kernels' least occupancy."""
        launch = binary.launch or candidate.source.launch
        kernels = [(binary.of_kernel(entry), own) for entry, own in launch.kernels(candidate.source.entry)]
        occupancy = min(
            self.target.gpu.occupancy(own.threads, kernel.registers, kernel.shared_bytes + own.shared_bytes)
            for kernel, own in kernels
        )
        source = replace(candidate.source, launch=launch)
        return Compiled(candidate.trial, candidate.config, source, binary, occupancy)

    def screen_binary(self, candidate: Compiled) -> Rejection | None:
        """Reject a binary that is not worth running."""
        cost = self.space.cost(candidate.config)
        why = screen_binary(candidate.binary, candidate.source, self.target.gpu, cost, self.timed)
        return Rejection(Outcome.SCREENED, why) if why else None

    def plans(self, config: Config) -> Plans:
        return make_plans(self.space, self.target, config)

    def evaluate(
        self,
        contender: CompiledCandidate,
        seed: int,
        workers: Workers | None,
        plans: Plans | None = None,
        whole: bool = True,
    ) -> Future[Evaluation | Rejection]:
        """Gate a candidate and give its figure, on the device that judges.

        `workers` are those of the compilers, where the device has none. `plans` are what `plans` gave, where that was
        asked before. `whole` is that of `Evaluator.submit`.
        """
        plans = plans or self.plans(contender.config)
        return self.judge.submit(Job(contender, plans, self.space.cost(contender.config), seed), workers, whole)

    def ended(self, reached: Proposed, end: End, run: int = 0) -> Candidate:
        """Return a candidate as `Ledger.candidate` would read it after `end`, without parents and operator."""
        compiled = reached if isinstance(reached, Compiled) else None
        return Candidate(
            reached.trial,
            run,
            str(self.target.problem),
            self.target.gpu.key,
            reached.config,
            end.outcome,
            end.reason,
            end.device,
            reached.source if isinstance(reached, Rendered) else None,
            compiled.binary if compiled else None,
            **last_verdicts(end.verdicts),
            measurement=end.figure,
            occupancy=compiled.occupancy if compiled else None,
            evidence=end.evidence,
        )
