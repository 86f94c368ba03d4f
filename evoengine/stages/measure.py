"""Timing on a GPU: candidate, incumbent and SDPA in turn, gated before and after.

Runs in the GPU's own process. The candidate passes the gate first, again at the full problem, and once more after it
was timed. What is timed and checked there is in `bench.py`, the clock in `clock.py`, the statistics in `timing.py`.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache

import torch
from torch.nn.attention import SDPBackend

from evoengine.devices import cuda_api
from evoengine.devices.base import KernelCrashed, KernelFailure
from evoengine.devices.cuda import CUDA_ERRORS, CudaKernel, first_line
from evoengine.devices.torch_gpu import gpu as torch_gpu
from evoengine.errors import MachineError
from evoengine.gpu import Gpu
from evoengine.problem import Problem
from evoengine.records import (
    Baseline,
    CaseResult,
    Contender,
    Finals,
    Kind,
    Measurement,
    Outcome,
    Plan,
    Verdict,
)
from evoengine.stages.bench import Bench
from evoengine.stages.clock import SDPA
from evoengine.stages.timing import Rounds, rank, settled, spread
from evoengine.stages.verify import verify
from evoengine.workloads import find_tensors
from evoengine.workloads.attention import flops, least_bytes

BACKENDS = (
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
)


class KernelThrottled(KernelFailure):
    """Timed, and not a repetition of it is worth keeping."""

    outcome = Outcome.SUSPECT


class BaselineFailed(Exception):
    """The SDPA backend `name` crashed or hung; after that this process must be replaced."""

    def __init__(self, name: str, outcome: Outcome, reason: str) -> None:
        super().__init__(f"SDPA {name}: {reason}")
        self.name, self.outcome = name, outcome


def measure(
    kernel: str, contender: Contender, plan: Plan, problem: Problem, gpu: Gpu, seed: int,
    incumbent: Contender | None, rival: str,
) -> tuple[Verdict, Measurement | None]:  # fmt: skip
    """Gate, timing, gate: the whole of a candidate's life on the GPU. A measurement only where all of it was correct.

    `rival` names the SDPA backend to time beside it. Raises KernelFailure where there is no result; after a crash or a
    hang this process must be replaced. Raises MachineError where the machine is at fault, as when memory runs out.
    """
    torch_gpu()  # its context
    device = cuda_api.device_name()
    try:
        loaded = _load(contender)
        verdict = verify(find_tensors(kernel), plan, loaded.run, device, seed)
        if not verdict.correct:
            return verdict, None
        bench = _bench(kernel, problem)
        verdict = _joined(verdict, bench.check(loaded, contender, "full problem", seed + 1))
        if not verdict.correct:
            return verdict, None
        against = bench.work(_load(incumbent), incumbent, f"of trial {incumbent.trial}") if incumbent else None
        rounds = bench.clock.race(bench.work(loaded, contender), against, bench.rivals(rival), seed)
        verdict = _joined(verdict, bench.check(loaded, contender, "full problem after timing", seed + 2))
    except torch.OutOfMemoryError as error:
        raise _out_of_memory(problem) from error
    except CUDA_ERRORS as error:
        raise KernelCrashed(f"kernel {contender.source.entry}: {first_line(error)}") from error
    if not verdict.correct:
        return verdict, None
    figure = _figure(rounds, "candidate", bench.clock.sensed, problem, gpu)
    if rounds.ended == "beaten":
        lost = {"dropped_after": float(len(figure.samples_us)), "incumbent": float(incumbent.trial)}
        lost["times_incumbent"] = figure.median_us / statistics.median(rounds.samples["incumbent"])
        figure = replace(figure, terms={**figure.terms, **lost})
    return verdict, figure


def baselines(kernel: str, problem: Problem, seed: int, without: Sequence[str] = ()) -> list[Baseline]:
    """Every SDPA backend that accepts the problem, but those named in `without`, pinned and named, timed in turn.

    Raises BaselineFailed for the first that crashes or hangs, MachineError where the GPU's memory does not hold the
    problem.
    """
    bench, contenders = _bench(kernel, problem), {}
    for backend in (b for b in BACKENDS if b.name not in without):
        try:
            repetition = bench.sdpa(backend.name)
        except KernelFailure as failure:
            raise BaselineFailed(backend.name, failure.outcome, str(failure)) from failure
        except CUDA_ERRORS as error:
            raise BaselineFailed(backend.name, Outcome.CRASHED, first_line(error)) from error
        if repetition:
            contenders[backend.name] = repetition
    rounds = bench.clock.rounds(contenders, seed, all_settled)
    device = cuda_api.device_name()
    medians = {name: statistics.median(samples) for name, samples in rounds.samples.items() if samples}
    return [
        Baseline(name, device, median, flops(problem) / median / 1e6, tuple(rounds.samples[name]))
        for name, median in medians.items()
    ]


def finals(
    kernel: str, contenders: Sequence[Contender], problem: Problem, gpu: Gpu, seed: int, rival: str
) -> Finals:
    """The best candidates against each other and SDPA, all in the same rounds."""
    bench = _bench(kernel, problem)
    try:
        bench.refresh(seed)
        finalists = {str(c.trial): bench.clock.repetition(bench.work(_load(c), c)) for c in contenders}
        rounds = bench.clock.rounds({**finalists, **bench.rivals(rival)}, seed, all_settled)
    except torch.OutOfMemoryError as error:
        raise _out_of_memory(problem) from error
    except CUDA_ERRORS as error:
        trials = ", ".join(str(c.trial) for c in contenders)
        raise KernelCrashed(f"one of trials {trials}: {first_line(error)}") from error
    figures = {c.trial: _figure(rounds, str(c.trial), bench.clock.sensed, problem, gpu) for c in contenders}
    registers = {str(c.trial): c.binary.registers for c in contenders}
    ranking = rank({name: rounds.samples[name] for name in finalists}, registers)
    return Finals(tuple(map(int, ranking.order)), tuple(map(int, ranking.tied)), figures)


def all_settled(samples: Mapping[str, Sequence[float]]) -> str | None:
    """Why every contender has enough, or None: the last one's reason."""
    reasons = [settled(own) for own in samples.values()]
    return reasons[-1] if all(reasons) else None


