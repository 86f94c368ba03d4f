"""fast.cu's kernel 11 as a folder of somebody's own: gate and prediction of the unchanged device code, and mended.

    python -m benchmarks.own_hopper_kernels FOLDER [--texts DIR]

FOLDER holds examples/matmul/matmul_11.cuh of github.com/pranjalssh/fast.cu at 38eb642 (MIT). The host's part is left
out; the order of tiles that it computes is an input made by a function of the folder. --texts writes the device code
with each mend instead, for fast_cu_races.cu, which runs it on a GPU.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from inspect import getsource
from pathlib import Path

from benchmarks.fast_cu import _cell, hilbert_space
from evoengine.gpu import find_gpu
from evoengine.paths import asset
from evoengine.records import CompiledCandidate, Verdict
from evoengine.search.evaluators import make_plans
from evoengine.space.space import load_space
from evoengine.stages.compile import compile_source
from evoengine.stages.gate import executor, judge_whole
from evoengine.stages.predict import predict_binary
from evoengine.stages.render import render
from evoengine.workloads.base import Target
from evoengine.workloads.folder import load_folder

KERNEL = """#include <cuda.h>
#include <cuda_bf16.h>
#include <stdint.h>
#define assert(x) ((void)0)
typedef __nv_bfloat16 bf16;
#include "matmul_11.cuh"
template __global__ void M11::matmulKernel11<128, TILE_N, 64, 384, STAGES, 128, 2, 1>(
    int, int, int, const __grid_constant__ CUtensorMap, const __grid_constant__ CUtensorMap,
    const __grid_constant__ CUtensorMap, int*);
"""
ORDER = f"""import numpy as np

SPACE_LENGTH = 128


{getsource(hilbert_space)}

{getsource(_cell)}

