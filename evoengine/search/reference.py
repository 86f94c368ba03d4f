"""Check a user's own reference before a search, in a worker process with a time limit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any, TypeVar

from evoengine.errors import UsageError
from evoengine.gpu import Gpu
from evoengine.records import Outcome, Rejection
from evoengine.sandbox.worker_process import COMPILER_LIMITS
from evoengine.sandbox.workers import WorkerPool
from evoengine.search.first_build import build_judges
from evoengine.workloads.base import Host, Target
from evoengine.workloads.folder import FolderWorkload
from evoengine.workloads.folder_definition import FolderProblem
from evoengine.workloads.triton_kernel import AutotuneEntry, Examined, TritonWorkload, define, is_served, proposed_space

Answer = TypeVar("Answer")

FOLDER, HOST = "evoengine.workloads.folder_check", "evoengine.virtual.host"
"""modules that only worker processes import"""
REFERENCE_SECONDS = 60.0
"""time limit of the reference on all of the gate's small sizes, each twice"""


def require_reference(target: Target, echo: Callable[[str], None], seconds: float = REFERENCE_SECONDS) -> None:
    """Run the reference of a user's own kernel as the gate will; other workloads have none.

    Raises UsageError if it raises, hangs, ends its process, or returns other outputs than problem.json states.
    """
    workload, problem = target.workload, target.problem
    if isinstance(workload, FolderWorkload) and isinstance(problem, FolderProblem):
        of = f"the reference of {workload.name} gives no outputs"
        found: tuple[str, ...] = _in_worker(FOLDER, "check_reference", (workload, problem), tuple, of, seconds)
    elif workload.host is not None:
        host, sizes = workload.host, {name: int(size) for name, size in problem.variables().items()}
        build_judges(emulated=False)  # before the time limit starts
        of = f"{host.call} and the reference of {workload.name} cannot be run"
        found = _in_worker(HOST, "check", (host, sizes, target.gpu), tuple, of, seconds)
    else:
        return
    for remark in found:
        echo(remark)


def examine_triton(host: Host, gpu: Gpu) -> TritonWorkload:
    """Execute a user's file in a worker process, and return the workload with a proposed space.

    Raises UsageError if the file raises, hangs or ends its process, or lacks what `host` names.
    """
    from evoengine.virtual import require_triton

    require_triton()
    host = with_functions(host)
    found = _in_worker(HOST, "examine", (host, gpu), Examined, f"{host.file} cannot be executed")
    return define(host, found.sizes, proposed_space(host.kernel, found.settings))


def with_functions(host: Host) -> Host:
    """Return the file with the functions that launch and judge its kernel, which for most is the file itself.

    Those of vLLM's and SGLang's kernels are evoengine's. Raises UsageError if the file has no such kernel.
    """
    if not is_served(host):
        return host
    return _in_worker(HOST, "with_functions", (host,), Host, f"{host.file} cannot be parsed")


def autotune_entry(text: str, times_ms: Sequence[float]) -> AutotuneEntry:
    """Return the entry of Triton's autotuner's cache for the candidate with this text.

    Raises UsageError if the autotuner keeps none, and where the user's file hangs or ends its process.
    """
    build_judges(emulated=False)
    failed = "Triton's autotuner cannot be asked for its cache"
    return _in_worker(HOST, "autotune_entry", (text, times_ms), AutotuneEntry, failed)


def _in_worker(
    module: str,
    function: str,
    given: tuple[Any, ...],
    returns: type[Answer],
    failed: str,
    seconds: float = REFERENCE_SECONDS,
) -> Answer:
    """Return what a function of a module, which this process does not import, returns in a process that may die.

    The module is imported before the time limit starts. Raises UsageError, beginning with `failed`, if it dies.
    """
    limits = replace(COMPILER_LIMITS, seconds=seconds, niceness=0, warm_up=partial(import_module, module))
    with closing(WorkerPool(1, limits)) as pool:
        task = partial(_call, module, function, *given)
        found = pool.submit(task, on_crash=Outcome.CRASHED, returns=returns).result()
    if isinstance(found, Rejection):
        raise UsageError(f"{failed}: {found.reason}")
    return found


def _call(module: str, function: str, *given: Any) -> Any:
    """Call a function of a module that only the worker process imports."""
    return getattr(import_module(module), function)(*given)
