"""Expected times of configurations before any trial, by source, and how far the trials confirm each source.

A source gives times: another GPU or another problem that the same kernel was measured on, or a model's predictions. The
surrogate models what is left of the trials' scores after a line through the sources: score = intercept + Σ slope ·
(- log µs). Intercept and slopes have normal priors, about 0 and about what a correct source would give; the deviation
of what is left has an inverse gamma prior on its square. All are integrated out in closed form (Rasmussen & Williams,
Gaussian Processes for Machine Learning (2006), 2.7; Student's t of their evidence: Bishop, Pattern Recognition and
Machine Learning (2006), 3.5). The same evidence without the line, with one source and with all decides which sources
are believed, decided again with each trial.

What matters is the order among the best. A source may rank the whole space correctly and its best configurations
wrongly, so that all the trials together would confirm it: a trial that neither is nor was said to be among the best
therefore counts for less.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, zip_longest
from typing import Protocol

import numpy as np
from scipy.linalg import cho_factor, cho_solve
from scipy.special import expit, gammaln

from evoengine.records import Config, Value
from evoengine.space.definition import Knob

# The pool of candidates of an evolutionary search.

ENUMERABLE = 20_000
"""largest number of valid configurations at which the pool is the whole space"""
N_RANDOM, N_CROSSED = 1024, 256
"""random points and crossovers in the pool of a larger space, in addition to the neighbours of the elites"""
N_DRAWS = 64
"""random points drawn of a larger space to find a new one"""


class Space(Protocol):
    """The part of a search space that a sampler uses; `SearchSpace` and `RecordedSpace` have it."""

    @property
    def knobs(self) -> tuple[Knob, ...]: ...
    def __len__(self) -> int: ...
    def contains(self, config: Config) -> bool: ...
    def sample(self, rng: np.random.Generator, n: int = 1) -> list[dict[str, Value]]: ...
    def enumerate(self) -> Iterator[dict[str, Value]]: ...
    def neighbours(self, config: Config) -> list[dict[str, Value]]: ...
    def encode(self, config: Config) -> np.ndarray: ...
    def decode(self, row: Sequence[int] | np.ndarray) -> dict[str, Value]: ...


class StartedSpace(Space, Protocol):
    """The part that a search uses in addition: start points, and which knobs are active."""

    def first_points(self, rng: np.random.Generator) -> list[tuple[Config, str]]: ...
    def is_active(self, knob: Knob, config: Config) -> bool: ...


class Pool:
    """Encoded valid configurations, int16 [n, knobs]: the whole space if it is small, else offspring of the best."""

    def __init__(self, space: Space, rng: np.random.Generator, tried: Container[bytes]) -> None:
        """Create a pool; none of the `tried` rows, as bytes, is proposed."""
        self._space, self._rng, self._tried = space, rng, tried
        self.whole = len(space) <= ENUMERABLE
        self._neighbours: dict[bytes, np.ndarray] = {}
        """of the best rows at the last breeding [n, knobs]"""
        self._set_rows(self._encoded(space.enumerate() if self.whole else ()))

    def close(self, row: np.ndarray) -> None:
        """Exclude a row that is tried now from proposals."""
        if (position := self._position.get(row.tobytes())) is not None:
            self.available[position] = False

    def draw(self) -> np.ndarray | None:
        """Return a random open valid row; None if none is found, which means that a space held whole is exhausted."""
        if self.whole:
            left = np.flatnonzero(self.available)
            return self.rows[self._rng.choice(left)] if len(left) else None
        rows = self._encoded(self._space.sample(self._rng, N_DRAWS))
        return next((row for row in rows if row.tobytes() not in self._tried), None)

    def breed(self, elites: np.ndarray, expected: Iterable[np.ndarray] = ()) -> None:
        """Renew a pool that does not hold the whole space from the best rows so far [n, knobs].

        `expected` are rows [knobs] that a prior expects to be fast; the pool includes them.
        """
        if self.whole:
            return
        random = self._encoded(self._space.sample(self._rng, N_RANDOM))
        self._neighbours = {elite.tobytes(): self._neighbours_of(elite) for elite in elites}
        near = self._neighbours.values()
        self._set_rows(np.unique(np.vstack([random, *expected, *near, *self._crossed(elites)]), axis=0))

    def _set_rows(self, rows: np.ndarray) -> None:
        self.rows = rows
        self._position = {row.tobytes(): i for i, row in enumerate(rows)}
        self.available = np.array([key not in self._tried for key in self._position], bool)

    def _neighbours_of(self, elite: np.ndarray) -> np.ndarray:
        known = self._neighbours.get(elite.tobytes())
        return self._encoded(self._space.neighbours(self._space.decode(elite))) if known is None else known

    def _crossed(self, elites: np.ndarray) -> list[np.ndarray]:
        """Return rows with each knob from one of two parents. Conditional knobs may make a row invalid."""
        if len(elites) < 2:
            return []
        parents = np.array([self._rng.choice(len(elites), 2, replace=False) for _ in range(N_CROSSED)])
        first = self._rng.random((N_CROSSED, elites.shape[1])) < 0.5
        children = np.unique(np.where(first, elites[parents[:, 0]], elites[parents[:, 1]]), axis=0)
        return [child for child in children if self._space.contains(self._space.decode(child))]

    def _encoded(self, configs: Iterable[Config]) -> np.ndarray:
        rows = [self._space.encode(config) for config in configs]
        return np.array(rows, np.int16).reshape(-1, len(self._space.knobs))


MIN_MEASURED = 8
"""number of configurations measured elsewhere from which on these figures are a source"""
RESIDUAL_DEVIATION = 0.45
"""expected deviation of the residual, relative to that of the source over the pool: a correlation of 0.9"""
DEGREES_OF_FREEDOM = 4.0
"""weight of the expected deviation, in trials"""
LINE_VARIANCES = (6.0, 1.5)
"""variances of intercept and slopes in units of the residual's variance"""
LOCAL = 0.4
"""deviation of the noise added to a trial, per score that it is below the best and was said to be"""
MODEL = "the model"
"""the source of predictions"""


