"""The full problem on the GPU: its tensors at addresses that stay, the check of whole outputs, what is timed there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType

import numpy as np
import torch
from torch.nn.attention import SDPBackend

from evoengine.devices import cuda_api
from evoengine.devices.base import launch_seconds
from evoengine.devices.cuda import CUDA_ERRORS, CudaKernel, await_gpu
from evoengine.devices.tensor_map import encode
from evoengine.devices.torch_gpu import gpu
from evoengine.errors import MachineError
from evoengine.problem import Problem
from evoengine.records import CaseResult, Contender
from evoengine.stages.clock import SDPA, Clock, KernelWork, LibraryWork, Repetition, flush_bytes
from evoengine.stages.verify import compare
from evoengine.workloads import find_workload
from evoengine.workloads.attention import Case, flops

SAMPLE_SCORES = 1 << 28
"""scores of one head that the float64 reference holds at once: 2 GiB, three times over while softmax runs"""
SAMPLE_BLOCKS = 4
"""blocks of rows, drawn at random, that are compared in float64 beside those of the first and last head"""
BLOCK_ROWS = 64
WHOLE_FACTOR = 2.0
"""rows that are not sampled err by less than this times the largest error of those that are"""


class Bench:
    """The full problem's tensors on the GPU and the clock; raises MachineError where its memory does not hold them."""

    def __init__(self, tensors: ModuleType, problem: Problem) -> None:
        self._tensors, self._problem = tensors, problem
        self.seconds = launch_seconds(flops(problem))
        gpu()  # its context
        self._require_memory()
        drawn = self._draw(0)
        self._inputs = {name: gpu().empty(tuple(t.shape), t.dtype) for name, t in drawn.items()}
        self._out = gpu().empty(tuple(drawn["q"].shape), drawn["q"].dtype)
        self.clock = Clock(self.seconds)

    def _require_memory(self) -> None:
        free, total = cuda_api.memory_info()
        needed = needed_bytes(self._problem)
        if needed > free:
            raise MachineError(
                f"{self._problem} needs {needed:,} bytes of GPU memory to be timed and {free:,} of {total:,} are free: "
                "name a smaller --problem or free the GPU"
            )

    def _draw(self, seed: int):
        return self._tensors.draw(Case("full problem", self._problem), seed, device=gpu().device).inputs

    def refresh(self, seed: int) -> None:
        """New inputs at the old addresses, which captured graphs keep."""
        for name, fresh in self._draw(seed).items():
            self._inputs[name].copy_(fresh)

    # ── the check ───────────────────────────────────────────────────────────────────────────────────────────────────

    def check(self, kernel: CudaKernel, contender: Contender, name: str, seed: int) -> tuple[CaseResult, ...]:
        """Fresh inputs at full size: every output written, samples compared in float64, and all of it with SDPA."""
        self.refresh(seed)
        self._out.fill_(float("nan"))
        self.work(kernel, contender)()
        await_gpu(kernel.entry, seconds=self.seconds)
        unwritten = int(self._out.isnan().sum())
        if unwritten:
            reason = f"{unwritten} of {self._out.numel()} outputs are NaN or were never written"
            return (CaseResult(name, str(self._problem), seed, False, None, None, None, reason),)
        samples = list(self._samples(seed))
        results = tuple(self._compare(name, seed, *sample) for sample in samples)
        if not all(r.correct for r in results):
            return results
        return (*results, self._compare_whole(name, seed, samples))

    def _samples(self, seed: int) -> Iterator[tuple[int, int, range]]:
        """(batch entry, head, rows) of what is compared in float64.

        They are the last rows of the first and last head, and blocks of rows anywhere.
        """
        p, rng = self._problem, np.random.default_rng(seed)
        rows = min(p.seq_q, max(1, SAMPLE_SCORES // p.seq_k))
        for b, h in dict.fromkeys([(0, 0), (p.batch - 1, p.heads - 1)]):
            yield b, h, range(p.seq_q - rows, p.seq_q)
        rows = min(p.seq_q, BLOCK_ROWS)
        for _ in range(SAMPLE_BLOCKS):
            first = int(rng.integers(p.seq_q - rows + 1))
            yield int(rng.integers(p.batch)), int(rng.integers(p.heads)), range(first, first + rows)

    def _compare(self, name: str, seed: int, b: int, h: int, rows: range) -> CaseResult:
        problem, inputs = self._tensors.rows_of(self._problem, self._inputs, b, h, rows)
        result = self._out[b, h, rows.start : rows.stop][None, None]
        return compare(self._tensors, Case(name, problem), self._tensors.Drawn(inputs, inputs), result, seed)

    def _compare_whole(self, name: str, seed: int, samples) -> CaseResult:
        """Every row against SDPA's. Both err, on other rows by at most WHOLE_FACTOR times what they do on the samples,
        each error taken relative to the largest output of its row."""
        theirs = self._tensors.library(self._problem, self._inputs)
        usual = torch.finfo(self._out.dtype).eps
        for b, h, rows in samples:
            exact = self._tensors.reference(*self._tensors.rows_of(self._problem, self._inputs, b, h, rows))[0, 0]
            scale = exact.abs().amax(dim=-1)
            for result in (self._out, theirs):
                error = (result[b, h, rows.start : rows.stop].double() - exact).abs().amax(dim=-1)
                usual = max(usual, float((error / scale).nan_to_num(posinf=0.0).max()))
        allowed = 2 * WHOLE_FACTOR * usual  # as both may err
        worst = [_worst_row(ours, other, allowed) for ours, other in zip(self._out, theirs, strict=True)]
        wrong = sum(count for _, _, count in worst)
        error, limit, _ = max(worst, key=lambda found: found[0] - found[1])
        rows = self._out.numel() // self._out.shape[-1]
        reason = f"{wrong} of {rows} rows differ from SDPA's, one by {error:.2e} where {limit:.2e} is allowed"
        problem = str(self._problem)
        return CaseResult(f"{name}, all rows", problem, seed, not wrong, error, None, limit, reason if wrong else None)

    # ── what is timed ───────────────────────────────────────────────────────────────────────────────────────────────

    def work(self, kernel: CudaKernel, contender: Contender, name: str | None = None) -> KernelWork:
        """A launch on the full problem's tensors."""
        tensors = {**{n: self._inputs[n] for n in ("q", "k", "v")}, self._tensors.OUTPUT: self._out}
        pointers = {name: t.data_ptr() for name, t in tensors.items()}
        scalars = (s.value for s in self._tensors.scalars(self._problem, contender.config))
        maps = (encode(m, pointers[m.tensor]) for m in self._tensors.tensor_maps(self._problem, contender.config))
        parameters = cuda_api.Parameters([*map(np.uint64, pointers.values()), *scalars, *maps])
        return KernelWork(kernel, contender.source.launch, parameters, name or kernel.entry)

    def sdpa(self, name: str) -> Repetition | None:
        """A repetition of an SDPA backend, or None where it does not take the problem or has too little memory."""
        call = self._tensors.library_call(self._problem, self._inputs, [SDPBackend.__members__[name]])
        try:
            return self.clock.repetition(LibraryWork(f"SDPA {name}", call))
        except RuntimeError as error:  # torch's way to say either
            if isinstance(error, CUDA_ERRORS) and not isinstance(error, torch.OutOfMemoryError):
                raise
            gpu().release_memory()
            return None

    def rivals(self, name: str) -> dict[str, Repetition]:
        repetition = self.sdpa(name)
        return {SDPA: repetition} if repetition else {}


def _worst_row(ours: torch.Tensor, theirs: torch.Tensor, relative: float) -> tuple[float, float, int]:
    """Of a batch entry: the error and the limit of the row that exceeds its limit most, and how many rows do."""
    error = (ours.float() - theirs.float()).abs().amax(dim=-1).flatten()
    limit = relative * theirs.float().abs().amax(dim=-1).flatten()
    at = int((error - limit).argmax())
    return float(error[at]), float(limit[at]), int((error > limit).sum())


def needed_bytes(problem: Problem) -> int:
    """GPU memory for gate and timing: what stays, and the largest of what comes and goes.

    Inputs are drawn in float32 beside their rounded copies. The check holds SDPA's output beside ours and, for one head
    in float64, its inputs and output and three matrices of scores.
    """
    p = problem
    out = p.batch * p.heads * p.seq_q * p.head_dim
    inputs = out + 2 * p.batch * p.kv_heads * p.seq_k * p.head_dim
    rows = min(p.seq_q, max(1, SAMPLE_SCORES // p.seq_k))
    drawing = (4 + 4 + 2) * inputs
    checking = 2 * out + 8 * (3 * rows * p.seq_k + 2 * (rows + p.seq_k) * p.head_dim) + 8 * out // p.batch
    return 2 * (inputs + out) + flush_bytes() + max(drawing, checking)
