"""Read the text of a `problem.json` into a Definition; every error names the key and the remedy.

The format is a superset of FlashInfer-Trace's Definition with its Workloads; docs/own-kernel.md lists the keys.
"""

from __future__ import annotations

import ast
import difflib
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

from evoengine.errors import UsageError
from evoengine.sandbox.untrusted import parse_json
from evoengine.space.expression import Expression
from evoengine.workloads.base import Tolerance
from evoengine.workloads.cuda_reference import CudaReference, read_reference
from evoengine.workloads.folder_arguments import read_maps, read_structs
from evoengine.workloads.folder_definition import (
    LARGEST_AXIS,
    PATTERNS,
    Axis,
    Definition,
    Draw,
    Example,
    Item,
    NamedCase,
    Scratch,
)

DTYPES = {
    "float64": "fp64", "float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "int64": "int64", "int32": "int32",
    "int16": "int16", "int8": "int8", "uint8": "uint8", "bool": "bool",
}  # fmt: skip # a table
"""dtype in problem.json → its name in `devices.base.DTYPE_BYTES`; those names are accepted too"""
_INTEGERS = {f"int{bits}": (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) for bits in (8, 16, 32, 64)} | {
    "uint8": (0, 255),
    "bool": (0, 1),
}
"""dtype → its minimum and maximum"""
_LARGEST_FLOATS = {"fp16": 65504.0, "bf16": 3.38e38, "fp32": 3.4e38}
SCALAR_DTYPES = ("fp32", "fp64", "int32", "int64")
IN_FLOAT32_ROUNDINGS = 64.0
"""spacings allowed of an output in float32 or float64: sequential sums of thousands of terms are off by some tens of
spacings of the largest output, and a library's blocked sums by fewer"""

_KEYS = (
    "name", "op_type", "description", "tags", "axes", "constraints", "inputs", "inout", "outputs", "scratch",
    "tensor_maps", "structs", "reference", "makers", "workloads", "entry", "parameters", "kernels", "constants",
    "compile_time", "tolerance", "cases", "flops", "bytes", "space",
)  # fmt: skip # a table
_DRAWS = {
    "random": (), "scalar": ("value",), "constant": ("value",), "zeros": (), "ones": (), "arange": (),
    "uniform": ("low", "high"), "integers": ("low", "high"), "indptr": ("total",), "permutation": (), "made": ("by",),
}  # fmt: skip # a table
_MORE = {"indptr": ("least", "over"), "permutation": ("high",)}
"""draw → its further fields"""
_NAME = re.compile(r"[A-Za-z_]\w{0,62}\Z", re.ASCII)


def parse_definition(text: str, where: str) -> Definition:
    """Parse a problem.json that contains its reference.

    Raises UsageError naming the key that is wrong and what would be right.
    """
    try:
        data = parse_json(text, parse_constant=_no_constant)
    except ValueError as error:
        raise UsageError(f"{where} is not valid JSON: {error}") from None
    if not isinstance(data, dict):
        raise UsageError(f"{where} must hold a JSON object, not a {type(data).__name__}")
    return _Reader(where, data).read()


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def require_name(name: object, where: str, what: str) -> str:
    """Return the name. Raises UsageError unless it is valid in C++, in a path and in an expression."""
    if not isinstance(name, str) or not _NAME.match(name):
        raise UsageError(f"{where}: {name!r} cannot name {what}; use letters, digits and _, at most 63, no digit first")
    return name


