"""Show whether the ledger holds what was written: a checksum of each row, and a chain of notes on which rows there are.

The checksum is a CRC-32 of all columns of a row. It is for damage (a flipped bit, a hand in the file), not against
forgery. A transaction adds one link to the chain of each run whose rows it wrote: their tables and numbers, with a
checksum over the link and the one before; the chain keeps the last one and how many there are, so that a row which is
deleted shows too. The chain of LEDGER notes the runs themselves. What evoengine removes, imports, prunes or repairs it
notes: such links are its signature. A ledger of before schema 0011 begins its chains at the upgrade, with what it held.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from operator import index
from typing import Any
from zlib import crc32

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Mapper, Session

from evoengine.ledger.tables import (
    Base,
    BaselineRow,
    CandidateRow,
    ChainRow,
    Checked,
    LinkRow,
    MeasurementRow,
    ProfileRow,
    RunRow,
    UtcDateTime,
    VerdictRow,
)
from evoengine.text import ranges

TIME = "%Y-%m-%d %H:%M:%S.%f"
"""as SQLite keeps a time, in UTC"""
Stored = int | float | str | None


class Damaged(Exception):
    """A row that is not what was written: of which table, and which column where that is known."""

    def __init__(self, table: str, row: object, column: str = "") -> None:
        super().__init__(f"{f'{column} of ' * bool(column)}row {row} of the table {table} is not what was written")


class Broken(Damaged):
    """Damage that a sentence tells."""

    def __init__(self, sentence: str) -> None:
        Exception.__init__(self, sentence)


@cache
def checked_columns(row: type[Base]) -> dict[str, Callable[[Any], Stored]]:
    """Return by column what gives a value as it is stored, from one that is given for the column or read from it.

    They come in the order of their names. A cubin and a source have a SHA-256 of their own. The functions raise
    TypeError, ValueError or AttributeError for values of another type.
    """
    kinds = ((sa.Double, _float), (sa.Integer, index), (sa.JSON, _json), (UtcDateTime, _time), (object, str))
    found: dict[str, Callable[[Any], Stored]] = {}
    for c in sorted(row.__table__.columns, key=lambda column: str(column.name)):
        if not (c.primary_key or c.name == "checksum" or isinstance(c.type, sa.LargeBinary)):
            found[c.name] = next(to_stored for kind, to_stored in kinds if isinstance(c.type, kind))
    return found


def _float(value: float) -> float:
    return float(value) + 0.0  # SQLite has no negative zero


def _json(value: object) -> str:
    """Return JSON as SQLAlchemy writes it; a text is what was read."""
    return value if isinstance(value, str) else json.dumps(value)


def _time(value: datetime | str) -> str:
    """Return a time as it is stored.

    A text is what SQLite holds, in which another program may have left microseconds out.
    """
    if isinstance(value, str):
        return value if "." in value else f"{value}.000000"
    return value.astimezone(UTC).strftime(TIME)


def row_checksum(row: type[Base], values: Mapping[str, Any]) -> str:
    """Return the checksum of a row with these values; a missing one is null.

    Columns that are null do not count, so that a later version may add some.
    """
    stated = ((name, values.get(name), to_stored) for name, to_stored in checked_columns(row).items())
    return _sum([(name, to_stored(value)) for name, value, to_stored in stated if value is not None])


def _sum(held: Sequence[tuple[str, Stored]]) -> str:
    """Return the checksum of columns' names and values, in the order of the names. SQLite keeps NaN as null."""
    return f"{crc32(repr([pair for pair in held if pair[1] == pair[1]]).encode()):08x}"


