"""The part of the CUDA driver API that loads, launches and times kernels, through ctypes.

Importing this needs no driver; the first call opens libcuda.so.1. Names and values are those of cuda.h. Times are
microseconds, sizes bytes, streams the handles that the driver (and torch) give them: 0 is the default stream.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np

from evoengine.errors import MachineError

OUT_OF_MEMORY, NOT_READY, NOT_SUPPORTED = 2, 600, 801
L2_CACHE_BYTES = 38
"""CU_DEVICE_ATTRIBUTE_…"""
_MAX_DYNAMIC_SHARED = 8
"""CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES"""
_NON_BLOCKING = 1
"""CU_STREAM_NON_BLOCKING: the stream does not wait for the default stream"""
_THREAD_LOCAL = 1
"""CU_STREAM_CAPTURE_MODE_THREAD_LOCAL: other threads may call the driver meanwhile"""

_INT, _UINT, _POINTER, _BYTES = ctypes.c_int, ctypes.c_uint, ctypes.c_void_p, ctypes.c_size_t
_DEVICE, _ADDRESS = ctypes.c_int, ctypes.c_uint64
_PROTOTYPES: dict[str, tuple[type, ...]] = {
    "cuInit": (_UINT,),
    "cuDriverGetVersion": (_POINTER,),
    "cuGetErrorName": (_INT, _POINTER),
    "cuGetErrorString": (_INT, _POINTER),
    "cuDeviceGetCount": (_POINTER,),
    "cuDeviceGet": (_POINTER, _INT),
    "cuDeviceGetName": (_POINTER, _INT, _DEVICE),
    "cuDeviceGetUuid": (_POINTER, _DEVICE),
    "cuDeviceGetUuid_v2": (_POINTER, _DEVICE),
    "cuDeviceTotalMem_v2": (_POINTER, _DEVICE),
    "cuDeviceGetAttribute": (_POINTER, _INT, _DEVICE),
    "cuDevicePrimaryCtxRetain": (_POINTER, _DEVICE),
    "cuCtxSetCurrent": (_POINTER,),
    "cuCtxResetPersistingL2Cache": (),
    "cuMemGetInfo_v2": (_POINTER, _POINTER),
    "cuMemsetD8Async": (_ADDRESS, ctypes.c_ubyte, _BYTES, _POINTER),
    "cuModuleLoadData": (_POINTER, ctypes.c_char_p),
    "cuModuleUnload": (_POINTER,),
    "cuModuleGetFunction": (_POINTER, _POINTER, ctypes.c_char_p),
    "cuModuleGetGlobal_v2": (_POINTER, _POINTER, _POINTER, ctypes.c_char_p),
    "cuMemcpyHtoD_v2": (_ADDRESS, ctypes.c_char_p, _BYTES),
    "cuFuncSetAttribute": (_POINTER, _INT, _INT),
    "cuLaunchKernel": (_POINTER, *[_UINT] * 7, _POINTER, _POINTER, _POINTER),
    "cuStreamCreate": (_POINTER, _UINT),
    "cuStreamDestroy_v2": (_POINTER,),
    "cuStreamBeginCapture_v2": (_POINTER, _INT),
    "cuStreamEndCapture": (_POINTER, _POINTER),
    "cuGraphInstantiateWithFlags": (_POINTER, _POINTER, ctypes.c_uint64),
    "cuGraphLaunch": (_POINTER, _POINTER),
    "cuGraphDestroy": (_POINTER,),
    "cuGraphExecDestroy": (_POINTER,),
    "cuEventCreate": (_POINTER, _UINT),
    "cuEventDestroy_v2": (_POINTER,),
    "cuEventRecord": (_POINTER, _POINTER),
    "cuEventQuery": (_POINTER,),
    "cuEventElapsedTime": (_POINTER, _POINTER, _POINTER),
    "cuTensorMapEncodeTiled": (_POINTER, _INT, _UINT, _ADDRESS, *[_POINTER] * 4, *[_INT] * 4),
}
"""the functions that evoengine calls → the types of their arguments; all return a CUresult"""


class CudaError(Exception):
    """A driver call that failed: `call` is the function, `code` its CUresult, `name` and `text` the driver's for it."""

    def __init__(self, call: str, code: int, name: str, text: str) -> None:
        super().__init__(f"{text} ({name}, {code}, from {call})")
        self.call, self.code, self.name, self.text = call, code, name, text

    @property
    def out_of_memory(self) -> bool:
        return self.code == OUT_OF_MEMORY


