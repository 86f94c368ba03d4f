"""The full problem on the GPU: its tensors at addresses that stay, the check of whole outputs, what is timed there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import TypeVar

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
from evoengine.records import CaseResult, Contender, Policy
from evoengine.stages.clock import Clock, KernelWork, LibraryWork, Prepared, flush_bytes
from evoengine.stages.timing import INPUT_SETS
from evoengine.stages.verify import case_seeds, compare
from evoengine.workloads.attention import Case, flops

SAMPLE_SCORES = 1 << 28
"""scores of one head that the float64 reference holds at once: 2 GiB, three times over while softmax runs"""
SAMPLE_BLOCKS = 4
"""blocks of rows, drawn at random, that are compared in float64 beside those of the first and last head"""
BLOCK_ROWS = 64
Inputs = dict[str, torch.Tensor]
_Found = TypeVar("_Found")
WHOLE_FACTOR = 2.0
"""rows that are not sampled err by less than this times the largest error of those that are"""


@dataclass(frozen=True, slots=True)
class Checked:
    """What the check of a whole output found."""

    cases: tuple[CaseResult, ...]
    row_error: float = 0.0
    """that a row may have against SDPA's, relative to its largest output; only where all cases are correct"""

    @property
    def wrong(self) -> CaseResult | None:
        return next((case for case in self.cases if not case.correct), None)


class Bench:
    """The full problem's tensors on the GPU and the clock; raises MachineError where its memory does not hold them.

    There are INPUT_SETS sets of inputs. Of each there are as many copies as a repetition has launches, so that every
    launch finds its inputs where the flush has left them: not in the L2.
    """

    def __init__(self, tensors: ModuleType, problem: Problem) -> None:
        self._tensors, self._problem = tensors, problem
        self.seconds = launch_seconds(flops(problem))
        gpu()  # its context
        self._require_memory()
        drawn = self._draw(0)
        self._sets = [[_empty_like(drawn)] for _ in range(INPUT_SETS)]
        self._out = gpu().empty(tuple(drawn["q"].shape), drawn["q"].dtype)
        self._theirs: dict[int, torch.Tensor] = {}
        """input set → SDPA's output, from when it is first asked for to the next refresh"""
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
        """New inputs at the old addresses, which captured graphs keep; `seed` draws the first set."""
        self._theirs.clear()
        for copies, own_seed in zip(self._sets, (seed, *case_seeds(seed, INPUT_SETS - 1)), strict=True):
            drawn = self._draw(own_seed)
            for copy in copies:
                _fill(copy, drawn)

    def _copies(self, policy: Policy) -> list[list[Inputs]]:
        """Of each set of inputs as many as a repetition has launches, made where they are missing: this process may have
        taken over from one that a kernel broke."""
        for copies in self._sets:
            while len(copies) < policy.batch:
                copies.append(_empty_like(copies[0]))
                _fill(copies[-1], copies[0])
        return [copies[: policy.batch] for copies in self._sets]

    # ── the check ───────────────────────────────────────────────────────────────────────────────────────────────────

    def check(self, kernel: CudaKernel, contender: Contender, name: str, seed: int) -> Checked:
        """Fresh inputs at full size: every output written, samples compared in float64, and all of it with SDPA."""
        self.launch_once(kernel, contender, seed, self.seconds)
        if reason := self._unwritten():
            return Checked((CaseResult(name, str(self._problem), seed, False, None, None, None, reason),))
        samples = list(self._samples(seed))
        results = tuple(self._compare(name, seed, *sample) for sample in samples)
        if not all(r.correct for r in results):
            return Checked(results)
        allowed = self._row_error(samples)
        return Checked((*results, self._compare_whole(name, seed, allowed)), allowed)

    def launch_once(self, kernel: CudaKernel, contender: Contender, seed: int, seconds: float) -> None:
        """On fresh inputs; raises KernelHung where it has not ended after so long."""
        self.refresh(seed)
        self._out.fill_(float("nan"))
        self._work(kernel, contender, self._sets[0][:1], kernel.entry)()
        await_gpu(kernel.entry, seconds=seconds)

    def output_check(self, checked: Checked) -> Callable[[int], str | None]:
        """What is wrong with the output of a repetition on an input set, of a kernel that has passed `check`."""

        def look(number: int) -> str | None:
            if reason := self._unwritten():
                return reason
            found = self._difference(number, checked.row_error)
            return self._say(found) if found.wrong_rows else None

        return look

    def _unwritten(self) -> str | None:
        count = int(self._out.isnan().sum())
        return f"{count} of {self._out.numel()} outputs are NaN or were never written" if count else None

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
        problem, inputs = self._tensors.rows_of(self._problem, self._sets[0][0], b, h, rows)
        result = self._out[b, h, rows.start : rows.stop][None, None]
        return compare(self._tensors, Case(name, problem), self._tensors.Drawn(inputs, inputs), result, seed)

    def _row_error(self, samples: Sequence[tuple[int, int, range]]) -> float:
        """How far a row may be from SDPA's, relative to its largest output, on the first set of inputs.

        Both err, on other rows by at most WHOLE_FACTOR times what they do on the samples.
        """
        usual, inputs = torch.finfo(self._out.dtype).eps, self._sets[0][0]
        for b, h, rows in samples:
            exact = self._tensors.reference(*self._tensors.rows_of(self._problem, inputs, b, h, rows))[0, 0]
            scale = exact.abs().amax(dim=-1)
            for result in (self._out, self._library(0)):
                error = (result[b, h, rows.start : rows.stop].double() - exact).abs().amax(dim=-1)
                usual = max(usual, float((error / scale).nan_to_num(posinf=0.0).max()))
        return 2 * WHOLE_FACTOR * usual

    def _compare_whole(self, name: str, seed: int, allowed: float) -> CaseResult:
        found = self._difference(0, allowed)
        reason = self._say(found) if found.wrong_rows else None
        problem, correct = str(self._problem), not found.wrong_rows
        return CaseResult(f"{name}, all rows", problem, seed, correct, found.error, None, found.limit, reason)

    def _library(self, number: int) -> torch.Tensor:
        if number not in self._theirs:
            self._theirs[number] = self._tensors.library(self._problem, self._sets[number][0])
        return self._theirs[number]

    def _difference(self, number: int, allowed: float) -> _Difference:
        """Of every row from SDPA's on that set of inputs."""
        theirs = self._library(number)
        parts = [_worst_row(ours, other, allowed) for ours, other in zip(self._out, theirs, strict=True)]
        worst = max(parts, key=lambda part: part.error - part.limit)
        return replace(worst, wrong_rows=sum(part.wrong_rows for part in parts))

    def _say(self, found: _Difference) -> str:
        rows = self._out.numel() // self._out.shape[-1]
        wrong = f"{found.wrong_rows} of {rows} rows differ from SDPA's"
        return f"{wrong}, one by {found.error:.2e} where {found.limit:.2e} is allowed"

    # ── what is timed ───────────────────────────────────────────────────────────────────────────────────────────────

    def kernel(self, kernel: CudaKernel, contender: Contender, policy: Policy, name: str | None = None) -> Prepared:
        """Launches on the full problem's tensors, ready to be timed."""
        works = [self._work(kernel, contender, inputs, name or kernel.entry) for inputs in self._copies(policy)]
        return self.clock.prepare(works, policy, self._out)

    def _work(
        self, kernel: CudaKernel, contender: Contender, copies: Sequence[Inputs], name: str
    ) -> KernelWork:
        parameters = [self._parameters(contender, inputs) for inputs in copies]
        return KernelWork(kernel, contender.source.launch, parameters, name)

    def _parameters(self, contender: Contender, inputs: Inputs) -> cuda_api.Parameters:
        tensors = {**{n: inputs[n] for n in ("q", "k", "v")}, self._tensors.OUTPUT: self._out}
        pointers = {name: t.data_ptr() for name, t in tensors.items()}
        scalars = (s.value for s in self._tensors.scalars(self._problem, contender.config))
        maps = (encode(m, pointers[m.tensor]) for m in self._tensors.tensor_maps(self._problem, contender.config))
        return cuda_api.Parameters([*map(np.uint64, pointers.values()), *scalars, *maps])

    def sdpa(self, name: str, policy: Policy) -> Prepared | None:
        """An SDPA backend, or None where it does not take the problem or has too little memory."""
        works = [self._library_work(name, inputs) for inputs in self._copies(policy)]
        return self._unless_refused(lambda: self.clock.prepare(works, policy))

    def sdpa_estimate(self, name: str) -> float | None:
        """Its rough time in microseconds, None likewise."""
        return self._unless_refused(lambda: self.clock.estimate(self._library_work(name, self._sets[0][:1])))

    def _library_work(self, name: str, copies: Sequence[Inputs]) -> LibraryWork:
        backends = [SDPBackend.__members__[name]]
        calls = [self._tensors.library_call(self._problem, inputs, backends) for inputs in copies]
        return LibraryWork(f"SDPA {name}", calls)

    def _unless_refused(self, run: Callable[[], _Found]) -> _Found | None:
        try:
            return run()
        except RuntimeError as error:  # torch's way to say that it does not take a problem, or has no memory for it
            if isinstance(error, CUDA_ERRORS) and not isinstance(error, torch.OutOfMemoryError):
                raise
            gpu().release_memory()
            return None


