"""Tell whether the process of a run lives, and read what a killed one leaves.

A running search writes the time of the database's clock to its row of `heartbeats` every few seconds, because host
names and process numbers mean nothing in containers. A run counts as killed if its last beat is older than
`KILLED_AFTER_SECONDS` and no other arrives while a process watches, and at once if its process was on this machine and
has ended. The run's fence is then raised, so that a process that was only stopped or asleep can write no more.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from datetime import UTC, datetime, timedelta

from sqlalchemy import Connection, or_, select, text
from sqlalchemy.orm import Session, aliased

from evoengine.errors import EvoengineError, MachineError
from evoengine.ledger.tables import CandidateRow, HeartbeatRow, RunRow
from evoengine.records import DEATHS, KILLED, RUNNING, Outcome
from evoengine.sandbox.machine import is_gone, this_process

BEAT_SECONDS = 3.0
KILLED_AFTER_SECONDS = 60.0
"""longer than a writer waits for another one's transaction"""
LOOK_AGAIN_SECONDS = 2 * BEAT_SECONDS + 1
"""between two looks at a run: after the database itself was unreachable, all beats are old, and new ones arrive soon"""
POLL_SECONDS = 0.5
_FENCE = text("SELECT fence FROM heartbeats WHERE run_id = :run")
_FENCE_SHARED = text("SELECT fence FROM heartbeats WHERE run_id = :run FOR SHARE")
"""every write asks this; composing the query each time costs more than its execution"""


def database_time(session: Session) -> datetime:
    """Return the database's time, UTC: one clock for all that write there."""
    if session.get_bind().dialect.name == "sqlite":
        told: str = session.scalars(text("SELECT strftime('%Y-%m-%d %H:%M:%f', 'now')")).one()
        return datetime.fromisoformat(told).replace(tzinfo=UTC)
    now: datetime = session.scalars(text("SELECT clock_timestamp()")).one()
    return now


def begin_beating(session: Session, run: int) -> int:
    """Enter the first beat of a new run, or of one that goes on in this process; return its fence."""
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
    """Return the seconds that the processes of a run have taken, the last one until its last beat."""
    here = (row.beat_at - row.began_at).total_seconds() if row.began_at else 0.0
    return row.spent + max(0.0, here)


def beat(session: Session, run: int) -> None:
    row = session.get_one(HeartbeatRow, run)
    row.beat_at = database_time(session)


def find_suspects(session: Session) -> dict[int, tuple[datetime | None, bool]]:
    """Return the runs that count as running and look killed, each with its last beat and whether that is certain.

    It is where the process was on this machine and has ended, and of a run without any beat, which is of an older
    evoengine.
    """
    too_old = database_time(session) - timedelta(seconds=KILLED_AFTER_SECONDS)
    running = select(RunRow.id, HeartbeatRow.beat_at, HeartbeatRow.process).outerjoin(HeartbeatRow)
    found: dict[int, tuple[datetime | None, bool]] = {}
    for run, beat_at, process in session.execute(running.where(RunRow.status == RUNNING)):
        certain = beat_at is None or is_gone(process)
        if certain or beat_at < too_old:
            found[run] = beat_at, certain
    return found


