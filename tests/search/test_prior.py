"""What a model or another GPU says of configurations leads the sampler where it is right, and is dropped where not."""

from __future__ import annotations

import pickle

import numpy as np
import optuna
import pytest
from scipy.stats import multivariate_t, spearmanr

from evoengine.objectives import OBJECTIVES
from evoengine.search.proposer import Proposer
from evoengine.search.samplers import evolution, prior
from evoengine.search.samplers.evolution import EvolutionSampler, Grid
from evoengine.search.samplers.prior import MIN_MEASURED, Prior, fit_mean
from tests.support.evolution import SPACE, search, speed, suggest
from tests.support.exhaustive import more

SEEDS = 8


@pytest.fixture
def space(load):
    """154 configurations."""
    return load(SPACE)


def time_us(config) -> float:
    return 1e3 * np.exp(-0.3 * speed(config))


def noisy(space, deviation: float, seed: int, turn: float = 1.0) -> Prior:
    """The times with log-normal noise; with `turn` -1 the slow ones are said to be fast."""
    noise = np.random.default_rng(seed)
    made = Prior(space)
    for config in space.enumerate():
        made.predict(config, time_us(config) ** turn * np.exp(deviation * noise.normal()))
    return made


def expected(made: Prior, space) -> np.ndarray:
    return made.log_us(np.array([space.encode(config) for config in space.enumerate()]))


def needed(space, made: Prior | None, seed: int) -> int:
    """Trials until the optimum; a trial is worth the inverse of its time."""
    best = min(map(time_us, space.enumerate()))
    study = optuna.create_study(direction="maximize", sampler=EvolutionSampler(seed, space, made))
    for number in range(100):
        trial = study.ask()
        found = time_us(suggest(trial, space))
        if found == best:
            return number
        study.tell(trial, 1 / found)
    return 100


def operators(study: optuna.Study) -> list[str]:
    return [trial.user_attrs["operator"] for trial in study.trials]


def test_a_prior_of_rank_correlation_0_9_halves_the_trials_at_least(space):
    made = [noisy(space, 0.27, seed) for seed in range(SEEDS)]
    truth = [time_us(config) for config in space.enumerate()]
    assert 0.85 < np.mean([spearmanr(expected(m, space), truth).statistic for m in made]) < 0.93
    without = np.mean([needed(space, None, seed) for seed in range(SEEDS)])
    assert np.mean([needed(space, m, seed) for seed, m in enumerate(made)]) < without / 2


@pytest.mark.parametrize("dropping", [True, *more([False])])
def test_a_prior_that_is_wrong_is_dropped_and_costs_little(space, monkeypatch, dropping):
    """Believed to the end it costs more than half as many trials again."""
    if not dropping:
        monkeypatch.setattr(evolution, "fit_mean", lambda scores, logs, tried, of, covariance: believed(tried, of))
    without = np.mean([needed(space, None, seed) for seed in range(SEEDS)])
    wrong = np.mean([needed(space, noisy(space, 0.5, seed, -1.0), seed) for seed in range(SEEDS)])
    assert (wrong < 1.3 * without + evolution.MIN_COMPLETED) == dropping, (wrong, without)


def believed(tried: np.ndarray, of: np.ndarray) -> prior.Mean:
    return prior.Mean(-3 * (tried - of.mean()), -3 * (of - of.mean()), 0.5)


def test_without_a_prior_and_with_one_that_knows_nothing_proposals_are_the_same(space, monkeypatch):
    for whole in (prior.ENUMERABLE, 10):
        monkeypatch.setattr(prior, "ENUMERABLE", whole)
        plain, empty = (search(space, 3, 40, EvolutionSampler(3, space, made)) for made in (None, Prior(space)))
        assert [t.params for t in plain.trials] == [t.params for t in empty.trials]
        assert operators(plain) == operators(empty)


def test_the_first_trials_are_those_that_the_prior_expects_to_be_fastest(space):
    made = noisy(space, 0.3, 1)
    study = search(space, 0, 8, EvolutionSampler(0, space, made))
    fastest = np.sort(expected(made, space))[:4]
    tried = made.log_us(np.array([space.encode(t.params) for t in study.trials]))
    assert tried[:4].tolist() == fastest.tolist()
    assert operators(study)[:4] == ["prior"] * 4 and "prior" not in operators(study)[4:]


def test_the_unit_of_a_prior_does_not_matter(space):
    studies = []
    for factor in (1.0, 1024.0):
        made = Prior(space)
        for config in space.enumerate():
            made.predict(config, factor * time_us(config))
        studies.append(search(space, 2, 30, EvolutionSampler(2, space, made)))
    assert [t.params for t in studies[0].trials] == [t.params for t in studies[1].trials]


