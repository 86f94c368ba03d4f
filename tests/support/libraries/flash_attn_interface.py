"""Stands in for FlashAttention 3, on the CPU."""

import torch
from standing_in import batched, in_pages, of_package, packed


@of_package("flash_attn_interface")
def flash_attn_func(q, k, v, causal=False):
    return batched(q, k, v, causal=causal)


@of_package("flash_attn_interface")
def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal=False):
    return packed(q, k, v, cu_seqlens_q, cu_seqlens_k, causal=causal)


@of_package("flash_attn_interface")
def flash_attn_with_kvcache(
    q, k_cache, v_cache, cache_seqlens, qv=None, page_table=None, cu_seqlens_q=None, max_seqlen_q=None,
    softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
):  # fmt: skip
    if qv is not None:
        q, k_cache = torch.cat([qv, q], -1), torch.cat([v_cache, k_cache], -1)
    if page_table is None:  # a page for each sequence
        page_table = torch.arange(len(k_cache))[:, None]
    starts, rows = cu_seqlens_q, q
    if starts is None:
        starts, rows = torch.arange(len(q) + 1) * q.shape[1], q.flatten(0, 1)
    given = {"scale": softmax_scale, "causal": causal, "window": window_size, "softcap": softcap}
    out = in_pages(rows, k_cache, v_cache, starts, page_table, cache_seqlens.tolist(), **given)
    return out.view(*q.shape[:-1], v_cache.shape[-1])
