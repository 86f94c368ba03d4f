"""Contents of a `problem.json`: axes, inputs, outputs, the reference's text, tolerance, cases; without sizes."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np

from evoengine.devices.base import ScalarArgument, ScratchParameter
from evoengine.errors import UsageError
from evoengine.records import Config, Value
from evoengine.sandbox.untrusted import parse_toml
from evoengine.space.expression import Expression, Scope, Undefined
from evoengine.space.symbol import Symbol, integer
from evoengine.workloads.base import Tolerance
from evoengine.workloads.cuda_reference import CudaReference
from evoengine.workloads.folder_arguments import MapRule, StructRule

LARGEST_AXIS = 2**31 - 1
"""so that an axis fits an int32 parameter"""
SCALARS: dict[str, Callable[[Any], Any]] = {
    "fp32": np.float32, "fp64": np.float64, "int32": np.int32, "int64": np.int64,
}  # fmt: skip # a table
"""dtype of a value that is passed directly → its type"""
PATTERNS = ("normal", "zeros", "one-hot", "large", "negative", "ties", "special", "ends", "wide")
"""draws of a gate case that apply to all floating-point inputs, or to all integers and booleans (`ends`, `wide`)"""
WIDE = {"int64": (64, 40), "int32": (32, 20), "int16": (16, 12), "uint8": (8,)}
"""dtype → bits of `random` integers in the pattern `wide`: all of them, and fewer if outputs leave their range"""
_SPECIAL = re.compile(r"nan_to_num|nan[a-z]+|is(nan|inf|finite|neginf|posinf)")
"""functions by which a reference tells NaN and infinities from numbers; `nan` itself is a value"""
OTHER_SCALAR = 0.75
"""factor of by-value floating-point inputs in the case with other ones: a probability or a scale stays one"""


@dataclass(frozen=True)
class Axis:
    """A size.

    It has a `value` if it is constant, an `expression` if it follows from others, and neither if a problem states it.
    """

    name: str
    value: int | None = None
    expression: Expression | None = None
    dtype: str = "int32"
    """int32 or int64, of the kernel's parameter"""

    @property
    def is_var(self) -> bool:
        return self.value is None and self.expression is None


@dataclass(frozen=True)
class Item:
    """An input or an output. `shape` contains expressions of axes; None for an input passed by value."""

    name: str
    shape: tuple[Expression, ...] | None
    dtype: str
    writes: tuple[tuple[Expression, Expression], ...] | None = None
    """along each dimension, the first index that the kernel writes and the one after the last; None for all"""


@dataclass(frozen=True)
class Scratch:
    """Scratch memory, neither an input nor an output. `shape` contains expressions of axes and knobs."""

    name: str
    shape: tuple[Expression, ...]
    dtype: str
    zeroed: bool
    """whether it is zero before the first launch, or else poisoned (NaN). It keeps its contents between launches"""


@dataclass(frozen=True)
class Draw:
    """The draw of an input: a type and its numbers, which may be expressions of axes.

    For `indptr`, `low` and `high` are the shortest segment and the sum of all; for `permutation`, `high` is above all
    integers. `maker` is the function of the folder that makes the input. Segments of an `indptr` are at least as long
    as those of the input `over`.
    """

    kind: str = "random"
    value: float | int | bool | None = None
    low: Expression | None = None
    high: Expression | None = None
    maker: str | None = None
    over: str | None = None


@dataclass(frozen=True)
class Example:
    """A workload: its sizes, and the draws of inputs that are not `random`."""

    axes: Mapping[str, int]
    draws: Mapping[str, Draw]


@dataclass(frozen=True)
class NamedCase:
    """A gate case that the folder states: a pattern for all floating-point inputs, or draws input by input."""

    name: str
    axes: Mapping[str, int]
    pattern: str = "normal"
    draws: Mapping[str, Draw] = field(default_factory=dict)


