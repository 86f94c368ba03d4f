"""Trials by what a person asks for: their run, problem, GPU, outcome, family, and a condition on their knobs.

What SQL can select by, it does. A condition is evaluated here, over batches of configurations that are read from the
last one back, so that the last few are found without reading the others.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from sqlalchemy import ColumnElement, Select, func, or_, select
from sqlalchemy.orm import Session, joinedload

from evoengine.ledger.checksums import RowReader
from evoengine.ledger.overview import Comparison, Effects, Overview, read_comparison, read_effects, read_overview
from evoengine.ledger.ranking import read_order
from evoengine.ledger.rows import to_run
from evoengine.ledger.runs import PENDING, Run
from evoengine.ledger.tables import CandidateRow, RunRow
from evoengine.ledger.trials import BATCH, Trial, read_trials
from evoengine.records import Config, Outcome

if TYPE_CHECKING:
    from evoengine.ledger.store import Ledger

KNOBS_FROM = 1000
"""of the last so many trials the knobs are named to a person who named one that is not there"""
_configs_of = RowReader(CandidateRow, ("config",))
S = TypeVar("S", bound="Select[*tuple[Any, ...]]")


class Condition(Protocol):
    @property
    def names(self) -> frozenset[str]:
        """The knobs that it reads."""
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
    """how many there are before them; None where nobody counted, and there is one at least"""


class TrialLists:
    """Lists and comparisons of a ledger's trials. Raises as a Ledger does, and what `Condition.matches` raises."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def matching(self, wanted: Wanted) -> list[int]:
        """All of them, in the order of their numbers."""
        return sorted(self._numbers(wanted))

    def last_matching(self, wanted: Wanted, count: int) -> Last:
        found = list(islice(self._numbers(wanted, count + 1), count + 1))
        last = sorted(found[:count])
        if len(found) <= count:
            return Last(last, 0)
        if wanted.condition or wanted.families:
            return Last(last, None)
        with self._ledger.database.reading() as session:
            total = session.scalars(_narrowed(select(func.count(CandidateRow.id)), wanted)).one()
        return Last(last, total - count)

    def listed(self, trials: Sequence[int]) -> Iterator[Trial]:
        """Those trials as lists show them, a batch at a time. The numbers ascend."""
        for start in range(0, len(trials), BATCH):
            of_batch = CandidateRow.id.in_(trials[start : start + BATCH])
            yield from read_trials(
                self._ledger.database.reading, select(CandidateRow.id).where(of_batch), resources=True
            )

    def knobs_of(self, trials: Sequence[int]) -> list[str]:
        """Return the knobs that those trials have, in the order in which they are first seen."""
        names: dict[str, None] = {}
        for start in range(0, len(trials), BATCH):
            of_batch = select(*_configs_of.columns).where(CandidateRow.id.in_(trials[start : start + BATCH]))
            with self._ledger.database.reading() as session:
                for config in _configs(session.execute(of_batch.order_by(CandidateRow.id)).all()):
                    names.update(dict.fromkeys(config.keys()))
        return list(names)

    def missing_knobs(self, wanted: Wanted, names: Iterable[str]) -> tuple[list[str], list[str]]:
        """Return those of `names` that no trial of the run, problem and GPU has as a knob.

        Beside them are the knobs that some have, where any is missing.
        """
        of_target = Wanted(wanted.run, wanted.problem, wanted.gpu)
        some = _narrowed(select(CandidateRow.id), of_target)
        with self._ledger.database.reading() as session:
            missing = [n for n in sorted(names) if session.scalar(some.where(_has(n)).limit(1)) is None]
        if not missing:
            return [], []
        return missing, sorted(self.knobs_of(self.last_matching(of_target, KNOBS_FROM).trials))

    def endings(self, wanted: Wanted) -> tuple[dict[str, int], list[str]]:
        """How the trials of the run, problem and GPU ended, outcome → trials, and their families."""
        of_target = Wanted(wanted.run, wanted.problem, wanted.gpu)
        family = _family()
        grouped = _narrowed(select(CandidateRow.outcome, family, func.count(CandidateRow.id)), of_target)
        outcomes: dict[str, int] = {}
        families: set[str] = set()
        with self._ledger.database.reading() as session:
            for outcome, of_family, trials in session.execute(grouped.group_by(CandidateRow.outcome, family)):
                name = outcome or PENDING
                outcomes[name] = outcomes.get(name, 0) + trials
                families |= {of_family} if of_family is not None else set()
        return outcomes, sorted(families)

    def comparison(self, first: int, second: int) -> Comparison:
        """Two runs beside each other. Raises UsageError where there is no such run, or where both are the same."""
        return read_comparison(self._ledger.database.reading, self._winner, first, second)

    def overview(self, problem: str, gpu: str) -> Overview:
        """Return what a page on a problem and a GPU shows."""
        best = next(iter(self._ledger.best(problem, gpu, 1)), None)
        lineage = self._ledger.ancestors(best.trial) if best else {}
        return read_overview(self._ledger.database.reading, problem, gpu, best, lineage)

    def effects(self, problem: str, gpu: str) -> Effects:
        """Which changes of knobs paid."""
        return read_effects(self._ledger.database.reading, problem, gpu)

    def _winner(self, run: Run) -> int | None:
        return next((c.trial for c in self._ledger.best(run.problem, run.gpu, 1, run=run.id)), None)

    def _numbers(self, wanted: Wanted, at_most: int | None = None) -> Iterator[int]:
        """Yield trial numbers, the last one first. Without a condition no more than `at_most` are asked for."""
        if wanted.condition:
            yield from self._picked(wanted, wanted.condition)
            return
        with self._ledger.database.reading() as session:
            numbers = _narrowed(select(CandidateRow.id), wanted).order_by(CandidateRow.id.desc()).limit(at_most)
            yield from session.scalars(numbers).all()

    def _picked(self, wanted: Wanted, condition: Condition) -> Iterator[int]:
        last: int | None = None
        while True:
            of_batch = _narrowed(select(*_configs_of.columns), wanted)
            if last is not None:
                of_batch = of_batch.where(CandidateRow.id < last)
            with self._ledger.database.reading() as session:
                rows = session.execute(of_batch.order_by(CandidateRow.id.desc()).limit(BATCH)).all()
                picked = [condition.matches(config) for config in _configs(rows)]
            yield from (row[0] for row, is_picked in zip(rows, picked, strict=True) if is_picked)
            if len(rows) < BATCH:
                return
            last = rows[-1][0]


