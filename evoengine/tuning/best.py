"""The best kernels of a ledger."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from evoengine.errors import NothingFound, UsageError, hint
from evoengine.ledger.ranking import RankedApart
from evoengine.ledger.store import Ledger, open_ledger
from evoengine.objectives import front, stored_objectives
from evoengine.records import Candidate, Measurement, listed
from evoengine.search.identity import kernel_identity
from evoengine.terms import range_us
from evoengine.tuning.setup import checked, register_kernel, require_name
from evoengine.workloads import stored_problem


@dataclass(frozen=True, slots=True, repr=False)
class Best:
    """`candidates`, best first, ranked by comparable figures."""

    problem: str
    gpu: str
    candidates: tuple[Candidate, ...]
    apart: tuple[RankedApart, ...] = ()
    """other ranked candidates of the problem and GPU: of another kernel, or judged by another version of the gate"""

    def __repr__(self) -> str:
        return f"Best({self.problem} on {self.gpu}: {listed(self.candidates)})"


def best(
    problem: str | None = None,
    gpu: str | None = None,
    *,
    kernel: Path | str | None = None,
    top: int = 10,
    pareto: bool = False,
    db: str | os.PathLike[str] | None = None,
) -> Best:
    """Return the best kernels found, by default for the problem and GPU of the last run.

    With `kernel`, a folder, only results of the folder's current version count. With `pareto` the result is the Pareto
    front over the objectives of the last run. Raises NothingFound if the ledger holds none, UsageError if it holds only
    results of another text, definition or reference of the kernel.
    """
    given = checked(best, locals())
    with open_ledger(given.pop("db"), create=False) as ledger:
        return find_best(ledger, **given)


def find_best(
    ledger: Ledger,
    problem: str | None,
    gpu: str | None,
    top: int | None,
    pareto: bool = False,
    kernel: Path | str | None = None,
) -> Best:
    """Return what `best` does, from an open ledger."""
    workload = register_kernel(Path(kernel)) if kernel is not None else None
    if workload is not None and problem is None:
        gpu, problem = ledger.targets.last_of(workload.name, gpu)
    gpu, problem = ledger.targets.last(gpu, None if problem is None else stored_problem(problem))
    if workload is not None:
        require_name(workload, problem)
    identity = None if workload is None else kernel_identity(workload)
    found: Sequence[Candidate] = ledger.best(problem, gpu, top=top or 10, kernel=identity)
    if not found and identity is not None and (others := ledger.best(problem, gpu, top=1)):
        raise UsageError(
            f"the kernel in {kernel} has changed since run {others[0].run} (text, definition or reference): "
            f"{hint('best', db=ledger.db, problem=problem, gpu=gpu)} shows that run's results, "
            f"{hint('search', kernel=kernel, db=ledger.db)} searches the new version"
        )
    if not found:
        raise NothingFound(
            f"the ledger holds no correct candidate for {problem} on {gpu}: "
            f"{hint('history', db=ledger.db, problem=problem, gpu=gpu)} shows the outcomes"
        )
    apart = tuple(ledger.ranked_apart(found[0]))
    if pareto:
        found = _front(ledger, problem, gpu, found[0].ranked_by, top)
    return Best(problem, gpu, tuple(found), apart)


def ties(candidates: Sequence[Candidate]) -> dict[int, list[int]]:
    """Return trial → trials whose predicted times lie within its prediction's range, so that they are tied with it.

    Measured figures and those by formula have no range and are never tied.
    """
    predicted = {c.trial: c.ranked_by for c in candidates if range_us(c.ranked_by.terms)}

    def tied(one: Measurement, other: Measurement) -> bool:
        low, high = range_us(one.terms) or (0.0, 0.0)
        return low <= other.median_us <= high

    return {
        trial: [n for n, other in predicted.items() if n != trial and tied(figure, other)]
        for trial, figure in predicted.items()
    }


def _front(ledger: Ledger, problem: str, gpu: str, like: Measurement, top: int | None) -> Sequence[Candidate]:
    """Return the Pareto front over the objectives of the last run, using figures that are comparable with `like`."""
    aimed = next(r.objectives for r in reversed(ledger.runs()) if (r.problem, r.gpu) == (problem, gpu))
    objectives = stored_objectives(aimed)
    if len(objectives) == 1:
        raise UsageError(
            f"the last run had the one objective {aimed}; a front needs several: search --objective tflops,registers"
        )
    known = ledger.trials(problem=problem, gpu=gpu, ranked=True, resources=True)
    alike = (t for t in known if t.measurement and t.measurement.comparable(like))
    return [ledger.candidate(t.trial) for t in front(alike, objectives)[:top]]
