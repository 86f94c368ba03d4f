from __future__ import annotations

import tracemalloc
from collections import Counter
from itertools import combinations

import numpy as np
import pytest

from evoengine.records import Config, config_key
from evoengine.search.samplers import evolution, prior, surrogate
from evoengine.search.samplers.evolution import (
    LED_WEIGHT,
    RARITY_EXPONENT,
    STALL_WEIGHT,
    Coverage,
    Evolution,
    fronts,
    normal_scores,
    scores,
)
from evoengine.search.samplers.surrogate import Surrogate
from evoengine.space.definition import Knob
from evoengine.space.space import SearchSpace
from tests.search.evolution import SPACE, Grid, search, speed
from tests.support.exhaustive import more


@pytest.fixture
def space(load) -> SearchSpace:
    """154 configurations; two knobs are conditional, one of them on the other."""
    return load(SPACE)


def test_every_proposal_from_a_bred_pool_is_valid_and_none_comes_twice(space, monkeypatch):
    monkeypatch.setattr(prior, "ENUMERABLE", 10)
    found = search(space, seed=0, trials=100)
    assert all(space.contains(t.config) for t in found)
    assert len({config_key(t.config) for t in found}) == 100


def test_a_small_space_is_walked_to_its_last_configuration_without_repeating_one(space):
    found = search(space, seed=0, trials=len(space))
    assert {config_key(t.config) for t in found} == {config_key(c) for c in space.enumerate()}


def test_the_same_seed_gives_the_same_search(space):
    one, same, other = ([t.config for t in search(space, seed, 40)] for seed in (1, 1, 2))
    assert one == same
    assert one != other


def test_more_trials_than_there_is_room_for_at_first_make_no_difference(space, monkeypatch):
    plain = search(space, 0, 40)
    monkeypatch.setattr(evolution, "FIRST_ROWS", 3)
    assert search(space, 0, 40) == plain


def test_a_trial_adds_no_more_than_a_few_hundred_bytes_to_a_search(space, monkeypatch):
    """A study of 100,000 trials in memory took 600 MB."""
    monkeypatch.setattr(prior, "ENUMERABLE", 10)
    grid = Grid(**dict.fromkeys("abcdefgh", range(8)))
    sampler, rows = Evolution(grid, 0), np.random.default_rng(0).integers(8, size=(22_000, 8))
    configs = [grid.decode(row) for row in rows]
    for config in configs[:2000]:
        sampler.recall(config, (1.0,), (), "mutation")
    tracemalloc.start()
    for config in configs[2000:]:
        sampler.recall(config, (1.0,), (), "mutation")
    grown, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert grown / 20_000 < 350, grown


def test_workers_in_parallel_get_configurations_that_differ(space):
    sampler = Evolution(space, 0)
    tried = {config_key(t.config) for t in search(space, 0, 20, sampler)}
    batch = [sampler.ask().config for _ in range(12)]
    assert len({config_key(config) for config in batch} - tried) == 12


def test_a_minimum_is_searched_for_as_well_as_a_maximum(space):
    found = search(space, 0, 50, Evolution(space, 0, directions=("minimize",)), lambda config: 1 / speed(config))
    assert min(t.value for t in found) == pytest.approx(0.1)


def test_the_unit_of_the_objective_does_not_matter(space):
    plain = search(space, seed=3, trials=40)
    stretched = search(space, seed=3, trials=40, value=lambda config: 1e3 * speed(config) ** 2)
    assert [t.config for t in plain] == [t.config for t in stretched]


@pytest.mark.parametrize("failed", [0.0, -np.inf, np.nan])
def test_a_region_that_fails_is_left(failed):
    """The further right the better; then all fails, where a climb would lead on to."""

    def value(config: Config) -> float:
        return failed if config["x"] > 11 else 1 + config["x"] + config["y"] / 10

    found = search(grid := Grid(x=range(20), y=range(20)), 0, 70, Evolution(grid, 0), value)
    assert np.mean([t.config["x"] > 11 for t in found[-50:]]) < 0.3
    assert max(found, key=lambda t: np.nan_to_num(t.value, nan=-np.inf)).config["x"] == 11