@cache
def library() -> ctypes.CDLL:
    """Return the driver's library. Raises OSError if this machine has none."""
    return ctypes.CDLL("libcuda.so.1")


@cache
def _function(name: str) -> Callable[..., int]:
    try:
        function = library()[name]
    except OSError as error:
        raise MachineError(f"this machine has no CUDA driver: {error}") from error
    except AttributeError as error:
        raise MachineError(f"the CUDA driver lacks {name}: evoengine needs a driver for CUDA 12 or later") from error
    function.argtypes, function.restype = _PROTOTYPES[name], ctypes.c_int
    return function


def call(name: str, *arguments: object) -> None:
    """Call a driver function.

    Raises CudaError if it fails, and MachineError if there is no driver or it lacks the function.
    """
    if code := _function(name)(*arguments):
        raise error_of(name, code)


def error_of(call: str, code: int) -> CudaError:
    """Return the error of a driver call that returned `code`, with the driver's own message."""
    name, text = ctypes.c_char_p(), ctypes.c_char_p()
    _function("cuGetErrorName")(code, ctypes.byref(name))
    _function("cuGetErrorString")(code, ctypes.byref(text))
    return CudaError(call, code, (name.value or b"unknown error").decode(), (text.value or b"unknown error").decode())


_keeps_handles = False


def keep_handles() -> None:
    """Release no handle from now on, in a process with a kernel that never ends: cuModuleUnload would wait for it."""
    global _keeps_handles
    _keeps_handles = True


def _release(name: str, handle: ctypes.c_void_p) -> None:
    """Release a handle, ignoring failures.

    After a sticky error the driver refuses this too, and the process is replaced.
    """
    if not _keeps_handles:
        _function(name)(handle)


class _Owned:
    """A driver handle that is released with the object."""

    def __init__(self, handle: ctypes.c_void_p, destroy: str) -> None:
        self.handle = handle
        self._release = weakref.finalize(self, _release, destroy, handle)
        self._release.atexit = False  # the driver may be gone by then


# ── the device ──────────────────────────────────────────────────────────────────────────────────────────────────────


@cache
def _primary_context() -> ctypes.c_void_p:
    device, context = ctypes.c_int(), ctypes.c_void_p()
    call("cuInit", 0)
    call("cuDeviceGet", ctypes.byref(device), 0)
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    return context


def use_primary_context() -> None:
    """Make the first device's primary context, which torch shares, current for the calling thread."""
    call("cuCtxSetCurrent", _primary_context())


def device_name(index: int = 0) -> str:
    name, device = ctypes.create_string_buffer(256), ctypes.c_int()
    call("cuDeviceGet", ctypes.byref(device), index)
    call("cuDeviceGetName", name, len(name), device)
    return name.value.decode()


def device_attribute(key: int, index: int = 0) -> int:
    """Return a CU_DEVICE_ATTRIBUTE_… of cuda.h by its number."""
    value, device = ctypes.c_int(), ctypes.c_int()
    call("cuDeviceGet", ctypes.byref(device), index)
    call("cuDeviceGetAttribute", ctypes.byref(value), key, device)
    return value.value


def memory_info() -> tuple[int, int]:
    """Return the free and the total bytes of the current context's GPU."""
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
    return free.value, total.value


def memset(pointer: int, value: int, size: int, stream: int = 0) -> None:
    """Queue a fill of `size` bytes with the byte `value`."""
    call("cuMemsetD8Async", pointer, value, size, stream)


def reset_persisting_l2() -> None:
    """Reset L2 lines that a kernel marked as persisting, so that a flush replaces them.

    Devices without such lines, such as MIG instances, are left alone.
    """
    try:
        call("cuCtxResetPersistingL2Cache")
    except CudaError as error:
        if error.code != NOT_SUPPORTED:
            raise


# ── kernels ─────────────────────────────────────────────────────────────────────────────────────────────────────────


class Parameters:
    """The values of a kernel's parameters, laid out once for any number of launches.

    Each is a NumPy scalar, whose type is the parameter's, or the bytes of a struct passed by value, as a tensor map.
    """

    def __init__(self, values: Sequence[np.generic | bytes]) -> None:
        parts = [v if isinstance(v, bytes) else v.tobytes() for v in values]
        self._held = [ctypes.create_string_buffer(part, len(part)) for part in parts]
        self.pointers = (ctypes.c_void_p * len(parts))(*map(ctypes.addressof, self._held))


