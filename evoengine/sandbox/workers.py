"""Processes in which candidates are compiled and run.

A process may die, hang, flood its output or return garbage. Its task then runs again (deaths.py) or ends with a reason,
and a new process replaces it.

Each worker is a Pebble pool of one process and a thread that feeds it, so that no worker waits for another's end. The
processes are forked from one that has only imported torch and the stages: a new one starts in milliseconds, where
importing takes two seconds of a core.
"""

from __future__ import annotations

import os
import pickle
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Generic, TypeVar

from pebble import ProcessExpired, ProcessPool

from evoengine.errors import EvoengineError, MachineError, UsageError
from evoengine.records import Outcome, Rejection
from evoengine.sandbox.deaths import STOPPED, Death, retry_deaths
from evoengine.sandbox.kept_process import Held, KeptContext, start_tracker
from evoengine.sandbox.machine import how_ended, oom_kills, why_unfit
from evoengine.sandbox.worker_process import (
    DEFAULT_LIMITS,
    MAX_PROCESSES,
    OUTPUT_TAIL_CHARS,
    Failure,
    TaskArguments,
    WorkerLimits,
    init_worker,
    ready,
    run_pickled,
)

START_SECONDS = 180.0
"""within which a worker must be ready"""
POLL_SECONDS = 0.2
"""how often the limits of a busy worker are checked; its answer is received at once"""
REASON_CHARS = 1000
"""limit of a rejection's reason: a source may put anything into a compiler's message"""
STARTS = 10
"""consecutive processes that may fail to start, or be killed before they take a task"""
UNGUARDED = "freeze_support"
"""a word of multiprocessing's message if a main module starts processes on import, without a guard"""
PAUSE_SECONDS = 0.1
"""after the first such process; each later pause is longer by as much"""
NO_LIMIT = 1 << 62
"""more bytes than any machine has"""

Answer = TypeVar("Answer")
"""the type of a task's result"""


@dataclass(frozen=True, slots=True)
class Deferred:
    """An argument that is evaluated when its task starts, not when it is submitted."""

    ask: Callable[[], object]


@dataclass(frozen=True, slots=True)
class Task(Generic[Answer]):
    """A function for a worker to call, and the meaning of how the call ends."""

    function: Callable[..., Answer | Rejection]
    on_crash: Outcome
    returns: type[Answer]
    seconds: float


Attempt = Callable[[AbstractContextManager[None]], Answer | Rejection | Death]
"""runs a task once while holding the lock that it is given"""
Retry = Callable[[Rejection], TaskArguments | None]


class Workers(ABC):
    """Where a search's tasks run: processes here (WorkerPool), or on the nodes of a Ray cluster (RayWorkers)."""

    def __init__(self, size: int, limits: WorkerLimits, name: str) -> None:
        """Create a thread for each of `size` workers, which run that many tasks at once."""
        self.size = size
        self.seconds_busy = 0.0
        """spent on tasks; exact only for a pool of one, as is `seconds_starting`"""
        self.seconds_starting = 0.0
        """spent waiting for a process to come up"""
        self._limits = limits
        self._threads = ThreadPoolExecutor(size, name)

    def submit(
        self,
        function: Callable[..., Answer | Rejection],
        *args: object,
        on_crash: Outcome,
        returns: type[Answer],
        retry: Retry = lambda rejection: None,
        seconds: float | None = None,
    ) -> Future[Answer | Rejection]:
        """Return a future of the function's answer, an instance of `returns`, or of a Rejection.

        A task that exceeds its time ends as `hung`, or as `on_crash` if that states the meaning of a hang; one
        that exceeds another limit, or returns another type, ends as `on_crash`. If its process dies, the task
        is retried, and ends as `crashed` or `killed` when `retry_deaths` decides so. Faults of the machine or
        of the usage are raised, because they would fail every candidate. After a Rejection, `retry` may return
        other arguments to try at once. `seconds` overrides the time limit.
        """
        task = Task(function, on_crash, returns, self._limits.seconds if seconds is None else seconds)
        try:
            return self._threads.submit(self._run, task, args, retry)
        except RuntimeError as error:  # a thread that cannot be started
            raise MachineError(f"a task cannot be started: {error}") from error

    def _run(self, task: Task[Answer], args: TaskArguments, retry: Retry) -> Answer | Rejection:
        while True:
            attempt = self._attempts(task, args)
            answer: Answer | Rejection = retry_deaths(attempt)
            other = retry(answer) if isinstance(answer, Rejection) else None
            if other is None:
                return answer
            args = other

    @abstractmethod
    def _attempts(self, task: Task[Answer], args: TaskArguments) -> Attempt[Answer]:
        """Return a function that runs the task with these arguments, any number of times."""

    @abstractmethod
    def close(self) -> None:
        """Kill the workers; running and waiting tasks are cancelled."""


