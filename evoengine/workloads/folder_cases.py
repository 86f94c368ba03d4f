"""The gate's cases of a folder's workload: its own, or small problems set against the configuration's knobs."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING

from evoengine.errors import UsageError
from evoengine.records import Config
from evoengine.space.expression import Expression, Scope
from evoengine.workloads.base import Case
from evoengine.workloads.folder_definition import Definition, holds, whole

if TYPE_CHECKING:
    from evoengine.workloads.folder import FolderProblem

Problems = Callable[[Mapping[str, int]], "FolderProblem"]
"""the problem with these values of the var axes; raises UsageError where there is none"""
MOST_SIZES = 8
"""small problems of unlike sizes"""
LARGEST_KNOB = 256
"""knobs above it are taken for no tile: twice as many rows would make the gate slow"""
MOST_WORK = 1 << 20
"""elements of a case's tensors plus a quarter of its operations: tens of milliseconds in the emulator"""
PATTERNS = ("zeros", "one-hot", "large", "negative")
NEARBY = 128
"""how far from a size its nearest allowed one is sought"""


def gate_cases(definition: Definition, problem: FolderProblem, config: Config, problem_of: Problems) -> tuple[Case, ...]:
    """The folder's cases where it states any; else sizes around those of tiles, and draws that show what others hide.

    Axes that the text of the kernel holds keep the problem's values. Sizes respect the problem's constraints, and those
    of the search space that say by `%` which sizes a configuration takes.
    """
    rules = size_rules(definition, config)

    def small(wanted: Mapping[str, int]) -> FolderProblem | None:
        return _nearest(definition, problem, wanted, rules, problem_of)

    if definition.cases:
        stated = [(c, problem_of({**_given(definition, problem), **_free_of(definition, c.axes)})) for c in definition.cases]
        return tuple(Case(c.name, sizes, f"case {c.name}" if c.draws else c.pattern, config) for c, sizes in stated)
    problems: dict[FolderProblem, None] = {}
    for wanted in _wanted_sizes(definition, problem, config):
        if (found := small(wanted)) is not None:
            problems[found] = None
        if len(problems) == MOST_SIZES:
            break
    problems = problems or {problem: None}
    sizes = list(problems)
    middle = sorted(sizes, key=lambda p: work(definition, p))[len(sizes) // 2]
    cases = [Case(str(p).partition(":")[2] or "as it is", p, "normal", config) for p in sizes]
    return (*cases, *(Case(pattern, middle, pattern, config) for pattern in PATTERNS))


def free_axes(definition: Definition) -> list[str]:
    return [axis for axis in definition.var_axes if axis not in definition.compile_time]


def work(definition: Definition, problem: FolderProblem) -> float:
    """What a case costs the emulator, about: elements and a quarter of the operations, where the folder states them."""
    axes = problem.axes
    tensors = [item.shape for item in (*definition.inputs, *definition.outputs) if item.shape is not None]
    elements = sum(prod(whole(size, axes) for size in shape) for shape in tensors)
    return elements + (float(definition.flops.evaluate(axes)) / 4 if definition.flops else 0.0)


def _given(definition: Definition, problem: FolderProblem) -> dict[str, int]:
    return {axis: problem.axes[axis] for axis in definition.var_axes}


def _free_of(definition: Definition, axes: Mapping[str, int]) -> dict[str, int]:
    """A case of the folder cannot change what the kernel's text holds."""
    return {axis: axes[axis] for axis in free_axes(definition) if axis in axes}


def _wanted_sizes(definition: Definition, problem: FolderProblem, config: Config) -> Iterator[dict[str, int]]:
    """Values for the free axes: each axis gets 1, one below and one above each knob's value, and past two of it.

    The axes go through the list at unlike places, so that whole tiles of one meet tails of another.
    """
    knobs = {v for v in config.values() if type(v) is int and 2 <= v <= LARGEST_KNOB}
    tiles = sorted(knobs, reverse=True) or [32]
    values = [1, *(v for t in tiles for v in (t + 1, 2 * t + 3, t - 1, t))]
    values = list(dict.fromkeys(values))
    free = free_axes(definition)
    for i in range(len(values)):
        yield {axis: min(values[(i + 2 * k) % len(values)], problem.axes[axis]) for k, axis in enumerate(free)}


def _nearest(
    definition: Definition, problem: FolderProblem, wanted: Mapping[str, int], rules: Rules, problem_of: Problems
) -> FolderProblem | None:
    """The wanted problem, shrunk to MOST_WORK and moved to sizes that all rules allow; None where none is near."""
    given = _given(definition, problem) | wanted
    while True:
        given = _equal(definition, given, wanted)
        found = _allowed(given, wanted, rules, problem_of)
        if found is None or work(definition, found) <= MOST_WORK:
            return found
        largest = max(wanted, key=lambda axis: given[axis], default=None)
        if largest is None or given[largest] == 1:
            return found
        given[largest] = max(1, given[largest] // 2)


def _equal(definition: Definition, given: dict[str, int], free: Mapping[str, int]) -> dict[str, int]:
    """With the axes set that a constraint `axis == expression` fixes, as FlashInfer-Trace's definitions have it."""
    given = dict(given)
    for constraint in definition.constraints:
        left, equals, right = constraint.text.partition("==")
        if equals and left.strip() in free:
            try:
                sizes = definition.sizes(given)
                given[left.strip()] = whole(Expression.parse(right, constraint.where), sizes)
            except UsageError:
                continue
    return given


def _allowed(
    given: dict[str, int], free: Mapping[str, int], rules: Rules, problem_of: Problems
) -> FolderProblem | None:
    """The problem, or the nearest one that differs in one size."""

    def attempt(sizes: Mapping[str, int]) -> FolderProblem | None:
        try:
            problem = problem_of(sizes)
        except UsageError:
            return None
        return problem if rules(problem.axes) else None

    if (found := attempt(given)) is not None:
        return found
    changed = dict(given)
    for axis in free:
        for step in range(1, NEARBY + 1):
            for value in (given[axis] + step, given[axis] - step):
                if value >= 1 and (found := attempt(changed | {axis: value})) is not None:
                    return found
        changed[axis] = next((v for v in range(given[axis], given[axis] + NEARBY) if v % 8 == 0), given[axis])
    return attempt(changed)


Rules = Callable[[Mapping[str, int]], bool]


def size_rules(definition: Definition, config: Config) -> Rules:
    """Whether a configuration takes these sizes, by the constraints of the space in which `%` meets an axis.

    Other constraints may speak of sizes too, for speed alone: the gate's problems are smaller than any worth tuning.
    """
    constraints, lets = _space_constraints(definition.space)
    names = {axis.name for axis in definition.axes}
    asked = [c for c in constraints if "%" in _spelled(c, lets) and _reads(c, lets) & names]

    def allowed(sizes: Mapping[str, int]) -> bool:
        scope = Scope({**sizes, **config}, lets, config)
        return all(holds(constraint, scope) for constraint in asked)

    return allowed


@lru_cache(maxsize=8)
def _space_constraints(text: str) -> tuple[tuple[Expression, ...], dict[str, Expression]]:
    """The constraints of a space file without conditions, and the lets of every family."""
    tables = tomllib.loads(text) if text else {}
    rules = [entry["expr"] for entry in tables.get("constraint", ()) if "when" not in entry]
    lets = {name: value for name, value in tables.get("let", {}).items() if not isinstance(value, dict)}
    return (
        tuple(Expression.parse(str(rule), "space.toml") for rule in rules),
        {name: Expression.parse(str(value), "space.toml") for name, value in lets.items()},
    )


def _reads(expression: Expression, lets: Mapping[str, Expression]) -> set[str]:
    names = set(expression.names)
    while more := {n for name in names & lets.keys() for n in lets[name].names} - names:
        names |= more
    return names


def _spelled(expression: Expression, lets: Mapping[str, Expression]) -> str:
    return expression.text + "".join(lets[name].text for name in _reads(expression, lets) & lets.keys())
