"""Check arguments of the Python functions against their annotations; a path may be given as text."""

from __future__ import annotations

import os
import reprlib
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from evoengine.errors import UsageError

_NAMES = {
    str: "a text", int: "a whole number", float: "a number", bool: "True or False", Path: "a path",
    os.PathLike: "a path", tuple: "a sequence of texts", Mapping: "a mapping of knobs and values",
    dict: "a mapping of knobs and values", type(None): "None",
}  # fmt: skip # a table


def checked(function: Callable[..., Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a function's or a class's parameters with paths as Path and sequences as tuples.

    Raises UsageError for a value that its parameter's annotation does not allow; a sentence names both.
    """
    kinds = _kinds(function)
    return {name: _checked(name, value, kinds[name]) if name in kinds else value for name, value in values.items()}


@cache
def _kinds(function: Callable[..., Any]) -> dict[str, tuple[type, ...]]:
    """Map each parameter to the types that it accepts, where all of them are known here."""
    found = {}
    for name, hint in get_type_hints(function).items():
        parts = get_args(hint) if isinstance(hint, UnionType) or get_origin(hint) is Union else (hint,)
        kinds = tuple(get_origin(part) or part for part in parts)
        if all(kind in _NAMES for kind in kinds):
            found[name] = kinds
    return found


def _checked(name: str, value: object, kinds: tuple[type, ...]) -> object:
    if Path in kinds and isinstance(value, str | os.PathLike):
        return Path(value)
    if str in kinds and isinstance(value, os.PathLike):
        return os.fspath(value)
    if tuple in kinds and isinstance(value, list | tuple) and all(isinstance(each, str) for each in value):
        return tuple(value)
    is_flag = isinstance(value, bool)
    numbers = not is_flag and isinstance(value, int) and (int in kinds or float in kinds)
    others = tuple(kind for kind in kinds if kind not in (int, tuple))
    if numbers or (isinstance(value, others) and (not is_flag or bool in kinds)):
        return value
    wanted = " or ".join(dict.fromkeys(_NAMES[kind] for kind in kinds))
    raise UsageError(f"{name} is {reprlib.repr(value)}, of type {type(value).__name__}; it takes {wanted}")
