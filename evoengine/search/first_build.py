"""The judges that need no GPU, built by a worker beside the search, once for each machine and compiler.

A search that is killed meanwhile leaves no compiler running.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace

from evoengine.devices.emulator import build as emulator
from evoengine.errors import MachineError
from evoengine.records import Outcome, Rejection
from evoengine.sass import build as executor
from evoengine.search.worker_process import COMPILER_LIMITS
from evoengine.search.workers import WorkerPool
from evoengine.stages.tasks import build_judges_task

LIMITS = replace(COMPILER_LIMITS, seconds=900.0, niceness=5, forked=False)
"""It takes ten seconds on two cores, and waits for another process that builds. Needs none of the imports that others
begin with, lets what the search does meanwhile go first, and goes before the workers, which wait for it."""


class FirstBuild:
    """Begins to build what this machine has not built: the executor of machine code, and the emulator where asked."""

    def __init__(self, emulated: bool) -> None:
        self._workers: WorkerPool | None = None
        self._built: Future[str | Rejection] | None = None
        self._failed: MachineError | None = None
        try:
            if executor.is_built() and (not emulated or emulator.is_built()):
                return
            self._workers = WorkerPool(1, LIMITS)
            self._built = self._workers.submit(build_judges_task, emulated, on_crash=Outcome.CRASHED, returns=str)
        except MachineError as error:  # for `wait`: what a GPU times needs no compiler here
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
