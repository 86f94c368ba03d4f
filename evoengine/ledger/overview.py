"""Read what a page shows of a problem, and of two runs beside each other.

A page on a problem has its runs, figures, outcomes, errors of the gate's cases, and which changes of knobs paid. Of two
runs it has how their trials ended, their best figures, and the configurations that both tried: figures are compared
where they are of one kind, model, device and policy, of one problem on one GPU. Of two runs on unlike problems or GPUs
each is shown by itself.
"""

from __future__ import annotations

import hashlib
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from sqlalchemy import Select, func, select
from sqlalchemy.orm import Session, joinedload

from evoengine.errors import NothingFound, UsageError
from evoengine.ledger.ranking import ComparisonKey, Timed, read_times
from evoengine.ledger.rows import from_json_number, numbers_from_json, to_baseline, to_run
from evoengine.ledger.runs import PENDING, Run
from evoengine.ledger.tables import BaselineRow, CandidateRow, MeasurementRow, RunRow, VerdictRow
from evoengine.ledger.trials import BATCH, Reading, Trial, read_trials
from evoengine.lineage import Effect, effects
from evoengine.records import EXECUTOR, Baseline, Candidate, Config, Kind, Outcome, config_key

# ── a page on a problem ───────────────────────────────────────────────────────────────────────────────────────────────


MOST_TRIALS = 20_000
"""that are drawn, the last ones"""
MOST_VERDICTS = 5_000
"""whose cases are read, the last ones"""
MOST_SAMPLES = 500
"""of a finalist, the first ones"""


@dataclass(frozen=True, slots=True)
class CaseErrors:
    """The results of one of the gate's cases, over the last verdict of each candidate."""

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
        problem,
        gpu,
        runs,
        trials,
        total,
        list(read_times(reading, figured)),
        outcomes,
        baselines,
        best,
        lineage,
        read_effects(reading, problem, gpu),
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
        CandidateRow.problem == problem,
        CandidateRow.gpu == gpu,
        CandidateRow.outcome.in_([str(o) for o in Outcome if o.has_figure]),
    )
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


NEAR = 0.05
"""a figure is near the best where it takes at most this much longer"""


@dataclass(frozen=True, slots=True)
class Time:
    trial: int
    place: int
    """which trial of its run it is, counted from 1 in the order in which they were started"""
    us: float
    tflops: float | None


@dataclass(frozen=True, slots=True)
class Standing:
    """A run's figures of one sort."""

    figures: int
    best: Time
    near_own: int
    """after how many trials of the run one was within NEAR of `best`"""
    near_both: int | None
    """after how many one was within NEAR of the better best of both runs; None where none was, or where the runs may
    not be compared"""


Pair = tuple[Standing | None, Standing | None]
"""of two runs"""


@dataclass(frozen=True, slots=True)
class Shared:
    """A configuration that both runs tried. `ratio` is the first run's time over the second's."""

    config: Config
    trials: tuple[int, int]
    outcomes: tuple[str, str]
    sort: ComparisonKey | None
    """of the figures that are compared: the most trusted that both have; None where they have none in common"""
    us: tuple[float, float] | None
    ratio: float | None


@dataclass(frozen=True, slots=True)
class Comparison:
    runs: tuple[Run, Run]
    comparable: bool
    """whether both are of one kernel and problem on one GPU"""
    differences: dict[str, tuple[str | None, str | None]]
    """what of the settings differs, by name"""
    trials: tuple[int, int]
    outcomes: dict[str, tuple[int, int]]
    standings: dict[ComparisonKey, Pair]
    """most trusted first"""
    shared: list[Shared]
    """those with the most unlike figures first"""

    @property
    def median_ratio(self) -> float | None:
        ratios = [s.ratio for s in self.shared if s.ratio is not None]
        return statistics.median(ratios) if ratios else None


@dataclass(slots=True)
class _Tried:
    """The figures of a run's trials; a million of them must fit."""

    winner: int | None
    """the trial that `best` would show of this run alone"""
    trials: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    configs: dict[bytes, tuple[int, str]] = field(default_factory=dict)
    """of a configuration its last trial, and how that ended"""
    times: dict[ComparisonKey, dict[int, Time]] = field(default_factory=dict)
    """trial → its last figure of that sort"""


def read_comparison(reading: Reading, winner: Callable[[Run], int | None], first: int, second: int) -> Comparison:
    """`winner` gives the trial that is best of a run by itself.

    Raises UsageError where there is no such run, or where both are the same; NothingFound where there is no run."""
    with reading() as session:
        runs = _run(session, first), _run(session, second)
    if first == second:
        raise UsageError(f"run {first} is compared with itself; name two runs")
    tried = _tried(reading, runs[0], winner), _tried(reading, runs[1], winner)
    comparable = _compared_by(runs[0]) == _compared_by(runs[1])
    names = sorted(tried[0].outcomes | tried[1].outcomes)
    return Comparison(
        runs,
        comparable,
        _differences(*runs),
        (tried[0].trials, tried[1].trials),
        {name: (tried[0].outcomes[name], tried[1].outcomes[name]) for name in names},
        _standings(tried, comparable),
        _shared(reading, tried, comparable),
    )


def _compared_by(run: Run) -> tuple[str, str, str | None]:
    return run.problem, run.gpu, run.kernel


