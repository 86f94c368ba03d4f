"""An open database of a ledger: its transactions, and what may forbid them.

A write is refused where the file is no longer the one that was opened (`watch.py`), and where another search took a run
of this process for killed (`heartbeat.py`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from sqlalchemy import URL, Connection, Engine
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from evoengine.errors import MachineError
from evoengine.ledger import chains
from evoengine.ledger.commits import Commits, Mark, was_made
from evoengine.ledger.database import db_of
from evoengine.ledger.driver_errors import display_url, is_away, translate_errors
from evoengine.ledger.heartbeat import Heart, Watchman, beat, mark_killed, require_fence
from evoengine.ledger.patience import Patience, Unavailable, patient
from evoengine.ledger.watch import FileLost, Watch
from evoengine.ledger.write_ahead_log import discard_log, empty_log
from evoengine.text import spans

_UNDONE = "the ledger could not write what belongs to the same transaction"


class _Together:
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
    ) -> None:  # fmt: skip
        with self._transaction:
            if self._failed:
                raise error or MachineError(_UNDONE)
        self.committed = True


class OpenDatabase:
    """Close it, or use it as a context manager."""

    def __init__(self, url: URL, engine: Engine) -> None:
        self._url, self._engine = url, engine
        self._reading_engine = engine.execution_options(reading=True)
        self._watch = Watch(Path(url.database or "") if url.drivername == "sqlite" else None)
        self._watch.guard(engine)
        self._engines = [engine]
        self._fences: dict[int, int] = {}
        """runs of this process that have not ended → their fences"""
        self._commits = Commits()
        self._heart = Heart(self._beat)
        self._watchman = Watchman()
        self.patience: Patience | None = None
        """of a search, which waits for a database that is away; None of commands that are told at once"""
        self._finished: list[int] = []
        """trials that ended through this object"""
        self._of_thread = threading.local()

    @property
    def url(self) -> str:
        """As SQLAlchemy and Optuna take it, with the password where there is one."""
        return self._url.render_as_string(hide_password=False)

    @property
    def place(self) -> str:
        """For people: the file, or the URL without its password."""
        return display_url(self._url)

    @property
    def db(self) -> str | None:
        """What --db takes to lead here, without a password; None for the default ledger."""
        return db_of(self._url)

    def watch(self, engine: Engine) -> None:
        """Has another engine on the same database open no other file than this ledger's, and close with it."""
        self._watch.guard(engine)
        self._engines.append(engine)

    def close(self) -> None:
        self._heart.stop()
        for engine in self._engines:
            engine.dispose()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @contextmanager
    def _writing(self, *, once: bool = True) -> Iterator[Session]:
        """As `_writing_plainly`, through the mapper."""
        with self._writing_plainly(once=once) as connection, Session(connection) as session:
            yield session
            session.flush()

    @contextmanager
    def together(self) -> Iterator[None]:
        """Has all that this thread writes meanwhile be one transaction, which takes a fraction of the time.

        In SQLite, where who writes holds off others anyway. In PostgreSQL every write stays a transaction of its own:
        two searches that wrote the same rows in unlike order would wait for each other.
        """
        if self._url.drivername != "sqlite":
            yield
            return
        ended_before = len(self._finished)
        together = self._of_thread.together = _Together(self._transaction)
        try:
            with together:
                yield
        finally:
            self._of_thread.together = None
            if not together.committed:
                del self._finished[ended_before:]

    def _together(self) -> _Together | None:
        together: _Together | None = getattr(self._of_thread, "together", None)
        return together

    @contextmanager
    def _writing_plainly(self, *, once: bool = True) -> Iterator[Connection]:
        """A transaction, or a part of the one that is written `together`. Without `once` it may be made again."""
        together = self._together()
        with together.writing() if together else self._transaction(once) as connection:
            yield connection

    @contextmanager
    def _transaction(self, once: bool = True) -> Iterator[Connection]:
        """One transaction. Raises MachineError where it cannot be, or may not be, part of this ledger's file."""
        try:
            self._watch.check()
            with translate_errors(self._url), self._committing(once) as connection:
                for run, fence in list(self._fences.items()):
                    require_fence(connection, run, fence)
                yield connection
            self._watch.check()
        except FileLost as lost:
            if lost.overwritten:
                discard_log(Path(self._url.database or ""))
            else:
                empty_log(self._engine)
            raise MachineError(self._told_lost(lost)) from lost

    @contextmanager
    def _committing(self, once: bool) -> Iterator[Connection]:
        """One transaction, made once: where the connection is lost while it is committed, the server is asked whether
        it was, before who has patience makes it again."""
        mark: Mark | None = None
        try:
            with self._engine.begin() as connection:
                chains.begin(connection)
                if once and self.patience is not None and self._url.drivername != "sqlite":
                    mark = self._commits.note(connection)
                yield connection
                chains.write(connection)
        except DBAPIError as error:
            lost = error.orig is not None and is_away(error.orig)
            if mark is None or self.patience is None or not lost or not self.patience.call(self._was_made(mark)):
                raise

    def _was_made(self, mark: Mark) -> Callable[[], bool]:
        """Asks for the transaction of that mark."""

        def ask() -> bool:
            with translate_errors(self._url), self._engine.begin() as connection:
                made = was_made(connection, mark)
            if made is None:  # its connection is lost, and the server has not noticed yet
                raise Unavailable(f"the database {self.place} is still at the last transaction")
            return made

        return ask

    def _told_lost(self, lost: FileLost) -> str:
        told = f"the ledger {self.place} {lost} while it was in use"
        if not self._finished:
            return f"{told}: nothing of this search is in what is there now"
        finished = spans(self._finished)
        if lost.holds_all:
            return f"{told}: it holds what ended before ({finished}), and nothing later"
        lost_trials = f"what ended in this search ({finished}) is not in what is there now"
        return f"{told}: {lost_trials}, except what was copied before"

    @contextmanager
    def _reading(self) -> Iterator[Session]:
        together = self._together()
        bind = together.connection if together and together.connection else self._reading_engine
        with translate_errors(self._url), Session(bind) as session:
            yield session

    @contextmanager
    def _reading_plainly(self) -> Iterator[Connection]:
        """As `_reading`, past the mapper."""
        together = self._together()
        if together and together.connection:
            with translate_errors(self._url):
                yield together.connection
            return
        with translate_errors(self._url), self._reading_engine.connect() as connection:
            yield connection

    def _beat(self) -> None:
        with self._writing(once=False) as session:
            for run in list(self._fences):
                beat(session, run)

    @patient
    def look_for_killed(self) -> list[int]:
        """Marks the runs that are known to have been killed; those that have to be looked at again in a while."""
        with self._reading() as session:
            killed = self._watchman.look(session)
        if killed:
            with self._writing() as session:
                mark_killed(session, killed)
            self._watchman.forget(killed)
        return self._watchman.undecided
