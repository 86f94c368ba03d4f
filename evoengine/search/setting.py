"""The settings of a search."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from evoengine.objectives import DEFAULT, OBJECTIVES, Objective
from evoengine.space.space import SearchSpace
from evoengine.stages.render import Fill, fill
from evoengine.workloads.base import Target


@dataclass(frozen=True, slots=True)
class Setting:
    """What is searched, where, and for how long."""

    target: Target
    space: SearchSpace
    templates: Path
    sampler: str
    seed: int
    trials: int
    seconds: float | None
    jobs: int
    timed: bool
    """whether a GPU times the candidates, so that spills are left to the timing"""
    objectives: tuple[Objective, ...] = (OBJECTIVES[DEFAULT],)
    fill: Fill = fill
    remeasure: bool = False
    """whether results in the ledger are not reused"""
