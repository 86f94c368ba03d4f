"""Run a user's script in a separate process, and record its description of a kernel.

Run as a file, `script_runner.py KIND SCRIPT [ARGUMENT…] FD`, without importing evoengine. For `kernel-tuner` a stand-in
module of that name records the calls of `tune_kernel`; for `kernelbench` model_probe.py examines the script's Model.
JSON is written to the open file FD.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import inspect
import json
import os
import random
import re
import resource
import runpy
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

MAX_BYTES = 256 << 20
"""limit of bytes of each file that the script writes, and of its output"""
GPU_LIBRARIES = ("pycuda", "cupy", "cupy_backends", "cupyx", "nvidia", "cuda", "pynvml", "nvmetrics", "pmt")
CALLS: list[dict[str, Any]] = []
RESULTS: list[Any] = []
"""results of run_kernel, kept so that no other object gets the identity of one"""
PARAMETERS: dict[str, list[Any]] = {}
"""results that belong to the described call"""


class AnyClass(type):
    """A metaclass for which attributes of the class itself are stand-ins too."""

    def __getattr__(cls, name: str) -> Anything:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()


class Anything(metaclass=AnyClass):
    """Stand for the tuner's other names: do nothing when called, read, iterated or calculated with.

    As a number it is 1, by which a script may divide.
    """

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

    def __len__(self) -> int:
        return 0

    def __bool__(self) -> bool:
        return True

    def __index__(self) -> int:
        return 1

    def __float__(self) -> float:
        return 1.0

    def __format__(self, spec: str) -> str:
        return ""

    def __exit__(self, *error: Any) -> None:
        return None


def _anything(self: Anything, *args: Any) -> Anything:
    return Anything()


def _false(self: Anything, other: Any) -> bool:
    return False


_BINARY = "add sub mul matmul truediv floordiv mod pow lshift rshift and or xor".split()
for _name in [*_BINARY, *(f"r{name}" for name in _BINARY), "neg", "pos", "invert", "abs", "getitem", "enter"]:
    setattr(Anything, f"__{_name}__", _anything)
for _name in ("lt", "le", "gt", "ge", "contains"):
    setattr(Anything, f"__{_name}__", _false)
for _name in ("setitem", "delitem"):
    setattr(Anything, f"__{_name}__", lambda self, *args: None)


class StandInModule(types.ModuleType):
    def __getattr__(self, name: str) -> type[Anything]:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything


_ALLOCATED = re.compile(r"(?:(?:pagelocked|aligned|managed)_)?(empty|zeros)(_like)?(?:_pinned)?(_like)?(?:_pinned)?")


class ArrayModule(types.ModuleType):
    """Replace cupy, and the functions of pycuda and cupyx that allocate memory, by NumPy arrays, which need no GPU."""

    def __getattr__(self, name: str) -> Any:
        import numpy as np

        if name.startswith("__"):
            raise AttributeError(name)
        if (allocated := _ALLOCATED.fullmatch(name)) and self.__name__ != "cupy":
            if allocated[2] or allocated[3]:
                return lambda like, dtype=None, **_: np.zeros_like(like, dtype)
            return lambda shape, dtype=np.float32, **_: np.zeros(shape, dtype)
        if name in ("asnumpy", "to_gpu", "asarray"):
            return np.asarray
        return getattr(np, name, Anything) if self.__name__.partition(".")[0] == "cupy" else Anything


class StandIn(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Stand for `kernel_tuner` and libraries of a GPU, with every module below them, installed or not."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in ("kernel_tuner", *GPU_LIBRARIES):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return ArrayModule(spec.name) if spec.name.partition(".")[0] in GPU_LIBRARIES else StandInModule(spec.name)

    def exec_module(self, module: Any) -> None:
        for name in OWN.get(module.__name__, ()):
            setattr(module, name, globals()[name])


OWN = {
    "kernel_tuner": ("tune_kernel", "run_kernel", "util"),
    "kernel_tuner.interface": ("tune_kernel", "run_kernel"),
    "kernel_tuner.kernelbuilder": ("PythonKernel",),
    "kernel_tuner.accuracy": ("TunablePrecision",),
    "kernel_tuner.util": ("get_best_config",),
}
"""names of the tuner that this file defines"""
NAMES = (
    "kernel_name", "kernel_source", "problem_size", "arguments", "tune_params", "grid_div_x", "grid_div_y",
    "grid_div_z", "restrictions", "answer", "atol", "verify", "verbose", "lang", "device", "platform", "smem_args",
    "cmem_args", "texmem_args", "compiler", "compiler_options", "defines", "log", "iterations", "block_size_names",
)  # fmt: skip # a table
"""parameters of kernel_tuner.tune_kernel in the documented order"""
RUN_NAMES = (
    "kernel_name", "kernel_source", "problem_size", "arguments", "params", "grid_div_x", "grid_div_y", "grid_div_z",
)  # fmt: skip # a table
"""parameters of run_kernel that both tuner and importer read"""
BUILDER_NAMES = ("kernel_name", "kernel_source", "problem_size", "arguments", "params", "inputs", "outputs")


def tune_kernel(*args: Any, **kwargs: Any) -> tuple[list[Result], Result]:
    given = dict(zip(NAMES, args, strict=False)) | kwargs
    record("tune_kernel", given, given.get("tune_params") or {})
    params = given.get("tune_params") or {}
    first = {name: next(iter(values)) for name, values in params.items() if len(values)}
    return [Result(first, time=1.0)], Result()


def record(by: str, given: dict[str, Any], params: Any) -> None:
    line = next((f.lineno for f in inspect.stack()[2:] if f.filename == SCRIPT), 0)
    global PARAMETERS
    PARAMETERS = {str(name): list(values) for name, values in params.items()} if isinstance(params, dict) else {}
    CALLS.append({name: described(value) for name, value in given.items()} | {"line": line, "by": by})
    save()


class Result(dict[str, Any]):
    """A configuration with a time, so that a script that saves the best one proceeds to its next kernel."""

    def __missing__(self, key: str) -> float:
        return 1.0


def get_best_config(results: list[Result], *args: Any, **kwargs: Any) -> Result:
    """Return the first configuration, from which a script calculates the sizes of its next kernel."""
    return results[0]


class util(Anything):  # the tuner's module
    get_best_config = staticmethod(get_best_config)


def run_kernel(*args: Any, **kwargs: Any) -> Any:
    """Return the arguments unchanged, because no kernel is run; arrays as views, which an answer may contain."""
    import numpy as np

    given = _one_configuration("run_kernel", RUN_NAMES, args, kwargs)
    results = [a.view() if isinstance(a, np.ndarray) else a for a in given.get("arguments") or []]
    RESULTS.extend(results)
    CALLS[-1]["results"] = [id(result) for result in results]
    save()
    return results


def _one_configuration(by: str, names: tuple[str, ...], args: Any, kwargs: Any) -> dict[str, Any]:
    given: dict[str, Any] = dict(zip(names, args, strict=False)) | kwargs
    if "kernel_string" in given:
        given["kernel_source"] = given.pop("kernel_string")
    params = given.pop("params", None) or {}
    given["tune_params"] = {name: [value] for name, value in params.items()}
    record(by, given, given["tune_params"])
    return given


class PythonKernel(Anything):
    """A kernel with one configuration that a script calls; the call returns its arguments."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        _one_configuration("PythonKernel", BUILDER_NAMES, args, kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return list(args)


