"""The samplers by name: evoengine's own and Optuna's."""

from __future__ import annotations

import warnings
from collections.abc import Callable

from optuna.exceptions import ExperimentalWarning
from optuna.samplers import BaseSampler, CmaEsSampler, GPSampler, NSGAIISampler, RandomSampler, TPESampler

from evoengine.search.samplers.evolution import EvolutionSampler
from evoengine.search.samplers.pool import Space
from evoengine.search.samplers.prior import Prior

# grouped TPE, for conditional knobs, and CMA-ES with margin, for integers, are marked experimental
warnings.filterwarnings("ignore", category=ExperimentalWarning, module="optuna")

MAKERS: dict[str, Callable[[int, Space, Prior | None], BaseSampler]] = {
    "evolution": EvolutionSampler,
    "tpe": lambda seed, *_: TPESampler(seed=seed, group=True, multivariate=True),
    "nsga2": lambda seed, *_: NSGAIISampler(seed=seed, population_size=20),
    "cmaes": lambda seed, *_: CmaEsSampler(seed=seed, warn_independent_sampling=False, with_margin=True),
    "gp": lambda seed, *_: GPSampler(seed=seed, deterministic_objective=True, warn_independent_sampling=False),
    "random": lambda seed, *_: RandomSampler(seed=seed),
}
ORDINAL = frozenset({"cmaes", "gp"})
"""samplers that work on numbers: an ordered knob is passed to them as the index of its value"""
