"""Trials as lists show them: the columns of a table's row, without sources, binaries, cases and samples.

They are read in batches, each in a transaction of its own: a list that a person pages through for an hour holds up no
search, and takes no more memory than a batch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import Any

from sqlalchemy import ColumnElement, Select, cast, func, literal, select, true
from sqlalchemy.orm import Session, aliased

from evoengine.ledger.checksums import Damaged, RowReader
from evoengine.ledger.rows import last_verdicts, most_trusted, to_policy, to_verdict
from evoengine.ledger.tables import BinaryRow, CandidateRow, MeasurementRow, RunRow, VerdictRow
from evoengine.lineage import Step, step, transition
from evoengine.objectives import Objective, objective_values
from evoengine.records import Config, Kind, Measurement, Outcome, Policy
from evoengine.text import plain

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
    (
        "candidate_id",
        "kind",
        "device",
        "tflops",
        "median_us",
        "vs_baseline",
        "suspect",
        "normalised_us",
        "policy",
        "terms",
    ),
)
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
    """Yield trials in the order of their numbers.

    `wanted` selects from the candidates; with `resources` registers and shared memory are read too, with `kind` only
    figures of that kind.
    """
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
    """Yield a trial and all that it came from, each once, of the same problem and GPU."""
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


def _trials(session: Session, rows: Sequence[Sequence[Any]], resources: bool, kind: Kind | None) -> list[Trial]:
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
    row: Sequence[Any],
    config: Config,
    parents: tuple[int, ...],
    figure: Measurement | None,
    binary: Resources | None,
    shared_bytes: int | None,
) -> Trial:
    number, run, problem, gpu, outcome, _, _, operator, reason, origin = row
    ended = OUTCOMES[outcome]
    return Trial(
        number, run, problem, gpu, config, parents, operator, ended, reason, origin, figure, binary, shared_bytes
    )


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
        KINDS[kind],
        device,
        tflops,
        median_us,
        (),
        vs_baseline,
        read_terms(terms, TERMS),
        suspect,
        read_policy(policy),
        normalised_us,
    )


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
    """Decode texts together, so that they share the names of their knobs, of which a configuration mostly consists."""
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
    """Read a policy. A ledger has few of them, and a figure each."""
    values = None if text is None else json.loads(text)
    return None if values is None else to_policy(values)


# ── what a study shows of a trial ─────────────────────────────────────────────────────────────────────────────────────


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
    """Yield the study trials of these numbers in batches, in their order, with figures of one kind."""
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
    """Return each trial's largest error in the gate's last verdict."""
    of_trials = select(VerdictRow).where(VerdictRow.candidate_id.in_(trials)).order_by(VerdictRow.id)
    held: dict[int, list[VerdictRow]] = {}
    for row in session.scalars(of_trials):
        held.setdefault(row.candidate_id, []).append(row)
    last = {trial: last_verdicts([to_verdict(row) for row in rows])["verdict"] for trial, rows in held.items()}
    return {trial: verdict.max_error for trial, verdict in last.items() if verdict}


def _shown(
    t: Trial,
    objectives: Sequence[Objective],
    made: Step,
    max_error: float | None,
    occupancy: float | None,
    source_sha256: str | None,
    started: datetime,
    finished: datetime | None,
) -> StudyTrial:
    figure = t.measurement
    shown = {
        "trial": t.trial,
        "outcome": str(t.outcome),
        "reason": t.reason,
        "registers": t.binary and t.binary.registers,
        "spill_bytes": t.binary and t.binary.spill_bytes,
        "shared_bytes": t.shared_bytes,
        "occupancy": occupancy,
        "max_abs_error": max_error,
        "source_sha256": source_sha256,
        "parents": list(t.parents),
        "operator": t.operator,
        "changed": _changed(made),
        "median_us": figure and figure.median_us,
        "kind": figure and str(figure.kind),
    }
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
