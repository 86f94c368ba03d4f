"""Run a user's script in a process of its own, and record its description of a kernel.

Run as a file, `script_runner.py KIND SCRIPT [ARGUMENT…] FD`, without importing evoengine. For `kernel-tuner` a
stand-in module of that name records the calls of `tune_kernel`; for `kernelbench` the script's Model is looked at by
model_probe.py. JSON is written to the open file FD.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import inspect
import json
import os
import resource
import runpy
import sys
import types
from collections.abc import Iterator
from typing import Any

MAX_BYTES = 256 << 20
"""limit of each file that the script writes, and of its output"""
GPU_LIBRARIES = ("pycuda", "cupy", "cupy_backends", "cupyx", "nvidia", "cuda", "pynvml", "nvmetrics", "pmt")
CALLS: list[dict[str, Any]] = []


class AnyClass(type):
    """Attributes of the class itself are stand-ins too."""

    def __getattr__(cls, name: str) -> Anything:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()


class Anything(metaclass=AnyClass):
    """A stand-in for the tuner's other names: it can be called, read and iterated, and does nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __call__(self, *args: Any, **kwargs: Any) -> Anything:
        return Anything()

    def __getattr__(self, name: str) -> Anything:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __getitem__(self, key: Any) -> Anything:
        return Anything()


class StandInModule(types.ModuleType):
    def __getattr__(self, name: str) -> type[Anything]:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything


class ArrayModule(types.ModuleType):
    """cupy by NumPy, and what allocates host memory in pycuda: arrays that no GPU needs."""

    def __getattr__(self, name: str) -> Any:
        import numpy as np

        if name.startswith("__"):
            raise AttributeError(name)
        if name in ("pagelocked_empty", "aligned_empty", "managed_empty"):
            return lambda shape, dtype=np.float32, **_: np.empty(shape, dtype)
        if name in ("pagelocked_zeros", "aligned_zeros", "managed_zeros"):
            return lambda shape, dtype=np.float32, **_: np.zeros(shape, dtype)
        if name in ("asnumpy", "to_gpu", "asarray"):
            return np.asarray
        return getattr(np, name, Anything) if self.__name__.partition(".")[0] == "cupy" else Anything


class StandIn(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """`kernel_tuner` and libraries of a GPU, with every module below them, installed or not."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in ("kernel_tuner", *GPU_LIBRARIES):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return ArrayModule(spec.name) if spec.name.partition(".")[0] in GPU_LIBRARIES else StandInModule(spec.name)

    def exec_module(self, module: Any) -> None:
        if module.__name__ == "kernel_tuner":
            module.tune_kernel, module.run_kernel = tune_kernel, run_kernel


NAMES = (
    "kernel_name", "kernel_source", "problem_size", "arguments", "tune_params", "grid_div_x", "grid_div_y",
    "grid_div_z", "restrictions", "answer", "atol", "verify", "verbose", "lang", "device", "platform", "smem_args",
    "cmem_args", "texmem_args", "compiler", "compiler_options", "defines", "log", "iterations", "block_size_names",
)  # fmt: skip # a table
"""the documented order of kernel_tuner.tune_kernel's parameters"""


def tune_kernel(*args: Any, **kwargs: Any) -> tuple[list[Result], Result]:
    given = dict(zip(NAMES, args, strict=False)) | kwargs
    line = next((f.lineno for f in inspect.stack()[1:] if f.filename == SCRIPT), 0)
    CALLS.append({name: described(value) for name, value in given.items()} | {"line": line})
    save()
    params = given.get("tune_params") or {}
    first = {name: next(iter(values)) for name, values in params.items() if len(values)}
    return [Result(first, time=1.0)], Result()


class Result(dict[str, Any]):
    """A configuration with a time, so that a script which saves the best one proceeds to its next kernel."""

    def __missing__(self, key: str) -> float:
        return 1.0


def run_kernel(
    kernel_name: Any, kernel_source: Any, problem_size: Any, arguments: Any, *args: Any, **kwargs: Any
) -> Any:
    """Return the arguments unchanged: no kernel is run here."""
    return list(arguments)


def described(value: Any, depth: int = 0) -> Any:
    """Return a value as JSON: arrays by dtype and size, functions by their source."""
    import numpy as np

    if isinstance(value, np.ndarray):
        constant = value.size > 0 and bool((value == value.flat[0]).all())
        low, high = (float(value.min()), float(value.max())) if value.size and value.dtype.kind in "fiu" else (0, 0)
        first = value.flat[0].item() if constant else None
        limits = {"constant": first, "low": low, "high": high}
        return {"array": value.dtype.name, "size": int(value.size), "identity": id(value), **limits}
    if isinstance(value, np.generic):
        return {"scalar": value.dtype.name, "value": value.item()}
    if isinstance(value, dict):
        return {str(key): described(item, depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple, range)) and depth < 6:
        return [described(item, depth + 1) for item in value]
    if isinstance(value, (bool, int, float, str)) or value is None:
        return value
    if callable(value):
        try:
            return {"function": " ".join(inspect.getsource(value).split())[:120]}
        except (OSError, TypeError):
            return {"function": getattr(value, "__name__", "a function")}
    return {"other": type(value).__name__}


def save() -> None:
    os.ftruncate(NOTES, 0)
    os.lseek(NOTES, 0, os.SEEK_SET)
    with open(NOTES, "w", encoding="utf-8", closefd=False) as file:
        json.dump(CALLS, file)


if __name__ == "__main__":
    KIND, SCRIPT, NOTES = sys.argv[1], os.path.abspath(sys.argv[2]), int(sys.argv[-1])
    # the script's imports must not be searched in this file's own folder
    PROBE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "model_probe.py")
    sys.path[0] = os.path.dirname(SCRIPT)
    sys.argv = [SCRIPT, *sys.argv[3:-1]]
    os.chdir(os.path.dirname(SCRIPT))
    # keep only the error output
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())
    resource.setrlimit(resource.RLIMIT_FSIZE, (MAX_BYTES, MAX_BYTES))
    if KIND == "kernelbench":
        CALLS.append(runpy.run_path(PROBE)["look"](SCRIPT))
        save()
    else:
        sys.meta_path.insert(0, StandIn())
        runpy.run_path(SCRIPT, run_name="__main__")
