"""What the stand-ins of FlashAttention and FlashInfer share: attention by torch, and the real packages' signatures.

The stand-ins have no code of those packages. A call that the real function would not accept raises TypeError.
"""

from __future__ import annotations

import functools
import math

import torch

from tests.support.library_signatures import signature


def of_package(package, name=None):
    """Bind a function's arguments as the real one of that name does; those that a call leaves out are not passed."""

    def decorate(function):
        own = name or function.__name__

        @functools.wraps(function)
        def bound(*args, **kwargs):
            return function(**signature(package, own).bind(*args, **kwargs).arguments)

        return bound

    return decorate


def attend(q, k, v, scale=None, causal=False, window=(-1, -1), softcap=0.0, slopes=None):
    """Return attention of one sequence, q [rows, heads, d] to k and v [keys, kv_heads, …], aligned to the last key."""
    rows, keys, group = q.shape[0], k.shape[0], q.shape[1] // k.shape[1]
    if not keys:
        return q.new_zeros(rows, q.shape[1], v.shape[-1])
    k, v = (x.float().repeat_interleave(group, 1).transpose(0, 1) for x in (k, v))
    scores = q.float().transpose(0, 1) @ k.transpose(1, 2) * (scale or q.shape[-1] ** -0.5)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    distance = torch.arange(keys) - torch.arange(keys - rows, keys)[:, None]
    if slopes is not None:
        scores = scores - slopes[:, None, None] * distance.abs()
    left, right = window
    hidden = (distance > (0 if causal else keys)) | (distance < -left if left >= 0 else False)
    hidden = hidden | (distance > right if right >= 0 else False)
    weights = torch.softmax(scores.masked_fill(hidden, -math.inf), -1).nan_to_num(0.0)
    return (weights @ v).transpose(0, 1).to(q.dtype)


def gathered(cache, pages, length):
    """Return a sequence's rows of a cache [pages, size, …] by its pages."""
    return cache[pages.long()].flatten(0, 1)[:length]


def batched(q, k, v, **given):
    return torch.stack([attend(*one, **given) for one in zip(q, k, v, strict=True)])


def packed(q, k, v, starts, key_starts, **given):
    """Return attention of sequences whose rows lie one after the other."""
    ends, key_ends = starts.tolist(), key_starts.tolist()
    parts = [
        attend(q[a:b], k[c:d], v[c:d], **given)
        for a, b, c, d in zip(ends, ends[1:], key_ends, key_ends[1:], strict=False)
    ]
    return torch.cat(parts)


def in_pages(q, k, v, starts, tables, lengths, **given):
    """Return attention of packed rows to caches in pages; `tables` has the pages of each sequence."""
    ends = starts.tolist()
    parts = [
        attend(q[a:b], gathered(k, pages, n), gathered(v, pages, n), **given)
        for a, b, pages, n in zip(ends, ends[1:], tables, lengths, strict=False)
    ]
    return torch.cat(parts)
