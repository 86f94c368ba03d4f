"""What samples say, on samples of which the truth is known."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
from scipy.signal import lfilter

from evoengine.timing.figures import batch_size
from evoengine.timing.statistics import (
    EARLY_STOP,
    MIN_SAMPLES,
    MOST,
    TARGET_REL_CI,
    Comparison,
    Estimate,
    clearly_slower,
    compare,
    median_interval,
    normalised_median,
    paired_ratio,
    spread,
    stop_reason,
)


class Gpu:
    """A simulated GPU: kernels of known time under noise, clocks that drift and switch, and now and then an outlier."""

    def __init__(self, seed, sigma=0.005, drift=0.0, slow_mode=0.0, outliers=0.02):
        self.rng = np.random.default_rng(seed)
        self.sigma, self.drift, self.slow_mode, self.outliers = sigma, drift, slow_mode, outliers
        self.slow, self.runs = False, 0

    def factors(self, count):
        """By which repetitions that follow each other take longer than the truth."""
        switched = self.rng.random(count) < 0.01  # clocks switch seldom and stay for a while
        slow = self.slow ^ (np.cumsum(switched) % 2 == 1)
        runs = self.runs + np.arange(1, count + 1)
        self.slow, self.runs = bool(slow[-1]), self.runs + count
        factors = 1 + self.drift * runs + self.slow_mode * slow + self.sigma * np.abs(self.rng.normal(size=count))
        late = self.rng.random(count) < self.outliers
        return factors * (1 + late * self.rng.exponential(0.3, count))

    def rounds(self, count, *true_us):
        """Samples of each kernel, in rounds of a random order."""
        shape = (count, len(true_us))
        order = self.rng.random(shape).argsort(axis=1)
        factors = self.factors(count * len(true_us)).reshape(shape)
        return (np.array(true_us) * np.take_along_axis(factors, order, axis=1)).T


def verdicts(difference, count=60, trials=60, **noise):
    found = (Gpu(seed, **noise).rounds(count, 100 * (1 + difference), 100.0) for seed in range(trials))
    return [compare(paired_ratio(ours, theirs)) for ours, theirs in found]


def until_settled(samples):
    """As many as it takes, and why they are enough."""
    return next((samples[:n], why) for n in range(len(samples) + 1) if (why := stop_reason(samples[:n])))


NOISES = {
    "calm": {},
    "drift": {"drift": 2e-4},
    "bimodal clocks": {"slow_mode": 0.08},
    "outliers": {"outliers": 0.1},
}


@pytest.mark.parametrize("noise", NOISES.values(), ids=NOISES)
def test_a_difference_of_2_percent_is_shown_either_way(noise):
    assert set(verdicts(0.02, **noise)) == {Comparison.SLOWER}
    assert set(verdicts(-0.02, **noise)) == {Comparison.FASTER}


@pytest.mark.parametrize("noise", NOISES.values(), ids=NOISES)
def test_equal_kernels_are_seldom_distinguished(noise):
    found = verdicts(0.0, trials=200, **noise)
    assert sum(v in (Comparison.FASTER, Comparison.SLOWER) for v in found) <= 0.05 * len(found)


def test_equal_kernels_are_shown_the_same_by_enough_rounds_and_kernels_1_percent_apart_are_not():
    assert verdicts(0.0, count=300, trials=40).count(Comparison.SAME) >= 38
    assert set(verdicts(0.01, count=300, trials=40)) == {Comparison.SLOWER}


def test_a_ratio_is_the_same_only_where_the_whole_interval_is_within_a_quarter_of_a_percent():
    assert compare(Estimate(1.0, 0.998, 1.002)) is Comparison.SAME
    assert compare(Estimate(1.0, 0.997, 1.003)) is Comparison.NOT_DISTINGUISHED
    assert compare(Estimate(0.996, 0.994, 0.999)) is Comparison.FASTER
    assert compare(Estimate(1.004, 1.001, 1.006)) is Comparison.SLOWER


def test_samples_of_other_rounds_are_not_compared():
    with pytest.raises(ValueError, match="equally many, not 3 and 2"):
        paired_ratio([1.0, 1.0, 1.0], [1.0, 1.0])


def test_unpaired_samples_would_not_tell_what_paired_ones_do():
    """Why rounds matter: under a drift of 10 %, medians of runs one after the other are off by several per cent."""
    gpu = Gpu(1, drift=1e-3)
    ours, theirs = gpu.rounds(60, 98.0)[0], gpu.rounds(60, 100.0)[0]
    assert np.median(ours) / np.median(theirs) < 0.95
    assert paired_ratio(*Gpu(1, drift=1e-3).rounds(60, 98.0, 100.0)).median == pytest.approx(0.98, abs=0.005)


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
    assert stop_reason([100.0] * (MIN_SAMPLES - 1)) is None
    assert stop_reason([100.0] * MIN_SAMPLES) == "precise"
    samples, why = until_settled(Gpu(2, sigma=0.03).rounds(MOST, 100.0)[0])
    assert len(samples) > MIN_SAMPLES
    assert spread(samples) <= TARGET_REL_CI or why != "precise"


def test_an_interval_that_no_longer_shrinks_ends_it_before_the_cap():
    two_modes = [100.0, 110.0] * 30
    assert stop_reason(two_modes) == "steady"
    assert stop_reason(two_modes[:38]) is None


def test_a_slow_kernel_is_capped_by_its_time_and_a_quick_one_by_its_repetitions():
    rng = np.random.default_rng(1)
    slow = list(4e5 * (1 + 0.2 * rng.random(MIN_SAMPLES)))
    assert stop_reason(slow) == "capped"
    assert stop_reason(slow[:-1]) is None
    assert stop_reason(Gpu(4, sigma=0.8).rounds(MOST, 1.0)[0])


# ── drift ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def drifting(rng, shape, sd, rho):
    """Clocks as an AR(1) process, repetition by repetition, as factors around 1; the median over a long run is 1."""
    noise = rng.normal(size=shape) * math.sqrt(1 - rho**2)
    noise[:, 0] = rng.normal(size=shape[0])
    return 1 + sd * lfilter([1.0], [1.0, -rho], noise, axis=1)


@pytest.mark.parametrize(("sd", "rho"), [(0.01, 0.98), (0.02, 0.995)])
@pytest.mark.parametrize("count", [MIN_SAMPLES, 40])
def test_under_drift_the_normalised_interval_covers_the_long_run_median_and_the_absolute_one_does_not(sd, rho, count):
    rng, true_us, baseline_us = np.random.default_rng(7), 200.0, 300.0
    clocks = drifting(rng, (600, 2 * count), sd, rho)
    own = true_us * clocks[:, 0::2] * (1 + 0.003 * rng.normal(size=(600, count)))
    baseline = baseline_us * clocks[:, 1::2] * (1 + 0.003 * rng.normal(size=(600, count)))
    absolute = [median_interval(a) for a in own]
    normalised = [normalised_median(a, b, baseline_us) for a, b in zip(own, baseline, strict=True)]
    assert np.mean([low <= true_us <= high for low, high in absolute]) < 0.5
    assert np.mean([e.low <= true_us <= e.high for e in normalised]) >= 0.9
    assert all(e.low <= e.median <= e.high for e in normalised)


# ── the timer's ticks ───────────────────────────────────────────────────────────────────────────────────────────────


def ticked(rng, true_us, noise, batch, tick, count=40):
    """What events tell of batches: both ends rounded down to the timer's tick, at whatever phase; per launch."""
    phase = rng.random(count) * tick
    elapsed = batch * true_us * (1 + noise * rng.normal(size=count) / math.sqrt(batch))
    return (np.floor((phase + elapsed) / tick) - np.floor(phase / tick)) * tick / batch


