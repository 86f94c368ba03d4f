"""One family of a space, bound to a problem and a GPU: which knobs are active, what is valid, how it is launched."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from evoengine.errors import UsageError
from evoengine.records import Config, Launch, NextKernel, Value
from evoengine.space.arrays import Columns
from evoengine.space.definition import Constraint, Definition, Knob, LaunchRule, dependencies, domain_error
from evoengine.space.expression import Expression, Scope, Undefined
from evoengine.space.symbol import Symbol

MAX_THREADS = 1024
"""threads per block, for every compute capability, as are the next two limits (CUDA C++ Programming Guide, Compute
Capabilities)"""
MAX_BLOCK_Z = 64
"""threads along z"""
MAX_GRID_YZ = 65535
"""blocks along y and along z"""


class Family:
    """The rules that hold where the knob `family` has this value.

    Raises UsageError if an expression uses a name that this family does not have, or mixes text and numbers.
    """

    def __init__(self, name: str, definition: Definition, variables: Mapping[str, Value]) -> None:
        self.name, self.knobs, self.variables = name, definition.knobs, variables
        self.lets = definition.lets[name]
        self.launch_rule = definition.launch[name]
        self.cost_rules = definition.cost.get(name, {})
        self._dependencies: dict[Expression, set[str]] = {}
        self._knob_names = {k.name for k in self.knobs}
        self._foreign = {n for group in definition.lets.values() for n in group} - self.lets.keys()
        # A rule that names a let that this family does not have is a rule of other families.
        self.constraints = [
            c for c in definition.constraints if self.defines(c.expr) and (c.when is None or self.defines(c.when))
        ]
        self._check_kinds()
        self.constraints += self._device_limits()

    def defines(self, expression: Expression) -> bool:
        """Return whether every let that the expression needs is defined for this family."""
        return not self._depends_on(expression) & self._foreign

    def _depends_on(self, expression: Expression) -> set[str]:
        if expression not in self._dependencies:
            self._dependencies[expression] = dependencies(expression, self.lets)
        return self._dependencies[expression]

    def _check_kinds(self) -> None:
        kinds: dict[str, str | None] = {k.name: k.kind for k in self.knobs}
        kinds |= {name: "text" if isinstance(value, str) else "number" for name, value in self.variables.items()}
        todo = {n: let for n, let in self.lets.items() if self.defines(let)}
        while todo:
            # There are no cycles, so each round resolves at least one let.
            ready = [n for n, let in todo.items() if not let.names & todo.keys()]
            kinds |= {n: todo.pop(n).kind(kinds) for n in ready}
        rule = self.launch_rule
        needed = [*rule.expressions, *self.cost_rules.values()]
        for expression in needed:
            if not self.defines(expression):
                lacking = ", ".join(sorted(self._depends_on(expression) & self._foreign))
                raise UsageError(
                    f"{expression.where}: `{expression.text}` needs the let {lacking}, which family {self.name} "
                    f"does not have; define it in [let.{self.name}]"
                )
        whens = [k.when for k in self.knobs if k.when and self.defines(k.when)]
        whens += [c.when for c in self.constraints if c.when]
        for expression in [*needed, *whens, *(c.expr for c in self.constraints)]:
            if expression.kind(kinds) == "text":
                raise UsageError(f"{expression.where}: `{expression.text}` is text; it must be a number or a condition")

    def _device_limits(self) -> list[Constraint]:
        """Return the limits of a launch on the GPU as constraints of the space."""
        return [limit for rule in self.launch_rule.kernels for limit in self._limits_of(rule)]

    def _limits_of(self, rule: LaunchRule) -> list[Constraint]:
        shared = self.variables.get("gpu.shared_per_block")
        threads = " * ".join(f"({e.text})" for e in rule.block)
        limits: list[tuple[str, Value, Expression, str]] = [
            (threads, MAX_THREADS, rule.block[0], f"a block has {MAX_THREADS} threads at most"),
            (rule.block[2].text, MAX_BLOCK_Z, rule.block[2], f"a block has {MAX_BLOCK_Z} threads along z at most"),
            *(
                (e.text, MAX_GRID_YZ, e, f"a grid has {MAX_GRID_YZ} blocks along y and z at most")
                for e in rule.grid[1:]
            ),
        ]
        if shared is not None:
            limits.append(
                (rule.shared.text, shared, rule.shared, f"a block has {shared} bytes of shared memory at most")
            )
        parsed = [(Expression.parse(f"({text}) <= {limit}", e.where), why) for text, limit, e, why in limits]
        return [Constraint(expr, None, why) for expr, why in parsed if expr.names]

    def scope(self, config: Config, variables: Mapping[str, Value] | None = None) -> Scope:
        return Scope({**(self.variables if variables is None else variables), **config}, self.lets, config)

    def columns(self, coded: Mapping[str, Any], length: int) -> Columns:
        """Return the scope of many configurations at once: each knob but the family an `EncodedColumn` [length]."""
        knobs = [k.name for k in self.knobs]
        return Columns({**self.variables, **coded, "family": self.name}, length, self.lets, knobs)

    def knob_dependencies(self, *expressions: Expression | None) -> set[str]:
        """Return the knobs on which the expressions depend, directly or through lets."""
        names = set().union(*(self._depends_on(e) for e in expressions if e))
        return names & self._knob_names

    def knobs_in(self, expression: Expression) -> set[str]:
        """Return the knobs that the expression itself names; a constraint does not apply where one is inactive."""
        return set(expression.names & self._knob_names)

    def is_active(self, knob: Knob, scope: Scope) -> bool:
        return knob.when is None or self.holds(knob.when, scope)

    def holds(self, when: Expression, scope: Scope) -> bool:
        """Return whether a `when` is true; False if evaluating it from left to right needs an inactive knob."""
        try:
            return self.defines(when) and bool(when.evaluate(scope))
        except Undefined:
            return False

    def completed(self, config: Config) -> Config:
        """Return the configuration with the defaults of active knobs that it does not name."""
        scope, found = self.scope(config), dict(config)
        for knob in self.knobs:
            if knob.name not in found and knob.default is not None and self.is_active(knob, scope):
                scope[knob.name] = found[knob.name] = knob.default
        return {k.name: found[k.name] for k in self.knobs if k.name in found}

    def missing_knob(self, config: Config) -> str | None:
        """Return the first active knob that the configuration lacks, or None."""
        scope = self.scope(config)
        return next((k.name for k in self.knobs if k.name not in config and self.is_active(k, scope)), None)

    def why_invalid(self, config: Config) -> str | None:
        """Return why the configuration is not a valid one of this family; None if it is."""
        for name in config:
            if name not in self._knob_names:
                return f"{name} is not a knob of this space"
        scope = self.scope(config)
        for knob in self.knobs:
            if knob.when and not self.is_active(knob, scope):
                if knob.name in config:
                    return f"{knob.name} is set where it is inactive; it needs {knob.when.text}"
            elif knob.name not in config:
                return f"{knob.name} is missing"
            elif knob.index(config[knob.name]) is None:
                return f"{domain_error(knob)}, not {config[knob.name]!r}"
        return next((c.why for c in self.constraints if self._violates(c, scope)), None)

    def _violates(self, constraint: Constraint, scope: Scope) -> bool:
        if constraint.when and not self.holds(constraint.when, scope):
            return False
        return all(n in scope for n in self.knobs_in(constraint.expr)) and not constraint.expr.evaluate(scope)

    def launch(self, config: Config, variables: Mapping[str, Value]) -> Launch:
        """Return the launch geometry of a configuration.

        Raises UsageError if threads or grid are not positive integers, or shared is negative or no integer.
        """
        return _launch(self.launch_rule, self.scope(config, variables))

    def size_rules(
        self, config: Config, sizes: Mapping[str, Value], kept_by: Sequence[Mapping[str, Value]]
    ) -> Iterator[tuple[str, str]]:
        """Yield expression and reason of constraints that `sizes`, of which some are Symbols, may break.

        A constraint that one of `kept_by` breaks is left out.
        """
        scope, seen = self.scope(config, sizes), [self.scope(config, known) for known in kept_by]
        for constraint in self.constraints:
            if any(name not in scope for name in self.knobs_in(constraint.expr)):
                continue
            if any(self._violates(constraint, known) for known in seen):
                continue
            try:
                asked = constraint.when.evaluate(scope) if constraint.when else True
                rule = constraint.expr.evaluate(scope) if asked else True
            except Undefined:
                continue
            if isinstance(rule, Symbol):
                yield str(rule), constraint.why

    def cost(self, config: Config, variables: Mapping[str, Value]) -> dict[str, float]:
        scope = self.scope(config, variables)
        return {name: float(rule.evaluate(scope)) for name, rule in self.cost_rules.items()}

    def check_costs(self, columns: Columns) -> None:
        """Raise UsageError for the first configuration in which a cost figure has no value."""
        for rule in self.cost_rules.values():
            rule.evaluate_arrays(columns)

    def doubtful_launches(self, columns: Columns) -> np.ndarray:
        """Return the rows for which `launch` may raise.

        These are all for which it does, and all rows of a column that has any decimals.
        """
        doubtful = np.zeros(columns.length, bool)
        for rule in self.launch_rule.kernels:
            for expression, least in (*((e, 1) for e in (*rule.block, *rule.grid)), (rule.shared, 0)):
                values = expression.evaluate_arrays(columns)
                doubtful |= (values < least) | (values.dtype.kind != "i")
        return np.flatnonzero(doubtful)


def _launch(rule: LaunchRule, scope: Scope) -> Launch:
    x, y, z = (_integer(e, scope, 1) for e in rule.grid)
    block_x, block_y, block_z = (_integer(e, scope, 1) for e in rule.block)
    shared = _integer(rule.shared, scope, 0)
    then = tuple(NextKernel(entry, _launch(behind, scope)) for entry, behind in rule.then)
    return Launch((x, y, z), block_x * block_y * block_z, shared, (block_y, block_z), then)


def _integer(expression: Expression, scope: Scope, least: int) -> int:
    value = expression.evaluate(scope)
    if isinstance(value, Symbol):
        return value
    if type(value) is int and value >= least:
        return value
    setting = ", ".join(f"{name}={v}" for name, v in scope.config.items())
    raise UsageError(
        f"{expression.where}: `{expression.text}` is {value} for {setting}; "
        f"a launch needs {'a positive integer' if least else 'an integer of at least 0'}"
    )
