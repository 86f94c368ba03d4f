"""Times of another GPU of the same architecture for the same problem, as the prior of a search."""

from __future__ import annotations

from evoengine.gpu import Gpu, known_gpus
from evoengine.ledger.store import Ledger
from evoengine.records import Candidate, Kind
from evoengine.search.samplers.pool import Space
from evoengine.search.samplers.prior import MIN_MEASURED, Prior

MOST = 20_000
"""number of figures taken from a sibling, fastest first"""


def sibling_prior(ledger: Ledger, space: Space, problem: str, gpu: Gpu) -> Prior:
    """Return the prior from the sibling GPU that measured most configurations of the space.

    It is empty if none measured enough.
    """
    others = {run.gpu for run in ledger.runs() if run.problem == problem and run.gpu != gpu.key}
    siblings = sorted(key for key in others & known_gpus().keys() if known_gpus()[key].arch == gpu.arch)
    found = max((_measured(ledger, space, problem, key) for key in siblings), key=len, default=[])
    prior = Prior(space)
    for candidate in found if len(found) >= MIN_MEASURED else ():
        prior.measure(candidate.config, candidate.ranked_by.compared_us)
    return prior


def _measured(ledger: Ledger, space: Space, problem: str, gpu: str) -> list[Candidate]:
    best = ledger.best(problem, gpu, top=MOST)
    return [c for c in best if c.ranked_by.kind is Kind.MEASURED and space.contains(c.config)]
