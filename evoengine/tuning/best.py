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
    """ranked candidates of the same problem and GPU that are of another kernel, or were judged by another gate"""

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
    """Return the best kernels found; of the last run's problem and GPU where none are named.

    With `kernel`, a folder, those of the kernel as that folder has it now. With `pareto` what nothing beats in all
    objectives of the last run. Raises NothingFound where the ledger holds none, UsageError where it holds only those of
    another text, definition or reference of the kernel.
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
    """Return what `best` does, of a ledger that is open."""
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
            f"the kernel in {kernel} is not the one that run {others[0].run} searched: its text, definition or "
            f"reference is another; {hint('best', db=ledger.db, problem=problem, gpu=gpu)} shows that one's, "
            f"{hint('search', kernel=kernel, db=ledger.db)} searches this one"
        )
    if not found:
        raise NothingFound(
            f"the ledger holds no correct candidate for {problem} on {gpu}: "
            f"{hint('history', db=ledger.db, problem=problem, gpu=gpu)} shows how each ended"
        )
    apart = tuple(ledger.ranked_apart(found[0]))
    if pareto:
        found = _front(ledger, problem, gpu, found[0].ranked_by, top)
    return Best(problem, gpu, tuple(found), apart)


def ties(candidates: Sequence[Candidate]) -> dict[int, list[int]]:
    """Return trial → trials whose predicted times lie within its prediction's range, and so cannot be distinguished.

    Measured figures and those by formula have no range, and tie with none.
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
        raise UsageError(f"the last run aimed at {aimed} alone; search with --objective tflops,registers for a front")
    known = ledger.trials(problem=problem, gpu=gpu, ranked=True, resources=True)
    alike = (t for t in known if t.measurement and t.measurement.comparable(like))
    return [ledger.candidate(t.trial) for t in front(alike, objectives)[:top]]
