"""Run a kernel back to back for seconds, at the clocks that the power limit permits, not those of an idle GPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from evoengine.devices.nvml import Reading
from evoengine.records import L2, Clocks, Policy

SETTLING_US = 5e5
"""warm-up, within which a power limit lowers the clocks (some hundred milliseconds)"""
COUNTED_US = 1e6
BLOCK_US = 5e4
"""duration of the launches between two events, which yield one sample"""
BUSY = 0.98
"""share of the wall time that the GPU must have been running; below it the GPU idled, and there is no such figure"""


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


def run_sustained(
    start: Callable[[int], Callable[[], float]],
    estimate_us: float,
    sense: Callable[[], Reading | None] = lambda: None,
    now: Callable[[], float] = time.perf_counter,
) -> Sustained:
    """Run for SETTLING_US and then for at least COUNTED_US, with a block always queued behind the running one.

    `start` queues so many launches and returns a call that waits for the last one and returns the microseconds from the
    start of the first. `estimate_us` is the time of one launch; `now` is in seconds.
    """
    launches = max(1, round(BLOCK_US / estimate_us))
    running, waiting = start(launches), start(launches)
    elapsed = counted = began = 0.0
    samples: list[float] = []
    readings: list[Reading] = []
    while counted < COUNTED_US:
        reading = sense()
        block = running()
        running, waiting = waiting, start(launches)
        if elapsed < SETTLING_US:
            elapsed += block
            began = now()
            continue
        counted += block
        samples.append(block / launches)
        if reading:
            readings.append(reading)
    ended = now()
    running()
    waiting()
    return Sustained(tuple(samples), tuple(readings), launches, counted / 1e6 / (ended - began))