@pytest.mark.parametrize("stall, least, most", [(STALL_WEIGHT, 0.45, 0.7), *more([(1e9, 0.0, 0.42)])])
def test_the_more_proposals_came_after_the_best_the_more_are_far_from_it(space, monkeypatch, stall, least, most):
    """The first trial is the best, and the nearer to it the better, so that nothing calls for going far."""
    monkeypatch.setattr(evolution, "STALL_WEIGHT", stall)
    far = []
    for seed in range(20):
        first = space.encode(search(space, seed, 1)[0].config)
        found = search(space, seed, 20, value=lambda config, first=first: -(space.encode(config) != first).sum())
        far += [(space.encode(trial.config) != first).sum() >= 3 for trial in found[8:]]  # 3: half of five knobs
    assert least <= np.mean(far) <= most, np.mean(far)


@pytest.mark.parametrize("power", [evolution.RARITY_EXPONENT, *more([0])])
def test_pairs_of_values_that_no_trial_had_are_looked_at(monkeypatch, power):
    """Five knobs of four values, of which only the first matters: how many of the 160 pairs 30 trials have."""
    monkeypatch.setattr(evolution, "RARITY_EXPONENT", power)
    monkeypatch.setattr(evolution, "STALL_WEIGHT", 1e9)
    pairs, grid = [], Grid(**dict.fromkeys("abcde", range(4)))
    for seed in range(24):
        found = search(grid, seed, 30, value=lambda config: 1.0 + config["a"])
        columns = [[trial.config[name] for trial in found] for name in "abcde"]
        pairs.append(sum(len({*zip(*pair, strict=True)}) for pair in combinations(columns, 2)))
    assert (np.mean(pairs) > 115) == (power > 0), np.mean(pairs)  # 118 and 113 when this was written


def test_minus_infinity_is_good_where_less_is_better(space):
    sampler = Evolution(space, 0, directions=("minimize",))
    found = search(space, 0, 30, sampler, lambda config: -np.inf if config["family"] == "tensor" else 1.0)
    assert "random" not in [t.operator for t in found[4:]]
    assert all(t.config["family"] == "tensor" for t in found[-10:])


def test_the_kin_of_a_given_point_follow_it(space):
    sampler = Evolution(space, 0)
    start = {"family": "tensor", "tile": 64, "warps": 4, "stages": 3, "order": "rows"}
    given = sampler.ask(start)
    sampler.tell(given.number, (speed(start),))
    assert (given.number, given.config, given.operator) == (0, start, None)
    assert ("mutation", (0,)) in [(t.operator, t.parents) for t in search(space, 0, 8, sampler)]


def test_every_trial_says_what_it_came_from(space):
    found = search(space, seed=0, trials=80)
    operators = [t.operator for t in found]
    assert operators[:4] == ["random"] * 4 and "random" not in operators[4:]
    assert Counter(operators)["mutation"] > 40
    for trial in found:
        parents = [found[n] for n in trial.parents]
        assert all(p.number < trial.number for p in parents)
        if trial.operator == "mutation":
            assert len(parents) == 1 and len(set(trial.config.items()) - set(parents[0].config.items())) <= 2
        if trial.operator == "crossover":
            either = set(parents[0].config.items()) | set(parents[1].config.items())
            assert set(trial.config.items()) <= either


def test_the_optimum_takes_a_quarter_of_the_trials_that_random_search_takes(space):
    values = np.array([speed(config) for config in space.enumerate()])
    at_random = [np.random.default_rng(seed).permutation(values).tolist().index(10) for seed in range(9)]
    needed = [[t.value for t in search(space, seed, 60)].index(10) for seed in range(9)]
    assert np.median(needed) < np.median(at_random) / 4


@pytest.mark.parametrize("choices", [(None, 2, 4), (None, "a"), (1, "auto"), (None, True, 1.5, "x")])
def test_choices_of_unlike_types_are_searched_too(choices):
    found = search(
        Grid(c=choices, x=range(10)), 0, 30, value=lambda config: -abs(choices.index(config["c"]) - 1) - config["x"]
    )
    assert max(found, key=lambda t: t.value).config == {"c": choices[1], "x": 0}


