"""Decode attention's tensors: a cache in pages with NaN wherever no key is, the float64 reference, the baselines.

Shapes as in `DecodeProblem`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch.nn.functional import normalize, scaled_dot_product_attention

from evoengine.workloads.base import Case, Drawn, Inputs, Outputs, Tensors
from evoengine.workloads.coverage import Cell
from evoengine.workloads.decode.cases import BEFORE_WINDOW, CODES, LENGTHS, PAGES, VALUES, step_keys
from evoengine.workloads.decode.packages import BASELINES
from evoengine.workloads.decode.problem import DecodeProblem, of_heads
from evoengine.workloads.packages import PackageBaseline
from evoengine.workloads.tensors import TORCH_DTYPES

OUTSIDE = 0x3FFF_FFFF
"""in a block table behind a sequence's last page: what no kernel may follow"""
PRODUCTS = "matmul and softmax"
"""the baseline where SDPA has none, or one that no GPU should be compared with"""


class DecodeTensors(Tensors[DecodeProblem]):
    independent = frozenset({"normal", "one long"})

    def draw(self, case: Case[DecodeProblem], seed: int, device: str = "cpu") -> Drawn:
        p = case.problem
        generator = torch.Generator(device=device).manual_seed(seed)
        lengths = _lengths(case, generator)
        q = torch.randn(p.batch, p.seq_q, p.heads, p.head_dim, generator=generator, device=device)
        shape = (p.batch, p.seq_k, p.kv_heads, p.head_dim)
        k, *others = (torch.randn(shape, generator=generator, device=device) for _ in p.caches)
        if case.draw == "shared":
            for x in (k, *others):
                x[1:] = x[:1]
        q, k = _SHAPED.get(case.draw, _normal)(p, q, k, lengths, generator)
        dtype = TORCH_DTYPES[p.dtype]
        inputs = {"q": q.to(dtype), "lengths": lengths.int()}
        caches = dict(zip(p.caches, (k, *others), strict=True))
        if p.cache:
            caches, scales = _scaled(p, caches, case.draw == "subnormal codes", generator)
            inputs |= scales
        outside = torch.arange(p.seq_k, device=device) >= lengths[:, None]
        wide = torch.float32 if p.cache else dtype  # torch fills nothing in FP8
        for name, x in caches.items():
            caches[name] = (
                x.to(wide).masked_fill_(outside[..., None, None], torch.nan).to(TORCH_DTYPES[p.cache or p.dtype])
            )
        inputs |= {name: numbers_of_heads(name, p, generator) for name in of_heads(p)}
        if p.page:
            inputs |= _paged(p, caches, lengths, case.draw == "shared", generator)
        else:
            inputs |= caches
        return Drawn(inputs, inputs)

    def reference(self, problem: DecodeProblem, inputs: Inputs) -> Outputs:
        """Return softmax(q kᵀ / √head_dim) v in float64 over each sequence's keys, gathered from its pages."""
        out = _zeros(problem, inputs, torch.float64)
        for b, q, k, v in _sequences(problem, inputs):
            q, k, v = q.double(), k.double(), v.double()
            logits = _logits_of(problem, inputs, _shared(q, k.transpose(-1, -2)) / math.sqrt(problem.root))
            out[b] = _to_rows(problem, _shared(_weights(problem, inputs, logits), v))
        return {"o": out}

    def own_dtype(self, problem: DecodeProblem, inputs: Inputs) -> Outputs:
        """Return the same with every step rounded to the kernel's own dtype, products summed in float32."""
        dtype, scale = inputs["q"].dtype, problem.root**-0.25
        out = _zeros(problem, inputs, dtype)
        for b, q, k, v in _sequences(problem, inputs):
            k, v = k.to(dtype), v.to(dtype)
            scores = _shared((q * scale).float(), (k * scale).float().transpose(-1, -2)).to(dtype)
            weights = _weights(problem, inputs, _logits_of(problem, inputs, scores.float())).to(dtype)
            out[b] = _to_rows(problem, _shared(weights.float(), v.float()).to(dtype))
        return {"o": out}

    def rounded_once(self, problem: DecodeProblem, inputs: Inputs) -> Outputs:
        """Return the best result of a fused kernel: float32 throughout, with only the weights and o rounded.

        Weights are relative to a value of each row between its largest and half of that, as where a maximum lags.
        """
        out = _zeros(problem, inputs, inputs["q"].dtype)
        for b, q, k, v in _sequences(problem, inputs):
            scores = _shared(q.float(), k.float().transpose(-1, -2)) / math.sqrt(problem.root)
            weights = _weights(problem, inputs, _logits_of(problem, inputs, scores))
            lag = torch.linspace(0.5, 1.0, scores.shape[-2], device=out.device).view(-1, 1)
            unit = weights.amax(-1, keepdim=True).clamp(min=1e-30) * lag
            p = (weights / unit).to(out.dtype).float()
            out[b] = _to_rows(problem, (_shared(p, v.float()) * unit).to(out.dtype))
        return {"o": out}

    def shown(self, case: Case[DecodeProblem], drawn: Drawn) -> frozenset[Cell]:
        return frozenset(_shown(case, drawn.inputs))

    def baselines(self, problem: DecodeProblem) -> tuple[str, ...]:
        """Return SDPA where it can. It has neither caps nor sinks, and copies a latent cache for every head."""
        return (PRODUCTS,) if problem.softcap or problem.sinks or problem.latent else ("SDPA",)

    def baseline(self, name: str, problem: DecodeProblem, inputs: Inputs) -> Callable[[], object]:
        """Return SDPA or products on the cache as one tensor of all sequences, gathered before; all are full."""
        k, v = (_gathered(problem, inputs, name).transpose(1, 2).contiguous() for name in "kv")
        q = inputs["q"].transpose(1, 2).contiguous()
        if name == PRODUCTS:
            return partial(_by_products, problem, inputs, q, k, k[..., : v.shape[-1]] if problem.latent else v)
        mask = None
        if problem.seq_q > 1 or problem.window or problem.alibi:
            shape = (problem.heads, problem.seq_q, problem.seq_k)
            mask = _logits_of(problem, inputs, torch.zeros(shape, device=q.device)).to(q.dtype)
        scale = problem.root**-0.5
        return lambda: scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=problem.group > 1)

    def package_baselines(self) -> tuple[PackageBaseline[DecodeProblem], ...]:
        return BASELINES

    def outputs_of(self, problem: DecodeProblem, found: torch.Tensor) -> Outputs:
        return {"o": found.transpose(1, 2)}

    def library(self, problem: DecodeProblem, inputs: Inputs) -> Outputs:
        return self.rounded_once(problem, inputs)

    def check_bytes(self, problem: DecodeProblem) -> int:
        """Return the bytes of the cache drawn in float32, its copies in the dtype, and a sequence in float64."""
        cache = 2 * problem.batch * problem.seq_k * problem.kv_heads * problem.head_dim
        return 10 * cache + 32 * problem.seq_k * problem.heads * problem.head_dim


