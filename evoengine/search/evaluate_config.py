"""Evaluate one configuration outside any search and ledger, as `evoengine verify` does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from evoengine.ledger.rows import last_verdicts
from evoengine.records import Binary, Candidate, Config, Judged, Outcome, Rejection
from evoengine.sandbox.worker_process import COMPILER_LIMITS
from evoengine.sandbox.workers import WorkerPool
from evoengine.search.evaluators import Evaluator, end_of
from evoengine.search.pipeline import Compiled, Pipeline, Proposed, Rendered
from evoengine.space.space import SearchSpace
from evoengine.stages.render import Fill
from evoengine.stages.tasks import COMPILE_SECONDS, Evaluation, compile_task
from evoengine.workloads.base import Target


def evaluate_config(
    target: Target, space: SearchSpace, config: Config, templates: Path, judge: Evaluator, seed: int, fill: Fill
) -> Candidate:
    """Render, compile, screen and judge a configuration, in processes that may die."""
    # `timed`: a spill is slow, not wrong; only a binary that cannot be launched or correct gets no verdict
    pipeline = Pipeline(target, space, templates, judge, timed=True, fill=fill)
    proposed = Proposed(0, config)
    rendered = pipeline.render(proposed)
    if isinstance(rendered, Rejection):
        return _ended(target, proposed, rendered)
    if rejection := pipeline.screen_launch(rendered):
        return _ended(target, rendered, rejection)
    workers = WorkerPool(1, COMPILER_LIMITS)
    try:
        made = workers.submit(
            compile_task,
            rendered.source,
            target.gpu.arch,
            on_crash=Outcome.UNCOMPILABLE,
            returns=Binary,
            seconds=COMPILE_SECONDS,
        ).result()
        if isinstance(made, Rejection):
            return _ended(target, rendered, made)
        compiled = pipeline.compiled(rendered, made)
        if rejection := pipeline.screen_binary(compiled):
            return _ended(target, compiled, rejection)
        judge.baselines()
        result = pipeline.evaluate(compiled.contender, seed, workers).result()
    finally:
        workers.close()
    return _ended(target, compiled, result)


def _ended(target: Target, reached: Proposed, result: Evaluation | Rejection) -> Candidate:
    """Return the candidate as far as it came, with its result."""
    candidate = Candidate(0, 0, str(target.problem), target.gpu.key, reached.config)
    if isinstance(reached, Rendered):
        candidate = replace(candidate, source=reached.source)
    if isinstance(reached, Compiled):
        candidate = replace(candidate, binary=reached.binary, occupancy=reached.occupancy)
    if isinstance(result, Rejection):
        device = result.verdict.device if result.verdict else None
        candidate = replace(
            candidate, outcome=result.outcome, reason=result.reason, verdict=result.verdict, device=device
        )
    else:
        end = end_of(result)
        wrong = Judged(result.verdicts).wrong
        candidate = replace(
            candidate,
            outcome=wrong.outcome if wrong else None,
            reason=end.reason,
            measurement=end.figure,
            device=end.device,
            **last_verdicts(result.verdicts),
        )
    return candidate
