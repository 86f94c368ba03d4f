"""An exported kernel by its own loader on the stand-in driver: what arrives on the device computes what it should.

It shows that loader and kernel agree on parameters, maps and grid, never how fast either is on a GPU.
"""

from __future__ import annotations

import importlib.util

import pytest
import torch

from evoengine import workloads
from evoengine.devices.base import TensorParameter
from evoengine.publish.export import export
from evoengine.records import Candidate, Outcome
from evoengine.stages import compile as compiler
from evoengine.stages.verify import compare
from evoengine.workloads import find_workload
from evoengine.workloads.attention.problem import parse_problem
from evoengine.workloads.base import Case
from evoengine.workloads.tensors import TORCH_DTYPES
from tests.support.exhaustive import more
from tests.support.exported import exported_module

pytestmark = pytest.mark.stand_in
TUNED_FOR = "b16,h16,s2048,d64,fp16,kv4"
ATTENTION = find_workload("attention")
MET = parse_problem("b2,h8,sq100,sk130,d64,fp16,kv2")
PERSISTENT = {"family": "wgmma", "schedule": "static"}


@pytest.fixture
def load(kernel_gate, tmp_path, monkeypatch):
    """The loader of a configuration's kernel; CPU tensors are taken for those of GPU 0."""

    def loaded(wanted, problem=TUNED_FOR):
        gate = kernel_gate(problem)
        config = gate.configuration(wanted)
        source = gate.source(config)
        binary = compiler.compile_source(source, "sm_90a")
        found = Candidate(1, 1, str(gate.problem), "h100", config, Outcome.ESTIMATED, source=source, binary=binary)
        export(found, gate.target, tmp_path / "out")
        path = tmp_path / "out" / f"{exported_module(tmp_path / 'out')}.py"
        spec = importlib.util.spec_from_file_location("exported", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        monkeypatch.setattr(module._cuda.Torch, "gpu_index", lambda device: 0)
        monkeypatch.setattr(module._cuda.Torch, "stream", lambda gpu_index: 0)
        return module

    return loaded


def on_device(tensor):
    from evoengine.devices.torch_gpu import gpu

    return gpu().empty(tuple(tensor.shape), tensor.dtype).copy_(tensor)


@pytest.mark.parametrize(
    "wanted", [{"family": "mma"}, PERSISTENT, *more([{"family": "scalar"}, {"family": "wgmma"}])], ids=str
)
def test_a_kernel_tuned_for_one_problem_is_right_for_another_by_its_loader(load, wanted):
    module, case = load(wanted), Case("by the loader", MET)
    drawn = ATTENTION.tensors().draw(case, seed=3)
    q, k, v = (on_device(drawn.inputs[name]) for name in "qkv")
    out = on_device(torch.full_like(q, float("nan")))
    assert module.attention(q, k, v, out=out) is out
    found = compare(ATTENTION, case, drawn, {"o": out}, 3)
    assert found.correct, found.reason


def test_a_persistent_kernel_gets_as_many_blocks_as_the_gpu_it_meets_runs_at_once(load, monkeypatch):
    from tests.fake_cuda import device

    module, grids = load(PERSISTENT), []
    monkeypatch.setitem(device.programs, "attention", lambda given: grids.append(given.launch.grid) or 0)
    drawn = ATTENTION.tensors().draw(Case("many tiles", parse_problem("b8,h32,s1024,d64,fp16")), 1).inputs
    q, k, v = (on_device(drawn[name]) for name in "qkv")
    module.attention(q, k, v, out=on_device(q))
    assert grids == [(132, 1, 1)]


OTHERS = {
    "rms_norm:rows33,hidden96,fp16": {"family": "warp"},
    "rms_norm:rows9,hidden512,bf16": {"family": "block"},
    "gemm:m70,n66,k96,fp16,bias_relu": {"family": "mma"},
    "gemm:m130,n72,k128,bf16": {"family": "wgmma"},
}
"""problem → what its kernel must have"""


def verdict(module, problem):
    """Of the exported kernel's outputs, called once by its loader on tensors in the device's memory."""
    workload, parsed = workloads.parse_problem(problem)
    case = Case("by the loader", parsed)
    drawn = workload.tensors().draw(case, seed=3)
    outputs = {
        p.name: on_device(torch.full(p.shape, float("nan"), dtype=TORCH_DTYPES[p.dtype]))
        for p in workload.parameters(parsed, {"family": None})
        if isinstance(p, TensorParameter) and p.output
    }
    inputs = {name: on_device(tensor) for name, tensor in drawn.inputs.items()}
    getattr(module, workload.name)(**inputs, **outputs)
    return compare(workload, case, drawn, outputs, 3)


@pytest.mark.parametrize("problem", [*list(OTHERS)[::3], *more(list(OTHERS)[1:3])])
def test_a_kernel_without_a_loader_of_its_own_is_right_by_the_loader_of_all(load, problem):
    found = verdict(load(OTHERS[problem], problem), problem)
    assert found.correct, found.reason


@pytest.mark.parametrize(("name", "value"), [("k", 64), *more([("n", 24)])])
def test_a_parameter_that_is_not_the_kernel_s_shows(load, name, value):
    problem = "gemm:m70,n66,k96,fp16,bias_relu"
    module = load(OTHERS[problem], problem)
    (scalar,) = [s for s, p in zip(module._Plan.scalars, module.SCALARS, strict=True) if p["name"] == name]
    scalar.value = value
    assert not verdict(module, problem).correct
