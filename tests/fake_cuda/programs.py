"""Kernels for the stand-in driver that are a few lines of Python: attention, right or wrong in a way that a test names.

Their binaries are real ones, compiled from an empty kernel with attention's parameters, so the driver checks them.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable
from functools import cache

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from evoengine.records import Binary, CompiledCandidate, Launch, Source
from evoengine.stages.compile import compile_source
from evoengine.workloads.attention.problem import AttentionProblem
from evoengine.workloads.attention.tensors import TORCH_DTYPES
from tests.fake_cuda import device
from tests.fake_cuda.device import LaunchOnDevice

SIGNATURE = """
#include <cuda_fp16.h>
extern "C" __global__ void {entry}(const half* q, const half* k, const half* v, half* o, int heads, int kv_heads,
                                   int seq_q, int seq_k, float scale) {{}}
"""
LAUNCH = Launch((1, 1, 1), 32, 0)
Change = Callable[[torch.Tensor, int], object]
"""what is wrong with a kernel in its n-th launch: may change its output [batch, heads, seq_q, head_dim_v] or give a
CUresult"""


@cache
def _compiled(trial: int) -> tuple[Source, Binary]:
    """A symbol of its own makes each trial's binary unlike the others'."""
    text = SIGNATURE.format(entry="attention") + f'extern "C" __device__ int trial_{trial} = 1;\n'
    source = Source(text, "attention", LAUNCH)
    return source, compile_source(source, "sm_90a")


def contender(
    problem: AttentionProblem, trial: int, us: float | Callable[[], float], change: Change | None = None
) -> CompiledCandidate:
    """A kernel that computes attention in `us` microseconds and then does what `change` says."""
    launches: list[int] = []

    def program(given: LaunchOnDevice) -> int:
        launches.append(1)
        out = _attention(problem, given)
        code = change(out, len(launches)) if change else 0
        return code if isinstance(code, int) else 0

    source, binary = _compiled(trial)
    sha256 = hashlib.sha256(binary.cubin).hexdigest()
    device.programs[sha256], device.times[sha256] = program, us
    return CompiledCandidate(trial, source, binary)


def tensor(address: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """The device's memory there as a tensor."""
    size = int(np.prod(shape)) * dtype.itemsize
    memory = (ctypes.c_uint8 * size).from_address(address)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def _attention(problem: AttentionProblem, given: LaunchOnDevice) -> torch.Tensor:
    heads, kv_heads, seq_q, seq_k = (int.from_bytes(p, "little") for p in given.parameters[4:8])
    dtype, width, width_v = TORCH_DTYPES[problem.dtype], problem.head_dim, problem.head_dim_v
    batch = device.tensor_bytes(given.pointer(0)) // (heads * seq_q * width * dtype.itemsize)
    q = tensor(given.pointer(0), (batch, heads, seq_q, width), dtype)
    k = tensor(given.pointer(1), (batch, kv_heads, seq_k, width), dtype)
    v = tensor(given.pointer(2), (batch, kv_heads, seq_k, width_v), dtype)
    out = tensor(given.pointer(3), (batch, heads, seq_q, width_v), dtype)
    mask = torch.ones(seq_q, seq_k, dtype=torch.bool).tril(seq_k - seq_q) if problem.causal else None
    exact = scaled_dot_product_attention(
        q.float(), k.float(), v.float(), attn_mask=mask, enable_gqa=heads != kv_heads
    )  # fmt: skip
    out.copy_(exact)
    return out
