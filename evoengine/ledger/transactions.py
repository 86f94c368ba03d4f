"""An open database of a ledger: its transactions, and what may forbid them.

A write is refused where the file is no longer the one that was opened, and where another search took a run of this
process for killed (`runs.py`).
"""

from __future__ import annotations

import os
import sqlite3
import stat
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext, suppress
from functools import partial, wraps
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any, Concatenate, NamedTuple, ParamSpec, Self, TypeVar, TypeVarTuple

from sqlalchemy import URL, Connection, Engine, Row, Select, event, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from evoengine.errors import MachineError
from evoengine.ledger import integrity
from evoengine.ledger.database import Unavailable, discard_log, display_url, empty_log, is_away, translate_errors
from evoengine.ledger.runs import Heart, beat, require_fence
from evoengine.text import spans

# ── a database that is unavailable ────────────────────────────────────────────────────────────────────────────────────


WAIT_SECONDS = 600.0
"""longer than a server takes to restart or to be upgraded"""
RETRY_SECONDS = 0.5


Result = TypeVar("Result")
Columns = TypeVarTuple("Columns")


class Patience:
    """Retries until the database is back, for `WAIT_SECONDS` at most; says so once, and once that it is over."""

    def __init__(self, echo: Callable[[str], None]) -> None:
        self._echo = echo

    def call(self, attempt: Callable[[], Result]) -> Result:
        """Call `attempt` until it succeeds. Raises Unavailable where the database stays unavailable."""
        began: float | None = None
        while True:
            try:
                result = attempt()
            except Unavailable as error:
                if began is None:
                    began = time.monotonic()
                    self._echo(f"{error}; this search waits, {WAIT_SECONDS / 60:g} minutes at most")
                if time.monotonic() - began >= WAIT_SECONDS:
                    raise
                time.sleep(RETRY_SECONDS)
            else:
                if began is not None:
                    self._echo(f"the ledger is back after {time.monotonic() - began:.0f} s: the search goes on")
                return result


Given = ParamSpec("Given")


def patient(method: Callable[Concatenate[Any, Given], Result]) -> Callable[Concatenate[Any, Given], Result]:
    """Try the whole method again where `self.database` has patience: each is one transaction, which was not made."""

    @wraps(method)
    def call(self: Any, /, *args: Given.args, **kwargs: Given.kwargs) -> Result:
        attempt = partial(method, self, *args, **kwargs)
        patience: Patience | None = self.database.patience
        return patience.call(attempt) if patience else attempt()

    return call


# ── commits over a lost connection ────────────────────────────────────────────────────────────────────────────────────


Mark = tuple[str, int]
"""writer and number of a transaction"""

LOCK_SECONDS = 5
"""how long the server may take to notice that a connection is lost, before it counts as away"""
_NOTE = text(
    "INSERT INTO commits (writer, number, at) VALUES (:writer, :number, CURRENT_TIMESTAMP) "
    "ON CONFLICT (writer) DO UPDATE SET number = excluded.number, at = excluded.at"
)
# It writes the row, or it would not wait for a transaction that still may.
_LAST = text(
    "INSERT INTO commits (writer, number, at) VALUES (:writer, 0, CURRENT_TIMESTAMP) "
    "ON CONFLICT (writer) DO UPDATE SET number = commits.number RETURNING number"
)
_FORGET = text("DELETE FROM commits WHERE at < CURRENT_TIMESTAMP - INTERVAL '7 days'")
_WAIT = text(f"SET LOCAL lock_timeout = '{LOCK_SECONDS}s'")
_STILL_LOCKED = "55P03"


class Commits:
    """Per-process log of commits, each thread a writer: tells whether a commit over a lost connection was made.

    Each transaction writes its number into its writer's row of `commits`. A server's own number of a transaction does
    not tell: after a crash it gives numbers again that were lost with their transactions.
    """

    def __init__(self) -> None:
        self._of_thread = threading.local()

    def note(self, connection: Connection) -> Mark:
        """Write the transaction's mark and return it."""
        own = self._of_thread
        if not hasattr(own, "writer"):
            own.writer, own.numbers = uuid.uuid4().hex, count(1)
            connection.execute(_FORGET)
        mark = own.writer, next(own.numbers)
        connection.execute(_NOTE, {"writer": mark[0], "number": mark[1]})
        return mark


