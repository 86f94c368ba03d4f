"""The full problem on the GPU: tensors at fixed addresses, the check of whole outputs, and the timed calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from evoengine.devices import cuda_api
from evoengine.devices.base import (
    ConstantParameter,
    ScratchParameter,
    TensorParameter,
    is_passed,
    launch_seconds,
)
from evoengine.devices.cuda import CUDA_ERRORS, CudaKernel, Parameters, await_gpu, first_line, parameter_value
from evoengine.devices.torch_gpu import gpu
from evoengine.errors import MachineError
from evoengine.records import CaseResult, CompiledCandidate, Policy
from evoengine.stages.verify import POISON, as_bytes, case_seeds, compare, written_part
from evoengine.timing.clock import Clock, KernelWork, LibraryWork, Prepared, flush_bytes
from evoengine.timing.rounds import INPUT_SETS
from evoengine.workloads.base import Case, Drawn, Inputs, Outputs, Sample, Target, taken
from evoengine.workloads.packages import is_installed
from evoengine.workloads.tensors import TORCH_DTYPES

_Found = TypeVar("_Found")
PLAIN = "plain torch"
"""name of the baseline of a problem that no library supports"""
WHOLE_FACTOR = 2.0
"""assumed bound of the errors of unsampled rows over the largest error of the sampled ones"""
ROWS_ELEMENTS = 1 << 24
"""elements of an output that are compared at once"""
FREED_SECONDS = 20.0
"""longest wait for memory, which a killed predecessor of this process may still hold"""
AS_BASELINE = "as a baseline"
"""the draw of a case whose outputs are a baseline's; no workload's errors are independent in it"""
OTHER_POISON = 0xA5
"""an integer that keeps both poisons was not written"""


class BaselineRefused(Exception):
    """A library does not support the problem or lacks memory for it; the message is the library's."""


@dataclass(frozen=True, slots=True)
class Checked:
    """The result of the check of whole outputs."""

    cases: tuple[CaseResult, ...]
    row_error: float = 0.0
    """allowed difference of a row from the library's, relative to its largest output; only where all cases are
    correct"""

    @property
    def wrong(self) -> CaseResult | None:
        return next((case for case in self.cases if not case.correct), None)


