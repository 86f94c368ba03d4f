"""Look after a whole ledger: find what is not as written or does not follow from the rest, repair it, remove runs."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sqlalchemy import create_engine, delete, exists, func, or_, select, text, update
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session
from sqlalchemy.pool import NullPool

from evoengine.errors import UsageError
from evoengine.ledger import integrity
from evoengine.ledger.integrity import Broken, Damaged, RowReader, broken
from evoengine.ledger.optuna.schema import TABLES as OPTUNA_TABLES
from evoengine.ledger.optuna.schema import delete_studies
from evoengine.ledger.ranking import check_standings, count_all_finals, read_order, rebuild
from evoengine.ledger.rows import BATCH, batches, unpacked
from evoengine.ledger.runs import find_suspects, of_one_death, take_back
from evoengine.ledger.schema import Missing, create_views, damaged_views, drop_views, find_missing
from evoengine.ledger.tables import (
    Base,
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
from evoengine.records import EXECUTOR, RUNNING
from evoengine.text import spans

if TYPE_CHECKING:
    from evoengine.ledger.store import Ledger

CHECKED_TRIALS = 2000
"""a ledger of more is not checked when it is opened: that would take longer than most commands do"""
OF_LARGE: tuple[type[Base], ...] = (RunRow, BaselineRow)
"""tables that are checked nevertheless: they have few rows, by which many others are chosen"""
MOST_OF_A_TABLE = 5
"""faults that are reported of one table"""


@dataclass(frozen=True, slots=True)
class Fault:
    what: str
    """a sentence"""
    repairable: bool
    """whether it can be made again from the rest of the ledger"""


def find_faults(ledger: Ledger, on_stage: Callable[[str], None]) -> list[Fault]:
    """Return what is damaged in the ledger's own tables or does not follow from the rest; the studies are left out.

    `on_stage` is told what is being checked. Nothing is written.
    """
    with ledger.database.reading() as session:
        _stand_still(session)
        return _look_through(session, on_stage)


def _look_through(session: Session, on_stage: Callable[[str], None]) -> list[Fault]:
    on_stage("checking the schema")
    missing = find_missing(session.connection())
    faults = [Fault(what, repairable=False) for what in _unreadable(missing)]
    if faults:
        return faults  # what follows reads them
    for index in missing.indexes:
        assert index.table is not None  # it is one of a table's
        faults.append(Fault(f"the index {index.name} of the table {index.table.name} is missing", repairable=True))
    for view, wrong in sorted(damaged_views(session.connection()).items()):
        faults.append(Fault(f"the view {view} {wrong}", repairable=True))
    for name, look in {"the file": _of_file, **_looks(), "chains": broken}.items():
        on_stage(f"checking {name}")
        faults += [Fault(what, repairable=False) for what in islice(look(session), MOST_OF_A_TABLE)]
    if not all(fault.repairable for fault in faults):
        return faults  # what follows from damaged rows is unknown
    if condemned := [row.id for row in of_one_death(session)]:
        faults.append(Fault(f"{spans(condemned)}: rejected because one process died, whoever had ended it", True))
    on_stage("checking what must hold")
    faults += [Fault(what, repairable=False) for what in islice(violated(session), MOST_OF_A_TABLE)]
    on_stage("checking standings")
    try:
        check_standings(session)
    except Damaged as damaged:
        faults.append(Fault(f"the stored ranking does not match the figures: {damaged}", repairable=True))
    for run in find_suspects(session):
        faults.append(Fault(f"run {run} is marked as running, but its process no longer sends heartbeats", True))
    return faults


def _looks() -> dict[str, Callable[[Session], Iterator[str]]]:
    """Return by table what finds its rows that are not what was written."""
    rows: dict[str, Callable[[Session], Iterator[str]]] = {r.__tablename__: partial(_of_rows, row=r) for r in CHECKED}
    return rows | {r.__tablename__: partial(_of_blobs, row=r) for r in (SourceRow, MachineCodeRow)}


def check_small(session: Session) -> None:
    """Check rows, references, chains and standings, where looking takes a moment: whoever opens a ledger does.

    Raises Damaged.
    """
    _stand_still(session)
    is_small = (session.scalar(select(func.max(CandidateRow.id))) or 0) <= CHECKED_TRIALS
    for checked in CHECKED if is_small else OF_LARGE:
        if fault := next(_of_rows(session, checked), None):
            raise Broken(fault)
    if not is_small:
        return
    for look in (_references, broken):
        if fault := next(look(session), None):
            raise Broken(fault)
    check_standings(session)


def _stand_still(session: Session) -> None:
    """Have the transaction see one state of the ledger, whatever is committed meanwhile; SQLite's does so by itself."""
    if session.get_bind().dialect.name == "postgresql":
        session.execute(text("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ"))


