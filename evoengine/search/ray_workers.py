"""Workers on the nodes of a Ray cluster, in place of a WorkerPool.

Each is a Ray actor (`NodeWorker`). Ray places it, restarts it when it is lost, and starts it on another node where its
own is gone. The task that it was running is retried on any other, as deaths.py describes.
"""

from __future__ import annotations

import platform
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from evoengine import __version__
from evoengine.devices.driver import GpuDevice, lock_device
from evoengine.errors import EvoengineError, MachineError
from evoengine.records import CompiledCandidate, Rejection
from evoengine.sandbox.deaths import EXCLUSIVE_DEATHS, Death
from evoengine.sandbox.worker_process import TaskArguments, WorkerLimits
from evoengine.sandbox.workers import Answer, Attempt, Deferred, Task, WorkerPool, Workers
from evoengine.search.first_build import FirstBuild
from evoengine.stages.tasks import JUDGING

# The actor that runs on the nodes of a Ray cluster. It has one worker process; a local search has several.
#
# A candidate can take down only the actor's worker, never the actor: limits and clean-up are enforced by the same
# keeper as in a local search. An actor is lost only with its node, or because somebody killed it.


@dataclass(frozen=True, slots=True)
class ActorInfo:
    """The node on which an actor started."""

    node: str
    """Ray's node id"""
    host: str
    version: str
    """evoengine's version there"""
    device: GpuDevice | None = None
    """the GPU that it holds exclusively"""


@dataclass(frozen=True, slots=True)
class TaskResult:
    """The result of a task."""

    answer: object
    """the task's answer, a Rejection, the Death of the node's worker, or the EvoengineError that the task raised"""
    seconds_busy: float
    seconds_starting: float


@dataclass(frozen=True, slots=True)
class ActorActivity:
    """The work of an actor that has a GPU."""

    ready: ActorInfo
    label: str
    """the search"""
    task: str | None
    """None while it is idle"""
    seconds: float
    """since the task began, or since it is idle"""


class NodeWorker:
    """A worker on a node; with `find_gpu` it holds that GPU exclusively, by a lock on its UUID.

    Without, it begins to build the judges as it starts, if its node has none; tasks that need them wait for that, and
    their time limits begin afterwards.
    """

    def __init__(self, limits: WorkerLimits, find_gpu: Callable[[], GpuDevice] | None, label: str) -> None:
        self._limits, self._find_gpu, self._label = limits, find_gpu, label
        self._pool: WorkerPool | None = None
        self._build: FirstBuild | None = None
        self._ready: ActorInfo | None = None
        self._lock = ExitStack()
        self._task: str | None = None
        self._since = time.monotonic()

    def ready(self) -> ActorInfo | EvoengineError:
        """Start the worker once; return the node's error if it cannot start."""
        try:
            self._start()
        except EvoengineError as error:
            return error
        assert self._ready is not None  # it has started
        return self._ready

    def _start(self) -> WorkerPool:
        if self._pool is not None:
            return self._pool
        # otherwise every worker process would import Ray's main program as its own main module
        vars(sys.modules["__main__"]).pop("__file__", None)
        limits, device = self._limits, None
        if self._find_gpu is not None:
            device = self._find_gpu()
            self._lock.enter_context(lock_device(device, print))
            limits = replace(limits, environment={**limits.environment, "CUDA_VISIBLE_DEVICES": device.uuid})
        else:
            self._build = FirstBuild()
            self._build.add_emulator()
        self._pool = WorkerPool(1, limits)
        self._ready = ActorInfo(ray.get_runtime_context().get_node_id(), platform.node(), __version__, device)
        return self._pool

    def run(self, task: Task[Any], *args: object) -> TaskResult:
        """Run the task in the worker, which is started first after a restart of the actor."""
        self._task, self._since = getattr(task.function, "__name__", str(task.function)), time.monotonic()
        try:
            pool = self._start()
            if self._build and task.function in JUDGING:
                self._build.wait(both=True)
            before = pool.seconds_busy, pool.seconds_starting
            answer = self._answer(pool, task, args)
        except EvoengineError as error:
            return TaskResult(error, 0.0, 0.0)
        finally:
            self._task, self._since = None, time.monotonic()
        return TaskResult(answer, pool.seconds_busy - before[0], pool.seconds_starting - before[1])

    def _answer(self, pool: WorkerPool, task: Task[Any], args: tuple[object, ...]) -> object:
        """Run the task once. The coordinator decides what a death means, because it knows all workers of the search."""
        try:
            return pool.attempt(task, args, nullcontext())
        except EvoengineError as error:
            return error

    def activity(self) -> ActorActivity | None:
        """Return the current task; None before the worker has started."""
        if self._ready is None:
            return None
        return ActorActivity(self._ready, self._label, self._task, time.monotonic() - self._since)


