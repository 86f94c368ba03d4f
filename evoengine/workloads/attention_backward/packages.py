"""The backward passes of FlashAttention, by the signatures of its versions 2.8.4 and 3.0.0."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import torch

from evoengine.workloads.attention_backward.problem import BackwardProblem
from evoengine.workloads.base import Inputs, Outputs
from evoengine.workloads.packages import PackageBaseline


def _covered(p: BackwardProblem) -> bool:
    """Cover all dtypes, sizes of heads and masks."""
    return True


def _gradients(package: ModuleType, p: BackwardProblem, inputs: Inputs) -> Callable[[], Outputs]:
    """Return a call of the backward pass alone; the forward pass has run before."""
    leaves = {name: inputs[name].detach().requires_grad_() for name in "qkv"}
    with torch.enable_grad():
        q, k, v = (leaf.transpose(1, 2) for leaf in leaves.values())
        out = package.flash_attn_func(q, k, v, causal=p.causal).transpose(1, 2)

    def call() -> Outputs:
        found = torch.autograd.grad(out, tuple(leaves.values()), inputs["dout"], retain_graph=True)
        return dict(zip(("dq", "dk", "dv"), found, strict=True))

    return call


BASELINES: tuple[PackageBaseline[BackwardProblem], ...] = tuple(
    PackageBaseline(package, "flash_attn_func, backward", _covered, _gradients)
    for package in ("flash_attn", "flash_attn_interface")
)
