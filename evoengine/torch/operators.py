"""Operators of torch that call tuned kernels: attention, linear layers, RMSNorm, and any kernel by its name.

Each is a `torch.library` operator with a fake implementation for the compiler. The public functions cast for autocast,
and differentiate by torch's own kernels, attention also by a tuned one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from evoengine.torch.kernels import KERNELS, Request, gpu_key
from evoengine.workloads.tensors import TORCH_DTYPES

Tensor = torch.Tensor

_DTYPES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
_BACKENDS = ("CPU", "CUDA")
_library = torch.library.Library("evoengine", "DEF")


def _define(schema: str, compute: Callable[..., Any], fake: Callable[..., Any]) -> Callable[..., Any]:
    """Define an operator and return it.

    The operator has no autograd kernel of its own: autograd falls through to `compute`, which is called with gradients
    disabled wherever a public function differentiates. This spares 5 µs of each call.
    """
    _library.define(schema)
    name = schema.partition("(")[0]
    for backend in _BACKENDS:
        _library.impl(name, compute, backend)
    _library.impl(name, torch.library.fallthrough_kernel, "Autograd")
    torch.library.register_fake(f"evoengine::{name}", fake, lib=_library)
    operator: Callable[..., Any] = getattr(torch.ops.evoengine, name).default
    return operator


def _needs_gradient(*tensors: Tensor | None) -> bool:
    if torch.is_grad_enabled():
        for tensor in tensors:  # a generator would take half a microsecond
            if tensor is not None and tensor.requires_grad:
                return True
    return False


def _autocast(first: Tensor, *others: Tensor | None) -> tuple[Any, ...]:
    """Return floating tensors in autocast's dtype where it is on for the device of the first."""
    device, tensors = first.device.type, (first, *others)
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(t if t is None or not t.is_floating_point() else t.to(dtype) for t in tensors)


# ── attention ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None, layout: str = "bhsd"
) -> Tensor:
    """Return softmax(q·kᵀ·scale)·v in the layout of its inputs.

    q is [batch, heads, seq_q, head_dim], k and v [batch, kv_heads, seq_k, head_dim], where heads is a multiple of
    kv_heads; with layout "bshd" seq comes before heads. Any strides will do: tensors whose strides a kernel cannot
    follow are copied. `scale` is 1/√head_dim by default. With `causal` the last query sees all keys, as in
    FlashAttention. Raises ValueError for another layout.
    """
    if layout != "bhsd" and layout != "bshd":
        raise ValueError(f"layout is {layout!r}; it must be 'bhsd' or 'bshd'")
    q, k, v = _autocast(q, k, v)
    if layout == "bshd":
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    scale = scale if scale is not None else q.shape[-1] ** -0.5
    out: Tensor
    if not _needs_gradient(q, k, v):
        out = _attention(q, k, v, causal, scale)
    elif not torch.compiler.is_compiling() and _backward_kernel(q, k, v, causal, scale) is None:
        # the backward pass of torch needs what its own forward pass keeps, and would compute it again
        out = sdpa(q, k, v, causal, scale)
    else:
        # torch.compile refuses an autograd function that gets one tensor twice
        q = q.view_as(q) if q is k or q is v else q
        v = v.view_as(v) if v is k else v
        out = _Attention.apply(q, k, v, causal, scale)  # type: ignore[no-untyped-call]
    return out if layout == "bhsd" else out.transpose(1, 2)


def _compute_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Tensor:
    key = ("attention", q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, causal, q.device)
    try:
        kernel = KERNELS.chosen[key]
    except KeyError:
        kernel = KERNELS.choose(key, _attention_request(q, k, v, causal))
    if kernel is None:
        return sdpa(q, k, v, causal, scale)
    if not (q.is_contiguous() and k.is_contiguous() and v.is_contiguous()):
        return _strided_attention(kernel, q, k, v, scale)
    out: Tensor = kernel(q, k, v, scale=scale)
    return out


_copied: set[object] = set()
"""kernels with shapes and strides that they cannot follow, so that a later call is not refused first"""


