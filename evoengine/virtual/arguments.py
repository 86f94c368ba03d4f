"""The arguments of a launch: tensors on the CPU as views of storages, with their offsets.

A kernel may take addresses as integers, as in the tutorial of grouped products. Tensors whose address was requested are
remembered; a launch that receives such an address, in a tensor of 64-bit integers or as a number, has that tensor in
its memory at the address that it has on the CPU.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from evoengine.devices.base import ConstantArgument, PointerArgument, ScalarArgument, StructArgument, TensorMapArgument
from evoengine.sass.launch import AnyArgument, DrawnArgument, HostMemory, Part

WHOLE_BYTES = 1 << 20
"""bytes of a storage up to which the model works on a copy, so that counters count; writes to a longer one are dropped
unless it is scratch memory"""
_HELD_MULTIPLE = 256

_FORMATS = {
    "i1": "<b", "i8": "<b", "i16": "<h", "i32": "<i", "i64": "<q", "u1": "<B", "u8": "<B", "u16": "<H", "u32": "<I",
    "u64": "<Q",
}  # fmt: skip # a table
"""Triton's integer type → its format in `struct`"""
_FLOATS = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
    "f32": torch.float32,
    "fp64": torch.float64,
}
_ADDRESSES, _WHOLE = ("i64", "u64"), 2**64 - 1
"""integer types that may be addresses"""
MAPPED = {
    torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64", torch.bool: "uint8",
    torch.int8: "uint8", torch.uint8: "uint8", torch.int16: "uint16", torch.uint16: "uint16", torch.int32: "int32",
    torch.uint32: "uint32", torch.int64: "int64", torch.uint64: "uint64", torch.float8_e4m3fn: "uint8",
    torch.float8_e5m2: "uint8", torch.float8_e4m3fnuz: "uint8", torch.float8_e5m2fnuz: "uint8",
}  # fmt: skip # a table
"""dtype of a tensor → dtype of a tensor map over it"""
_SWIZZLES = (0, 32, 64, 128)


class BadArgument(Exception):
    """An argument with which a kernel cannot be launched; the message names it."""


class Descriptor(NamedTuple):
    """Triton's host-side tensor descriptor, and what the compiler requires of it."""

    value: Any
    meta: Any
    """swizzle (its number), element type and box; None if the kernel takes a plain pointer"""


