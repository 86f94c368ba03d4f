"""The gate's cases of a folder's workload: its own, or small problems set against the configuration's knobs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from math import prod

from evoengine.errors import UsageError
from evoengine.records import Config
from evoengine.space.expression import Expression
from evoengine.workloads.base import Case
from evoengine.workloads.folder_definition import Definition, FolderProblem, whole
from evoengine.workloads.folder_space import Rules, size_rules, tiles

Problems = Callable[[Mapping[str, int]], FolderProblem]
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
MULTIPLES = (2, 4, 8, 16, 32, 64, 128, 256)
"""what all sizes are rounded up to where no single change is enough"""


def gate_cases(
    definition: Definition, problem: FolderProblem, config: Config, problem_of: Problems
) -> tuple[Case[FolderProblem], ...]:
    """The folder's cases where it states any; else sizes around those of tiles, and draws that show what others hide.

    Axes that the text of the kernel holds keep the problem's values. Sizes respect the problem's constraints, and those
    of the search space that say by `%` which sizes a configuration takes.
    """
    rules = size_rules(definition, config)

    def small(wanted: Mapping[str, int]) -> FolderProblem | None:
        return _nearest(definition, problem, wanted, rules, problem_of)

    if definition.cases:
        stated = [
            (c, problem_of({**_given(definition, problem), **_free_of(definition, c.axes)})) for c in definition.cases
        ]
        return tuple(Case(c.name, sizes, f"case {c.name}" if c.draws else c.pattern, config) for c, sizes in stated)
    problems: dict[FolderProblem, None] = {}
    for wanted in _wanted_sizes(definition, problem, config):
        if (found := small(wanted)) is not None:
            problems[found] = None
        if len(problems) == MOST_SIZES:
            break
    problems = problems or {problem: None}
    sizes = list(problems)
    largest = max(sizes, key=lambda p: work(definition, p))
    cases = [Case(str(p).partition(":")[2] or "as it is", p, "normal", config) for p in sizes]
    return (*cases, *(Case(pattern, largest, pattern, config) for pattern in PATTERNS))


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
    """Values for the free axes: each gets 1, one below and one above a tile, past two of it, and the same of every
    knob.

    The axes go through their lists at unlike places, so that whole tiles of one meet tails of another.
    """
    free = free_axes(definition)
    values = {axis: _around(found, config) for axis, found in tiles(definition, free, config).items()}
    for i in range(max(map(len, values.values()), default=0)):
        yield {a: min(values[a][(i + 2 * k) % len(values[a])], problem.axes[a]) for k, a in enumerate(free)}


def _around(found: list[int], config: Config) -> list[int]:
    knobs = sorted((v for v in config.values() if type(v) is int and 2 <= v <= LARGEST_KNOB), reverse=True)
    steps = [t for t in (*found, *(knobs or [32])) if t > 1]
    return list(dict.fromkeys([1, *(v for t in steps for v in (t + 1, 2 * t + 3, t - 1, t))]))


def _nearest(
    definition: Definition, problem: FolderProblem, wanted: Mapping[str, int], rules: Rules, problem_of: Problems
) -> FolderProblem | None:
    """The wanted problem, shrunk to MOST_WORK and moved to sizes that all rules allow; None where none is near."""
    given = {**_given(definition, problem), **wanted}
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
    """The problem, or the nearest one that differs in one size, or one whose sizes are all multiples of the same
    number."""

    def attempt(sizes: Mapping[str, int]) -> FolderProblem | None:
        try:
            problem = problem_of(sizes)
        except UsageError:
            return None
        return problem if rules(problem.axes) else None

    if (found := attempt(given)) is not None:
        return found
    for axis in free:
        for step in range(1, NEARBY + 1):
            for value in (given[axis] + step, given[axis] - step):
                if value >= 1 and (found := attempt({**given, axis: value})) is not None:
                    return found
    for multiple in MULTIPLES:
        rounded = {axis: -(-given[axis] // multiple) * multiple for axis in free}
        if (found := attempt({**given, **rounded})) is not None:
            return found
    return None
