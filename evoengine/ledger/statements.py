"""Writes rows past the mapper, with their checksums and their notes in a chain, by statements that are composed once.

What a search writes of each candidate goes this way: the mapper takes several times as long as the database.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from sqlalchemy import Connection, Insert, Select, Table, Update, bindparam, insert, select, update
from sqlalchemy.dialects import postgresql, sqlite

from evoengine.ledger import chains
from evoengine.ledger.checksums import RowReader, checked_columns, row_checksum
from evoengine.ledger.models import Base, Checked


def insert_row(connection: Connection, row: type[Base], values: Mapping[str, Any]) -> int:
    """A row of a table with a number of its own, which it gives; a missing column is null."""
    key = connection.execute(_insert(row), {**values, "checksum": row_checksum(row, values)}).inserted_primary_key
    assert key is not None  # one row was inserted
    number: int = key[0]
    chains.note(connection, row, number, values)
    return number


def insert_new(connection: Connection, row: type[Base], values: Mapping[str, Any]) -> int | str | None:
    """Its primary key; None where it is there already: another process may be writing the same."""
    sums = {"checksum": row_checksum(row, values)} if issubclass(row, Checked) else {}
    key: int | str | None = connection.scalar(_insert_new(row, connection.dialect.name), {**values, **sums})
    return key


def update_row(connection: Connection, row: type[Base], number: int, values: Mapping[str, Any]) -> None:
    """Raises NoResultFound where there is no such row, Damaged where it is not what was written before."""
    reader, selected = _whole(row)
    before = connection.execute(selected[connection.dialect.name == "postgresql"], {"number": number}).one()
    held = dict(zip(checked_columns(row), reader.read(before)[1:], strict=True))
    checksum = row_checksum(row, held | dict(values))
    connection.execute(_update(row, tuple(values)), {**values, "checksum": checksum, "number": number})


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
def _whole(row: type[Base]) -> tuple[RowReader, tuple[Select[Any], Select[Any]]]:
    """What reads a row as a whole, and selects it: as it is, and locked against other writers."""
    reader = RowReader(row, tuple(checked_columns(row)))
    selected = select(*reader.columns).where(_table(row).c.id == bindparam("number"))
    return reader, (selected, selected.with_for_update())


@cache
def _update(row: type[Base], names: tuple[str, ...]) -> Update:
    table = _table(row)
    changed = {name: bindparam(name, type_=table.c[name].type) for name in (*names, "checksum")}
    return update(table).where(table.c.id == bindparam("number")).values(changed)
