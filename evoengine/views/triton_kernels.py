"""The JSON of `evoengine verify --triton`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypedDict

from evoengine.sass.predict import MODEL_VERSION, Prediction
from evoengine.views.encoding import SCHEMA

if TYPE_CHECKING:
    from evoengine.virtual.gate import ConfigVerdict


class AttemptAnswer(TypedDict):
    """One execution."""

    sizes: str
    draw: str
    correct: bool
    reason: str | None
    share_of_allowed: float | None
    difference: float | None


class ConfigAnswer(TypedDict):
    """One configuration; times are in µs."""

    config: str
    outcome: str
    attempts: list[AttemptAnswer]
    refused: dict[str, str]
    inexact: list[str]
    unbuilt: dict[str, str]
    time_us: float | None
    range_us: list[float] | None
    bound: str | None
    unpredictable: str | None


class TritonAnswer(TypedDict):
    """The answer of `evoengine verify --triton --json`."""

    schema: int
    kernel: str
    gpu: str
    seed: int
    correct: bool
    model_version: int
    configs: list[ConfigAnswer]


def as_answer(target: str, gpu: str, seed: int, verdicts: Sequence[ConfigVerdict]) -> TritonAnswer:
    """Return what --json prints."""
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
    found = verdict.prediction if isinstance(verdict.prediction, Prediction) else None
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
        "time_us": found.time_us if found else None,
        "range_us": [found.low_us, found.high_us] if found else None,
        "bound": found.bound if found else None,
        "unpredictable": verdict.prediction if isinstance(verdict.prediction, str) else None,
    }
