"""Determine which faults the values of a case of attention can show, from the drawn tensors."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from evoengine.workloads.attention.coverage import ALIKE, DIAGONAL, RISES, rise_name
from evoengine.workloads.attention.problem import AttentionProblem
from evoengine.workloads.base import Drawn

_ALMOST_ALL = 0.999
"""share of a row's weight"""
_LATE = 1000
"""number of keys before one that takes all weight, so that their weight must be rescaled away"""


def shown_values(problem: AttentionProblem, drawn: Drawn) -> Iterator[str]:
    """Yield the names of what the first head shows, by its logits in powers of two [rows, keys] and by V."""
    q, k, v = (drawn.inputs[name][0, 0].float() for name in "qkv")
    if drawn.inputs is not drawn.expected:
        yield "keys in another order"
    if float(v.abs().max()) > torch.finfo(torch.float16).max:
        yield "values beyond a half"
    if bool((v == v[:1]).all()) and len(v) > 1:
        yield "columns of V that are constant"
    logits = q @ k.T * (math.log2(math.e) / math.sqrt(problem.head_dim))
    if problem.causal:
        yield from _at_diagonal(logits, problem.seq_k - problem.seq_q)
        seen = torch.ones_like(logits, dtype=torch.bool).tril(problem.seq_k - problem.seq_q)
        logits = logits.masked_fill(~seen, -math.inf)
    yield from _of_rows(logits)


def _of_rows(logits: torch.Tensor) -> Iterator[str]:
    finite = logits.isfinite()
    top, at = logits.max(dim=1)
    bottom = torch.where(finite, logits, math.inf).amin(dim=1)
    for name, found in (
        ("all logits of a row below -126", (top < -126) & (top > -65504)),
        ("all logits of a row below -65504", top < -65504),
        ("all logits of a row above 65504", bottom > 65504),
    ):
        if bool(found.any()):
            yield name
    yield from _rises(logits, top, at)
    falling = (top < 0) & (at < logits.shape[1] // 4) & (top > -126) & (top > bottom + 8)
    for half, name in enumerate(("upper", "lower")):
        if bool(falling[torch.arange(len(falling)) // 8 % 2 == half].any()):
            yield f"a row that falls, in the {name} half of a stripe"
    yield from _weights(logits, top, at)


def _at_diagonal(logits: torch.Tensor, diagonal: int) -> Iterator[str]:
    """Yield what a mask that is off by one would change, of logits without a mask."""
    row, last = torch.arange(len(logits)), logits.shape[1] - 1
    at = logits.argmax(dim=1)
    alone = (logits - logits.amax(dim=1, keepdim=True)).exp2().sum(dim=1) < 1 / _ALMOST_ALL
    if bool((alone & (at == row + diagonal) & (row < last)).any()):
        yield DIAGONAL[0]
    if bool((alone & (at == row + diagonal + 1)).any()):
        yield DIAGONAL[1]


def _rises(logits: torch.Tensor, top: torch.Tensor, at: torch.Tensor) -> Iterator[str]:
    """Yield the rises of a maximum from what it was before the key that has it."""
    before = torch.arange(logits.shape[1]) < at[:, None]
    earlier = torch.where(before, logits, -math.inf).amax(dim=1)
    rises = (top - earlier)[(at > 0) & (earlier > -1)]
    for rise in RISES:
        if bool(((rises - rise).abs() < 1e-4 * rise).any()):
            yield rise_name(rise)


def _weights(logits: torch.Tensor, top: torch.Tensor, at: torch.Tensor) -> Iterator[str]:
    """Yield what the weights of rows are, relative to the largest."""
    weights = (logits - top[:, None]).exp2()
    alone = weights.sum(dim=1) < 1 / _ALMOST_ALL
    if bool((alone & (at < logits.shape[1] // 4)).any()):
        yield "an early key that takes all weight"
    if bool((alone & (at >= logits.shape[1] * 3 // 4)).any()):
        yield "a late key that takes all weight"
    if bool((alone & (at >= _LATE)).any()):
        yield "a key that takes all weight behind a thousand others"
    for weight, name in ((2 / 3, "2/3"), (2.0**-15.5, "2^-15.5")):
        if bool((((weights / weight - 1).abs() < 0.05).sum(dim=1) >= ALIKE).any()):
            yield f"{ALIKE:,} weights of {name}"
