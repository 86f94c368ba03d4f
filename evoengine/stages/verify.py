"""The correctness gate: a candidate runs every case of its workload and is compared with float64 before it is timed.

The outer rule is FlashAttention's (its tests): the largest error may be twice that of the same computation in the
candidate's own dtype on the same inputs, plus one rounding of the largest output; a workload may state other factors or
plain tolerances (`Tolerance`). It holds for each row by itself too, so that a row of small outputs is not judged by the
largest of all. Where the errors of many rows are independent, sums over rows and over all of them are judged besides:
such sums scatter by 1 / √n only and show what each error alone leaves open.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from evoengine.devices.base import Arguments, KernelFailure, TensorArgument, Tensors
from evoengine.records import GATE_VERSION, CaseResult, Launch, Outcome, Plan, Verdict
from evoengine.stages.arguments import make_arguments, read_outputs
from evoengine.workloads.base import AnyCase, AnyWorkload, Drawn, Outputs, Problem, Tolerance

Run = Callable[[Launch, Arguments, int], Tensors]
"""runs one launch with a seed for the device's own choices; raises KernelFailure"""
MANY_ROWS = 32
"""rows from which on sums over all outputs are judged: with 32 columns each their root mean square scatters by 2 %"""
RMS_ALLOWED = 1.15
"""times what the roundings that a kernel must do give (`Tensors.rounded_once`): one bit less of one of them gives
1.5"""
ROW_BIAS_ALLOWED = 2.25
"""times what those roundings give, which for 32 rows chance alone exceeds once in 100,000 cases; a row's sum rounded to
the dtype gives three times as much in most cases"""
BIAS_ALLOWED = 1 / 32
"""of the spacing of the dtype's numbers, at 1; factors cut off instead of rounded give a tenth and more"""
BIAS_SIGMAS = 4.0
"""one case in 16,000 is as far off by chance alone"""


class Judged(Protocol):
    """A case of any kind, small or at full size: what its result says of it."""

    @property
    def name(self) -> str: ...

    @property
    def problem(self) -> Problem: ...


def verify(workload: AnyWorkload, plan: Plan, run: Run, device: str, seed: int) -> Verdict:
    """Runs the plan's cases with seeds drawn from `seed`; a crash or a hang ends it, a wrong result does not."""
    return run_plan(plan, seed, device, lambda case, launch, own_seed: check(workload, case, launch, run, own_seed))


def run_plan(plan: Plan, seed: int, device: str, judge: Callable[[Any, Launch, int], CaseResult]) -> Verdict:
    """`judge` of each case with its launch and a seed of its own; it may raise KernelFailure, which ends the plan."""
    start = time.perf_counter()
    results: list[CaseResult] = []
    outcome: Outcome | None = None
    for (case, launch), case_seed in zip(plan, case_seeds(seed, len(plan)), strict=True):
        try:
            results.append(judge(case, launch, case_seed))
        except KernelFailure as failure:
            results.append(failed(case, case_seed, str(failure)))
            outcome = failure.outcome
            break
    wrong = next((r for r in results if not r.correct), None)
    if wrong and outcome is None:
        outcome = Outcome.INCORRECT
    reason = f"{wrong.name}: {wrong.reason}" if wrong else None
    wall_ms = (time.perf_counter() - start) * 1e3
    return Verdict(device, outcome, reason, tuple(results), wall_ms, gate_version=GATE_VERSION)


def case_seeds(seed: int, count: int) -> list[int]:
    """One seed per case, unlike for every candidate and case, and the same again from the same `seed`."""
    return [int(word) for word in np.random.SeedSequence(seed).generate_state(count, np.uint32)]


def check(workload: AnyWorkload, case: AnyCase, launch: Launch, run: Run, seed: int) -> CaseResult:
    """One case: draw, launch, compare. Raises KernelFailure where there is no result."""
    drawn = workload.tensors().draw(case, seed)
    parameters = workload.parameters(case.problem, case.config)
    arguments = make_arguments(parameters, drawn.inputs)
    after = run(launch, arguments, seed)
    for argument in arguments:
        if not isinstance(argument, TensorArgument) or argument.output:
            continue
        if not np.array_equal(after[argument.name].view(np.uint8), argument.data.view(np.uint8)):
            return failed(case, seed, f"the kernel changed its input {argument.name}")
    return compare(workload, case, drawn, read_outputs(parameters, after), seed)


@dataclass(frozen=True, slots=True)
class Bound:
    """One figure of a result's error and how large it may be, in the unit of the outputs."""

    name: str
    error: float
    allowed: float


def compare(workload: AnyWorkload, case: AnyCase, drawn: Drawn, results: Outputs, seed: int) -> CaseResult:
    """The rules themselves, for results on any device."""
    for name, result in results.items():
        unwritten = int(result.isnan().sum())
        if unwritten:
            of = f" of {name}" if len(results) > 1 else ""
            return failed(case, seed, f"{unwritten} of {result.numel()} outputs{of} are NaN or were never written")
    tensors = workload.tensors()
    expected = tensors.reference(case.problem, drawn.expected)
    errors = {name: result.double() - expected[name].double() for name, result in results.items()}
    found = bounds(workload, case, drawn, results, errors, expected)
    broken = next((bound for own in found.values() for bound in own if not bound.error <= bound.allowed), None)
    reason = f"{broken.name} {broken.error:.2e} where {broken.allowed:.2e} is allowed" if broken else None
    worst = max(found, key=lambda name: float(errors[name].abs().max()))
    largest, mean, allowed = (
        float(errors[worst].abs().max()),
        float(errors[worst].abs().mean()),
        found[worst][0].allowed,
    )
    return CaseResult(case.name, str(case.problem), seed, broken is None, largest, mean, allowed, reason)


