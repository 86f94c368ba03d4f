"""Compare two runs: outcomes of their trials, their best figures, and the configurations tried in both.

Figures are comparable if kind, model, device and policy are the same, and the runs' problems, GPUs and kernels are too.
"""

from __future__ import annotations

import hashlib
import statistics
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from sqlalchemy import select

from evoengine.errors import UsageError
from evoengine.ledger.ranking import ComparisonKey, read_times
from evoengine.ledger.read import Trial, read_numbered, read_trials
from evoengine.ledger.rows import Reading
from evoengine.ledger.store import Ledger
from evoengine.ledger.tables import CandidateRow
from evoengine.records import PENDING, Config, Run, config_key

NEAR = 0.05
"""a time is near the best if it is at most this much longer"""


@dataclass(frozen=True, slots=True)
class Time:
    trial: int
    place: int
    """position of the trial in its run, from 1, in the order of their start"""
    us: float
    tflops: float | None


@dataclass(frozen=True, slots=True)
class Standing:
    """A run's figures with one comparison key."""

    figures: int
    best: Time
    near_own: int
    """number of trials until one was within NEAR of `best`"""
    near_both: int | None
    """number of trials until one was within NEAR of the best of both runs; None if none was, or if the runs are not
    comparable"""


Pair = tuple[Standing | None, Standing | None]
"""of two runs"""


@dataclass(frozen=True, slots=True)
class Shared:
    """A configuration that both runs tried. `ratio` is the first run's time over the second's."""

    config: Config
    trials: tuple[int, int]
    outcomes: tuple[str, str]
    key: ComparisonKey | None
    """of the compared figures: the most trusted that both have; None if they have none in common"""
    us: tuple[float, float] | None
    ratio: float | None


@dataclass(frozen=True, slots=True)
class Comparison:
    runs: tuple[Run, Run]
    comparable: bool
    """whether kernel, problem and GPU are the same"""
    differences: dict[str, tuple[str | None, str | None]]
    """settings that differ, by name"""
    trials: tuple[int, int]
    outcomes: dict[str, tuple[int, int]]
    standings: dict[ComparisonKey, Pair]
    """most trusted first"""
    shared: list[Shared]
    """those whose figures differ most first"""

    @property
    def median_ratio(self) -> float | None:
        ratios = [s.ratio for s in self.shared if s.ratio is not None]
        return statistics.median(ratios) if ratios else None


@dataclass(slots=True)
class _Tried:
    """The figures of a run's trials; a million of them must fit."""

    winner: int | None
    """the trial that `best` would show if the ledger held this run only"""
    trials: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    configs: dict[bytes, tuple[int, str]] = field(default_factory=dict)
    """digest of a configuration → its last trial and that one's outcome"""
    times: dict[ComparisonKey, dict[int, Time]] = field(default_factory=dict)
    """key → trial → its last figure with that key"""


def compare_runs(ledger: Ledger, first: int, second: int) -> Comparison:
    """Return the comparison of two runs.

    Raises UsageError if a run does not exist or both are the same, NothingFound if the ledger holds no run.
    """
    runs = ledger.find_run(first), ledger.find_run(second)
    if first == second:
        raise UsageError(f"run {first} cannot be compared with itself; name two runs")
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
        _shared(ledger.database.reading, tried, comparable),
    )


def _compared_by(run: Run) -> tuple[str, str, str | None]:
    return run.problem, run.gpu, run.kernel


def _differences(first: Run, second: Run) -> dict[str, tuple[str | None, str | None]]:
    settings = _settings(first), _settings(second)
    names = dict.fromkeys((*settings[0], *settings[1]))
    pairs = {name: (settings[0].get(name), settings[1].get(name)) for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _settings(run: Run) -> dict[str, str | None]:
    device, gate = run.device, (run.conditions or {}).get("gate")
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
        "gate version": None if gate is None else str(gate),
        "evoengine": run.version,
        "imported from": run.imported_from,
        **{name: str(version) for name, version in device.versions.items()},
    }


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
        found.configs[_digest(trial)] = trial.trial, outcome
        if trial.outcome and trial.outcome.ranked:
            ranked[trial.trial] = found.trials
    for figure in read_times(reading, list(ranked)):
        time = Time(figure.trial, ranked[figure.trial], figure.us, figure.tflops)
        found.times.setdefault(figure.key, {})[figure.trial] = time
    return found


def _digest(trial: Trial) -> bytes:
    return hashlib.blake2b(config_key(trial.config).encode(errors="surrogatepass"), digest_size=16).digest()


# ── comparison ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _keys(tried: Sequence[_Tried]) -> list[ComparisonKey]:
    return sorted({key for each in tried for key in each.times}, key=lambda key: key.precedence)


def _standings(tried: tuple[_Tried, _Tried], comparable: bool) -> dict[ComparisonKey, Pair]:
    found = {}
    for key in _keys(tried):
        best = [_best(each, key) for each in tried]
        times = [time.us for time in best if time]
        of_both = min(times) if comparable and len(times) == 2 else None
        one, other = (_standing(each, key, time, of_both) for each, time in zip(tried, best, strict=True))
        found[key] = one, other
    return found


def _best(tried: _Tried, key: ComparisonKey) -> Time | None:
    """Return the winner's time if it was ranked by this key, since finals may have chosen it; else the shortest."""
    times = tried.times.get(key)
    if not times:
        return None
    of_winner = (own for own, by_trial in tried.times.items() if tried.winner in by_trial)
    if tried.winner is not None and key == min(of_winner, key=lambda own: own.precedence, default=None):
        return times[tried.winner]
    return min(times.values(), key=lambda t: (t.us, t.trial))


def _standing(tried: _Tried, key: ComparisonKey, best: Time | None, of_both: float | None) -> Standing | None:
    if best is None:
        return None
    times = tried.times[key].values()
    near_own = _first_near(times, best.us)
    near_both = None if of_both is None else _first_near(times, of_both)
    return Standing(len(times), best, near_own or best.place, near_both)


def _first_near(times: Collection[Time], us: float) -> int | None:
    return min((t.place for t in times if t.us <= us * (1 + NEAR)), default=None)


def _shared(reading: Reading, tried: tuple[_Tried, _Tried], comparable: bool) -> list[Shared]:
    first, second = tried
    both = [digest for digest in first.configs if digest in second.configs]
    keys = _keys(tried) if comparable else []
    configs = {t.trial: t.config for t in read_numbered(reading, sorted(first.configs[digest][0] for digest in both))}
    found = []
    for digest in both:
        (a, ended_a), (b, ended_b) = first.configs[digest], second.configs[digest]
        key = next((k for k in keys if a in first.times.get(k, {}) and b in second.times.get(k, {})), None)
        us = None if key is None else (first.times[key][a].us, second.times[key][b].us)
        found.append(Shared(configs[a], (a, b), (ended_a, ended_b), key, us, us and us[0] / us[1]))
    return sorted(found, key=lambda s: (-_difference(s.ratio), s.trials))


def _difference(ratio: float | None) -> float:
    return 0.0 if ratio is None else max(ratio, 1 / ratio)