def _strided_attention(kernel: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    layout = kernel, *((t.shape, t.stride()) for t in (q, k, v))
    if layout not in _copied:
        try:
            return kernel(q, k, v, scale=scale)
        except ValueError:
            _copied.add(layout)
    return kernel(q.contiguous(), k.contiguous(), v.contiguous(), scale=scale)


def sdpa(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Tensor:
    """Return torch's attention, with the causal mask aligned to the last query and key."""
    mask = None
    if causal and q.shape[2] != k.shape[2]:
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril(k.shape[2] - q.shape[2])
    grouped = q.shape[1] != k.shape[1]
    is_causal = causal and mask is None
    out = functional.scaled_dot_product_attention(q, k, v, mask, 0.0, is_causal, scale=scale, enable_gqa=grouped)
    return out.contiguous()


def _attention_request(q: Tensor, k: Tensor, v: Tensor, causal: bool, with_lse: bool = False) -> Request:
    inputs = tuple((tuple(t.shape), t.dtype) for t in (q, k, v))
    dtype = _DTYPES.get(q.dtype)
    (batch, heads, seq_q, head_dim), (kv_heads, seq_k) = q.shape, k.shape[1:3]
    seq = f"s{seq_q}" if seq_q == seq_k else f"sq{seq_q},sk{seq_k}"
    parts = [f"b{batch}", f"h{heads}", seq, f"d{head_dim}", str(dtype)]
    if v.shape[3] != head_dim:
        parts.append(f"dv{v.shape[3]}")
    if causal:
        parts.append("causal")
    if kv_heads != heads:
        parts.append(f"kv{kv_heads}")
    if with_lse:
        parts.append("lse")
    sizes = {"head_dim": head_dim, "head_dim_v": v.shape[3], "dtype": dtype, "causal": causal}
    sizes["lse"] = with_lse or None  # problems without have no such variable
    wanted = {"batch": batch, "heads": heads, "kv_heads": kv_heads, "seq_q": seq_q, "seq_k": seq_k}
    return Request("attention", gpu_key(q.device), inputs, "attention:" + ",".join(parts), sizes, wanted)


_attention = _define(
    "attention(Tensor q, Tensor k, Tensor v, bool causal, float scale) -> Tensor",
    _compute_attention,
    lambda q, k, v, causal, scale: q.new_empty((*q.shape[:-1], v.shape[-1])),
)


def _backward_kernel(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Callable[..., Any] | None:
    key = ("attention_backward", q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, causal, scale, q.device)
    try:
        return KERNELS.chosen[key]
    except KeyError:
        return KERNELS.choose(key, _attention_backward_request(q, k, v, causal, scale))


def _attention_backward_request(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Request:
    forward = _attention_request(q, k, v, causal)
    rows = tuple(q.shape[:-1])
    inputs = (*forward.inputs, *(((*rows, v.shape[-1]), q.dtype),) * 2, (rows, torch.float32))
    refusal = ""
    if causal and q.shape[2] != k.shape[2]:
        refusal = "torch's forward pass aligns a causal mask otherwise than kernels where lengths differ"
    elif not math.isclose(scale, q.shape[-1] ** -0.5, rel_tol=1e-6):
        refusal = f"kernels of the backward pass are compiled for a scale of 1/√head_dim, and it is {scale:g}"
    problem = str(forward.problem).replace("attention:", "attention-backward:")
    of = {"causal": causal}
    return Request("attention-backward", forward.gpu, inputs, problem, variables=of, refusal=refusal)


def _compute_attention_with_lse(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Return attention, and LSE [batch, heads, seq_q] in float32: NaN where no backward kernel will ask for it."""
    if _backward_kernel(q, k, v, causal, scale) is None:
        lse = q.new_full(q.shape[:-1], math.nan, dtype=torch.float32)
        return _compute_attention(q, k, v, causal, scale), lse
    key = ("attention with lse", q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, causal, q.device)
    try:
        kernel = KERNELS.chosen[key]
    except KeyError:
        kernel = KERNELS.choose(key, _attention_request(q, k, v, causal, with_lse=True))
    if kernel is not None:
        computed: tuple[Tensor, Tensor] = kernel(*(t.contiguous() for t in (q, k, v)), scale=scale)
        return computed
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    out, lse = _library_with_lse(q, k, v, causal, scale)
    return out.contiguous(), lse.reshape(q.shape[:-1]).contiguous()


def _library_with_lse(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Return torch's attention and its LSE, by cuDNN where torch's SDPA would take that: torch has no public call."""
    aten = torch.ops.aten
    if q.device.type == "cpu":
        found = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)  # noqa: SLF001
        return found[0], found[1]
    if torch.cuda.get_device_capability(q.device) >= (9, 0) and torch.backends.cuda.cudnn_sdp_enabled():
        try:
            found = aten._scaled_dot_product_cudnn_attention(  # noqa: SLF001
                q, k, v, None, True, 0.0, causal, scale=scale
            )
            return found[0], found[1]
        except RuntimeError:  # torch's way to say that cuDNN does not take the problem
            pass
    found = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scale)  # noqa: SLF001
    return found[0], found[1]


_attention_with_lse = _define(
    "attention_with_lse(Tensor q, Tensor k, Tensor v, bool causal, float scale) -> (Tensor, Tensor)",
    _compute_attention_with_lse,
    lambda q, k, v, causal, scale: (
        q.new_empty((*q.shape[:-1], v.shape[-1])),
        q.new_empty(q.shape[:-1], dtype=torch.float32),
    ),
)


def _compute_attention_backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, grad: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, ...]:
    """Return the gradients of q, k and v; without a kernel torch computes the forward pass again."""
    kernel = _backward_kernel(q, k, v, causal, scale)
    if kernel is not None:
        found: tuple[Tensor, ...] = kernel(*(t.contiguous() for t in (q, k, v, out, grad, lse)))
        return found
    with torch.enable_grad():
        inputs = [t.detach().requires_grad_() for t in (q, k, v)]
        again = sdpa(inputs[0], inputs[1], inputs[2], causal, scale)
    return tuple(t.contiguous() for t in torch.autograd.grad(again, inputs, grad))


_attention_backward = _define(
    "attention_backward(Tensor q, Tensor k, Tensor v, Tensor out, Tensor grad, Tensor lse, bool causal, float scale)"
    " -> (Tensor, Tensor, Tensor)",
    _compute_attention_backward,
    lambda q, k, v, out, grad, lse, causal, scale: tuple(t.new_empty(t.shape) for t in (q, k, v)),
)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Any:
        out, lse = _attention_with_lse(q, k, v, causal, scale)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.causal, ctx.scale = causal, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        q, k, v, out, lse = ctx.saved_tensors
        return (*_attention_backward(q, k, v, out, grad, lse, ctx.causal, ctx.scale), None, None)


# ── linear ────────────────────────────────────────────────────────────────────────────────────────────────────────────

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": functional.relu,
    "gelu": functional.gelu,
    "silu": functional.silu,
}


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None) -> Tensor:
    """Return activation(x·weightᵀ + bias).

    x is [..., k], weight [n, k], bias [n]; the activation is None, "relu", "gelu" (by erf) or "silu". Raises ValueError
    for another one.
    """
    if activation not in (None, *ACTIVATIONS):
        raise ValueError(f"activation is {activation!r}; it must be None, {', '.join(map(repr, ACTIVATIONS))}")
    x, weight, bias = _autocast(x, weight, bias)
    if _needs_gradient(x, weight, bias):
        out: Tensor = _Linear.apply(x, weight, bias, activation)  # type: ignore[no-untyped-call]
    else:
        out = _linear(x, weight, bias, activation)
    return out