@pytest.mark.parametrize("noise", [0.003, 0.01])
def test_with_batches_and_the_tick_the_interval_of_a_10_us_kernel_covers_the_truth_and_is_narrow(noise):
    rng, tick = np.random.default_rng(3), 0.5
    true = 10.0 + 0.5 * rng.random(500)
    single = [median_interval(ticked(rng, us, noise, 1, tick)) for us in true]
    batch = batch_size(10.0, tick)
    batched = [median_interval(ticked(rng, us, noise, batch, tick), tick=tick / batch) for us in true]
    assert np.mean([low <= us <= high for us, (low, high) in zip(true, single, strict=True)]) < 0.5
    assert np.mean([low <= us <= high for us, (low, high) in zip(true, batched, strict=True)]) >= 0.9
    assert np.median([(high - low) / 2 / us for us, (low, high) in zip(true, batched, strict=True)]) <= TARGET_REL_CI


def test_samples_that_are_all_the_same_tick_are_no_more_precise_than_the_tick():
    assert stop_reason([10.5] * MIN_SAMPLES) == "precise"
    assert stop_reason([10.5] * MIN_SAMPLES, tick=0.5) is None
    assert spread([10.5] * MIN_SAMPLES, tick=0.5) == pytest.approx(0.25 / 10.5)


# ── racing ──────────────────────────────────────────────────────────────────────────────────────────────────────────


REPETITIONS = 10


def dropped_after(gpu, candidate_us, incumbent_us, rule=clearly_slower):
    """Repetitions after which the candidate is dropped, None where it is timed in full; and its samples."""
    ours, theirs = gpu.rounds(REPETITIONS, candidate_us, incumbent_us).tolist()
    counts = (n for n in range(1, REPETITIONS + 1) if rule(ours[:n], theirs[:n]))
    return next(counts, None), ours


def simulated_search(seed, rule=clearly_slower):
    """(whether the true best was dropped, how many were dropped): 30 candidates, each against the best so far."""
    rng = np.random.default_rng(seed)
    gpu = Gpu(seed, sigma=0.01, drift=rng.normal(0, 2e-5), slow_mode=0.1, outliers=0.05)
    true = 100 * np.exp(rng.exponential(0.4, 30))
    best_us, best, dropped = math.inf, 0, []
    for number, us in enumerate(true):
        after, samples = dropped_after(gpu, us, true[best], rule)
        if after and number:
            dropped.append(number)
        elif (median := statistics.median(samples)) < best_us:
            best_us, best = median, number
    return int(np.argmin(true)) in dropped, len(dropped)


def test_racing_never_drops_the_true_best_in_1000_searches_and_saves_most_of_the_work():
    results = [simulated_search(seed) for seed in range(1000)]
    assert sum(lost for lost, _ in results) == 0
    assert statistics.mean(count for _, count in results) > 15


def test_a_race_that_judges_by_one_repetition_would_drop_the_true_best():
    """The same simulation with a rule that is too quick: so the test above can fail."""

    def hasty(ours, theirs):
        return len(ours) == 1 and ours[0] > 1.02 * theirs[0]

    assert sum(simulated_search(seed, hasty)[0] for seed in range(200)) > 0


def test_what_is_clearly_slower_is_dropped_after_few_repetitions():
    for slowdown, most in ((3.0, 3), (1.3, 5), (1.15, 8)):
        dropped = [dropped_after(Gpu(seed), 100 * slowdown, 100.0)[0] for seed in range(50)]
        assert sum(after is not None and after <= most for after in dropped) > 40
    assert [count for count, _ in EARLY_STOP] == sorted(count for count, _ in EARLY_STOP)
