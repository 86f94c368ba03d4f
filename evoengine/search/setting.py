"""What a search is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from evoengine.objectives import DEFAULT, OBJECTIVES, Objective
from evoengine.space.space import SearchSpace
from evoengine.stages.render import Fill
from evoengine.stages.template import fill
from evoengine.workloads.base import Target


@dataclass(frozen=True, slots=True)
class Setting:
    """What is searched, on what, and for how long."""

    target: Target
    space: SearchSpace
    templates: Path
    sampler: str
    seed: int
    trials: int
    seconds: float | None
    jobs: int
    timed: bool
    """whether a device times the candidates, so that a spill is for the clock to judge"""
    objectives: tuple[Objective, ...] = (OBJECTIVES[DEFAULT],)
    fill: Fill = fill
    remeasure: bool = False
    """whether what the ledger knows is evaluated again"""
