"""Kernels exported for an H100 on a driver that notes what it is asked; CPU tensors are taken for those of an H100."""

from __future__ import annotations

import hashlib

import pytest
import torch

from evoengine.gpu import find_gpu
from evoengine.publish.export import export, export_files
from evoengine.publish.folder import with_checksums
from evoengine.records import Binary, Candidate, Launch, Outcome, Source
from evoengine.torch import kernels
from evoengine.workloads import parse_problem
from evoengine.workloads.base import Target
from tests.publish.conftest import built, driver  # noqa: F401 # fixtures

H100 = find_gpu("h100")
CONFIGS = {
    "attention": {"family": "wmma", "tile_m": 64, "tile_n": 64},
    "gemm": {"family": "mma", "tile_m": 64, "tile_n": 64, "tile_k": 32},
    "rms_norm": {"family": "warp"},
    "rowwise": {"family": "warp"},
}


def exported(problem: str, config: dict[str, object] | None = None, gpu: str = "h100"):
    """A candidate without code, whose source differs by problem and configuration, and its target."""
    target = Target(*parse_problem(problem), find_gpu(gpu))
    config = config or CONFIGS[target.workload.name]
    source = Source(f"// {problem} {config}", "attention", Launch((1, 1, 1), 128, 1024))
    cubin = b"\x7fELF" + hashlib.sha256(source.text.encode()).digest()
    binary = Binary(cubin, "sm_90a", "", "none 13.0", 168, 0, 0, 0, (), {}, 0.0)
    problem = str(target.problem)
    return Candidate(1, 1, problem, gpu, config, Outcome.ESTIMATED, source=source, binary=binary), target


def bundle_of(problem: str) -> dict[str, bytes]:
    return with_checksums(export_files(*exported(problem)))


@pytest.fixture
def exports(tmp_path):
    """Writes an export of a problem's kernel and returns its folder."""

    def written(problem, config=None, gpu="h100", name="out"):
        export(*exported(problem, config, gpu), tmp_path / name)
        return tmp_path / name

    return written


@pytest.fixture(autouse=True)
def h100(driver, monkeypatch):  # noqa: F811
    """Takes the CPU for an H100, and forgets what other tests chose."""
    kernels.KERNELS.use(())
    load = kernels.load_folder

    def loaded(folder, described):
        function = load(folder, described)
        cuda = function.__globals__["_cuda"]
        monkeypatch.setattr(cuda.Torch, "gpu_index", lambda device: 0)
        monkeypatch.setattr(cuda.Torch, "stream", lambda gpu_index: 0)
        return function

    monkeypatch.setattr(kernels, "load_folder", loaded)
    monkeypatch.setattr(kernels, "gpu_key", lambda device: "h100")
    monkeypatch.setattr("evoengine.torch.operators.gpu_key", lambda device: "h100")
    yield driver
    kernels.KERNELS.use(())


def halfs(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float16)
