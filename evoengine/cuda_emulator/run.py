"""Runs an executable made by `build`, one process for all rounds of launches over the same memory."""

from __future__ import annotations

import os
import re
import resource
import shutil
import signal
import struct
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path

import numpy as np

from evoengine.cuda_emulator.build import JAILED
from evoengine.devices import tensor_map
from evoengine.devices.base import (
    DTYPE_BYTES,
    VISIT,
    Argument,
    Arguments,
    ConstantArgument,
    ConstantParameter,
    Executed,
    KernelCall,
    KernelCrashed,
    KernelHung,
    PassedParameter,
    PointerArgument,
    Round,
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
from evoengine.devices.pool import BlockLaunch, BlockTrace, read_traces
from evoengine.errors import MachineError
from evoengine.records import Launch
from evoengine.sandbox import jail
from evoengine.sandbox.machine import oom_kills, require_own_end

# The layouts of Header, TensorHeader, CallHeader and ArgumentHeader in runtime/main.cpp.
_HEADER = struct.Struct("=Qq4IQ")
_TENSOR = struct.Struct("=QIIc55s")
_CALL = struct.Struct("=9I128s")
_ARGUMENT = struct.Struct("=QIc51s")
_RELOCATION = struct.Struct("=IIII")
_CRASHED, _HUNG = 10, 11
_POISON, _OTHER_POISON = 0xFF, 0xFE
"""bytes that outputs hold before anything is written: NaN, and what shows by its difference what was not written"""
_CLOCK_OVER_CPU = 30
"""how many times its CPU time a launch may take by the clock, as on a machine that many processes share"""
_IN_CODE = re.compile(r"line \{([0-9a-f]+)\}")

_InMemory = TensorArgument | ScratchArgument | TensorParameter | ScratchParameter


@dataclass(frozen=True, slots=True)
class _Tensor:
    """One allocation of a process."""

    name: str
    bytes: int
    number: int
    """of the argument among those of its kernel"""
    element: int
    """bytes"""
    kind: str
    """one of those of TensorHeader"""


def run_rounds(executable: Path, rounds: Sequence[Round], seed: int, timeout: float) -> Executed:
    """Run the rounds over the same memory, as `RunRounds` says; `timeout` is in seconds of CPU time, for all of them.

    `seed` draws the order and the interleaving of blocks and threads, and the placement of tensors. Raises
    KernelCrashed and KernelHung with the reason, naming kernel, block, thread and launch; KernelUnbuildable for a
    tensor map that cannot be; MachineError and OSError where the process cannot be started or the machine has no memory
    left.
    """
    executed = _run_all(executable, rounds, seed, timeout, _POISON)
    suspects = _elements_equal_to(executed.tensors[0], rounds[0], _POISON)
    if not suspects:
        return executed
    again = _run_all(executable, rounds[:1], seed, timeout, _OTHER_POISON)
    unwritten = _elements_equal_to(again.tensors[0], rounds[0], _OTHER_POISON)
    counts = {name: int((held & unwritten[name]).sum()) for name, held in suspects.items() if name in unwritten}
    return replace(executed, unwritten={name: count for name, count in counts.items() if count})


def run(
    executable: Path, entry: str, launch: Launch, arguments: Arguments, seed: int, timeout: float
) -> dict[str, np.ndarray]:
    """Launch a kernel once; return every tensor argument by name.

    Outputs hold their previous contents before the launch. Raises as `run_rounds` does.
    """
    rounds = [[KernelCall(entry, launch, arguments)]]
    return dict(_run_all(executable, rounds, seed, timeout, None).tensors[0])


def run_blocks(executable: Path, entry: str, asked: BlockLaunch, seed: int, timeout: float) -> list[BlockTrace]:
    """Run blocks, each by itself or as `together` says, and return what they touch. Raises as `run_rounds` does.

    A process ends where it gives a block up; another one goes on behind it.
    """
    traces: list[BlockTrace] = []
    while len(traces) * asked.together < len(asked.blocks):
        left = replace(asked, blocks=asked.blocks[len(traces) * asked.together :])
        found = _run_until_given_up(executable, entry, left, seed, timeout)
        if not found:
            raise KernelCrashed(f"the emulator's process ended without a report, kernel {entry}")
        traces += found
    return traces


def _run_until_given_up(
    executable: Path, entry: str, asked: BlockLaunch, seed: int, timeout: float
) -> list[BlockTrace]:
    tensors = {t.name: t for t in _in_memory(asked.arguments)}
    header = _header(executable, seed, 1, tensors.values(), len(asked.blocks), _POISON, asked.pool.pages.nbytes)
    chosen = np.array(
        [(b.number, b.input_limit, n % asked.together > 0) for n, b in enumerate(asked.blocks)], np.uint64
    )
    call = _call(entry, asked.launch, asked.arguments, tensors)
    given = [a for a in asked.arguments if isinstance(a, TensorArgument)]
    contents = _contents([KernelCall(entry, asked.launch, given)], tensors, first=True)
    message = b"".join([header, chosen.tobytes(), asked.pool.pages.tobytes(), struct.pack("=I", 1), *contents, call])
    return read_traces(_finish(executable, message, entry, asked.launch, timeout), asked)


# ── what goes to the process ────────────────────────────────────────────────────────────────────────────────────────


def _run_all(executable: Path, rounds: Sequence[Round], seed: int, timeout: float, fill: int | None) -> Executed:
    """Run the rounds. `fill` is the byte that outputs hold before the first round; None keeps their own contents."""
    tensors = _tensors(rounds, with_contents=fill is None)
    message = [_header(executable, seed, len(rounds), tensors.values(), 0, fill or 0, 0)]
    for number, calls in enumerate(rounds):
        message += [struct.pack("=I", len(calls)), *_contents(calls, tensors, number == 0)]
        message += [_call(call.entry, call.launch, call.arguments, tensors) for call in calls]
    first = rounds[0][0]
    output = _finish(executable, b"".join(message), first.entry, first.launch, timeout)
    return _executed(output, rounds, tensors)


def _tensors(rounds: Sequence[Round], with_contents: bool) -> dict[str, _Tensor]:
    """Return all allocations by name. An argument that any kernel writes is an output for all."""
    found: dict[str, _Tensor] = {}
    for calls in rounds:
        for call in calls:
            for tensor in _in_memory(call.arguments):
                known = found.setdefault(tensor.name, tensor)
                if known.bytes != tensor.bytes:
                    raise ValueError(f"{tensor.name} has {known.bytes} bytes in one launch, {tensor.bytes} in another")
                if tensor.kind != "i":
                    found[tensor.name] = tensor
    if with_contents:
        return {name: replace(t, kind="x") if t.kind == "o" else t for name, t in found.items()}
    return found


def _in_memory(arguments: Sequence[Argument | PassedParameter | ConstantParameter]) -> list[_Tensor]:
    return [
        _Tensor(a.name, _bytes(a), number, _element(a), _kind(a))
        for number, a in enumerate(arguments)
        if isinstance(a, _InMemory)
    ]


def _bytes(argument: _InMemory) -> int:
    return argument.data.nbytes if isinstance(argument, TensorArgument) else argument.bytes


def _element(argument: _InMemory) -> int:
    if isinstance(argument, TensorArgument):
        return argument.data.itemsize
    return 4 if isinstance(argument, ScratchArgument) else DTYPE_BYTES[argument.dtype]


def _kind(argument: _InMemory) -> str:
    if isinstance(argument, ScratchArgument):
        return "z" if argument.zeroed else "s"
    if isinstance(argument, ScratchParameter):
        return "Z" if argument.zeroed else "S"
    if isinstance(argument, TensorParameter):
        return "B" if argument.inout else "O" if argument.output else "I"
    if argument.inout:
        return "b"
    return "o" if argument.output else "i"


def _header(
    executable: Path, seed: int, rounds: int, tensors: Iterable[_Tensor], chosen: int, fill: int, pool_bytes: int
) -> bytes:
    parent = 1 if _is_jailed(executable) else os.getpid()  # in a jail it is the first process
    rows = [_TENSOR.pack(t.bytes, t.number, t.element, t.kind.encode(), t.name.encode()[:54]) for t in tensors]
    return b"".join([_HEADER.pack(seed % 2**64, parent, rounds, len(rows), chosen, fill, pool_bytes), *rows])


def _contents(calls: Round, tensors: Mapping[str, _Tensor], first: bool) -> list[bytes]:
    """Return the contents of each input, and in the first round those of outputs that have initial contents."""
    given = {a.name: a.data for call in reversed(calls) for a in call.arguments if isinstance(a, TensorArgument)}
    wanted = [t.name for t in tensors.values() if t.kind in "ib" or (t.kind == "x" and first)]
    missing = [name for name in wanted if name not in given]
    if missing:
        raise ValueError(f"a round gives no contents of {', '.join(missing)}, an input of another round")
    return [np.ascontiguousarray(given[name]).tobytes() for name in wanted]


def _call(
    entry: str, launch: Launch, arguments: Sequence[Argument | PassedParameter], tensors: Mapping[str, _Tensor]
) -> bytes:
    constants = sum(isinstance(a, ConstantArgument) for a in arguments)
    every, arguments = arguments, [a for a in arguments if is_passed(a) or isinstance(a, ConstantArgument)]
    geometry = (*launch.grid, *launch.block, launch.shared_bytes)
    if len(entry.encode()) > 127:
        raise KernelCrashed(f"the emulator takes names of kernels of up to 127 bytes, not {entry}")
    numbers = {name: number for number, name in enumerate(tensors)}
    values = [_value(a, every, numbers) for a in arguments]
    headers = [_argument_header(a, value, numbers) for a, value in zip(arguments, values, strict=True)]
    call = _CALL.pack(*geometry, len(arguments) - constants, constants, entry.encode())
    return b"".join([call, *headers, *values])


def _value(
    argument: Argument | PassedParameter, arguments: Sequence[Argument | PassedParameter], numbers: Mapping[str, int]
) -> bytes:
    if isinstance(argument, TensorMapArgument):
        return _tensor_map(argument, arguments, numbers)
    if isinstance(argument, ScalarArgument):
        return argument.value.tobytes()
    if isinstance(argument, ConstantArgument):
        return np.ascontiguousarray(argument.data).tobytes()
    if isinstance(argument, StructArgument):
        return _struct(argument, arguments, numbers)
    return b""


def _struct(
    argument: StructArgument, arguments: Sequence[Argument | PassedParameter], numbers: Mapping[str, int]
) -> bytes:
    """Return a struct's bytes, and behind them where in it which pointer or tensor map has its address to be put."""
    whole, relocations = bytearray(argument.bytes), []
    for at, part in argument.parts:
        if isinstance(part, PointerArgument):
            relocations.append(_RELOCATION.pack(at, numbers[part.memory], 0, part.offset))
            continue
        if isinstance(part, TensorMapArgument):
            relocations.append(_RELOCATION.pack(at, numbers[part.tensor], 1, 0))
        value = _value(part, arguments, numbers)
        whole[at : at + len(value)] = value
    return bytes(whole) + b"".join(relocations)


def _tensor_map(
    argument: TensorMapArgument, arguments: Sequence[Argument | PassedParameter], numbers: Mapping[str, int]
) -> bytes:
    viewed = next(a for a in arguments if isinstance(a, _InMemory) and a.name == argument.tensor)
    tensor_map.check(argument, _bytes(viewed))
    return tensor_map.describe(argument, 0, numbers[argument.tensor])


def _argument_header(argument: Argument | PassedParameter, value: bytes, numbers: Mapping[str, int]) -> bytes:
    size, tensor = len(value), 0
    if isinstance(argument, _InMemory):
        read_only = isinstance(argument, TensorArgument | TensorParameter) and not argument.output
        kind, size, tensor = b"t" if read_only else b"o", _bytes(argument), numbers[argument.name]
    elif isinstance(argument, StructArgument):
        kind, size, tensor = b"s", argument.bytes, (len(value) - argument.bytes) // _RELOCATION.size
    elif isinstance(argument, ConstantArgument):
        kind = b"c"
    elif isinstance(argument, TensorMapArgument):
        kind = b"m"
    else:
        kind = b"f" if argument.value.dtype.kind == "f" else b"i"
    return _ARGUMENT.pack(size, tensor, kind, argument.name.encode()[:50])


# ── what comes back ─────────────────────────────────────────────────────────────────────────────────────────────────


def _finish(executable: Path, message: bytes, entry: str, launch: Launch, timeout: float) -> bytes:
    """Run the process on a message and return its answer.

    The limit is one of CPU time, which does not depend on what else the machine does; by the clock it is
    _CLOCK_OVER_CPU times that.
    """
    killed_before = oom_kills()
    hung = KernelHung(f"no end after {timeout:g} s, kernel {entry}, grid {launch.grid}")
    seconds = max(1, ceil(timeout))
    with _started(executable, seconds) as process:
        try:
            output, errors = process.communicate(message, _CLOCK_OVER_CPU * timeout)
        except BaseException as error:
            process.kill()
            if isinstance(error, subprocess.TimeoutExpired):
                raise hung from None
            raise
    code = jail.end_of(process.returncode) if _is_jailed(executable) else process.returncode
    done = subprocess.CompletedProcess(process.args, code, output, errors)
    if done.returncode == -signal.SIGXCPU:
        raise hung
    if done.returncode == -signal.SIGKILL and oom_kills() > killed_before:
        raise MachineError("this machine has no memory left: the kernel ended the emulator's process")
    if done.returncode != 0:
        _fail(done, executable, entry)
    return done.stdout


@contextmanager
def _started(executable: Path, seconds: int) -> Iterator[subprocess.Popen[bytes]]:
    """Start the process with a limit of CPU time; a proposal's in a jail, where it can start no other one."""
    pipe = subprocess.PIPE
    if _is_jailed(executable):
        with jail.no_new_processes() as seccomp:
            command = _limited_in_jail(executable, seconds, seccomp)
            with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, pass_fds=[seccomp]) as process:
                yield process
        return
    with subprocess.Popen([str(executable)], stdin=pipe, stdout=pipe, stderr=pipe) as process:
        with suppress(ProcessLookupError):  # it has ended
            resource.prlimit(process.pid, resource.RLIMIT_CPU, (seconds, seconds + 1))
        yield process


