"""Timing on a GPU: candidate, incumbent and SDPA in turn, L2 flushed before each, medians of event-timed repetitions.

Runs in the GPU's own process. The candidate passes the gate first, again at the full problem, and once more after it
was timed. The statistics are in `timing.py`.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from types import ModuleType

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from evoengine.devices.base import KernelCrashed, KernelFailure
from evoengine.devices.cuda import CUDA_ERRORS, CudaKernel, await_gpu, first_line, tensor_map
from evoengine.devices.nvml import Reading, Sensors, open_sensors
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
from evoengine.stages.finals import rank, run_finals
from evoengine.stages.statistics import beaten, settled, spread
from evoengine.stages.timing import Dropped, Repetition, Rounds, Timed, run_rounds
from evoengine.stages.verify import compare, verify
from evoengine.workloads import find_tensors
from evoengine.workloads.attention import Case, flops, least_bytes

DEVICE = "cuda"
WARM_UP = 3
GRAPH_US = 100.0
"""kernels quicker than this are replayed from a CUDA graph: what the CPU takes to launch them would show"""
FLUSH_BYTES = 512 << 20
"""zeroed before each repetition, or twice the L2 where that is more. It also gives the CPU the time to run ahead: some
130 µs on the fastest memory, as SDPA's way through Python takes several times that of a launch and must not be timed"""
BACKENDS = (
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
)
SAMPLE_SCORES = 1 << 28
"""scores of one head that the float64 reference holds at once: 2 GiB"""
SDPA = "sdpa"
Work = Callable[[], None]


class KernelThrottled(KernelFailure):
    """Timed, and not a repetition of it is worth keeping."""

    outcome = Outcome.SUSPECT


def measure(
    kernel: str, contender: Contender, plan: Plan, problem: Problem, gpu: Gpu, seed: int,
    incumbent: Contender | None, rival: str,
) -> tuple[Verdict, Measurement | None]:  # fmt: skip
    """Gate, timing, gate: the whole of a candidate's life on the GPU. A measurement only where all of it was correct.

    `rival` names the SDPA backend to time beside it. Raises KernelFailure where there is no result; after a crash or a
    hang this process must be replaced.
    """
    device = torch.cuda.get_device_name()
    try:
        loaded = _load(contender)
        verdict = verify(find_tensors(kernel), plan, loaded.run, device, seed)
        if not verdict.correct:
            return verdict, None
        bench = _bench(kernel, problem)
        verdict = _joined(verdict, bench.check(loaded, contender, "full problem", seed + 1))
        if not verdict.correct:
            return verdict, None
        rounds = bench.race(loaded, contender, incumbent, rival, seed)
        verdict = _joined(verdict, bench.check(loaded, contender, "full problem after timing", seed + 2))
    except CUDA_ERRORS as error:
        raise KernelCrashed(f"kernel {contender.source.entry}: {first_line(error)}") from error
    if not verdict.correct:
        return verdict, None
    figure = _figure(rounds, "candidate", bench.sensed, problem, gpu)
    if rounds.ended == "beaten":
        lost = {"dropped_after": float(len(figure.samples_us)), "incumbent": float(incumbent.trial)}
        lost["times_incumbent"] = figure.median_us / statistics.median(rounds.samples["incumbent"])
        figure = replace(figure, terms={**figure.terms, **lost})
    return verdict, figure


def baselines(kernel: str, problem: Problem, seed: int) -> list[Baseline]:
    """Every SDPA backend that accepts the problem, pinned and named, timed in turn.

    Raises MachineError where the GPU's memory does not hold the problem.
    """
    bench = _bench(kernel, problem)
    clocks = {b.name: clock for b in BACKENDS if (clock := bench.sdpa(b.name))}
    rounds = bench.rounds(clocks, seed, all_settled)
    device = torch.cuda.get_device_name()
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
        clocks = {str(c.trial): bench.clock(bench.work(_load(c), c), c.source.entry) for c in contenders}
        timed, sense = as_timed({**clocks, **bench.rivals(rival)}), bench.sense
        rounds = run_finals(timed, list(clocks), np.random.default_rng(seed), sense)
    except CUDA_ERRORS as error:
        trials = ", ".join(str(c.trial) for c in contenders)
        raise KernelCrashed(f"one of trials {trials}: {first_line(error)}") from error
    figures = {c.trial: _figure(rounds, str(c.trial), bench.sensed, problem, gpu) for c in contenders}
    registers = {str(c.trial): c.binary.registers for c in contenders}
    ranking = rank({name: rounds.samples[name] for name in clocks}, registers)
    lead = ranking.lead and (ranking.lead.median, ranking.lead.low, ranking.lead.high)
    order, tied, left = (tuple(map(int, names)) for names in (ranking.order, ranking.tied, ranking.open))
    return Finals(order, tied, figures, left, lead)


