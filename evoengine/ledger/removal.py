"""Takes whole runs out of a ledger, with everything that is theirs alone."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import delete, select, text
from sqlalchemy.orm import Session

from evoengine.errors import UsageError
from evoengine.ledger import chains
from evoengine.ledger.models import (
    BaselineRow,
    BinaryRow,
    CandidateRow,
    ClaimRow,
    DeviceRow,
    HeartbeatRow,
    MachineCodeRow,
    MeasurementRow,
    ProfileRow,
    RankingRow,
    RunRow,
    SourceRow,
    StandingRow,
    VerdictRow,
)
from evoengine.ledger.optuna_schema import delete_studies
from evoengine.ledger.ranking import count_all_finals
from evoengine.ledger.runs import RUNNING

OF_CANDIDATE = (ClaimRow, StandingRow, VerdictRow, MeasurementRow, ProfileRow)
OF_RUN = (BaselineRow, HeartbeatRow, CandidateRow)


def delete_runs(session: Session, runs: Sequence[int]) -> None:
    """Deletes the runs and what no other run uses.

    Raises UsageError, with nothing deleted, where there is no such run or one that is running may still use one
    of them.
    What other runs say of their candidates stays as it is, also where it names a trial that is no longer there.
    """
    _lock(session)
    _require_removable(session, runs)
    candidates = select(CandidateRow.id).where(CandidateRow.run_id.in_(runs))
    trials = session.scalars(candidates).all()
    for row in OF_CANDIDATE:
        session.execute(delete(row).where(row.candidate_id.in_(candidates)))
    for owned in OF_RUN:
        session.execute(delete(owned).where(owned.run_id.in_(runs)))
    session.execute(delete(RunRow).where(RunRow.id.in_(runs)))
    count_all_finals(session.connection())
    chains.remove(session, runs, trials)
    for run in runs:
        delete_studies(session.connection(), run)
    delete_unused(session)


def _lock(session: Session) -> None:
    """Holds off those who are about to use a source that nobody uses yet. SQLite's transaction has the only write
    lock."""
    if session.get_bind().dialect.name == "postgresql":
        names = ", ".join(
            row.__tablename__ for row in (RunRow, DeviceRow, SourceRow, BinaryRow, MachineCodeRow, RankingRow)
        )
        session.execute(text(f"LOCK TABLE {names} IN SHARE ROW EXCLUSIVE MODE"))


def _require_removable(session: Session, runs: Sequence[int]) -> None:
    known = {row.id: row for row in session.scalars(select(RunRow))}
    if missing := sorted(set(runs) - set(known)):
        held = f"its runs are numbered {min(known)} to {max(known)}" if known else "it holds none"
        raise UsageError(f"the ledger has no run {missing[0]}: {held} (evoengine runs lists them)")
    living = [row for row in known.values() if row.status == RUNNING]
    for run in runs:
        # a search times the best candidates of earlier runs against its own
        target = (known[run].problem, known[run].gpu)
        for row in living:
            if row.id == run:
                raise UsageError(f"run {run} is still going on; end it, or wait until it has ended, then remove it")
            if (row.problem, row.gpu) == target:
                raise UsageError(
                    f"run {run} cannot be removed while run {row.id} works on the same problem and GPU, as that one "
                    "may time its candidates; wait until it has ended"
                )


def delete_unused(session: Session) -> None:
    """Binaries, sources, machine code, rankings and devices that no run uses."""
    compiled = select(CandidateRow.id).where(CandidateRow.binary_id == BinaryRow.id)
    session.execute(delete(BinaryRow).where(~compiled.exists()))
    rendered = select(CandidateRow.id).where(CandidateRow.source_sha256 == SourceRow.sha256)
    kept = select(BinaryRow.id).where(BinaryRow.source_sha256 == SourceRow.sha256)
    session.execute(delete(SourceRow).where(~rendered.exists(), ~kept.exists()))
    shared = select(BinaryRow.id).where(BinaryRow.cubin_sha256 == MachineCodeRow.sha256)
    session.execute(delete(MachineCodeRow).where(~shared.exists()))
    ranked = select(StandingRow.candidate_id).where(StandingRow.ranking_id == RankingRow.id)
    session.execute(delete(RankingRow).where(~ranked.exists()))
    used = select(RunRow.id).where(RunRow.device_id == DeviceRow.id)
    session.execute(delete(DeviceRow).where(~used.exists()))
