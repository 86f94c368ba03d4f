"""Shows that the process of a run lives, and finds the runs whose process does not.

A running search writes the time into its row every few seconds, by the database's clock: host names and process
numbers mean nothing in containers. A run whose last beat is older than `KILLED_AFTER_SECONDS` is taken for killed, and
its fence is raised. A process that only stood still, stopped or asleep, finds that and may write no more.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta

from sqlalchemy import select, text
from sqlalchemy.orm import Session

from evoengine.errors import EvoengineError, MachineError
from evoengine.ledger.models import HeartbeatRow, RunRow
from evoengine.ledger.runs import KILLED, RUNNING

BEAT_SECONDS = 3.0
KILLED_AFTER_SECONDS = 60.0
"""longer than a writer waits for another one"""
_FENCE = text("SELECT fence FROM heartbeats WHERE run_id = :run")
_FENCE_SHARED = text("SELECT fence FROM heartbeats WHERE run_id = :run FOR SHARE")
"""every write asks this; composing the query each time costs more than its execution"""


def database_time(session: Session) -> datetime:
    """The database's clock, UTC: one for all that write there."""
    if session.get_bind().dialect.name == "sqlite":
        told: str = session.scalars(text("SELECT strftime('%Y-%m-%d %H:%M:%f', 'now')")).one()
        return datetime.fromisoformat(told).replace(tzinfo=UTC)
    now: datetime = session.scalars(text("SELECT clock_timestamp()")).one()
    return now


def begin_beating(session: Session, run: int) -> int:
    """Enters the first beat of a new run; its fence."""
    row = HeartbeatRow(run_id=run, fence=1, beat_at=database_time(session))
    session.add(row)
    return row.fence


def mark_killed(session: Session) -> None:
    """Takes the runs that no longer beat from their processes. A run without any beat is of an older evoengine."""
    too_old = database_time(session) - timedelta(seconds=KILLED_AFTER_SECONDS)
    for run in session.scalars(select(RunRow).where(RunRow.status == RUNNING)):
        beat = session.get(HeartbeatRow, run.id, with_for_update=True)
        if beat is None or beat.beat_at < too_old:
            run.status = KILLED
        if beat is not None and run.status == KILLED:
            beat.fence += 1


def require_fence(session: Session, run: int, fence: int) -> None:
    """Raises MachineError where the run was taken for killed. Holds, until the transaction ends, that it is not."""
    # SQLite's transaction has the write lock from its beginning
    query = _FENCE if session.get_bind().dialect.name == "sqlite" else _FENCE_SHARED
    if session.scalar(query, {"run": run}) != fence:
        raise MachineError(
            f"this process stood still for more than {KILLED_AFTER_SECONDS:g} s, so another search took run {run} for "
            "killed and goes on with what it left: nothing more is written, search again"
        )


def beat(session: Session, run: int) -> None:
    row = session.get_one(HeartbeatRow, run)
    row.beat_at = database_time(session)


class Heart:
    """A thread that calls `write` every few seconds, from `start` until `stop`.

    What `write` raises is not lost: the run's own next write raises it too.
    """

    def __init__(self, write: Callable[[], None]) -> None:
        self._write = write
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        if self._thread is None:
            self._ended.clear()
            self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _beat(self) -> None:
        while not self._ended.wait(BEAT_SECONDS):
            with suppress(EvoengineError):
                self._write()
