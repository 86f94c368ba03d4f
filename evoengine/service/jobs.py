"""Jobs in the database: requests, progress and events.

A server claims a job by raising its fence; only the holder of the current fence may write to the job and its runs.
Times are those of the database's clock.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, cast, get_args

from sqlalchemy import func, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from evoengine.errors import EvoengineError, MachineError, NothingFound, UsageError
from evoengine.ledger.runs import database_time
from evoengine.ledger.store import Ledger
from evoengine.service.tables import JobEventRow, JobRow
from evoengine.views import SCHEMA
from evoengine.views import service as views
from evoengine.views.service import JobPartView, JobState

QUEUED, RUNNING, WAITING = "queued", "running", "waiting"
DONE, CANCELLED, FAILED = "done", "cancelled", "failed"
STATES: tuple[JobState, ...] = get_args(JobState)
ENDED = frozenset({DONE, CANCELLED, FAILED})
LONGEST_KEY = 255
"""characters of an idempotency key"""


class TooMany(EvoengineError):
    """The submitter has reached its limit of unfinished jobs."""


class Fenced(MachineError):
    """The job was taken over by another server, or cancelled: this server may no longer write to it."""


@dataclass(frozen=True, slots=True)
class Job:
    id: int
    state: str
    why: str | None
    request: Mapping[str, Any]
    gpu: str
    priority: int
    submitter: int
    owner: str | None
    fence: int
    parts: list[dict[str, Any]]
    """of each problem: problem, runs, done, seconds, ended"""
    progress: Mapping[str, Any] | None
    events: int
    deaths: int
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None

    @property
    def ended(self) -> bool:
        return self.state in ENDED

    @property
    def predicted(self) -> bool:
        """Return whether the whole job was searched without a GPU and remains to be timed."""
        return all(part["ended"] for part in self.parts)


@dataclass(frozen=True, slots=True)
class Event:
    number: int
    event: str
    data: Mapping[str, Any]
    at: datetime


class Jobs:
    def __init__(self, ledger: Ledger) -> None:
        self._db = ledger.database

    # ── for clients ─────────────────────────────────────────────────────────────────────────────────────────────────

    def submit(self, request: Mapping[str, Any], submitter: int, key: str | None, most: int) -> Job:
        """Enter a job, or return the one that the submitter entered before with the same key and request.

        Raises UsageError if the key was used for another request, and TooMany if the submitter has `most` unfinished
        jobs.
        """
        body = _sha256(request)
        with self._db.writing() as session:
            if known := _by_key(session, submitter, key):
                return _same(known, body, key)
            unfinished = select(func.count()).where(JobRow.submitter == submitter, JobRow.state.not_in(ENDED))
            if session.scalars(unfinished).one() >= most:
                raise TooMany(f"you have {most} unfinished jobs, the most allowed; wait for one to end, or cancel one")
            row = _new(request, submitter, key, body, database_time(session))
            try:
                with session.begin_nested():
                    session.add(row)
            except IntegrityError:  # a concurrent request has the same key
                known = _by_key(session, submitter, key)
                if known is None:
                    raise
                return _same(known, body, key)
            _add_event(session, row, "state", {"state": QUEUED, "why": None})
            return to_job(row)

    def unfinished_problems(self, gpu: str) -> set[str]:
        """Return the problems of unfinished jobs for the GPU."""
        with self._db.reading() as session:
            rows = session.scalars(select(JobRow).where(JobRow.gpu == gpu, JobRow.state.not_in(ENDED)))
            return {part["problem"] for row in rows for part in row.parts}

    def find(self, number: int) -> Job:
        """Return a job. Raises NothingFound."""
        with self._db.reading() as session:
            return to_job(_row(session, number))

    def newest(self, state: str | None = None, before: int | None = None, limit: int = 100) -> list[Job]:
        """Return jobs, newest first."""
        wanted = select(JobRow).order_by(JobRow.id.desc()).limit(limit)
        if state is not None:
            wanted = wanted.where(JobRow.state == state)
        if before is not None:
            wanted = wanted.where(JobRow.id < before)
        with self._db.reading() as session:
            return [to_job(row) for row in session.scalars(wanted)]

    def counts(self) -> dict[str, int]:
        """Return the number of jobs in each state."""
        with self._db.reading() as session:
            found = session.execute(select(JobRow.state, func.count()).group_by(JobRow.state)).all()
        return dict.fromkeys(get_args(JobState), 0) | {state: count for state, count in found}

    def cancel(self, number: int) -> Job:
        """Cancel the job unless it has ended; its results are kept. Raises NothingFound."""
        with self._db.writing() as session:
            row = _row(session, number, lock=True)
            if row.state not in ENDED:
                end(session, row, CANCELLED, None)
            return to_job(row)

    def events(self, number: int, after: int = 0, limit: int = 1000) -> list[Event]:
        """Return the events of a job with numbers above `after`, in order."""
        of_job = select(JobEventRow).where(JobEventRow.job_id == number, JobEventRow.number > after)
        with self._db.reading() as session:
            rows = session.scalars(of_job.order_by(JobEventRow.number).limit(limit))
            return [Event(row.number, row.event, row.data, row.at) for row in rows]

    def announced(self, number: int) -> set[int]:
        """Return the trials that events of the job have announced."""
        told = select(JobEventRow.data).where(JobEventRow.job_id == number, JobEventRow.event == "trial")
        with self._db.reading() as session:
            return {data["trial"] for data in session.scalars(told)}

    # ── for the holder of the fence ─────────────────────────────────────────────────────────────────────────────────

    def tell(
        self,
        number: int,
        fence: int,
        event: str,
        data: Mapping[str, Any],
        parts: Iterable[Mapping[str, Any]] | None = None,
        progress: Mapping[str, Any] | None = None,
    ) -> None:
        """Add an event, and record the job's progress. Raises Fenced."""
        with self._db.writing() as session:
            row = held(session, number, fence)
            if parts is not None:
                row.parts = [dict(part) for part in parts]
            if progress is not None:
                row.progress = dict(progress)
            _add_event(session, row, event, data)

    def note(self, number: int, fence: int, parts: Iterable[Mapping[str, Any]]) -> None:
        """Record the runs of the job's problems, and how far they came. Raises Fenced."""
        with self._db.writing() as session:
            held(session, number, fence).parts = [dict(part) for part in parts]

    def finish(self, number: int, fence: int, state: str, why: str | None = None) -> None:
        """Finish the job. Raises Fenced."""
        with self._db.writing() as session:
            end(session, held(session, number, fence), state, why)

    def wait(self, number: int, fence: int, why: str) -> None:
        """Release the job until a server can continue it. Raises Fenced."""
        with self._db.writing() as session:
            change(session, held(session, number, fence), WAITING, why)


