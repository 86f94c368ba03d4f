"""Runs as a list shows them: how many trials, how many of them correct, and the best."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass

from sqlalchemy import func, select
from sqlalchemy.orm import Session, joinedload

from evoengine.ledger.listing import Trial, read_trials
from evoengine.ledger.models import CandidateRow, RunRow
from evoengine.ledger.ranking import read_order
from evoengine.ledger.rows import to_run
from evoengine.ledger.runs import Run
from evoengine.records import Outcome


@dataclass(frozen=True, slots=True)
class RunSummary:
    run: Run
    trials: int
    correct: int
    best: Trial | None
    """of the run's own, as `Ledger.best` ranks them; None where none is ranked"""


def read_summaries(session: Session) -> Iterator[RunSummary]:
    """Oldest first."""
    outcomes = select(CandidateRow.run_id, CandidateRow.outcome, func.count()).group_by(
        CandidateRow.run_id, CandidateRow.outcome
    )
    counts: dict[int, dict[str | None, int]] = {}
    for run, outcome, trials in session.execute(outcomes):
        counts.setdefault(run, {})[outcome] = trials
    for row in session.scalars(select(RunRow).options(joinedload(RunRow.device)).order_by(RunRow.id)):
        own = counts.get(row.id, {})
        correct = sum(own.get(str(outcome), 0) for outcome in Outcome if outcome.correct)
        yield RunSummary(to_run(row), sum(own.values()), correct, _best(session, row) if correct else None)


def _best(session: Session, run: RunRow) -> Trial | None:
    order = read_order(session, run.problem, run.gpu, 1, run.id)
    best = select(CandidateRow.id).where(CandidateRow.id.in_(order))
    return next(read_trials(lambda: nullcontext(session), best, resources=False), None)
