"""Runs the jobs that this server claims: a thread that fills its slots, and a process per job."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from evoengine.errors import EvoengineError
from evoengine.ledger.chosen import FILE_VARIABLE, URL_VARIABLE
from evoengine.ledger.runs import this_host
from evoengine.service.database import Database
from evoengine.service.executors import Executors, Slot
from evoengine.service.jobs import Fenced, Job
from evoengine.service.work import CPU

TICK_SECONDS = 0.25
BEATS_PER_PATIENCE = 5
"""how often a server says that it lives, before it is taken for killed"""
GIVE_BACK_SECONDS = 6.0
"""for a search to end in order; what is under way then is lost, what ended is not"""


@dataclass(slots=True)
class Running:
    job: Job
    slot: Slot
    process: subprocess.Popen[bytes]
    stopped_at: float | None = None
    """when it was told to stop"""


class Dispatcher(threading.Thread):
    """`stop` gives back what runs, and returns when that is done. `say` takes lines for people."""

    def __init__(self, database: Database, slots: list[Slot], patience: float, say: Callable[[str], None]) -> None:
        super().__init__(name="dispatcher", daemon=True)
        self.owner = f"{this_host()}:{os.getpid()}:{secrets.token_hex(4)}"
        self.executors = Executors(database, self.owner, slots, patience)
        self._url, self._slots, self._say = database.url, slots, say
        self._beat_seconds = patience / BEATS_PER_PATIENCE
        self._running: dict[int, Running] = {}
        self._ended = threading.Event()
        self._trouble = ""

    def run(self) -> None:
        beaten = float("-inf")
        while not self._ended.is_set():
            try:
                self._reap()
                if time.monotonic() - beaten >= self._beat_seconds:
                    self._beat()
                    beaten = time.monotonic()
                self._fill()
                self._trouble = ""
            except EvoengineError as error:
                self._complain(error)
            self._ended.wait(TICK_SECONDS)
        self._give_back_all()

    def begin_stop(self) -> None:
        """Takes no more jobs; its thread gives back what runs. For a handler of a signal: it takes no time."""
        self._ended.set()

    def stop(self) -> None:
        self.begin_stop()
        if self.is_alive():
            self.join()

    def _complain(self, error: EvoengineError) -> None:
        """Once for each trouble: the database may be away for hours."""
        if str(error) != self._trouble:
            self._say(f"no job can be taken: {error}")
        self._trouble = str(error)

    def _beat(self) -> None:
        own = [(r.job.id, r.job.fence) for r in self._running.values() if r.stopped_at is None]
        lost = self.executors.beat(own)
        for running in self._running.values():
            if running.job.id in lost:
                self._tell_to_stop(running)

    def _fill(self) -> None:
        taken = {running.slot.number for running in self._running.values()}
        for slot in self._slots:
            if slot.number not in taken and (job := self.executors.claim(slot)):
                self._running[job.id] = Running(job, slot, self._start(job, slot))
                self._say(f"job {job.id}: started on {slot.device.name if slot.device else 'the CPU'}")

    def _start(self, job: Job, slot: Slot) -> subprocess.Popen[bytes]:
        environment = {name: value for name, value in os.environ.items() if name != FILE_VARIABLE}
        environment[URL_VARIABLE] = self._url
        if slot.device:
            environment["CUDA_VISIBLE_DEVICES"] = slot.device.uuid
        device = slot.device.uuid if slot.device else CPU
        command = [sys.executable, "-m", "evoengine.service.work", str(job.id), str(job.fence), device]
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
                by = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
                how = f"its process ended by {by}"
                self._say(f"job {number}: {how}")
                with suppress(Fenced):
                    self.executors.died(number, running.job.fence, how)

    def _tell_to_stop(self, running: Running) -> None:
        if running.stopped_at is None:
            running.stopped_at = time.monotonic()
            running.process.terminate()

    def _give_back_all(self) -> None:
        """Every search may end in order; after some seconds it is ended."""
        end = time.monotonic() + GIVE_BACK_SECONDS
        for running in self._running.values():
            self._tell_to_stop(running)
        for number, running in self._running.items():
            with suppress(subprocess.TimeoutExpired):
                running.process.wait(max(0.0, end - time.monotonic()))
            if running.process.poll() is None:
                running.process.kill()
                running.process.wait()
            with suppress(Fenced):  # it is over
                self.executors.give_back(number, running.job.fence, "its server was shut down")
                self._say(f"job {number}: given back")
        with suppress(EvoengineError):
            self.executors.leave()
