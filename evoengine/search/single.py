"""One configuration down the road, outside any search and ledger: what `evoengine verify` does."""

from __future__ import annotations

from pathlib import Path

from evoengine.records import Binary, Candidate, Config, Contender, Outcome, Rejection
from evoengine.search.judges import Judge, make_job
from evoengine.search.workers import COMPILER_TERMS, WorkerPool
from evoengine.space.space import SearchSpace
from evoengine.stages.pipeline import compile_task
from evoengine.stages.render import render
from evoengine.stages.screen import screen_binary, screen_launch
from evoengine.workloads.base import Target


def walk(
    target: Target, space: SearchSpace, config: Config, templates: Path, judge: Judge, seed: int
) -> Candidate:
    """Renders, compiles, screens and judges, in processes that may die."""
    source, gpu = render(target, space, config, templates), target.gpu

    def ended(outcome: Outcome | None, reason: str | None, **found: object) -> Candidate:
        return Candidate(0, 0, str(target.problem), gpu.key, config, outcome, reason, source=source, **found)

    if why := screen_launch(source.launch, gpu):
        return ended(Outcome.SCREENED, why)
    workers = WorkerPool(1, COMPILER_TERMS)
    try:
        binary = workers.submit(compile_task, source, gpu.arch, died=Outcome.UNCOMPILABLE, gives=Binary).result()
        if isinstance(binary, Rejection):
            return ended(binary.outcome, binary.reason)
        # a spill is slow, not wrong: only a binary that cannot be launched or right at all goes without a verdict
        if why := screen_binary(binary, source.launch, gpu, space.cost(config), timed=True):
            return ended(Outcome.SCREENED, why, binary=binary)
        judge.baselines()
        job = make_job(space, target, Contender(0, source, binary, config), seed)
        result = judge.submit(job, workers).result()
    finally:
        workers.close()
    if isinstance(result, Rejection):
        return ended(result.outcome, result.reason, binary=binary)
    verdict, figure, unread = result
    shared = binary.shared_bytes + source.launch.shared_bytes
    return ended(
        verdict.outcome, verdict.reason or unread, binary=binary, verdict=verdict, measurement=figure, device=verdict.device,
        occupancy=gpu.occupancy(source.launch.threads, binary.registers, shared),
    )  # fmt: skip
