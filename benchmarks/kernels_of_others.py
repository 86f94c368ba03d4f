"""Kernels of four libraries against PyTorch, for `evoengine run`: how far each is off, of its largest result.

pip install liger-kernel==0.8.5 fla-core==0.6.0 einops
pip download --no-deps unsloth==2026.10.9 vllm==0.33.0    # unpacked in FOLDER; their packages are not imported
evoengine run --map-cuda benchmarks/kernels_of_others.py FOLDER
"""

from __future__ import annotations

import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from triton.language.extra import libdevice

FOLDER = Path(sys.argv[1] if len(sys.argv) > 1 else ".")


def stub(name: str, **values: object) -> None:
    """Put a module in place of one that a file imports for what its kernels do not need."""

    def missing(what: str) -> Callable[..., None]:
        if what.startswith("__"):
            raise AttributeError(what)
        return lambda *_, **__: None

    module = sys.modules.setdefault(name, ModuleType(name))
    module.__dict__.update({"__path__": [], "__getattr__": missing} | values)


def kernels_in(file: str) -> ModuleType:
    """Execute one file of a package without the package."""
    name = file.removesuffix(".py").replace("/", ".")
    spec = importlib.util.spec_from_file_location(name, FOLDER / file)
    assert spec is not None and spec.loader is not None  # the suffix is .py
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def liger(module: str, name: str, *arguments: Any) -> torch.Tensor:
    function = getattr(importlib.import_module(f"liger_kernel.ops.{module}"), f"Liger{name}Function")
    found = function.apply(*arguments)
    return found[0] if isinstance(found, tuple) else found


# ── Liger ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def liger_cases() -> Iterator[tuple[str, Callable[[], Any], Callable[[], Any]]]:
    x, up, gain = torch.randn(16, 700), torch.randn(16, 700), torch.randn(700)
    yield "Liger rms_norm", lambda: liger("rms_norm", "RMSNorm", x, gain, 1e-6, 0.0, "llama", False), (
        lambda: F.rms_norm(x, (700,), gain, 1e-6))  # fmt: skip
    yield "Liger swiglu", lambda: liger("swiglu", "SiLUMul", x, up), lambda: F.silu(x) * up
    logits, target = torch.randn(16, 3000), torch.randint(0, 3000, (16,))
    yield "Liger cross_entropy", lambda: liger("cross_entropy", "CrossEntropy", logits.clone(), target, None), (
        lambda: F.cross_entropy(logits, target))  # fmt: skip


# ── flash-linear-attention ──────────────────────────────────────────────────────────────────────────────────────────


def recurrent(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor) -> torch.Tensor:
    """Linear attention with a decay for each step, [batch, time, head, channel]; decay [batch, time, head, channel]."""
    batch, steps, heads, channels = q.shape
    state, out = torch.zeros(batch, heads, channels, v.shape[-1]), []
    for t in range(steps):
        state = state * decay[:, t].exp()[..., None] + k[:, t][..., None] * v[:, t][..., None, :]
        out.append((q[:, t][..., None] * channels**-0.5 * state).sum(-2))
    return torch.stack(out, 1)


def by_delta_rule(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
    """The delta rule: each step corrects what the state gives for its key, [batch, time, head, channel]."""
    state, out = torch.zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3]), []
    for t in range(q.shape[1]):
        missing = (v[:, t] - (k[:, t][..., None] * state).sum(-2)) * beta[:, t][..., None]
        state = state + k[:, t][..., None] * missing[..., None, :]
        out.append((q[:, t][..., None] * q.shape[-1] ** -0.5 * state).sum(-2))
    return torch.stack(out, 1)


def fla_cases() -> Iterator[tuple[str, Callable[[], Any], Callable[[], Any]]]:
    from fla.ops.delta_rule import fused_recurrent_delta_rule
    from fla.ops.gla import fused_recurrent_gla
    from fla.ops.simple_gla import fused_recurrent_simple_gla

    q, k, v = (torch.randn(1, 128, 2, 64) for _ in range(3))
    gates = F.logsigmoid(torch.randn(1, 128, 2, 64))
    yield "fla fused_recurrent_gla", lambda: fused_recurrent_gla(q, k, v, gates)[0], lambda: recurrent(q, k, v, gates)
    of_head = F.logsigmoid(torch.randn(1, 128, 2))
    yield "fla fused_recurrent_simple_gla", lambda: fused_recurrent_simple_gla(q, k, v, of_head)[0], (
        lambda: recurrent(q, k, v, of_head[..., None].expand_as(k)))  # fmt: skip
    unit, beta = F.normalize(k, dim=-1), torch.rand(1, 128, 2)
    yield "fla fused_recurrent_delta_rule", lambda: fused_recurrent_delta_rule(q, unit, v, beta)[0], (
        lambda: by_delta_rule(q, unit, v, beta))  # fmt: skip


