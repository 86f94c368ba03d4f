"""Replace layers and attention of a model by tuned kernels, and report what was replaced."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from evoengine.errors import UsageError
from evoengine.torch.kernels import KERNELS
from evoengine.torch.operators import attention, linear, rms_norm

TOLERANCE = {torch.float16: 2e-2, torch.bfloat16: 8e-2, torch.float32: 1e-4, torch.float64: 1e-8}
"""largest difference of a patched model's outputs over the largest magnitude of the original's, by dtype"""


@dataclass(frozen=True, slots=True)
class Patched:
    """The result of `patch`."""

    layers: tuple[str, ...]
    """names of the layers"""
    kernels: tuple[str, ...]
    """the kernels that the example called: the operator, and where each comes from"""
    torch: tuple[str, ...]
    """the calls of the example that torch computes: the operator, and why there is no kernel"""
    difference: float
    """largest difference of the outputs over the largest magnitude of the original's"""


def patch(model: nn.Module, *example: Any, **named: Any) -> Patched:
    """Replace Linear, RMSNorm and scaled_dot_product_attention of a model, in place, and report what was replaced.

    `example` and `named` are inputs of the model: it is called with them before and after, and left as it was where
    the outputs differ by more than rounding. Calls of attention with a mask or dropout stay torch's.
    Raises UsageError if outputs differ, and for a model that was patched before.
    """
    if getattr(model, "forward_before_patch", None):
        raise UsageError("this model was patched before; unpatch(model) undoes it")
    with torch.no_grad(), _fixed_random():
        before = [t.clone() for t in _tensors(model(*example, **named))]
    known = set(KERNELS.origins)
    layers = _replace(model)
    with torch.no_grad(), _fixed_random():
        after = _tensors(model(*example, **named))
    difference = _difference(before, after)
    allowed = max(TOLERANCE.get(t.dtype, 0.0) for t in before)
    if difference > allowed:
        unpatch(model)
        raise UsageError(
            f"the patched model's outputs differ by {difference:.2g} of the original's largest magnitude, where "
            f"{allowed:.2g} are rounding: it was left as it was"
        )
    new = [key for key in KERNELS.origins if key not in known]
    shown = {key: f"{key[0]}: {KERNELS.origins[key]}" for key in new if isinstance(key, tuple)}
    called = tuple(text for key, text in shown.items() if KERNELS.chosen[key])
    left = tuple(text for key, text in shown.items() if not KERNELS.chosen[key])
    return Patched(layers, called, left, difference)


def unpatch(model: nn.Module) -> None:
    """Undo `patch`."""
    for module in model.modules():
        for name in ("forward", "forward_before_patch"):
            module.__dict__.pop(name, None)


def _replace(model: nn.Module) -> tuple[str, ...]:
    names = []
    for name, module in model.named_modules():
        if type(module) is nn.Linear:
            module.forward = _linear_forward(module)  # type: ignore[assignment, method-assign]
            names.append(name)
        elif type(module) is nn.RMSNorm and module.weight is not None and len(module.normalized_shape) == 1:
            module.forward = _rms_norm_forward(module)  # type: ignore[assignment, method-assign]
            names.append(name)
    original = model.forward

    def forward(*given: Any, **named: Any) -> Any:
        with _Attention():
            return original(*given, **named)

    model.forward_before_patch = original  # type: ignore[assignment]
    model.forward = forward
    return tuple(names)


def _linear_forward(module: nn.Linear) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: linear(x, module.weight, module.bias)


def _rms_norm_forward(module: nn.RMSNorm) -> Callable[[torch.Tensor], Any]:
    """Return the layer's function. Without an eps of its own torch takes the dtype's; autocast leaves FP32 as it is."""

    def forward(x: torch.Tensor) -> Any:
        if torch.is_autocast_enabled(x.device.type):
            return functional.rms_norm(x, module.normalized_shape, module.weight, module.eps)
        return rms_norm(x, module.weight, eps=torch.finfo(x.dtype).eps if module.eps is None else module.eps)

    return forward


class _Attention(TorchFunctionMode):
    """Calls a tuned kernel in place of scaled_dot_product_attention."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is functional.scaled_dot_product_attention and (ours := _arguments(*args, **kwargs)):
            return attention(*ours[0], **ours[1])
        return func(*args, **kwargs)


def _arguments(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> tuple[tuple[torch.Tensor, ...], dict[str, Any]] | None:
    """Return the arguments of `attention` for a call of torch's; None for one that it does not cover.

    torch aligns its causal mask to the first query and key, which is the same only for equal lengths.
    """
    if attn_mask is not None or dropout_p or query.dim() != 4 or key.dim() != 4:
        return None
    if (is_causal and query.shape[2] != key.shape[2]) or (query.shape[1] != key.shape[1] and not enable_gqa):
        return None
    return (query, key, value), {"causal": is_causal, "scale": scale}


def _tensors(found: Any) -> list[torch.Tensor]:
    """Return the tensors of a model's output, which may be nested in tuples, lists and dicts."""
    if isinstance(found, torch.Tensor):
        return [found]
    inner = found.values() if isinstance(found, Mapping) else found if isinstance(found, (tuple, list)) else ()
    return [tensor for part in inner for tensor in _tensors(part)]


def _difference(before: list[torch.Tensor], after: list[torch.Tensor]) -> float:
    """Return the largest difference over the largest magnitude of what was before; infinite where one is not finite."""
    if [t.shape for t in before] != [t.shape for t in after]:
        return float("inf")
    found = 0.0
    for old, new in zip(before, after, strict=True):
        if old.is_floating_point() and old.numel():
            scale = max(float(old.abs().max()), torch.finfo(old.dtype).tiny)
            worst = float((old.double() - new.double()).abs().max()) / scale
            found = max(found, worst if worst == worst else float("inf"))
        elif not torch.equal(old, new):
            return float("inf")
    return found


@contextmanager
def _fixed_random() -> Iterator[None]:
    """Make both calls of a model draw the same random numbers, and leave the generators as they were."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(0)
        yield
