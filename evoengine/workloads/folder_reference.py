"""Run the reference of a folder's workload: the user's Python, with torch or NumPy, unchanged or in other arithmetic.

It runs only in worker processes. Its errors become a UsageError that names the line.
"""

from __future__ import annotations

import ast
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from evoengine.devices.base import DTYPE_BYTES, Argument, ConstantArgument, ScalarArgument, TensorArgument
from evoengine.errors import UsageError
from evoengine.workloads.base import Inputs, Outputs
from evoengine.workloads.cuda_reference import CudaReference, run_reference
from evoengine.workloads.folder_definition import SCALARS, Definition, FolderProblem, Item, shape_of, written_ranges
from evoengine.workloads.tensors import TORCH_DTYPES

_FILE = "<reference>"
_TO_FLOAT = ("float", "half", "bfloat16")
_TO_INTEGER = ("int", "short", "char", "byte")
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32)
_FACTORS = ("mul", "div", "true_divide")
ROUGH = 8
"""number of computations with changed roundings: all of them miss a decision that is equally likely either way once in
128 cases"""


class NotDouble(Exception):
    """The reference cannot compute in float64; the message states why."""


def run_as_is(definition: Definition, problem: FolderProblem, inputs: Inputs) -> Outputs:
    """Return the outputs in the dtypes that problem.json states.

    Raises UsageError if the reference raises, or returns other outputs than stated.
    """
    found = _call(definition, problem, inputs)
    checked = {item.name: _checked(definition, item, found[item.name], problem) for item in definition.outputs}
    return _where_written(definition, problem, checked)


def _where_written(definition: Definition, problem: FolderProblem, outputs: Outputs) -> Outputs:
    """Return outputs with zeros where the kernel does not write."""
    found = dict(outputs)
    for item in definition.outputs:
        if (ranges := written_ranges(item, problem)) is not None:
            found[item.name] = torch.zeros_like(outputs[item.name])
            at = np.ix_(*ranges)
            found[item.name][at] = outputs[item.name][at]
    return found


def run_in_float64(definition: Definition, problem: FolderProblem, inputs: Inputs) -> Outputs:
    """Return the outputs from floating-point inputs converted to float64, ignoring casts to narrower types.

    Raises NotDouble if the reference does not run in this way.
    """
    if definition.kernel_reference is not None:
        raise NotDouble("it is a CUDA kernel")
    raised = {name: t.double() if t.is_floating_point() else t for name, t in inputs.items()}
    try:
        with all_in_float64():
            found = _call(definition, problem, raised)
    except UsageError as error:
        raise NotDouble(str(error)) from None
    floating = {item.name for item in definition.outputs if TORCH_DTYPES[item.dtype].is_floating_point}
    sizes = {item.name: prod(shape_of(item, problem)) for item in definition.outputs}
    for name, output in found.items():
        if output.numel() != sizes[name]:
            raise NotDouble(f"its output {name} has {output.numel()} elements where its inputs are float64")
        if name in floating and output.dtype != torch.float64:
            raise NotDouble(f"its output {name} is {_dtype_name(output.dtype)} where its inputs are float64")
    return _where_written(definition, problem, found)


def off_by_roundings(definition: Definition, problem: FolderProblem, inputs: Inputs) -> Outputs | None:
    """Return for each output element the value farthest from the exact one among several roundings in float32.

    None if the reference does not run in float64.
    """
    try:
        exact = run_in_float64(definition, problem, inputs)
        furthest = dict(exact)
        for seed in range(ROUGH):
            with _Roughening(seed):
                found = run_in_float64(definition, problem, inputs)
            for name, output in found.items():
                away, most = ((one.double() - exact[name].double()).abs() for one in (output, furthest[name]))
                furthest[name] = torch.where(away > most, output, furthest[name])
    except NotDouble:
        return None
    return furthest