def test_what_a_prior_does_not_know_is_tried_too(space):
    """The model reads the family plain alone; what is best is of the other."""
    made = Prior(space)
    for config in space.enumerate():
        if config["family"] == "plain":
            made.predict(config, time_us(config))
    study = search(space, 0, 60, EvolutionSampler(0, space, made))
    assert study.best_value == 10
    assert study.trials[0].params["family"] == "plain"


def test_where_the_favourites_of_a_prior_fail_the_search_draws_at_random(space):
    made = noisy(space, 0.1, 0)
    rows = np.array([space.encode(config) for config in space.enumerate()])
    bad = {row.tobytes() for row in rows[np.argsort(made.log_us(rows))[:60]]}
    study = search(
        space, 0, 40, EvolutionSampler(0, space, made),
        lambda config: -np.inf if space.encode(config).tobytes() in bad else speed(config),
    )  # fmt: skip
    came_through = [t.number for t in study.trials if t.value > -np.inf]
    assert operators(study)[: came_through[3] + 1] == ["prior"] * 4 + ["random"] * (came_through[3] - 3)
    assert operators(study)[came_through[3] + 1] not in ("prior", "random")


def test_a_space_too_large_to_hold_is_led_too(space, monkeypatch):
    monkeypatch.setattr(prior, "ENUMERABLE", 10)
    made = noisy(space, 0.1, 0)
    study = search(space, 0, 20, EvolutionSampler(0, space, made))
    assert operators(study)[:4] == ["prior"] * 4
    assert study.best_value > 9


@pytest.mark.parametrize("expected", [evolution.N_PRIOR_ROWS, 0])
def test_what_a_prior_expects_to_be_fast_is_in_the_pool_of_a_large_space(space, monkeypatch, expected):
    """The best is many knobs from all that is tried, and its prediction comes when the search is under way."""
    for name, value in (("ENUMERABLE", 10), ("N_RANDOM", 2), ("N_CROSSED", 1)):
        monkeypatch.setattr(prior, name, value)
    monkeypatch.setattr(evolution, "N_PRIOR_ROWS", expected)
    monkeypatch.setattr(evolution, "N_ELITES", 0)
    made = Prior(space)
    sampler = EvolutionSampler(0, space, made)
    study = search(space, 0, 12, sampler)
    best = max(space.enumerate(), key=speed)
    assert best not in [t.params for t in study.trials]
    for config in [best, *(t.params for t in study.trials)]:
        made.predict(config, time_us(config))
    sampler._search._fit()
    assert (space.encode(best) == sampler._search._pool.rows).all(1).any() == bool(expected)


def test_the_fastest_of_a_prior_in_their_order(space):
    made = noisy(space, 0.3, 0)
    rows = made.fastest(9)
    assert made.log_us(rows).tolist() == np.sort(expected(made, space))[:9].tolist()
    assert rows.dtype == np.int16 and len(made.fastest(1000)) == len(space)
    assert Prior(space).fastest(3).shape == (0, len(space.knobs))


def test_a_sampler_kept_in_a_file_goes_on_with_its_prior():
    grid = Grid({name: optuna.distributions.IntDistribution(0, 8) for name in "ab"})
    made = Prior(grid)
    for config in grid.enumerate():
        made.predict(config, 1.0 + config["a"] + config["b"])
    sampler, found = EvolutionSampler(0, grid, made), []
    study = optuna.create_study(sampler=sampler)
    for _ in range(3):
        study.optimize(lambda trial: 1.5 + sum(trial.suggest_categorical(name, (*range(9),)) for name in "ab"), 1)
        found.append(sum(study.trials[-1].params.values()))
        study.sampler = pickle.loads(pickle.dumps(study.sampler))
    assert found == [0, 1, 1]
    assert operators(study) == ["prior"] * 3


def test_with_several_objectives_the_prior_leads_the_first_trials_only(space, monkeypatch):
    monkeypatch.setattr(evolution, "fit_mean", lambda *_: pytest.fail("it knows of time alone"))
    proposer = Proposer(
        space, "evolution", 0, objectives=(OBJECTIVES["tflops"], OBJECTIVES["registers"]), prior=noisy(space, 0.2, 0)
    )
    found = []
    for _ in range(20):
        proposal = proposer.propose()
        proposer.tell(proposal, (speed(proposal.config), 32.0 * proposal.config["warps"]))
        found.append(proposal.operator)
    assert "prior" in found[:8] and "prior" not in found[8:]


