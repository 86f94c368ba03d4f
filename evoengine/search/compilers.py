"""Workers that render templates, compile sources and predict binaries.

A template that loops for ever or exhausts memory costs only its candidate. Each source is compiled, and each binary
predicted, at most once.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import closing
from dataclasses import replace

from evoengine.errors import UsageError
from evoengine.ledger.store import Ledger
from evoengine.records import Binary, Candidate, CompiledCandidate, Outcome, Rejection, Source
from evoengine.sandbox.worker_process import COMPILER_LIMITS, WorkerLimits
from evoengine.sandbox.workers import Answer, WorkerPool, Workers
from evoengine.search.identity import Setting
from evoengine.search.targets import stored_gpu
from evoengine.stages.compile import options
from evoengine.stages.predict import Estimated
from evoengine.stages.render import Template, fill
from evoengine.stages.tasks import COMPILE_SECONDS, compile_task
from evoengine.stages.toolchain import compiler_version

RENDER_LIMITS = WorkerLimits(seconds=10.0, memory_bytes=1 << 30, environment={"CUDA_VISIBLE_DEVICES": ""}, forked=False)
"""a template takes milliseconds, the first a tenth of a second; it needs none of the other workers' imports"""
POLL_SECONDS = 0.1


class Renderer:
    """A replacement of `fill`. `while_waiting` is called repeatedly while a template takes long."""

    def __init__(self, limits: WorkerLimits = RENDER_LIMITS) -> None:
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


MAX_BINARIES = 128
"""kept for later requests, about 1 MB each with their listings"""


class Compilers:
    def __init__(
        self,
        setting: Setting,
        ledger: Ledger,
        compiler: Callable[[Source, str], Binary | Rejection],
        predictor: Callable[..., Estimated],
        workers: Workers,
        seconds: float,
    ) -> None:
        """Create the compilers of a search. `seconds` is the time limit of a task; the workers are closed with it."""
        self.workers = workers
        self._setting, self._ledger = setting, ledger
        self._compiler, self._predictor, self._seconds = compiler, predictor, seconds
        self._binaries: dict[str, Future[Binary | Rejection]] = {}
        """by the source's sha256, oldest first"""
        self._predictions: dict[str, Future[Estimated | Rejection]] = {}

    def recorded(self, source: Source) -> Binary | None:
        """Return the binary that this compiler made of the source in an earlier run."""
        arch = self._setting.target.gpu.arch
        return self._ledger.find_binary(source.sha256, options(arch, source.text), arch, compiler_version())

    def compile(self, source: Source) -> Future[Binary | Rejection]:
        """Compile a source unless that is running or done. A failed compilation is repeated."""
        future = self._binaries.get(source.sha256)
        if future is None or not _holds(future, Binary):
            future = self._binaries[source.sha256] = self.workers.submit(
                self._compiler,
                source,
                self._setting.target.gpu.arch,
                on_crash=Outcome.UNCOMPILABLE,
                returns=Binary,
                seconds=min(COMPILE_SECONDS, self._seconds),
            )
            if len(self._binaries) > MAX_BINARIES:
                del self._binaries[next(iter(self._binaries))]
        return future

    def predict(self, contender: CompiledCandidate) -> Future[Estimated | Rejection]:
        """Predict a candidate's time unless that is running or done. A failed prediction is repeated."""
        s, key = self._setting, contender.source.sha256
        future = self._predictions.get(key)
        if future is None or not _holds(future, Estimated):
            future = self._predictions[key] = self.workers.submit(
                self._predictor,
                s.target,
                contender,
                s.space.cost(contender.config),
                on_crash=Outcome.CRASHED,
                returns=Estimated,
            )
        return future

    def close(self) -> None:
        self.workers.close()


def _holds(future: Future[Answer | Rejection], kind: type[Answer]) -> bool:
    """Return whether the future returned such an answer, or may still return one."""
    return not future.done() or (future.exception() is None and isinstance(future.result(), kind))


# Recompile machine code that a ledger lacks, such as that of imported candidates, from the source.


def compile_in(workers: Workers, source: Source, arch: str) -> Binary | Rejection:
    """Compile a source in a worker process and wait for the binary."""
    return workers.submit(
        compile_task, source, arch, on_crash=Outcome.UNCOMPILABLE, returns=Binary, seconds=COMPILE_SECONDS
    ).result()


def with_machine_code(ledger: Ledger, trial: int) -> Candidate | Rejection:
    """Return the trial with its cubin if it was compiled.

    An imported trial is compiled for its GPU, and the binary is stored. Returns a Rejection if its source does not
    compile. Raises MachineError if this machine has no compiler, UsageError if the GPU is unknown or the stored data is
    damaged.
    """
    candidate = ledger.candidate(trial, with_cubin=True)
    if candidate.source is None or candidate.binary is None or candidate.binary.cubin:
        return candidate
    arch = stored_gpu(ledger, candidate.gpu).arch
    with closing(WorkerPool(1, COMPILER_LIMITS)) as workers:
        made = compile_in(workers, candidate.source, arch)
    if isinstance(made, Rejection):
        return made
    ledger.record_binary(trial, candidate.source, made)
    return replace(candidate, binary=made)
