"""Stands in for flashinfer.mla."""

from itertools import pairwise

import torch
from standing_in import in_pages, of_package


class BatchMLAPagedAttentionWrapper:
    @of_package("flashinfer", "BatchMLAPagedAttentionWrapper.__init__")
    def __init__(self, float_workspace_buffer):
        pass

    @of_package("flashinfer", "BatchMLAPagedAttentionWrapper.plan")
    def plan(
        self, qo_indptr, kv_indptr, kv_indices, kv_len_arr, num_heads, head_dim_ckv, head_dim_kpe, page_size, causal,
        sm_scale, q_data_type, kv_data_type,
    ):  # fmt: skip
        ends = kv_indptr.tolist()
        self._tables = [kv_indices[a:b] for a, b in pairwise(ends)]
        self._starts, self._lengths = qo_indptr, kv_len_arr.tolist()
        self._options = {"scale": sm_scale, "causal": causal}

    @of_package("flashinfer", "BatchMLAPagedAttentionWrapper.run")
    def run(self, q_nope, q_pe, ckv_cache, kpe_cache):
        q, k, v = torch.cat([q_nope, q_pe], -1), torch.cat([ckv_cache, kpe_cache], -1), ckv_cache
        cache = (k[:, :, None], v[:, :, None])
        return in_pages(q, *cache, self._starts, self._tables, self._lengths, **self._options)
