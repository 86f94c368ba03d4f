"""Whole candidates into the tables at once: what another ledger, or another tuner, has found."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime

from sqlalchemy import select
from sqlalchemy.orm import Session

from evoengine.ledger.models import BinaryRow, CandidateRow, MeasurementRow, SourceRow, VerdictRow
from evoengine.ledger.rows import binary_values, launch_values, measurement_values, verdict_values
from evoengine.records import Candidate, Measurement, config_key

InsertNew = Callable[..., None]


def enter(
    session: Session, insert_new: InsertNew, run: int, candidates: Iterable[Candidate],
    figures: Mapping[int, Sequence[Measurement]], now: datetime,
) -> list[int]:  # fmt: skip
    """Their new trial numbers, in order; `figures` has all of each, by its old number.

    Parents among them are renumbered; others are not of this ledger and go.
    """
    numbers: dict[int, int] = {}
    for c in candidates:
        row = CandidateRow(
            run_id=run, problem=c.problem, gpu=c.gpu, config=dict(c.config), config_key=config_key(c.config),
            parents=[numbers[p] for p in c.parents if p in numbers], operator=c.operator, created_at=now, finished_at=now,
            outcome=str(c.outcome), reason=c.reason, device=c.device, occupancy=c.occupancy,
        )  # fmt: skip
        if c.source:
            insert_new(session, SourceRow, sha256=c.source.sha256, text=c.source.text)
            for name, value in launch_values(c.source).items():
                setattr(row, name, value)
        if c.source and c.binary:
            values = binary_values(c.source, c.binary)
            insert_new(session, BinaryRow, **values)
            key = {name: values[name] for name in ("source_sha256", "options", "arch", "compiler")}
            row.binary_id = session.scalar(select(BinaryRow.id).filter_by(**key))
        session.add(row)
        session.flush()
        numbers[c.trial] = row.id
        if c.verdict:
            session.add(VerdictRow(candidate_id=row.id, taken_at=now, **verdict_values(c.verdict)))
        for figure in figures[c.trial]:
            if "final_of_run" in figure.terms:
                figure = replace(figure, terms={**figure.terms, "final_of_run": float(run)})
            session.add(MeasurementRow(candidate_id=row.id, taken_at=now, **measurement_values(figure)))
    return list(numbers.values())
