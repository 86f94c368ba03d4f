"""Run jobs: heartbeats of servers, the GPUs on which they can time, the choice of a slot, and the dispatcher thread.

A server has a slot per GPU and some without one, or slots whose jobs run on a Ray cluster. It claims a job for a free
slot; the jobs of a server whose heartbeat is old are taken over by others. The dispatcher runs a process per job. A
step that raises does not end it, because a server without a dispatcher would claim jobs that nobody runs. A job that
cannot be started is returned to the queue, and its slot is left empty for a while.
"""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from typing import Any, cast

from sqlalchemy import and_, delete, or_, select
from sqlalchemy.orm import Session

from evoengine.devices.driver import GpuDevice, find_driver
from evoengine.errors import EvoengineError
from evoengine.gpu import known_gpus
from evoengine.ledger.runs import database_time, mark_killed
from evoengine.ledger.store import Ledger
from evoengine.ledger.tables import HeartbeatRow
from evoengine.paths import environment_with_ledger
from evoengine.sandbox.machine import how_ended
from evoengine.service.jobs import FAILED, QUEUED, RUNNING, WAITING, Fenced, Job, change, end, held, locked, to_job
from evoengine.service.settings import Settings
from evoengine.service.tables import ExecutorRow, JobRow
from evoengine.views.service import ServerGpuView, ServerView

CPU = "cpu"
"""the device of a job without a GPU"""
MOST_DEATHS = 3
"""deaths of a job's process after which the job is not retried"""
FORGOTTEN_AFTER = timedelta(days=1)
"""after which a server without a heartbeat is no longer listed"""


@dataclass(frozen=True, slots=True)
class Slot:
    """A place for one job of this server."""

    number: int
    device: GpuDevice | None = None
    """of this machine"""
    on_cluster: tuple[str, ...] = ()
    """kinds of GPU on which its jobs are timed through Ray"""

    @property
    def gpus(self) -> tuple[str, ...]:
        return offered(self.device) if self.device else self.on_cluster


def offered(device: GpuDevice) -> tuple[str, ...]:
    """Return the known GPUs for which this device can time: its own, else those of its architecture."""
    known = known_gpus().values()
    own = tuple(gpu.key for gpu in known if gpu.name == device.name)
    return own or tuple(gpu.key for gpu in known if gpu.capability == device.capability)


def slots_here(settings: Settings) -> list[Slot]:
    """Return one slot per GPU of this machine and some without one.

    With a cluster there are only those, since its nodes have the GPUs.
    """
    if settings.cluster:
        return [Slot(number, None, settings.cluster_gpus) for number in range(settings.cpu_jobs)]
    found = find_driver()
    devices = [] if isinstance(found, str) else found[1]
    slots = [Slot(number, device) for number, device in enumerate(devices)]
    return slots + [Slot(len(devices) + number) for number in range(settings.cpu_jobs)]