def bounds(
    workload: AnyWorkload, case: AnyCase, drawn: Drawn, results: Outputs, errors: Outputs, expected: Outputs
) -> dict[str, list[Bound]]:
    """All that is asked of each output's error, that of its largest first. `errors` and `expected` are float64 [...,
    rows, columns].
    """
    tensors, tolerance = workload.tensors(), workload.tolerance
    of = {name: f" of {name}" if len(results) > 1 else "" for name in results}
    if tolerance.rtol is not None or tolerance.atol is not None:
        return {n: [_elementwise(f"error{of[n]}", e, expected[n].double(), tolerance)] for n, e in errors.items()}
    own = tensors.own_dtype(case.problem, drawn.expected)
    independent = case.draw in tensors.independent
    rounded = tensors.rounded_once(case.problem, drawn.expected) if independent else {}
    found: dict[str, list[Bound]] = {}
    for name, error in errors.items():
        eps = torch.finfo(results[name].dtype).eps if results[name].dtype.is_floating_point else 0.0
        exact = expected[name].double()
        found[name] = _by_own_error(of[name], error, exact, own[name].double() - exact, eps, tolerance)
        if name in rounded and _rows(error).numel() >= MANY_ROWS:
            found[name] += _by_sums(of[name], error, exact, rounded[name].double() - exact, eps)
    return found


def _rows(values: torch.Tensor) -> torch.Tensor:
    """The largest of each row's absolute values."""
    return values.reshape(-1, values.shape[-1] if values.dim() else 1).abs().amax(-1)


def _elementwise(name: str, error: torch.Tensor, expected: torch.Tensor, tolerance: Tolerance) -> Bound:
    """The error that the share `matched` of all elements must not exceed, over what is allowed at that element."""
    allowed = (tolerance.atol or 0.0) + (tolerance.rtol or 0.0) * expected.abs()
    excess = (error.abs() - allowed).flatten()
    rank = min(excess.numel(), max(1, int(np.ceil(tolerance.matched * excess.numel()))))
    at = int(excess.argsort()[rank - 1])
    return Bound(name, float(error.abs().flatten()[at]), float(allowed.flatten()[at]))


def _by_own_error(
    of: str, error: torch.Tensor, expected: torch.Tensor, own_error: torch.Tensor, eps: float, tolerance: Tolerance
) -> list[Bound]:
    own, size, largest = _rows(own_error), _rows(expected), _rows(error)
    allowed = tolerance.own * own + tolerance.roundings * eps * size
    worst = int((largest / allowed.clamp(min=torch.finfo(allowed.dtype).tiny)).argmax())
    whole = tolerance.own * own.max() + tolerance.roundings * eps * size.max()
    return [
        Bound(f"error{of}", float(largest.max()), float(whole)),
        Bound(f"error of one row{of}", float(largest[worst]), float(allowed[worst])),
    ]


def _by_sums(
    of: str, error: torch.Tensor, expected: torch.Tensor, rounded_once: torch.Tensor, eps: float
) -> list[Bound]:
    own_biases, biases = _row_biases(rounded_once, expected), _row_biases(error, expected)
    return [
        Bound(f"root mean square error{of}", _rms(error), RMS_ALLOWED * _rms(rounded_once)),
        Bound(f"bias of rows{of}", _rms(biases), ROW_BIAS_ALLOWED * _rms(own_biases)),
        _bias(f"bias{of}", error, expected, eps),
    ]


def _rms(x: torch.Tensor) -> float:
    return float(x.square().mean().sqrt())


def _row_biases(error: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """How much too large each row is, relative to its size: the slope of its errors over its outputs.

    What is wrong with a row as a whole, such as its sum, adds up over its columns; their own rounding errors do not.
    """
    return (error * expected).sum(-1) / expected.square().sum(-1)


def _bias(name: str, error: torch.Tensor, expected: torch.Tensor, eps: float) -> Bound:
    """How much too large outputs are on the whole, relative to their size: the slope of the errors over the outputs.

    The sum over a row's columns is one sample. Rounding errors of unlike rows are independent, so their sum scatters by
    the root of the squares' sum.
    """
    rows = (error * expected).sum(-1)
    scatter = float(rows.square().sum().sqrt())
    size = float(expected.square().sum())
    return Bound(name, abs(float(rows.sum())) / size, eps * BIAS_ALLOWED + BIAS_SIGMAS * scatter / size)


def failed(case: Judged, seed: int, reason: str) -> CaseResult:
    """A case without a result to compare."""
    return CaseResult(case.name, str(case.problem), seed, False, None, None, None, reason)
