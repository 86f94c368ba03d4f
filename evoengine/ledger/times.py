"""All figures of trials, sorted by what makes them comparable, where lists have of each trial the one that it is ranked
by."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sqlalchemy import select

from evoengine.ledger.checksums import RowReader
from evoengine.ledger.listing import BATCH, Reading, read_policy
from evoengine.ledger.models import MeasurementRow
from evoengine.ledger.rows import KIND_PRECEDENCE
from evoengine.records import Clocks, Kind, Policy
from evoengine.terms import FORMULA, model_of

_figures = RowReader(
    MeasurementRow,
    ("candidate_id", "kind", "device", "tflops", "median_us", "normalised_us", "policy", "terms", "suspect"),
)


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
        rows = select(*_figures.columns).order_by(MeasurementRow.id)
        with reading() as session:
            of_batch = session.execute(rows.where(MeasurementRow.candidate_id.in_(trials[start : start + BATCH])))
            timed = [_timed(*values) for _, *values, suspect in map(_figures.read, of_batch) if not suspect]
        yield from timed


def _timed(
    trial: int, named: str, device: str, tflops: float | None, median_us: float, normalised_us: float | None,
    policy: str | None, terms: str,
) -> Timed:  # fmt: skip
    kind = Kind(named)
    model = model_of(json.loads(terms)) if kind is Kind.ESTIMATED else None
    us = median_us if normalised_us is None else normalised_us
    return Timed(trial, Sort(kind, model, device, read_policy(policy)), us, tflops)