class _Reader:
    def __init__(self, where: str, data: dict[str, Any]) -> None:
        self.where, self.data = where, data

    def read(self) -> Definition:
        for key in self.data:
            if key not in (*_KEYS, "cooperative"):
                near = difflib.get_close_matches(key, _KEYS, n=1)
                self._fail(
                    f"unknown key {key!r}{f'; did you mean {near[0]}?' if near else ''}; known are {', '.join(_KEYS)}"
                )
        if "cooperative" in self.data:
            self._fail(
                "cooperative launches are not made: a kernel whose blocks wait for one another by grid synchronisation "
                "must be split into several kernels, which `kernels` runs one behind the other"
            )
        needed = ["name", "axes", "inputs", "reference", *([] if self.data.get("inout") else ["outputs"])]
        for key in needed:
            if key not in self.data:
                self._fail(f"it has no {key}; it needs name, axes, inputs, outputs, reference and workloads")
        name = require_name(self.data["name"], self.where, "a kernel")
        self.axes = self._axes()
        self.names = {axis.name for axis in self.axes}
        inputs, outputs = self._items("inputs"), self._items("outputs")
        self._require_distinct(inputs, outputs)
        self.inputs = {item.name: item for item in inputs}
        outputs = (*outputs, *self._inout())
        tensors = [item.name for item in (*inputs, *outputs)]
        scratch = self._scratch(set(tensors))
        memory = [i.name for i in (*inputs, *outputs) if i.shape is not None] + [s.name for s in scratch]
        taken = {*tensors, *self.names, *(s.name for s in scratch)}
        self.maps = read_maps(self._own_names("tensor_maps", taken), dict.fromkeys(memory), self.where, self._fail)
        taken |= {m.name for m in self.maps}
        held = dict.fromkeys([*tensors, *(s.name for s in scratch), *self.names, *(m.name for m in self.maps)])
        self.structs = read_structs(self._own_names("structs", taken), held, self.where, self._fail)
        self.makers = self._makers()
        compile_time = self._compile_time()
        constants = self._constants()
        parameters, then = self._parameters([*inputs, *outputs, *scratch], compile_time, constants)
        return Definition(
            name=name,
            axes=self.axes,
            inputs=inputs,
            outputs=outputs,
            reference="" if isinstance(self.data["reference"], dict) else self._reference(),
            kernel_reference=self._kernel_reference(parameters),
            examples=self._examples(),
            constraints=tuple(self._expression(c, "constraints") for c in self._list("constraints")),
            entry=require_name(self.data.get("entry", name), f"{self.where}: entry", "a kernel's entry"),
            parameters=parameters,
            then=then,
            scratch=scratch,
            maps=self.maps,
            structs=self.structs,
            makers=self.makers,
            constants=constants,
            compile_time=compile_time,
            tolerance=self._tolerance(),
            cases=self._cases(),
            flops=self._expression(self.data["flops"], "flops") if "flops" in self.data else None,
            bytes=self._expression(self.data["bytes"], "bytes") if "bytes" in self.data else None,
            description=str(self.data.get("description", "")),
            space=str(self.data.get("space", "")),
        )

    def _fail(self, what: str) -> NoReturn:
        raise UsageError(f"{self.where}: {what}")

    def _object(self, owner: Mapping[str, Any], key: str, at: str) -> dict[str, Any]:
        value = owner.get(key) or {}
        if not isinstance(value, dict):
            self._fail(f"{at} must be an object, not {json.dumps(value)[:60]}")
        return value

    def _list(self, key: str) -> list[Any]:
        value = self.data.get(key) or []
        if not isinstance(value, list):
            self._fail(f"{key} must be a list, not {json.dumps(value)[:60]}")
        return value

    def _known_keys(self, entry: Mapping[str, Any], known: Iterable[str], at: str) -> None:
        for key in entry:
            if key not in known:
                self._fail(f"{at} has the unknown key {key!r}; known are {', '.join(known)}")

    def _expression(self, value: Any, at: str) -> Expression:
        """Parse an expression of axes."""
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            self._fail(f"{at} must be a number or an expression of axes in quotes, not {json.dumps(value)[:60]}")
        expression = Expression.parse(value if isinstance(value, str) else repr(value), f"{self.where}: {at}")
        for name in sorted(expression.names - self.names):
            self._fail(f"{at} names {name}, which is not an axis; axes are {', '.join(sorted(self.names)) or 'none'}")
        return expression

    def _axes(self) -> tuple[Axis, ...]:
        entries = self._object(self.data, "axes", "axes")
        for name in entries:
            require_name(name, f"{self.where}: axes", "an axis")
        self.names = set(entries)
        axes = tuple(self._axis(name, entry) for name, entry in entries.items())
        self._refuse_circles(axes)
        return axes

    def _axis(self, name: str, entry: Any) -> Axis:
        axis = self._size_of(name, entry)
        dtype = entry.get("dtype", "int32")
        if dtype not in ("int32", "int64"):
            self._fail(f"axis {name} has the dtype {dtype!r}; the kernel takes it as int32, or as int64")
        return replace(axis, dtype=dtype)

    def _size_of(self, name: str, entry: Any) -> Axis:
        kind = entry.get("type") if isinstance(entry, dict) else None
        match kind:
            case "var":
                return Axis(name)
            case "const":
                value = entry.get("value")
                if type(value) is not int or not 1 <= value <= LARGEST_AXIS:
                    self._fail(
                        f"axis {name} has the value {value!r}; a constant axis has an integer from 1 to {LARGEST_AXIS}"
                    )
                return Axis(name, value=value)
            case "expr":
                return Axis(
                    name, expression=self._expression(entry.get("expression", entry.get("value")), f"axis {name}")
                )
        self._fail(f'axis {name} must be {{"type": "var"}}, "const" with a value or "expr" with an expression')

    def _refuse_circles(self, axes: tuple[Axis, ...]) -> None:
        known = {axis.name for axis in axes if not axis.expression}
        left = {axis.name: axis.expression for axis in axes if axis.expression}
        while left:
            ready = {name for name, rule in left.items() if rule.names <= known}
            if not ready:
                self._fail(f"the axes {', '.join(left)} are defined in terms of each other; make one of them var")
            known |= ready
            left = {name: rule for name, rule in left.items() if name not in ready}

    def _items(self, key: str) -> tuple[Item, ...]:
        entries = self._object(self.data, key, key)
        if not entries and not (key == "outputs" and self.data.get("inout")):
            self._fail(f"{key} is empty; a kernel has at least one")
        return tuple(self._item(key, name, entry) for name, entry in entries.items())

    def _item(self, key: str, name: str, entry: Any) -> Item:
        at = f"{key}.{name}"
        require_name(name, f"{self.where}: {key}", "a tensor")
        if name in self.names:
            self._fail(f"{at} has the name of an axis; rename one of the two")
        if not isinstance(entry, dict) or "shape" not in entry or "dtype" not in entry:
            self._fail(f'{at} needs a shape and a dtype, as in {{"shape": ["N"], "dtype": "float32"}}')
        self._known_keys(entry, ("shape", "dtype", "description", *(("writes",) if key == "outputs" else ())), at)
        dtype, shape = self._dtype(entry["dtype"], at), entry["shape"]
        if shape is None:
            if key == "outputs":
                self._fail(
                    f"{at} has no shape; a kernel writes tensors only: give it the shape [] for a single element"
                )
            if dtype not in SCALAR_DTYPES:
                self._fail(f"{at} is passed by value as {entry['dtype']}; by value go {', '.join(SCALAR_DTYPES)}")
            return Item(name, None, dtype)
        if not isinstance(shape, list):
            self._fail(f"{at} has the shape {json.dumps(shape)[:60]}; a shape is a list of axes, or null for a value")
        sizes = tuple(self._expression(size, f"the shape of {at}") for size in shape)
        return Item(name, sizes, dtype, self._writes(entry["writes"], len(shape), at) if "writes" in entry else None)

    def _writes(self, given: Any, dimensions: int, at: str) -> tuple[tuple[Expression, Expression], ...]:
        parts = [part.split(":") if isinstance(part, str) else [] for part in given] if isinstance(given, list) else []
        if len(parts) != dimensions or any(len(part) != 2 for part in parts):
            self._fail(
                f"{at}.writes is {json.dumps(given)[:60]}; it names the indices that the kernel writes along each of "
                f'{dimensions} dimensions, as in ["1:h - 1", "0:w"]'
            )
        return tuple((self._expression(a, f"{at}.writes"), self._expression(b, f"{at}.writes")) for a, b in parts)

    def _inout(self) -> tuple[Item, ...]:
        """Return the inputs that the kernel overwrites."""
        listed = self._list("inout")
        for name in listed:
            if not isinstance(name, str) or name not in self.inputs or self.inputs[name].shape is None:
                tensors = ", ".join(item.name for item in self.inputs.values() if item.shape is not None)
                self._fail(f"inout names {name!r}, which is not an input tensor: {tensors}")
        return tuple(self.inputs[name] for name in dict.fromkeys(listed))

    def _own_names(self, key: str, taken: set[str]) -> dict[str, Any]:
        entries = self._object(self.data, key, key)
        for name in entries:
            require_name(name, f"{self.where}: {key}", "a parameter")
            if name in taken:
                self._fail(f"{key}.{name} has the name of another parameter or an axis; rename one of the two")
        return entries

    def _makers(self) -> str:
        """Return the Python text of the functions that make inputs, after checking only its syntax."""
        text = self.data.get("makers", "")
        if not isinstance(text, str):
            self._fail("makers must be the name of a .py file beside this one, with a function for each input it makes")
        self.functions = self._functions(text, "the text of makers")
        return text

    def _functions(self, text: str, what: str) -> list[str]:
        """Return the names of the functions that a Python text defines."""
        try:
            tree = ast.parse(text)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            line = f", line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
            self._fail(f"{what} is not valid Python{line}: {getattr(error, 'msg', error)}")
        return [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]

    def _dtype(self, dtype: Any, at: str) -> str:
        if dtype in list(DTYPES.values()):
            return str(dtype)
        if not isinstance(dtype, str) or dtype not in DTYPES:
            self._fail(f"{at} has the dtype {dtype!r}, which the emulator does not have; it has {', '.join(DTYPES)}")
        return DTYPES[dtype]

    def _require_distinct(self, inputs: tuple[Item, ...], outputs: tuple[Item, ...]) -> None:
        for name in sorted({item.name for item in inputs} & {item.name for item in outputs}):
            self._fail(
                f"{name} is both an input and an output; a tensor that the kernel overwrites is named among the "
                f'inputs, and in "inout": ["{name}"]'
            )

    def _scratch(self, taken: set[str]) -> tuple[Scratch, ...]:
        return tuple(
            self._one_scratch(name, entry, taken)
            for name, entry in self._object(self.data, "scratch", "scratch").items()
        )

    def _one_scratch(self, name: str, entry: Any, taken: set[str]) -> Scratch:
        at = f"scratch.{name}"
        require_name(name, f"{self.where}: scratch", "scratch memory")
        if name in taken | self.names:
            self._fail(f"{at} has the name of a tensor or an axis; rename one of the two")
        if not isinstance(entry, dict) or not isinstance(entry.get("shape"), list) or "dtype" not in entry:
            self._fail(f'{at} needs a shape and a dtype, as in {{"shape": ["tiles"], "dtype": "float32"}}')
        self._known_keys(entry, ("shape", "dtype", "zeroed", "description"), at)
        if not isinstance(entry.get("zeroed", False), bool):
            self._fail(f"{at}.zeroed is {entry['zeroed']!r}; it is true where memory is zero before the first launch")
        shape = tuple(Expression.parse(str(size), f"{self.where}: the shape of {at}") for size in entry["shape"])
        return Scratch(name, shape, self._dtype(entry["dtype"], at), entry.get("zeroed", False))

    def _compile_time(self) -> tuple[str, ...]:
        """Return the axes that a template may use as constants: constant and listed ones, and those that follow."""
        listed = self._list("compile_time")
        for name in listed:
            if not isinstance(name, str) or name not in self.names:
                self._fail(
                    f"compile_time names {name!r}, which is not an axis; axes are {', '.join(sorted(self.names))}"
                )
        baked = {axis.name for axis in self.axes if axis.value is not None} | set(listed)
        while more := {a.name for a in self.axes if a.expression and a.expression.names <= baked} - baked:
            baked |= more
        return tuple(axis.name for axis in self.axes if axis.name in baked)

    def _constants(self) -> dict[str, str]:
        constants = self._object(self.data, "constants", "constants")
        for symbol, name in constants.items():
            require_name(symbol, f"{self.where}: constants", "a __constant__ variable")
            if not isinstance(name, str) or name not in self.inputs or self.inputs[name].shape is None:
                tensors = ", ".join(item.name for item in self.inputs.values() if item.shape is not None)
                self._fail(
                    f"constants gives {symbol} the contents of {name!r}, which is not an input tensor: {tensors}"
                )
            if symbol in self.inputs and symbol != name:
                self._fail(
                    f"constants: {symbol} is an input, and would hold the contents of {name}; rename one of the two"
                )
        return constants

    def _parameters(
        self, memory: Sequence[Item | Scratch], compile_time: tuple[str, ...], constants: Mapping[str, str]
    ) -> tuple[tuple[str, ...], dict[str, tuple[str, ...]]]:
        """Return the first kernel's parameters and those of the kernels after it, by entry."""
        items = list(dict.fromkeys(item.name for item in memory))
        extra = [*(m.name for m in self.maps), *(s.name for s in self.structs)]
        free = [axis.name for axis in self.axes if axis.is_var and axis.name not in compile_time]
        default = [*(n for n in items if n not in constants.values()), *free]
        if extra and "parameters" not in self.data:
            self._fail(f"it has {', '.join(extra)} and no parameters; list the kernel's parameters in their order")
        items += extra
        first = self._parameter_list(self.data.get("parameters", default), "parameters", items, constants)
        then = {
            require_name(entry, f"{self.where}: kernels", "a kernel"): self._parameter_list(
                order, f"kernels.{entry}", items, constants
            )
            for entry, order in self._object(self.data, "kernels", "kernels").items()
        }
        taken = {*first, *(name for order in then.values() for name in order), *constants.values()}
        taken |= {name for s in self.structs if s.name in taken for name in s.names}
        taken |= {m.tensor for m in self.maps if m.name in taken}
        for item in memory:
            if item.shape is not None and item.name not in taken:
                what = "scratch memory" if isinstance(item, Scratch) else "tensor"
                self._fail(f"parameters leaves out the {what} {item.name}; a kernel gets every tensor and all scratch")
        for name in extra:
            if name not in taken:
                self._fail(f"parameters leaves out {name}; a kernel gets every tensor map and every struct")
        return first, then

    def _parameter_list(
        self, order: Any, at: str, items: Sequence[str], constants: Mapping[str, str]
    ) -> tuple[str, ...]:
        if not isinstance(order, list) or not all(isinstance(name, str) for name in order):
            self._fail(f"{at} must be a list of names, in the order of the kernel's parameters")
        for name in order:
            if name not in items and name not in self.names:
                self._fail(f"{at} names {name!r}, which is not an input, output, scratch memory or axis")
            if name in constants:
                self._fail(f"{at} names {name}, which is in constants; the kernel gets it in one way")
        if len(set(order)) < len(order):
            self._fail(f"{at} names one twice; name every parameter once")
        return tuple(order)

    def _kernel_reference(self, parameters: tuple[str, ...]) -> CudaReference | None:
        given = self.data["reference"]
        if not isinstance(given, dict):
            return None
        own = given.get("parameters", parameters)
        for name in own if isinstance(own, list | tuple) else ():
            if name in {
                *(self.data.get("scratch") or ()),
                *(m.name for m in self.maps),
                *(s.name for s in self.structs),
            }:
                self._fail(
                    f"the reference's kernel takes {name}; it can take inputs, outputs and axes alone, which "
                    "reference.parameters names"
                )
        return read_reference(given, parameters, self._expression, self._fail)

    def _reference(self) -> str:
        text = self.data["reference"]
        if not isinstance(text, str) or not text.strip():
            self._fail(
                "reference must be Python text with a function run(*inputs), the name of a .py file beside this "
                "one, or an object with the file of a CUDA kernel"
            )
        if "run" not in self._functions(text, "the reference"):
            self._fail("the reference has no function run; define run(*inputs) that returns the outputs in order")
        return text

    def _examples(self) -> tuple[Example, ...]:
        entries = self._list("workloads")
        var = [axis.name for axis in self.axes if axis.is_var]
        if not entries:
            if var:
                self._fail(f"it has no workloads; give at least one with values for the axes {', '.join(var)}")
            entries = [{}]
        return tuple(self._example(entry, i, var) for i, entry in enumerate(entries))

    def _example(self, entry: Any, number: int, var: list[str]) -> Example:
        at = f"workloads[{number}]"
        if not isinstance(entry, dict):
            self._fail(f"{at} must be an object with axes and inputs")
        self._known_keys(entry, ("axes", "inputs", "uuid", "description"), at)
        axes = self._given_axes(entry, at)
        if missing := [name for name in var if name not in axes]:
            self._fail(f"{at} gives no value for {', '.join(missing)}")
        draws = self._draws(self._object(entry, "inputs", f"{at}.inputs"), f"{at}.inputs")
        for item in self.inputs.values():
            if item.shape is None and draws.get(item.name, Draw()).kind != "scalar":
                self._fail(f'{at}.inputs gives no value for {item.name}; write {{"type": "scalar", "value": …}}')
        return Example(axes, draws)

    def _given_axes(self, entry: Mapping[str, Any], at: str) -> dict[str, int]:
        axes = self._object(entry, "axes", f"{at}.axes")
        fixed = {axis.name: axis.value for axis in self.axes if axis.value is not None}
        for name, value in axes.items():
            if name not in self.names:
                self._fail(f"{at} gives {name}, which is not an axis; axes are {', '.join(sorted(self.names))}")
            if type(value) is not int or not 1 <= value <= LARGEST_AXIS:
                self._fail(f"{at} gives {name} the value {value!r}; an axis is an integer from 1 to {LARGEST_AXIS}")
            if fixed.get(name, value) != value:
                self._fail(f"{at} gives {name} the value {value}, and the axis is constant at {fixed[name]}")
        return {axis.name: axes[axis.name] for axis in self.axes if axis.is_var and axis.name in axes}

    def _draws(self, entries: Mapping[str, Any], at: str) -> dict[str, Draw]:
        for name in entries:
            if name not in self.inputs:
                self._fail(f"{at} names {name}, which is not an input; inputs are {', '.join(self.inputs)}")
        return {name: self._draw(self.inputs[name], entry, f"{at}.{name}") for name, entry in entries.items()}

    def _draw(self, item: Item, entry: Any, at: str) -> Draw:
        kind = entry.get("type") if isinstance(entry, dict) else None
        if not isinstance(kind, str) or kind not in _DRAWS:
            self._fail(f"{at} has the type {kind!r}; known are {', '.join(_DRAWS)}")
        self._known_keys(entry, ("type", *_DRAWS[kind], *_MORE.get(kind, ())), at)
        if missing := [key for key in _DRAWS[kind] if key not in entry]:
            self._fail(f"{at} is {kind} and gives no {missing[0]}")
        if (kind == "scalar") != (item.shape is None):
            takes = (
                "is passed by value and needs the type scalar" if item.shape is None else "is a tensor, not a scalar"
            )
            self._fail(f"{at}: {item.name} {takes}")
        value = entry.get("value")
        if "value" in entry and not _fits(value, item.dtype):
            self._fail(f"{at} has the value {value!r}, which is not {item.dtype}")
        if kind in ("indptr", "permutation") and item.dtype not in ("int32", "int64"):
            self._fail(f"{at} is {kind}, and {item.name} is {item.dtype}; indices are int32 or int64")
        if kind == "indptr" and len(item.shape or ()) != 1:
            self._fail(f"{at} is indptr, and {item.name} has {len(item.shape or ())} dimensions; it has one")
        maker = entry.get("by")
        if kind == "made" and maker not in self.functions:
            known = ", ".join(self.functions) or 'none: name a .py file beside in "makers"'
            self._fail(f"{at} is made by {maker!r}, which is not a function of makers; functions there are {known}")
        low, high = (
            next((self._expression(entry[k], f"{at}.{k}") for k in keys if k in entry), None)
            for keys in (("low", "least"), ("high", "total"))
        )
        over = entry.get("over")
        if over is not None:
            before = [*self.inputs][: [*self.inputs].index(item.name)]
            like = self.inputs[over] if over in before else None
            shapes = {tuple(size.text for size in one.shape or ()) for one in (item, like) if one is not None}
            if like is None or len(shapes) > 1 or like.dtype != item.dtype:
                self._fail(f"{at} is over {over!r}, which is not an input before {item.name} of its shape and dtype")
        return Draw(kind, value, low, high, maker, over)

    def _tolerance(self) -> Tolerance:
        entry = self._object(self.data, "tolerance", "tolerance")
        self._known_keys(entry, ("rtol", "atol", "required_matched_ratio", "own", "roundings"), "tolerance")
        for key, value in entry.items():
            if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
                self._fail(f"tolerance.{key} is {value!r}; it must be a number of at least 0")
        matched = entry.get("required_matched_ratio", 1.0)
        if not 0 < matched <= 1:
            self._fail(f"tolerance.required_matched_ratio is {matched}; it is a share above 0 and at most 1")
        return Tolerance(
            own=entry.get("own", 2.0),
            roundings=entry.get("roundings", 1.0),
            wide_roundings=None if "roundings" in entry else IN_FLOAT32_ROUNDINGS,
            rtol=entry.get("rtol"),
            atol=entry.get("atol"),
            matched=matched,
        )

    def _cases(self) -> tuple[NamedCase, ...]:
        return tuple(self._case(entry, i) for i, entry in enumerate(self._list("cases")))

    def _case(self, entry: Any, number: int) -> NamedCase:
        at = f"cases[{number}]"
        if not isinstance(entry, dict) or not isinstance(entry.get("name"), str) or not entry["name"].strip():
            self._fail(f"{at} must be an object with a name")
        self._known_keys(entry, ("name", "axes", "draw"), at)
        axes, draw = self._given_axes(entry, at), entry.get("draw", "normal")
        if isinstance(draw, dict):
            return NamedCase(entry["name"], axes, draws=self._draws(draw, f"{at}.draw"))
        if draw not in PATTERNS:
            self._fail(
                f"{at} has the draw {draw!r}; it is one of {', '.join(PATTERNS)}, or an object of inputs and types"
            )
        return NamedCase(entry["name"], axes, draw)


def _fits(value: object, dtype: str) -> bool:
    """Return whether a JSON number is representable in that dtype."""
    if not isinstance(value, int | float) or (isinstance(value, float) and not math.isfinite(value)):
        return False
    if dtype not in _INTEGERS:
        return abs(value) <= _LARGEST_FLOATS.get(dtype, 1.7e308)
    lowest, highest = _INTEGERS[dtype]
    return value == int(value) and lowest <= value <= highest