def same_in_int64(definition: Definition, problem: FolderProblem, inputs: Inputs, outputs: Outputs) -> bool:
    """Return whether 64-bit integers give the same outputs; False if some inputs have them anyway."""
    integers = {name for name, t in inputs.items() if not t.is_floating_point() and t.dtype != torch.bool}
    if not runs_torch(definition) or any(inputs[name].dtype == torch.int64 for name in integers):
        return False
    longer = {name: tensor.long() if name in integers else tensor for name, tensor in inputs.items()}
    try:
        with _Converting(torch.int64, _TO_INTEGER, _INTEGERS.__contains__):
            found = _call(definition, problem, longer)
    except UsageError:
        return False
    flat = {name: output.reshape(-1) for name, output in found.items()}
    return all(
        flat[name].dtype == torch.promote_types(flat[name].dtype, output.dtype)
        and torch.equal(flat[name], output.reshape(-1).to(flat[name].dtype))
        for name, output in outputs.items()
    )


def runs_torch(definition: Definition) -> bool:
    """Return whether the reference computes with torch, that is, it is neither a kernel nor NumPy code."""
    return definition.kernel_reference is None and not uses_numpy(definition)


def uses_numpy(definition: Definition) -> bool:
    """Return whether the reference imports NumPy and not torch, so that it takes arrays. Runs nothing."""
    if definition.kernel_reference is not None:
        return False
    return _imports_numpy_alone(definition.reference)


def reference_call(definition: Definition, problem: FolderProblem, inputs: Inputs) -> Callable[[], object]:
    """Return a call of `run` with its arguments prepared, to be timed as a baseline."""
    run = loaded(definition.reference, definition.name)["run"]
    arguments = _arguments(definition, problem, inputs, numpy=uses_numpy(definition))
    return lambda: run(*arguments)