RETRIES = 1 + EXCLUSIVE_DEATHS
"""of a task whose actor was lost. The first loss does not count as a death: with a node all of its actors are lost, and
most of their tasks are not the cause"""
PATIENCE_SECONDS = 30.0
"""without any worker, after which the user is told"""
END_SECONDS = 10.0
"""for threads that wait for a worker to notice that the pool is closed"""
MAX_BINARIES = 128
"""kept in the object store for further tasks"""


@dataclass(frozen=True, slots=True)
class ActorOptions:
    """Resources that Ray assigns to each actor."""

    cpus: float = 1.0
    gpus: float = 0.0
    resources: Mapping[str, float] | None = None
    find_gpu: Callable[[], GpuDevice] | None = None
    """run on the node: the GPU that Ray gave the actor"""
    board: str | None = None
    """the name that this GPU must have"""
    name: str | None = None
    """under which `evoengine cluster status` finds it"""


class SentBinaries:
    """Binaries in the cluster's object store: each is sent to a node once, for all actors there."""

    def __init__(self) -> None:
        self._sent: dict[tuple[int, str], Any] = {}
        self._sending = threading.Lock()

    def send(self, argument: object) -> object:
        """Return the argument, or Ray's reference for a compiled candidate."""
        if not isinstance(argument, CompiledCandidate):
            return argument
        key = argument.trial, argument.source.sha256
        with self._sending:
            if key not in self._sent:
                self._sent[key] = ray.put(argument)
                if len(self._sent) > MAX_BINARIES:
                    del self._sent[next(iter(self._sent))]
            return self._sent[key]


@dataclass(slots=True, eq=False)
class _Remote:
    actor: Any
    """Ray's handle"""
    ready: ActorInfo | None = None
    """None until it has started"""


