"""Query the CUDA driver about this machine's GPUs without a context or a heavy import, and lock a GPU."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from uuid import UUID

from evoengine.devices import cuda_api
from evoengine.devices.cuda_api import CudaError
from evoengine.errors import MachineError
from evoengine.gpu import Gpu, known_gpus

_MAJOR, _MINOR = 75, 76
"""CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*"""
_LIMITS = {
    "sms": 16,
    "shared_per_block": 97,
    "shared_per_sm": 81,
    "registers_per_sm": 82,
    "threads_per_sm": 39,
    "blocks_per_sm": 106,
}
"""field of `Gpu` → CUdevice_attribute of cuda.h"""


@dataclass(frozen=True, slots=True)
class GpuDevice:
    index: int
    name: str
    uuid: str
    """GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx, of a MIG instance MIG-…, as CUDA_VISIBLE_DEVICES and NVML take it"""
    capability: int
    """90 for compute capability 9.0"""
    memory_bytes: int
    limits: dict[str, int] = field(default_factory=dict)
    """those fields of `Gpu` that the driver reports"""


def find_driver() -> tuple[str, list[GpuDevice]] | str:
    """Return the driver's CUDA version (13.0) and its GPUs; the reason if they are not available."""
    try:
        cuda_api.library()
    except OSError:
        return "no CUDA driver (libcuda.so.1 is missing)"
    version, count = ctypes.c_int(), ctypes.c_int()
    try:
        cuda_api.call("cuInit", 0)
        cuda_api.call("cuDriverGetVersion", ctypes.byref(version))
        cuda_api.call("cuDeviceGetCount", ctypes.byref(count))
        devices = [_describe(index) for index in range(count.value)]
    except CudaError as error:
        return f"the CUDA driver cannot be initialised ({error.call} returned {error.code}: {error.text})"
    if not devices:
        return "the CUDA driver sees no GPU"
    return f"{version.value // 1000}.{version.value % 1000 // 10}", devices


def _describe(index: int) -> GpuDevice:
    device, memory = ctypes.c_int(), ctypes.c_size_t()
    cuda_api.call("cuDeviceGet", ctypes.byref(device), index)
    cuda_api.call("cuDeviceTotalMem_v2", ctypes.byref(memory), device)
    name, (uuid, mig) = cuda_api.device_name(index), _uuid(device)
    if mig and "MIG" not in name:
        name = f"{name} (a MIG instance)"
    major, minor = (cuda_api.device_attribute(key, index) for key in (_MAJOR, _MINOR))
    limits = {field: cuda_api.device_attribute(key, index) for field, key in _LIMITS.items()}
    return GpuDevice(index, name, uuid, 10 * major + minor, memory.value, limits)


def _uuid(device: ctypes.c_int) -> tuple[str, bool]:
    """Return the UUID with its prefix, and whether it is that of a MIG instance.

    cuDeviceGetUuid returns the UUID of the whole GPU, cuDeviceGetUuid_v2 that of the instance that the process sees.
    """
    whole, own = (ctypes.c_ubyte * 16)(), (ctypes.c_ubyte * 16)()
    cuda_api.call("cuDeviceGetUuid", whole, device)
    cuda_api.call("cuDeviceGetUuid_v2", own, device)
    mig = bytes(own) != bytes(whole)
    return f"{'MIG' if mig else 'GPU'}-{UUID(bytes=bytes(own))}", mig


def supports_arch(device: GpuDevice, arch: str) -> bool:
    """Return whether the GPU has that architecture.

    A binary for an older minor version would run, but it is not what was tuned.
    """
    return device.capability == int("".join(c for c in arch if c.isdigit()))


def require_arch(device: GpuDevice, arch: str, what: str) -> None:
    """Raise MachineError if binaries for `arch`, which is the architecture of `what`, do not run on the GPU."""
    if not supports_arch(device, arch):
        raise MachineError(
            f"{what} is compiled for {arch}, which this machine's {device.name} (sm_{device.capability}) cannot run: "
            "evoengine search --gpu with the GPU's own name compiles for it"
        )


def resolve_gpu(device: GpuDevice, named: Gpu) -> Gpu:
    """Return the GPU of this machine under the key of the named one, with the limits that its driver reports.

    Peaks are those of gpus.toml for a GPU of its name, else those of the named one.
    """
    known = next((gpu for gpu in known_gpus().values() if gpu.name == device.name), named)
    return replace(known, key=named.key, name=device.name, arch=named.arch, **device.limits)


@contextmanager
def lock_device(device: GpuDevice, echo: Callable[[str], None]) -> Iterator[None]:
    """Lock the GPU for this process. Reports and waits while another evoengine of this user times on it."""
    from filelock import FileLock, Timeout
    from platformdirs import user_cache_path

    folder = user_cache_path("evoengine") / "gpus"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise MachineError(f"cannot write {folder}, which holds the locks of GPUs: set XDG_CACHE_HOME") from error
    lock = FileLock(Path(folder, f"{device.uuid}.lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        echo(f"another evoengine is timing on {device.name} ({device.uuid}); waiting for it to end (Ctrl-C stops)")
        lock.acquire(poll_interval=0.2)
    try:
        yield
    finally:
        lock.release()
