"""Timing on a GPU: candidate and fastest SDPA in turn, L2 flushed before each, the median of event-timed repetitions.

Runs in the GPU's own process. The candidate passes the gate first, again at the full problem, and once more after it
was timed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from types import ModuleType

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from evoengine.devices.base import KernelCrashed
from evoengine.devices.cuda import CUDA_ERRORS, CudaKernel, first_line
from evoengine.gpu import Gpu
from evoengine.problem import Problem
from evoengine.records import Baseline, Binary, CaseResult, Kind, Launch, Measurement, Outcome, Plan, Source, Verdict
from evoengine.stages.verify import compare, verify
from evoengine.workloads import find_tensors
from evoengine.workloads.attention import Case, flops

SAMPLES = (10, 60)
"""fewest and most repetitions"""
BUDGET_US = 2e6
"""kernel time spent on one candidate, once the fewest repetitions are there"""
WARM_UP = 3
SDPA_BACKENDS = (
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
)
SAMPLE_SCORES = 1 << 28
"""scores of one head that the float64 reference holds at once: 2 GiB"""


def measure(
    kernel: str, source: Source, binary: Binary, plan: Plan, problem: Problem, gpu: Gpu, seed: int
) -> tuple[Verdict, Measurement | None]:
    """Gate, timing, gate: the whole of a candidate's life on the GPU. A measurement only where all of it was correct.

    Raises KernelFailure where there is no result; after a crash this process must be replaced.
    """
    device = torch.cuda.get_device_name()
    try:
        loaded = CudaKernel(binary, source.entry, source.launch)
        verdict = verify(find_tensors(kernel), plan, loaded.run, device, seed)
        if not verdict.correct:
            return verdict, None
        bench = _bench(kernel, problem)
        verdict = _joined(verdict, bench.check(loaded, source.launch, "full problem"))
        if not verdict.correct:
            return verdict, None
        samples, rivals = bench.time(loaded, source.launch)
        verdict = _joined(verdict, bench.check(loaded, source.launch, "full problem after timing"))
    except CUDA_ERRORS as error:
        raise KernelCrashed(first_line(error)) from error
    if not verdict.correct:
        return verdict, None
    median = float(np.median(samples))
    tflops = flops(problem) / median / 1e6
    suspect = None
    if tflops > gpu.tensor_tflops:
        suspect = f"{tflops:.0f} TFLOPS is above the {gpu.tensor_tflops:.0f} that {gpu.key} can do"
    return verdict, Measurement(
        Kind.MEASURED, device, tflops, median, tuple(samples), vs_sdpa=float(np.median(rivals)) / median, suspect=suspect
    )


def baselines(kernel: str, problem: Problem) -> list[Baseline]:
    """Every SDPA backend that accepts the problem, pinned and named."""
    return _bench(kernel, problem).baselines()


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


class Bench:
    """The full problem's tensors on the GPU, and the clock."""

    def __init__(self, tensors: ModuleType, problem: Problem) -> None:
        self._tensors, self._problem = tensors, problem
        self._seed = 0
        self._inputs = self._draw()
        self._out = torch.empty_like(self._inputs["q"])
        l2 = torch.cuda.get_device_properties(0).L2_cache_size
        self._flush = torch.empty(2 * l2, dtype=torch.uint8, device="cuda")
        self._baselines: list[Baseline] = []
        self._rival: SDPBackend | None = None

    def _draw(self):
        return self._tensors.draw(Case("full problem", self._problem), self._seed, device="cuda").inputs

    def check(self, kernel: CudaKernel, launch: Launch, name: str) -> tuple[CaseResult, ...]:
        """Fresh inputs at full size, all outputs written, and the last rows of the first and last head compared."""
        self._seed += 1
        self._inputs = self._draw()
        self._out.fill_(float("nan"))
        kernel.launch(launch, self._parameters())
        torch.cuda.synchronize()
        unwritten = int(self._out.isnan().sum())
        if unwritten:
            reason = f"{unwritten} of {self._out.numel()} outputs are NaN or were never written"
            return (CaseResult(name, str(self._problem), self._seed, False, None, None, None, reason),)
        p = self._problem
        return tuple(self._compare(name, b, h) for b, h in {(0, 0), (p.batch - 1, p.heads - 1)})

    def _compare(self, name: str, batch: int, head: int) -> CaseResult:
        """The last rows of a head are an attention problem of their own: the causal mask is aligned to the lower right."""
        p = self._problem
        rows = min(p.seq_q, max(1, SAMPLE_SCORES // p.seq_k))
        kv = head // (p.heads // p.kv_heads)
        part = {
            "q": self._inputs["q"][batch, head, -rows:][None, None],
            "k": self._inputs["k"][batch, kv][None, None],
            "v": self._inputs["v"][batch, kv][None, None],
        }
        case = Case(name, replace(p, batch=1, heads=1, kv_heads=1, seq_q=rows))
        drawn = self._tensors.Drawn(part, part)
        result = self._out[batch, head, -rows:][None, None]
        return compare(self._tensors, case, self._tensors.Drawn(part, part), result, self._seed)

    def _parameters(self) -> tuple:
        pointers = [np.uint64(t.data_ptr()) for t in (*(self._inputs[n] for n in ("q", "k", "v")), self._out)]
        return (*pointers, *(s.value for s in self._tensors.scalars(self._problem)))

    def time(self, kernel: CudaKernel, launch: Launch) -> tuple[list[float], list[float]]:
        """Microseconds of the candidate and of the fastest SDPA backend, taken in turn."""
        self.baselines()
        parameters = self._parameters()
        return self._interleaved(lambda: kernel.launch(launch, parameters), lambda: self._sdpa(self._rival))

    def baselines(self) -> list[Baseline]:
        if not self._baselines:
            for backend in SDPA_BACKENDS:
                self._try_baseline(backend)
            fastest = min(self._baselines, key=lambda b: b.median_us)
            self._rival = next(b for b in SDPA_BACKENDS if b.name == fastest.name)
        return self._baselines

    def _try_baseline(self, backend: SDPBackend) -> None:
        try:
            samples, _ = self._interleaved(lambda: self._sdpa(backend), None)
        except RuntimeError as error:  # torch's way to say that a backend does not take the problem, or lacks the memory
            if isinstance(error, torch.AcceleratorError):
                raise
            return
        median = float(np.median(samples))
        name = torch.cuda.get_device_name()
        self._baselines.append(Baseline(backend.name, name, median, flops(self._problem) / median / 1e6, tuple(samples)))

    def _sdpa(self, backend: SDPBackend) -> None:
        i, p = self._inputs, self._problem
        # torch aligns is_causal to the upper left; only where the lengths are equal is that our mask
        square = p.seq_q == p.seq_k
        mask = causal_lower_right(p.seq_q, p.seq_k) if p.causal and not square else None
        grouped = p.kv_heads != p.heads
        with sdpa_kernel(backend):
            scaled_dot_product_attention(
                i["q"], i["k"], i["v"], attn_mask=mask, is_causal=p.causal and square, enable_gqa=grouped
            )

    def _interleaved(self, first: Callable[[], None], second: Callable[[], None] | None) -> tuple[list[float], list[float]]:
        for _ in range(WARM_UP):
            first()
            if second:
                second()
        ours: list[float] = []
        theirs: list[float] = []
        while len(ours) < SAMPLES[0] or (len(ours) < SAMPLES[1] and sum(ours) < BUDGET_US):
            ours.append(self._once(first))
            if second:
                theirs.append(self._once(second))
        return ours, theirs

    def _once(self, work: Callable[[], None]) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self._flush.zero_()
        start.record()
        work()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3
