"""Problem and workload of what a ledger holds, so that it can be gated, measured or exported again."""

from __future__ import annotations

from evoengine.errors import UsageError
from evoengine.gpu import Gpu, find_gpu, known_gpus
from evoengine.gpu_file import stored_fields
from evoengine.ledger.store import Ledger
from evoengine.records import Candidate
from evoengine.workloads import find_workload, workloads
from evoengine.workloads.base import AnyWorkload, Target


def target_of(ledger: Ledger, candidate: Candidate) -> Target:
    """What a candidate was found for. Raises UsageError where its workload is not known here."""
    return stored_target(ledger, candidate.problem, stored_gpu(ledger, candidate.gpu))


def stored_gpu(ledger: Ledger, key: str) -> Gpu:
    """The GPU of that name: of gpus.toml, or as a file described it to a run. Raises UsageError for others."""
    if key in known_gpus() or (fields := ledger.gpu_definition(key)) is None:
        return find_gpu(key)
    return stored_fields(fields, f"the ledger's description of {key!a}")


def stored_target(ledger: Ledger, problem: str, gpu: Gpu) -> Target:
    """A problem of the ledger, by its text. Raises UsageError where its workload is not known here."""
    workload = _workload(ledger, problem)
    return Target(workload, workload.parse(problem), gpu)


def _workload(ledger: Ledger, problem: str) -> AnyWorkload:
    """By its name, or from the definition that the last run for this problem kept."""
    name = problem.partition(":")[0]
    if name in workloads():
        return find_workload(name)
    definition = ledger.last_definition(problem)
    if definition is None:
        raise UsageError(f"the workload {name} of {problem} is not known here; name its folder with --kernel")
    from evoengine.workloads.folder import workload_from_text

    return workload_from_text(name, definition)
