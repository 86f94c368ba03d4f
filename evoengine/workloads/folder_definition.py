"""Contents of a `problem.json`: axes, inputs, outputs, the reference's text, tolerance, cases; without sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from evoengine.errors import UsageError
from evoengine.records import Value
from evoengine.space.expression import Expression, Undefined
from evoengine.workloads.base import Tolerance

LARGEST_AXIS = 2**31 - 1
"""axes are int32 parameters"""
PATTERNS = ("normal", "zeros", "one-hot", "large", "negative", "ends")
"""draws of a gate case that shape all floating-point inputs alike, or all integers and truth values (`ends`)"""


@dataclass(frozen=True)
class Axis:
    """A size.

    It has a `value` where it is constant, an `expression` where it follows from others, and neither where a problem
    states it.
    """

    name: str
    value: int | None = None
    expression: Expression | None = None

    @property
    def is_var(self) -> bool:
        return self.value is None and self.expression is None


@dataclass(frozen=True)
class Item:
    """An input or an output. `shape` holds expressions of axes; None for an input passed by value."""

    name: str
    shape: tuple[Expression, ...] | None
    dtype: str


@dataclass(frozen=True)
class Scratch:
    """Scratch memory, neither an input nor an output. `shape` holds expressions of axes and knobs."""

    name: str
    shape: tuple[Expression, ...]
    dtype: str
    zeroed: bool
    """whether it is zero before the first launch, else poisoned. It keeps its contents between launches"""


@dataclass(frozen=True)
class Draw:
    """The draw of an input: a type and its numbers, which may be expressions of axes."""

    kind: str = "random"
    value: float | int | bool | None = None
    low: Expression | None = None
    high: Expression | None = None


@dataclass(frozen=True)
class Example:
    """A workload: its sizes, and the draws of inputs that are not `random`."""

    axes: Mapping[str, int]
    draws: Mapping[str, Draw]


@dataclass(frozen=True)
class NamedCase:
    """A gate case that the folder states: a pattern over all floating-point inputs, or draws input by input."""

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
    reference: str
    examples: tuple[Example, ...]
    constraints: tuple[Expression, ...]
    entry: str
    parameters: tuple[str, ...]
    """the first kernel's, in order: names of inputs, outputs, scratch memory and axes"""
    then: Mapping[str, tuple[str, ...]]
    """kernels after the first, in stream order, each with its parameters"""
    scratch: tuple[Scratch, ...]
    constants: Mapping[str, str]
    """`__constant__` variables of the kernel, each with the input whose contents it holds"""
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
    def var_axes(self) -> tuple[str, ...]:
        return tuple(axis.name for axis in self.axes if axis.is_var)

    def sizes(self, given: Mapping[str, int]) -> dict[str, int]:
        """Return the value of every axis, given those of the var axes.

        Raises UsageError where one is no positive int32.
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
        """Return how inputs are drawn for a problem, and for the gate's cases of it: as its workload says."""
        return self.examples[problem.example].draws


def whole(expression: Expression, sizes: Mapping[str, Any]) -> int:
    """Return an expression's value as a size. Raises UsageError where it is no integer from 1 to LARGEST_AXIS."""
    value = expression.evaluate(sizes)
    if type(value) is not int or not 1 <= value <= LARGEST_AXIS:
        setting = ", ".join(f"{name}={sizes[name]}" for name in sorted(expression.names))
        raise UsageError(
            f"{expression.where}: `{expression.text}` is {value} for {setting or 'every problem'}; "
            f"a size is an integer from 1 to {LARGEST_AXIS}"
        )
    return value


@dataclass(frozen=True, slots=True)
class FolderProblem:
    """`sizes` holds every axis, in the order of problem.json; `given` names those that the problem's text gives."""

    name: str
    sizes: tuple[tuple[str, int], ...]
    given: tuple[str, ...]
    example: int = 0
    """the number of the workload with the draws of inputs"""

    def __str__(self) -> str:
        return f"{self.name}:" + ",".join(f"{axis}={value}" for axis, value in self.sizes if axis in self.given)

    def variables(self) -> dict[str, Value]:
        return dict(self.sizes)

    @property
    def axes(self) -> dict[str, int]:
        return dict(self.sizes)


def shape_of(item: Item, problem: FolderProblem) -> tuple[int, ...]:
    """Return the shape of an item. Raises UsageError where a size is no positive integer."""
    axes = problem.axes
    return tuple(whole(size, axes) for size in item.shape or ())


def holds(constraint: Expression, values: Mapping[str, Any]) -> bool:
    """Return whether a constraint holds; True where it needs a name without a value."""
    try:
        return bool(constraint.evaluate(values))
    except Undefined:
        return True
