"""Looks through a whole ledger: what in it is not as it was written, or does not follow from the rest.

`evoengine db check` says what was found, and `Ledger.mend` makes again what can be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

from sqlalchemy import func, inspect, select, text
from sqlalchemy.orm import Session

from evoengine.ledger.chains import broken
from evoengine.ledger.checksums import Broken, Damaged, RowReader
from evoengine.ledger.heartbeat import find_suspects
from evoengine.ledger.integrity import CHECKED, READ_ERRORS
from evoengine.ledger.invariants import violated
from evoengine.ledger.listing import BATCH
from evoengine.ledger.models import Base, BaselineRow, CandidateRow, MachineCodeRow, RunRow, SourceRow
from evoengine.ledger.optuna_schema import TABLES as OPTUNA_TABLES
from evoengine.ledger.ranking import check_standings
from evoengine.ledger.reclaim import of_one_death
from evoengine.ledger.rows import unpacked
from evoengine.ledger.schema import missing_columns, missing_indexes
from evoengine.ledger.views import damaged_views
from evoengine.text import spans

CHECKED_TRIALS = 2000
"""a ledger of more is not looked through when it is opened: that would take longer than most commands do"""
OF_LARGE: tuple[type[Base], ...] = (RunRow, BaselineRow)
"""tables that are looked through nevertheless: they have few rows, by which many others are chosen"""
MOST_OF_A_TABLE = 5
"""faults that are told of one table"""


@dataclass(frozen=True, slots=True)
class Fault:
    what: str
    """a sentence"""
    mended: bool
    """whether it can be made again from the rest of the ledger"""


def find_faults(session: Session, on_stage: Callable[[str], None]) -> list[Fault]:
    """All of the ledger's own tables; `on_stage` is told what is being looked at. Nothing is written."""
    _stand_still(session)
    on_stage("checking the schema")
    faults = [Fault(what, mended=False) for what in _missing(session)]
    if faults:
        return faults  # what follows reads them
    for index in missing_indexes(session.connection()):
        assert index.table is not None  # it is one of a table's
        faults.append(Fault(f"the index {index.name} of the table {index.table.name} is not there", mended=True))
    for view, wrong in sorted(damaged_views(session.connection()).items()):
        faults.append(Fault(f"the view {view} {wrong}", mended=True))
    stages: dict[str, Callable[[Session], Iterator[str]]] = {"the file": _of_file}
    for checked in CHECKED:
        stages[checked.__tablename__] = partial(_of_rows, row=checked)
    for packed in (SourceRow, MachineCodeRow):
        stages[packed.__tablename__] = partial(_of_blobs, row=packed)
    stages["chains"] = broken
    for name, look in stages.items():
        on_stage(f"checking {name}")
        faults += [Fault(what, mended=False) for what in islice(look(session), MOST_OF_A_TABLE)]
    if not all(fault.mended for fault in faults):
        return faults  # what follows from damaged rows nobody can tell
    if condemned := [row.id for row in of_one_death(session)]:
        faults.append(Fault(f"{spans(condemned)}: rejected because one process died, whoever had ended it", True))
    on_stage("checking what must hold")
    faults += [Fault(what, mended=False) for what in islice(violated(session), MOST_OF_A_TABLE)]
    on_stage("checking standings")
    try:
        check_standings(session)
    except Damaged as damaged:
        faults.append(Fault(f"the ranking does not follow from the figures: {damaged}", mended=True))
    for run in find_suspects(session):
        faults.append(Fault(f"run {run} is said to be running, and its process no longer shows that it lives", True))
    return faults


def check_small(session: Session) -> None:
    """What a command does that opens a ledger: rows, references, chains and standings, where looking takes a moment.
    Raises Damaged."""
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
    """Has the transaction see one state of the ledger, whatever is committed meanwhile; SQLite's does so by itself."""
    if session.get_bind().dialect.name == "postgresql":
        session.execute(text("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ"))


def _missing(session: Session) -> Iterator[str]:
    """Tables and columns that are not there. Optuna makes its tables together, with the first study."""
    looked = inspect(session.connection())
    tables = set(looked.get_table_names())
    for name in sorted(Base.metadata.tables.keys() - tables):
        yield f"the table {name} is not there"
    for name in sorted(OPTUNA_TABLES - tables if OPTUNA_TABLES & tables else ()):
        yield f"the table {name} of Optuna's, which keeps the studies, is not there"
    for column in missing_columns(session.connection()):
        yield f"the column {column.name} of the table {column.table.name} is not there"


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
        yield f"row {row} of the table {table} names a row of {parent} that is not there"


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
