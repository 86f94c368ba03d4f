"""Kernels of Liger on a virtual GPU, against PyTorch on the CPU: what runs, how far it is off, and what races.

pip install triton==3.7.1 liger-kernel==0.8.5
python -m benchmarks.liger_kernels [--gpu h100]
"""

from __future__ import annotations

import argparse
import importlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

import evoengine.virtual

Case = tuple[str, Callable[[], Any], Callable[[], Any], tuple[torch.Tensor, ...]]
"""name, Liger's result, PyTorch's, and the tensors whose gradients are compared"""


def liger(module: str, name: str) -> Callable[..., Any]:
    function = getattr(importlib.import_module(f"liger_kernel.ops.{module}"), f"Liger{name}Function")

    def call(*arguments: Any) -> Any:
        found = function.apply(*arguments)
        return found[0] if isinstance(found, tuple) else found

    return call


def turned(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([-x[..., 32:], x[..., :32]], -1)


def cases() -> Iterator[Case]:
    torch.manual_seed(0)

    def leaf(*shape: int) -> torch.Tensor:
        return torch.randn(shape, requires_grad=True)

    x, gain, bias, up = leaf(8, 300), leaf(300), leaf(300), leaf(8, 300)
    norm = torch.nn.functional.rms_norm
    yield "rms_norm", lambda: liger("rms_norm", "RMSNorm")(x, gain, 1e-6, 0.0, "llama", False), (
        lambda: norm(x, (300,), gain, 1e-6)), (x, gain)  # fmt: skip
    yield "layer_norm", lambda: liger("layer_norm", "LayerNorm")(x, gain, bias, 1e-5), (
        lambda: F.layer_norm(x, (300,), gain, bias, 1e-5)), (x, gain, bias)  # fmt: skip
    yield "swiglu", lambda: liger("swiglu", "SiLUMul")(x, up), lambda: F.silu(x) * up, (x, up)
    yield "geglu", lambda: liger("geglu", "GELUMul")(x, up), lambda: F.gelu(x, approximate="tanh") * up, (x, up)
    yield "softmax", lambda: liger("softmax", "Softmax")(x), lambda: x.softmax(-1), (x,)
    logits, target = leaf(16, 1000), torch.randint(0, 1000, (16,))
    yield "cross_entropy", lambda: liger("cross_entropy", "CrossEntropy")(logits.clone(), target, None), (
        lambda: F.cross_entropy(logits, target)), (logits,)  # fmt: skip
    hidden, weight, word = leaf(16, 64), leaf(500, 64), torch.randint(0, 500, (16,))
    yield "fused_linear_cross_entropy", (
        lambda: liger("fused_linear_cross_entropy", "FusedLinearCrossEntropy")(hidden, weight, word)), (
        lambda: F.cross_entropy(hidden @ weight.t(), word)), (hidden, weight)  # fmt: skip
    log_p, p = torch.randn(8, 300).log_softmax(-1), torch.randn(8, 300).softmax(-1)
    yield "kl_div", lambda: liger("kl_div", "KLDivLoss")(log_p, p, "batchmean", False, 1e-10), (
        lambda: F.kl_div(log_p, p, reduction="batchmean")), ()  # fmt: skip
    image, scale, shift = torch.randn(2, 8, 50), torch.randn(8), torch.randn(8)
    yield "group_norm", lambda: liger("group_norm", "GroupNorm")(image, scale, shift, 8, 4, 1e-5), (
        lambda: F.group_norm(image, 4, scale, shift, 1e-5)), ()  # fmt: skip
    table, index = torch.randn(50, 64), torch.randint(0, 50, (3, 7))
    yield "embedding", lambda: liger("experimental.embedding", "Embedding")(table, index), lambda: table[index], ()
    q, k = torch.randn(1, 4, 10, 64), torch.randn(1, 2, 10, 64)
    angles = torch.outer(torch.arange(10.0), 1e4 ** -(torch.arange(0, 64, 2) / 64)).repeat(1, 2)[None]
    cos, sin = angles.cos(), angles.sin()
    yield "rope", lambda: liger("rope", "Rope")(q.clone(), k.clone(), cos, sin), (
        lambda: q * cos[:, None] + turned(q) * sin[:, None]), ()  # fmt: skip


def gradients(result: torch.Tensor, inputs: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    grad = torch.ones_like(result) * torch.linspace(0.5, 1.5, result.numel()).reshape(result.shape)
    return list(torch.autograd.grad(result, inputs, grad)) if inputs else []


def error(case: Case) -> float:
    """The largest difference of results and gradients."""
    _, own, reference, inputs = case
    right = reference()
    expected = [right.detach(), *gradients(right, inputs)]
    result = own()
    # some change their inputs when gradients are computed
    found = [result.detach().clone(), *gradients(result, inputs)]
    return max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", default="h100")
    device = evoengine.virtual.activate(parser.parse_args().gpu)
    for case in cases():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            off = error(case)
        races = [str(w.message) for w in caught if w.category.__name__ == "RaceWarning"]
        print(f"{case[0]:28} off by {off:.1e}", *races)
    print(device.summary())


if __name__ == "__main__":
    main()
