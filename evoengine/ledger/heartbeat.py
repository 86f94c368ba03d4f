"""Shows that the process of a run lives, and finds the runs whose process does not.

A running search writes the time into its row every few seconds, by the database's clock: host names and process
numbers mean nothing in containers. A run whose last beat is older than `KILLED_AFTER_SECONDS`, and that still does not
beat while somebody looks, is taken for killed. So is, at once, one whose process was on this machine and is not there
any more (`process.py`). Its fence is raised: a process that only stood still, stopped or asleep, finds that and may
write no more.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import UTC, datetime, timedelta

from sqlalchemy import Connection, select, text
from sqlalchemy.orm import Session

from evoengine.errors import EvoengineError, MachineError
from evoengine.ledger.models import HeartbeatRow, RunRow
from evoengine.ledger.process import is_gone, this_process
from evoengine.ledger.reclaim import end_unfinished
from evoengine.ledger.runs import KILLED, RUNNING

BEAT_SECONDS = 3.0
KILLED_AFTER_SECONDS = 60.0
"""longer than a writer waits for another one"""
LOOK_AGAIN_SECONDS = 2 * BEAT_SECONDS + 1
"""between the two looks at a run: where the database itself was away, all beats are old, and come again within one"""
POLL_SECONDS = 0.5
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
    """Enters the first beat of a new run, or of one that goes on in this process; its fence."""
    now = database_time(session)
    row = session.get(HeartbeatRow, run, with_for_update=True)
    if row is None:
        row = HeartbeatRow(run_id=run, fence=0, spent=0.0)
        session.add(row)
    row.spent = seconds_until_last_beat(row)
    row.fence += 1
    row.beat_at = row.began_at = now
    row.process = this_process()
    return row.fence


def seconds_until_last_beat(row: HeartbeatRow) -> float:
    """That the processes of a run have taken, the last one as far as it beat."""
    here = (row.beat_at - row.began_at).total_seconds() if row.began_at else 0.0
    return row.spent + max(0.0, here)


def beat(session: Session, run: int) -> None:
    row = session.get_one(HeartbeatRow, run)
    row.beat_at = database_time(session)


Suspects = dict[int, datetime | None]
"""run that may have been killed → its last beat; None of a run without any, which is of an older evoengine"""


def find_suspects(session: Session) -> Suspects:
    """The runs that count as running and look killed."""
    too_old = database_time(session) - timedelta(seconds=KILLED_AFTER_SECONDS)
    running = select(RunRow.id, HeartbeatRow.beat_at, HeartbeatRow.process).outerjoin(HeartbeatRow)
    found: Suspects = {}
    for run, beat_at, process in session.execute(running.where(RunRow.status == RUNNING)):
        if beat_at is None or beat_at < too_old or is_gone(process):
            found[run] = beat_at
    return found


def are_gone(session: Session, runs: Iterable[int]) -> set[int]:
    """Those that need no second look: without any beat, or with a process that was on this machine and has ended."""
    rows = {run: session.get(HeartbeatRow, run) for run in runs}
    return {run for run, row in rows.items() if row is None or is_gone(row.process)}


def mark_killed(session: Session, suspects: Suspects) -> None:
    """Takes those runs from their processes that have not beaten since; what was under way in them ends."""
    for run, beat_at in suspects.items():
        # in the order in which who writes locks them
        heart = session.get(HeartbeatRow, run, with_for_update=True)
        row = session.get(RunRow, run, with_for_update=True)
        if row is None or row.status != RUNNING or (heart and heart.beat_at) != beat_at:
            continue
        row.status = KILLED
        if heart is not None:
            heart.fence += 1
        end_unfinished(session, run, killed=True)


class Watchman:
    """Looks at the running runs now and then; one that looks killed twice, with beats' time between, is."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[datetime | None, float]] = {}
        """suspect → its last beat, and since when it has been seen like that"""

    def look(self, session: Session) -> Suspects:
        """Those that are to be marked as killed."""
        now, suspects = time.monotonic(), find_suspects(session)
        old, self._seen = self._seen, {}
        for run, beat_at in suspects.items():
            before, since = old.get(run, (beat_at, now))
            self._seen[run] = (beat_at, since if before == beat_at else now)
        gone = are_gone(session, suspects)
        waited = {run for run, (_, since) in self._seen.items() if now - since >= LOOK_AGAIN_SECONDS}
        return {run: suspects[run] for run in waited | gone}

    @property
    def undecided(self) -> list[int]:
        """Runs that have to be looked at again."""
        return sorted(self._seen)

    def forget(self, runs: Iterable[int]) -> None:
        for run in runs:
            self._seen.pop(run, None)


def require_fence(connection: Connection, run: int, fence: int) -> None:
    """Raises MachineError where the run was taken for killed. Holds, until the transaction ends, that it is not."""
    # SQLite's transaction has the write lock from its beginning
    query = _FENCE if connection.dialect.name == "sqlite" else _FENCE_SHARED
    if connection.scalar(query, {"run": run}) != fence:
        raise MachineError(
            f"this process stood still for more than {KILLED_AFTER_SECONDS:g} s, so another search took run {run} for "
            "killed and goes on with what it left: nothing more is written, search again"
        )


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