class Executors:
    """The servers that share a ledger; `patience`: seconds after which one without a heartbeat counts as dead."""

    def __init__(self, ledger: Ledger, owner: str, slots: Sequence[Slot], patience: float) -> None:
        self._db, self._owner, self._slots = ledger.database, owner, slots
        self._patience = timedelta(seconds=patience)

    def beat(self, jobs: Iterable[tuple[int, int]]) -> set[int]:
        """Record that this server and its jobs (number, fence) are alive.

        Return those that are no longer its own, cancelled or taken over.
        """
        with self._db.writing() as session:
            now = database_time(session)
            self._enter(session, now)
            self._update_waiting(session, now)
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
            available = _available(session, now - self._patience)
            for row in locked(session, (QUEUED, RUNNING)):
                if row.state == RUNNING and not self._is_lost(row, now):
                    continue
                if not _fits(to_job(row), available, slot):
                    continue
                fence_job(session, row)
                row.owner, row.beat_at, row.started_at = self._owner, now, row.started_at or now
                if row.state == RUNNING:  # its server was killed
                    change(session, row, QUEUED, "its server was lost")
                    row.owner, row.beat_at = self._owner, now
                change(session, row, RUNNING, None)
                return to_job(row)
        return None

    def _anything_to_do(self) -> bool:
        """Return whether a job may be waiting. Called often, so it does not take the writer's lock."""
        with self._db.reading() as session:
            too_old = database_time(session) - self._patience
            open_to_all = or_(JobRow.state == QUEUED, and_(JobRow.state == RUNNING, JobRow.beat_at < too_old))
            return session.scalar(select(JobRow.id).where(open_to_all).limit(1)) is not None

    def give_back(self, number: int, fence: int, why: str) -> None:
        """Return a job that this server holds, so that another can continue it at once; its results are kept."""
        with self._db.writing() as session:
            row = held(session, number, fence)
            fence_job(session, row)
            change(session, row, QUEUED, why)

    def died(self, number: int, fence: int, how: str) -> None:
        """Record that the job's process or machine failed, for the reason `how`; the job is tried MOST_DEATHS times."""
        with self._db.writing() as session:
            row = held(session, number, fence)
            fence_job(session, row)
            row.deaths += 1
            if row.deaths < MOST_DEATHS:
                change(session, row, QUEUED, how)
            else:
                end(session, row, FAILED, f"tried {row.deaths} times, the last time: {how}")

    def leave(self) -> None:
        """Record that this server runs no more jobs."""
        with self._db.writing() as session:
            session.execute(delete(ExecutorRow).where(ExecutorRow.owner == self._owner))

    def known(self) -> list[ServerView]:
        with self._db.reading() as session:
            since = database_time(session) - self._patience
            rows = session.scalars(select(ExecutorRow).order_by(ExecutorRow.owner))
            return [
                {
                    "owner": row.owner,
                    "alive": row.beat_at >= since,
                    "gpus": cast("list[ServerGpuView]", row.gpus),
                    "cpu_jobs": row.cpu_jobs,
                    "seen_at": row.beat_at,
                }
                for row in rows
            ]

    def _enter(self, session: Session, now: datetime) -> None:
        row = session.get(ExecutorRow, self._owner, with_for_update=True)
        if row is None:
            row = ExecutorRow(owner=self._owner)
            session.add(row)
        row.gpus = [_described(slot) for slot in self._slots if slot.gpus]
        row.cpu_jobs, row.beat_at = sum(s.device is None for s in self._slots), now
        session.execute(delete(ExecutorRow).where(ExecutorRow.beat_at < now - FORGOTTEN_AFTER))

    def _update_waiting(self, session: Session, now: datetime) -> None:
        """Mark jobs that no server can run as waiting, with the reason, and others as queued."""
        since = now - self._patience
        available = _available(session, since)
        has_cpu = session.scalar(
            select(ExecutorRow.owner).where(ExecutorRow.cpu_jobs > 0, ExecutorRow.beat_at >= since).limit(1)
        )
        for row in locked(session, (QUEUED, WAITING)):
            job = to_job(row)
            need = _need(job, available)
            can_run = has_cpu if need is None else need in available.for_job(job)
            if not can_run:
                change(session, row, WAITING, _waits_for(job, need))
            elif row.state == WAITING:
                change(session, row, QUEUED, None)

    def _is_lost(self, row: JobRow, now: datetime) -> bool:
        return row.beat_at is None or row.beat_at < now - self._patience


def fence_job(session: Session, row: JobRow) -> None:
    """Raise the fence of the job, and those of its runs that count as running.

    The previous owner writes nothing more. Trials in progress end.
    """
    row.fence += 1
    runs = {run for part in row.parts for run in part["runs"]}
    hearts = {run: session.get(HeartbeatRow, run, with_for_update=True) for run in runs}
    mark_killed(session, {run: heart.beat_at if heart else None for run, heart in hearts.items()})


@dataclass(frozen=True, slots=True)
class AvailableGpus:
    """GPUs that live servers can time for."""

    own: frozenset[str]
    on_cluster: frozenset[str]

    def for_job(self, job: Job) -> frozenset[str]:
        """Return the GPUs that can time for the job.

        Predictions are timed on a server's own GPU, a search also on a cluster.
        """
        return self.own if job.predicted else self.own | self.on_cluster


def _available(session: Session, since: datetime) -> AvailableGpus:
    rows = session.scalars(select(ExecutorRow).where(ExecutorRow.beat_at >= since))
    found: dict[bool, set[str]] = {False: set(), True: set()}
    for row in rows:
        for gpu in row.gpus:
            found[gpu["on_cluster"]].update(gpu["gpus"])
    return AvailableGpus(frozenset(found[False]), frozenset(found[True]))


