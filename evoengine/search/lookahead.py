"""Compile and predict likely proposals on idle workers, ahead of a search that times on a GPU.

The predictions enter the prior that guides the sampler; the binaries are kept until they are proposed. A failure here
has no other effect than a missing prediction: only proposed candidates are rejected.
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
from evoengine.sandbox.workers import Answer
from evoengine.search.compilers import Compilers
from evoengine.search.identity import Setting
from evoengine.search.samplers.prior import Prior
from evoengine.stages.predict import Estimated
from evoengine.stages.render import render
from evoengine.stages.screen import screen_binary, screen_launch

MIN_PREDICTED = 20
"""configurations, measured by a sibling or predicted ahead, that suffice for the sampler's first pick"""
MAX_WAIT_SECONDS = 20.0
"""maximum wait of the sampler's first pick"""
MAX_WAIT_SHARE = 0.1
"""maximum wait as a share of the search's time"""
N_CENTRES = 8
"""configurations of the least expected time whose neighbours are considered"""
N_DRAWS = 64
"""random configurations drawn to find a new one"""
MAX_FAILURES = 8
"""failures without a single prediction after which the lookahead gives up"""
STREAM = 1
"""of random numbers, different from the sampler's"""


@dataclass(frozen=True, slots=True)
class _Probe:
    config: Config
    source: Source


class Lookahead:
    def __init__(self, setting: Setting, prior: Prior, compilers: Compilers) -> None:
        self.predicted = 0
        self._known = len(prior)
        self._setting, self._prior, self._compilers = setting, prior, compilers
        self._rng = np.random.default_rng((setting.seed, STREAM))
        self._seen: set[str] = set()
        """keys of configurations that were started or proposed"""
        self._compiling: dict[Future[Binary | Rejection], list[_Probe]] = {}
        self._predicting: dict[Future[Estimated | Rejection], list[_Probe]] = {}
        self._failed = 0
        self._ended = False
        self._near = False
        self._wait_ends: float | None = None

    @property
    def in_flight(self) -> set[Future[Any]]:
        return {*self._compiling, *self._predicting}

    def must_wait(self) -> bool:
        """Return whether the sampler's first pick should wait until there are predictions."""
        now = time.monotonic()
        if self._wait_ends is None:
            seconds = self._setting.seconds
            longest = MAX_WAIT_SECONDS if seconds is None else min(MAX_WAIT_SECONDS, MAX_WAIT_SHARE * seconds)
            self._wait_ends = now + longest
        more = not self._ended or bool(self.in_flight)
        return more and now < self._wait_ends and self._known + self.predicted < MIN_PREDICTED

    def discard(self, config: Config) -> None:
        """Drop a configuration that was proposed, since a prediction ahead of it no longer helps."""
        self._seen.add(config_key(config))

    def start(self, best: Config | None) -> bool:
        """Start one more configuration: alternately a neighbour of `best`, and one that is expected to be fast.

        Returns False if none is left, or if predictions are not available.
        """
        for _ in range(N_DRAWS):
            config = None if self._ended else self._choose(best)
            if config is None:
                break
            self._seen.add(config_key(config))
            if self._begin(config):
                return True
        self._ended = True
        return False

    def advance(self, future: Future[Any]) -> None:
        """Process the result of a future in `in_flight`."""
        for probe in self._compiling.pop(future, ()):
            binary = _answer(future, Binary)
            if binary is None:
                self._fail()
            elif not self._screened(probe, binary):
                self._predict(probe, binary)
        for probe in self._predicting.pop(future, ()):
            estimated = _answer(future, Estimated)
            if estimated is None or estimated.figure is None or not estimated.by_model:
                self._fail()
            else:
                self._prior.predict(probe.config, estimated.figure.median_us)
                self.predicted += 1

    def _begin(self, config: Config) -> bool:
        s = self._setting
        try:
            probe = _Probe(config, render(s.target, s.space, config, s.templates, s.fill))
        except UsageError:
            return False
        if screen_launch(probe.source.launch, s.target.gpu):
            return False
        if recorded := self._compilers.recorded(probe.source):
            return not self._screened(probe, recorded) and self._predict(probe, recorded)
        self._compiling.setdefault(self._compilers.compile(probe.source), []).append(probe)
        return True

    def _predict(self, probe: _Probe, binary: Binary) -> bool:
        future = self._compilers.predict(CompiledCandidate(0, probe.source, binary, probe.config))
        self._predicting.setdefault(future, []).append(probe)
        return True

    def _screened(self, probe: _Probe, binary: Binary) -> bool:
        s = self._setting
        return screen_binary(binary, probe.source, s.target.gpu, s.space.cost(probe.config), s.timed) is not None

    def _fail(self) -> None:
        self._failed += 1
        self._ended |= self._failed >= MAX_FAILURES and not self.predicted

    def _choose(self, best: Config | None) -> Config | None:
        self._near = not self._near
        near = self._neighbour(best) if self._near else None
        space = self._setting.space
        # random draws would miss some of so few
        return near or self._draw(space.enumerate() if space.valid <= N_DRAWS else space.sample(self._rng, N_DRAWS))

    def _neighbour(self, best: Config | None) -> Config | None:
        space = self._setting.space
        around = [space.decode(row) for row in self._prior.fastest(N_CENTRES)] + ([best] if best else [])
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
