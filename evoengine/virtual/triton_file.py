"""A Triton kernel in a user's file: the kernel, its configurations, and functions beside it."""

from __future__ import annotations

import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from triton.runtime.autotuner import Autotuner, Config
from triton.runtime.jit import JITFunction, KernelInterface

from evoengine.errors import UsageError
from evoengine.hints import did_you_mean


def load(path: Path) -> ModuleType:
    """Import the file, which executes it. Raises UsageError where it is none, or raises."""
    if not path.is_file():
        raise UsageError(f"there is no file {str(path)!r}; --triton takes FILE::KERNEL")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{path} is no Python file; --triton takes FILE::KERNEL")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    sys.path.insert(0, str(path.resolve().parent))
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise UsageError(f"{path} cannot be imported: {said(error, path)}") from None
    return module


def said(error: BaseException, path: Path) -> str:
    """Return the error's type and text with the innermost line of the file that raised it."""
    if isinstance(error, SyntaxError):
        return f"line {error.lineno}: SyntaxError: {error.msg}"
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == str(path)]
    where = f"line {lines[-1]}: " if lines else ""
    return f"{where}{type(error).__name__}: {' '.join(str(error).split())[:300]}"


class TritonKernel:
    """A kernel with the decorators around it."""

    def __init__(self, module: ModuleType, name: str) -> None:
        """Find the kernel. Raises UsageError naming the module's kernels where it is none of them."""
        found = getattr(module, name, None)
        if not isinstance(found, KernelInterface):
            names = [own for own, value in vars(module).items() if isinstance(value, KernelInterface)]
            raise UsageError(
                f"{module.__file__} has no Triton kernel {name!r}: it has {', '.join(names) or 'none'}"
                f"{did_you_mean(name, names)}"
            )
        self.name = name
        self._tuner: Autotuner | None = None
        while not isinstance(found, JITFunction):
            if isinstance(found, Autotuner):
                self._tuner = found
            found = found.fn
        self.function: Callable[..., object] = found.fn
        self.parameters: tuple[str, ...] = tuple(found.arg_names)

    @property
    def configs(self) -> list[Config | None]:
        """Return the configurations of its autotuner; a None where it has no autotuner."""
        return list(self._tuner.configs) if self._tuner else [None]

    @contextmanager
    def only(self, config: Config | None) -> Iterator[None]:
        """Leave the autotuner no other configuration, so that it launches with this one and times nothing."""
        if self._tuner is None:
            yield
            return
        before, self._tuner.configs = self._tuner.configs, [config]
        try:
            yield
        finally:
            self._tuner.configs = before


def config_text(config: Config | None) -> str:
    """Return a configuration's fields that it sets, as NAME=VALUE."""
    if config is None:
        return "as launched"
    return " ".join(f"{name}={value}" for name, value in config.all_kwargs().items() if value is not None)


def function_of(module: ModuleType, name: str, option: str) -> Callable[..., Any]:
    """Return a function of the module. Raises UsageError where it has none of the name."""
    found = getattr(module, name, None)
    if isinstance(found, KernelInterface) or not callable(found):
        names = [own for own, value in vars(module).items() if inspect.isfunction(value)]
        raise UsageError(
            f"{module.__file__} has no function {name!r} for {option}: it has {', '.join(names) or 'none'}"
            f"{did_you_mean(name, names)}"
        )
    function: Callable[..., Any] = found
    return function


def sizes_of(call: Callable[..., Any], name: str) -> dict[str, int]:
    """Return the function's integer parameters with their defaults. Raises UsageError where another has no default."""
    sizes = {}
    for parameter in inspect.signature(call).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if parameter.default is parameter.empty:
            raise UsageError(
                f"{name} has the parameter {parameter.name} without a default; --call takes a function that makes its "
                "own tensors, whose integer parameters are sizes with defaults"
            )
        if type(parameter.default) is int:
            sizes[parameter.name] = parameter.default
    return sizes


def require_names(reference: Callable[..., Any], kernel: TritonKernel) -> tuple[str, ...]:
    """Return the reference's parameters. Raises UsageError for one that the kernel does not have."""
    names = tuple(inspect.signature(reference).parameters)
    unknown = [name for name in names if name not in kernel.parameters]
    if unknown:
        raise UsageError(
            f"the reference has the parameter {unknown[0]}, which kernel {kernel.name} has not: it has "
            f"{', '.join(kernel.parameters)}{did_you_mean(unknown[0], kernel.parameters)}"
        )
    return names
