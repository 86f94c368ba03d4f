"""Timing's statistics on samples of which the truth is known."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest

from evoengine.devices.nvml import Reading, judge_reading
from evoengine.stages.timing import (
    FEWEST,
    MOST,
    PRECISE,
    RACE,
    Comparison,
    beaten,
    compare,
    median_interval,
    rank,
    run_rounds,
    settled,
    spread,
)


class Gpu:
    """A simulated GPU: kernels of known time under noise, clocks that drift and switch, and now and then an outlier."""

    def __init__(self, seed, sigma=0.005, drift=0.0, slow_mode=0.0, outliers=0.02):
        self.rng = np.random.default_rng(seed)
        self.sigma, self.drift, self.slow_mode, self.outliers = sigma, drift, slow_mode, outliers
        self.slow, self.runs = False, 0

    def time(self, true_us: float) -> float:
        self.runs += 1
        if self.rng.random() < 0.01:  # clocks switch seldom and stay for a while
            self.slow = not self.slow
        factor = 1 + self.drift * self.runs + self.slow_mode * self.slow + self.sigma * abs(self.rng.normal())
        if self.rng.random() < self.outliers:
            factor *= 1 + self.rng.exponential(0.3)
        return true_us * factor

    def rounds(self, seed, enough, **true_us):
        contenders = {name: (lambda us=us: self.time(us)) for name, us in true_us.items()}
        return run_rounds(contenders, np.random.default_rng(seed), enough)


def after(count):
    return lambda samples: "done" if len(next(iter(samples.values()))) == count else None


def verdicts(difference, count=60, trials=60, **noise):
    found = []
    for seed in range(trials):
        samples = Gpu(seed, **noise).rounds(seed, after(count), ours=100 * (1 + difference), theirs=100.0).samples
        found.append(compare(samples["ours"], samples["theirs"]))
    return found


NOISES = {
    "calm": {},
    "drift": {"drift": 2e-4},
    "bimodal clocks": {"slow_mode": 0.08},
    "outliers": {"outliers": 0.1},
}


@pytest.mark.parametrize("noise", NOISES.values(), ids=NOISES)
def test_a_difference_of_2_percent_is_told_either_way(noise):
    assert set(verdicts(0.02, **noise)) == {Comparison.SLOWER}
    assert set(verdicts(-0.02, **noise)) == {Comparison.FASTER}


@pytest.mark.parametrize("noise", NOISES.values(), ids=NOISES)
def test_a_difference_of_3_per_mille_is_ambiguous(noise):
    found = verdicts(0.003, **noise)
    assert not set(found) & {Comparison.FASTER, Comparison.SLOWER}
    assert found.count(Comparison.AMBIGUOUS) >= 0.9 * len(found)


def test_equal_kernels_are_the_same_or_ambiguous_never_told_apart():
    found = verdicts(0.0, trials=200)
    assert not any(v.told_apart for v in found)
    assert found.count(Comparison.SAME) > 0.8 * len(found)


def test_unpaired_samples_would_not_tell_what_paired_ones_do():
    """Why rounds matter: under a drift of 10 %, medians of runs one after the other are off by several per cent."""
    gpu = Gpu(1, drift=1e-3)
    ours = [gpu.time(98.0) for _ in range(60)]
    theirs = [gpu.time(100.0) for _ in range(60)]
    assert statistics.median(ours) / statistics.median(theirs) < 0.95
    paired = Gpu(1, drift=1e-3).rounds(1, after(60), ours=98.0, theirs=100.0).samples
    ratio = statistics.median(paired["ours"]) / statistics.median(paired["theirs"])
    assert ratio == pytest.approx(0.98, abs=0.005)


@pytest.mark.parametrize("count", [6, 10, 25, 60])
def test_the_interval_holds_the_true_median_95_times_in_100(count):
    rng = np.random.default_rng(3)
    held = 0
    for _ in range(1500):
        low, high = median_interval(rng.exponential(1.0, count))
        held += low <= math.log(2) <= high
    assert 0.94 <= held / 1500 <= 0.995


def test_fewer_than_six_samples_give_no_interval():
    assert median_interval([1.0] * 5) == (0.0, math.inf)


def test_quiet_samples_stop_at_the_fewest_and_noisy_ones_go_on_until_precise():
    assert settled([100.0] * (FEWEST - 1)) is None
    assert settled([100.0] * FEWEST) == "precise"
    rounds = Gpu(2, sigma=0.03).rounds(1, lambda s: settled(s["a"]), a=100.0)
    assert len(rounds.samples["a"]) > FEWEST
    assert spread(rounds.samples["a"]) <= PRECISE or rounds.ended != "precise"


def test_an_interval_that_no_longer_shrinks_ends_it_before_the_cap():
    two_modes = [100.0, 110.0] * 30
    assert settled(two_modes) == "steady"
    assert settled(two_modes[:38]) is None


def test_a_slow_kernel_is_capped_by_its_time_and_a_quick_one_by_its_repetitions():
    rng = np.random.default_rng(1)
    slow = list(4e5 * (1 + 0.2 * rng.random(FEWEST)))
    assert settled(slow) == "capped"
    assert settled(slow[:-1]) is None
    gpu = Gpu(4, sigma=0.8)
    assert len(gpu.rounds(1, lambda s: settled(s["a"]), a=1.0).samples["a"]) <= MOST


def test_every_round_takes_one_sample_of_each_in_an_order_of_its_own():
    calls = []
    contenders = {name: (lambda name=name: calls.append(name) or 1.0) for name in "abc"}
    rounds = run_rounds(contenders, np.random.default_rng(0), after(20))
    orders = {tuple(calls[i : i + 3]) for i in range(0, 60, 3)}
    assert all(sorted(order) == list("abc") for order in orders)
    assert len(orders) > 3
    assert {len(s) for s in rounds.samples.values()} == {20}


def test_throttled_rounds_are_dropped_and_counted():
    readings = iter([Reading(1980, 60.0), Reading(900, 88.0, ("hardware slowdown",), throttled=True)] * 100)
    times = iter(range(1, 1000))
    rounds = run_rounds({"a": lambda: float(next(times))}, np.random.default_rng(0), after(10), lambda: next(readings))
    assert rounds.samples["a"] == [float(n) for n in range(1, 20, 2)]
    assert rounds.throttled == 9
    assert all(not r.throttled for r in rounds.readings)


def test_a_gpu_that_never_stops_throttling_ends_without_a_sample():
    slow = Reading(300, 90.0, (), throttled=True)
    rounds = run_rounds({"a": lambda: 1.0}, np.random.default_rng(0), after(10), lambda: slow)
    assert (rounds.ended, rounds.samples["a"], rounds.throttled) == ("throttled", [], MOST)


@pytest.mark.parametrize(
    ("sm_mhz", "reasons", "throttled", "names"),
    [
        (1980, 0x0, False, ()),
        (1400, 0x0, True, ()),
        (1700, 0x4, False, ("power cap",)),
        (1900, 0x20, True, ("software thermal slowdown",)),
        (1900, 0x48, True, ("hardware slowdown", "hardware thermal slowdown")),
        (1980, 0x1, False, ()),
    ],
)
def test_heat_and_low_clocks_throttle_and_the_power_cap_does_not(sm_mhz, reasons, throttled, names):
    reading = judge_reading(sm_mhz, 1980, 60.0, reasons)
    assert (reading.throttled, reading.held_back) == (throttled, names)


def race(gpu, candidate_us, incumbent_us, seed):
    def enough(samples):
        return "beaten" if beaten(samples["c"], samples["i"]) else after(10)(samples)

    return gpu.rounds(seed, enough, c=candidate_us, i=incumbent_us)


def simulated_search(seed, rule=race):
    """(whether the true best was dropped, how many were dropped): 30 candidates, each against the best so far."""
    rng = np.random.default_rng(seed)
    gpu = Gpu(seed, sigma=0.01, drift=rng.normal(0, 2e-5), slow_mode=0.1, outliers=0.05)
    true = 100 * np.exp(rng.exponential(0.4, 30))
    best_us, best, dropped = None, None, []
    for number, us in enumerate(true):
        rounds = rule(gpu, us, true[best] if best is not None else us, seed)
        if best is not None and rounds.ended == "beaten":
            dropped.append(number)
            continue
        median = statistics.median(rounds.samples["c"])
        if best_us is None or median < best_us:
            best_us, best = median, number
    return int(np.argmin(true)) in dropped, len(dropped)


def test_racing_never_drops_the_true_best_in_1000_searches_and_saves_most_of_the_work():
    results = [simulated_search(seed) for seed in range(1000)]
    assert sum(lost for lost, _ in results) == 0
    assert statistics.mean(count for _, count in results) > 15


def test_a_race_that_judges_by_one_repetition_would_drop_the_true_best():
    """The same simulation with a rule that is too quick: so the test above can fail."""

    def hasty(gpu, candidate_us, incumbent_us, seed):
        def enough(samples):
            return "beaten" if samples["c"][0] > 1.02 * samples["i"][0] else after(10)(samples)

        return gpu.rounds(seed, enough, c=candidate_us, i=incumbent_us)

    assert sum(simulated_search(seed, hasty)[0] for seed in range(200)) > 0


def test_what_is_plainly_slower_is_dropped_after_few_repetitions():
    for slowdown, most in ((3.0, 3), (1.3, 5), (1.15, 8)):
        dropped = [race(Gpu(seed), 100 * slowdown, 100.0, seed) for seed in range(50)]
        assert sum(r.ended == "beaten" and len(r.samples["c"]) <= most for r in dropped) > 40
    assert [count for count, _ in RACE] == sorted(count for count, _ in RACE)


def test_finalists_are_ranked_by_median_and_a_tie_goes_to_the_fewest_registers():
    gpu = Gpu(5)
    samples = gpu.rounds(5, after(60), a=100.0, b=100.1, c=104.0, d=90.0 * 1.2).samples
    ranking = rank(samples, {"a": 168, "b": 96, "c": 32, "d": 32})
    assert ranking.order == ("b", "a", "c", "d")
    assert set(ranking.tied) == {"a", "b"}


def test_a_clear_winner_has_no_ties_however_many_registers_it_takes():
    samples = Gpu(6).rounds(6, after(60), a=97.0, b=100.0).samples
    ranking = rank(samples, {"a": 255, "b": 16})
    assert (ranking.order, ranking.tied) == (("a", "b"), ())
