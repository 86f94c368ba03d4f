"""evoengine's own sampler: an evolutionary search that pays only for the offspring a surrogate expects most of.

Every proposal is a whole configuration of the valid space that was not proposed before. Until four trials have come
through they are those that a prior (`prior`) expects to be fastest, or random draws where there is none. From then on a
Gaussian process (`surrogate`) judges a pool of candidates (`Pool`), one that has the prior as its mean as far as the
trials confirm it, or one that ignores it; where the best stalls, the latter takes turns with one that knows products of
knobs. The pool is the whole valid space where that is small, and otherwise what mutation and crossover of the best
trials bring forth beside fresh random points and what the prior expects to be fastest. Proposed is the one with the
largest expected improvement, weighted by how rarely trials have had its pairs of values (`coverage`): a landscape may
have several basins, and the first one found be a poor one. For the same reason, the more proposals came after the best,
the likelier is the next among those far from it. What is learned from are ranks and, less so, logarithms: the
objective's unit does not matter, and a trial that failed is simply the worst. What followed the prior is no fair sample
of the space: it counts little in the ranks, and a best that it found is no sign that the search has stalled.
"""

from __future__ import annotations

import math
import sys
import threading
from bisect import bisect_right, insort
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.samplers import BaseSampler, RandomSampler
from optuna.search_space import IntersectionSearchSpace
from optuna.storages import BaseStorage
from optuna.study import Study, StudyDirection
from optuna.trial import FrozenTrial, TrialState
from scipy.special import ndtr, ndtri

from evoengine.records import LED_BY, Config
from evoengine.search.samplers.prior import Mean, Pool, Prior, Space, Trust, fit_mean
from evoengine.search.samplers.surrogate import Surrogate, find_products
from evoengine.space.definition import Knob

MIN_COMPLETED = 4
"""trials that come through before the surrogate is asked"""
PRIOR_FREE = 8
"""of so many proposals one ignores the prior, first the fourth: a wrong one costs three trials at first"""
N_ELITES = 8
REFIT_GROWTH = 1.1
"""factor by which the trials learned from grow before hyperparameters are drawn again, and offspring bred again"""
MAX_FIT_TRIALS = 256
"""trials learned from at a fit, half of them the best and half the latest"""
MAX_FRONT_TRIALS = 512
"""number of the best trials, and of the latest, among which Pareto fronts are sought"""
MAX_SINGLE_READS = 128
"""trials read one by one; of more, all are"""
RARITY_EXPONENT = 3
"""power of a candidate's pair coverage by which its expected improvement is divided"""
STALL_WEIGHT = 1.0
"""share of the surrogate's proposals since the best, of all trials, at which every second one explores far from it"""
PRODUCT_AFTER = 32
"""the surrogate's proposals since the best after which every second one is by the surrogate that knows products"""
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


