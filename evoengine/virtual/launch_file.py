"""launch.json: the tensors of launches, and how each kernel is launched; docs/virtual-gpu.md describes the format.

It is data: nothing in it is executed, and the files that it names are arrays in the same folder.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch

from evoengine.devices.base import ConstantArgument, PointerArgument, ScalarArgument, StructArgument, TensorMapArgument
from evoengine.errors import UsageError, did_you_mean
from evoengine.sandbox.untrusted import parse_json, read_limited_text
from evoengine.sass.launch import Geometry, Part
from evoengine.virtual.arguments import MAPPED, Arguments
from evoengine.workloads.tensors import TORCH_DTYPES

DTYPES = {
    **TORCH_DTYPES, "uint16": torch.uint16, "uint32": torch.uint32, "uint64": torch.uint64,
    "fp8e4m3": torch.float8_e4m3fn, "fp8e5m2": torch.float8_e5m2,
}  # fmt: skip # a table
POINTER = "pointer"
"""dtype of a tensor whose elements are the addresses of others"""
SCALARS = {
    "int8": "b", "uint8": "B", "int16": "h", "uint16": "H", "int32": "i", "uint32": "I", "int64": "q", "uint64": "Q",
    "bool": "?", "fp16": "e", "fp32": "f", "fp64": "d",
}  # fmt: skip # a table
"""type of a scalar argument → its format in `struct`"""
LARGEST = 1 << 33
"""limit of the bytes of all tensors"""
MOST_THREADS, LARGEST_GRID = 1024, (2**31 - 1, 65535, 65535)
BELOW = 64
"""default limit below which integers are drawn"""

_TOP = ("tensors", "grid", "block", "shared", "cluster", "arguments", "constants", "then")
_LAUNCH = ("entry", *_TOP[1:-1])
_TENSOR = ("dtype", "shape", "draw", "file", "values", "expected")
_DRAWS = ("normal", "uniform", "zeros", "ones", "nan", "arange")
_MAP = ("tensor", "dims", "strides", "box", "swizzle", "offset", "name")


@dataclass(frozen=True, slots=True)
class Step:
    """One launch of the kernel `entry`; an empty name means the kernel that the command names."""

    entry: str
    geometry: Geometry
    arguments: tuple[Part | StructArgument | ConstantArgument, ...]


@dataclass(frozen=True, slots=True)
class LaunchFile:
    """The contents of launch.json."""

    tensors: Mapping[str, torch.Tensor]
    scalars: Mapping[str, Any]
    """values of arguments that have a name"""
    expected: Mapping[str, torch.Tensor]
    normal: tuple[str, ...]
    """tensors of normal values, which may be drawn again"""
    tables: frozenset[str]
    """tensors of pointers"""
    steps: tuple[Step, ...]

    def arguments(self, step: Step) -> Arguments:
        """Return a launch's arguments; all tensors are in its memory, as on a GPU."""
        found = Arguments()
        found.given = {**self.tensors, **self.scalars}
        for name, tensor in self.tensors.items():
            found.hold(name, tensor, in_place=bool(self.tables))
        found.parameters = list(step.arguments)
        return found


