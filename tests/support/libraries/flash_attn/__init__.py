"""Stands in for FlashAttention 2, on the CPU."""

import torch
from standing_in import attend, batched, gathered, of_package, packed


@of_package("flash_attn")
def flash_attn_func(q, k, v, causal=False):
    return batched(q, k, v, causal=causal)


@of_package("flash_attn")
def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal=False, block_table=None
):
    if block_table is None:
        return packed(q, k, v, cu_seqlens_q, cu_seqlens_k, causal=causal)
    _require_pages(k)
    lengths = cu_seqlens_k.diff().tolist()
    k, v = (torch.cat([gathered(x, *one) for one in zip(block_table, lengths, strict=True)]) for x in (k, v))
    return packed(q, k, v, cu_seqlens_q, cu_seqlens_k, causal=causal)


@of_package("flash_attn")
def flash_attn_with_kvcache(
    q, k_cache, v_cache, cache_seqlens, block_table=None, softmax_scale=None, causal=False, window_size=(-1, -1),
    softcap=0.0, alibi_slopes=None,
):  # fmt: skip
    if block_table is not None:
        _require_pages(k_cache)
        k_cache, v_cache = ([x[own.long()].flatten(0, 1) for own in block_table] for x in (k_cache, v_cache))
    given = {"scale": softmax_scale, "causal": causal, "window": window_size, "softcap": softcap}
    return torch.stack([
        attend(rows, k[:n], v[:n], slopes=alibi_slopes, **given)
        for rows, k, v, n in zip(q, k_cache, v_cache, cache_seqlens.tolist(), strict=True)
    ])  # fmt: skip


def _require_pages(cache):
    if cache.shape[1] % 256:
        raise RuntimeError("Paged KV cache block size must be divisible by 256")
