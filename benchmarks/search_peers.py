"""Run other tuners on recorded spaces, for `benchmarks/search_quality.py --runs FILE`.

    python benchmarks/search_peers.py --spaces DIR --runs FILE --peers kernel_tuner:adaptive_tabu_greywolf smac

Needs kernel_tuner (its constraint-aware strategies begin with 1.5), smac, or both, and not evoengine itself, whose
environment need not hold them. Counting is as there: a configuration costs one trial, a failed one too, a repeated one
none. Kernel Tuner is given the recorded configurations as its restrictions. SMAC knows of no restrictions here: one
that is not recorded gets the slowest time and counts as no trial.
"""

from __future__ import annotations

import argparse
import gzip
import json
import logging
import math
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

Evaluate = Callable[[tuple[Any, ...]], float | None]
FAILED_FACTOR = 10.0
"""times the slowest time: the value of a failed configuration for a peer that takes numbers alone"""
MOST_PROPOSALS = 40
"""proposals per trial after which a run ends early"""


class Exhausted(Exception):
    """The budget is used up."""


class Space:
    def __init__(self, path: Path) -> None:
        packed = path.read_bytes()
        text = (gzip.decompress(packed) if path.suffix == ".gz" else packed).decode().rstrip().rstrip(",")
        for closing in ("", "}", "}}"):
            try:
                content = json.loads(text + closing)
                break
            except json.JSONDecodeError:
                continue
        self.name = path.name.split(".json")[0]
        self.knobs: dict[str, list[Any]] = {k: content["tune_params"][k] for k in content["tune_params_keys"]}
        self.times: dict[tuple[Any, ...], float] = {}
        for entry in content["cache"].values():
            time_ms = entry["time"]
            good = isinstance(time_ms, int | float) and 0 < time_ms < 1e20
            self.times[tuple(entry[k] for k in self.knobs)] = float(time_ms) if good else math.nan
        ran = [t for t in self.times.values() if t == t]
        self.optimum, self.slowest = min(ran), max(ran)


class Counter:
    """Counts unique recorded configurations and keeps the best so far."""

    def __init__(self, space: Space, budget: int) -> None:
        self.space, self.budget = space, budget
        self.curve: list[float] = []
        self.proposals = 0
        self._seen: set[tuple[Any, ...]] = set()
        self._best = math.inf

    def evaluate(self, config: tuple[Any, ...]) -> float:
        """Return the time in ms, NaN of a failure. Raises Exhausted once the budget is used up."""
        self.proposals += 1
        found = self.space.times.get(config, math.nan)
        if config in self.space.times and config not in self._seen:
            if len(self.curve) >= self.budget:
                raise Exhausted
            self._seen.add(config)
            self._best = min(self._best, found if found == found else math.inf)
            self.curve.append(self._best / self.space.optimum)
        if len(self.curve) >= self.budget or self.proposals > MOST_PROPOSALS * self.budget:
            raise Exhausted
        return found


def kernel_tuner(strategy: str, counter: Counter, seed: int) -> None:
    """Run a strategy of Kernel Tuner with its defaults until the budget is used up."""
    import random
    from importlib import import_module

    import numpy as np
    from kernel_tuner.searchspace import Searchspace

    random.seed(seed)
    np.random.seed(seed)
    module = import_module(f"kernel_tuner.strategies.{STRATEGY_MODULES.get(strategy, strategy)}")
    space = counter.space
    cache = {",".join(map(str, config)): dict(zip(space.knobs, config, strict=True)) for config in space.times}
    searchspace = Searchspace(None, None, None, from_cache={"tune_params": space.knobs, "cache": cache})
    while True:  # a strategy that ends before the budget begins again
        try:
            module.tune(searchspace, Runner(counter), _options())
        except Exhausted:
            return


STRATEGY_MODULES = {"adaptive_tabu_greywolf": "gen_adaptive_tabu_greywolf", "hybrid_vndx": "gen_hybrid_vndx"}


