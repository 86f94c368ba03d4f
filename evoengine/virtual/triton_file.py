"""A Triton kernel in a user's file: the kernel, its configurations, and functions of the file."""

from __future__ import annotations

import importlib.util
import inspect
import linecache
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from triton.compiler.errors import CompileTimeAssertionFailure
from triton.runtime.autotuner import Autotuner, Config
from triton.runtime.errors import OutOfResources, PTXASError
from triton.runtime.jit import JITFunction, KernelInterface

from evoengine.errors import UsageError, did_you_mean
from evoengine.gpu import Gpu
from evoengine.records import Value
from evoengine.virtual.device import VirtualGpu
from evoengine.virtual.triton_driver import installed
from evoengine.workloads.base import Host
from evoengine.workloads.triton_kernel import FIELDS

USUAL = FIELDS[:2]
"""fields that are always varied"""
DEFAULTS = {"num_warps": 4, "num_stages": 3, "num_ctas": 1, "maxnreg": None}


def load(file: str, text: str) -> ModuleType:
    """Execute the text as the module in `file`, which may have changed since. Raises UsageError if the text raises."""
    path = Path(file)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None  # the suffix is .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    # Triton reads a kernel's text through `inspect`; without a modification time the entry is not read again
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    try:
        exec(compile(text, file, "exec"), module.__dict__)
    except Exception as error:
        raise UsageError(f"{file} cannot be imported: {said(error, path)}") from None
    return module


def said(error: BaseException, path: Path) -> str:
    """Return the error's type and text with the innermost line of the file that raised it."""
    if isinstance(error, SyntaxError):
        return f"line {error.lineno}: SyntaxError: {error.msg}"
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == str(path)]
    where = f"line {lines[-1]}: " if lines else ""
    return f"{where}{type(error).__name__}: {' '.join(str(error).split())[:300]}"


class Pruned(Exception):
    """The autotuner's own function skips a configuration."""


REFUSALS = (Pruned, OutOfResources, CompileTimeAssertionFailure, PTXASError)
"""exceptions for which an autotuner skips a configuration"""


def why_refused(error: BaseException) -> str:
    """Return why one of REFUSALS was raised, in one line; for an assertion, its text in the kernel."""
    if isinstance(error, CompileTimeAssertionFailure) and error.src and error.node is not None:
        return f"{error.src.splitlines()[error.node.lineno - 1].strip()} fails"
    return " ".join(str(error).split())


class Program:
    """A user's file, executed: the kernel, the function that launches it, and the reference."""

    def __init__(self, host: Host, gpu: Gpu) -> None:
        """Execute the file on a virtual GPU. Raises UsageError if it raises or lacks a name in `host`."""
        with installed(VirtualGpu(gpu)):
            module = load(host.file, host.text)
        self.host, self.path = host, Path(host.file)
        self.kernel = TritonKernel(module, host.kernel)
        self.function = function_of(module, host.call, "--call")
        self.reference = function_of(module, host.reference, "--reference") if host.reference else None
        self.names = require_names(self.reference, self.kernel) if self.reference else ()
        """names of the kernel's parameters that the reference takes"""
        self.sizes = sizes_of(self.function, host.call)
        """the function's integer parameters with their defaults"""


class TritonKernel:
    """A kernel with its decorators."""

    def __init__(self, module: ModuleType, name: str) -> None:
        """Find the kernel. Raises UsageError, with the names of the module's kernels, if there is none of that name."""
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
    def tuner(self) -> Autotuner:
        """Return its autotuner. Raises UsageError if it has none."""
        if self._tuner is None:
            raise UsageError(
                f"kernel {self.name} has no @triton.autotune, so nothing of it can be varied: add one with a list of "
                "triton.Config, and leave their parameters out where the kernel is launched"
            )
        return self._tuner

    @property
    def configs(self) -> list[Config | None]:
        """Return the configurations of its autotuner; a None if it has no autotuner."""
        return list(self._tuner.configs) if self._tuner else [None]

    @property
    def settings(self) -> list[dict[str, Value]]:
        """Return the configurations of its autotuner as knobs and values: the kernel's own parameters, then fields.

        A value that is neither number nor text is named by its text. Raises UsageError without an autotuner, or if the
        configurations have different parameters.
        """
        configs: list[Config] = self.tuner.configs
        names = tuple(configs[0].kwargs)
        if unlike := next((config for config in configs if set(config.kwargs) != set(names)), None):
            raise UsageError(
                f"the autotuner's list of kernel {self.name} has a configuration of {', '.join(names) or 'nothing'} "
                f"and one of {', '.join(unlike.kwargs) or 'nothing'}: give all of them the same parameters"
            )
        if clash := next((name for name in names if name in FIELDS or name == "family"), None):
            raise UsageError(f"kernel {self.name} has the parameter {clash}, which cannot be a knob; rename it")
        plain = {name: self._is_plain(name) for name in names}
        fields = [name for name in FIELDS if name in USUAL or any(getattr(c, name) != DEFAULTS[name] for c in configs)]
        return [
            {name: c.kwargs[name] if plain[name] else str(c.kwargs[name]) for name in names}
            | {name: getattr(c, name) or DEFAULTS[name] or 0 for name in fields}
            for c in configs
        ]

    def _is_plain(self, name: str) -> bool:
        """Return whether all values of a parameter have one type that a knob may have."""
        types = {type(config.kwargs[name]) for config in self.tuner.configs}
        return len(types) == 1 and types <= {bool, int, float, str}

    def config_of(self, settings: Mapping[str, Value]) -> Config:
        """Return the configuration for `settings`, whose names are those of the property."""
        first = self.tuner.configs[0]
        kwargs = {name: self._value(name, settings[name]) for name in first.kwargs}
        fields = {name: settings.get(name) or DEFAULTS[name] for name in FIELDS}
        return Config(kwargs, pre_hook=first.pre_hook, **fields)

    def _value(self, name: str, value: Value) -> object:
        if self._is_plain(name):
            return value
        return next(c.kwargs[name] for c in self.tuner.configs if str(c.kwargs[name]) == value)

    @contextmanager
    def only(self, config: Config | None) -> Iterator[None]:
        """Reduce the autotuner's list to this configuration, so that it launches with it and times nothing.

        A launch raises Pruned if the autotuner's own function skips the configuration.
        """
        if self._tuner is None:
            yield
            return
        tuner, before = self._tuner, self._tuner.configs

        def run(*args: Any, **kwargs: Any) -> Any:
            """Prune as the autotuner does if it has several configurations."""
            tuner.nargs = dict(zip(tuner.arg_names, args, strict=False))
            if tuner.early_config_prune and not tuner.early_config_prune(tuner.configs, tuner.nargs, **kwargs):
                raise Pruned("the autotuner's early_config_prune leaves it out")
            return type(tuner).run(tuner, *args, **kwargs)

        tuner.configs, tuner.run = [config], run
        try:
            yield
        finally:
            tuner.configs = before
            del tuner.run


def config_text(config: Config | None) -> str:
    """Return the fields that a configuration sets, as NAME=VALUE."""
    if config is None:
        return "as launched"
    return " ".join(f"{name}={value}" for name, value in config.all_kwargs().items() if value is not None)


def function_of(module: ModuleType, name: str, option: str) -> Callable[..., Any]:
    """Return a function of the module. Raises UsageError if it has none of that name."""
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
    """Return the function's integer parameters with their defaults. Raises UsageError if one has no default."""
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
