"""What a model or another GPU says of configurations leads the sampler where it is right, and is dropped where not."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import multivariate_t, spearmanr

from evoengine.objectives import OBJECTIVES
from evoengine.search.proposer import Proposer
from evoengine.search.samplers import evolution, prior
from evoengine.search.samplers.evolution import Evolution
from evoengine.search.samplers.prior import MIN_MEASURED, Prior, fit_mean
from tests.search.evolution import SPACE, Done, search, speed
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
    """Return what its only source says."""
    (said,) = made.log_us(np.array([space.encode(config) for config in space.enumerate()]))
    return said


def needed(space, made: Prior | None, seed: int) -> int:
    """Trials until the optimum; a trial is worth the inverse of its time."""
    best = min(map(time_us, space.enumerate()))
    sampler = Evolution(space, seed, made)
    for number in range(100):
        (trial,) = search(space, seed, 1, sampler, lambda config: 1 / time_us(config))
        if trial.value == 1 / best:
            return number
    return 100


def operators(found: list[Done]) -> list[str]:
    return [trial.operator.partition(evolution.LED_BY)[0] for trial in found]


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
        monkeypatch.setattr(
            evolution, "fit_mean", lambda scores, logs, tried, of, covariance: believed(tried[0], of[0])
        )
        monkeypatch.setattr(evolution.Evolution, "_follows_prior", lambda search, believed: True)
    without = np.mean([needed(space, None, seed) for seed in range(SEEDS)])
    wrong = np.mean([needed(space, noisy(space, 0.5, seed, -1.0), seed) for seed in range(SEEDS)])
    assert (wrong < 1.3 * without + evolution.MIN_COMPLETED) == dropping, (wrong, without)


def believed(tried: np.ndarray, of: np.ndarray) -> prior.Mean:
    return prior.Mean(-3 * (tried - of.mean()), -3 * (of - of.mean()), 0.5)


def test_without_a_prior_and_with_one_that_knows_nothing_proposals_are_the_same(space, monkeypatch):
    for whole in (prior.ENUMERABLE, 10):
        monkeypatch.setattr(prior, "ENUMERABLE", whole)
        plain, empty = (search(space, 3, 40, Evolution(space, 3, made)) for made in (None, Prior(space)))
        assert [t.config for t in plain] == [t.config for t in empty]
        assert operators(plain) == operators(empty)


LED_FIRST = ["prior", "prior", "random", "prior"]


def test_the_first_trials_are_those_that_the_prior_expects_to_be_fastest(space, monkeypatch):
    monkeypatch.setattr(evolution, "TIED", 0.0)
    made = noisy(space, 0.3, 1)
    found = search(space, 0, 8, Evolution(space, 0, made))
    fastest = np.sort(expected(made, space))
    (tried,) = made.log_us(np.array([space.encode(t.config) for t in found]))
    assert tried[:2].tolist() == fastest[:2].tolist()
    assert tried[3] == min(us for us in fastest if us not in tried[:3])
    assert operators(found)[:4] == LED_FIRST and "prior" not in operators(found)[4:]


def test_of_what_a_model_predicts_to_be_as_fast_any_is_tried_first(space):
    """Predictions err by more than the fastest ones differ by, so that their order is none."""
    made = noisy(space, 0.3, 1)
    rows = np.array([space.encode(config) for config in space.enumerate()])
    (said,) = made.log_us(rows)
    tied = {row.tobytes() for row in rows[said <= said.min() + evolution.TIED]}
    first = {space.encode(Evolution(space, seed, made).ask().config).tobytes() for seed in range(8 * len(tied))}
    assert first == tied and len(tied) > 1


def test_what_was_measured_elsewhere_is_tried_in_its_order(space):
    made = Prior(space)
    for config in space.enumerate():
        made.measure(config, time_us(config))
    found = search(space, 0, 2, Evolution(space, 0, made))
    assert [time_us(t.config) for t in found] == sorted(map(time_us, space.enumerate()))[:2]


def test_the_unit_of_a_prior_does_not_matter(space):
    searches = []
    for factor in (1.0, 1024.0):
        made = Prior(space)
        for config in space.enumerate():
            made.predict(config, factor * time_us(config))
        searches.append(search(space, 2, 30, Evolution(space, 2, made)))
    assert [t.config for t in searches[0]] == [t.config for t in searches[1]]


def test_what_a_prior_does_not_know_is_tried_too(space):
    """The model reads the family plain alone; what is best is of the other."""
    made = Prior(space)
    for config in space.enumerate():
        if config["family"] == "plain":
            made.predict(config, time_us(config))
    found = search(space, 0, 60, Evolution(space, 0, made))
    assert max(t.value for t in found) == 10
    assert found[0].config["family"] == "plain"


def test_where_the_favourites_of_a_prior_fail_the_search_draws_at_random(space):
    made = noisy(space, 0.1, 0)
    rows = np.array([space.encode(config) for config in space.enumerate()])
    bad = {row.tobytes() for row in rows[np.argsort(made.log_us(rows)[0])[:60]]}
    found = search(
        space, 0, 40, Evolution(space, 0, made),
        lambda config: -np.inf if space.encode(config).tobytes() in bad else speed(config),
    )  # fmt: skip
    came_through = [t.number for t in found if t.value > -np.inf]
    assert [o for o in operators(found)[: came_through[3] + 1] if o not in ("prior", "random")] == []
    fourth = [t.number for t in found if t.value == -np.inf][3]
    led = [number for number, operator in enumerate(operators(found)) if operator == "prior"]
    assert led == [0, 1, 3, 4][: len(led)] and len(led) >= 3 and led[-1] <= fourth
    assert operators(found)[came_through[3] + 1] not in ("prior", "random")


def test_a_space_too_large_to_hold_is_led_too(space, monkeypatch):
    monkeypatch.setattr(prior, "ENUMERABLE", 10)
    made = noisy(space, 0.1, 0)
    found = search(space, 0, 20, Evolution(space, 0, made))
    assert operators(found)[:4] == LED_FIRST
    assert max(t.value for t in found) > 9


@pytest.mark.parametrize("expected", [evolution.N_PRIOR_ROWS, 0])
def test_what_a_prior_expects_to_be_fast_is_in_the_pool_of_a_large_space(space, monkeypatch, expected):
    """The best is many knobs from all that is tried, and its prediction comes after the search has begun."""
    for name, value in (("ENUMERABLE", 10), ("N_RANDOM", 2), ("N_CROSSED", 1)):
        monkeypatch.setattr(prior, name, value)
    monkeypatch.setattr(evolution, "N_PRIOR_ROWS", expected)
    monkeypatch.setattr(evolution, "N_ELITES", 0)
    made = Prior(space)
    sampler = Evolution(space, 0, made)
    found = search(space, 0, 12, sampler)
    best = max(space.enumerate(), key=speed)
    assert best not in [t.config for t in found]
    for config in [best, *(t.config for t in found)]:
        made.predict(config, time_us(config))
    sampler._fit(sampler._models[0])
    assert (space.encode(best) == sampler._pool.rows).all(1).any() == bool(expected)


def test_the_fastest_of_a_prior_in_their_order(space):
    made = noisy(space, 0.3, 0)
    rows = made.fastest(9)
    assert made.log_us(rows)[0].tolist() == np.sort(expected(made, space))[:9].tolist()
    assert rows.dtype == np.int16 and len(made.fastest(1000)) == len(space)
    assert Prior(space).fastest(3).shape == (0, len(space.knobs))


def test_with_several_objectives_the_prior_leads_the_first_trials_only(space, monkeypatch):
    monkeypatch.setattr(evolution, "fit_mean", lambda *_: pytest.fail("it knows of time alone"))
    proposer = Proposer(
        space, "evolution", 0, objectives=(OBJECTIVES["tflops"], OBJECTIVES["registers"]), prior=noisy(space, 0.2, 0)
    )
    found = []
    for _ in range(20):
        proposal = proposer.propose()
        proposer.tell(proposal, (speed(proposal.config), 32.0 * proposal.config["warps"]))
        found.append(proposal.operator.partition(evolution.LED_BY)[0])
    assert "prior" in found[:8] and "prior" not in found[8:]


@pytest.mark.parametrize("sampler", ["tpe", "random"])
def test_other_samplers_make_no_use_of_it(space, sampler):
    proposers = (Proposer(space, sampler, 1, prior=made) for made in (None, noisy(space, 0.2, 0)))
    plain, led = ([p.propose().key for _ in range(6)] for p in proposers)
    assert plain == led


def test_sources_are_heard_in_turn_the_measured_ones_first(space):
    configs = list(space.enumerate())
    made = Prior(space)
    for place, config in enumerate(configs):
        made.predict(config, 1.0 + place)
    for place, config in enumerate(configs[10 : 10 + MIN_MEASURED]):
        made.measure(config, 5.0 - 0.1 * place, "a100")
    for config in configs[: MIN_MEASURED - 1]:
        made.measure(config, 1.0, "too few")
    assert made.sources == ("a100", prior.MODEL)
    rows = made.fastest(3)
    last = configs[10 + MIN_MEASURED - 1]
    assert [space.decode(row) for row in rows] == [last, configs[0], configs[10 + MIN_MEASURED - 2]]
    said = np.exp(made.log_us(rows))
    assert np.isnan(said[0, 1]) and said[1, 1] == pytest.approx(1.0) and len(made) == len(configs)


def test_of_two_sources_the_one_that_the_trials_confirm_is_believed(space, monkeypatch):
    monkeypatch.setattr(prior, "FAILURES", 32)
    made = noisy(space, 0.3, 0, -1.0)
    for config in space.enumerate():
        made.measure(config, 1.3 * time_us(config) * np.exp(0.1 * np.sin(len(str(config)))), "rtx3090")
    found = search(space, 0, 30, Evolution(space, 0, made), lambda config: 1 / time_us(config))
    led = [t.operator.partition(evolution.LED_BY)[2] for t in found[4:]]
    assert led.count("rtx3090") >= 12
    assert sum(prior.MODEL in of for of in led) <= 4, led


def test_one_proposal_of_eight_ignores_the_prior(space, monkeypatch):
    monkeypatch.setattr(prior, "FAILURES", 32)
    monkeypatch.setattr(prior, "FAILURE", 0.0)
    found = search(space, 0, 32, Evolution(space, 0, noisy(space, 0.1, 0)), lambda config: 1 / time_us(config))
    led = [evolution.LED_BY in t.operator for t in found]
    assert not any(led[2::8]) and sum(led) >= 16


# ── trust ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_forecasts_that_the_results_confirm_add_trust_and_others_take_it():
    good, bad = prior.Trust(), prior.Trust()
    for place in range(6):
        good.forecast(place, [(1.0, 0.3), (0.0, 0.3)], True)
        bad.forecast(place, [(0.0, 0.3), (1.0, 0.3)], True)
    for trust in (good, bad):
        trust.learn(range(6), np.array([1.0] * 5 + [np.nan]))
    assert good.likelihood(5, 6, True) > 0.99 and bad.likelihood(5, 6, True) < 0.05


def test_each_proposal_that_followed_the_prior_without_a_new_best_takes_trust():
    trust = prior.Trust()
    for place in range(20):
        trust.forecast(place, [(0.0, 1.0), (0.0, 1.0)], True)
    trust.learn(range(20), np.zeros(20))
    assert trust.likelihood(16, 20, True) == pytest.approx(1 / (1 + np.exp(3 * prior.FAILURE - prior.CREDIT)))
    assert trust.likelihood(25, 26, False) > 0.5, "a best that did not follow the prior changes nothing"
    for place in range(26, 32):
        trust.forecast(place, [(0.0, 1.0), (0.0, 1.0)], True)
    trust.forecast(32, [(0.0, 0.1), (3.0, 0.1)], True)
    trust.learn([32], np.zeros(1))
    assert trust.likelihood(25, 33, False) == 0.0 < trust.likelihood(32, 33, False)


@pytest.mark.parametrize(("measured", "share"), [(False, prior.FAILURE_SHARE), (True, 0.0)])
def test_a_prior_without_a_new_best_is_followed_a_few_times_and_a_model_by_a_share_of_the_trials(measured, share):
    trust = prior.Trust()
    for place in range(1000):
        if trust.likelihood(-1, place, measured) > 0:
            trust.forecast(place, [(1.0, 0.1), (0.0, 0.1)], True)
            trust.learn([place], np.ones(1))
    assert len(trust._followed) == prior.FAILURES + share * 1000


def test_a_board_that_was_measured_is_no_longer_followed_where_a_model_of_the_same_figures_is(space):
    """The best of the space is what it does not know, so that nothing that follows it is a new best for long."""
    followed = {}
    for measured in (False, True):
        made = Prior(space)
        for config in sorted(space.enumerate(), key=time_us)[20:]:
            (made.measure if measured else made.predict)(config, time_us(config))
        found = search(space, 0, 60, Evolution(space, 0, made), lambda config: 1 / time_us(config))
        followed[measured] = sum(evolution.LED_BY in t.operator for t in found)
    assert followed[True] < followed[False], followed


def test_what_the_prior_found_is_no_sign_that_the_search_without_it_has_stalled(space):
    """Else every second proposal would be far from a best that was found at once, in whose neighbourhood none was."""
    sampler = Evolution(space, 0, noisy(space, 0.0, 0))
    found = search(space, 0, 24, sampler, lambda config: 1 / time_us(config))
    led = [evolution.LED_BY in t.operator for t in found]
    assert led[sampler._latest_best()] and not led[sampler._latest_best(own=True)]
    assert sampler._since_best(own=True) < sampler._since_best(own=False)


def test_what_a_prior_learns_while_the_search_goes_on_counts(space):
    made = Prior(space)
    sampler = Evolution(space, 0, made)
    search(space, 0, 1, sampler)
    best = max(space.enumerate(), key=speed)
    made.predict(best, 1.0)
    assert search(space, 0, 1, sampler)[0].config == best


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
    return fit_mean(scores, logs, predicted[None], predicted[None], 1.1 * np.eye(len(logs)))


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
    made = fit_mean(logs, logs, -logs[None], of_pool[None], np.eye(21))
    assert made.pool[-1] == pytest.approx(np.median(made.pool[:-1]))


@pytest.mark.parametrize("of_pool", [np.full(5, np.nan), np.full(5, 3.0)])
def test_a_prior_that_says_nothing_or_the_same_of_all_gives_no_mean(of_pool):
    logs = np.arange(5.0)
    assert fit_mean(logs, logs, of_pool[None], of_pool[None], np.eye(5)) is None