class Prior:
    """Expected times of configurations of one space, by source; a row is int16 [knobs] as the space encodes it."""

    def __init__(self, space: Space) -> None:
        self._space = space
        self._sources: dict[str, dict[bytes, float]] = {}

    def predict(self, config: Config, us: float) -> None:
        """Add a model's prediction in microseconds."""
        self._add(MODEL, config, us)

    def measure(self, config: Config, us: float, source: str = "another GPU") -> None:
        """Add a time in microseconds that was measured elsewhere. The first sources are the nearest ones."""
        self._add(source, config, us)

    def _add(self, source: str, config: Config, us: float) -> None:
        self._sources.setdefault(source, {})[self._space.encode(config).tobytes()] = np.log(us)

    @property
    def sources(self) -> tuple[str, ...]:
        """Return the sources that know enough, measured ones first, the nearest of them first."""
        measured = (s for s, table in self._sources.items() if s != MODEL and len(table) >= MIN_MEASURED)
        return (*measured, *([MODEL] if MODEL in self._sources else []))

    @property
    def sizes(self) -> tuple[int, ...]:
        """Return how many configurations each of the sources knows."""
        return tuple(len(self._sources[source]) for source in self.sources)

    def knowing(self, row: np.ndarray) -> tuple[str, ...]:
        """Return the sources that know a row [knobs]."""
        return tuple(source for source in self.sources if row.tobytes() in self._sources[source])

    def __len__(self) -> int:
        return len(set().union(*(self._sources[s] for s in self.sources)))

    def __contains__(self, config: Config) -> bool:
        return any(self._space.encode(config).tobytes() in self._sources[s] for s in self.sources)

    def log_us(self, rows: np.ndarray) -> np.ndarray:
        """Return the natural logarithm of the time in microseconds by source and row [sources, n], NaN if unknown."""
        keys = [row.tobytes() for row in rows]
        found = [[self._sources[source].get(key, np.nan) for key in keys] for source in self.sources]
        return np.array(found, float).reshape(len(found), len(keys))

    def fastest(self, n: int) -> np.ndarray:
        """Return at most n rows with the least expected times, int16 [n, knobs]: of each source in turn the next."""
        tables = [self._sources[source] for source in self.sources]
        ranked = [heapq.nsmallest(n, table, table.__getitem__) for table in tables]
        keys = dict.fromkeys(key for of_turn in zip_longest(*ranked) for key in of_turn if key is not None)
        rows = [np.frombuffer(key, np.int16) for key in islice(keys, n)]
        return np.array(rows, np.int16).reshape(-1, len(self._space.knobs))


