"""Recompile machine code that a ledger lacks, such as that of imported candidates, from the source."""

from __future__ import annotations

from dataclasses import replace

from evoengine.ledger.store import Ledger
from evoengine.records import Binary, Candidate, Outcome, Rejection
from evoengine.sandbox.worker_process import COMPILER_LIMITS
from evoengine.sandbox.workers import WorkerPool
from evoengine.search.targets import stored_gpu
from evoengine.stages.tasks import COMPILE_SECONDS, compile_task


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
    workers = WorkerPool(1, COMPILER_LIMITS)
    try:
        made = workers.submit(
            compile_task,
            candidate.source,
            arch,
            on_crash=Outcome.UNCOMPILABLE,
            returns=Binary,
            seconds=COMPILE_SECONDS,
        ).result()
    finally:
        workers.close()
    if isinstance(made, Rejection):
        return made
    ledger.record_binary(trial, candidate.source, made)
    return replace(candidate, binary=made)
