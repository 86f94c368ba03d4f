"""Kernels of FlashAttention and FlashInfer for decode attention, on the cache as it is.

By the signatures of FlashAttention 2.8.4 and 3.0.0, and FlashInfer 0.7.2. All sequences are full.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import torch

from evoengine.workloads import flashinfer
from evoengine.workloads.base import Inputs, Outputs
from evoengine.workloads.decode.problem import DecodeProblem
from evoengine.workloads.packages import PackageBaseline

Call = Callable[[], Outputs]
PAGES_OF_2 = 256
"""FlashAttention 2 takes pages of multiples of that many keys"""


def _covered_by_2(p: DecodeProblem) -> bool:
    """Cover caches of the queries' dtype, windows, caps and ALiBi; not latent attention, sinks and small pages."""
    return not (p.latent or p.cache or p.sinks or p.page % PAGES_OF_2)


def _covered_by_3(p: DecodeProblem) -> bool:
    """Cover caches of the queries' dtype in any pages, windows and caps; not ALiBi and sinks."""
    return not (p.latent or p.cache or p.sinks or p.alibi)


def _covered_latent(p: DecodeProblem) -> bool:
    """Cover latent attention in any pages, without features."""
    return p.latent and not (p.window or p.softcap or p.sinks or p.alibi)


def _covered_by_flashinfer(p: DecodeProblem) -> bool:
    """Cover any pages, caches in FP8, windows and caps; not slopes of ALiBi other than its own, and sinks."""
    return not (p.latent or p.sinks or p.alibi)


def _one_query(p: DecodeProblem) -> bool:
    return p.seq_q == 1 and _covered_by_flashinfer(p)


def _several_queries(p: DecodeProblem) -> bool:
    return p.seq_q > 1 and _covered_by_flashinfer(p)


def _flash_attention(package: ModuleType, p: DecodeProblem, inputs: Inputs, table: str) -> Call:
    """Call FlashAttention, of which versions 2 and 3 have other names for the table; only 2 takes slopes."""
    given = _of_flash_attention(p)
    if p.page:
        given[table] = inputs["block_table"]
    if p.alibi:
        given["alibi_slopes"] = inputs["slopes"]
    q, k, v, lengths = inputs["q"], _cache(p, inputs, "k"), _cache(p, inputs, "v"), inputs["lengths"]
    return lambda: {"o": package.flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, **given)}


_flash_attention_2 = partial(_flash_attention, table="block_table")
_flash_attention_3 = partial(_flash_attention, table="page_table")


def _latent_3(package: ModuleType, p: DecodeProblem, inputs: Inputs) -> Call:
    """Give the part of a key that is its value, and of a query that meets it, as FlashAttention 3 takes them."""
    q, cache, lengths, at = inputs["q"], _cache(p, inputs, "kv"), inputs["lengths"], p.head_dim_v
    given = _of_flash_attention(p) | ({"page_table": inputs["block_table"]} if p.page else {})
    parts = {"q": q[..., at:], "k_cache": cache[..., at:], "v_cache": cache[..., :at], "qv": q[..., :at]}
    return lambda: {"o": package.flash_attn_with_kvcache(**parts, cache_seqlens=lengths, **given)}


def _of_flash_attention(p: DecodeProblem) -> dict[str, Any]:
    window = (p.window - 1, 0) if p.window else (-1, -1)
    return {"softmax_scale": p.root**-0.5, "causal": True, "window_size": window, "softcap": float(p.softcap)}


def _decode(package: ModuleType, p: DecodeProblem, inputs: Inputs, tensor_cores: bool) -> Call:
    q, scaled = _queries(p, inputs), _scaled_values(p, inputs)
    cache = (_cache(p, inputs, "k"), _cache(p, inputs, "v"))
    run = flashinfer.decode(package, _shared(p), p.root**-0.5, q, cache, _pages(p, inputs), tensor_cores)
    return lambda: {"o": scaled(run()).view(p.batch, 1, p.heads, p.head_dim_v)}