CREDIT, MEMORY, FAILURE = 2.0, 0.9, 0.2
"""logarithm of the odds at which the prior is followed at first; the share of evidence that a further forecast leaves;
what a proposal that followed the prior takes from the odds until a new best is found"""
FAILURES, FAILURE_SHARE = 4, 1 / 20
"""proposals that followed the prior since one of them was a new best, from which on it is not followed, whatever the
forecasts say: they may be right of all but the best; of a model in addition a share of all trials, since it errs
everywhere, where a board that is right of the best shows it at once"""
LIMIT = 3.0
"""largest evidence of one forecast, either way"""
FORECAST_NOISE = 0.1
"""variance of a score from forecast to result"""


class Trust:
    """How far the surrogate's forecasts with the prior are better than those without, where proposals are made.

    The trials together may confirm a prior that is wrong where it matters, among the best. So each proposal is
    forecast both ways, and the results show which way was right.
    """

    def __init__(self) -> None:
        self._forecasts: dict[int, Sequence[tuple[float, float]]] = {}
        self._followed: list[int] = []
        self._evidence = 0.0
        self._success = -1
        """place of the last new best that followed the prior"""

    def forecast(self, place: int, forecasts: Sequence[tuple[float, float]], followed: bool) -> None:
        """Keep mean and deviation of a trial's score, with the prior and without it."""
        self._forecasts[place] = forecasts
        if followed:
            self._followed.append(place)

    def learn(self, places: Sequence[int], scores: np.ndarray) -> None:
        """Compare the forecasts of trials that have ended with their scores [n]; NaN where they have not."""
        for place, score in zip(places, scores.tolist(), strict=True):
            if place in self._forecasts and score == score:
                led, plain = (_log_density(score, *of) for of in self._forecasts.pop(place))
                self._evidence = MEMORY * self._evidence + float(np.clip(led - plain, -LIMIT, LIMIT))

    def likelihood(self, best: int, trials: int, measured: bool) -> float:
        """Return how likely a proposal is to follow the prior.

        `best` is the place of the best of so many trials; `measured` says whether a source other than a model is
        believed.
        """
        at = bisect_left(self._followed, best)
        if at < len(self._followed) and self._followed[at] == best:
            self._success = best
        failures = len(self._followed) - bisect_right(self._followed, self._success)
        if failures >= FAILURES + (0 if measured else FAILURE_SHARE * trials):
            return 0.0
        return float(expit(CREDIT + self._evidence - FAILURE * failures))


def _log_density(score: float, mean: float, deviation: float) -> float:
    variance = deviation**2 + FORECAST_NOISE
    return -0.5 * ((score - mean) ** 2 / variance + float(np.log(variance)))


@dataclass(frozen=True, slots=True)
class Mean:
    """The surrogate's prior mean: scores of the tried rows [n] and of the pool [m]; `deviation` of the residual.

    `believed` are the places of the sources that it follows.
    """

    tried: np.ndarray
    pool: np.ndarray
    deviation: float
    believed: tuple[int, ...] = (0,)


