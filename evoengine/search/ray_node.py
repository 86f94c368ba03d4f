"""The actor that runs on the nodes of a Ray cluster. It has one worker process; a local search has several.

A candidate can take down only the actor's worker, never the actor: limits and clean-up are enforced by the same keeper
as in a local search. An actor is lost only with its node, or because somebody killed it.
"""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import ray

from evoengine import __version__
from evoengine.devices.driver import GpuDevice, lock_device
from evoengine.errors import EvoengineError
from evoengine.sandbox.worker_process import WorkerLimits
from evoengine.sandbox.workers import Task, WorkerPool
from evoengine.search.first_build import FirstBuild
from evoengine.stages.tasks import JUDGING


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
    """What an actor with a GPU is doing."""

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
