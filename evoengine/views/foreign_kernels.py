"""Kernels of cubins and of Triton files, and verdicts on them: the JSON of `cubins` and `verify`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from typing_extensions import TypedDict

from evoengine.sass.cubin import Kernel
from evoengine.sass.predict import MODEL_VERSION, Prediction
from evoengine.views import SCHEMA, AnswerView, fields_of
from evoengine.views.tables import Column, Table

if TYPE_CHECKING:
    from evoengine.virtual.cubin_verify import CubinVerdict, LaunchVerdict
    from evoengine.virtual.gate import ConfigVerdict


class CubinKernelAnswer(TypedDict):
    """A kernel; sizes are in bytes."""

    entry: str
    arch: int
    registers: int
    shared_bytes: int
    local_bytes: int
    parameters: list[int]
    max_threads: int | None
    cluster: list[int]


class CubinsAnswer(AnswerView):
    """Describe what `evoengine cubins --json` prints."""

    file: str
    kernels: list[CubinKernelAnswer]


def cubins_json(file: Path, kernels: Sequence[Kernel]) -> CubinsAnswer:
    return {"schema": SCHEMA, "file": str(file), "kernels": [_kernel_json(kernel) for kernel in kernels]}


def _kernel_json(kernel: Kernel) -> CubinKernelAnswer:
    return {**fields_of(kernel, CubinKernelAnswer), "parameters": [size for _, size in kernel.parameters]}


def cubins_table(kernels: Sequence[Kernel]) -> Table:
    columns = [
        Column("kernel", least=20, folds=True), Column("arch"), Column("registers", right=True),
        Column("shared", right=True), Column("local", right=True), Column("threads at most", right=True, leaves=1),
        Column("parameters", least=8, folds=True),
    ]  # fmt: skip
    return Table(columns, map(_row, kernels))


def _row(kernel: Kernel) -> tuple[str, ...]:
    return (
        kernel.entry,
        f"sm_{kernel.arch}",
        str(kernel.registers),
        str(kernel.shared_bytes),
        str(kernel.local_bytes or ""),
        str(kernel.max_threads or ""),
        " ".join(str(size) for _, size in kernel.parameters),
    )


class PredictionAnswer(TypedDict):
    """A prediction in µs, or in `unpredictable` why there is none."""

    time_us: float | None
    range_us: list[float] | None
    bound: str | None
    unpredictable: str | None


def _prediction_json(found: Prediction | str | None) -> PredictionAnswer:
    if not isinstance(found, Prediction):
        return {"time_us": None, "range_us": None, "bound": None, "unpredictable": found}
    ends = [found.low_us, found.high_us]
    return {"time_us": found.time_us, "range_us": ends, "bound": found.bound, "unpredictable": None}


class LaunchAnswer(PredictionAnswer):
    """One launch."""

    entry: str
    arch: int
    registers: int
    shared_bytes: int
    blocks_sampled: int
    profile: dict[str, float]


class DrawAnswer(TypedDict):
    """One execution of all launches."""

    draw: str
    correct: bool
    reason: str | None
    share_of_allowed: float | None


class CubinAnswer(AnswerView):
    """Describe what `evoengine verify --cubin --json` prints."""

    file: str
    gpu: str
    seed: int
    correct: bool
    model_version: int
    launches: list[LaunchAnswer]
    attempts: list[DrawAnswer]
    written: dict[str, int]
    remarks: list[str]


def cubin_answer(file: Path, gpu: str, seed: int, verdict: CubinVerdict) -> CubinAnswer:
    from evoengine.stages.profile import REMARKS

    return {
        "schema": SCHEMA,
        "file": str(file),
        "gpu": gpu,
        "seed": seed,
        "correct": verdict.wrong is None,
        "model_version": MODEL_VERSION,
        "launches": [_launch_answer(one) for one in verdict.launches],
        "attempts": [
            {"draw": one.draw, "correct": one.reason is None, "reason": one.reason, "share_of_allowed": one.share}
            for one in verdict.attempts
        ],
        "written": verdict.written,
        "remarks": list(REMARKS),
    }


def _launch_answer(one: LaunchVerdict) -> LaunchAnswer:
    return {
        "entry": one.kernel.entry,
        "arch": one.kernel.arch,
        "registers": one.kernel.registers,
        "shared_bytes": one.kernel.shared_bytes,
        **_prediction_json(one.prediction),
        "blocks_sampled": one.sampled,
        "profile": dict(one.figures),
    }


class AttemptAnswer(TypedDict):
    """One execution."""

    sizes: str
    draw: str
    correct: bool
    reason: str | None
    share_of_allowed: float | None
    difference: float | None


class ConfigAnswer(PredictionAnswer):
    """One configuration."""

    config: str
    outcome: str
    attempts: list[AttemptAnswer]
    refused: dict[str, str]
    inexact: list[str]
    unbuilt: dict[str, str]


class TritonAnswer(AnswerView):
    """Describe what `evoengine verify --triton --json` prints."""

    kernel: str
    gpu: str
    seed: int
    correct: bool
    model_version: int
    configs: list[ConfigAnswer]


def triton_answer(target: str, gpu: str, seed: int, verdicts: Sequence[ConfigVerdict]) -> TritonAnswer:
    return {
        "schema": SCHEMA,
        "kernel": target,
        "gpu": gpu,
        "seed": seed,
        "correct": not any(verdict.wrong for verdict in verdicts),
        "model_version": MODEL_VERSION,
        "configs": [_config_answer(verdict) for verdict in verdicts],
    }


def _config_answer(verdict: ConfigVerdict) -> ConfigAnswer:
    return {
        "config": verdict.config,
        "outcome": verdict.outcome,
        "attempts": [
            {
                "sizes": one.sizes,
                "draw": one.draw,
                "correct": one.reason is None,
                "reason": one.reason,
                "share_of_allowed": one.share,
                "difference": one.difference,
            }
            for one in verdict.attempts
        ],
        "refused": dict(verdict.refused),
        "inexact": verdict.inexact,
        "unbuilt": verdict.unbuilt,
        **_prediction_json(verdict.prediction),
    }
