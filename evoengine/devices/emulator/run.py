"""Runs an executable made by `build`, one launch per process."""

from __future__ import annotations

import os
import signal
import struct
import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from evoengine.devices import tensor_map
from evoengine.devices.base import (
    Argument,
    Arguments,
    ConstantArgument,
    KernelCrashed,
    KernelHung,
    ScalarArgument,
    TensorArgument,
    TensorMapArgument,
    TensorParameter,
)
from evoengine.devices.pool import BlockLaunch, BlockTrace
from evoengine.errors import MachineError
from evoengine.machine import oom_kills, require_own_end
from evoengine.records import Launch

# The layouts of LaunchHeader and ArgumentHeader in runtime/main.cpp, and of BlockHeader and PageHeader in
# runtime/pooled.cpp.
_LAUNCH = struct.Struct("=Qq3I3I4IQ")
_ARGUMENT = struct.Struct("=Qc55s")
_BLOCK = struct.Struct("=QII")
_PAGE = struct.Struct("=QII")
_CRASHED, _HUNG = 10, 11


def run(
    executable: Path, entry: str, launch: Launch, arguments: Arguments, seed: int, timeout: float
) -> dict[str, np.ndarray]:
    """Every tensor argument by name as it stands after the launch, in its dtype and shape; inputs as they were.

    `seed` draws the order of blocks and threads and the placement of tensors; `timeout` is in seconds.
    Raises KernelCrashed and KernelHung with the reason, naming kernel, block and thread; KernelUnbuildable for a tensor
    map that cannot be; MachineError and OSError where the process cannot be started or the machine has no memory left,
    ToolDied where a signal ended it.
    """
    header = _header(launch, arguments, seed)
    return _results(_finish(executable, header + _message(arguments), entry, launch, timeout), arguments)


def run_blocks(executable: Path, entry: str, asked: BlockLaunch, seed: int, timeout: float) -> list[BlockTrace]:
    """What each of the blocks touches. Raises as `run` does."""
    launch, arguments, pages = asked.launch, asked.arguments, asked.pool.pages
    header = _header(launch, arguments, seed, len(asked.blocks), pages.nbytes)
    chosen = np.array([(b.number, b.input_limit) for b in asked.blocks], np.uint64)
    message = header + chosen.tobytes() + pages.tobytes() + _message(arguments)
    return _block_traces(_finish(executable, message, entry, launch, timeout), arguments)


def _header(launch: Launch, arguments: Sequence[Argument | TensorParameter], seed: int, *chosen: int) -> bytes:
    constants = sum(isinstance(a, ConstantArgument) for a in arguments)
    geometry = (*launch.grid, *launch.block, launch.shared_bytes, len(arguments) - constants)
    blocks, pool_bytes = chosen or (0, 0)
    return _LAUNCH.pack(seed % 2**64, os.getpid(), *geometry, blocks, constants, pool_bytes)


def _message(arguments: Sequence[Argument | TensorParameter]) -> bytes:
    values = [_value(a, arguments) for a in arguments]
    return b"".join([*map(_argument_header, arguments, values), *values])


def _finish(executable: Path, message: bytes, entry: str, launch: Launch, timeout: float) -> bytes:
    killed_before = oom_kills()
    try:
        done = subprocess.run([str(executable)], input=message, capture_output=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        raise KernelHung(f"no end after {timeout:g} s, kernel {entry}, grid {launch.grid}") from None
    if done.returncode == -signal.SIGKILL and oom_kills() > killed_before:
        raise MachineError("this machine has no memory left: the kernel ended the emulator's process")
    if done.returncode != 0:
        _fail(done, entry)
    return done.stdout


def _value(argument: Argument | TensorParameter, arguments: Sequence[Argument | TensorParameter]) -> bytes:
    if isinstance(argument, TensorMapArgument):
        return _tensor_map(argument, arguments)
    if isinstance(argument, TensorParameter):
        return b""
    if isinstance(argument, ScalarArgument):
        return argument.value.tobytes()
    return np.ascontiguousarray(argument.data).tobytes()


def _tensor_map(argument: TensorMapArgument, arguments: Sequence[Argument | TensorParameter]) -> bytes:
    tensors = {a.name: (i, a) for i, a in enumerate(arguments) if isinstance(a, TensorArgument | TensorParameter)}
    index, tensor = tensors[argument.tensor]
    tensor_map.check(argument, tensor.bytes if isinstance(tensor, TensorParameter) else tensor.data.nbytes)
    return tensor_map.describe(argument, 0, index)


def _argument_header(argument: Argument | TensorParameter, value: bytes) -> bytes:
    size = len(value)
    if isinstance(argument, TensorArgument):
        kind = b"o" if argument.output else b"t"
    elif isinstance(argument, TensorParameter):
        kind, size = b"O" if argument.output else b"T", argument.bytes
    elif isinstance(argument, ConstantArgument):
        kind = b"c"
    elif isinstance(argument, TensorMapArgument):
        kind = b"m"
    else:
        kind = b"f" if argument.value.dtype.kind == "f" else b"i"
    return _ARGUMENT.pack(size, kind, argument.name.encode()[:54])


def _fail(done: subprocess.CompletedProcess[bytes], entry: str) -> None:
    reason = done.stderr.decode(errors="replace").strip()
    if done.returncode == _HUNG:
        raise KernelHung(reason)
    if done.returncode == _CRASHED and reason:
        raise KernelCrashed(reason)
    require_own_end(f"the emulator's process, kernel {entry},", done.returncode)  # of a kernel's fault it reports
    ended = f"the emulator's process ended by exit code {done.returncode} without a report, kernel {entry} {reason}"
    raise KernelCrashed(ended.rstrip())


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


def _block_traces(output: bytes, arguments: Sequence[Argument | TensorParameter]) -> list[BlockTrace]:
    found, position = [], 0
    while position < len(output):
        block, given_up, pages = _BLOCK.unpack_from(output, position)
        position += _BLOCK.size
        touched: dict[str, list[tuple[int, np.ndarray]]] = {
            a.name: [] for a in arguments if isinstance(a, TensorParameter)
        }
        for _ in range(pages):
            offset, argument, size = _PAGE.unpack_from(output, position)
            position += _PAGE.size
            touched[arguments[argument].name].append((offset, np.frombuffer(output, np.uint8, size, position)))
            position += size
        found.append(BlockTrace(block, bool(given_up), touched))
    return found
