"""Ways of the wgmma GEMM beside fast.cu's fastest kernel: predicted time and what a step of the main loop holds.

    python benchmarks/gemm_hopper.py [--fast-cu DIR]

Each row is a start point of search_spaces/gemm.toml with some knobs changed, compiled and predicted on an H100; DIR
holds fast.cu's examples/matmul at the commit that benchmarks/fast_cu.py names. Nothing is measured on a GPU.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import fast_cu  # noqa: E402
from evoengine.gpu import find_gpu  # noqa: E402
from evoengine.paths import asset  # noqa: E402
from evoengine.records import CompiledCandidate, Config, Value  # noqa: E402
from evoengine.sass.chip import find_chip  # noqa: E402
from evoengine.sass.main_loop import main_loops  # noqa: E402
from evoengine.sass.predict import Prediction, predict  # noqa: E402
from evoengine.space.space import load_space  # noqa: E402
from evoengine.stages.compile import compile_source, listing_of  # noqa: E402
from evoengine.stages.predict import predict_binary  # noqa: E402
from evoengine.stages.render import render  # noqa: E402
from evoengine.workloads import parse_problem  # noqa: E402
from evoengine.workloads.base import Target  # noqa: E402

GPU = "h100"
SQUARE, LARGE, FEW_ROWS = (
    f"gemm:{sizes},bf16" for sizes in ("m4096,n4096,k4096", "m8192,n8192,k8192", "m16,n4096,k4096")
)
Knobs = Mapping[str, Value | None]
PERSISTENT: Knobs = {"schedule": "persistent", "ping_pong": False}
SINGLE: Knobs = {"cluster": "1x1"}
IN_TURN: Knobs = {"schedule": "none", "ping_pong": None, "stream_steps": 0}
FEW: Knobs = {"swap": True}


@dataclass(frozen=True)
class Way:
    """A start point, the first that has these values, with others in their place; None takes a knob away."""

    name: str
    problem: str
    start: Knobs
    changes: Knobs


WAYS = (
    Way("persistent, pairs below one another", SQUARE, PERSISTENT, {}),
    Way("along a Hilbert curve", SQUARE, PERSISTENT, {"raster": "hilbert", "group_m": None}),
    Way("pairs beside one another", SQUARE, PERSISTENT, {"cluster": "1x2"}),
    Way("no clusters", SQUARE, PERSISTENT, SINGLE),
    Way("a tile for each block", SQUARE, PERSISTENT, IN_TURN),
    Way("C stored in words", SQUARE, PERSISTENT, {"c_store": "direct"}),
    Way(
        "C in words, a tile for each block, no clusters",
        SQUARE,
        PERSISTENT,
        {**IN_TURN, **SINGLE, "split_k": 1, "c_store": "direct"},
    ),
    Way("three stages", SQUARE, PERSISTENT, {"stages": 3}),
    Way("192 columns", SQUARE, PERSISTENT, {"tile_n": 192}),
    Way("ping-pong", SQUARE, {"ping_pong": True}, {}),
    Way("persistent, pairs below one another", LARGE, PERSISTENT, {}),
    Way("operands exchanged", FEW_ROWS, FEW, {}),
    Way("operands exchanged, twelve stages", FEW_ROWS, FEW, {"stages": 12}),
    Way("two blocks share the steps", FEW_ROWS, FEW, {"split_k": 2, "stream_steps": None, "producer_registers": 24}),
)


def configuration(way: Way) -> Config:
    """Return the knobs of a way, whether the space admits them or not: stages may be more than it has."""
    _, problem = parse_problem(way.problem)
    starts = load_space(asset("search_spaces") / "gemm.toml", problem, find_gpu(GPU)).starts
    found = next(start for start in starts if way.start.items() <= start.items())
    return {name: value for name, value in {**found, **way.changes}.items() if value is not None}


def row(way: Way) -> str:
    workload, problem = parse_problem(way.problem)
    target = Target(workload, problem, find_gpu(GPU))
    config = configuration(way)
    space = load_space(asset("search_spaces") / "gemm.toml", problem, target.gpu)
    source = render(target, space, config, asset("templates"))
    binary = compile_source(source, target.gpu.arch)
    candidate = CompiledCandidate(0, source, binary, config)
    (loop,) = main_loops(listing_of(binary), source.entry)
    step = f"{len(loop.path)} | {loop.count('HGMMA')} | {loop.count('R2UR')} | {binary.spill_bytes}"
    return _line(way.problem, way.name, target.flops, predict_binary(target, candidate), step)


def rows_of_fast_cu(folder: Path) -> Iterator[str]:
    for size in (4096, 8192):
        program, launch = fast_cu.launch(folder / "matmul_11.cuh", 11, size)
        flops = 2.0 * size**3
        found = predict(program, launch, find_chip(GPU), flops, 6.0 * size * size)
        yield _line(f"gemm:m{size},n{size},k{size},bf16", "fast.cu's kernel 11", flops, found, "| | | ")


def _line(problem: str, name: str, flops: float, found: Prediction, step: str) -> str:
    tensor, dram = (f"{found.shares.get(pipe, 0.0):.0%}" for pipe in ("tensor", "dram"))
    tflops = flops / found.time_us / 1e6
    return f"| {problem} | {name} | {found.time_us:.1f} | {tflops:.0f} | {tensor} | {dram} | {step} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fast-cu", type=Path, help="fast.cu's examples/matmul")
    options = parser.parse_args()
    print("| problem | kernel | predicted, µs | TFLOPS | tensor | DRAM | step | HGMMA | R2UR | spilled |")
    print("|---|---|---:|---:|---:|---:|---:|---:|---:|---:|")
    for line in rows_of_fast_cu(options.fast_cu) if options.fast_cu else ():
        print(line, flush=True)
    for way in WAYS:
        print(row(way), flush=True)


if __name__ == "__main__":
    main()
