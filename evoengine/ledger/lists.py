"""Trials by what a person asks for: their run, problem, GPU, outcome, family, and a condition on their knobs.

What SQL can select by, it does. A condition is evaluated here, over batches of configurations that are read from the
last one back, so that the last few are found without reading the others.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from sqlalchemy import ColumnElement, Select, func, or_, select
from sqlalchemy.orm import Session, joinedload

from evoengine.ledger.checksums import RowReader
from evoengine.ledger.comparison import Comparison, read_comparison
from evoengine.ledger.listing import BATCH, Reading, Trial, read_trials
from evoengine.ledger.ranking import Timed, read_order, read_times
from evoengine.ledger.rows import from_json_number, numbers_from_json, to_baseline, to_run
from evoengine.ledger.runs import PENDING, Run
from evoengine.ledger.tables import BaselineRow, CandidateRow, MeasurementRow, RunRow, VerdictRow
from evoengine.lineage import Effect, effects
from evoengine.records import EXECUTOR, Baseline, Candidate, Config, Kind, Outcome

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

    def ranked_targets(self) -> list[tuple[str, str]]:
        """Return every problem and GPU with a ranked candidate, latest first."""
        ranked = CandidateRow.outcome.in_([str(o) for o in Outcome if o.ranked])
        grouped = select(CandidateRow.problem, CandidateRow.gpu).where(ranked)
        grouped = grouped.group_by(CandidateRow.problem, CandidateRow.gpu).order_by(func.max(CandidateRow.id).desc())
        with self._ledger.database.reading() as session:
            return [(problem, gpu) for problem, gpu in session.execute(grouped)]

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


# ── a page on a problem ───────────────────────────────────────────────────────────────────────────────────────────────


MOST_TRIALS = 20_000
"""that are drawn, the last ones"""
MOST_VERDICTS = 5_000
"""whose cases are read, the last ones"""
MOST_SAMPLES = 500
"""of a finalist, the first ones"""


@dataclass(frozen=True, slots=True)
class CaseErrors:
    """Of one of the gate's cases, over the last verdict of each candidate."""

    shares: Sequence[float]
    """the largest error over what is allowed, of verdicts with both"""
    failed: Sequence[float]
    """those of them in which the case failed"""
    asked: int
    without_number: int
    """failed without an error that is a number: a NaN, a crash"""


@dataclass(frozen=True, slots=True)
class Finalist:
    trial: int
    place: int
    samples_us: Sequence[float]


@dataclass(frozen=True, slots=True)
class Overview:
    problem: str
    gpu: str
    runs: list[Run]
    """those on it, oldest first"""
    trials: list[Trial]
    """the last of them, in their order"""
    total: int
    times: list[Timed]
    """every figure of `trials` that can be trusted, whether the gate was finished or not"""
    outcomes: Mapping[tuple[str, str], int]
    """family and outcome → trials, of all"""
    baselines: list[Baseline]
    """the last of each name, device and policy"""
    best: Candidate | None
    lineage: Mapping[int, Trial]
    """the best and all that it came from, by number"""
    effects: Effects
    cases: Mapping[str, CaseErrors]
    finalists: list[Finalist]
    """of the last finals held here, by their places"""


def read_overview(
    reading: Reading, problem: str, gpu: str, best: Candidate | None, lineage: Mapping[int, Trial]
) -> Overview:
    """`lineage` are the best and all that it came from."""
    own = select(CandidateRow.id).where(CandidateRow.problem == problem, CandidateRow.gpu == gpu)
    with reading() as session:
        last = session.scalars(own.order_by(CandidateRow.id.desc()).offset(MOST_TRIALS - 1).limit(1)).one_or_none()
        runs = _runs(session, problem, gpu)
        total, outcomes = _outcomes(session, own)
        baselines = _baselines(session, problem, gpu)
        finalists = _finalists(session, own)
        cases = _cases(session, own)
    drawn = own if last is None else own.where(CandidateRow.id >= last)
    trials = list(read_trials(reading, drawn, resources=False))
    figured = [t.trial for t in trials if t.outcome and t.outcome.has_figure]
    return Overview(
        problem, gpu, runs, trials, total, list(read_times(reading, figured)), outcomes, baselines, best, lineage,
        read_effects(reading, problem, gpu), cases, finalists,
    )  # fmt: skip


def _runs(session: Session, problem: str, gpu: str) -> list[Run]:
    rows = select(RunRow).options(joinedload(RunRow.device)).where(RunRow.problem == problem, RunRow.gpu == gpu)
    return [to_run(row) for row in session.scalars(rows.order_by(RunRow.id))]


def _outcomes(session: Session, own: Select[int]) -> tuple[int, dict[tuple[str, str], int]]:
    family = CandidateRow.config["family"].as_string()
    grouped = own.with_only_columns(family, CandidateRow.outcome, func.count(CandidateRow.id))
    found: Counter[tuple[str, str]] = Counter()
    for of_family, outcome, trials in session.execute(grouped.group_by(family, CandidateRow.outcome)):
        found[of_family or "", outcome or PENDING] += trials
    return found.total(), dict(found)


