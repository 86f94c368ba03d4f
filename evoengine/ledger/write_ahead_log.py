"""The write-ahead log of an SQLite ledger (`NAME-wal`): it holds the last commits until they are moved into the file.

It can be left behind by a killed process, be copied without its file or beside another one, or be unreadable.
"""

from __future__ import annotations

import os
import sqlite3
import time
from contextlib import suppress
from pathlib import Path

from sqlalchemy import Engine

from evoengine.errors import MachineError

USER_VERSION_OFFSET = 60
"""where an SQLite file has what PRAGMA user_version says (sqlite.org/fileformat2.html, 1.3)"""
LOG_IN_USE_SECONDS = 60.0
"""a log that was written since then belongs to a search that is running"""


def reading_uri(path: Path, *, alone: bool) -> str:
    """`alone`: whether nobody writes the file meanwhile; then it is read without the side files of its log."""
    log = Path(f"{path}-wal")
    immutable = alone and not (log.exists() and log.stat().st_size)
    return f"{path.resolve().as_uri()}?mode=ro{'&immutable=1' if immutable else ''}"


def orphaned_log(path: Path) -> str:
    log = Path(f"{path}-wal")
    return f"; {log.name} beside it is the write-ahead log of a file that is not there" if log.exists() else ""


def check_log(connection: sqlite3.Connection, path: Path, log: Path, in_use: bool) -> None:
    """Raises MachineError where a log that nobody is writing does not fit the file; `in_use`: somebody may be.

    SQLite takes whatever log it finds for the file's own, and would write it into the file when that is closed.
    """
    if in_use and log.stat().st_mtime > time.time() - LOG_IN_USE_SECONDS:
        return
    try:
        (found,) = connection.execute("PRAGMA integrity_check(1)").fetchone()
        (number,) = connection.execute("PRAGMA user_version").fetchone()
        if found == "ok" and connection.execute("PRAGMA foreign_key_check").fetchone():
            found = "rows name others that are not there"
    except sqlite3.DatabaseError as error:
        found, number = str(error), 0
    if not in_use:  # else closing the file would drop the locks of who has it open, as above
        with path.open("rb") as file:
            file.seek(USER_VERSION_OFFSET)
            own = int.from_bytes(file.read(4), "big")
        if own and own != number:
            found = "they are of two ledgers"
    if found != "ok":
        if not in_use:
            Path(f"{path}-shm").unlink(missing_ok=True)  # made by this very look
        raise MachineError(
            f"{path} and its write-ahead log {log.name} do not fit together ({' '.join(found.split())}): the log "
            "may be another file's; move it away to read the file without it, or restore both from the same copy"
        )


def empty_log(engine: Engine) -> None:
    """Moves what the write-ahead log holds into the file that is open, wherever that is now.

    The log keeps its path when the file goes, and would be taken for that of the file that comes in its place. A
    connection that is open already is used; where there is none, there is nothing to move.
    """
    with suppress(Exception):
        raw = engine.raw_connection()
        try:
            raw.cursor().execute("PRAGMA wal_checkpoint(TRUNCATE)")
        finally:
            raw.close()


def discard_log(path: Path) -> None:
    """Empties and removes the log of a file that was overwritten: SQLite would move it into what is there now.

    What it holds is of no use without the pages that are gone. Removed it is not taken for that of the new file,
    emptied it gives nothing to connections that still have it open.
    """
    with suppress(OSError):
        os.truncate(f"{path}-wal", 0)
    for name in (f"{path}-wal", f"{path}-shm"):
        Path(name).unlink(missing_ok=True)
