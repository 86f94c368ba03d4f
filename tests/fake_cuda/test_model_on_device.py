"""A patched transformer whose attention, norms and linear layers are tuned kernels, computed on the stand-in driver.

CPU tensors are taken for those of an H100: each kernel gets copies of its inputs in the driver's memory.
"""

from __future__ import annotations

import copy
import importlib
from functools import cache

import pytest
import torch

import evoengine.torch as tuned
from evoengine.errors import UsageError
from evoengine.publish.export import export
from evoengine.records import Candidate, Outcome
from evoengine.stages import compile as compiler
from evoengine.torch import kernels, operators
from tests.support.exhaustive import more
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
compiled = cache(compiler.compile_source)


@pytest.fixture
def place(kernel_gate, tmp_path, monkeypatch):
    """A folder with a kernel for each problem; `spoil` changes the source of each."""

    def exported(spoil=lambda text: text, problems=PROBLEMS, **values):
        for number, problem in enumerate(problems):
            gate = kernel_gate(problem)
            family = "mma" if "mma" in gate.space.families else "warp"
            own = {knob.name: values[knob.name] for knob in gate.space.knobs if knob.name in values}
            config = gate.configuration({"family": family, **own})
            source = gate.source(config)
            source = type(source)(spoil(source.text), source.entry, source.launch)
            binary = compiled(source, "sm_90a")
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
        library.empty = staticmethod(lambda like, shape, dtype: gpu().empty(tuple(shape), getattr(torch, dtype)))

        def called(*given, **named):
            found = kernel(*map(copied, given), **named)
            return found.clone() if isinstance(found, torch.Tensor) else tuple(t.clone() for t in found)

        return called

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
        """Of the norm alone; the other five kernels are right."""
        return text.replace("0.0f", "0.5f") if "rms_norm" in text else text

    tuned.use(place(spoil))
    with pytest.warns(tuned.NoKernel), pytest.raises(UsageError, match="the patched model's outputs differ"):
        tuned.patch(model, TOKENS)


BACKWARD = ("attention-backward:b2,h4,s70,d64,fp16,kv2", "attention-backward:b2,h4,s70,d64,fp16,causal,kv2")
WITHOUT_SUMS = {"dq": "second_pass"}
"""the stand-in takes a tensor that a kernel writes for one that it does not read, so it cannot add to one"""


@pytest.mark.parametrize("causal", [True, *more([False])])
def test_gradients_are_those_of_the_tuned_backward_pass(place, causal):
    torch.manual_seed(2)
    given = [torch.randn(2, heads, 70, 64, dtype=torch.float16) for heads in (4, 2, 2, 4)]
    tuned.use(place(problems=BACKWARD[causal : causal + 1], **WITHOUT_SUMS))
    q, k, v = (t.requires_grad_() for t in given[:3])
    with pytest.warns(tuned.NoKernel, match="torch computes attention:b2,h4,s70,d64,fp16.*,kv2,lse"):
        tuned.attention(q, k, v, causal=causal).backward(given[3])
    ((key, origin),) = [(key, o) for key, o in kernels.KERNELS.origins.items() if key[0] == "attention_backward"]
    assert kernels.KERNELS.chosen[key] is not None and origin.endswith("0")
    compiled = [t.detach().requires_grad_() for t in (q, k, v)]
    called = torch.compile(lambda *x: tuned.attention(*x, causal=causal), fullgraph=True, backend="aot_eager")
    called(*compiled).backward(given[3])
    exact = [t.detach().double().requires_grad_() for t in (q, k, v)]
    operators.sdpa(*exact, causal, 0.125).backward(given[3].double())
    for own, again, other in zip((q, k, v), compiled, exact, strict=True):
        torch.testing.assert_close(own.grad.double(), other.grad, rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(again.grad, own.grad)


def test_both_passes_are_tuned_where_a_forward_kernel_writes_lse(place, recwarn):
    torch.manual_seed(3)
    given = [torch.randn(2, heads, 70, 64, dtype=torch.float16) for heads in (4, 2, 2, 4)]
    tuned.use(place(problems=("attention:b2,h4,s70,d64,fp16,kv2,lse", BACKWARD[0]), **WITHOUT_SUMS))
    q, k, v = (t.requires_grad_() for t in given[:3])
    out = tuned.attention(q, k, v)
    out.backward(given[3])
    assert not [w for w in recwarn if w.category is tuned.NoKernel]
    exact = [t.detach().double().requires_grad_() for t in (q, k, v)]
    wanted = operators.sdpa(*exact, False, 0.125)
    wanted.backward(given[3].double())
    torch.testing.assert_close(out.double(), wanted, rtol=1e-2, atol=1e-2)
    for own, other in zip((q, k, v), exact, strict=True):
        torch.testing.assert_close(own.grad.double(), other.grad, rtol=1e-2, atol=1e-2)
    with torch.no_grad(), pytest.warns(tuned.NoKernel, match="torch computes attention:b2,h4,s70,d64,fp16,kv2 on"):
        tuned.attention(q, k, v)  # which does not want the other output


@pytest.mark.parametrize(
    ("named", "says"),
    [
        ({"scale": 0.5}, "compiled for a scale of 1/√head_dim, and it is 0.5"),
        ({"causal": True}, "no place that was named has a kernel for it"),
    ],
)
def test_another_backward_pass_than_the_kernel_s_is_torch_s(place, named, says):
    q, k, v = (torch.randn(2, heads, 70, 64, dtype=torch.float16, requires_grad=True) for heads in (4, 2, 2))
    tuned.use(place(problems=BACKWARD[:1], **WITHOUT_SUMS))
    with pytest.warns(tuned.NoKernel, match=f"torch computes attention-backward:.*{says}"):
        tuned.attention(q, k, v, **named).sum().backward()
    assert all(t.grad is not None for t in (q, k, v))