def _unreadable(missing: Missing) -> Iterator[str]:
    for name in missing.tables:
        whose = " of Optuna's, which keeps the studies," if name in OPTUNA_TABLES else ""
        yield f"the table {name}{whose} is missing"
    for column in missing.columns:
        yield f"the column {column.name} of the table {column.table.name} is missing"


def _of_file(session: Session) -> Iterator[str]:
    if session.get_bind().dialect.name != "sqlite":
        return  # PostgreSQL holds both itself
    for found in session.scalars(text(f"PRAGMA integrity_check({MOST_OF_A_TABLE})")):
        if found != "ok":
            yield f"SQLite finds the file damaged: {found}"
    yield from _references(session)


def _references(session: Session) -> Iterator[str]:
    if session.get_bind().dialect.name != "sqlite":
        return
    for table, row, parent, _ in session.execute(text("PRAGMA foreign_key_check")):
        yield f"row {row} of the table {table} refers to a row of {parent} that does not exist"


def _of_rows(session: Session, row: type[Base]) -> Iterator[str]:
    table, reader = row.__table__, RowReader(row, ())
    first, last = session.execute(select(func.min(table.c.id), func.max(table.c.id))).one()
    for begin in range(first or 1, (last or 0) + 1, BATCH):
        end = begin + BATCH - 1
        try:
            rows: Any = session.execute(select(*reader.columns).where(table.c.id.between(begin, end)))
            for values in rows:
                try:
                    reader.read(values)
                except Damaged as damaged:
                    yield str(damaged)
        except READ_ERRORS as error:
            yield f"a value of the rows {begin} to {end} of the table {row.__tablename__} cannot be read: {error}"


