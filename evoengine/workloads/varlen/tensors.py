"""Tensors of attention over packed sequences: inputs drawn from a seed, the float64 reference, SDPA as the baseline.

Shapes as in `VarlenProblem`. Elements that no sequence owns are NaN: rows after the last sequence's keys, and the slots
of pages after a sequence's end. Entries of the table after a sequence's end name no page of the pool.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from evoengine.workloads.attention.problem import OUTPUT
from evoengine.workloads.attention.tensors import SHAPES, TORCH_DTYPES, negative_halves
from evoengine.workloads.base import Case, Drawn, Inputs, Outputs, Sample, Tensors
from evoengine.workloads.coverage import Cell
from evoengine.workloads.packages import PackageBaseline
from evoengine.workloads.varlen.cases import maxima_of_bits
from evoengine.workloads.varlen.packages import BASELINES
from evoengine.workloads.varlen.problem import VarlenProblem

SHARED_PAGES = "shared pages"
"""the draw in which sequences share the pages of a common prefix"""
NO_PAGE = 1 << 30
"""value of the table's entries after a sequence's end"""
SAMPLED = 8
"""number of blocks of rows of a whole problem that are compared in float64"""
BLOCK_ROWS = 64


class VarlenTensors(Tensors[VarlenProblem]):
    independent = frozenset({"normal", SHARED_PAGES})

    def draw(self, case: Case[VarlenProblem], seed: int, device: str = "cpu") -> Drawn:
        p, dtype = case.problem, TORCH_DTYPES[case.problem.dtype]
        generator = torch.Generator(device=device).manual_seed(seed)
        table = draw_table(p, seed, case.draw == SHARED_PAGES)
        inputs = {"q": torch.empty(p.total_q, p.heads, p.head_dim, dtype=dtype, device=device)}
        for name in "kv":
            inputs[name] = torch.full((*pool_shape(p), p.kv_heads, p.head_dim), math.nan, dtype=dtype, device=device)
        shape = SHAPES.get(case.draw, SHAPES["normal"])
        for s in range(p.sequences):
            q_len, kv_len = p.lens[s], p.kv_lens[s]
            q, k, v = (
                torch.randn(1, heads, length, p.head_dim, generator=generator, device=device)
                for heads, length in ((p.heads, q_len), (p.kv_heads, kv_len), (p.kv_heads, kv_len))
            )
            if q_len and kv_len:
                q, k, v = shape(q, k, v, generator)
            inputs["q"][_rows(p.lens, s)] = q[0].transpose(0, 1).to(dtype)
            slots = _slots(p, s, table).to(device)
            for name, rows in (("k", k), ("v", v)):
                _flat(inputs[name])[slots] = rows[0].transpose(0, 1).to(dtype)
        inputs |= {name: torch.from_numpy(values).to(device) for name, values in index_tensors(p, table).items()}
        return Drawn(inputs, inputs)

    def reference(self, problem: VarlenProblem, inputs: Inputs) -> Outputs:
        """Return softmax in float64 of each sequence, on keys gathered from its pages; [total_q, heads, head_dim]."""

        def one(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, hidden: torch.Tensor | None) -> torch.Tensor:
            q, k, v = q.double(), k.double(), v.double()
            scores = q @ k.transpose(-1, -2) / math.sqrt(problem.head_dim)
            return _softmax(scores, hidden) @ v

        return {OUTPUT: _by_sequence(problem, inputs, torch.float64, one)}

    def own_dtype(self, problem: VarlenProblem, inputs: Inputs) -> Outputs:
        """Return it with every step rounded to the candidate's own dtype, as for `attention`."""
        dtype, scale = inputs["q"].dtype, problem.head_dim**-0.25

        def one(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, hidden: torch.Tensor | None) -> torch.Tensor:
            scores = ((q * scale).float() @ (k * scale).float().transpose(-1, -2)).to(dtype)
            return _softmax(scores.float(), hidden).to(dtype).float() @ v.float()

        return {OUTPUT: _by_sequence(problem, inputs, dtype, one)}

    def rounded_once(self, problem: VarlenProblem, inputs: Inputs) -> Outputs:
        """Return the best result of a fused kernel: everything in float32, with only P and O rounded to T."""
        dtype = inputs["q"].dtype

        def one(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, hidden: torch.Tensor | None) -> torch.Tensor:
            scores = q.float() @ k.float().transpose(-1, -2) / math.sqrt(problem.head_dim)
            if hidden is not None:
                scores.masked_fill_(hidden, -math.inf)
            lag = torch.linspace(0.0, math.log(2.0), q.shape[1], device=q.device).view(-1, 1)
            p = (scores - scores.amax(-1, keepdim=True).clamp(min=-1e30) + lag).exp_()
            return (p.to(dtype).float() @ v.float()) / p.sum(-1, keepdim=True).clamp(min=1e-30)

        return {OUTPUT: _by_sequence(problem, inputs, dtype, one)}

    def shown(self, case: Case[VarlenProblem], drawn: Drawn) -> frozenset[Cell]:
        """Return what the first head's scores show to a kernel that takes maxima of bits."""
        if not maxima_of_bits(case.config):
            return frozenset()
        return frozenset(Cell("values", what) for what in _shown_values(case.problem, drawn.inputs))

    def baselines(self, problem: VarlenProblem) -> tuple[str, ...]:
        return ("SDPA",)

    def baseline(self, name: str, problem: VarlenProblem, inputs: Inputs) -> Callable[[], object]:
        """Return a call of SDPA for each sequence, on keys gathered from their pages before."""
        gathered = [_sequence(problem, inputs, s) for s in range(problem.sequences)]
        return lambda: [_sdpa(problem, *one) for one in gathered if min(one[0].shape[1], one[1].shape[1])]

    def package_baselines(self) -> tuple[PackageBaseline[VarlenProblem], ...]:
        return BASELINES

    def outputs_of(self, problem: VarlenProblem, found: list[torch.Tensor]) -> Outputs:
        shape = (problem.total_q, problem.heads, problem.head_dim)
        out, own = torch.zeros(shape, dtype=TORCH_DTYPES[problem.dtype]), iter(found)
        for s in range(problem.sequences):
            if min(problem.lens[s], problem.kv_lens[s]):
                part = next(own).transpose(0, 1)
                out = out.to(part.device)
                out[_rows(problem.lens, s)] = part
        return {OUTPUT: out}

    def library(self, problem: VarlenProblem, inputs: Inputs) -> Outputs:
        out = torch.zeros_like(inputs["q"])
        for s in range(problem.sequences):
            q, k, v = _sequence(problem, inputs, s)
            if min(q.shape[1], k.shape[1]):
                out[_rows(problem.lens, s)] = _sdpa(problem, q, k, v).transpose(0, 1)
        return {OUTPUT: out}

    def samples(self, problem: VarlenProblem, inputs: Inputs, seed: int) -> Sequence[Sample[VarlenProblem]]:
        """Return the last rows of the longest sequence, and blocks of rows drawn from all, each with all heads."""
        rng = np.random.default_rng(seed)
        places = [(problem.order[0], problem.lens[problem.order[0]])]
        owner = np.repeat(np.arange(problem.sequences), problem.lens)
        for row in rng.integers(problem.total_q, size=SAMPLED):
            s = int(owner[row])
            places.append((s, int(row) - sum(problem.lens[:s]) + 1))
        return [_sample(problem, inputs, s, range(max(0, end - BLOCK_ROWS), end)) for s, end in places]

    def check_bytes(self, problem: VarlenProblem) -> int:
        """Return the bytes of drawing in float32, and of a sample's scores in float64 three times over."""
        row = problem.head_dim * (problem.heads + 2 * problem.kv_heads)
        longest = max(problem.kv_lens)
        return 4 * row * max(*problem.lens, longest) + 8 * problem.heads * longest * (
            3 * BLOCK_ROWS + 2 * problem.head_dim
        )