def read_launch(path: Path, seed: int) -> LaunchFile:
    """Read the file and draw its tensors. Raises UsageError with the position of the error."""
    try:
        found = parse_json(read_limited_text(path))
    except OSError as error:
        raise UsageError(f"--launch {path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise UsageError(f"--launch {path} is no JSON: {error}") from None
    try:
        return _Reader(path.resolve().parent, seed).read(found)
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None


@dataclass(slots=True)
class _Reader:
    folder: Path
    seed: int
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    scalars: dict[str, Any] = field(default_factory=dict)
    expected: dict[str, torch.Tensor] = field(default_factory=dict)
    tables: dict[str, Sequence[Any]] = field(default_factory=dict)

    def read(self, found: Any) -> LaunchFile:
        top = _object(found, "the file", _TOP)
        described = {
            name: _object(one, f"tensors.{name}", _TENSOR)
            for name, one in _object(top.get("tensors", {}), "tensors").items()
        }
        sizes = {name: _bytes(name, one) for name, one in described.items()}
        if sum(sizes.values()) > LARGEST:
            raise UsageError(f"the tensors have {sum(sizes.values())} bytes; {LARGEST} at most are taken")
        for number, (name, one) in enumerate(described.items()):
            self._tensor(name, one, number)
        for name, values in self.tables.items():
            self.tensors[name][:] = torch.tensor([self._address(name, value) for value in values], dtype=torch.int64)
        steps = [self._step("", {name: value for name, value in top.items() if name in _LAUNCH})]
        for number, one in enumerate(_list(top.get("then", []), "then")):
            where = f"then[{number}]"
            steps.append(self._step(where, _object(one, where, _LAUNCH)))
        normal = tuple(name for name, one in described.items() if _is_normal(one))
        return LaunchFile(self.tensors, self.scalars, self.expected, normal, frozenset(self.tables), tuple(steps))

    # ── tensors ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _tensor(self, name: str, described: Mapping[str, Any], number: int) -> None:
        where = f"tensors.{name}"
        if described["dtype"] == POINTER:
            self.tables[name] = _list(described.get("values"), f"{where}.values")
            self.tensors[name] = torch.zeros(len(self.tables[name]), dtype=torch.int64)
            return
        dtype, shape = DTYPES[described["dtype"]], tuple(described.get("shape", ()))
        given = [way for way in ("draw", "file", "values") if way in described]
        if len(given) > 1:
            raise UsageError(f"{where} has {' and '.join(given)}; one of them says what it holds")
        if "file" in described:
            self.tensors[name] = self._array(described["file"], f"{where}.file", dtype, shape)
        elif "values" in described:
            self.tensors[name] = _values(described["values"], where, dtype, shape)
        else:
            generator = torch.Generator().manual_seed(self.seed + number)
            self.tensors[name] = _drawn(described.get("draw"), where, dtype, shape, generator)
        if "expected" in described:
            self.expected[name] = self._array(described["expected"], f"{where}.expected", None, shape)

    def _array(self, name: Any, where: str, dtype: torch.dtype | None, shape: tuple[int, ...]) -> torch.Tensor:
        """Return an array of a .npy file in the folder, as bits if NumPy does not have the dtype."""
        try:
            array = np.load(self.folder / str(name), allow_pickle=False)
            tensor = torch.from_numpy(np.ascontiguousarray(array))
        except (OSError, ValueError, TypeError) as error:
            raise UsageError(f"{where}: {name!r} is not an array that NumPy reads: {error}") from None
        if tuple(tensor.shape) != shape:
            raise UsageError(f"{where}: {name!r} has the shape {tuple(tensor.shape)}; the tensor has {shape}")
        if dtype is None or tensor.dtype == dtype:
            return tensor.clone()
        if tensor.element_size() == dtype.itemsize and not tensor.is_floating_point():
            return tensor.view(dtype).clone()
        raise UsageError(f"{where}: {name!r} holds {tensor.dtype}, not {dtype}")

    def _address(self, of: str, value: Any) -> int:
        name, offset = self._place(value, f"tensors.{of}")
        return self.tensors[name].data_ptr() + offset

    def _place(self, value: Any, where: str) -> tuple[str, int]:
        """Return tensor and offset of a pointer: a tensor's name, or an object with `pointer` and `offset`."""
        described = {POINTER: value} if isinstance(value, str) else _object(value, where, (POINTER, "offset", "name"))
        name, offset = str(described.get(POINTER)), described.get("offset", 0)
        if name not in self.tensors:
            raise UsageError(f"{where} points to {name!r}, which is not a tensor{did_you_mean(name, self.tensors)}")
        if type(offset) is not int or not 0 <= offset <= self.tensors[name].nbytes:
            raise UsageError(f"{where} has the offset {offset!r}; {name} has {self.tensors[name].nbytes} bytes")
        return name, offset

    # ── launches ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _step(self, where: str, described: Mapping[str, Any]) -> Step:
        at = f"{where}." if where else ""
        if where and not described.get("entry"):
            raise UsageError(f"{where} names no entry, the kernel that is launched there")
        grid, block = _three(described, at, "grid", LARGEST_GRID), _three(described, at, "block", (MOST_THREADS,) * 3)
        if prod(block) > MOST_THREADS:
            raise UsageError(f"{at}block has {prod(block)} threads; a GPU takes {MOST_THREADS}")
        shared = described.get("shared", 0)
        if type(shared) is not int or not 0 <= shared < 1 << 20:
            raise UsageError(f"{at}shared is {shared!r}; it is the dynamic shared memory of a block, in bytes")
        cluster = _three(described, at, "cluster", (16, 16, 16)) if "cluster" in described else None
        passed: list[Part | StructArgument | ConstantArgument] = []
        for number, one in enumerate(_list(described.get("arguments", []), f"{at}arguments")):
            passed.append(self._argument(one, f"{at}arguments[{number}]"))
        for name, one in _object(described.get("constants", {}), f"{at}constants").items():
            passed.append(ConstantArgument(name, np.frombuffer(_hex(one, f"{at}constants.{name}"), np.uint8)))
        return Step(str(described.get("entry", "")), Geometry(grid, block, shared, cluster), tuple(passed))

    def _argument(self, value: Any, where: str) -> Part | StructArgument:
        if isinstance(value, str):
            return PointerArgument(where, *self._place(value, where))
        kinds = (POINTER, "tensor_map", "struct", "hex", *SCALARS)
        described = _object(value, where)
        kind = next((kind for kind in kinds if kind in described), None)
        if kind is None:
            raise UsageError(f"{where} is neither a tensor's name nor an object with one of {', '.join(kinds)}")
        if kind == POINTER:
            return PointerArgument(where, *self._place(described, where))
        if kind == "tensor_map":
            return self._tensor_map(described[kind], where)
        if kind == "struct":
            return self._struct(_object(value, where, ("struct", "at")), where)
        _object(value, where, (kind, "name"))
        if "name" in described:
            self.scalars[str(described["name"])] = described[kind]
        return ScalarArgument(where, np.void(_packed(kind, described[kind], where)))

    def _struct(self, described: Mapping[str, Any], where: str) -> StructArgument:
        size = described["struct"]
        if type(size) is not int or not 0 < size <= 32764:
            raise UsageError(f"{where}.struct is {size!r}; it is a struct's bytes, of which parameters take 32764")
        parts = []
        for offset, part in _object(described.get("at", {}), f"{where}.at").items():
            if not offset.isdecimal() or int(offset[:9]) >= size:
                raise UsageError(f"{where}.at has {offset!r}; its names are offsets in bytes below {size}")
            found = self._argument(part, f"{where}.at.{offset}")
            if isinstance(found, StructArgument):
                raise UsageError(f"{where}.at.{offset} is a struct; name the fields of the outermost alone")
            parts.append((int(offset), found))
        return StructArgument(where, size, tuple(parts))

    def _tensor_map(self, value: Any, where: str) -> TensorMapArgument:
        described = _object(value, where, _MAP)
        name, offset = self._place({POINTER: described.get("tensor"), "offset": described.get("offset", 0)}, where)
        dims, strides, box = (
            tuple(_integers(described.get(part, []), f"{where}.{part}")) for part in ("dims", "strides", "box")
        )
        (swizzle,) = _integers([described.get("swizzle", 0)], f"{where}.swizzle")
        return TensorMapArgument(where, name, MAPPED[self.tensors[name].dtype], dims, strides, box, swizzle, offset)


# ── JSON ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _object(value: Any, where: str, known: Sequence[str] | None = None) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise UsageError(f"{where} is {_short(value)}, no object")
    for name in value if known else ():
        if name not in (known or ()):
            raise UsageError(
                f"{where} has {name!r}; it takes {', '.join(known or ())}{did_you_mean(name, known or ())}"
            )
    return value


def _list(value: Any, where: str) -> Sequence[Any]:
    if not isinstance(value, list):
        raise UsageError(f"{where} is {_short(value)}, no list")
    return value


def _integers(value: Any, where: str) -> Sequence[int]:
    for one in _list(value, where):
        if type(one) is not int or not 0 <= one < 1 << 40:
            raise UsageError(f"{where} has {_short(one)}, which is not a number from 0 to 2^40")
    found: Sequence[int] = value
    return found


def _three(described: Mapping[str, Any], at: str, name: str, largest: tuple[int, ...]) -> tuple[int, int, int]:
    where = f"{at}{name}"
    if name not in described:
        raise UsageError(f"{where} is missing: one to three numbers")
    given = _integers(described[name], where)
    if not 1 <= len(given) <= 3 or any(not 1 <= n <= most for n, most in zip(given, largest, strict=False)):
        raise UsageError(
            f"{where} is {list(given)}; it is one to three numbers from 1 to {', '.join(map(str, largest))}"
        )
    x, y, z = (*given, 1, 1)[:3]
    return x, y, z


def _short(value: Any) -> str:
    return repr(value)[:60]


def _hex(value: Any, where: str) -> bytes:
    try:
        return bytes.fromhex(value)
    except (TypeError, ValueError):
        raise UsageError(f"{where} is {_short(value)}, no bytes in hexadecimal") from None


def _packed(kind: str, value: Any, where: str) -> bytes:
    if kind == "hex":
        return _hex(value, where)
    try:
        return struct.pack(f"<{SCALARS[kind]}", value)
    except (struct.error, OverflowError, TypeError) as error:
        raise UsageError(f"{where} is {_short(value)}, no {kind}: {error}") from None


def _bytes(name: str, described: Mapping[str, Any]) -> int:
    """Return a tensor's bytes; its dtype and shape are checked."""
    dtype = described.get("dtype")
    if dtype == POINTER:
        return 8 * len(_list(described.get("values"), f"tensors.{name}.values"))
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise UsageError(f"tensors.{name}.dtype is {_short(dtype)}; it is one of {', '.join((*DTYPES, POINTER))}")
    shape = _integers(described.get("shape", []), f"tensors.{name}.shape")
    if 0 in shape:
        raise UsageError(f"tensors.{name}.shape is {list(shape)}, which has no elements")
    return prod(shape) * DTYPES[dtype].itemsize


def _is_normal(described: Mapping[str, Any]) -> bool:
    if described["dtype"] == POINTER or not DTYPES[described["dtype"]].is_floating_point:
        return False
    return described.get("draw", "normal") == "normal" and "file" not in described and "values" not in described


def _values(values: Any, where: str, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    try:
        return torch.tensor(values).to(dtype).reshape(shape).clone()
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(f"{where}.values do not make a tensor of shape {list(shape)}: {str(error)[:100]}") from None


def _drawn(
    draw: Any, where: str, dtype: torch.dtype, shape: tuple[int, ...], generator: torch.Generator
) -> torch.Tensor:
    if draw is None:
        draw = "normal" if dtype.is_floating_point else "uniform"
    if isinstance(draw, dict):
        bounds = _object(draw, f"{where}.draw", ("low", "high"))
        low, high = bounds.get("low", 0), bounds.get("high")
        if type(low) is not int or type(high) is not int or not -(2**63) <= low < high < 2**63:
            raise UsageError(f"{where}.draw takes low and high, integers, of which high is not reached")
        return torch.randint(low, high, shape, generator=generator).to(dtype)
    makers: Mapping[str, Callable[[], torch.Tensor]] = {
        "normal": lambda: torch.randn(shape, generator=generator),
        "uniform": lambda: (
            torch.rand(shape, generator=generator)
            if dtype.is_floating_point
            else torch.randint(0, 2 if dtype is torch.bool else BELOW, shape, generator=generator)
        ),
        "zeros": lambda: torch.zeros(shape),
        "ones": lambda: torch.ones(shape),
        "nan": lambda: torch.full(shape, float("nan")),
        "arange": lambda: torch.arange(prod(shape)).reshape(shape),
    }
    if draw not in _DRAWS:
        raise UsageError(
            f"{where}.draw is {_short(draw)}; it is one of {', '.join(_DRAWS)}, or an object of low and high"
        )
    if draw == "nan" and not dtype.is_floating_point:
        raise UsageError(f"{where}.draw is 'nan', which integers are not")
    return makers[draw]().to(dtype)