class RowReader:
    """Reads some columns of a table's rows past the mapper, many at a time: all are selected, and checked.

    JSON comes as the text that is stored.
    """

    def __init__(self, row: type[Base], names: Sequence[str]) -> None:
        self._row = row
        self._asked = len(names)
        self._names = (*names, *(name for name in checked_columns(row) if name not in names))
        table = row.__table__
        asked = (sa.cast(table.c[n], sa.Text) if isinstance(table.c[n].type, sa.JSON) else table.c[n] for n in names)
        others = (_as_stored(table.c[n]) for n in self._names[self._asked :])
        self.columns: tuple[sa.ColumnElement[Any], ...] = (table.c.id, table.c.checksum, *asked, *others)
        """what to select"""
        self.width = len(self.columns)
        self._order = [(name, self._names.index(name), to_stored) for name, to_stored in checked_columns(row).items()]

    def read(self, values: Sequence[Any]) -> tuple[Any, ...]:
        """Return the row's number and the columns that were asked for. Raises Damaged."""
        number, checksum, *of_row = values
        try:
            sound = checksum == _sum(
                [(n, to_stored(v)) for n, i, to_stored in self._order if (v := of_row[i]) is not None]
            )
        except (TypeError, ValueError, AttributeError):  # a value of another type
            sound = False
        if not sound:
            raise Damaged(self._row.__tablename__, number)
        return number, *of_row[: self._asked]


def _as_stored(column: sa.ColumnElement[Any]) -> sa.ColumnElement[Any]:
    if isinstance(column.type, sa.JSON):
        return sa.cast(column, sa.Text)
    return sa.type_coerce(column, sa.Text) if isinstance(column.type, UtcDateTime) else column


# ── every row that the mapper writes or reads ───────────────────────────────────────────────────────────────────────


@sa.event.listens_for(Checked, "before_insert", propagate=True)
@sa.event.listens_for(Checked, "before_update", propagate=True)
def _fill(mapper: Mapper[Any], connection: object, row: Any) -> None:
    table: type[Base] = type(row)
    row.checksum = row_checksum(table, {name: getattr(row, name) for name in checked_columns(table)})


@sa.event.listens_for(Checked, "load", propagate=True)
def _check_loaded(row: Any, context: object) -> None:
    """Check rows that are read as a whole."""
    table: type[Base] = type(row)
    held = row.__dict__
    if held.keys() >= checked_columns(table).keys():
        try:
            sound = held.get("checksum") == row_checksum(table, held)
        except (TypeError, ValueError, AttributeError):  # a value of another type
            sound = False
        if not sound:
            raise Damaged(table.__tablename__, held.get("id"))


LEDGER = 0
"""in place of a run's number"""
WRITTEN, UPGRADED, IMPORTED = "written", "upgraded", "imported"
"""of links that add rows"""
REMOVED = "removed"
"""of one that takes rows out"""
PRUNED, REPAIRED, REVOKED = "pruned", "repaired", "revoked"
"""of links that say what else was done; their rows stay"""
OF_CANDIDATE: tuple[type[Base], ...] = (VerdictRow, MeasurementRow, ProfileRow)
OF_RUN: tuple[type[Base], ...] = (CandidateRow, BaselineRow)
Numbers = dict[str, set[int]]
"""table → numbers of rows"""
_PENDING = "evoengine's links"
"""in Connection.info"""


@dataclass(slots=True)
class _Pending:
    """What a transaction has written so far."""

    what: str = WRITTEN
    rows: list[tuple[str, int, int | None, int | None]] = field(default_factory=list)
    """table and number, with the run or the trial that it is of"""
    signed: list[tuple[int, str, str]] = field(default_factory=list)
    """run, what was done, and to which rows"""


# ── written ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def begin(connection: sa.Connection) -> None:
    """Begin a transaction of the ledger: forget whatever was pending of one that failed."""
    connection.info[_PENDING] = _Pending()


def note(connection: sa.Connection, row: type[Base], number: int, values: Mapping[str, Any]) -> None:
    """Note that a row was inserted; do nothing outside of a ledger's transaction."""
    pending: _Pending | None = connection.info.get(_PENDING)
    if pending is None:
        return
    if row is RunRow:
        pending.rows += [(row.__tablename__, number, chain, None) for chain in (LEDGER, number)]
    elif row in OF_RUN:
        pending.rows.append((row.__tablename__, number, values["run_id"], None))
    elif row in OF_CANDIDATE:
        pending.rows.append((row.__tablename__, number, None, values["candidate_id"]))


