"""Looks for damage in a ledger's file: cheaply in what queries select by, and thoroughly once reading has failed."""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

from sqlalchemy import JSON, Connection, Double, Integer, text

from evoengine.ledger.checksums import Damaged, check, checked_columns, checksum
from evoengine.ledger.models import (
    Base,
    BaselineRow,
    BinaryRow,
    CandidateRow,
    DeviceRow,
    MeasurementRow,
    ProfileRow,
    RunRow,
    UtcDateTime,
    VerdictRow,
)
from evoengine.records import Kind, Outcome

SELECTED_BY: Mapping[type[Base], tuple[str, ...]] = {
    CandidateRow: ("run_id", "problem", "gpu", "outcome"),
    VerdictRow: ("candidate_id", "device", "outcome"),
    MeasurementRow: ("candidate_id", "kind"),
    BaselineRow: ("run_id", "name"),
    RunRow: ("status", "gpu", "problem", "definition"),
}
"""columns that queries choose rows by: a row that is damaged there is not read, and nobody would see it missing"""
OWNERS = ((VerdictRow, "candidate_id", "candidates"), (MeasurementRow, "candidate_id", "candidates"))
"""rows that belong to another one, the column that names it, and its table"""
WORDS = {"outcome": [str(o) for o in Outcome], "kind": [str(k) for k in Kind]}
"""columns of few words → those"""
READ_ERRORS = (AttributeError, KeyError, LookupError, OverflowError, TypeError, ValueError)
"""what reading a damaged value may raise, and a fault of the program too: `find_damage` decides which it was"""


def check_selection(connection: Connection) -> None:
    """Raises Damaged where a value that rows are selected by is not what was written. SQLite alone.

    0.1 s for 50,000 candidates.
    """
    raw = cast(sqlite3.Connection, connection.connection.dbapi_connection)
    raw.create_function("evo_checksum", 1, checksum, deterministic=True)
    for row, names in SELECTED_BY.items():
        table, columns = row.__tablename__, checked_columns(row)
        for name in names:
            written = f"substr(checksums, {columns[name][0] + 1}, 8)"
            conditions = [f"checksums IS NOT NULL AND {written} <> evo_checksum({name})"]
            if name in WORDS:
                conditions.append(f"{name} NOT IN ({', '.join(repr(w) for w in WORDS[name])})")
            found = f"SELECT id FROM {table} WHERE {' OR '.join(conditions)} LIMIT 1"
            if (number := connection.scalar(text(found))) is not None:
                raise Damaged(table, number, name)
    for row, name, owner in OWNERS:
        found = f"SELECT id FROM {row.__tablename__} WHERE {name} NOT IN (SELECT id FROM {owner}) LIMIT 1"
        if (number := connection.scalar(text(found))) is not None:
            raise Damaged(row.__tablename__, number, name)


def find_damage(path: Path) -> Damaged | None:
    """The first value of the file that is not what was written, or that is nothing its column may hold."""
    with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as connection:
        connection.text_factory = bytes
        for row in (DeviceRow, RunRow, BinaryRow, CandidateRow, VerdictRow, MeasurementRow, BaselineRow, ProfileRow):
            held = {name for _, name, *_ in connection.execute(f"PRAGMA table_info({row.__tablename__})")}
            names = [n for n in ("id", "checksums", *checked_columns(row)) if n.encode() in held]
            for values in connection.execute(f"SELECT {', '.join(names)} FROM {row.__tablename__}"):
                try:
                    _check_raw(row, dict(zip(names, values, strict=True)))
                except Damaged as damaged:
                    return damaged
        return next(_damaged_blobs(connection), None)


def _check_raw(row: type[Base], raw: dict[str, Any]) -> None:
    number, checksums = raw.pop("id"), raw.pop("checksums", None)
    values = {}
    for name, value in raw.items():
        try:
            values[name] = None if value is None else _reader(row, name)(value)
        except (ArithmeticError, LookupError, TypeError, ValueError, RecursionError) as error:
            raise Damaged(row.__tablename__, number, name) from error
    check(row, number, checksums.decode(errors="replace") if checksums else None, values)


def _reader(row: type[Base], name: str) -> Callable[[Any], object]:
    kind = row.__table__.columns[name].type
    if name in WORDS:
        return lambda raw: WORDS[name][WORDS[name].index(raw.decode())]
    if isinstance(kind, JSON):
        return lambda raw: json.loads(raw)
    if isinstance(kind, UtcDateTime):
        return lambda raw: datetime.fromisoformat(raw.decode()).replace(tzinfo=UTC)
    if isinstance(kind, (Double, Integer)):
        return lambda raw: raw
    return lambda raw: raw.decode()


def _damaged_blobs(connection: sqlite3.Connection) -> Iterator[Damaged]:
    for number, source in connection.execute("SELECT sha256, text FROM sources"):
        if hashlib.sha256(source).hexdigest().encode() != number:
            yield Damaged("sources", number.decode(errors="replace"), "text")
