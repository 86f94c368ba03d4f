"""The last word of a search that times: its best candidates timed against each other, and the ranking that follows."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace

from evoengine.ledger.store import Ledger
from evoengine.records import Contender, Finals, Kind, Rejection
from evoengine.search.judges import Judge

FINALISTS = 8


def hold_finals(ledger: Ledger, judge: Judge, problem: str, gpu: str) -> Future | None:
    """A future of the finals among the ledger's best measured candidates; None where the judge times none."""
    best = ledger.best(problem, gpu, top=FINALISTS)
    found = [ledger.candidate(c.trial, with_cubin=True) for c in best if c.measurement.kind is Kind.MEASURED]
    return judge.finals([Contender(c.trial, c.source, c.binary, c.config) for c in found]) if found else None


def record_finals(ledger: Ledger, run: int, result: Finals | Rejection) -> list[str]:
    """Writes the new figures, each with its place; says what a person should know of them.

    `Ledger.best` ranks by `place` among the finalists of the last run that held finals (`final_of_run`).
    """
    if isinstance(result, Rejection):
        return [f"the best could not be timed against each other ({result.reason}); they are ranked by single timings"]
    for place, trial in enumerate(result.order, 1):
        figure = result.figures[trial]
        final = {"final_of_run": float(run), "place": float(place), "tied": float(trial in result.tied)}
        ledger.record_measurement(trial, replace(figure, terms={**figure.terms, **final}))
    if not result.tied:
        return []
    first, *others = sorted(result.tied, key=result.order.index)
    listed = ", ".join(f"#{trial}" for trial in others)
    return [f"#{first} cannot be told apart from {listed}; of these it has the fewest registers"]
