"""Gate every configuration of a user's Triton kernel, in a worker process that may die."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING

from evoengine.errors import UsageError
from evoengine.gpu import Gpu
from evoengine.records import Outcome, Rejection
from evoengine.sandbox.worker_process import COMPILER_LIMITS
from evoengine.sandbox.workers import WorkerPool
from evoengine.sass.launch import require_arch_of
from evoengine.search.first_build import build_judges
from evoengine.search.reference import with_functions
from evoengine.virtual import require_triton
from evoengine.workloads.base import Host

if TYPE_CHECKING:
    from evoengine.virtual.gate import ConfigVerdict
    from evoengine.virtual.verify import Session

SECONDS = 3600.0
"""time limit of one configuration"""


def verify_triton(
    host: Host, gpu: Gpu, seed: int, exact: bool = False, on_stage: Callable[[str], None] = lambda stage: None
) -> list[ConfigVerdict]:
    """Return a verdict for each configuration of the autotuner's list, in its order.

    One whose process dies or takes too long is wrong for that, and the others are gated all the same. Raises UsageError
    as `Session` does, and for a GPU whose machine code cannot be executed.
    """
    from evoengine.virtual.gate import Attempt, ConfigVerdict

    require_triton()
    require_arch_of(gpu.capability)
    host = with_functions(host)
    on_stage("building the executor")
    build_judges(emulated=False)
    pool = WorkerPool(1, replace(COMPILER_LIMITS, seconds=SECONDS, niceness=0, warm_up=_load))
    verdicts = []
    try:
        on_stage("executing the file")
        configs = pool.submit(_configs, host, gpu, seed, on_crash=Outcome.CRASHED, returns=tuple).result()
        if isinstance(configs, Rejection):
            raise UsageError(f"{host.file} cannot be executed: {configs.reason}")
        first = 0
        """that the others are compared with"""
        for number, config in enumerate(configs):
            on_stage(f"gating configuration {number + 1} of {len(configs)}")
            found = pool.submit(
                _gate, host, gpu, seed, number, first, exact, on_crash=Outcome.CRASHED, returns=ConfigVerdict
            ).result()
            if isinstance(found, Rejection):
                first += first == number
                found = ConfigVerdict(config, [Attempt("", "in a process", found.reason, found.outcome)])
            verdicts.append(found)
    finally:
        pool.close()
    return verdicts


def _load() -> None:
    import_module("evoengine.virtual.verify")


_sessions: dict[tuple[Host, Gpu, int], Session] = {}
"""of a worker process, by what it is made from"""


def _configs(host: Host, gpu: Gpu, seed: int) -> tuple[str, ...]:
    return _session(host, gpu, seed).configs


def _gate(host: Host, gpu: Gpu, seed: int, number: int, first: int, exact: bool) -> ConfigVerdict:
    """Gate one configuration, after the `first`, with which it is compared, where this process is a new one."""
    if (host, gpu, seed) not in _sessions and number != first:
        _session(host, gpu, seed).gate(first, exact)
    return _session(host, gpu, seed).gate(number, exact)


def _session(host: Host, gpu: Gpu, seed: int) -> Session:
    from evoengine.virtual.verify import Session

    if (host, gpu, seed) not in _sessions:
        _sessions[host, gpu, seed] = Session(host, gpu, seed)
    return _sessions[host, gpu, seed]
