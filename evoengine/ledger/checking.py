"""Looks through a whole ledger: what in it is not as it was written, or does not follow from the rest.

`evoengine db check` says what was found, and `Ledger.mend` makes again what can be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

from sqlalchemy import JSON, Text, cast, func, select, text
from sqlalchemy.orm import Session

from evoengine.ledger.checksums import Damaged, checked_columns, row_check
from evoengine.ledger.heartbeat import find_suspects
from evoengine.ledger.integrity import READ_ERRORS
from evoengine.ledger.listing import BATCH
from evoengine.ledger.models import (
    Base,
    BaselineRow,
    BinaryRow,
    CandidateRow,
    DeviceRow,
    MachineCodeRow,
    MeasurementRow,
    ProfileRow,
    RunRow,
    SourceRow,
    VerdictRow,
)
from evoengine.ledger.reclaim import of_one_death
from evoengine.ledger.rows import unpacked
from evoengine.ledger.standings import check_standings
from evoengine.text import spans

CHECKED: tuple[type[Base], ...] = (
    DeviceRow,
    RunRow,
    BinaryRow,
    CandidateRow,
    VerdictRow,
    MeasurementRow,
    BaselineRow,
    ProfileRow,
)
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
    stages: dict[str, Callable[[Session], Iterator[str]]] = {"the file": _of_file}
    for checked in CHECKED:
        stages[checked.__tablename__] = partial(_of_rows, row=checked)
    for packed in (SourceRow, MachineCodeRow):
        stages[packed.__tablename__] = partial(_of_blobs, row=packed)
    faults = []
    for name, look in stages.items():
        on_stage(f"checking {name}")
        faults += [Fault(what, mended=False) for what in islice(look(session), MOST_OF_A_TABLE)]
    if faults:
        return faults  # what follows from damaged rows nobody can tell
    on_stage("checking standings")
    try:
        check_standings(session)
    except Damaged as damaged:
        faults.append(Fault(f"the ranking does not follow from the figures: {damaged}", mended=True))
    if condemned := [row.id for row in of_one_death(session)]:
        faults.append(Fault(f"{spans(condemned)}: rejected because one process died, whoever had ended it", True))
    for run in find_suspects(session):
        faults.append(Fault(f"run {run} is said to be running, and its process no longer shows that it lives", True))
    return faults


def _of_file(session: Session) -> Iterator[str]:
    if session.get_bind().dialect.name != "sqlite":
        return  # PostgreSQL holds both itself
    for found in session.scalars(text(f"PRAGMA integrity_check({MOST_OF_A_TABLE})")):
        if found != "ok":
            yield f"SQLite finds the file damaged: {found}"
    for table, row, parent, _ in session.execute(text("PRAGMA foreign_key_check")):
        yield f"row {row} of the table {table} names a row of {parent} that is not there"


def _of_rows(session: Session, row: type[Base]) -> Iterator[str]:
    table = row.__table__
    names = list(checked_columns(row))
    check = row_check(row, names)
    columns = [cast(table.c[n], Text) if isinstance(table.c[n].type, JSON) else table.c[n] for n in names]
    first, last = session.execute(select(func.min(table.c.id), func.max(table.c.id))).one()
    for begin in range(first or 1, (last or 0) + 1, BATCH):
        end = begin + BATCH - 1
        try:
            rows: Any = session.execute(
                select(table.c.id, table.c.checksums, *columns).where(table.c.id.between(begin, end))
            )
            for number, sums, *values in rows:
                try:
                    check(number, sums, values)
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