class TunablePrecision:
    """An array whose type is a tuning parameter."""

    def __init__(self, name: str, array: Any, *args: Any, **kwargs: Any) -> None:
        self.name, self.array = name, array


def described(value: Any, depth: int = 0) -> Any:
    """Return a value as JSON: arrays by dtype and size, functions by their source and as a formula."""
    import numpy as np

    if isinstance(value, TunablePrecision):
        return described(value.array, depth + 1) | {"precision": value.name}
    if type(value).__module__ == "torch" and hasattr(value, "numpy"):
        return described(value.detach().cpu().numpy(), depth) | {"identity": id(value)}
    if isinstance(value, np.ndarray):
        return described_array(value)
    if isinstance(value, np.generic):
        return {"scalar": value.dtype.name, "value": value.item()}
    if isinstance(value, dict):
        return {str(key): described(item, depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple, range)) and depth < 6:
        return [described(item, depth + 1) for item in value]
    if isinstance(value, (bool, int, float, str)) or value is None:
        return value
    if isinstance(value, os.PathLike):
        return str(value)
    if callable(value):
        return described_function(value)
    return {"other": type(value).__name__}


SAMPLE = 1 << 22
"""number of elements of a large array of decimals that are examined"""


def described_array(value: Any) -> dict[str, Any]:
    import numpy as np

    flat = np.ascontiguousarray(value).reshape(-1)
    if flat.dtype.kind == "c":
        flat = flat.view(flat.real.dtype)  # structs such as float2 and double2
    found = {"array": flat.dtype.name, "size": int(flat.size), "identity": id(value)}
    found |= {"constant": None, "low": 0.0, "high": 0.0, "offsets": False}
    if flat.dtype.kind not in "biuf" or not flat.size:
        return found
    is_whole = flat.dtype.kind in "biu"
    looked = flat if is_whole or flat.size <= SAMPLE else flat[:: flat.size // SAMPLE]
    looked = looked if is_whole else looked[np.isfinite(looked)]
    if looked.size and (looked == looked[0]).all():
        found["constant"] = looked[0].item()
    elif looked.size and flat.dtype.kind != "b":
        found |= {"low": float(looked.min()), "high": float(looked.max())}
        found["offsets"] = bool(is_whole and flat[0] == 0 and (flat[1:] >= flat[:-1]).all())
    return found


MOST_CONFIGURATIONS = 256
"""number of configurations in which a function of the script is compared with its formula"""
MOST_TRIED = 64
"""number of configurations in which a generator is compared with its text"""


def configurations(most: int) -> list[dict[str, Any]]:
    """Return some combinations of the tuned values, always the same."""
    rng = random.Random(1)
    values = {name: each for name, each in PARAMETERS.items() if each}
    return [{name: rng.choice(each) for name, each in values.items()} for _ in range(most)] if values else []


def described_function(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the start of a function's source, its formula if there is one, and its values in some configurations."""
    try:
        found: dict[str, Any] = {"function": " ".join(inspect.getsource(function).split())[:120]}
    except (OSError, TypeError):
        found = {"function": getattr(function, "__name__", "a function")}
    if (text := generated_text(function)) is not None:
        return found | {"text": text}
    written = FORMULA(function, list(PARAMETERS)) if hasattr(function, "__code__") else None
    if written is None:
        return found
    values = []
    for configuration in configurations(MOST_CONFIGURATIONS):
        try:
            by_name = function.__code__.co_varnames[: function.__code__.co_argcount]
            takes_names = set(by_name) <= set(configuration)
            value = function(*(configuration[n] for n in by_name)) if takes_names else function(configuration)
        except Exception:  # any exception of the script: the configuration is not one that it means
            continue
        values.append([configuration, value])
    return found | {"formula": written, "values": described(values)}


def generated_text(function: Callable[..., Any]) -> str | None:
    """Return the text that a generator returns for names in place of values, if it holds for all values.

    It holds if replacing the names by values gives what the generator returns for the values.
    """

    def filled(text: str, configuration: dict[str, Any]) -> str:
        return re.sub(r"[A-Za-z_]\w*", lambda word: str(configuration.get(word[0], word[0])), text)

    try:
        text = function({name: name for name in PARAMETERS})
        if isinstance(text, str) and "__global__" in text:
            tried = configurations(MOST_TRIED)
            return text if all(filled(text, one) == filled(function(one), one) for one in tried) else None
    except Exception:  # it calculates with the values, or is not a generator
        pass
    return None


def save() -> None:
    os.ftruncate(NOTES, 0)
    os.lseek(NOTES, 0, os.SEEK_SET)
    with open(NOTES, "w", encoding="utf-8", closefd=False) as file:
        json.dump(CALLS, file)


if __name__ == "__main__":
    KIND, SCRIPT, NOTES = sys.argv[1], os.path.abspath(sys.argv[2]), int(sys.argv[-1])
    # imports of the script must not be searched in this file's folder
    PROBE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "model_probe.py")
    sys.path[0] = os.path.dirname(SCRIPT)
    sys.argv = [SCRIPT, *sys.argv[3:-1]]
    os.chdir(os.path.dirname(SCRIPT))
    # keep only error output
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())
    resource.setrlimit(resource.RLIMIT_FSIZE, (MAX_BYTES, MAX_BYTES))
    if KIND == "kernelbench":
        CALLS.append(runpy.run_path(PROBE)["look"](SCRIPT))
        save()
    else:
        FORMULA = runpy.run_path(os.path.join(os.path.dirname(PROBE), "script_formula.py"))["formula"]
        sys.meta_path.insert(0, StandIn())
        runpy.run_path(SCRIPT, run_name="__main__")
