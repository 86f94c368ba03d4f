"""Check a user's own reference before a search, in a worker process with a time limit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module

from evoengine.errors import UsageError
from evoengine.records import Outcome, Rejection
from evoengine.sandbox.worker_process import COMPILER_LIMITS
from evoengine.sandbox.workers import WorkerPool
from evoengine.workloads.base import Target
from evoengine.workloads.folder import FolderWorkload
from evoengine.workloads.folder_definition import FolderProblem

REFERENCE_SECONDS = 60.0
"""time limit of the reference on all of the gate's small sizes, each twice"""


def require_reference(target: Target, echo: Callable[[str], None], seconds: float = REFERENCE_SECONDS) -> None:
    """Run the reference of a folder's workload as the gate will; other workloads have none.

    Raises UsageError if it raises, hangs, ends its process, or returns other outputs than problem.json states.
    """
    workload, problem = target.workload, target.problem
    if not isinstance(workload, FolderWorkload) or not isinstance(problem, FolderProblem):
        return
    pool = WorkerPool(1, replace(COMPILER_LIMITS, seconds=seconds, niceness=0, warm_up=_load))
    try:
        found = pool.submit(_check, workload, problem, on_crash=Outcome.CRASHED, returns=tuple).result()
    finally:
        pool.close()
    if isinstance(found, Rejection):
        raise UsageError(f"the reference of {workload.name} gives no outputs: {found.reason}")
    for remark in found:
        echo(remark)


def _load() -> None:
    """Import torch before the time limit starts."""
    import_module("evoengine.workloads.folder_check")


def _check(workload: FolderWorkload, problem: FolderProblem) -> tuple[str, ...]:
    from evoengine.workloads.folder_check import check_reference

    return check_reference(workload, problem)
