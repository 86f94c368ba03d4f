"""Run kernels on a real GPU: cuda_api loads and launches the binary, torch holds the tensors. The process may die.

A CUDA error is sticky and a kernel that never ends holds the GPU: after KernelCrashed or KernelHung the process must be
replaced.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np
import torch

from evoengine.devices import cuda_api, tensor_map, torch_gpu
from evoengine.devices.base import (
    LAUNCH_SECONDS,
    Argument,
    ConstantArgument,
    Executed,
    KernelCall,
    KernelCrashed,
    KernelHung,
    KernelUnbuildable,
    PointerArgument,
    Round,
    RunRounds,
    ScalarArgument,
    ScratchArgument,
    ScratchParameter,
    StructArgument,
    TensorArgument,
    TensorMapArgument,
    TensorParameter,
    Tensors,
    is_passed,
)
from evoengine.devices.cuda_api import CudaError
from evoengine.devices.torch_gpu import gpu
from evoengine.errors import MachineError
from evoengine.records import Binary, Launch

GUARD_BYTES = 1 << 16
"""size of the guard bands on both sides of every tensor, whose pattern a launch must not change"""
GUARD = 0xA5
POLL_SECONDS = 2e-5
CUDA_ERRORS: tuple[type[Exception], ...] = (CudaError, *torch_gpu.ERRORS)
_BINARY_REFUSED = (1, 200, 209, 218, 222, 300, 500)
"""CUresults of loading that are the binary's fault: exceeded limit, format, architecture, missing kernel; others are
the machine's"""
Parameters = Mapping[str, cuda_api.Parameters]
"""by the kernel's entry"""
_Found = TypeVar("_Found")


class CudaKernel:
    """A loaded binary, unloaded when it is dropped.

    Raises KernelUnbuildable if the GPU refuses the binary, MachineError if the machine is at fault.
    """

    def __init__(self, binary: Binary, entry: str, launch: Launch) -> None:
        """Load a kernel. `launch` states the dynamic shared memory of a block, and the kernels that follow `entry`."""
        gpu()  # its context
        try:
            module = _with_memory(f"load kernel {entry}", lambda: cuda_api.Module(binary.cubin))
            self._functions = {name: module.function(name) for name, _ in launch.kernels(entry)}
            for name, geometry in launch.kernels(entry):
                self._functions[name].allow_shared(geometry.shared_bytes)
        except CudaError as error:
            if error.code in _BINARY_REFUSED:
                raise KernelUnbuildable(f"the GPU cannot run the binary: {error}") from error
            raise MachineError(f"the GPU cannot load a kernel: {error}") from error
        self.entry = entry
        self.scratch: dict[str, torch.Tensor] = {}
        """scratch memory by name, uint8; it keeps its contents between launches and is freed with this object"""

    def provide_scratch(self, stated: Sequence[ScratchParameter]) -> None:
        """Allocate missing scratch memory, zeroed or poisoned."""
        for p in stated:
            if p.name not in self.scratch:
                self.scratch[p.name] = gpu().empty((p.bytes,), torch.uint8).fill_(0 if p.zeroed else 0xFF)

    def set_constants(self, contents: Mapping[str, bytes]) -> None:
        """Fill `__constant__` variables by name, after all queued work has ended. Raises CudaError."""
        if contents:
            await_gpu(self.entry)
        for name, data in contents.items():
            self._functions[self.entry].set_constant(name, data)

    def launch(self, launch: Launch, parameters: Parameters, stream: int | None = None) -> None:
        """Queue the kernels, by default on torch's stream, each with its own parameters.

        Raises CudaError, MachineError.
        """
        stream = gpu().stream() if stream is None else stream
        for entry, geometry in launch.kernels(self.entry):
            self._queue(entry, geometry, parameters[entry], stream)

    def _queue(self, entry: str, launch: Launch, parameters: cuda_api.Parameters, stream: int) -> None:
        function = self._functions[entry]
        _with_memory(
            f"launch kernel {entry}",
            lambda: function.launch(launch.grid, launch.block, launch.shared_bytes, parameters, stream),
        )

    def run(self, call: KernelCall, seed: int) -> Tensors:
        """Launch once from host memory with guard bands and return every tensor as it stands afterwards.

        Raises KernelCrashed if the GPU reports an error or a guard band changed, KernelHung if the kernel does not end.
        """
        arguments = call.arguments
        try:
            buffers = {a.name: _guarded(a.data) for a in arguments if isinstance(a, TensorArgument)}
            self.set_constants({a.name: a.data.tobytes() for a in arguments if isinstance(a, ConstantArgument)})
            pointers = {name: buffer.data_ptr() + GUARD_BYTES for name, buffer in buffers.items()}
            parameters = cuda_api.Parameters([parameter_value(a, pointers) for a in arguments if is_passed(a)])
            self._queue(call.entry, call.launch, parameters, gpu().stream())
            await_gpu(self.entry)
            found = {name: buffer.cpu().numpy() for name, buffer in buffers.items()}
        except CUDA_ERRORS as error:
            raise KernelCrashed(f"kernel {self.entry}: {first_line(error)}") from error
        return {a.name: _check_guards(a, found[a.name]) for a in arguments if isinstance(a, TensorArgument)}


