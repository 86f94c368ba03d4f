"""Call a function in a jail: in a process that reaches nothing of the user's, and whose answer is not trusted.

Function and arguments go there pickled. What comes back is JSON, read by the annotation of what the function returns.
"""

from __future__ import annotations

import os
import pickle
import platform
import re
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import GenericAlias
from typing import Any, NamedTuple, TypeVar, cast

from evoengine.errors import EvoengineError, MachineError, NothingFound, ToolDied, UsageError
from evoengine.sandbox import jail
from evoengine.sandbox.machine import how_ended
from evoengine.sandbox.plain import from_json, to_json
from evoengine.sandbox.worker_process import MAX_PROCESSES, ONE_THREAD

ANSWER_BYTES = 256 << 20
"""of an answer, and of each file that the process may write; the listing of a binary is the largest"""
COUNTS_BY_NAMESPACE = (5, 14)
"""the first Linux that counts processes for RLIMIT_NPROC in each user namespace; before, all of the user's count. Root
has no such limit: its processes are bounded by the worker's keeper"""
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

    The errors `raises`, and evoengine's own, are raised here. Raises MachineError where there is no jail, ToolDied
    where the process ended without such an answer.
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
    """Run the command on these bytes; return its output, its exit code, and the last line of what it complained of."""
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
    """Answer the call on standard input, within limits that hold for all that this process starts."""
    jail.enter()
    _limit(resource.RLIMIT_FSIZE, ANSWER_BYTES)
    if tuple(map(int, re.findall(r"\d+", platform.release())[:2])) >= COUNTS_BY_NAMESPACE:
        _limit(resource.RLIMIT_NPROC, MAX_PROCESSES)
    output = os.dup(1)
    os.dup2(2, 1)  # what a library prints is no answer
    answer = _answer(*pickle.load(sys.stdin.buffer))
    with open(output, "wb") as file:
        file.write(answer)


if __name__ == "__main__":
    main()