def held(session: Session, number: int, fence: int) -> JobRow:
    """Return the job, locked until the transaction ends. Raises Fenced."""
    row = _row(session, number, lock=True)
    if row.fence != fence or row.state != RUNNING:
        raise Fenced(f"job {number} was cancelled or taken over by another server; this one no longer writes to it")
    return row


def change(session: Session, row: JobRow, state: str, why: str | None) -> None:
    """Change the state and add the event. A job that no longer runs has no owner."""
    if (row.state, row.why) == (state, why):
        return
    row.state, row.why = state, why
    if state != RUNNING:
        row.owner = row.beat_at = None
    _add_event(session, row, "state", {"state": state, "why": why})


def end(session: Session, row: JobRow, state: str, why: str | None) -> None:
    row.finished_at = database_time(session)
    change(session, row, state, why)


def locked(session: Session, states: Iterable[str]) -> list[JobRow]:
    """Return jobs in these states by priority, then by age, skipping rows that another transaction has locked."""
    wanted = select(JobRow).where(JobRow.state.in_(states)).order_by(JobRow.priority.desc(), JobRow.id)
    return list(session.scalars(wanted.with_for_update(skip_locked=True)))


def to_job(row: JobRow) -> Job:
    stated = {name: getattr(row, name) for name in Job.__slots__}
    return Job(**stated | {"parts": [dict(part) for part in row.parts]})


def job_json(job: Job) -> views.JobView:
    total = job.request["trials"] * len(job.parts)
    begun: views.JobProgressView = {"stage": None, "done": 0, "total": total, "best": None}
    return {
        "schema": SCHEMA,
        "id": job.id,
        "state": cast("JobState", job.state),
        "why": job.why,
        "request": job.request,
        "gpu": job.gpu,
        "priority": job.priority,
        "parts": cast("list[JobPartView]", job.parts),
        "progress": cast("views.JobProgressView", job.progress) or begun,
        "events": job.events,
        "created_at": job.created_at,
        "started_at": job.started_at,
        "finished_at": job.finished_at,
        "links": {"self": f"/v1/jobs/{job.id}", "events": f"/v1/jobs/{job.id}/events"},
    }


def _new(request: Mapping[str, Any], submitter: int, key: str | None, body: str, now: datetime) -> JobRow:
    parts = [{"problem": p, "runs": [], "done": 0, "seconds": 0.0, "ended": None} for p in request["problems"]]
    return JobRow(
        state=QUEUED,
        request=dict(request),
        gpu=request["gpu"],
        priority=request["priority"],
        submitter=submitter,
        idempotency_key=key,
        body_sha256=body,
        fence=0,
        parts=parts,
        events=0,
        deaths=0,
        created_at=now,
    )


def _by_key(session: Session, submitter: int, key: str | None) -> JobRow | None:
    if key is None:
        return None
    return session.scalar(select(JobRow).where(JobRow.submitter == submitter, JobRow.idempotency_key == key))


def _same(row: JobRow, body: str, key: str | None) -> Job:
    if row.body_sha256 != body:
        raise UsageError(f"the Idempotency-Key {key!a} was used for another request, job {row.id}; use a new key")
    return to_job(row)


def _row(session: Session, number: int, lock: bool = False) -> JobRow:
    row = session.get(JobRow, number, with_for_update=True if lock else None) if 0 < number < 2**31 else None
    if row is None:
        raise NothingFound(f"there is no job {number}")
    return row


def _add_event(session: Session, row: JobRow, event: str, data: Mapping[str, Any]) -> None:
    """Add an event. The row is locked, so that numbers appear in order."""
    session.flush()
    row.events += 1
    session.add(JobEventRow(job_id=row.id, number=row.events, event=event, data=dict(data), at=database_time(session)))


def _sha256(request: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()