def _described(slot: Slot) -> dict[str, Any]:
    name = slot.device.name if slot.device else "Ray cluster"
    return {"name": name, "gpus": list(slot.gpus), "on_cluster": slot.device is None}


def _need(job: Job, available: AvailableGpus) -> str | None:
    """Return the GPU that the job needs now, None if a CPU suffices."""
    device = job.request["device"]
    if device == "cuda":
        return job.gpu
    if device == "auto":
        return job.gpu if job.predicted or job.gpu in available.for_job(job) else None
    return None


def _fits(job: Job, available: AvailableGpus, slot: Slot) -> bool:
    need = _need(job, available)
    if need is None or (job.predicted and slot.device is None):
        return need is None and slot.device is None
    return need in slot.gpus


def _waits_for(job: Job, need: str | None) -> str:
    if need is None:
        return "no running server takes jobs without a GPU; start one with EVOENGINE_CPU_JOBS above 0"
    if job.predicted:
        return f"searched and predicted; it is timed when a server has a GPU for {need}"
    return f'no running server has a GPU for {need}; with "device": "auto" it is predicted meanwhile'


TICK_SECONDS = 0.25
BEATS_PER_PATIENCE = 5
"""heartbeats in the time after which a server counts as dead"""
GIVE_BACK_SECONDS = 6.0
"""for a search to stop; candidates still in flight are lost, finished ones are not"""
REST_SECONDS, LONGEST_REST = 1.0, 60.0
"""for which a slot takes no job after one could not be started in it; doubled on each repetition"""
STILL_SECONDS = 60.0
"""after which a dispatcher that does not finish a step counts as stuck: longer than a writer waits for the lock"""


@dataclass(slots=True)
class Running:
    job: Job
    slot: Slot
    process: subprocess.Popen[bytes]
    stopped_at: float | None = None
    """when it was told to stop"""


@dataclass(frozen=True, slots=True)
class Rest:
    seconds: float
    until: float


