"""What a database's driver raises, and what a damaged value does to who reads it, as one sentence with a remedy."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy import URL
from sqlalchemy.exc import DBAPIError

from evoengine.errors import EvoengineError, MachineError, UsageError
from evoengine.ledger.check import READ_ERRORS, find_damage
from evoengine.ledger.checksums import Damaged
from evoengine.machine import require_files
from evoengine.passwords import hide_passwords


class Unavailable(UsageError):
    """The database cannot be used for now."""


BUSY_SECONDS = 30.0
"""how long a writer waits for another's transaction to end"""
_SIGNS_OF_DAMAGE = ("not a database", "malformed", "disk I/O error", "unsupported file format", "no such table")
_SIGNS_OF_ABSENCE = (
    "OperationalError", "InterfaceError", "AdminShutdown", "CrashShutdown", "CannotConnectNow", "ConnectionTimeout",
    "IdleInTransactionSessionTimeout", "DeadlockDetected", "SerializationFailure",
)  # fmt: skip
"""psycopg's errors of a connection that is lost or not to be had, and of a transaction that another one broke"""
_RESTORE = "restore it from a copy, or name another with --db"


def display_url(url: URL) -> str:
    """Return the file, or the URL without its password."""
    return url.database or "" if url.drivername == "sqlite" else hide_passwords(url.render_as_string())


@contextmanager
def translate_errors(url: URL) -> Iterator[None]:
    """Turn what the database driver and damaged values raise into one sentence."""
    try:
        yield
    except DBAPIError as error:
        raise _explanation(url, error.orig or error) from error
    except sqlite3.Error as error:
        raise _explanation(url, error) from error
    except Damaged as damaged:
        raise _damage(url, damaged) from damaged
    except READ_ERRORS as error:
        if damage := _find_damage(url):
            raise damage from error
        if isinstance(error, OverflowError):  # of SQLite's driver; PostgreSQL's gives a DBAPIError
            raise UsageError("a number of more than 64 bits stands for nothing in a ledger") from error
        raise


def is_away(error: BaseException) -> bool:
    """Whether a server ended the connection, or takes none for now, by what its driver raises."""
    return type(error).__name__ in _SIGNS_OF_ABSENCE or isinstance(error, (ConnectionError, TimeoutError))


def _find_damage(url: URL) -> EvoengineError | None:
    if url.drivername != "sqlite":
        return None
    try:
        damaged = find_damage(Path(url.database or ""))
    except sqlite3.Error as error:
        return _explanation(url, error)
    return _damage(url, damaged) if damaged else None


def _damage(url: URL, damaged: Damaged) -> EvoengineError:
    return MachineError(f"{display_url(url)} is damaged: {damaged}; {_RESTORE}")


def _explanation(url: URL, error: BaseException) -> EvoengineError:
    """Return what to raise; raise MachineError where no file can be opened any more."""
    reason = hide_passwords(str(error).strip().splitlines()[0]) if str(error).strip() else type(error).__name__
    if "locked" in reason:
        return Unavailable(
            f"{display_url(url)} has been locked by another writer for {BUSY_SECONDS:g} s; "
            "let that program end, or name another file with --db"
        )
    if url.drivername != "sqlite":
        advice = "check the server and the URL of --db"
        kind = Unavailable if is_away(error) else UsageError
        return kind(f"the database {display_url(url)} cannot be used: {reason}; {advice}")
    if "UTF-8" in reason and (damage := _find_damage(url)):
        return damage
    if any(word in reason for word in _SIGNS_OF_DAMAGE):
        return MachineError(f"{display_url(url)} is damaged ({reason}); {_RESTORE}")
    if "unable to open" in reason:
        require_files()
    log = Path(f"{url.database}-wal")
    if ("readonly" in reason or "unable to open" in reason) and log.exists():
        return UsageError(
            f"{display_url(url)} cannot be read or written ({reason}) beside its write-ahead log {log.name}, which "
            "holds the last commits: make both and their folder writable, or copy both to a folder that is"
        )
    if "readonly" in reason or "unable to open" in reason:
        advice = "name a file in a folder that can with --db"
        return UsageError(f"{display_url(url)} cannot be written ({reason}); {advice}")
    return MachineError(f"the ledger {display_url(url)} cannot be used: {reason}")