def _prefill(package: ModuleType, p: DecodeProblem, inputs: Inputs) -> Call:
    q, scaled = _queries(p, inputs), _scaled_values(p, inputs)
    cache = (_cache(p, inputs, "k"), _cache(p, inputs, "v"))
    run = flashinfer.prefill_paged(package, _shared(p), p.root**-0.5, q, _starts(p, inputs), cache, _pages(p, inputs))
    return lambda: {"o": scaled(run()).view(p.batch, p.seq_q, p.heads, p.head_dim_v)}


def _latent(package: ModuleType, p: DecodeProblem, inputs: Inputs) -> Call:
    cache = _cache(p, inputs, "kv").squeeze(2)
    run = flashinfer.latent(
        package, _shared(p), p.root**-0.5, _queries(p, inputs), _starts(p, inputs), cache, _pages(p, inputs)
    )
    return lambda: {"o": run().view(p.batch, p.seq_q, p.heads, p.head_dim_v)}


BASELINES: tuple[PackageBaseline[DecodeProblem], ...] = (
    PackageBaseline("flash_attn", "flash_attn_with_kvcache", _covered_by_2, _flash_attention_2),
    PackageBaseline("flash_attn_interface", "flash_attn_with_kvcache", _covered_by_3, _flash_attention_3),
    PackageBaseline("flash_attn_interface", "flash_attn_with_kvcache", _covered_latent, _latent_3),
    PackageBaseline(
        "flashinfer", "BatchDecodeWithPagedKVCacheWrapper", _one_query, partial(_decode, tensor_cores=False)
    ),
    PackageBaseline(
        "flashinfer",
        "BatchDecodeWithPagedKVCacheWrapper on tensor cores",
        _one_query,
        partial(_decode, tensor_cores=True),
    ),
    PackageBaseline("flashinfer", "BatchPrefillWithPagedKVCacheWrapper", _several_queries, _prefill),
    PackageBaseline("flashinfer", "BatchMLAPagedAttentionWrapper", _covered_latent, _latent),
)


def _shared(p: DecodeProblem) -> flashinfer.Shared:
    return flashinfer.Shared(p.heads, p.kv_heads, p.head_dim, p.head_dim_v, p.seq_q > 1, p.window, float(p.softcap))


def _pages(p: DecodeProblem, inputs: Inputs) -> flashinfer.Pages:
    return flashinfer.pages_of(inputs["lengths"], inputs.get("block_table"), p.page or p.seq_k)


def _starts(p: DecodeProblem, inputs: Inputs) -> torch.Tensor:
    return torch.arange(p.batch + 1, dtype=torch.int32, device=inputs["q"].device) * p.seq_q


def _queries(p: DecodeProblem, inputs: Inputs) -> torch.Tensor:
    """Return the queries, [rows, heads, d], times the keys' scales, which FlashInfer has for all heads together."""
    q = inputs["q"].view(-1, p.heads, p.head_dim)
    return (q * _of_heads(p, inputs["k_scale"])).to(q.dtype) if p.cache else q


def _scaled_values(p: DecodeProblem, inputs: Inputs) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return what multiplies outputs by the values' scales, in place; it is timed."""
    if not p.cache:
        return lambda o: o
    scale = _of_heads(p, inputs["v_scale"]).to(inputs["q"].dtype)
    return lambda o: o.mul_(scale)


def _of_heads(p: DecodeProblem, scale: torch.Tensor) -> torch.Tensor:
    return scale.repeat_interleave(p.group)[:, None]


def _cache(p: DecodeProblem, inputs: Inputs, name: str) -> torch.Tensor:
    """Return a cache with zeros in the slots behind each sequence's end, which libraries expect to be numbers."""
    cache, tail = inputs[name], p.seq_k % p.page if p.page else 0
    if not tail:
        return cache
    cache = cache.clone()
    cache.view(torch.uint8)[inputs["block_table"][:, -1].long(), tail:] = 0
    return cache
