"""Ranks candidates: stores by which figure and time each one counts, so that reading a ranking is an ORDER BY.

A candidate counts by its last figure of its most trusted kind, and not at all where that figure is suspect or the
candidate was refuted. Figures are ranked together where kind, device, policy, kernel and version of the gate are the
same: one name (h100) stands for GPUs of unlike speed, and a kernel takes another time with a warm L2.

The finalists of the last finals keep the places that they won there, and whatever was timed before, alone, is behind
them. Finals of an imported run decide between trials of that run alone: nobody timed its finalists against what this
ledger had. What counts among the trials of one run is stored beside what counts among all.

Predictions that are closer to one another than SAME_WITHIN do not tell which kernel is faster. Of those as close to the
fastest prediction the simplest is the first: the kernel with the fewest registers, as in finals, and of equal ones that
with the least shared memory.

`standings` follows from candidates, verdicts and measurements. Every write of one of these calls `update_standing` or
`rebuild` in the same transaction; `evoengine db check` computes all of it again and compares.
"""

from __future__ import annotations

import heapq
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any, NamedTuple

from sqlalchemy import Connection, Row, bindparam, case, delete, func, insert, or_, select, text, true
from sqlalchemy.orm import Session, aliased

from evoengine.ledger.integrity import Damaged, RowReader, execute, insert_new
from evoengine.ledger.rows import FIGURES, Reading, batches, read_figure
from evoengine.ledger.tables import (
    ADJUSTED,
    UNPLACED,
    BinaryRow,
    CandidateRow,
    MeasurementRow,
    RankingRow,
    RunRow,
    StandingRow,
    VerdictRow,
)
from evoengine.records import EXECUTOR, Kind, Measurement, Outcome, Policy, precedence
from evoengine.terms import FORMULA, SAME_WITHIN, model_of

FETCHED = 64
"""standings that are read together"""
_KEY = ("problem", "gpu", "kernel", "precedence", "kind", "device", "policy", "gate_version")
"""columns of `rankings` that two figures share which are ranked together"""
PREDICTED, BY_FORMULA = (precedence(Kind.ESTIMATED, by_formula) for by_formula in (False, True))


# ── figures that count ──────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class _Figure:
    """A measurement with its number, its trial, and the ranking that it belongs to, by the names of RankingRow."""

    id: int
    trial: int
    run: int
    measurement: Measurement
    source: str
    """the source's SHA-256, or the configuration's key where no source is known"""
    ranking: Mapping[str, Any]

    @property
    def key(self) -> tuple[Any, ...]:
        """Return the values of `_KEY`."""
        return tuple(self.ranking.values())

    def standing(self) -> dict[str, Any]:
        """Return the candidate's row of `standings` before finals are counted, without its ranking."""
        us, terms = self.measurement.compared_us, self.measurement.terms
        final = (terms.get("final_of_run", 0.0), terms["place"]) if "place" in terms else (None, None)
        return dict(
            zip(_COLUMNS, (self.trial, self.run, self.id, us, *final, us, UNPLACED, us, UNPLACED), strict=False)
        )


_candidates = RowReader(
    CandidateRow, ("run_id", "problem", "gpu", "outcome", "gate_version", "source_sha256", "config_key")
)
_FIGURE = (*_candidates.columns, *FIGURES.columns)
_any_verdict = aliased(VerdictRow)
# a verdict on executed machine code decides nothing here: what it refutes ends as not ranked, unless a GPU measured it
_LAST_VERDICT = (
    select(func.max(_any_verdict.id))
    .where(_any_verdict.candidate_id == CandidateRow.id, _any_verdict.device != EXECUTOR)
    .scalar_subquery()
)
# not `in_`, which is composed for every execution
_RANKED = or_(*(CandidateRow.outcome == str(o) for o in Outcome if o.ranked))
_FIGURES = (
    select(func.coalesce(RunRow.kernel, ""), *_FIGURE)
    .select_from(CandidateRow)
    .join(RunRow, RunRow.id == CandidateRow.run_id)
    .join(MeasurementRow)
    .outerjoin(VerdictRow, VerdictRow.id == _LAST_VERDICT)
    .where(_RANKED, VerdictRow.outcome.is_(None))
    .order_by(CandidateRow.id, MeasurementRow.id)
)
_FIGURES_OF_TRIAL = _FIGURES.where(CandidateRow.id == bindparam("trial"))


