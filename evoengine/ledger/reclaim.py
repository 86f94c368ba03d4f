"""How candidates end that were under way when their search was killed or ended, and which are to be tried again."""

from __future__ import annotations

from datetime import UTC, datetime

from sqlalchemy import or_, select
from sqlalchemy.orm import Session, aliased

from evoengine.ledger.models import CandidateRow
from evoengine.records import DEATHS, Outcome

RETRIES = 2
"""how often a candidate is tried again, alone, that was under way when its search was killed: it may be what kills
it"""
WHY_KILLED = "was under way when the process of its search was killed"
WHY_INTERRUPTED = "was under way when its search was ended"
WHY_CRASHED = f"its search was killed {RETRIES + 1} times while it was under way"


def end_unfinished(session: Session, run: int, *, killed: bool) -> None:
    """Ends what is under way in a run that is not any more. What was killed too often ends as crashed."""
    for row in session.scalars(select(CandidateRow).where(CandidateRow.run_id == run, CandidateRow.outcome.is_(None))):
        outcome, reason = Outcome.INTERRUPTED, WHY_INTERRUPTED
        if killed and (before := kills(session, row)) >= RETRIES:
            outcome, reason = Outcome.CRASHED, WHY_CRASHED
            row.evidence = {DEATHS: [{"how": "its search was killed", "alone": n > 0} for n in range(before + 1)]}
        elif killed:
            outcome, reason = Outcome.KILLED, WHY_KILLED
        row.outcome, row.reason, row.finished_at = str(outcome), reason, datetime.now(UTC)


_ONE_DEATH = ("the worker process died (%", "the worker process ended without an answer%", "its worker was lost %")
"""how the reasons begin that evoengine up to 0.1.0 gave where one worker had died, whoever had killed it"""


def of_one_death(session: Session) -> list[CandidateRow]:
    """Trials that one death, or the end of their search, was made a verdict on: without the evidence for it."""
    one = or_(*(CandidateRow.reason.like(begins) for begins in _ONE_DEATH), CandidateRow.reason == WHY_CRASHED)
    judged = CandidateRow.outcome.in_([str(Outcome.CRASHED), str(Outcome.UNCOMPILABLE)])
    rows = session.scalars(select(CandidateRow).where(judged, one).order_by(CandidateRow.id))
    return [row for row in rows if DEATHS not in (row.evidence or {})]


def take_back(row: CandidateRow) -> None:
    """Makes of a verdict from one death what it was: no word on the kernel. It is tried again when its run goes on."""
    if row.reason == WHY_CRASHED:
        row.evidence = {DEATHS: [{"how": "its search was killed", "alone": False}] * (RETRIES + 1)}
    else:
        row.outcome, row.reason = str(Outcome.KILLED), f"{row.reason}: it did not die twice with nothing beside it"


def kills(session: Session, row: CandidateRow) -> int:
    """How many of the trials that this one is a retry of were killed; one that was interrupted says nothing."""
    found, seen = 0, {row.id}
    while row.retry_of is not None and row.retry_of not in seen:
        seen.add(row.retry_of)
        earlier = session.get(CandidateRow, row.retry_of)
        if earlier is None:
            break
        row = earlier
        found += row.outcome == Outcome.KILLED
    return found


def left_over(session: Session, run: int) -> dict[int, int]:
    """Trials of a run that are to be tried again → how often each was killed."""
    retry = aliased(CandidateRow)
    unjudged = [str(o) for o in Outcome if not o.judged]
    again = select(retry.id).where(retry.run_id == run, retry.retry_of == CandidateRow.id)
    rows = session.scalars(
        select(CandidateRow)
        .where(CandidateRow.run_id == run, CandidateRow.outcome.in_(unjudged), ~again.exists())
        .order_by(CandidateRow.id)
    )
    return {row.id: kills(session, row) + (row.outcome == Outcome.KILLED) for row in rows}
