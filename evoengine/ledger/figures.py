"""The queries behind every ranking: the figures of candidates that stand, and the fastest of those."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, Select, and_, bindparam, case, func, select, text
from sqlalchemy.orm import Session, aliased

from evoengine.ledger.checksums import Damaged, RowReader
from evoengine.ledger.listing import BATCH, KINDS, read_policy, read_terms
from evoengine.ledger.models import CandidateRow, MeasurementRow, RankingRow, RunRow, StandingRow, VerdictRow
from evoengine.ledger.ranking import Figure, in_order
from evoengine.ledger.rows import KIND_PRECEDENCE
from evoengine.records import EXECUTOR, Clocks, Kind, Outcome, Policy

RANKED = tuple(str(o) for o in Outcome if o.ranked)
TERMS = ("predicted", "place", "final_of_run")
"""those that ranking reads"""
FIRST_FASTEST = 64
"""figures that are looked at for the best few; more where finals, or kernels that are there twice, want it"""
_OF_CANDIDATE = ("run_id", "problem", "gpu", "outcome", "gate_version", "source_sha256", "config_key")
_OF_MEASUREMENT = ("candidate_id", "kind", "device", "median_us", "normalised_us", "suspect", "terms", "policy")
_candidates, _measurements = RowReader(CandidateRow, _OF_CANDIDATE), RowReader(MeasurementRow, _OF_MEASUREMENT)
_FIGURE = (*_candidates.columns, *_measurements.columns)
_STANDING = (
    select(StandingRow.us, *_FIGURE)
    .select_from(StandingRow)
    .join(CandidateRow, CandidateRow.id == StandingRow.candidate_id)
    .join(MeasurementRow, MeasurementRow.id == StandingRow.figure_id)
)
_IS_FINAL = text("standings.is_final = 1")
"""as the index of finals has it"""
_MODEL = case((and_(RankingRow.kind == str(Kind.ESTIMATED), RankingRow.by_formula == 0), RankingRow.device))
"""of rankings of predictions what predicted them, with its version and clock; null of others"""


_any_verdict = aliased(VerdictRow)
_last_verdict = (
    select(func.max(_any_verdict.id))
    .where(_any_verdict.candidate_id == CandidateRow.id, _any_verdict.device != EXECUTOR)
    .scalar_subquery()
)
_STANDING_FIGURES = (
    select(*_FIGURE)
    .select_from(CandidateRow)
    .join(MeasurementRow)
    .outerjoin(VerdictRow, VerdictRow.id == _last_verdict)
    .where(CandidateRow.outcome.in_(RANKED), VerdictRow.outcome.is_(None))
    .order_by(CandidateRow.id, MeasurementRow.id)
)
_FIGURES_OF_TRIAL = _STANDING_FIGURES.where(CandidateRow.id == bindparam("trial"))


# ── figures that stand ──────────────────────────────────────────────────────────────────────────────────────────────


def read_figures(session: Session, *wanted: ColumnElement[bool]) -> Iterator[Figure]:
    """Of candidates that ended ranked and were not refuted by a later verdict of the gate: candidate after candidate,
    of each the oldest first. `wanted` narrows the candidates.

    A verdict on executed machine code decides nothing here: what it refutes ends as not ranked, unless a GPU measured
    it.
    """
    figures = _STANDING_FIGURES.where(*wanted)
    rows: Iterator[Row[Any]] = iter(session.execute(figures, execution_options={"yield_per": BATCH}))
    return map(to_figure, rows)


def figures_of(connection: Connection, trial: int) -> Iterator[Figure]:
    """As `read_figures`, of one candidate."""
    return map(to_figure, connection.execute(_FIGURES_OF_TRIAL, {"trial": trial}))


def to_figure(row: Sequence[Any]) -> Figure:
    return _read_row(row)[0]


def _read_row(row: Sequence[Any]) -> tuple[Figure, str]:
    """Return the figure and its kernel: the source's SHA-256, or the configuration's key where no source is known."""
    trial, run, _, _, _, gate_version, source_sha256, config_key = _candidates.read(row[: _candidates.width])
    number, *values = _measurements.read(row[_candidates.width :])
    _, kind, device, median_us, normalised_us, suspect, terms, policy = values
    us = median_us if normalised_us is None else normalised_us
    read = read_terms(terms, TERMS), device, run, read_policy(policy)
    return Figure(number, trial, KINDS[kind], us, suspect, *read, gate_version or 0), source_sha256 or config_key


def policy_key(policy: Policy | None) -> str:
    """As rankings keep it."""
    return "" if policy is None else json.dumps(asdict(policy), sort_keys=True)


# ── the best of them ────────────────────────────────────────────────────────────────────────────────────────────────


def read_order(
    session: Session, problem: str, gpu: str, top: int, run: int | None = None, kernel: str | None = None
) -> list[int]:
    """Return the first `top` trials, best first, as `evoengine.ledger.ranking.ranked` orders them; of those with one
    source the best alone. `run` and `kernel` narrow them.

    Of figures that may be compared only finalists and the fastest are read: nobody slower comes before them.
    """
    rankings = [r for r in _held_rankings(session, problem, gpu, run) if kernel is None or r.kernel == kernel]
    if not rankings:
        return []
    last = _last(session, rankings, run)
    alike = [r for r in rankings if (r.kernel, r.gate_version) == (last.kernel, last.gate_version)]
    classes = [[r for r in alike if (r.kind, r.device, r.policy) == (last.kind, last.device, last.policy)]]
    if last.kind == Kind.ESTIMATED and not last.by_formula:
        classes.append([r for r in alike if r.by_formula])
    firsts: dict[str, int] = {}
    for comparable in classes:
        if len(firsts) < top:
            _add_fastest(session, [r.id for r in comparable], run, top, firsts)
    return list(firsts.values())[:top]


@dataclass(frozen=True, slots=True)
class RankedApart:
    """Ranked candidates of one kernel, one version of the gate and one model and clock: their number and the last of
    their runs."""

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


def _held_rankings(session: Session, problem: str, gpu: str, run: int | None) -> list[RankingRow]:
    """Those that have a figure; in PostgreSQL and SQLite alike a look into an index for each."""
    held = _of_run(select(StandingRow.us).where(StandingRow.ranking_id == RankingRow.id), run).exists()
    wanted = select(RankingRow).where(RankingRow.problem == problem, RankingRow.gpu == gpu, held)
    return list(session.scalars(wanted.order_by(RankingRow.id)))


def _last(session: Session, rankings: Sequence[RankingRow], run: int | None) -> RankingRow:
    """That of the last figure of the most trusted kind."""
    trusted = min(map(_precedence, rankings))
    of_kind = [r for r in rankings if _precedence(r) == trusted]
    if len(of_kind) == 1:
        return of_kind[0]
    newest = _of_run(select(StandingRow.figure_id), run).order_by(StandingRow.figure_id.desc()).limit(1)
    return max(of_kind, key=lambda r: session.scalars(newest.where(StandingRow.ranking_id == r.id)).one())


def _precedence(ranking: RankingRow) -> tuple[int, int, bool]:
    """As that of a Figure."""
    policy = read_policy(ranking.policy or None)
    sustained = policy is not None and policy.clocks is Clocks.SUSTAINED
    return KIND_PRECEDENCE.index(KINDS[ranking.kind]), ranking.by_formula, sustained


def _add_fastest(
    session: Session, rankings: Sequence[int], run: int | None, top: int, firsts: dict[str, int]
) -> None:  # fmt: skip
    """Puts kernel → trial into `firsts`, best first, until it has `top` of them or there are no more."""
    finals: dict[int, Figure] = {}
    for ranking in rankings:
        of_finals = _of_run(_STANDING, run).where(StandingRow.ranking_id == ranking, _IS_FINAL)
        finals |= {trial: figure for trial, (figure, _) in _read(session, of_finals).items()}
    size = FIRST_FASTEST
    while True:
        known, slowest_read = dict(finals), 0.0
        for ranking in rankings:
            fastest = _fastest(session, ranking, run, size)
            known |= {figure.trial: figure for figure in fastest if figure.trial not in finals}
            if len(fastest) == size:
                slowest_read = max(slowest_read, fastest[-1].speed)
        # who was not read counts at most by the speed of the last one read
        sure = [known[trial] for trial, speed in in_order(list(known.values())) if speed > slowest_read]
        found = dict(firsts)
        _add_kernels(session, sure, top, found)
        if len(found) >= top or slowest_read == 0.0:
            firsts.update(found)
            return
        size *= 8


def _fastest(session: Session, ranking: int, run: int | None, size: int) -> list[Figure]:
    """As far as the order needs them, without finals' places."""
    columns = StandingRow.figure_id, StandingRow.candidate_id, StandingRow.us, StandingRow.run_id
    light: Any = select(*columns)
    wanted = _of_run(light, run).where(StandingRow.ranking_id == ranking).order_by(StandingRow.us)
    rows = session.execute(wanted.limit(size))
    return [Figure(number, trial, Kind.MEASURED, us, None, {}, run=of) for number, trial, us, of in rows]


