"""A folder's problem at its own lengths: one axis at a time, shortened where that takes too long."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import combinations
from math import prod

from evoengine.devices.base import DTYPE_BYTES
from evoengine.errors import UsageError
from evoengine.records import Config
from evoengine.space.expression import Expression
from evoengine.workloads.folder_definition import Definition, FolderProblem, whole
from evoengine.workloads.folder_space import Rules, launched_threads

Problems = Callable[[Mapping[str, int]], FolderProblem]
"""the problem with these values of the var axes; raises UsageError where there is none"""
SMALL = (3, 1, 2, 4, 8, 16, 32, 64, 128, 256)
"""lengths of the other axes, in the order in which they are tried"""
MOST_WORK = 1 << 24
"""cost limit of a case with the problem's own lengths, by `cost`: some seconds in the emulator"""
_THREAD = 8
"""cost of a thread in elements"""


@dataclass(frozen=True, slots=True)
class Extent:
    """A problem with the whole's own length along `axis`, and minimal others."""

    axis: str
    problem: FolderProblem
    part: str | None
    """the part of that length that it has, where all of it takes too long"""


def free_axes(definition: Definition) -> list[str]:
    """Return the axes that may have other lengths than the problem's: the kernel's text does not hold them."""
    return [axis for axis in definition.var_axes if axis not in definition.compile_time]


def elements(definition: Definition, problem: FolderProblem) -> int:
    """Return how many elements inputs and outputs have."""
    axes = problem.axes
    shapes = [item.shape for item in (*definition.inputs, *definition.outputs) if item.shape is not None]
    return sum(prod(whole(size, axes) for size in shape) for shape in shapes)


def operations(definition: Definition, problem: FolderProblem) -> float:
    """Return the operations that the folder states; 0 where it states none."""
    return float(definition.flops.evaluate(problem.axes)) if definition.flops else 0.0


def work(definition: Definition, problem: FolderProblem) -> float:
    """Return what a case costs at least, about: elements and a quarter of the operations."""
    return elements(definition, problem) + operations(definition, problem) / 4


def cost(definition: Definition, problem: FolderProblem, config: Config) -> float:
    """Return what a launch costs the emulator, about: the work, and each of the threads."""
    return work(definition, problem) + _THREAD * launched_threads(definition, problem, config)


def input_bytes(definition: Definition, problem: FolderProblem) -> int:
    """Return the bytes of all input tensors."""
    axes = problem.axes
    return sum(
        prod(whole(size, axes) for size in item.shape) * DTYPE_BYTES[item.dtype]
        for item in definition.inputs
        if item.shape is not None
    )


def own_extents(
    definition: Definition, problem: FolderProblem, config: Config, rules: Rules, problem_of: Problems
) -> Iterator[Extent]:
    """Yield for each free axis the smallest valid problem that has its own length there.

    Where that is not affordable, it is the longest affordable one that leaves the same remainders.
    """
    for axis in free_axes(definition):
        own = problem.axes[axis]
        for length in (own, *shorter_lengths(own)):
            found = smallest_with(definition, problem, axis, length, rules, problem_of)
            if found is not None and cost(definition, found, config) <= MOST_WORK:
                yield Extent(axis, found, None if length == own else f"{axis} {length:,} of {own:,}")
                break


def shorter_lengths(length: int) -> Iterator[int]:
    """Yield lengths below this one, the longest first, that leave the same remainders modulo powers of two."""
    step = 1 << (length.bit_length() - 1)
    while step > 1:
        if step + length % step < length:
            yield step + length % step
        step //= 2


def smallest_with(
    definition: Definition, problem: FolderProblem, axis: str, length: int, rules: Rules, problem_of: Problems
) -> FolderProblem | None:
    """Return the first valid problem with that length of the axis: others short, or as few as need be at their own."""
    others = [other for other in free_axes(definition) if other != axis]
    own = {name: problem.axes[name] for name in definition.var_axes}
    for kept in range(len(others) + 1):
        for at_own in combinations(others, kept):
            for small in SMALL if kept < len(others) else SMALL[:1]:
                short = {other: min(small, own[other]) for other in others if other not in at_own}
                found = attempt({**own, **short, axis: length}, definition, short, rules, problem_of)
                if found is not None and found.axes[axis] == length:
                    return found
    return None