def _read_figure(row: Sequence[Any]) -> _Figure:
    """Read the run's kernel and the columns of `_FIGURE`. Raises Damaged where a row is not what was written."""
    kernel, *columns = row
    trial, run, problem, gpu, _, gate_version, source, config_key = _candidates.read(columns[: _candidates.width])
    number, _, m = read_figure(columns[_candidates.width :], _TERMS)
    policy = "" if m.policy is None else json.dumps(asdict(m.policy), sort_keys=True)
    key = (problem, gpu, kernel, m.precedence, str(m.kind), m.device, policy, gate_version or 0)
    ranking = dict(zip(_KEY, key, strict=True))
    return _Figure(number, trial, run, m, source or config_key, ranking)


_TERMS = ("predicted", "place", "final_of_run")


def _counting(rows: Iterable[Row[Any]]) -> Iterator[_Figure]:
    """Yield the figure by which each candidate counts; the rows come candidate after candidate, oldest figure first."""
    for _, of_trial in groupby(map(_read_figure, rows), key=lambda figure: figure.trial):
        chosen = min(reversed(list(of_trial)), key=lambda figure: figure.measurement.precedence)
        if not chosen.measurement.suspect:
            yield chosen


# ── kept up to date ─────────────────────────────────────────────────────────────────────────────────────────────────

_FALL = text("DELETE FROM standings WHERE candidate_id = :trial RETURNING ranking_id, final_of_run")
_SAME = " AND ".join(f"r.{name} = ?" for name in _KEY)
_BEFORE = (
    "SELECT r.id, s.ranking_id, s.figure_id, s.final_of_run,"
    f" (SELECT max(figure_id) FROM standings WHERE ranking_id = r.id AND ({ADJUSTED}) AND final_of_run IS NOT NULL)"
    f" AS last_final FROM rankings r LEFT JOIN standings s ON s.candidate_id = ? WHERE {_SAME}"
)
"""number of the ranking, what stood in it of the trial, and the last figure of finals in it"""
_COLUMNS = (
    "candidate_id run_id figure_id us final_of_run final_place counted_us place run_counted_us run_place ranking_id"
).split()
_STAND = (
    f"INSERT INTO standings ({', '.join(_COLUMNS)}) VALUES ({', '.join('?' * len(_COLUMNS))})"
    f" ON CONFLICT (candidate_id) DO UPDATE SET {', '.join(f'{name} = excluded.{name}' for name in _COLUMNS[2:])}"
)


def update_standing(connection: Connection, trial: int) -> None:
    """Store by what a trial counts after it got an outcome, a verdict or a figure; without an outcome by nothing."""
    figure = next(_counting(connection.execute(_FIGURES_OF_TRIAL, {"trial": trial})), None)
    if figure is None:
        fallen = connection.execute(_FALL, {"trial": trial}).one_or_none()
        if fallen is not None and fallen.final_of_run is not None:
            count_finals(connection, fallen.ranking_id)
        return
    standing = figure.standing()
    is_final = standing["final_of_run"] is not None
    ranking, stood_in, stood_by, was_final, last_final = _find(connection, figure, alone=is_final)
    if (stood_in, stood_by) == (ranking, figure.id):
        return
    execute(connection, _STAND, *standing.values(), ranking)
    if was_final is not None and stood_in != ranking:
        count_finals(connection, stood_in, figure.run)
    if is_final or was_final is not None or (last_final or 0) > figure.id:
        count_finals(connection, ranking, figure.run)


def _find(connection: Connection, figure: _Figure, *, alone: bool = False) -> Any:
    """Return what `_BEFORE` finds, with the ranking made where it is new.

    On PostgreSQL, locks it against those who count its finals and, with `alone`, against those who add to it.
    """
    if connection.dialect.name == "postgresql":
        lock = "UPDATE" if alone else "KEY SHARE"
        execute(connection, f"SELECT r.id FROM rankings r WHERE {_SAME} FOR {lock}", *figure.key)
    found = execute(connection, _BEFORE, figure.trial, *figure.key).one_or_none()
    if found is not None:
        return found
    insert_new(connection, RankingRow, figure.ranking)
    return execute(connection, _BEFORE, figure.trial, *figure.key).one()


