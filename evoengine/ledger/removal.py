"""Takes whole runs out of a ledger, with everything that is theirs alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import islice

from sqlalchemy import delete, func, or_, select, text, update
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
from evoengine.ledger.optuna.schema import delete_studies
from evoengine.ledger.ranking import count_all_finals, read_order
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


# ── pruning ───────────────────────────────────────────────────────────────────────────────────────────────────────────


BATCH = 500


@dataclass(frozen=True, slots=True)
class Pruned:
    sources: int
    binaries: int
    packed_bytes: int


def prune(session: Session, keep: int, before: datetime | None) -> Pruned:
    """Of finished trials that are not among the best `keep` of their problem and GPU, and that ended before that time
    where one is named. Trials of runs that go on keep theirs, and so does whatever shares a source with one that does.
    """
    held = _packed_bytes(session)
    kept = _sources_of_best(session, keep)
    in_use = [CandidateRow.outcome.is_(None), RunRow.status == RUNNING]
    if before is not None:
        in_use.append(or_(CandidateRow.finished_at.is_(None), CandidateRow.finished_at >= before))
    using = select(CandidateRow.id).join(RunRow).where(CandidateRow.source_sha256 == SourceRow.sha256, or_(*in_use))
    unused = select(SourceRow.sha256).where(SourceRow.packed.is_not(None), ~using.exists())
    wanted = iter([sha256 for sha256 in session.scalars(unused).all() if sha256 not in kept])
    sources = 0
    while batch := list(islice(wanted, BATCH)):
        session.execute(update(SourceRow).where(SourceRow.sha256.in_(batch)).values(packed=None))
        sources += len(batch)
    made_of = select(BinaryRow.id).join(SourceRow, SourceRow.sha256 == BinaryRow.source_sha256)
    needed = made_of.where(BinaryRow.cubin_sha256 == MachineCodeRow.sha256, SourceRow.packed.is_not(None))
    binaries = session.scalars(select(func.count()).select_from(MachineCodeRow).where(~needed.exists())).one()
    session.execute(delete(MachineCodeRow).where(~needed.exists()))
    chains.sign(session.connection(), chains.LEDGER, chains.PRUNED, f"{sources} sources, {binaries} binaries")
    return Pruned(sources, binaries, held - _packed_bytes(session))


def _sources_of_best(session: Session, keep: int) -> set[str | None]:
    kept: set[str | None] = set()
    for problem, gpu in session.execute(select(RunRow.problem, RunRow.gpu).distinct()).all():
        best = iter(read_order(session, problem, gpu, keep))
        while batch := list(islice(best, BATCH)):
            kept |= set(session.scalars(select(CandidateRow.source_sha256).where(CandidateRow.id.in_(batch))))
    return kept


def _packed_bytes(session: Session) -> int:
    tables = (SourceRow, MachineCodeRow)
    return sum(session.scalar(select(func.sum(func.length(row.packed)))) or 0 for row in tables)
