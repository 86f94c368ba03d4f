"""The JSON of `evoengine verify --cubin`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from typing_extensions import TypedDict

from evoengine.sass.predict import MODEL_VERSION, Prediction
from evoengine.stages.profile import REMARKS
from evoengine.views.encoding import SCHEMA

if TYPE_CHECKING:
    from evoengine.virtual.cubin_verify import CubinVerdict, LaunchVerdict


class LaunchAnswer(TypedDict):
    """One launch; times are in µs."""

    entry: str
    arch: int
    registers: int
    shared_bytes: int
    time_us: float | None
    range_us: list[float] | None
    bound: str | None
    unpredictable: str | None
    blocks_sampled: int
    profile: dict[str, float]


class DrawAnswer(TypedDict):
    """One execution of all launches."""

    draw: str
    correct: bool
    reason: str | None
    share_of_allowed: float | None


class CubinAnswer(TypedDict):
    """The answer of `evoengine verify --cubin --json`."""

    schema: int
    file: str
    gpu: str
    seed: int
    correct: bool
    model_version: int
    launches: list[LaunchAnswer]
    attempts: list[DrawAnswer]
    written: dict[str, int]
    remarks: list[str]


def as_answer(file: Path, gpu: str, seed: int, verdict: CubinVerdict) -> CubinAnswer:
    """Return what --json prints."""
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
    found = one.prediction if isinstance(one.prediction, Prediction) else None
    return {
        "entry": one.kernel.entry,
        "arch": one.kernel.arch,
        "registers": one.kernel.registers,
        "shared_bytes": one.kernel.shared_bytes,
        "time_us": found.time_us if found else None,
        "range_us": [found.low_us, found.high_us] if found else None,
        "bound": found.bound if found else None,
        "unpredictable": one.prediction if isinstance(one.prediction, str) else None,
        "blocks_sampled": one.sampled,
        "profile": dict(one.figures),
    }
