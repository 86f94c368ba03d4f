"""Read trials as lists show them, and choose them by run, problem, GPU, outcome, family and a condition on their knobs.

They are read in batches without sources, binaries, cases and samples, each batch in a transaction of its own: a list
that a person pages through for an hour holds up no search, and takes no more memory than a batch. What SQL can select
by, it does; a condition is evaluated here, from the last trial back, so that the last few are found without the others.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from sqlalchemy import ColumnElement, Select, cast, func, literal, or_, select, true
from sqlalchemy.orm import Session, aliased, joinedload

from evoengine.errors import NothingFound, hint
from evoengine.gpu import find_gpu
from evoengine.ledger.integrity import Damaged, RowReader
from evoengine.ledger.ranking import read_order
from evoengine.ledger.rows import BATCH, FIGURES, Reading, batches, most_trusted, read_figure, to_run
from evoengine.ledger.tables import BinaryRow, CandidateRow, MeasurementRow, RunRow
from evoengine.records import PENDING, Config, KernelResources, Kind, Measurement, Outcome, Run

if TYPE_CHECKING:
    from evoengine.ledger.store import Ledger

_candidates = RowReader(
    CandidateRow, ("run_id", "problem", "gpu", "outcome", "config", "parents", "operator", "reason")
)
_CONFIG, _PARENTS = 5, 6
"""their places in what it reads"""
_binaries = RowReader(BinaryRow, ("registers", "spill_bytes", "shared_bytes", "other_kernels"))
_COMPILED = (CandidateRow.id, CandidateRow.shared_bytes, CandidateRow.binary_id)
"""of rows that were checked"""
OUTCOMES: Mapping[str | None, Outcome | None] = {None: None} | {str(outcome): outcome for outcome in Outcome}


@dataclass(frozen=True, slots=True)
class Resources:
    """Fields of a Binary that lists show, under its names."""

    registers: int
    spill_bytes: int
    others: tuple[KernelResources, ...]


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


def read_trials(reading: Reading, wanted: Select[Any], *, resources: bool, kind: Kind | None = None) -> Iterator[Trial]:
    """Yield trials in the order of their numbers.

    `wanted` selects from the candidates; with `resources` registers and shared memory are read too, with `kind` only
    figures of that kind.
    """
    listed = wanted.join(RunRow, RunRow.id == CandidateRow.run_id)
    of_batch = listed = listed.order_by(CandidateRow.id)
    while True:
        with reading() as session:
            rows = session.execute(
                of_batch.limit(BATCH).with_only_columns(*_candidates.columns, RunRow.imported_from)
            ).all()
            trials = _trials(session, rows, resources, kind)
        yield from trials
        if len(rows) < BATCH:
            return
        of_batch = listed.where(CandidateRow.id > trials[-1].trial)


def read_numbered(
    reading: Reading, trials: Sequence[int], *, resources: bool = False, kind: Kind | None = None
) -> Iterator[Trial]:
    """Yield the trials of these numbers, which ascend, as `read_trials` does."""
    for some in batches(trials):
        of_batch = select(CandidateRow.id).where(CandidateRow.id.in_(some))
        yield from read_trials(reading, of_batch, resources=resources, kind=kind)


def read_ancestors(reading: Reading, trial: int) -> Iterator[Trial]:
    """Yield a trial and all that it came from, each once, of the same problem and GPU."""
    with reading() as session:
        numbers = session.scalars(_ancestors(trial, session.get_bind().dialect.name)).all()
    yield from read_numbered(reading, numbers)


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
    trials = []
    for row, config, of_trial in zip(rows, configs, parents, strict=True):
        number, run, problem, gpu, outcome, _, _, operator, reason, origin = row
        stated = config, tuple(of_trial), operator, OUTCOMES[outcome], reason, origin
        binary, shared_bytes = taken.get(number, (None, None))
        trials.append(Trial(number, run, problem, gpu, *stated, figures.get(number), binary, shared_bytes))
    return trials


def _figures(session: Session, trials: Iterable[int], kind: Kind | None) -> dict[int, Measurement | None]:
    """Return the figure by which each trial is ranked, of one kind alone if it is given."""
    of_batch = select(*FIGURES.columns).where(MeasurementRow.candidate_id.in_(trials)).order_by(MeasurementRow.id)
    if kind is not None:
        of_batch = of_batch.where(MeasurementRow.kind == str(kind))
    held: dict[int, list[Measurement]] = {}
    rows: Iterable[Sequence[Any]] = session.execute(of_batch)
    for row in rows:
        _, trial, figure = read_figure(row)
        held.setdefault(trial, []).append(figure)
    return {trial: f[0] if len(f) == 1 else most_trusted(f) for trial, f in held.items()}


def _resources(session: Session, trials: Iterable[int]) -> dict[int, tuple[Resources | None, int | None]]:
    """Return the resources of trials, with shared memory in bytes for those that were rendered."""
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
            _, registers, spill_bytes, static, behind = _binaries.read(of_binary)
            others = tuple(KernelResources(**other) for other in json.loads(behind or "[]"))
            taken[trial] = Resources(registers, spill_bytes, others), (dynamic or 0) + static
    return taken


def _decoded(texts: Sequence[str]) -> list[Any]:
    """Decode texts together, so that they share the names of their knobs, of which a configuration mostly consists."""
    values: list[Any] = json.loads(f"[{','.join(texts)}]")
    return values


KNOBS_FROM = 1000
"""of the last so many trials the knobs are named to a person who named one that is not there"""
_configs_of = RowReader(CandidateRow, ("config",))
S = TypeVar("S", bound="Select[*tuple[Any, ...]]")


class Condition(Protocol):
    @property
    def names(self) -> frozenset[str]:
        """Return the knobs that it reads."""
        ...

    def matches(self, config: Config) -> bool: ...


@dataclass(frozen=True, slots=True)
class Wanted:
    """Filters of a list of trials. None and empty filters match all; an outcome is one of `Outcome`'s, or PENDING."""

    run: int | None = None
    problem: str | None = None
    gpu: str | None = None
    outcomes: Sequence[str] = ()
    families: Sequence[str] = ()
    condition: Condition | None = None


