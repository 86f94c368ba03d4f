"""FlashInfer's wrappers, planned for a batch: their kernels are baselines of several workloads.

By the signatures of FlashInfer 0.7.2. A wrapper is planned once and then run, as a server does for all layers of a
step; only the run is timed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any
from weakref import WeakValueDictionary

import torch

Run = Callable[[], torch.Tensor]
HEAD_DIMS = (64, 128, 256)
WORKSPACE_BYTES = 128 << 20
"""what its documentation recommends"""
_workspaces: WeakValueDictionary[torch.device, torch.Tensor] = WeakValueDictionary()


@dataclass(frozen=True, slots=True)
class Shared:
    """Hold what all sequences of a batch share; `window` is the number of keys that a query sees, 0 for all."""

    heads: int
    kv_heads: int
    head_dim: int
    head_dim_v: int
    causal: bool
    window: int = 0
    softcap: float = 0.0

    def plan(self, scale: float, q: torch.Tensor, k: torch.Tensor) -> dict[str, Any]:
        """Return the arguments that all plans of a wrapper take."""
        return {
            "window_left": self.window - 1,  # -1 for no window; the query's own key is not counted
            "logits_soft_cap": self.softcap,
            "sm_scale": scale,
            "q_data_type": q.dtype,
            "kv_data_type": k.dtype,
        }


@dataclass(frozen=True, slots=True)
class Pages:
    """Hold where each sequence's keys are, int32 tensors by the names of FlashInfer's documentation."""

    indptr: torch.Tensor
    indices: torch.Tensor
    last_page_len: torch.Tensor
    lengths: torch.Tensor
    size: int


def pages_of(lengths: torch.Tensor, table: torch.Tensor | None, size: int) -> Pages:
    """Return the pages of sequences; without a table, each sequence has one page of `size` slots."""
    if table is None:
        table = torch.arange(len(lengths), dtype=torch.int32, device=lengths.device)[:, None]
    count = (lengths + size - 1) // size
    used = torch.arange(table.shape[1], device=lengths.device) < count[:, None]
    return Pages(indptr(count), table[used].contiguous(), (lengths - 1) % size + 1, lengths, size)


def indptr(lengths: torch.Tensor) -> torch.Tensor:
    """Return where each of successive parts begins, and the end of the last, int32 [parts + 1]."""
    zero = torch.zeros(1, dtype=torch.int32, device=lengths.device)
    return torch.cat([zero, lengths.cumsum(0).int()])


def decode(
    package: ModuleType, shared: Shared, scale: float, q: torch.Tensor, cache: Any, pages: Pages, tensor_cores: bool
) -> Run:
    """Return a run of one query per sequence, q [batch, heads, d], on a cache (k, v) of [pages, size, kv_heads, d]."""
    wrapper = package.BatchDecodeWithPagedKVCacheWrapper(workspace(q.device), "NHD", use_tensor_cores=tensor_cores)
    wrapper.plan(
        pages.indptr, pages.indices, pages.last_page_len, shared.heads, shared.kv_heads, shared.head_dim, pages.size,
        **shared.plan(scale, q, cache[0]),
    )  # fmt: skip # in the order of the parameters
    return lambda: wrapper.run(q, cache)


def prefill_paged(
    package: ModuleType, shared: Shared, scale: float, q: torch.Tensor, starts: torch.Tensor, cache: Any, pages: Pages
) -> Run:
    """Return a run of packed queries, q [total, heads, d], on a cache in pages; query rows begin at `starts`."""
    wrapper = package.BatchPrefillWithPagedKVCacheWrapper(workspace(q.device), "NHD")
    wrapper.plan(
        starts, pages.indptr, pages.indices, pages.last_page_len, shared.heads, shared.kv_heads, shared.head_dim,
        pages.size, causal=shared.causal, **shared.plan(scale, q, cache[0]),
    )  # fmt: skip
    return lambda: wrapper.run(q, cache)


def prefill_ragged(
    package: ModuleType, shared: Shared, scale: float, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    starts: torch.Tensor, key_starts: torch.Tensor,
) -> Run:  # fmt: skip
    """Return a run of packed queries on packed keys, all [total, heads, d]."""
    wrapper = package.BatchPrefillWithRaggedKVCacheWrapper(workspace(q.device), "NHD")
    wrapper.plan(
        starts, key_starts, shared.heads, shared.kv_heads, shared.head_dim, head_dim_vo=shared.head_dim_v,
        causal=shared.causal, **shared.plan(scale, q, k),
    )  # fmt: skip
    return lambda: wrapper.run(q, k, v)


def latent(
    package: ModuleType, shared: Shared, scale: float, q: torch.Tensor, starts: torch.Tensor, cache: torch.Tensor,
    pages: Pages,
) -> Run:  # fmt: skip
    """Return a run of latent attention, q [total, heads, d], on a cache of [pages, size, d]; a value is part of a key.

    The plan is given flat, as all versions take it.
    """
    wrapper = package.mla.BatchMLAPagedAttentionWrapper(workspace(q.device))
    wrapper.plan(
        qo_indptr=starts,
        kv_indptr=pages.indptr,
        kv_indices=pages.indices,
        kv_len_arr=pages.lengths,
        num_heads=shared.heads,
        head_dim_ckv=shared.head_dim_v,
        head_dim_kpe=shared.head_dim - shared.head_dim_v,
        page_size=pages.size,
        causal=shared.causal,
        sm_scale=scale,
        q_data_type=q.dtype,
        kv_data_type=cache.dtype,
    )
    at = shared.head_dim_v
    parts = {"q_nope": q[..., :at], "q_pe": q[..., at:], "ckv_cache": cache[..., :at], "kpe_cache": cache[..., at:]}
    return lambda: wrapper.run(**parts)


def workspace(device: torch.device) -> torch.Tensor:
    """Return memory for the parts of a run, which runs share as they follow one another."""
    found = _workspaces.get(device)
    if found is None:
        found = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        _workspaces[device] = found
    return found
