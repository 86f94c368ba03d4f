"""The query behind every ranking: the figures of candidates that stand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Select, Text, cast, func, select
from sqlalchemy.orm import Session, aliased

from evoengine.ledger.listing import BATCH, read_policy
from evoengine.ledger.models import CandidateRow, MeasurementRow, VerdictRow
from evoengine.ledger.ranking import Figure, ranked
from evoengine.records import EXECUTOR, Kind, Outcome

_TERMS = ("predicted", "place", "final_of_run")
"""those that ranking reads"""
_NONE = [None] * len(_TERMS)
_NO_TERMS: Mapping[str, float] = {}


def read_order(session: Session, problem: str, gpu: str, run: int | None = None) -> list[int]:
    """Trials best first, as `evoengine.ledger.ranking` has it; of those with one kernel the best alone."""
    figures = _figures_of_correct(problem, gpu)
    if run is not None:
        figures = figures.where(CandidateRow.run_id == run)
    kernels: dict[int, str] = {}
    found: list[Figure] = []
    for row in session.execute(figures, execution_options={"yield_per": BATCH}):
        found.append(_to_figure(row))
        kernels[found[-1].trial] = row[0]
    firsts: dict[str, int] = {}
    for trial in ranked(found):
        firsts.setdefault(kernels[trial], trial)
    return list(firsts.values())


def _figures_of_correct(problem: str, gpu: str) -> Select[Any]:
    """(kernel, …) for `_to_figure`, oldest first; a kernel is its source, and where that is unknown, as of what another
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


def _to_figure(row: Sequence[Any]) -> Figure:
    _, number, trial, kind, us, suspect, device, run, policy, *values = row
    terms = _NO_TERMS
    if values != _NONE:
        terms = {name: float(v) for name, v in zip(_TERMS, values, strict=True) if v is not None}
    return Figure(number, trial, Kind(kind), 1e6 / us, suspect, terms, device, run, read_policy(policy))
