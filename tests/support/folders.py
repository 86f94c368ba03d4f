"""Folders with kernels of somebody's own, for tests: written, loaded and put through the gate in the emulator."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from evoengine.gpu import find_gpu
from evoengine.paths import asset
from evoengine.records import Config, Rejection, Source, Verdict
from evoengine.search.evaluators import make_plans
from evoengine.space.space import SearchSpace, load_space
from evoengine.stages.render import render
from evoengine.workloads.base import Target
from evoengine.workloads.folder import load_folder
from tests.support.kernel_gate import emulate

SAXPY: dict[str, Any] = {
    "name": "saxpy",
    "axes": {"n": {"type": "var"}},
    "inputs": {
        "x": {"shape": ["n"], "dtype": "float32"},
        "y": {"shape": ["n"], "dtype": "float32"},
        "a": {"shape": None, "dtype": "float32"},
    },
    "outputs": {"out": {"shape": ["n"], "dtype": "float32"}},
    "reference": "def run(x, y, a):\n    return a * x + y\n",
    "workloads": [{"axes": {"n": 4096}, "inputs": {"a": {"type": "scalar", "value": 2.5}}}],
}
SAXPY_SPACE = """kernel = "saxpy"
[knobs]
block_size_x = [32, 64, 128]
per_thread = [1, 2, 4]
[launch]
threads = "block_size_x"
grid = ["ceil_div(n, block_size_x * per_thread)", 1, 1]
shared = 0
"""
SAXPY_KERNEL = """#ifndef block_size_x
#define block_size_x 256
#endif
#define per_thread 8

extern "C" __global__ void saxpy(const float* x, const float* y, float a, float* out, int n) {
    for (int k = 0; k < per_thread; ++k) {
        int i = (blockIdx.x * per_thread + k) * block_size_x + threadIdx.x;
        if (i < n) out[i] = a * x[i] + y[i];
    }
}
"""
SAXPY_CONFIG: Config = {"family": "saxpy", "block_size_x": 64, "per_thread": 2}


def write(folder: Path, problem: Mapping[str, Any], space: str, kernel: str, file: str | None = None) -> Path:
    """A folder named after its kernel; `file` is `NAME.cu` unless given."""
    own = folder / str(problem["name"])
    own.mkdir(parents=True, exist_ok=True)
    (own / "problem.json").write_text(json.dumps(problem))
    (own / "space.toml").write_text(space)
    (own / (file or f"{problem['name']}.cu")).write_text(kernel)
    return own


def saxpy(folder: Path, kernel: str = SAXPY_KERNEL, space: str = SAXPY_SPACE, **changes: Any) -> Path:
    return write(folder, SAXPY | changes, space, kernel)


def load(folder: Path, problem: str | None = None) -> tuple[Target, SearchSpace]:
    workload = load_folder(folder)
    target = Target(workload, workload.parse(problem or workload.example), find_gpu("h100"))
    return target, load_space(folder / "space.toml", target.problem, target.gpu)


def rendered(folder: Path, config: Config, problem: str | None = None) -> Source:
    target, space = load(folder, problem)
    return render(target, space, config, asset("templates"))


def gate(folder: Path, config: Config, problem: str | None = None, seed: int = 7) -> Verdict | Rejection:
    """The verdict of the emulator on one configuration."""
    target, space = load(folder, problem)
    assert space.why_invalid(config) is None
    source = render(target, space, config, asset("templates"))
    return emulate(target.workload, source, make_plans(space, target, config), seed, target.gpu.arch)
