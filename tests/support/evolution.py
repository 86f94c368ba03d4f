"""A small space with conditional knobs, a known optimum, and searches of it."""

from __future__ import annotations

import numpy as np
import optuna

from evoengine.search.samplers.evolution import EvolutionSampler
from evoengine.space.space import SearchSpace
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


def suggest(trial: optuna.Trial, space: SearchSpace) -> dict:
    config: dict = {}
    for knob in space.knobs:
        if space.is_active(knob, config):
            config[knob.name] = trial.suggest_categorical(knob.name, knob.values)
    return config


def search(space: SearchSpace, seed: int, trials: int, sampler=None, value=speed) -> optuna.Study:
    sampler = sampler or EvolutionSampler(seed, space)
    study = optuna.create_study(direction="maximize", sampler=sampler)
    for _ in range(trials):
        trial = study.ask()
        study.tell(trial, value(suggest(trial, space)))
    return study
