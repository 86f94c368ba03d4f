"""Look after a whole ledger: check and mend it, take out runs, and give back space."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from typing import TYPE_CHECKING

from sqlalchemy import delete, func, or_, select, text, update
from sqlalchemy.orm import Session

from evoengine.errors import UsageError
from evoengine.ledger import chains
from evoengine.ledger.check import Fault, look_through, violated
from evoengine.ledger.checksums import Broken
from evoengine.ledger.database import empty_log, translate_errors
from evoengine.ledger.heartbeat import of_one_death, take_back
from evoengine.ledger.optuna.schema import delete_studies
from evoengine.ledger.ranking import count_all_finals, read_order, rebuild
from evoengine.ledger.runs import RUNNING
from evoengine.ledger.schema import create_views, damaged_views, drop_views, missing_indexes
from evoengine.ledger.tables import (
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

if TYPE_CHECKING:
    from evoengine.ledger.store import Ledger

OF_CANDIDATE = (ClaimRow, StandingRow, VerdictRow, MeasurementRow, ProfileRow)
OF_RUN = (BaselineRow, HeartbeatRow, CandidateRow)


def delete_runs(session: Session, runs: Sequence[int]) -> None:
    """Delete the runs and what no other run uses.

    Raises UsageError, with nothing deleted, where there is no such run or one that is running may still use one of
    them. What other runs say of their candidates stays as it is, also where it names a trial that is no longer there.
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
    """Hold off those who are about to use a source that nobody uses yet.

    SQLite's transaction has the only write lock.
    """
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


def _prune(session: Session, keep: int, before: datetime | None) -> Pruned:
    """Take out sources and machine code, as `prune` says.

    Trials of runs that go on keep theirs, and so does whatever shares a source with one that does.
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


# ── the ledger as a whole ─────────────────────────────────────────────────────────────────────────────────────────────


def find_faults(ledger: Ledger, on_stage: Callable[[str], None]) -> list[Fault]:
    """Return what is damaged or does not follow from the rest; the studies are not looked at."""
    with ledger.database.reading() as session:
        return look_through(session, on_stage)


def require_proven(ledger: Ledger, trial: int) -> None:
    """Raise MachineError where something of the trial does not hold, or a row of its run is not there."""
    with ledger.database.reading() as session:
        run = session.get_one(CandidateRow, trial).run_id
        for what in (*violated(session, trial), *chains.broken(session, run)):
            raise Broken(what)


def mend(ledger: Ledger, echo: Callable[[str], None]) -> None:
    """Derive again what follows from the rest of the ledger, and take killed runs from their processes."""
    ledger.await_killed(lambda run: True, echo)
    with ledger.database.writing() as session:
        connection = session.connection()
        for index in missing_indexes(connection):
            index.create(connection)
        if damaged_views(connection):
            drop_views(connection)
            create_views(connection)
        for row in of_one_death(session):
            take_back(row)
            rows = chains.spelt({CandidateRow.__tablename__: {row.id}})
            chains.sign(connection, row.run_id, chains.REPAIRED, rows)
        rebuild(session)


def prune(ledger: Ledger, keep: int, before: datetime | None) -> Pruned:
    """Take out the sources and machine code of all but the best `keep` of each problem and GPU.

    Only of trials that ended before that time, where one is named; most of a ledger's bytes are theirs. Configurations,
    verdicts, figures and lineage stay, and what was taken is made again where a search comes to it again.
    """
    with ledger.database.writing() as session:
        return _prune(session, keep, before)


def vacuum(ledger: Ledger) -> bool:
    """Make an SQLite file as small as it can be; return whether nobody stood in the way."""
    database = ledger.database
    if database.engine.dialect.name != "sqlite":
        return True
    with translate_errors(database.url), closing(database.engine.raw_connection()) as connection:
        try:
            connection.cursor().execute("VACUUM")
        except sqlite3.OperationalError as error:
            if "locked" in str(error):
                return False
            raise
    empty_log(database.engine)
    return True