def as_timed(clocks: Mapping[str, Callable[[], float]]) -> dict[str, Timed]:
    return {name: Timed(lambda inputs, clock=clock: Repetition(clock())) for name, clock in clocks.items()}


def all_settled(samples: Mapping[str, Sequence[float]]) -> str | None:
    """Why every contender has enough, or None: the last one's reason."""
    reasons = [settled(own) for own in samples.values()]
    return reasons[-1] if all(reasons) else None


def _figure(rounds: Rounds, name: str, sensed: bool, problem: Problem, gpu: Gpu) -> Measurement:
    samples = rounds.samples[name]
    if not samples:
        raise KernelThrottled(f"the GPU held its clocks back in all of {rounds.dropped.total()} repetitions")
    median = statistics.median(samples)
    tflops, gbs = flops(problem) / median / 1e6, least_bytes(problem) / median / 1e3
    rival = rounds.samples.get(SDPA, [])[: len(samples)]
    return Measurement(
        Kind.MEASURED,
        torch.cuda.get_device_name(),
        tflops,
        median,
        tuple(samples),
        vs_sdpa=statistics.median(rival) / median if rival else None,
        terms={
            "interval_percent": 100 * spread(samples) if len(samples) > 5 else float("nan"),
            "peak_tflops_percent": 100 * tflops / gpu.tensor_tflops,
            "peak_gbs_percent": 100 * gbs / gpu.memory_gbs,
            "throttled": float(rounds.dropped[Dropped.THROTTLED]),
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


def _joined(verdict: Verdict, cases: tuple[CaseResult, ...]) -> Verdict:
    wrong = next((c for c in cases if not c.correct), None)
    return replace(
        verdict,
        cases=verdict.cases + cases,
        outcome=Outcome.INCORRECT if wrong else None,
        reason=f"{wrong.name}: {wrong.reason}" if wrong else None,
    )


def _captured(work: Work, name: str) -> Work:
    """The replay of a graph of `work`. It runs once more on the stream that will be captured, as libraries set themselves
    up per stream, which a capture may not allow (PyTorch, CUDA semantics: CUDA graphs)."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
    torch.cuda.current_stream().wait_stream(stream)
    await_gpu(name)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        work()
    return graph.replay


@cache
def _bench(kernel: str, problem: Problem) -> Bench:
    return Bench(find_tensors(kernel), problem)


class Bench:
    """The full problem's tensors on the GPU, at addresses that stay, and the clock."""

    def __init__(self, tensors: ModuleType, problem: Problem) -> None:
        self._tensors, self._problem = tensors, problem
        flush = max(FLUSH_BYTES, 2 * torch.cuda.get_device_properties(0).L2_cache_size)
        self._require_memory(flush)
        self._inputs = self._draw(0)
        self._out = torch.empty_like(self._inputs["q"])
        self._flush = torch.empty(flush, dtype=torch.uint8, device=DEVICE)
        sensors = open_sensors(os.environ["CUDA_VISIBLE_DEVICES"])
        self._sensors = sensors if isinstance(sensors, Sensors) else None

    @property
    def sensed(self) -> bool:
        return self._sensors is not None

    def _require_memory(self, flush: int) -> None:
        """Tensors are drawn as float32 before they are rounded: three times the bytes of the problem itself."""
        free, total = torch.cuda.mem_get_info()
        needed = int(3 * least_bytes(self._problem)) + flush
        if needed > free:
            raise MachineError(
                f"{self._problem} needs {needed:,} bytes of GPU memory to be timed and {free:,} of {total:,} are free: "
                "name a smaller --problem or free the GPU"
            )

    def _draw(self, seed: int):
        return self._tensors.draw(Case("full problem", self._problem), seed, device=DEVICE).inputs

    def refresh(self, seed: int) -> None:
        """New inputs at the old addresses, which captured graphs keep."""
        for name, fresh in self._draw(seed).items():
            self._inputs[name].copy_(fresh)

    def check(self, kernel: CudaKernel, contender: Contender, name: str, seed: int) -> tuple[CaseResult, ...]:
        """Fresh inputs at full size, all outputs written, and the last rows of the first and last head compared."""
        self.refresh(seed)
        self._out.fill_(float("nan"))
        self.work(kernel, contender)()
        await_gpu(kernel.entry)
        unwritten = int(self._out.isnan().sum())
        if unwritten:
            reason = f"{unwritten} of {self._out.numel()} outputs are NaN or were never written"
            return (CaseResult(name, str(self._problem), seed, False, None, None, None, reason),)
        p = self._problem
        return tuple(self._compare(name, b, h, seed) for b, h in {(0, 0), (p.batch - 1, p.heads - 1)})

    def _compare(self, name: str, batch: int, head: int, seed: int) -> CaseResult:
        """The last rows of a head are a problem of their own: the causal mask is aligned to the lower right."""
        p = self._problem
        rows = min(p.seq_q, max(1, SAMPLE_SCORES // p.seq_k))
        kv = head // (p.heads // p.kv_heads)
        part = {
            "q": self._inputs["q"][batch, head, -rows:][None, None],
            "k": self._inputs["k"][batch, kv][None, None],
            "v": self._inputs["v"][batch, kv][None, None],
        }
        case = Case(name, replace(p, batch=1, heads=1, kv_heads=1, seq_q=rows))
        result = self._out[batch, head, -rows:][None, None]
        return compare(self._tensors, case, self._tensors.Drawn(part, part), result, seed)

    # ── what is timed ───────────────────────────────────────────────────────────────────────────────────────────────

    def work(self, kernel: CudaKernel, contender: Contender) -> Work:
        tensors = {**{n: self._inputs[n] for n in ("q", "k", "v")}, self._tensors.OUTPUT: self._out}
        pointers = {name: t.data_ptr() for name, t in tensors.items()}
        scalars = (s.value for s in self._tensors.scalars(self._problem, contender.config))
        maps = (tensor_map(m, pointers[m.tensor]) for m in self._tensors.tensor_maps(self._problem, contender.config))
        parameters = (*map(np.uint64, pointers.values()), *scalars, *maps)
        return lambda: kernel.launch(contender.source.launch, parameters)

    def sdpa(self, name: str) -> Callable[[], float] | None:
        """The clock of an SDPA backend, or None where it does not take the problem or lacks the memory."""
        try:
            return self.clock(self._sdpa_work(SDPBackend.__members__[name]), f"SDPA {name}")
        except RuntimeError as error:  # torch's way to say either
            if isinstance(error, CUDA_ERRORS) and not isinstance(error, torch.OutOfMemoryError):
                raise
            torch.cuda.empty_cache()
            return None

    def rivals(self, name: str) -> dict[str, Callable[[], float]]:
        clock = self.sdpa(name)
        return {SDPA: clock} if clock else {}

    def _sdpa_work(self, backend: SDPBackend) -> Work:
        i, p = self._inputs, self._problem
        # torch aligns is_causal to the upper left; only where the lengths are equal is that our mask
        square = p.seq_q == p.seq_k
        mask = causal_lower_right(p.seq_q, p.seq_k) if p.causal and not square else None
        grouped = p.kv_heads != p.heads

        def work() -> None:
            with sdpa_kernel(backend):
                scaled_dot_product_attention(
                    i["q"], i["k"], i["v"], attn_mask=mask, is_causal=p.causal and square, enable_gqa=grouped
                )

        return work

    # ── the clock ───────────────────────────────────────────────────────────────────────────────────────────────────

    def clock(self, work: Work, name: str) -> Callable[[], float]:
        """Warms up; gives a call that runs `work` once with a cold L2 and tells its microseconds."""
        for _ in range(WARM_UP):
            first = self._once(work, name)
        timed = _captured(work, name) if first < GRAPH_US else work
        return lambda: self._once(timed, name)

    def _once(self, work: Work, name: str) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self._flush.zero_()
        start.record()
        work()
        end.record()
        await_gpu(name, end)
        return start.elapsed_time(end) * 1e3

    def sense(self) -> Reading | None:
        return self._sensors.read() if self._sensors else None

    def rounds(self, clocks: Mapping[str, Callable[[], float]], seed: int, enough) -> Rounds:
        return run_rounds(as_timed(clocks), np.random.default_rng(seed), enough, self.sense)

    def race(
        self, kernel: CudaKernel, contender: Contender, incumbent: Contender | None, rival: str, seed: int
    ) -> Rounds:
        """The candidate until its median is settled, or until it is plainly beaten by the incumbent."""
        clocks = {"candidate": self.clock(self.work(kernel, contender), kernel.entry)}
        if incumbent:
            best = _load(incumbent)
            clocks["incumbent"] = self.clock(self.work(best, incumbent), f"of trial {incumbent.trial}")

        def enough(samples: Mapping[str, list[float]]) -> str | None:
            if incumbent and beaten(samples["candidate"], samples["incumbent"]):
                return "beaten"
            return settled(samples["candidate"])

        return self.rounds({**clocks, **self.rivals(rival)}, seed, enough)
