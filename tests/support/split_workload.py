"""Sums of rows by two kernels with scratch memory, rendered from one template as the package's own families are.

It lies in a module of its own because worker processes import it to unpickle the workload.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch

import evoengine
from evoengine import workloads
from evoengine.devices.base import Parameter, ScalarArgument, ScratchParameter, TensorParameter
from evoengine.records import Config, Value
from evoengine.workloads.base import Case, Drawn, Inputs, Outputs, Tensors, Tolerance, Workload

PROBLEM = "split:512"
COLUMNS = 1024
SPACE = """kernel = "split"

[knobs]
splits = [2, 4, 8]

[launch]
threads = 128
grid = ["rows", "splits", 1]
shared = 0

[kernels.combine]
threads = 64
grid = ["ceil_div(rows, 64)", 1, 1]
shared = 0
"""
KERNEL = """constexpr int COLUMNS = {{ columns }}, SPLITS = {{ splits }}, OWN = COLUMNS / SPLITS;

extern "C" __global__ void split(const float* x, float* partial) {
    __shared__ float sums[4];
    float sum = 0.0f;
    for (int i = threadIdx.x; i < OWN; i += 128) sum += x[blockIdx.x * COLUMNS + blockIdx.y * OWN + i];
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x == 0) partial[blockIdx.x * SPLITS + blockIdx.y] = sums[0] + sums[1] + sums[2] + sums[3];
}

extern "C" __global__ void combine(float* y, const float* partial, int rows) {
    const int row = blockIdx.x * 64 + threadIdx.x;
    if (row >= rows) return;
    float sum = 0.0f;
    for (int i = 0; i < SPLITS; ++i) sum += partial[row * SPLITS + i];
    y[row] = sum;
}
"""


@dataclass(frozen=True)
class SplitProblem:
    rows: int

    def __str__(self) -> str:
        return f"split:{self.rows}"

    def variables(self) -> dict[str, Value]:
        return {"rows": self.rows, "columns": COLUMNS}


class SplitTensors(Tensors[SplitProblem]):
    def draw(self, case: Case[SplitProblem], seed: int, device: str = "cpu") -> Drawn:
        generator = torch.Generator(device=device).manual_seed(seed)
        inputs = {"x": torch.randn(case.problem.rows, COLUMNS, generator=generator, device=device)}
        return Drawn(inputs, inputs)

    def reference(self, problem: SplitProblem, inputs: Inputs) -> Outputs:
        return {"y": inputs["x"].double().sum(1)}

    def own_dtype(self, problem: SplitProblem, inputs: Inputs) -> Outputs:
        return {"y": inputs["x"].cumsum(1)[:, -1]}


@dataclass(frozen=True)
class Split(Workload[SplitProblem]):
    """`folder` holds its space file and its template."""

    folder: Path

    name = "split"
    grammar = "…"
    example = PROBLEM
    compile_time = ("columns",)
    tolerance = Tolerance(atol=1e-4)

    def parse(self, text: str) -> SplitProblem:
        return SplitProblem(int(text.removeprefix("split:")))

    def flops(self, problem: SplitProblem) -> float:
        return float(problem.rows * COLUMNS)

    def min_dram_bytes(self, problem: SplitProblem) -> float:
        return 4.0 * problem.rows * (COLUMNS + 1)

    def cases(self, problem: SplitProblem, config: Config) -> tuple[Case[SplitProblem], ...]:
        return tuple(Case(f"{rows} rows", SplitProblem(rows), config=config) for rows in (1, 65))

    def parameters(self, problem: SplitProblem, config: Config) -> tuple[Parameter, ...]:
        return (
            TensorParameter("x", (problem.rows, COLUMNS), "fp32"),
            TensorParameter("y", (problem.rows,), "fp32", output=True),
            ScratchParameter("partial", (problem.rows, int(config.get("splits", 1))), "fp32"),
            ScalarArgument("rows", np.int32(problem.rows)),
        )

    def kernel_parameters(self, entry: str) -> tuple[str, ...]:
        return ("x", "partial") if entry == self.entry else ("y", "partial", "rows")

    def tensors(self) -> Tensors[SplitProblem]:
        return SplitTensors()

    def space_file(self) -> Path:
        return self.folder / "split.toml"

    def templates(self) -> Path:
        return self.folder


@contextmanager
def registered(folder: Path, kernel: str = KERNEL) -> Iterator[Split]:
    """Writes its files and registers it, until the block ends."""
    folder.mkdir(exist_ok=True)
    (folder / "split.toml").write_text(SPACE)
    (folder / "split.cu.j2").write_text(kernel)
    with patch.object(workloads, "_registered", {}):
        evoengine.register(Split(folder))
        yield Split(folder)
