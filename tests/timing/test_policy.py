"""How a problem is timed is chosen once, from the fastest of its kernels."""

from __future__ import annotations

from itertools import pairwise

import pytest

from evoengine.records import L2, Clocks, LaunchMode, Policy
from evoengine.timing.figures import FEWEST_TICKS, GRAPH_US, TICK_US, batch_size, choose_policy


@pytest.mark.parametrize(
    ("fastest_us", "launch", "batch"),
    [(5.0, "graph", 32), (10.0, "graph", 16), (60.0, "graph", 2), (100.0, "stream", 1)],
)
def test_quick_kernels_are_replayed_from_a_graph_and_batched_and_slow_ones_are_not(fastest_us, launch, batch):
    assert choose_policy(fastest_us) == Policy(LaunchMode(launch), L2.COLD, Clocks.BOOST, batch)


def test_a_repetition_lasts_200_ticks_and_never_twice_that_where_it_is_batched():
    for fastest_us in (0.3, 1.0, 7.7, 24.9, 25.1, 99.9, 100.0, 5000.0):
        for tick_us in (TICK_US, 0.032, 1.0):
            batch = batch_size(fastest_us, tick_us)
            assert batch * fastest_us >= FEWEST_TICKS * tick_us
            assert batch == 1 or batch * fastest_us < 2 * FEWEST_TICKS * tick_us


def test_an_estimate_a_few_percent_off_seldom_changes_the_policy():
    """Within a factor of two one batch size serves: of estimates 2 % apart some 3 % fall on either side of a border."""
    times = [1.02**n for n in range(230)]
    changed = [choose_policy(a) != choose_policy(b) for a, b in pairwise(times)]
    assert sum(changed) <= 0.04 * len(changed)


@pytest.mark.parametrize("nonsense", [0.0, -1.0, float("nan"), float("inf")])
def test_what_is_no_time_is_refused(nonsense):
    with pytest.raises(ValueError, match="positive number of microseconds"):
        choose_policy(nonsense)


def test_the_border_between_stream_and_graph_is_where_batches_end():
    assert GRAPH_US == FEWEST_TICKS * TICK_US
