"""One configuration down the road, outside any search and ledger: what `evoengine verify` does."""

from __future__ import annotations

from pathlib import Path

from evoengine.gpu import Gpu
from evoengine.problem import Problem
from evoengine.records import Binary, Candidate, Config, Outcome, Rejection, Verdict
from evoengine.search.workers import WorkerPool, result_of
from evoengine.space.space import SearchSpace
from evoengine.stages.pipeline import compile_task, emulate_task, measure_task
from evoengine.stages.render import render
from evoengine.stages.screen import screen_binary, screen_launch
from evoengine.workloads import find_workload


def walk(
    space: SearchSpace, config: Config, problem: Problem, gpu: Gpu, templates: Path, timed: bool, seed: int
) -> Candidate:
    """Renders, compiles, screens and gates (on the GPU when `timed`: times too), in a worker that may die."""
    source = render(space, config, problem, templates)
    cases = find_workload(space.kernel).cases(problem, config)
    plan = [(case, space.launch(config, case.problem)) for case in cases]
    pool = WorkerPool(1)

    def ended(outcome: Outcome | None, reason: str | None, **found: object) -> Candidate:
        return Candidate(0, 0, str(problem), gpu.key, config, outcome, reason, source=source, **found)

    try:
        if why := screen_launch(source.launch, gpu):
            return ended(Outcome.SCREENED, why)
        binary = result_of(pool.submit(compile_task, source, gpu.arch), died=Outcome.UNCOMPILABLE)
        if isinstance(binary, Rejection):
            return ended(binary.outcome, binary.reason)
        # a spill is slow, not wrong: only a binary that cannot be launched at all goes without a verdict
        if why := screen_binary(binary, source.launch, gpu, timed=True):
            return ended(Outcome.SCREENED, why, binary=binary)
        result = _judge(pool, space, source, binary, plan, problem, gpu, timed, seed)
    finally:
        pool.close()
    if isinstance(result, Rejection):
        return ended(result.outcome, result.reason, binary=binary)
    verdict, figure = result
    return ended(
        verdict.outcome, verdict.reason, binary=binary, verdict=verdict, measurement=figure, device=verdict.device,
        occupancy=gpu.occupancy(source.launch.threads, binary.registers, binary.shared_bytes + source.launch.shared_bytes),
    )  # fmt: skip


def _judge(pool, space, source, binary: Binary, plan, problem, gpu, timed: bool, seed: int):
    if timed:
        task = (measure_task, space.kernel, source, binary, plan, problem, gpu, seed)
        return result_of(pool.submit(*task), died=Outcome.CRASHED)
    verdict = result_of(pool.submit(emulate_task, space.kernel, source, plan, seed), died=Outcome.CRASHED)
    return (verdict, None) if isinstance(verdict, Verdict) else verdict