def mark_killed(session: Session, suspects: Mapping[int, datetime | None]) -> None:
    """Take those runs from their processes that have not beaten since, and end what was in flight in them.

    `suspects` has the last beat of each run; None of one without any.
    """
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
    """Looks at the running runs repeatedly: one that looks killed twice, LOOK_AGAIN_SECONDS apart, is."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[datetime | None, float]] = {}
        """by suspect, its last beat and the time since which that has not changed"""

    def look(self, session: Session) -> dict[int, datetime | None]:
        """Return the runs that are to be marked as killed, each with its last beat."""
        now, old, killed = time.monotonic(), self._seen, {}
        self._seen = {}
        for run, (beat_at, certain) in find_suspects(session).items():
            before, since = old.get(run, (beat_at, now))
            self._seen[run] = beat_at, since if before == beat_at else now
            if certain or now - self._seen[run][1] >= LOOK_AGAIN_SECONDS:
                killed[run] = beat_at
        return killed

    @property
    def undecided(self) -> list[int]:
        """Return the runs that have to be looked at again."""
        return sorted(self._seen)

    def forget(self, runs: Iterable[int]) -> None:
        for run in runs:
            self._seen.pop(run, None)


def require_fence(connection: Connection, run: int, fence: int) -> None:
    """Raise MachineError if the run was marked as killed. Until the transaction ends, no process can do that."""
    # SQLite's transaction has the write lock from its beginning
    query = _FENCE if connection.dialect.name == "sqlite" else _FENCE_SHARED
    if connection.scalar(query, {"run": run}) != fence:
        raise MachineError(
            f"this process was suspended for more than {KILLED_AFTER_SECONDS:g} s, so another search considered "
            f"run {run} killed and continues its trials; this process writes nothing more: search again"
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


# ── what was in flight in a killed search ─────────────────────────────────────────────────────────────────────────────


RETRIES = 4
"""how often a candidate is tried again, alone, that was in flight when its search was killed. Kernels run in other
processes, so whatever killed the search is no verdict on them; but what takes down the machine is not tried for ever"""
WHY_KILLED = "was being evaluated when the process of its search was killed"
WHY_INTERRUPTED = "was being evaluated when its search ended"


def end_unfinished(session: Session, run: int, *, killed: bool) -> None:
    """End what is in flight in a run that is over."""
    for row in session.scalars(select(CandidateRow).where(CandidateRow.run_id == run, CandidateRow.outcome.is_(None))):
        row.outcome, row.reason = str(Outcome.INTERRUPTED), WHY_INTERRUPTED
        if killed:
            row.outcome, row.reason = str(Outcome.KILLED), WHY_KILLED
            if (before := kills(session, row)) >= RETRIES:
                row.reason = f"{WHY_KILLED}, for the {before + 1}th time: it is not tried again"
        row.finished_at = datetime.now(UTC)


_ONE_DEATH = ("the worker process died (%", "the worker process ended without an answer%", "its worker was lost %")
"""beginnings of the reasons that early versions gave when one worker had died, whatever had killed it"""
_KILLED_THRICE = "its search was killed 3 times while it was under way"
"""the reason that early versions gave when a search had been killed, whatever had killed it"""


def of_one_death(session: Session) -> list[CandidateRow]:
    """Return the trials that were rejected because one process died, or because their search was killed."""
    one = or_(*(CandidateRow.reason.like(begins) for begins in _ONE_DEATH), CandidateRow.reason == _KILLED_THRICE)
    judged = CandidateRow.outcome.in_([str(Outcome.CRASHED), str(Outcome.UNCOMPILABLE)])
    rows = session.scalars(select(CandidateRow).where(judged, one).order_by(CandidateRow.id))
    return [row for row in rows if row.reason == _KILLED_THRICE or DEATHS not in (row.evidence or {})]


def take_back(row: CandidateRow) -> None:
    """Take back a verdict from one death, which says nothing of the kernel.

    The trial is tried again when its run goes on.
    """
    if row.reason != _KILLED_THRICE:
        row.reason = f"{row.reason}: it did not die twice with nothing beside it"
    row.outcome = str(Outcome.KILLED)


def kills(session: Session, row: CandidateRow) -> int:
    """Return how many of the trials that this one retries were killed; interrupted ones are not counted."""
    found, seen = 0, {row.id}
    while row.retry_of is not None and row.retry_of not in seen:
        seen.add(row.retry_of)
        earlier = session.get(CandidateRow, row.retry_of)
        if earlier is None:
            break
        row = earlier
        found += row.outcome == Outcome.KILLED
    return found


def left_over(session: Session, run: int) -> dict[int, int]:
    """Return the trials of a run that were cut short and not tried again, and how often each was killed."""
    retry = aliased(CandidateRow)
    unjudged = [str(o) for o in Outcome if not o.judged]
    again = select(retry.id).where(retry.run_id == run, retry.retry_of == CandidateRow.id)
    rows = session.scalars(
        select(CandidateRow)
        .where(CandidateRow.run_id == run, CandidateRow.outcome.in_(unjudged), ~again.exists())
        .order_by(CandidateRow.id)
    )
    return {row.id: kills(session, row) + (row.outcome == Outcome.KILLED) for row in rows}
