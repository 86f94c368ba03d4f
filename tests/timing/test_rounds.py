"""Rounds of repetitions on simulated contenders: pairing, what is dropped and when, and outputs that are replayed."""

from __future__ import annotations

import numpy as np
import pytest

from evoengine.devices.nvml import Reading, classify_reading
from evoengine.timing.rounds import (
    ALL_PAUSES_S,
    CHECK_EVERY,
    FIRST_PAUSE_S,
    INPUT_SETS,
    LONGEST_PAUSE_S,
    MOST_DROPPED,
    Dropped,
    InputPlan,
    Repetition,
    Timed,
    run_rounds,
)

HOT = Reading(900, 88.0, ("hardware slowdown",), throttled=True)
WELL = Reading(1980, 60.0)


def after(count):
    return lambda samples: "done" if len(next(iter(samples.values()))) == count else None


def never(samples):
    return None


def rng(seed=0):
    return np.random.default_rng(seed)


# ── rounds ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_every_round_takes_one_sample_of_each_in_an_order_of_its_own():
    calls = []
    contenders = {name: Timed(lambda _, name=name: calls.append(name) or Repetition(1.0)) for name in "abc"}
    rounds = run_rounds(contenders, rng(), after(20))
    orders = {tuple(calls[i : i + 3]) for i in range(0, 60, 3)}
    assert all(sorted(order) == list("abc") for order in orders)
    assert len(orders) > 3
    assert {len(s) for s in rounds.samples.values()} == {20}


def test_a_retired_contender_is_not_run_again_and_keeps_the_samples_of_the_first_rounds():
    runs = []
    contenders = {name: Timed(lambda _, name=name: runs.append(name) or Repetition(float(len(runs)))) for name in "ab"}

    def retire(samples):
        return "b" if len(samples["a"]) == 4 else ""

    rounds = run_rounds(contenders, rng(), lambda s: "done" if len(s["a"]) == 9 else None, retire=retire)
    assert (len(rounds.samples["a"]), len(rounds.samples["b"])) == (9, 4)
    assert runs[8:] == ["a"] * 5


