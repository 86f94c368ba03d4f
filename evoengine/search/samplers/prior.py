"""Expected times of configurations before any trial, and how far the trials confirm them.

A prior gives times: a model's predictions, or figures measured on another GPU. The surrogate then models what is left
of the trials' scores after a line through them: score = intercept + slope · (- log µs). Intercept and slope have normal
priors, about 0 and about what a correct prediction would give; the deviation of what is left has an inverse gamma prior
on its square. All three are integrated out in closed form (Rasmussen & Williams, Gaussian Processes for Machine
Learning (2006), 2.7; Student's t of their evidence: Bishop, Pattern Recognition and Machine Learning (2006), 3.5). The
same evidence without the line shows whether the prior is wrong on this space: then it is dropped.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from scipy.linalg import cho_factor, cho_solve
from scipy.special import gammaln

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

    def __init__(self, space: Space, rng: np.random.Generator) -> None:
        self._space, self._rng = space, rng
        self.whole = len(space) <= ENUMERABLE
        self._excluded: set[bytes] = set()
        self._neighbours: dict[bytes, list[np.ndarray]] = {}
        self._set_rows(self._encoded(space.enumerate() if self.whole else ()))

    def exclude(self, row: np.ndarray) -> None:
        """Exclude a row from proposals."""
        self._excluded.add(row.tobytes())
        if (position := self._position.get(row.tobytes())) is not None:
            self.available[position] = False

    def draw(self) -> np.ndarray | None:
        """Return a random open valid row; None if none is found, which means that a space held whole is exhausted."""
        if self.whole:
            left = np.flatnonzero(self.available)
            return self.rows[self._rng.choice(left)] if len(left) else None
        rows = self._encoded(self._space.sample(self._rng, N_DRAWS))
        return next((row for row in rows if row.tobytes() not in self._excluded), None)

    def breed(self, elites: np.ndarray, expected: Iterable[np.ndarray] = ()) -> None:
        """Renew a pool that does not hold the whole space from the best rows so far [n, knobs].

        `expected` are rows [knobs] that a prior expects to be fast; the pool includes them.
        """
        if self.whole:
            return
        random = self._encoded(self._space.sample(self._rng, N_RANDOM))
        near = [row for elite in elites for row in self._neighbours_of(elite)]
        self._set_rows(np.unique(np.vstack([random, *expected, *near, *self._crossed(elites)]), axis=0))

    def _set_rows(self, rows: np.ndarray) -> None:
        self.rows = rows
        self._position = {row.tobytes(): i for i, row in enumerate(rows)}
        self.available = np.array([key not in self._excluded for key in self._position], bool)

    def _neighbours_of(self, elite: np.ndarray) -> list[np.ndarray]:
        key = elite.tobytes()
        if key not in self._neighbours:
            found = self._space.neighbours(self._space.decode(elite))
            self._neighbours[key] = [self._space.encode(config) for config in found]
        return self._neighbours[key]

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
"""number of configurations measured on another GPU from which on these figures replace the predictions"""
MIN_CORRELATION = 0.5
"""correlation of the logarithms of predictions and figures of another GPU, below which only the latter count"""
RESIDUAL_DEVIATION = 0.45
"""expected deviation of the residual, relative to that of the prior over the pool: a correlation of 0.9"""
DEGREES_OF_FREEDOM = 4.0
"""weight of the expected deviation, in trials"""
LINE_VARIANCES = (6.0, 1.5)
"""variances of intercept and slope in units of the residual's variance"""


