"""The stages as tasks for a worker process: each takes records, and returns a record or a Rejection.

A task imports its needs itself, so that the process that only submits tasks loads neither torch nor CuPy.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import NamedTuple

from evoengine.devices.base import KernelFailure
from evoengine.records import (
    AnyBaseline,
    Baseline,
    Binary,
    CompiledCandidate,
    Finals,
    Judged,
    Measurement,
    Outcome,
    Plan,
    Plans,
    Rejection,
    Source,
    Verdict,
)
from evoengine.stages.predict import Estimated, figure_by_formula, predict_figure
from evoengine.terms import peak_percent
from evoengine.workloads.base import AnyWorkload, Target

NEAR_CEILING = 90.0
"""per cent of the chip's peak from which on a figure does not count before the gate is finished"""
COMPILE_SECONDS = 90.0
"""time limit; a kernel takes a few seconds"""


class Evaluation(NamedTuple):
    verdicts: tuple[Verdict, ...]
    figure: Measurement | None
    """None where a verdict refutes the candidate, or nothing tells how fast it is"""
    model_error: str | None = None
    """why its figure is the formula's and no prediction"""
    whole: bool = True
    """whether the gate was finished"""


def compile_task(source: Source, arch: str) -> Binary | Rejection:
    from evoengine.stages.compile import CompileFailed, compile_source

    try:
        return compile_source(source, arch)
    except CompileFailed as error:
        return Rejection(Outcome.UNCOMPILABLE, str(error))


# ── without a GPU ───────────────────────────────────────────────────────────────────────────────────────────────────


def estimate_task(
    target: Target,
    contender: CompiledCandidate,
    plans: Plans,
    seed: int,
    cost: Mapping[str, float],
    whole: bool,
    failed: str | None = None,
) -> Evaluation | Rejection:
    """Judge the short cases and predict the time; judge to the end where that is to be `whole`.

    Without a figure, and with one so near the ceiling of the chip that work may have been skipped, the candidate is
    judged to the end too. Where executor or model `failed` before, the emulator judges alone and the formula gives the
    figure.
    """
    from evoengine.stages.gate import judges_of
    from evoengine.stages.verify import CannotJudge

    try:
        judges = judges_of(target.workload, contender, plans, seed, failed)
        judged = judges.judge_short()
        if not judged.correct:
            return Evaluation(judged.verdicts, None)
        estimated = predict_task(target, contender, cost, failed)
        figure = estimated.figure
        if whole or figure is None or _near_ceiling(figure):
            judged = judges.judge_rest(judged.verdicts)
    except CannotJudge as error:
        return Rejection(Outcome.UNCOMPILABLE, str(error))
    return Evaluation(judged.verdicts, figure if judged.correct else None, estimated.model_error, judged.whole)


def _near_ceiling(figure: Measurement) -> bool:
    percent = peak_percent(figure.terms, figure.compared_us)
    return percent is not None and percent >= NEAR_CEILING


def finish_task(
    workload: AnyWorkload,
    contender: CompiledCandidate,
    plans: Plans,
    seed: int,
    known: tuple[Verdict, ...],
    failed: str | None = None,
) -> Judged | Rejection:
    """Judge to the end what the verdicts `known` of a candidate leave open; without any, every case by both judges."""
    from evoengine.stages.gate import judges_of
    from evoengine.stages.verify import CannotJudge

    try:
        judges = judges_of(workload, contender, plans, seed, failed)
        return judges.judge_rest(known) if known else judges.judge_whole()
    except CannotJudge as error:
        return Rejection(Outcome.UNCOMPILABLE, str(error))


def predict_task(
    target: Target, contender: CompiledCandidate, cost: Mapping[str, float], failed: str | None = None
) -> Estimated:
    """Predict the candidate's time by the model of its chip; by formula if that `failed` before."""
    if failed:
        return Estimated(figure_by_formula(target, contender, cost), f"the model failed: {failed}")
    return predict_figure(target, contender, cost)


JUDGING = (estimate_task, finish_task, predict_task)
"""tasks that need the executor, and some of them the emulator"""


# ── on a GPU, in its runner ─────────────────────────────────────────────────────────────────────────────────────────


def load_cuda() -> None:
    """Import everything that a runner needs before its first task, without creating a CUDA context."""
    import_module("evoengine.timing.measure")


def measure_task(
    target: Target,
    contender: CompiledCandidate,
    plan: Plan,
    seed: int,
    incumbent: CompiledCandidate | None,
    baseline: Baseline,
) -> Evaluation | Rejection:
    """Gate and timing on the GPU, against the best candidate so far and the fastest baseline.

    A Rejection where the kernel crashed or hung, in a gate case too: by it the runner is known to be unusable.
    """
    from evoengine.timing.measure import measure

    found = measure(target, contender, plan, seed, incumbent, baseline)
    if isinstance(found, Rejection):
        return found
    verdict, figure = found
    return Evaluation((verdict,), figure)


def baselines_task(target: Target, seed: int, failed: Mapping[str, str]) -> list[AnyBaseline] | Rejection:
    """Time the libraries' own kernels on the GPU, other than those that `failed`, each for the reason given.

    A Rejection names one that crashed or hung, or none where none can be timed.
    """
    from evoengine.timing.measure import BaselineFailed, NoBaseline, baselines

    try:
        return baselines(target, seed, failed)
    except BaselineFailed as failure:
        return Rejection(failure.outcome, str(failure), failure.name)
    except NoBaseline as reasons:
        return Rejection(Outcome.UNRANKED, str(reasons))


def finals_task(
    target: Target, contenders: tuple[CompiledCandidate, ...], seed: int, baseline: Baseline
) -> Finals | Rejection:
    from evoengine.timing.measure import finals

    try:
        return finals(target, contenders, seed, baseline)
    except KernelFailure as failure:
        return Rejection(failure.outcome, str(failure))
