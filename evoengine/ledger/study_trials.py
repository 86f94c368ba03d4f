"""What the Optuna study of a run shows of its trials, read from the ledger many at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from evoengine.ledger.checksums import RowReader
from evoengine.ledger.listing import BATCH, Reading, Trial, read_trials
from evoengine.ledger.models import CandidateRow, VerdictRow
from evoengine.ledger.rows import last_verdicts, to_verdict
from evoengine.lineage import Step, step, transition
from evoengine.objectives import Objective, objective_values
from evoengine.records import Config, Kind, Outcome
from evoengine.text import plain

CHANGED_LENGTH = 500
"""characters of what was changed of a trial's parent"""
_further_of = RowReader(CandidateRow, ("occupancy", "source_sha256", "created_at", "finished_at"))


@dataclass(frozen=True, slots=True)
class StudyTrial:
    """A finished trial as the study has it."""

    trial: int
    config: Config
    values: tuple[float, ...] | None
    """for each objective; None of one that is not ranked by a figure of the study's kind, which is pruned"""
    unfinished: bool
    """whether its search may still finish the gate for it"""
    attributes: Mapping[str, object]
    source_sha256: str | None
    started: datetime
    finished: datetime | None


def read_study_trials(
    reading: Reading, trials: Sequence[int], kind: Kind, objectives: Sequence[Objective]
) -> Iterator[list[StudyTrial]]:
    """Those of these numbers, in their order and in batches, with figures of one kind."""
    for begin in range(0, len(trials), BATCH):
        of_batch = select(CandidateRow.id).where(CandidateRow.id.in_(trials[begin : begin + BATCH]))
        listed = list(read_trials(reading, of_batch, resources=True, kind=kind))
        parents = sorted({parent for trial in listed for parent in trial.parents})
        of_parents = select(CandidateRow.id).where(CandidateRow.id.in_(parents))
        known = {t.trial: t for t in read_trials(reading, of_parents, resources=False, kind=kind)} if parents else {}
        with reading() as session:
            further = _further(session, [trial.trial for trial in listed])
            errors = _largest_errors(session, [trial.trial for trial in listed])
        yield [_shown(t, objectives, step(t, known), errors.get(t.trial), *further[t.trial]) for t in listed]


def _further(session: Session, trials: Sequence[int]) -> dict[int, tuple[Any, ...]]:
    rows = session.execute(select(*_further_of.columns).where(CandidateRow.id.in_(trials)))
    return {number: tuple(values) for number, *values in map(_further_of.read, rows)}


def _largest_errors(session: Session, trials: Sequence[int]) -> dict[int, float | None]:
    """By the gate's last verdict."""
    of_trials = select(VerdictRow).where(VerdictRow.candidate_id.in_(trials)).order_by(VerdictRow.id)
    held: dict[int, list[VerdictRow]] = {}
    for row in session.scalars(of_trials):
        held.setdefault(row.candidate_id, []).append(row)
    last = {trial: last_verdicts([to_verdict(row) for row in rows])["verdict"] for trial, rows in held.items()}
    return {trial: verdict.max_error for trial, verdict in last.items() if verdict}


def _shown(
    t: Trial, objectives: Sequence[Objective], made: Step, max_error: float | None, occupancy: float | None,
    source_sha256: str | None, started: datetime, finished: datetime | None,
) -> StudyTrial:  # fmt: skip
    figure = t.measurement
    shown = {
        "trial": t.trial, "outcome": str(t.outcome), "reason": t.reason,
        "registers": t.binary and t.binary.registers, "spill_bytes": t.binary and t.binary.spill_bytes,
        "shared_bytes": t.shared_bytes, "occupancy": occupancy, "max_abs_error": max_error,
        "source_sha256": source_sha256, "parents": list(t.parents), "operator": t.operator, "changed": _changed(made),
        "median_us": figure and figure.median_us, "kind": figure and str(figure.kind),
    }  # fmt: skip
    texts = {name: plain(value) for name, value in shown.items() if isinstance(value, str)}
    attributes = {name: value for name, value in (shown | texts).items() if value not in (None, [])}
    trusted = figure is not None and not figure.suspect and t.outcome is not None and t.outcome.ranked
    values = objective_values(t, objectives) if trusted else None
    unfinished = t.outcome is Outcome.UNFINISHED
    return StudyTrial(t.trial, t.config, values, unfinished, attributes, source_sha256, started, finished)


def _changed(made: Step) -> str | None:
    """`tile_m 64→128: +25.0% over #1`; None of a trial that was made from no other."""
    if not made.changes or made.parent is None:
        return None
    gain = f": {made.gain - 1:+.1%} over #{made.parent.trial}" if made.gain is not None else ""
    return f"{', '.join(map(transition, made.changes))[:CHANGED_LENGTH]}{gain}"