def _baselines(session: Session, problem: str, gpu: str) -> list[Baseline]:
    rows = select(BaselineRow).join(RunRow, RunRow.id == BaselineRow.run_id)
    of_target = rows.where(RunRow.problem == problem, RunRow.gpu == gpu).order_by(BaselineRow.id)
    baselines = [to_baseline(row) for row in session.scalars(of_target)]
    return list({(b.name, b.device, b.policy): b for b in baselines}.values())


def _finalists(session: Session, own: Select[int]) -> list[Finalist]:
    """Figures of finals are among the last ones of the trials that ended as measured."""
    placed = MeasurementRow.terms["place"].as_float()
    of_run = MeasurementRow.terms["final_of_run"].as_float()
    here = (MeasurementRow.kind == str(Kind.MEASURED), MeasurementRow.suspect.is_(None), of_run >= 0)
    of_target = own.join(MeasurementRow, MeasurementRow.candidate_id == CandidateRow.id).where(*here)
    last = session.scalar(of_target.with_only_columns(func.max(of_run)))
    if last is None:
        return []
    rows = select(MeasurementRow).join(CandidateRow, CandidateRow.id == MeasurementRow.candidate_id)
    wanted = rows.where(*here, of_run == last, CandidateRow.id.in_(own)).order_by(placed, MeasurementRow.id)
    return [
        Finalist(row.candidate_id, int(row.terms["place"]), numbers_from_json(row.samples_us[:MOST_SAMPLES]))
        for row in session.scalars(wanted)
    ]


def _cases(session: Session, own: Select[int]) -> dict[str, CaseErrors]:
    verdicts = select(VerdictRow).where(VerdictRow.device != EXECUTOR, VerdictRow.candidate_id.in_(own))
    last: dict[int, VerdictRow] = {}
    for row in session.scalars(verdicts.order_by(VerdictRow.id.desc()).limit(MOST_VERDICTS)):
        last.setdefault(row.candidate_id, row)
    shares: dict[str, list[float]] = defaultdict(list)
    failed: dict[str, list[float]] = defaultdict(list)
    asked: Counter[str] = Counter()
    without_number: Counter[str] = Counter()
    for case in (case for row in last.values() for case in row.cases):
        name, share = str(case["name"]), _share(case["max_error"], case["allowed"])
        asked[name] += 1
        if share is not None:
            shares[name].append(share)
        if not case["correct"]:
            failed[name] += [share] if share is not None else []
            without_number[name] += share is None
    return {name: CaseErrors(shares[name], failed[name], asked[name], without_number[name]) for name in asked}


def _share(error: float | str | None, allowed: float | str | None) -> float | None:
    """Return an error over what is allowed; None where either is no number."""
    largest, bound = from_json_number(error), from_json_number(allowed)
    if largest is None or not bound or not math.isfinite(largest) or not math.isfinite(bound):
        return None
    return largest / bound


# ── changes of knobs ──────────────────────────────────────────────────────────────────────────────────────────────────


MOST_EFFECTS = 25_000
"""of which effects are computed, the last ones: about 2 KB of memory and 40 µs each"""


@dataclass(frozen=True, slots=True)
class Effects:
    effects: list[Effect]
    trials: int
    """how many ranked trials they were computed from, the last ones"""
    ranked: int
    """how many there are"""

    def __str__(self) -> str:
        some = f"the last {self.trials:,} of " if self.trials < self.ranked else ""
        return f"from {some}{self.ranked:,} ranked trials"


def read_effects(reading: Reading, problem: str, gpu: str, most: int = MOST_EFFECTS) -> Effects:
    """Return the effects of the last `most` trials with a figure; their parents may be earlier ones."""
    ranked = select(CandidateRow.id).where(
        CandidateRow.problem == problem, CandidateRow.gpu == gpu,
        CandidateRow.outcome.in_([str(o) for o in Outcome if o.has_figure]),
    )  # fmt: skip
    with reading() as session:
        total = session.scalars(select(func.count()).select_from(ranked.subquery())).one()
        skipped = ranked.order_by(CandidateRow.id.desc()).offset(most - 1).limit(1)
        first = session.scalar(skipped) if total > most else None
    last = ranked if first is None else ranked.where(CandidateRow.id >= first)
    children = list(read_trials(reading, last, resources=False))
    earlier = sorted({p for t in children for p in t.parents if first is not None and p < first})
    parents = [
        parent
        for start in range(0, len(earlier), BATCH)
        for parent in read_trials(
            reading, ranked.where(CandidateRow.id.in_(earlier[start : start + BATCH])), resources=False
        )
    ]
    return Effects(effects(children, parents), len(children), total)


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
