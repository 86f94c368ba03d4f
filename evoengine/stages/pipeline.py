"""The verbs as tasks for a worker process: each takes records, gives a record or says why there is none.

What a task needs is imported inside it, so that the process that only hands tasks out loads no torch and no CuPy.
"""

from __future__ import annotations

import subprocess

from evoengine.devices.base import Arguments, KernelFailure, Tensors
from evoengine.gpu import Gpu
from evoengine.problem import Problem
from evoengine.records import Baseline, Binary, Launch, Measurement, Outcome, Plan, Rejection, Source, Verdict

LAUNCH_SECONDS = 20.0
"""one emulated launch of a gate case takes milliseconds; past this it will not end"""


def compile_task(source: Source, arch: str) -> Binary | Rejection:
    from evoengine.stages.compile import CompileFailed, compile_source

    try:
        return compile_source(source, arch)
    except (CompileFailed, subprocess.TimeoutExpired) as error:
        return Rejection(Outcome.UNCOMPILABLE, str(error))


def emulate_task(kernel: str, source: Source, plan: Plan, seed: int) -> Verdict | Rejection:
    """Builds the source for the CPU and puts it through the gate there."""
    from evoengine.devices.emulator.build import build
    from evoengine.devices.emulator.run import run
    from evoengine.stages.verify import verify
    from evoengine.workloads import find_tensors

    try:
        executable = build(source)
    except KernelFailure as failure:
        return Rejection(failure.outcome, f"emulator: {failure}")

    def launch(geometry: Launch, arguments: Arguments, schedule: int) -> Tensors:
        return run(executable, source.entry, geometry, arguments, schedule, LAUNCH_SECONDS)

    return verify(find_tensors(kernel), plan, launch, "emulator", seed)


def measure_task(
    kernel: str, source: Source, binary: Binary, plan: Plan, problem: Problem, gpu: Gpu, seed: int
) -> tuple[Verdict, Measurement | None] | Rejection:
    """Gate and timing on the GPU."""
    from evoengine.stages.measure import measure

    try:
        return measure(kernel, source, binary, plan, problem, gpu, seed)
    except KernelFailure as failure:
        return Rejection(failure.outcome, str(failure))


def baselines_task(kernel: str, problem: Problem) -> list[Baseline]:
    """The library's own kernels on the GPU."""
    from evoengine.stages.measure import baselines

    return baselines(kernel, problem)
