"""Which changes of knobs paid, from as many of a problem's trials as can be held beside each other."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import func, select

from evoengine.ledger.listing import BATCH, Reading, read_trials
from evoengine.ledger.models import CandidateRow
from evoengine.lineage import Effect, effects
from evoengine.records import Outcome

MOST_TRIALS = 25_000
"""of which effects are computed, the last ones: about 2 KB of memory and 40 µs each"""


@dataclass(frozen=True, slots=True)
class Effects:
    effects: list[Effect]
    trials: int
    """how many ranked trials they were computed from, the last ones"""
    ranked: int
    """how many there are"""

    def __str__(self) -> str:
        some = f"the last {self.trials:,} of " if self.trials < self.ranked else ""
        return f"from {some}{self.ranked:,} ranked trials"


def read_effects(reading: Reading, problem: str, gpu: str, most: int = MOST_TRIALS) -> Effects:
    """Return the effects of the last `most` trials with a figure; their parents may be earlier ones."""
    ranked = select(CandidateRow.id).where(
        CandidateRow.problem == problem, CandidateRow.gpu == gpu,
        CandidateRow.outcome.in_([str(o) for o in Outcome if o.has_figure]),
    )  # fmt: skip
    with reading() as session:
        total = session.scalars(select(func.count()).select_from(ranked.subquery())).one()
        skipped = ranked.order_by(CandidateRow.id.desc()).offset(most - 1).limit(1)
        first = session.scalar(skipped) if total > most else None
    last = ranked if first is None else ranked.where(CandidateRow.id >= first)
    children = list(read_trials(reading, last, resources=False))
    earlier = sorted({p for t in children for p in t.parents if first is not None and p < first})
    parents = [
        parent
        for start in range(0, len(earlier), BATCH)
        for parent in read_trials(
            reading, ranked.where(CandidateRow.id.in_(earlier[start : start + BATCH])), resources=False
        )
    ]
    return Effects(effects(children, parents), len(children), total)
