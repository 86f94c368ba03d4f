"""A function in a user's Python file that needs nothing of evoengine: the reference of a binary's kernel."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from evoengine.errors import UsageError
from evoengine.hints import did_you_mean


def function_in(target: str, option: str) -> Callable[..., Any]:
    """Return the function that FILE.py::FUNCTION names; the file is executed. Raises UsageError where there is none."""
    file, separator, name = target.partition("::")
    path = Path(file)
    if not separator or not name or not path.is_file():
        raise UsageError(f"{option} takes FILE.py::FUNCTION, and {target!r} is none")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{option}: {path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise UsageError(f"{option}: {path} cannot be imported: {type(error).__name__}: {error}") from None
    found = getattr(module, name, None)
    if not callable(found):
        names = [own for own, value in vars(module).items() if inspect.isfunction(value)]
        raise UsageError(f"{option}: {path} has no function {name!r}{did_you_mean(name, names)}")
    function: Callable[..., Any] = found
    return function


def names_of(function: Callable[..., Any], known: Collection[str], of: str) -> tuple[str, ...]:
    """Return the function's parameters. Raises UsageError for one that is not known."""
    names = tuple(inspect.signature(function).parameters)
    for name in names:
        if name not in known:
            raise UsageError(
                f"the reference has the parameter {name}, which {of} does not name: it names "
                f"{', '.join(known)}{did_you_mean(name, known)}"
            )
    return names
