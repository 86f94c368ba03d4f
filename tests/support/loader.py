"""A driver of our own (loader_driver.c) that an exported kernel's loader meets, and tensors in host memory to call it
with."""

from __future__ import annotations

import ctypes
import math
import struct
from types import SimpleNamespace

import cupy
import numpy as np
import torch

from evoengine.workloads import find_workload

PROBLEM = "b2,h4,s100,d64,bf16,kv2"
WMMA = {"family": "wmma", "tile_m": 64, "tile_n": 64}
WGMMA = {"family": "wgmma", "tile_m": 128, "tile_n": 96, "load": "tma", "o_store": "direct"}
ALL_MAPS = WGMMA | {"o_store": "tma"}
STATIC = WGMMA | {"schedule": "static"}
LAUNCH = struct.Struct("=4QQ6i3i3iii16s512s")
SMS, CAPABILITY, SHARED_PER_BLOCK = 16, (75, 76), 97
"""numbers of the driver's attributes"""


class Driver:
    """The library, with its counters and settings as attributes, and what it was asked to launch."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        for gpu, (sms, shared) in enumerate([(132, 232448), (114, 232448)]):
            self.set_attribute(gpu, SMS, sms)
            self.set_attribute(gpu, CAPABILITY[0], 9)
            self.set_attribute(gpu, SHARED_PER_BLOCK, shared)

    def get(self, name: str) -> int:
        return ctypes.c_int.in_dll(self.library, name).value

    def set(self, name: str, value: int) -> None:
        ctypes.c_int.in_dll(self.library, name).value = value

    def set_attribute(self, gpu: int, number: int, value: int) -> None:
        ((ctypes.c_int * 128) * 2).in_dll(self.library, "attributes")[gpu][number] = value

    def launches(self) -> list[SimpleNamespace]:
        raw = bytes((ctypes.c_char * (LAUNCH.size * self.get("launches"))).in_dll(self.library, "seen"))
        return [self._launch(found) for found in LAUNCH.iter_unpack(raw)]

    def _launch(self, found: tuple) -> SimpleNamespace:
        maps = [found[20][i : i + 128] for i in range(0, 128 * self.get("maps"), 128)]
        return SimpleNamespace(
            pointers=found[:4], stream=found[4], scalars=found[5:11], grid=found[11:14], block=found[14:17],
            shared=found[17], gpu=found[18], image=found[19].rstrip(b"\0"), maps=maps,
        )  # fmt: skip


def tensors(batch=2, heads=4, kv_heads=2, seq_q=100, seq_k=100, head_dim=64, head_dim_v=None):
    q = torch.zeros(batch, heads, seq_q, head_dim, dtype=torch.bfloat16)
    k = torch.zeros(batch, kv_heads, seq_k, head_dim, dtype=torch.bfloat16)
    width = head_dim_v or head_dim
    return q, k, k.new_zeros(batch, kv_heads, seq_k, width), q.new_zeros(batch, heads, seq_q, width)


def on_gpu(gpu: int, shape) -> tuple[cupy.ndarray, np.ndarray]:
    """A CuPy array that says it is on that GPU, and the host memory that it lies in."""
    memory = np.zeros(2 * math.prod(shape) + 16, np.uint8)
    start = memory.ctypes.data + -memory.ctypes.data % 16
    pointer = cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(start, memory.nbytes - 16, memory, gpu), 0)
    return cupy.ndarray(shape, np.float16, pointer), memory


def cupy_tensors(gpu: int = 0):
    made = [on_gpu(gpu, (2, heads, 100, 64)) for heads in (4, 2, 2, 4)]
    return [array for array, _ in made], [memory for _, memory in made]


def parameters_of(kind: type, problem, config):
    return [p for p in find_workload("attention").parameters(problem, config) if isinstance(p, kind)]


def strided(shape, strides, offset=0):
    room = 1 + offset + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    return torch.zeros(room, dtype=torch.bfloat16).as_strided(shape, strides, offset)
