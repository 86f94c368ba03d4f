"""The finals of a search that times: its best candidates timed against each other, and the resulting ranking."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import replace

from evoengine.ledger.store import Ledger
from evoengine.records import Candidate, Kind, Outcome, Rejection
from evoengine.search.evaluators import Evaluator
from evoengine.search.recompile import with_machine_code
from evoengine.stages.final_result import Finals
from evoengine.stages.statistics import SAME_WITHIN

FINALISTS = 8


def submit_finals(ledger: Ledger, judge: Evaluator, problem: str, gpu: str) -> Future[Finals | Rejection] | None:
    """Return a future of the finals among the ledger's best measured candidates; None if the evaluator times none."""
    best = ledger.best(problem, gpu, top=FINALISTS)
    measured = [c.trial for c in best if c.ranked_by.kind is Kind.MEASURED]
    known = [with_machine_code(ledger, trial) for trial in measured]
    found = [candidate.contender for candidate in known if isinstance(candidate, Candidate)]
    return judge.finals(found) if found else None


def record_finals(ledger: Ledger, run: int, result: Finals | Rejection) -> list[str]:
    """Write the new figures with their places; return remarks for people.

    `Ledger.best` ranks by `place` among the finalists of the last run that held finals (`final_of_run`). Sustained
    figures have no place. A finalist whose output was wrong ends as incorrect.
    """
    if isinstance(result, Rejection):
        return [f"the best could not be timed against each other ({result.reason}); they are ranked by single timings"]
    said = []
    for trial, how in result.wrong.items():
        candidate = ledger.candidate(trial)
        reason = f"wrong while it was timed in finals, {how}"
        ledger.finish(trial, Outcome.INCORRECT, reason, candidate.occupancy, candidate.device)
        said.append(f"#{trial} was {reason}; it is out")
    for place, trial in enumerate(result.order, 1):
        if trial in result.sustained:
            ledger.record_measurement(trial, result.sustained[trial])
        figure = result.figures[trial]
        final = {"final_of_run": float(run), "place": float(place), "tied": float(trial in result.tied)}
        if place == 1 and result.lead:
            final |= dict(zip(("over_second", "over_second_low", "over_second_high"), result.lead, strict=True))
        ledger.record_measurement(trial, replace(figure, terms={**figure.terms, **final}))
    return said + _outcome(result)


def _outcome(result: Finals) -> list[str]:
    """Return sentences that compare the winner with the others."""
    said = []
    if result.lead:
        ratio, low, high = (100 * (value - 1) for value in result.lead)
        first, second = result.order[:2]
        interval = f"95 % interval {low:+.2f} to {high:+.2f} %"
        said.append(f"#{first} against #{second} in the same rounds: {ratio:+.2f} % of time ({interval})")
    if result.tied:
        first, *others = sorted(result.tied, key=result.order.index)
        within = f"within {100 * SAME_WITHIN:g} %"
        said.append(f"#{first} is the same as {_listed(others)} {within}; of these it has the fewest registers")
    if result.open:
        said.append(f"the fastest was not distinguished from {_listed(result.open)} in the time of the finals")
    return said


def _listed(trials: Iterable[int]) -> str:
    return ", ".join(f"#{trial}" for trial in trials)
