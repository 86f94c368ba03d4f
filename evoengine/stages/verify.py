"""The correctness gate: a candidate runs every case of its workload and is compared with float64 before it is timed.

The outer rule is FlashAttention's (its tests): the largest error may be twice that of SDPA computed in the candidate's
own dtype on the same inputs, plus one rounding of the largest output. It holds for each row by itself too, so that a
row of small outputs is not judged by the largest of all. Where the errors of many rows are independent, sums over rows
and over all of them are judged besides: such sums scatter by 1 / √n only and show what each error alone leaves open.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import numpy as np
import torch

from evoengine.devices.base import Arguments, KernelFailure, TensorArgument, Tensors
from evoengine.records import CaseResult, Launch, Outcome, Plan, Verdict

Run = Callable[[Launch, Arguments, int], Tensors]
"""runs one launch with a seed for the device's own choices; raises KernelFailure"""
MANY_ROWS = 32
"""rows from which on sums over all outputs are judged: at head_dim 32 their root mean square scatters by 2 %"""
RMS_ALLOWED = 1.15
"""times what rounding P and O once each gives: one bit less of P gives 1.5"""
ROW_BIAS_ALLOWED = 2.25
"""times what rounding P and O once each gives, which for 32 rows chance alone exceeds once in 100,000 cases; a row's sum
rounded to the dtype gives three times as much in most cases"""
BIAS_ALLOWED = 1 / 32
"""of the spacing of the dtype's numbers, at 1; P cut off instead of rounded gives a tenth and more"""
BIAS_SIGMAS = 4.0
"""one case in 16,000 is as far off by chance alone"""


def verify(tensors: ModuleType, plan: Plan, run: Run, device: str, seed: int) -> Verdict:
    """Runs the plan's cases with seeds drawn from `seed`; a crash or a hang ends it, a wrong result does not."""
    return run_plan(plan, seed, device, lambda case, launch, own_seed: check(tensors, case, launch, run, own_seed))


def run_plan(plan: Plan, seed: int, device: str, judge: Callable[[object, Launch, int], CaseResult]) -> Verdict:
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
    return Verdict(device, outcome, reason, tuple(results), (time.perf_counter() - start) * 1e3)


def case_seeds(seed: int, count: int) -> list[int]:
    """One seed per case, unlike for every candidate and case, and the same again from the same `seed`."""
    return [int(word) for word in np.random.SeedSequence(seed).generate_state(count, np.uint32)]


def check(tensors: ModuleType, case, launch: Launch, run: Run, seed: int) -> CaseResult:
    """One case: draw, launch, compare. Raises KernelFailure where there is no result."""
    drawn = tensors.draw(case, seed)
    arguments = tensors.arguments(case.problem, drawn.inputs, case.config)
    after = run(launch, arguments, seed)
    for argument in arguments:
        if isinstance(argument, TensorArgument) and not argument.output:
            if not np.array_equal(after[argument.name], argument.data):
                return failed(case, seed, f"the kernel changed its input {argument.name}")
    result = tensors.from_bits(case.problem, after[tensors.OUTPUT])
    return compare(tensors, case, drawn, result, seed)


@dataclass(frozen=True, slots=True)
class Bound:
    """One figure of a result's error and how large it may be, in the unit of the outputs."""

    name: str
    error: float
    allowed: float


def compare(tensors: ModuleType, case, drawn, result: torch.Tensor, seed: int) -> CaseResult:
    """The rules themselves, for a result on any device."""
    unwritten = int(result.isnan().sum())
    if unwritten:
        return failed(case, seed, f"{unwritten} of {result.numel()} outputs are NaN or were never written")
    expected = tensors.reference(case.problem, drawn.expected)
    error = result.double() - expected
    found = bounds(tensors, case, drawn, error, expected)
    broken = next((bound for bound in found if not bound.error <= bound.allowed), None)
    reason = f"{broken.name} {broken.error:.2e} where {broken.allowed:.2e} is allowed" if broken else None
    largest, mean, allowed = found[0].error, float(error.abs().mean()), found[0].allowed
    return CaseResult(case.name, str(case.problem), seed, broken is None, largest, mean, allowed, reason)


def bounds(tensors: ModuleType, case, drawn, error: torch.Tensor, expected: torch.Tensor) -> list[Bound]:
    """All that is asked of a result's `error`; like `expected` [batch, heads, rows, columns], float64."""
    eps = torch.finfo(drawn.expected["q"].dtype).eps
    own = (tensors.own_dtype(case.problem, drawn.expected).double() - expected).abs().amax(-1)
    size, largest = expected.abs().amax(-1), error.abs().amax(-1)
    allowed = 2 * own + eps * size
    worst = int((largest / allowed.clamp(min=torch.finfo(allowed.dtype).tiny)).argmax())
    found = [
        Bound("error", float(largest.max()), float(2 * own.max() + eps * size.max())),
        Bound("error of one row", float(largest.flatten()[worst]), float(allowed.flatten()[worst])),
    ]
    if case.draw in tensors.INDEPENDENT and largest.numel() >= MANY_ROWS:
        rounded_once = tensors.rounded_once(case.problem, drawn.expected).double() - expected
        found.append(Bound("root mean square error", _rms(error), RMS_ALLOWED * _rms(rounded_once)))
        own_biases, biases = _row_biases(rounded_once, expected), _row_biases(error, expected)
        found.append(Bound("bias of rows", _rms(biases), ROW_BIAS_ALLOWED * _rms(own_biases)))
        found.append(_bias(error, expected, eps))
    return found


def _rms(x: torch.Tensor) -> float:
    return float(x.square().mean().sqrt())


def _row_biases(error: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """How much too large each row is, relative to its size: the slope of its errors over its outputs.

    What is wrong with a row as a whole, such as its sum, adds up over its columns; their own rounding errors do not.
    """
    return (error * expected).sum(-1) / expected.square().sum(-1)


def _bias(error: torch.Tensor, expected: torch.Tensor, eps: float) -> Bound:
    """How much too large outputs are on the whole, relative to their size: the slope of the errors over the outputs.

    The sum over a row's columns is one sample. Rounding errors of unlike rows are independent, so their sum scatters by
    the root of the squares' sum.
    """
    rows = (error * expected).sum(-1)
    scatter = float(rows.square().sum().sqrt())
    size = float(expected.square().sum())
    return Bound("bias", abs(float(rows.sum())) / size, eps * BIAS_ALLOWED + BIAS_SIGMAS * scatter / size)


def failed(case, seed: int, reason: str) -> CaseResult:
    """A case without a result to compare."""
    return CaseResult(case.name, str(case.problem), seed, False, None, None, None, reason)
