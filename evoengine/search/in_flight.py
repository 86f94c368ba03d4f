"""A candidate in flight: its proposal, and the furthest stage of the pipeline that it reached."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from evoengine.ledger.rows import last_verdicts
from evoengine.records import Candidate, Plans
from evoengine.search.evaluators import End
from evoengine.search.pipeline import Compiled, Proposed, Rendered
from evoengine.search.proposer import Proposal
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
