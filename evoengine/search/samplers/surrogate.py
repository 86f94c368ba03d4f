"""A Gaussian process over encoded configurations, which predicts the scores of a pool from those tried.

The kernel is a product over knobs of Matérn 3/2 in the distance of two positions in the knob's domain, times a penalty
for any difference at all (Hamming), which lets neighbours differ where a landscape is jagged. Unordered knobs, and
inactive ones against active, are one step from each other. The algebra is that of Rasmussen & Williams, Gaussian
Processes for Machine Learning (2006), chapters 2 and 4.

With `derived` two kinds of values that are computed from ordered knobs count like further knobs: the products of pairs,
and whether a value is a power of two. What a kernel's speed depends on are often products, as threads are of a block's
sides, and two configurations may differ in two knobs and have the same one. Sizes of problems are mostly multiples of
powers of two, so a tile of another size leaves a remainder, for which a compiler makes other code.

Length scales, penalty and noise have normal priors on their logarithms, narrow ones: what a search has tried is little
and no fair sample, and what it seems to say of them misleads. Only a knob of many values may have a length much unlike
the others', for it alone can vary within its domain. All are drawn by elliptical slice sampling (Murray, Adams & MacKay
2010): a draw from the posterior costs less than its maximum, explores with it, and needs no gradient. What the tried
rows say of the pool is kept as a triangular solve, to which a trial adds one row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from scipy.linalg import solve_triangular

from evoengine.space.definition import Knob

FIRST_DRAWS, DRAWS = 15, 5
"""slice-sampling steps at the first fit and at every later one"""
LENGTH, HAMMING, NOISE = (0.6, 0.4), (-2.0, 0.4), (-4.0, 1.5)
"""mean and deviation of the priors on natural logarithms: lengths, of a knob with two values, in domains; noise for
targets of variance 1"""
JITTER = 1e-5
ROW_GROWTH = 64
"""rows by which the memory of the solve grows"""
MAX_POSITIONS = 512
"""of a knob; values of a larger one share positions, since a table of all pairs would not fit into memory"""
MAX_PRODUCTS, PRODUCT_POSITIONS = 6, 32
"""pairs of knobs whose product counts, those with most values first, and the number of positions of each product"""
MIN_FACTOR_VALUES = 3
"""of a knob that is a factor"""
MIN_POWERS = 2
"""values of a knob that are powers of two, for it to count which are"""
DERIVED_WIDTH = 2.0
"""how much wider the prior on the length scale of a derived value is than that of a knob with two values"""


class Surrogate:
    """Rows are int16 [n, knobs], positions in the knobs' domains, -1 where inactive."""

    def __init__(self, knobs: Sequence[Knob], rng: np.random.Generator, derived: bool = False) -> None:
        self._rng = rng
        self.derived = tuple(find_derived(knobs)) if derived else ()
        self._columns = [k for k, knob in enumerate(knobs) if len(knob.values) > 1 or knob.when]
        self._values = [len(knobs[k].values) for k in self._columns]
        self._distances = [_distances(knobs[k]) for k in self._columns] + [of.distances for of in self.derived]
        self._starts = np.cumsum([0, *map(len, self._distances)])
        widths = [_prior_width(knobs[k]) for k in self._columns] + [DERIVED_WIDTH] * len(self.derived)
        lengths = [(LENGTH[0], LENGTH[1] * width) for width in widths]
        self._mean, self._deviation = np.array([*lengths, HAMMING, NOISE]).T
        self._hyper = self._mean.copy()
        self._draws = FIRST_DRAWS

    def fit(self, rows: np.ndarray, targets: np.ndarray, pool: np.ndarray) -> None:
        """Draw hyperparameters for the targets [n], of mean 0 and variance 1, and condition the pool on the rows.

        A target may be NaN: the row was tried and its result is not known yet.
        """
        known = ~np.isnan(targets)
        tried = self._places(rows)
        self._draw(tried[known], targets[known])
        self._noise = np.exp(self._hyper[-1])
        self._log_kernels = [block.astype(np.float32) for block in self._logs(self._hyper)]
        self._pool = self._one_hot(self._places(pool), np.float32)
        self._tried = self._log_columns(tried, self._log_kernels)
        self._factor = np.linalg.cholesky(self._covariance(tried, self._hyper))
        self._solve = np.empty((len(rows) + ROW_GROWTH, len(pool)), np.float32)
        against = np.exp(self._tried @ self._pool.T)
        factor = self._factor.astype(np.float32)
        self._solve[: len(rows)] = solve_triangular(factor, against, lower=True, check_finite=False)
        self._explained = np.square(self._solve[: len(rows)]).sum(0)

    def extend(self, row: np.ndarray) -> None:
        """Add a tried row [knobs] to those of the last fit, keeping the hyperparameters."""
        n, places = len(self._factor), self._places(row[None])
        one = self._log_columns(places, self._log_kernels)
        to_tried = np.exp(self._tried @ self._one_hot(places, np.float32).T)[:, 0].astype(float)
        left = solve_triangular(self._factor, to_tried, lower=True, check_finite=False)
        pivot = np.sqrt(max(1 + self._noise + JITTER - left @ left, JITTER))
        self._factor = np.pad(self._factor, (0, 1))
        self._factor[n, :n], self._factor[n, n] = left, pivot
        self._tried = np.vstack([self._tried, one])
        if n == len(self._solve):
            self._solve = np.pad(self._solve, ((0, ROW_GROWTH), (0, 0)))
        self._solve[n] = np.exp(one @ self._pool.T)[0] - left.astype(np.float32) @ self._solve[:n]
        self._solve[n] /= pivot
        self._explained += np.square(self._solve[n])

    def predict(self, targets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return mean and deviation over the pool [m] if the tried rows, in the order given, reached `targets` [n].

        A row whose target is NaN does not change the mean and reduces the deviation.
        """
        if (unknown := np.isnan(targets)).any():
            covariance = self._factor @ self._factor.T
            targets = targets.copy()
            of_known = np.linalg.solve(covariance[~unknown][:, ~unknown], targets[~unknown])
            targets[unknown] = covariance[unknown][:, ~unknown] @ of_known
        weights = solve_triangular(self._factor, targets, lower=True, check_finite=False).astype(np.float32)
        variance = np.maximum(1 - self._explained, 1e-9)
        return weights @ self._solve[: len(weights)], np.sqrt(variance)

    def covariance(self, rows: np.ndarray) -> np.ndarray:
        """Return the covariance [n, n] of rows [n, knobs], noise included, for the hyperparameters drawn last."""
        return self._covariance(self._places(rows), self._hyper)

    def _draw(self, tried: np.ndarray, targets: np.ndarray) -> None:
        likelihood = self._log_likelihood(self._hyper, tried, targets)
        for _ in range(self._draws):
            offset = self._hyper - self._mean
            other = self._rng.normal(size=len(offset)) * self._deviation
            level = likelihood + np.log(self._rng.random())
            angle = self._rng.random() * 2 * np.pi
            low, high = angle - 2 * np.pi, angle
            # The bracket shrinks to the current point, whose likelihood is above the level, so this terminates.
            while True:
                hyper = self._mean + offset * np.cos(angle) + other * np.sin(angle)
                likelihood = self._log_likelihood(hyper, tried, targets)
                if likelihood > level:
                    break
                low, high = (angle, high) if angle < 0 else (low, angle)
                angle = low + (high - low) * self._rng.random()
            self._hyper = hyper
        self._draws = DRAWS

    def _log_likelihood(self, hyper: np.ndarray, tried: np.ndarray, targets: np.ndarray) -> float:
        factor = np.linalg.cholesky(self._covariance(tried, hyper))
        scaled = solve_triangular(factor, targets, lower=True, check_finite=False)
        return float(-0.5 * scaled @ scaled - np.log(np.diag(factor)).sum())

    def _covariance(self, tried: np.ndarray, hyper: np.ndarray) -> np.ndarray:
        """Return the covariance of rows of `_places`, noise included.

        In single precision it is not always positive definite, so it is float64.
        """
        columns = self._log_columns(tried, self._logs(hyper))
        covariance: np.ndarray = np.exp(columns @ self._one_hot(tried, np.float64).T)
        covariance[np.diag_indices(len(tried))] += np.exp(hyper[-1]) + JITTER
        return covariance

    def _logs(self, hyper: np.ndarray) -> list[np.ndarray]:
        """Return the logarithm of each knob's kernel [positions, positions]."""
        found = []
        for distance, length in zip(self._distances, np.exp(hyper), strict=False):
            scaled = np.sqrt(3) * distance / length
            found.append(np.log1p(scaled) - scaled - np.exp(hyper[-2]) * (distance > 0))
        return found

    def _places(self, rows: np.ndarray) -> np.ndarray:
        """Return the position of each row in each knob and derived value [n, knobs], the inactive one last."""
        places = []
        for column, values, distance in zip(self._columns, self._values, self._distances, strict=False):
            positions = len(distance) - 1
            # -1 selects the last
            places.append(rows[:, column].astype(np.int64) * positions // values % len(distance))
        places += [of.positions[rows[:, of.one], rows[:, of.other]] for of in self.derived]
        return np.array(places, np.int64).reshape(-1, len(rows)).T

    def _one_hot(self, places: np.ndarray, dtype: type) -> np.ndarray:
        """Return one column per position of each knob [n, positions of all]."""
        hot = np.zeros((len(places), self._starts[-1]), dtype)
        hot[np.arange(len(places))[:, None], places + self._starts[:-1]] = 1
        return hot

    def _log_columns(self, places: np.ndarray, logs: Sequence[np.ndarray]) -> np.ndarray:
        """Return the logarithms of each knob's kernel between a row and each position [n, positions of all].

        Times one-hot rows, it gives the logarithm of the kernel between two rows.
        """
        return np.hstack([log[place] for log, place in zip(logs, places.T, strict=True)])


@dataclass(frozen=True, slots=True)
class Derived:
    """A value that two knobs, or one taken twice, determine, as a further knob.

    positions: [values + 1, values + 1] by the positions of both, the last for an inactive one, which -1 selects;
    distances: [positions + 1, positions + 1], 1 from the least value to the largest.
    """

    one: int
    other: int
    positions: np.ndarray
    distances: np.ndarray


def find_derived(knobs: Sequence[Knob]) -> Iterator[Derived]:
    """Yield what counts beside the knobs themselves: products, and which values are powers of two."""
    yield from find_products(knobs)
    yield from find_powers(knobs)


def find_products(knobs: Sequence[Knob]) -> Iterator[Derived]:
    """Yield the products of pairs of ordered knobs of positive numbers; distances are those of logarithms."""
    factors = [k for k, knob in enumerate(knobs) if _is_factor(knob)]
    pairs = sorted(combinations(factors, 2), key=lambda pair: -len(knobs[pair[0]].values) * len(knobs[pair[1]].values))
    for one, other in pairs[:MAX_PRODUCTS]:
        first, second = (np.log2(np.array(knobs[k].values, float)) for k in (one, other))
        logs = np.round(first[:, None] + second, 4)
        levels, places = np.unique(logs, return_inverse=True)
        if len(levels) > PRODUCT_POSITIONS:
            places = np.minimum((logs - levels[0]) / np.ptp(levels) * PRODUCT_POSITIONS, PRODUCT_POSITIONS - 1)
            levels = np.linspace(levels[0], levels[-1], PRODUCT_POSITIONS)
        n = len(levels)
        positions = np.full((len(first) + 1, len(second) + 1), n)
        positions[:-1, :-1] = places.reshape(logs.shape).astype(int)
        distances = 1.0 - np.eye(n + 1)
        distances[:n, :n] = np.abs(levels[:, None] - levels) / np.ptp(levels)
        yield Derived(one, other, positions, distances)


def find_powers(knobs: Sequence[Knob]) -> Iterator[Derived]:
    """Yield of each ordered knob of positive whole numbers, some but not all powers of two, which values are."""
    for k, knob in enumerate(knobs):
        if not _is_factor(knob) or not all(isinstance(value, int) for value in knob.values):
            continue
        power = np.array([int(value).bit_count() == 1 for value in knob.values])
        if power.sum() >= MIN_POWERS and not power.all():
            positions = np.full((len(power) + 1, len(power) + 1), 2)
            positions[:-1, :-1] = np.where(power, 0, 1)[:, None]
            yield Derived(k, k, positions, 1.0 - np.eye(3))


def _is_factor(knob: Knob) -> bool:
    return (
        knob.ordinal
        and MIN_FACTOR_VALUES <= len(knob.values) <= MAX_POSITIONS
        and all(isinstance(v, int | float) and not isinstance(v, bool) and v > 0 for v in knob.values)
    )


def _prior_width(knob: Knob) -> float:
    """Return how much wider the prior on a knob's length scale is than that of a knob with two values."""
    return np.log2(max(2, len(knob.values))) ** (2 / 3) if knob.ordinal else 1.0


def _distances(knob: Knob) -> np.ndarray:
    """Return distances between positions [positions + 1, positions + 1]; inactive comes last.

    An ordered domain has distance 1 from end to end.
    """
    n = min(len(knob.values), MAX_POSITIONS)
    distances = 1.0 - np.eye(n + 1)
    if knob.ordinal and n > 1:
        position = np.arange(n) / (n - 1)
        distances[:n, :n] = np.abs(position[:, None] - position[None])
    return distances
