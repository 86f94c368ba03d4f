"""The tensors of attention backward: inputs drawn from a seed, the float64 reference, SDPA's backward as the baseline.

Shapes as in `BackwardProblem`. LSE is that of a forward pass in float64, rounded, and O a little larger (ENLARGED).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import normalize, scaled_dot_product_attention

from evoengine.workloads.attention_backward.packages import BASELINES
from evoengine.workloads.attention_backward.problem import VALUES, BackwardProblem
from evoengine.workloads.base import Case, Drawn, Inputs, Outputs, Sample, Tensors
from evoengine.workloads.coverage import Cell
from evoengine.workloads.packages import PackageBaseline
from evoengine.workloads.tensors import TORCH_DTYPES

BACKENDS = (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)
ENLARGED = 1.0 + 2.0**-5
"""factor of the O of the forward pass: with O itself, dQ and dK of a row that sees one key would be 0 whatever is
computed, and a rounding could not be distinguished from a fault"""
ROUNDING_DEVIATION = 0.21
"""standard deviation of a rounding's error, relative to eps times the number: it is uniform within half a spacing,
which is from eps / 2 to eps"""
SHIFTING = 16
"""columns of Q and K that shift all logits of a row"""
LESSENED = 2.0**-6
"""factor of ordinary dO for shifted rows, whose large queries would otherwise outweigh all others in dK, and for
further queries that point at a key, because two dS that cancel would leave a row of dK smaller than their roundings"""


class BackwardTensors(Tensors[BackwardProblem]):
    """Tensors of attention backward. The reference is a function of all inputs as given, including O and LSE.

    Its value on some keys of some heads is therefore that part of its value on all of them.
    """

    independent = frozenset({"normal"})

    def draw(self, case: Case[BackwardProblem], seed: int, device: str = "cpu") -> Drawn:
        p, dtype = case.problem, TORCH_DTYPES[case.problem.dtype]
        generator = torch.Generator(device=device).manual_seed(seed)

        def normal(heads: int, seq: int) -> torch.Tensor:
            return torch.randn(p.batch, heads, seq, p.head_dim, generator=generator, device=device)

        q, k, v = normal(p.heads, p.seq_q), normal(p.kv_heads, p.seq_k), normal(p.kv_heads, p.seq_k)
        dout = normal(p.heads, p.seq_q)
        q, k = _SHAPED[case.draw](p, q, k)
        if case.draw == "large logits":
            dout[:, :, torch.arange(p.seq_q, device=device) % 4 >= 2] *= LESSENED
        if case.draw == "one-hot rows":
            dout[:, :, p.seq_k :] *= LESSENED
        inputs = {name: tensor.to(dtype) for name, tensor in (("q", q), ("k", k), ("v", v), ("dout", dout))}
        o, lse = forward(p, {name: tensor.double() for name, tensor in inputs.items()})
        inputs |= {"o": (o * ENLARGED).to(dtype), "lse": lse.float()}
        return Drawn(inputs, inputs)

    def reference(self, problem: BackwardProblem, inputs: Inputs) -> Outputs:
        return gradients(problem, inputs)

    def own_dtype(self, problem: BackwardProblem, inputs: Inputs) -> Outputs:
        """Return the gradients with P, dP and dS rounded to the dtype, as torch's math backend rounds them.

        Logits stay in float32: P is relative to the given LSE, not to that of rounded logits. Products are summed in
        float32. The error of each element counts as at least the standard deviation of the sum of these roundings: if
        few queries contribute to a row of dK, all of its columns have similar errors, which by chance may be tiny.
        """
        dtype = inputs["q"].dtype
        rounded = _rounding(dtype)
        exact = _gradients(problem, inputs, torch.float32, _unrounded, _unrounded)
        found = _as(dtype, _gradients(problem, inputs, torch.float32, rounded, rounded))
        least = _deviations(problem, inputs)
        return {
            name: torch.where((found[name] - x).abs() < least[name], x + least[name], found[name].float())
            for name, x in exact.items()
        }

    def rounded_once(self, problem: BackwardProblem, inputs: Inputs) -> Outputs:
        """Return the best result of a fused kernel: float32, with only P, dS and the gradients rounded."""
        dtype = inputs["q"].dtype
        return _as(dtype, _gradients(problem, inputs, torch.float32, _rounding(dtype), _unrounded))

    def shown(self, case: Case[BackwardProblem], drawn: Drawn) -> frozenset[Cell]:
        return frozenset(Cell("values", what) for what in _shown(case.problem, drawn.inputs))

    def baselines(self, problem: BackwardProblem) -> tuple[str, ...]:
        return tuple(backend.name for backend in BACKENDS)

    def baseline(self, name: str, problem: BackwardProblem, inputs: Inputs) -> Callable[[], object]:
        """Return a call of SDPA's backward by that backend; the forward pass has run before."""
        q, k, v = (inputs[n].detach().requires_grad_() for n in "qkv")
        square = problem.seq_q == problem.seq_k
        mask = _seen(problem, q.device) if problem.causal and not square else None
        grouped = problem.kv_heads != problem.heads
        with sdpa_kernel([SDPBackend.__members__[name]]), torch.enable_grad():
            out = scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=problem.causal and square, enable_gqa=grouped
            )

        def call() -> object:
            return torch.autograd.grad(out, (q, k, v), inputs["dout"], retain_graph=True)

        return call

    def package_baselines(self) -> tuple[PackageBaseline[BackwardProblem], ...]:
        return BASELINES

    def outputs_of(self, problem: BackwardProblem, found: tuple[torch.Tensor, ...]) -> Outputs:
        return dict(zip(("dq", "dk", "dv"), found, strict=True))

    def as_baselines_see(self, problem: BackwardProblem, inputs: Inputs) -> Inputs:
        """Return the inputs with the O and LSE of the forward pass, which libraries run themselves."""
        o, lse = forward(problem, {name: tensor.double() for name, tensor in inputs.items()})
        return {**inputs, "o": o.to(inputs["q"].dtype), "lse": lse.float()}

    def library(self, problem: BackwardProblem, inputs: Inputs) -> Outputs:
        return self.rounded_once(problem, inputs)

    def samples(self, problem: BackwardProblem, inputs: Inputs, seed: int) -> Sequence[Sample[BackwardProblem]]:
        """Return the first and the last KV head of the batch, each with the query heads that share it."""
        p = problem
        places = dict.fromkeys([(0, 0), (p.batch - 1, p.kv_heads - 1)])
        return [_sample(problem, inputs, batch, head) for batch, head in places]

    def check_bytes(self, problem: BackwardProblem) -> int:
        """Return the bytes of five matrices of a KV head's logits in float64, and of all inputs in float32 twice."""
        p = problem
        logits = p.heads // p.kv_heads * p.seq_q * p.seq_k
        return 5 * 8 * logits + 8 * p.batch * (3 * p.heads * p.seq_q + 2 * p.kv_heads * p.seq_k) * p.head_dim


