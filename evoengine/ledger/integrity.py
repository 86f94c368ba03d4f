"""Looks for damage in a ledger's file: cheaply in what queries select by, and thoroughly once reading has failed."""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

from sqlalchemy import JSON, Connection, Double, Integer, text

from evoengine.ledger.checksums import WIDTH, Damaged, check, checked_columns, checksum
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
WORDS = {"outcome": [str(o) for o in Outcome], "kind": [str(k) for k in Kind]}
"""columns of few words → those"""
READ_ERRORS = (AttributeError, KeyError, LookupError, OverflowError, TypeError, ValueError)
"""what reading a damaged value may raise, and a fault of the program too: `find_damage` decides which it was"""


def check_selection(connection: Connection) -> None:
    """Raises Damaged where a value that rows are selected by is not what was written, or names a row that is not there.
    SQLite alone.

    0.1 s for 50,000 candidates.
    """
    raw = cast(sqlite3.Connection, connection.connection.dbapi_connection)
    raw.create_function("evo_checksums", -1, _checksums, deterministic=True)
    for row, names in SELECTED_BY.items():
        table, columns, listed = row.__tablename__, checked_columns(row), ", ".join(names)
        written = " || ".join(f"substr(checksums, {columns[name][0] + 1}, {WIDTH})" for name in names)
        strange = [f"{n} NOT IN ({', '.join(map(repr, WORDS[n]))})" for n in names if n in WORDS]
        conditions = " OR ".join([f"checksums IS NOT NULL AND {written} <> evo_checksums({listed})", *strange])
        found = connection.execute(text(f"SELECT id, checksums, {listed} FROM {table} WHERE {conditions} LIMIT 1"))
        for values in found.mappings():
            check(row, values["id"], values["checksums"], {name: values[name] for name in names})
            raise Damaged(table, values["id"], next(n for n in names if n in WORDS))
    for table, row_id, _, key in connection.execute(text("PRAGMA foreign_key_check")):
        if table in Base.metadata.tables:
            keys = connection.execute(text(f"PRAGMA foreign_key_list({table})"))
            raise Damaged(table, row_id, next(k["from"] for k in keys.mappings() if k["id"] == key))


@lru_cache(4096)
def _of_one(value: object) -> str:
    return checksum(value)


def _checksums(*values: object) -> str:
    """Of the same few values again and again: problems, GPUs, outcomes."""
    return "".join(map(_of_one, values))


def find_damage(path: Path) -> Damaged | None:
    """The first value of the file that is not what was written, or that is nothing its column may hold.

    Raises sqlite3.DatabaseError where the file itself is damaged.
    """
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
        for source in _damaged_sources(connection):
            return source
        (found,) = connection.execute("PRAGMA integrity_check(1)").fetchone()
    if found != b"ok":
        raise sqlite3.DatabaseError(f"malformed: {found.decode(errors='replace')}")
    return None


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


def _damaged_sources(connection: sqlite3.Connection) -> Iterator[Damaged]:
    for number, source in connection.execute("SELECT sha256, text FROM sources"):
        if hashlib.sha256(source).hexdigest().encode() != number:
            yield Damaged("sources", number.decode(errors="replace"), "text")