def torch_linear(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
    out = functional.linear(x, weight, bias)
    return ACTIVATIONS[activation](out) if activation else out


def _compute_linear(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
    key = ("linear", x.shape, weight.shape, x.dtype, weight.dtype, bias is None, activation, x.device, weight.stride())
    try:
        kernel = KERNELS.chosen[key]
    except KeyError:
        kernel = KERNELS.choose(key, _linear_request(x, weight, bias, activation))
    if kernel is None:
        return torch_linear(x, weight, bias, activation)
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    bias = bias if bias is not None else _zeros(weight)
    out = kernel(rows, weight if weight.is_contiguous() else weight.t(), bias)
    assert isinstance(out, Tensor)
    return out.view(*x.shape[:-1], weight.shape[0])


_unread: dict[tuple[int, torch.dtype, torch.device], Tensor] = {}


def _zeros(weight: Tensor) -> Tensor:
    """Return the bias of a kernel that reads none."""
    key = weight.shape[0], weight.dtype, weight.device
    if key not in _unread:
        _unread[key] = weight.new_zeros(weight.shape[0])
    return _unread[key]


def _linear_request(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Request:
    """Return the product that a layer needs. Its B is the weight as it lies in memory, [n, k] or transposed."""
    n, k = weight.shape
    m = math.prod(x.shape[:-1])
    epilogue = "_".join(filter(None, ["bias" if bias is not None else None, activation])) or "none"
    inputs = (((m, k), x.dtype), ((n, k), weight.dtype), ((n,), x.dtype if bias is None else bias.dtype))
    layout, dtype = "nk" if weight.is_contiguous() else "kn", _DTYPES.get(x.dtype)
    problem = f"gemm:m{m},n{n},k{k},{dtype}" + ",b_nk" * (layout == "nk") + f",{epilogue}" * (epilogue != "none")
    sizes = {"m": m, "n": n, "k": k, "batch": 1, "dtype": dtype, "epilogue": epilogue}
    sizes |= {"a_layout": "mk", "b_layout": layout, "residual": False}
    laid_out = weight.is_contiguous() or weight.t().is_contiguous()
    refusal = (
        "" if laid_out else "kernels read weight as it is contiguous, [n, k], or as a contiguous [k, n] transposed"
    )
    return Request("gemm", gpu_key(x.device), inputs, problem, sizes, refusal=refusal)


_linear = _define(
    "linear(Tensor x, Tensor weight, Tensor? bias, str? activation) -> Tensor",
    _compute_linear,
    lambda x, weight, bias, activation: x.new_empty((*x.shape[:-1], weight.shape[0])),
)


def _compute_linear_backward(
    x: Tensor, weight: Tensor, bias: Tensor | None, grad: Tensor, activation: str | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, weight and bias, the last one empty without a bias."""
    with torch.enable_grad():
        inputs = [t.detach().requires_grad_() for t in (x, weight, bias) if t is not None]
        out = torch_linear(inputs[0], inputs[1], inputs[2] if len(inputs) > 2 else None, activation)
    found = [t.contiguous() for t in torch.autograd.grad(out, inputs, grad)]
    return found[0], found[1], found[2] if len(found) > 2 else x.new_empty(0)


_linear_backward = _define(
    "linear_backward(Tensor x, Tensor weight, Tensor? bias, Tensor grad, str? activation) -> (Tensor, Tensor, Tensor)",
    _compute_linear_backward,
    lambda x, weight, bias, grad, activation: (
        x.new_empty(x.shape),
        weight.new_empty(weight.shape),
        x.new_empty(0 if bias is None else bias.shape),
    ),
)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Any:
        ctx.save_for_backward(x, weight, bias)
        ctx.activation = activation
        return _linear(x, weight, bias, activation)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight, bias = ctx.saved_tensors
        of_x, of_weight, of_bias = _linear_backward(x, weight, bias, grad, ctx.activation)
        return of_x, of_weight, None if bias is None else of_bias, None


# ── RMSNorm ───────────────────────────────────────────────────────────────────────────────────────────────────────────


EPS = 1e-6
"""for which kernels of RMSNorm are compiled, as Llama has it"""


def rms_norm(
    x: Tensor, weight: Tensor, residual: Tensor | None = None, eps: float = EPS
) -> Tensor | tuple[Tensor, Tensor]:
    """Return rms_norm(x)·weight; with a residual rms_norm(x + residual)·weight and x + residual.

    x and residual are [..., hidden], weight [hidden]. torch computes where eps is not 1e-6.
    """
    if residual is None:
        x, weight = _autocast(x, weight)
        if _needs_gradient(x, weight):
            return functional.rms_norm(x, weight.shape, weight, eps)
        found: Tensor = _rms_norm_alone(x, weight, eps)
        return found
    x, weight, residual = _autocast(x, weight, residual)
    if _needs_gradient(x, weight, residual):
        total = x + residual
        return functional.rms_norm(total, weight.shape, weight, eps), total
    y, total = _rms_norm(x, weight, residual, eps)
    return y, total


def _compute_rms_norm_alone(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    key = ("rms_norm", x.shape, weight.shape, x.dtype, weight.dtype, eps, x.device)
    try:
        kernel = KERNELS.chosen[key]
    except KeyError:
        kernel = KERNELS.choose(key, _rms_norm_alone_request(x, weight, eps))
    if kernel is None:
        return functional.rms_norm(x, weight.shape, weight, eps)
    y: Tensor = kernel(x.reshape(-1, x.shape[-1]).contiguous(), weight.contiguous())
    return y.view(x.shape)


def _rms_norm_alone_request(x: Tensor, weight: Tensor, eps: float) -> Request:
    rows, hidden = math.prod(x.shape[:-1]), x.shape[-1]
    inputs = (((rows, hidden), x.dtype), (tuple(weight.shape), weight.dtype))
    problem = f"rowwise:rms_norm,rows{rows},hidden{hidden},{_DTYPES.get(x.dtype)}"
    of = {"operator": "rms_norm", "out_dtype": _DTYPES.get(x.dtype)}
    return Request("rowwise", gpu_key(x.device), inputs, problem, variables=of, refusal=_refused_eps(eps))


_rms_norm_alone = _define(
    "rms_norm_alone(Tensor x, Tensor weight, float eps) -> Tensor",
    _compute_rms_norm_alone,
    lambda x, weight, eps: x.new_empty(x.shape),
)


def _refused_eps(eps: float) -> str:
    return "" if eps == EPS else f"kernels are compiled for an eps of 1e-6, and it is {eps}"


def _compute_rms_norm(x: Tensor, weight: Tensor, residual: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    key = ("rms_norm", x.shape, residual.shape, weight.shape, x.dtype, weight.dtype, eps, x.device)
    try:
        kernel = KERNELS.chosen[key]
    except KeyError:
        kernel = KERNELS.choose(key, _rms_norm_request(x, weight, residual, eps))
    if kernel is None:
        total = x + residual
        return functional.rms_norm(total, weight.shape, weight, eps), total
    rows = -1, x.shape[-1]
    y, total = kernel(x.reshape(rows).contiguous(), residual.reshape(rows).contiguous(), weight.contiguous())
    return y.view(x.shape), total.view(x.shape)


def _rms_norm_request(x: Tensor, weight: Tensor, residual: Tensor, eps: float) -> Request:
    rows, hidden = math.prod(x.shape[:-1]), x.shape[-1]
    inputs = (((rows, hidden), x.dtype), ((rows, hidden), residual.dtype), (tuple(weight.shape), weight.dtype))
    problem = f"rms_norm:rows{rows},hidden{hidden},{_DTYPES.get(x.dtype)}"
    return Request("rms_norm", gpu_key(x.device), inputs, problem, refusal=_refused_eps(eps))


_rms_norm = _define(
    "rms_norm(Tensor x, Tensor weight, Tensor residual, float eps) -> (Tensor, Tensor)",
    _compute_rms_norm,
    lambda x, weight, residual, eps: (x.new_empty(x.shape), x.new_empty(x.shape)),
)


# ── kernels of a user's own ───────────────────────────────────────────────────────────────────────────────────────────


def op(name: str, fallback: Callable[..., Any], **variables: object) -> Callable[..., Any]:
    """Return a function that calls the kernel of that name on tensors in the order of its inputs.

    `name` is a workload, built in or a folder's. `variables` of its problem tell kernels of the same inputs apart:
    `op("rowwise", softmax, operator="softmax")`, `op("gemm", linear, epilogue="bias_relu")`. Where no kernel fits the
    shapes and dtypes of a call, `fallback` computes it. `fallback` also differentiates, and describes the outputs to
    the compiler, so it must be made of torch's operators and return tensors of the kernel's shapes and dtypes, in the
    order of its outputs.
    """

    named = (name, *sorted(variables.items()))

    def compute(inputs: list[Tensor]) -> list[Tensor]:
        key = ("op", named, tuple((t.shape, t.dtype) for t in inputs), inputs[0].device)
        try:
            kernel = KERNELS.chosen[key]
        except KeyError:
            kernel = KERNELS.choose(key, request(inputs))
        found = fallback(*inputs) if kernel is None else kernel(*(t.contiguous() for t in inputs))
        return [found] if isinstance(found, Tensor) else [*found]

    def request(inputs: list[Tensor]) -> Request:
        described = tuple((tuple(t.shape), t.dtype) for t in inputs)
        return Request(name, gpu_key(inputs[0].device), described, variables=variables)

    def fake(inputs: list[Tensor]) -> list[Tensor]:
        found = fallback(*inputs)
        return [torch.empty_like(t) for t in ([found] if isinstance(found, Tensor) else found)]

    numbered = f"op_{len(_defined)}_{''.join(c if c.isalnum() else '_' for c in name)}"
    operator = _define(f"{numbered}(Tensor[] inputs) -> Tensor[]", compute, fake)
    _defined.append(operator)

    def call(*inputs: Tensor) -> Any:
        """Call the kernel; see `evoengine.torch.op`."""
        if _needs_gradient(*inputs):
            return fallback(*inputs)
        found = operator([*inputs])
        return found[0] if len(found) == 1 else tuple(found)

    return call


_defined: list[Any] = []
