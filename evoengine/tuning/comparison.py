"""Compare two runs: how their trials ended, their best figures, and the configurations that both tried.

Figures are compared where they are of one kind, model, device and policy, of one problem on one GPU. Of two runs on
unlike problems or GPUs each is shown by itself.
"""

from __future__ import annotations

import hashlib
import statistics
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from sqlalchemy import func, select
from sqlalchemy.orm import Session, joinedload

from evoengine.errors import NothingFound, UsageError
from evoengine.ledger.ranking import ComparisonKey, read_times
from evoengine.ledger.read import Trial, read_numbered, read_trials
from evoengine.ledger.rows import Reading, to_run
from evoengine.ledger.store import Ledger
from evoengine.ledger.tables import CandidateRow, RunRow
from evoengine.records import PENDING, Config, Run, config_key

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


def compare_runs(ledger: Ledger, first: int, second: int) -> Comparison:
    """Return two runs beside each other.

    Raises UsageError where there is no such run, or where both are the same; NothingFound where there is no run.
    """
    reading = ledger.database.reading
    with reading() as session:
        runs = _run(session, first), _run(session, second)
    if first == second:
        raise UsageError(f"run {first} is compared with itself; name two runs")
    tried = _tried(ledger, runs[0]), _tried(ledger, runs[1])
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


def _tried(ledger: Ledger, run: Run) -> _Tried:
    reading = ledger.database.reading
    found = _Tried(winner=next((c.trial for c in ledger.best(run.problem, run.gpu, 1, run=run.id)), None))
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
    tried_first = sorted(first.configs[key][0] for key in both)
    configs = {t.trial: t.config for t in read_numbered(reading, tried_first)}
    found = []
    for key in both:
        (a, ended_a), (b, ended_b) = first.configs[key], second.configs[key]
        sort = next((s for s in sorts if a in first.times.get(s, {}) and b in second.times.get(s, {})), None)
        us = None if sort is None else (first.times[sort][a].us, second.times[sort][b].us)
        found.append(Shared(configs[a], (a, b), (ended_a, ended_b), sort, us, us and us[0] / us[1]))
    return sorted(found, key=lambda s: (-_unlikeness(s.ratio), s.trials))


def _unlikeness(ratio: float | None) -> float:
    return 0.0 if ratio is None else max(ratio, 1 / ratio)
