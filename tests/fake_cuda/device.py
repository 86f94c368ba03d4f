"""What runs on the stand-in driver: each launch goes to the CPU emulator, for the time that a test says it takes.

Environment, all optional:
    FAKE_CUDA_SOURCES   folder in which compiled sources are noted by the binary's hash, so that they can be emulated
    FAKE_CUDA_TIMES     JSON file: kernel, a binary's sha256 or "SDPA NAME" → microseconds; "inf" hangs
    FAKE_CUDA_NOISE     relative standard deviation of kernel times, 0.003 unless given
    FAKE_CUDA_DRIVER    the driver's version: 12040 is CUDA 12.4; 13000
    FAKE_CUDA_TORCH     CUDA of torch's build: 13.0; empty for a CPU-only build
    FAKE_CUDA_MIG       1: the device is a MIG instance
    FAKE_CUDA_TOTAL_BYTES, FAKE_CUDA_OTHERS_BYTES   memory, and how much of it other processes hold
    FAKE_CUDA_FAIL      function:code:count,… the first `count` calls fail with that CUresult
    FAKE_CUDA_BREAK     n:code the n-th kernel of a process leaves that error behind; -1: it never ends
    FAKE_CUDA_THROTTLE  from:to:factor kernels that begin in this span of simulated microseconds are so much slower,
                        and the sensors say why
    FAKE_CUDA_LAUNCH_US, FAKE_CUDA_TICK_US   what a launch takes on the host; the resolution of events
    FAKE_CUDA_PROCESSES number of other processes that NVML sees on the GPU

In one process `times` and `programs` do the same: `programs[entry] = function(launch)` takes the emulator's place.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import math
import os
import re
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np

from evoengine.cuda_emulator.build import build
from evoengine.cuda_emulator.run import run
from evoengine.cuda_emulator.translate import constant_names
from evoengine.devices import cuda_api
from evoengine.devices.base import (
    Argument,
    ConstantArgument,
    KernelCrashed,
    KernelHung,
    KernelUnbuildable,
    ScalarArgument,
    TensorArgument,
    TensorMapArgument,
)  # fmt: skip
from evoengine.records import Launch, Source

ILLEGAL_ADDRESS, MISALIGNED_ADDRESS, LAUNCH_FAILED, HANGS = 700, 716, 719, -1
EMULATOR_SECONDS = 10.0
"""a launch that a test makes takes one at most; past this it will not end"""
DEFAULT_US = 2000.0

times: dict[str, float | Callable[[], float]] = {}
"""kernel, binary or library call → microseconds, or what gives them"""
programs: dict[str, Callable[[LaunchOnDevice], int]] = {}
"""SHA-256 of a binary, or entry point → what it does instead of being emulated; returns a CUresult, 0, or HANGS"""
released: list[bool] = []
"""one for each time that torch was asked to give memory back"""
reports: list[str] = []
"""what the emulator said of kernels that failed"""


@dataclass(frozen=True)
class LaunchOnDevice:
    """A launch as the driver received it: the bytes of parameters and `__constant__` variables, and the binary."""

    entry: str
    image: bytes
    launch: Launch
    parameters: tuple[bytes, ...]
    constants: tuple[tuple[str, bytes], ...] = ()

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.image).hexdigest()

    def pointer(self, index: int) -> int:
        return int.from_bytes(self.parameters[index], "little")


class _Raw(ctypes.Structure):
    _fields_ = [
        ("entry", ctypes.c_char_p), ("image", ctypes.c_void_p), ("image_bytes", ctypes.c_size_t),
        ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared_bytes", ctypes.c_uint),
        ("count", ctypes.c_int), ("parameters", ctypes.POINTER(ctypes.c_void_p)),
        ("sizes", ctypes.POINTER(ctypes.c_uint16)), ("constants", ctypes.c_int),
        ("constant_names", ctypes.POINTER(ctypes.c_char_p)), ("constant_contents", ctypes.POINTER(ctypes.c_void_p)),
        ("constant_sizes", ctypes.POINTER(ctypes.c_size_t)),
    ]  # fmt: skip


_HOOK = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(_Raw), ctypes.POINTER(ctypes.c_double))


@cache
def install() -> None:
    """Has the driver of this process bring its launches here."""
    cuda_api.library().stand_in_hook(_hook)


@_HOOK
def _hook(raw, us) -> int:
    r = raw.contents
    parameters = tuple(ctypes.string_at(r.parameters[i], r.sizes[i]) for i in range(r.count))
    launch = Launch(tuple(r.grid), math.prod(r.block), r.shared_bytes, tuple(r.block[1:]))
    constants = tuple(
        (r.constant_names[i].decode(), ctypes.string_at(r.constant_contents[i], r.constant_sizes[i]))
        for i in range(r.constants)
    )
    given = LaunchOnDevice(r.entry.decode(), ctypes.string_at(r.image, r.image_bytes), launch, parameters, constants)
    us[0] = microseconds(given.entry, given.sha256)
    try:
        code = (programs.get(given.sha256) or programs.get(given.entry, _emulate))(given)
    except BaseException as error:  # ctypes would lose it
        print(f"the stand-in driver could not run {given.entry}: {type(error).__name__}: {error}", flush=True)
        return LAUNCH_FAILED
    return HANGS if us[0] == float("inf") else code


# ── time ────────────────────────────────────────────────────────────────────────────────────────────────────────────

_rng = np.random.default_rng(1)


@cache
def _times_file(path: str) -> dict[str, float]:
    return {name: float(us) for name, us in json.loads(Path(path).read_text()).items()}


def microseconds(*names: str) -> float:
    """The time of the first of these names that a test gave one, with noise."""
    given = {**(_times_file(path) if (path := os.environ.get("FAKE_CUDA_TIMES")) else {}), **times}
    own = next((given[name] for name in reversed(names) if name in given), DEFAULT_US)
    noise = float(os.environ.get("FAKE_CUDA_NOISE", "0.003"))
    return (own() if callable(own) else own) * (1 + noise * abs(float(_rng.normal())))


# ── emulation ───────────────────────────────────────────────────────────────────────────────────────────────────────


def note(cubin: bytes, source: Source) -> None:
    """Remembers what a binary was made of."""
    path = Path(os.environ["FAKE_CUDA_SOURCES"], f"{hashlib.sha256(cubin).hexdigest()}.json")
    written = path.with_suffix(f".{os.getpid()}")
    written.write_text(json.dumps({"text": source.text, "entry": source.entry}))
    written.replace(path)


@cache
def _source(sha256: str, entry: str) -> Source:
    noted = json.loads(Path(os.environ["FAKE_CUDA_SOURCES"], f"{sha256}.json").read_text())
    return Source(noted["text"], entry, Launch((1, 1, 1), 32, 0))


_Effect = tuple[int, dict[int, bytes]]
"""a CUresult or HANGS, and what is written by address"""
_effects: dict[bytes, _Effect] = {}
"""launches on the same bytes give the same bytes, so they are emulated once"""
POISON = 0xFFFF
"""what the emulator's outputs start as: what still stands afterwards was not written"""


