"""Back-to-back runs on a simulated GPU that heats up: no rests, at least a second, at the clocks it settles to."""

from __future__ import annotations

import pytest

from evoengine.devices.nvml import Reading
from evoengine.records import L2, Clocks, LaunchMode, Policy
from evoengine.timing.clock import COUNTED_US, SETTLING_US, run_sustained
from evoengine.timing.rounds import sustained_policy


class Gpu:
    """Runs what is enqueued in its order; slower by a fifth once it has been busy for 0.3 s, as a power limit has
    it."""

    def __init__(self, kernel_us, cpu_us=0.0):
        self.kernel_us, self.cpu_us, self.now_us, self.free_at, self.busy_us = kernel_us, cpu_us, 0.0, 0.0, 0.0
        self.rested_us = 0.0

    def start(self, launches):
        self.now_us += self.cpu_us
        begin = max(self.now_us, self.free_at)
        self.rested_us += begin - self.free_at
        took = launches * self.kernel_us * (1.2 if self.busy_us > 3e5 else 1.0)
        self.free_at, self.busy_us = begin + took, self.busy_us + took

        def wait(end=self.free_at):
            self.now_us = max(self.now_us, end)
            return took

        return wait

    def sense(self):
        return Reading(1410.0, 70.0, ("power cap",), False, 690.0)

    def run(self, **changes):
        return run_sustained(self.start, self.kernel_us, self.sense, lambda: self.now_us / 1e6, **changes)


@pytest.mark.parametrize("kernel_us", [10.0, 300.0, 80_000.0])
def test_it_counts_a_second_without_rests_at_the_clocks_that_the_gpu_settles_to(kernel_us):
    gpu = Gpu(kernel_us)
    found = gpu.run()
    assert sum(found.samples_us) * found.launches >= COUNTED_US
    assert gpu.busy_us >= SETTLING_US + COUNTED_US
    assert gpu.rested_us == 0.0 and found.busy == pytest.approx(1.0)
    assert not found.rested
    assert found.samples_us == pytest.approx([1.2 * kernel_us] * len(found.samples_us))
    assert {(r.sm_mhz, r.watts) for r in found.readings} == {(1410.0, 690.0)}


def test_a_gpu_that_waits_for_the_cpu_is_known_to_have_rested():
    gpu = Gpu(300.0, cpu_us=70_000.0)
    found = gpu.run()
    assert gpu.rested_us > 0
    assert found.rested


def test_a_sustained_figure_has_a_policy_of_its_own():
    policy = Policy(LaunchMode.GRAPH, L2.COLD, Clocks.BOOST, 16)
    assert sustained_policy(policy) == Policy(LaunchMode.GRAPH, L2.WARM, Clocks.SUSTAINED, 1)
