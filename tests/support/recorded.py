"""A cache file of another tuner."""

from __future__ import annotations

import itertools
import json


def cache(path, paddings=2):
    """A Kernel Tuner cache of 12 configurations for each padding, one of which did not compile."""
    domains = {"block": [32, 64, 128, 256], "tile": [1, 2, 4], "padding": [*range(paddings)]}
    entries = {}
    for block, tile, padding in itertools.product(*domains.values()):
        time = 1.0 + abs(block - 128) / 64 + (4 - tile) + 0.1 * padding
        failed = (block, tile) == (256, 4)
        entries[f"{block},{tile},{padding}"] = {
            "block": block, "tile": tile, "padding": padding,
            "time": "CompilationFailedConfig" if failed else time, "times": [time], "GFLOP/s": 1.0 / time,
        }  # fmt: skip
    content = {
        "device_name": "TEST GPU", "kernel_name": "test", "problem_size": 1, "tune_params_keys": list(domains),
        "tune_params": domains, "objective": "time", "cache": entries,
    }  # fmt: skip
    path.write_text(json.dumps(content))
    return path
