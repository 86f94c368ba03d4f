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

from sqlalchemy import ColumnElement, Select, cast, func, literal, select, true
from sqlalchemy.orm import Session, aliased

from evoengine.ledger.checksums import Damaged, RowReader
from evoengine.ledger.models import BinaryRow, CandidateRow, MeasurementRow, RunRow
from evoengine.ledger.rows import most_trusted, to_policy
from evoengine.records import Config, Kind, Measurement, Outcome, Policy

BATCH = 1000
"""trials that are read together"""
FIRST_BATCH = 100
"""of those that are read from the last one back: mostly a page of them is shown"""
Reading = Callable[[], AbstractContextManager[Session]]
"""begins a transaction that reads"""
_candidates = RowReader(
    CandidateRow, ("run_id", "problem", "gpu", "outcome", "config", "parents", "operator", "reason")
)
_CONFIG, _PARENTS = 5, 6
"""their places in what it reads"""
_figures_of = RowReader(
    MeasurementRow,
    ("candidate_id", "kind", "device", "tflops", "median_us", "vs_baseline", "suspect", "normalised_us", "policy",
     "terms"),
)  # fmt: skip
_binaries = RowReader(BinaryRow, ("registers", "spill_bytes", "shared_bytes"))
_COMPILED = (CandidateRow.id, CandidateRow.shared_bytes, CandidateRow.binary_id)
"""of rows that were checked"""
KINDS: Mapping[str, Kind] = {str(kind): kind for kind in Kind}
OUTCOMES: Mapping[str | None, Outcome | None] = {None: None} | {str(outcome): outcome for outcome in Outcome}
_NO_TERMS: Mapping[str, float] = {}
TERMS = ("predicted", "roofline_us", "peak_tflops_percent", "peak_gbs_percent")
"""those that a row of a list shows something of: which model made an estimate, and how near the peak it is"""


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
    imported_from: str | None
    measurement: Measurement | None = None
    """without samples, and of its terms only `TERMS`"""
    binary: Resources | None = None
    """None before it was compiled, and where resources were not asked for"""
    shared_bytes: int | None = None
    """dynamic and static, per block; None before it was rendered, and where resources were not asked for"""


def read_trials(
    reading: Reading, wanted: Select[Any], *, resources: bool, newest_first: bool = False, kind: Kind | None = None
) -> Iterator[Trial]:
    """In the order of their numbers. `wanted` selects from the candidates; with `resources` registers and shared
    memory are read too, with `kind` only figures of that kind."""
    listed = wanted.join(RunRow, RunRow.id == CandidateRow.run_id)
    listed = listed.order_by(CandidateRow.id.desc() if newest_first else CandidateRow.id)
    of_batch, size = listed, FIRST_BATCH if newest_first else BATCH
    while True:
        with reading() as session:
            rows = session.execute(
                of_batch.limit(size).with_only_columns(*_candidates.columns, RunRow.imported_from)
            ).all()
            trials = _trials(session, rows, resources, kind)
        yield from trials
        if len(rows) < size:
            return
        last = trials[-1].trial
        of_batch, size = listed.where(CandidateRow.id < last if newest_first else CandidateRow.id > last), BATCH


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


def _trials(
    session: Session, rows: Sequence[Sequence[Any]], resources: bool, kind: Kind | None
) -> list[Trial]:  # fmt: skip
    rows = [(*_candidates.read(row[:-1]), row[-1]) for row in rows]
    numbers = [row[0] for row in rows]
    figures = _figures(session, numbers, kind)
    taken = _resources(session, numbers) if resources else {}
    configs, parents = (_decoded([row[place] for row in rows]) for place in (_CONFIG, _PARENTS))
    return [
        _trial(row, config, tuple(of_trial), figures.get(row[0]), *taken.get(row[0], (None, None)))
        for row, config, of_trial in zip(rows, configs, parents, strict=True)
    ]


def _trial(
    row: Sequence[Any], config: Config, parents: tuple[int, ...], figure: Measurement | None, binary: Resources | None,
    shared_bytes: int | None,
) -> Trial:  # fmt: skip
    number, run, problem, gpu, outcome, _, _, operator, reason, origin = row
    ended = OUTCOMES[outcome]
    return Trial(
        number, run, problem, gpu, config, parents, operator, ended, reason, origin, figure, binary, shared_bytes
    )  # fmt: skip


def _figures(session: Session, trials: Iterable[int], kind: Kind | None) -> dict[int, Measurement | None]:
    """Of each trial the one it is ranked by, of this kind alone where one is named."""
    of_batch = select(*_figures_of.columns).where(MeasurementRow.candidate_id.in_(trials)).order_by(MeasurementRow.id)
    if kind is not None:
        of_batch = of_batch.where(MeasurementRow.kind == str(kind))
    held: dict[int, list[Measurement]] = {}
    rows: Iterable[Sequence[Any]] = session.execute(of_batch)
    for row in rows:
        _, trial, *values = _figures_of.read(row)
        held.setdefault(trial, []).append(_figure(values))
    return {trial: f[0] if len(f) == 1 else most_trusted(f) for trial, f in held.items()}


def _figure(values: Sequence[Any]) -> Measurement:
    kind, device, tflops, median_us, vs_baseline, suspect, normalised_us, policy, terms = values
    return Measurement(
        KINDS[kind], device, tflops, median_us, (), vs_baseline, read_terms(terms, TERMS), suspect, read_policy(policy),
        normalised_us,
    )  # fmt: skip


def _resources(session: Session, trials: Iterable[int]) -> dict[int, tuple[Resources | None, int | None]]:
    """With the shared bytes, of those that were rendered."""
    of_batch = select(*_COMPILED, *_binaries.columns).outerjoin(BinaryRow)
    taken: dict[int, tuple[Resources | None, int | None]] = {}
    rendered = of_batch.where(CandidateRow.id.in_(trials), CandidateRow.source_sha256.is_not(None))
    rows: Iterable[Sequence[Any]] = session.execute(rendered)
    for trial, dynamic, binary, *of_binary in rows:
        if of_binary[0] != binary:
            raise Damaged(CandidateRow.__tablename__, trial, "binary_id")
        if binary is None:
            taken[trial] = None, dynamic
        else:
            _, registers, spill_bytes, static = _binaries.read(of_binary)
            taken[trial] = Resources(registers, spill_bytes), (dynamic or 0) + static
    return taken


def _decoded(texts: Sequence[str]) -> list[Any]:
    """Decoded together, so that they share the names of their knobs, of which a configuration mostly consists."""
    values: list[Any] = json.loads(f"[{','.join(texts)}]")
    return values


def read_terms(text: str, names: Sequence[str]) -> Mapping[str, float]:
    """Those of these names; a text that has none of them is not decoded."""
    if not any(name in text for name in names):
        return _NO_TERMS
    terms = json.loads(text)
    return {name: float(terms[name]) for name in names if name in terms}


@lru_cache(maxsize=1024)
def read_policy(text: str | None) -> Policy | None:
    """A ledger has few of them, and a figure each."""
    values = None if text is None else json.loads(text)
    return None if values is None else to_policy(values)
