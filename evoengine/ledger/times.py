"""All figures of trials, sorted by what makes them comparable, where lists have of each trial the one that it is ranked
by."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sqlalchemy import select
from sqlalchemy.orm import load_only

from evoengine.ledger.listing import BATCH, Reading
from evoengine.ledger.models import MeasurementRow
from evoengine.ledger.rows import KIND_PRECEDENCE, to_policy
from evoengine.records import Clocks, Kind, Policy
from evoengine.terms import FORMULA, model_of

_READ = (
    MeasurementRow.candidate_id, MeasurementRow.checksums, MeasurementRow.kind, MeasurementRow.device,
    MeasurementRow.tflops, MeasurementRow.median_us, MeasurementRow.normalised_us, MeasurementRow.policy,
    MeasurementRow.terms, MeasurementRow.suspect,
)  # fmt: skip
"""all but the samples"""


@dataclass(frozen=True, slots=True)
class Sort:
    """What figures share that may be compared, within a problem and GPU."""

    kind: Kind
    model: str | None
    """of an estimate what it was made by"""
    device: str
    policy: Policy | None

    @property
    def is_sustained(self) -> bool:
        return self.policy is not None and self.policy.clocks is Clocks.SUSTAINED

    def trust(self) -> tuple[int, bool, bool, str, str]:
        """Less is trusted more, as `ranking.py` has it."""
        by_kind, by_formula = KIND_PRECEDENCE.index(self.kind), self.model == FORMULA
        return by_kind, by_formula, self.is_sustained, self.device, str(self.policy)


@dataclass(frozen=True, slots=True)
class Timed:
    trial: int
    sort: Sort
    us: float
    """that it is compared by"""
    tflops: float | None


def read_times(reading: Reading, trials: Sequence[int]) -> Iterator[Timed]:
    """Every figure of those trials that can be trusted, a trial's oldest first."""
    for start in range(0, len(trials), BATCH):
        rows = select(MeasurementRow).options(load_only(*_READ)).order_by(MeasurementRow.id)
        with reading() as session:
            of_batch = session.scalars(rows.where(MeasurementRow.candidate_id.in_(trials[start : start + BATCH])))
            timed = [_timed(row) for row in of_batch if not row.suspect]
        yield from timed


def _timed(row: MeasurementRow) -> Timed:
    kind = Kind(row.kind)
    model = model_of(row.terms) if kind is Kind.ESTIMATED else None
    sort = Sort(kind, model, row.device, None if row.policy is None else to_policy(row.policy))
    us = row.median_us if row.normalised_us is None else row.normalised_us
    return Timed(row.candidate_id, sort, us, row.tflops)
