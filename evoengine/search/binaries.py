"""The binary of what a person will use, executed by its machine code: a search's winner, and every export."""

from __future__ import annotations

import secrets

from evoengine.errors import MachineError, UsageError
from evoengine.ledger.store import Ledger
from evoengine.records import Candidate, CompiledCandidate, Outcome, Rejection
from evoengine.search.evaluators import gate_plan, seed_for
from evoengine.search.model_build import build_model
from evoengine.search.remeasure import spaces_of
from evoengine.search.targets import target_of
from evoengine.search.worker_process import COMPILER_LIMITS
from evoengine.search.workers import WorkerPool
from evoengine.space.space import SearchSpace
from evoengine.stages.binary_check import BinaryCheck
from evoengine.stages.tasks import execute_task
from evoengine.workloads.base import Target


def check_binary(target: Target, space: SearchSpace, contender: CompiledCandidate, seed: int) -> BinaryCheck:
    """Puts the binary through the gate's small cases, in a process that may die.

    Raises MachineError where this machine has no disassembler or no C++ compiler.
    """
    build_model()  # before the time that the check may take begins
    workers = WorkerPool(1, COMPILER_LIMITS)
    try:
        plan = gate_plan(space, target, contender.config)
        result = workers.submit(
            execute_task, target.workload, contender.source, contender.binary, plan, seed,
            died=Outcome.CRASHED, gives=BinaryCheck,
        ).result()  # fmt: skip
    finally:
        workers.close()
    return BinaryCheck(None, result.reason) if isinstance(result, Rejection) else result


def check_winner(ledger: Ledger, run: int, target: Target, space: SearchSpace, seed: int) -> list[str]:
    """Executes the best of the run, and where it is refuted the next, until one stands; says what came of each.

    What is refuted ends as incorrect, crashed or hung, with the verdict in the ledger.
    """
    said = []
    while best := ledger.best(str(target.problem), target.gpu.key, top=1, run=run):
        winner = ledger.candidate(best[0].trial, with_cubin=True)
        try:
            check = check_binary(target, space, winner.contender, seed_for(seed, run, winner.trial))
        except MachineError as error:
            check = BinaryCheck(None, str(error))
        said.append(f"#{winner.trial}: {check}")
        record_check(ledger, winner, check)
        if not check.refuted:
            break
    return said


def check_export(ledger: Ledger, candidate: Candidate) -> BinaryCheck:
    """Executes what is to be exported, with its cubin; by the space of its run.

    Raises UsageError where that is a space of others that cannot be read: nothing here vouches for the candidate.
    """
    try:
        target = target_of(ledger, candidate)
        space = spaces_of(ledger, [candidate], target)[candidate.run]
        check = check_binary(target, space, candidate.contender, secrets.randbelow(2**31))
    except (MachineError, UsageError) as error:
        if isinstance(error, UsageError) and candidate.imported_from is not None:
            raise UsageError(f"trial {candidate.trial} is not exported: {error}") from error
        check = BinaryCheck(None, str(error))
    record_check(ledger, candidate, check)
    return check


def record_check(ledger: Ledger, candidate: Candidate, check: BinaryCheck) -> None:
    """A refuted candidate ends with the check's outcome, unless a GPU ran it: that stays, beside the verdict."""
    verdict = check.verdict
    if verdict is None:
        return
    ledger.record_verdict(candidate.trial, verdict)
    if verdict.outcome is not None and candidate.outcome is not Outcome.MEASURED:
        reason = f"machine code: {verdict.reason}"
        ledger.finish(candidate.trial, verdict.outcome, reason, candidate.occupancy, verdict.device)
