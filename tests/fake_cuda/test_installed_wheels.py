"""Wheels of tuned kernels, installed beside each other into a new environment, compute on the stand-in driver there."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest
import torch

from evoengine.paths import asset
from evoengine.publish.export import export_files
from evoengine.publish.folder import write_new
from evoengine.publish.packages import package_files
from evoengine.records import Candidate, Config, Outcome, Source
from evoengine.space.space import load_space
from evoengine.stages import compile as compiler
from evoengine.stages.render import render
from evoengine.workloads.base import Target
from tests.support import split_workload

pytestmark = pytest.mark.stand_in
NORM = "rowwise:rms_norm,rows12,hidden64,fp32"

CALLS = """
import sys
import torch
import norm_kernel
import split_kernels
from evoengine.devices.torch_gpu import gpu

def on_device(tensor):
    return gpu().empty(tuple(tensor.shape), tensor.dtype).copy_(tensor)

for module in (norm_kernel, split_kernels):
    assert module.__file__.startswith(sys.prefix), module.__file__
    library = module.__dict__[module.KERNEL["kernel"]].__globals__["_cuda"].Torch
    library.gpu_index = staticmethod(lambda device: 0)
    library.stream = staticmethod(lambda gpu_index: 0)
    library.empty = staticmethod(lambda beside, shape, dtype: gpu().empty(tuple(shape), getattr(torch, dtype)))
given = torch.load(sys.argv[1])
y = on_device(torch.full((given["x"].shape[0],), float("nan")))
split_kernels.split(on_device(given["x"]), y=y)
z = on_device(torch.full_like(given["h"], float("nan")))
norm_kernel.rowwise(on_device(given["h"]), on_device(given["w"]), y=z)
assert len(split_kernels.KERNEL["launch"]["then"]) == 1
torch.save({"sums": y.clone(), "norms": z.clone()}, sys.argv[1])
"""


def wheel(target: Target, source: Source, config: Config, folder: Path, name: str) -> Path:
    binary = compiler.compile_source(source, target.gpu.arch)
    found = Candidate(1, 1, str(target.problem), "h100", config, Outcome.ESTIMATED, source=source, binary=binary)
    (path,) = write_new(folder / name, package_files("wheel", export_files(found, target), name))
    return path


@pytest.fixture
def wheels(kernel_gate, tmp_path) -> list[Path]:
    """Of a kernel alone, and of two kernels with scratch memory between them."""
    gate = kernel_gate(NORM)
    config = gate.configuration({"family": "warp"})
    made = [wheel(gate.target, gate.source(config), config, tmp_path, "norm-kernel")]
    with split_workload.registered(tmp_path / "own") as workload:
        target = Target(workload, workload.parse("split:70"), gate.target.gpu)
        config = {"family": "split", "splits": 4}
        space = load_space(workload.space_file(), target.problem, target.gpu)
        source = render(target, space, config, asset("templates"))
        return [*made, wheel(target, source, config, tmp_path, "split-kernels")]


def installed(wheels: list[Path], folder: Path) -> Path:
    """The Python of a new environment that has these wheels and nothing else."""
    venv.create(folder)
    python = folder / "bin" / "python"
    options = ["--quiet", "--no-index", "--no-deps", "--disable-pip-version-check"]
    subprocess.run([sys.executable, "-m", "pip", "--python", python, "install", *options, *wheels], check=True)
    return python


def test_kernels_of_several_launches_and_of_one_are_imported_and_right(wheels, tmp_path):
    python, given = installed(wheels, tmp_path / "new"), tmp_path / "given.pt"
    alone = [python, "-I", "-c", "import norm_kernel as n, split_kernels as s; print(n.__all__, s.__all__)"]
    done = subprocess.run(alone, capture_output=True, text=True, check=False)
    assert done.stdout == "['KERNEL', 'rowwise'] ['KERNEL', 'split']\n", done.stderr
    tensors = {"x": torch.randn(70, split_workload.COLUMNS), "h": torch.randn(12, 64), "w": torch.randn(64)}
    torch.save(tensors, given)
    # torch, and the driver's memory, are those of the tests
    paths = [os.environ["PYTHONPATH"], str(Path(torch.__file__).parents[1])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    called = [python, "-c", CALLS, given]
    done = subprocess.run(called, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    found = torch.load(given)
    torch.testing.assert_close(found["sums"], tensors["x"].sum(1), rtol=1e-4, atol=1e-4)
    wanted = torch.nn.functional.rms_norm(tensors["h"], (64,), tensors["w"], 1e-6)
    torch.testing.assert_close(found["norms"], wanted, rtol=1e-4, atol=1e-4)
