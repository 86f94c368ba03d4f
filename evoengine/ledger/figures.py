"""The query behind every ranking: the figures of candidates that stand."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Select, func, select
from sqlalchemy.orm import aliased

from evoengine.ledger.models import CandidateRow, MeasurementRow, VerdictRow
from evoengine.records import EXECUTOR, Outcome


def figures_of_correct(
    problem: str, gpu: str
) -> Select[str, int, int, str, float, str | None, dict[str, Any], str, int, dict[str, Any] | None]:
    """(kernel, id, trial, kind, compared time in µs, suspect, terms, device, run, policy), oldest first; a kernel is
    its source, and where that is unknown, as of what another tuner recorded, its configuration.

    Of what ended ranked and was not refuted by a later verdict of the gate. A verdict on executed machine code decides
    nothing here: what it refutes ends as not ranked, unless a GPU measured it.
    """
    any_verdict = aliased(VerdictRow)
    of_gate = (any_verdict.candidate_id == CandidateRow.id, any_verdict.device != EXECUTOR)
    last = select(func.max(any_verdict.id)).where(*of_gate).scalar_subquery()
    figures = select(
        func.coalesce(CandidateRow.source_sha256, CandidateRow.config_key), MeasurementRow.id, CandidateRow.id,
        MeasurementRow.kind, func.coalesce(MeasurementRow.normalised_us, MeasurementRow.median_us),
        MeasurementRow.suspect, MeasurementRow.terms, MeasurementRow.device, CandidateRow.run_id, MeasurementRow.policy,
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
