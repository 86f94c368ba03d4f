"""The workloads. Each folder here is one, which its __init__.py names as `WORKLOAD`.

Others may be registered.
"""

from __future__ import annotations

import pkgutil
from functools import cache
from importlib import import_module

from evoengine.errors import UsageError
from evoengine.hints import did_you_mean
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
    """Return the user's own kernel that a ledger's run defines by this text. Raises UsageError where it is at fault."""
    from evoengine.workloads.folder import FolderWorkload
    from evoengine.workloads.triton_kernel import TritonWorkload, is_definition

    return TritonWorkload(text) if is_definition(text) else FolderWorkload(name, text)


def parse_problem(text: str) -> tuple[AnyWorkload, Problem]:
    """Parse `WORKLOAD:…`; without a name before the colon, a problem of the default workload.

    Raises UsageError naming the part that is wrong and what would be right.
    """
    name, colon, _ = text.partition(":")
    workload = find_workload(name) if colon else default_workload()
    return workload, workload.parse(text)


def stored_problem(text: str) -> str:
    """Return a problem that a ledger may hold, in the form it has there.

    A recorded space's, or that of an unknown workload, is returned as it is. Raises UsageError.
    """
    name, colon, _ = text.partition(":")
    return str(parse_problem(text)[1]) if not colon or name in workloads() else text
