"""What the CUDA driver says of this machine's GPUs, through its C interface: no context is made, nothing heavy is imported."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

_MAJOR, _MINOR = 75, 76
"""CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*"""


@dataclass(frozen=True, slots=True)
class GpuDevice:
    index: int
    name: str
    uuid: str
    capability: int
    """90 for compute capability 9.0"""
    memory_bytes: int


def find_driver() -> tuple[str, list[GpuDevice]] | str:
    """The driver's CUDA version (13.0) and its GPUs; or, where that cannot be had, the reason."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "no CUDA driver (libcuda.so.1 is not on this machine)"
    code = cuda.cuInit(0)
    if code:
        return f"the CUDA driver does not start (cuInit gives {code})"
    version, count = ctypes.c_int(), ctypes.c_int()
    cuda.cuDriverGetVersion(ctypes.byref(version))
    cuda.cuDeviceGetCount(ctypes.byref(count))
    devices = [_describe(cuda, index) for index in range(count.value)]
    if not devices:
        return "the CUDA driver sees no GPU"
    return f"{version.value // 1000}.{version.value % 1000 // 10}", devices


def _describe(cuda: ctypes.CDLL, index: int) -> GpuDevice:
    device, name, uuid, memory = ctypes.c_int(), ctypes.create_string_buffer(256), (ctypes.c_ubyte * 16)(), ctypes.c_size_t()
    cuda.cuDeviceGet(ctypes.byref(device), index)
    cuda.cuDeviceGetName(name, len(name), device)
    cuda.cuDeviceGetUuid(uuid, device)
    cuda.cuDeviceTotalMem_v2(ctypes.byref(memory), device)
    major, minor = (_attribute(cuda, device, key) for key in (_MAJOR, _MINOR))
    return GpuDevice(index, name.value.decode(), f"GPU-{bytes(uuid).hex()}", 10 * major + minor, memory.value)


def _attribute(cuda: ctypes.CDLL, device: ctypes.c_int, key: int) -> int:
    value = ctypes.c_int()
    cuda.cuDeviceGetAttribute(ctypes.byref(value), key, device)
    return value.value
