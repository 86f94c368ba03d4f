"""Candidates in flight: their proposals, the furthest stage that each reached, and what is awaited for them."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from evoengine.ledger.rows import last_verdicts
from evoengine.records import Baseline, Binary, Candidate, Judged, Plans, Rejection
from evoengine.search.evaluators import End
from evoengine.search.pipeline import Compiled, Proposed, Rendered
from evoengine.search.proposer import Proposal
from evoengine.stages.predict import Estimated
from evoengine.stages.tasks import Evaluation
from evoengine.workloads.base import Target

Reached = TypeVar("Reached", bound=Proposed, covariant=True)


@dataclass(frozen=True, slots=True)
class InFlight(Generic[Reached]):
    proposal: Proposal
    candidate: Reached
    plans: Plans | None = None
    """the gate's cases, if they were computed before"""

    @property
    def trial(self) -> int:
        return self.candidate.trial

    @property
    def occupancy(self) -> float | None:
        return self.candidate.occupancy if isinstance(self.candidate, Compiled) else None

    def as_ended(self, end: End, run: int, target: Target) -> Candidate:
        """Return the candidate as `Ledger.candidate` would read it after `end`."""
        reached, proposal = self.candidate, self.proposal
        return Candidate(
            self.trial,
            run,
            str(target.problem),
            target.gpu.key,
            proposal.config,
            end.outcome,
            end.reason,
            end.device,
            reached.source if isinstance(reached, Rendered) else None,
            reached.binary if isinstance(reached, Compiled) else None,
            **last_verdicts(end.verdicts),
            measurement=end.figure,
            occupancy=self.occupancy,
            parents=proposal.parents,
            operator=proposal.operator,
            evidence=end.evidence,
        )


@dataclass(slots=True)
class Pending:
    """The futures that a search awaits, by the task, each with the candidate that it is for."""

    baselines: set[Future[list[Baseline] | Rejection]] = field(default_factory=set)
    compiling: dict[Future[Binary | Rejection], InFlight[Rendered]] = field(default_factory=dict)
    judging: dict[Future[Evaluation | Rejection], InFlight[Compiled]] = field(default_factory=dict)
    leading: dict[Future[Judged | Rejection], Candidate] = field(default_factory=dict)
    """candidates that have led for a while, whose gate is being finished"""
    predicting: dict[Future[Estimated | Rejection], InFlight[Compiled]] = field(default_factory=dict)
    """predictions of candidates that a GPU timed"""
    awaiting: dict[Future[None], tuple[InFlight[Rendered], str]] = field(default_factory=dict)
    """candidates that another search evaluates, with the key of the evaluation"""

    @property
    def futures(self) -> set[Future[Any]]:
        return {
            *self.baselines,
            *self.compiling,
            *self.judging,
            *self.leading,
            *self.predicting,
            *self.awaiting,
        }
