"""Kernels of FlashAttention and FlashInfer for packed sequences, with keys packed or in pages.

By the signatures of FlashAttention 2.8.4 and 3.0.0, and FlashInfer 0.7.2.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import torch

from evoengine.workloads import flashinfer
from evoengine.workloads.attention.problem import OUTPUT
from evoengine.workloads.base import Inputs, Outputs
from evoengine.workloads.packages import PackageBaseline
from evoengine.workloads.varlen.problem import VarlenProblem

Call = Callable[[], Outputs]
PAGES_OF_2 = 256
"""FlashAttention 2 takes pages of multiples of that many keys"""


def _covered_by_2(p: VarlenProblem) -> bool:
    """Cover packed keys and large pages."""
    return p.page % PAGES_OF_2 == 0


def _packed(p: VarlenProblem) -> bool:
    """Cover packed keys."""
    return not p.page


def _paged(p: VarlenProblem) -> bool:
    """Cover any pages."""
    return bool(p.page)


def _packed_of_flashinfer(p: VarlenProblem) -> bool:
    """Cover packed keys of heads of common sizes."""
    return _packed(p) and p.head_dim in flashinfer.HEAD_DIMS


def _paged_of_flashinfer(p: VarlenProblem) -> bool:
    """Cover any pages of heads of common sizes."""
    return _paged(p) and p.head_dim in flashinfer.HEAD_DIMS


def _varlen(package: ModuleType, p: VarlenProblem, inputs: Inputs) -> Call:
    q, (k, v) = inputs["q"], _keys(p, inputs)
    given = {"block_table": _table(p, inputs)} if p.page else {}
    lengths = (inputs["cu_q"], inputs["cu_kv"], max(p.lens), max(p.kv_lens))
    return lambda: {OUTPUT: package.flash_attn_varlen_func(q, k, v, *lengths, causal=p.causal, **given)}


def _on_a_cache(package: ModuleType, p: VarlenProblem, inputs: Inputs) -> Call:
    """Return the function of caches, of which alone FlashAttention 3 takes a table."""
    q, (k, v) = inputs["q"], _keys(p, inputs)
    given = {
        "cache_seqlens": inputs["cu_kv"].diff(),
        "page_table": _table(p, inputs),
        "cu_seqlens_q": inputs["cu_q"],
        "max_seqlen_q": max(p.lens),
    }
    return lambda: {OUTPUT: package.flash_attn_with_kvcache(q, k, v, causal=p.causal, **given)}


def _ragged(package: ModuleType, p: VarlenProblem, inputs: Inputs) -> Call:
    q, (k, v) = inputs["q"], _keys(p, inputs)
    starts = (inputs["cu_q"], inputs["cu_kv"])
    run = flashinfer.prefill_ragged(package, _shared(p), p.head_dim**-0.5, q, k, v, *starts)
    return lambda: {OUTPUT: run()}


def _in_pages(package: ModuleType, p: VarlenProblem, inputs: Inputs) -> Call:
    pages = flashinfer.pages_of(inputs["cu_kv"].diff(), _table(p, inputs), p.page)
    q, cache = inputs["q"], _keys(p, inputs)
    run = flashinfer.prefill_paged(package, _shared(p), p.head_dim**-0.5, q, inputs["cu_q"], cache, pages)
    return lambda: {OUTPUT: run()}


def _shared(p: VarlenProblem) -> flashinfer.Shared:
    return flashinfer.Shared(p.heads, p.kv_heads, p.head_dim, p.head_dim, p.causal)


BASELINES: tuple[PackageBaseline[VarlenProblem], ...] = (
    PackageBaseline("flash_attn", "flash_attn_varlen_func", _covered_by_2, _varlen),
    PackageBaseline("flash_attn_interface", "flash_attn_varlen_func", _packed, _varlen),
    PackageBaseline("flash_attn_interface", "flash_attn_with_kvcache", _paged, _on_a_cache),
    PackageBaseline("flashinfer", "BatchPrefillWithRaggedKVCacheWrapper", _packed_of_flashinfer, _ragged),
    PackageBaseline("flashinfer", "BatchPrefillWithPagedKVCacheWrapper", _paged_of_flashinfer, _in_pages),
)


def _keys(p: VarlenProblem, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Return K and V without NaN: libraries expect numbers in slots that no sequence owns."""
    if p.page:
        return inputs["k"].nan_to_num(), inputs["v"].nan_to_num()
    return inputs["k"][: p.total_kv], inputs["v"][: p.total_kv]


def _table(p: VarlenProblem, inputs: Inputs) -> torch.Tensor:
    """Return the table with a page of the pool in the entries after a sequence's end."""
    return inputs["table"].clamp(max=p.pool - 1)