class Bench:
    """The full problem's tensors on the GPU and the clock. Raises MachineError if its memory is too small.

    There are INPUT_SETS sets of inputs, each with as many copies as a repetition has launches, so that no launch finds
    its inputs in the L2.
    """

    def __init__(self, target: Target) -> None:
        self._target, self._problem = target, target.problem
        self._tensors = target.workload.tensors()
        self.seconds = launch_seconds(target.flops)
        gpu()  # its context
        self._require_memory()
        drawn = self._draw(0)
        self._sets: list[list[dict[str, torch.Tensor]]] = [[_empty_like(drawn)] for _ in range(INPUT_SETS)]
        self._written = {p.name: p for p in _tensor_parameters(target) if p.output}
        self._outputs = {n: gpu().empty(p.shape, TORCH_DTYPES[p.dtype]) for n, p in self._written.items()}
        stated = target.workload.parameters(target.problem, {})
        self._constants = [p for p in stated if isinstance(p, ConstantParameter)]
        self._theirs: dict[int, Outputs] = {}
        """input set → the library's outputs; cache until the next refresh"""
        self.clock = Clock(self.seconds)
        self._of_packages = {
            own.name: own
            for own in self._tensors.package_baselines()
            if is_installed(own.package) and own.covers(self._problem)
        }

    def _require_memory(self) -> None:
        needed, deadline = needed_bytes(self._target), gpu().now() + FREED_SECONDS
        while (memory := cuda_api.memory_info())[0] < needed <= memory[1] and gpu().now() < deadline:
            gpu().rest(0.1)
        free, total = memory
        if needed > free:
            raise MachineError(
                f"timing {self._problem} needs {needed:,} bytes of GPU memory, and {free:,} of {total:,} are free: "
                "choose a smaller --problem or free the GPU"
            )

    def _draw(self, seed: int) -> Inputs:
        return self._tensors.draw(Case("full problem", self._problem), seed, device=gpu().device).inputs

    def refresh(self, seed: int) -> None:
        """Draw new inputs at the same addresses, which captured graphs keep. `seed` draws the first set."""
        self._theirs.clear()
        constants: dict[str, torch.Tensor] = {}
        for copies, own_seed in zip(self._sets, (seed, *case_seeds(seed, INPUT_SETS - 1)), strict=True):
            drawn = {**self._draw(own_seed), **constants}
            constants = {p.name: drawn[p.name] for p in self._constants}  # a module has one place for them
            for copy in copies:
                _fill(copy, drawn)

    def _copies(self, policy: Policy) -> list[list[dict[str, torch.Tensor]]]:
        """Return as many copies of each set of inputs as a repetition has launches.

        Missing ones are created, since this process may have replaced one that a kernel broke.
        """
        for copies in self._sets:
            while len(copies) < policy.batch:
                copies.append(_empty_like(copies[0]))
                _fill(copies[-1], copies[0])
        return [copies[: policy.batch] for copies in self._sets]

    # ── the check ───────────────────────────────────────────────────────────────────────────────────────────────────

    def check(self, kernel: CudaKernel, contender: CompiledCandidate, name: str, seed: int) -> Checked:
        """Check a kernel on fresh inputs at full size.

        Every output must be written; samples are compared in float64, and all outputs with the library's.
        """
        self.launch_once(kernel, contender, seed, self.seconds)
        if reason := self._unwritten() or self._unwritten_integers(kernel, contender, seed):
            return Checked((CaseResult(name, str(self._problem), seed, False, None, None, None, reason),))
        samples = list(self._tensors.samples(self._problem, self._sets[0][0], seed))
        results = tuple(self._compare(Case(name, s.problem), s.inputs, s.take(self._results()), seed) for s in samples)
        if not all(r.correct for r in results):
            return Checked(results)
        allowed = self._row_error(samples)
        return Checked((*results, self._compare_whole(name, seed, allowed)), allowed)

    def launch_once(
        self, kernel: CudaKernel, contender: CompiledCandidate, seed: int, seconds: float, poison: int = POISON
    ) -> None:
        """Launch on fresh inputs over outputs whose bytes are all `poison`; raises KernelHung after `seconds`."""
        self.refresh(seed)
        for name, output in self._outputs.items():
            if self._written[name].inout:
                output.copy_(self._sets[0][0][name])
            else:
                output.view(torch.uint8).fill_(poison)
        self._work(kernel, contender, self._sets[0][:1], kernel.entry)()
        await_gpu(kernel.entry, seconds=seconds)

    def output_check(self, checked: Checked) -> Callable[[int], str | None]:
        """Return a function that reports what is wrong with the outputs of a repetition on an input set.

        It is for a kernel that has passed `check`. Outputs that are updated in place many times are not compared.
        """

        def look(number: int) -> str | None:
            if reason := self._unwritten():
                return reason
            if any(p.inout for p in self._written.values()):
                return None
            found = self._difference(number, checked.row_error)
            return str(found) if found.wrong_rows else None

        return look

    def _unwritten(self) -> str | None:
        for output in self._results().values():
            if count := int(output.isnan().sum()):
                return f"{count} of {output.numel()} outputs are NaN or were never written"
        return None

    def _results(self) -> Outputs:
        """Return the outputs, with zeros where the kernel does not write them."""
        return {name: written_part(self._written[name], output) for name, output in self._outputs.items()}

    def _unwritten_integers(self, kernel: CudaKernel, contender: CompiledCandidate, seed: int) -> str | None:
        """Return a sentence if elements of integer outputs keep the poison, for two different poisons."""
        pure = [name for name, p in self._written.items() if not p.inout]
        kept = {name: mask for name in pure if (mask := self._poisoned(name, POISON)) is not None}
        if not any(bool(mask.any()) for mask in kept.values()):
            return None
        self.launch_once(kernel, contender, seed, self.seconds, OTHER_POISON)
        for name, mask in kept.items():
            other = self._poisoned(name, OTHER_POISON)
            assert other is not None
            if count := int((mask & other).sum()):
                return f"{count} of {mask.numel()} outputs of {name} were never written"
        return None

    def _poisoned(self, name: str, poison: int) -> torch.Tensor | None:
        """Return which elements hold nothing but poison; None of floating-point outputs, where poison is NaN."""
        output = self._results()[name]
        if output.dtype.is_floating_point:
            return None
        return (output.view(torch.uint8).reshape(output.numel(), -1) == poison).all(dim=-1)

    def _compare(self, case: Case[Any], inputs: Inputs, outputs: Outputs, seed: int) -> CaseResult:
        return compare(self._target.workload, case, Drawn(inputs, inputs), outputs, seed)

    def _row_error(self, samples: Sequence[Sample[Any]]) -> float:
        """Return the allowed difference of a row from the library's, relative to its largest output.

        It is determined on the first set of inputs. Both implementations have errors, on other rows by at most
        WHOLE_FACTOR times those on the samples.
        """
        floating = [t for t in self._outputs.values() if t.dtype.is_floating_point]
        usual = max((torch.finfo(t.dtype).eps for t in floating), default=0.0)
        for sample in samples:
            expected = self._tensors.reference(sample.problem, sample.inputs)
            for outputs in (self._results(), self._library(0)):
                for name, result in sample.take(outputs).items():
                    exact = _as_rows(expected[name].double())
                    error = (_as_rows(result).double() - exact).abs().amax(dim=-1)
                    usual = max(usual, float((error / exact.abs().amax(dim=-1)).nan_to_num(posinf=0.0).max()))
        return 2 * WHOLE_FACTOR * usual

    def _compare_whole(self, name: str, seed: int, allowed: float) -> CaseResult:
        found = self._difference(0, allowed)
        reason = str(found) if found.wrong_rows else None
        problem, correct = str(self._problem), not found.wrong_rows
        return CaseResult(f"{name}, all rows", problem, seed, correct, found.error, None, found.limit, reason)

    def _library(self, number: int) -> Outputs:
        if number not in self._theirs:
            self._theirs[number] = self._tensors.library(self._problem, self._sets[number][0])
        return self._theirs[number]

    def _difference(self, number: int, allowed: float) -> _Difference:
        """Return the difference of the worst row from the library's on that set of inputs, over all outputs."""
        theirs, label = self._library(number), self._target.workload.baseline_label
        found = [_worst_row(ours, theirs[name], allowed, label) for name, ours in self._results().items()]
        return max(found, key=lambda one: one.error - one.limit)

    # ── what is timed ───────────────────────────────────────────────────────────────────────────────────────────────

    def kernel(
        self, kernel: CudaKernel, contender: CompiledCandidate, policy: Policy, name: str | None = None
    ) -> Prepared:
        """Prepare launches on the full problem's tensors for timing."""
        works = [self._work(kernel, contender, inputs, name or kernel.entry) for inputs in self._copies(policy)]
        return self.clock.prepare(works, policy, tuple(self._outputs.values()))

    def _work(
        self, kernel: CudaKernel, contender: CompiledCandidate, copies: Sequence[Inputs], name: str
    ) -> KernelWork:
        kernel.set_constants({p.name: as_bytes(copies[0][p.name]).tobytes() for p in self._constants})
        parameters = [self._parameters(kernel, contender, inputs) for inputs in copies]
        return KernelWork(kernel, contender.source.launch, parameters, name)

    def _parameters(self, kernel: CudaKernel, contender: CompiledCandidate, inputs: Inputs) -> Parameters:
        workload, source = self._target.workload, contender.source
        stated = workload.parameters(self._problem, contender.config)
        kernel.provide_scratch([p for p in stated if isinstance(p, ScratchParameter)])
        tensors = {**inputs, **self._outputs, **kernel.scratch}
        pointers = {name: tensor.data_ptr() for name, tensor in tensors.items()}
        return {
            entry: cuda_api.Parameters(
                [parameter_value(p, pointers) for p in taken(workload, entry, stated) if is_passed(p)]
            )
            for entry, _ in source.launch.kernels(source.entry)
        }

    def package_baselines(self) -> list[str]:
        """Return the names of the kernels that cover the problem, of packages that are installed."""
        return list(self._of_packages)

    def baseline(self, name: str, policy: Policy) -> Prepared:
        """Prepare a library's implementation. Raises BaselineRefused."""
        return self._unless_refused(
            lambda: self.clock.prepare([self._baseline_work(name, one) for one in self._copies(policy)], policy)
        )

    def baseline_estimate(self, name: str, seed: int) -> float:
        """Return a rough time of a baseline in microseconds. Raises BaselineRefused, also if its values are wrong."""

        def estimate() -> float:
            self._check_baseline(name, seed)
            return self.clock.estimate(self._baseline_work(name, self._sets[0][:1]))

        return self._unless_refused(estimate)

    def _check_baseline(self, name: str, seed: int) -> None:
        """Compare a baseline with float64 by the rule for candidates. Raises BaselineRefused if its values are wrong.

        PLAIN is not compared, as its error is the measure of that rule. Bounds on sums of errors are left out: they
        expect the roundings of a fused kernel.
        """
        if name == PLAIN:
            return
        inputs, found = self._sets[0][0], list[Any]()
        call = self._baseline_call(name, inputs)
        LibraryWork(self._label(name), [lambda: found.append(call())])()
        await_gpu(self._label(name), seconds=self.seconds)
        of_package = name in self._of_packages
        outputs: Outputs = found[-1] if of_package else self._tensors.outputs_of(self._problem, found[-1])
        if any(output.isnan().any() for output in outputs.values()):
            raise BaselineRefused("wrong values: some outputs are NaN")
        for sample in self._tensors.samples(self._problem, inputs, seed) if outputs else ():
            case = Case("full problem", sample.problem, draw=AS_BASELINE)
            seen = self._tensors.as_baselines_see(sample.problem, sample.inputs)
            result = self._compare(case, seen, sample.take(outputs), seed)
            if not result.correct:
                raise BaselineRefused(f"wrong values: {result.reason}")

    def _label(self, name: str) -> str:
        return name if name in self._of_packages else f"{self._target.workload.baseline_label} {name}"

    def _baseline_work(self, name: str, copies: Sequence[Inputs]) -> LibraryWork:
        return LibraryWork(self._label(name), [self._baseline_call(name, inputs) for inputs in copies])

    def _baseline_call(self, name: str, inputs: Inputs) -> Callable[[], object]:
        if name == PLAIN:
            return lambda: self._tensors.own_dtype(self._problem, inputs)
        if name in self._of_packages:
            return self._of_packages[name].call(self._problem, inputs)
        return self._tensors.baseline(name, self._problem, inputs)

    def _unless_refused(self, run: Callable[[], _Found]) -> _Found:
        try:
            return run()
        except RuntimeError as error:  # torch's way to say that it does not take a problem, or has no memory for it
            if isinstance(error, CUDA_ERRORS) and not isinstance(error, torch.OutOfMemoryError):
                raise
            gpu().release_memory()
            raise BaselineRefused(first_line(error)) from error


