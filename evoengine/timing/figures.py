"""Make figures from a GPU's samples, with observations during the measurement, and decide whether to trust them."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from evoengine.devices import cuda_api
from evoengine.devices.base import KernelFailure
from evoengine.devices.nvml import Reading
from evoengine.gpu import Gpu
from evoengine.records import L2, Baseline, Clocks, CompiledCandidate, Kind, LaunchMode, Measurement, Outcome, Policy
from evoengine.timing.rounds import BASELINE, Dropped, Rounds, Sustained, sustained_policy
from evoengine.timing.statistics import normalised_median, paired_ratio, spread
from evoengine.workloads.base import Target


class NotTimed(KernelFailure):
    """The kernel ran, but no repetition is usable."""

    outcome = Outcome.SUSPECT


MOST_ABOVE_BOOST = 1.25
"""largest ratio of a board's clock to the boost clock of its data sheet"""


@dataclass(frozen=True, slots=True)
class Subject:
    """The subject of figures: problem and GPU, and the baseline with its long-run time."""

    target: Target
    baseline: Baseline

    def tensor_percent(self, tflops: float, mix: Mapping[str, int]) -> float:
        """Return the percentage of the peak of halves on tensor cores, or of faster products that the kernel has."""
        gpu = self.target.gpu
        return 100 * tflops / max(gpu.tensor_tflops, gpu.peak_tflops(mix) if mix else 0.0)


def make_baselines(target: Target, policy: Policy, rounds: Rounds) -> list[Baseline]:
    """Return the figures of the baselines that have samples."""
    device = cuda_api.device_name()
    medians = {name: statistics.median(samples) for name, samples in rounds.samples.items() if samples}
    return [
        Baseline(name, device, median, target.flops / median / 1e6, tuple(rounds.samples[name]), policy)
        for name, median in medians.items()
    ]


def make_figure(
    subject: Subject, rounds: Rounds, name: str, mix: Mapping[str, int], incumbent: CompiledCandidate | None = None
) -> Measurement:
    """Return the figure of one contender, whose binary has `mix`. Raises NotTimed if none of its repetitions counts."""
    samples, policy = rounds.samples[name], subject.baseline.policy
    if not samples:
        raise NotTimed(f"none of {rounds.dropped.total()} repetitions counts: {rounds.ended}")
    median = statistics.median(samples)
    theirs = rounds.samples.get(BASELINE, [])[: len(samples)]
    normalised = normalised_median(samples, theirs, subject.baseline.median_us).median if theirs else None
    compared = normalised or median
    tflops, gbs = subject.target.flops / compared / 1e6, subject.target.min_dram_bytes / compared / 1e3
    observed = _observed(rounds.readings)
    interval = 100 * spread(samples, TICK_US / policy.batch) if len(samples) > 5 else float("nan")
    return Measurement(
        Kind.MEASURED,
        cuda_api.device_name(),
        tflops,
        median,
        tuple(samples),
        vs_baseline=1 / paired_ratio(samples, theirs).median if theirs else None,
        terms={
            "interval_percent": interval,
            "peak_tflops_percent": subject.tensor_percent(tflops, mix),
            "peak_gbs_percent": 100 * gbs / subject.target.gpu.memory_gbs,
            "throttled": float(rounds.dropped[Dropped.THROTTLED]),
            "cpu_behind": float(rounds.dropped[Dropped.CPU_BEHIND]),
            **observed,
            **(_why_dropped(rounds, samples, incumbent) if incumbent and rounds.ended == "beaten" else {}),
        },
        suspect=above_roofline(tflops, gbs, subject.target.gpu, mix, observed),
        policy=policy,
        normalised_us=normalised,
    )


def make_sustained(subject: Subject, found: Sustained, mix: Mapping[str, int]) -> Measurement | None:
    """Return the figure of a kernel run back to back; None if the GPU idled meanwhile."""
    if found.rested:
        return None
    median = statistics.median(found.samples_us)
    tflops = subject.target.flops / median / 1e6
    terms = {"peak_tflops_percent": subject.tensor_percent(tflops, mix), **_observed(found.readings)}
    return Measurement(
        Kind.MEASURED,
        cuda_api.device_name(),
        tflops,
        median,
        found.samples_us,
        terms=terms,
        suspect=above_roofline(tflops, 0.0, subject.target.gpu, mix, terms),
        policy=sustained_policy(subject.baseline.policy),
    )


def _why_dropped(rounds: Rounds, samples: list[float], incumbent: CompiledCandidate) -> dict[str, float]:
    """Return the terms that record why a candidate was clearly slower than the incumbent."""
    ratio = statistics.median(samples) / statistics.median(rounds.samples["incumbent"])
    return {
        "dropped_after": float(len(samples)),
        "incumbent": float(incumbent.trial),
        "times_incumbent": ratio,
    }


def _observed(readings: list[Reading] | tuple[Reading, ...]) -> dict[str, float]:
    """Return the sensors' terms; empty if the GPU has no readable sensors."""
    if not readings:
        return {}
    clocks = [r.sm_mhz for r in readings]
    watts = [r.watts for r in readings if r.watts is not None]
    return {
        "sm_mhz": statistics.median(clocks),
        "sm_mhz_lowest": min(clocks),
        "temperature_c": max(r.temperature_c for r in readings),
        "power_capped": float(sum("power cap" in r.held_back for r in readings)),
        **({"watts": statistics.median(watts)} if watts else {}),
    }


def above_roofline(
    tflops: float, gbs: float, gpu: Gpu, mix: Mapping[str, int], observed: Mapping[str, float]
) -> str | None:
    """Return why a figure cannot be: above the peak of the fastest arithmetic in `mix`, or of the memory; else None.

    A peak goes with the clock, where the sensors in `observed` say that the board exceeded its data sheet's.
    """
    clock = min(MOST_ABOVE_BOOST, max(1.0, observed.get("sm_mhz", 0.0) / 1e3 / gpu.clock_ghz))
    peak = clock * gpu.peak_tflops(mix)
    if tflops > peak:
        without = "" if not mix or any("MMA" in opcode for opcode in mix) else " without its tensor cores"
        return f"{tflops:.0f} TFLOPS is above the {peak:.0f} that {gpu.name} can do{without}"
    # the L2 is flushed, so the inputs come from memory; outputs may stay in it
    if gbs / 2 > gpu.memory_gbs:
        return f"half of {gbs:.0f} GB/s is above the {gpu.memory_gbs:.0f} that {gpu.name} can read"
    return None


# How the kernels of a problem are timed; the clock carries it out.
#
# A policy is chosen once for all of its contenders, as figures of different policies are never compared.

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
