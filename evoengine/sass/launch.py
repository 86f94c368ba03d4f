"""Launches for the executor: constant banks as the driver fills them, memory at drawn addresses, sizes and limits."""

from __future__ import annotations

import ctypes
import math
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from ctypes import POINTER, Structure, c_char_p, c_uint16, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from typing import NamedTuple

import numpy as np

from evoengine import records
from evoengine.devices import tensor_map
from evoengine.devices.base import (
    ConstantArgument,
    KernelCrashed,
    PointerArgument,
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
from evoengine.errors import UsageError
from evoengine.sass.cubin import CONSTANT_BANK, PARAMETER_BANK, RESERVED_SHARED, Kernel, Segment

# The structs of core/api.h, field by field.


class SassBank(Structure):
    _fields_ = (("index", c_uint32), ("bytes", c_uint32), ("data", c_void_p))


class SassAllocation(Structure):
    _fields_ = (
        ("address", c_uint64), ("bytes", c_uint64), ("data", c_void_p), ("period", c_uint64),
        ("writable", c_uint32), ("sparse", c_uint16), ("argument", c_uint16), ("name", c_char_p), ("written", c_void_p),
    )  # fmt: skip # a table


class SassLaunch(Structure):
    _fields_ = (
        ("grid", c_uint32 * 3), ("threads", c_uint32 * 3), ("cluster", c_uint32 * 3),
        ("shared_bytes", c_uint32), ("reserved_shared", c_uint32), ("local_bytes", c_uint32), ("registers", c_uint32),
        ("arch", c_uint32), ("barriers", c_uint32), ("mbarriers", c_uint32), ("sms", c_uint32),
        ("bank_count", c_uint32), ("allocation_count", c_uint32),
        ("banks", POINTER(SassBank)), ("allocations", POINTER(SassAllocation)), ("seed", c_uint64),
    )  # fmt: skip # a table


DRAWN_BYTES = 1 << 20
"""period of a drawn tensor's contents"""
REGISTERS_PER_BLOCK = 65536
"""of every compute capability from 7.5 to 9.0 (CUDA C++ Programming Guide, Compute Capabilities)"""

# Where the driver puts what every kernel reads from bank 0, as the machine code of sm_75 to sm_90 has it: from byte 0
# the block's threads and the grid, from 0x18 the windows of shared and local memory, at 0x28 the end of the stack and
# the bytes of dynamic shared memory, at 0x30 the launch's number and at 0x10c that of SMs; on sm_90 at 0x140 whether
# the launch has clusters, their blocks along x, y and z, the reciprocals of these, and the grid in clusters, at 0x188
# the blocks of a cluster, and at 0x198 the generic address of the parameters, from which those of tensor maps are made.
_DRIVER_VALUES = struct.Struct("<3I3IQQII")
_GRID_NUMBER, _SM_COUNT = 0x30, 0x10C
_CLUSTER_AT, _CLUSTER = 0x140, struct.Struct("<I3I3f3I")
_CLUSTER_BLOCKS = 0x188
_PARAMETERS_POINTER = 0x198
# The same on sm_120: at 0x140 the launch's number, from 0x2a0 a cluster's blocks along x, y and z, the bytes of dynamic
# shared memory, reciprocals, a word that is not known, the grid in clusters and a cluster's blocks; at 0x2d0 the number
# of SMs, at 0x2f8 the window of local memory, at 0x348 the address of the parameters, from 0x360 the block's threads, a
# word, and the grid, and at 0x37c the end of the stack.
_GRID_NUMBER_120, _SM_COUNT_120 = 0x140, 0x2D0
_CLUSTER_120_AT, _CLUSTER_120 = 0x2A0, struct.Struct("<3II3f4x3II")
_LOCAL_WINDOW_120, _PARAMETERS_POINTER_120 = 0x2F8, 0x348
_DRIVER_VALUES_120_AT, _DRIVER_VALUES_120 = 0x360, struct.Struct("<3I4x3II")
# The windows of the generic address space, as in core/machine.h.
SHARED_WINDOW, LOCAL_WINDOW, CONSTANT_WINDOW = 0xFF0000000000, 0xFE0000000000, 0xFD0000000000
PROVIDED = {"vprintf": 0xFC0000000000, "__assertfail": 0xFC0000000010}
"""functions of the driver → addresses, as in core/machine.h"""
NO_FUNCTION = 0xFC0000010000
"""where others are said to be, so that a call of one is an error"""

SM_COUNT = 132
"""number of SMs that a kernel reads, an H100's on every chip; a right kernel does not depend on it"""
_ALIGNMENT = 256
_ANY = 2**32 - 1
_LOWEST, _LARGEST_GAP = 1 << 33, 1 << 32
_SPARSE_GAP = 1 << 35
"""between tensors that may exceed 32-bit offsets, so that an overflowed offset does not hit another one"""


BYTES = ("uint8", "int8", "fp8_e4m3", "fp8_e5m2")
"""dtypes of one byte, all drawn as integers: as FP8 those are numbers from 0 to 2"""


@dataclass(frozen=True, slots=True)
class DrawnArgument:
    """A pointer argument of `bytes` bytes with repeating contents, for a model, which needs no results.

    The contents are `contents`, or drawn by `dtype`. Writes beyond the part that is held are dropped.
    """

    name: str
    bytes: int
    dtype: str
    """fp16, bf16, fp32, int32 or one of BYTES: floats are normal with deviation 1, integers uniform below 64"""
    output: bool = False
    contents: np.ndarray | None = None
    address: int | None = None
    """as of HostMemory"""
    passed: bool = True
    """as of TensorParameter"""


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Memory of the caller, `data` [bytes] uint8, that a launch reads and writes in place."""

    name: str
    data: np.ndarray
    address: int | None = None
    """where the launch finds it, as tables of pointers say that name it; None: at a drawn address"""

    @property
    def bytes(self) -> int:
        return self.data.nbytes


Sparse = TensorParameter | ScratchParameter
"""memory of which only the pages exist that a block touches"""
Part = (
    TensorArgument
    | ScratchArgument
    | ScalarArgument
    | TensorMapArgument
    | DrawnArgument
    | HostMemory
    | PointerArgument
    | Sparse
)
AnyArgument = Part | StructArgument
InMemory = TensorArgument | DrawnArgument | HostMemory | ScratchArgument | Sparse


@dataclass(frozen=True, slots=True)
class Geometry:
    """A launch's sizes with three-dimensional blocks; shared memory is dynamic, bytes per block."""

    grid: tuple[int, int, int]
    threads: tuple[int, int, int]
    shared_bytes: int = 0
    cluster: tuple[int, int, int] | None = None
    """None: the binary's own"""


class SparseKind(IntEnum):
    """Contents of a page of sparse memory at its first access, as in core/sparse.h; NONE for memory held whole."""

    NONE, INPUT, OUTPUT, SCRATCH, ZEROED, INOUT = range(6)


@dataclass(frozen=True, slots=True)
class Allocation:
    """A tensor, scratch memory or section of device variables in the executor's memory.

    `held` [bytes] uint8 are its first bytes.
    """

    name: str
    address: int
    bytes: int
    held: np.ndarray
    writable: bool
    written: np.ndarray | None = None
    """[words of four bytes] uint8: a bit for each byte that a launch has stored to; None where not needed"""
    sparse: SparseKind = SparseKind.NONE
    argument: int = 0
    """where it is sparse, its number among the launch's arguments"""


class Launch:
    """A launch of one kernel: the struct that core.py passes on, with all that it points to. Sizes are in bytes."""

    def __init__(
        self, kernel: Kernel, geometry: Geometry, arguments: Sequence[AnyArgument], allocations: Sequence[Allocation],
        banks: Mapping[int, bytearray], seed: int,
    ) -> None:  # fmt: skip
        self.grid, self.threads, self.cluster = geometry.grid, geometry.threads, geometry.cluster or kernel.cluster
        self.registers = kernel.registers
        self.shared_bytes = kernel.shared_bytes + geometry.shared_bytes
        self.local_bytes = _stack(kernel)
        self.reserved_shared = RESERVED_SHARED if kernel.arch >= 90 else 0
        self.arguments, self.allocations = arguments, allocations
        self._bank_data = {bank: np.frombuffer(data, np.uint8) for bank, data in banks.items() if data}
        self._banks = (SassBank * len(self._bank_data))(
            *(SassBank(bank, data.nbytes, data.ctypes.data) for bank, data in self._bank_data.items())
        )
        self._allocations = (SassAllocation * len(allocations))(*map(_structure, allocations))
        self.structure = SassLaunch(
            grid=self.grid, threads=self.threads, cluster=self.cluster, shared_bytes=self.shared_bytes,
            reserved_shared=self.reserved_shared, local_bytes=self.local_bytes, registers=self.registers,
            arch=kernel.arch, barriers=kernel.barriers,
            mbarriers=_ANY if kernel.mbarriers is None else kernel.mbarriers, sms=SM_COUNT,
            bank_count=len(self._banks),
            allocation_count=len(allocations), banks=self._banks,
            allocations=self._allocations, seed=seed % 2**64,
        )  # fmt: skip

    def reference(self) -> object:
        """Return what a C function takes as `const SassLaunch*`."""
        return ctypes.byref(self.structure)

    @property
    def allocation_bytes(self) -> list[int]:
        """Return the sizes of allocations in bytes, in order of address."""
        return [allocation.bytes for allocation in self.allocations]

    @property
    def unequal_indices(self) -> bool:
        """Return whether a given input holds lengths or offsets, by which blocks may have unequal work."""
        return any(_is_unequal(part) for part in _parts(self.arguments))

    @property
    def allocation_count(self) -> int:
        return len(self.allocations)

    def results(self) -> Tensors:
        """Return every TensorArgument by name in its current state, in its dtype and shape."""
        held = {allocation.name: allocation.held for allocation in self.allocations}
        tensors = [a for a in _parts(self.arguments) if isinstance(a, TensorArgument)]
        return {a.name: held[a.name].view(a.data.dtype).reshape(a.data.shape) for a in tensors}


def prepare(
    kernel: Kernel, launch: records.Launch | Geometry, arguments: Sequence[AnyArgument | ConstantArgument], seed: int,
    constants: Mapping[str, bytes] | None = None, memory: Memory | None = None, mapped: Sequence[Part] = (),
) -> Launch:  # fmt: skip
    """Return everything that the kernel needs to run.

    `arguments` are in the order of its parameters, then those that are not passed, and `__constant__` variables by
    name; `mapped` is more memory to which only tensor maps and PointerArguments point. `seed` draws the launch's
    schedule and, without `memory`, the addresses of tensors. Raises UsageError where arguments do not fit the binary's
    parameters, KernelCrashed where a GPU would refuse the launch, KernelUnbuildable for an impossible tensor map.
    """
    require_arch(kernel)
    geometry = launch if isinstance(launch, Geometry) else Geometry(launch.grid, launch.block, launch.shared_bytes)
    _check_launch(kernel, geometry)
    given = {a.name: a.data.tobytes() for a in arguments if isinstance(a, ConstantArgument)}
    stated = [a for a in arguments if not isinstance(a, ConstantArgument)]
    passed, in_memory = [a for a in stated if is_passed(a)], [*stated, *mapped]
    allocations = (memory or Memory([(kernel, in_memory)], seed)).allocations(kernel, in_memory)
    banks = _banks(kernel, geometry, passed, allocations, {**(constants or {}), **given}, seed % 2**20)
    return Launch(kernel, geometry, in_memory, allocations, banks, seed)


def require_arch(kernel: Kernel) -> None:
    """Raise UsageError unless the executor knows how the binary's architecture is launched."""
    require_arch_of(kernel.arch)


def is_executable(arch: int) -> bool:
    """Return whether the executor knows how machine code of the compute capability `arch`, 90 for 9.0, is launched."""
    return 75 <= arch <= 90 or 120 <= arch <= 121


def require_arch_of(arch: int) -> None:
    """Raise UsageError unless machine code of the compute capability `arch`, 90 for 9.0, can be executed."""
    if not is_executable(arch):
        lacks = ": its tensor memory and tcgen05 are missing" if 100 <= arch < 120 else ""
        raise UsageError(f"machine code of sm_{arch} cannot be executed{lacks}; that of sm_75 to sm_90 and sm_120 can")


def _check_launch(kernel: Kernel, geometry: Geometry) -> None:
    """Raise KernelCrashed where a driver would refuse the launch because of the binary.

    Limits of the GPU are checked by the screens, which know it.
    """
    threads = geometry.threads[0] * geometry.threads[1] * geometry.threads[2]
    if kernel.max_threads and threads > kernel.max_threads:
        raise KernelCrashed(f"{threads} threads per block; the binary was made for {kernel.max_threads} at most")
    if kernel.registers * threads > REGISTERS_PER_BLOCK:
        raise KernelCrashed(
            f"a launch of {threads} threads of {kernel.registers} registers; a block has {REGISTERS_PER_BLOCK} at most"
        )
    cluster = geometry.cluster or kernel.cluster
    if any(blocks % together for blocks, together in zip(geometry.grid, cluster, strict=True)):
        raise KernelCrashed(f"grid {geometry.grid} is no multiple of the cluster {cluster}")


def _is_unequal(part: Part) -> bool:
    """Return whether an input's integers are neither alike, nor evenly spaced, nor each as frequent as the others.

    Lengths and offsets of equal parts are, as are tables of pages, and the numbers of tiles in them.
    """
    if isinstance(part, DrawnArgument) and part.contents is not None and part.dtype in ("int32", "int64"):
        values = part.contents.reshape(-1).view(part.dtype)
    elif isinstance(part, TensorArgument) and not part.output and part.data.dtype in (np.int32, np.int64):
        values = part.data.reshape(-1)
    else:
        return False
    if not values.size:
        return False
    found, times = np.unique(values, return_counts=True)
    ascending = bool((np.diff(values) >= 0).all())
    return bool(np.ptp(times) > 0 or (ascending and len(found) > 2 and np.ptp(np.diff(found)) > 0))


def _stack(kernel: Kernel) -> int:
    return -(-kernel.local_bytes // 16) * 16


# ── memory ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _parts(arguments: Sequence[AnyArgument | ConstantArgument]) -> Iterator[Part]:
    for argument in arguments:
        if isinstance(argument, StructArgument):
            yield from (part for _, part in argument.parts)
        elif not isinstance(argument, ConstantArgument):
            yield argument


class Memory:
    """Tensors, scratch memory and device variables of some launches, each at one address for all of them.

    Outputs begin as 0xFF (NaN), scratch memory too or as zeros; both keep what launches leave in them, as device
    variables do.
    """

    def __init__(
        self,
        launches: Iterable[tuple[Kernel, Sequence[AnyArgument | ConstantArgument]]],
        seed: int,
        numbers: Mapping[str, int] | None = None,
    ) -> None:
        """Place what these launches need in drawn order with drawn gaps, so that none follows upon another.

        `numbers` are those of sparse memory; by default its places among a launch's arguments.
        """
        self._numbers = numbers
        sizes: dict[str, int] = {}
        fixed: dict[str, int] = {}
        sparse = False
        self._held: dict[str, np.ndarray] = {}
        for kernel, arguments in launches:
            for item in _items(kernel, arguments):
                if sizes.setdefault(item.name, item.size) != item.size:
                    raise UsageError(f"{item.name} has {sizes[item.name]} bytes in one launch, {item.size} in another")
                sparse |= isinstance(item.of, Sparse)
                if isinstance(item.of, HostMemory | DrawnArgument | Segment) and item.of.address is not None:
                    fixed[item.name] = item.of.address
                if item.writable and item.name not in self._held:
                    self._held[item.name] = _first_contents(item.of)
        drawn = {name: size for name, size in sizes.items() if name not in fixed}
        self._addresses = {**_place(drawn, seed, _SPARSE_GAP if sparse else _LARGEST_GAP), **fixed}
        self._written: dict[str, np.ndarray] = {}

    def watch(self, names: Iterable[str]) -> Mapping[str, np.ndarray]:
        """Return what `Allocation.written` says of these outputs, from now on and until the next call."""
        self._written = {name: np.zeros(-(-self._held[name].nbytes // 4), np.uint8) for name in names}
        return self._written

    def refill(self, arguments: Iterable[object]) -> None:
        """Give in-out tensors the contents of these arguments."""
        for argument in arguments:
            if isinstance(argument, TensorArgument) and argument.inout:
                self._held[argument.name][:] = _input_contents(argument)

    def allocations(self, kernel: Kernel, arguments: Sequence[AnyArgument | ConstantArgument]) -> list[Allocation]:
        """Return what a launch with these arguments may touch, by address."""
        found = []
        numbers = self._numbers or {a.name: number for number, a in enumerate(arguments)}
        for name, size, writable, of in _items(kernel, arguments):
            held = self._held[name] if name in self._held else _input_contents(of)
            sparse = (_sparse_kind(of), numbers[name]) if isinstance(of, Sparse) else (SparseKind.NONE, 0)
            address, written = self._addresses[name], self._written.get(name)
            found.append(Allocation(name, address, size, held, writable, written, *sparse))
        return sorted(found, key=lambda allocation: allocation.address)


def _place(sizes: Mapping[str, int], seed: int, largest_gap: int) -> dict[str, int]:
    """Return addresses at multiples of 256 bytes."""
    random = np.random.default_rng(seed)
    names = [list(sizes)[i] for i in random.permutation(len(sizes))]
    addresses, end = {}, _LOWEST
    for name in names:
        gap = int(random.integers(largest_gap // _ALIGNMENT // 2, largest_gap // _ALIGNMENT)) * _ALIGNMENT
        addresses[name] = -(-end // _ALIGNMENT) * _ALIGNMENT + gap
        end = addresses[name] + sizes[name]
    if end >= CONSTANT_WINDOW:
        raise UsageError(f"the arguments take {end - _LOWEST} bytes of addresses, more than the executor has")
    return addresses


def _bytes_of(argument: InMemory) -> int:
    return argument.data.nbytes if isinstance(argument, TensorArgument) else argument.bytes


class _Item(NamedTuple):
    """An item that needs memory in a launch; `size` in bytes."""

    name: str
    size: int
    writable: bool
    of: InMemory | Segment


def _items(kernel: Kernel, arguments: Sequence[AnyArgument | ConstantArgument]) -> Iterator[_Item]:
    for argument in _parts(arguments):
        if isinstance(argument, InMemory):
            writable = isinstance(argument, ScratchArgument | ScratchParameter | HostMemory) or argument.output
            yield _Item(argument.name, _bytes_of(argument), writable, argument)
    for segment in kernel.globals:
        yield _Item(segment.name, segment.size, True, segment)


def _first_contents(of: InMemory | Segment) -> np.ndarray:
    """Return what memory that a kernel may write holds at first, [bytes held] uint8."""
    if isinstance(of, Sparse):
        return np.empty(0, np.uint8)
    if isinstance(of, Segment):
        return np.frombuffer(of.data.ljust(of.size, b"\0"), np.uint8).copy()
    if isinstance(of, ScratchArgument):
        return np.full(of.bytes, 0 if of.zeroed else 0xFF, np.uint8)
    if isinstance(of, TensorArgument):
        return _input_contents(of).copy() if of.inout else np.full(of.data.nbytes, 0xFF, np.uint8)
    if isinstance(of, HostMemory):
        return of.data
    held = _input_contents(of)
    return held.copy() if held.nbytes == of.bytes else held


def _input_contents(of: InMemory | Segment) -> np.ndarray:
    """Return the contents of an input, [bytes held] uint8."""
    if isinstance(of, Sparse):
        return np.empty(0, np.uint8)
    if isinstance(of, TensorArgument):
        return np.ascontiguousarray(of.data).reshape(-1).view(np.uint8)
    if not isinstance(of, DrawnArgument):
        raise TypeError(f"{of.name} is no input")
    values = _drawn(of.dtype) if of.contents is None else of.contents.view(np.uint8)
    return values[: of.bytes]


def _sparse_kind(of: Sparse) -> SparseKind:
    if isinstance(of, ScratchParameter):
        return SparseKind.ZEROED if of.zeroed else SparseKind.SCRATCH
    if of.inout:
        return SparseKind.INOUT
    return SparseKind.OUTPUT if of.output else SparseKind.INPUT


def drawn_bytes(dtype: str, size: int) -> np.ndarray:
    """Return `size` bytes of drawn values, uint8."""
    return np.resize(_drawn(dtype), size)


@cache
def _drawn(dtype: str) -> np.ndarray:
    """Draw DRAWN_BYTES of values, the same in every process; uint8 view."""
    random = np.random.default_rng(0)
    if dtype in BYTES:
        return random.integers(0, 64, DRAWN_BYTES, dtype=np.uint8)
    if dtype == "int32":
        return random.integers(0, 64, DRAWN_BYTES // 4, dtype=np.int32).view(np.uint8)
    if dtype == "fp16":
        return random.standard_normal(DRAWN_BYTES // 2, np.float32).astype(np.float16).view(np.uint8)
    if dtype == "bf16":
        bits = random.standard_normal(DRAWN_BYTES // 2, np.float32).view(np.uint32)
        return (bits >> 16).astype(np.uint16).view(np.uint8)
    if dtype == "fp32":
        return random.standard_normal(DRAWN_BYTES // 4, np.float32).view(np.uint8)
    raise UsageError(f"values of dtype {dtype!r} cannot be drawn; fp16, bf16, fp32, int32 and {', '.join(BYTES)} can")


def _structure(allocation: Allocation) -> SassAllocation:
    held = allocation.held
    return SassAllocation(
        address=allocation.address, bytes=allocation.bytes, data=held.ctypes.data, period=held.nbytes,
        writable=allocation.writable, name=allocation.name.encode(),
        written=None if allocation.written is None else allocation.written.ctypes.data,
        sparse=allocation.sparse, argument=allocation.argument,
    )  # fmt: skip


# ── constant banks ──────────────────────────────────────────────────────────────────────────────────────────────────


def _banks(
    kernel: Kernel, geometry: Geometry, arguments: Sequence[AnyArgument], allocations: Sequence[Allocation],
    constants: Mapping[str, bytes], number: int,
) -> dict[int, bytearray]:  # fmt: skip
    placed = {allocation.name: allocation for allocation in allocations}
    banks = {bank: bytearray(data) for bank, data in kernel.banks.items()}
    for pointer in kernel.pointers:
        struct.pack_into("<Q", banks[pointer.bank], pointer.offset, placed[pointer.segment].address + pointer.place)
    for function in kernel.functions:
        struct.pack_into("<Q", banks[function.bank], function.offset, PROVIDED.get(function.name, NO_FUNCTION))
    for name, value in constants.items():
        _put_constant(kernel, banks.get(CONSTANT_BANK, bytearray()), name, value)
    bank = banks[PARAMETER_BANK]
    bank.extend(bytes(max(kernel.parameters_at - len(bank), 0)))
    put = _put_driver_values_120 if kernel.arch >= 120 else _put_driver_values
    put(bank, kernel, geometry, number)
    _put_parameters(kernel, bank, arguments, placed)
    return banks


def _put_constant(kernel: Kernel, bank: bytearray, name: str, value: bytes) -> None:
    if name not in kernel.constants:
        known = ", ".join(kernel.constants) or "none"
        raise UsageError(f"kernel {kernel.entry} has no __constant__ variable {name}; it has {known}")
    offset, size = kernel.constants[name]
    if len(value) > size:
        raise UsageError(f"__constant__ {name} has {size} bytes; {len(value)} are too many")
    bank[offset : offset + len(value)] = value


def _put_parameters(
    kernel: Kernel, bank: bytearray, arguments: Sequence[AnyArgument], placed: Mapping[str, Allocation]
) -> None:
    if len(arguments) != len(kernel.parameters):
        raise UsageError(f"kernel {kernel.entry} has {len(kernel.parameters)} parameters; {len(arguments)} were given")
    for argument, (offset, size) in zip(arguments, kernel.parameters, strict=True):
        value = _value(argument, placed)
        if len(value) != size:
            raise UsageError(
                f"parameter {argument.name} of kernel {kernel.entry} has {size} bytes; {len(value)} were given"
            )
        bank[offset : offset + size] = value


def _value(argument: AnyArgument, placed: Mapping[str, Allocation]) -> bytes:
    """Return a parameter's bytes."""
    if isinstance(argument, InMemory):
        return struct.pack("<Q", placed[argument.name].address)
    if isinstance(argument, PointerArgument):
        return struct.pack("<Q", placed[argument.memory].address + argument.offset)
    if isinstance(argument, ScalarArgument):
        return argument.value.tobytes()
    if isinstance(argument, TensorMapArgument):
        tensor_map.check(argument, placed[argument.tensor].bytes)
        return tensor_map.pack(argument, placed[argument.tensor].address)
    whole = bytearray(argument.bytes)
    for offset, part in argument.parts:
        value = _value(part, placed)
        if offset + len(value) > len(whole):
            end = offset + len(value)
            raise UsageError(f"{part.name} ends at byte {end} of {argument.name}, which has {len(whole)}")
        whole[offset : offset + len(value)] = value
    return bytes(whole)


def _put_driver_values(bank: bytearray, kernel: Kernel, geometry: Geometry, number: int) -> None:
    windows = SHARED_WINDOW, LOCAL_WINDOW
    values = *geometry.threads, *geometry.grid, *windows, _stack(kernel), geometry.shared_bytes
    _DRIVER_VALUES.pack_into(bank, 0, *values)
    struct.pack_into("<Q", bank, _GRID_NUMBER, number)
    struct.pack_into("<I", bank, _SM_COUNT, SM_COUNT)
    if kernel.arch >= 90:
        cluster = geometry.cluster or kernel.cluster
        clusters = (blocks // together for blocks, together in zip(geometry.grid, cluster, strict=True))
        reciprocals = (1 / blocks for blocks in cluster)
        _CLUSTER.pack_into(bank, _CLUSTER_AT, math.prod(cluster) > 1, *cluster, *reciprocals, *clusters)
        struct.pack_into("<I", bank, _CLUSTER_BLOCKS, math.prod(cluster))
        struct.pack_into("<Q", bank, _PARAMETERS_POINTER, CONSTANT_WINDOW + kernel.parameters_at)


def _put_driver_values_120(bank: bytearray, kernel: Kernel, geometry: Geometry, number: int) -> None:
    cluster = geometry.cluster or kernel.cluster
    clusters = [blocks // together for blocks, together in zip(geometry.grid, cluster, strict=True)]
    sizes = *cluster, geometry.shared_bytes, *(1 / blocks for blocks in cluster), *clusters, math.prod(cluster)
    _CLUSTER_120.pack_into(bank, _CLUSTER_120_AT, *sizes)
    struct.pack_into("<Q", bank, _GRID_NUMBER_120, number)
    struct.pack_into("<I", bank, _SM_COUNT_120, SM_COUNT)
    struct.pack_into("<Q", bank, _LOCAL_WINDOW_120, LOCAL_WINDOW)
    struct.pack_into("<Q", bank, _PARAMETERS_POINTER_120, CONSTANT_WINDOW + kernel.parameters_at)
    _DRIVER_VALUES_120.pack_into(bank, _DRIVER_VALUES_120_AT, *geometry.threads, *geometry.grid, _stack(kernel))