def test_a_surrogate_extended_by_a_row_is_the_one_fitted_to_all(monkeypatch):
    monkeypatch.setattr("evoengine.search.samplers.surrogate.FIRST_DRAWS", 0)
    rng = np.random.default_rng(0)
    knobs = (Knob("a", (1, 2, 4, 8)), Knob("b", ("x", "y", "z")), Knob("c", tuple(range(9))))
    rows = np.array([rng.integers((4, 3, 9)) for _ in range(30)], np.int16)
    candidates = np.unique(rows, axis=0)
    targets = rng.normal(size=30)
    whole, grown = Surrogate(knobs, rng), Surrogate(knobs, rng)
    whole.fit(rows, targets, candidates)
    grown.fit(rows[:10], targets[:10], candidates)
    for row in rows[10:]:
        grown.extend(row)
    np.testing.assert_allclose(grown.predict(targets), whole.predict(targets), atol=2e-3)


def test_a_surrogate_is_sure_of_what_was_tried_and_unsure_of_the_rest():
    knobs = (Knob("a", tuple(range(20))), Knob("b", tuple(range(20))))
    candidates = np.array(list(np.ndindex(20, 20)), np.int16)
    rng = np.random.default_rng(0)
    tried = rng.choice(400, 40, replace=False)
    truth = -np.hypot(candidates[:, 0] - 12, candidates[:, 1] - 5)
    truth = (truth - truth.mean()) / truth.std()
    surrogate = Surrogate(knobs, rng)
    surrogate.fit(candidates[tried], truth[tried], candidates)
    mean, deviation = surrogate.predict(truth[tried])
    assert np.corrcoef(mean, truth)[0, 1] > 0.9
    assert deviation[tried].max() < np.median(np.delete(deviation, tried))


def test_a_row_is_as_common_as_its_rarest_pair_of_values():
    knobs = [Knob("a", (1, 2)), Knob("b", ("x", "y")), Knob("many", (*range(9),)), Knob("one", (7,)), Knob("c", (0, 1))]
    coverage = Coverage(knobs)
    prior = np.array([[a, b, 0, 0, c] for a in (0, 1) for b in (0, 1) for c in (0, 1)], np.int16)
    coverage.set_pool(prior)
    assert coverage.pair_coverage(np.arange(8)).tolist() == [1.0] * 8
    for many in range(8):
        coverage.add(np.array([0, 0, many, 0, 0], np.int16))
    # of 8 trials spread evenly 2 had each pair; 4 are added to both
    had, had_not = (8 + 4) / (2 + 4), 4 / (2 + 4)
    assert coverage.pair_coverage(np.arange(8)) == pytest.approx([had, *[had_not] * 7])


def test_an_inactive_knob_counts_as_one_more_value(space):
    coverage = Coverage(space.knobs)
    rows = np.array([space.encode(config) for config in space.enumerate()])
    plain = rows[:, [knob.name for knob in space.knobs].index("stages")] < 0
    coverage.set_pool(rows)
    for row in rows[plain]:
        coverage.add(row)
    of_rows = coverage.pair_coverage(np.arange(len(rows)))
    assert of_rows[plain].min() > 1 > of_rows[~plain].max()


@pytest.mark.parametrize("knobs", [[Knob("a", (*range(9),)), Knob("b", (1, 2))], [Knob("a", (*range(9),))]])
def test_without_two_knobs_of_few_values_nothing_is_rare(knobs):
    coverage = Coverage(knobs)
    coverage.set_pool(np.zeros((3, len(knobs)), np.int16))
    coverage.add(np.zeros(len(knobs), np.int16))
    assert coverage.pair_coverage(np.arange(3)).tolist() == [1.0] * 3


