"""Whether a stored row is as it was written: a CRC-32 of each column, kept beside the values and held against them.

It is for damage (a flipped bit, a hand in the file), not against forgery. Rows of before schema 0008 have none; of
those the types are checked alone.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from functools import cache, lru_cache
from typing import Any
from zlib import crc32

from sqlalchemy import JSON, Column, Double, Integer, LargeBinary, event
from sqlalchemy.orm import Mapper

from evoengine.ledger.models import Base, Checked, UtcDateTime

SHORT = 100
"""characters of a text that many rows may have"""
WIDTH = 8
"""hexadecimal digits of one checksum"""
LISTS = ("parents", "cases", "samples_us", "warnings", "remarks")
"""columns whose JSON is an array; that of the others is an object"""


class Damaged(Exception):
    """A stored value that is not what was written: of which table, which row and which column."""

    def __init__(self, table: str, row: object, column: str) -> None:
        super().__init__(f"{column} of row {row} of the table {table} is not what was written")


def checksum(value: object) -> str:
    """Of a value as it is stored and read back: None, a number, a text, a time, or what JSON holds."""
    return f"{crc32(_canonical(value)):08x}"


def _canonical(value: object) -> bytes:
    if value is None or (isinstance(value, float) and math.isnan(value)):  # SQLite keeps NaN as null
        return b"\0"
    if isinstance(value, str):
        return value.encode(errors="surrogatepass")
    if isinstance(value, datetime):
        return value.astimezone(UTC).isoformat().encode()
    if isinstance(value, (dict, list)):
        return json.dumps(value).encode()
    return repr(value).encode()


@cache
def checked_columns(row: type[Base]) -> dict[str, tuple[int, Callable[[Any], object] | None]]:
    """Column → where its checksum begins, and what brings a value given to the type that is read back.

    In the order of the model: a new column belongs behind those that are there. A cubin has a SHA-256 of its own.
    """
    columns: Iterable[Column[Any]] = row.__table__.columns  # type: ignore[assignment]
    checked = [c for c in columns if not (c.primary_key or c.name == "checksums" or isinstance(c.type, LargeBinary))]
    converters: dict[type, Callable[[Any], object]] = {Double: float, Integer: int}
    return {c.name: (place * WIDTH, converters.get(_kind(c))) for place, c in enumerate(checked)}


def _kind(column: Column[Any]) -> type:
    kinds = (Double, Integer, JSON, UtcDateTime)
    return next((kind for kind in kinds if isinstance(column.type, kind)), str)


@cache
def _types(row: type[Base]) -> dict[str, tuple[type, ...]]:
    """Column → the Python types of its values."""
    types: dict[type, tuple[type, ...]] = {Double: (float, int), Integer: (int,), UtcDateTime: (datetime,), str: (str,)}
    columns: Iterable[Column[Any]] = row.__table__.columns  # type: ignore[assignment]
    return {
        c.name: types.get(_kind(c), (list if c.name in LISTS else dict,)) + ((type(None),) if c.nullable else ())
        for c in columns
        if c.name in checked_columns(row)
    }


def checksums_of(row: type[Base], values: Mapping[str, Any]) -> str:
    """What stands in the column `checksums` of a row with these values; a missing one is null."""
    parts = []
    for name, (_, converter) in checked_columns(row).items():
        value = values.get(name)
        parts.append(checksum(converter(value) if converter and value is not None else value))
    return "".join(parts)


def check(row: type[Base], number: object, checksums: str | None, values: Mapping[str, Any]) -> None:
    """Raises Damaged where one of the values read is not what was written; `values` may be some of the columns."""
    columns, types = checked_columns(row), _types(row)
    for name, value in values.items():
        if name not in columns:
            continue
        place, _ = columns[name]
        # of a column that came after the row was written there is no checksum
        written = checksums[place : place + WIDTH] if checksums else ""
        if not isinstance(value, types[name]) or (written and written != checksum(value)):
            raise Damaged(row.__tablename__, number, name)
    if checksums is not None and len(checksums) % WIDTH:
        raise Damaged(row.__tablename__, number, "checksums")


RowCheck = Callable[[object, str | None, Sequence[object]], None]
"""raises Damaged; takes a row's number, its checksums and the values of the columns it was made for"""


def row_check(row: type[Base], names: Sequence[str]) -> RowCheck:
    """As `check`, quicker, for many rows of which the same columns are read, JSON as the text that is stored.

    That text is what its checksum was made of: `json.dumps` writes both.
    """
    columns, types = checked_columns(row), _types(row)
    kept = [(name, columns[name][0], columns[name][0] + WIDTH, _stored(types[name])) for name in names]

    def check_row(number: object, checksums: str | None, values: Sequence[object]) -> None:
        for (name, begin, end, allowed), value in zip(kept, values, strict=True):
            if not isinstance(value, allowed):
                raise Damaged(row.__tablename__, number, name)
            if checksums:
                written = checksums[begin:end]
                if type(value) is float:
                    found = f"{crc32(repr(value).encode()):08x}"  # as `checksum` has it, of most values of a figure
                elif value is None or (type(value) is str and len(value) <= SHORT):
                    found = _text_checksum(value)
                else:
                    found = checksum(value)
                if written and written != found:
                    raise Damaged(row.__tablename__, number, name)

    return check_row


def _stored(types: tuple[type, ...]) -> tuple[type, ...]:
    return tuple(str if kind in (dict, list) else kind for kind in types)


@lru_cache(maxsize=4096)
def _text_checksum(text: object) -> str:
    """Many rows have the same device and the same policy, or none."""
    return checksum(text)


# ── every row that the mapper writes or reads ───────────────────────────────────────────────────────────────────────


@event.listens_for(Checked, "before_insert", propagate=True)
@event.listens_for(Checked, "before_update", propagate=True)
def _fill(mapper: Mapper[Any], connection: object, row: Any) -> None:
    table: type[Base] = type(row)
    row.checksums = checksums_of(table, {name: getattr(row, name) for name in checked_columns(table)})


@event.listens_for(Checked, "load", propagate=True)
def _check_loaded(row: Any, context: object) -> None:
    held = row.__dict__
    check(type(row), held.get("id"), held.get("checksums"), held)
