"""Read the data of a report: runs, figures, outcomes, errors of the gate, and the effects of knob changes."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import Select, func, select
from sqlalchemy.orm import Session, joinedload

from evoengine.ledger.ranking import Timed, read_times
from evoengine.ledger.read import Trial, read_trials
from evoengine.ledger.rows import batches, to_baseline, to_run
from evoengine.ledger.store import Ledger
from evoengine.ledger.tables import BaselineRow, CandidateRow, MeasurementRow, RunRow, VerdictRow
from evoengine.lineage import Effect, effects
from evoengine.records import EXECUTOR, PENDING, Baseline, Candidate, Kind, Outcome, Run

MOST_TRIALS = 20_000
"""number of the last trials that are drawn"""
MOST_VERDICTS = 5_000
"""number of the last verdicts whose cases are read"""
MOST_SAMPLES = 500
"""number of a finalist's first samples that are drawn"""


@dataclass(frozen=True, slots=True)
class CaseErrors:
    """The results of one of the gate's cases, over the last verdict of each candidate."""

    shares: Sequence[float]
    """the largest error over the allowed one, for verdicts with both"""
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
    """oldest first"""
    trials: list[Trial]
    """the last of them, in their order"""
    total: int
    times: list[Timed]
    """every figure of `trials` that can be trusted, whether the gate was finished or not"""
    outcomes: Mapping[tuple[str, str], int]
    """family and outcome → number of all trials"""
    baselines: list[Baseline]
    """the last of each name, device and policy"""
    best: Candidate | None
    lineage: Mapping[int, Trial]
    """number → the best trial and its ancestors"""
    effects: Effects
    cases: Mapping[str, CaseErrors]
    finalists: list[Finalist]
    """of the last finals held here, by their places"""


def read_overview(ledger: Ledger, problem: str, gpu: str) -> Overview:
    """Return what a page on a problem and a GPU shows."""
    best = next(iter(ledger.best(problem, gpu, 1)), None)
    reading = ledger.database.reading
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
        problem,
        gpu,
        runs,
        trials,
        total,
        list(read_times(reading, figured)),
        outcomes,
        baselines,
        best,
        ledger.ancestors(best.trial) if best else {},
        read_effects(ledger, problem, gpu),
        cases,
        finalists,
    )


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
    found = [to_baseline(row) for row in session.scalars(of_target)]
    return list({(b.name, b.device, b.policy): b for b in found if isinstance(b, Baseline)}.values())


def _finalists(session: Session, own: Select[int]) -> list[Finalist]:
    """Return the finalists of the last finals held for these trials."""
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
        Finalist(row.candidate_id, int(row.terms["place"]), tuple(map(float, row.samples_us[:MOST_SAMPLES])))
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
    """Return an error over what is allowed; None if either is not a number."""
    largest, bound = (None if value is None else float(value) for value in (error, allowed))
    if largest is None or not bound or not math.isfinite(largest) or not math.isfinite(bound):
        return None
    return largest / bound


# ── effects of knob changes ───────────────────────────────────────────────────────────────────────────────────────────


MOST_EFFECTS = 25_000
"""number of the last trials of which effects are computed: about 2 KB of memory and 40 µs each"""


@dataclass(frozen=True, slots=True)
class Effects:
    effects: list[Effect]
    trials: int
    """number of the last ranked trials from which they were computed"""
    ranked: int
    """number of all ranked trials"""

    def __str__(self) -> str:
        some = f"the last {self.trials:,} of " if self.trials < self.ranked else ""
        return f"from {some}{self.ranked:,} ranked trials"


def read_effects(ledger: Ledger, problem: str, gpu: str, most: int = MOST_EFFECTS) -> Effects:
    """Return the effects of the last `most` trials with a figure; their parents may be earlier ones."""
    ranked = select(CandidateRow.id).where(
        CandidateRow.problem == problem,
        CandidateRow.gpu == gpu,
        CandidateRow.outcome.in_([str(o) for o in Outcome if o.has_figure]),
    )
    reading = ledger.database.reading
    with reading() as session:
        total = session.scalars(select(func.count()).select_from(ranked.subquery())).one()
        skipped = ranked.order_by(CandidateRow.id.desc()).offset(most - 1).limit(1)
        first = session.scalar(skipped) if total > most else None
    last = ranked if first is None else ranked.where(CandidateRow.id >= first)
    children = list(read_trials(reading, last, resources=False))
    earlier = sorted({p for t in children for p in t.parents if first is not None and p < first})
    parents = [
        parent
        for some in batches(earlier)
        for parent in read_trials(reading, ranked.where(CandidateRow.id.in_(some)), resources=False)
    ]
    return Effects(effects(children, parents), len(children), total)