class EvolutionSampler(BaseSampler):
    """Proposes from `space`, or without one from what the study's trials have in common.

    The objective must suggest each knob as `suggest_categorical(knob.name, knob.values)` where a space is given. Each
    trial says what it came from in its user attributes: `operator`, and the numbers of its `parents`:

    - random: a draw from the space, no parents;
    - prior: what the prior expects to be fastest, no parents;
    - mutation: one or two knobs away from one of the best trials, its parent;
    - crossover: every knob as in one of two of the best trials, its parents;
    - surrogate: none of these; the surrogate saw promise further off.

    Where the prior was followed, ` led by ` and its believed sources follow: `mutation led by rtx3090, the model`.

    A study that goes on in another process marks the trials that it was given with the attribute `recalled`.

    Known-good points go first by `study.enqueue_trial`. Of trials in flight (parallel workers) the surrogate knows
    where they are but not what they reach, so a batch spreads out. With several objectives a trial is
    worth the Pareto front it stands on; a prior, which knows of times alone, then leads the first trials only.

    A `prior` may learn more while the study goes on. The objective must be a time or a speed then.
    """

    def __init__(self, seed: int | None = None, space: Space | None = None, prior: Prior | None = None) -> None:
        self._space, self._prior = space, prior
        self._independent = RandomSampler(seed)
        self._rng = np.random.default_rng(seed)
        self._lock = threading.Lock()
        self._switch_study(None)

    def _switch_study(self, study: Study | None) -> None:
        """Replace the state of one study by that of another, which its trials determine."""
        # a study has no public identity
        whose = (study._storage, study._study_id) if study is not None else None  # noqa: SLF001
        if whose is None or whose != self._whose:
            self._whose: tuple[BaseStorage, int] | None = whose
            self._common = IntersectionSearchSpace()
            self._searched: dict[str, BaseDistribution] | None = None
            self._search: _Search | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the lock, which cannot be pickled.

        Thus a study can continue in another process.
        """
        return {name: getattr(self, name) for name in ("_space", "_prior", "_independent", "_rng")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.Lock()
        self._switch_study(None)

    def reseed_rng(self) -> None:
        self._independent.reseed_rng()
        self._rng.bit_generator.state = np.random.default_rng().bit_generator.state

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        if self._space is not None:
            return {knob.name: CategoricalDistribution(knob.values) for knob in self._space.knobs}
        with self._lock:
            self._switch_study(study)
            return self._common.calculate(study)

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        if not search_space:
            return {}
        with self._lock:
            self._switch_study(study)
            if self._search is None or self._searched != search_space:
                self._searched, space = search_space, self._space or Grid(search_space)
                self._search = _Search(space, self._rng, self._prior)
            self._search.read(study, trial.number)
            config, operator, parents = self._search.propose(trial.number)
            if self._search.believed:
                operator += LED_BY + ", ".join(self._search.believed)
        for key, value in (("operator", operator), ("parents", parents)):
            # as Optuna's own samplers do: `trial` is a copy
            study._storage.set_trial_user_attr(trial._trial_id, key, value)  # noqa: SLF001
            trial.set_user_attr(key, value)
        return config

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        return self._independent.sample_independent(study, trial, param_name, param_distribution)


class _Model:
    """A surrogate, and the trials that it has learned from."""

    def __init__(self, surrogate: Surrogate) -> None:
        self.surrogate = surrogate
        self.fitted: list[int] = []
        self.refit_at = 0.0

    def extend(self, rows: Sequence[np.ndarray]) -> bool:
        """Learn from the latest trials; return False where a fit is due instead."""
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


class _Search:
    """The trials of one study in one space, and what to try next.

    A proposal costs the same however many trials there are, but for the growth of arrays and lists.
    """

    def __init__(self, space: Space, rng: np.random.Generator, prior: Prior | None) -> None:
        self._space, self._rng, self._prior = space, rng, prior
        self._pool = Pool(space, rng)
        self._models = [_Model(Surrogate(space.knobs, rng))]
        if any(find_products(space.knobs)):
            self._models.append(_Model(Surrogate(space.knobs, rng, products=True)))
        self._led = _Model(Surrogate(space.knobs, rng))
        """knows of the prior: its hyperparameters are of what that leaves"""
        self._bred = False
        self._expected = np.zeros((0, 0))
        """what the prior says of the pool, when its sources had `_expected_sizes` figures"""
        self._expected_sizes: tuple[int, ...] | None = None
        self._coverage = Coverage(space.knobs)
        self._rows: list[np.ndarray] = []
        self._numbers: list[int] = []
        self._values: list[float] = []
        """greater is better; -inf where rejected, NaN where in flight"""
        self._best: list[tuple[float, int]] = []
        """the best trials that came through, at most MAX_FIT_TRIALS / 2: (-value, place), best first"""
        self._vectors: dict[int, np.ndarray] = {}
        """every objective of a finished trial, greater is better, where there are several"""
        self._row_numbers: dict[bytes, int] = {}
        self._surrogate_rows: list[int] = []
        """rows that the surrogate chose, ascending"""
        self._own_rows: list[int] = []
        """those of them that did not follow the prior"""
        self._prior_rows: set[int] = set()
        """rows that the prior chose alone"""
        self._led_rows: set[int] = set()
        """rows that followed the prior, those that it chose alone among them"""
        self._through = self._through_by_prior = self._failed = 0
        """trials that came through, those of them that the prior chose alone, and those that were rejected"""
        self._dropped = False
        """whether the trials contradict the prior"""
        self._trust = Trust()
        self._unfinished: list[int] = []
        self._read = 0

    def read(self, study: Study, latest: int) -> None:
        """Process the changes of the study's trials since the last call, up to the number of the latest."""
        numbers = [*self._unfinished, *range(self._read, latest + 1)]
        trials = [*_trials(study, numbers)]
        self._read = max(self._read, latest + 1)
        self._unfinished = [n for n, trial in zip(numbers, trials, strict=True) if not trial.state.is_finished()]
        signs = np.array([1.0 if d == StudyDirection.MAXIMIZE else -1.0 for d in study.directions])
        for trial in trials:
            config = {k.name: trial.params[k.name] for k in self._space.knobs if k.name in trial.params}
            if trial.state == TrialState.WAITING or not self._space.contains(config):
                continue
            place = self._enter(self._space.encode(config), trial.number)
            operator, led, _ = (trial.user_attrs.get("operator") or "").partition(LED_BY)
            if operator == "prior":
                self._prior_rows.add(place)
            if led:
                self._led_rows.add(place)
            if operator in SURROGATE_OPERATORS and "recalled" in trial.user_attrs:
                self._count_surrogate_row(place, bool(led))
            if trial.state.is_finished():
                complete = trial.state == TrialState.COMPLETE and trial.values is not None
                vector = signs * trial.values if complete else np.full(len(signs), -np.inf)
                if len(signs) > 1:
                    self._vectors[place] = vector
                self._finish(place, float(vector[0]))
        if len(signs) > 1 and numbers:
            self._rank_fronts()

    def _finish(self, place: int, value: float) -> None:
        if not math.isnan(self._values[place]):  # a repeated configuration
            return
        self._values[place] = value
        if value == -np.inf:
            self._failed += 1
            return
        self._through += 1
        self._through_by_prior += place in self._prior_rows
        insort(self._best, (-value, place))
        del self._best[MAX_FIT_TRIALS // 2 :]

    def _rank_fronts(self) -> None:
        """Compute the trials' values, which are the numbers of their fronts, of the best so far and of the latest."""
        places = [*self._vectors]
        if len(places) > MAX_FRONT_TRIALS:
            best = sorted(places[:-MAX_FRONT_TRIALS], key=lambda place: -self._values[place])
            for place in best[MAX_FRONT_TRIALS:]:
                del self._vectors[place]
            places = [*self._vectors]
        if not places:
            return
        for place, front in zip(places, fronts(np.array([*self._vectors.values()])), strict=True):
            self._values[place] = -float(front) if (self._vectors[place] > -np.inf).all() else -np.inf
        through = [(-self._values[place], place) for place in places if self._values[place] > -np.inf]
        self._best = sorted(through)[: MAX_FIT_TRIALS // 2]

    def propose(self, number: int) -> tuple[dict[str, Any], str, list[int]]:
        """Return a new configuration for the trial, its operator, and the numbers of its parents."""
        self.believed: tuple[str, ...] = ()
        row = self._most_promising_row() if self._ready() else None
        if row is not None:
            operator, parents = self._descent(row)
            self._count_surrogate_row(len(self._rows), bool(self.believed))
        else:
            row = self._fastest_expected()
            operator, parents = "random" if row is None else "prior", []
        if row is None:
            row = self._pool.draw()
        if row is None:
            return self._space.sample(self._rng)[0], operator, parents
        self._enter(row, number)
        return self._space.decode(row), operator, parents

    def _enter(self, row: np.ndarray, number: int) -> int:
        place = self._row_numbers.setdefault(row.tobytes(), len(self._rows))
        if place == len(self._rows):
            self._rows.append(row)
            self._numbers.append(number)
            self._values.append(np.nan)
            self._pool.exclude(row)
            self._coverage.add(row)
        return place

    def _count_surrogate_row(self, place: int, led: bool) -> None:
        self._surrogate_rows.append(place)
        if not led:
            self._own_rows.append(place)

    def _ready(self) -> bool:
        """Return whether enough trials succeeded.

        Once the prior is dropped, only those that it did not choose count.
        """
        return self._through - (self._through_by_prior if self._dropped else 0) >= MIN_COMPLETED

    def _fastest_expected(self) -> np.ndarray | None:
        """Return the open row that the prior expects to be fastest; None if it knows none, or was wrong too often."""
        if self._prior is None or self._dropped or self._failed >= MIN_COMPLETED or self._is_prior_free():
            return None
        rows: Iterable[np.ndarray] = self._prior.fastest(len(self._rows) + 1)
        row = next((row for row in rows if row.tobytes() not in self._row_numbers), None)
        self.believed = () if row is None else self._prior.knowing(row)
        return row

    def _most_promising_row(self) -> np.ndarray | None:
        """Return the candidate with the largest expected improvement, weighted by rarity; None if none is left."""
        late = self._since_best(own=True) >= PRODUCT_AFTER and len(self._rows) % 2
        model = self._models[-1 if late else 0]
        if not model.extend(self._rows):
            self._fit(model)
        if not self._pool.available.any():
            return None
        targets = self._targets(model)
        mean, deviation = plain = model.surrogate.predict(targets)
        if (led := self._predict_led()) is not None and self._follows_prior():
            mean, deviation = led.mean, led.deviation
            self.believed = led.sources
        gain = (
            expected_improvement(mean, deviation, np.nanmax(targets))
            / self._coverage.pair_coverage() ** RARITY_EXPONENT
        )
        best = int(np.where(self._proposable(own=not self.believed), gain, -1.0).argmax())
        if led is not None:
            ways = (led.mean, led.deviation), plain
            self._trust.forecast(
                len(self._rows), [(float(m[best]), float(d[best])) for m, d in ways], bool(self.believed)
            )
        row: np.ndarray = self._pool.rows[best]
        return row

    def _predict_led(self) -> _Led | None:
        """Return what the prior and the trials together forecast; None where the trials contradict it."""
        if self._prior is None or self._vectors or not self._prior.sources:
            self._dropped = self._prior is not None
            return None
        if not self._led.extend(self._rows):
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
        return len(self._rows) % PRIOR_FREE == MIN_COMPLETED - 1

    def _follows_prior(self) -> bool:
        """Return whether the next proposal follows the prior: never one of PRIOR_FREE, the others as it is trusted."""
        if self._is_prior_free():
            return False
        return bool(self._rng.random() < self._trust.likelihood(self._latest_best(), len(self._rows)))

    def _proposable(self, own: bool) -> np.ndarray:
        """Return a mask [n] of the pool's rows that may be proposed: all open rows, or those far from the best."""
        best, since = self._latest_best(own), self._since_best(own)
        if self._rng.random() < since / (since + STALL_WEIGHT * len(self._rows)) and best >= 0:
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
        best = [(value, place) for value, place in self._best if not own or place not in self._led_rows]
        return -1 if not best else max(place for value, place in best if value == best[0][0])

    def _since_best(self, own: bool) -> int:
        """Return how many of the surrogate's proposals came after the best trial, of its own ones alone if `own`."""
        rows = self._own_rows if own else self._surrogate_rows
        return len(rows) - bisect_right(rows, self._latest_best(own))

    def _fit(self, model: _Model) -> None:
        latest = range(max(0, len(self._rows) - MAX_FIT_TRIALS // 2), len(self._rows))
        if model is self._models[0] or not self._bred:
            self._breed()
        model.fitted = sorted({*(place for _, place in self._best), *latest})
        model.refit_at = REFIT_GROWTH * len(model.fitted)
        rows = np.array([self._rows[i] for i in model.fitted])
        targets = self._targets(model)
        if model is self._led and (mean := self._fit_mean(targets)) is not None:
            targets = (targets - mean.tried) / mean.deviation
        model.surrogate.fit(rows, targets, self._pool.rows)

    def _breed(self) -> None:
        expected = () if self._prior is None else self._prior.fastest(N_PRIOR_ROWS)
        self._pool.breed(np.array([self._rows[i] for i in self._elites()]), expected)
        self._coverage.set_pool(self._pool.rows)
        self._bred, self._expected_sizes = True, None
        if not self._pool.whole:  # the other model knows nothing of these rows
            for model in (*self._models[1:], self._led):
                model.refit_at = 0.0

    def _fit_mean(self, targets: np.ndarray) -> Mean | None:
        """Return the prior's mean as far as the trials support it."""
        assert self._prior is not None
        rows = np.array([self._rows[i] for i in self._led.fitted])
        logs = logarithms(np.array([self._values[i] for i in self._led.fitted]))
        sizes = self._prior.sizes
        if sizes != self._expected_sizes:  # a look-up of the whole pool takes longer than all else
            self._expected, self._expected_sizes = self._prior.log_us(self._pool.rows), sizes
        tried = self._prior.log_us(rows)
        return fit_mean(targets, logs, tried, self._expected, self._led.surrogate.covariance(rows))

    def _targets(self, model: _Model) -> np.ndarray:
        """Return the targets of the learned trials [n]; NaN for those in progress."""
        values = np.array([self._values[i] for i in model.fitted])
        targets = np.full(len(values), np.nan)
        known = ~np.isnan(values)
        weights = np.array([LED_WEIGHT if i in self._led_rows else 1.0 for i in model.fitted])
        targets[known] = scores(values[known], weights[known])
        return targets

    def _elites(self) -> list[int]:
        return [place for _, place in self._best[:N_ELITES]]

    def _descent(self, row: np.ndarray) -> tuple[str, list[int]]:
        elites = self._elites()
        same = np.array([self._rows[i] == row for i in elites])
        if not len(elites):
            return "surrogate", []
        changed = len(row) - same.sum(1)
        if changed.min() <= 2:
            return "mutation", [self._numbers[elites[int(changed.argmin())]]]
        for i, mother in enumerate(same):
            for j, father in enumerate(same[:i]):
                if (mother | father).all():
                    return "crossover", sorted(self._numbers[elites[k]] for k in (i, j))
        return "surrogate", []


def _trials(study: Study, numbers: Sequence[int]) -> Iterator[FrozenTrial]:
    """Yield the trials of these numbers; a list of all of them would take longer than a proposal after many."""
    if len(numbers) > MAX_SINGLE_READS:
        trials = study.get_trials(deepcopy=False)
        yield from (trials[n] for n in numbers)
        return
    storage = study._storage  # noqa: SLF001
    for n in numbers:
        yield storage.get_trial(storage.get_trial_id_from_study_id_trial_number(study._study_id, n))  # noqa: SLF001


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

    def pair_coverage(self) -> np.ndarray:
        """Return for each row [n] the least coverage of its pairs of values.

        A pair's coverage is the number of trials with it, divided by the number if trials were spread evenly. It is
        below 1 if the trials had one of the row's pairs more rarely than the pool does; never 0, and 1 without pairs.
        """
        even = self._tried.sum(1, keepdims=True) * self._share
        ratio = (self._tried + PRIOR) / (even + PRIOR)
        if not len(ratio):
            return np.ones(self._pool_cells.shape[1])
        least: np.ndarray = ratio[0][self._pool_cells[0]]
        for of_pair, cells in zip(ratio[1:], self._pool_cells[1:], strict=True):
            np.minimum(least, of_pair[cells], out=least)
        return least

    def _cells(self, rows: np.ndarray) -> np.ndarray:
        """Return the cell of each row for every pair of knobs [pairs, n]."""
        first, second = rows.T[self._pairs[:, 0]] + 1, rows.T[self._pairs[:, 1]] + 1
        cells: np.ndarray = (first * (MAX_PAIR_VALUES + 1) + second).astype(np.uint8)
        return cells


# The space of an Optuna study whose knobs are known from its trials alone: every combination of their values.

FINEST = 64
"""number of values into which a continuous or wider range is divided"""


class Grid:
    def __init__(self, distributions: Mapping[str, BaseDistribution]) -> None:
        self._distributions = distributions
        self.knobs = tuple(Knob(name, _values(d)) for name, d in distributions.items())
        self._sizes = tuple(len(knob.values) for knob in self.knobs)

    def __len__(self) -> int:
        return min(math.prod(self._sizes), sys.maxsize)

    def contains(self, config: Config) -> bool:
        return all(
            name in config and d._contains(d.to_internal_repr(config[name]))  # noqa: SLF001 - nothing public tells
            for name, d in self._distributions.items()
        )

    def sample(self, rng: np.random.Generator, n: int = 1) -> list[dict[str, Any]]:
        return [self.decode(row) for row in rng.integers(self._sizes, size=(n, len(self._sizes)))]

    def enumerate(self) -> Iterator[dict[str, Any]]:
        return map(self.decode, np.ndindex(*self._sizes))

    def neighbours(self, config: Config) -> list[dict[str, Any]]:
        return [{**config, k.name: value} for k in self.knobs for value in k.values if value != config[k.name]]

    def encode(self, config: Config) -> np.ndarray:
        """Return the nearest point of the grid, int16 [knobs]."""
        return np.array([_position(self._distributions[k.name], k, config[k.name]) for k in self.knobs], np.int16)

    def decode(self, row: Sequence[int] | np.ndarray) -> dict[str, Any]:
        return {knob.name: knob.values[int(i)] for knob, i in zip(self.knobs, row, strict=True)}


def _values(distribution: BaseDistribution) -> tuple[Any, ...]:
    if isinstance(distribution, CategoricalDistribution):
        return distribution.choices
    assert isinstance(distribution, IntDistribution | FloatDistribution)
    low, high, step = distribution.low, distribution.high, distribution.step
    kind = int if isinstance(distribution, IntDistribution) else float
    if step is not None and not distribution.log and (high - low) / step < FINEST:
        return tuple(kind(low + i * step) for i in range(round((high - low) / step) + 1))
    spread = (np.geomspace if distribution.log else np.linspace)(low, high, FINEST)
    if step is not None:
        spread = low + np.round((spread - low) / step) * step
    return tuple(kind(value) for value in np.unique(np.clip(spread, low, high)))


def _position(distribution: BaseDistribution, knob: Knob, value: Any) -> int:
    if isinstance(distribution, CategoricalDistribution):
        return int(distribution.to_internal_repr(value))
    return int(np.abs(np.array(knob.values) - value).argmin())
