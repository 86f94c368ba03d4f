"""Keeps, beside the figures, by which of them each candidate is ranked: `figures.read_order` finds the fastest there.

What stands here follows from candidates, verdicts and measurements alone. Every write of one of these goes through
`update_standing` or `rebuild`, in the same transaction; `evoengine db check` makes all of them again and compares.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, islice

from sqlalchemy import delete, insert, select
from sqlalchemy.orm import Session

from evoengine.ledger.checksums import Damaged
from evoengine.ledger.figures import RANKED, policy_key, read_figures
from evoengine.ledger.listing import BATCH
from evoengine.ledger.models import CandidateRow, RankingRow, StandingRow
from evoengine.ledger.ranking import Figure, standing
from evoengine.ledger.rows import insert_new

RankingKey = tuple[str, str, str, int, str, str]
"""problem, GPU, kind, whether by formula, device, policy"""
_KEY = (
    RankingRow.problem, RankingRow.gpu, RankingRow.kind, RankingRow.by_formula, RankingRow.device, RankingRow.policy
)  # fmt: skip


def update_standing(session: Session, trial: int) -> None:
    """After a trial got an outcome, a verdict or a figure. Of one that has no outcome yet nothing stands."""
    outcome = session.scalar(select(CandidateRow.outcome).where(CandidateRow.id == trial))
    if outcome is None:
        return
    session.execute(delete(StandingRow).where(StandingRow.candidate_id == trial))
    if outcome in RANKED:
        _insert(session, standing(read_figures(session, CandidateRow.id == trial)))


def rebuild(session: Session, run: int | None = None) -> None:
    """All that stands, of one run or of all."""
    of_run = () if run is None else (CandidateRow.run_id == run,)
    session.execute(delete(StandingRow) if run is None else delete(StandingRow).where(StandingRow.run_id == run))
    # read and written in turns, and who reads must not see what is written
    numbers = iter(session.scalars(select(CandidateRow.id).where(*of_run).order_by(CandidateRow.id)).all())
    while batch := list(islice(numbers, BATCH)):
        between = CandidateRow.id.between(batch[0], batch[-1])
        _insert(session, standing_of_each(read_figures(session, *of_run, between)))


def check_standings(session: Session) -> None:
    """Raises Damaged at the first trial whose standing does not follow from its figures."""
    numbers = iter(session.scalars(select(CandidateRow.id).order_by(CandidateRow.id)).all())
    while batch := list(islice(numbers, BATCH)):
        figures = list(standing_of_each(read_figures(session, CandidateRow.id.between(batch[0], batch[-1]))))
        targets = _targets(session, figures)
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


def _insert(session: Session, figures: Iterable[Figure]) -> None:
    held = list(figures)
    targets = _targets(session, held)
    rankings: dict[RankingKey, int] = {}
    rows = []
    for figure in held:
        key = (*targets[figure.trial], *comparable_key(figure))
        if key not in rankings:
            rankings[key] = _ranking(session, key)
        rows.append({
            "candidate_id": figure.trial, "ranking_id": rankings[key], "run_id": figure.run, "figure_id": figure.id,
            "us": figure.us, "is_final": _is_final(figure),
        })  # fmt: skip
    if rows:
        session.execute(insert(StandingRow), rows)


def _targets(session: Session, figures: Sequence[Figure]) -> dict[int, tuple[str, str]]:
    """Trial → problem and GPU."""
    wanted = select(CandidateRow.id, CandidateRow.problem, CandidateRow.gpu)
    found = session.execute(wanted.where(CandidateRow.id.in_([figure.trial for figure in figures])))
    return {trial: (problem, gpu) for trial, problem, gpu in found}


def comparable_key(figure: Figure) -> tuple[str, int, str, str]:
    """Kind, whether by formula, device and policy."""
    return str(figure.kind), int(figure.by_formula), figure.device, policy_key(figure.policy)


def _is_final(figure: Figure) -> int:
    return int("place" in figure.terms)


def _ranking(session: Session, key: RankingKey) -> int:
    named = dict(zip(("problem", "gpu", "kind", "by_formula", "device", "policy"), key, strict=True))
    same = select(RankingRow.id).filter_by(**named)
    known = session.scalar(same)
    if known is not None:
        return known
    insert_new(session, RankingRow, **named)
    return session.scalars(same).one()