def _of_blobs(session: Session, row: type[SourceRow] | type[MachineCodeRow]) -> Iterator[str]:
    last = ""
    while True:
        of_batch = select(row.sha256, row.packed).where(row.sha256 > last).order_by(row.sha256).limit(BATCH // 10)
        found = session.execute(of_batch).all()
        for sha256, packed in found:
            try:
                if packed is not None:
                    unpacked(packed, row, sha256)
            except Damaged as damaged:
                yield str(damaged)
        if not found:
            return
        last = found[-1][0]


# ── what must hold ────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Invariant:
    holds: str
    """of every trial, in a sentence"""
    broken: str
    """a condition in SQL: it is broken for the trial `c`, of the run `r`"""


_PASSED = (
    "EXISTS (SELECT 1 FROM verdicts p WHERE p.candidate_id = c.id AND p.outcome IS NULL AND p.short_only IS NULL"
    " AND CAST(p.cases AS text) <> '[]')"
)
_LAST_VERDICT = f"SELECT max(v.id) FROM verdicts v WHERE v.candidate_id = c.id AND v.device <> '{EXECUTOR}'"
_REFUTED = f"EXISTS (SELECT 1 FROM verdicts f WHERE f.id = ({_LAST_VERDICT}) AND f.outcome IS NOT NULL)"
_FIGURE = "EXISTS (SELECT 1 FROM measurements m WHERE m.candidate_id = c.id AND m.kind = c.outcome)"
_OWN = "r.imported_from IS NULL"
"""what other tuners say of their kernels is theirs to prove"""
_UNNAMED_DEVICES = "SELECT d.id FROM devices d WHERE NOT EXISTS (SELECT 1 FROM runs r WHERE r.device_id = d.id)"
"""each is written with its first run and removed with its last, so that runs note which devices there are"""

INVARIANTS = (
    Invariant(
        "a correct trial passed the gate, case by case",
        f"{_OWN} AND c.outcome IN ('measured', 'estimated', 'unranked') AND (NOT {_PASSED} OR {_REFUTED})",
    ),
    Invariant(
        "a ranked trial has a figure of the kind that its outcome names",
        f"c.outcome IN ('measured', 'estimated', 'recorded') AND NOT {_FIGURE}",
    ),
    Invariant(
        "an incorrect trial has a verdict that says so",
        f"{_OWN} AND c.outcome = 'incorrect' AND NOT EXISTS"
        " (SELECT 1 FROM verdicts v WHERE v.candidate_id = c.id AND v.outcome IS NOT NULL)",
    ),
    Invariant(
        "a trial whose end was taken over has the source of the trial that it names, which evaluated it",
        "c.taken_from IS NOT NULL AND EXISTS (SELECT 1 FROM candidates o WHERE o.id = c.taken_from AND"
        " (o.taken_from IS NOT NULL OR coalesce(o.source_sha256, '') <> coalesce(c.source_sha256, '')))",
    ),
    Invariant(
        "a trial that tries another one again has its configuration, and that one was cut short",
        "c.retry_of IS NOT NULL AND EXISTS (SELECT 1 FROM candidates o WHERE o.id = c.retry_of AND"
        " (o.config_key <> c.config_key OR coalesce(o.outcome, '') NOT IN ('killed', 'interrupted')))",
    ),
    Invariant(
        "a trial has the binary of its own source",
        "c.binary_id IS NOT NULL AND NOT EXISTS (SELECT 1 FROM binaries b WHERE b.id = c.binary_id"
        " AND b.source_sha256 = c.source_sha256)",
    ),
    Invariant(
        "a duplicate comes after a trial of its run with the same source",
        f"{_OWN} AND c.outcome = 'duplicate' AND NOT EXISTS (SELECT 1 FROM candidates o WHERE o.run_id = c.run_id"
        " AND o.source_sha256 = c.source_sha256 AND o.id < c.id)",
    ),
    Invariant("a trial with an outcome says when it ended", "c.outcome IS NOT NULL AND c.finished_at IS NULL"),
)


def violated(session: Session, trial: int | None = None) -> Iterator[str]:
    """Yield a sentence for each trial and device, or for that trial, of which something does not hold."""
    of_one = "" if trial is None else " AND c.id = :trial"
    named = {} if trial is None else {"trial": trial}
    for invariant in INVARIANTS:
        query = f"SELECT c.id FROM candidates c JOIN runs r ON r.id = c.run_id WHERE {invariant.broken}{of_one}"
        for number in session.scalars(text(f"{query} ORDER BY c.id"), named):
            yield f"trial {number} violates an invariant: {invariant.holds}"
    yield from _without_origin(session, trial)
    if trial is None:
        for device in session.scalars(text(f"{_UNNAMED_DEVICES} ORDER BY d.id")):
            yield f"device {device} violates an invariant: a device belongs to a run"


def _without_origin(session: Session, trial: int | None) -> Iterator[str]:
    """Yield a sentence for each trial whose result was taken from a trial that is missing and was never removed."""
    query = "SELECT c.id, c.taken_from FROM candidates c WHERE c.taken_from IS NOT NULL"
    query += "" if trial is None else " AND c.id = :trial"
    query += " AND NOT EXISTS (SELECT 1 FROM candidates o WHERE o.id = c.taken_from) ORDER BY c.id"
    named = {} if trial is None else {"trial": trial}
    orphans = session.execute(text(query), named).all()
    removed = integrity.removed(session, CandidateRow.__tablename__) if orphans else set()
    for number, origin in orphans:
        if origin not in removed:
            yield f"trial {number} reuses the outcome of trial {origin}, which is missing and was not removed"


# ── damage in a file ──────────────────────────────────────────────────────────────────────────────────────────────────


CHECKED: tuple[type[Base], ...] = (
    *(DeviceRow, RunRow, BinaryRow, CandidateRow),
    *(VerdictRow, MeasurementRow, BaselineRow, ProfileRow),
)
READ_ERRORS = (AttributeError, KeyError, LookupError, OverflowError, TypeError, ValueError)
"""what reading a damaged value may raise, and a fault of the program too: `find_damage` decides which it was"""


def find_damage(path: Path) -> str | None:
    """Return what the first row of the file is that is not what was written, as a sentence.

    Raises sqlite3.Error where the file itself is damaged, or the text of its schema.
    """

    def connect() -> sqlite3.Connection:
        connection = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)
        # what is not text is found like any damage
        connection.text_factory = lambda stored: stored.decode(errors="replace")
        return connection

    engine = create_engine("sqlite://", creator=connect, poolclass=NullPool)
    try:
        with Session(engine) as session:
            if found := next(chain.from_iterable(look(session) for look in _looks().values()), None):
                return found
            (fault,) = session.scalars(text("PRAGMA integrity_check(1)"))
    except DBAPIError as error:
        raise error.orig or error from error
    if fault != "ok":
        raise sqlite3.DatabaseError(f"malformed: {fault}")
    return None


def delete_runs(session: Session, runs: Sequence[int]) -> None:
    """Delete the runs and what no other run uses.

    Raises UsageError, with nothing deleted, where there is no such run or one that is running may still use one of
    them. What other runs say of their candidates stays as it is, also where it names a trial that is no longer there.
    """
    _lock(session)
    _require_removable(session, runs)
    candidates = select(CandidateRow.id).where(CandidateRow.run_id.in_(runs))
    trials = session.scalars(candidates).all()
    for row in (ClaimRow, StandingRow, VerdictRow, MeasurementRow, ProfileRow):
        session.execute(delete(row).where(row.candidate_id.in_(candidates)))
    for owned in (BaselineRow, HeartbeatRow, CandidateRow):
        session.execute(delete(owned).where(owned.run_id.in_(runs)))
    session.execute(delete(RunRow).where(RunRow.id.in_(runs)))
    count_all_finals(session.connection())
    integrity.remove(session, runs, trials)
    for run in runs:
        delete_studies(session.connection(), run)
    delete_unused(session)