def pool_shape(problem: VarlenProblem) -> tuple[int, ...]:
    return (problem.pool, problem.page) if problem.page else (problem.pool,)


def draw_table(problem: VarlenProblem, seed: int, shared: bool = False) -> np.ndarray:
    """Return the pages of each sequence, int32 [sequences, table_width], in an order drawn from all of the pool.

    There are none if K and V are packed. With `shared`, each sequence begins with the same pages as the longest one,
    as far as both fill them.
    """
    p = problem
    if not p.page:
        return np.empty((p.sequences, 0), np.int32)
    table = np.full((p.sequences, p.table_width), NO_PAGE, np.int32)
    pages = iter(np.random.default_rng(seed).permutation(p.pool))
    longest = max(range(p.sequences), key=lambda s: p.kv_lens[s])
    for s in (longest, *(s for s in range(p.sequences) if s != longest)):
        common = p.kv_lens[s] // p.page if shared and s != longest else 0
        table[s, :common] = table[longest, :common]
        for i in range(common, p.pages_of(s)):
            table[s, i] = next(pages)
    return table


def index_tensors(problem: VarlenProblem, table: np.ndarray) -> dict[str, np.ndarray]:
    """Return the int32 inputs by name: cumulative lengths, order and, with pages, the table."""
    cumulative = {
        name: np.cumsum((0, *lens), dtype=np.int32)
        for name, lens in (("cu_q", problem.lens), ("cu_kv", problem.kv_lens))
    }
    found = cumulative | {"order": np.array(problem.order, np.int32)}
    return found | {"table": table} if problem.page else found


