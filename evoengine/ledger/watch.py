"""Whether the SQLite file of an open ledger is still the one that was opened.

SQLite goes on writing into a file that was deleted or replaced, and says nothing: what it writes is lost. Worse, a
connection that is opened later writes into the replacement. So each new connection and each transaction asks here.

A copy over the file (`cp backup.db ledger.db`) leaves it the same file to the system. It is known by the number that
each ledger and each backup has in its file (`schema.mark`); an older copy of the ledger itself by its highest trial and
its count of changes to tables, which never fall. SQLite keeps the highest trial where that trial is gone, and its own
backups begin to count again.
"""

from __future__ import annotations

import os
import sqlite3
import stat
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import Engine, event

_NUMBER_AND_CHANGES = "SELECT user_version, schema_version FROM pragma_user_version, pragma_schema_version"
WRITABLE = stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH


class FileLost(Exception):
    """What became of the file, as the end of the sentence "the ledger …"; whether it still holds what was written."""

    def __init__(self, what: str, *, holds_all: bool = False, overwritten: bool = False) -> None:
        super().__init__(what)
        self.holds_all = holds_all
        self.overwritten = overwritten
        """whether the file that is open has another's content, which its log would be moved into"""


class Watch:
    """The file's identity (device and inode), its size, and whether it could be written, as they were at first.

    Of a server's database there is no file (`path` None) and nothing to watch.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path and path.resolve()
        self._first = os.stat(path) if path else None
        self._size = self._first.st_size if self._first else 0
        self._changed = 0
        self._held = _held(self._path) if self._path else None

    def check(self) -> None:
        """Raises FileLost where the file is gone, another one, overwritten, shorter than it was, or read-only now.

        A few microseconds where nothing was written into the file itself.
        """
        if self._path is None or self._first is None:
            return
        try:
            now = os.stat(self._path)
        except OSError as error:
            where = "was deleted" if self._path.parent.is_dir() else "is gone with its folder"
            raise FileLost(where) from error
        if (now.st_dev, now.st_ino) != (self._first.st_dev, self._first.st_ino):
            raise FileLost("was replaced by another file")
        if self._first.st_mode & WRITABLE and not now.st_mode & WRITABLE:
            raise FileLost("was made read-only", holds_all=True)
        if now.st_ctime_ns != self._changed:
            self._check_held(self._path)
        if now.st_size < self._size and not _is_whole(self._path):
            raise FileLost(f"was cut from {self._size:,} to {now.st_size:,} bytes")
        self._size, self._changed = now.st_size, now.st_ctime_ns

    def _check_held(self, path: Path) -> None:
        now, before = _held(path), self._held
        if now is None or before is None or not before.number:
            return
        if now.number != before.number:
            raise FileLost("was overwritten", overwritten=True)
        if now.last_trial < before.last_trial or now.table_changes < before.table_changes:
            raise FileLost("was overwritten with an older copy of itself", overwritten=True)
        self._held = now

    def guard(self, engine: Engine) -> None:
        """Has the engine open no connection to another file than this."""

        @event.listens_for(engine, "do_connect")
        def ask(*connecting: Any) -> None:
            self.check()


@dataclass(frozen=True, slots=True)
class _Held:
    """What stands in the file itself, whatever its log says."""

    number: int
    """of the ledger; 0 where the file is none of SQLite's"""
    table_changes: int = 0
    last_trial: int = 0


def _held(path: Path) -> _Held | None:
    """None where nobody can tell.

    SQLite has to read it: if anything else opened the file and closed it again, that would drop SQLite's locks on it.
    """
    try:
        with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro&immutable=1", uri=True)) as connection:
            number, changes = connection.execute(_NUMBER_AND_CHANGES).fetchone()
            if not connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'sqlite_sequence'").fetchone():
                return _Held(number, changes)
            (last,) = connection.execute("SELECT max(seq) FROM sqlite_sequence WHERE name = 'candidates'").fetchone()
    except sqlite3.Error as error:
        return _Held(0) if error.sqlite_errorcode == sqlite3.SQLITE_NOTADB else None
    return _Held(number, changes, last or 0)


def _is_whole(path: Path) -> bool:
    """A file that somebody ran VACUUM on is shorter too."""
    with suppress(sqlite3.Error), closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as connection:
        answer: tuple[str] = connection.execute("PRAGMA quick_check(1)").fetchone()
        return answer == ("ok",)
    return False