def _add_kernels(session: Session, order: Sequence[Figure], top: int, firsts: dict[str, int]) -> None:
    """Until there are `top`; each is held against its row of the measurements."""
    for begin in range(0, len(order), FIRST_FASTEST):
        some = order[begin : begin + FIRST_FASTEST]
        rows = _read(session, _STANDING.where(StandingRow.candidate_id.in_([figure.trial for figure in some])))
        for figure in some:
            if len(firsts) >= top:
                return
            if figure.trial not in rows:
                raise Damaged(StandingRow.__tablename__, figure.trial, "figure_id")
            firsts.setdefault(rows[figure.trial][1], figure.trial)


def _of_run(standings: Select[Any], run: int | None) -> Select[Any]:
    return standings if run is None else standings.where(StandingRow.run_id == run)


def _read(session: Session, wanted: Select[Any]) -> dict[int, tuple[Figure, str]]:
    """Trial → its figure and its kernel. Raises Damaged where a figure is not what stands for it."""
    rows: Sequence[Sequence[Any]] = session.execute(wanted).all()
    found: dict[int, tuple[Figure, str]] = {}
    for us, *row in rows:
        figure, kernel = _read_row(row)
        if us != figure.us:
            raise Damaged(StandingRow.__tablename__, figure.trial, "us")
        found[figure.trial] = figure, kernel
    return found