def _rows(lens: Sequence[int], sequence: int) -> slice:
    first = sum(lens[:sequence])
    return slice(first, first + lens[sequence])


def _slots(problem: VarlenProblem, sequence: int, table: np.ndarray) -> torch.Tensor:
    """Return the rows of the pool that hold a sequence's keys."""
    if not problem.page:
        rows = _rows(problem.kv_lens, sequence)
        return torch.arange(rows.start, rows.stop)
    key = np.arange(problem.kv_lens[sequence])
    return torch.from_numpy(table[sequence, key // problem.page].astype(np.int64) * problem.page + key % problem.page)


def _flat(pool: torch.Tensor) -> torch.Tensor:
    """Return K or V as [rows, kv_heads, head_dim]."""
    return pool.view(-1, *pool.shape[-2:])


Triple = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
One = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]


def _sequence(problem: VarlenProblem, inputs: Inputs, sequence: int) -> Triple:
    """Return Q [heads, q_len, head_dim], and K and V [heads, kv_len, head_dim] gathered and repeated for all heads."""
    table = inputs["table"].cpu().numpy() if problem.page else np.empty((0, 0), np.int32)
    slots = _slots(problem, sequence, table).to(inputs["q"].device)
    group = problem.heads // problem.kv_heads
    k, v = (_flat(inputs[n])[slots].transpose(0, 1).repeat_interleave(group, dim=0) for n in "kv")
    return inputs["q"][_rows(problem.lens, sequence)].transpose(0, 1), k, v


def _by_sequence(problem: VarlenProblem, inputs: Inputs, dtype: torch.dtype, one: One) -> torch.Tensor:
    out = torch.zeros(inputs["q"].shape, dtype=dtype, device=inputs["q"].device)
    for s in range(problem.sequences):
        q, k, v = _sequence(problem, inputs, s)
        if min(q.shape[1], k.shape[1]):
            out[_rows(problem.lens, s)] = one(q, k, v, _hidden(problem, q, k)).transpose(0, 1).to(dtype)
    return out


def _hidden(problem: VarlenProblem, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor | None:
    """Return which keys a row does not see, [q_len, kv_len]; None if it sees all."""
    if not problem.causal:
        return None
    q_len, kv_len = q.shape[1], k.shape[1]
    return ~torch.ones(q_len, kv_len, dtype=torch.bool, device=q.device).tril(diagonal=kv_len - q_len)


def _shown_values(problem: VarlenProblem, inputs: Inputs) -> Iterator[str]:
    """Yield what the scores of each sequence's first head show, in powers of two."""
    for s in range(problem.sequences):
        q, k, _ = _sequence(problem, inputs, s)
        if min(q.shape[1], k.shape[1]):
            scores = q[0].float() @ k[0].float().T * (math.log2(math.e) / math.sqrt(problem.head_dim))
            hidden = _hidden(problem, q, k)
            seen = scores if hidden is None else scores.masked_fill(hidden, -math.inf)
            bottom = scores if hidden is None else scores.masked_fill(hidden, math.inf)
            yield from negative_halves(seen.amax(-1), bottom.amin(-1))


def _softmax(scores: torch.Tensor, hidden: torch.Tensor | None) -> torch.Tensor:
    """Return the weights; those of a row that sees no key are zero."""
    if hidden is None:
        return torch.softmax(scores, -1)
    weights = torch.softmax(scores.masked_fill(hidden, -math.inf), -1)
    return weights.masked_fill(hidden, 0.0)


def _sdpa(problem: VarlenProblem, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    hidden = _hidden(problem, q, k)
    square = hidden is not None and q.shape[1] == k.shape[1]
    mask = None if hidden is None or square else ~hidden
    out = scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=mask, is_causal=square)[0]
    return out if hidden is None else out.masked_fill(hidden.all(-1)[:, None], 0.0)


def _sample(problem: VarlenProblem, inputs: Inputs, sequence: int, rows: range) -> Sample[VarlenProblem]:
    """Return rows of a sequence as a packed problem of that sequence alone."""
    p, q_len, kv_len = problem, problem.lens[sequence], problem.kv_lens[sequence]
    keys = max(0, rows.stop + kv_len - q_len) if p.causal else kv_len
    own = replace(p, lens=(len(rows),), kv_lens=(keys,), page=0, pool=0)
    table = inputs["table"].cpu().numpy() if p.page else np.empty((0, 0), np.int32)
    slots = _slots(p, sequence, table)[:keys].to(inputs["q"].device)
    first = sum(p.lens[:sequence])
    place = slice(first + rows.start, first + rows.stop)
    part = {"q": inputs["q"][place]} | {name: _flat(inputs[name])[slots] for name in "kv"}
    return Sample(own, part, lambda outputs: {OUTPUT: outputs[OUTPUT][place]})
