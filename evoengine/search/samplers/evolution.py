"""evoengine's own sampler: an evolutionary search that pays only for the offspring a surrogate expects most of.

Every proposal is a whole configuration of the valid space that was not proposed before. Until four trials have come
through they are those that a prior (`prior`) expects to be fastest, or random draws where there is none. From then on a
Gaussian process (`surrogate`) judges a pool of candidates (`Pool`), one that has the prior as its mean as far as the
trials confirm it, or one that ignores it; where the best stalls, the latter takes turns with one that knows products of
knobs and powers of two. The pool is the whole valid space where that is small, and otherwise what mutation and
crossover of the best trials bring forth beside fresh random points and what the prior expects to be fastest. Proposed
is the one with the largest expected improvement, weighted by how rarely trials have had its pairs of values
(`coverage`): a landscape may have several basins, and the first one found be a poor one. For the same reason, the more
proposals came after the best, the likelier is the next among those far from it. What is learned from are ranks and,
less so, logarithms: the objective's unit does not matter, and a trial that failed is simply the worst. What followed
the prior is no fair sample of the space: it counts little in the ranks, and a best that it found is no sign that the
search has stalled.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right, insort
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from scipy.special import ndtr, ndtri

from evoengine.objectives import Direction
from evoengine.records import LED_BY, Config
from evoengine.search.samplers import Asked
from evoengine.search.samplers.prior import MODEL, Mean, Pool, Prior, Space, Trust, fit_mean
from evoengine.search.samplers.surrogate import Surrogate, find_derived
from evoengine.space.definition import Knob

MIN_COMPLETED = 4
"""trials that come through before the surrogate is asked"""
PRIOR_FREE = 8
"""of so many proposals one ignores the prior, first the third: a wrong one costs two trials at first"""
TIED, N_TIED = 0.1, 32
"""logarithm of the factor within which predictions say nothing of the order, as they err by as much; the largest number
of rows that are tied"""
N_ELITES = 8
REFIT_GROWTH = 1.1
"""factor by which the trials learned from grow before hyperparameters are drawn again, and offspring bred again"""
MAX_FIT_TRIALS = 256
"""trials learned from at a fit, half of them the best and half the latest"""
FIRST_ROWS = 256
"""trials for which there is room at first; the room doubles"""
MAX_FRONT_TRIALS = 512
"""number of the best trials, and of the latest, among which Pareto fronts are sought"""
RARITY_EXPONENT = 3
"""power of the coverage of a candidate's rarest pair by which its expected improvement is divided"""
STALL_WEIGHT = 1.0
"""share of the surrogate's proposals since the best, of all trials, at which every second one explores far from it"""
DERIVED_AFTER = 16
"""the surrogate's proposals since the best after which every second one is by the one that knows derived values"""
N_PRIOR_ROWS = 256
"""rows that the prior expects to be fastest, added to the pool of a larger space"""
LOG_WEIGHT = 0.25
"""weight of logarithms in the targets; the rest are ranks"""
LED_WEIGHT = 1 / 8
"""weight in the ranks of a trial that followed the prior: it is no fair sample of the space"""
SURROGATE_OPERATORS = ("mutation", "crossover", "surrogate")
"""operators of proposals by the surrogate"""
EXPLORE_DISTANCE = 4
"""number of knobs, or half of them where there are few, in which an exploring proposal differs from the best"""


class _Model:
    """A surrogate, and the trials that it has learned from."""

    def __init__(self, surrogate: Surrogate) -> None:
        self.surrogate = surrogate
        self.fitted: list[int] = []
        self.refit_at = 0.0

    def extend(self, rows: np.ndarray) -> bool:
        """Learn from the latest of all trials [trials, knobs]; return False where a fit is due instead."""
        new = range(self.fitted[-1] + 1 if self.fitted else 0, len(rows))
        if len(self.fitted) + len(new) >= self.refit_at:
            return False
        for place in new:
            self.surrogate.extend(rows[place])
            self.fitted.append(place)
        return True


@dataclass(frozen=True, slots=True)
class _Led:
    """Mean and deviation of the pool's scores [m] where the prior is believed, and which of its sources are."""

    mean: np.ndarray
    deviation: np.ndarray
    sources: tuple[str, ...]