@dataclass(frozen=True, slots=True)
class Last:
    """The last trials of those that are wanted, in their order."""

    trials: list[int]
    earlier: int | None
    """how many there are before them; None if nobody counted, and there is one at least"""


class TrialLists:
    """Lists and comparisons of a ledger's trials. Raises as a Ledger does, and what `Condition.matches` raises."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def matching(self, wanted: Wanted) -> list[int]:
        """Return all of them, in the order of their numbers."""
        return sorted(self._numbers(wanted))

    def last_matching(self, wanted: Wanted, count: int) -> Last:
        found = list(islice(self._numbers(wanted, count + 1), count + 1))
        last = sorted(found[:count])
        if len(found) <= count:
            return Last(last, 0)
        if wanted.condition or wanted.families:
            return Last(last, None)
        total = self._ledger.database.scalar(narrowed(select(func.count(CandidateRow.id)), wanted))
        return Last(last, total - count)

    def listed(self, trials: Sequence[int]) -> Iterator[Trial]:
        """Return those trials as lists show them, a batch at a time. The numbers ascend."""
        return read_numbered(self._ledger.database.reading, trials, resources=True)

    def knobs_of(self, trials: Sequence[int]) -> list[str]:
        """Return the knobs that those trials have, in the order in which they are first seen."""
        names: dict[str, None] = {}
        for some in batches(trials):
            of_batch = select(*_configs_of.columns).where(CandidateRow.id.in_(some))
            with self._ledger.database.reading() as session:
                for config in _configs(session.execute(of_batch.order_by(CandidateRow.id)).all()):
                    names.update(dict.fromkeys(config.keys()))
        return list(names)

    def missing_knobs(self, wanted: Wanted, names: Iterable[str]) -> tuple[list[str], list[str]]:
        """Return those of `names` that no trial of the run, problem and GPU has as a knob.

        Beside them are the knobs that some have, where any is missing.
        """
        of_target = Wanted(wanted.run, wanted.problem, wanted.gpu)
        some = narrowed(select(CandidateRow.id), of_target)
        scalar = self._ledger.database.scalar
        missing = [n for n in sorted(names) if scalar(some.where(_knob(n).is_not(None)).limit(1)) is None]
        if not missing:
            return [], []
        return missing, sorted(self.knobs_of(self.last_matching(of_target, KNOBS_FROM).trials))

    def endings(self, wanted: Wanted) -> tuple[dict[str, int], list[str]]:
        """Return outcome → number of trials of the run, problem and GPU, and their families."""
        of_target = Wanted(wanted.run, wanted.problem, wanted.gpu)
        family = _knob("family")
        grouped = narrowed(select(CandidateRow.outcome, family, func.count(CandidateRow.id)), of_target)
        outcomes: dict[str, int] = {}
        families: set[str] = set()
        for outcome, of_family, trials in self._ledger.database.rows(grouped.group_by(CandidateRow.outcome, family)):
            name = outcome or PENDING
            outcomes[name] = outcomes.get(name, 0) + trials
            families |= {of_family} if of_family is not None else set()
        return outcomes, sorted(families)

    def _numbers(self, wanted: Wanted, at_most: int | None = None) -> Iterator[int]:
        """Yield trial numbers, the last one first. Without a condition no more than `at_most` are asked for."""
        if wanted.condition:
            yield from self._picked(wanted, wanted.condition)
            return
        numbers = narrowed(select(CandidateRow.id), wanted).order_by(CandidateRow.id.desc()).limit(at_most)
        yield from (number for (number,) in self._ledger.database.rows(numbers))

    def _picked(self, wanted: Wanted, condition: Condition) -> Iterator[int]:
        last: int | None = None
        while True:
            of_batch = narrowed(select(*_configs_of.columns), wanted)
            if last is not None:
                of_batch = of_batch.where(CandidateRow.id < last)
            with self._ledger.database.reading() as session:
                rows = session.execute(of_batch.order_by(CandidateRow.id.desc()).limit(BATCH)).all()
                picked = [condition.matches(config) for config in _configs(rows)]
            yield from (row[0] for row, is_picked in zip(rows, picked, strict=True) if is_picked)
            if len(rows) < BATCH:
                return
            last = rows[-1][0]


def narrowed(selected: S, wanted: Wanted) -> S:
    """Narrow a selection from the candidates by all but the condition."""
    of_target = {"run_id": wanted.run, "problem": wanted.problem, "gpu": wanted.gpu}
    for name, value in of_target.items():
        if value is not None:
            selected = selected.where(getattr(CandidateRow, name) == value)
    if wanted.outcomes:
        ended = CandidateRow.outcome.in_([o for o in wanted.outcomes if o != PENDING])
        unfinished = CandidateRow.outcome.is_(None)
        selected = selected.where(or_(ended, unfinished) if PENDING in wanted.outcomes else ended)
    if wanted.families:
        selected = selected.where(_knob("family").in_(wanted.families))
    return selected


def _knob(name: str) -> ColumnElement[str]:
    value: ColumnElement[str] = CandidateRow.config[name].as_string()
    return value


def _configs(rows: Sequence[Sequence[Any]]) -> list[Config]:
    return _decoded([_configs_of.read(row)[1] for row in rows])


# ── runs as lists show them ───────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class RunSummary:
    run: Run
    trials: int
    correct: int
    best: Trial | None
    """of the run's own, as `Ledger.best` ranks them; None if none is ranked"""


