"""Looks for damage in a ledger's file: cheaply in what queries select by, and thoroughly once reading has failed."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sqlalchemy import JSON, Double, Integer

from evoengine.ledger.checksums import WIDTH, Damaged, check, checked_columns, checksum
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

SELECTED_BY: Mapping[type[Base], tuple[str, ...]] = {
    CandidateRow: ("run_id", "problem", "gpu", "outcome", "gate_version"),
    VerdictRow: ("candidate_id", "device", "outcome"),
    MeasurementRow: ("candidate_id", "kind"),
    BaselineRow: ("run_id", "name"),
    RunRow: ("status", "gpu", "problem", "definition", "imported_from", "kernel"),
}
"""columns that queries choose rows by, or read without the row: who else would see what is missing or wrong there?"""
SELECTED_BY_OF_LARGE = {row: SELECTED_BY[row] for row in (BaselineRow, RunRow)}
CHECKED_TRIALS = 2000
"""a ledger of more is not looked through when it is opened: that would take longer than most commands do"""
NUMBER = "candidate_id"
CHECKED_WHEN_READ = (CandidateRow.__tablename__, BinaryRow.__tablename__)
WORDS = {"outcome": [str(o) for o in Outcome], "kind": [str(k) for k in Kind]}
"""columns of few words → those"""
READ_ERRORS = (AttributeError, KeyError, LookupError, OverflowError, TypeError, ValueError)
"""what reading a damaged value may raise, and a fault of the program too: `find_damage` decides which it was"""


def check_selection(connection: sqlite3.Connection) -> None:
    """Raises Damaged where a value that rows are selected by is not what was written, or names a row that is not there.

    Rows that agree in these values and their checksums are looked at once; the numbers of candidates, which do not
    agree, one by one. Of a large ledger the tables that grow with its trials are left to `evoengine db check`.
    """
    connection.create_function("evo_checksum", 1, checksum, deterministic=True)
    (trials,) = connection.execute("SELECT max(id) FROM candidates").fetchone()
    small = (trials or 0) <= CHECKED_TRIALS
    for row, names in SELECTED_BY.items() if small else SELECTED_BY_OF_LARGE.items():
        table, columns = row.__tablename__, checked_columns(row)
        slices = {n: f"substr(checksums, {columns[n][0] + 1}, {WIDTH})" for n in names}
        few = [n for n in names if n != NUMBER]
        kinds = f"SELECT DISTINCT {', '.join([*few, *(slices[n] for n in few)])} FROM {table}"
        for values in connection.execute(kinds).fetchall():
            for name, value, written in zip(few, values, values[len(few) :], strict=False):
                known = value is None or name not in WORDS or value in WORDS[name]
                if not known or (written and written != checksum(value)):
                    raise Damaged(table, _first_with(connection, table, name, value, slices[name], written), name)
        if NUMBER in names:
            wrong = f"checksums IS NOT NULL AND {slices[NUMBER]} <> evo_checksum({NUMBER})"
            for (number,) in connection.execute(f"SELECT id FROM {table} WHERE {wrong} LIMIT 1"):
                raise Damaged(table, number, NUMBER)
    if small:
        _check_references(connection)


def _first_with(
    connection: sqlite3.Connection, table: str, name: str, value: object, written: str, stands: object
) -> object:
    """The row in which such a value and such a checksum stand."""
    found = f"SELECT id FROM {table} WHERE {name} IS ? AND {written} IS ? LIMIT 1"
    return connection.execute(found, (value, stands)).fetchone()[0]


def _check_references(connection: sqlite3.Connection) -> None:
    """Of candidates and binaries that have checksums those are enough, and looking up their sources is slow."""
    for table in Base.metadata.tables:
        unchecked = f"SELECT id FROM {table} WHERE checksums IS NULL LIMIT 1"
        if table in CHECKED_WHEN_READ and connection.execute(unchecked).fetchone() is None:
            continue
        for _, row_id, _, key in connection.execute(f"PRAGMA foreign_key_check({table})"):
            keys = connection.execute(f"PRAGMA foreign_key_list({table})").fetchall()
            raise Damaged(table, row_id, next(column for number, _, _, column, *_ in keys if number == key))


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
        if found_blob := next(_damaged_blobs(connection), None):
            return found_blob
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
        except (ArithmeticError, RecursionError, *READ_ERRORS) as error:
            raise Damaged(row.__tablename__, number, name) from error
    if not isinstance(checksums, bytes | None):
        raise Damaged(row.__tablename__, number, "checksums")
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
    for row in (SourceRow, MachineCodeRow):
        for place, number, packed in connection.execute(f"SELECT rowid, sha256, packed FROM {row.__tablename__}"):
            try:
                if packed is not None:
                    unpacked(packed, row, number.decode() if isinstance(number, bytes) else str(place))
            except UnicodeDecodeError:
                yield Damaged(row.__tablename__, place, "sha256")
            except Damaged as damaged:
                yield damaged