class Evolution:
    """The trials of a search in one space, and what to try next.

    A trial's number is its place among them. Where each came from is one of these operators:

    - random: a draw from the space, no parents;
    - prior: what the prior expects to be fastest, no parents;
    - mutation: one or two knobs away from one of the best trials, its parent;
    - crossover: every knob as in one of two of the best trials, its parents;
    - surrogate: none of these; the surrogate saw promise further off.

    Where the prior was followed, ` led by ` and its believed sources follow: `mutation led by rtx3090, the model`.

    Of trials in flight the surrogate knows where they are but not what they reach, so a batch spreads out. With several
    objectives a trial is worth the Pareto front it stands on; a prior, which knows of times alone, then leads the first
    trials only. A prior may learn more while the search goes on. The objective must be a time or a speed then.

    A proposal costs the same however many trials there are. Of each trial the row, its value and its place are kept,
    some 250 bytes; all else is of the best and the latest.
    """

    def __init__(
        self, space: Space, seed: int, prior: Prior | None = None, directions: Sequence[Direction] = ("maximize",)
    ) -> None:
        self._space, self._rng, self._prior = space, np.random.default_rng(seed), prior
        self._signs = np.array([1.0 if direction == "maximize" else -1.0 for direction in directions])
        self._places: dict[bytes, int] = {}
        """place of each row that was tried or is in flight"""
        self._pool = Pool(space, self._rng, self._places)
        self._models = [_Model(Surrogate(space.knobs, self._rng))]
        if any(find_derived(space.knobs)):
            self._models.append(_Model(Surrogate(space.knobs, self._rng, derived=True)))
        self._led = _Model(Surrogate(space.knobs, self._rng))
        """knows of the prior: its hyperparameters are of what that leaves"""
        self._bred = False
        self._expected = np.zeros((0, 0))
        """what the prior says of the pool, when its sources had `_expected_sizes` figures"""
        self._expected_sizes: tuple[int, ...] | None = None
        self._coverage = Coverage(space.knobs)
        self._rows = np.empty((FIRST_ROWS, len(space.knobs)), np.int16)
        """of all trials, in the order of their places; longer than these"""
        self._values = np.empty(FIRST_ROWS)
        """likewise; greater is better; -inf where rejected, NaN where in flight"""
        self._best: list[tuple[float, int]] = []
        """the best trials that came through, at most MAX_FIT_TRIALS / 2: (-value, place), best first"""
        self._vectors: dict[int, np.ndarray] = {}
        """every objective of a finished trial, greater is better, where there are several"""
        self._surrogate_places = array("q")
        """of trials that the surrogate chose, ascending"""
        self._own_places = array("q")
        """those of them that did not follow the prior"""
        self._prior_places: set[int] = set()
        """of trials that the prior chose alone"""
        self._led_places: set[int] = set()
        """of trials that followed the prior, those that it chose alone among them"""
        self._through = self._through_by_prior = self._failed = 0
        """trials that came through, those of them that the prior chose alone, and those that were rejected"""
        self._dropped = False
        """whether the trials contradict the prior"""
        self._trust = Trust()

    def ask(self, config: Config | None = None) -> Asked:
        """Begin a trial of `config`, or of a new configuration of the sampler's own where it is None.

        One that was tried already has its number of then: a given one, or any where no new one is found.
        """
        if config is not None:
            return Asked(self._enter(self._space.encode(config)), config)
        if self._vectors:
            self._rank_fronts()
        believed: tuple[str, ...] = ()
        row = None
        if self._ready():
            row, believed = self._most_promising_row()
        if row is not None:
            operator, parents = self._descent(row)
            self._count_surrogate_place(len(self._places), bool(believed))
        else:
            row, believed = self._fastest_expected()
            operator, parents = "random" if row is None else "prior", ()
        if row is None:
            row = self._pool.draw()
        if row is None:
            row = self._space.encode(self._space.sample(self._rng)[0])
        place = self._enter(row)
        if operator == "prior":
            self._prior_places.add(place)
        if believed:
            self._led_places.add(place)
            operator += LED_BY + ", ".join(believed)
        return Asked(place, self._space.decode(row), parents, operator)

    def tell(self, number: int, values: Sequence[float]) -> None:
        """Report what a trial reached, one value per objective; what is told first counts."""
        if not math.isnan(self._values[number]):
            return
        vector = np.nan_to_num(self._signs * values, nan=-np.inf, posinf=np.inf, neginf=-np.inf)
        if len(vector) > 1:
            self._vectors[number] = vector
        value = self._values[number] = float(vector[0])
        if value == -np.inf:
            self._failed += 1
            return
        self._through += 1
        self._through_by_prior += number in self._prior_places
        insort(self._best, (-value, number))
        del self._best[MAX_FIT_TRIALS // 2 :]

    def recall(self, config: Config, values: Sequence[float], parents: Sequence[int], operator: str | None) -> int:
        """Enter a trial of an earlier process of the search, and return its number."""
        place = self._enter(self._space.encode(config))
        operator, led, _ = (operator or "").partition(LED_BY)
        if operator == "prior":
            self._prior_places.add(place)
        if led:
            self._led_places.add(place)
        if operator in SURROGATE_OPERATORS:
            self._count_surrogate_place(place, bool(led))
        self.tell(place, values)
        return place

    def _rank_fronts(self) -> None:
        """Compute the trials' values, which are the numbers of their fronts, of the best so far and of the latest."""
        places = [*self._vectors]
        if len(places) > MAX_FRONT_TRIALS:
            best = sorted(places[:-MAX_FRONT_TRIALS], key=lambda place: -self._values[place])
            for place in best[MAX_FRONT_TRIALS:]:
                del self._vectors[place]
            places = [*self._vectors]
        for place, front in zip(places, fronts(np.array([*self._vectors.values()])), strict=True):
            self._values[place] = -float(front) if (self._vectors[place] > -np.inf).all() else -np.inf
        through = [(-float(self._values[place]), place) for place in places if self._values[place] > -np.inf]
        self._best = sorted(through)[: MAX_FIT_TRIALS // 2]

    def _enter(self, row: np.ndarray) -> int:
        count = len(self._places)
        place = self._places.setdefault(row.tobytes(), count)
        if place == count:
            if count == len(self._values):
                self._rows = np.concatenate([self._rows, np.empty_like(self._rows)])
                self._values = np.concatenate([self._values, np.empty_like(self._values)])
            self._rows[place], self._values[place] = row, np.nan
            self._pool.close(row)
            self._coverage.add(row)
        return place

    def _count_surrogate_place(self, place: int, led: bool) -> None:
        self._surrogate_places.append(place)
        if not led:
            self._own_places.append(place)

    def _ready(self) -> bool:
        """Return whether enough trials succeeded.

        Once the prior is dropped, only those that it did not choose count.
        """
        return self._through - (self._through_by_prior if self._dropped else 0) >= MIN_COMPLETED

    def _fastest_expected(self) -> tuple[np.ndarray | None, tuple[str, ...]]:
        """Return an open row that the prior expects to be fastest, and the sources that know it.

        Predictions within TIED of the fastest do not tell which row is faster, so that one of these is drawn. The row
        is None if the prior knows none, or was wrong too often.
        """
        if self._prior is None or self._dropped or self._failed >= MIN_COMPLETED or self._is_prior_free():
            return None, ()
        fastest = self._prior.fastest(len(self._places) + N_TIED)
        rows = fastest[[row.tobytes() not in self._places for row in fastest]]
        if not len(rows):
            return None, ()
        if (knowing := self._prior.knowing(rows[0])) != (MODEL,):
            return rows[0], knowing
        predicted = self._prior.log_us(rows)[-1]
        row = self._rng.choice(rows[predicted <= predicted[0] + TIED])
        return row, self._prior.knowing(row)

    def _most_promising_row(self) -> tuple[np.ndarray | None, tuple[str, ...]]:
        """Return the candidate with the largest expected improvement, weighted by rarity, and the sources it follows.

        The row is None if no candidate is left.
        """
        late = self._since_best(own=True) >= DERIVED_AFTER and len(self._places) % 2
        model = self._models[-1 if late else 0]
        if not model.extend(self._tried):
            self._fit(model)
        if not self._pool.available.any():
            return None, ()
        targets = self._targets(model)
        mean, deviation = plain = model.surrogate.predict(targets)
        believed: tuple[str, ...] = ()
        if (led := self._predict_led()) is not None and self._follows_prior(led.sources):
            mean, deviation, believed = led.mean, led.deviation, led.sources
        gain = expected_improvement(mean, deviation, np.nanmax(targets))
        best = self._coverage.favoured(np.where(self._proposable(own=not believed), gain, -np.inf))
        if led is not None:
            ways = (led.mean, led.deviation), plain
            forecasts = [(float(m[best]), float(d[best])) for m, d in ways]
            self._trust.forecast(len(self._places), forecasts, bool(believed))
        return self._pool.rows[best], believed

    @property
    def _tried(self) -> np.ndarray:
        """Return the rows of all trials [trials, knobs]."""
        return self._rows[: len(self._places)]

    def _predict_led(self) -> _Led | None:
        """Return what the prior and the trials together forecast; None where the trials contradict it."""
        if self._prior is None or self._vectors or not self._prior.sources:
            self._dropped = self._prior is not None
            return None
        if not self._led.extend(self._tried):
            self._fit(self._led)
        targets = self._targets(self._led)
        prior = self._fit_mean(targets)
        self._dropped = prior is None
        if prior is None:
            return None
        self._trust.learn(self._led.fitted, targets)
        mean, deviation = self._led.surrogate.predict((targets - prior.tried) / prior.deviation)
        sources = tuple(self._prior.sources[place] for place in prior.believed)
        return _Led(prior.pool + prior.deviation * mean, prior.deviation * deviation, sources)

    def _is_prior_free(self) -> bool:
        return len(self._places) % PRIOR_FREE == MIN_COMPLETED - 2

    def _follows_prior(self, believed: tuple[str, ...]) -> bool:
        """Return whether the next proposal follows the prior: never one of PRIOR_FREE, the others as it is trusted."""
        if self._is_prior_free():
            return False
        likelihood = self._trust.likelihood(self._latest_best(), len(self._places), believed != (MODEL,))
        return bool(self._rng.random() < likelihood)

    def _proposable(self, own: bool) -> np.ndarray:
        """Return a mask [n] of the pool's rows that may be proposed: all open rows, or those far from the best."""
        best, since = self._latest_best(own), self._since_best(own)
        if self._rng.random() < since / (since + STALL_WEIGHT * len(self._places)) and best >= 0:
            live = np.count_nonzero(np.ptp(self._pool.rows, axis=0))
            changed = (self._pool.rows != self._rows[best]).sum(1)
            far: np.ndarray = self._pool.available & (changed >= min(EXPLORE_DISTANCE, -(-live // 2)))
            if far.any():
                return far
        return self._pool.available

    def _latest_best(self, own: bool = False) -> int:
        """Return the place of the best trial, the latest of equal ones; -1 where none came through.

        `own` leaves out those that followed the prior: what it finds at once is no sign that the search has stalled.
        """
        best = [(value, place) for value, place in self._best if not own or place not in self._led_places]
        return -1 if not best else max(place for value, place in best if value == best[0][0])

    def _since_best(self, own: bool) -> int:
        """Return how many of the surrogate's proposals came after the best trial, of its own ones alone if `own`."""
        places = self._own_places if own else self._surrogate_places
        return len(places) - bisect_right(places, self._latest_best(own))

    def _fit(self, model: _Model) -> None:
        count = len(self._places)
        latest = range(max(0, count - MAX_FIT_TRIALS // 2), count)
        if model is self._models[0] or not self._bred:
            self._breed()
        model.fitted = sorted({*(place for _, place in self._best), *latest})
        model.refit_at = REFIT_GROWTH * len(model.fitted)
        rows = self._rows[model.fitted]
        targets = self._targets(model)
        if model is self._led and (mean := self._fit_mean(targets)) is not None:
            targets = (targets - mean.tried) / mean.deviation
        model.surrogate.fit(rows, targets, self._pool.rows)

    def _breed(self) -> None:
        if self._bred and self._pool.whole:
            return
        expected = () if self._prior is None else self._prior.fastest(N_PRIOR_ROWS)
        self._pool.breed(self._rows[self._elites()], expected)
        self._coverage.set_pool(self._pool.rows)
        self._bred, self._expected_sizes = True, None
        if not self._pool.whole:  # the other model knows nothing of these rows
            for model in (*self._models[1:], self._led):
                model.refit_at = 0.0

    def _fit_mean(self, targets: np.ndarray) -> Mean | None:
        """Return the prior's mean as far as the trials support it."""
        assert self._prior is not None
        rows = self._rows[self._led.fitted]
        logs = logarithms(self._values[self._led.fitted])
        sizes = self._prior.sizes
        if sizes != self._expected_sizes:  # a look-up of the whole pool takes longer than all else
            self._expected, self._expected_sizes = self._prior.log_us(self._pool.rows), sizes
        tried = self._prior.log_us(rows)
        return fit_mean(targets, logs, tried, self._expected, self._led.surrogate.covariance(rows))

    def _targets(self, model: _Model) -> np.ndarray:
        """Return the targets of the learned trials [n]; NaN for those in progress."""
        values = self._values[model.fitted]
        targets = np.full(len(values), np.nan)
        known = ~np.isnan(values)
        weights = np.array([LED_WEIGHT if i in self._led_places else 1.0 for i in model.fitted])
        targets[known] = scores(values[known], weights[known])
        return targets

    def _elites(self) -> list[int]:
        return [place for _, place in self._best[:N_ELITES]]

    def _descent(self, row: np.ndarray) -> tuple[str, tuple[int, ...]]:
        elites = self._elites()
        if not elites:
            return "surrogate", ()
        same = self._rows[elites] == row
        changed = len(row) - same.sum(1)
        if changed.min() <= 2:
            return "mutation", (elites[int(changed.argmin())],)
        for i, mother in enumerate(same):
            for j, father in enumerate(same[:i]):
                if (mother | father).all():
                    first, second = sorted((elites[i], elites[j]))
                    return "crossover", (first, second)
        return "surrogate", ()


def scores(values: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
    """Return targets for the surrogate from values [n], where greater is better, and their weights [n], 1 by default.

    They are normal scores, drawn towards the logarithms: ranks exaggerate small differences, and logarithms alone let a
    few outliers decide. Zero and infinite values keep their normal scores, and so do all values if the others differ in
    sign.
    """
    weights = np.ones(len(values)) if weights is None else weights
    worth, every = normal_scores(values, weights), logarithms(values)
    plain = ~np.isnan(every)
    logs = every[plain]
    if len(logs) and np.ptp(logs) > 0:
        ranks = worth[plain]
        (middle, deviation), (centre, spread) = (_moments(of, weights[plain]) for of in (logs, ranks))
        drawn = (logs - middle) / deviation * spread + centre
        # within the ranks' range, or the slowest would fall behind what failed
        worth[plain] += LOG_WEIGHT * (np.clip(drawn, ranks.min(), ranks.max()) - ranks)
    return worth


def _moments(values: np.ndarray, weights: np.ndarray) -> tuple[float, float]:
    """Return the weighted mean and deviation of values [n]."""
    mean = np.average(values, weights=weights)
    return float(mean), float(np.sqrt(np.average(np.square(values - mean), weights=weights)))


def logarithms(values: np.ndarray) -> np.ndarray:
    """Return logarithms of values [n] that grow with them.

    They are NaN for zero and infinite values, and for all if the others differ in sign.
    """
    found = np.full(len(values), np.nan)
    plain = np.isfinite(values) & (values != 0)
    of = values[plain]
    if (of > 0).all() or (of < 0).all():
        found[plain] = np.sign(of) * np.log(np.abs(of))
    return found


def normal_scores(values: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
    """Return the normal quantiles of the values' weighted ranks [n]; ties share their mean rank."""
    _, place = np.unique(values, return_inverse=True)
    count = np.bincount(place, weights)
    quantiles: np.ndarray = ndtri((np.cumsum(count) - count / 2) / count.sum())[place]
    return quantiles


def fronts(vectors: np.ndarray) -> np.ndarray:
    """Return the number of each row's Pareto front [n], 0 for the best, where greater is better.

    `vectors` is [n, objectives]. See Deb et al. 2002.
    """
    no_worse = np.all(vectors[:, None] >= vectors[None], axis=-1)
    dominates: np.ndarray = no_worse & np.any(vectors[:, None] > vectors[None], axis=-1)
    found, left = np.zeros(len(vectors), int), np.ones(len(vectors), bool)
    while left.any():
        best = left & ~dominates[left].any(0)
        found[left & ~best] += 1
        left &= ~best
    return found


def expected_improvement(mean: np.ndarray, deviation: np.ndarray, best: float) -> np.ndarray:
    """Return the expected improvement of a normal variable over `best`, where greater is better.

    See Jones, Schonlau & Welch 1998.
    """
    z = (mean - best) / deviation
    expected: np.ndarray = deviation * (z * ndtr(z) + np.exp(-0.5 * z * z) / np.sqrt(2 * np.pi))
    return expected


# The coverage of a pool by the trials, in pairs of values.
#
# What a configuration reaches often depends on a few knobs together, and a pair of values that no trial has had
# together may be what the best ones share: the idea of combinatorial testing (Kuhn, Wallace & Gallo 2004). Only knobs
# of few values take part: of two with many, no search covers the pairs.

MAX_PAIR_VALUES = 4
"""maximum number of values of a knob that takes part, not counting the inactive one"""
PRIOR = 4.0
"""pseudo-count added to the observed and to the even number of trials of a pair, so that few trials do not decide"""


class Coverage:
    """Rows are int16 [n, knobs], positions in the knobs' domains, -1 where inactive."""

    def __init__(self, knobs: Sequence[Knob]) -> None:
        few = [
            k
            for k, knob in enumerate(knobs)
            if len(knob.values) <= MAX_PAIR_VALUES and (len(knob.values) > 1 or knob.when)
        ]
        self._pairs = np.array([*combinations(few, 2)], int).reshape(-1, 2)
        self._tried = np.zeros((len(self._pairs), (MAX_PAIR_VALUES + 1) ** 2))

    def add(self, row: np.ndarray) -> None:
        """Count a trial [knobs]."""
        self._tried[np.arange(len(self._pairs)), self._cells(row[None])[:, 0]] += 1

    def set_pool(self, pool: np.ndarray) -> None:
        """Set the rows to be scored, at least one."""
        self._pool_cells = self._cells(pool)
        self._share = np.zeros_like(self._tried)
        for share, cells in zip(self._share, self._pool_cells, strict=True):
            share[:] = np.bincount(cells, minlength=len(share)) / len(pool)

    def pair_coverage(self, some: np.ndarray) -> np.ndarray:
        """Return for some rows of the pool [some] the least coverage of their pairs of values.

        A pair's coverage is the number of trials with it, divided by the number if trials were spread evenly. It is
        below 1 if the trials had one of the row's pairs more rarely than the pool does; never 0, and 1 without pairs.
        """
        least = np.full(len(some), np.inf if len(self._pairs) else 1.0)
        for of_pair, cells in zip(self._ratio(), self._pool_cells, strict=True):
            np.minimum(least, of_pair[cells[some]], out=least)
        return least

    def favoured(self, gain: np.ndarray) -> int:
        """Return the row of the pool whose gain [n], divided by its pair coverage to RARITY_EXPONENT, is largest."""
        some, first = np.arange(len(gain)), int(gain.argmax())
        lead = gain[first] / self.pair_coverage(some[[first]])[0] ** RARITY_EXPONENT
        if lead > 0:  # the gain of most rows is so small that no rarity makes up for it
            some = np.flatnonzero(gain >= 0.999 * lead * self._ratio().min(initial=1.0) ** RARITY_EXPONENT)
        return int(some[(gain[some] / self.pair_coverage(some) ** RARITY_EXPONENT).argmax()])

    def _ratio(self) -> np.ndarray:
        """Return the coverage of each cell [pairs, cells]."""
        even = self._tried.sum(1, keepdims=True) * self._share
        ratio: np.ndarray = (self._tried + PRIOR) / (even + PRIOR)
        return ratio

    def _cells(self, rows: np.ndarray) -> np.ndarray:
        """Return the cell of each row for every pair of knobs [pairs, n]."""
        first, second = rows.T[self._pairs[:, 0]] + 1, rows.T[self._pairs[:, 1]] + 1
        cells: np.ndarray = (first * (MAX_PAIR_VALUES + 1) + second).astype(np.uint8)
        return cells