@dataclass(frozen=True)
class Definition:
    name: str
    axes: tuple[Axis, ...]
    inputs: tuple[Item, ...]
    outputs: tuple[Item, ...]
    """the outputs of the reference, in order; in-out tensors, which are inputs too, come last"""
    reference: str
    """Python text; empty if a kernel is the reference"""
    kernel_reference: CudaReference | None
    examples: tuple[Example, ...]
    constraints: tuple[Expression, ...]
    entry: str
    parameters: tuple[str, ...]
    """the first kernel's parameters, in order: names of inputs, outputs, scratch memory and axes"""
    then: Mapping[str, tuple[str, ...]]
    """kernels after the first, in stream order, each with its parameters"""
    scratch: tuple[Scratch, ...]
    maps: tuple[MapRule, ...]
    structs: tuple[StructRule, ...]
    makers: str
    """the Python text with the functions that make inputs"""
    constants: Mapping[str, str]
    """`__constant__` variable of the kernel → the input whose contents it has"""
    compile_time: tuple[str, ...]
    tolerance: Tolerance
    cases: tuple[NamedCase, ...]
    flops: Expression | None
    bytes: Expression | None
    description: str
    space: str

    @property
    def all_parameters(self) -> tuple[str, ...]:
        """Return the parameters of all kernels, each once, those of the first kernel first."""
        return tuple(dict.fromkeys(name for own in (self.parameters, *self.then.values()) for name in own))

    @property
    def inout(self) -> frozenset[str]:
        """Return the names of tensors that the kernel reads and overwrites."""
        return frozenset(item.name for item in self.inputs) & {item.name for item in self.outputs}

    @property
    def runs_alone(self) -> bool:
        """Return whether the writes of one block can be judged alone: without scratch and in-out tensors."""
        return not self.scratch and not self.inout and not self.then and self.writes_whole

    @property
    def writes_whole(self) -> bool:
        return all(item.writes is None for item in self.outputs)

    @property
    def var_axes(self) -> tuple[str, ...]:
        return tuple(axis.name for axis in self.axes if axis.is_var)

    def size_argument(self, axis: str, size: int) -> ScalarArgument:
        """Return an axis as an argument of the kernel."""
        (dtype,) = (one.dtype for one in self.axes if one.name == axis)
        return ScalarArgument(axis, integer(size, dtype))

    def sizes(self, given: Mapping[str, int]) -> dict[str, int]:
        """Return the value of every axis, given those of the var axes.

        Raises UsageError if one is not a positive int32.
        """
        known = {a.name: a.value if a.value is not None else given[a.name] for a in self.axes if not a.expression}
        derived = {axis.name: axis.expression for axis in self.axes if axis.expression}
        while derived:
            ready = {name: rule for name, rule in derived.items() if rule.names <= known.keys()}
            known |= {name: whole(rule, known) for name, rule in ready.items()}
            derived = {name: rule for name, rule in derived.items() if name not in ready}
        return {axis.name: known[axis.name] for axis in self.axes}

    def example_of(self, axes: Mapping[str, int]) -> int:
        """Return the number of the workload with these axes, or else of the first."""
        fits = (all(axes.get(name) == value for name, value in example.axes.items()) for example in self.examples)
        return next((number for number, found in enumerate(fits) if found), 0)

    def draws_for(self, problem: FolderProblem) -> Mapping[str, Draw]:
        """Return how inputs are drawn for a problem and for its gate cases, as its workload states."""
        draws = self.examples[problem.example].draws
        if not problem.other_scalars:
            return draws
        return {**draws, **{name: replace(draws[name], value=value) for name, value in self._others(problem)}}

    def passes_fractions(self, problem: FolderProblem) -> bool:
        """Return whether a kernel takes a nonzero floating-point number by value, which a case can change."""
        return any(True for _ in self._others(problem))

    @property
    def tells_special_values(self) -> bool:
        """Return whether the reference calls a function for NaN or infinities, such as `nan_to_num` or `isinf`."""
        return self.kernel_reference is None and _names_special_values(self.reference)

    def _others(self, problem: FolderProblem) -> Iterator[tuple[str, float]]:
        draws = self.examples[problem.example].draws
        held = {part for rule in self.structs for part in rule.names}
        for item in self.inputs:
            is_passed = item.name in self.all_parameters or item.name in held
            if item.shape is None and item.dtype in ("fp32", "fp64") and is_passed and draws[item.name].value:
                yield item.name, float(draws[item.name].value or 0) * OTHER_SCALAR


