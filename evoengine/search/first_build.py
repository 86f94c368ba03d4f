"""Build the judges that need no GPU in a worker during the search, once for each machine and compiler.

A search that is killed meanwhile leaves no running compiler.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from contextlib import closing
from dataclasses import replace

from evoengine.errors import MachineError
from evoengine.records import Outcome, Rejection
from evoengine.sandbox.host_compiler import cache_folder, remove_abandoned
from evoengine.sandbox.worker_process import COMPILER_LIMITS
from evoengine.sandbox.workers import WorkerPool
from evoengine.sass import build as executor

LIMITS = replace(COMPILER_LIMITS, seconds=900.0, niceness=5, forked=False)
"""A build takes ten seconds on two cores, or waits for another process that builds. It needs none of the workers'
imports; by its niceness it yields to the search but precedes the workers, which wait for it."""


class FirstBuild:
    """A build in the background of the executor of machine code and, where it is added, the emulator, where missing.

    The executor comes first: its build takes two cores, and the first candidates need nothing else.
    """

    def __init__(self) -> None:
        """Begin to build the executor where this machine has none."""
        self._workers: WorkerPool | None = None
        self._failed: MachineError | None = None
        self._emulator: Future[str | Rejection] | None = None
        self._executor = self._begin(executor.is_built, build_executor_task)

    def add_emulator(self) -> None:
        """Build the emulator too, once the executor is built."""
        from evoengine.cuda_emulator.build import is_built

        self._emulator = self._emulator or self._begin(is_built, build_emulator_task)

    def _begin(self, is_built: Callable[[], bool], build: Callable[[], str]) -> Future[str | Rejection] | None:
        try:
            if self._failed or is_built():
                return None
            self._workers = self._workers or WorkerPool(1, LIMITS)
            return self._workers.submit(build, on_crash=Outcome.CRASHED, returns=str)
        except MachineError as error:  # raised by `wait`: a search on a GPU needs no compiler here
            self._failed = error
            return None

    @property
    def is_running(self) -> bool:
        return any(build and not build.done() for build in (self._executor, self._emulator))

    def wait(self, both: bool) -> None:
        """Wait until the executor is built and, with `both`, the emulator where it was added.

        Raises MachineError if one of them failed or could not begin.
        """
        if self._failed:
            raise self._failed
        for build in (self._executor, self._emulator if both else None):
            if build and isinstance(found := build.result(), Rejection):
                raise MachineError(f"the judges that need no GPU cannot be built: {found.reason}")

    def close(self) -> None:
        """End the build if it is still running, and remove what it has not finished."""
        if self._workers:
            self._workers.close()
            for name in ("sass", "emulator"):
                remove_abandoned(cache_folder(name))


# Here, and not with the tasks of the stages, whose imports would delay the build.


def build_executor_task() -> str:
    """Build the executor of machine code; return its path."""
    return str(executor.build())


def build_emulator_task() -> str:
    """Build the emulator; return its path."""
    from evoengine.cuda_emulator.build import build_runtime

    return str(build_runtime())


def build_judges(emulated: bool = True) -> None:
    """Build executor and, where it is to judge too, emulator where this machine has not.

    Raises MachineError if they cannot be built.
    """
    with closing(FirstBuild()) as build:
        if emulated:
            build.add_emulator()
        build.wait(both=emulated)
