"""Looks for damage in a ledger's file once reading has failed: the first value that is nothing its column may hold."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sqlalchemy import JSON, Double, Integer

from evoengine.ledger.checksums import Damaged, check, checked_columns
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
    UtcDateTime,
    VerdictRow,
)
from evoengine.ledger.rows import unpacked
from evoengine.records import Kind, Outcome

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
WORDS: Mapping[str, list[str]] = {"outcome": [str(o) for o in Outcome], "kind": [str(k) for k in Kind]}
"""columns of few words → those"""
READ_ERRORS = (AttributeError, KeyError, LookupError, OverflowError, TypeError, ValueError)
"""what reading a damaged value may raise, and a fault of the program too: `find_damage` decides which it was"""


def find_damage(path: Path) -> Damaged | None:
    """The first row of the file that is not what was written, or a value in it that is nothing its column may hold.

    Raises sqlite3.Error where the file itself is damaged, or the text of its schema.
    """
    with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as connection:
        connection.text_factory = bytes
        for row in CHECKED:
            names = ["id", "checksum", *checked_columns(row)]
            for values in connection.execute(f"SELECT {', '.join(names)} FROM {row.__tablename__}"):
                try:
                    _check_raw(row, dict(zip(names, values, strict=True)))
                except Damaged as damaged:
                    return damaged
        if found_blob := next(_damaged_blobs(connection), None):
            return found_blob
        (found,) = connection.execute("PRAGMA integrity_check(1)").fetchone()
    if found != b"ok":
        raise sqlite3.DatabaseError(f"malformed: {found.decode(errors='replace')}")
    return None


def _check_raw(row: type[Base], raw: dict[str, Any]) -> None:
    number, checksum = raw.pop("id"), raw.pop("checksum")
    values = {}
    for name, value in raw.items():
        try:
            values[name] = None if value is None else _reader(row, name)(value)
        except (ArithmeticError, RecursionError, *READ_ERRORS) as error:
            raise Damaged(row.__tablename__, number, name) from error
    if not isinstance(checksum, bytes):
        raise Damaged(row.__tablename__, number, "checksum")
    check(row, number, checksum.decode(errors="replace"), values)


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
    for row in (SourceRow, MachineCodeRow):
        for place, number, packed in connection.execute(f"SELECT rowid, sha256, packed FROM {row.__tablename__}"):
            try:
                if packed is not None:
                    unpacked(packed, row, number.decode() if isinstance(number, bytes) else str(place))
            except UnicodeDecodeError:
                yield Damaged(row.__tablename__, place, "sha256")
            except Damaged as damaged:
                yield damaged
