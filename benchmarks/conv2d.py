"""Convolutions of ResNet-50's layers: predicted times of the implicit products, of the direct kernel and of the ideal.

    python benchmarks/conv2d.py [--gpus h100 a100 l4] [PROBLEM ...]

Each row is the fastest start point of all, and the times of the fastest by mma.sync and of the direct family. The ideal
does the products at the tensor cores' rate, or moves the bytes that no kernel can avoid, whatever takes longer.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from evoengine.gpu import find_gpu
from evoengine.paths import asset
from evoengine.records import CompiledCandidate
from evoengine.space.space import load_space
from evoengine.stages.compile import compile_source
from evoengine.stages.predict import predict_binary
from evoengine.stages.render import render
from evoengine.workloads import parse_problem
from evoengine.workloads.base import Target

PROBLEMS = tuple(
    f"conv2d:n32,{text},fp16"
    for text in (
        "c3,h224,w224,k64,r7,s7,stride2,pad3", "c64,h56,w56,k64,r3,s3,pad1", "c256,h56,w56,k64,r1,s1",
        "c128,h28,w28,k128,r3,s3,pad1", "c256,h56,w56,k512,r1,s1,stride2", "c256,h14,w14,k256,r3,s3,pad1",
        "c512,h7,w7,k512,r3,s3,pad1",
    )
)  # fmt: skip # a table
GPUS = ("h100", "a100", "l4")


def row(text: str, gpu: str) -> str:
    target = Target(*parse_problem(text), find_gpu(gpu))
    space = load_space(asset("search_spaces") / "conv2d.toml", target.problem, target.gpu)
    fastest: dict[str, tuple[float, str]] = {}
    for config in space.starts:
        source = render(target, space, config, asset("templates"))
        binary = compile_source(source, target.gpu.arch)
        found = predict_binary(target, CompiledCandidate(0, source, binary, config))
        shares = ", ".join(f"{name} {share:.0%}" for name, share in found.shares.items() if share > 0.4)
        tile = "x".join(str(config[name]) for name in ("tile_m", "tile_n", "tile_k") if name in config)
        family, known = str(config["family"]), f"{tile} | {shares}"
        fastest[family] = min(fastest.get(family, (found.time_us, known)), (found.time_us, known))
    ideal = max(target.flops / target.gpu.tensor_tflops / 1e6, target.min_dram_bytes / target.gpu.memory_gbs / 1e3)
    best = min(fastest, key=lambda family: fastest[family])
    (us, known), mma, direct = fastest[best], fastest["mma"][0], fastest["direct"][0]
    known = f"{best} {known} | {us:.1f} | {target.flops / us / 1e6:.0f} | {ideal / us:.2f}"
    return f"| {gpu} | {text} | {known} | {mma:.1f} | {direct:,.0f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("problems", nargs="*", default=PROBLEMS, metavar="PROBLEM")
    parser.add_argument("--gpus", nargs="+", default=GPUS, metavar="GPU")
    options = parser.parse_args()
    print("| GPU | problem | tile | bound | predicted, µs | TFLOPS | ideal ÷ predicted | mma, µs | direct, µs |")
    print("|---|---|---|---|---:|---:|---:|---:|---:|")
    for text in options.problems:
        for gpu in options.gpus:
            print(row(text, gpu), flush=True)


if __name__ == "__main__":
    main()
