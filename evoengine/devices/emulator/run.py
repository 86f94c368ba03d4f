"""Runs an executable made by `build`, one launch per process."""

from __future__ import annotations

import os
import signal
import struct
import subprocess
from pathlib import Path

import numpy as np

from evoengine.devices import tensor_map
from evoengine.devices.base import Argument, Arguments, KernelCrashed, KernelHung, TensorArgument, TensorMapArgument
from evoengine.records import Launch

# The layouts of LaunchHeader and ArgumentHeader in runtime/main.cpp, and of TensorMap in runtime/internal.h.
_LAUNCH = struct.Struct("=Qq3I3I")
_ARGUMENT = struct.Struct("=Qc55s")
_TENSOR_MAP = struct.Struct("=QQ4Q5I5HBBH46x")
_CRASHED, _HUNG = 10, 11


def run(
    executable: Path, entry: str, launch: Launch, arguments: Arguments, seed: int, timeout: float
) -> dict[str, np.ndarray]:
    """Every tensor argument by name as it stands after the launch, in its dtype and shape; inputs as they were.

    `seed` draws the order of blocks and threads and the placement of tensors; `timeout` is in seconds.
    Raises KernelCrashed and KernelHung with the reason, naming kernel, block and thread; KernelUnbuildable for a tensor
    map that cannot be.
    """
    header = _LAUNCH.pack(seed % 2**64, os.getpid(), *launch.grid, launch.threads, launch.shared_bytes, len(arguments))
    values = [_value(a, arguments) for a in arguments]
    message = b"".join([header, *map(_argument_header, arguments, values), *(v.tobytes() for v in values)])
    try:
        done = subprocess.run([str(executable)], input=message, capture_output=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        raise KernelHung(f"no end after {timeout:g} s, kernel {entry}, grid {launch.grid}") from None
    if done.returncode != 0:
        _fail(done, entry)
    return _results(done.stdout, arguments)


def _value(argument: Argument, arguments: Arguments) -> np.ndarray:
    if isinstance(argument, TensorMapArgument):
        return np.frombuffer(_tensor_map(argument, arguments), np.uint8)
    return np.ascontiguousarray(argument.data if isinstance(argument, TensorArgument) else argument.value)


def _tensor_map(argument: TensorMapArgument, arguments: Arguments) -> bytes:
    index, tensor = next((i, a) for i, a in enumerate(arguments) if a.name == argument.tensor)
    tensor_map.check(argument, tensor.data.nbytes)

    def five(values: tuple[int, ...]) -> list[int]:
        return [*values, *[1] * (5 - len(values))]

    strides = five(argument.strides_bytes)[:4]
    element, rank = tensor_map.element_bytes(argument), len(argument.dims)
    dims, box = five(argument.dims), five(argument.box)
    return _TENSOR_MAP.pack(0, index, *strides, *dims, *box, element, rank, argument.swizzle or 16)


def _argument_header(argument: Argument, value: np.ndarray) -> bytes:
    if isinstance(argument, TensorArgument):
        kind = b"o" if argument.output else b"t"
    elif isinstance(argument, TensorMapArgument):
        kind = b"m"
    else:
        kind = b"f" if value.dtype.kind == "f" else b"i"
    return _ARGUMENT.pack(value.nbytes, kind, argument.name.encode()[:54])


def _fail(done: subprocess.CompletedProcess[bytes], entry: str) -> None:
    reason = done.stderr.decode(errors="replace").strip()
    if done.returncode == _HUNG:
        raise KernelHung(reason)
    if done.returncode == _CRASHED and reason:
        raise KernelCrashed(reason)
    how = signal.Signals(-done.returncode).name if done.returncode < 0 else f"exit code {done.returncode}"
    raise KernelCrashed(f"the emulator's process ended by {how} without a report, kernel {entry} {reason}".rstrip())


def _results(output: bytes, arguments: Arguments) -> dict[str, np.ndarray]:
    results, position = {}, 0
    for argument in arguments:
        if not isinstance(argument, TensorArgument):
            continue
        if argument.output:
            flat = np.frombuffer(output, argument.data.dtype, argument.data.size, position)
            results[argument.name] = flat.reshape(argument.data.shape).copy()
            position += argument.data.nbytes
        else:
            results[argument.name] = argument.data.copy()
    return results
