"""The executor of machine code built by a worker: a search that is killed meanwhile leaves no compiler running."""

from __future__ import annotations

from dataclasses import replace

from evoengine.errors import MachineError
from evoengine.records import Outcome, Rejection
from evoengine.sass.build import is_built
from evoengine.search.worker_process import COMPILER_LIMITS
from evoengine.search.workers import WorkerPool
from evoengine.stages.tasks import build_model_task

SECONDS = 900.0
"""it takes ten on all cores, and waits for another process that builds it"""


def build_model() -> None:
    """Build the model unless this machine has it. Raises MachineError if it cannot be built."""
    if is_built():
        return
    workers = WorkerPool(1, replace(COMPILER_LIMITS, seconds=SECONDS, niceness=0))
    try:
        found = workers.submit(build_model_task, died=Outcome.CRASHED, gives=str).result()
    finally:
        workers.close()
    if isinstance(found, Rejection):
        raise MachineError(f"the executor of machine code cannot be built: {found.reason}")