@sa.event.listens_for(Checked, "after_insert", propagate=True)
def _note_mapped(mapper: Mapper[Any], connection: sa.Connection, row: Any) -> None:
    note(connection, type(row), row.id, row.__dict__)


def call_it(connection: sa.Connection, what: str) -> None:
    """State how the rows of this transaction came to be."""
    connection.info[_PENDING].what = what


def sign(connection: sa.Connection, run: int, what: str, rows: str) -> None:
    """Have this transaction state what evoengine did to rows that stand or stood there."""
    connection.info[_PENDING].signed.append((run, what, rows))


def write(connection: sa.Connection) -> None:
    """Write the links of this transaction, as its last act."""
    pending: _Pending | None = connection.info.pop(_PENDING, None)
    if pending is None:
        return
    of_run: dict[int, Numbers] = defaultdict(lambda: defaultdict(set))
    runs = {n: run for table, n, run, _ in pending.rows if table == CandidateRow.__tablename__ and run is not None}
    for earlier in {trial for *_, trial in pending.rows if trial is not None} - runs.keys():
        runs[earlier] = execute(connection, _RUN_OF, earlier).scalar_one()
    for table, number, run, trial in pending.rows:
        of_run[runs[trial] if trial is not None else run or LEDGER][table].add(number)
    for run in sorted(of_run):  # in one order, as two transactions that write to both wait for each other
        append(connection, run, pending.what, spelt(of_run[run]))
    for run, what, rows in sorted(pending.signed):
        append(connection, run, what, rows)


_RUN_OF = "SELECT run_id FROM candidates WHERE id = ?"
_END = "SELECT links, sum FROM chains WHERE run_id = ?"
_BEGIN = "INSERT INTO chains (run_id, links, sum) VALUES (?, 0, '') ON CONFLICT DO NOTHING"
_LINK = "INSERT INTO links (run_id, number, what, rows, at, sum) VALUES (?, ?, ?, ?, ?, ?)"
_MOVE = "UPDATE chains SET links = ?, sum = ? WHERE run_id = ?"


def append(connection: sa.Connection, run: int, what: str, rows: str) -> None:
    """Add a link to the chain of a run."""
    is_sqlite = connection.dialect.name == "sqlite"
    locked = _END if is_sqlite else f"{_END} FOR UPDATE"  # SQLite's transaction has the write lock from its beginning
    end: Any = execute(connection, locked, run).one_or_none()
    if end is None:
        execute(connection, _BEGIN, run)
        end = execute(connection, locked, run).one()
    number, at = end[0] + 1, datetime.now(UTC)
    total = link_sum(end[1], run, number, what, rows, at)
    execute(connection, _LINK, run, number, what, rows, at.strftime(TIME) if is_sqlite else at, total)
    execute(connection, _MOVE, number, total, run)


def execute(connection: sa.Connection, statement: str, *values: object) -> sa.CursorResult[Any]:
    """Give the driver a statement as it is, with a ? for each value.

    It is for what every trial needs, as composing one takes longer than its execution.
    """
    as_stated = statement if connection.dialect.name == "sqlite" else statement.replace("?", "%s")
    return connection.exec_driver_sql(as_stated, values)


def link_sum(before: str, run: int, number: int, what: str, rows: str, at: datetime) -> str:
    """Return the checksum of a link, which covers all links before it."""
    return f"{crc32(repr((before, run, number, what, rows, at.strftime(TIME))).encode()):08x}"


def remove(session: Session, runs: Iterable[int], trials: Iterable[int]) -> None:
    """Take out the chains of runs that are removed with these trials, and sign for it."""
    numbers = set(runs)
    for row in (LinkRow, ChainRow):
        session.execute(sa.delete(row).where(row.run_id.in_(numbers)))
    gone = spelt({RunRow.__tablename__: numbers, CandidateRow.__tablename__: set(trials)})
    sign(session.connection(), LEDGER, REMOVED, gone)


