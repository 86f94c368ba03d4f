"""A real GPU: CuPy loads and launches the binary, torch holds the tensors. Runs in a process of its own, which may die.

A CUDA error is sticky and a kernel that never ends holds the GPU: after KernelCrashed or KernelHung the process must be
replaced.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import cupy
import numpy as np
import torch
from cupy.cuda import driver, runtime

from evoengine.devices.base import (
    Arguments,
    KernelCrashed,
    KernelHung,
    KernelUnbuildable,
    TensorArgument,
    TensorMapArgument,
    Tensors,
)
from evoengine.devices.tensor_map import BYTES, encode
from evoengine.records import Binary, Launch

GUARD_BYTES = 1 << 16
"""on both sides of every tensor, filled with a pattern that must survive the launch"""
GUARD = 0xA5
LAUNCH_SECONDS = 10.0
"""one launch takes milliseconds, a tenth of a second at most; past this it will not end"""
POLL_SECONDS = 2e-5
CUDA_ERRORS: tuple[type[Exception], ...] = (runtime.CUDARuntimeError, driver.CUDADriverError)
if hasattr(torch, "AcceleratorError"):  # torch 2.8; a plain RuntimeError before
    CUDA_ERRORS += (torch.AcceleratorError,)


class CudaKernel:
    """A loaded binary; raises KernelUnbuildable where the GPU refuses it."""

    def __init__(self, binary: Binary, entry: str, launch: Launch) -> None:
        with tempfile.TemporaryDirectory(prefix="evoengine-") as folder:
            path = Path(folder, "kernel.cubin")
            path.write_bytes(binary.cubin)
            try:
                self._function = cupy.RawModule(path=str(path)).get_function(entry)
                self._function.max_dynamic_shared_size_bytes = launch.shared_bytes
            except CUDA_ERRORS as error:
                raise KernelUnbuildable(f"the GPU does not take the binary: {first_line(error)}") from error
        self.entry = entry

    def launch(self, launch: Launch, parameters: tuple) -> None:
        """Queues the kernel on torch's current stream; pointers travel as uint64."""
        stream = cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream)
        with stream:
            self._function(launch.grid, (launch.threads, 1, 1), parameters, shared_mem=launch.shared_bytes)

    def run(self, launch: Launch, arguments: Arguments, seed: int) -> Tensors:
        """One launch from host memory with guard bands; all tensors as they stood afterwards."""
        try:
            buffers = {a.name: _guarded(a.data) for a in arguments if isinstance(a, TensorArgument)}
            self.launch(launch, tuple(_parameter(a, buffers) for a in arguments))
            await_gpu(self.entry)
            found = {name: buffer.cpu().numpy() for name, buffer in buffers.items()}
        except CUDA_ERRORS as error:
            raise KernelCrashed(f"kernel {self.entry}: {first_line(error)}") from error
        return {a.name: _unguarded(a, found[a.name]) for a in arguments if isinstance(a, TensorArgument)}


def await_gpu(entry: str, event: torch.cuda.Event | None = None, seconds: float = LAUNCH_SECONDS) -> None:
    """Waits for all that was queued, or for `event`; raises KernelHung where it takes longer than `seconds`.

    A plain synchronize would wait for an endless loop as long as the loop.
    """
    if event is None:
        event = torch.cuda.Event()
        event.record()
    deadline = time.monotonic() + seconds
    while not event.query():
        if time.monotonic() > deadline:
            raise KernelHung(f"kernel {entry}: no end after {seconds:g} s on the GPU")
        time.sleep(POLL_SECONDS)


def _parameter(argument, buffers: dict[str, torch.Tensor]):
    if isinstance(argument, TensorArgument):
        return np.uint64(buffers[argument.name].data_ptr() + GUARD_BYTES)
    if isinstance(argument, TensorMapArgument):
        return tensor_map(argument, buffers[argument.tensor].data_ptr() + GUARD_BYTES)
    return argument.value


def tensor_map(argument: TensorMapArgument, pointer: int) -> np.ndarray:
    """The map of the tensor at that device address; CuPy passes a NumPy array of one element by value."""
    return np.frombuffer(encode(argument, pointer), dtype=np.dtype((np.void, BYTES)))


def _guarded(data: np.ndarray) -> torch.Tensor:
    buffer = torch.full((data.nbytes + 2 * GUARD_BYTES,), GUARD, dtype=torch.uint8, device="cuda")
    buffer[GUARD_BYTES : GUARD_BYTES + data.nbytes] = torch.from_numpy(data.reshape(-1).view(np.uint8).copy()).cuda()
    return buffer


def _unguarded(argument: TensorArgument, found: np.ndarray) -> np.ndarray:
    size = argument.data.nbytes
    for side, band in (("before the start", found[:GUARD_BYTES]), ("past the end", found[GUARD_BYTES + size :])):
        touched = np.flatnonzero(band != GUARD)
        if touched.size:
            raise KernelCrashed(f"out-of-bounds write: {touched.size} bytes {side} of {argument.name} were changed")
    return found[GUARD_BYTES : GUARD_BYTES + size].copy().view(argument.data.dtype).reshape(argument.data.shape)


def first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
