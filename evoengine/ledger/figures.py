"""The query behind every ranking: the figures of candidates that stand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Select, Text, cast, func, select
from sqlalchemy.orm import Session, aliased

from evoengine.ledger.checksums import row_check
from evoengine.ledger.listing import BATCH, KINDS, read_policy, read_terms
from evoengine.ledger.models import CandidateRow, MeasurementRow, VerdictRow
from evoengine.ledger.ranking import Figure, ranked
from evoengine.records import EXECUTOR, Outcome

_OF_MEASUREMENT = ("device", "median_us", "normalised_us", "suspect", "terms", "policy")
_check_candidate = row_check(CandidateRow, ("source_sha256", "config_key"))
_check_measurement = row_check(MeasurementRow, _OF_MEASUREMENT)
"""what queries select by is checked when a ledger is opened"""
TERMS = ("predicted", "place", "final_of_run")
"""those that ranking reads"""


def read_order(session: Session, problem: str, gpu: str, run: int | None = None) -> list[int]:
    """Trials best first, as `evoengine.ledger.ranking` has it; of those with one kernel the best alone."""
    figures = _figures_of_correct(problem, gpu)
    if run is not None:
        figures = figures.where(CandidateRow.run_id == run)
    kernels: dict[int, str] = {}
    found: list[Figure] = []
    for row in session.execute(figures, execution_options={"yield_per": BATCH}):
        found.append(_to_figure(row))
        _, _, source_sha256, config_key, *_ = row
        kernels[found[-1].trial] = config_key if source_sha256 is None else source_sha256
    firsts: dict[str, int] = {}
    for trial in ranked(found):
        firsts.setdefault(kernels[trial], trial)
    return list(firsts.values())


def _figures_of_correct(problem: str, gpu: str) -> Select[Any]:
    """What `_to_figure` takes, oldest first. A kernel is its source, and where that is unknown, as of what another
    tuner recorded, its configuration.

    Of what ended ranked and was not refuted by a later verdict of the gate. A verdict on executed machine code decides
    nothing here: what it refutes ends as not ranked, unless a GPU measured it.
    """
    any_verdict = aliased(VerdictRow)
    of_gate = (any_verdict.candidate_id == CandidateRow.id, any_verdict.device != EXECUTOR)
    last = select(func.max(any_verdict.id)).where(*of_gate).scalar_subquery()
    texts = ("terms", "policy")
    figures = select(
        CandidateRow.id, CandidateRow.checksums, CandidateRow.source_sha256, CandidateRow.config_key,
        CandidateRow.run_id, MeasurementRow.id, MeasurementRow.checksums, MeasurementRow.kind,
        *(cast(getattr(MeasurementRow, name), Text) if name in texts else getattr(MeasurementRow, name)
          for name in _OF_MEASUREMENT),
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
    trial, sums, source_sha256, config_key, run, number, figure_sums, kind, *values = row
    _check_candidate(trial, sums, (source_sha256, config_key))
    _check_measurement(number, figure_sums, values)
    device, median_us, normalised_us, suspect, terms, policy = values
    us = median_us if normalised_us is None else normalised_us
    return Figure(
        number, trial, KINDS[kind], 1e6 / us, suspect, read_terms(terms, TERMS), device, run, read_policy(policy)
    )
