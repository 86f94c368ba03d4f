"""Products by weights of 4 bits: predicted times of some configurations, beside a copy of their bytes.

    python benchmarks/w4a16.py

Each row is a configuration of search_spaces/w4a16.toml, compiled and predicted on an H100 with a cold L2. Nothing is
measured on a GPU.
"""

from __future__ import annotations

import sys
from pathlib import Path

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

GPU, COPY_GBS = "h100", 2760.0
"""the rate of a large copy, as benchmarks/notes/decode.md has it"""
DECODE, WIDE, MIDDLE = (f"w4a16:{sizes},k4096,fp16,zeros" for sizes in ("m16,n4096", "m16,n11008", "m256,n4096"))
LARGE, PREFILL = "w4a16:m16,n28672,k8192,fp16,zeros", "w4a16:m4096,n4096,k4096,fp16,zeros"


def few(split_k: int, stream_steps: int = 0, tile_k: int = 128, stages: int = 4) -> Config:
    return _configuration((16, 128, tile_k), (4, 4), stages, split_k, stream_steps, 1)


def many(tile: tuple[int, int], warps: tuple[int, int], split_k: int = 1, stream_steps: int = 0) -> Config:
    return _configuration((*tile, 64), warps, 3, split_k, stream_steps, 8 if split_k == 1 and not stream_steps else 1)


def _configuration(
    tile: tuple[int, int, int], warps: tuple[int, int], stages: int, split_k: int, stream_steps: int, group_m: int
) -> Config:
    tiles = dict(zip(("tile_m", "tile_n", "tile_k"), tile, strict=True))
    shared = {"split_k": split_k} | ({"stream_steps": stream_steps} if split_k == 1 else {})
    of_warps = {"warps": warps[0], "warps_n": warps[1]}
    return {"family": "mma", **tiles, **of_warps, "stages": stages, **shared, "group_m": group_m, "min_blocks": 1}


ROWS = (
    *((DECODE, config) for config in (few(1), few(4), few(8, tile_k=64, stages=5), few(1, 8))),
    *((WIDE, config) for config in (few(1), few(2), few(4), few(1, 20))),
    *((LARGE, config) for config in (few(1), few(4))),
    *((MIDDLE, many((128, 128), (4, 2), *shared)) for shared in ((1, 0), (4, 0), (1, 16))),
    *((MIDDLE, many((64, 128), (4, 4), *shared)) for shared in ((1, 0), (2, 0), (1, 32))),
    *((PREFILL, many(*of)) for of in (((128, 128), (4, 2)), ((128, 256), (8, 4)))),
)


def row(text: str, config: Config) -> str:
    workload, problem = parse_problem(text)
    target = Target(workload, problem, find_gpu(GPU))
    space = load_space(asset("search_spaces") / "w4a16.toml", problem, target.gpu)
    source = render(target, space, config, asset("templates"))
    binary = compile_source(source, target.gpu.arch)
    found = predict_binary(target, CompiledCandidate(0, source, binary, config))
    copy = target.min_dram_bytes / COPY_GBS / 1e3 / found.time_us
    tensor, dram = (f"{found.shares.get(pipe, 0.0):.0%}" for pipe in ("tensor", "dram"))
    tile = "x".join(str(config[name]) for name in ("tile_m", "tile_n", "tile_k"))
    shared = f"split_k {config['split_k']}" if int(config["split_k"]) > 1 else f"stream {config['stream_steps']}"
    times = f"{found.time_us:.1f} | {target.flops / found.time_us / 1e6:.0f} | {copy:.2f} | {tensor} | {dram}"
    return f"| {text} | {tile} | {shared} | {times} | {binary.registers} | {binary.spill_bytes} |"


def main() -> None:
    print(
        "| problem | tile | steps shared | predicted, µs | TFLOPS | of a copy | tensor | DRAM | registers | spilled |"
    )
    print("|---|---|---|---:|---:|---:|---:|---:|---:|---:|")
    for text, config in ROWS:
        print(row(text, config), flush=True)


if __name__ == "__main__":
    main()