def removed(session: Session, table: str) -> set[int]:
    """Return the numbers of the rows of a table that evoengine removed with their runs."""
    found: set[int] = set()
    for _, what, rows, *_ in _links(session.connection(), LEDGER):
        found |= read(rows).get(table, set()) if what == REMOVED else set()
    return found


def begin_all(connection: sa.Connection, what: str) -> None:
    """Start the chain of every run from the rows that the ledger holds; delete earlier chains."""
    for row in (LinkRow, ChainRow):
        connection.execute(sa.delete(row))
    runs = list(connection.scalars(sa.select(RunRow.id).order_by(RunRow.id)))
    if not runs:
        return
    append(connection, LEDGER, what, spelt({RunRow.__tablename__: set(runs)}))
    for run in runs:
        append(connection, run, what, spelt(_held(connection, run)))


def _held(connection: sa.Connection, run: int) -> Numbers:
    """Return the rows of a run that are there, its own among them."""
    found: Numbers = {RunRow.__tablename__: {run}}
    for row in OF_RUN:
        table = row.__table__
        found[row.__tablename__] = set(connection.scalars(sa.select(table.c.id).where(table.c.run_id == run)))
    for row in OF_CANDIDATE:
        table = row.__table__
        of_run = sa.select(table.c.id).join(CandidateRow, CandidateRow.id == table.c.candidate_id)
        found[row.__tablename__] = set(connection.scalars(of_run.where(CandidateRow.run_id == run)))
    return found


def spelt(numbers: Mapping[str, set[int]]) -> str:
    """Return the numbers as text: `candidates 1-3,7; verdicts 2`."""
    return "; ".join(f"{table} {ranges(of_table, '-', ',')}" for table, of_table in sorted(numbers.items()) if of_table)


def read(rows: str) -> Numbers:
    """Read what `spelt` wrote."""
    found: Numbers = {}
    for of_table in filter(None, rows.split("; ")):
        table, _, spans = of_table.partition(" ")
        numbers = found.setdefault(table, set())
        for span in spans.split(","):
            first, _, last = span.partition("-")
            numbers.update(range(int(first), int(last or first) + 1))
    return found


# ── held against what is there ──────────────────────────────────────────────────────────────────────────────────────


def broken(session: Session, run: int | None = None) -> Iterator[str]:
    """Yield a sentence for each row and each link that is missing, or that nobody wrote; of a run, or of all."""
    connection = session.connection()
    if run is None:
        yield from _broken_links(connection, LEDGER)
        yield from _differing(connection, LEDGER, {RunRow.__tablename__: set(connection.scalars(sa.select(RunRow.id)))})
    runs = [run] if run is not None else sorted(connection.scalars(sa.select(RunRow.id)))
    for each in runs:
        yield from _broken_links(connection, each)
        yield from _differing(connection, each, _held(connection, each))


def _name(run: int) -> str:
    return "the ledger" if run == LEDGER else f"run {run}"


def _links(connection: sa.Connection, run: int) -> list[Any]:
    of_run = sa.select(LinkRow.number, LinkRow.what, LinkRow.rows, LinkRow.at, LinkRow.sum).where(LinkRow.run_id == run)
    return list(connection.execute(of_run.order_by(LinkRow.number)))


def _broken_links(connection: sa.Connection, run: int) -> Iterator[str]:
    end = connection.execute(sa.select(ChainRow.links, ChainRow.sum).where(ChainRow.run_id == run)).one_or_none()
    if end is None:
        is_new = run == LEDGER and connection.scalar(sa.select(RunRow.id).limit(1)) is None
        if not is_new or _links(connection, run):
            yield f"the chain of {_name(run)} is missing"
        return
    before, expected = "", 1
    for number, what, rows, at, total in _links(connection, run):
        if number != expected:
            yield f"link {expected} of {_name(run)} is missing"
            return
        if total != link_sum(before, run, number, what, rows, at):
            yield f"link {number} of {_name(run)} is not what was written"
            return
        before, expected = total, number + 1
    if (expected - 1, before) != tuple(end):
        yield f"{_name(run)} has {expected - 1} links, and {end[0]} were written"


