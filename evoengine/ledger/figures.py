"""The query behind every ranking: the figures of candidates that stand."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from sqlalchemy import Row, Select, func, select
from sqlalchemy.orm import aliased

from evoengine.ledger.checksums import check
from evoengine.ledger.models import CandidateRow, MeasurementRow, VerdictRow
from evoengine.ledger.ranking import Figure
from evoengine.ledger.rows import to_policy
from evoengine.records import EXECUTOR, Kind, Outcome

OF_CANDIDATE = ("id", "checksums", "run_id", "source_sha256", "config_key")
OF_MEASUREMENT = (
    "id", "checksums", "kind", "device", "median_us", "normalised_us", "suspect", "terms", "policy",
)  # fmt: skip
"""the columns that are selected, in their order: first those of the candidate, then those of its figure"""


def figures_of_correct(problem: str, gpu: str) -> Select[*tuple[Any, ...]]:
    """The columns above, oldest figure first. A kernel is its source, and where that is unknown, as of what another
    tuner recorded, its configuration.

    Of what ended ranked and was not refuted by a later verdict of the gate. A verdict on executed machine code decides
    nothing here: what it refutes ends as not ranked, unless a GPU measured it.
    """
    any_verdict = aliased(VerdictRow)
    of_gate = (any_verdict.candidate_id == CandidateRow.id, any_verdict.device != EXECUTOR)
    last = select(func.max(any_verdict.id)).where(*of_gate).scalar_subquery()
    figures: Select[*tuple[Any, ...]] = select(
        *(getattr(CandidateRow, name) for name in OF_CANDIDATE),
        *(getattr(MeasurementRow, name) for name in OF_MEASUREMENT),
    )
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


def checked_figures(rows: Iterable[Row[*tuple[Any, ...]]], kernels: dict[int, str]) -> Iterator[Figure]:
    """What `figures_of_correct` selects, held against its checksums; each trial's kernel goes into `kernels`."""
    for row in rows:
        candidate, measurement = row[: len(OF_CANDIDATE)], row[len(OF_CANDIDATE) :]
        trial, sums, run, source, config_key = candidate
        check(CandidateRow, trial, sums, {"run_id": run, "source_sha256": source, "config_key": config_key})
        values = dict(zip(OF_MEASUREMENT, measurement, strict=True))
        number, sums = values.pop("id"), values.pop("checksums")
        check(MeasurementRow, number, sums, values)
        us = values["median_us"] if values["normalised_us"] is None else values["normalised_us"]
        policy = values["policy"] and to_policy(values["policy"])
        kernels[trial] = config_key if source is None else source
        yield Figure(
            number, trial, Kind(values["kind"]), 1e6 / us, values["suspect"], values["terms"], values["device"], run,
            policy,
        )  # fmt: skip
