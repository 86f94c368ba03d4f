"""Trials as lists show them: the columns of a table's row, without sources, binaries, cases and samples.

They are read in batches, each in a transaction of its own: a list that a person pages through for an hour holds up no
search, and takes no more memory than a batch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from sqlalchemy import ColumnElement, Select, Text, cast, func, literal, select, true
from sqlalchemy.orm import Session, aliased

from evoengine.ledger.models import BinaryRow, CandidateRow, MeasurementRow
from evoengine.ledger.rows import most_trusted, to_policy
from evoengine.records import Config, Kind, Measurement, Outcome, Policy

BATCH = 1000
"""trials that are read together"""
Reading = Callable[[], AbstractContextManager[Session]]
"""begins a transaction that reads"""
_CANDIDATE = (
    CandidateRow.id, CandidateRow.run_id, CandidateRow.problem, CandidateRow.gpu, cast(CandidateRow.config, Text),
    cast(CandidateRow.parents, Text), CandidateRow.operator, CandidateRow.outcome, CandidateRow.reason,
)  # fmt: skip
_CONFIG, _PARENTS = 4, 5
"""their places among those"""
_MADE_BY = MeasurementRow.terms["predicted"].as_float()
_FIGURE = (
    MeasurementRow.candidate_id, MeasurementRow.kind, MeasurementRow.device, MeasurementRow.tflops,
    MeasurementRow.median_us, MeasurementRow.vs_baseline, MeasurementRow.suspect, cast(MeasurementRow.policy, Text),
    MeasurementRow.normalised_us, _MADE_BY,
)  # fmt: skip


_NO_TERMS: Mapping[str, float] = {}
_PREDICTED: Mapping[str, float] = {"predicted": 1.0}


@dataclass(frozen=True, slots=True)
class Resources:
    """Of a binary, what lists show. The names are those of a Binary."""

    registers: int
    spill_bytes: int


@dataclass(frozen=True, slots=True)
class Trial:
    """A candidate as a row of a list. Where the names are those of a Candidate, so are the values."""

    trial: int
    run: int
    problem: str
    gpu: str
    config: Config
    parents: tuple[int, ...]
    operator: str | None
    outcome: Outcome | None
    reason: str | None
    measurement: Measurement | None = None
    """without samples; of its terms only what says which model an estimate was made by"""
    binary: Resources | None = None
    """None before it was compiled, and where resources were not asked for"""
    shared_bytes: int | None = None
    """dynamic and static, per block; None before it was rendered, and where resources were not asked for"""


def read_trials(reading: Reading, wanted: Select[Any], *, resources: bool) -> Iterator[Trial]:
    """In the order of their numbers. `wanted` selects from the candidates; with `resources` registers and shared
    memory are read too."""
    last = 0
    while True:
        of_batch = wanted.where(CandidateRow.id > last).order_by(CandidateRow.id).limit(BATCH)
        with reading() as session:
            rows = session.execute(of_batch.with_only_columns(*_CANDIDATE)).all()
            numbers = [row[0] for row in rows]
            figures = _figures(session, numbers)
            taken = _resources(session, numbers) if resources else {}
        configs, parents = (_decoded([str(row[place]) for row in rows]) for place in (_CONFIG, _PARENTS))
        for row, config, of_trial in zip(rows, configs, parents, strict=True):
            yield _trial(row, config, tuple(of_trial), figures.get(row[0]), *taken.get(row[0], (None, None)))
        if len(rows) < BATCH:
            return
        last = numbers[-1]


def read_ancestors(reading: Reading, trial: int) -> Iterator[Trial]:
    """A trial and all that it came from, each once, of the same problem and GPU."""
    with reading() as session:
        numbers = session.scalars(_ancestors(trial, session.get_bind().dialect.name)).all()
    for start in range(0, len(numbers), BATCH):
        of_batch = CandidateRow.id.in_(numbers[start : start + BATCH])
        yield from read_trials(reading, select(CandidateRow.id).where(of_batch), resources=False)


def _ancestors(trial: int, dialect: str) -> Select[int]:
    line = select(literal(trial).label("id")).cte("line", recursive=True)
    parent: ColumnElement[int]
    if dialect == "sqlite":
        named = func.json_each(CandidateRow.parents).table_valued("value")
        parent = named.c.value
    else:
        named = func.json_array_elements_text(CandidateRow.parents).table_valued("value").render_derived()
        parent = cast(named.c.value, CandidateRow.id.type)
    of_child = line.join(CandidateRow, CandidateRow.id == line.c.id).join(named, true())
    # UNION, not UNION ALL: a trial that a damaged ledger says to be its own ancestor comes once
    line = line.union(select(parent).select_from(of_child))
    this = aliased(CandidateRow)
    alike = (CandidateRow.problem == this.problem) & (CandidateRow.gpu == this.gpu) & (this.id == trial)
    return select(CandidateRow.id).join(line, line.c.id == CandidateRow.id).join(this, alike).order_by(CandidateRow.id)


def _figures(session: Session, trials: Iterable[int]) -> dict[int, Measurement | None]:
    """Of each trial the one it is ranked by."""
    of_batch = select(*_FIGURE).where(MeasurementRow.candidate_id.in_(trials)).order_by(MeasurementRow.id)
    held: dict[int, list[Measurement]] = {}
    for row in session.execute(of_batch):
        held.setdefault(row[0], []).append(_figure(row))
    return {trial: f[0] if len(f) == 1 else most_trusted(f) for trial, f in held.items()}


def _resources(session: Session, trials: Iterable[int]) -> dict[int, tuple[Resources | None, int | None]]:
    """With the shared bytes, of those that were rendered."""
    shared = CandidateRow.shared_bytes + func.coalesce(BinaryRow.shared_bytes, 0)
    of_batch = select(CandidateRow.id, shared, BinaryRow.registers, BinaryRow.spill_bytes).outerjoin(BinaryRow)
    rows = session.execute(of_batch.where(CandidateRow.id.in_(trials), CandidateRow.source_sha256.is_not(None)))
    return {
        trial: (None if registers is None else Resources(registers, spilled), shared_bytes)
        for trial, shared_bytes, registers, spilled in rows
    }


def _decoded(texts: Sequence[str]) -> list[Any]:
    """Decoded together, so that they share the names of their knobs, of which a configuration mostly consists."""
    values: list[Any] = json.loads(f"[{','.join(texts)}]")
    return values


def _trial(
    row: Sequence[Any], config: Config, parents: tuple[int, ...], figure: Measurement | None, binary: Resources | None,
    shared_bytes: int | None,
) -> Trial:  # fmt: skip
    number, run, problem, gpu, _, _, operator, outcome, reason = row
    ended = Outcome(outcome) if outcome else None
    return Trial(
        number, run, problem, gpu, config, parents, operator, ended, reason, figure, binary, shared_bytes
    )  # fmt: skip


def _figure(row: Sequence[Any]) -> Measurement:
    _, kind, device, tflops, median_us, vs_baseline, suspect, policy, normalised_us, predicted = row
    return Measurement(
        Kind(kind), device, tflops, median_us, (), vs_baseline, _PREDICTED if predicted else _NO_TERMS, suspect,
        read_policy(policy), normalised_us,
    )  # fmt: skip


@lru_cache(maxsize=1024)
def read_policy(text: str | None) -> Policy | None:
    """A ledger has few of them, and a figure each."""
    values = None if text is None else json.loads(text)
    return None if values is None else to_policy(values)
