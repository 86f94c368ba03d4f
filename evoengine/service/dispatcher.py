"""Runs the jobs that this server claims: a thread that fills its slots, and a process per job.

Whatever a step of it raises, the next one follows: a server whose dispatcher is dead takes jobs that nobody runs. A job
that cannot be started here goes back, and its slot rests for a while.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from evoengine.errors import EvoengineError
from evoengine.ledger.runs import this_host
from evoengine.machine import how_ended
from evoengine.paths import FILE_VARIABLE, URL_VARIABLE
from evoengine.service.database import Database
from evoengine.service.executors import Executors, Slot
from evoengine.service.jobs import Fenced, Job
from evoengine.service.work import CPU

TICK_SECONDS = 0.25
BEATS_PER_PATIENCE = 5
"""how often a server says that it lives, before it is taken for killed"""
GIVE_BACK_SECONDS = 6.0
"""for a search to end in order; what is under way then is lost, what ended is not"""
REST_SECONDS, LONGEST_REST = 1.0, 60.0
"""for which a slot takes no job after one could not be started in it; twice as long each time that happens again"""
STILL_SECONDS = 60.0
"""after which a dispatcher that came to no end of a step is taken for stuck: longer than a writer waits for another"""


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
    """`stop` gives back what runs, and returns when that is done. `say` takes lines for people."""

    def __init__(self, database: Database, slots: list[Slot], patience: float, say: Callable[[str], None]) -> None:
        super().__init__(name="dispatcher", daemon=True)
        self.owner = f"{this_host()}:{os.getpid()}:{secrets.token_hex(4)}"
        self.executors = Executors(database, self.owner, slots, patience)
        self._url, self._slots, self._say = database.url, slots, say
        self._beat_seconds = patience / BEATS_PER_PATIENCE
        self._running: dict[int, Running] = {}
        self._owed: dict[int, Callable[[], None]] = {}
        """job → what the database is to be told of it; it was away, or full"""
        self._rests: dict[int, Rest] = {}
        """slot → how long it takes no job"""
        self._ended = threading.Event()
        self._troubles: dict[str, str] = {}
        """step → what it was last kept from by"""
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
                self._tell(f"no job can be taken: {why}")
            self._troubles[name] = why
        self._stepped = time.monotonic()

    def _tell(self, line: str) -> None:
        with suppress(OSError, ValueError):  # its standard error is on a full disk, or closed
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
        kept_from: Exception | None = None
        for number, tell in list(self._owed.items()):
            try:
                with suppress(Fenced):  # it is over, or another server's
                    tell()
            except Exception as error:
                kept_from = error
            else:
                del self._owed[number]
        if kept_from:
            raise kept_from

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
            why = (
                error.strerror if isinstance(error, OSError) and error.strerror else f"{type(error).__name__}: {error}"
            )
            why = f"its process could not be started: {why}"
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
        environment = {name: value for name, value in os.environ.items() if name != FILE_VARIABLE}
        environment[URL_VARIABLE] = self._url
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
            with suppress(
                Fenced, EvoengineError, OSError
            ):  # it is over, or others take it over when this one is silent
                tell()
                self._tell(f"job {number}: given back")
        with suppress(EvoengineError, OSError):
            self.executors.leave()
