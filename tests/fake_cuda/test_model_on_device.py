"""A patched transformer whose attention, norms and linear layers are tuned kernels, computed on the stand-in driver.

CPU tensors are taken for those of an H100: each kernel gets copies of its inputs in the driver's memory.
"""

from __future__ import annotations

import copy
import importlib

import pytest
import torch

import evoengine.torch as tuned
from evoengine.errors import UsageError
from evoengine.publish.export import export
from evoengine.records import Candidate, Outcome
from evoengine.stages import compile as compiler
from evoengine.torch import kernels
from tests.torch.model import Transformer

pytestmark = pytest.mark.stand_in
TOKENS = torch.arange(12).view(2, 6)
PROBLEMS = (
    "b2,h2,s6,d32,fp16,causal",
    "gemm:m12,n192,k64,fp16,b_nk",
    "gemm:m12,n64,k64,fp16,b_nk,bias",
    "gemm:m12,n128,k64,fp16,b_nk,bias",
    "gemm:m12,n64,k128,fp16,b_nk,bias",
    "rowwise:rms_norm,rows12,hidden64,fp16",
)
"""of the layers, but for the last, whose 50 columns no kernel takes"""


@pytest.fixture
def place(kernel_gate, tmp_path, monkeypatch):
    """A folder with a kernel for each problem; `spoil` changes the source of each."""

    def exported(spoil=lambda text: text):
        for number, problem in enumerate(PROBLEMS):
            gate = kernel_gate(problem)
            config = gate.configuration({"family": "mma" if "mma" in gate.space.families else "warp"})
            source = gate.source(config)
            source = type(source)(spoil(source.text), source.entry, source.launch)
            binary = compiler.compile_source(source, "sm_90a")
            found = Candidate(1, 1, str(gate.problem), "h100", config, Outcome.ESTIMATED, source=source, binary=binary)
            export(found, gate.target, tmp_path / "kernels" / str(number))
        return tmp_path / "kernels"

    monkeypatch.setattr(kernels, "load_folder", on_device(kernels.load_folder))
    for module in ("kernels", "operators"):
        monkeypatch.setattr(importlib.import_module(f"evoengine.torch.{module}"), "gpu_key", lambda device: "h100")
    yield exported
    kernels.KERNELS.use(())


def on_device(load_folder):
    """Load kernels that copy their inputs into the driver's memory and their output out of it."""
    from evoengine.devices.torch_gpu import gpu

    def copied(tensor):
        return gpu().empty(tuple(tensor.shape), tensor.dtype).copy_(tensor)

    def loaded(folder, described):
        kernel = load_folder(folder, described)
        library = kernel.__globals__["_cuda"].Torch
        library.gpu_index = staticmethod(lambda device: 0)
        library.stream = staticmethod(lambda gpu_index: 0)
        library.empty_like = staticmethod(copied)
        dtypes = {"float16": torch.float16}
        library.empty = staticmethod(lambda like, shape, dtype: gpu().empty(tuple(shape), dtypes[dtype]))
        return lambda *given, **named: kernel(*map(copied, given), **named).clone()

    return loaded


@pytest.fixture
def model():
    torch.manual_seed(1)
    return Transformer().half()


def test_a_patched_model_computes_by_tuned_kernels_what_it_computed(place, model):
    original = copy.deepcopy(model)
    tuned.use(place())
    with pytest.warns(tuned.NoKernel, match="torch computes gemm:m12,n50,k64,fp16,b_nk,bias"):
        found = tuned.patch(model, TOKENS)
    assert len(found.kernels) == len(PROBLEMS) and len(found.torch) == 1
    assert 0 < found.difference < 5e-3
    out, wanted = model(TOKENS), original(TOKENS)
    torch.testing.assert_close(out, wanted, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(torch.compile(model, fullgraph=True, backend="aot_eager")(TOKENS), out)
    out.float().sum().backward(), wanted.float().sum().backward()
    for (name, own), (_, other) in zip(model.named_parameters(), original.named_parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad, rtol=5e-2, atol=5e-2, msg=name)


def test_a_wrong_kernel_is_found_by_the_patch(place, model):
    def spoil(text):
        assert "float sum" in text or "0.0f" in text
        return text.replace("0.0f", "0.5f")

    tuned.use(place(spoil))
    with pytest.warns(tuned.NoKernel), pytest.raises(UsageError, match="the patched model's outputs differ"):
        tuned.patch(model, TOKENS)
