"""A small space with conditional knobs, a known optimum, and searches of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from evoengine.records import Config, Value
from evoengine.search.samplers.evolution import Evolution
from evoengine.search.samplers.prior import Space
from evoengine.space.definition import Knob
from tests.support.spaces import launches

SPACE = """\
kernel = "attention"
[knobs]
family = ["plain", "tensor"]
tile = [8, 16, 32, 64, 128]
warps = [1, 2, 4, 8]
stages = { values = [1, 2, 3, 4], when = "family == 'tensor'" }
order = { values = ["rows", "columns", "swizzled"], when = "family == 'tensor' and stages > 1" }
[[constraint]]
expr = "tile >= 8 * warps"
why = "each warp owns eight rows"
""" + launches("plain", "tensor")


def speed(config) -> float:
    """Best, at 10, with family tensor, tile 64, 4 warps, 3 stages, swizzled."""
    loss = abs(np.log2(config["tile"] / 64)) + abs(np.log2(config["warps"] / 4))
    if config["family"] == "plain":
        return 5 - 0.5 * loss
    return 10 - loss - abs(config["stages"] - 3) - (config.get("order") != "swizzled")


class Grid:
    """A space of every combination of the knobs' values."""

    def __init__(self, **knobs: Sequence[Value | None]) -> None:
        self.knobs = tuple(Knob(name, tuple(values)) for name, values in knobs.items())
        self._sizes = tuple(len(knob.values) for knob in self.knobs)

    def __len__(self) -> int:
        return math.prod(self._sizes)

    def contains(self, config: Config) -> bool:
        return all(knob.values.count(config[knob.name]) for knob in self.knobs)

    def sample(self, rng: np.random.Generator, n: int = 1) -> list[Config]:
        return [self.decode(row) for row in rng.integers(self._sizes, size=(n, len(self._sizes)))]

    def enumerate(self) -> Iterator[Config]:
        return map(self.decode, np.ndindex(*self._sizes))

    def neighbours(self, config: Config) -> list[Config]:
        return [{**config, k.name: value} for k in self.knobs for value in k.values if value != config[k.name]]

    def encode(self, config: Config) -> np.ndarray:
        return np.array([knob.values.index(config[knob.name]) for knob in self.knobs], np.int16)

    def decode(self, row: Sequence[int] | np.ndarray) -> Config:
        return {knob.name: knob.values[int(i)] for knob, i in zip(self.knobs, row, strict=True)}


@dataclass(frozen=True)
class Done:
    """A trial of a search that has ended."""

    number: int
    config: Config
    value: float
    operator: str
    parents: tuple[int, ...]


def search(
    space: Space, seed: int, trials: int, sampler: Evolution | None = None, value: Callable[[Config], float] = speed
) -> list[Done]:
    """Return the trials of a search for the greatest value."""
    sampler = sampler or Evolution(space, seed)
    done = []
    for _ in range(trials):
        asked = sampler.ask()
        found = value(asked.config)
        sampler.tell(asked.number, (found,))
        done.append(Done(asked.number, asked.config, found, asked.operator, asked.parents))
    return done
