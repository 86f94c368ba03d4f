"""The best kernels of a ledger."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from evoengine.errors import NothingFound, UsageError
from evoengine.hints import hint
from evoengine.ledger.store import Ledger, open_ledger
from evoengine.objectives import front, stored_objectives
from evoengine.records import Candidate, Measurement


@dataclass(frozen=True, slots=True)
class Best:
    """`candidates` best first, all by figures that may be compared."""

    problem: str
    gpu: str
    candidates: tuple[Candidate, ...]


def best(
    problem: str | None = None, gpu: str | None = None, *, top: int = 10, pareto: bool = False, db: str | None = None
) -> Best:
    """The best kernels found; of the last run's problem and GPU where none are named. With `pareto` what nothing beats
    in all objectives of the last run.

    Raises NothingFound where the ledger holds none.
    """
    with open_ledger(db, create=False) as ledger:
        return find_best(ledger, problem, gpu, top, pareto)


def find_best(ledger: Ledger, problem: str | None, gpu: str | None, top: int | None, pareto: bool = False) -> Best:
    """As `best`, in a ledger that is open."""
    gpu, problem = ledger.last_target(gpu, problem)
    found: Sequence[Candidate] = ledger.best(problem, gpu, top=top or 10)
    if not found:
        raise NothingFound(
            f"the ledger holds no correct candidate for {problem} on {gpu}: "
            f"{hint('history', db=ledger.db, problem=problem, gpu=gpu)} shows how each ended"
        )
    if pareto:
        found = _front(ledger, problem, gpu, found[0].ranked_by, top)
    return Best(problem, gpu, tuple(found))


def _front(ledger: Ledger, problem: str, gpu: str, like: Measurement, top: int | None) -> Sequence[Candidate]:
    """The Pareto front over the objectives of the last run, by figures that may be compared with `like`."""
    aimed = next(r.objectives for r in reversed(ledger.runs()) if (r.problem, r.gpu) == (problem, gpu))
    objectives = stored_objectives(aimed)
    if len(objectives) == 1:
        raise UsageError(f"the last run aimed at {aimed} alone; search with --objective tflops,registers for a front")
    known = ledger.trials(problem=problem, gpu=gpu, ranked=True, resources=True)
    alike = (t for t in known if t.measurement and t.measurement.comparable(like))
    return [ledger.candidate(t.trial) for t in front(alike, objectives)[:top]]
