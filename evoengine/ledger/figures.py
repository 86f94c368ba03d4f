"""The query behind every ranking: the figures of candidates that stand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Select, Text, cast, func, select
from sqlalchemy.orm import aliased

from evoengine.ledger.listing import read_policy
from evoengine.ledger.models import CandidateRow, MeasurementRow, VerdictRow
from evoengine.ledger.ranking import Figure
from evoengine.records import EXECUTOR, Kind, Outcome

_TERMS = ("predicted", "place", "final_of_run")
"""those that ranking reads"""
_NO_TERMS: Mapping[str, float] = {}


def figures_of_correct(problem: str, gpu: str) -> Select[Any]:
    """(kernel, …) for `to_figure`, oldest first; a kernel is its source, and where that is unknown, as of what another
    tuner recorded, its configuration.

    Of what ended ranked and was not refuted by a later verdict of the gate. A verdict on executed machine code decides
    nothing here: what it refutes ends as not ranked, unless a GPU measured it.
    """
    any_verdict = aliased(VerdictRow)
    of_gate = (any_verdict.candidate_id == CandidateRow.id, any_verdict.device != EXECUTOR)
    last = select(func.max(any_verdict.id)).where(*of_gate).scalar_subquery()
    figures = select(
        func.coalesce(CandidateRow.source_sha256, CandidateRow.config_key), MeasurementRow.id, CandidateRow.id,
        MeasurementRow.kind, func.coalesce(MeasurementRow.normalised_us, MeasurementRow.median_us),
        MeasurementRow.suspect, MeasurementRow.device, CandidateRow.run_id, cast(MeasurementRow.policy, Text),
        *(MeasurementRow.terms[name].as_float() for name in _TERMS),
    )  # fmt: skip
    return (
        figures.select_from(CandidateRow)
        .join(MeasurementRow)
        .outerjoin(VerdictRow, VerdictRow.id == last)
        .where(
            CandidateRow.problem == problem,
            CandidateRow.gpu == gpu,
            CandidateRow.outcome.in_([str(o) for o in Outcome if o.ranked]),
            VerdictRow.outcome.is_(None),
        )
        .order_by(MeasurementRow.id)
    )


def to_figure(row: Sequence[Any]) -> Figure:
    _, number, trial, kind, us, suspect, device, run, policy, *values = row
    known = {name: float(v) for name, v in zip(_TERMS, values, strict=True) if v is not None}
    return Figure(number, trial, Kind(kind), 1e6 / us, suspect, known or _NO_TERMS, device, run, read_policy(policy))
