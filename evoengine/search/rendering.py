"""Render templates in a worker process: one that loops for ever or exhausts memory costs only its candidate."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import wait

from evoengine.errors import UsageError
from evoengine.records import Outcome, Rejection
from evoengine.search.worker_process import WorkerLimits
from evoengine.search.workers import WorkerPool
from evoengine.stages.template import Template, fill

LIMITS = WorkerLimits(seconds=10.0, memory_bytes=1 << 30, environment={"CUDA_VISIBLE_DEVICES": ""}, forked=False)
"""a template takes milliseconds, the first a tenth of a second; it needs none of the other workers' imports"""
POLL_SECONDS = 0.1


class Renderer:
    """A replacement of `fill`. `while_waiting` is called repeatedly while a template takes long."""

    def __init__(self, limits: WorkerLimits = LIMITS) -> None:
        self._pool = WorkerPool(1, limits)
        self.while_waiting: Callable[[], None] = lambda: None

    def __call__(self, template: Template) -> str:
        """Render a template in a worker process. Raises as `fill` does, UsageError beyond a limit, and MachineError."""
        future = self._pool.submit(fill, template, on_crash=Outcome.UNCOMPILABLE, returns=str)
        while not wait((future,), POLL_SECONDS).done:
            self.while_waiting()
        found = future.result()
        if isinstance(found, Rejection):
            raise UsageError(f"the template {template.folders.own / template.family} cannot be filled: {found.reason}")
        return found

    def close(self) -> None:
        self._pool.close()