class Prior:
    """Expected times of configurations of one space; a row is int16 [knobs] as the space encodes it."""

    def __init__(self, space: Space) -> None:
        self._space = space
        self._predicted: dict[bytes, float] = {}
        self._measured: dict[bytes, float] = {}

    def predict(self, config: Config, us: float) -> None:
        """Add a model's prediction in microseconds."""
        self._predicted[self._space.encode(config).tobytes()] = np.log(us)

    def measure(self, config: Config, us: float) -> None:
        """Add a time in microseconds that another GPU took."""
        self._measured[self._space.encode(config).tobytes()] = np.log(us)

    def __len__(self) -> int:
        return len(self._table())

    def __contains__(self, config: Config) -> bool:
        return self._space.encode(config).tobytes() in self._table()

    def log_us(self, rows: np.ndarray) -> np.ndarray:
        """Return for each row [n] the natural logarithm of its expected time in microseconds, NaN if unknown.

        Figures of another GPU take precedence over predictions. Predictions are shifted to agree with them in the
        median, and ignored if they disagree.
        """
        table = self._table()
        return np.array([table.get(row.tobytes(), np.nan) for row in rows], float)

    def fastest(self, n: int) -> np.ndarray:
        """Return at most n rows with the least expected time, fastest first, int16 [n, knobs]."""
        table = self._table()
        rows = [np.frombuffer(key, np.int16) for key in heapq.nsmallest(n, table, table.__getitem__)]
        return np.array(rows, np.int16).reshape(-1, len(self._space.knobs))

    def _table(self) -> Mapping[bytes, float]:
        if len(self._measured) < MIN_MEASURED:
            return self._predicted
        both = sorted(self._measured.keys() & self._predicted.keys())
        measured, predicted = (np.array([of[key] for key in both]) for of in (self._measured, self._predicted))
        if not len(both) or (len(both) >= MIN_MEASURED and not _correlation(measured, predicted) >= MIN_CORRELATION):
            return self._measured
        shift = float(np.median(measured - predicted))
        return {key: log + shift for key, log in self._predicted.items()} | self._measured


def _correlation(one: np.ndarray, other: np.ndarray) -> float:
    """Return the correlation, 0 if one of the arrays is constant."""
    return float(np.corrcoef(one, other)[0, 1]) if one.std() and other.std() else 0.0


@dataclass(frozen=True, slots=True)
class Mean:
    """The surrogate's prior mean: scores of the tried rows [n] and of the pool [m]; `deviation` of the residual."""

    tried: np.ndarray
    pool: np.ndarray
    deviation: float


def fit_mean(
    scores: np.ndarray, logs: np.ndarray, tried: np.ndarray, pool: np.ndarray, covariance: np.ndarray
) -> Mean | None:
    """Return the mean that the tried rows support, or None if they contradict the prior.

    scores: [n] of the tried rows, NaN for those in progress; logs: [n] logarithms that the scores grow with, NaN if
    there are none; tried [n] and pool [m]: log µs, NaN if unknown; covariance [n, n] of the tried rows by the
    surrogate.
    """
    if np.isnan(pool).all():
        return None
    usual, spread = float(np.nanmedian(pool)), float(np.nanstd(pool))
    fit = ~np.isnan(logs) & ~np.isnan(tried)
    unit = _unit(scores[fit], logs[fit])
    if not spread or unit is None:
        return None
    of_tried, of_pool = (-unit * (np.where(np.isnan(of), usual, of) - usual) for of in (tried, pool))
    centre = of_tried[fit].mean()
    basis = np.column_stack([np.ones(fit.sum()), of_tried[fit] - centre])
    within, of = covariance[np.ix_(fit, fit)], scores[fit]
    line = _fit_line(of, basis, np.array([0.0, 1.0]), within, RESIDUAL_DEVIATION * unit * spread)
    flat = _fit_line(of, basis[:, :1], np.zeros(1), within, unit * spread)
    if line.evidence < flat.evidence or line.coefficients[1] <= 0:
        return None
    intercept, slope = line.coefficients
    return Mean(intercept + slope * (of_tried - centre), intercept + slope * (of_pool - centre), line.deviation)


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
    n, widths = len(of), np.diag(LINE_VARIANCES[: basis.shape[1]])
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