@dataclass(frozen=True, slots=True)
class _Difference:
    """The row of an output that exceeds its limit most, and how many do."""

    error: float
    limit: float
    wrong_rows: int


def _worst_row(ours: torch.Tensor, theirs: torch.Tensor, relative: float) -> _Difference:
    """Of a batch entry; a row may differ by `relative` times its largest output."""
    error = (ours.float() - theirs.float()).abs().amax(dim=-1).flatten()
    limit = relative * theirs.float().abs().amax(dim=-1).flatten()
    at = int((error - limit).argmax())
    return _Difference(float(error[at]), float(limit[at]), int((error > limit).sum()))


def _empty_like(inputs: Inputs) -> Inputs:
    return {name: gpu().empty(tuple(tensor.shape), tensor.dtype) for name, tensor in inputs.items()}


def _fill(inputs: Inputs, drawn: Inputs) -> None:
    for name, tensor in drawn.items():
        inputs[name].copy_(tensor)


def needed_bytes(problem: Problem) -> int:
    """GPU memory for gate and timing: what stays, and the largest of what comes and goes.

    Inputs are drawn in float32 beside their rounded copies. The check holds SDPA's output for each set of inputs and, for
    one head in float64, its inputs and output and three matrices of scores.
    """
    p = problem
    out = p.batch * p.heads * p.seq_q * p.head_dim
    inputs = out + 2 * p.batch * p.kv_heads * p.seq_k * p.head_dim
    rows = min(p.seq_q, max(1, SAMPLE_SCORES // p.seq_k))
    drawing = (4 + 4 + 2) * inputs
    checking = 8 * (3 * rows * p.seq_k + 2 * (rows + p.seq_k) * p.head_dim) + 8 * out // p.batch
    return 2 * (INPUT_SETS * (inputs + out) + out) + flush_bytes() + max(drawing, checking)