@lru_cache(maxsize=8)
def _names_special_values(text: str) -> bool:
    names = (str(getattr(node, "attr", getattr(node, "id", ""))) for node in ast.walk(ast.parse(text)))
    return any(_SPECIAL.fullmatch(name) for name in names)


def whole(expression: Expression, sizes: Mapping[str, Any]) -> int:
    """Return an expression's value as a size. Raises UsageError if it is not an integer from 1 to LARGEST_AXIS.

    The value of an expression of Symbols is a Symbol.
    """
    value = expression.evaluate(sizes)
    if isinstance(value, Symbol):
        return value
    if type(value) is not int or not 1 <= value <= LARGEST_AXIS:
        setting = ", ".join(f"{name}={sizes[name]}" for name in sorted(expression.names))
        raise UsageError(
            f"{expression.where}: `{expression.text}` is {value} for {setting or 'every problem'}; "
            f"a size is an integer from 1 to {LARGEST_AXIS}"
        )
    return value


@dataclass(frozen=True, slots=True)
class FolderProblem:
    """A problem. `sizes` has every axis, in the order of problem.json; `given` names those in the problem's text."""

    name: str
    sizes: tuple[tuple[str, int], ...]
    given: tuple[str, ...]
    example: int = 0
    """the number of the workload with the draws of inputs"""
    other_scalars: bool = False
    """whether by-value numbers differ from those of the workload"""

    def __str__(self) -> str:
        return f"{self.name}:" + ",".join(f"{axis}={value}" for axis, value in self.sizes if axis in self.given)

    def variables(self) -> dict[str, Value]:
        return dict(self.sizes)

    @property
    def axes(self) -> dict[str, int]:
        return dict(self.sizes)


def shape_of(item: Item, problem: FolderProblem) -> tuple[int, ...]:
    """Return the shape of an item. Raises UsageError if a size is not a positive integer."""
    axes = problem.axes
    return tuple(whole(size, axes) for size in item.shape or ())


def written_ranges(item: Item, problem: FolderProblem) -> tuple[range, ...] | None:
    """Return the indices along each dimension that the kernel writes; None for all of them.

    Raises UsageError if one is not a range within the output.
    """
    if item.writes is None:
        return None
    axes, found = problem.axes, []
    for (first, last), size in zip(item.writes, shape_of(item, problem), strict=True):
        begin, end = first.evaluate(axes), last.evaluate(axes)
        if isinstance(begin, Symbol) or isinstance(end, Symbol):
            return None  # an exported kernel's loader leaves the whole output to the kernel
        if type(begin) is not int or type(end) is not int or not 0 <= begin < end <= size:
            raise UsageError(
                f"{first.where}: `{first.text}:{last.text}` is {begin}:{end} for {problem}; a part of {size} indices "
                f"begins at 0 or more and ends behind that, at {size} at most"
            )
        found.append(range(begin, end))
    return tuple(found)


def scope_of(definition: Definition, problem: FolderProblem, config: Config) -> Scope:
    """Return axes, knobs and the space's lets as names of expressions."""
    return Scope({**problem.axes, **config}, _read(definition.space).lets, config)


def holds(constraint: Expression, values: Mapping[str, Any]) -> bool:
    """Return whether a constraint holds; True if it needs a name without a value."""
    try:
        return bool(constraint.evaluate(values))
    except Undefined:
        return True


# What the search space of a folder states about sizes: those that a configuration supports, and its tiles.

Rules = Callable[[Mapping[str, int]], bool]
LARGEST_TILE = 1024


