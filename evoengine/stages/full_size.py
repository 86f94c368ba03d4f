"""The gate at full size: blocks of the problem itself, over tensors of which only touched pages exist."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import Any

from evoengine.devices.base import KernelHung
from evoengine.devices.pool import BlockLaunch, BlockTrace
from evoengine.records import CaseResult, Launch, Plan, Verdict
from evoengine.stages.verify import Judged, compare, failed, run_plan, share_of_allowed
from evoengine.workloads.base import AnyWorkload, FullSize, NothingWritten, WrongBlock

BLOCKS_SECONDS = 5.0
"""CPU time for all blocks of a case, where the duration of one is unknown"""
RunBlocks = Callable[[BlockLaunch, int], list[BlockTrace]]
"""runs the blocks with a seed for the device's own choices; raises KernelFailure"""


def verify_blocks(verdict: Verdict, workload: AnyWorkload, plan: Plan, run: RunBlocks, seed: int) -> Verdict:
    """Return a good verdict on small cases with that on the plan's at full size added; any other as it is."""
    if not verdict.correct or not plan:
        return verdict

    def judge(case: Judged, launch: Launch, own_seed: int) -> CaseResult | None:
        full = workload.full_size()
        if launch.then:
            return _not_judged(case, own_seed, f"it launches {1 + len(launch.then)} kernels")
        asked = full.draw_blocks(case, launch, own_seed)
        if asked is None:
            return None
        try:
            asked, traces = _run(asked, run, own_seed, full.unknown_cost)
            return check_blocks(workload, case, asked, traces, own_seed)
        except (NothingWritten, KernelHung) as failure:
            alone = full.alone(case, own_seed)
            if alone is None or _works_alone(full, alone, run, failure, own_seed):
                if isinstance(failure, KernelHung):
                    raise
                return replace(failed(case, own_seed, str(failure)), part=_judged_part(case, asked))
            return _not_judged(case, own_seed, "one alone neither ends nor writes")

    more = run_plan(plan, seed + 1, verdict.device, judge)
    cases, wall_ms = verdict.cases + more.cases, verdict.wall_ms + more.wall_ms
    return replace(more, cases=cases, wall_ms=wall_ms, coverage=verdict.coverage)


def _run(asked: BlockLaunch, run: RunBlocks, seed: int, unknown_cost: bool) -> tuple[BlockLaunch, list[BlockTrace]]:
    """Run the blocks, or as many as there is time for where one alone shows how long they take."""
    if not unknown_cost or len(asked.blocks) == 1:
        return asked, run(asked, seed)
    before = _cpu_seconds()
    first = run(replace(asked, blocks=asked.blocks[:1]), seed)
    possible = int(BLOCKS_SECONDS / max(_cpu_seconds() - before, 1e-3))
    rest = asked.blocks[1 : max(2, possible)]
    done = replace(asked, blocks=[asked.blocks[0], *rest])
    return done, first + run(replace(asked, blocks=rest), seed)


def _cpu_seconds() -> float:
    """Return the CPU seconds of this process and of those it has awaited, independent of the machine's load."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + used.ru_utime + used.ru_stime


def _works_alone(
    full: FullSize[Any], alone: BlockLaunch, run: RunBlocks, failure: NothingWritten | KernelHung, seed: int
) -> bool:
    """Return whether blocks of a small launch write by themselves what those at full size did not, or end."""
    try:
        traces = run(alone, seed)
    except KernelHung:
        return False
    return not isinstance(failure, NothingWritten) or failure.output in full.written_outputs(alone, traces)


def _not_judged(case: Judged, seed: int, reason: str) -> CaseResult:
    part = f"no block at full size: {reason}"
    return CaseResult(case.name, str(case.problem), seed, True, None, None, None, part=part)


def check_blocks(
    workload: AnyWorkload, case: Judged, asked: BlockLaunch, traces: list[BlockTrace], seed: int
) -> CaseResult:
    """Return whether the blocks wrote what they should and nothing else.

    The figures are those of the part with the largest error.
    """
    judged = _judged_part(case, asked)
    try:
        parts = workload.full_size().written_parts(case, asked, traces)
    except NothingWritten:
        raise
    except WrongBlock as wrong:
        return replace(failed(case, seed, str(wrong)), part=judged)
    results = [compare(workload, p.case, p.drawn, p.outputs, seed, p.expected) for p in parts]
    if not results:
        return CaseResult(case.name, str(case.problem), seed, True, None, None, None, part=judged)
    worst = next((r for r in results if not r.correct), None) or max(results, key=share_of_allowed)
    return replace(worst, problem=str(case.problem), part=parts[0].case.part or judged)


def _judged_part(case: Judged, asked: BlockLaunch) -> str | None:
    """Return how many of the launch's blocks are run, and how much of the problem they have, where that is not all."""
    blocks, total = len(asked.blocks), prod(asked.launch.grid)
    some = f"{blocks:,} of {total:,} blocks" if blocks < total else None
    return ", ".join(part for part in (some, case.part) if part) or None
