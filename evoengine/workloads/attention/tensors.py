"""Attention's tensors: inputs drawn from a seed, the float64 reference, SDPA as the baseline.

Shapes as in `AttentionProblem`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import normalize, scaled_dot_product_attention

from evoengine.workloads.attention.cases import ALIKE, DIAGONAL, HALVES, RISES, negative_name, rise_name
from evoengine.workloads.attention.packages import BASELINES
from evoengine.workloads.attention.problem import LSE, OUTPUT, AttentionProblem
from evoengine.workloads.base import Case, Drawn, Inputs, Outputs, Sample, Tensors
from evoengine.workloads.coverage import Cell
from evoengine.workloads.packages import PackageBaseline

TORCH_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
BACKENDS = (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)
FUSED = (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)
"""backends that never hold all scores at once"""
SCORES_AT_ONCE = 1 << 26
"""limit of the scores of one head at once, if no fused backend supports the problem"""
SAMPLE_SCORES = 1 << 28
"""limit of the scores of one head that the float64 reference holds at once: 2 GiB, three times over during softmax"""
SAMPLE_BLOCKS = 4
"""number of random blocks of rows that are compared in float64, in addition to those of the first and last head"""
BLOCK_ROWS = 64
LSE_ROUNDINGS = 4.0
"""roundings of an LSE to float32: in the sum of a product, in its scale and in the conversion from base 2"""


class AttentionTensors(Tensors[AttentionProblem]):
    independent = frozenset({"normal", "permuted"})

    def draw(self, case: Case[AttentionProblem], seed: int, device: str = "cpu") -> Drawn:
        problem = case.problem
        generator = torch.Generator(device=device).manual_seed(seed)

        def normal(heads: int, seq: int, width: int) -> torch.Tensor:
            return torch.randn(problem.batch, heads, seq, width, generator=generator, device=device)

        q = normal(problem.heads, problem.seq_q, problem.head_dim)
        k = normal(problem.kv_heads, problem.seq_k, problem.head_dim)
        v = normal(problem.kv_heads, problem.seq_k, problem.head_dim_v)
        q, k, v = SHAPES[case.draw](q, k, v, generator)
        if case.draw == "one-hot rows" and problem.dtype == "bf16":
            v = v * BEYOND_HALF
        dtype = TORCH_DTYPES[problem.dtype]
        inputs = {"q": q.to(dtype), "k": k.to(dtype), "v": v.to(dtype)}
        if case.draw != "permuted":
            return Drawn(inputs, inputs)
        order = torch.randperm(problem.seq_k, generator=generator, device=device)
        shuffled = {
            "q": inputs["q"],
            "k": inputs["k"][:, :, order].contiguous(),
            "v": inputs["v"][:, :, order].contiguous(),
        }
        return Drawn(shuffled, inputs)

    def reference(self, problem: AttentionProblem, inputs: Inputs) -> Outputs:
        """Return SDPA in float64 on the same (already rounded) inputs, [batch, heads, seq_q, head_dim_v], and LSE."""
        exact = {name: tensor.double() for name, tensor in inputs.items()}
        return {OUTPUT: _sdpa(problem, exact), **_lse_output(problem, exact)}

    def own_dtype(self, problem: AttentionProblem, inputs: Inputs) -> Outputs:
        """Return SDPA with every step rounded to the candidate's own dtype.

        Its error is that of a straightforward implementation, as in FlashAttention's tests
        (`attention_ref(upcast=False, reorder_ops=True)`), with the scale on Q and K as in torch's math backend.
        Products are summed in float32 and rounded: in 16 bits torch takes ten times as long on a CPU, and whether it
        sums in 16 bits too depends on device and settings.

        LSE may err by a quarter of the dtype's spacing at 1, which changes a weight that a backward pass computes from
        it by as much as half of a rounding does, and by LSE_ROUNDINGS.
        """
        dtype, out, group = inputs["q"].dtype, _empty_output(problem, inputs), problem.heads // problem.kv_heads
        mask, scale = _mask(problem, out.device), problem.head_dim**-0.25
        for i in range(problem.batch):
            q, k = (inputs["q"][i] * scale).float(), (inputs["k"][i] * scale).float().repeat_interleave(group, dim=0)
            scores = (q @ k.transpose(-1, -2)).to(dtype)
            if mask is not None:
                scores.masked_fill_(~mask, -math.inf)
            weights = torch.softmax(scores.float(), -1).to(dtype)
            out[i] = weights.float() @ inputs["v"][i].float().repeat_interleave(group, dim=0)
        found = _lse_output(problem, {name: tensor.float() for name, tensor in inputs.items()})
        roundings = LSE_ROUNDINGS * torch.finfo(torch.float32).eps
        least = torch.finfo(dtype).eps / 4
        return {OUTPUT: out, **{name: lse + least + roundings * lse.abs() for name, lse in found.items()}}

    def rounded_once(self, problem: AttentionProblem, inputs: Inputs) -> Outputs:
        """Return the best result of a fused kernel: everything in float32, with only P and O rounded to T.

        P is relative to a different value in each row, between its largest and half of that: a maximum that lags leaves
        no weight that is a power of two and needs no rounding.
        """
        out, group = _empty_output(problem, inputs), problem.heads // problem.kv_heads
        mask = _mask(problem, out.device)
        for i in range(problem.batch):
            q, k, v = inputs["q"][i].float(), *(inputs[n][i].float().repeat_interleave(group, dim=0) for n in "kv")
            scores = q @ k.transpose(-1, -2) / math.sqrt(problem.head_dim)
            if mask is not None:
                scores.masked_fill_(~mask, -math.inf)
            lag = torch.linspace(0.0, math.log(2.0), problem.seq_q, device=out.device).view(-1, 1)
            p = (scores - scores.amax(-1, keepdim=True) + lag).exp_()
            out[i] = (p.to(out.dtype).float() @ v) / p.sum(-1, keepdim=True)
        return {OUTPUT: out}

    def shown(self, case: Case[AttentionProblem], drawn: Drawn) -> frozenset[Cell]:
        if case.draw == "normal":
            return frozenset()
        return frozenset(Cell("values", what) for what in shown_values(case.problem, drawn))

    def baselines(self, problem: AttentionProblem) -> tuple[str, ...]:
        return tuple(backend.name for backend in BACKENDS)

    def baseline(self, name: str, problem: AttentionProblem, inputs: Inputs) -> Callable[[], torch.Tensor]:
        return _library_call(problem, inputs, [SDPBackend.__members__[name]])

    def package_baselines(self) -> tuple[PackageBaseline[AttentionProblem], ...]:
        return BASELINES

    def outputs_of(self, problem: AttentionProblem, found: torch.Tensor) -> Outputs:
        return {OUTPUT: found}

    def library(self, problem: AttentionProblem, inputs: Inputs) -> Outputs:
        """Return SDPA in the problem's dtype if a fused backend supports it, or else in float32 by parts, and LSE."""
        floats = {name: tensor.float() for name, tensor in inputs.items()}
        lse = _lse_output(problem, floats)
        try:
            return {OUTPUT: _library_call(problem, inputs, FUSED)(), **lse}
        except RuntimeError:  # torch's way to state that none does
            return {OUTPUT: _by_parts(problem, floats), **lse}

    def samples(self, problem: AttentionProblem, inputs: Inputs, seed: int) -> Sequence[Sample[AttentionProblem]]:
        """Return the last rows of the first and last head, and random blocks of rows."""
        return [_sample(problem, inputs, *place) for place in _sampled_rows(problem, seed)]

    def check_bytes(self, problem: AttentionProblem) -> int:
        """Return the memory of the check in bytes.

        Inputs are drawn in float32 beside their rounded copies, and for one head the check holds inputs, output and
        three matrices of scores in float64.
        """
        p = problem
        widths = p.head_dim + p.head_dim_v
        out = p.batch * p.heads * p.seq_q * p.head_dim_v
        inputs = p.batch * (p.heads * p.seq_q * p.head_dim + p.kv_heads * p.seq_k * widths)
        rows = min(p.seq_q, max(1, SAMPLE_SCORES // p.seq_k))
        drawing = (4 + 4 + 2) * inputs
        checking = 8 * (3 * rows * p.seq_k + (rows + p.seq_k) * widths) + 8 * out // p.batch
        return max(drawing, checking)


BEYOND_HALF = 2.0**20
"""factor of ordinary values that a kernel for bfloat16 must not keep in halves"""
Triple = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Shape = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Generator], Triple]


