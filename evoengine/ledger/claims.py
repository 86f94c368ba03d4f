"""Who evaluates what: one trial for each key, whatever search it is of, and what others take over from it.

A claim holds as long as its trial is in flight in a run that lives; its trial's end is what is known of the key from
then on. A trial that was killed or interrupted leaves its claim to who comes next, and so does one that ended because
processes died: of those it is not certain what ended them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from sqlalchemy import Connection, bindparam, delete, select, text, update
from sqlalchemy.orm import Session

from evoengine.errors import UsageError
from evoengine.ledger import integrity
from evoengine.ledger.integrity import checked_columns, insert_new
from evoengine.ledger.ranking import update_standing
from evoengine.ledger.rows import OF_SOURCE, to_record
from evoengine.ledger.tables import Base, CandidateRow, ClaimRow, MeasurementRow, RunRow, UtcDateTime, VerdictRow
from evoengine.ledger.transactions import Database, patient
from evoengine.records import DEATHS, EXECUTOR, RUNNING, Kind, Measurement, Outcome


@dataclass(frozen=True, slots=True)
class Claim:
    """What a trial found when it claimed a key."""

    trial: int
    """that evaluates it: the one that asked, or the one to wait for or to take over from"""
    known: bool
    """whether that one has ended, and its end says something of the kernel"""


def claim(connection: Connection, key: str, trial: int) -> Claim:
    """Make the trial the one that evaluates the key, unless another does or did."""
    if insert_new(connection, ClaimRow, {"key": key, "candidate_id": trial}) is not None:
        return Claim(trial, False)
    held = (
        select(ClaimRow.candidate_id, CandidateRow.outcome, CandidateRow.evidence, RunRow.status)
        .join(CandidateRow, CandidateRow.id == ClaimRow.candidate_id)
        .join(RunRow, RunRow.id == CandidateRow.run_id)
        .where(ClaimRow.key == key)
    )
    holder, outcome, evidence, status = connection.execute(held).one()
    if outcome is not None and Outcome(outcome).reusable and DEATHS not in (evidence or {}):
        return Claim(holder, True)
    if outcome is None and status == RUNNING:
        return Claim(holder, False)
    taking = update(ClaimRow).where(ClaimRow.key == key, ClaimRow.candidate_id == holder)
    if connection.scalar(taking.values(candidate_id=trial, ended_at=None).returning(ClaimRow.key)) is not None:
        return Claim(trial, False)
    return claim(connection, key, trial)  # somebody else was quicker


def claim_again(connection: Connection, key: str, trial: int) -> None:
    """Make the trial the one that is known of the key from now on."""
    if claim(connection, key, trial).trial != trial:
        connection.execute(update(ClaimRow).where(ClaimRow.key == key).values(candidate_id=trial, ended_at=None))


_END = text("UPDATE claims SET ended_at = :now WHERE candidate_id = :trial AND ended_at IS NULL").bindparams(
    bindparam("now", type_=UtcDateTime)
)
"""of every trial; composing it each time costs more than its execution"""


def end_claims(connection: Connection, trial: int, now: datetime) -> None:
    connection.execute(_END, {"trial": trial, "now": now})


class Claims:
    """Claims of a ledger."""

    def __init__(self, database: Database) -> None:
        self.database = database

    @patient
    def claim(self, key: str, trial: int) -> Claim:
        """Claim a key whose holder is no longer in flight."""
        with self.database.write_connection() as connection:
            return claim(connection, key, trial)

    def revoke(self, trial: int) -> bool:
        """Have the next search that finds the trial's kernel evaluate it; return whether any would have taken it over.

        Neither its end nor that of the trial that it took its own from is taken over any more. Raises UsageError where
        there is no such trial, or it is in flight.
        """
        with self.database.writing() as session:
            row = session.get(CandidateRow, trial)
            if row is None:
                raise UsageError(f"there is no trial {trial}")
            if row.outcome is None:
                raise UsageError(f"trial {trial} is in flight: its claim says who evaluates its kernel")
            of_either = ClaimRow.candidate_id.in_([trial, row.taken_from or trial])
            revoked = session.scalars(delete(ClaimRow).where(of_either).returning(ClaimRow.candidate_id)).all()
            if revoked:
                rows = integrity.spelt({CandidateRow.__tablename__: set(revoked)})
                integrity.sign(session.connection(), row.run_id, integrity.REVOKED, rows)
        return bool(revoked)

    @patient
    def decided(self, trials: Sequence[int]) -> set[int]:
        """Return which of the trials are no longer in flight: ended, removed, or of a run that is."""
        in_flight = (
            select(CandidateRow.id)
            .join(RunRow, RunRow.id == CandidateRow.run_id)
            .where(CandidateRow.id.in_(trials), CandidateRow.outcome.is_(None), RunRow.status == RUNNING)
        )
        return set(trials) - {trial for (trial,) in self.database.rows(in_flight)}

    @patient
    def take_over(self, key: str, original: int, trial: int, *, timed: bool) -> Outcome:
        """End a trial as another one ended that had the same key; return its outcome.

        Verdicts and figures come along as they were at that end, each with the time at which it was taken: a GPU that
        timed it later under another driver, and finals against others, are not of this evaluation. A rejection that
        came later is: a result that was once wrong is wrong.
        """
        with self.database.writing() as session:
            self.database.finished.append(trial)
            return _take_over(session, key, original, trial, timed)


def _take_over(session: Session, key: str, original: int, trial: int, timed: bool) -> Outcome:
    was, row, now = session.get_one(CandidateRow, original), session.get_one(CandidateRow, trial), datetime.now(UTC)
    ended_at = session.scalars(select(ClaimRow.ended_at).where(ClaimRow.key == key)).one() or now
    rejected = not Outcome(str(was.outcome)).correct
    kept_verdicts = [v for v in was.verdicts if rejected or v.taken_at <= ended_at]
    kept_figures = [f for f in was.measurements if _is_of_evaluation(f, ended_at, timed)]
    session.add_all([_copy(VerdictRow, v, trial) for v in kept_verdicts])
    session.add_all([_copy(MeasurementRow, f, trial) for f in kept_figures])
    row.outcome, row.reason = str(was.outcome), was.reason
    if was.outcome == Outcome.MEASURED and not timed:  # a GPU timed it later
        row.outcome = str(Outcome.ESTIMATED if kept_figures else Outcome.UNRANKED)
        row.reason = None
    row.taken_from, row.gate_version = was.taken_from or original, was.gate_version
    row.binary_id, row.occupancy = was.binary_id, was.occupancy
    for name in OF_SOURCE:  # a launch may be known only from the binary
        setattr(row, name, getattr(was, name))
    row.device = next((v.device for v in reversed(kept_verdicts) if v.device != EXECUTOR), None)
    row.finished_at = now
    session.flush()
    update_standing(session.connection(), trial)
    return Outcome(row.outcome)


def _is_of_evaluation(figure: MeasurementRow, ended_at: datetime, timed: bool) -> bool:
    read = to_record(Measurement, figure)
    if read.kind is Kind.ESTIMATED:  # of what was timed, a prediction may come in after the time
        return True
    return timed and figure.taken_at <= ended_at and "place" not in read.terms


def _copy(table: type[Base], row: Base, trial: int) -> Base:
    values = {name: getattr(row, name) for name in checked_columns(table) if name != "candidate_id"}
    return table(candidate_id=trial, **values)