class Arguments:
    """Parameters in the order of the kernel's, and the storages that they point to."""

    def __init__(self) -> None:
        self.parameters: list[AnyArgument | ConstantArgument] = []
        self.given: dict[str, Any] = {}
        """arguments as the program passed them, by parameter name; the tensors of a table of addresses"""
        self._storages: dict[int, HostMemory] = {}
        self.fresh: dict[str, torch.UntypedStorage] = {}
        """storages that only PyTorch holds and no earlier launch had, by name"""
        self.scratch: set[str] = set()
        """names of memory that a kernel needs internally, such as for tensor maps that it makes"""
        self._addresses: dict[str, np.ndarray] = {}
        """64-bit integers that may be addresses, by parameter name"""

    @property
    def mapped(self) -> Sequence[HostMemory]:
        """Return the storages themselves: a launch changes the tensors."""
        return list(self._storages.values())

    def for_model(self) -> list[DrawnArgument]:
        """Return the storages' contents for a prediction, which does not change the tensors."""

        def held(s: HostMemory) -> int:
            return s.bytes if s.name in self.scratch else _held(s.bytes)

        return [DrawnArgument(s.name, s.bytes, "uint8", True, s.data[: held(s)], s.address) for s in self.mapped]

    def key(self) -> tuple[object, ...]:
        """Return what a prediction depends on, except the contents of tensors."""
        return (*map(_hashable, self.parameters), *((s.name, s.bytes) for s in self.mapped))

    def follow(self, known: KnownAddresses) -> None:
        """Hold the storages to which addresses among the arguments point, in int64 tensors or as numbers."""
        for storage in known.storages_at(np.concatenate([np.empty(0, np.int64), *self._addresses.values()])):
            start = storage.data_ptr()
            name = self._storages[start].name if start in self._storages else f"the tensor at {start:#x}"
            data = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
            self._storages[start] = HostMemory(name, data, start)
        for name, addresses in self._addresses.items():
            if tensors := known.tensors_at(addresses):
                self.given[name] = tensors

    def add(self, name: str, kind: Any, value: Any) -> None:
        """Append the parameters for an argument of Triton's type `kind`. Raises BadArgument."""
        if isinstance(kind, tuple):
            for number, (inner, each) in enumerate(zip(kind, value, strict=True)):
                self.add(f"{name}[{number}]", inner, each)
        elif kind.startswith("*"):
            self.parameters.append(self._pointer(name, value))
            if kind.lstrip("*") in _ADDRESSES and isinstance(value, torch.Tensor):
                self._addresses[name] = value.detach().reshape(-1).view(torch.int64).numpy()
        elif kind.startswith("tensordesc"):
            self._add_descriptor(name, value)
        elif kind != "constexpr":
            self.parameters.append(ScalarArgument(name, np.void(_packed(name, kind, value))))
            if kind in _ADDRESSES:
                self._addresses[name] = np.array([value & _WHOLE], np.uint64).view(np.int64)

    def _pointer(self, name: str, value: Any) -> Part:
        if value is None:
            return ScalarArgument(name, np.int64(0))
        storage, offset = self._place(name, value)
        return PointerArgument(name, storage, offset) if storage else ScalarArgument(name, np.int64(0))

    def _place(self, name: str, value: Any) -> tuple[str, int]:
        """Return the storage of a tensor, empty for a tensor without contents, and the tensor's offset in bytes."""
        tensor = getattr(value, "base", value)  # triton.reinterpret wraps a tensor
        if not isinstance(tensor, torch.Tensor):
            raise BadArgument(f"argument {name} is a {type(value).__name__}; a virtual GPU takes tensors of PyTorch")
        if tensor.device.type != "cpu":
            raise BadArgument(
                f"argument {name} is a tensor on {tensor.device}; a virtual GPU takes those on the CPU: "
                "leave device=... out, or use triton.runtime.driver.active.get_active_torch_device()"
            )
        if not tensor.untyped_storage().nbytes():
            return "", 0
        return self.hold(name, tensor).name, int(tensor.storage_offset()) * tensor.element_size()

    def hold(self, name: str, tensor: torch.Tensor, in_place: bool = False) -> HostMemory:
        """Return the tensor's storage, which is now in the launch's memory; with `in_place` at its own address."""
        storage = tensor.untyped_storage()
        key = storage.data_ptr()
        if key not in self._storages:
            if storage.resizable():  # NumPy's view below makes it unresizable
                self.fresh[name] = storage
            data = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
            self._storages[key] = HostMemory(name, data, key if in_place else None)
        return self._storages[key]

    def _add_descriptor(self, name: str, given: Descriptor) -> None:
        value, meta = given
        shape, strides = [int(n) for n in value.shape], [int(n) for n in value.strides]
        if meta is None:
            self.parameters.append(self._pointer(name, value.base))
            self._scalars(name, "i64", [*shape, *strides])
            self._scalars(name, "i1", [value.padding == "nan", value.round_f32_to_tf32])
        else:
            self.parameters.append(self._tensor_map(name, value, meta, shape, strides))
        self._scalars(name, "i32", shape)
        self._scalars(name, "i64", strides)

    def _scalars(self, name: str, kind: str, values: Sequence[int]) -> None:
        for value in values:
            self.parameters.append(ScalarArgument(name, np.void(_packed(name, kind, value))))

    def _tensor_map(self, name: str, value: Any, meta: Any, shape: list[int], strides: list[int]) -> TensorMapArgument:
        dtype = MAPPED.get(value.base.dtype)
        refused = {
            "im2col": meta.get("is_im2col"),
            "padded FP4": meta["fp4_padded"],
            "rounding to TF32": getattr(value, "round_f32_to_tf32", False),
            f"elements of {value.base.dtype}": dtype is None,
        }
        for what, is_so in refused.items():
            if is_so:
                raise BadArgument(f"argument {name} is a tensor descriptor with {what}, which cannot be executed")
        assert dtype is not None  # it would be refused
        size = value.base.element_size()
        storage, offset = self._place(name, value.base)
        return TensorMapArgument(
            name, storage, dtype, tuple(reversed(shape)), tuple(n * size for n in reversed(strides[:-1])),
            tuple(reversed(meta["block_size"])), _SWIZZLES[meta["swizzle"]], offset, value.padding == "nan",
        )  # fmt: skip