# ── what is dropped ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_repetition_that_does_not_count_takes_its_whole_round_along_so_that_pairs_stay_pairs():
    """The clocks of round n are n: pairs of one round have the ratio 2, whatever was dropped."""
    number, sometimes = iter(range(10**6)), rng(5)

    def timed(factor):
        def repeat(_):
            dropped = Dropped.CPU_BEHIND if sometimes.random() < 0.2 else None
            return Repetition(factor * (1 + next(number) // 2), dropped)

        return Timed(repeat)

    rounds = run_rounds({"a": timed(1.0), "b": timed(2.0)}, rng(), after(50))
    assert np.array_equal(2 * np.array(rounds.samples["a"]), rounds.samples["b"])
    assert rounds.dropped[Dropped.CPU_BEHIND] > 10
    assert set(np.diff(rounds.samples["a"])) != {1.0}


def test_a_cpu_that_is_never_ahead_ends_without_a_sample_and_without_a_pause():
    behind = Timed(lambda _: Repetition(1.0, Dropped.CPU_BEHIND))
    rounds = run_rounds({"a": behind}, rng(), never, sleep=pytest.fail)
    assert (rounds.ended, rounds.samples["a"]) == ("the CPU was not ahead of the GPU", [])
    assert rounds.dropped[Dropped.CPU_BEHIND] == MOST_DROPPED


def test_throttled_rounds_are_dropped_and_counted_by_either_sign():
    readings = iter([WELL, HOT] * 100)
    times = iter(range(1, 1000))
    seen = Timed(lambda _: Repetition(float(next(times))))
    rounds = run_rounds({"a": seen}, rng(), after(10), lambda: next(readings), sleep=lambda s: None)
    assert rounds.samples["a"] == [float(n) for n in range(1, 20, 2)]
    assert rounds.dropped[Dropped.THROTTLED] == 9
    assert all(not r.throttled for r in rounds.readings)

    timed_window = Timed(lambda _: Repetition(float(n := next(times)), Dropped.THROTTLED if n % 2 else None))
    rounds = run_rounds({"a": timed_window}, rng(), after(10), sleep=lambda s: None)
    assert all(n % 2 == 0 for n in rounds.samples["a"])
    assert rounds.dropped[Dropped.THROTTLED] >= 9


def test_pauses_double_from_50_ms_while_the_gpu_throttles_and_start_over_when_it_has_recovered():
    hot, pauses = iter([True] * 3 + [False] + [True] * 2 + [False] * 9), []
    contender = Timed(lambda _: Repetition(1.0, Dropped.THROTTLED if next(hot) else None))
    run_rounds({"a": contender}, rng(), after(10), sleep=pauses.append)
    assert pauses == [0.05, 0.1, 0.2, 0.05, 0.1]


def test_a_gpu_that_never_stops_throttling_is_given_pauses_of_bounded_length_and_sum_and_ends_without_a_sample():
    pauses = []
    rounds = run_rounds({"a": Timed(lambda _: Repetition(1.0))}, rng(), never, lambda: HOT, sleep=pauses.append)
    assert (rounds.ended, rounds.samples["a"]) == ("throttled", [])
    assert pauses[0] == FIRST_PAUSE_S and max(pauses) == LONGEST_PAUSE_S
    assert ALL_PAUSES_S - LONGEST_PAUSE_S < sum(pauses) <= ALL_PAUSES_S
    assert rounds.dropped[Dropped.THROTTLED] == len(pauses) + 1


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
    reading = classify_reading(sm_mhz, 1980, 60.0, reasons)
    assert (reading.throttled, reading.held_back) == (throttled, names)


# ── outputs ─────────────────────────────────────────────────────────────────────────────────────────────────────────

POISON = "NaN"


class Kernel:
    """Its output after each repetition is a word for the inputs that it belongs to. `cheat` says what it does instead
    of
    computing, once it has computed `honest` times: it gets the inputs, the kernel's past inputs, and gives the
    output."""

    def __init__(self, cheat, honest=15):
        self.cheat, self.honest, self.past, self.out, self.checked = cheat, honest, [], None, []

    def repeat(self, inputs):
        self.out = POISON
        cheats = self.cheat and len(self.past) >= self.honest
        result = self.cheat(inputs, self.past) if cheats else inputs
        self.out = self.out if result is None else result
        self.past.append(inputs)
        return Repetition(1.0 if cheats else 100.0)

    def check(self, inputs):
        self.checked.append(len(self.past))
        return None if self.out == inputs else f"the output is {self.out} and not {inputs}"

    def timed(self):
        return Timed(self.repeat, self.check)


CHEATS = {
    "idles": lambda inputs, past: None,
    "replays its last honest result": lambda inputs, past: past[14],
    "replays its first result": lambda inputs, past: past[0],
}


def race(kernel, seed, count=200, others=1, check=True):
    contender = kernel.timed() if check else Timed(kernel.repeat)
    others = {f"other {n}": Kernel(None).timed() for n in range(others)}
    return run_rounds({"candidate": contender, **others}, rng(seed), after(count))


@pytest.mark.parametrize("cheat", CHEATS.values(), ids=CHEATS)
@pytest.mark.parametrize("others", [1, 7], ids=["in a race", "in finals"])
def test_a_kernel_that_computes_15_times_and_then_replays_is_caught_within_20_repetitions(cheat, others):
    for seed in range(100):
        kernel = Kernel(cheat)
        rounds = race(kernel, seed, others=others)
        assert rounds.ended == "wrong"
        assert len(kernel.past) - kernel.honest <= 20
        assert rounds.wrong == {"candidate": f"repetition {len(kernel.past)}: {kernel.check(kernel.past[-1])}"}


def test_a_kernel_that_answers_for_the_inputs_before_is_caught_within_20_repetitions_nearly_always():
    late = [Kernel(lambda inputs, past: past[-1]) for _ in range(300)]
    for seed, kernel in enumerate(late):
        assert race(kernel, seed).ended == "wrong"
    assert np.mean([len(k.past) - k.honest <= 20 for k in late]) >= 0.85


def test_without_the_check_the_replay_would_win_the_race():
    kernel = Kernel(CHEATS["idles"])
    rounds = race(kernel, 0, check=False)
    assert rounds.ended == "done" and np.median(rounds.samples["candidate"]) == 1.0


def test_with_one_set_of_inputs_a_replayed_result_would_pass():
    """Why there are two: so the test above can fail."""
    kernel = Kernel(CHEATS["replays its first result"])
    rounds = run_rounds({"candidate": kernel.timed()}, rng(), after(200), input_sets=1)
    assert rounds.ended == "done" and len(kernel.checked) == 200 / CHECK_EVERY


def test_honest_kernels_are_checked_and_none_is_accused():
    kernel = Kernel(None)
    assert race(kernel, 3).ended == "done"
    assert len(kernel.checked) == 200 / CHECK_EVERY


def test_neither_the_inputs_nor_the_checked_repetition_can_be_foreseen():
    plan = InputPlan(rng(1), INPUT_SETS)
    given = [plan.next() for _ in range(4000)]
    inputs, checked = np.array(given).T.astype(int)
    blocks = checked.reshape(-1, CHECK_EVERY)
    assert set(blocks.sum(axis=1)) == {1}
    assert all(0.15 < share < 0.25 for share in blocks.mean(axis=0))
    assert 0.47 < inputs.mean() < 0.53
    assert 0.45 < (inputs[1:] == inputs[:-1]).mean() < 0.55
