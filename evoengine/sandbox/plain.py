"""Records as JSON, for the answer of a process that is not trusted: only values of known types come out of it."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from evoengine.sandbox.untrusted import parse_json

_hints = cache(get_type_hints)


def to_json(value: object) -> bytes:
    """Return a record, or a value of its fields' types, as JSON."""
    return json.dumps(_plain(value)).encode()


def from_json(raw: bytes, declared: Any) -> Any:
    """Return the value of the declared type that `to_json` wrote. Raises ValueError for anything else."""
    try:
        return _typed(parse_json(raw.decode()), declared)
    except (TypeError, KeyError) as error:
        raise ValueError(f"it is no {declared}: {error}") from None


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, Mapping):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(each) for each in value]
    if is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    return value


def _typed(value: Any, declared: Any) -> Any:
    """Return a value of JSON as one of the declared type. Raises TypeError, KeyError or ValueError."""
    kind, parts = get_origin(declared) or declared, get_args(declared)
    if kind is Any:
        return value
    if kind is None:
        return _require(value, NoneType)
    if kind in (UnionType, Union):
        return _typed_as_any(value, parts)
    if isinstance(kind, type) and is_dataclass(kind):
        return kind(**{name: _typed(value[name], hint) for name, hint in _hints(kind).items()})
    if issubclass(kind, tuple):
        return _tuple(value, kind, parts)
    if issubclass(kind, Mapping):
        return {_typed(name, parts[0]): _typed(each, parts[1]) for name, each in _require(value, dict).items()}
    if issubclass(kind, Enum):
        return kind(value)
    if kind is bytes:
        return base64.b64decode(_require(value, str), validate=True)
    if kind is float and type(value) is int:
        return float(value)
    return _require(value, kind)


def _typed_as_any(value: Any, kinds: tuple[Any, ...]) -> Any:
    for kind in kinds:
        try:
            return _typed(value, kind)
        except (TypeError, KeyError, ValueError):
            continue
    raise TypeError(f"a value is none of {kinds}")


def _tuple(value: Any, kind: Any, parts: tuple[Any, ...]) -> Any:
    _require(value, list)
    if named := getattr(kind, "_fields", None):
        return kind(*(_typed(each, _hints(kind)[name]) for name, each in zip(named, value, strict=True)))
    if parts[1:] == (...,):
        return tuple(_typed(each, parts[0]) for each in value)
    return tuple(_typed(each, part) for each, part in zip(value, parts, strict=True))


def _require(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise TypeError(f"a {kind.__name__} is {type(value).__name__}")
    return value
