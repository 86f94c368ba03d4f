"""The samplers, which propose configurations: evoengine's own and Optuna's.

Each is declared once, in SAMPLERS. What makes one imports it then, so that --help imports no Optuna.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Protocol

from evoengine.objectives import Direction
from evoengine.records import Config

if TYPE_CHECKING:
    from optuna.samplers import BaseSampler

    from evoengine.search.samplers.prior import Prior, StartedSpace


@dataclass(frozen=True, slots=True)
class Asked:
    """A trial that a sampler has begun."""

    number: int
    config: Config
    parents: tuple[int, ...] = ()
    """numbers of earlier trials"""
    operator: str | None = None


class Sampler(Protocol):
    """Propose configurations to a search, which tells what became of each. Trials are numbered from 0."""

    def ask(self, config: Config | None = None) -> Asked:
        """Begin a trial of `config`, or of the sampler's own choice where it is None."""

    def tell(self, number: int, values: Sequence[float]) -> None:
        """Report what a trial reached, one value per objective."""

    def recall(self, config: Config, values: Sequence[float], parents: Sequence[int], operator: str | None) -> int:
        """Enter a trial of an earlier process of the search, and return its number."""


@dataclass(frozen=True, slots=True)
class Declared:
    optuna: Callable[[int], BaseSampler] | None
    """makes Optuna's sampler of a seed; None for evoengine's own"""
    single_objective: bool = False
    """whether it supports only one objective"""
    prior_guided: bool = False
    ordinal: bool = False
    """whether it works on numbers: an ordered knob is passed to it as the index of its value"""


def _optuna() -> ModuleType:
    import optuna.samplers
    from optuna.exceptions import ExperimentalWarning

    # grouped TPE, for conditional knobs, and CMA-ES with margin, for integers, are marked experimental
    warnings.filterwarnings("ignore", category=ExperimentalWarning, module="optuna")
    return optuna.samplers


SAMPLERS = {
    "evolution": Declared(None, prior_guided=True),
    "tpe": Declared(lambda seed: _optuna().TPESampler(seed=seed, group=True, multivariate=True)),
    "nsga2": Declared(lambda seed: _optuna().NSGAIISampler(seed=seed, population_size=20)),
    "cmaes": Declared(
        lambda seed: _optuna().CmaEsSampler(seed=seed, warn_independent_sampling=False, with_margin=True),
        single_objective=True,
        ordinal=True,
    ),
    "gp": Declared(
        lambda seed: _optuna().GPSampler(seed=seed, deterministic_objective=True, warn_independent_sampling=False),
        ordinal=True,
    ),
    "random": Declared(lambda seed: _optuna().RandomSampler(seed=seed)),
}
NAMES = tuple(SAMPLERS)
DEFAULT = "evolution"


def make_sampler(
    name: str, space: StartedSpace, seed: int, directions: Sequence[Direction], prior: Prior | None
) -> Sampler:
    """Return the sampler of this name for a search of the space; one that no prior guides ignores it."""
    declared = SAMPLERS[name]
    if declared.optuna is None:
        from evoengine.search.samplers.evolution import Evolution

        return Evolution(space, seed, prior, directions)
    from evoengine.search.samplers.study import StudySampler

    return StudySampler(declared.optuna(seed), space, directions, declared.ordinal)