def _normal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, generator: torch.Generator) -> Triple:
    return q, k, v


def _below(most: int, generator: torch.Generator) -> int:
    """Return a random number, at least 0."""
    return int(torch.randint(most, (), generator=generator, device=generator.device))


def _extreme_logits(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, generator: torch.Generator) -> Triple:
    """Draw rows of five kinds in turn, starting with a random one, so that neighbours differ.

    Logits of standard deviation 10, where exp overflows a half unless the maximum is subtracted; about -100, which exp
    takes to 0 under a maximum that starts at 0; all -49152 or all 49152, below what may stand for a masked score (-1e4,
    -65504) and with products q·k beyond a half's largest number; and ordinary ones. The first column of K alone decides
    how far a row lies from 0.
    """
    q, k = q.clone(), k.clone()
    row = (torch.arange(q.shape[2], device=q.device) + _below(5, generator)) % 5
    unit = math.sqrt(q.shape[-1]) / 256.0
    k[..., 0] = -256.0
    q[:, :, row == 0] *= 10.0
    q[:, :, (row == 2) | (row == 3)] = 0.0
    q[..., 0] = unit * torch.tensor([0.0, 100.0, 49152.0, -49152.0, 0.0], device=q.device)[row]
    return q, k, v


def _thirds(q: torch.Tensor, k: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Give those rows a weight of 1 for the first key and of 2/3 for all others.

    In 16-bit sums each addition of 2/3 is rounded in the same direction while the exponent stays, so that errors
    accumulate instead of cancelling.
    """
    q, k = q.clone(), k.clone()
    q[:, :, rows] = 0.0
    q[:, :, rows, 0] = math.sqrt(q.shape[-1])
    k[..., 0] = math.log(2 / 3)
    k[:, :, 0, 0] = 0.0
    return q, k


def _constants(v: torch.Tensor) -> torch.Tensor:
    """Return one number from 1 to 2 for each column of V, the same for all keys."""
    return 1.0 + normalize(v[:, :, :1], p=torch.inf, dim=-1).abs().expand_as(v)


def _constant_columns(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, generator: torch.Generator) -> Triple:
    """Make every output its column's constant for any weights; exposes weights that do not add up to one."""
    every_second = torch.arange(q.shape[2], device=q.device) % 2 == 0
    return *_thirds(q, k, every_second), _constants(v)


GOLDEN = 0.6180339887
"""factor whose successive multiples have fractional parts that are far apart and cover 0 to 1 evenly"""


def _targets(q: torch.Tensor, k: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return the key that each query of a one-hot row points at: early and late ones in turn, from a random start."""
    row = torch.arange(q.shape[2], device=q.device)
    stride = max(1, round(GOLDEN * k.shape[2]))
    while math.gcd(stride, k.shape[2]) > 1:
        stride += 1
    return (row * stride + _below(k.shape[2], generator)) % k.shape[2]


def _one_hot(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, generator: torch.Generator) -> Triple:
    """Point every query at one key, so that each output is one row of V; exposes rows in the wrong place."""
    return _pointing(q, k, _targets(q, k, generator)), normalize(k, dim=-1), v


def _diagonal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, generator: torch.Generator) -> Triple:
    """Point every second query at the last key that it sees under a mask, and those between at the next one.

    A row that sees one key too few or too many returns another row of V. The first row points at the next key: only
    this row sees a key too many if a tile is mistaken for one that all rows see.
    """
    row = torch.arange(q.shape[2], device=q.device)
    last = row + k.shape[2] - q.shape[2]
    return _pointing(q, k, (last + (row + 1) % 2).clamp(0, k.shape[2] - 1)), normalize(k, dim=-1), v


def _pointing(q: torch.Tensor, k: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return queries for keys of unit length, whose weights are negligible except for that of their target."""
    group, peak = q.shape[1] // k.shape[1], 24.0 * math.sqrt(q.shape[-1])
    return normalize(k, dim=-1).repeat_interleave(group, dim=1)[:, :, targets] * peak


def _long(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, generator: torch.Generator) -> Triple:
    """Draw rows of four kinds over columns of V that are nearly constant.

    Every second row has weights of 2/3, every eighth instead weights of 2^-15.5; between them are rows with logits of
    standard deviation 4, and rows that point at one key in turn.

    The first kind exposes sums and outputs kept in 16 bits. The second and last expose weights that become 0 too early,
    or never, and rescaling factors that do not: the keys of weight 1 have small values, so that the small weights that
    all others keep add up noticeably. In the third kind some keys of every tile matter, wherever along the keys a
    pipeline fails.
    """
    targets = _targets(q, k, generator)
    pointing, small = _pointing(q, k, targets), normalize(k, dim=-1)
    row = torch.arange(q.shape[2], device=q.device)
    v = _constants(v) + 0.25 * v
    v[:, :, targets] /= 64.0
    ordinary = q * 4.0 * math.sqrt(q.shape[-1])
    q, k = _thirds(2.0 * pointing, small, row % 2 == 0)
    q[:, :, row % 8 == 0] *= 15.5 * math.log(2) / math.log(1.5)
    q[:, :, row % 4 == 1] = ordinary[:, :, row % 4 == 1]
    return q, k, v


HALF_STRIPE = 8
"""rows for which a lane of a tensor core's product holds the same one or two columns: half of the 16 of a stripe"""


def _late_maximum(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, generator: torch.Generator) -> Triple:
    """Draw logits that increase along the keys, so that the running maximum changes in every tile and O is rescaled.

    In every second row they stay at 0 instead, except for one key in the middle third, where the maximum rises by one
    of RISES, to six digits: by two columns of K, the second for the remainder that rounding to 16 bits leaves of the
    first. In one even row of 16, drawn from the upper and the lower eight of neighbouring stripes in turn, they
    decrease from -8 by a third column of K: a maximum that is wrong for negative logits may be wrong only for some of a
    warp's rows.
    """
    direction = normalize(q[:1, :1, :1], dim=-1)
    keys, rows = k.shape[2], q.shape[2]
    climb = torch.linspace(0.0, 12.0, keys, device=k.device).view(1, 1, -1, 1)
    q, k = q * 0.3 + direction * math.sqrt(q.shape[-1]), k * 0.3 + climb * direction
    fine = 2.0**-7
    k[..., :2], k[..., 2] = 0.0, -1.0
    late = keys // 3 + _below(keys // 3 + 1, generator)
    k[:, :, late, :2] = torch.tensor([1.0, fine], device=k.device)
    row = torch.arange(1, rows, 2, device=q.device)
    rise = torch.tensor(RISES, device=q.device)[row // 2 % len(RISES)] * math.log(2.0) * math.sqrt(q.shape[-1])
    coarse = rise.bfloat16().float()
    q[..., :3] = 0.0
    q[:, :, row] = 0.0
    q[:, :, row, 0], q[:, :, row, 1] = coarse, (rise - coarse) / fine
    falling = -6.0 * direction[..., 3:]
    at = _falling_rows(rows, generator)
    q[:, :, at, 3:], q[:, :, at, 2] = falling * math.sqrt(q.shape[-1]), 8.0 * math.sqrt(q.shape[-1])
    return q, k, v


def _negative_rows(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, generator: torch.Generator) -> Triple:
    """Draw rows with only negative logits in one half of each stripe, next to rows whose logits are all 0.

    They are -8 and -256 by eight keys in turn, so that each lane of a product has both, and weights relative to the
    lower one are infinite. The halves are the upper and the lower of neighbouring stripes.
    """
    q, k = torch.zeros_like(q), torch.zeros_like(k)
    row, key = torch.arange(q.shape[2], device=q.device), torch.arange(k.shape[2], device=k.device)
    upper = _below(2, generator)
    negative = (row // HALF_STRIPE + row // (2 * HALF_STRIPE) + upper) % 2 == 0
    q[:, :, negative, 0] = 8.0 * math.sqrt(q.shape[-1])
    k[..., 0] = torch.where(key // 8 % 2 == 0, -1.0, -32.0)
    return q, k, v


def _falling_rows(rows: int, generator: torch.Generator) -> list[int]:
    """Return one even row of each 16, in the upper and the lower half of neighbouring ones."""
    upper = _below(2, generator)
    drawn = [
        first + HALF_STRIPE * ((first // 16 + upper) % 2) + 2 * _below(HALF_STRIPE // 2, generator)
        for first in range(0, rows, 16)
    ]
    return [row for row in drawn if row < rows]


SHAPES: dict[str, Shape] = {
    "normal": _normal,
    "permuted": _normal,
    "extreme logits": _extreme_logits,
    "constant columns": _constant_columns,
    "one-hot rows": _one_hot,
    "diagonal": _diagonal,
    "late maximum": _late_maximum,
    "long": _long,
    "negative rows": _negative_rows,
}


def _mask(problem: AttentionProblem, device: torch.device) -> torch.Tensor | None:
    if not problem.causal:
        return None
    visible = torch.ones(problem.seq_q, problem.seq_k, dtype=torch.bool, device=device)
    return visible.tril(diagonal=problem.seq_k - problem.seq_q)


def _empty_output(problem: AttentionProblem, inputs: Inputs) -> torch.Tensor:
    return inputs["q"].new_empty(problem.batch, problem.heads, problem.seq_q, problem.head_dim_v)


def _sdpa(problem: AttentionProblem, inputs: Inputs) -> torch.Tensor:
    """Run torch's math backend one batch entry at a time, because the scores of a whole problem exceed the memory."""
    q, k, v = inputs["q"], inputs["k"], inputs["v"]
    mask, out, grouped = _mask(problem, q.device), _empty_output(problem, inputs), problem.kv_heads != problem.heads
    with sdpa_kernel(SDPBackend.MATH):
        for i in range(problem.batch):
            out[i] = scaled_dot_product_attention(q[i], k[i], v[i], attn_mask=mask, enable_gqa=grouped)
    return out


def _lse_output(problem: AttentionProblem, inputs: Inputs) -> Outputs:
    """Return LSE in the dtype of the inputs if the problem has it, or else nothing."""
    p, q, k = problem, inputs["q"], inputs["k"]
    if not p.lse:
        return {}
    out, step = q.new_empty(q.shape[:-1]), max(1, SCORES_AT_ONCE // (p.heads * p.seq_k))
    key, group = torch.arange(p.seq_k, device=q.device), p.heads // p.kv_heads
    for i in range(p.batch):
        keys = k[i].repeat_interleave(group, dim=0).transpose(-1, -2)
        for rows in torch.arange(p.seq_q, device=q.device).split(step):
            scores = q[i, :, rows] @ keys / math.sqrt(p.head_dim)
            if p.causal:
                scores.masked_fill_(key > rows[:, None] + p.seq_k - p.seq_q, -math.inf)
            out[i, :, rows] = scores.logsumexp(-1)
    return {LSE: out}


def _sampled_rows(problem: AttentionProblem, seed: int) -> Iterator[tuple[int, int, range]]:
    """Yield (batch entry, head, rows) of the parts that are compared in float64."""
    p, rng = problem, np.random.default_rng(seed)
    rows = min(p.seq_q, max(1, SAMPLE_SCORES // p.seq_k))
    for b, h in dict.fromkeys([(0, 0), (p.batch - 1, p.heads - 1)]):
        yield b, h, range(p.seq_q - rows, p.seq_q)
    rows = min(p.seq_q, BLOCK_ROWS)
    for _ in range(SAMPLE_BLOCKS):
        first = int(rng.integers(p.seq_q - rows + 1))
        yield int(rng.integers(p.batch)), int(rng.integers(p.heads)), range(first, first + rows)


def _sample(problem: AttentionProblem, inputs: Inputs, batch: int, head: int, rows: range) -> Sample[AttentionProblem]:
    own, part = _rows_of(problem, inputs, batch, head, rows)

    def take(outputs: Outputs) -> Outputs:
        return {name: output[batch, head, rows.start : rows.stop][None, None] for name, output in outputs.items()}

    return Sample(own, part, take)


def _rows_of(
    problem: AttentionProblem, inputs: Inputs, batch: int, head: int, rows: range
) -> tuple[AttentionProblem, Inputs]:
    """Return the output's `rows` of one head as a problem of their own, with the keys that they see.

    The output is [1, 1, rows, head_dim_v]. The causal mask is aligned to the lower right, so it ends with the last of
    them.
    """
    p = problem
    keys = min(p.seq_k, rows.stop + p.seq_k - p.seq_q) if p.causal else p.seq_k
    kv = head // (p.heads // p.kv_heads)
    part = {
        "q": inputs["q"][batch, head, rows.start : rows.stop][None, None],
        "k": inputs["k"][batch, kv, :keys][None, None],
        "v": inputs["v"][batch, kv, :keys][None, None],
    }
    return replace(p, batch=1, heads=1, kv_heads=1, seq_q=len(rows), seq_k=keys), part


def _lower_right(problem: AttentionProblem) -> torch.Tensor:
    # imported here because it loads torch's compiler, a second of a core that only GPU workers need to spend
    from torch.nn.attention.bias import causal_lower_right

    return causal_lower_right(problem.seq_q, problem.seq_k)


def _library_call(
    problem: AttentionProblem, inputs: Inputs, backends: Sequence[SDPBackend]
) -> Callable[[], torch.Tensor]:
    """Return a call of SDPA by the first of these backends that supports the problem.

    The call raises RuntimeError if none does.
    """
    # torch aligns is_causal to the upper left, which is the same mask only for equal lengths
    square = problem.seq_q == problem.seq_k
    mask = _lower_right(problem) if problem.causal and not square else None
    grouped = problem.kv_heads != problem.heads
    own_mask = problem.causal and square

    def call() -> torch.Tensor:
        with sdpa_kernel(list(backends)):
            return scaled_dot_product_attention(
                inputs["q"], inputs["k"], inputs["v"], attn_mask=mask, is_causal=own_mask, enable_gqa=grouped
            )

    return call


def _by_parts(problem: AttentionProblem, inputs: Inputs) -> torch.Tensor:
    out, step = _empty_output(problem, inputs), max(1, SCORES_AT_ONCE // problem.seq_k)
    for b, h in np.ndindex(problem.batch, problem.heads):
        for first in range(0, problem.seq_q, step):
            rows = range(first, min(first + step, problem.seq_q))
            out[b, h, rows.start : rows.stop] = _sdpa(*_rows_of(problem, inputs, b, h, rows))[0, 0]
    return out


# Determine which faults the values of a case of attention can show, from the drawn tensors.

_ALMOST_ALL = 0.999
"""share of a row's weight"""
MIN_EXPONENT = -126
"""smallest exponent of a normal float, and of a normal bf16"""
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
    for half, name in enumerate(HALVES):
        if bool(falling[torch.arange(len(falling)) // HALF_STRIPE % 2 == half].any()):
            yield f"a row that falls, in the {name} half of a stripe"
    yield from negative_halves(top, bottom)
    yield from _weights(logits, top, at)


def negative_halves(top: torch.Tensor, bottom: torch.Tensor) -> Iterator[str]:
    """Yield the halves of stripes in which every row is negative, next to a half in which none is.

    `top` and `bottom` are the largest and the smallest logit of each row, in powers of two [rows].
    """
    apart = (top < 0) & (top > MIN_EXPONENT) & (top - bottom > -MIN_EXPONENT)
    whole = len(apart) // (2 * HALF_STRIPE) * (2 * HALF_STRIPE)
    wide, below = (of[:whole].view(-1, 2, HALF_STRIPE) for of in (apart, top < 0))
    for half, name in enumerate(HALVES):
        if bool((wide[:, half].all(dim=1) & ~below[:, 1 - half].any(dim=1)).any()):
            yield negative_name(name)


def _at_diagonal(logits: torch.Tensor, diagonal: int) -> Iterator[str]:
    """Yield what a mask that is off by one would change, for logits without a mask."""
    row, last = torch.arange(len(logits)), logits.shape[1] - 1
    at = logits.argmax(dim=1)
    alone = (logits - logits.amax(dim=1, keepdim=True)).exp2().sum(dim=1) < 1 / _ALMOST_ALL
    if bool((alone & (at == row + diagonal) & (row < last)).any()):
        yield DIAGONAL[0]
    if bool(alone[0]) and int(at[0]) == diagonal + 1:
        yield DIAGONAL[1]


def _rises(logits: torch.Tensor, top: torch.Tensor, at: torch.Tensor) -> Iterator[str]:
    """Yield the rises of a maximum over its value before the key that has it."""
    before = torch.arange(logits.shape[1]) < at[:, None]
    earlier = torch.where(before, logits, -math.inf).amax(dim=1)
    rises = (top - earlier)[(at > 0) & (earlier > -1)]
    for rise in RISES:
        if bool(((rises - rise).abs() < 1e-4 * rise).any()):
            yield rise_name(rise)


def _weights(logits: torch.Tensor, top: torch.Tensor, at: torch.Tensor) -> Iterator[str]:
    """Yield the kinds of weights that rows have, relative to the largest."""
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