def _run(session: Session, number: int) -> Run:
    row = session.scalar(select(RunRow).options(joinedload(RunRow.device)).where(RunRow.id == number))
    if row is not None:
        return to_run(row)
    least, most = session.execute(select(func.min(RunRow.id), func.max(RunRow.id))).one()
    if least is None:
        raise NothingFound("the ledger holds no run yet")
    raise UsageError(
        f"there is no run {number}: the ledger's are numbered {least} to {most}; evoengine runs lists them"
    )


def _differences(first: Run, second: Run) -> dict[str, tuple[str | None, str | None]]:
    settings = _settings(first), _settings(second)
    names = dict.fromkeys((*settings[0], *settings[1]))
    pairs = {name: (settings[0].get(name), settings[1].get(name)) for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _settings(run: Run) -> dict[str, str | None]:
    device = run.device
    return {
        "problem": run.problem,
        "GPU": run.gpu,
        "device": device.name,
        "device UUID": device.uuid,
        "driver": device.driver,
        "sampler": run.sampler,
        "objectives": run.objectives,
        "seed": str(run.seed),
        "space": run.space_name,
        "space SHA-256": run.space_sha256,
        "kernel SHA-256": run.kernel,
        "gate version": _text((run.conditions or {}).get("gate")),
        "evoengine": run.version,
        "imported from": run.imported_from,
        **{name: str(version) for name, version in device.versions.items()},
    }


def _text(value: object) -> str | None:
    return None if value is None else str(value)


# ── trials ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _tried(reading: Reading, run: Run, winner: Callable[[Run], int | None]) -> _Tried:
    found = _Tried(winner=winner(run))
    of_run = select(CandidateRow.id).where(CandidateRow.run_id == run.id)
    ranked: dict[int, int] = {}
    for trial in read_trials(reading, of_run, resources=False):
        found.trials += 1
        outcome = str(trial.outcome or PENDING)
        found.outcomes[outcome] += 1
        found.configs[_key(trial)] = trial.trial, outcome
        if trial.outcome and trial.outcome.ranked:
            ranked[trial.trial] = found.trials
    for figure in read_times(reading, list(ranked)):
        time = Time(figure.trial, ranked[figure.trial], figure.us, figure.tflops)
        found.times.setdefault(figure.key, {})[figure.trial] = time
    return found


def _key(trial: Trial) -> bytes:
    return hashlib.blake2b(config_key(trial.config).encode(errors="surrogatepass"), digest_size=16).digest()


# ── beside each other ───────────────────────────────────────────────────────────────────────────────────────────────


def _sorts(tried: Sequence[_Tried]) -> list[ComparisonKey]:
    return sorted({sort for each in tried for sort in each.times}, key=lambda sort: sort.precedence)


def _standings(tried: tuple[_Tried, _Tried], comparable: bool) -> dict[ComparisonKey, Pair]:
    found = {}
    for sort in _sorts(tried):
        best = [_best(each, sort) for each in tried]
        times = [time.us for time in best if time]
        of_both = min(times) if comparable and len(times) == 2 else None
        one, other = (_standing(each, sort, time, of_both) for each, time in zip(tried, best, strict=True))
        found[sort] = one, other
    return found


def _best(tried: _Tried, sort: ComparisonKey) -> Time | None:
    """Return the time by which the run's winner won, since finals may have chosen it; of other trials the shortest."""
    times = tried.times.get(sort)
    if not times:
        return None
    won_by = min(
        (s for s, of_sort in tried.times.items() if tried.winner in of_sort),
        key=lambda sort: sort.precedence,
        default=None,
    )
    if tried.winner is not None and sort == won_by:
        return times[tried.winner]
    return min(times.values(), key=lambda t: (t.us, t.trial))


def _standing(tried: _Tried, sort: ComparisonKey, best: Time | None, of_both: float | None) -> Standing | None:
    if best is None:
        return None
    times = tried.times[sort].values()
    near_own = _first_near(times, best.us)
    near_both = None if of_both is None else _first_near(times, of_both)
    return Standing(len(times), best, near_own or best.place, near_both)


def _first_near(times: Collection[Time], us: float) -> int | None:
    return min((t.place for t in times if t.us <= us * (1 + NEAR)), default=None)


def _shared(reading: Reading, tried: tuple[_Tried, _Tried], comparable: bool) -> list[Shared]:
    first, second = tried
    both = [key for key in first.configs if key in second.configs]
    sorts = _sorts(tried) if comparable else []
    configs = _configs(reading, [first.configs[key][0] for key in both])
    found = []
    for key in both:
        (a, ended_a), (b, ended_b) = first.configs[key], second.configs[key]
        sort = next((s for s in sorts if a in first.times.get(s, {}) and b in second.times.get(s, {})), None)
        us = None if sort is None else (first.times[sort][a].us, second.times[sort][b].us)
        found.append(Shared(configs[a], (a, b), (ended_a, ended_b), sort, us, us and us[0] / us[1]))
    return sorted(found, key=lambda s: (-_unlikeness(s.ratio), s.trials))


def _unlikeness(ratio: float | None) -> float:
    return 0.0 if ratio is None else max(ratio, 1 / ratio)


def _configs(reading: Reading, trials: Sequence[int]) -> dict[int, Config]:
    configs: dict[int, Config] = {}
    for start in range(0, len(trials), BATCH):
        of_batch = CandidateRow.id.in_(trials[start : start + BATCH])
        batch = read_trials(reading, select(CandidateRow.id).where(of_batch), resources=False)
        configs |= {t.trial: t.config for t in batch}
    return configs