def attempt(
    given: Mapping[str, int], definition: Definition, movable: Mapping[str, int], rules: Rules, problem_of: Problems
) -> FolderProblem | None:
    """Return the problem of these sizes, or None where it is invalid.

    Movable axes that a constraint `axis == expression` fixes are set first.
    """
    try:
        problem = problem_of(with_equalities(definition, given, movable))
    except UsageError:
        return None
    return problem if rules(problem.axes) else None


def with_equalities(definition: Definition, given: Mapping[str, int], movable: Mapping[str, int]) -> dict[str, int]:
    """Return sizes with the axes set that a constraint `axis == expression` fixes, as FlashInfer-Trace has them."""
    sizes = dict(given)
    for constraint in definition.constraints:
        for axis, expression in _equal_sides(constraint):
            if axis in movable:
                with suppress(UsageError):
                    sizes[axis] = whole(expression, definition.sizes(sizes))
                break
    return sizes


def _equal_sides(constraint: Expression) -> list[tuple[str, Expression]]:
    """Return each side of an `==` that may be an axis, with the other side."""
    left, equals, right = (part.strip() for part in constraint.text.partition("=="))
    try:
        sides = [(left, Expression.parse(right, constraint.where)), (right, Expression.parse(left, constraint.where))]
    except UsageError:  # a chain of comparisons
        return []
    return sides if equals else []


def cut_until(
    definition: Definition,
    problem: FolderProblem,
    fits: Callable[[FolderProblem], bool],
    rules: Rules,
    problem_of: Problems,
    first: Collection[str] = (),
) -> FolderProblem | None:
    """Return the problem with axes shortened until it fits, keeping their remainders.

    Axes of `first` are shortened before others, and the longest first. None where no shorter problem is valid.
    """
    found = problem
    while not fits(found):
        shorter = next(_shortened(definition, found, rules, problem_of, first), None)
        if shorter is None:
            return None
        found = shorter
    return found


def _shortened(
    definition: Definition, problem: FolderProblem, rules: Rules, problem_of: Problems, first: Collection[str]
) -> Iterator[FolderProblem]:
    """Yield the problem with one axis shortened, in the order of `cut_until`."""
    given = {axis: problem.axes[axis] for axis in definition.var_axes}
    for axis in sorted(free_axes(definition), key=lambda axis: (axis not in first, -given[axis])):
        movable = {other: given[other] for other in free_axes(definition) if other != axis}
        for length in shorter_lengths(given[axis]):
            found = attempt({**given, axis: length}, definition, movable, rules, problem_of)
            if found is not None and work(definition, found) < work(definition, problem):
                yield found


def part_of(definition: Definition, problem: FolderProblem, whole_problem: FolderProblem) -> str | None:
    """Return which lengths a problem has of the whole one's, or None where it has all."""
    lengths = [(axis, problem.axes[axis], whole_problem.axes[axis]) for axis in definition.var_axes]
    return ", ".join(f"{axis} {own:,} of {all_of:,}" for axis, own, all_of in lengths if own < all_of) or None


def small_problem(
    definition: Definition, problem: FolderProblem, least: int, rules: Rules, problem_of: Problems
) -> FolderProblem:
    """Return a problem whose free axes are all short, `least` at least, or the problem itself where none is valid."""
    free = free_axes(definition)
    for length in sorted({size for size in SMALL if size >= least} | {least}):
        short = {axis: min(length, problem.axes[axis]) for axis in free}
        given = {**{axis: problem.axes[axis] for axis in definition.var_axes}, **short}
        found = attempt(given, definition, short, rules, problem_of)
        if found is not None:
            return found
    return problem