def _zeros(problem: DecodeProblem, inputs: Inputs, dtype: torch.dtype) -> torch.Tensor:
    """Return outputs of queries that see no key, [batch, seq_q, heads, head_dim_v]."""
    return inputs["q"].new_zeros((*inputs["q"].shape[:-1], problem.head_dim_v), dtype=dtype)


# The cache: what a sequence's keys are, wherever they lie.


def _slots(problem: DecodeProblem, inputs: Inputs, sequence: int, length: int) -> torch.Tensor:
    """Return the slots of a sequence's keys among all of the cache, int64 [length]."""
    key = torch.arange(length, device=inputs["lengths"].device)
    if not problem.page:
        return sequence * problem.seq_k + key
    pages = inputs["block_table"][sequence].long()
    return pages[key // problem.page] * problem.page + key % problem.page


def _sequences(
    problem: DecodeProblem, inputs: Inputs
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Yield each sequence that has keys: its number, q [heads, seq_q, d], and k and v [kv_heads, length, d].

    Those of a cache in FP8 are float64.
    """
    for b, length in enumerate(inputs["lengths"].tolist()):
        if length:
            k = _rows(problem, inputs, "k", b, length).transpose(0, 1)
            latent = problem.latent
            v = k[..., : problem.head_dim_v] if latent else _rows(problem, inputs, "v", b, length).transpose(0, 1)
            yield b, inputs["q"][b].transpose(0, 1), k, v


def _shared(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return x [heads, m, n] times y [kv_heads, n, l], each KV head's for all heads that share it; [heads, m, l]."""
    return (x.reshape(len(y), -1, x.shape[-1]) @ y).view(*x.shape[:-1], y.shape[-1])


def _rows(problem: DecodeProblem, inputs: Inputs, name: str, sequence: int, length: int) -> torch.Tensor:
    """Return k or v of a sequence, [length, kv_heads, d], in float64 where the cache is FP8."""
    cache = inputs["kv" if problem.latent else name].view(-1, problem.kv_heads, problem.head_dim)
    found = cache[_slots(problem, inputs, sequence, length)]
    if name == "v":
        found = found[..., : problem.head_dim_v]
    return found.double() * inputs[f"{name}_scale"].double()[:, None] if problem.cache else found


def _gathered(problem: DecodeProblem, inputs: Inputs, name: str) -> torch.Tensor:
    """Return k or v without pages in the dtype of q, [batch, seq_k, kv_heads, head_dim]; all sequences are full."""
    every = range(problem.batch)
    return torch.stack([_rows(problem, inputs, name, b, problem.seq_k).to(inputs["q"].dtype) for b in every])


def _by_products(
    problem: DecodeProblem, inputs: Inputs, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> torch.Tensor:
    """Return attention of q [batch, heads, seq_q, d] to k and v [batch, kv_heads, seq_k, …], without a loop or a wait.

    A GPU is timed only while the CPU is ahead of it.
    """
    by_cache = (problem.batch, problem.kv_heads, problem.group * problem.seq_q)
    scores = problem.root**-0.5 * (q.view(*by_cache, -1) @ k.mT)
    logits = _logits_of(problem, inputs, scores.view(*q.shape[:3], -1))
    weights = _weights(problem, inputs, logits).to(v.dtype)
    return (weights.view(*by_cache, -1) @ v).view(*q.shape[:3], -1)


def _distance(problem: DecodeProblem, keys: int, device: torch.device) -> torch.Tensor:
    """Return how far keys lie behind the queries, [seq_q, keys]; negative before them. The last key is the last's."""
    query = torch.arange(problem.seq_q, device=device)[:, None]
    return torch.arange(keys, device=device) - (query + keys - problem.seq_q)


def _hidden(problem: DecodeProblem, keys: int, device: torch.device) -> torch.Tensor:
    """Return which keys the queries do not see, [seq_q, keys]."""
    distance = _distance(problem, keys, device)
    return (distance > 0) | (distance <= -problem.window) if problem.window else distance > 0


def _logits_of(problem: DecodeProblem, inputs: Inputs, scores: torch.Tensor) -> torch.Tensor:
    """Return logits from products of queries and keys [heads, seq_q, keys]; those of unseen keys are -inf."""
    keys, device = scores.shape[-1], scores.device
    if problem.softcap:
        scores = problem.softcap * torch.tanh(scores / problem.softcap)
    if problem.alibi:
        scores = scores + inputs["slopes"].view(-1, 1, 1).to(scores.dtype) * _distance(problem, keys, device)
    if problem.seq_q == 1 and not problem.window:
        return scores  # a single query sees all keys
    return scores.masked_fill(_hidden(problem, keys, device), -torch.inf)


def _weights(problem: DecodeProblem, inputs: Inputs, logits: torch.Tensor) -> torch.Tensor:
    """Return the weights of logits [heads, seq_q, keys]; zeros where a query sees no key."""
    if not problem.sinks:
        return torch.softmax(logits, -1).nan_to_num(0.0)
    sinks = inputs["sinks"].view(-1, 1, 1).to(logits.dtype).expand(*logits.shape[:-1], 1)
    return torch.softmax(torch.cat([logits, sinks], -1), -1)[..., :-1]


def _to_rows(problem: DecodeProblem, outputs: torch.Tensor) -> torch.Tensor:
    """Return [heads, seq_q, head_dim] as it lies in o."""
    return outputs.transpose(0, 1)


# Draws: lengths, pages and values.


def _lengths(case: Case[DecodeProblem], generator: torch.Generator) -> torch.Tensor:
    """Return the sequences' lengths, int64 [batch], by how the case draws."""
    p, step = case.problem, step_keys(case.config)
    device = generator.device
    if case.draw == "unequal":
        kinds = [p.seq_k, 0, 1, step, step + 1, step - 1, p.seq_q - 1, 2, p.seq_q]
        lengths = torch.tensor([min(p.seq_k, kinds[b % len(kinds)]) for b in range(p.batch)], device=device)
        return lengths[torch.randperm(p.batch, generator=generator, device=device)]
    if case.draw == "one long":
        return torch.tensor([p.seq_k if b == 1 else p.seq_q + b for b in range(p.batch)], device=device)
    if case.draw == "shared":
        return torch.tensor(
            [p.seq_k if b == 0 else max(1, p.seq_k - b * step // 2) for b in range(p.batch)], device=device
        )
    return torch.full((p.batch,), p.seq_k, device=device)


def _paged(
    problem: DecodeProblem, caches: Inputs, lengths: torch.Tensor, shared: bool, generator: torch.Generator
) -> dict[str, torch.Tensor]:
    """Return the pools of the caches with the table of their pages, which are in any order, the pool's last among them.

    With `shared` all sequences have the pages of the first, which is the longest. Whatever is behind a length is NaN,
    and so are pages that no sequence has; entries behind a sequence's last page lead out of the pool.
    """
    p, device = problem, generator.device
    order = torch.randperm(p.pages, generator=generator, device=device).view(p.batch, p.table_width)
    longest = int(lengths.argmax())
    order[order == p.pages - 1], order[longest, 0] = order[longest, 0].clone(), p.pages - 1
    if shared:
        order = order[longest].expand_as(order)
    used = torch.arange(p.table_width, device=device) * p.page < lengths[:, None]
    found = {"block_table": torch.where(used, order, OUTSIDE).int()}
    key = torch.arange(p.seq_k, device=device)
    slots = order[:, key // p.page] * p.page + key % p.page
    for name, cache in caches.items():
        pool = torch.full((p.pages * p.page, *cache.shape[2:]), torch.nan, dtype=cache.dtype, device=device)
        for b in [longest] if shared else range(p.batch):
            pool[slots[b]] = cache[b]
        found[name] = pool.view(p.pages, p.page, *cache.shape[2:])
    return found


def numbers_of_heads(name: str, problem: DecodeProblem, generator: torch.Generator) -> torch.Tensor:
    """Return slopes from 0.04 to 0.3, in any order, or sinks that weigh as much as a dozen keys; float32 [heads]."""
    heads, device = problem.heads, generator.device
    if name == "sinks":
        return torch.randn(heads, generator=generator, device=device) + 2.5
    order = torch.randperm(heads, generator=generator, device=device)
    return (0.04 + 0.26 * order.float() / heads).contiguous()


def _scaled(
    problem: DecodeProblem, caches: Inputs, subnormal: bool, generator: torch.Generator
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return k and v in units of a scale for each KV head, and the scales, float32 [kv_heads], all by name.

    The largest number of a head becomes a code, so that it is exact: of the first head the largest code, of others one
    of the eight largest. With `subnormal` it is the largest subnormal code.
    """
    device, dtype = generator.device, TORCH_DTYPES[problem.cache]
    codes = torch.arange(127, dtype=torch.uint8, device=device).view(dtype).float()
    codes = codes[codes < torch.finfo(dtype).smallest_normal if subnormal else codes <= torch.finfo(dtype).max]
    found, scales = {}, {}
    for name, x in caches.items():
        fewer = torch.randint(1 if subnormal else 8, (problem.kv_heads,), generator=generator, device=device)
        fewer[0] = 0
        scale = x.abs().amax((0, 1, 3)) / codes[len(codes) - 1 - fewer]
        found[name], scales[f"{name}_scale"] = x / scale[:, None], scale
    return found, scales


Shape = Callable[
    [DecodeProblem, torch.Tensor, torch.Tensor, torch.Tensor, torch.Generator], tuple[torch.Tensor, torch.Tensor]
]


def _normal(
    p: DecodeProblem, q: torch.Tensor, k: torch.Tensor, lengths: torch.Tensor, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    return q, k


def _climbing(
    p: DecodeProblem, q: torch.Tensor, k: torch.Tensor, lengths: torch.Tensor, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Let logits climb by 12 along the keys for every even head, and fall for every odd one."""
    direction = normalize(q[:1, :1, :1], dim=-1)
    climb = torch.linspace(0.0, 12.0, p.seq_k, device=k.device).view(1, -1, 1, 1)
    sign = 1.0 - 2.0 * (torch.arange(p.heads, device=q.device) % 2).view(1, 1, -1, 1)
    return q * 0.3 + sign * direction * math.sqrt(p.head_dim), k * 0.3 + climb * direction


def _pointing(
    p: DecodeProblem, q: torch.Tensor, k: torch.Tensor, lengths: torch.Tensor, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Point each query at one key, the first and the last that it sees and others: each output is one row of v."""
    key = torch.randint(p.seq_k, q.shape[:3], generator=generator, device=q.device) % lengths.view(-1, 1, 1)
    row = torch.arange(p.batch * p.seq_q * p.heads, device=q.device).view(key.shape) % 4
    last = (lengths.view(-1, 1, 1) - p.seq_q + torch.arange(p.seq_q, device=q.device).view(1, -1, 1)).expand_as(key)
    first = (last - p.window + 1).clamp(min=0) if p.window else torch.zeros_like(last)
    key = torch.where(row == 1, first, torch.where(row == 2, last.clamp(min=0), key))
    return _at(p, k, key), normalize(k, dim=-1)


def _last_keys(
    p: DecodeProblem, q: torch.Tensor, k: torch.Tensor, lengths: torch.Tensor, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Point each query at the last key that it sees, or at the next."""
    query = torch.arange(p.seq_q, device=q.device).view(1, -1, 1)
    more = (query + torch.arange(p.heads, device=q.device)) % 2
    key = (lengths.view(-1, 1, 1) - p.seq_q + query + more).clamp(0, p.seq_k - 1)
    return _at(p, k, key), normalize(k, dim=-1)


def _before_window(
    p: DecodeProblem, q: torch.Tensor, k: torch.Tensor, lengths: torch.Tensor, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Point each query at the first key within its window, or at the one before."""
    query = torch.arange(p.seq_q, device=q.device).view(1, -1, 1)
    fewer = (query + torch.arange(p.heads, device=q.device)) % 2
    key = (lengths.view(-1, 1, 1) - p.seq_q + query - p.window + 1 - fewer).clamp(min=0)
    return _at(p, k, key), normalize(k, dim=-1)


def _at(p: DecodeProblem, k: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Return queries whose weight is next to all on their `key` [batch, seq_q, heads] of k made of length 1."""
    of_heads = normalize(k, dim=-1).repeat_interleave(p.group, 2)
    wanted = key[..., None].expand(*key.shape, p.head_dim)
    return of_heads.gather(1, wanted) * 24.0 * math.sqrt(p.head_dim)


def _logits(
    p: DecodeProblem, q: torch.Tensor, k: torch.Tensor, lengths: torch.Tensor, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw heads of four kinds: logits of deviation 10, about -100, all -49152, and all 49152.

    The first column of k alone decides how far from 0 they are.
    """
    q, k = q.clone(), k.clone()
    kind = torch.arange(p.heads, device=q.device) % 4
    unit = math.sqrt(p.head_dim) / 256.0
    k[..., 0] = -256.0
    q[:, :, kind == 0] *= 10.0
    q[:, :, kind >= 2] = 0.0
    q[..., 0] = unit * torch.tensor([0.0, 100.0, 49152.0, -49152.0], device=q.device)[kind]
    return q, k


_SHAPED: dict[str, Shape] = {
    "climbing": _climbing,
    "pointing": _pointing,
    "last keys": _last_keys,
    "before the window": _before_window,
    "logits": _logits,
}


# What a case shows by what it drew.


def _shown(case: Case[DecodeProblem], inputs: Inputs) -> Iterator[Cell]:
    p, step = case.problem, step_keys(case.config)
    of_kind: dict[str, Callable[[int], bool]] = {
        LENGTHS[0]: lambda n: n == 0,
        LENGTHS[1]: lambda n: n == 1,
        LENGTHS[2]: lambda n: 0 < n < p.seq_q,
        LENGTHS[3]: lambda n: n > 0 and n % step == 0,
        LENGTHS[4]: lambda n: n > step and n % step == 1,
        LENGTHS[5]: lambda n: n % step == step - 1,
        LENGTHS[6]: lambda n: n == p.seq_k,
    }
    lengths = inputs["lengths"].tolist()
    yield from (Cell("lengths", kind) for kind, holds in of_kind.items() if any(map(holds, lengths)))
    if p.page:
        used = [_slots(p, inputs, b, n) // p.page for b, n in enumerate(lengths)]
        own = [set(pages.tolist()) for pages in used]
        every = set().union(*own)
        if sum(map(len, own)) > len(every):
            yield Cell("pages", PAGES[0])
        if p.pages - 1 in every:
            yield Cell("pages", PAGES[1])
        if len(every) < p.pages:
            yield Cell("pages", PAGES[2])
    if p.cache:
        yield from (Cell("codes", what) for what in _shown_codes(p, inputs))
    if case.draw in _SHAPED:
        yield from (Cell("values", what) for what in _shown_values(p, inputs))


def _shown_codes(p: DecodeProblem, inputs: Inputs) -> Iterator[str]:
    every = torch.stack([inputs[name].float().nan_to_num(0.0).abs() for name in "kv"])
    if every.max() == torch.finfo(inputs["k"].dtype).max:
        yield CODES[0]
    if 0 < every.max() < torch.finfo(inputs["k"].dtype).smallest_normal:
        yield CODES[1]


def _shown_values(p: DecodeProblem, inputs: Inputs) -> Iterator[str]:
    for _, q, k, _v in _sequences(p, inputs):
        scores = _shared(q.double(), k.double().transpose(-1, -2)) / math.sqrt(p.root)
        keys, hidden = scores.shape[-1], _hidden(p, scores.shape[-1], scores.device)
        top, weight = scores.argmax(-1), _weights(p, inputs, _logits_of(p, inputs, scores))
        alone, at = weight.amax(-1) > 0.99, weight.argmax(-1)
        last = (keys - p.seq_q + torch.arange(p.seq_q, device=q.device)).expand_as(at)
        rises = (scores.cummax(-1).values.diff(dim=-1) > 0).sum(-1)
        found = {
            VALUES[0]: alone & (at >= 3 * keys // 4),
            VALUES[1]: alone & (at == ((last - p.window + 1).clamp(min=0) if p.window else 0)),
            VALUES[2]: alone & (at == last),
            VALUES[3]: hidden.expand_as(scores).gather(-1, top[..., None])[..., 0] & (top == last + 1),
            VALUES[4]: rises > min(8, keys // 8),
            VALUES[5]: scores.abs().amax(-1) > 49000,
            BEFORE_WINDOW: (top == last - p.window) & (top >= 0),
        }
        yield from (what for what, holds in found.items() if bool(holds.any()))