def _hashable(part: AnyArgument | ConstantArgument) -> object:
    if isinstance(part, ScalarArgument):
        return part.name, part.value.tobytes()
    if isinstance(part, ConstantArgument):
        return part.name, part.data.tobytes()
    if isinstance(part, StructArgument):
        return part.name, part.bytes, *((offset, _hashable(inner)) for offset, inner in part.parts)
    return part


def _held(size: int) -> int:
    """Return how many bytes of a storage the model holds: part of a long one, so that it is not copied."""
    return size if size <= WHOLE_BYTES else (size - 1) // _HELD_MULTIPLE * _HELD_MULTIPLE


def _packed(name: str, kind: str, value: Any) -> bytes:
    if kind in _FLOATS:
        return torch.tensor([float(value)], dtype=_FLOATS[kind]).view(torch.uint8).numpy().tobytes()
    try:
        return struct.pack(_FORMATS[kind], value)
    except KeyError:
        raise BadArgument(f"argument {name} has the type {kind}, which cannot be passed yet") from None
    except struct.error as error:
        raise BadArgument(f"argument {name} is {value!r}, no {kind}: {error}") from None


class KnownAddresses:
    """Storages and tensors whose address a program has requested, while they exist."""

    def __init__(self) -> None:
        self._refs: dict[int, StorageWeakRef] = {}
        self._tensors: WeakValueDictionary[int, torch.Tensor] = WeakValueDictionary()

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Remember each tensor whose `data_ptr` is called."""
        own = torch.Tensor.data_ptr

        def data_ptr(tensor: torch.Tensor) -> int:
            if tensor.device.type == "cpu":
                storage = tensor.untyped_storage()
                self._refs[storage.data_ptr()] = StorageWeakRef(storage)
                self._tensors[own(tensor)] = tensor
            return own(tensor)

        with mock.patch.object(torch.Tensor, "data_ptr", data_ptr):
            yield

    def tensors_at(self, addresses: np.ndarray) -> list[torch.Tensor]:
        """Return the tensors that begin at these addresses, [n] int64; none unless all are known."""
        known = [tensor for address in addresses.tolist() if (tensor := self._tensors.get(address)) is not None]
        return known if len(known) == addresses.size else []

    def storages_at(self, addresses: np.ndarray) -> list[torch.UntypedStorage]:
        """Return the storages that contain one of these addresses, [n] int64."""
        live = self._live()
        if not live or not addresses.size:
            return []
        starts = np.array(sorted(live), np.int64)
        at = np.searchsorted(starts, np.unique(addresses), side="right") - 1
        found = {int(starts[n]) for n in set(at.tolist()) if n >= 0}
        unique = np.unique(addresses)
        return [
            live[start]
            for start in sorted(found)
            if ((unique >= start) & (unique < start + live[start].nbytes())).any()
        ]

    def _live(self) -> dict[int, torch.UntypedStorage]:
        self._refs = {start: ref for start, ref in self._refs.items() if not ref.expired()}
        found: dict[int, torch.UntypedStorage] = {}
        for start, ref in self._refs.items():
            storage: Any = torch.UntypedStorage._new_with_weak_ptr(ref.cdata)  # noqa: SLF001 # torch's own way
            if storage is not None and storage.nbytes():
                found[start] = storage
        return found
