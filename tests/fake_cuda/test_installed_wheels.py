"""Wheels of one kernel and of several, installed into a new environment, compute on the stand-in driver there."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest
import torch

from evoengine.paths import asset
from evoengine.publish.export import export_files
from evoengine.publish.folder import CHECKSUMS, TABLE, with_checksums, write_new
from evoengine.publish.packages import package_files, table_package_files
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
import norm
import table
from evoengine.devices.torch_gpu import gpu

def on_device(tensor):
    return gpu().empty(tuple(tensor.shape), tensor.dtype).copy_(tensor)

kernels = {"norm": norm.rowwise, **table.KERNELS}
for kernel in kernels.values():
    assert kernel.__code__.co_filename.startswith(sys.prefix)
    library = kernel.__globals__["_cuda"].Torch
    library.gpu_index = staticmethod(lambda device: 0)
    library.stream = staticmethod(lambda gpu_index: 0)
    library.empty = staticmethod(lambda beside, shape, dtype: gpu().empty(tuple(shape), getattr(torch, dtype)))
given, found = torch.load(sys.argv[1]), {}
for name, kernel in kernels.items():
    inputs = [given["x"]] if name == "split:70" else [given["h"], given["w"]]
    y = torch.full((70,) if name == "split:70" else given["h"].shape, float("nan"))
    out = on_device(y)
    kernel(*map(on_device, inputs), y=out)
    found[name] = out.clone()
torch.save(found, sys.argv[1])
"""
"""imports the wheels, and calls each kernel on copies of the tensors in a file, where it leaves what they return"""


def exported(target: Target, source: Source, config: Config) -> dict[str, bytes]:
    binary = compiler.compile_source(source, target.gpu.arch)
    found = Candidate(1, 1, str(target.problem), "h100", config, Outcome.ESTIMATED, source=source, binary=binary)
    return export_files(found, target)


@pytest.fixture
def wheels(kernel_gate, tmp_path) -> list[Path]:
    """Of a kernel alone, and of a table of it and of another that has two launches and scratch memory between them."""
    gate = kernel_gate(NORM)
    config = gate.configuration({"family": "warp"})
    norm = exported(gate.target, gate.source(config), config)
    with split_workload.registered(tmp_path / "own") as workload:
        target = Target(workload, workload.parse("split:70"), gate.target.gpu)
        config = {"family": "split", "splits": 4}
        space = load_space(workload.space_file(), target.problem, target.gpu)
        source = render(target, space, config, asset("templates"))
        assert len(source.launch.then) == 1
        split = exported(target, source, config)
        both = {NORM: with_checksums(norm), "split:70": with_checksums(split)}
        files = {f"{folder}/{name}": data for folder, own in enumerate(both.values()) for name, data in own.items()}
        entries = [
            {"problem": problem, "kernel": 1, "folder": str(folder), "median_us": 1.0, "regret": 0.0,
             "sha256": hashlib.sha256(own[CHECKSUMS]).hexdigest()}
            for folder, (problem, own) in enumerate(both.items())
        ]  # fmt: skip
        table = json.dumps({"evoengine_table": 1, "gpu": "h100", "entries": entries}).encode()
        packed = [
            package_files("wheel", norm, "norm"),
            table_package_files("wheel", {TABLE: table, **files}, "table"),
        ]
        return [path for made in packed for path in write_new(tmp_path / next(iter(made)), made)]


def installed(wheels: list[Path], folder: Path) -> Path:
    """The Python of a new environment that has these wheels and nothing else."""
    venv.create(folder)
    python = folder / "bin" / "python"
    options = ["--quiet", "--no-index", "--no-deps", "--disable-pip-version-check"]
    subprocess.run([sys.executable, "-m", "pip", "--python", python, "install", *options, *wheels], check=True)
    return python


def test_kernels_of_one_launch_and_of_several_are_imported_and_right(wheels, tmp_path):
    python, given = installed(wheels, tmp_path / "new"), tmp_path / "given.pt"
    alone = [python, "-I", "-c", "import norm, table; print(norm.__all__, [*table.KERNELS])"]
    done = subprocess.run(alone, capture_output=True, text=True, check=False)
    assert done.stdout == f"['KERNEL', 'rowwise'] ['{NORM}', 'split:70']\n", done.stderr
    tensors = {"x": torch.randn(70, split_workload.COLUMNS), "h": torch.randn(12, 64), "w": torch.randn(64)}
    torch.save(tensors, given)
    # torch, and the driver's memory, are those of the tests
    paths = [os.environ["PYTHONPATH"], str(Path(torch.__file__).parents[1])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    called = [python, "-c", CALLS, given]
    done = subprocess.run(called, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    found = torch.load(given)
    torch.testing.assert_close(found["split:70"], tensors["x"].sum(1), rtol=1e-4, atol=1e-4)
    wanted = torch.nn.functional.rms_norm(tensors["h"], (64,), tensors["w"], 1e-6)
    for name in ("norm", NORM):
        torch.testing.assert_close(found[name], wanted, rtol=1e-4, atol=1e-4)
