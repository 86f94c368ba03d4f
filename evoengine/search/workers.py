"""Processes in which candidates are compiled and run. One may die, hang, flood its output or answer nonsense; its task
then ends with a reason, a new process takes its place, and nothing else is lost.

Each worker is a Pebble pool of one process and a thread that feeds it, so that no worker waits for another's end. The
processes are forked from one that has imported torch and the stages and done nothing else: a new one is there in
milliseconds, where importing takes two seconds of a core.
"""

from __future__ import annotations

import ctypes
import itertools
import multiprocessing
import os
import pickle
import queue
import resource
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import TypeVar

from pebble import ProcessExpired, ProcessPool

from evoengine.errors import EvoengineError, MachineError
from evoengine.records import Outcome, Rejection

START_SECONDS = 180.0
"""a worker that is not ready after this long will not be"""
POLL_SECONDS = 0.2
"""how often a worker at work is looked after; its answer itself is not waited for in steps"""
OUTPUT_TAIL_CHARS = 300
"""characters of a dead worker's output that go into the reason"""
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""libraries' own threads would only get into each other's way"""
_PR_SET_PDEATHSIG = 1
"""prctl(2)"""

Answer = TypeVar("Answer")
"""what a task gives"""
TaskArguments = tuple[object, ...]


def nothing() -> None:
    """A warm-up for tasks that load what they need quickly."""


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """What a worker is given: time per task, memory, environment, and what it loads before its first task."""

    seconds: float = 180.0
    memory_bytes: int | None = 4 << 30
    """private writable memory (RLIMIT_DATA) of a worker and, each, of the processes it starts; None: no limit"""
    file_bytes: int = 256 << 20
    """largest file it may write: also where a flood of output ends"""
    environment: Mapping[str, str] = field(default_factory=dict)
    niceness: int = 0
    """what it adds to this process's own: a GPU's runner must not wait for compilers"""
    warm_up: Callable[[], None] = nothing
    forked: bool = True
    """whether it begins with what `evoengine.search.worker_imports` imports; else with nothing, as CUDA wants it, which
    no process can use whose parent did"""
    spare: bool = False
    """whether a second process stands by, warmed up, to take over at once where the first is lost"""


COMPILER_LIMITS = WorkerLimits(environment={"CUDA_VISIBLE_DEVICES": ""}, niceness=10)
"""of workers that compile: NVRTC would start the driver in each, and none may keep a GPU's runner waiting"""


@dataclass(frozen=True, slots=True)
class Deferred:
    """An argument that is asked for when its task starts, not when it is submitted."""

    ask: Callable[[], object]


@dataclass(frozen=True, slots=True)
class Failure:
    """How a task ended that gave no answer. `late` tells one that was cut off from one that broke."""

    reason: str
    late: bool = False


# ── in the worker's process ─────────────────────────────────────────────────────────────────────────────────────────