def _is_jailed(executable: Path) -> bool:
    return executable.name.startswith(JAILED)


def _limited_in_jail(executable: Path, seconds: int, seccomp: int) -> list[str]:
    """Return the command that runs an executable in a jail; its shell sets the limit before the executable starts."""
    limited = f'ulimit -S -t {seconds}; ulimit -H -t {seconds + 1}; exec "$0"'
    return jail.jailed(["/bin/sh", "-c", limited, str(executable)], [executable], seccomp=seccomp)


def _fail(done: subprocess.CompletedProcess[bytes], executable: Path, entry: str) -> None:
    reason = _IN_CODE.sub(lambda m: _line_of(executable, m[1]), done.stderr.decode(errors="replace").strip())
    if done.returncode == _HUNG:
        raise KernelHung(reason)
    if done.returncode == _CRASHED and reason:
        raise KernelCrashed(reason)
    require_own_end(f"the emulator's process, kernel {entry},", done.returncode)  # of a kernel's fault it reports
    ended = f"the emulator's process ended by exit code {done.returncode} without a report, kernel {entry} {reason}"
    raise KernelCrashed(ended.rstrip())


def _line_of(executable: Path, address: str) -> str:
    """Return the kernel's source line for an address in the executable, from its debug information."""
    tool = shutil.which("addr2line")
    if not tool:
        return "a line that only addr2line could tell (install binutils)"
    command = [tool, "-i", "-e", str(executable), address]
    if _is_jailed(executable):
        command = jail.jailed(command, [executable])
    found = subprocess.run(command, capture_output=True, encoding="utf-8", check=False)
    lines = re.findall(r"(?:kernel\.cu|<stdin>|/-):(\d+)", found.stdout)  # as the compilers name standard input
    return f"line {lines[0]}" if lines else "a line that the debug information does not tell"


