"""Stands in for evoengine/devices/torch_gpu.py: torch on the CPU, its tensors in memory that the stand-in driver gave.

A library's kernel takes the time that `FAKE_CUDA_TIMES` gives for its name, such as "SDPA FLASH_ATTENTION".
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Sequence
from functools import cache

import torch

from evoengine.devices import cuda_api
from tests.fake_cuda import device

Call = Callable[[], object]
ERRORS: tuple[type[Exception], ...] = ()
HOST_US = 40.0
"""what torch's way through Python takes before SDPA is queued"""
_COMPUTE = ctypes.CFUNCTYPE(ctypes.c_double)


class TorchGpu:
    device = "cpu"

    def __init__(self) -> None:
        cuda_api.use_primary_context()
        device.install()
        self._driver = cuda_api.library()

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        count = 1
        for extent in shape:
            count *= extent
        size, pointer = count * dtype.itemsize, ctypes.c_uint64()
        code = self._driver.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(size))
        if code == cuda_api.OUT_OF_MEMORY:
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {size} bytes")
        if code:
            raise cuda_api.error_of("cuMemAlloc_v2", code)
        memory = (ctypes.c_uint8 * size).from_address(pointer.value)
        weakref.finalize(memory, self._driver.cuMemFree_v2, pointer).atexit = False
        return torch.frombuffer(memory, dtype=dtype).view(shape)

    def stream(self) -> int:
        return 0

    def queue(self, name: str, call: Call, stream: int = 0) -> None:
        """The driver runs `call` in its turn; what it raises, the caller gets, as where torch refuses a call."""
        raised: list[BaseException] = []

        def compute() -> float:
            try:
                _computed_once(call)
            except BaseException as error:
                raised.append(error)
            return device.microseconds(name)

        callback = _COMPUTE(compute)
        _callbacks.append(callback)  # a graph may call it again
        self._driver.stand_in_advance(ctypes.c_double(HOST_US))
        code = self._driver.stand_in_work(ctypes.c_void_p(stream), callback)
        if raised:
            raise raised[0]
        if code:
            raise cuda_api.error_of(name, code)

    def captured(self, name: str, calls: Sequence[Call]) -> Call:
        def queue_all(stream: int) -> None:
            for call in calls:
                self.queue(name, call, stream)

        graph = cuda_api.Graph(queue_all)
        return lambda: graph.launch(self.stream())

    def now(self) -> float:
        return device.now() / 1e6

    def rest(self, seconds: float) -> None:
        self._driver.stand_in_advance(ctypes.c_double(seconds * 1e6))

    def release_memory(self) -> None:
        device.released.append(True)


_callbacks: list[object] = []
_known: list[Call] = []


def _computed_once(call: Call) -> None:
    """Nothing reads what a library's kernel writes while it is timed, so it need not be computed again."""
    if call not in _known:
        call()
        _known.append(call)


@cache
def gpu() -> TorchGpu:
    return TorchGpu()
