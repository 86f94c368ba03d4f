"""`patch` replaces layers of a model only where its outputs stay what they were, and says what it replaced."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch

import evoengine.torch as tuned
from evoengine.errors import UsageError
from tests.torch.model import Transformer

TOKENS = torch.arange(12).view(2, 6)
LAYERS = [f"blocks.{i}.{name}" for i in (0, 1) for name in ("norm", "ends", "qkv", "out", "up", "down")]
LAYERS += ["logits"]
ATTENTION = "attention:b2,h2,s6,d32,fp16,causal"


@pytest.fixture
def model():
    torch.manual_seed(1)
    return Transformer().half()


@pytest.fixture(autouse=True)
def silent():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", tuned.NoKernel)
        yield


def test_what_was_replaced_is_reported_and_outputs_stay(model):
    before = model(TOKENS)
    found = tuned.patch(model, TOKENS)
    assert [*found.layers] == LAYERS
    assert found.kernels == () and found.difference < 1e-3
    assert {text.split(":")[0] for text in found.torch} == {"attention", "linear", "rms_norm"}
    torch.testing.assert_close(model(TOKENS), before, rtol=2e-2, atol=2e-3)


def test_a_kernel_that_computes_something_else_leaves_the_model_as_it_was(h100, exports, model):
    """The driver computes nothing, so the output of a kernel is the memory that it was given."""
    before = model(TOKENS)
    tuned.use(exports(ATTENTION))
    with pytest.raises(UsageError, match=r"the patched model's outputs differ by .* it was left as it was"):
        tuned.patch(poisoned(model), TOKENS)
    assert h100.get("launches") == 2
    torch.testing.assert_close(model(TOKENS), before, rtol=2e-2, atol=2e-3)
    assert h100.get("launches") == 2


def poisoned(model):
    """New memory holds NaN, as torch fills it on request."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    return model


@pytest.fixture(autouse=True)
def as_before():
    yield
    torch.use_deterministic_algorithms(False)


def test_the_kernels_that_the_model_calls_are_named(h100, exports, model, monkeypatch):
    folder = exports(ATTENTION)
    tuned.use(folder)
    monkeypatch.setattr("evoengine.torch.patching.TOLERANCE", {torch.float16: float("inf")})
    found = tuned.patch(model, TOKENS)
    assert found.kernels == (f"attention: {folder}",)
    assert h100.get("launches") == 2


def test_gradients_and_the_compiler_take_a_patched_model(model):
    model = model.float()
    other = copy.deepcopy(model)
    tuned.patch(model, TOKENS)
    for call in (model, torch.compile(model, fullgraph=True, backend="aot_eager")):
        model.zero_grad(), other.zero_grad()
        out, wanted = call(TOKENS), other(TOKENS)
        torch.testing.assert_close(out, wanted)
        out.sum().backward(), wanted.sum().backward()
        torch.testing.assert_close([p.grad for p in model.parameters()], [p.grad for p in other.parameters()])


def test_a_state_dict_is_loaded_and_saved_as_before(model):
    saved = copy.deepcopy(model.state_dict())
    tuned.patch(model, TOKENS)
    assert list(model.state_dict()) == list(saved)
    torch.testing.assert_close(model.state_dict(), saved)
    model.load_state_dict(saved)


def test_a_patched_model_is_not_patched_again_before_it_is_unpatched(model):
    tuned.patch(model, TOKENS)
    with pytest.raises(UsageError, match="this model was patched before"):
        tuned.patch(model, TOKENS)
    tuned.unpatch(model)
    assert tuned.patch(model, TOKENS).layers


def test_attention_that_the_operator_does_not_cover_stays_torch_s(model):
    class Masked(torch.nn.Module):
        def forward(self, q, k):
            mask = torch.zeros(4, 4)
            sdpa = torch.nn.functional.scaled_dot_product_attention
            return sdpa(q, q, q, mask), sdpa(q, k, k, is_causal=True)

    q, k = torch.randn(1, 2, 4, 32), torch.randn(1, 2, 6, 32)
    found = tuned.patch(Masked(), q, k)
    assert found.torch == () and found.difference == 0
