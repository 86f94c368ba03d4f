"""The workloads. Each folder here is a workload, which its __init__.py names as `WORKLOAD`.

Further ones can be registered. Problems are given by their texts, as a named set (`gemm:llama3-8b`), or as the lines of
a file (`@FILE`).
"""

from __future__ import annotations

import pkgutil
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from pathlib import Path

from evoengine.errors import UsageError, did_you_mean
from evoengine.sandbox.untrusted import read_limited_text
from evoengine.workloads.base import AnyWorkload, Problem

_registered: dict[str, AnyWorkload] = {}


def register(workload: AnyWorkload) -> None:
    """Register a workload under its name in this process. Raises UsageError if a built-in workload has that name."""
    if workload.name in _own():
        raise UsageError(f"there is a workload {workload.name} already; give yours another name")
    _registered[workload.name] = workload


def workloads() -> dict[str, AnyWorkload]:
    """Return all known workloads by name."""
    return {**_own(), **_registered}


@cache
def _own() -> dict[str, AnyWorkload]:
    folders = [found.name for found in pkgutil.iter_modules(__path__) if found.ispkg]
    found = [import_module(f"{__name__}.{name}").WORKLOAD for name in folders]
    return {workload.name: workload for workload in found}


def default_workload() -> AnyWorkload:
    return next(w for w in workloads().values() if w.is_default)


def find_workload(name: str) -> AnyWorkload:
    known = workloads()
    if name not in known:
        raise UsageError(f"there is no workload {name!r}; known ones are {', '.join(known)}{did_you_mean(name, known)}")
    return known[name]


def workload_from_definition(name: str, text: str) -> AnyWorkload:
    """Return the user's own kernel that a ledger's run defines by this text. Raises UsageError if it is invalid."""
    from evoengine.workloads.folder import FolderWorkload
    from evoengine.workloads.triton_kernel import TritonWorkload, is_definition

    return TritonWorkload(text) if is_definition(text) else FolderWorkload(name, text)


def parse_problem(text: str) -> tuple[AnyWorkload, Problem]:
    """Parse `WORKLOAD:…`; without a name before the colon, a problem of the default workload.

    Raises UsageError naming the part that is wrong and what would be right.
    """
    name, colon, parts = text.partition(":")
    workload = find_workload(name) if colon else default_workload()
    try:
        return workload, workload.parse(text)
    except UsageError as error:
        if "-" in parts and (
            hint := did_you_mean(text, _sets())
        ):  # only in the name of a set, never in a part of a problem
            raise UsageError(
                f"{text!r} is not a problem, such as {workload.example}, and no named set{hint}"
            ) from error
        raise


def stored_problem(text: str) -> str:
    """Return a problem that a ledger may hold, in the form that it has there.

    The problem of a recorded space or of an unknown workload is returned unchanged. Raises UsageError.
    """
    name, colon, _ = text.partition(":")
    return str(parse_problem(text)[1]) if not colon or name in workloads() else text


def expand(texts: Sequence[str]) -> tuple[str, ...]:
    """Return the problems that the texts stand for, each once, in order and in the form that a ledger has.

    Raises UsageError for an invalid problem, an unreadable or empty file, and problems of different workloads.
    """
    parsed = dict.fromkeys(str(parse_problem(problem)[1]) for problem in expanded(texts))
    kinds = dict.fromkeys(problem.partition(":")[0] if ":" in problem else "attention" for problem in parsed)
    if len(kinds) > 1:
        raise UsageError(f"problems of one search are of one workload, and these are of {' and '.join(kinds)}")
    return tuple(parsed)


def expanded(texts: Sequence[str]) -> list[str]:
    """Return the problems that the texts stand for, as written. Raises UsageError as `expand` does for files."""
    return [problem for text in texts for problem in _expanded(text)]


def stands_for_several(text: str) -> bool:
    return text.startswith("@") or text in _sets()


def _expanded(text: str) -> Sequence[str]:
    if text.startswith("@"):
        return _lines(Path(text[1:]))
    return _sets().get(text, (text,))


def _sets() -> dict[str, tuple[str, ...]]:
    return {f"{w.name}:{name}": found for w in workloads().values() for name, found in w.problem_sets().items()}


def _lines(file: Path) -> list[str]:
    """Return the problems of a file, one per line; text after # is a comment."""
    try:
        lines = read_limited_text(file).splitlines()
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f"the file of problems {file} cannot be read: {why}") from error
    numbered = enumerate((line.partition("#")[0].strip() for line in lines), start=1)
    found = {number: line for number, line in numbered if line}
    if not found:
        raise UsageError(f"the file {file} holds no problem; write one a line")
    sets, problems = _sets(), []
    for number, line in found.items():
        if line.startswith("@"):
            raise UsageError(f"the file {file} names a file, {line}; it takes problems and named sets")
        try:
            problems += [str(parse_problem(problem)[1]) for problem in sets.get(line, (line,))]
        except UsageError as error:
            raise UsageError(f"line {number} of {file}: {error}") from error
    return problems
