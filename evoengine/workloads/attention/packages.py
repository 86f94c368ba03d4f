"""Kernels of FlashAttention and FlashInfer for attention.

By the signatures of FlashAttention 2.8.4 and 3.0.0, and FlashInfer 0.7.2.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import torch

from evoengine.workloads import flashinfer
from evoengine.workloads.attention.problem import OUTPUT, AttentionProblem
from evoengine.workloads.base import Inputs, Outputs
from evoengine.workloads.packages import PackageBaseline

Call = Callable[[], Outputs]
UNEQUAL = (192, 128)
"""sizes of heads of Q and K, and of V, that libraries take if they differ"""


def _of_equal_heads(p: AttentionProblem) -> bool:
    """Cover all dtypes and masks, with heads of V as large as those of K."""
    return p.head_dim == p.head_dim_v


def _covered_by_3(p: AttentionProblem) -> bool:
    """Cover all dtypes and masks, with heads of V as large as those of K, and those of latent attention's prefill."""
    return _of_equal_heads(p) or (p.head_dim, p.head_dim_v) == UNEQUAL


def _covered_by_flashinfer(p: AttentionProblem) -> bool:
    """Cover all dtypes and masks, with heads of common sizes."""
    equal = _of_equal_heads(p) and p.head_dim in flashinfer.HEAD_DIMS
    return equal or (p.head_dim, p.head_dim_v) == UNEQUAL


def _flash_attention(package: ModuleType, p: AttentionProblem, inputs: Inputs) -> Call:
    q, k, v = (inputs[name].transpose(1, 2) for name in "qkv")
    return lambda: {OUTPUT: package.flash_attn_func(q, k, v, causal=p.causal).transpose(1, 2)}


def _flashinfer(package: ModuleType, p: AttentionProblem, inputs: Inputs) -> Call:
    """Return a run on packed copies of the inputs, as its wrapper takes no heads in front of rows."""
    q, k, v = (inputs[name].transpose(1, 2).flatten(0, 1).contiguous() for name in "qkv")
    shared = flashinfer.Shared(p.heads, p.kv_heads, p.head_dim, p.head_dim_v, p.causal)
    begins = torch.arange(p.batch + 1, dtype=torch.int32, device=q.device)
    run = flashinfer.prefill_ragged(package, shared, p.head_dim**-0.5, q, k, v, begins * p.seq_q, begins * p.seq_k)
    return lambda: {OUTPUT: run().view(p.batch, p.seq_q, p.heads, p.head_dim_v).transpose(1, 2)}


BASELINES: tuple[PackageBaseline[AttentionProblem], ...] = (
    PackageBaseline("flash_attn", "flash_attn_func", _of_equal_heads, _flash_attention),
    PackageBaseline("flash_attn_interface", "flash_attn_func", _covered_by_3, _flash_attention),
    PackageBaseline("flashinfer", "BatchPrefillWithRaggedKVCacheWrapper", _covered_by_flashinfer, _flashinfer),
)