def _figure(rounds: Rounds, name: str, sensed: bool, problem: Problem, gpu: Gpu) -> Measurement:
    samples = rounds.samples[name]
    if not samples:
        raise KernelThrottled(f"the GPU held its clocks back in all of {rounds.throttled} repetitions")
    median = statistics.median(samples)
    tflops, gbs = flops(problem) / median / 1e6, least_bytes(problem) / median / 1e3
    rival = rounds.samples.get(SDPA)
    return Measurement(
        Kind.MEASURED,
        cuda_api.device_name(),
        tflops,
        median,
        tuple(samples),
        vs_sdpa=statistics.median(rival) / median if rival else None,
        terms={
            "interval_percent": 100 * spread(samples) if len(samples) > 5 else float("nan"),
            "peak_tflops_percent": 100 * tflops / gpu.tensor_tflops,
            "peak_gbs_percent": 100 * gbs / gpu.memory_gbs,
            "throttled": float(rounds.throttled),
            **(_observed(rounds) if sensed else {}),
        },
        suspect=_above_roofline(tflops, gbs, gpu),
    )


def _observed(rounds: Rounds) -> dict[str, float]:
    clocks = [r.sm_mhz for r in rounds.readings]
    return {
        "sm_mhz": statistics.median(clocks),
        "sm_mhz_lowest": min(clocks),
        "temperature_c": max(r.temperature_c for r in rounds.readings),
        "power_capped": float(sum("power cap" in r.held_back for r in rounds.readings)),
    }


def _above_roofline(tflops: float, gbs: float, gpu: Gpu) -> str | None:
    if tflops > gpu.tensor_tflops:
        return f"{tflops:.0f} TFLOPS is above the {gpu.tensor_tflops:.0f} that {gpu.name} can do"
    # the L2 is flushed, so the inputs come from memory; what is written may stay in it
    if gbs / 2 > gpu.memory_gbs:
        return f"half of {gbs:.0f} GB/s is above the {gpu.memory_gbs:.0f} that {gpu.name} can read"
    return None


def _load(contender: Contender) -> CudaKernel:
    return CudaKernel(contender.binary, contender.source.entry, contender.source.launch)


def _out_of_memory(problem: Problem) -> MachineError:
    free, total = cuda_api.memory_info()
    return MachineError(
        f"the GPU ran out of memory on {problem}: {free:,} of {total:,} bytes are free; end what else uses the GPU or "
        "name a smaller --problem"
    )


def _joined(verdict: Verdict, cases: tuple[CaseResult, ...]) -> Verdict:
    wrong = next((c for c in cases if not c.correct), None)
    return replace(
        verdict,
        cases=verdict.cases + cases,
        outcome=Outcome.INCORRECT if wrong else None,
        reason=f"{wrong.name}: {wrong.reason}" if wrong else None,
    )


@cache
def _bench(kernel: str, problem: Problem) -> Bench:
    return Bench(find_tensors(kernel), problem)
