"""Host time of evoengine.torch's operators beside an empty operator of torch, on a driver that does nothing. No GPU.

    python -m benchmarks.operators [--calls 20000]

The driver is that of benchmarks/loader.py, to which the CPU is GPU 0. An empty operator takes attention's arguments and
returns a tensor that is there already: what it costs is torch's way to any operator that is written in Python.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

import evoengine.torch as tuned
from benchmarks.loader import KERNELS, build_driver, load
from evoengine.torch import kernels, operators

EACH = 40
"""calls of a round, which end before another process takes the core"""


def empty_operator() -> Callable[..., torch.Tensor]:
    library = torch.library.Library("evoengine_benchmark", "DEF")
    library.define("empty(Tensor q, Tensor k, Tensor v, bool causal, float scale) -> Tensor")
    out = torch.empty(1)
    library.impl("empty", lambda q, k, v, causal, scale: out, "CPU")
    empty_operator.kept = library  # type: ignore[attr-defined] # the operator goes with it
    return torch.ops.evoengine_benchmark.empty.default


def measure(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Return the mean microseconds of each round of a call; the calls take turns."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            begun = time.perf_counter_ns()
            for _ in range(EACH):
                call()
            found[name].append((time.perf_counter_ns() - begun) / 1000 / EACH)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=20_000)
    options = parser.parse_args()
    q, k, v = (torch.empty(1, 8, 64, 64, dtype=torch.float16) for _ in range(3))
    with tempfile.TemporaryDirectory() as folder:
        driver = build_driver(Path(folder))
        module = load(KERNELS["no tensor maps"], Path(folder, "export"), driver)
        kernels.KERNELS.use(())
        empty, name = empty_operator(), "attention"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", tuned.NoKernel)
            tuned.attention(q, k, v)
        (key,) = kernels.KERNELS.chosen
        kernels.KERNELS.chosen[key] = module.attention
        calls = {
            "an empty operator": lambda: empty(q, k, v, False, 0.125),
            "the exported loader": lambda: module.attention(q, k, v, scale=0.125),
            "the operator": lambda: operators._attention(q, k, v, False, 0.125),
            f"evoengine.torch.{name}": lambda: tuned.attention(q, k, v),
        }
        found = measure(calls, max(options.calls // EACH, 1))
    table = Table(title="Host time per call on a driver that does nothing (CPU figures, no GPU took part)")
    for column in ("call", "fastest µs", "median µs", "µs above the empty operator", "µs above loader and empty"):
        table.add_column(column, justify="left" if column == "call" else "right")
    base = min(found["an empty operator"])
    for call, samples in found.items():
        best = min(samples)
        above = f"{best - base - min(found['the exported loader']):.1f}" if call.startswith(("the op", "evo")) else ""
        table.add_row(call, f"{best:.1f}", f"{statistics.median(samples):.1f}", f"{best - base:.1f}", above)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