@pytest.mark.parametrize("scale", [1.0, 0.0, -1e-20])
def test_the_favoured_row_is_the_one_of_the_largest_gain_for_its_rarity(scale):
    rng = np.random.default_rng(0)
    pool = np.array([*np.ndindex(3, 4, 2, 4, 9)], np.int16)
    coverage = Coverage([Knob(name, (*range(n),)) for name, n in zip("abcde", (3, 4, 2, 4, 9), strict=True)])
    coverage.set_pool(pool)
    for _ in range(30):
        coverage.add(pool[rng.choice(len(pool)) // 2])
        gain = np.where(rng.random(len(pool)) < 0.2, -np.inf, scale * rng.random(len(pool)) ** 8)
        weighted = gain / coverage.pair_coverage(np.arange(len(pool))) ** RARITY_EXPONENT
        assert coverage.favoured(gain) == weighted.argmax()


def test_scores_lie_between_ranks_and_logarithms():
    values = np.array([-np.inf, 1.0, 1.01, 8.0])
    ranks, objective_values = normal_scores(values), scores(values)
    assert objective_values[0] == ranks[0] < objective_values[1] < objective_values[2] < objective_values[3]
    assert objective_values[2] - objective_values[1] < ranks[2] - ranks[1]
    positive = values[1:]
    assert scores(positive**2) == pytest.approx(scores(3 * positive))


@pytest.mark.parametrize("failed", [-np.inf, 0.0])
def test_nothing_that_ran_is_worth_less_than_what_failed(failed):
    objective_values = scores(np.array([failed, 1e-9, *np.linspace(5, 6, 30)]))
    assert objective_values.argmin() == 0 and (np.diff(objective_values) > 0).all()


def test_a_bunch_of_led_trials_at_the_top_leaves_the_others_their_scores():
    """Else what follows a prior into one basin takes most of the range, and none of it is left to tell others apart."""
    drawn, bunch = np.linspace(1.0, 2.0, 20), np.linspace(2.01, 2.02, 40)
    values = np.concatenate([drawn, bunch])
    alone, led = scores(drawn), scores(values, np.where(values > 2, LED_WEIGHT, 1.0))
    unweighted = scores(values)
    assert np.median(alone - led[:20]) < 0.4 and np.median(alone - unweighted[:20]) > 0.8
    assert np.ptp(led[20:]) < np.ptp(unweighted[20:])
    assert (np.diff(led) > 0).all()


def test_a_surrogate_that_knows_products_predicts_what_a_product_of_two_knobs_decides():
    """The score jumps with the product of a block's sides; each product was tried in a few shapes."""
    knobs = (*(Knob(name, (1, 2, 4, 8, 16, 32, 64)) for name in "xy"), Knob("z", (0, 1)))
    pool = np.array([*np.ndindex(7, 7, 2)], np.int16)
    truth = np.random.default_rng(1).normal(size=13)[pool[:, :2].sum(1)]
    tried = np.random.default_rng(2).choice(len(pool), 40, replace=False)
    errors = []
    for products in (False, True):
        surrogate = Surrogate(knobs, np.random.default_rng(0), products)
        surrogate.fit(pool[tried], truth[tried], pool)
        errors.append(np.sqrt(np.mean((surrogate.predict(truth[tried])[0] - truth) ** 2)))
    assert errors[1] < 0.6 * errors[0], errors


def test_the_front_is_worth_most():
    objective_values = scores(-np.array([0.0, 1.0, *np.arange(50.0, 90.0)]))
    assert (np.diff(objective_values) < 0).all()


@pytest.mark.parametrize(
    "values", [[-1.0, 2.0, 3.0], [0.0, 0.0], [-np.inf, -np.inf], [5.0, 5.0], [np.inf, 0.0, -np.inf]]
)
def test_where_logarithms_say_nothing_scores_are_those_of_ranks(values):
    assert scores(np.array(values)).tolist() == normal_scores(np.array(values)).tolist()


def test_less_being_better_is_more_of_the_negative():
    times = np.array([1.0, 2.0, 9.0])
    assert scores(-times) == pytest.approx(scores(1 / times))


def test_fronts_are_peeled_one_by_one():
    vectors = np.array([[3.0, 1.0], [1.0, 3.0], [2.0, 0.5], [0.0, 0.0], [3.0, 1.0]])
    assert fronts(vectors).tolist() == [0, 0, 1, 2, 0]


@pytest.mark.parametrize("leeway, found", [(surrogate._prior_width, True), *more([(lambda knob: 1.0, False)])])
def test_several_objectives_are_searched_along_their_front(monkeypatch, leeway, found):
    """A third of the searches, at the least, find those with b 20, one in 40 of all points.

    Uniform draws would try about one. Had all lengths the prior of those of two values, few would find them.
    """
    monkeypatch.setattr(surrogate, "_prior_width", leeway)
    on_front = []
    for seed in range(12):
        sampler = Evolution(Grid(a=range(40), b=range(40)), seed, directions=("maximize", "minimize"))
        on_front.append(0)
        for _ in range(40):
            asked = sampler.ask()
            a, b = asked.config["a"], asked.config["b"]
            sampler.tell(asked.number, (float(a), a * 0.5 + abs(b - 20)))
            on_front[-1] += b == 20
    assert (sum(n > 10 for n in on_front) >= 4) == found, on_front
