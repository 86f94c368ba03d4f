"""The gate at full size: blocks of the problem itself, over tensors of which only touched pages exist."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod

from evoengine.devices.pool import BlockLaunch, BlockTrace
from evoengine.records import CaseResult, Launch, Plan, Verdict
from evoengine.stages.verify import Judged, compare, failed, run_plan, share_of_allowed
from evoengine.workloads.base import AnyWorkload, WrongBlock

RunBlocks = Callable[[BlockLaunch, int], list[BlockTrace]]
"""runs the blocks with a seed for the device's own choices; raises KernelFailure"""


def verify_blocks(verdict: Verdict, workload: AnyWorkload, plan: Plan, run: RunBlocks, seed: int) -> Verdict:
    """Return a good verdict on small cases with that on the plan's at full size added; any other as it is."""
    if not verdict.correct or not plan:
        return verdict

    def judge(case: Judged, launch: Launch, own_seed: int) -> CaseResult:
        asked = workload.full_size().draw_blocks(case, launch, own_seed)
        return check_blocks(workload, case, asked, run(asked, own_seed), own_seed)

    more = run_plan(plan, seed + 1, verdict.device, judge)
    return replace(more, cases=verdict.cases + more.cases, wall_ms=verdict.wall_ms + more.wall_ms)


def check_blocks(
    workload: AnyWorkload, case: Judged, asked: BlockLaunch, traces: list[BlockTrace], seed: int
) -> CaseResult:
    """Return whether the blocks wrote what they should and nothing else, with the figures of the part that is furthest
    off."""
    judged = _judged_part(case, asked)
    try:
        parts = workload.full_size().written_parts(case, asked, traces)
    except WrongBlock as wrong:
        return replace(failed(case, seed, str(wrong)), part=judged)
    results = [compare(workload, p.case, p.drawn, p.outputs, seed) for p in parts]
    if not results:
        return CaseResult(case.name, str(case.problem), seed, True, None, None, None, part=judged)
    worst = next((r for r in results if not r.correct), None) or max(results, key=share_of_allowed)
    return replace(worst, problem=str(case.problem), part=judged)


def _judged_part(case: Judged, asked: BlockLaunch) -> str | None:
    """Return how many of the launch's blocks are run, and how much of the problem they have, where that is not all."""
    blocks, total = len(asked.blocks), prod(asked.launch.grid)
    some = f"{blocks:,} of {total:,} blocks" if blocks < total else None
    return ", ".join(part for part in (some, case.part) if part) or None