def was_made(connection: Connection, mark: Mark) -> bool | None:
    """Return whether the last transaction of the writer is that one; None while the server has not ended it."""
    writer, number = mark
    connection.execute(_WAIT)
    try:
        return bool(connection.scalars(_LAST, {"writer": writer}).one() == number)
    except DBAPIError as error:
        if getattr(error.orig, "sqlstate", None) == _STILL_LOCKED:
            return None
        raise


# ── a file that is lost ───────────────────────────────────────────────────────────────────────────────────────────────


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
    """Whether the SQLite file of an open ledger is still the one that was opened.

    SQLite goes on writing into a file that was deleted or replaced, and says nothing. Worse, a connection that is
    opened later writes into the replacement. So each new connection and each transaction asks here. A copy over the
    file leaves it the same file to the system: it is known by the number that each ledger and each backup has in its
    file (`database.mark`), an older copy of the ledger itself by its highest trial and its count of changes to tables,
    which never fall. A server's database has no file (`path` None) and nothing to watch.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path and path.resolve()
        self._first = os.stat(path) if path else None
        self._size = self._first.st_size if self._first else 0
        self._changed = 0
        self._held = _held(self._path) if self._path else None

    def check(self) -> None:
        """Raise FileLost if the file is gone, another one, overwritten, shorter than it was, or read-only now.

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
        """Have the engine check the file before each new connection."""

        @event.listens_for(engine, "do_connect")
        def ask(*connecting: Any) -> None:
            self.check()


class _Held(NamedTuple):
    """What stands in the file itself, whatever its log says."""

    number: int
    """of the ledger; 0 where the file is none of SQLite's"""
    table_changes: int = 0
    last_trial: int = 0


