"""Operators on rows at shapes of real models: the fastest start point, predicted on an H100, beside a copy.

    python benchmarks/rowwise.py [--all] [PROBLEM ...]

GB/s are of the bytes that no kernel can avoid; a copy of 512 MB was measured at 2,760 GB/s on that board, reads and
writes together. The cold L2 of the prediction is that of a first launch. Nothing is measured on a GPU here.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from evoengine.gpu import find_gpu  # noqa: E402
from evoengine.paths import asset  # noqa: E402
from evoengine.records import CompiledCandidate, Config  # noqa: E402
from evoengine.space.space import load_space  # noqa: E402
from evoengine.stages.compile import compile_source  # noqa: E402
from evoengine.stages.predict import predict_binary  # noqa: E402
from evoengine.stages.render import render  # noqa: E402
from evoengine.workloads import parse_problem  # noqa: E402
from evoengine.workloads.base import Target  # noqa: E402

COPY_GBS = 2760
PROBLEMS = tuple(
    f"rowwise:{text},bf16"
    for text in (
        "layer_norm,rows8192,hidden4096", "layer_norm,rows4096,hidden14336", "rms_norm,rows8192,hidden4096",
        "rms_norm,rows4096,hidden14336", "softmax,rows8192,hidden4096", "softmax,rows4096,hidden14336",
        "softmax,rows4096,hidden65536", "cross_entropy,rows4096,hidden32000", "cross_entropy,rows4096,hidden128256",
        "rope,rows8192,hidden4096,d128", "silu_mul,rows8192,hidden4096", "silu_mul,rows4096,hidden14336",
    )
)  # fmt: skip # a table


class Found(NamedTuple):
    time_us: float
    config: Config
    spilled: int
    bounds: str


def fastest(target: Target, every: bool) -> list[Found]:
    """Return the start points with their predicted times, the fastest first."""
    space = load_space(asset("search_spaces") / f"{target.workload.name}.toml", target.problem, target.gpu)
    found = []
    for config in space.starts:
        source = render(target, space, config, asset("templates"))
        binary = compile_source(source, target.gpu.arch)
        predicted = predict_binary(target, CompiledCandidate(0, source, binary, config))
        shares = ", ".join(f"{name} {share:.0%}" for name, share in predicted.shares.items() if share > 0.3)
        found.append(Found(predicted.time_us, config, binary.spill_bytes, shares))
    return sorted(found, key=lambda one: one.time_us)[: None if every else 1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("problems", nargs="*", default=PROBLEMS, metavar="PROBLEM")
    parser.add_argument("--all", action="store_true", help="every start point, not the fastest alone")
    options = parser.parse_args()
    print("| problem | start point | predicted, µs | GB/s | of a copy | bound | spilled |")
    print("|---|---|---:|---:|---:|---|---:|")
    for text in options.problems:
        target = Target(*parse_problem(text), find_gpu("h100"))
        for one in fastest(target, options.all):
            gbs = target.min_dram_bytes / one.time_us / 1e3
            knobs = " ".join(f"{name}={value}" for name, value in one.config.items())
            cells = f"{one.time_us:.1f} | {gbs:,.0f} | {gbs / COPY_GBS:.0%} | {one.bounds} | {one.spilled}"
            print(f"| {text} | {knobs} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
