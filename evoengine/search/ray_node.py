"""What runs on the nodes of a Ray cluster: an actor that has one worker of its own, as a local search has many.

A candidate can only take down the actor's worker, never the actor: limits and what is left behind are the business of
the same keeper as in a local search. An actor that is lost was lost with its node, or killed by somebody.
"""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace

import ray

from evoengine import __version__
from evoengine.devices.driver import GpuDevice, lock_device
from evoengine.errors import EvoengineError
from evoengine.records import Outcome
from evoengine.search.worker_process import WorkerLimits
from evoengine.search.workers import WorkerPool


@dataclass(frozen=True, slots=True)
class Ready:
    """Where an actor came up."""

    node: str
    """Ray's id of it"""
    host: str
    version: str
    """of evoengine"""
    device: GpuDevice | None = None
    """that it has for itself"""


@dataclass(frozen=True, slots=True)
class Ran:
    """What came of a task."""

    answer: object
    """the task's, a Rejection, the Death of the node's worker, or the EvoengineError that the task ended with"""
    seconds_busy: float
    seconds_starting: float


@dataclass(frozen=True, slots=True)
class Doing:
    """What an actor with a GPU is at."""

    ready: Ready
    label: str
    """what is searched"""
    task: str | None
    """None where it waits for the next"""
    seconds: float
    """for which it does"""


class NodeWorker:
    """A worker on a node; with `find_gpu` it has that GPU for itself, under the lock of its UUID on the node."""

    def __init__(self, limits: WorkerLimits, find_gpu: Callable[[], GpuDevice] | None, label: str) -> None:
        self._limits, self._find_gpu, self._label = limits, find_gpu, label
        self._pool: WorkerPool | None = None
        self._ready: Ready | None = None
        self._lock = ExitStack()
        self._task: str | None = None
        self._since = time.monotonic()

    def ready(self) -> Ready | EvoengineError:
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
        # a worker would import Ray's main program as its own, in every process
        vars(sys.modules["__main__"]).pop("__file__", None)
        limits, device = self._limits, None
        if self._find_gpu is not None:
            device = self._find_gpu()
            self._lock.enter_context(lock_device(device, print))
            limits = replace(limits, environment={**limits.environment, "CUDA_VISIBLE_DEVICES": device.uuid})
        self._pool = WorkerPool(1, limits)
        self._ready = Ready(ray.get_runtime_context().get_node_id(), platform.node(), __version__, device)
        return self._pool

    def run(
        self, task: Callable[..., object], died: Outcome, gives: type[object], seconds: float, *args: object
    ) -> Ran:
        """Run the task in the worker, which is started first on a node that came back."""
        self._task, self._since = getattr(task, "__name__", str(task)), time.monotonic()
        try:
            pool = self._start()
            before = pool.seconds_busy, pool.seconds_starting
            answer = self._answer(pool, task, died, gives, seconds, args)
        except EvoengineError as error:
            return Ran(error, 0.0, 0.0)
        finally:
            self._task, self._since = None, time.monotonic()
        return Ran(answer, pool.seconds_busy - before[0], pool.seconds_starting - before[1])

    def _answer(
        self, pool: WorkerPool, task: Callable[..., object], died: Outcome, gives: type[object], seconds: float,
        args: tuple[object, ...],
    ) -> object:  # fmt: skip
        """Run the task once. The coordinator decides what a death means, because it knows all workers of the search."""
        try:
            return pool.attempt(task, args, died, gives, seconds, nullcontext())
        except EvoengineError as error:
            return error

    def doing(self) -> Doing | None:
        """Return the current task; None before the worker has started."""
        if self._ready is None:
            return None
        return Doing(self._ready, self._label, self._task, time.monotonic() - self._since)
