"""Optuna's samplers by name."""

from __future__ import annotations

from collections.abc import Callable

from optuna.samplers import BaseSampler, CmaEsSampler, GPSampler, NSGAIISampler, RandomSampler, TPESampler

MAKERS: dict[str, Callable[[int], BaseSampler]] = {
    "tpe": lambda seed: TPESampler(seed=seed, group=True, multivariate=True, warn_independent_sampling=False),
    "nsga2": lambda seed: NSGAIISampler(seed=seed, population_size=20),
    "cmaes": lambda seed: CmaEsSampler(seed=seed, warn_independent_sampling=False, with_margin=True),
    "gp": lambda seed: GPSampler(seed=seed, deterministic_objective=True, warn_independent_sampling=False),
    "random": lambda seed: RandomSampler(seed=seed),
}
ORDINAL = frozenset({"cmaes", "gp"})
"""samplers that work on numbers: an ordered knob is given to them as the index of its value"""