def _begin(terms: WorkerLimits, output: str, environment: Mapping[str, str]) -> None:
    """Ctrl-C is the coordinator's to answer; a group of its own lets the worker be killed with all that it started."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.setpgid(0, 0)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.environ.clear()
    os.environ.update(dict(environment) | ONE_THREAD | dict(terms.environment))
    os.nice(terms.niceness)
    if terms.memory_bytes:
        resource.setrlimit(resource.RLIMIT_DATA, (terms.memory_bytes, terms.memory_bytes))
    resource.setrlimit(resource.RLIMIT_FSIZE, (terms.file_bytes, terms.file_bytes))
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)


def _ready(warm_up: Callable[[], None]) -> int:
    warm_up()
    return os.getpid()


def _answer(task: Callable[..., object], args: TaskArguments) -> bytes:
    """The answer pickled here, so that one that cannot be fails this task and not the channel to all of them."""
    try:
        os.ftruncate(1, 0)
        return pickle.dumps(task(*args))
    except EvoengineError as error:
        return pickle.dumps(error)
    except BaseException as error:  # SystemExit too ends the task alone
        return pickle.dumps(Failure(f"{type(error).__name__}: {error}"[:OUTPUT_TAIL_CHARS]))


# ── in the coordinator's ────────────────────────────────────────────────────────────────────────────────────────────


def _context(forked: bool) -> BaseContext:
    if not forked:
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["evoengine.search.worker_imports"])
    return context


class _Worker:
    """One process, until it fails."""

    def __init__(self, terms: WorkerLimits, output: Path) -> None:
        self._terms, self._output = terms, output
        # a process is forked with the environment of the first one, which may not be today's
        begins = (terms, str(self._output), dict(os.environ))
        self._pool = ProcessPool(1, initializer=_begin, initargs=begins, context=_context(terms.forked))
        self._pid: int | None = None
        self._killing = threading.Lock()
        self._killed = False
        self._started = self._pool.schedule(_ready, args=(terms.warm_up,))

    def await_start(self) -> None:
        """Raises BrokenProcessPool where the process does not come up."""
        if self._pid is None:
            try:
                self._pid = self._started.result(START_SECONDS)
            except Exception as error:
                raise BrokenProcessPool(f"{type(error).__name__}: {error}{self._output_tail()}") from error

    def call(self, task: Callable[..., object], args: TaskArguments) -> object:
        """The task's answer or a Failure; raises EvoengineError where the task did, BrokenProcessPool where the process
        was gone before it got the task."""
        try:
            future = self._pool.schedule(_answer, args=(task, args))
        except RuntimeError as error:
            raise BrokenProcessPool(str(error)) from error
        deadline = time.monotonic() + self._terms.seconds
        while True:
            try:
                answer = pickle.loads(future.result(POLL_SECONDS))
                break
            except TimeoutError:
                if time.monotonic() > deadline:
                    return Failure(f"no end after {self._terms.seconds:g} s", late=True)
                if not future.done() and not _alive(self._pid):
                    return Failure(f"the worker process ended without an answer{self._output_tail()}")
            except ProcessExpired as error:
                return Failure(f"the worker process died ({_cause(error.exitcode)}){self._output_tail()}")
            except BrokenProcessPool:
                raise
            except Exception as error:
                return Failure(f"the answer cannot be read: {type(error).__name__}: {error}"[:OUTPUT_TAIL_CHARS])
        if isinstance(answer, EvoengineError):
            raise answer
        return answer

    def _output_tail(self) -> str:
        """The end of what the process printed; a library often says there why it aborted."""
        if not self._output.exists():
            return ""
        with self._output.open("rb") as file:
            file.seek(max(0, self._output.stat().st_size - OUTPUT_TAIL_CHARS))
            said = " ".join(file.read().decode(errors="replace").split())
        return f": {said}" if said else ""

    def kill(self) -> None:
        """Ends the process and all that it started, however they resist; waits where another thread does."""
        with self._killing:
            if self._killed:
                return
            self._killed = True
            self._started.cancel()
            self._pool.stop()
            if self._pid is not None:
                with suppress(ProcessLookupError):
                    os.killpg(self._pid, signal.SIGKILL)
            # two threads in here at once would close the same file descriptors twice
            self._pool.join()
            self._output.unlink(missing_ok=True)


def _alive(pid: int | None) -> bool:
    """Pebble reaps its processes, so one that ended is gone."""
    if pid is None:
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _cause(exitcode: int) -> str:
    return signal.Signals(-exitcode).name if exitcode < 0 else f"exit code {exitcode}"


class WorkerPool:
    """`jobs` workers that run tasks of `evoengine.stages.tasks`, in the order they are submitted."""

    def __init__(self, jobs: int, terms: WorkerLimits = WorkerLimits()) -> None:
        self._terms = terms
        self._folder = tempfile.TemporaryDirectory(prefix="evoengine-workers-")
        self._numbers = itertools.count()
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        self._all: set[_Worker] = set()
        self._spare: _Worker | None = None
        self._threads = ThreadPoolExecutor(jobs, "worker")
        self._starting = threading.Lock()
        self._closed = False
        self.seconds_busy = 0.0
        """spent on tasks; like the next, exact for a pool of one"""
        self.seconds_starting = 0.0
        """spent waiting for a process to come up"""
        self.replaced = 0
        """processes that were lost"""
        for _ in range(jobs):
            self._idle.put(self._new())
        if terms.spare:
            self._spare = self._new()

    def _new(self) -> _Worker:
        worker = _Worker(self._terms, Path(self._folder.name, f"{next(self._numbers)}.out"))
        self._all.add(worker)
        return worker

    def submit(
        self, task: Callable[..., Answer | Rejection], *args: object, died: Outcome, gives: type[Answer],
        again: Callable[[Rejection], TaskArguments | None] = lambda rejection: None,
    ) -> Future[Answer | Rejection]:  # fmt: skip
        """A future of the task's answer, an instance of `gives`, or of a Rejection.

        A task that hangs is `hung`, or `died` where that says what it means, as a process that dies does. What is wrong
        with the machine or the usage is raised: it would fail every candidate. After a Rejection `again` may give other
        arguments to try at once.
        """
        return self._threads.submit(self._run, task, args, died, gives, again)

    def _run(
        self, task: Callable[..., Answer | Rejection], args: TaskArguments, died: Outcome, gives: type[Answer],
        again: Callable[[Rejection], TaskArguments | None],
    ) -> Answer | Rejection:  # fmt: skip
        worker = self._idle.get()
        try:
            args = tuple(a.ask() if isinstance(a, Deferred) else a for a in args)
            while True:
                worker, answer = self._call(worker, task, args)
                if not isinstance(answer, (Rejection, Failure, gives)):
                    answer = Failure(f"the answer is of type {type(answer).__name__}")
                if isinstance(answer, Failure):
                    outcome = Outcome.HUNG if answer.late and died is Outcome.CRASHED else died
                    answer = Rejection(outcome, answer.reason)
                    worker = self._replace(worker)
                elif isinstance(answer, Rejection) and answer.outcome in (Outcome.CRASHED, Outcome.HUNG):
                    # a CUDA error is sticky: whatever ran next in that process would inherit it
                    worker = self._replace(worker)
                other = again(answer) if isinstance(answer, Rejection) else None
                if other is None:
                    return answer
                args = other
        finally:
            self._idle.put(worker)

    def _call(self, worker: _Worker, task: Callable[..., object], args: TaskArguments) -> tuple[_Worker, object]:
        try:
            return worker, self._timed(worker, task, args)
        except BrokenProcessPool:
            # it was killed while idle or starting, so the task has not run
            worker = self._replace(worker)
        try:
            return worker, self._timed(worker, task, args)
        except BrokenProcessPool as error:
            raise MachineError(f"worker processes die as they start: {error}") from error

    def _timed(self, worker: _Worker, task: Callable[..., object], args: TaskArguments) -> object:
        start = time.monotonic()
        worker.await_start()
        ready = time.monotonic()
        self.seconds_starting += ready - start
        try:
            return worker.call(task, args)
        finally:
            self.seconds_busy += time.monotonic() - ready

    def _replace(self, worker: _Worker) -> _Worker:
        start = time.monotonic()
        worker.kill()
        with self._starting:
            self._all.discard(worker)
            if self._closed:
                return worker
            self.replaced += 1
            fresh, self._spare = self._spare or self._new(), None
            if self._terms.spare:
                self._spare = self._new()
        self.seconds_starting += time.monotonic() - start
        return fresh

    def close(self) -> None:
        """Kills what runs; tasks under way and waiting come to nothing."""
        with self._starting:
            self._closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in list(self._all):
            worker.kill()
        self._threads.shutdown(wait=True)
        self._folder.cleanup()