@lru_cache(maxsize=8)
def _imports_numpy_alone(text: str) -> bool:
    tree = ast.parse(text)
    imported = {alias.name.partition(".")[0] for n in ast.walk(tree) if isinstance(n, ast.Import) for alias in n.names}
    imported |= {str(n.module).partition(".")[0] for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    return "numpy" in imported and "torch" not in imported


@lru_cache(maxsize=8)
def loaded(text: str, name: str) -> dict[str, Any]:
    """Return the names that a text defines."""
    # references of FlashInfer-Trace may use torch without importing it
    namespace: dict[str, Any] = {"__name__": f"reference_of_{name}", "torch": torch, "np": np, "numpy": np}
    try:
        exec(compile(text, _FILE, "exec"), namespace)
    except BaseException as error:
        raise UsageError(f"the reference of {name} cannot be loaded: {said(error)}") from None
    return namespace


def said(error: BaseException) -> str:
    """Return the error's type and text, with the innermost line of the reference that raised it."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == _FILE]
    where = f"line {lines[-1]}: " if lines else ""
    words = " ".join(str(error).split())[:200]
    return f"{where}{type(error).__name__}{f': {words}' if words else ''}"


def _arguments(definition: Definition, problem: FolderProblem, inputs: Inputs, numpy: bool) -> list[Any]:
    draws = definition.draws_for(problem)
    values: list[Any] = [
        draws[item.name].value if item.shape is None
        else inputs[item.name].clone() if item.name in definition.inout
        else inputs[item.name]
        for item in definition.inputs
    ]  # fmt: skip # one case a line
    return [_array(value) if numpy and isinstance(value, torch.Tensor) else value for value in values]


def _array(tensor: torch.Tensor) -> np.ndarray:
    """Convert a tensor to NumPy; bfloat16 becomes float32, which represents its values exactly."""
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).cpu().numpy()


def _run_kernel(
    definition: Definition, reference: CudaReference, problem: FolderProblem, inputs: Inputs
) -> dict[str, torch.Tensor]:
    """Return the outputs of a reference that is a kernel."""
    draws, written = definition.draws_for(problem), {item.name: item for item in definition.outputs}
    every: dict[str, Argument] = {axis: definition.size_argument(axis, size) for axis, size in problem.sizes}
    for item in definition.inputs:
        if item.shape is None:
            every[item.name] = ScalarArgument(item.name, SCALARS[item.dtype](draws[item.name].value))
        else:
            bits = _as_bits(inputs[item.name], item)
            every[item.name] = TensorArgument(item.name, bits, item.name in written, inout=item.name in written)
    for item in definition.outputs:
        if item.name not in every:
            poison = np.full(prod(shape_of(item, problem)) * DTYPE_BYTES[item.dtype], 0xFF, np.uint8)
            flat = torch.from_numpy(poison).view(TORCH_DTYPES[item.dtype])
            every[item.name] = TensorArgument(item.name, _as_bits(flat.reshape(shape_of(item, problem)), item), True)
    constants = [ConstantArgument(s, as_bytes(inputs[name])) for s, name in definition.constants.items()]
    after = run_reference(reference, problem.axes, every, constants, f"the reference of {definition.name}")
    return {
        name: torch.from_numpy(np.ascontiguousarray(after[name]).reshape(-1).view(np.uint8).copy())
        .view(TORCH_DTYPES[item.dtype])
        .reshape(shape_of(item, problem))
        for name, item in written.items()
    }


def as_bytes(tensor: torch.Tensor) -> np.ndarray:
    """Return a tensor's contents, uint8 [bytes]."""
    found: np.ndarray = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return found


def _as_bits(tensor: torch.Tensor, item: Item) -> np.ndarray:
    """Return a tensor as unsigned integers of its elements' size."""
    return as_bytes(tensor.cpu()).view(f"u{DTYPE_BYTES[item.dtype]}").reshape(tuple(tensor.shape))


def _call(definition: Definition, problem: FolderProblem, inputs: Inputs) -> dict[str, torch.Tensor]:
    if definition.kernel_reference is not None:
        return _run_kernel(definition, definition.kernel_reference, problem, inputs)
    run, numpy = loaded(definition.reference, definition.name)["run"], uses_numpy(definition)
    try:
        with torch.no_grad():
            returned = run(*_arguments(definition, problem, inputs, numpy))
    except BaseException as error:
        raise UsageError(f"the reference of {definition.name} raises for {problem}: {said(error)}") from None
    device = next((t.device for t in inputs.values()), torch.device("cpu"))
    return {name: value.to(device) for name, value in _named(definition, returned).items()}


def _named(definition: Definition, returned: object) -> dict[str, torch.Tensor]:
    """Return the result of `run` by output name: from one value, a sequence in order, or a mapping."""
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


# Other arithmetic: everything in float64, all integers in 64 bits, or results with changed roundings.


class _Converting(TorchFunctionMode):
    """Replace dtypes passed to torch, and casts by methods of a tensor, by one wider dtype."""

    def __init__(self, wide: torch.dtype, casts: Sequence[str], replaces: Callable[[torch.dtype], bool]) -> None:
        super().__init__()
        self._wide, self._casts, self._replaces = wide, casts, replaces

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in self._casts and args and isinstance(args[0], torch.Tensor):
            return args[0].to(self._wide)
        kwargs = {name: self._replaced(value) for name, value in (kwargs or {}).items()}
        return func(*map(self._replaced, args), **kwargs)

    def _replaced(self, value: Any) -> Any:
        return self._wide if isinstance(value, torch.dtype) and self._replaces(value) else value


@contextmanager
def all_in_float64() -> Iterator[None]:
    """Compute the block in float64: every floating-point dtype that is passed to torch means float64."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Converting(torch.float64, _TO_FLOAT, lambda dtype: dtype.is_floating_point):
            yield
    finally:
        torch.set_default_dtype(before)


class _Roughening(TorchDispatchMode):
    """Move results by a float32 spacing up or down: those that float32 does not represent, products and quotients.

    Powers of two are exact factors. Views and in-place results are not changed.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if not isinstance(found, torch.Tensor) or found.dtype != torch.float64 or found.device.type != "cpu":
            return found
        if func.is_view or any(found is given for given in args):
            return found
        name = func.overloadpacket.__name__
        scales = name in _FACTORS and not any(_is_power(factor) for factor in args[:2])
        moved = found.clone() if scales else found.float().double() != found
        if not scales and not bool(moved.any()):
            return found
        signs = torch.randint(0, 2, found.shape, generator=self._generator) * 2 - 1
        off = found * (1 + signs * torch.finfo(torch.float32).eps)
        return off if scales else torch.where(moved, off, found)


def _is_power(factor: Any) -> bool:
    """Return whether all elements of a factor are zero or a power of two, up to the sign."""
    values = torch.as_tensor(factor, dtype=torch.float64)
    return bool(((torch.frexp(values).mantissa.abs() == 0.5) | (values == 0)).all())