class Dispatcher(threading.Thread):
    """The thread that runs jobs. `stop` returns them to the queue and waits for that; `say` logs a line."""

    def __init__(self, ledger: Ledger, slots: list[Slot], patience: float, say: Callable[[str], None]) -> None:
        super().__init__(name="dispatcher", daemon=True)
        self.owner = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"
        self.executors = Executors(ledger, self.owner, slots, patience)
        self._url, self._slots, self._say = ledger.url, slots, say
        self._beat_seconds = patience / BEATS_PER_PATIENCE
        self._running: dict[int, Running] = {}
        self._owed: dict[int, Callable[[], None]] = {}
        """job → update that could not be written because the database was unavailable"""
        self._rests: dict[int, Rest] = {}
        """slot → for how long it takes no job"""
        self._ended = threading.Event()
        self._troubles: dict[str, str] = {}
        """step → its last error"""
        self._beaten = float("-inf")
        self._stepped = time.monotonic()

    def run(self) -> None:
        while not self._ended.is_set():
            for step in (self._reap, self._settle, self._beat, self._fill):
                self._try(step, step.__name__)
            self._ended.wait(TICK_SECONDS)
        self._give_back_all()

    @property
    def works(self) -> bool:
        """Return whether the dispatcher runs, or has been told to stop."""
        going = self.is_alive() and time.monotonic() - self._stepped < STILL_SECONDS
        return going or self._ended.is_set()

    def _try(self, step: Callable[[], None], name: str) -> None:
        """Run a step. A failure is reported once, because the database may be unavailable for hours."""
        try:
            step()
            self._troubles.pop(name, None)
        except Exception as error:
            why = str(error) if isinstance(error, EvoengineError) else f"{type(error).__name__}: {error}"
            if why not in self._troubles.values():
                self._tell(f"cannot take jobs: {why}")
            self._troubles[name] = why
        self._stepped = time.monotonic()

    def _tell(self, line: str) -> None:
        with suppress(OSError, ValueError):  # standard error may be on a full disk, or closed
            self._say(line)

    def begin_stop(self) -> None:
        """Claim no more jobs; the thread returns those that run. Safe to call in a signal handler."""
        self._ended.set()

    def stop(self) -> None:
        self.begin_stop()
        if self.is_alive():
            self.join()

    def _beat(self) -> None:
        if time.monotonic() - self._beaten < self._beat_seconds:
            return
        own = [(r.job.id, r.job.fence) for r in self._running.values() if r.stopped_at is None]
        lost = self.executors.beat(own)
        for running in self._running.values():
            if running.job.id in lost:
                self._tell_to_stop(running)
        self._beaten = time.monotonic()

    def _settle(self) -> None:
        """Write to the database what could not be written before."""
        failure: Exception | None = None
        for number, tell in list(self._owed.items()):
            try:
                with suppress(Fenced):  # it has ended, or another server has it
                    tell()
            except Exception as error:
                failure = error
            else:
                del self._owed[number]
        if failure:
            raise failure

    def _fill(self) -> None:
        taken = {running.slot.number for running in self._running.values()}
        for slot in self._slots:
            rest = self._rests.get(slot.number)
            if slot.number not in taken and (rest is None or time.monotonic() >= rest.until):
                self._try(partial(self._fill_one, slot), f"slot {slot.number}")

    def _fill_one(self, slot: Slot) -> None:
        job = self.executors.claim(slot)
        if job is None:
            return
        try:
            self._running[job.id] = Running(job, slot, self._start(job, slot))
        except Exception as error:
            self._rest(slot)
            cause = (isinstance(error, OSError) and error.strerror) or f"{type(error).__name__}: {error}"
            why = f"its process could not be started: {cause}"
            self._tell(f"job {job.id}: {why}")
            self._owed[job.id] = partial(self.executors.give_back, job.id, job.fence, why)
            self._settle()
        else:
            self._rests.pop(slot.number, None)
            self._tell(f"job {job.id}: started on {slot.device.name if slot.device else 'the CPU'}")

    def _rest(self, slot: Slot) -> None:
        """Leave the next job to other slots and servers for a while."""
        before = self._rests.get(slot.number)
        seconds = min(2 * before.seconds, LONGEST_REST) if before else REST_SECONDS
        self._rests[slot.number] = Rest(seconds, time.monotonic() + seconds)

    def _start(self, job: Job, slot: Slot) -> subprocess.Popen[bytes]:
        environment = environment_with_ledger(self._url)
        if slot.device:
            environment["CUDA_VISIBLE_DEVICES"] = slot.device.uuid
        device = slot.device.uuid if slot.device else CPU
        work = [str(job.id), str(job.fence), device, str(os.getpid())]
        command = [sys.executable, "-m", "evoengine.service.work", *work]
        return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)

    def _reap(self) -> None:
        for number, running in list(self._running.items()):
            code = running.process.poll()
            if code is None:
                if running.stopped_at is not None and time.monotonic() - running.stopped_at > GIVE_BACK_SECONDS:
                    running.process.kill()
                continue
            del self._running[number]
            if code and running.stopped_at is None:
                named = how_ended(code)
                how = f"its process ended by {'signal ' if named.startswith('SIG') else ''}{named}"
                self._tell(f"job {number}: {how}")
                self._owed[number] = partial(self.executors.died, number, running.job.fence, how)

    def _tell_to_stop(self, running: Running) -> None:
        if running.stopped_at is None:
            running.stopped_at = time.monotonic()
            running.process.terminate()

    def _give_back_all(self) -> None:
        """Stop all searches in order, kill those left after some seconds, and return their jobs."""
        end = time.monotonic() + GIVE_BACK_SECONDS
        for running in self._running.values():
            self._tell_to_stop(running)
        for number, running in self._running.items():
            with suppress(subprocess.TimeoutExpired):
                running.process.wait(max(0.0, end - time.monotonic()))
            if running.process.poll() is None:
                running.process.kill()
                running.process.wait()
            self._owed.setdefault(
                number, partial(self.executors.give_back, number, running.job.fence, "its server was shut down")
            )
        for number, tell in self._owed.items():
            # Fenced: it has ended; others: another server takes it over when this one's heartbeat is old
            with suppress(Fenced, EvoengineError, OSError):
                tell()
                self._tell(f"job {number}: returned to the queue")
        with suppress(EvoengineError, OSError):
            self.executors.leave()