def _emulate(given: LaunchOnDevice) -> int:
    try:
        arguments = _arguments(given, _source(given.sha256, given.entry))
    except LookupError as error:
        reports.append(str(error))
        return ILLEGAL_ADDRESS
    key = _key(given, arguments)
    if key not in _effects:
        _effects[key] = _run(given, arguments)
    code, written = _effects[key]
    for address, data in written.items():
        ctypes.memmove(address, data, len(data))
    return code


def _key(given: LaunchOnDevice, arguments: tuple[Argument, ...]) -> bytes:
    digest = hashlib.blake2b(
        repr((given.sha256, given.entry, given.launch, given.parameters, given.constants)).encode()
    )
    for argument in arguments:
        if isinstance(argument, TensorArgument) and not argument.output:
            digest.update(argument.data)
    return digest.digest()


def _run(given: LaunchOnDevice, arguments: Sequence[Argument], writable: bool = False) -> _Effect:
    """`writable`: whether inputs may be written too."""
    poisoned = [replace(a, data=np.full_like(a.data, POISON)) if _is_output(a) else a for a in arguments]
    if writable:
        poisoned = [replace(a, output=True) if isinstance(a, TensorArgument) else a for a in poisoned]
    try:
        executable = build(_source(given.sha256, given.entry), "sm_90a")
        after = run(executable, given.entry, given.launch, poisoned, len(_effects) + 1, EMULATOR_SECONDS)
    except KernelHung as failure:
        reports.append(str(failure))
        return HANGS, {}
    except KernelUnbuildable as failure:  # of what a GPU runs, the emulator knows all but a trap
        reports.append(str(failure))
        return LAUNCH_FAILED, {}
    except KernelCrashed as failure:
        reports.append(str(failure))
        if "write to read-only input" in str(failure):  # which a GPU lets pass
            return _run(given, arguments, writable=True)
        return _consequence(str(failure), arguments)
    written: dict[int, bytes] = {}
    for before, a in zip(poisoned, arguments, strict=True):
        if _is_output(before):
            written |= _pieces(a.data.ctypes.data, after[a.name], before.data)
    return 0, written


def _is_output(argument: Argument) -> bool:
    return isinstance(argument, TensorArgument) and argument.output