def _with_memory(what: str, act: Callable[[], _Found]) -> _Found:
    """Retry a call without torch's cached memory if the driver has none left.

    Raises MachineError if that is not enough, since it is not the kernel's fault.
    """
    try:
        return act()
    except CudaError as error:
        if not error.out_of_memory:
            raise
    gpu().release_memory()
    try:
        return act()
    except CudaError as error:
        if not error.out_of_memory:
            raise
        free, total = cuda_api.memory_info()
        raise MachineError(
            f"the GPU is out of memory: {free:,} of {total:,} bytes are free, too few to {what}; end other programs on "
            "the GPU or choose a smaller --problem"
        ) from error


def await_gpu(name: str, event: cuda_api.Event | None = None, seconds: float = LAUNCH_SECONDS) -> None:
    """Wait for all queued work, or for `event`. Raises KernelHung after `seconds`.

    A synchronize would wait forever for an endless loop, as would unloading its module.
    """
    if event is None:
        event = cuda_api.Event()
        event.record(gpu().stream())
    deadline = time.monotonic() + seconds
    while not event.query():
        if time.monotonic() > deadline:
            cuda_api.keep_handles()
            raise KernelHung(f"kernel {name}: no end after {seconds:.3g} s on the GPU")
        time.sleep(POLL_SECONDS)


def parameter_value(argument: object, pointers: Mapping[str, int]) -> np.generic | bytes:
    """Return the value of a kernel's parameter, or of a part of a struct, with tensors at these addresses."""
    if isinstance(argument, ScalarArgument):
        return argument.value
    if isinstance(argument, TensorMapArgument):
        return encode_tensor_map(argument, pointers[argument.tensor])
    if isinstance(argument, PointerArgument):
        return np.uint64(pointers[argument.memory] + argument.offset)
    if isinstance(argument, StructArgument):
        whole = bytearray(argument.bytes)
        for at, part in argument.parts:
            value = parameter_value(part, pointers)
            data = value if isinstance(value, bytes) else value.tobytes()
            whole[at : at + len(data)] = data
        return bytes(whole)
    assert isinstance(argument, TensorArgument | TensorParameter | ScratchParameter)
    return np.uint64(pointers[argument.name])


def _guarded(data: np.ndarray) -> torch.Tensor:
    buffer = gpu().empty((data.nbytes + 2 * GUARD_BYTES,), torch.uint8).fill_(GUARD)
    buffer[GUARD_BYTES : GUARD_BYTES + data.nbytes] = torch.from_numpy(data.reshape(-1).view(np.uint8).copy())
    return buffer


def _check_guards(argument: TensorArgument, found: np.ndarray) -> np.ndarray:
    size = argument.data.nbytes
    for side, band in (("before the start", found[:GUARD_BYTES]), ("past the end", found[GUARD_BYTES + size :])):
        touched = np.flatnonzero(band != GUARD)
        if touched.size:
            raise KernelCrashed(f"out-of-bounds write: {touched.size} bytes {side} of {argument.name} were changed")
    return found[GUARD_BYTES : GUARD_BYTES + size].copy().view(argument.data.dtype).reshape(argument.data.shape)


def first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


_L2_PROMOTION_256B = 3


