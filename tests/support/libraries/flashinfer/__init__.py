"""Stands in for FlashInfer, on the CPU."""

import torch
from standing_in import in_pages, of_package, packed

from . import mla as mla


def options(window_left=-1, logits_soft_cap=0.0, sm_scale=None, causal=False, **dtypes):
    assert dtypes.keys() <= {"q_data_type", "kv_data_type", "head_dim_vo"}, dtypes
    return {"window": (window_left, -1), "softcap": logits_soft_cap, "scale": sm_scale, "causal": causal}


def tables_of(indptr, indices, last_page_len, size):
    """Return the pages of each sequence, and its length."""
    own = [indices[a:b] for a, b in zip(indptr.tolist(), indptr.tolist()[1:], strict=False)]
    return own, [(len(pages) - 1) * size + last for pages, last in zip(own, last_page_len.tolist(), strict=True)]


class BatchDecodeWithPagedKVCacheWrapper:
    @of_package("flashinfer", "BatchDecodeWithPagedKVCacheWrapper.__init__")
    def __init__(self, float_workspace_buffer, kv_layout, use_tensor_cores):
        assert kv_layout == "NHD" and float_workspace_buffer.dtype == torch.uint8

    @of_package("flashinfer", "BatchDecodeWithPagedKVCacheWrapper.plan")
    def plan(self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, **given):
        self._batch, self._options = len(last_page_len), options(**given)
        self._tables = tables_of(indptr, indices, last_page_len, page_size)

    @of_package("flashinfer", "BatchDecodeWithPagedKVCacheWrapper.run")
    def run(self, q, paged_kv_cache):
        return in_pages(q, *paged_kv_cache, torch.arange(self._batch + 1), *self._tables, **self._options)


class BatchPrefillWithPagedKVCacheWrapper:
    @of_package("flashinfer", "BatchPrefillWithPagedKVCacheWrapper.__init__")
    def __init__(self, float_workspace_buffer, kv_layout):
        assert kv_layout == "NHD"

    @of_package("flashinfer", "BatchPrefillWithPagedKVCacheWrapper.plan")
    def plan(
        self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, num_kv_heads,
        head_dim_qk, page_size, **given,
    ):  # fmt: skip
        self._starts, self._options = qo_indptr, options(**given)
        self._tables = tables_of(paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, page_size)

    @of_package("flashinfer", "BatchPrefillWithPagedKVCacheWrapper.run")
    def run(self, q, paged_kv_cache):
        return in_pages(q, *paged_kv_cache, self._starts, *self._tables, **self._options)


class BatchPrefillWithRaggedKVCacheWrapper:
    @of_package("flashinfer", "BatchPrefillWithRaggedKVCacheWrapper.__init__")
    def __init__(self, float_workspace_buffer, kv_layout):
        assert kv_layout == "NHD"

    @of_package("flashinfer", "BatchPrefillWithRaggedKVCacheWrapper.plan")
    def plan(self, qo_indptr, kv_indptr, num_qo_heads, num_kv_heads, head_dim_qk, **given):
        self._starts, self._options = (qo_indptr, kv_indptr), options(**given)

    @of_package("flashinfer", "BatchPrefillWithRaggedKVCacheWrapper.run")
    def run(self, q, k, v):
        return packed(q, k, v, *self._starts, **self._options)
