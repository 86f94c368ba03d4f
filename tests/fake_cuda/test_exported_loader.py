"""An exported kernel by its own loader on the stand-in driver: what arrives on the device computes what it should.

It shows that loader and kernel agree on parameters, maps and grid, never how fast either is on a GPU.
"""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import pytest
import torch

from evoengine import workloads
from evoengine.devices.base import TensorParameter
from evoengine.publish.export import export, run_time_sizes
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
        export(found, gate.target, tmp_path / "out", run_time=run_time_sizes(found, gate.target, gate.space))
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


@pytest.mark.parametrize("wanted", [PERSISTENT, *more([{"family": "mma"}, {"family": "wmma"}])], ids=str)
def test_a_kernel_with_lse_returns_it_beside_the_output(load, monkeypatch, wanted):
    module, met = load(wanted, f"{TUNED_FOR},lse"), replace(MET, lse=True)
    monkeypatch.setattr(module._cuda.Torch, "empty_like", lambda like: on_device(like))
    monkeypatch.setattr(module._cuda.Torch, "empty", lambda like, shape, dtype: on_device(torch.empty(shape)))
    drawn = ATTENTION.tensors().draw(Case("by the loader", met), seed=3)
    q, k, v = (on_device(drawn.inputs[name]) for name in "qkv")
    out, lse = module.attention(q, k, v)
    assert lse.shape == (2, 8, 100) and lse.dtype == torch.float32
    found = compare(ATTENTION, Case("by the loader", met), drawn, {"o": out, "lse": lse}, 3)
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


SMALLER = {
    ("gemm:m2100,n2056,k520,bf16", "gemm:m130,n72,k128,bf16"): {"schedule": "persistent", "cluster": "2x1"},
    ("gemm:m300,n128,k256,fp16,bias_relu", "gemm:m70,n66,k96,fp16,bias_relu"): {"family": "mma"},
    ("convolution:w300,h200,fw5,fh3", "convolution:w70,h33,fw5,fh3"): {"family": "shared"},
    ("conv2d:n3,c64,h20,w24,k64,r3,s3,pad1,fp16,bias", "conv2d:n2,c32,h9,w11,k40,r3,s3,pad1,fp16,bias"): {
        "family": "mma"
    },
    ("rowwise:softmax,rows100,hidden512,bf16", "rowwise:softmax,rows3,hidden512,bf16"): {"family": "block"},
}
"""problem that a kernel was tuned for, and a smaller one → what the kernel must have"""


@pytest.mark.parametrize(("tuned", "smaller"), [*list(SMALLER)[:1], *more(list(SMALLER)[1:])])
def test_a_kernel_is_right_for_a_smaller_problem_by_the_loader_of_all(load, tuned, smaller):
    module = load(SMALLER[tuned, smaller], tuned)
    if ",n66," in smaller:
        with pytest.raises(ValueError, match="n=66, k=96 break n % 8 == 0, which this kernel needs: it was"):
            verdict(module, smaller)
        smaller = smaller.replace(",n66,", ",n72,")
    found = verdict(module, smaller)
    assert found.correct, found.reason


def test_a_grid_that_is_not_of_the_smaller_problem_shows(load):
    (tuned, smaller), wanted = next(iter(SMALLER.items()))
    module = load(wanted, tuned)
    module.RUN_TIME["grids"][0][0] = 2
    assert verdict(module, smaller).correct  # persistent blocks go from tile to tile, however few they are
    module = load({"family": "mma"}, "gemm:m300,n128,k256,fp16,bias_relu")
    module.RUN_TIME["grids"][0][0] = 1
    assert not verdict(module, "gemm:m70,n72,k96,fp16,bias_relu").correct


@pytest.mark.parametrize(("name", "value"), [("k", 64), *more([("n", 24)])])
def test_a_parameter_that_is_not_the_kernel_s_shows(load, name, value):
    problem = "gemm:m70,n66,k96,fp16,bias_relu"
    module = load(OTHERS[problem], problem)
    (scalar,) = [p for p in module.SCALARS if p["name"] == name]
    scalar["value"] = value
    assert not verdict(module, problem).correct


