"""Run the reference of a folder's workload: the user's own Python, with torch or NumPy.

It runs only in worker processes. Its errors become a UsageError that names the line.
"""

from __future__ import annotations

import ast
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from evoengine.errors import UsageError
from evoengine.workloads.base import Inputs, Outputs
from evoengine.workloads.dtypes import TORCH_DTYPES
from evoengine.workloads.folder_definition import Definition, FolderProblem, Item, shape_of

_FILE = "<reference>"
_TO_HALF = ("float", "half", "bfloat16")


class NotDouble(Exception):
    """The reference cannot compute in float64; the message states why."""


def run_as_is(definition: Definition, problem: FolderProblem, inputs: Inputs) -> Outputs:
    """Return the outputs in the dtypes that problem.json states.

    Raises UsageError where the reference raises, or returns other outputs than stated.
    """
    found = _call(definition, problem, inputs)
    return {item.name: _checked(definition, item, found[item.name], problem) for item in definition.outputs}


def run_in_float64(definition: Definition, problem: FolderProblem, inputs: Inputs) -> Outputs:
    """Return the outputs from floating-point inputs raised to float64, ignoring casts to narrower types.

    Raises NotDouble where the reference does not run so.
    """
    raised = {name: t.double() if t.is_floating_point() else t for name, t in inputs.items()}
    try:
        with all_in_float64():
            found = _call(definition, problem, raised)
    except UsageError as error:
        raise NotDouble(str(error)) from None
    floating = {item.name for item in definition.outputs if TORCH_DTYPES[item.dtype].is_floating_point}
    for name, output in found.items():
        if name in floating and output.dtype != torch.float64:
            raise NotDouble(f"its output {name} is {_dtype_name(output.dtype)} where its inputs are float64")
    return found


def uses_numpy(definition: Definition) -> bool:
    """Return whether the reference imports NumPy and not torch, and so takes arrays. Runs nothing."""
    return _imports_numpy_alone(definition.reference)


def reference_call(definition: Definition, problem: FolderProblem, inputs: Inputs) -> Callable[[], object]:
    """Return a call of `run` with its arguments prepared, to be timed as a baseline."""
    run = _loaded(definition.reference, definition.name)
    arguments = _arguments(definition, problem, inputs, numpy=uses_numpy(definition))
    return lambda: run(*arguments)


@lru_cache(maxsize=8)
def _imports_numpy_alone(text: str) -> bool:
    tree = ast.parse(text)
    imported = {alias.name.partition(".")[0] for n in ast.walk(tree) if isinstance(n, ast.Import) for alias in n.names}
    imported |= {str(n.module).partition(".")[0] for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    return "numpy" in imported and "torch" not in imported


@lru_cache(maxsize=8)
def _loaded(text: str, name: str) -> Callable[..., object]:
    # references of FlashInfer-Trace may use torch without importing it
    namespace: dict[str, Any] = {"__name__": f"reference_of_{name}", "torch": torch, "np": np, "numpy": np}
    try:
        exec(compile(text, _FILE, "exec"), namespace)
    except BaseException as error:
        raise UsageError(f"the reference of {name} cannot be loaded: {_said(error)}") from None
    run: Callable[..., object] = namespace["run"]
    return run


def _said(error: BaseException) -> str:
    """Return the error's type and text, with the innermost line of the reference that raised it."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == _FILE]
    where = f"line {lines[-1]}: " if lines else ""
    words = " ".join(str(error).split())[:200]
    return f"{where}{type(error).__name__}{f': {words}' if words else ''}"


def _arguments(definition: Definition, problem: FolderProblem, inputs: Inputs, numpy: bool) -> list[Any]:
    draws = definition.draws_for(problem)
    values = [inputs[item.name] if item.shape is not None else draws[item.name].value for item in definition.inputs]
    return [_array(value) if numpy and isinstance(value, torch.Tensor) else value for value in values]


def _array(tensor: torch.Tensor) -> np.ndarray:
    """Convert a tensor to NumPy; bfloat16 becomes float32, which holds its values exactly."""
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).cpu().numpy()


def _call(definition: Definition, problem: FolderProblem, inputs: Inputs) -> dict[str, torch.Tensor]:
    run, numpy = _loaded(definition.reference, definition.name), uses_numpy(definition)
    try:
        with torch.no_grad():
            returned = run(*_arguments(definition, problem, inputs, numpy))
    except BaseException as error:
        raise UsageError(f"the reference of {definition.name} raises for {problem}: {_said(error)}") from None
    device = next((t.device for t in inputs.values()), torch.device("cpu"))
    return {name: value.to(device) for name, value in _named(definition, returned).items()}


def _named(definition: Definition, returned: object) -> dict[str, torch.Tensor]:
    """Return what `run` returned by output name: from one value, a sequence in their order, or a mapping."""
    names, of = [item.name for item in definition.outputs], f"the reference of {definition.name}"
    if isinstance(returned, Mapping):
        if set(returned) != set(names):
            raise UsageError(f"{of} returns {', '.join(map(str, returned))}; problem.json states {', '.join(names)}")
        values: Sequence[object] = [returned[name] for name in names]
    else:
        values = returned if isinstance(returned, tuple | list) else [returned]
    if len(values) != len(names):
        raise UsageError(f"{of} returns {len(values)} outputs; problem.json states {len(names)}: {', '.join(names)}")
    return {name: _tensor(value, f"{of} returns as {name}") for name, value in zip(names, values, strict=True)}


def _tensor(value: object, where: str) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, np.ndarray | np.generic | int | float):
        return torch.from_numpy(np.ascontiguousarray(value))
    raise UsageError(f"{where} a {type(value).__name__}; it must be a torch tensor or a NumPy array")


def _checked(definition: Definition, item: Item, output: torch.Tensor, problem: FolderProblem) -> torch.Tensor:
    shape = shape_of(item, problem)
    of = f"the reference of {definition.name} returns {item.name}"
    if tuple(output.shape) != shape and not (shape == () and output.numel() == 1):
        raise UsageError(f"{of} with the shape {tuple(output.shape)} for {problem}; problem.json states {shape}")
    stated = TORCH_DTYPES[item.dtype]
    rounds_itself = uses_numpy(definition) and stated == torch.bfloat16 and output.is_floating_point()
    if output.dtype != stated and not rounds_itself:
        raise UsageError(f"{of} as {_dtype_name(output.dtype)}; problem.json states {_dtype_name(stated)}")
    return output.to(stated).reshape(shape)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class _Widening(TorchFunctionMode):
    """Replaces every floating-point dtype passed to torch by float64, so that a reference's casts stay exact."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in _TO_HALF and args and isinstance(args[0], torch.Tensor):
            return args[0].double()
        kwargs = {name: _wide(value) for name, value in (kwargs or {}).items()}
        return func(*map(_wide, args), **kwargs)


def _wide(value: Any) -> Any:
    return torch.float64 if isinstance(value, torch.dtype) and value.is_floating_point else value


@contextmanager
def all_in_float64() -> Iterator[None]:
    """Compute in float64 what is within: every floating-point dtype that is passed to torch means float64."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Widening():
            yield
    finally:
        torch.set_default_dtype(before)
