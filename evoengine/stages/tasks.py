"""The verbs as tasks for a worker process: each takes records, gives a record or says why there is none.

What a task needs is imported inside it, so that the process that only hands tasks out loads no torch and no CuPy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import NamedTuple

from evoengine.devices.base import Executed, KernelFailure, Round
from evoengine.devices.pool import BlockLaunch, BlockTrace
from evoengine.records import (
    Baseline,
    Binary,
    CompiledCandidate,
    Measurement,
    Outcome,
    Plan,
    Rejection,
    Source,
    Verdict,
)
from evoengine.stages.binary_check import BinaryCheck
from evoengine.stages.final_result import Finals
from evoengine.stages.predict import Estimated, figure_by_formula, predict_figure
from evoengine.workloads.base import AnyWorkload, Target

COMPILE_SECONDS = 90.0
"""a kernel takes a few"""
LAUNCH_SECONDS = 20.0
"""one emulated launch of a gate case takes milliseconds; past this it will not end"""


class Evaluation(NamedTuple):
    verdict: Verdict
    figure: Measurement | None
    """only where the verdict is good, and something tells how fast the candidate is"""
    unread: str | None = None
    """why its figure is the formula's and no prediction"""


def compile_task(source: Source, arch: str) -> Binary | Rejection:
    from evoengine.stages.compile import CompileFailed, compile_source

    try:
        return compile_source(source, arch)
    except CompileFailed as error:
        return Rejection(Outcome.UNCOMPILABLE, str(error))


def build_model_task() -> str:
    """The path of the executor of machine code."""
    from evoengine.sass.build import build

    return str(build())


# ── without a GPU ───────────────────────────────────────────────────────────────────────────────────────────────────


def emulate_task(
    workload: AnyWorkload, source: Source, plan: Plan, full_plan: Plan, seed: int, arch: str
) -> Verdict | Rejection:
    """Build the source for the CPU, as NVRTC compiles it for `arch`, and put it through the gate there: small cases,
    then those at full size."""
    from evoengine.devices.emulator.build import build
    from evoengine.devices.emulator.run import run_blocks, run_rounds
    from evoengine.stages.full_size import verify_blocks
    from evoengine.stages.verify import verify

    try:
        executable = build(source, arch)
    except KernelFailure as failure:
        return Rejection(failure.outcome, f"emulator: {failure}")

    def launch(rounds: Sequence[Round], schedule: int) -> Executed:
        return run_rounds(executable, rounds, schedule, LAUNCH_SECONDS)

    def launch_blocks(asked: BlockLaunch, schedule: int) -> list[BlockTrace]:
        return run_blocks(executable, source.entry, asked, schedule, LAUNCH_SECONDS)

    verdict = verify(workload, plan, launch, "emulator", seed)
    return verify_blocks(verdict, workload, full_plan, launch_blocks, seed)


def estimate_task(
    target: Target, contender: CompiledCandidate, plan: Plan, full_plan: Plan, seed: int, cost: Mapping[str, float],
    failed: str | None = None,
) -> Evaluation | Rejection:  # fmt: skip
    """The gate in the emulator, and the prediction for what passes it; by formula where the model `failed` before."""
    verdict = emulate_task(target.workload, contender.source, plan, full_plan, seed, target.gpu.arch)
    if isinstance(verdict, Rejection) or not verdict.correct:
        return verdict if isinstance(verdict, Rejection) else Evaluation(verdict, None)
    estimated = predict_task(target, contender, cost, failed)
    return Evaluation(verdict, estimated.figure, estimated.unread)


def predict_task(
    target: Target, contender: CompiledCandidate, cost: Mapping[str, float], failed: str | None = None
) -> Estimated:
    """The candidate's time by the model of its chip; by formula where that `failed` before."""
    if failed:
        return Estimated(figure_by_formula(target, contender, cost), f"the model failed: {failed}")
    return predict_figure(target, contender, cost)


def execute_task(workload: AnyWorkload, source: Source, binary: Binary, plan: Plan, seed: int) -> BinaryCheck:
    """The small cases again, by the machine code itself."""
    from evoengine.stages.verify_binary import verify_binary

    return verify_binary(workload, plan, source, binary, seed)


# ── on a GPU, in its runner ─────────────────────────────────────────────────────────────────────────────────────────


def load_cuda() -> None:
    """Everything that a runner needs, ahead of its first task; makes no CUDA context yet."""
    import_module("evoengine.stages.measure")


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
    from evoengine.stages.measure import measure

    found = measure(target, contender, plan, seed, incumbent, baseline)
    return found if isinstance(found, Rejection) else Evaluation(*found)


def baselines_task(target: Target, seed: int, without: tuple[str, ...]) -> list[Baseline] | Rejection:
    """The library's own kernels on the GPU, but those in `without`; a Rejection names one that crashed or hung."""
    from evoengine.stages.measure import BaselineFailed, baselines

    try:
        return baselines(target, seed, without)
    except BaselineFailed as failure:
        return Rejection(failure.outcome, str(failure), failure.name)


def finals_task(
    target: Target, contenders: tuple[CompiledCandidate, ...], seed: int, baseline: Baseline
) -> Finals | Rejection:
    from evoengine.stages.measure import finals

    try:
        return finals(target, contenders, seed, baseline)
    except KernelFailure as failure:
        return Rejection(failure.outcome, str(failure))