PACKED = "varlen:h4,kv2,d64,bf16,causal,lens=100+0+37,kvlens=130+5+37"
SEQUENCES = "varlen:h6,kv2,d64,bf16,causal,lens=3+70+0+1,kvlens=9+70+4+0"
"""another batch than the kernel was tuned for"""


@pytest.mark.parametrize(
    ("page", "knobs"),
    [
        (",page16", {"family": "mma"}),
        *more([("", {"family": "mma"}), ("", {"family": "wgmma"}), (",page16", {"family": "wgmma"})]),
        *more([("", {"load": "tma", "o_store": "tma"}), (",page16", {"load": "tma", "o_store": "shared"})]),
    ],
)
def test_a_kernel_of_sequences_is_right_for_another_batch_by_its_loader(load, monkeypatch, page, knobs):
    module = load({"tile_m": 64, **knobs}, PACKED + page)
    like = module._like
    monkeypatch.setattr(module, "_like", lambda tensor, values: on_device(like(tensor, values)))
    workload, problem = workloads.parse_problem(SEQUENCES + page)
    case = Case("by the loader", problem)
    drawn = workload.tensors().draw(case, seed=3)
    given = {name: on_device(tensor) for name, tensor in drawn.inputs.items()}
    batch = module.Batch(given["cu_q"], given["cu_kv"], given.get("table"))
    assert batch.tensors[2].tolist() == list(problem.order)
    out = on_device(torch.full_like(given["q"], float("nan")))
    assert module.varlen(given["q"], given["k"], given["v"], batch, out) is out
    found = compare(workload, case, drawn, {"o": out}, 3)
    assert found.correct, found.reason


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


def test_lengths_and_tables_that_a_kernel_would_read_beyond_are_refused(load):
    module = load({"family": "mma", "tile_m": 64}, f"{PACKED},page16")
    table = int32([0, 3], [1, -1])
    module.Batch(int32(0, 4, 9), int32(0, 17, 20), table)
    refused = [
        ((int32(1, 4), int32(0, 4), table), "cu_q begins with 1; cumulative lengths begin with 0"),
        ((int32(0, 4, 3), int32(0, 4, 8), table), "cu_q falls from 4 to 3 at sequence 1; lengths are 0 or more"),
        ((int32(0, 4), int32(0, 4, 8), table), "cu_q is of 1 sequences and cu_kv of 2; they must be of as many"),
        ((int32(0, 4), int32(0, 4)), "this kernel has pages of 16 rows and needs a table"),
        ((int32(0, 4, 9), int32(0, 17, 20), int32([0], [1])), "table has 1 pages of sequence 0, whose 17 keys need 2"),
        ((int32(0, 4, 9), int32(0, 17, 37), table), "table names page -1 for sequence 1; pages are counted from 0"),
        ((int32(0, 4), int32(0, 4), table), "table has shape (2, 2); [1, pages of the longest] was expected"),
    ]
    for given, says in refused:
        with pytest.raises(ValueError) as error:
            module.Batch(*given)
        assert str(error.value) == says
    batch = module.Batch(int32(0, 4, 9), int32(0, 17, 20), table)
    q, k = torch.zeros(9, 4, 64, dtype=torch.bfloat16), torch.zeros(4, 16, 2, 64, dtype=torch.bfloat16)
    for tensors, says in [
        ((q[:8], k, k), "q has 8 rows, and the lengths of cu_q add up to 9"),
        ((q, k[:3], k[:3]), "k has 3 pages, and the batch has keys in 4"),
        ((q, k[:, :8], k[:, :8]), r"k has shape (4, 8, 2, 64); [pages, 16, kv_heads, 64] was expected"),
        ((q, k, k[:, :, :1]), "v has shape (4, 16, 1, 64); (4, 16, 2, 64) was expected"),
        ((q[:, :, :32].contiguous(), k, k), "q has shape (9, 4, 32); [rows, heads, 64] was expected"),
        ((q.half(), k, k), "q is float16; this kernel was compiled for bfloat16"),
    ]:
        with pytest.raises(ValueError) as error:
            module.varlen(*tensors, batch)
        assert str(error.value) == says
