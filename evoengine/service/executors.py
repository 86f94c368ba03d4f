"""Who runs jobs: servers that beat, the GPUs they can time on, and which job goes where.

A server has a slot per GPU and some without one, or some whose jobs run on a Ray cluster. It claims a job for a free
slot; of a server whose beat is old, others take the jobs over.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, cast

from sqlalchemy import and_, delete, or_, select
from sqlalchemy.orm import Session

from evoengine.devices.driver import GpuDevice, find_driver
from evoengine.gpu import known_gpus
from evoengine.ledger.heartbeat import database_time, mark_killed
from evoengine.ledger.service_tables import ExecutorRow, JobRow
from evoengine.ledger.tables import HeartbeatRow
from evoengine.service.database import Database
from evoengine.service.jobs import FAILED, QUEUED, RUNNING, WAITING, Job, change, end, held, locked, to_job
from evoengine.service.settings import Settings
from evoengine.views.service import ServerGpu, ServerInfo

MOST_DEATHS = 3
"""of a job's process, after which it is not tried again"""
FORGOTTEN_AFTER = timedelta(days=1)
"""an executor that does not beat is no longer listed"""


@dataclass(frozen=True, slots=True)
class Slot:
    """A place for one job of this server."""

    number: int
    device: GpuDevice | None = None
    """of this machine"""
    on_cluster: tuple[str, ...] = ()
    """evoengine's names of the GPUs that its jobs are timed on by way of Ray"""

    @property
    def gpus(self) -> tuple[str, ...]:
        return offered(self.device) if self.device else self.on_cluster


@dataclass(frozen=True, slots=True)
class Executor:
    owner: str
    gpus: Sequence[Mapping[str, Any]]
    cpu_jobs: int
    beat_at: datetime
    alive: bool


def server_json(executor: Executor) -> ServerInfo:
    return {
        "owner": executor.owner,
        "alive": executor.alive,
        "gpus": cast("list[ServerGpu]", executor.gpus),
        "cpu_jobs": executor.cpu_jobs,
        "seen_at": executor.beat_at,
    }


def offered(device: GpuDevice) -> tuple[str, ...]:
    """Return the known GPUs that this one can time for: its own, else those of its architecture."""
    known = known_gpus().values()
    own = tuple(gpu.key for gpu in known if gpu.name == device.name)
    return own or tuple(gpu.key for gpu in known if gpu.capability == device.capability)


def slots_here(settings: Settings) -> list[Slot]:
    """Return one slot per GPU of this machine and some without one; with a cluster only those, since its nodes have
    the GPUs."""
    if settings.cluster:
        return [Slot(number, None, settings.cluster_gpus) for number in range(settings.cpu_jobs)]
    found = find_driver()
    devices = [] if isinstance(found, str) else found[1]
    slots = [Slot(number, device) for number, device in enumerate(devices)]
    return slots + [Slot(len(devices) + number) for number in range(settings.cpu_jobs)]


