"""Run rounds of repetitions: their order, inputs, dropped rounds and checks of outputs. Independent of a GPU.

Contenders are timed in rounds, one repetition each in a random order, so that a drift of the clocks affects all of them
alike. `statistics.py` evaluates the samples.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

import numpy as np

from evoengine.devices.nvml import Reading
from evoengine.records import L2, Clocks, Policy

INPUT_SETS = 2
"""sets of inputs that repetitions take in an unpredictable order, so that a cached result is a wrong one"""
CHECK_EVERY = 5
"""repetitions of a contender among which one, not known beforehand, has its output checked. Two checks in a row never
take the same inputs: whatever is replayed is wrong in one of them, which are at most 3 × CHECK_EVERY - 1 apart"""
MOST_DROPPED = 300
"""limit of dropped rounds, after which the timing is aborted"""
FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 2.0
ALL_PAUSES_S = 30.0
"""a GPU that has throttled through pauses of this sum will not recover in time"""
BASELINE = "baseline"
"""the baseline's name in a round"""
BUSY = 0.98
"""share of the wall time that the GPU must have been running; below it the GPU idled, and there is no such figure"""


class Dropped(StrEnum):
    """Why a repetition does not count."""

    THROTTLED = "throttled"
    CPU_BEHIND = "the CPU was not ahead of the GPU"


@dataclass(frozen=True, slots=True)
class Repetition:
    """One timing: microseconds per launch, however many launches were timed together."""

    microseconds: float
    dropped: Dropped | None = None


@dataclass(frozen=True, slots=True)
class Timed:
    """The functions of a contender that rounds call.

    `repeat` takes the number of an input set, overwrites the output with NaN, flushes the L2 and runs once. `check`
    takes the same number right after such a repetition and says what is wrong with the output, None if nothing is; a
    library's kernel needs none.
    """

    repeat: Callable[[int], Repetition]
    check: Callable[[int], str | None] | None = None


@dataclass(slots=True)
class Rounds:
    """Samples by contender, in microseconds; the i-th of each is from the same round.

    Of a contender that was retired there are fewer: those of the first rounds.
    """

    samples: dict[str, list[float]]
    readings: list[Reading] = field(default_factory=list)
    dropped: Counter[Dropped] = field(default_factory=Counter)
    """number of dropped rounds by reason"""
    wrong: dict[str, str] = field(default_factory=dict)
    """contender whose output was wrong → in which repetition, and how"""
    ended: str = ""


def run_rounds(
    contenders: Mapping[str, Timed],
    rng: np.random.Generator,
    enough: Callable[[Mapping[str, list[float]]], str | None],
    sense: Callable[[], Reading | None] = lambda: None,
    retire: Callable[[Mapping[str, list[float]]], Collection[str]] = lambda samples: (),
    sleep: Callable[[float], None] = time.sleep,
    input_sets: int = INPUT_SETS,
) -> Rounds:
    """Repeat rounds until `enough` returns a reason to end, an output is wrong, or too many rounds were dropped.

    If one repetition of a round does not count, the whole round is dropped, so that samples stay paired. A throttling
    GPU is paused, each time for twice as long. Contenders that `retire` names take no further part.
    """
    rounds = Rounds({name: [] for name in contenders})
    plans = {name: InputPlan(rng, input_sets) for name in contenders}
    active, pauses = list(contenders), _Pauses(sleep)
    while not rounds.ended:
        taken: dict[str, Repetition] = {}
        for name in rng.permutation(active).tolist():
            inputs, checked = plans[name].next()
            taken[name] = contenders[name].repeat(inputs)
            check = contenders[name].check
            if checked and check and (reason := check(inputs)):
                rounds.wrong[name] = f"repetition {plans[name].count}: {reason}"
                rounds.ended = "wrong"
                return rounds
        reading = sense()
        if dropped := _why_dropped(taken, reading):
            rounds.dropped[dropped] += 1
            recovering = dropped is not Dropped.THROTTLED or pauses.take()
            if not recovering or rounds.dropped.total() >= MOST_DROPPED:
                rounds.ended = str(dropped)
            continue
        pauses.reset()
        if reading:
            rounds.readings.append(reading)
        for name, repetition in taken.items():
            rounds.samples[name].append(repetition.microseconds)
        retired = retire(rounds.samples)
        active = [name for name in active if name not in retired]
        rounds.ended = enough(rounds.samples) or ""
    return rounds


def _why_dropped(taken: Mapping[str, Repetition], reading: Reading | None) -> Dropped | None:
    """Return the reason to drop the whole round; throttling takes precedence, because it calls for a pause."""
    reasons = {repetition.dropped for repetition in taken.values()}
    if Dropped.THROTTLED in reasons or (reading and reading.throttled):
        return Dropped.THROTTLED
    return Dropped.CPU_BEHIND if Dropped.CPU_BEHIND in reasons else None


class InputPlan:
    """Chooses the inputs of a contender's next repetition, and whether its output is checked."""

    def __init__(self, rng: np.random.Generator, input_sets: int) -> None:
        self._rng, self._sets = rng, input_sets
        self._block: list[tuple[int, bool]] = []
        self._last_checked = int(rng.integers(input_sets))
        self.count = 0
        """repetitions given so far"""

    def next(self) -> tuple[int, bool]:
        """Return the number of the input set, and whether to check its outputs."""
        self.count += 1
        if not self._block:
            inputs = self._rng.integers(self._sets, size=CHECK_EVERY).tolist()
            checked = int(self._rng.integers(CHECK_EVERY))
            inputs[checked] = self._other_than_last()
            self._block = [(number, place == checked) for place, number in enumerate(inputs)]
        return self._block.pop()

    def _other_than_last(self) -> int:
        """Return any input set but the one that was checked last."""
        if self._sets > 1:
            self._last_checked = (self._last_checked + int(self._rng.integers(1, self._sets))) % self._sets
        return self._last_checked


class _Pauses:
    """Pauses that let a throttling GPU cool; each successive pause is twice as long."""

    def __init__(self, sleep: Callable[[float], None]) -> None:
        self._sleep, self._taken = sleep, 0.0
        self.reset()

    def reset(self) -> None:
        self._next = FIRST_PAUSE_S

    def take(self) -> bool:
        """Pause and return True; return False without a pause if the GPU has used up all pauses."""
        if self._taken + self._next > ALL_PAUSES_S:
            return False
        self._sleep(self._next)
        self._taken += self._next
        self._next = min(2 * self._next, LONGEST_PAUSE_S)
        return True


# ── runs back to back ─────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Sustained:
    """Microseconds per launch, a sample per block, with the sensors read while each block ran."""

    samples_us: tuple[float, ...]
    readings: tuple[Reading, ...]
    launches: int
    """per block"""
    busy: float
    """share of the wall time that the GPU ran"""

    @property
    def rested(self) -> bool:
        return self.busy < BUSY


def sustained_policy(policy: Policy) -> Policy:
    """Return the policy of a sustained figure beside one of `policy`.

    Nothing flushes the L2 between successive launches, and blocks last longer than any batch, so that their length is
    not part of the policy.
    """
    return replace(policy, l2=L2.WARM, clocks=Clocks.SUSTAINED, batch=1)
