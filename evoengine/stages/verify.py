"""The correctness gate: a candidate runs every case of its workload and is compared with float64 before it is timed.

The rule is FlashAttention's: the largest error may be twice that of SDPA computed in the candidate's own dtype on the
same inputs, plus one rounding of the largest output.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import ModuleType

import numpy as np
import torch

from evoengine.devices.base import Arguments, KernelFailure, TensorArgument, Tensors
from evoengine.records import CaseResult, Launch, Outcome, Plan, Verdict

Run = Callable[[Launch, Arguments, int], Tensors]
"""runs one launch with a seed for the device's own choices; raises KernelFailure"""


def verify(tensors: ModuleType, plan: Plan, run: Run, device: str, seed: int) -> Verdict:
    """Runs the plan's cases with seeds drawn from `seed`; a crash or a hang ends it, a wrong result does not."""
    start = time.perf_counter()
    results: list[CaseResult] = []
    outcome: Outcome | None = None
    for (case, launch), case_seed in zip(plan, case_seeds(seed, len(plan)), strict=True):
        try:
            results.append(check(tensors, case, launch, run, case_seed))
        except KernelFailure as failure:
            results.append(_failed(case, case_seed, str(failure)))
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
                return _failed(case, seed, f"the kernel changed its input {argument.name}")
    result = tensors.from_bits(case.problem, after[tensors.OUTPUT])
    return compare(tensors, case, drawn, result, seed)


def compare(tensors: ModuleType, case, drawn, result: torch.Tensor, seed: int) -> CaseResult:
    """The rule itself, for a result on any device."""
    expected = tensors.reference(case.problem, drawn.expected)
    unwritten = int(result.isnan().sum())
    if unwritten:
        return _failed(case, seed, f"{unwritten} of {result.numel()} outputs are NaN or were never written")
    error = (result.double() - expected).abs()
    own = (tensors.own_dtype(case.problem, drawn.expected).double() - expected).abs().max()
    allowed = float(2 * own + torch.finfo(result.dtype).eps * expected.abs().max())
    largest, mean = float(error.max()), float(error.mean())
    correct = largest <= allowed
    reason = None if correct else f"error {largest:.2e} where {allowed:.2e} is allowed"
    return CaseResult(case.name, str(case.problem), seed, correct, largest, mean, allowed, reason)


def _failed(case, seed: int, reason: str) -> CaseResult:
    return CaseResult(case.name, str(case.problem), seed, False, None, None, None, reason)