def _narrowed(selected: S, wanted: Wanted) -> S:
    """By all but the condition."""
    of_target = {"run_id": wanted.run, "problem": wanted.problem, "gpu": wanted.gpu}
    for name, value in of_target.items():
        if value is not None:
            selected = selected.where(getattr(CandidateRow, name) == value)
    if wanted.outcomes:
        ended = CandidateRow.outcome.in_([o for o in wanted.outcomes if o != PENDING])
        unfinished = CandidateRow.outcome.is_(None)
        selected = selected.where(or_(ended, unfinished) if PENDING in wanted.outcomes else ended)
    if wanted.families:
        selected = selected.where(_family().in_(wanted.families))
    return selected


def _family() -> ColumnElement[str]:
    return _knob("family")


def _has(knob: str) -> ColumnElement[bool]:
    return _knob(knob).is_not(None)


def _knob(name: str) -> ColumnElement[str]:
    value: ColumnElement[str] = CandidateRow.config[name].as_string()
    return value


def _configs(rows: Sequence[Sequence[Any]]) -> list[Config]:
    """Decode configurations together, so that they share the names of their knobs."""
    texts = [_configs_of.read(row)[1] for row in rows]
    configs: list[Config] = json.loads(f"[{','.join(texts)}]")
    return configs


# ── runs as lists show them ───────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class RunSummary:
    run: Run
    trials: int
    correct: int
    best: Trial | None
    """of the run's own, as `Ledger.best` ranks them; None where none is ranked"""


def read_summaries(session: Session) -> Iterator[RunSummary]:
    """Oldest first."""
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
