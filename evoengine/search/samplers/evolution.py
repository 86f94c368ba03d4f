"""evoengine's own sampler: an evolutionary search that pays only for the offspring a surrogate expects most of.

Every proposal is a whole configuration of the valid space that was not proposed before. Until four trials have come
through they are those that a prior (`prior`) expects to be fastest, or random draws where there is none. From then on a
Gaussian process (`surrogate`) judges a pool of candidates (`pool`), with the prior as its mean until the trials speak
against it. The pool is the whole valid space where that is small, and otherwise what mutation and crossover of the best
trials bring forth beside fresh random points and what the prior expects to be fastest. Proposed is the one with the
largest expected improvement, weighted by how rarely trials have had its pairs of values (`coverage`): a landscape may
have several basins, and the first one found be a poor one. For the same reason, the more proposals came after the best,
the likelier is the next among those far from it. What is learned from are ranks and, less so, logarithms: the
objective's unit does not matter, and a trial that failed is simply the worst.
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
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

from evoengine.records import Config
from evoengine.search.samplers.prior import Mean, Pool, Prior, Space, fit_mean
from evoengine.search.samplers.surrogate import Surrogate
from evoengine.space.definition import Knob

MIN_COMPLETED = 4
"""trials that come through before the surrogate is asked"""
N_ELITES = 8
REFIT_GROWTH = 1.1
"""factor by which the trials learned from grow before hyperparameters are drawn again, and offspring bred again"""
MAX_FIT_TRIALS = 256
"""trials learned from at a fit, half of them the best and half the latest"""
RARITY_EXPONENT = 3
"""power of a candidate's pair coverage by which its expected improvement is divided"""
STALL_WEIGHT = 1.0
"""share of the surrogate's proposals since the best, of all trials, at which every second one explores far from it"""
N_PRIOR_ROWS = 256
"""rows that the prior expects to be fastest, added to the pool of a larger space"""
LOG_WEIGHT = 0.25
"""weight of logarithms in the targets; the rest are ranks"""
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
            self._search.read(study)
            config, operator, parents = self._search.propose(trial.number)
        for key, value in (("operator", operator), ("parents", parents)):
            # as Optuna's own samplers do: `trial` is a copy
            study._storage.set_trial_user_attr(trial._trial_id, key, value)  # noqa: SLF001
            trial.set_user_attr(key, value)
        return config

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        return self._independent.sample_independent(study, trial, param_name, param_distribution)


