"""One configuration through render, compile and gate, outside any search and ledger."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace
from pathlib import Path

from evoengine.devices.driver import GpuDevice, resolve_gpu
from evoengine.errors import UsageError
from evoengine.gpu import AUTO
from evoengine.records import Candidate, Config
from evoengine.search.binaries import check_binary
from evoengine.search.evaluate_config import evaluate_config
from evoengine.search.evaluators import make_evaluator
from evoengine.search.reference import require_reference
from evoengine.search.rendering import Renderer
from evoengine.stages.binary_check import BinaryCheck
from evoengine.stages.render import Fill
from evoengine.tuning.boards import choose_gpu
from evoengine.tuning.setup import (
    Echo,
    choose_device,
    lock_gpu,
    make_target,
    prepare_space,
    require_compilers,
    silent,
)  # fmt: skip
from evoengine.workloads.base import Target


@dataclass(frozen=True, slots=True)
class Verified:
    candidate: Candidate
    seed: int
    """repeats the verdict"""
    binary: BinaryCheck | None = None
    """where its machine code was to be executed, and there is any"""

    @property
    def correct(self) -> bool:
        verdict = self.candidate.verdict
        return verdict is not None and verdict.correct and not self.candidate.refuted

    @property
    def why_not(self) -> str:
        """Of a candidate that is not correct: how it ended, and why."""
        c = self.candidate
        by_binary = c.refuted and (c.outcome is None or c.outcome.correct)
        found = c.binary_verdict if by_binary and c.binary_verdict else c
        return f"{found.outcome}: {found.reason}"


def verify(
    config: Config, problem: str | None = None, gpu: str = AUTO, *, gpu_file: Path | None = None,
    kernel: Path | None = None, device: str = "auto", space: Path | None = None, templates: Path | None = None,
    binary: bool = False, seed: int | None = None, echo: Echo = silent, on_stage: Echo = silent,
) -> Verified:  # fmt: skip
    """Renders, compiles and gates a configuration; with `binary` its machine code is executed too, on the CPU.
    `on_stage` is told what is being done.

    Raises UsageError where the configuration is not in the space.
    """
    choice = choose_gpu(gpu, gpu_file)
    target = make_target(problem, choice.gpu, kernel)
    timing = choose_device(device, target.gpu, echo)
    if timing:
        target = replace(target, gpu=resolve_gpu(timing, target.gpu))
    renderer = Renderer()
    try:
        return _verify(config, target, choice.why, timing, space, templates, binary, seed, renderer, echo, on_stage)
    finally:
        renderer.close()


def _verify(
    config: Config, target: Target, chosen: str | None, timing: GpuDevice | None, space: Path | None,
    templates: Path | None, binary: bool, seed: int | None, fill: Fill, echo: Echo,
    on_stage: Echo,
) -> Verified:  # fmt: skip
    on_stage("reading the space")
    bound, folder = prepare_space(space, templates, target, timing is None, fill)
    if why := bound.why_invalid(config):
        raise UsageError(f"the configuration is not in the space {bound.name}: {why}")
    require_compilers(target.gpu, emulated=timing is None)
    on_stage("running the reference")
    require_reference(target, echo)
    if chosen:
        echo(chosen)
    seed = secrets.randbelow(2**31) if seed is None else seed
    on_stage("compiling and gating")
    with lock_gpu(timing, echo):
        judge = make_evaluator(target, timing, seed)
        try:
            candidate = evaluate_config(target, bound, config, folder, judge, seed, fill)
        finally:
            judge.close()
    if not binary or not candidate.binary:
        return Verified(candidate, seed)
    on_stage("executing the machine code")
    check = check_binary(target, bound, candidate.contender, seed)
    return Verified(replace(candidate, binary_verdict=check.verdict), seed, check)
