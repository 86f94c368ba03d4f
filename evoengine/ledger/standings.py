"""Keeps, beside the figures, by which of them each candidate is ranked: `figures.read_order` finds the fastest there.

What stands here follows from candidates, verdicts and measurements alone. Every write of one of these goes through
`update_standing` or `rebuild`, in the same transaction; `evoengine db check` makes all of them again and compares.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, islice

from sqlalchemy import Connection, delete, func, insert, select, text
from sqlalchemy.orm import Session

from evoengine.ledger.checksums import Damaged
from evoengine.ledger.figures import figures_of, policy_key, read_figures
from evoengine.ledger.listing import BATCH
from evoengine.ledger.models import CandidateRow, RankingRow, RunRow, StandingRow
from evoengine.ledger.ranking import Figure, standing
from evoengine.ledger.statements import insert_new

RankingKey = tuple[str, str, str, str, int, str, str, int]
"""problem, GPU, kernel, kind, whether by formula, device, policy, gate version"""
_KEY_NAMES = ("problem", "gpu", "kernel", "kind", "by_formula", "device", "policy", "gate_version")
_KEY = tuple(getattr(RankingRow, name) for name in _KEY_NAMES)
_OF_FIGURE = _KEY_NAMES[3:]


_FALL = text("DELETE FROM standings WHERE candidate_id = :trial")
_STAND = text(
    "INSERT INTO standings (candidate_id, ranking_id, run_id, figure_id, us, is_final)"
    " SELECT c.id, r.id, c.run_id, :figure_id, :us, :is_final"
    " FROM candidates c JOIN runs n ON n.id = c.run_id"
    " JOIN rankings r ON r.problem = c.problem AND r.gpu = c.gpu AND r.kernel = coalesce(n.kernel, '')"
    " WHERE c.id = :trial AND r.kind = :kind AND r.by_formula = :by_formula AND r.device = :device"
    " AND r.policy = :policy AND r.gate_version = :gate_version"
    " ON CONFLICT (candidate_id) DO UPDATE SET"
    " ranking_id = excluded.ranking_id, figure_id = excluded.figure_id, us = excluded.us, is_final = excluded.is_final"
    " RETURNING candidate_id"
)


def update_standing(connection: Connection, trial: int) -> None:
    """After a trial got an outcome, a verdict or a figure. Of one that has no outcome yet nothing stands."""
    figures = standing(figures_of(connection, trial))
    if not figures:
        connection.execute(_FALL, {"trial": trial})
        return
    (figure,) = figures
    key = dict(zip(_OF_FIGURE, comparable_key(figure), strict=True))
    of_figure = {"figure_id": figure.id, "us": figure.us, "is_final": _is_final(figure)}
    if connection.scalar(_STAND, {"trial": trial, **key, **of_figure}) is None:  # the first of its ranking
        connection.execute(_FALL, {"trial": trial})
        _insert(connection, figures)


def rebuild(session: Session, run: int | None = None) -> None:
    """All that stands, of one run or of all."""
    of_run = () if run is None else (CandidateRow.run_id == run,)
    session.execute(delete(StandingRow) if run is None else delete(StandingRow).where(StandingRow.run_id == run))
    # read and written in turns, and who reads must not see what is written
    numbers = iter(session.scalars(select(CandidateRow.id).where(*of_run).order_by(CandidateRow.id)).all())
    while batch := list(islice(numbers, BATCH)):
        between = CandidateRow.id.between(batch[0], batch[-1])
        _insert(session.connection(), standing_of_each(read_figures(session, *of_run, between)))


def check_standings(session: Session) -> None:
    """Raises Damaged at the first trial whose standing does not follow from its figures."""
    numbers = iter(session.scalars(select(CandidateRow.id).order_by(CandidateRow.id)).all())
    while batch := list(islice(numbers, BATCH)):
        figures = list(standing_of_each(read_figures(session, CandidateRow.id.between(batch[0], batch[-1]))))
        targets = _targets(session.connection(), figures)
        expected = {f.trial: (f.run, f.id, f.us, _is_final(f), *targets[f.trial], *comparable_key(f)) for f in figures}
        of_batch = select(
            StandingRow.candidate_id, StandingRow.run_id, StandingRow.figure_id, StandingRow.us, StandingRow.is_final,
            *_KEY,
        ).outerjoin(RankingRow, RankingRow.id == StandingRow.ranking_id)  # fmt: skip
        of_batch = of_batch.where(StandingRow.candidate_id.between(batch[0], batch[-1]))
        found = {trial: tuple(values) for trial, *values in session.execute(of_batch)}
        for trial in sorted(expected.keys() | found.keys()):
            if expected.get(trial) != found.get(trial):
                raise Damaged(StandingRow.__tablename__, trial, "figure_id")


def standing_of_each(figures: Iterable[Figure]) -> Iterator[Figure]:
    """The one figure of each candidate; `figures` come candidate after candidate."""
    for _, of_trial in groupby(figures, key=lambda figure: figure.trial):
        yield from standing(of_trial)


def _insert(connection: Connection, figures: Iterable[Figure]) -> None:
    held = list(figures)
    targets = _targets(connection, held)
    rankings: dict[RankingKey, int] = {}
    rows = []
    for figure in held:
        key = (*targets[figure.trial], *comparable_key(figure))
        if key not in rankings:
            rankings[key] = _ranking(connection, key)
        rows.append({
            "candidate_id": figure.trial, "ranking_id": rankings[key], "run_id": figure.run, "figure_id": figure.id,
            "us": figure.us, "is_final": _is_final(figure),
        })  # fmt: skip
    if rows:
        connection.execute(insert(StandingRow), rows)


def _targets(connection: Connection, figures: Sequence[Figure]) -> dict[int, tuple[str, str, str]]:
    """Map each trial to its problem, GPU and kernel."""
    kernel = func.coalesce(RunRow.kernel, "")
    wanted = select(CandidateRow.id, CandidateRow.problem, CandidateRow.gpu, kernel).join(CandidateRow.run)
    found = connection.execute(wanted.where(CandidateRow.id.in_([figure.trial for figure in figures])))
    return {trial: (problem, gpu, kernel) for trial, problem, gpu, kernel in found}


def comparable_key(figure: Figure) -> tuple[str, int, str, str, int]:
    """Return kind, whether by formula, device, policy and gate version."""
    return str(figure.kind), int(figure.by_formula), figure.device, policy_key(figure.policy), figure.gate_version


def _is_final(figure: Figure) -> int:
    return int("place" in figure.terms)


def _ranking(connection: Connection, key: RankingKey) -> int:
    named = dict(zip(_KEY_NAMES, key, strict=True))
    same = select(RankingRow.id).filter_by(**named)
    known = connection.scalar(same)
    if known is not None:
        return known
    insert_new(connection, RankingRow, named)
    return connection.scalars(same).one()