def _differing(connection: sa.Connection, run: int, held: Numbers) -> Iterator[str]:
    noted: Numbers = defaultdict(set)
    for _, what, rows, *_ in _links(connection, run):
        try:
            of_link = read(rows) if what in (WRITTEN, UPGRADED, IMPORTED, REMOVED) else {}
        except ValueError:  # of a link that is damaged, which was told
            continue
        for table, numbers in of_link.items():
            if what == REMOVED:
                noted[table] -= numbers
            else:
                noted[table] |= numbers
    for table in sorted(held):
        here, written = held.get(table, set()), noted.get(table, set())
        for number in sorted(written - here):
            yield f"row {number} of the table {table} was deleted: the chain of {_name(run)} lists it"
        for number in sorted(here - written):
            yield f"row {number} of the table {table} is in no link of {_name(run)}: evoengine did not write it"


# ── rows written past the mapper ──────────────────────────────────────────────────────────────────────────────────────


# What a search writes of each candidate goes this way: the mapper takes several times as long as the database.


def insert_row(connection: sa.Connection, row: type[Base], values: Mapping[str, Any]) -> int:
    """Insert a row and return its number; a missing column is null."""
    written = {**values, "checksum": row_checksum(row, values)}
    key = connection.execute(sa.insert(table_of(row)), written).inserted_primary_key
    assert key is not None  # one row was inserted
    number: int = key[0]
    note(connection, row, number, values)
    return number


def insert_new(connection: sa.Connection, row: type[Base], values: Mapping[str, Any]) -> int | str | None:
    """Insert a row unless its key exists, as another process may have written it; return the key of a new row."""
    sums = {"checksum": row_checksum(row, values)} if issubclass(row, Checked) else {}
    key: int | str | None = connection.scalar(_insert_new(row, connection.dialect.name), {**values, **sums})
    return key


def update_row(connection: sa.Connection, row: type[Base], number: int, values: Mapping[str, Any]) -> None:
    """Update columns of a row.

    Raises NoResultFound if there is no such row, Damaged where it is not what was written before.
    """
    reader, selected = _whole(row)
    before = connection.execute(selected, {"number": number}).one()
    held = dict(zip(checked_columns(row), reader.read(before)[1:], strict=True))
    checksum = row_checksum(row, held | dict(values))
    connection.execute(_update(row, tuple(values)), {**values, "checksum": checksum, "number": number})


def table_of(row: type[Base]) -> sa.Table:
    """Return the table of a class of rows."""
    assert isinstance(row.__table__, sa.Table)
    return row.__table__


@cache
def _insert_new(row: type[Base], dialect: str) -> sa.Insert:
    table = table_of(row)
    into: sqlite.Insert | postgresql.Insert = sqlite.insert(table) if dialect == "sqlite" else postgresql.insert(table)
    return into.on_conflict_do_nothing().returning(*table.primary_key)


@cache
def _whole(row: type[Base]) -> tuple[RowReader, sa.Select[Any]]:
    """Return what reads a whole row, and what selects it, locked against other writers."""
    reader = RowReader(row, tuple(checked_columns(row)))
    selected = sa.select(*reader.columns).where(table_of(row).c.id == sa.bindparam("number"))
    return reader, selected.with_for_update()


@cache
def _update(row: type[Base], names: tuple[str, ...]) -> sa.Update:
    table = table_of(row)
    changed = {name: sa.bindparam(name, type_=table.c[name].type) for name in (*names, "checksum")}
    return sa.update(table).where(table.c.id == sa.bindparam("number")).values(changed)