def read_summaries(session: Session) -> Iterator[RunSummary]:
    """Yield a summary of each run, oldest first."""
    outcomes = select(CandidateRow.run_id, CandidateRow.outcome, func.count()).group_by(
        CandidateRow.run_id, CandidateRow.outcome
    )
    counts: dict[int, dict[str | None, int]] = {}
    for run, outcome, trials in session.execute(outcomes):
        counts.setdefault(run, {})[outcome] = trials
    for row in session.scalars(select(RunRow).options(joinedload(RunRow.device)).order_by(RunRow.id)):
        own = counts.get(row.id, {})
        correct = sum(own.get(str(outcome), 0) for outcome in Outcome if outcome.correct)
        yield RunSummary(to_run(row), sum(own.values()), correct, _best(session, row) if correct else None)


def _best(session: Session, run: RunRow) -> Trial | None:
    order = read_order(session, run.problem, run.gpu, 1, run.id)
    best = select(CandidateRow.id).where(CandidateRow.id.in_(order))
    return next(read_trials(lambda: nullcontext(session), best, resources=False), None)


class Targets:
    """Problems and GPUs of a ledger. Raises as a Ledger does."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def known_gpu(self, name: str | None) -> str | None:
        """Return the name. Raises UsageError if neither a run here nor evoengine has a GPU of that name."""
        of_gpu = select(RunRow.id).where(RunRow.gpu == name).limit(1)
        held = name is None or self._ledger.database.scalar(of_gpu) is not None
        return name if held else find_gpu(str(name)).key

    def last(self, gpu: str | None, problem: str | None) -> tuple[str, str]:
        """Return GPU and problem of the last run that agrees with what is given.

        Raises NothingFound if there is none, and UsageError for an unknown GPU.
        """
        gpu = self.known_gpu(gpu)
        found = self._last(gpu, [] if problem is None else [RunRow.problem == problem])
        if found is None:
            wanted = " for " + " on ".join(w for w in (problem, gpu) if w) if gpu or problem else ""
            then = "search" if self._ledger.is_empty() else "history"
            what = "fills it" if self._ledger.is_empty() else "lists what it has"
            raise NothingFound(f"the ledger holds no run{wanted}: {hint(then, db=self._ledger.db)} {what}")
        return found

    def _last(self, gpu: str | None, conditions: Sequence[ColumnElement[bool]]) -> tuple[str, str] | None:
        of_gpu = [] if gpu is None else [RunRow.gpu == gpu]
        runs = select(RunRow.gpu, RunRow.problem).where(*of_gpu, *conditions)
        found = self._ledger.database.rows(runs.order_by(RunRow.id.desc()).limit(1))
        return (found[0][0], found[0][1]) if found else None

    def problems_of(self, workload: str, gpu: str) -> list[str]:
        """Return the problems of a workload, by its name, that runs for a GPU had, the latest first."""
        of_both = RunRow.gpu == gpu, RunRow.problem.startswith(f"{workload}:", autoescape=True)
        problems = select(RunRow.problem).where(*of_both).group_by(RunRow.problem).order_by(func.max(RunRow.id).desc())
        return [problem for (problem,) in self._ledger.database.rows(problems)]

    def last_of(self, workload: str, gpu: str | None) -> tuple[str, str]:
        """Return GPU and problem of a workload's last run, by its name; raises NothingFound if there is none."""
        found = self._last(self.known_gpu(gpu), [RunRow.problem.startswith(f"{workload}:", autoescape=True)])
        if found is None:
            raise NothingFound(f"the ledger holds no run of {workload}{f' on {gpu}' if gpu else ''}")
        return found

    def ranked(self) -> list[tuple[str, str]]:
        """Return every problem and GPU with a ranked candidate, latest first."""
        ranked = CandidateRow.outcome.in_([str(o) for o in Outcome if o.ranked])
        grouped = select(CandidateRow.problem, CandidateRow.gpu).where(ranked)
        grouped = grouped.group_by(CandidateRow.problem, CandidateRow.gpu).order_by(func.max(CandidateRow.id).desc())
        return [(problem, gpu) for problem, gpu in self._ledger.database.rows(grouped)]

    def last_definition(self, problem: str) -> str | None:
        """Return the problem.json that the last run for this problem kept; None if none kept one."""
        kept = select(RunRow.definition).where(RunRow.problem == problem, RunRow.definition.is_not(None))
        found: str | None = self._ledger.database.scalar(kept.order_by(RunRow.id.desc()).limit(1))
        return found

    def gpu_definition(self, gpu: str) -> dict[str, Any] | None:
        """Return the fields of the GPU that a file described to the last run on it; None if none did."""
        kept = select(RunRow.gpu_definition).where(RunRow.gpu == gpu, RunRow.gpu_definition.is_not(None))
        found: dict[str, Any] | None = self._ledger.database.scalar(kept.order_by(RunRow.id.desc()).limit(1))
        return found
