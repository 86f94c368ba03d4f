"""Products by weights of 4 bits: predicted times of some configurations, beside a copy of their bytes.

    python benchmarks/w4a16.py                  predicted: each row for an H100 with a cold L2
    python benchmarks/w4a16.py --prepare DIR    the rows, and gemm's beside them, for measured_h100.py --from DIR
    python benchmarks/w4a16.py --report         measured: what results/ has, with the predictions frozen before

Each row is a configuration of search_spaces/w4a16.toml.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.measured_bench import TOOLS  # noqa: E402
from benchmarks.measured_kernels import own, write_tools  # noqa: E402
from evoengine.gpu import find_gpu  # noqa: E402
from evoengine.paths import asset  # noqa: E402
from evoengine.records import CompiledCandidate, Config  # noqa: E402
from evoengine.space.space import load_space  # noqa: E402
from evoengine.stages.compile import compile_source  # noqa: E402
from evoengine.stages.predict import predict_binary  # noqa: E402
from evoengine.stages.render import render  # noqa: E402
from evoengine.workloads import parse_problem  # noqa: E402
from evoengine.workloads.base import Target  # noqa: E402

MEASURED = ROOT / "benchmarks" / "results" / "h100-w4a16-2026-11-26.json.gz"
FAMILIES = ("mma", "wgmma")
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


def prepare(folder: Path) -> None:
    for kind in ("cubins", "sources"):
        (folder / kind).mkdir(parents=True, exist_ok=True)
    write_tools(folder, TOOLS)
    beside = [
        (f"gemm:{sizes},fp16", family) for sizes in ("m16,n4096,k4096", "m4096,n4096,k4096") for family in FAMILIES
    ]
    with (folder / "rows.jsonl").open("w") as out:
        for text, config in (*ROWS, *((text, _start(text, family)) for text, family in beside)):
            print(json.dumps(own(text, config, folder)), file=out, flush=True)


def _start(text: str, family: str) -> Config:
    """Return gemm's first start point of a family, by wgmma of few rows that with operands exchanged."""
    _, problem = parse_problem(text)
    starts = load_space(asset("search_spaces") / "gemm.toml", problem, find_gpu(GPU)).starts
    swapped = family == "wgmma" and "m16," in text
    return next(c for c in starts if c["family"] == family and bool(c.get("swap")) == swapped)


def report() -> None:
    data = json.loads(gzip.decompress(MEASURED.read_bytes()))
    kernels = {kernel["id"]: kernel for kernel in data["kernels"]}
    torch = {one["problem"]: f"{one['cold_us']:.1f}" for one in data["torch"]}
    print("| problem | kernel | measured, µs | TFLOPS | of a copy | torch by 16 bits, µs | predicted before | error |")
    print("|---|---|---:|---:|---:|---:|---:|---:|")
    for row in sorted(data["rows"], key=lambda row: list(kernels).index(row["id"])):
        k, us = kernels[row["id"]], median(row["cold_us"])
        before = k["predicted"]["cold"]["us"]
        copy = k["dram_bytes"] / COPY_GBS / 1e3 / us
        figures = f"{us:.1f} | {k['flops'] / us / 1e6:.0f} | {copy:.2f} | {torch.get(k['problem'], '')}"
        names = " ".join(f"{k['config'][name]}" for name in ("tile_m", "tile_n", "tile_k"))
        shared = "".join(
            f", {name} {k['config'][name]}" for name in ("split_k", "stream_steps") if k["config"].get(name)
        )
        print(f"| {k['problem']} | {k['set']} {names}{shared} | {figures} | {before:.1f} | {before / us - 1:+.0%} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prepare", type=Path, metavar="DIR", help="write kernels and launches there")
    parser.add_argument("--report", action="store_true", help="show what was measured")
    options = parser.parse_args()
    if options.prepare:
        return prepare(options.prepare)
    if options.report:
        return report()
    print(
        "| problem | tile | steps shared | predicted, µs | TFLOPS | of a copy | tensor | DRAM | registers | spilled |"
    )
    print("|---|---|---|---:|---:|---:|---:|---:|---:|---:|")
    for text, config in ROWS:
        print(row(text, config), flush=True)
    return None


if __name__ == "__main__":
    main()