# ── unsloth ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def unsloth_cases() -> Iterator[tuple[str, Callable[[], Any], Callable[[], Any]]]:
    for name in ("unsloth", "unsloth.kernels", "unsloth.kernels.triton_launch"):
        stub(name)
    stub("unsloth.kernels.utils", triton_tanh=libdevice.tanh)
    gated, geglu = (kernels_in(f"unsloth/kernels/{name}.py") for name in ("swiglu", "geglu"))
    x, up = torch.randn(1, 16, 700), torch.randn(1, 16, 700)
    n, grid, block = x.numel(), (triton.cdiv(x.numel(), 1024),), {"BLOCK_SIZE": 1024, "LONG_INDEXING": 0}

    def filled(launch: Callable[[torch.Tensor], object], like: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(like)
        launch(out)
        return out

    yield "unsloth swiglu", (
        lambda: filled(lambda h: gated._fg_kernel[grid](x, up, h, n, **block), x)), (
        lambda: F.silu(x) * up)  # fmt: skip
    yield "unsloth geglu", (
        lambda: filled(lambda h: geglu._exact_forward_kernel[grid](x, up, h, n, **block), x)), (
        lambda: F.gelu(x) * up)  # fmt: skip
    yield "unsloth geglu of tanh", (
        lambda: filled(lambda h: geglu._approx_forward_kernel[grid](x, up, h, n, **block), x)), (
        lambda: F.gelu(x, approximate="tanh") * up)  # fmt: skip


# ── vLLM ────────────────────────────────────────────────────────────────────────────────────────────────────────────

AWQ_ORDER = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])


def unpacked(words: torch.Tensor) -> torch.Tensor:
    """Numbers of four bits out of words, [rows, 8 * columns]."""
    return (words[..., None] >> 4 * AWQ_ORDER & 15).reshape(words.shape[0], -1)


def attended(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    """[time, head, channel]"""
    q, k, v = (x.transpose(0, 1)[None].float() for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)[0].transpose(0, 1)


def vllm_cases() -> Iterator[tuple[str, Callable[[], Any], Callable[[], Any]]]:
    for name in ("vllm", "vllm.utils"):
        stub(name)
    answers = dict.fromkeys(("is_rocm", "is_xpu", "is_cuda_alike", "is_hip"), lambda *_: False)
    platform = SimpleNamespace(
        **answers, is_cuda=lambda: True, fp8_dtype=lambda: torch.float8_e4m3fn, has_device_capability=lambda *_: True,
        is_device_capability_family=lambda *_: False, get_device_capability=lambda *_: (9, 0),
    )  # fmt: skip
    stub("vllm.platforms", current_platform=platform)
    stub("vllm.triton_utils", triton=triton, tl=tl, HAS_TRITON=True)
    stub("vllm.utils.math_utils", RCP_LN2=1.4426950408889634)
    awq = kernels_in("vllm/model_executor/layers/quantization/awq_triton.py")
    words, zeros = (torch.randint(-(2**31), 2**31, (n, 16), dtype=torch.int32) for n in (128, 2))
    scales, left = torch.rand(2, 128).half(), torch.randn(20, 128).half()

    def dequantized() -> torch.Tensor:
        spread = [x.repeat_interleave(64, 0) for x in (unpacked(zeros), scales.float())]
        return (unpacked(words) - spread[0]) * spread[1]

    yield "vLLM awq_dequantize", lambda: awq.awq_dequantize_triton(words, scales, zeros), dequantized
    yield (
        "vLLM awq_gemm",
        lambda: awq.awq_gemm_triton(left, words, scales, zeros, 4),
        lambda: left.float() @ dequantized(),
    )
    merge = kernels_in("vllm/v1/attention/ops/triton_merge_attn_states.py").merge_attn_states
    parts = [(torch.randn(9, 4, 80), torch.randn(4, 9)) for _ in range(2)]

    def merged() -> torch.Tensor:
        out = torch.empty(9, 4, 80)
        merge(out, parts[0][0], parts[0][1], parts[1][0], parts[1][1])
        return out

    def by_weights() -> torch.Tensor:
        weights = torch.stack([lse for _, lse in parts]).softmax(0).transpose(1, 2)[..., None]
        return weights[0] * parts[0][0] + weights[1] * parts[1][0]

    yield "vLLM merge_attn_states", merged, by_weights
    prefill = kernels_in("vllm/v1/attention/ops/triton_prefill_attention.py").context_attention_fwd
    q, k, v = torch.randn(100, 4, 64).half(), torch.randn(100, 2, 64).half(), torch.randn(100, 2, 64).half()

    def prefilled() -> torch.Tensor:
        out = torch.empty_like(q)
        prefill(q, k, v, out, torch.tensor([0], dtype=torch.int32), torch.tensor([100], dtype=torch.int32), 100)
        return out

    yield "vLLM prefill attention", prefilled, lambda: attended(q, k, v, True)
    decode = kernels_in("vllm/v1/attention/ops/triton_decode_attention.py").decode_attention_fwd

    def decoded() -> torch.Tensor:
        out, lse, logits = torch.empty(1, 4, 64).half(), torch.empty(1, 4), torch.empty(1, 4, 2, 65)
        pages = torch.arange(100, dtype=torch.int32)[None]
        decode(q[:1], k, v, out, lse, pages, torch.tensor([100], dtype=torch.int32), logits, 2, 64**-0.5)
        return out

    yield "vLLM decode attention", decoded, lambda: attended(q[:1], k, v, False)


def main() -> None:
    torch.manual_seed(0)
    sys.path.insert(0, str(FOLDER))
    for cases in (liger_cases, fla_cases, unsloth_cases, vllm_cases):
        try:
            for name, ours, theirs in cases():
                try:
                    found, right = ours().float(), theirs().float()
                    off = float((found - right).abs().max() / right.abs().max())
                    print(f"{name:31}{off:9.1e}", flush=True)
                except Exception as error:
                    print(f"{name:31}{type(error).__name__}: {error}", flush=True)
                    traceback.print_exc()
        except Exception:
            traceback.print_exc()


if __name__ == "__main__":
    main()
