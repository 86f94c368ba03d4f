"""Start points from the best of neighbouring problems and GPUs."""

from __future__ import annotations

from evoengine.ledger.store import Ledger
from evoengine.records import Config, config_key
from evoengine.search.nearness import nearest_first
from evoengine.search.setting import Setting

NEIGHBOURS = 4
"""number of problems and GPUs of earlier runs whose best kernels are tried"""
RANKS = 100
"""ranks of each that are searched for a configuration that is valid here"""


def neighbouring_bests(ledger: Ledger, setting: Setting) -> list[Config]:
    """Return the best valid configurations of the nearest other problems and GPUs, without start points.

    Among equally near ones the latest comes first.
    """
    here = (str(setting.target.problem), setting.target.gpu.key)
    others = dict.fromkeys((r.problem, r.gpu) for r in reversed(ledger.runs()) if (r.problem, r.gpu) != here)
    found: dict[str, Config] = {}
    for problem, gpu in nearest_first(here[0], setting.target.gpu, others)[:NEIGHBOURS]:
        ranked = (c.config for c in ledger.best(problem, gpu, top=RANKS))
        config = next((c for c in ranked if setting.space.contains(c)), None)
        if config is not None and config not in setting.space.starts:
            found[config_key(config)] = config
    return list(found.values())
