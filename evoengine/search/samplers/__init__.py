"""The samplers, which propose configurations: evoengine's own and Optuna's.

Each is declared once, in SAMPLERS. What makes one imports it then, so that --help imports no Optuna.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from optuna.samplers import BaseSampler

    from evoengine.search.samplers.prior import Prior, Space


@dataclass(frozen=True, slots=True)
class Declared:
    make: Callable[[int, Space, Prior | None], BaseSampler]
    """of a seed, the space and the prior"""
    single_objective: bool = False
    """whether it supports only one objective"""
    prior_guided: bool = False
    ordinal: bool = False
    """whether it works on numbers: an ordered knob is passed to it as the index of its value"""


def _evolution(seed: int, space: Space, prior: Prior | None) -> BaseSampler:
    from evoengine.search.samplers.evolution import EvolutionSampler

    return EvolutionSampler(seed, space, prior)


def _optuna() -> ModuleType:
    import optuna.samplers
    from optuna.exceptions import ExperimentalWarning

    # grouped TPE, for conditional knobs, and CMA-ES with margin, for integers, are marked experimental
    warnings.filterwarnings("ignore", category=ExperimentalWarning, module="optuna")
    return optuna.samplers


SAMPLERS = {
    "evolution": Declared(_evolution, prior_guided=True),
    "tpe": Declared(lambda seed, *_: _optuna().TPESampler(seed=seed, group=True, multivariate=True)),
    "nsga2": Declared(lambda seed, *_: _optuna().NSGAIISampler(seed=seed, population_size=20)),
    "cmaes": Declared(
        lambda seed, *_: _optuna().CmaEsSampler(seed=seed, warn_independent_sampling=False, with_margin=True),
        single_objective=True,
        ordinal=True,
    ),
    "gp": Declared(
        lambda seed, *_: _optuna().GPSampler(seed=seed, deterministic_objective=True, warn_independent_sampling=False),
        ordinal=True,
    ),
    "random": Declared(lambda seed, *_: _optuna().RandomSampler(seed=seed)),
}
NAMES = tuple(SAMPLERS)
DEFAULT = "evolution"