def _pieces(address: int, data: np.ndarray, before: np.ndarray) -> dict[int, bytes]:
    """The runs of elements that were written, by their address."""
    there = np.concatenate([[False], data != before, [False]])
    edges = np.flatnonzero(there[1:] != there[:-1])
    return {address + 2 * int(a): data[a:b].tobytes() for a, b in zip(edges[::2], edges[1::2], strict=True)}


def _consequence(report: str, arguments: Sequence[Argument]) -> _Effect:
    """What a GPU would do of it: a write beside a tensor but inside its allocation lands there unseen."""
    if "beyond the address space" in report:
        return ILLEGAL_ADDRESS, {}
    if "misaligned" in report:
        return MISALIGNED_ADDRESS, {}
    outside = re.search(r"out-of-bounds write of (\w+): (\d+) bytes (before its start|past its end)", report)
    if outside:
        name, distance, side = outside[1], int(outside[2]), outside[3]
        data = next(a.data for a in arguments if a.name == name)
        start = data.ctypes.data
        address = start - distance if side.startswith("before") else start + data.nbytes + distance
        if _allocation(address):
            return 0, {address: b"\0"}
    return (ILLEGAL_ADDRESS if "out-of-bounds" in report or "outside" in report else LAUNCH_FAILED), {}


def _allocation(address: int) -> tuple[int, int] | None:
    start, size = ctypes.c_uint64(), ctypes.c_size_t()
    if cuda_api.library().stand_in_allocation(ctypes.c_uint64(address), ctypes.byref(start), ctypes.byref(size)):
        return None
    return start.value, size.value


def tensor_bytes(address: int) -> int:
    """Of the tensor that begins there. One that begins some bytes into its allocation ends as many before its end, as
    guard bands have it. Raises LookupError where nothing is allocated."""
    found = _allocation(address)
    if found is None:
        raise LookupError(f"no allocation holds the address {address:#x}")
    start, size = found
    return size - 2 * (address - start)


def _tensor(address: int) -> np.ndarray:
    return np.frombuffer((ctypes.c_uint8 * tensor_bytes(address)).from_address(address), np.uint16)


def reset() -> None:
    """The driver as in a new process: nothing hangs or is sticky, and no call was made yet."""
    cuda_api._keeps_handles = False
    cuda_api.library().stand_in_reset()


def now() -> float:
    """Simulated microseconds."""
    function = cuda_api.library().stand_in_now
    function.restype = ctypes.c_double
    return function()


def live(kind: str) -> int:
    """How many of the driver's objects there are: module, stream, graph, executable graph, event, bytes, launches."""
    function = cuda_api.library().stand_in_live
    function.restype = ctypes.c_long
    return function(kind.encode())


def _declared(source: Source) -> list[str]:
    """The declarations of the kernel's parameters."""
    found = re.search(rf"\b{source.entry}\s*\(([^{{;]*)\)\s*\{{", source.text, re.DOTALL)
    return [" ".join(p.split()) for p in found[1].split(",")]


def _arguments(given: LaunchOnDevice, source: Source) -> tuple[Argument, ...]:
    """The launch's bytes as the emulator's arguments; raises LookupError for a pointer to no allocation."""
    names: dict[int, str] = {}
    arguments: list[Argument] = []
    for declared, value in zip(_declared(source), given.parameters, strict=True):
        name = re.findall(r"\w+", declared)[-1]
        if "*" in declared:
            address = int.from_bytes(value, "little")
            names[address] = name
            output = not declared.startswith("const") and " const " not in declared.partition("*")[0]
            arguments.append(TensorArgument(name, _tensor(address), output))
        elif len(value) == 128:
            arguments.append(_tensor_map(name, value, names))
        else:
            kind = np.float32 if "float" in declared else {4: np.int32, 8: np.int64}[len(value)]
            arguments.append(ScalarArgument(name, np.frombuffer(value, kind)[0]))
    own = constant_names(source.text)
    arguments += [ConstantArgument(n, np.frombuffer(data, np.uint8)) for n, data in given.constants if n in own]
    return tuple(arguments)


_MAP = struct.Struct("=Q4Q5I5H3B")
"""TensorMap of driver.cpp"""
_DTYPES = {6: "fp16", 9: "bf16", 7: "fp32"}
_SWIZZLES = (0, 32, 64, 128)


def _tensor_map(name: str, value: bytes, names: dict[int, str]) -> TensorMapArgument:
    address, *fields = _MAP.unpack_from(value)
    strides, dims, box, (dtype, rank, swizzle) = fields[:4], fields[4:9], fields[9:14], fields[14:]
    return TensorMapArgument(
        name, names[address], _DTYPES[dtype], tuple(dims[:rank]), tuple(strides[: rank - 1]), tuple(box[:rank]),
        _SWIZZLES[swizzle],
    )  # fmt: skip