@pytest.mark.parametrize("sampler", ["tpe", "random"])
def test_other_samplers_make_no_use_of_it(space, sampler):
    proposers = (Proposer(space, sampler, 1, prior=made) for made in (None, noisy(space, 0.2, 0)))
    plain, led = ([p.propose().key for _ in range(6)] for p in proposers)
    assert plain == led


def test_where_figures_of_another_gpu_disagree_with_predictions_those_count_for_nothing(space):
    made = noisy(space, 0.1, 0, -1.0)
    for config in list(space.enumerate())[::2]:
        made.measure(config, 1.3 * time_us(config))
    known = ~np.isnan(expected(made, space))
    assert known[::2].all() and not known[1::2].any()


def test_enough_figures_of_another_gpu_come_before_predictions_which_are_shifted_to_agree(space):
    configs = list(space.enumerate())
    rows = np.array([space.encode(config) for config in configs])
    made = Prior(space)
    for config in configs[:100]:
        made.predict(config, 10.0)
    for config in configs[50 : 50 + MIN_MEASURED - 1]:
        made.measure(config, 40.0)
    assert np.allclose(np.exp(made.log_us(rows[:100])), 10.0), "too few to go by"
    made.measure(configs[120], 70.0)
    found = np.exp(made.log_us(rows))
    assert np.allclose(found[:100], 40.0) and found[120] == pytest.approx(70.0)
    assert np.isnan(np.delete(found[100:], 20)).all()


def test_a_sibling_wins_over_a_wrong_model(space):
    made = noisy(space, 0.5, 0, -1.0)
    for config in list(space.enumerate())[::2]:
        made.measure(config, 1.3 * time_us(config))
    study = search(space, 0, 4, EvolutionSampler(0, space, made), lambda config: 1 / time_us(config))
    times = sorted(time_us(config) for config in list(space.enumerate())[::2])
    assert [1 / t.value for t in study.trials] == pytest.approx(times[:4])


def test_what_a_prior_learns_while_the_study_goes_on_counts(space):
    made = Prior(space)
    sampler = EvolutionSampler(0, space, made)
    search(space, 0, 1, sampler)
    best = max(space.enumerate(), key=speed)
    made.predict(best, 1.0)
    assert search(space, 0, 1, sampler).trials[0].params == best


# ── the mean ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_evidence_is_that_of_students_t():
    rng = np.random.default_rng(0)
    basis, covariance = rng.normal(size=(9, 2)), np.cov(rng.normal(size=(9, 40))) + np.eye(9)
    of, coefficients, scale = rng.normal(size=9), np.array([0.0, 1.0]), 0.7
    shape = scale**2 * (covariance + basis @ np.diag(prior.LINE_VARIANCES) @ basis.T)
    found = prior._fit_line(of, basis, coefficients, covariance, scale)
    assert found.evidence == pytest.approx(
        multivariate_t(basis @ coefficients, shape, prior.DEGREES_OF_FREEDOM).logpdf(of)
    )


def mean_of(logs: np.ndarray, predicted: np.ndarray) -> prior.Mean | None:
    """Of independent rows, tried all."""
    scores = (logs - logs.mean()) / logs.std()
    return fit_mean(scores, logs, predicted, predicted, 1.1 * np.eye(len(logs)))


def test_the_better_a_prior_the_less_is_left_and_a_wrong_one_is_none():
    rng = np.random.default_rng(0)
    logs, noise = rng.normal(size=30), rng.normal(size=30)
    good, fair = mean_of(logs, -logs + 0.1 * noise), mean_of(logs, -logs + 0.6 * noise)
    assert good.deviation < fair.deviation
    assert spearmanr(good.pool, logs).statistic > 0.95
    assert mean_of(logs, logs + 0.1 * noise) is None
    assert mean_of(logs, noise) is None


def test_rows_that_nothing_is_known_of_get_the_usual_mean():
    rng = np.random.default_rng(0)
    logs = rng.normal(size=21)
    of_pool = np.array([*-logs, np.nan])
    made = fit_mean(logs, logs, -logs, of_pool, np.eye(21))
    assert made.pool[-1] == pytest.approx(np.median(made.pool[:-1]))


@pytest.mark.parametrize("of_pool", [np.full(5, np.nan), np.full(5, 3.0)])
def test_a_prior_that_says_nothing_or_the_same_of_all_gives_no_mean(of_pool):
    logs = np.arange(5.0)
    assert fit_mean(logs, logs, of_pool, of_pool, np.eye(5)) is None
