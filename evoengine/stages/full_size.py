"""The gate at full size: a few blocks of the problem itself, over tensors of which only touched pages exist."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType

from evoengine.devices.base import KernelFailure
from evoengine.devices.pool import BlockLaunch, BlockTrace
from evoengine.records import CaseResult, Outcome, Plan, Verdict
from evoengine.stages.verify import case_seeds, compare

RunBlocks = Callable[[BlockLaunch, int], list[BlockTrace]]
"""runs the blocks with a seed for the device's own choices; raises KernelFailure"""


def verify_blocks(
    verdict: Verdict, tensors: ModuleType, full: ModuleType, plan: Plan, run: RunBlocks, seed: int
) -> Verdict:
    """A good verdict on small cases with that on the plan's at full size added; any other as it is.

    `tensors` and `full` are the workload's modules for the two kinds of cases.
    """
    if not verdict.correct:
        return verdict
    start = time.perf_counter()
    results: list[CaseResult] = []
    outcome: Outcome | None = None
    for (case, launch), case_seed in zip(plan, case_seeds(seed + 1, len(plan)), strict=True):
        try:
            asked = full.draw_blocks(case, launch, case_seed)
            results.append(check_blocks(tensors, full, case, asked, run(asked, case_seed), case_seed))
        except KernelFailure as failure:
            results.append(_failed(case, case_seed, str(failure)))
            outcome = failure.outcome
            break
    wrong = next((r for r in results if not r.correct), None)
    if wrong and outcome is None:
        outcome = Outcome.INCORRECT
    reason = f"{wrong.name}: {wrong.reason}" if wrong else None
    wall_ms = verdict.wall_ms + (time.perf_counter() - start) * 1e3
    return replace(verdict, outcome=outcome, reason=reason, cases=(*verdict.cases, *results), wall_ms=wall_ms)


def check_blocks(
    tensors: ModuleType, full: ModuleType, case, asked: BlockLaunch, traces: list[BlockTrace], seed: int
) -> CaseResult:
    """Whether the blocks wrote what they should and nothing else; the figures are of the part that is furthest off."""
    try:
        parts = full.written_parts(case, asked, traces)
    except full.WrongBlock as wrong:
        return _failed(case, seed, str(wrong))
    results = [compare(tensors, p.case, p.drawn, p.result, seed) for p in parts]
    if not results:
        return CaseResult(case.name, str(case.problem), seed, True, None, None, None)
    worst = next((r for r in results if not r.correct), None) or max(results, key=lambda r: r.max_error / r.allowed)
    return replace(worst, problem=str(case.problem))


def _failed(case, seed: int, reason: str) -> CaseResult:
    return CaseResult(case.name, str(case.problem), seed, False, None, None, None, reason)