@dataclass(frozen=True)
class _Space:
    constraints: tuple[Expression, ...]
    lets: Mapping[str, Expression]
    grids: Mapping[str, tuple[Expression, ...]]
    """family, or "", → the grid's sizes"""
    threads: Mapping[str, tuple[Expression, ...]]
    kernels: tuple[tuple[str, ...], ...]
    """entries of the kernels after the first, of each family that has some"""

    @property
    def grid(self) -> tuple[Expression, ...]:
        return tuple(size for sizes in self.grids.values() for size in sizes)


def size_rules(definition: Definition, config: Config) -> Rules:
    """Return whether a configuration supports sizes, by those constraints in which `%` applies to an axis.

    Other constraints may concern sizes too, but only for speed: the gate's problems are smaller than any worth tuning.
    """
    space = _read(definition.space)
    names = {axis.name for axis in definition.axes}
    asked = [c for c in space.constraints if "%" in _spelled(c, space.lets) and _reads(c, space.lets) & names]

    def allowed(sizes: Mapping[str, int]) -> bool:
        scope = Scope({**sizes, **config}, space.lets, config)
        return all(holds(constraint, scope) for constraint in asked)

    return allowed


def first_config(definition: Definition) -> Config:
    """Return the first start point of the folder's space, or else the first value of every knob; {} if unknown."""
    tables = parse_toml(definition.space) if definition.space else {}
    starts, knobs = tables.get("start") or [{}], tables.get("knobs", {})
    values = {name: given.get("values", [0]) if isinstance(given, dict) else given for name, given in knobs.items()}
    found: dict[str, Value] = {name: listed[0] for name, listed in values.items() if listed}
    found.update(starts[0])
    return found


def require_launches(definition: Definition) -> None:
    """Raise UsageError unless problem.json and the space name the same kernels after the first."""
    if not definition.space:
        return
    orders = _read(definition.space).kernels
    launched = {entry for order in orders for entry in order}
    for entry in definition.then:
        if entry not in launched:
            raise UsageError(
                f"problem.json has the kernel {entry}, and space.toml has no table [kernels.{entry}]; "
                f"add one with threads, grid and shared"
            )
    for entry in sorted(launched - definition.then.keys()):
        raise UsageError(
            f"space.toml launches the kernel {entry}, and problem.json does not give its parameters; add "
            f'"kernels": {{"{entry}": [...]}}'
        )
    for order in orders:
        stated = [entry for entry in definition.then if entry in order]
        if [*order] != stated:
            raise UsageError(
                f"space.toml launches {', '.join(order)}, and problem.json has these kernels as {', '.join(stated)}; "
                "they run one behind the other: give both files the same order"
            )


def scratch_parameter(
    definition: Definition, scratch: Scratch, problem: FolderProblem, config: Config
) -> ScratchParameter:
    """Return scratch memory with its size, an expression of axes, knobs and the space's lets.

    Without a configuration, sizes that depend on a knob are 1. Raises UsageError if a size is not a positive integer.
    """
    scope = scope_of(definition, problem, config)
    try:
        shape = tuple(whole(size, scope) for size in scratch.shape)
    except Undefined:
        if config:
            raise
        shape = (1,)
    return ScratchParameter(scratch.name, shape, scratch.dtype, scratch.zeroed)


def launched_threads(definition: Definition, problem: FolderProblem, config: Config) -> int:
    """Return the threads of all blocks of a launch; 0 if the space does not state them."""
    space = _read(definition.space)
    scope = Scope({**problem.axes, **config}, space.lets, config)
    family = str(config.get("family")) if str(config.get("family")) in space.grids else ""
    sizes = (*space.grids.get(family, ()), *space.threads.get(family, ()))
    return prod(_size(size, scope) for size in sizes) if sizes else 0


