"""Writes rows past the mapper, with their checksums, by statements that are composed once.

What a search writes of each candidate goes this way: the mapper takes several times as long as the database.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from sqlalchemy import Connection, Insert, Table, Update, bindparam, func, insert, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

from evoengine.ledger.checksums import WIDTH, checked_columns, checksum_of, checksums_of
from evoengine.ledger.models import Base, Checked


def insert_row(connection: Connection, row: type[Base], values: Mapping[str, Any]) -> int:
    """A row of a table with a number of its own, which it gives; a missing column is null."""
    key = connection.execute(_insert(row), {**values, "checksums": checksums_of(row, values)}).inserted_primary_key
    assert key is not None  # one row was inserted
    number: int = key[0]
    return number


def insert_new(connection: Connection, row: type[Base], values: Mapping[str, Any]) -> int | str | None:
    """Its primary key; None where it is there already: another process may be writing the same."""
    sums = {"checksums": checksums_of(row, values)} if issubclass(row, Checked) else {}
    key: int | str | None = connection.scalar(_insert_new(row, connection.dialect.name), {**values, **sums})
    return key


def update_row(connection: Connection, row: type[Base], number: int, values: Mapping[str, Any]) -> None:
    """Raises NoResultFound where there is no such row."""
    sums = {_sum(name): checksum_of(row, name, value) for name, value in values.items()}
    updated = connection.execute(_update(row, tuple(values)), {**values, **sums, "number": number})
    if updated.rowcount:
        return
    with Session(connection) as session:  # of an older evoengine, without checksums or with fewer
        found = session.get_one(row, number)
        for name, value in values.items():
            setattr(found, name, value)
        session.flush()


def _table(row: type[Base]) -> Table:
    assert isinstance(row.__table__, Table)
    return row.__table__


@cache
def _insert(row: type[Base]) -> Insert:
    return insert(_table(row))


@cache
def _insert_new(row: type[Base], dialect: str) -> Insert:
    table = _table(row)
    into: sqlite.Insert | postgresql.Insert = sqlite.insert(table) if dialect == "sqlite" else postgresql.insert(table)
    return into.on_conflict_do_nothing().returning(*table.primary_key)


@cache
def _update(row: type[Base], names: tuple[str, ...]) -> Update:
    """Of a row that has a checksum of each column; those of other columns are left as they are."""
    table, places = _table(row), {name: place for name, (place, _) in checked_columns(row).items()}
    sums, end = table.c.checksums, 0
    parts: list[Any] = []
    for name in sorted(names, key=places.__getitem__):
        parts += [func.substr(sums, end + 1, places[name] - end), bindparam(_sum(name), type_=sums.type)]
        end = places[name] + WIDTH
    spliced = func.substr(sums, end + 1, len(places) * WIDTH - end)
    for part in reversed(parts):
        spliced = part.concat(spliced)
    whole = func.length(sums) == len(places) * WIDTH
    return update(table).where(table.c.id == bindparam("number"), whole).values(checksums=spliced)


def _sum(name: str) -> str:
    """The parameter that is the checksum of a column."""
    return f"sum_of_{name}"
