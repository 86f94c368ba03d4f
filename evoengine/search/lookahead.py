"""Looking ahead in a search that times on a GPU: what nobody asked for yet is compiled and predicted on idle workers.

The predictions go into the prior, which leads the sampler; the binaries are kept for when they are proposed. What fails
here is not predicted, and nothing else: only a candidate that was proposed is ever rejected.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np

from evoengine.errors import EvoengineError, UsageError
from evoengine.records import Binary, CompiledCandidate, Config, Rejection, Source, config_key
from evoengine.search.compilers import Compilers
from evoengine.search.samplers.prior import Prior
from evoengine.search.setting import Setting
from evoengine.search.workers import Answer
from evoengine.stages.predict import Estimated
from evoengine.stages.render import render
from evoengine.stages.screen import screen_binary, screen_launch

OPENING = 20
"""configurations that a sibling measured or that were predicted ahead, after which the sampler's first pick waits no
longer"""
OPENING_SECONDS = 20.0
"""the longest it waits"""
OPENING_SHARE = 0.1
"""of a search's time, that it waits at most"""
BEST = 8
"""configurations of the least expected time whose neighbours are looked at"""
DRAWN = 64
"""random configurations among which a new one is sought"""
PATIENCE = 8
"""failures before the first prediction, after which the model is taken to read nothing here"""
STREAM = 1
"""of random numbers: another than the sampler's, which has the seed alone"""


@dataclass(frozen=True, slots=True)
class _Look:
    config: Config
    source: Source


class Lookahead:
    def __init__(self, setting: Setting, prior: Prior, compilers: Compilers) -> None:
        self.predicted = 0
        self._known = len(prior)
        self._setting, self._prior, self._compilers = setting, prior, compilers
        self._rng = np.random.default_rng((setting.seed, STREAM))
        self._seen: set[str] = set()
        """keys of configurations looked at or proposed"""
        self._compiling: dict[Future[Binary | Rejection], list[_Look]] = {}
        self._predicting: dict[Future[Estimated | Rejection], list[_Look]] = {}
        self._failed = 0
        self._ended = False
        self._near = False
        self._opening_ends: float | None = None

    @property
    def under_way(self) -> set[Future[Any]]:
        return {*self._compiling, *self._predicting}

    def opening(self) -> bool:
        """Return whether the sampler's first pick should wait until there are predictions."""
        now = time.monotonic()
        if self._opening_ends is None:
            seconds = self._setting.seconds
            longest = OPENING_SECONDS if seconds is None else min(OPENING_SECONDS, OPENING_SHARE * seconds)
            self._opening_ends = now + longest
        more = not self._ended or bool(self.under_way)
        return more and now < self._opening_ends and self._known + self.predicted < OPENING

    def leave(self, config: Config) -> None:
        """Drop a configuration that was proposed, since a prediction ahead of it no longer helps."""
        self._seen.add(config_key(config))

    def start(self, best: Config | None) -> bool:
        """Start one more configuration: alternately a neighbour of `best`, and one that is expected to be fast.

        Returns False if none is left, or if predictions are not available.
        """
        for _ in range(DRAWN):
            config = None if self._ended else self._choose(best)
            if config is None:
                break
            self._seen.add(config_key(config))
            if self._begin(config):
                return True
        self._ended = True
        return False

    def advance(self, future: Future[Any]) -> None:
        """Process the result of a future in `under_way`."""
        for look in self._compiling.pop(future, ()):
            binary = _answer(future, Binary)
            if binary is None:
                self._fail()
            elif not self._screened(look, binary):
                self._predict(look, binary)
        for look in self._predicting.pop(future, ()):
            estimated = _answer(future, Estimated)
            if estimated is None or estimated.figure is None or not estimated.by_model:
                self._fail()
            else:
                self._prior.predict(look.config, estimated.figure.median_us)
                self.predicted += 1

    def _begin(self, config: Config) -> bool:
        s = self._setting
        try:
            look = _Look(config, render(s.target, s.space, config, s.templates, s.fill))
        except UsageError:
            return False
        if screen_launch(look.source.launch, s.target.gpu):
            return False
        if recorded := self._compilers.recorded(look.source):
            return not self._screened(look, recorded) and self._predict(look, recorded)
        self._compiling.setdefault(self._compilers.compile(look.source), []).append(look)
        return True

    def _predict(self, look: _Look, binary: Binary) -> bool:
        future = self._compilers.predict(CompiledCandidate(0, look.source, binary, look.config))
        self._predicting.setdefault(future, []).append(look)
        return True

    def _screened(self, look: _Look, binary: Binary) -> bool:
        s = self._setting
        return screen_binary(binary, look.source, s.target.gpu, s.space.cost(look.config), s.timed) is not None

    def _fail(self) -> None:
        self._failed += 1
        self._ended |= self._failed >= PATIENCE and not self.predicted

    def _choose(self, best: Config | None) -> Config | None:
        self._near = not self._near
        near = self._neighbour(best) if self._near else None
        space = self._setting.space
        # of so few, draws would leave some out
        return near or self._draw(space.enumerate() if space.valid <= DRAWN else space.sample(self._rng, DRAWN))

    def _neighbour(self, best: Config | None) -> Config | None:
        space = self._setting.space
        around = [space.decode(row) for row in self._prior.fastest(BEST)] + ([best] if best else [])
        for i in self._rng.permutation(len(around)):
            if config := self._draw(space.neighbours(around[i])):
                return config
        return None

    def _draw(self, configs: Iterable[Config]) -> Config | None:
        left = [config for config in configs if config_key(config) not in self._seen]
        return left[self._rng.integers(len(left))] if left else None


def _answer(future: Future[Answer | Rejection], kind: type[Answer]) -> Answer | None:
    """Return the answer, or None if the task failed in any way.

    Faults of the machine are reported by the candidates themselves.
    """
    try:
        answer = future.result()
    except EvoengineError:
        return None
    return answer if isinstance(answer, kind) else None
