"""FP8 products with scales of 128 beside DeepGEMM's kernel: both compiled, both predicted by the same model.

    python benchmarks/deep_gemm.py --deep-gemm DIR --cutlass DIR [--nvcc nvcc] [--grouped]

The folders hold DeepGEMM's deep_gemm/include (MIT, commit 54e2261) and CUTLASS's include. Its kernel is instantiated as
its host code does for a layout (csrc/jit_kernels/heuristics/sm90.hpp), each of LAYOUTS. Ours are CONFIGURATIONS. With
--rows FOLDER its kernels become rows for measured_h100.py --from, and with
--grouped it is DeepGEMM's contiguous layout of groups, whose sizes are multiples of 128 with an index for each row, and
ours of the same sizes.
Nothing is measured on a GPU; PUBLISHED has the rows of DeepGEMM's first README (commit a6d97a1, H800).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from evoengine.devices.base import ScalarArgument, TensorMapArgument  # noqa: E402
from evoengine.errors import UsageError  # noqa: E402
from evoengine.gpu import find_gpu  # noqa: E402
from evoengine.paths import asset  # noqa: E402
from evoengine.records import CompiledCandidate, Config  # noqa: E402
from evoengine.sass.chip import find_chip  # noqa: E402
from evoengine.sass.core import Program  # noqa: E402
from evoengine.sass.cubin import kernel_names, read_kernel  # noqa: E402
from evoengine.sass.launch import DrawnArgument, Geometry, Launch, prepare  # noqa: E402
from evoengine.sass.listing import disassemble  # noqa: E402
from evoengine.sass.predict import Prediction, Unpredictable, predict  # noqa: E402
from evoengine.space.space import SearchSpace, load_space  # noqa: E402
from evoengine.stages.compile import compile_source  # noqa: E402
from evoengine.stages.predict import predict_binary  # noqa: E402
from evoengine.stages.render import render  # noqa: E402
from evoengine.workloads import parse_problem  # noqa: E402
from evoengine.workloads.base import Target  # noqa: E402

GPU, ARCH = "h100", "sm_90a"
DEPTH = 128
PUBLISHED = {(4096, 4096, 7168): 1304, (4096, 7168, 16384): 1358, (4096, 7168, 2048): 1025, (128, 4096, 7168): 533}
"""TFLOPS on an H800"""
PUBLISHED_GROUPS = {
    (4096, 4096, 7168, 8): 1288, (4096, 7168, 2048, 8): 1093,
    (8192, 4096, 7168, 4): 1297, (8192, 7168, 2048, 4): 1099,
}  # fmt: skip # a table
"""the same of the contiguous layout, by rows of each group, n, k and groups"""
SHARED = 232448


@dataclass(frozen=True, slots=True)
class Layout:
    rows: int
    columns: int
    multicast_a: bool = True
    """whether the two blocks of a cluster lie beside one another, and share rows of A"""


LAYOUTS = (
    Layout(128, 128), Layout(128, 128, multicast_a=False), Layout(128, 160), Layout(256, 128), Layout(64, 128),
    Layout(64, 64),
)  # fmt: skip # a table
PERSISTENT: Config = {
    "family": "wgmma", "tile_m": 128, "tile_n": 128, "tile_k": 128, "consumers": 2, "swap": False, "stages": 5,
    "raster": "groups", "group_m": 8, "schedule": "persistent", "ping_pong": False, "cluster": "2x1", "c_store": "tma",
    "producer_registers": 40, "min_blocks": 1,
}  # fmt: skip # a table
TALL: Config = {**PERSISTENT, "tile_m": 256, "stages": 3, "cluster": "1x2"}
SMALL: Config = {
    **{name: value for name, value in PERSISTENT.items() if name != "ping_pong"},
    "tile_m": 64, "tile_n": 64, "consumers": 1, "stages": 8, "group_m": 1, "schedule": "none",
    "cluster": "2x1", "stream_steps": 0, "producer_registers": 24,
}  # fmt: skip # a table
CONFIGURATIONS: tuple[Config, ...] = (TALL, {**TALL, "cluster": "2x1"}, {**TALL, "stages": 4}, PERSISTENT)


@dataclass(frozen=True, slots=True)
class Shape:
    m: int
    """rows of each group"""
    n: int
    k: int
    groups: int = 0
    """0 for an ordinary product"""

    @property
    def rows(self) -> int:
        return self.m * max(1, self.groups)

    def __str__(self) -> str:
        groups = f"{self.groups} groups of " if self.groups else ""
        return f"{groups}m{self.m} n{self.n} k{self.k}"


def instance(layout: Layout, shape: Shape, stages: int) -> str:
    n, k, groups = shape.n, shape.k, shape.groups
    threads = 128 if layout.rows <= 64 else 256
    return f"""#include <deep_gemm/impls/sm90_fp8_gemm_1d2d.cuh>