def rebuild(session: Session, run: int | None = None) -> None:
    """Store by what each trial counts, of one run or of all."""
    connection = session.connection()
    connection.execute(delete(StandingRow) if run is None else delete(StandingRow).where(StandingRow.run_id == run))
    rankings: dict[tuple[Any, ...], int] = {}
    for _, _, figures in _spans(session, run):
        for figure in figures:
            if figure.key not in rankings:
                rankings[figure.key] = _find(connection, figure).id
        if figures:
            rows = [figure.standing() | {"ranking_id": rankings[figure.key]} for figure in figures]
            connection.execute(insert(StandingRow), rows)
    count_all_finals(connection)


def _spans(session: Session, run: int | None = None) -> Iterator[tuple[int, int, list[_Figure]]]:
    """Yield the first and last number of trials that are read together, and the figures by which they count."""
    of_run = true() if run is None else CandidateRow.run_id == run
    for some in batches(session.scalars(select(CandidateRow.id).where(of_run).order_by(CandidateRow.id)).all()):
        wanted = _FIGURES.where(of_run, CandidateRow.id.between(some[0], some[-1]))
        yield some[0], some[-1], list(_counting(session.execute(wanted)))


# ── finals ──────────────────────────────────────────────────────────────────────────────────────────────────────────

_ADJUSTABLE = (
    "SELECT candidate_id, run_id, figure_id, us, final_of_run, final_place, counted_us, place, run_counted_us,"
    " run_place FROM standings WHERE ranking_id = :ranking"
)
_IN_QUESTION = text(
    f"{_ADJUSTABLE} AND ({ADJUSTED}) UNION {_ADJUSTABLE} AND counted_us < (SELECT max(us) FROM standings"
    f" WHERE ranking_id = :ranking AND ({ADJUSTED}) AND final_of_run IS NOT NULL)"
)
_COUNT = text(
    "UPDATE standings SET counted_us = :counted_us, place = :place, run_counted_us = :run_counted_us,"
    " run_place = :run_place WHERE candidate_id = :candidate_id"
)
Counted = dict[int, tuple[float, int]]
"""trial → the time by which it counts, and its place among those of equal time"""


def count_finals(connection: Connection, ranking: int, run: int | None = None) -> None:
    """Store what the last finals make of a ranking's times: among all trials, and among those of `run` or of each."""
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT id FROM rankings WHERE id = :ranking FOR UPDATE"), {"ranking": ranking})
    if changed := [counted for _, counted in _miscounted(connection, ranking, run)]:
        connection.execute(_COUNT, changed)


def count_all_finals(connection: Connection) -> None:
    """Store what finals make of the times of every ranking."""
    for ranking in connection.scalars(text(f"SELECT DISTINCT ranking_id FROM standings WHERE {ADJUSTED}")).all():
        count_finals(connection, ranking)


