"""The pool of candidates of an evolutionary search."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import numpy as np

from evoengine.records import Config, Value
from evoengine.space.definition import Knob

ENUMERABLE = 20_000
"""largest number of valid configurations at which the pool is the whole space"""
N_RANDOM, N_CROSSED = 1024, 256
"""random points and crossovers in the pool of a larger space, in addition to the neighbours of the elites"""
N_DRAWS = 64
"""random points drawn of a larger space to find a new one"""


class Space(Protocol):
    """What a sampler needs of a search space; `SearchSpace` and `RecordedSpace` are two of them."""

    @property
    def knobs(self) -> tuple[Knob, ...]: ...
    def __len__(self) -> int: ...
    def contains(self, config: Config) -> bool: ...
    def sample(self, rng: np.random.Generator, n: int = 1) -> list[dict[str, Value]]: ...
    def enumerate(self) -> Iterator[dict[str, Value]]: ...
    def neighbours(self, config: Config) -> list[dict[str, Value]]: ...
    def encode(self, config: Config) -> np.ndarray: ...
    def decode(self, row: Sequence[int] | np.ndarray) -> dict[str, Value]: ...


class StartedSpace(Space, Protocol):
    """What a search needs in addition: what to try first, and which knobs are active."""

    def first_points(self, rng: np.random.Generator) -> list[tuple[Config, str]]: ...
    def is_active(self, knob: Knob, config: Config) -> bool: ...


class Pool:
    """Encoded valid configurations, int16 [n, knobs]: the whole space if it is small, else offspring of the best."""

    def __init__(self, space: Space, rng: np.random.Generator) -> None:
        self._space, self._rng = space, rng
        self.whole = len(space) <= ENUMERABLE
        self._excluded: set[bytes] = set()
        self._neighbours: dict[bytes, list[np.ndarray]] = {}
        self._set_rows(self._encoded(space.enumerate() if self.whole else ()))

    def exclude(self, row: np.ndarray) -> None:
        """Exclude a row from proposals."""
        self._excluded.add(row.tobytes())
        if (position := self._position.get(row.tobytes())) is not None:
            self.available[position] = False

    def draw(self) -> np.ndarray | None:
        """Return a random open valid row; None if none is found, which means that a space held whole is exhausted."""
        if self.whole:
            left = np.flatnonzero(self.available)
            return self.rows[self._rng.choice(left)] if len(left) else None
        rows = self._encoded(self._space.sample(self._rng, N_DRAWS))
        return next((row for row in rows if row.tobytes() not in self._excluded), None)

    def breed(self, elites: np.ndarray, expected: Iterable[np.ndarray] = ()) -> None:
        """Renew a pool that does not hold the whole space from the best rows so far [n, knobs].

        `expected` are rows [knobs] that a prior expects to be fast; the pool includes them.
        """
        if self.whole:
            return
        random = self._encoded(self._space.sample(self._rng, N_RANDOM))
        near = [row for elite in elites for row in self._neighbours_of(elite)]
        self._set_rows(np.unique(np.vstack([random, *expected, *near, *self._crossed(elites)]), axis=0))

    def _set_rows(self, rows: np.ndarray) -> None:
        self.rows = rows
        self._position = {row.tobytes(): i for i, row in enumerate(rows)}
        self.available = np.array([key not in self._excluded for key in self._position], bool)

    def _neighbours_of(self, elite: np.ndarray) -> list[np.ndarray]:
        key = elite.tobytes()
        if key not in self._neighbours:
            found = self._space.neighbours(self._space.decode(elite))
            self._neighbours[key] = [self._space.encode(config) for config in found]
        return self._neighbours[key]

    def _crossed(self, elites: np.ndarray) -> list[np.ndarray]:
        """Return rows with each knob from one of two parents. Conditional knobs may make a row invalid."""
        if len(elites) < 2:
            return []
        parents = np.array([self._rng.choice(len(elites), 2, replace=False) for _ in range(N_CROSSED)])
        first = self._rng.random((N_CROSSED, elites.shape[1])) < 0.5
        children = np.unique(np.where(first, elites[parents[:, 0]], elites[parents[:, 1]]), axis=0)
        return [child for child in children if self._space.contains(self._space.decode(child))]

    def _encoded(self, configs: Iterable[Config]) -> np.ndarray:
        rows = [self._space.encode(config) for config in configs]
        return np.array(rows, np.int16).reshape(-1, len(self._space.knobs))