using namespace deep_gemm;
static void instantiate() {{
    auto kernel = reinterpret_cast<void*>(&sm90_fp8_gemm_1d2d_impl<
        cute::UMMA::Major::K, 0, {n}, {k}, {max(1, groups)}, {layout.rows}, {layout.columns}, {DEPTH}, 128, 128,
        {128 if layout.columns % 64 == 0 else 64}, {stages}, 128, {threads}, 2, {str(layout.multicast_a).lower()}, 132,
        GemmType::{"MGroupedContiguous" if groups else "Normal"}, cutlass::bfloat16_t,
        epilogue::transform::EpilogueIdentity>);
}}
"""


def stages_and_bytes(layout: Layout, k: int) -> tuple[int, int]:
    """Return the buffers and the bytes of shared memory, as get_pipeline_config computes them."""
    factors = 4 * -(-k // DEPTH) * (1 if DEPTH % layout.columns == 0 else 2)
    extra = -(-2 * layout.rows * layout.columns // 1024) * 1024 + 256 + -(-factors // 8) * 8
    each = DEPTH * (layout.rows + layout.columns) + -(-4 * layout.rows // 128) * 128
    stages = min((SHARED - extra) // each, 16)
    return stages, extra + stages * each


def compiled(text: str, options: argparse.Namespace) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        source, cubin = Path(folder) / "kernel.cu", Path(folder) / "kernel.cubin"
        source.write_text(text)
        flags = ("-std=c++20", f"-arch={ARCH}", "-O3", "--expt-relaxed-constexpr", "--expt-extended-lambda", "-cubin")
        includes = (f"-I{options.deep_gemm}/deep_gemm/include", f"-I{options.cutlass}/include")
        done = subprocess.run(
            [options.nvcc, *flags, *includes, source, "-o", cubin], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise UsageError(f"nvcc cannot compile DeepGEMM's kernel: {done.stderr.strip().splitlines()[0]}")
        return cubin.read_bytes()


def geometry_of(layout: Layout, shape: Shape) -> Geometry:
    threads = 256 if layout.rows <= 64 else 384
    return Geometry((132, 1, 1), (threads, 1, 1), stages_and_bytes(layout, shape.k)[1], (2, 1, 1))


def launch_of(cubin: bytes, layout: Layout, shape: Shape) -> tuple[Program, Launch]:
    m, n, k, entries = shape.rows, shape.n, shape.k, max(1, shape.groups)
    entry = kernel_names(cubin)[0]
    program, kernel = Program(disassemble(cubin), entry), read_kernel(cubin, entry)
    blocks = -(-k // DEPTH)
    a, b = DrawnArgument("A", m * k, "uint8"), DrawnArgument("B", entries * n * k, "uint8")
    c = DrawnArgument("C", 2 * m * n, "bf16", output=True)
    of_a, of_b = (
        DrawnArgument("SA", 4 * m * blocks, "fp32"),
        DrawnArgument("SB", 4 * entries * -(-n // DEPTH) * blocks, "fp32"),
    )
    swizzle = 128 if layout.columns % 64 == 0 else 64
    maps = [
        TensorMapArgument("map_a", "A", "uint8", (k, m), (k,), (DEPTH, layout.rows), 128),
        TensorMapArgument("map_b", "B", "uint8", (k, entries * n), (k,), (DEPTH, layout.columns), 128),
        TensorMapArgument("map_d", "C", "bf16", (n, m), (2 * n,), (swizzle // 2, layout.rows), swizzle),
        TensorMapArgument("map_sa", "SA", "fp32", (m, blocks), (4 * m,), (layout.rows, 1), 0),
    ]
    sizes = [ScalarArgument(name, np.int32(size)) for name, size in (("m", m), ("n", n), ("k", k))]
    owners = np.repeat(np.arange(entries, dtype=np.int32), shape.m)
    layout_of_groups = DrawnArgument("groups", owners.nbytes, "int32", contents=owners.view(np.uint8))
    return program, prepare(
        kernel, geometry_of(layout, shape), [of_b, layout_of_groups, *sizes, *maps], 0, mapped=[a, b, c, of_a]
    )


def traffic(shape: Shape) -> float:
    return float(shape.rows * shape.k + max(1, shape.groups) * shape.n * shape.k + 2 * shape.rows * shape.n)


def predicted(options: argparse.Namespace, layout: Layout, shape: Shape) -> Prediction:
    stages, _ = stages_and_bytes(layout, shape.k)
    program, launch = launch_of(compiled(instance(layout, shape, stages), options), layout, shape)
    return predict(program, launch, find_chip(GPU), 2.0 * shape.rows * shape.n * shape.k, traffic(shape))


def write_rows(options: argparse.Namespace, layouts: Sequence[Layout], shapes: Sequence[Shape]) -> None:
    """Append DeepGEMM's kernels to a folder of measured_h100.py --prepare."""
    from benchmarks.measured_kernels import Made, keep, make_folder, row_of

    make_folder(options.rows)
    with (options.rows / "rows.jsonl").open("a") as file:
        for shape, layout in product(shapes, layouts):
            stages, _ = stages_and_bytes(layout, shape.k)
            cubin = compiled(instance(layout, shape, stages), options)
            program, launch = launch_of(cubin, layout, shape)
            made = Made(kernel_names(cubin)[0], program, launch, geometry_of(layout, shape))
            shared = "A" if layout.multicast_a else "B"
            named = "DeepGEMM", str(shape), f"{layout.rows} × {layout.columns}, multicast of {shared}"
            row = row_of(named, cubin, [made], 2.0 * shape.rows * shape.n * shape.k, traffic(shape), policies=("cold",))
            keep(options.rows, row, cubin, None, "")
            print(json.dumps(row, ensure_ascii=False), file=file, flush=True)
            print(named, row["predicted"]["cold"]["us"], flush=True)