def _miscounted(connection: Connection, ranking: int, run: int | None = None) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield trials whose row of `standings` does not have the time and place by which they count, and these."""
    rows = connection.execute(_IN_QUESTION, {"ranking": ranking}).all()
    of_all, in_run = _count(rows), dict[int, tuple[float, int]]()
    by_run: dict[int, list[Row[Any]]] = {}
    for row in rows:
        by_run.setdefault(row.run_id, []).append(row)
    for number, of_run in by_run.items():
        if run in (None, number):
            in_run |= _count(of_run)
    for row in rows:
        trial, held = row.candidate_id, (row.counted_us, row.place, row.run_counted_us, row.run_place)
        right = (*of_all[trial], *in_run.get(trial, held[2:]))
        if held != right:
            names = ("counted_us", "place", "run_counted_us", "run_place")
            yield trial, {"candidate_id": trial, **dict(zip(names, right, strict=True))}


def _count(standings: Sequence[Row[Any]]) -> Counted:
    """Return by what trials of one ranking count. Those left out that no finals concern change nothing."""
    counted: Counted = {s.candidate_id: (s.us, UNPLACED) for s in standings}
    for finalists, concerned in _last_finals(standings):
        slowest = us = counted[finalists[-1].candidate_id][0]
        for finalist in reversed(finalists):
            us = min(us, counted[finalist.candidate_id][0])
            counted[finalist.candidate_id] = us, int(finalist.final_place)
        began = min(finalist.figure_id for finalist in finalists)
        for standing in concerned:
            if standing.figure_id < began and counted[standing.candidate_id][0] < slowest:
                counted[standing.candidate_id] = slowest, UNPLACED
    return counted


def _last_finals(standings: Sequence[Row[Any]]) -> Iterator[tuple[list[Row[Any]], Sequence[Row[Any]]]]:
    """Yield finalists by their places, and the standings that are behind them where they were taken before.

    Finals held in another ledger, whose numbers are below 0, concern their own run alone. This ledger's come last.
    """
    held: dict[int, list[Row[Any]]] = {}
    for s in standings:
        if s.final_of_run is not None:
            held.setdefault(s.run_id if s.final_of_run < 0 else 0, []).append(s)
    for run, placed in sorted(held.items(), reverse=True):
        last = max(s.final_of_run for s in placed)
        finalists = [s for s in placed if s.final_of_run == last]
        yield (
            sorted(finalists, key=lambda s: (s.final_place, s.candidate_id)),
            [s for s in standings if s.run_id == run] if run else standings,
        )


# ── read ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def read_order(
    session: Session, problem: str, gpu: str, top: int, run: int | None = None, kernel: str | None = None
) -> list[int]:
    """Return the first `top` trials, best first; of those with one source the best alone.

    `run` and `kernel` narrow them.

    All are of the ranking with the last figure of the most trusted kind. Of predictions within SAME_WITHIN of the
    fastest, the simplest is the first. Behind predictions come estimates by formula, of what the model could not read,
    in an order of their own.
    """
    rankings = [r for r in _held_rankings(session, problem, gpu, run) if kernel in (None, r.kernel)]
    if not rankings:
        return []
    first = _newest(session, [r for r in rankings if r.precedence == rankings[0].precedence], run)
    classes = [[first.id]]
    if first.precedence == PREDICTED:
        same = (first.kernel, first.gate_version)
        formula = (r for r in rankings if r.precedence == BY_FORMULA and (r.kernel, r.gate_version) == same)
        classes.append([r.id for r in formula])
    firsts: dict[str, int] = {}
    for ranking in classes:
        order = _in_order(session, ranking, run)
        if ranking == [first.id] and first.precedence == PREDICTED:
            order = _simplest_ahead(order)
        for placed in order if len(firsts) < top else ():
            firsts.setdefault(placed.source, placed.trial)
            if len(firsts) == top:
                break
    return list(firsts.values())


def _held_rankings(session: Session, problem: str, gpu: str, run: int | None) -> list[RankingRow]:
    """Return the rankings that hold a trial, most trusted first."""
    held = select(StandingRow.us).where(StandingRow.ranking_id == RankingRow.id)
    held = held if run is None else held.where(StandingRow.run_id == run)
    wanted = select(RankingRow).where(RankingRow.problem == problem, RankingRow.gpu == gpu, held.exists())
    return list(session.scalars(wanted.order_by(RankingRow.precedence, RankingRow.id)))


def _newest(session: Session, rankings: Sequence[RankingRow], run: int | None) -> RankingRow:
    """Return the ranking that holds the last figure."""
    if len(rankings) == 1:
        return rankings[0]
    last = select(func.max(StandingRow.figure_id))
    last = last if run is None else last.where(StandingRow.run_id == run)
    return max(rankings, key=lambda r: session.scalars(last.where(StandingRow.ranking_id == r.id)).one())


_HOLDS = (
    func.coalesce(BinaryRow.registers, sys.maxsize),
    func.coalesce(BinaryRow.shared_bytes + CandidateRow.shared_bytes, sys.maxsize),
)


class _Placed(NamedTuple):
    """A trial of a ranking that is read."""

    trial: int
    source: str
    us: float
    holds: tuple[int, int]
    """registers of a thread and bytes of shared memory of a block; no less than any other where no binary is known"""


def _simplest_ahead(order: Iterator[_Placed]) -> Iterator[_Placed]:
    """Yield the trials of `order`, ahead of all the simplest of the first FETCHED within SAME_WITHIN of the fastest."""
    near: list[_Placed] = []
    behind = next(order, None)
    while behind and len(near) < FETCHED and behind.us <= (1 + SAME_WITHIN) * (near or [behind])[0].us:
        near.append(behind)
        behind = next(order, None)
    simplest = min(near, key=lambda placed: placed.holds, default=None)
    yield from sorted(near, key=lambda placed: placed is not simplest)
    if behind:
        yield behind
    yield from order


def _in_order(session: Session, rankings: Sequence[int], run: int | None) -> Iterator[_Placed]:
    """Yield the trials of rankings, fastest first.

    Raises Damaged where a row is not what was written, or its standing does not follow from it.
    """
    s = StandingRow
    order = (s.counted_us, s.place) if run is None else (s.run_counted_us, s.run_place)
    wanted = (
        select(*order, s.us, s.candidate_id, *_HOLDS, func.coalesce(RunRow.kernel, ""), *_FIGURE)
        .join(RunRow, RunRow.id == s.run_id)
        .outerjoin(CandidateRow, CandidateRow.id == s.candidate_id)
        .outerjoin(BinaryRow, BinaryRow.id == CandidateRow.binary_id)
        .outerjoin(MeasurementRow, MeasurementRow.id == s.figure_id)
        .order_by(*order, s.us, s.candidate_id)
    )
    if run is not None:
        wanted = wanted.where(s.run_id == run)
    read = [
        session.execute(wanted.where(s.ranking_id == ranking), execution_options={"yield_per": FETCHED})
        for ranking in rankings
    ]
    try:
        for _, _, us, trial, registers, shared, *columns in heapq.merge(*read, key=lambda row: tuple(row[:4])):
            if None in (columns[1], columns[1 + _candidates.width]):
                raise Damaged(s.__tablename__, trial, "figure_id")
            figure = _read_figure(columns)
            if figure.measurement.compared_us != us:
                raise Damaged(s.__tablename__, trial, "us")
            yield _Placed(trial, figure.source, us, (registers, shared))
    finally:
        for result in read:
            result.close()


def check_standings(session: Session) -> None:
    """Raise Damaged at the first trial whose standing does not follow from its figures."""
    connection = session.connection()
    by_key = {tuple(getattr(r, name) for name in _KEY): r.id for r in session.scalars(select(RankingRow))}
    names = ("run_id", "figure_id", "us", "final_of_run", "final_place", "ranking_id")
    for first, last, figures in _spans(session):
        expected = {}
        for figure in figures:
            standing = figure.standing() | {"ranking_id": by_key.get(figure.key)}
            expected[figure.trial] = tuple(standing[name] for name in names)
        columns = [getattr(StandingRow, name) for name in names]
        rows = session.execute(
            select(StandingRow.candidate_id, *columns).where(StandingRow.candidate_id.between(first, last))
        )
        found = {trial: tuple(values) for trial, *values in rows}
        for trial in sorted(expected.keys() | found.keys()):
            if expected.get(trial) != found.get(trial):
                raise Damaged(StandingRow.__tablename__, trial, "figure_id")
    placed = or_(StandingRow.place < UNPLACED, StandingRow.run_place < UNPLACED)
    stray = select(StandingRow.candidate_id).where(StandingRow.final_of_run.is_(None), placed)
    for trial in session.scalars(stray.limit(1)):
        raise Damaged(StandingRow.__tablename__, trial, "place")
    for ranking in by_key.values():
        for trial, _ in _miscounted(connection, ranking):
            raise Damaged(StandingRow.__tablename__, trial, "counted_us")


# ── what is ranked apart ────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class RankedApart:
    """Ranked candidates of one kernel, one version of the gate and one model and clock."""

    candidates: int
    """0 of the last run, where that searched another kernel and has none"""
    last_run: int
    same_kernel: bool
    gate_version: int
    model: str | None = None
    """what predicted them, where that is not what predicted the others; None of other figures"""

    def __str__(self) -> str:
        if not self.candidates:
            other = "another text, definition or reference of the kernel"
            return f"run {self.last_run} searched {other}, of which no candidate is ranked"
        who = f"{self.candidates} candidate{'s' * (self.candidates != 1)} up to run {self.last_run}"
        gate = f"gate version {self.gate_version}" if self.gate_version else "a gate from before versions were kept"
        why = f"judged by {gate}" if self.same_kernel else "of another text, definition or reference of the kernel"
        why = f"predicted by {self.model}" if self.model else why
        return f"{who} {'is' if self.candidates == 1 else 'are'} ranked apart: {why}"


def read_ranked_apart(session: Session, problem: str, gpu: str, like: int) -> list[RankedApart]:
    """Return the candidates that the trial `like` is not ranked with, by kernel, gate and model, newest first."""
    key = RankingRow.kernel, RankingRow.gate_version, _MODEL
    joined = select(*key).join(StandingRow, StandingRow.ranking_id == RankingRow.id)
    own = session.execute(joined.where(StandingRow.candidate_id == like)).one_or_none()
    if own is None:
        return []
    counted = select(*key, func.count(), func.max(StandingRow.run_id)).join(
        StandingRow, StandingRow.ranking_id == RankingRow.id
    )
    groups = session.execute(counted.where(RankingRow.problem == problem, RankingRow.gpu == gpu).group_by(*key)).all()
    found = []
    for kernel, gate, model, count, run in groups:
        another_model = None not in (own[2], model) and model != own[2]
        if (kernel, gate) != tuple(own[:2]) or another_model:
            same = (kernel, gate) == tuple(own[:2])
            found.append(RankedApart(count, run, kernel == own[0], gate, model if same else None))
    of_target = select(RunRow.id, RunRow.kernel).where(RunRow.problem == problem, RunRow.gpu == gpu)
    last_run, last_kernel = session.execute(of_target.order_by(RunRow.id.desc()).limit(1)).one()
    if (last_kernel or "") not in {own[0], *(kernel for kernel, *_ in groups)}:
        found.append(RankedApart(0, last_run, False, own[1]))
    return sorted(found, key=lambda apart: -apart.last_run)


_MODEL = case((RankingRow.precedence == PREDICTED, RankingRow.device))
"""of rankings of predictions what predicted them, with its version and clock; null of others"""


# ── every figure ────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class ComparisonKey:
    """What figures share that may be compared, within a problem and GPU."""

    kind: Kind
    model: str | None
    """of an estimate what it was made by"""
    device: str
    policy: Policy | None

    @property
    def is_sustained(self) -> bool:
        return self.policy is not None and self.policy.is_sustained

    @property
    def precedence(self) -> tuple[int, str, str]:
        """Return the sort key of keys, smaller for more trusted."""
        return precedence(self.kind, self.model == FORMULA, self.is_sustained), self.device, str(self.policy)


def key_of(figure: Measurement) -> ComparisonKey:
    model = model_of(figure.terms) if figure.kind is Kind.ESTIMATED else None
    return ComparisonKey(figure.kind, model, figure.device, figure.policy)


@dataclass(frozen=True, slots=True)
class Timed:
    """A figure of a trial: the time by which it is compared, in µs, and the speed, where the operations are known."""

    trial: int
    key: ComparisonKey
    us: float
    tflops: float | None


def read_times(reading: Reading, trials: Sequence[int]) -> Iterator[Timed]:
    """Yield every figure of those trials that can be trusted, a trial's oldest first."""
    for some in batches(trials):
        of_batch = select(*FIGURES.columns).where(MeasurementRow.candidate_id.in_(some))
        with reading() as session:
            rows = session.execute(of_batch.order_by(MeasurementRow.id)).all()
        for _, trial, m in (read_figure(row, ("predicted",)) for row in rows):
            if not m.suspect:
                yield Timed(trial, key_of(m), m.compared_us, m.tflops)
