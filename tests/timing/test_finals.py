"""Finals on samples of which the truth is known: the fastest wins, equals are not distinguished, time goes to the
top."""

from __future__ import annotations

import math
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
from scipy.signal import lfilter

from evoengine.timing import finals as stage
from evoengine.timing.finals import BUDGET_US, LOOKS, SuccessiveRejects, error_rate, fastest_of, rank, run_finals
from evoengine.timing.rounds import Repetition, Timed
from evoengine.timing.statistics import Comparison
from tests.support.exhaustive import more

EIGHT_05_APART = tuple(300.0 * (1 + 0.005 * n) for n in range(8))
ALIKE = (300.0,) * 8


def samples_of(seed, true_us, noise=0.003, drift=0.0, rho=0.99, outliers=0.0):
    """(rounds, kernels): microseconds of repetitions that follow each other in a random order within each round.

    The clocks are an AR(1) process from repetition to repetition.
    """
    rng = np.random.default_rng(seed)
    shape = (LOOKS[-1], len(true_us))
    steps = rng.normal(size=math.prod(shape)) * math.sqrt(1 - rho**2)
    steps[0] = rng.normal()
    clocks = 1 + drift * lfilter([1.0], [1.0, -rho], steps).reshape(shape)
    order = rng.random(shape).argsort(axis=1)
    own = 1 + noise * rng.normal(size=shape)
    late = np.where(rng.random(shape) < outliers, rng.exponential(0.3, shape), 0.0)
    return np.array(true_us) * np.take_along_axis(clocks, order, axis=1) * own * (1 + late)


def hold(samples, registers=None):
    """Finals over prepared samples, as `run_rounds` would hold them: a look is all that a round can change."""
    names = [str(n) for n in range(samples.shape[1])]
    rejects, taken = SuccessiveRejects(names), {name: samples[:0, int(name)] for name in names}
    active = list(names)
    for look in LOOKS:
        taken |= {name: samples[:look, int(name)] for name in active}
        retired = rejects.retire(taken)
        active = [name for name in active if name not in retired]
        if ended := rejects.enough(taken):
            break
    fewer_where_slower = {name: 128 - 8 * int(name) for name in names}
    ranking = rank(taken, registers or fewer_where_slower)
    spent = sum(float(own.sum()) for own in taken.values())
    return SimpleNamespace(ranking=ranking, ended=ended, rounds=look, spent_us=spent, taken=taken)


# ── the fastest wins ────────────────────────────────────────────────────────────────────────────────────────────────

CONDITIONS = {
    "0.3 % noise": {"noise": 0.003},
    "1 % noise": {"noise": 0.01},
    "1 % drift": {"noise": 0.003, "drift": 0.01, "rho": 0.98},
    "2 % drift": {"noise": 0.003, "drift": 0.02, "rho": 0.995},
    "outliers": {"noise": 0.003, "outliers": 0.05},
}


@pytest.mark.parametrize("noise", CONDITIONS.values(), ids=CONDITIONS)
def test_among_eight_half_a_percent_apart_the_fastest_wins_though_the_slower_have_fewer_registers(noise):
    finals = [hold(samples_of(seed, EIGHT_05_APART, **noise)) for seed in range(100)]
    crowned = [EIGHT_05_APART[int(f.ranking.order[0])] / EIGHT_05_APART[0] - 1 for f in finals]
    assert np.mean(np.array(crowned) == 0) >= 0.8
    assert np.mean(crowned) <= 0.005
    assert np.mean([f.ended == "decided" for f in finals]) >= 0.95


def test_a_rule_that_takes_all_that_is_not_distinguished_for_the_same_would_crown_slower_kernels(monkeypatch):
    """The same finals with the registers deciding wherever nothing is shown: so the test above can fail."""
    monkeypatch.setattr(stage, "compare", lambda r: Comparison.SAME if r.low <= 1.005 else Comparison.SLOWER)
    winners = []
    for seed in range(100):
        own = samples_of(seed, EIGHT_05_APART)[: LOOKS[0]]
        taken = {str(n): own[:, n] for n in range(8)}
        winners.append(rank(taken, {name: 128 - 8 * int(name) for name in taken}).order[0])
    assert winners.count("0") < 10


def test_the_ratio_to_the_second_is_reported_with_an_interval_that_holds_the_truth():
    held = []
    for seed in range(100):
        ranking = hold(samples_of(seed, EIGHT_05_APART, drift=0.01)).ranking
        first, second = (EIGHT_05_APART[int(name)] for name in ranking.order[:2])
        held.append(ranking.lead.low <= first / second <= ranking.lead.high)
        assert ranking.lead.high < 1
    assert np.mean(held) >= 0.95


# ── equals ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("kernels", "finals"), [(2, 400), *more([(8, 200)])])
def test_equals_are_distinguished_in_no_more_than_5_in_100_finals(kernels, finals):
    found = [hold(samples_of(seed, ALIKE[:kernels], drift=0.01)) for seed in range(finals)]
    claimed = [f for f in found if len(f.ranking.tied) + len(f.ranking.open) < kernels]
    assert len(claimed) <= 0.05 * finals