class _Search:
    """The trials of one study in one space, and what to try next."""

    def __init__(self, space: Space, rng: np.random.Generator, prior: Prior | None) -> None:
        self._space, self._rng, self._prior = space, rng, prior
        self._pool = Pool(space, rng)
        self._surrogate = Surrogate(space.knobs, rng)
        self._coverage = Coverage(space.knobs)
        self._rows: list[np.ndarray] = []
        self._numbers: list[int] = []
        self._values: list[float] = []
        """greater is better; -inf where rejected, NaN where in flight"""
        self._vectors: dict[int, np.ndarray] = {}
        """every objective of a finished trial, greater is better"""
        self._row_numbers: dict[bytes, int] = {}
        self._surrogate_rows: dict[int, None] = {}
        """rows that the surrogate chose"""
        self._prior_rows: set[int] = set()
        """rows that the prior chose"""
        self._dropped = False
        """whether the trials contradict the prior"""
        self._unfinished: list[int] = []
        self._read = 0
        self._fitted: list[int] = []
        self._refit_at = 0.0

    def read(self, study: Study) -> None:
        """Process the changes of the study's trials since the last call."""
        trials = study.get_trials(deepcopy=False)
        numbers = [*self._unfinished, *range(self._read, len(trials))]
        self._read = len(trials)
        self._unfinished = [n for n in numbers if not trials[n].state.is_finished()]
        signs = np.array([1.0 if d == StudyDirection.MAXIMIZE else -1.0 for d in study.directions])
        for trial in (trials[n] for n in numbers):
            config = {k.name: trial.params[k.name] for k in self._space.knobs if k.name in trial.params}
            if trial.state == TrialState.WAITING or not self._space.contains(config):
                continue
            place = self._enter(self._space.encode(config), trial.number)
            operator = trial.user_attrs.get("operator")
            if operator == "prior":
                self._prior_rows.add(place)
            if operator in SURROGATE_OPERATORS and "recalled" in trial.user_attrs:
                self._surrogate_rows[place] = None
            if trial.state.is_finished():
                complete = trial.state == TrialState.COMPLETE and trial.values is not None
                self._vectors[place] = signs * trial.values if complete else np.full(len(signs), -np.inf)
                self._values[place] = self._vectors[place][0]
        if len(signs) > 1 and self._vectors:
            for place, front in zip(self._vectors, fronts(np.array([*self._vectors.values()])), strict=True):
                self._values[place] = -float(front) if (self._vectors[place] > -np.inf).all() else -np.inf

    def propose(self, number: int) -> tuple[dict[str, Any], str, list[int]]:
        """Return a new configuration for the trial, its operator, and the numbers of its parents."""
        row = self._most_promising_row() if self._ready() else None
        if row is not None:
            operator, parents = self._descent(row)
            self._surrogate_rows[len(self._rows)] = None
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

    def _ready(self) -> bool:
        """Return whether enough trials succeeded.

        Once the prior is dropped, only those that it did not choose count.
        """
        through = {place for place, value in enumerate(self._values) if value > -np.inf}
        return len(through - self._prior_rows if self._dropped else through) >= MIN_COMPLETED

    def _fastest_expected(self) -> np.ndarray | None:
        """Return the open row that the prior expects to be fastest; None if it knows none, or was wrong too often."""
        failed = sum(value == -np.inf for value in self._values)
        if not self._prior or self._dropped or failed >= MIN_COMPLETED:
            return None
        rows: Iterable[np.ndarray] = self._prior.fastest(len(self._rows) + 1)
        return next((row for row in rows if row.tobytes() not in self._row_numbers), None)

    def _most_promising_row(self) -> np.ndarray | None:
        """Return the candidate with the largest expected improvement, weighted by rarity; None if none is left."""
        new = range(self._fitted[-1] + 1 if self._fitted else 0, len(self._rows))
        if len(self._fitted) + len(new) >= self._refit_at:
            self._fit()
        else:
            for place in new:
                self._surrogate.extend(self._rows[place])
                self._fitted.append(place)
        if not self._pool.available.any():
            return None
        targets = self._targets()
        mean, deviation = self._predict(targets)
        gain = (
            expected_improvement(mean, deviation, np.nanmax(targets))
            / self._coverage.pair_coverage() ** RARITY_EXPONENT
        )
        best: np.ndarray = self._pool.rows[int(np.where(self._proposable(), gain, -1.0).argmax())]
        return best

    def _proposable(self) -> np.ndarray:
        """Return a mask [n] of the pool's rows that may be proposed: all open rows, or those far from the best."""
        values = np.nan_to_num(np.array(self._values), nan=-np.inf)
        best = int(np.flatnonzero(values == values.max())[-1])
        since = sum(place > best for place in self._surrogate_rows)
        if self._rng.random() < since / (since + STALL_WEIGHT * len(values)):
            live = np.count_nonzero(np.ptp(self._pool.rows, axis=0))
            changed = (self._pool.rows != self._rows[best]).sum(1)
            far: np.ndarray = self._pool.available & (changed >= min(EXPLORE_DISTANCE, -(-live // 2)))
            if far.any():
                return far
        return self._pool.available

    def _fit(self) -> None:
        latest = range(max(0, len(self._rows) - MAX_FIT_TRIALS // 2), len(self._rows))
        self._fitted = sorted({*self._ranked()[: MAX_FIT_TRIALS // 2], *latest})
        self._refit_at = REFIT_GROWTH * len(self._fitted)
        expected = () if self._prior is None else self._prior.fastest(N_PRIOR_ROWS)
        self._pool.breed(np.array([self._rows[i] for i in self._elites()]), expected)
        self._coverage.set_pool(self._pool.rows)
        rows = np.array([self._rows[i] for i in self._fitted])
        targets = self._targets()
        mean = self._fit_mean(targets)
        left = targets if mean is None else (targets - mean.tried) / mean.deviation
        self._surrogate.fit(rows, left, self._pool.rows)

    def _predict(self, targets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return mean and deviation of the pool's scores [m], given those of the learned trials [n]."""
        prior = self._fit_mean(targets)
        self._dropped = self._prior is not None and prior is None
        if prior is None:
            return self._surrogate.predict(targets)
        mean, deviation = self._surrogate.predict((targets - prior.tried) / prior.deviation)
        return prior.pool + prior.deviation * mean, prior.deviation * deviation

    def _fit_mean(self, targets: np.ndarray) -> Mean | None:
        """Return the prior's mean as far as the trials support it; None without a prior, or with several objectives."""
        if self._prior is None or any(len(vector) > 1 for vector in self._vectors.values()):
            return None
        rows = np.array([self._rows[i] for i in self._fitted])
        logs = logarithms(np.array([self._values[i] for i in self._fitted]))
        tried, pool = self._prior.log_us(rows), self._prior.log_us(self._pool.rows)
        return fit_mean(targets, logs, tried, pool, self._surrogate.covariance(rows))

    def _targets(self) -> np.ndarray:
        """Return the targets of the learned trials [n]; NaN for those in progress."""
        values = np.array([self._values[i] for i in self._fitted])
        targets = np.full(len(values), np.nan)
        known = ~np.isnan(values)
        targets[known] = scores(values[known])
        return targets

    def _elites(self) -> list[int]:
        return [i for i in self._ranked()[:N_ELITES] if self._values[i] > -np.inf]

    def _ranked(self) -> list[int]:
        """Return the trials, best first; rejected ones and those in progress come last."""
        values = np.array(self._values)
        order: list[int] = np.argsort(-np.where(np.isnan(values), -np.inf, values), kind="stable").tolist()
        return order

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


def scores(values: np.ndarray) -> np.ndarray:
    """Return targets for the surrogate from values [n], where greater is better.

    They are normal scores, drawn towards the logarithms: ranks exaggerate small differences, and logarithms alone let a
    few outliers decide. Zero and infinite values keep their normal scores, and so do all values if the others differ in
    sign.
    """
    worth, every = normal_scores(values), logarithms(values)
    plain = ~np.isnan(every)
    logs = every[plain]
    if len(logs) and np.ptp(logs) > 0:
        ranks = worth[plain]
        drawn = (logs - logs.mean()) / logs.std() * ranks.std() + ranks.mean()
        # within the ranks' range, or the slowest would fall behind what failed
        worth[plain] += LOG_WEIGHT * (np.clip(drawn, ranks.min(), ranks.max()) - ranks)
    return worth


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


def normal_scores(values: np.ndarray) -> np.ndarray:
    """Return the normal quantiles of the values' ranks [n]; ties share their mean rank."""
    _, place, count = np.unique(values, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(count) - (count - 1) / 2)[place]
    quantiles: np.ndarray = ndtri((ranks - 0.5) / len(values))
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
