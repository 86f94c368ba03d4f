"""How the kernels of a problem are timed; the clock carries it out.

A policy is chosen once for all of its contenders, as figures of different policies are never compared.
"""

from __future__ import annotations

from evoengine.records import L2, Clocks, LaunchMode, Policy

TICK_US = 0.5
"""resolution of the GPU's event timer (CUDA Runtime API, cudaEventElapsedTime: around 0.5 microseconds)"""
FEWEST_TICKS = 200
"""minimum length of a repetition, so that rounding to a tick moves a median by at most a quarter of a per cent"""
GRAPH_US = 100.0
"""kernels faster than this are replayed from a CUDA graph, since the CPU's launch overhead would show"""


def choose_policy(fastest_us: float, tick_us: float = TICK_US) -> Policy:
    """Return the policy of a problem, from the least time that one of its kernels is expected to take.

    Raises ValueError if that is not a positive time.
    """
    if not 0 < fastest_us < float("inf"):
        raise ValueError(f"a kernel's time must be a positive number of microseconds, not {fastest_us}")
    launch = LaunchMode.GRAPH if fastest_us < GRAPH_US else LaunchMode.STREAM
    return Policy(launch, L2.COLD, Clocks.BOOST, batch_size(fastest_us, tick_us))


def batch_size(fastest_us: float, tick_us: float) -> int:
    """Return the number of launches to be timed together: the least power of two that lasts FEWEST_TICKS.

    A power of two keeps the policy the same if the estimate changes by a few per cent.
    """
    batch = 1
    while batch * fastest_us < FEWEST_TICKS * tick_us:
        batch *= 2
    return batch