class Module(_Owned):
    """A cubin in the current context, unloaded when it and its functions are dropped."""

    def __init__(self, image: bytes) -> None:
        """Load a binary. Raises CudaError if memory is exhausted, or if the GPU cannot run the binary."""
        handle = ctypes.c_void_p()
        call("cuModuleLoadData", ctypes.byref(handle), image)
        super().__init__(handle, "cuModuleUnload")

    def function(self, name: str) -> Function:
        """Return the kernel of that unmangled name. Raises CudaError if the binary has none."""
        handle = ctypes.c_void_p()
        call("cuModuleGetFunction", ctypes.byref(handle), self.handle, name.encode())
        return Function(self, handle)


class Function:
    """A kernel of a module, which it keeps loaded."""

    def __init__(self, module: Module, handle: ctypes.c_void_p) -> None:
        self._module, self._handle = module, handle

    def set_constant(self, name: str, data: bytes) -> None:
        """Copy `data` to the start of the module's `__constant__` variable of that name, synchronously.

        Raises CudaError.
        """
        at, size = ctypes.c_uint64(), ctypes.c_size_t()
        call("cuModuleGetGlobal_v2", ctypes.byref(at), ctypes.byref(size), self._module.handle, name.encode())
        call("cuMemcpyHtoD_v2", at.value, data, min(len(data), size.value))

    def allow_shared(self, size: int) -> None:
        """Allow `size` bytes of dynamic shared memory per block. Launches with more than 48 KiB require it."""
        call("cuFuncSetAttribute", self._handle, _MAX_DYNAMIC_SHARED, size)

    def launch(
        self,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        shared_bytes: int,
        parameters: Parameters,
        stream: int = 0,
    ) -> None:
        """Queue the kernel. The driver copies the parameters, so they may be freed at once."""
        call("cuLaunchKernel", self._handle, *grid, *block, shared_bytes, stream, parameters.pointers, None)


# ── streams, events, graphs ─────────────────────────────────────────────────────────────────────────────────────────


class Stream(_Owned):
    """A stream that neither waits for the default stream nor is awaited by it."""

    def __init__(self) -> None:
        handle = ctypes.c_void_p()
        call("cuStreamCreate", ctypes.byref(handle), _NON_BLOCKING)
        super().__init__(handle, "cuStreamDestroy_v2")


class Event(_Owned):
    def __init__(self) -> None:
        handle = ctypes.c_void_p()
        call("cuEventCreate", ctypes.byref(handle), 0)
        super().__init__(handle, "cuEventDestroy_v2")

    def record(self, stream: int = 0) -> None:
        call("cuEventRecord", self.handle, stream)

    def query(self) -> bool:
        """Return whether all work queued before the record has ended. Raises CudaError if it failed."""
        code = _function("cuEventQuery")(self.handle)
        if code not in (0, NOT_READY):
            raise error_of("cuEventQuery", code)
        return code == 0

    def elapsed_us(self, end: Event) -> float:
        """Return the time in µs from this event to `end`, both completed.

        The driver's clock ticks about twice a microsecond.
        """
        milliseconds = ctypes.c_float()
        call("cuEventElapsedTime", ctypes.byref(milliseconds), self.handle, end.handle)
        return milliseconds.value * 1e3


class Graph(_Owned):
    """A capture, for replay, of what `record` queues on the stream that it receives.

    It holds `record`, and through it the kernels that the graph launches.
    """

    def __init__(self, record: Callable[[int], None]) -> None:
        stream, graph, executable = Stream(), ctypes.c_void_p(), ctypes.c_void_p()
        call("cuStreamBeginCapture_v2", stream.handle, _THREAD_LOCAL)
        try:
            record(stream.handle.value or 0)
        finally:
            call("cuStreamEndCapture", stream.handle, ctypes.byref(graph))
        try:
            call("cuGraphInstantiateWithFlags", ctypes.byref(executable), graph, 0)
        finally:
            call("cuGraphDestroy", graph)
        self._record = record
        super().__init__(executable, "cuGraphExecDestroy")

    def launch(self, stream: int = 0) -> None:
        call("cuGraphLaunch", self.handle, stream)
