"""The contents of a space file: knobs, constraints, lets, launch and cost rules, start points."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import PurePath

from evoengine.errors import UsageError, did_you_mean
from evoengine.records import Value
from evoengine.space.expression import Expression, Scope


@dataclass(frozen=True)
class Knob:
    """One dimension of the space. Where `when` does not hold, the knob is inactive and absent from the Config."""

    name: str
    values: tuple[Value, ...]
    when: Expression | None = None
    default: Value | None = None
    """its value in start points that do not name it; None if each must name it"""

    @cached_property
    def ordinal(self) -> bool:
        """Return whether the values are ascending numbers, so that neighbours in the list are neighbours in size."""
        numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in self.values)
        return numbers and list(self.values) == sorted(self.values)

    @cached_property
    def kind(self) -> str:
        return "text" if isinstance(self.values[0], str) else "number"

    @cached_property
    def _index(self) -> dict[tuple[type, Value], int]:
        return {(type(value), value): i for i, value in enumerate(self.values)}

    def index(self, value: object) -> int | None:
        """Return the position of a value in the domain, or None. True is not 1, and 1.0 is not 1."""
        return self._index.get((type(value), value)) if isinstance(value, Value) else None


@dataclass(frozen=True)
class Constraint:
    """`expr` must hold wherever `when` holds and every knob that `expr` names is active."""

    expr: Expression
    when: Expression | None
    why: str


@dataclass(frozen=True)
class LaunchRule:
    block: tuple[Expression, Expression, Expression]
    """threads along x, y and z"""
    grid: tuple[Expression, Expression, Expression]
    shared: Expression
    then: tuple[tuple[str, LaunchRule], ...] = ()
    """further kernels in stream order: entry, and its rule"""

    @property
    def kernels(self) -> tuple[LaunchRule, ...]:
        """Return the rules of all kernels, in order."""
        return self, *(rule for _, rule in self.then)

    @property
    def expressions(self) -> tuple[Expression, ...]:
        return tuple(e for rule in self.kernels for e in (*rule.block, *rule.grid, rule.shared))


@dataclass(frozen=True)
class Definition:
    """A space file, checked in itself but bound to no problem. `lets`, `launch` and `cost` are keyed by family."""

    path: PurePath
    text: str
    kernel: str
    knobs: tuple[Knob, ...]
    constraints: tuple[Constraint, ...]
    lets: Mapping[str, Mapping[str, Expression]]
    launch: Mapping[str, LaunchRule]
    cost: Mapping[str, Mapping[str, Expression]]
    starts: tuple[tuple[str, Mapping[str, Value]], ...]
    """file and line of each with the knobs that it names; the others have their defaults"""

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()

    def impossible_families(self, gpu: Mapping[str, Value]) -> dict[str, str]:
        """Return the families that no problem can have on a GPU of these variables (`gpu.NAME`), with reasons.

        Families that only the sizes of a problem or a knob rule out are not among them; SearchSpace finds those.
        """
        found: dict[str, str] = {}
        for family in map(str, self.knobs[0].values):
            scope = Scope({**gpu, "family": family}, {}, {})
            for rule in self.constraints:
                about_gpu = rule.expr.names and rule.expr.names <= gpu.keys()
                about_family = rule.when is None or rule.when.names == {"family"}
                applies = about_gpu and about_family and (rule.when is None or rule.when.evaluate(scope))
                if applies and not rule.expr.evaluate(scope):
                    found.setdefault(family, rule.why)
        return found

    def restricted_to(self, families: Sequence[str]) -> Definition:
        """Return the definition restricted to these families, in the file's order.

        Raises UsageError if the file has no such family.
        """
        family, *others = self.knobs
        for name in families:
            if name not in family.values:
                raise UsageError(f"{domain_error(family)}, not {name!r}{did_you_mean(name, family.values)}")
        kept = Knob(family.name, tuple(value for value in family.values if value in families))
        starts = tuple((where, config) for where, config in self.starts if config.get("family") in kept.values)
        return replace(self, knobs=(kept, *others), starts=starts)


def domain_error(knob: Knob) -> str:
    return f"{knob.name} must be one of {', '.join(map(str, knob.values))}"


def dependencies(expression: Expression, lets: Mapping[str, Expression]) -> set[str]:
    """Return every name that the expression reads, directly or through lets, including those lets."""
    names: set[str] = set()
    todo = [expression]
    while todo:
        for name in todo.pop().names - names:
            names.add(name)
            if name in lets:
                todo.append(lets[name])
    return names