def ours(config: Config, shape: Shape) -> Prediction | None:
    """Return the prediction of a configuration; None where the space does not admit it."""
    rows = f"grouped-gemm:rows={shape.groups}x{shape.m}" if shape.groups else f"gemm:m{shape.m}"
    workload, problem = parse_problem(f"{rows},n{shape.n},k{shape.k},fp8_e4m3,b_nk,block_scales")
    target = Target(workload, problem, find_gpu(GPU))
    space = load_space(asset("search_spaces") / f"{workload.name}.toml", problem, target.gpu)
    config = known_knobs(config, space)
    if not space.contains(config):
        return None
    source = render(target, space, config, asset("templates"))
    return predict_binary(target, CompiledCandidate(0, source, compile_source(source, target.gpu.arch), config))


def known_knobs(config: Config, space: SearchSpace) -> Config:
    """Return the part of a configuration that the space has: groups are walked in one order, and not by ping-pong."""
    names = {knob.name for knob in space.knobs}
    return {name: value for name, value in config.items() if name in names}


def line(shape: Shape, name: str, found: Prediction) -> str:
    tflops = 2.0 * shape.rows * shape.n * shape.k / found.time_us / 1e6
    tensor, dram = (f"{found.shares.get(pipe, 0.0):.0%}" for pipe in ("tensor", "dram"))
    return f"| {shape} | {name} | {found.time_us:.1f} | {tflops:.0f} | {tensor} | {dram} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deep-gemm", type=Path, required=True)
    parser.add_argument("--cutlass", type=Path, required=True)
    parser.add_argument("--nvcc", default="nvcc")
    parser.add_argument("--shapes", type=int, default=len(PUBLISHED), help="how many of the published shapes")
    parser.add_argument("--rows", type=Path, metavar="FOLDER")
    parser.add_argument("--grouped", action="store_true")
    options = parser.parse_args()
    published = PUBLISHED_GROUPS if options.grouped else PUBLISHED
    layouts = [layout for layout in LAYOUTS if layout.rows == DEPTH or not options.grouped]
    if options.rows:
        shapes = [Shape(*sizes) for sizes in list(published)[: options.shapes]]
        return write_rows(options, layouts, shapes)
    print("| problem | kernel | predicted, µs | TFLOPS | tensor | DRAM |")
    print("|---|---|---:|---:|---:|---:|")
    for sizes, tflops in list(published.items())[: options.shapes]:
        shape = Shape(*sizes)
        time_us = 2.0 * shape.rows * shape.n * shape.k / tflops / 1e6
        print(f"| {shape} | published, H800 | {time_us:.1f} | {tflops} | | |", flush=True)
        for layout in layouts:
            shared = "A" if layout.multicast_a else "B"
            name = f"DeepGEMM {layout.rows} × {layout.columns}, multicast of {shared}"
            try:
                print(line(shape, name, predicted(options, layout, shape)), flush=True)
            except Unpredictable as reason:
                print(f"| {shape} | {name} | not predicted: {reason} | | | |", flush=True)
        for config in (*CONFIGURATIONS, SMALL):
            if found := ours(config, shape):
                said = ", ".join(f"{name} {config[name]}" for name in ("tile_m", "cluster", "stages"))
                print(line(shape, f"ours: {said}", found), flush=True)


if __name__ == "__main__":
    main()