def order(axes, knobs):
    return hilbert_space(axes["m"] // 256, axes["n"] // knobs["TILE_N"], 64)
"""
PROBLEM = {
    "name": "matmul11",
    "entry": "matmulKernel11",
    "description": "C = A · B, stored column by column",
    "axes": {axis: {"type": "var"} for axis in "mnk"},
    "inputs": {
        "a": {"shape": ["m", "k"], "dtype": "bfloat16"},
        "b": {"shape": ["n", "k"], "dtype": "bfloat16"},
        "space": {"shape": [64, 128], "dtype": "int32"},
    },
    "outputs": {"c": {"shape": ["n", "m"], "dtype": "bfloat16"}},
    "tensor_maps": {
        "map_a": {
            "tensor": "a",
            "dims": [64, "m", "k // 64"],
            "strides": ["2 * k", 128],
            "box": [64, 128, 1],
            "swizzle": 128,
        },
        "map_b": {
            "tensor": "b",
            "dims": [64, "n", "k // 64"],
            "strides": ["2 * k", 128],
            "box": [64, "TILE_N", 1],
            "swizzle": 128,
        },
        "map_c": {"tensor": "c", "dims": [64, "n", "m // 64"], "strides": ["2 * m", 128], "box": [64, "TILE_N", 2]},
    },
    "parameters": ["m", "n", "k", "map_c", "map_a", "map_b", "space"],
    "makers": "inputs.py",
    "reference": "def run(a, b, space):\n    return b @ a.T\n",
    "constraints": ["m % 256 == 0", "n % 256 == 0", "k % 64 == 0"],
    "flops": "2 * m * n * k",
    "workloads": [{"axes": dict.fromkeys("mnk", 4096), "inputs": {"space": {"type": "made", "by": "order"}}}],
}
SPACE = """kernel = "matmul11"
[knobs]
TILE_N = [128, 256]
STAGES = [2, 3]
[launch]
threads = 384
grid = [128, 1, 1]
shared = "round_up(STAGES * 128 * (128 + TILE_N) + 256 * TILE_N + 16 * STAGES + 512, 128)"
[[start]]
TILE_N = 256
STAGES = 3
"""
_BARRIER, _WAIT = 'asm volatile("bar.sync 1, 256;\\n");', 'asm volatile("cp.async.bulk.wait_group 0;");'
_CLUSTER = 'asm volatile("barrier.cluster.arrive;\\n" : :);\nasm volatile("barrier.cluster.wait;\\n" : :);\n'
MENDS = (
    ("no proxy fence", _BARRIER, f'asm volatile("fence.proxy.async.shared::cta;\\n" ::: "memory");\n{_BARRIER}'),
    ("one thread waits for the store", _WAIT, f"{_WAIT}\n{_BARRIER}"),
)
"""what the gate finds, and the change that mends it; blocks also end before their store and their cluster have"""


def device_code(text: str) -> str:
    """Return the file without what only the host runs."""
    text = text[: text.index("// Rotate/flip")].replace("int *_dspace;", "")
    host = text.index("template <int BlockMajorSize"), text.index("template<int ScaleD")
    return f"{text[: host[0]]}{text[host[1] :]}\n}}\n"


def mended(code: str, fence: bool = True, wait: bool = True, end: bool = True) -> str:
    """Return the device code with what the gate finds missing, or a part of it."""
    for asked, (_, old, new) in zip((fence, wait), MENDS, strict=True):
        assert old in code
        code = code.replace(old, new, 1) if asked else code
    return _with_an_end(code) if end else code


def _with_an_end(code: str) -> str:
    end = code.rindex("}", 0, code.rindex("}", 0, code.rindex("}")) + 1)
    return f"{code[:end]}{_WAIT}\n{_CLUSTER}{code[end:]}"


def write(folder: Path, code: str) -> Path:
    """Write the folder of the kernel with that device code."""
    own = folder / "matmul11"
    own.mkdir(parents=True)
    files = {"matmul_11.cuh": code, "matmul11.cu": KERNEL, "inputs.py": ORDER, "space.toml": SPACE}
    for name, text in {**files, "problem.json": json.dumps(PROBLEM)}.items():
        (own / name).write_text(text)
    return own


def judged(own: Path) -> tuple[Verdict, float]:
    """Return the executor's verdict on the start point, with the predicted time in microseconds."""
    workload = load_folder(own)
    target = Target(workload, workload.parse(workload.example), find_gpu("h100"))
    space = load_space(own / "space.toml", target.problem, target.gpu)
    config = space.starts[0]
    source = render(target, space, config, asset("templates"))
    contender = CompiledCandidate(0, source, compile_source(source, target.gpu.arch), config)
    verdict = judge_whole(executor(contender), workload, make_plans(space, target, config), seed=7)
    return verdict, predict_binary(target, contender).time_us


def texts(code: str) -> dict[str, str]:
    """Return the device code by the name of what is mended."""
    alone = {name: {part: part == name for part in ("fence", "wait", "end")} for name in ("fence", "wait", "end")}
    single = {name: mended(code, **asked) for name, asked in alone.items()}
    return {"unchanged": code, **single, "mended": mended(code)}


def rows(file: Path, folder: Path) -> Iterator[str]:
    code = device_code(file.read_text("utf-8"))
    for name, text in (("unchanged", code), ("mended", mended(code))):
        verdict, time_us = judged(write(folder / name, text))
        cases = f"{sum(case.correct for case in verdict.cases)} of {len(verdict.cases)} cases"
        yield f"| {name} | {cases} | {verdict.reason or 'correct'} | {time_us:.1f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--texts", type=Path, metavar="DIR")
    given = parser.parse_args()
    file = given.folder / "matmul_11.cuh"
    if given.texts:
        for name, text in texts(device_code(file.read_text("utf-8"))).items():
            (given.texts / f"{name}.cuh").write_text(text, "utf-8")
        return
    with tempfile.TemporaryDirectory() as scratch:
        print("| device code | judged | reason | predicted µs |\n|---|---|---|---|")
        for row in rows(file, Path(scratch)):
            print(row, flush=True)


if __name__ == "__main__":
    main()