def test_looking_often_at_plain_95_percent_intervals_would_distinguish_equals(monkeypatch):
    """Why intervals are widened for looks and pairs: so the test above can fail."""
    monkeypatch.setattr(stage, "error_rate", lambda finalists: 0.05)
    found = [hold(samples_of(seed, ALIKE, noise=0.01)) for seed in range(30)]
    assert sum(len(f.ranking.tied) + len(f.ranking.open) < 8 for f in found) > 10


def test_of_those_shown_the_same_the_one_with_the_fewest_registers_wins():
    found = [hold(samples_of(seed, (300.0, 300.0, 306.0)), {"0": 168, "1": 96, "2": 32}) for seed in range(100)]
    same = [f.ranking for f in found if set(f.ranking.tied) == {"0", "1"}]
    assert len(same) >= 95
    assert {r.order for r in same} == {("1", "0", "2")} and {r.open for r in same} == {()}


def test_a_winner_that_is_distinguished_has_no_ties_however_many_registers_it_takes():
    f = hold(samples_of(1, (291.0, 300.0)), {"0": 255, "1": 16})
    assert (f.ranking.order, f.ranking.tied, f.ranking.open) == (("0", "1"), (), ())


def test_what_the_cap_leaves_open_is_said_and_registers_do_not_decide_it():
    f = hold(samples_of(3, (300.0, 300.4), noise=0.03), {"0": 255, "1": 16})
    assert f.ended == "capped" and f.rounds == LOOKS[-1]
    assert set(f.ranking.open) | {f.ranking.order[0]} == {"0", "1"} and f.ranking.tied == ()
    assert f.ranking.order[0] == fastest_of(f.taken)


# ── time ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_time_goes_to_the_top_pair():
    true = (300.0, 301.0, *(330.0,) * 6)
    f = hold(samples_of(0, true))
    assert {len(f.taken[str(n)]) for n in range(2, 8)} == {LOOKS[0]}
    assert len(f.taken["0"]) == len(f.taken["1"]) > 3 * LOOKS[0]


def test_finals_of_quick_and_of_slow_kernels_stay_within_the_budget():
    for us in (10.0, 300.0, 10_000.0, 100_000.0):
        f = hold(samples_of(1, (us,) * 8, noise=0.02))
        assert f.spent_us <= BUDGET_US * 1.01
    slowest = hold(samples_of(1, (1e6,) * 8, noise=0.02))
    assert (slowest.ended, slowest.rounds) == ("capped", LOOKS[0])


def test_a_finalist_alone_wins_after_the_first_look():
    f = hold(samples_of(0, (300.0,)))
    assert (f.ranking.order, f.ranking.lead, f.rounds) == (("0",), None, LOOKS[0])


def test_the_first_look_can_show_a_difference_and_one_round_less_could_not():
    rate = error_rate(8)
    low, high = stage.paired_ratio([1.0] * LOOKS[0], [2.0] * LOOKS[0], rate).low, math.inf
    assert low == 0.5 and high > 0
    assert stage.paired_ratio([1.0] * (LOOKS[0] - 1), [2.0] * (LOOKS[0] - 1), rate).low == 0.0


# ── with the rounds ─────────────────────────────────────────────────────────────────────────────────────────────────

TRUE = {"a": 300.0, "b": 301.5, "c": 303.0, "d": 330.0, "sdpa": 500.0}
REGISTERS = {"a": 200, "b": 90, "c": 80, "d": 32}


def simulated(wrong=()):
    """Contenders with how often each ran; the output of those in `wrong` is wrong from its 10th repetition on."""
    rng, runs = np.random.default_rng(4), Counter()

    def timed(name):
        def repeat(_):
            runs[name] += 1
            return Repetition(TRUE[name] * (1 + 0.01 * rng.normal()))

        return Timed(repeat, lambda _: "off" if name in wrong and runs[name] >= 10 else None)

    return {name: timed(name) for name in TRUE}, runs


def ranking_of(rounds):
    finalists = {name: own for name, own in rounds.samples.items() if name != "sdpa"}
    return rank(finalists, REGISTERS)


def test_finals_in_rounds_beside_a_baseline_retire_finalists_and_never_the_baseline():
    contenders, runs = simulated()
    rounds = run_finals(contenders, list("abcd"), np.random.default_rng(4))
    assert (rounds.ended, rounds.wrong) == ("decided", {})
    assert runs["d"] == LOOKS[0] < runs["a"] == runs["sdpa"]
    assert ranking_of(rounds).order == tuple("abcd")


def test_finals_begin_again_without_a_finalist_whose_output_is_wrong():
    contenders, _ = simulated(wrong="a")
    rounds = run_finals(contenders, list("abcd"), np.random.default_rng(4))
    assert rounds.ended == "decided" and rounds.wrong["a"].endswith(": off")
    assert "a" not in rounds.samples and ranking_of(rounds).order == tuple("bcd")


def test_finals_in_which_every_output_is_wrong_end():
    contenders, _ = simulated(wrong="ab")
    rounds = run_finals({n: contenders[n] for n in ("a", "b", "sdpa")}, ["a", "b"], np.random.default_rng(4))
    assert rounds.wrong.keys() == {"a", "b"} and rounds.samples == {"sdpa": []}