def fit_mean(
    scores: np.ndarray, logs: np.ndarray, tried: np.ndarray, pool: np.ndarray, covariance: np.ndarray
) -> Mean | None:
    """Return the mean that the tried rows support most, or None if they contradict every source.

    scores: [n] of the tried rows, NaN for those in progress; logs: [n] logarithms that the scores grow with, NaN if
    there are none; tried [sources, n] and pool [sources, m]: log µs, NaN if unknown; covariance [n, n] of the tried
    rows by the surrogate.
    """
    telling = [s for s, of in enumerate(pool) if not np.isnan(of).all() and np.nanstd(of)]
    fit = ~np.isnan(logs) & ~np.isnan(tried[telling]).all(0)
    unit = _unit(scores[fit], logs[fit])
    if not telling or unit is None:
        return None
    usual = {s: float(np.nanmedian(pool[s])) for s in telling}
    of_tried, of_pool = (
        {s: -unit * (np.where(np.isnan(of[s]), usual[s], of[s]) - usual[s]) for s in telling} for of in (tried, pool)
    )
    spread = {s: unit * float(np.nanstd(pool[s])) for s in telling}
    of, within = scores[fit], covariance[np.ix_(fit, fit)]
    said = np.max([of_tried[s][fit] - of_tried[s][fit].max() for s in telling], axis=0)
    within = within + np.diag(np.square(LOCAL * np.minimum(of.max() - of, -said)))
    flat = _fit_line(of, np.ones((len(of), 1)), np.zeros(1), within, max(spread.values()))
    best, centres = flat, np.zeros(0)
    chosen: tuple[int, ...] = ()
    for some in dict.fromkeys([*((s,) for s in telling), tuple(telling)]):
        columns = np.array([of_tried[s][fit] for s in some])
        middle = columns.mean(1)
        basis = np.column_stack([np.ones(len(of)), columns.T - middle])
        expected = np.array([0.0, *[1.0 / len(some)] * len(some)])
        scale = RESIDUAL_DEVIATION * float(np.mean([spread[s] for s in some]))
        line = _fit_line(of, basis, expected, within, scale)
        if line.evidence >= best.evidence and (line.coefficients[1:] > 0).all():
            best, chosen, centres = line, some, middle
    if not chosen:
        return None
    slopes = best.coefficients[1:]
    means = [
        best.coefficients[0] + slopes @ (np.array([of[s] for s in chosen]) - centres[:, None])
        for of in (of_tried, of_pool)
    ]
    return Mean(means[0], means[1], best.deviation, chosen)


def _unit(scores: np.ndarray, logs: np.ndarray) -> float | None:
    """Return scores per unit of the logarithms; None if too few are known."""
    if len(logs) < 2 or not logs.std():
        return None
    return float(scores.std() / logs.std()) or None


@dataclass(frozen=True, slots=True)
class _Line:
    evidence: float
    """logarithm of the marginal likelihood"""
    coefficients: np.ndarray
    deviation: float


def _fit_line(of: np.ndarray, basis: np.ndarray, expected: np.ndarray, covariance: np.ndarray, scale: float) -> _Line:
    """Fit of [n] = basis [n, k] · coefficients + a Gaussian process.

    Its covariance is `covariance` times a square that is near scale².
    """
    n, sources = len(of), basis.shape[1] - 1
    widths = np.diag([LINE_VARIANCES[0], *[LINE_VARIANCES[1]] * sources])
    factor = cho_factor(covariance + basis @ widths @ basis.T, lower=True)
    left = of - basis @ expected
    solved = cho_solve(factor, left)
    misfit, before = float(left @ solved), DEGREES_OF_FREEDOM * scale**2
    evidence = (
        gammaln((DEGREES_OF_FREEDOM + n) / 2)
        - gammaln(DEGREES_OF_FREEDOM / 2)
        - n / 2 * np.log(np.pi * before)
        - np.log(np.diag(factor[0])).sum()
        - (DEGREES_OF_FREEDOM + n) / 2 * np.log1p(misfit / before)
    )
    deviation = float(np.sqrt((before + misfit) / (DEGREES_OF_FREEDOM + n)))
    return _Line(float(evidence), expected + widths @ basis.T @ solved, deviation)