class Runner:
    """Stands in for Kernel Tuner's runner: a strategy hands it configurations, it looks their times up."""

    def __init__(self, counter: Counter) -> None:
        self._counter = counter
        self.dev = SimpleNamespace(max_threads=1024)
        self.kernel_source = SimpleNamespace()

    def add_strategy_time(self, seconds: float) -> None:
        """Ignore the time that a strategy took."""

    def run(self, configs: Sequence[Any], tuning_options: Any) -> list[dict[str, Any]]:
        return [self._result(tuple(config)) for config in configs]

    def _result(self, config: tuple[Any, ...]) -> dict[str, Any]:
        from kernel_tuner.util import RuntimeFailedConfig

        ms = self._counter.evaluate(config)
        found = {**dict(zip(self._counter.space.knobs, config, strict=True)), "time": ms}
        return found if ms == ms else found | {"time": None, "__error__": RuntimeFailedConfig()}


def _options() -> Any:
    from kernel_tuner.interface import Options

    never = SimpleNamespace(
        raise_exception_if_done=lambda: None, is_done=lambda: False, get_fraction_consumed=lambda: 0.0
    )
    return Options(
        strategy_options=Options(max_fevals=10**9), objective=["time"], objective_higher_is_better=[False],
        verbose=False, budget=never, max_fevals=10**9, time_limit=1e9, eps=1e-3,
    )  # fmt: skip


def smac(counter: Counter, seed: int) -> None:
    from ConfigSpace import Categorical, ConfigurationSpace
    from smac import HyperparameterOptimizationFacade, Scenario

    space = counter.space
    hyper = ConfigurationSpace(seed=seed)
    hyper.add([Categorical(k, values, ordered=len(values) > 2) for k, values in space.knobs.items()])

    def cost(config: Any, seed: int = 0) -> float:
        ms = counter.evaluate(tuple(_plain(config[k]) for k in space.knobs))
        return math.log(ms if ms == ms else FAILED_FACTOR * space.slowest)

    logging.disable(logging.WARNING)
    scenario = Scenario(hyper, deterministic=True, n_trials=MOST_PROPOSALS * counter.budget, seed=seed)
    facade = HyperparameterOptimizationFacade(scenario, cost, overwrite=True, logging_level=50)
    while True:
        info = facade.ask()
        try:
            value = cost(info.config)
        except Exhausted:
            return
        from smac.runhistory.dataclasses import TrialValue

        facade.tell(info, TrialValue(cost=value))


def _plain(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else value


@cache
def read(path: Path) -> Space:
    return Space(path)


def run(path: Path, peer: str, seed: int, budget: int) -> dict[str, Any]:
    counter, begun = Counter(read(path), budget), time.process_time()
    tuner, _, strategy = peer.partition(":")
    if tuner == "smac":
        smac(counter, seed)
    else:
        kernel_tuner(strategy, counter, seed)
    ms = 1e3 * (time.process_time() - begun) / max(1, len(counter.curve))
    if len(counter.curve) < budget:
        print(f"{counter.space.name} {peer} {seed}: ended after {len(counter.curve)} trials", file=sys.stderr)
    return {
        "space": counter.space.name, "sampler": peer, "seed": seed, "curve": counter.curve,
        "proposals": counter.proposals, "ms": ms,
    }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--spaces", type=Path, required=True, metavar="DIR", help="folder of recorded spaces")
    parser.add_argument("--runs", type=Path, required=True, metavar="FILE", help="runs are added here, none twice")
    parser.add_argument("--peers", nargs="+", default=["kernel_tuner:adaptive_tabu_greywolf", "smac"])
    parser.add_argument("--seeds", type=int, default=60)
    parser.add_argument("--budget", type=int, default=200)
    options = parser.parse_args(arguments)
    warnings.filterwarnings("ignore")
    lines = options.runs.read_text().splitlines() if options.runs.exists() else ()
    done = {(r["space"], r["sampler"], r["seed"]) for r in map(json.loads, lines)}
    paths = [p for p in sorted(options.spaces.glob("*.json*")) if not p.name.split(".json")[0].endswith(("_T1", "_T4"))]
    for peer in options.peers:
        for path in paths:
            for seed in range(options.seeds):
                if path.is_file() and (path.name.split(".json")[0], peer, seed) not in done:
                    with options.runs.open("a") as file:
                        file.write(json.dumps(run(path, peer, seed, options.budget)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
