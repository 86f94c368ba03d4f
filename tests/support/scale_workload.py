"""A fourth kind of kernel, as somebody adds one: y = a·x for a vector. No file of the package knows of it.

It lies in a module of its own because worker processes import it to unpickle the workload.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch

import evoengine
from evoengine import workloads
from evoengine.devices.base import Parameter, ScalarArgument, TensorParameter
from evoengine.errors import UsageError
from evoengine.records import Config, Value
from evoengine.tuning.search import SearchResult
from evoengine.workloads.base import Case, Drawn, Inputs, Outputs, Tensors, Tolerance, Workload
from tests.support.made_once import made_once

PROBLEM = "scale:n5000"
SPACE = """kernel = "scale"

[knobs]
threads_x = [32, 64, 128]
per_thread = [1, 2, 4]

[launch]
threads = "threads_x"
grid = ["ceil_div(n, threads_x * per_thread)", 1, 1]
shared = 0
"""
KERNEL = """extern "C" __global__ void scale(const float* x, float* y, float a, int n) {
    const int first = blockIdx.x * {{ threads_x * per_thread }} + threadIdx.x;
    for (int k = 0; k < {{ per_thread }}; ++k) {
        const int i = first + k * {{ threads_x }};
        if (i < n) y[i] = a * x[i];
    }
}
"""


@dataclass(frozen=True)
class ScaleProblem:
    n: int

    def __str__(self) -> str:
        return f"scale:n{self.n}"

    def variables(self) -> dict[str, Value]:
        return {"n": self.n}


class ScaleTensors(Tensors[ScaleProblem]):
    def draw(self, case: Case[ScaleProblem], seed: int, device: str = "cpu") -> Drawn:
        generator = torch.Generator(device=device).manual_seed(seed)
        inputs = {"x": torch.randn(case.problem.n, generator=generator, device=device)}
        return Drawn(inputs, inputs)

    def reference(self, problem: ScaleProblem, inputs: Inputs) -> Outputs:
        return {"y": Scale.FACTOR * inputs["x"].double()}

    def own_dtype(self, problem: ScaleProblem, inputs: Inputs) -> Outputs:
        return {"y": Scale.FACTOR * inputs["x"]}


@dataclass(frozen=True)
class Scale(Workload[ScaleProblem]):
    """`folder` holds its space file and its template."""

    folder: Path

    FACTOR = 2.5
    name = "scale"
    grammar = "n…"
    example = PROBLEM
    compile_time = ()
    tolerance = Tolerance()

    def parse(self, text: str) -> ScaleProblem:
        digits = text.removeprefix("scale:").removeprefix("n")
        if not digits.isdigit() or not int(digits):
            raise UsageError(f"the problem {text!r} is no {self.grammar}; write it like {self.example}")
        return ScaleProblem(int(digits))

    def flops(self, problem: ScaleProblem) -> float:
        return float(problem.n)

    def min_dram_bytes(self, problem: ScaleProblem) -> float:
        return 8.0 * problem.n

    def cases(self, problem: ScaleProblem, config: Config) -> tuple[Case[ScaleProblem], ...]:
        tile = int(config["threads_x"]) * int(config["per_thread"])
        return tuple(Case(f"{n} elements", ScaleProblem(n), config=config) for n in (1, tile, tile + 1, 2 * tile - 1))

    def parameters(self, problem: ScaleProblem, config: Config) -> tuple[Parameter, ...]:
        return (
            TensorParameter("x", (problem.n,), "fp32"),
            TensorParameter("y", (problem.n,), "fp32", output=True),
            ScalarArgument("a", np.float32(self.FACTOR)),
            ScalarArgument("n", np.int32(problem.n)),
        )

    def tensors(self) -> Tensors[ScaleProblem]:
        return ScaleTensors()

    def space_file(self) -> Path:
        return self.folder / "scale.toml"

    def templates(self) -> Path:
        return self.folder


@contextmanager
def registered(folder: Path) -> Iterator[Scale]:
    """Writes its files and registers it, until the block ends."""
    folder.mkdir(exist_ok=True)
    (folder / "scale.toml").write_text(SPACE)
    (folder / "scale.cu.j2").write_text(KERNEL)
    with patch.object(workloads, "_registered", {}):
        evoengine.register(Scale(folder))
        yield Scale(folder)


def searched(factory: pytest.TempPathFactory) -> tuple[Path, SearchResult]:
    """A ledger with one search of two trials, and what `evoengine.tune` returned."""

    def search(folder: Path):
        with registered(folder / "own"):
            db = str(folder / "ledger.db")
            return evoengine.tune(PROBLEM, gpu="h100", trials=2, device="emulator", seed=1, jobs=1, db=db)

    folder, result = made_once(factory, "scale", search)
    return folder / "ledger.db", result
