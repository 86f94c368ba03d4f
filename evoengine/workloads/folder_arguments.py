"""Parameters of a folder's kernel beyond tensors and numbers: tensor maps, and structs that hold any of them."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from evoengine.devices.base import (
    DTYPE_BYTES,
    Parameter,
    PointerArgument,
    ScalarArgument,
    ScratchParameter,
    StructArgument,
    TensorMapArgument,
    TensorParameter,
)
from evoengine.errors import UsageError
from evoengine.space.expression import Expression, Scope, Undefined
from evoengine.space.symbol import Symbol, typed

MOST_BYTES = 32764
"""limit of the bytes of all parameters of a kernel from CUDA 12.1 on, 4096 before (CUDA C++ Programming Guide)"""
MOST_RANK = 5
SCALARS = {
    "int8": "b", "uint8": "B", "int16": "h", "uint16": "H", "int32": "i", "uint32": "I", "int64": "q", "uint64": "Q",
    "float32": "f", "float64": "d",
}  # fmt: skip # a table
"""type of a number in a struct → its format in `struct`"""
_MAP_DTYPES = {"int8": "uint8", "bool": "uint8", "int16": "uint16"}
"""dtypes of tensors → their names in tensor maps, if these differ"""
_MAP_KEYS = ("tensor", "dims", "strides", "box", "swizzle", "offset", "nan", "description")


@dataclass(frozen=True)
class MapRule:
    """A tensor map: sizes are expressions of axes and knobs, innermost first; strides and the offset are in bytes."""

    name: str
    tensor: str
    dims: tuple[Expression, ...]
    strides: tuple[Expression, ...]
    box: tuple[Expression, ...]
    swizzle: Expression
    offset: Expression
    nan: bool


@dataclass(frozen=True)
class Part:
    """A part of a struct: the parameter `name`, a pointer to it with an offset, or a number of a type in SCALARS."""

    at: int
    name: str | None = None
    offset: Expression | None = None
    scalar: str | None = None
    value: Expression | None = None
    raw: bytes = b""


@dataclass(frozen=True)
class StructRule:
    name: str
    bytes: int
    parts: tuple[Part, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Return the tensors, scalars, axes and tensor maps that it contains or points to."""
        return tuple(dict.fromkeys(part.name for part in self.parts if part.name is not None))


# ── what problem.json says ──────────────────────────────────────────────────────────────────────────────────────────

Fail = Callable[[str], Any]
"""raises UsageError with the given message"""


def read_maps(entries: Mapping[str, Any], tensors: Collection[str], where: str, fail: Fail) -> tuple[MapRule, ...]:
    """Return the tensor maps of `tensor_maps`."""
    return tuple(_map(name, entry, tensors, where, fail) for name, entry in entries.items())


def _map(name: str, entry: Any, tensors: Collection[str], where: str, fail: Fail) -> MapRule:
    at = f"tensor_maps.{name}"
    if not isinstance(entry, dict) or not {"tensor", "dims", "box"} <= entry.keys():
        fail(f'{at} needs a tensor, dims and a box, as in {{"tensor": "a", "dims": ["k", "m"], "box": [64, 128]}}')
    for key in entry:
        if key not in _MAP_KEYS:
            fail(f"{at} has the unknown key {key!r}; known are {', '.join(_MAP_KEYS)}")
    if entry["tensor"] not in tensors:
        fail(f"{at} views {entry['tensor']!r}, which is not a tensor; tensors are {', '.join(tensors)}")
    dims, strides, box = (_sizes(entry.get(key, []), f"{at}.{key}", where, fail) for key in ("dims", "strides", "box"))
    if (
        not 1 <= len(dims) <= MOST_RANK
        or len(box) != len(dims)
        or ("strides" in entry and len(strides) != len(dims) - 1)
    ):
        found = f"{len(dims)} dims, {len(strides)} strides and a box of {len(box)}"
        fail(f"{at} has {found}; a map of n dims has n - 1 strides and a box of n, with n from 1 to {MOST_RANK}")
    nan = entry.get("nan", False)
    if not isinstance(nan, bool):
        fail(f"{at}.nan is {nan!r}; it is true where what lies outside of the tensor reads as NaN")
    swizzle, offset = (_size(entry.get(key, 0), f"{at}.{key}", where, fail) for key in ("swizzle", "offset"))
    return MapRule(name, entry["tensor"], dims, strides, box, swizzle, offset, nan)


def _sizes(values: Any, at: str, where: str, fail: Fail) -> tuple[Expression, ...]:
    if not isinstance(values, list):
        fail(f"{at} must be a list of numbers or expressions, innermost first, not {json.dumps(values)[:60]}")
    return tuple(_size(value, at, where, fail) for value in values)


def _size(value: Any, at: str, where: str, fail: Fail) -> Expression:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        fail(f"{at} must be a number or an expression of axes and knobs, not {json.dumps(value)[:60]}")
    return Expression.parse(str(value), f"{where}: {at}")


def read_structs(entries: Mapping[str, Any], known: Collection[str], where: str, fail: Fail) -> tuple[StructRule, ...]:
    """Return the structs of `structs`; `known` are the names that a part may refer to."""
    return tuple(_struct(name, entry, known, where, fail) for name, entry in entries.items())


def _struct(name: str, entry: Any, known: Collection[str], where: str, fail: Fail) -> StructRule:
    at = f"structs.{name}"
    if not isinstance(entry, dict) or not isinstance(entry.get("at"), dict) or type(entry.get("bytes")) is not int:
        fail(
            f'{at} needs its bytes and what lies at which of them, as in {{"bytes": 16, "at": {{"0": "x", "8": "n"}}}}'
        )
    size = entry["bytes"]
    if not 1 <= size <= MOST_BYTES:
        fail(f"{at}.bytes is {size}; a struct has 1 to {MOST_BYTES}")
    parts = [_part(offset, part, known, size, f"{at}.at", where, fail) for offset, part in entry["at"].items()]
    return StructRule(name, size, tuple(parts))


