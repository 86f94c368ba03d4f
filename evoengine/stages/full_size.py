"""The gate at full size: a few blocks of the problem itself, over tensors of which only touched pages exist."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from evoengine.devices.pool import BlockLaunch, BlockTrace
from evoengine.records import CaseResult, Launch, Plan, Verdict
from evoengine.stages.verify import Judged, compare, failed, run_plan, share_of_allowed
from evoengine.workloads.base import AnyWorkload, WrongBlock

RunBlocks = Callable[[BlockLaunch, int], list[BlockTrace]]
"""runs the blocks with a seed for the device's own choices; raises KernelFailure"""


def verify_blocks(verdict: Verdict, workload: AnyWorkload, plan: Plan, run: RunBlocks, seed: int) -> Verdict:
    """A good verdict on small cases with that on the plan's at full size added; any other as it is."""
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
    """Whether the blocks wrote what they should and nothing else; the figures are of the part that is furthest off."""
    try:
        parts = workload.full_size().written_parts(case, asked, traces)
    except WrongBlock as wrong:
        return failed(case, seed, str(wrong))
    results = [compare(workload, p.case, p.drawn, p.outputs, seed) for p in parts]
    if not results:
        return CaseResult(case.name, str(case.problem), seed, True, None, None, None)
    worst = next((r for r in results if not r.correct), None) or max(results, key=share_of_allowed)
    return replace(worst, problem=str(case.problem))