class Executors:
    """`patience`: seconds after which a server that does not beat is taken for killed."""

    def __init__(self, database: Database, owner: str, slots: Sequence[Slot], patience: float) -> None:
        self._db, self._owner, self._slots = database, owner, slots
        self._patience = timedelta(seconds=patience)

    def beat(self, jobs: Iterable[tuple[int, int]]) -> set[int]:
        """Record that this server and its jobs (number, fence) are alive; return those that are no longer its own,
        cancelled or taken over."""
        with self._db.writing() as session:
            now = database_time(session)
            self._enter(session, now)
            self._sort(session, now)
            lost = set()
            for number, fence in jobs:
                row = session.get(JobRow, number, with_for_update=True)
                if row is None or row.fence != fence or row.state != RUNNING:
                    lost.add(number)
                else:
                    row.beat_at = now
            return lost

    def claim(self, slot: Slot) -> Job | None:
        """Claim the next job that fits the slot with a new fence."""
        if not self._anything_to_do():
            return None
        with self._db.writing() as session:
            now = database_time(session)
            timed = _timed(session, now - self._patience)
            for row in locked(session, (QUEUED, RUNNING)):
                if row.state == RUNNING and not self._is_lost(row, now):
                    continue
                if not _fits(to_job(row), timed, slot):
                    continue
                take(session, row)
                row.owner, row.beat_at, row.started_at = self._owner, now, row.started_at or now
                if row.state == RUNNING:  # of a server that was killed
                    change(session, row, QUEUED, "its server was lost")
                    row.owner, row.beat_at = self._owner, now
                change(session, row, RUNNING, None)
                return to_job(row)
        return None

    def _anything_to_do(self) -> bool:
        """Return whether a job may be waiting. Asked often, so it does not take the writer's lock."""
        with self._db.reading() as session:
            too_old = database_time(session) - self._patience
            open_to_all = or_(JobRow.state == QUEUED, and_(JobRow.state == RUNNING, JobRow.beat_at < too_old))
            return session.scalar(select(JobRow.id).where(open_to_all).limit(1)) is not None

    def give_back(self, number: int, fence: int, why: str) -> None:
        """Return a job that this server holds, so that another can continue it at once; its results are kept."""
        with self._db.writing() as session:
            row = held(session, number, fence)
            take(session, row)
            change(session, row, QUEUED, why)

    def died(self, number: int, fence: int, how: str) -> None:
        """Record that the machine failed the job, or that its process died as stated by `how`; it is retried a
        limited number of times."""
        with self._db.writing() as session:
            row = held(session, number, fence)
            take(session, row)
            row.deaths += 1
            if row.deaths < MOST_DEATHS:
                change(session, row, QUEUED, how)
            else:
                end(session, row, FAILED, f"tried {row.deaths} times, the last time: {how}")

    def leave(self) -> None:
        """Record that this server runs no more jobs."""
        with self._db.writing() as session:
            session.execute(delete(ExecutorRow).where(ExecutorRow.owner == self._owner))

    def known(self) -> list[Executor]:
        with self._db.reading() as session:
            since = database_time(session) - self._patience
            rows = session.scalars(select(ExecutorRow).order_by(ExecutorRow.owner))
            return [Executor(r.owner, r.gpus, r.cpu_jobs, r.beat_at, r.beat_at >= since) for r in rows]

    def _enter(self, session: Session, now: datetime) -> None:
        row = session.get(ExecutorRow, self._owner, with_for_update=True)
        if row is None:
            row = ExecutorRow(owner=self._owner)
            session.add(row)
        row.gpus = [_described(slot) for slot in self._slots if slot.gpus]
        row.cpu_jobs, row.beat_at = sum(s.device is None for s in self._slots), now
        session.execute(delete(ExecutorRow).where(ExecutorRow.beat_at < now - FORGOTTEN_AFTER))

    def _sort(self, session: Session, now: datetime) -> None:
        """Mark jobs that no server can run as waiting, with the reason, and others as queued."""
        since = now - self._patience
        timed = _timed(session, since)
        has_cpu = session.scalar(
            select(ExecutorRow.owner).where(ExecutorRow.cpu_jobs > 0, ExecutorRow.beat_at >= since).limit(1)
        )
        for row in locked(session, (QUEUED, WAITING)):
            job = to_job(row)
            need = _need(job, timed)
            can_run = has_cpu if need is None else need in timed.for_job(job)
            if not can_run:
                change(session, row, WAITING, _waits_for(job, need))
            elif row.state == WAITING:
                change(session, row, QUEUED, None)

    def _is_lost(self, row: JobRow, now: datetime) -> bool:
        return row.beat_at is None or row.beat_at < now - self._patience


def take(session: Session, row: JobRow) -> None:
    """Raise the fence of the job, and those of its runs that count as running, so that the previous owner writes
    nothing more. Their trials in progress end."""
    row.fence += 1
    runs = {run for part in row.parts for run in part["runs"]}
    hearts = {run: session.get(HeartbeatRow, run, with_for_update=True) for run in runs}
    mark_killed(session, {run: heart.beat_at if heart else None for run, heart in hearts.items()})


@dataclass(frozen=True, slots=True)
class Timed:
    """GPUs that live servers can time for."""

    own: frozenset[str]
    on_cluster: frozenset[str]

    def for_job(self, job: Job) -> frozenset[str]:
        """Return the GPUs that can time for the job: predictions are timed on a server's own GPU, a search also on a
        cluster."""
        return self.own if job.predicted else self.own | self.on_cluster


def _timed(session: Session, since: datetime) -> Timed:
    rows = session.scalars(select(ExecutorRow).where(ExecutorRow.beat_at >= since))
    found: dict[bool, set[str]] = {False: set(), True: set()}
    for row in rows:
        for gpu in row.gpus:
            found[gpu["on_cluster"]].update(gpu["gpus"])
    return Timed(frozenset(found[False]), frozenset(found[True]))


def _described(slot: Slot) -> dict[str, Any]:
    name = slot.device.name if slot.device else "Ray cluster"
    return {"name": name, "gpus": list(slot.gpus), "on_cluster": slot.device is None}


def _need(job: Job, timed: Timed) -> str | None:
    """Return the GPU that the job needs now, None if a CPU suffices."""
    device = job.request["device"]
    if device == "cuda":
        return job.gpu
    if device == "auto":
        return job.gpu if job.predicted or job.gpu in timed.for_job(job) else None
    return None


def _fits(job: Job, timed: Timed, slot: Slot) -> bool:
    need = _need(job, timed)
    if need is None or (job.predicted and slot.device is None):
        return need is None and slot.device is None
    return need in slot.gpus


def _waits_for(job: Job, need: str | None) -> str:
    if need is None:
        return "no server that is up runs jobs on the CPU; one with EVOENGINE_CPU_JOBS above 0 takes it"
    if job.predicted:
        return f"searched and predicted; it is timed when a server has a GPU for {need}"
    return f'no server that is up has a GPU for {need}; with "device": "auto" it is predicted meanwhile'