def tiles(definition: Definition, axes: Iterable[str], config: Config) -> dict[str, list[int]]:
    """Return the sizes by which the grid divides each axis, largest first.

    `ceil_div(rows, tile_m)` states that tiles have tile_m rows. A let that reads no axis may be a tile of any of them.
    """
    space = _read(definition.space)
    first = {axis.name: axis.value or 1 for axis in definition.axes}
    scope = Scope({**first, **config}, space.lets, config)
    found: dict[str, set[int]] = {axis: set() for axis in axes}
    for expression in (*space.grid, *space.lets.values()):
        for node in _divisions(expression.tree):
            names = _reads(Expression("", "space.toml", node), space.lets)
            tile = _divisor(node, scope)
            for axis in found.keys() & names if 2 <= tile <= LARGEST_TILE else ():
                found[axis].add(tile)
    for let in space.lets.values():
        tile = 0 if _reads(let, space.lets) & first.keys() else _size(let, scope)
        for values in found.values() if 2 <= tile <= LARGEST_TILE else ():
            values.add(tile)
    return {axis: sorted(values, reverse=True) for axis, values in found.items()}


@lru_cache(maxsize=8)
def _read(text: str) -> _Space:
    """Return the constraints without a condition, the lets of every family and the grids.

    Raises UsageError if the text is not a space file; the space's own reader reports the exact fault.
    """
    try:
        return _parsed(parse_toml(text) if text else {})
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        raise UsageError(f"the search space of the folder cannot be read: {type(error).__name__}: {error}") from None


def _parsed(tables: Mapping[str, Any]) -> _Space:
    launch = tables.get("launch", {})
    rules = {"": launch, **{family: rule for family, rule in launch.items() if isinstance(rule, dict)}}

    def parsed(value: object) -> Expression:
        return Expression.parse(str(value), "space.toml")

    def all_parsed(rule: Mapping[str, Any], key: str) -> tuple[Expression, ...]:
        value = rule.get(key, ())
        return tuple(map(parsed, value if isinstance(value, list | tuple) else (value,)))

    return _Space(
        tuple(parsed(entry["expr"]) for entry in tables.get("constraint", ()) if "when" not in entry),
        {name: parsed(value) for name, value in tables.get("let", {}).items() if not isinstance(value, dict)},
        {family: all_parsed(rule, "grid") for family, rule in rules.items()},
        {family: all_parsed(rule, "threads") for family, rule in rules.items()},
        tuple(_entries(tables.get("kernels", {}))),
    )


def _entries(table: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """Yield the names of the tables that are launch rules, [kernels.ENTRY] or [kernels.FAMILY.ENTRY], by family."""
    families = [
        rule for rule in table.values() if "grid" not in rule and all(isinstance(v, dict) for v in rule.values())
    ]
    if own := tuple(name for name, rule in table.items() if rule not in families):
        yield own
    for rule in families:
        yield from _entries(rule)


def _divisions(tree: ast.expr) -> Iterator[ast.expr]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.expr) and _parts(node))


def _parts(node: ast.expr) -> tuple[ast.expr, ast.expr] | None:
    """Return the dividend and the divisor of a division, or None."""
    match node:
        case ast.Call(func=ast.Name(id="ceil_div"), args=[left, right]):
            return left, right
        case ast.BinOp(left=left, op=ast.FloorDiv(), right=right):
            return left, right
    return None


def _divisor(node: ast.expr, scope: Scope) -> int:
    """Return the product of the divisors along a chain of divisions; 0 if one is not a size.

    ceil_div(ceil_div(n, 32), 4) divides n into tiles of 128.
    """
    parts = _parts(node)
    if parts is None:
        return 1
    return _size(Expression("", "space.toml", parts[1]), scope) * _divisor(parts[0], scope)


def _size(expression: Expression, scope: Scope) -> int:
    """Return the expression's value if it is an integer, or else 0."""
    try:
        value = expression.evaluate(scope)
    except UsageError:
        return 0
    return value if type(value) is int else 0


def _reads(expression: Expression, lets: Mapping[str, Expression]) -> set[str]:
    names = set(expression.names)
    while more := {n for name in names & lets.keys() for n in lets[name].names} - names:
        names |= more
    return names


def _spelled(expression: Expression, lets: Mapping[str, Expression]) -> str:
    return expression.text + "".join(lets[name].text for name in _reads(expression, lets) & lets.keys())