class _Worker:
    """One process, until it fails."""

    def __init__(self, limits: WorkerLimits) -> None:
        """Start a worker process. Raises MachineError if that fails."""
        self._limits = limits
        held = Held(MAX_PROCESSES, 2 * limits.memory_bytes if limits.memory_bytes else NO_LIMIT)
        self._processes = KeptContext(held, limits.forked)
        self._pid: int | None = None
        self._killing = threading.Lock()
        self._killed = False
        pool: ProcessPool | None = None
        try:
            start_tracker()
            initial = (limits, dict(os.environ))
            self._pool = pool = ProcessPool(1, initializer=init_worker, initargs=initial, context=self._processes)
            self._started = self._pool.schedule(ready, args=(limits.warm_up,))
        except (BrokenProcessPool, OSError, RuntimeError) as error:  # the last of threads that cannot be started
            if pool:
                self._give_up(pool)
            cause = error.__cause__ or error
            why = f"{cause.strerror or cause}: {cause.filename or ''}" if isinstance(cause, OSError) else str(cause)
            raise MachineError(f"a worker process cannot be started: {why.rstrip(': ')}") from error

    def _give_up(self, pool: ProcessPool) -> None:
        """End the processes of a pool that did not come up."""
        with suppress(Exception):  # after a failed start its own state is inconsistent
            pool.stop()
        self._processes.end()
        self._processes.close()

    def await_start(self) -> None:
        """Wait until the process is up. Raises BrokenProcessPool if it was killed, MachineError if it cannot start."""
        if self._pid is None:
            try:
                self._pid = self._await_pid()
            except Exception as error:
                if self._processes.ended:  # Pebble's own message would not help a user
                    raise BrokenProcessPool(f"{self._processes.how_ended()}{self._output_tail()}") from error
                raise MachineError(
                    f"worker processes die as they start: {type(error).__name__}: {error}{self._output_tail()}"
                ) from error

    def _await_pid(self) -> int:
        """Wait until the process is up. Raises TimeoutError if it ends before that, or takes too long."""
        deadline, ended = time.monotonic() + START_SECONDS, False
        while True:
            try:
                return int(self._started.result(POLL_SECONDS))
            except TimeoutError:
                before, ended = ended, self._processes.ended  # Pebble may lose its first task with the process
                if before or time.monotonic() > deadline:
                    raise

    def call(self, task: Callable[..., object], args: TaskArguments, seconds: float) -> object:
        """Run a task; return its answer, a Failure or a Death.

        Raises EvoengineError if the task did, BrokenProcessPool if the process was gone before it received the task,
        and MachineError if something other than the task ended it.
        """
        killed_before, start = oom_kills(), time.monotonic()
        found = self._call(task, args, seconds)
        if isinstance(found, EvoengineError):
            raise found
        if not isinstance(found, Failure):
            return found
        killed = oom_kills() - killed_before
        if why := self._machine_fault(found, killed):
            raise MachineError(why)
        if found.death is None:
            return found
        return Death(found.death, found.reason, round(time.monotonic() - start, 1), killed)

    def _machine_fault(self, failure: Failure, killed: int) -> str | None:
        """Return why the machine, not the task, is at fault for a lost process, or None.

        `killed` counts the kernel's OOM kills.
        """
        if failure.death == "SIGKILL" and killed:
            return "this machine has no memory left: the kernel ended a worker process; fewer --jobs need less"
        return None if failure.late else why_unfit()

    def _call(self, task: Callable[..., object], args: TaskArguments, seconds: float) -> object:
        try:
            future = self._pool.schedule(run_pickled, args=(task, args))
        except RuntimeError as error:
            raise BrokenProcessPool(str(error)) from error
        deadline, ended = time.monotonic() + seconds, False
        while True:
            try:
                return pickle.loads(future.result(POLL_SECONDS))
            except TimeoutError:
                if time.monotonic() > deadline:
                    return self._timeout_failure(seconds)
                before, ended = ended, self._processes.ended
                if before and not future.done():  # Pebble does not report a process that ended with exit code 0
                    how = self._processes.how_ended()
                    return Failure(f"the worker process ended without an answer{self._output_tail()}", death=how)
            except ProcessExpired as error:
                if why := self._processes.why_ended():
                    return Failure(f"the worker process was ended: {why}", limit=why)
                how = how_ended(error.exitcode)
                return Failure(f"the worker process died ({how}){self._output_tail()}", death=how)
            except BrokenProcessPool:
                raise
            except Exception as error:
                return Failure(f"the answer cannot be read: {type(error).__name__}: {error}"[:OUTPUT_TAIL_CHARS])

    def _timeout_failure(self, seconds: float) -> Failure:
        """Return the failure for a task beyond its time limit.

        A process that was stopped by a signal did not reach the limit itself.
        """
        late = f"no end after {seconds:g} s"
        if self._processes.stopped:
            return Failure(f"{late}, and the worker process was stopped", late=True, death=STOPPED)
        return Failure(late, late=True, limit=f"{seconds:g} s")

    def _output_tail(self) -> str:
        """Return the end of the process's output, where a library often states why it aborted."""
        said = " ".join(self._processes.output_tail(OUTPUT_TAIL_CHARS).split())
        return f": {said}" if said else ""

    def kill(self) -> None:
        """End the process and all its descendants; wait if another thread is doing so."""
        with self._killing:
            if self._killed:
                return
            self._killed = True
            self._started.cancel()
            self._pool.stop()
            self._processes.end()
            # two threads here at once would close the same file descriptors twice
            self._pool.join()
            self._processes.close()


