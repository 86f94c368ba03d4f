"""Build the judges that need no GPU in a worker during the search, once for each machine and compiler.

A search that is killed meanwhile leaves no running compiler.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace

from evoengine.cuda_emulator import build as emulator
from evoengine.errors import MachineError
from evoengine.records import Outcome, Rejection
from evoengine.sandbox.worker_process import COMPILER_LIMITS
from evoengine.sandbox.workers import WorkerPool
from evoengine.sass import build as executor
from evoengine.stages.tasks import build_judges_task

LIMITS = replace(COMPILER_LIMITS, seconds=900.0, niceness=5, forked=False)
"""A build takes ten seconds on two cores, or waits for another process that builds. It needs none of the workers'
imports; by its niceness it yields to the search but precedes the workers, which wait for it."""


class FirstBuild:
    """A build, in the background, of the executor of machine code and, if asked for, the emulator, where missing."""

    def __init__(self, emulated: bool) -> None:
        self._workers: WorkerPool | None = None
        self._built: Future[str | Rejection] | None = None
        self._failed: MachineError | None = None
        try:
            if executor.is_built() and (not emulated or emulator.is_built()):
                return
            self._workers = WorkerPool(1, LIMITS)
            self._built = self._workers.submit(build_judges_task, emulated, on_crash=Outcome.CRASHED, returns=str)
        except MachineError as error:  # raised by `wait`: a search on a GPU needs no compiler here
            self._failed = error

    @property
    def is_running(self) -> bool:
        return self._built is not None and not self._built.done()

    def wait(self) -> None:
        """Wait for the end of the build; raises MachineError where it failed or could not begin."""
        if self._failed:
            raise self._failed
        if self._built is None:
            return
        if isinstance(found := self._built.result(), Rejection):
            raise MachineError(f"what judges without a GPU cannot be built: {found.reason}")

    def close(self) -> None:
        """End the build if it is still running."""
        if self._workers:
            self._workers.close()


def build_judges() -> None:
    """Build executor and emulator where this machine has not; raises MachineError where they cannot be."""
    build = FirstBuild(emulated=True)
    try:
        build.wait()
    finally:
        build.close()