def forward(problem: BackwardProblem, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Return O and LSE in the inputs' dtype; 0 and -inf for a row that sees no key."""
    logits, group = _logits(problem, inputs), problem.heads // problem.kv_heads
    lse = torch.logsumexp(logits, -1)
    weights = (logits - lse.masked_fill(lse.isinf(), 0.0)[..., None]).exp()
    return weights @ inputs["v"].repeat_interleave(group, dim=1), lse


Round = Callable[[torch.Tensor], torch.Tensor]


def _unrounded(x: torch.Tensor) -> torch.Tensor:
    return x


def _rounding(dtype: torch.dtype) -> Round:
    return lambda x: x.to(dtype).to(x.dtype)


def _gradients(
    problem: BackwardProblem, inputs: Inputs, computed_in: torch.dtype, round_weight: Round, round_dp: Round
) -> dict[str, torch.Tensor]:
    """Return dQ, dK and dV, computed in a dtype with P, dS and dP rounded; heads of a group are summed at the end."""
    x = {name: tensor.to(computed_in) for name, tensor in inputs.items()}
    weights, dp, delta = _weights(problem, x)
    return _products(problem, x, round_weight(weights), round_weight(weights * (round_dp(dp) - delta)))


def gradients(problem: BackwardProblem, inputs: Inputs) -> dict[str, torch.Tensor]:
    """Return dQ, dK and dV in float64."""
    return _gradients(problem, inputs, torch.float64, _unrounded, _unrounded)


def partial_dq(problem: BackwardProblem, inputs: Inputs, keys: slice) -> tuple[torch.Tensor, float]:
    """Return what some keys of a single KV head contribute to dQ / scale, float64 [1, heads, seq_q, d], and its error.

    The allowed error is the largest possible sum of the roundings of dS to the dtype.
    """
    x = {name: tensor.double() for name, tensor in inputs.items()}
    weights, dp, delta = _weights(problem, x)
    ds, k = (weights * (dp - delta))[..., keys], x["k"][:, :, keys]
    bound = ds.abs() @ k.abs() + (weights * dp.abs())[..., keys] @ k.abs()
    return ds @ k, torch.finfo(inputs["q"].dtype).eps * float(bound.max())


def _weights(problem: BackwardProblem, x: Inputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return P, dP and delta."""
    lse = x["lse"].masked_fill(x["lse"].isinf(), 0.0)[..., None]
    v = x["v"].repeat_interleave(problem.heads // problem.kv_heads, dim=1)
    delta = (x["dout"] * x["o"]).sum(-1, keepdim=True)
    return (_logits(problem, x) - lse).exp(), x["dout"] @ v.transpose(-1, -2), delta


def _products(problem: BackwardProblem, x: Inputs, weights: torch.Tensor, ds: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return dQ, dK and dV, the products of P and dS."""
    p, group, scale = problem, problem.heads // problem.kv_heads, 1.0 / math.sqrt(problem.head_dim)

    def summed(of_heads: torch.Tensor) -> torch.Tensor:
        return of_heads.reshape(p.batch, p.kv_heads, group, *of_heads.shape[2:]).sum(2)

    dv, dk = weights.transpose(-1, -2) @ x["dout"], ds.transpose(-1, -2) @ x["q"] * scale
    return {"dq": ds @ x["k"].repeat_interleave(group, dim=1) * scale, "dk": summed(dk), "dv": summed(dv)}


def _deviations(problem: BackwardProblem, inputs: Inputs) -> dict[str, torch.Tensor]:
    """Return the standard deviation of each gradient's element if P, dP and dS are rounded; float32."""
    x = {name: tensor.float() for name, tensor in inputs.items()}
    weights, dp, delta = _weights(problem, x)
    ds = (weights * (dp - delta)).square() + (weights * dp).square()
    squares = x | {name: x[name].square() for name in ("q", "k", "dout")}
    each = ROUNDING_DEVIATION * torch.finfo(inputs["q"].dtype).eps
    found = _products(problem, squares, weights.square(), ds)
    scale = 1.0 / math.sqrt(problem.head_dim)
    return {name: each * (v if name == "dv" else v * scale).sqrt() for name, v in found.items()}


def _as(dtype: torch.dtype, outputs: Outputs) -> Outputs:
    return {name: tensor.to(dtype) for name, tensor in outputs.items()}


def _logits(problem: BackwardProblem, inputs: Inputs) -> torch.Tensor:
    k = inputs["k"].repeat_interleave(problem.heads // problem.kv_heads, dim=1)
    logits = inputs["q"] @ k.transpose(-1, -2) / math.sqrt(problem.head_dim)
    return logits.masked_fill(~_seen(problem, logits.device), -math.inf) if problem.causal else logits


def _seen(problem: BackwardProblem, device: torch.device) -> torch.Tensor:
    seen = torch.ones(problem.seq_q, problem.seq_k, dtype=torch.bool, device=device)
    return seen.tril(diagonal=problem.seq_k - problem.seq_q)


Pair = tuple[torch.Tensor, torch.Tensor]


def _normal(problem: BackwardProblem, q: torch.Tensor, k: torch.Tensor) -> Pair:
    return q, k


def _large_logits(problem: BackwardProblem, q: torch.Tensor, k: torch.Tensor) -> Pair:
    """Draw rows of four kinds in turn: ordinary, of standard deviation 4, all about -96, all about 96.

    In the third, exp(-LSE) is beyond float32, so that a nonexistent key that is not masked turns into NaN.
    """
    q, k = q.clone(), k.clone()
    kind = torch.arange(problem.seq_q, device=q.device) % 4
    k[..., :SHIFTING] = 1.0
    q[:, :, kind == 1] *= 4.0
    shift = torch.tensor([0.0, 0.0, -96.0, 96.0], device=q.device)[kind] * math.sqrt(problem.head_dim)
    q[..., :SHIFTING] = shift[:, None] / SHIFTING
    return q, k


def _one_hot(problem: BackwardProblem, q: torch.Tensor, k: torch.Tensor) -> Pair:
    """Point every query at one key, so that each row of dV is a sum of rows of dO; exposes rows in the wrong place."""
    return _pointing(problem, k, torch.arange(problem.seq_q, device=q.device) * 7 % problem.seq_k)


def _diagonal(problem: BackwardProblem, q: torch.Tensor, k: torch.Tensor) -> Pair:
    """Point every query at the last key that it sees under a mask, and every second at the next one."""
    row = torch.arange(problem.seq_q, device=q.device)
    target = (row + problem.seq_k - problem.seq_q + row % 2).clamp(min=0, max=problem.seq_k - 1)
    return _pointing(problem, k, target)


def _pointing(problem: BackwardProblem, k: torch.Tensor, target: torch.Tensor) -> Pair:
    unit, peak = normalize(k, dim=-1), 12.0 * math.sqrt(problem.head_dim)
    q = unit.repeat_interleave(problem.heads // problem.kv_heads, dim=1)[:, :, target] * peak
    return q, unit


_SHAPED: dict[str, Callable[[BackwardProblem, torch.Tensor, torch.Tensor], Pair]] = {
    "normal": _normal,
    "ordinary": _normal,
    "large logits": _large_logits,
    "one-hot rows": _one_hot,
    "diagonal": _diagonal,
}


def _shown(problem: BackwardProblem, inputs: Inputs) -> Iterator[str]:
    """Yield the names of what the first head shows, by its logits and their LSE."""
    one = replace(problem, batch=1, heads=1, kv_heads=1)
    logits = _logits(one, {name: inputs[name][:1, :1].float() for name in "qk"})[0, 0]
    lse = inputs["lse"][0, 0]
    finite = torch.where(logits.isfinite(), logits, lse[:, None])
    if bool((finite.amin(1) > 90).any()) and bool((finite.amax(1) < -90).any()):
        yield VALUES[0]
    weights = (logits - lse.masked_fill(lse.isinf(), 0.0)[:, None]).exp()
    alone = weights.amax(1) > 0.99
    if problem.seq_k > 1 and bool((alone & (lse > 1)).sum() > 1):
        yield VALUES[1]
    last = torch.arange(problem.seq_q) + problem.seq_k - problem.seq_q
    if problem.causal and bool((alone & (weights.argmax(1) == last) & (last < problem.seq_k - 1)).any()):
        yield VALUES[2]
    if bool(lse.isinf().any()):
        yield VALUES[3]


def _sample(problem: BackwardProblem, inputs: Inputs, batch: int, head: int) -> Sample[BackwardProblem]:
    group = problem.heads // problem.kv_heads
    heads = {"queries": slice(head * group, (head + 1) * group), "keys": slice(head, head + 1)}
    own = replace(problem, batch=1, heads=group, kv_heads=1)

    def part(tensors: Outputs) -> Outputs:
        return {
            name: x[batch : batch + 1, heads["keys" if name in ("k", "v", "dk", "dv") else "queries"]]
            for name, x in tensors.items()
        }

    return Sample(own, part(inputs), part)
