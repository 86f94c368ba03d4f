"""Restore problem and workload of a ledger's candidates, to gate, measure or export them again."""

from __future__ import annotations

from collections.abc import Sequence

from evoengine.errors import UsageError
from evoengine.gpu import Gpu, find_gpu, known_gpus
from evoengine.gpu_file import stored_fields
from evoengine.ledger.store import Ledger
from evoengine.records import Candidate
from evoengine.sass.chip import DEFAULT as DEFAULT_CLOCK
from evoengine.sass.chip import Clock
from evoengine.space.space import SearchSpace, space_from_text
from evoengine.terms import clock
from evoengine.workloads import find_workload, workload_from_definition, workloads
from evoengine.workloads.base import AnyWorkload, Target


def target_of(ledger: Ledger, candidate: Candidate) -> Target:
    """Return the target of a candidate, by the definition that its own run stored, at the clock of its figure.

    Raises UsageError if its workload is not known here.
    """
    workload = restored_workload(candidate.problem, ledger.run(candidate.run).definition)
    at = clock(candidate.measurement.terms) if candidate.measurement else None
    gpu, predicted_at = stored_gpu(ledger, candidate.gpu), Clock.parse(at) if at else DEFAULT_CLOCK
    return Target(workload, workload.parse(candidate.problem), gpu, predicted_at)


def stored_gpu(ledger: Ledger, key: str) -> Gpu:
    """Return the GPU of that name, from gpus.toml or as a file described it to a run. Raises UsageError for others."""
    if key in known_gpus() or (fields := ledger.targets.gpu_definition(key)) is None:
        return find_gpu(key)
    return stored_fields(fields, f"the ledger's description of {key!a}")


def stored_target(ledger: Ledger, problem: str, gpu: Gpu) -> Target:
    """Return a problem of the ledger by its text, by the definition that the last run for it kept.

    Raises UsageError if its workload is not known here.
    """
    workload = restored_workload(problem, ledger.targets.last_definition(problem))
    return Target(workload, workload.parse(problem), gpu)


def restored_workload(problem: str, definition: str | None) -> AnyWorkload:
    """Return the workload that a run's definition states, else the one that is known by the problem's name.

    Raises UsageError if there is none.
    """
    name = problem.partition(":")[0]
    if definition is not None:
        return workload_from_definition(name, definition)
    if name not in workloads():
        raise UsageError(f"the workload {name} of {problem} is not known here; name its folder with --kernel")
    return find_workload(name)


def spaces_of(ledger: Ledger, candidates: Sequence[Candidate], target: Target) -> dict[int, SearchSpace]:
    """Return the space of each candidate's run from the text in the ledger.

    A binary belongs to the launch rules under which it was compiled.
    """
    wanted = {c.run for c in candidates}
    spaces: dict[int, SearchSpace] = {}
    by_text: dict[str, SearchSpace] = {}
    for run in ledger.runs():
        if run.id in wanted:
            if run.space_text not in by_text:
                by_text[run.space_text] = space_from_text(run.space_text, run.space_name, target.problem, target.gpu)
            spaces[run.id] = by_text[run.space_text]
    return spaces