def encode_tensor_map(argument: TensorMapArgument, device_pointer: int) -> bytes:
    """Return the 128 bytes of the map of a tensor at `device_pointer`, a multiple of 16. Call `check` first.

    Elements outside the dims read as zero and are not written. Raises MachineError if no driver supports tensor maps
    (12.0 and later), KernelUnbuildable if it refuses the map.
    """
    rank = len(argument.dims)
    _, dtype, _ = tensor_map.ELEMENTS[argument.dtype]
    memory = ctypes.create_string_buffer(tensor_map.BYTES + tensor_map.ALIGNMENT)
    start = -ctypes.addressof(memory) % tensor_map.ALIGNMENT
    try:
        cuda_api.call(
            "cuTensorMapEncodeTiled",
            ctypes.addressof(memory) + start,
            dtype,
            rank,
            device_pointer + argument.offset,
            (ctypes.c_uint64 * rank)(*argument.dims),
            (ctypes.c_uint64 * rank)(*argument.strides_bytes),
            (ctypes.c_uint32 * rank)(*argument.box),
            (ctypes.c_uint32 * rank)(*[1] * rank),
            0,  # no interleaving
            tensor_map.SWIZZLES[argument.swizzle],
            _L2_PROMOTION_256B,
            argument.nan,  # what lies outside of the tensor
        )
    except CudaError as error:
        raise KernelUnbuildable(f"tensor map {argument.name}: {error}") from error
    return memory.raw[start : start + tensor_map.BYTES]


# Rounds on a device that launches one kernel at a time and does not record stores, such as a GPU. Memory is passed on
# from launch to launch.

LaunchOne = Callable[[KernelCall, int], Tensors]
"""runs one kernel; outputs initially have the contents of their arguments"""
POISONS = (0xFF, 0xA5)
"""an element that keeps both was not written"""


def rounds_by_launches(launch: LaunchOne) -> RunRounds:
    """Return a `RunRounds` that makes one launch for each kernel."""

    def run(rounds: Sequence[Round], seed: int) -> Executed:
        memory: dict[str, np.ndarray] = {}
        found = [dict(_run_round(launch, one, memory, seed)) for one in rounds]
        return Executed(found, _unwritten(launch, rounds[0], found[0], seed))

    return run


def _run_round(launch: LaunchOne, calls: Round, memory: dict[str, np.ndarray], seed: int) -> Tensors:
    found: dict[str, np.ndarray] = {}
    given = (a for call in calls for a in call.arguments)
    memory.update({a.name: a.data for a in given if isinstance(a, TensorArgument) and a.inout})
    for call in calls:
        arguments = [_from_memory(argument, memory) for argument in call.arguments]
        after = launch(KernelCall(call.entry, call.launch, arguments), seed)
        outputs = {a.name for a in arguments if isinstance(a, TensorArgument) and a.output}
        memory.update({name: data for name, data in after.items() if name in outputs})
        found.update(after)
    return found


def _from_memory(argument: Argument, memory: dict[str, np.ndarray]) -> Argument:
    if isinstance(argument, ScratchArgument):
        fresh = np.full(argument.bytes, 0 if argument.zeroed else POISONS[0], np.uint8)
        return TensorArgument(argument.name, memory.get(argument.name, fresh), output=True, passed=argument.passed)
    if isinstance(argument, TensorArgument) and argument.output and argument.name in memory:
        return replace(argument, data=memory[argument.name])
    return argument


def _unwritten(launch: LaunchOne, calls: Round, after: Tensors, seed: int) -> dict[str, int]:
    """Return how many elements of each output keep the poison, for two different poisons."""
    given = [a for call in calls for a in call.arguments if isinstance(a, TensorArgument)]
    outputs = {a.name: a.data for a in given if a.output and not a.inout}
    kept = {name: _equal(after[name], data) for name, data in outputs.items()}
    if not any(mask.any() for mask in kept.values()):
        return {}
    other = {name: np.full(data.nbytes, POISONS[1], np.uint8).view(data.dtype) for name, data in outputs.items()}
    memory = {name: data.reshape(outputs[name].shape) for name, data in other.items()}
    poisoned = dict(memory)
    again = _run_round(launch, calls, memory, seed)
    counts = {name: int((mask & _equal(again[name], poisoned[name])).sum()) for name, mask in kept.items()}
    return {name: count for name, count in counts.items() if count}


def _equal(found: np.ndarray, poison: np.ndarray) -> np.ndarray:
    """Return which elements have the poison's bits."""
    bits = np.dtype(f"u{poison.dtype.itemsize}")
    equal: np.ndarray = found.view(bits) == poison.view(bits)
    return equal