class RayWorkers(Workers):
    """`size` actors that run tasks of `evoengine.stages.tasks`; `echo` reports nodes that are lost or excluded.

    A node whose machine fails (a full disk, no compiler) is excluded; the others continue, and the search ends with the
    reason when none is left.
    """

    def __init__(
        self,
        size: int,
        limits: WorkerLimits,
        echo: Callable[[str], None],
        options: ActorOptions,
        label: str = "",
        binaries: SentBinaries | None = None,
    ) -> None:
        """Create workers.

        `binaries` are shared with other workers of the cluster; `label` is shown by `evoengine cluster status`.
        """
        super().__init__(size, limits, "ray-worker")
        self._echo, self._options = echo, options
        self._idle: queue.SimpleQueue[_Remote | None] = queue.SimpleQueue()
        self._changing = threading.Lock()
        self._excluded: dict[str, str] = {}
        """node → why it is excluded"""
        self._closed = self._reported_waiting = False
        self._waiting: list[threading.Thread] = []
        self._binaries = binaries or SentBinaries()
        self._all = [self._create(f"{options.name}:{n}" if options.name else None, label) for n in range(size)]
        for worker in self._all:
            self._add_when_ready(worker)

    def _create(self, name: str | None, label: str) -> _Remote:
        options = self._options
        made = ray.remote(NodeWorker).options(
            num_cpus=options.cpus,
            num_gpus=options.gpus,
            resources=dict(options.resources or {}),
            max_restarts=-1,
            max_task_retries=0,
            max_concurrency=2,
            scheduling_strategy="SPREAD",
            name=name,
        )
        return _Remote(made.remote(self._limits, options.find_gpu, label))

    def close(self) -> None:
        """Kill the workers; running and waiting tasks are cancelled."""
        with self._changing:
            self._closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in self._all:
            _kill(worker)
            self._idle.put(None)
        self._threads.shutdown(wait=True)
        for thread in self._waiting:
            thread.join(END_SECONDS)

    # ── a task ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _attempts(self, task: Task[Answer], args: TaskArguments) -> Attempt[Answer]:
        """Return what runs the task; one whose actor was lost runs again on another, at most RETRIES times."""
        return partial(self._attempt, task, args, iter(range(RETRIES + 1)))

    def _attempt(
        self, task: Task[Answer], args: TaskArguments, losses: Iterator[int], lock: AbstractContextManager[None]
    ) -> Answer | Rejection | Death:
        """Run the task once while holding the lock. `losses` numbers the lost actors from 0."""
        for each in args:
            if isinstance(each, Deferred):
                each.ask()  # before a worker is taken: what it waits for may need that worker
        worker, start = self._next_idle(), time.monotonic()
        try:
            given = (each.ask() if isinstance(each, Deferred) else each for each in args)
            sent = tuple(map(self._binaries.send, given))
            with lock:
                ran: TaskResult = ray.get(worker.actor.run.remote(task, *sent))
        except RayTaskError as error:
            return self._excluded_death(worker, f"it cannot run evoengine's tasks: {_cause(error)}")
        except RayError as error:
            self._on_lost(worker, error)
            number, spent = next(losses), round(time.monotonic() - start, 1)
            reason = f"its worker was lost {number + 1} times: {_cause(error)}"
            return Death("a lost actor", reason, spent, counts=number > 0)
        except ConnectionError as error:
            raise MachineError(f"the connection to the Ray cluster is lost: {_cause(error)}") from error
        except BaseException:
            self._idle.put(worker)
            raise
        self._count(ran)
        if isinstance(ran.answer, MachineError):
            return self._excluded_death(worker, str(ran.answer))
        self._idle.put(worker)
        if isinstance(ran.answer, EvoengineError):
            raise ran.answer
        assert isinstance(ran.answer, (Rejection, Death, task.returns))  # the node's own pool sees to it
        return ran.answer

    def _excluded_death(self, worker: _Remote, why: str) -> Death:
        self._exclude_node(worker, why)
        return Death("a node that failed", why, 0.0, counts=False)

    def _count(self, ran: TaskResult) -> None:
        with self._changing:
            self.seconds_busy += ran.seconds_busy
            self.seconds_starting += ran.seconds_starting

    # ── workers that join and leave ──────────────────────────────────────────────────────────────────────────────────

    def _add_when_ready(self, worker: _Remote) -> None:
        """Add the worker once it has started, which may take long on a full cluster."""
        waiting = threading.Thread(target=self._await_ready, args=(worker,), daemon=True)
        with self._changing:
            self._waiting = [thread for thread in self._waiting if thread.is_alive()] + [waiting]
            waiting.start()

    def _await_ready(self, worker: _Remote) -> None:
        try:
            found = ray.get(worker.actor.ready.options(max_task_retries=-1).remote())
        except (RayError, ConnectionError) as error:
            self._drop(worker, f"a worker cannot be started: {_cause(error)}")
            return
        if isinstance(found, EvoengineError):
            self._drop(worker, str(found))
            return
        worker.ready = found
        board = self._options.board
        if found.version != __version__:
            self._exclude_node(worker, f"it has evoengine {found.version}, and this is {__version__}")
        elif found.device and board and found.device.name != board:
            self._drop(
                worker, f"{found.host} has an {found.device.name}, and figures are of an {board}: it is left out"
            )
        else:
            self._idle.put(worker)

    def _next_idle(self) -> _Remote:
        """Return a free worker on a usable node. Raises MachineError if there is none and will be none."""
        while True:
            try:
                worker = self._idle.get(timeout=PATIENCE_SECONDS)
            except queue.Empty:
                self._report_waiting()
                continue
            if worker is None:
                self._idle.put(None)
                raise MachineError(self._why_no_worker())
            if worker.ready is None or worker.ready.node not in self._excluded:
                return worker
            self._drop(worker, None)

    def _report_waiting(self) -> None:
        with self._changing:
            waiting = not self._reported_waiting and not any(worker.ready for worker in self._all)
            self._reported_waiting |= waiting
        if waiting:
            gpus = ", or another evoengine times on its GPUs" if self._options.gpus else ""
            self._echo(
                f"no worker of the cluster is up: its nodes have no room for one, or are starting it{gpus}; waiting"
            )

    def _why_no_worker(self) -> str:
        whys = list(dict.fromkeys(self._excluded.values()))
        return f"no node of the cluster is left to run on: {'; '.join(whys)}" if whys else "the workers are closed"

    def _on_lost(self, worker: _Remote, error: Exception) -> None:
        """Remove a worker until Ray has restarted it on its node or on another."""
        if not self._closed:
            where, worker.ready = worker.ready.host if worker.ready else "a node", None
            self._echo(f"a worker on {where} was lost ({_cause(error)}); its task is retried on another")
            self._add_when_ready(worker)

    def _exclude_node(self, worker: _Remote, why: str) -> None:
        node, host = (worker.ready.node, worker.ready.host) if worker.ready else ("", "a node")
        with self._changing:
            known = node in self._excluded
            self._excluded.setdefault(node, f"{host}: {why}")
        self._drop(worker, None if known else f"{host} is excluded, the others continue: {why}")

    def _drop(self, worker: _Remote, why: str | None) -> None:
        """Continue without the worker."""
        with self._changing:
            if self._closed or worker not in self._all:
                return
            self._all.remove(worker)
            if why:
                self._excluded.setdefault(f"worker {id(worker)}", why)
            left = bool(self._all)
        _kill(worker)
        if why:
            self._echo(why)
        if not left:
            self._idle.put(None)


def _kill(worker: _Remote) -> None:
    with suppress(RayError, ConnectionError, RuntimeError):  # it or the cluster may be gone
        ray.kill(worker.actor)


def _cause(error: BaseException) -> str:
    """Return the last line of a Ray error; tracebacks and actor names precede it."""
    lines = str(error).strip().splitlines()
    return lines[-1].strip() if lines else type(error).__name__
