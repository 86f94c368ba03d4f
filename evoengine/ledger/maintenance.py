"""A ledger's file as a whole: its schema, a copy of it, and it opened for being looked through."""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing
from pathlib import Path

from sqlalchemy import URL

from evoengine.errors import NothingFound, UsageError
from evoengine.hints import hint
from evoengine.ledger.chosen import chosen_database
from evoengine.ledger.database import db_of, inspect_database, make_engine, parse_url
from evoengine.ledger.driver_errors import display_url, translate_errors
from evoengine.ledger.schema import known_revisions, number_for_a_file
from evoengine.ledger.store import Ledger
from evoengine.ledger.write_ahead_log import reading_uri


def schema_of(database: str | None) -> str:
    """Its revision. Raises NothingFound where there is no ledger."""
    return _schema(parse_url(chosen_database(database)))


def _schema(url: URL) -> str:
    revision = inspect_database(url).revision
    if revision is None:
        raise NothingFound(f"no ledger at {display_url(url)}: {hint('search', db=db_of(url))} makes one")
    return revision


def open_unchecked(database: str | None) -> Ledger:
    """A ledger that may be damaged. Raises UsageError on one of another schema."""
    url = parse_url(chosen_database(database))
    revision = _schema(url)
    if revision != known_revisions()[-1]:
        raise UsageError(
            f"{display_url(url)} has schema {revision}, and this evoengine checks {known_revisions()[-1]}: "
            f"{hint('db', 'upgrade', db=db_of(url))} brings it there"
        )
    return Ledger(url, make_engine(url))


def back_up(database: str | None, file: Path) -> int:
    """Writes a copy by SQLite's own means, which takes in what is written meanwhile; its bytes. It has a number of its
    own: a search that uses the ledger knows it where it is put in the ledger's place.

    Raises UsageError where the file is there already or cannot be written, and for PostgreSQL.
    """
    url = parse_url(chosen_database(database))
    if url.drivername != "sqlite":
        raise UsageError(
            "PostgreSQL has a program for it: pg_dump --format=custom --file=FILE DATABASE copies the ledger"
        )
    if file.exists():
        raise UsageError(f"{file} is there already; name a new file")
    _schema(url)
    part = file.with_name(f"{file.name}.part")
    source = reading_uri(Path(url.database or ""), alone=False)
    try:
        part.touch()
        with (
            translate_errors(url),
            closing(sqlite3.connect(source, uri=True)) as connection,
            closing(sqlite3.connect(part)) as copy,
        ):
            connection.backup(copy)
            copy.execute(f"PRAGMA user_version = {number_for_a_file()}")
        os.replace(part, file)
    except OSError as error:
        raise UsageError(f"{file} cannot be written: {error.strerror}; name a file in another folder") from error
    finally:
        part.unlink(missing_ok=True)
    return file.stat().st_size