@dataclass(frozen=True, slots=True)
class _Difference:
    """The row of an output that exceeds its limit most, and the number of `rows` that exceed it."""

    error: float
    limit: float
    wrong_rows: int
    rows: int
    label: str

    def __str__(self) -> str:
        wrong = f"{self.wrong_rows} of {self.rows} rows differ from {self.label}'s"
        return f"{wrong}, one by {self.error:.2e} where {self.limit:.2e} is allowed"


def _worst_row(ours: torch.Tensor, theirs: torch.Tensor, relative: float, label: str) -> _Difference:
    """Return the row with the largest difference.

    A row may differ by `relative` times its largest output. Where its terms cancel, as in dQ of a query that sees one
    key, nothing but the rounding of those terms is left: a row whose outputs are below the dtype's rounding of the
    tensor's largest may differ by as much as a row of that size.
    """
    ours, theirs = _as_rows(ours), _as_rows(theirs)
    largest = float(theirs.abs().nan_to_num(0.0, 0.0, 0.0).max())
    least = torch.finfo(theirs.dtype).eps * largest if theirs.is_floating_point() else 0.0
    count = max(1, ROWS_ELEMENTS // max(1, ours.shape[-1]))
    parts = [
        _rows_difference(own, other, relative, least)
        for own, other in zip(ours.split(count), theirs.split(count), strict=True)
    ]
    error, limit, _ = max(parts, key=lambda part: part[0] - part[1])
    return _Difference(error, limit, sum(wrong for _, _, wrong in parts), len(ours), label)


def _rows_difference(
    ours: torch.Tensor, theirs: torch.Tensor, relative: float, least: float
) -> tuple[float, float, int]:
    error = (ours.float() - theirs.float()).abs().amax(dim=-1)
    limit = relative * theirs.float().abs().amax(dim=-1).clamp(min=least)
    at = int((error - limit).argmax())
    return float(error[at]), float(limit[at]), int((error > limit).sum())


def _as_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor as [rows, columns]; a scalar or a vector is one row."""
    return tensor.reshape(-1, tensor.shape[-1]) if tensor.dim() else tensor.reshape(1, 1)


def _tensor_parameters(target: Target) -> list[TensorParameter]:
    stated = target.workload.parameters(target.problem, {})
    return [p for p in stated if isinstance(p, TensorParameter)]


def _empty_like(inputs: Inputs) -> dict[str, torch.Tensor]:
    return {name: gpu().empty(tuple(tensor.shape), tensor.dtype) for name, tensor in inputs.items()}


def _fill(inputs: dict[str, torch.Tensor], drawn: Inputs) -> None:
    for name, tensor in drawn.items():
        inputs[name].copy_(tensor)


def needed_bytes(target: Target) -> int:
    """Return the GPU memory in bytes for gate and timing: the resident tensors and the largest temporary ones.

    The check holds the library's outputs for each set of inputs.
    """
    tensors = _tensor_parameters(target)
    outputs = sum(p.bytes for p in tensors if p.output)
    inputs = sum(p.bytes for p in tensors if not p.output)
    passing = target.workload.tensors().check_bytes(target.problem)
    return INPUT_SETS * (inputs + outputs) + outputs + flush_bytes() + passing
