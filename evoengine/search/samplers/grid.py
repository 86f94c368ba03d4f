"""The space of an Optuna study whose knobs are known from its trials alone: every combination of their values."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution

from evoengine.records import Config
from evoengine.space.definition import Knob

FINEST = 64
"""number of values into which a continuous or wider range is divided"""


class Grid:
    def __init__(self, distributions: Mapping[str, BaseDistribution]) -> None:
        self._distributions = distributions
        self.knobs = tuple(Knob(name, _values(d)) for name, d in distributions.items())
        self._sizes = tuple(len(knob.values) for knob in self.knobs)

    def __len__(self) -> int:
        return min(math.prod(self._sizes), sys.maxsize)

    def contains(self, config: Config) -> bool:
        return all(
            name in config and d._contains(d.to_internal_repr(config[name]))  # noqa: SLF001 - nothing public tells
            for name, d in self._distributions.items()
        )

    def sample(self, rng: np.random.Generator, n: int = 1) -> list[dict[str, Any]]:
        return [self.decode(row) for row in rng.integers(self._sizes, size=(n, len(self._sizes)))]

    def enumerate(self) -> Iterator[dict[str, Any]]:
        return map(self.decode, np.ndindex(*self._sizes))

    def neighbours(self, config: Config) -> list[dict[str, Any]]:
        return [{**config, k.name: value} for k in self.knobs for value in k.values if value != config[k.name]]

    def encode(self, config: Config) -> np.ndarray:
        """Return the nearest point of the grid, int16 [knobs]."""
        return np.array([_position(self._distributions[k.name], k, config[k.name]) for k in self.knobs], np.int16)

    def decode(self, row: Sequence[int] | np.ndarray) -> dict[str, Any]:
        return {knob.name: knob.values[int(i)] for knob, i in zip(self.knobs, row, strict=True)}


def _values(distribution: BaseDistribution) -> tuple[Any, ...]:
    if isinstance(distribution, CategoricalDistribution):
        return distribution.choices
    assert isinstance(distribution, IntDistribution | FloatDistribution)
    low, high, step = distribution.low, distribution.high, distribution.step
    kind = int if isinstance(distribution, IntDistribution) else float
    if step is not None and not distribution.log and (high - low) / step < FINEST:
        return tuple(kind(low + i * step) for i in range(round((high - low) / step) + 1))
    spread = (np.geomspace if distribution.log else np.linspace)(low, high, FINEST)
    if step is not None:
        spread = low + np.round((spread - low) / step) * step
    return tuple(kind(value) for value in np.unique(np.clip(spread, low, high)))


def _position(distribution: BaseDistribution, knob: Knob, value: Any) -> int:
    if isinstance(distribution, CategoricalDistribution):
        return int(distribution.to_internal_repr(value))
    return int(np.abs(np.array(knob.values) - value).argmin())