def _executed(output: bytes, rounds: Sequence[Round], tensors: Mapping[str, _Tensor]) -> Executed:
    position, after = 0, []
    for calls in rounds:
        arguments = {a.name: a for call in calls for a in call.arguments if isinstance(a, TensorArgument)}
        found: dict[str, np.ndarray] = {}
        for tensor in tensors.values():
            argument = arguments.get(tensor.name)
            if tensor.kind in "oxb":
                if argument:
                    found[tensor.name] = _array(output, argument, position)
                position += tensor.bytes
            elif argument:
                found[tensor.name] = argument.data.copy()
        after.append({name: found[name] for name in arguments})
    (count,) = struct.unpack_from("=Q", output, position)
    return Executed(after, visits=np.frombuffer(output, VISIT, count, position + 8))


def _array(output: bytes, argument: TensorArgument, position: int) -> np.ndarray:
    flat = np.frombuffer(output, argument.data.dtype, argument.data.size, position)
    return flat.reshape(argument.data.shape).copy()


def _elements_equal_to(tensors: Tensors, calls: Round, byte: int) -> dict[str, np.ndarray]:
    """Return, for each output, a mask [elements] of the elements that consist of that byte alone.

    Outputs without any are left out.
    """
    given = [a for call in calls for a in call.arguments if isinstance(a, TensorArgument)]
    outputs = {a.name for a in given if a.output and not a.inout}
    found = {}
    for name in sorted(outputs):
        data = tensors[name]
        bits = np.ascontiguousarray(data).reshape(-1).view(f"u{data.itemsize}")
        held = bits == np.frombuffer(bytes([byte]) * data.itemsize, bits.dtype)[0]
        if held.any():
            found[name] = held
    return found