def _held(path: Path) -> _Held | None:
    """Return what the file itself holds; None if it cannot be read.

    SQLite must read it: opening and closing the file by other means would drop SQLite's locks on it.
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
    """Return whether the file is sound: one that somebody ran VACUUM on is shorter too."""
    with suppress(sqlite3.Error), closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as connection:
        answer: tuple[str] = connection.execute("PRAGMA quick_check(1)").fetchone()
        return answer == ("ok",)
    return False


# ── an open database ──────────────────────────────────────────────────────────────────────────────────────────────────


_UNDONE = "the ledger could not write what belongs to the same transaction"


class _BatchTransaction:
    """One transaction for all that a thread writes in its block; the first write begins it.

    What fails beside the writes takes nothing of them back: they are committed. Where a write itself fails, all are
    undone.
    """

    def __init__(self, begin: Callable[[], AbstractContextManager[Connection]]) -> None:
        self._begin = begin
        self._transaction = ExitStack()
        self._failed = False
        self.connection: Connection | None = None
        """None before the first write"""
        self.committed = False

    @contextmanager
    def writing(self) -> Iterator[Connection]:
        if self._failed:
            raise MachineError(_UNDONE)
        if self.connection is None:
            self.connection = self._transaction.enter_context(self._begin())
        try:
            yield self.connection
        except BaseException:
            self._failed = True
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._transaction:
            if self._failed:
                raise error or MachineError(_UNDONE)
        self.committed = True


class Database:
    """Open database: its transactions, and the runs of this process, whose beats it writes."""

    def __init__(self, url: URL, engine: Engine) -> None:
        self.url, self.engine = url, engine
        self._reading_engine = engine.execution_options(reading=True)
        self._watch = Watch(Path(url.database or "") if url.drivername == "sqlite" else None)
        self._watch.guard(engine)
        self._engines = [engine]
        self._fences: dict[int, int] = {}
        """runs of this process that have not ended → their fences"""
        self._commits = Commits()
        self._heart = Heart(self._beat)
        self.patience: Patience | None = None
        """of a search, which waits for an unavailable database; None of commands, which fail at once"""
        self.finished: list[int] = []
        """trials that ended through this object"""
        self._of_thread = threading.local()

    def watch(self, engine: Engine) -> None:
        """Guard and close another engine on the same database as this one."""
        self._watch.guard(engine)
        self._engines.append(engine)

    def close(self) -> None:
        self._heart.stop()
        for engine in self._engines:
            engine.dispose()

    @contextmanager
    def writing(self, *, once: bool = True) -> Iterator[Session]:
        """Begin a transaction as `write_connection`, and yield a session."""
        with self.write_connection(once=once) as connection, Session(connection) as session:
            yield session
            session.flush()

    @contextmanager
    def together(self) -> Iterator[None]:
        """Combine all that this thread writes meanwhile into one transaction, which takes a fraction of the time.

        In SQLite, where who writes holds off others anyway. In PostgreSQL every write stays a transaction of its own:
        two searches that wrote the same rows in unlike order would wait for each other.
        """
        if self.url.drivername != "sqlite":
            yield
            return
        ended_before = len(self.finished)
        together = self._of_thread.together = _BatchTransaction(self._transaction)
        try:
            with together:
                yield
        finally:
            self._of_thread.together = None
            if not together.committed:
                del self.finished[ended_before:]

    def _together(self) -> _BatchTransaction | None:
        together: _BatchTransaction | None = getattr(self._of_thread, "together", None)
        return together

    @contextmanager
    def write_connection(self, *, once: bool = True) -> Iterator[Connection]:
        """Begin a transaction, or a part of the one that is written `together`. Without `once` it may be made again."""
        together = self._together()
        with together.writing() if together else self._transaction(once) as connection:
            yield connection

    @contextmanager
    def _transaction(self, once: bool = True) -> Iterator[Connection]:
        """Make one transaction. Raises MachineError if the file is lost, or this process lost one of its runs."""
        try:
            self._watch.check()
            with translate_errors(self.url), self._committing(once) as connection:
                for run, fence in list(self._fences.items()):
                    require_fence(connection, run, fence)
                yield connection
            self._watch.check()
        except FileLost as lost:
            if lost.overwritten:
                discard_log(Path(self.url.database or ""))
            else:
                empty_log(self.engine)
            raise MachineError(self._told_lost(lost)) from lost

    @contextmanager
    def _committing(self, once: bool) -> Iterator[Connection]:
        """Make one transaction once.

        Where the connection is lost while it is committed, the server is asked whether it was, before whoever has
        patience makes it again.
        """
        mark: Mark | None = None
        try:
            with self.engine.begin() as connection:
                integrity.begin(connection)
                if once and self.patience is not None and self.url.drivername != "sqlite":
                    mark = self._commits.note(connection)
                yield connection
                integrity.write(connection)
        except DBAPIError as error:
            if mark is None or self.patience is None or error.orig is None or not is_away(error.orig):
                raise
            if not self.patience.call(partial(self._was_made, mark)):
                raise

    def _was_made(self, mark: Mark) -> bool:
        """Ask the server whether the transaction of that mark was made."""
        with translate_errors(self.url), self.engine.begin() as connection:
            made = was_made(connection, mark)
        if made is None:  # its connection is lost, and the server has not noticed yet
            raise Unavailable(f"the database {display_url(self.url)} is still at the last transaction")
        return made

    def _told_lost(self, lost: FileLost) -> str:
        told = f"the ledger {display_url(self.url)} {lost} while it was in use"
        if not self.finished:
            return f"{told}: the file there now has no trial of this search"
        finished = spans(self.finished)
        if lost.holds_all:
            return f"{told}: it has the trials that ended before ({finished}), but none later"
        return f"{told}: the trials that ended in this search ({finished}) are lost, except those copied before"

    @contextmanager
    def reading(self) -> Iterator[Session]:
        """Begin a transaction that reads, or use the one that is written `together`; yield a session."""
        together = self._together()
        written = together and together.connection
        with (
            translate_errors(self.url),
            nullcontext(written) if written else self._reading_engine.connect() as connection,
            Session(connection) as session,
        ):
            yield session

    def scalar(self, wanted: Select[Any]) -> Any:
        """Return the first column of the first row; None if there is no row."""
        with self.reading() as session:
            return session.scalar(wanted)

    def rows(self, wanted: Select[*Columns]) -> Sequence[Row[*Columns]]:
        """Return all rows."""
        with self.reading() as session:
            return session.execute(wanted).all()

    def _beat(self) -> None:
        with self.writing(once=False) as session:
            for run in list(self._fences):
                beat(session, run)

    def keep_alive(self, run: int, fence: int) -> None:
        """Write the beat of a run of this process until `release`."""
        self._fences[run] = fence
        self._heart.start()

    def release(self, run: int) -> None:
        """End the beat of a run."""
        self._fences.pop(run, None)
        if not self._fences:
            self._heart.stop()