def _lock(session: Session) -> None:
    """Lock the tables against writers that are about to use a source that no row uses yet.

    SQLite's transaction has the only write lock.
    """
    if session.get_bind().dialect.name == "postgresql":
        rows = (RunRow, DeviceRow, SourceRow, BinaryRow, MachineCodeRow, RankingRow)
        names = ", ".join(row.__tablename__ for row in rows)
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
    """Delete binaries, sources, machine code, rankings and devices that no run uses."""
    rendered = exists().where(CandidateRow.source_sha256 == SourceRow.sha256)
    compiled = exists().where(BinaryRow.source_sha256 == SourceRow.sha256)
    for row, *used in (
        (BinaryRow, exists().where(CandidateRow.binary_id == BinaryRow.id)),
        (SourceRow, rendered, compiled),
        (MachineCodeRow, exists().where(BinaryRow.cubin_sha256 == MachineCodeRow.sha256)),
        (RankingRow, exists().where(StandingRow.ranking_id == RankingRow.id)),
        (DeviceRow, exists().where(RunRow.device_id == DeviceRow.id)),
    ):
        session.execute(delete(row).where(*(~use for use in used)))


# ── pruning ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Pruned:
    sources: int
    binaries: int
    packed_bytes: int


def prune(ledger: Ledger, keep: int, before: datetime | None) -> Pruned:
    """Take out the sources and machine code of all but the best `keep` of each problem and GPU.

    Only of trials that ended before that time, where one is named; most of a ledger's bytes are theirs. Configurations,
    verdicts, figures and lineage stay, and what was taken is made again where a search comes to it again. Trials of
    runs that go on keep theirs, and so does whatever shares a source with one that does.
    """
    with ledger.database.writing() as session:
        return _prune(session, keep, before)


def _prune(session: Session, keep: int, before: datetime | None) -> Pruned:
    held = _packed_bytes(session)
    kept: set[str | None] = set()
    for problem, gpu in session.execute(select(RunRow.problem, RunRow.gpu).distinct()).all():
        for best in batches(read_order(session, problem, gpu, keep)):
            kept |= set(session.scalars(select(CandidateRow.source_sha256).where(CandidateRow.id.in_(best))))
    in_use = [CandidateRow.outcome.is_(None), RunRow.status == RUNNING]
    if before is not None:
        in_use.append(or_(CandidateRow.finished_at.is_(None), CandidateRow.finished_at >= before))
    using = select(CandidateRow.id).join(RunRow).where(CandidateRow.source_sha256 == SourceRow.sha256, or_(*in_use))
    unused = select(SourceRow.sha256).where(SourceRow.packed.is_not(None), ~using.exists())
    sources = 0
    for batch in batches([sha256 for sha256 in session.scalars(unused).all() if sha256 not in kept]):
        session.execute(update(SourceRow).where(SourceRow.sha256.in_(batch)).values(packed=None))
        sources += len(batch)
    made_of = select(BinaryRow.id).join(SourceRow, SourceRow.sha256 == BinaryRow.source_sha256)
    needed = made_of.where(BinaryRow.cubin_sha256 == MachineCodeRow.sha256, SourceRow.packed.is_not(None))
    binaries = session.scalars(select(func.count()).select_from(MachineCodeRow).where(~needed.exists())).one()
    session.execute(delete(MachineCodeRow).where(~needed.exists()))
    integrity.sign(session.connection(), integrity.LEDGER, integrity.PRUNED, f"{sources} sources, {binaries} binaries")
    return Pruned(sources, binaries, held - _packed_bytes(session))


def _packed_bytes(session: Session) -> int:
    tables = (SourceRow, MachineCodeRow)
    return sum(session.scalar(select(func.sum(func.length(row.packed)))) or 0 for row in tables)


# ── repaired ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def require_proven(ledger: Ledger, trial: int) -> None:
    """Raise MachineError if something of the trial does not hold, or a row of its run is not there."""
    with ledger.database.reading() as session:
        run = session.get_one(CandidateRow, trial).run_id
        for what in (*violated(session, trial), *integrity.broken(session, run)):
            raise Broken(what)


def repair_ledger(ledger: Ledger, echo: Callable[[str], None]) -> None:
    """Derive again what follows from the rest of the ledger, and take killed runs from their processes."""
    ledger.await_killed(lambda run: True, echo)
    with ledger.database.writing() as session:
        connection = session.connection()
        for index in find_missing(connection).indexes:
            index.create(connection)
        if damaged_views(connection):
            drop_views(connection)
            create_views(connection)
        for row in of_one_death(session):
            take_back(row)
            rows = integrity.spelt({CandidateRow.__tablename__: {row.id}})
            integrity.sign(connection, row.run_id, integrity.REPAIRED, rows)
        rebuild(session)
