"""Call a function in a jail, in a process whose answer is not trusted.

Function and arguments are sent pickled. The answer is JSON, which is converted according to the function's return type,
so that only values of known types result.
"""

from __future__ import annotations

import base64
import gc
import json
import os
import pickle
import platform
import re
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from types import GenericAlias, NoneType, UnionType
from typing import Any, NamedTuple, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from evoengine.errors import EvoengineError, MachineError, NothingFound, ToolDied, UsageError
from evoengine.sandbox import jail
from evoengine.sandbox.machine import how_ended
from evoengine.sandbox.untrusted import parse_json
from evoengine.sandbox.worker_process import MAX_PROCESSES, ONE_THREAD

ANSWER_BYTES = 256 << 20
"""limit of an answer, and of each file that the process may write; the largest is the listing of a binary"""
COUNTS_BY_NAMESPACE = (5, 14)
"""first version of Linux whose RLIMIT_NPROC counts processes per user namespace instead of per user. Root has no such
limit; its processes are bounded by the worker's keeper"""
_OWN = (ToolDied, MachineError, UsageError, NothingFound, EvoengineError)

T = TypeVar("T")


class _Error(NamedTuple):
    """An exception: the names of its class and of those that it derives from, its message, and how of a ToolDied."""

    kinds: tuple[str, ...]
    message: str
    how: str


def call(
    function: Callable[..., T],
    *args: object,
    returns: Any,
    raises: tuple[type[Exception], ...] = (),
    readable: Iterable[Path] = (),
    environment: Mapping[str, str] | None = None,
) -> T:
    """Call a module's function in a jail that reads the paths `readable` too, and return its answer, a `returns`.

    The errors `raises`, and evoengine's own, are raised here. Raises MachineError if there is no jail, ToolDied if the
    process ended without a valid answer.
    """
    jail.require_jail()
    command = jail.jailed_python(["-m", __name__], readable, {**ONE_THREAD, **(environment or {})})
    raw, code, said = _run(command, pickle.dumps((function, args)))
    how = how_ended(jail.end_of(code))
    try:
        error, answer = from_json(raw, tuple[_Error, None] | GenericAlias(tuple, (None, returns)))
        if error is None:
            return cast(T, answer)
        kind = next(kind for name in error.kinds for kind in (*_OWN, *raises) if kind.__name__ == name)
    except (ValueError, StopIteration):
        told = said or raw[:200].decode(errors="replace")
        raise ToolDied(f"a process in the jail ended with {how} and no answer: {told}", how) from None
    raise ToolDied(error.message, error.how) if kind is ToolDied else kind(error.message)


def _run(command: list[str], given: bytes) -> tuple[bytes, int, str]:
    """Run the command on these bytes; return its output, its exit code, and the last line of its standard error."""
    with tempfile.TemporaryFile() as stdin, tempfile.TemporaryFile() as stderr:
        stdin.write(given)
        stdin.seek(0)
        with subprocess.Popen(command, stdin=stdin, stdout=subprocess.PIPE, stderr=stderr) as process:
            assert process.stdout
            try:
                raw = process.stdout.read(ANSWER_BYTES + 1)
            finally:  # it has ended, or answers without end
                process.kill()
        stderr.seek(max(0, stderr.seek(0, os.SEEK_END) - 4096))
        lines = stderr.read().decode(errors="replace").strip().splitlines()
    return raw[:ANSWER_BYTES], process.returncode, lines[-1][:200] if lines else ""


def _answer(function: Callable[..., object], args: tuple[object, ...]) -> bytes:
    try:
        return to_json((None, function(*args)))
    except Exception as error:
        kinds = tuple(kind.__name__ for kind in type(error).__mro__)
        return to_json((_Error(kinds, str(error), getattr(error, "how", "")), None))


def _limit(kind: int, most: int) -> None:
    """Set a limit, unless a lower one is set."""
    _, hard = resource.getrlimit(kind)
    lower = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(kind, (lower, lower))


def main() -> None:
    """Answer the call on standard input, within limits for this process and its descendants."""
    jail.enter()
    _limit(resource.RLIMIT_FSIZE, ANSWER_BYTES)
    if tuple(map(int, re.findall(r"\d+", platform.release())[:2])) >= COUNTS_BY_NAMESPACE:
        _limit(resource.RLIMIT_NPROC, MAX_PROCESSES)
    output = os.dup(1)
    os.dup2(2, 1)  # output of libraries must not mix with the answer
    gc.disable()  # imports leave hardly any garbage, and searching for it takes a sixth of their time
    function, args = pickle.load(sys.stdin.buffer)
    gc.enable()
    gc.freeze()
    answer = _answer(function, args)
    with open(output, "wb") as file:
        file.write(answer)


_hints = cache(get_type_hints)


def to_json(value: object) -> bytes:
    """Return a record, or a value of its fields' types, as JSON."""
    return json.dumps(_plain(value)).encode()


def from_json(raw: bytes, declared: Any) -> Any:
    """Return the value of the declared type that `to_json` wrote. Raises ValueError for anything else."""
    try:
        return _typed(parse_json(raw.decode()), declared)
    except (TypeError, KeyError) as error:
        raise ValueError(f"it is not a {declared}: {error}") from None


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
    raise TypeError(f"a value is not one of {kinds}")


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


if __name__ == "__main__":
    main()