class WorkerPool(Workers):
    """`jobs` workers that run tasks of `evoengine.stages.tasks`, in the order they are submitted."""

    def __init__(self, jobs: int, limits: WorkerLimits = DEFAULT_LIMITS) -> None:
        super().__init__(jobs, limits, "worker")
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        self._all: set[_Worker] = set()
        self._spare: _Worker | None = None
        self._starting = threading.Lock()
        self._closed = False
        self.replaced = 0
        """number of lost processes"""
        for _ in range(jobs):
            self._idle.put(self._new())
        if limits.spare:
            self._spare = self._new()

    def _new(self) -> _Worker:
        worker = _Worker(self._limits)
        self._all.add(worker)
        return worker

    def _start_with_retries(self) -> _Worker:
        """Start a worker with retries, so that a short shortage of processes does not end a long search.

        Raises MachineError.
        """
        for tries in range(1, STARTS):
            try:
                return self._new()
            except MachineError:
                time.sleep(tries * PAUSE_SECONDS)
        return self._new()

    def _attempts(self, task: Task[Answer], args: TaskArguments) -> Attempt[Answer]:
        asked = tuple(a.ask() if isinstance(a, Deferred) else a for a in args)
        return partial(self.attempt, task, asked)

    def attempt(
        self, task: Task[Answer], args: TaskArguments, lock: AbstractContextManager[None]
    ) -> Answer | Rejection | Death:
        """Run the task once while holding the lock, for a caller that decides itself what a Death means."""
        worker = self._idle.get()
        try:
            with lock:
                worker, answer = self._call(worker, task, args)
            if not isinstance(answer, (Rejection, Failure, Death, task.returns)):
                answer = Failure(f"the answer is of type {type(answer).__name__}")
            if isinstance(answer, Failure):
                outcome = Outcome.HUNG if answer.late and task.on_crash is Outcome.CRASHED else task.on_crash
                answer = Rejection(outcome, answer.reason, evidence={"limit": answer.limit} if answer.limit else None)
                worker = self._replace(worker)
            elif isinstance(answer, Death) or (
                # a CUDA error is sticky: the next task of that process would inherit it
                isinstance(answer, Rejection) and answer.outcome in (Outcome.CRASHED, Outcome.HUNG)
            ):
                worker = self._replace(worker)
            if isinstance(answer, Rejection | Death) and len(answer.reason) > REASON_CHARS:
                answer = replace(answer, reason=f"{answer.reason[:REASON_CHARS]} …")
            return answer
        finally:
            self._idle.put(worker)

    def _call(self, worker: _Worker, task: Task[Answer], args: TaskArguments) -> tuple[_Worker, object]:
        """Run a task on a worker.

        A worker that is killed while idle or starting has not run it, so another takes it.
        """
        for starts in range(STARTS):
            try:
                return worker, self._timed(worker, task, args)
            except BrokenProcessPool as error:
                why = str(error)
                if self._closed:
                    raise MachineError("the workers are closed") from error
                if UNGUARDED in why:
                    raise UsageError(
                        "the main module of this program calls evoengine on import, and worker processes import it: "
                        'put the call below `if __name__ == "__main__":`'
                    ) from None
            time.sleep((1 + starts) * PAUSE_SECONDS if starts else 0.0)
            worker = self._replace(worker)
        unfit = why_unfit() or f"something on this machine kills them ({STARTS} in a row)"
        raise MachineError(f"worker processes die as they start: {why}; {unfit}")

    def _timed(self, worker: _Worker, task: Task[Answer], args: TaskArguments) -> object:
        start = time.monotonic()
        worker.await_start()
        ready = time.monotonic()
        self.seconds_starting += ready - start
        try:
            return worker.call(task.function, args, task.seconds)
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
            fresh, self._spare = self._spare or self._start_with_retries(), None
            if self._limits.spare:
                self._spare = self._start_with_retries()
        self.seconds_starting += time.monotonic() - start
        return fresh

    def close(self) -> None:
        """Kill the workers; running and waiting tasks are cancelled."""
        with self._starting:
            self._closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in list(self._all):
            worker.kill()
        self._threads.shutdown(wait=True)
