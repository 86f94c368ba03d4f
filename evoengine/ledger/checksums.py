"""Whether a stored row is as it was written: a CRC-32 of all its columns, kept beside them and held against them.

It is for damage (a flipped bit, a hand in the file), not against forgery. `chains.py` notes which rows there are.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from typing import Any
from zlib import crc32

from sqlalchemy import JSON, Column, ColumnElement, Double, Integer, LargeBinary, Text, cast, event, type_coerce
from sqlalchemy.orm import Mapper

from evoengine.ledger.tables import Base, Checked, UtcDateTime

LISTS = ("parents", "cases", "samples_us", "warnings", "remarks", "next_kernels", "other_kernels")
"""columns whose JSON is an array; that of the others is an object"""
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
    """Column → what gives a value as it is stored, from one that is given for the column or read from it.

    In the order of their names. A cubin and a source have a SHA-256 of their own.
    """
    columns = sorted(_columns(row), key=lambda column: column.name)
    unchecked = [c.name for c in columns if c.primary_key or c.name == "checksum" or isinstance(c.type, LargeBinary)]
    kinds: dict[type, Callable[[Any], Stored]] = {Double: _float, Integer: int, JSON: _json, UtcDateTime: _time}
    return {c.name: kinds.get(_kind(c), _text) for c in columns if c.name not in unchecked}


def _columns(row: type[Base]) -> list[Column[Any]]:
    return [c for c in row.__table__.columns if isinstance(c, Column)]


def _kind(column: Column[Any]) -> type:
    kinds = (Double, Integer, JSON, UtcDateTime)
    return next((kind for kind in kinds if isinstance(column.type, kind)), str)


def _text(value: str) -> str:
    return value


def _float(value: float) -> float:
    return float(value) + 0.0  # SQLite has no negative zero


def _json(value: object) -> str:
    """As SQLAlchemy writes it; a text is what was read."""
    return value if isinstance(value, str) else json.dumps(value)


def _time(value: datetime | str) -> str:
    """Return a time as it is stored.

    A text is what SQLite holds, in which another program may have left microseconds out.
    """
    if isinstance(value, str):
        return value if "." in value else f"{value}.000000"
    return value.astimezone(UTC).strftime(TIME)


@cache
def _types(row: type[Base]) -> dict[str, tuple[type, ...]]:
    """Column → the Python types of its values, as the mapper or a driver gives them."""
    types: dict[type, tuple[type, ...]] = {
        Double: (float, int),
        Integer: (int,),
        UtcDateTime: (datetime, str),
        str: (str,),
    }
    found = {}
    for c in _columns(row):
        of_column = types.get(_kind(c), (list if c.name in LISTS else dict, str))
        found[c.name] = of_column + ((type(None),) if c.nullable else ())
    return found


def row_checksum(row: type[Base], values: Mapping[str, Any]) -> str:
    """Return the checksum of a row with these values; a missing one is null.

    Columns that are null do not count, so that a later version may add some.
    """
    stored = [(name, to_stored(values.get(name))) for name, to_stored in _converters(row)]
    return _sum(stored)


@cache
def _converters(row: type[Base]) -> tuple[tuple[str, Callable[[Any], Stored]], ...]:
    def unless_null(convert: Callable[[Any], Stored]) -> Callable[[Any], Stored]:
        return lambda value: None if value is None else convert(value)

    return tuple((name, unless_null(convert)) for name, convert in checked_columns(row).items())


def _sum(stored: Sequence[tuple[str, Stored]]) -> str:
    """Of each column's name and value, in the order of the names. SQLite keeps NaN as null."""
    held = [pair for pair in stored if pair[1] is not None and pair[1] == pair[1]]
    return f"{crc32(repr(held).encode()):08x}"


def check(row: type[Base], number: object, checksum: object, values: Mapping[str, Any]) -> None:
    """Raise Damaged where the values of the columns, all of them, are not what was written."""
    for name, types in _types(row).items():
        if name in values and not isinstance(values[name], types):
            raise Damaged(row.__tablename__, number, name)
    if checksum != row_checksum(row, values):
        raise Damaged(row.__tablename__, number)


class RowReader:
    """Reads some columns of a table's rows past the mapper, many at a time: all are selected, and checked.

    JSON comes as the text that is stored.
    """

    def __init__(self, row: type[Base], names: Sequence[str]) -> None:
        self._row = row
        self._asked = len(names)
        self._names = (*names, *(name for name in checked_columns(row) if name not in names))
        table = row.__table__
        asked = (cast(table.c[n], Text) if isinstance(table.c[n].type, JSON) else table.c[n] for n in names)
        others = (_as_stored(table.c[n]) for n in self._names[self._asked :])
        self.columns: tuple[ColumnElement[Any], ...] = (table.c.id, table.c.checksum, *asked, *others)
        """what to select"""
        self.width = len(self.columns)
        in_order = sorted(self._names)
        self._order = [(name, self._names.index(name), checked_columns(row)[name]) for name in in_order]

    def read(self, values: Sequence[Any]) -> tuple[Any, ...]:
        """Return the row's number and the columns that were asked for. Raises Damaged."""
        number, checksum, *of_row = values
        try:
            held = [(n, convert(v)) for n, place, convert in self._order if (v := of_row[place]) is not None]
            sound = checksum == _sum(held)
        except (TypeError, ValueError, AttributeError):  # a value of another type
            sound = False
        if not sound:
            check(self._row, number, checksum, dict(zip(self._names, of_row, strict=True)))
            raise Damaged(self._row.__tablename__, number)
        return number, *of_row[: self._asked]


def _as_stored(column: ColumnElement[Any]) -> ColumnElement[Any]:
    if isinstance(column.type, JSON):
        return cast(column, Text)
    return type_coerce(column, Text) if isinstance(column.type, UtcDateTime) else column


# ── every row that the mapper writes or reads ───────────────────────────────────────────────────────────────────────


@event.listens_for(Checked, "before_insert", propagate=True)
@event.listens_for(Checked, "before_update", propagate=True)
def _fill(mapper: Mapper[Any], connection: object, row: Any) -> None:
    table: type[Base] = type(row)
    row.checksum = row_checksum(table, {name: getattr(row, name) for name in checked_columns(table)})


@event.listens_for(Checked, "load", propagate=True)
def _check_loaded(row: Any, context: object) -> None:
    """Of rows that are read as a whole."""
    held = row.__dict__
    table: type[Base] = type(row)
    if held.keys() >= checked_columns(table).keys():
        check(table, held.get("id"), held.get("checksum"), held)