def _part(offset: str, value: Any, known: Collection[str], size: int, at: str, where: str, fail: Fail) -> Part:
    if not offset.isdecimal() or int(offset[:9]) >= size:
        fail(f"{at} has {offset!r}; its names are offsets in bytes below {size}")
    place, at = int(offset), f"{at}.{offset}"
    if isinstance(value, str):
        value = {"pointer": value}
    if not isinstance(value, dict):
        fail(f"{at} is {json.dumps(value)[:60]}; it is a name, or an object with pointer, hex, {', '.join(SCALARS)}")
    if "pointer" in value:
        if value["pointer"] not in known:
            fail(f"{at} names {value['pointer']!r}, which is none of {', '.join(known)}")
        shift = _size(value["offset"], f"{at}.offset", where, fail) if "offset" in value else None
        return Part(place, value["pointer"], shift)
    if "hex" in value:
        try:
            return Part(place, raw=bytes.fromhex(value["hex"]))
        except (TypeError, ValueError):
            fail(f"{at}.hex is {json.dumps(value['hex'])[:60]}, no bytes in hexadecimal")
    kind = next((kind for kind in SCALARS if kind in value), None)
    if kind is None:
        fail(f"{at} is {json.dumps(value)[:60]}; it is a name, or an object with pointer, hex, {', '.join(SCALARS)}")
    return Part(place, scalar=kind, value=_size(value[kind], f"{at}.{kind}", where, fail))


# ── what it is for a problem and a configuration ────────────────────────────────────────────────────────────────────


def map_argument(rule: MapRule, of: TensorParameter | ScratchParameter, scope: Scope, exact: bool) -> TensorMapArgument:
    """Return the map of a tensor. Without `exact`, sizes that depend on a knob without a value are 1.

    Raises UsageError if a size is not an integer.
    """
    element = DTYPE_BYTES[of.dtype]
    dims, box = (tuple(_whole(size, scope, exact) for size in sizes) for sizes in (rule.dims, rule.box))
    strides = tuple(_whole(size, scope, exact) for size in rule.strides) or tuple(_dense(dims, element))
    swizzle, offset = _whole(rule.swizzle, scope, exact), _whole(rule.offset, scope, exact)
    dtype = _MAP_DTYPES.get(of.dtype, of.dtype)
    return TensorMapArgument(rule.name, rule.tensor, dtype, dims, strides, box, swizzle, offset, rule.nan)


def _dense(dims: Sequence[int], element: int) -> Iterator[int]:
    """Yield the strides in bytes of a dense tensor, without the innermost."""
    for dim in dims[:-1]:
        element *= dim
        yield element


def struct_argument(rule: StructRule, parameters: Mapping[str, Parameter], scope: Scope, exact: bool) -> StructArgument:
    """Return the struct. Raises UsageError if a part exceeds it, or a number does not fit its type."""
    parts = []
    for part in rule.parts:
        value, size = _value(rule, part, parameters, scope, exact)
        if part.at + size > rule.bytes:
            raise UsageError(
                f"structs.{rule.name}: what lies at {part.at} ends at byte {part.at + size} of {rule.bytes}; give the "
                "struct its sizeof as bytes"
            )
        parts.append((part.at, value))
    return StructArgument(rule.name, rule.bytes, tuple(parts))


def _value(
    rule: StructRule, part: Part, parameters: Mapping[str, Parameter], scope: Scope, exact: bool
) -> tuple[ScalarArgument | PointerArgument | TensorMapArgument, int]:
    """Return a part with its size in bytes."""
    name = f"{rule.name}+{part.at}"
    if part.scalar is not None and part.value is not None:
        return _scalar(name, part.scalar, part.value, scope, exact)
    if part.name is None:
        return ScalarArgument(name, np.void(part.raw)), len(part.raw)
    found = parameters[part.name]
    if isinstance(found, TensorParameter | ScratchParameter):
        offset = _whole(part.offset, scope, exact) if part.offset is not None else 0
        return PointerArgument(name, part.name, offset), 8
    if isinstance(found, TensorMapArgument):
        return found, 128
    assert isinstance(found, ScalarArgument)  # the reader admits no other part
    return found, found.value.nbytes


def _scalar(name: str, kind: str, value: Expression, scope: Scope, exact: bool) -> tuple[ScalarArgument, int]:
    number = _evaluated(value, scope, exact)
    if isinstance(number, Symbol):
        argument = typed(number, kind)
        return ScalarArgument(name, argument), argument.nbytes
    try:
        raw = struct.pack(f"<{SCALARS[kind]}", number)
    except (struct.error, OverflowError, TypeError):
        raise UsageError(f"{value.where}: `{value.text}` is {number}, which is not {kind}") from None
    return ScalarArgument(name, np.void(raw)), len(raw)


def _evaluated(expression: Expression, scope: Scope, exact: bool) -> Any:
    try:
        return expression.evaluate(scope)
    except Undefined:
        if exact:
            raise
        return 1


def _whole(expression: Expression, scope: Scope, exact: bool) -> int:
    value = _evaluated(expression, scope, exact)
    if isinstance(value, Symbol):
        return cast(int, value)
    if type(value) is not int or value < 0:
        raise UsageError(f"{expression.where}: `{expression.text}` is {value}, which is not a size")
    return value
