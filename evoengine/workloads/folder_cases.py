"""The gate's cases of a folder's workload.

They are those that the folder states, or small problems chosen against the configuration's knobs, and problems with the
problem's own lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import combinations, islice
from math import prod

from evoengine.devices.base import DTYPE_BYTES
from evoengine.errors import UsageError
from evoengine.records import Config, Launch
from evoengine.space.expression import Expression
from evoengine.workloads.base import Case
from evoengine.workloads.coverage import Cell
from evoengine.workloads.folder_definition import (
    WIDE,
    Definition,
    FolderProblem,
    Rules,
    launched_threads,
    size_rules,
    tiles,
    whole,
)

MOST_SIZES = 8
"""number of small problems of different sizes"""
LARGEST_KNOB = 256
"""largest knob that may be a tile: longer tiles would make the gate slow"""
MOST_WORK = 1 << 20
"""limit of a case's cost, elements of tensors plus a quarter of the operations: tens of milliseconds in the emulator"""
FLOAT_PATTERNS = ("zeros", "one-hot", "large", "negative", "ties")
"""patterns that replace the draw of `random` floating-point inputs"""
SPECIAL_PATTERN = "special"
"""the pattern that draws NaN and infinities, for references that tell these from numbers"""
INTEGER_PATTERN = "ends"
"""the pattern that draws integers from the ends of their ranges, and equal or nearly equal booleans"""
WIDE_PATTERN = "wide"
"""the pattern that draws `random` integers from the whole range of their dtype, or from as much as outputs can hold"""
OTHER_SCALARS = "other scalars"
"""the case with other by-value floating-point inputs than the example's"""
NEARBY = 128
"""distance from a size within which the nearest allowed one is searched"""
MULTIPLES = (2, 4, 8, 16, 32, 64, 128, 256)
"""multiples to which all sizes are rounded up if changing a single one is not enough"""


def gate_cases(
    definition: Definition, problem: FolderProblem, config: Config, problem_of: Problems
) -> tuple[Case[FolderProblem], ...]:
    """Return the folder's cases if it states any, or else cases chosen by size.

    These are sizes around those of tiles, draws that expose faults that others hide, and the problem's own length along
    each axis. If affordable, the problem itself is among them. Axes that the text of the kernel contains keep the
    problem's values. Sizes respect the problem's constraints, and those of the search space that state by `%` which
    sizes a configuration supports.
    """
    rules = size_rules(definition, config)
    if definition.cases:
        cases = _stated_cases(definition, problem, config, problem_of)
    else:
        small = _small_problems(definition, problem, config, rules, problem_of)
        cheap = cheap_problems(definition, problem, config, problem_of)
        largest = max(cheap, key=lambda p: work(definition, p))
        shown = _behind_tiles(definition, problem, config, rules, problem_of) or largest
        cases = [Case(_sizes(p), p, "normal", config) for p in small]
        cases += [Case(pattern, shown, pattern, config) for pattern in patterns(definition, problem)]
        if definition.passes_fractions(problem):
            cases.append(Case(OTHER_SCALARS, replace(largest, other_scalars=True), "normal", config))
        cases += _own_lengths(definition, problem, config, rules, problem_of)
    if judged_whole(definition, problem, config) and all(case.problem != problem for case in cases):
        is_long = cost(definition, problem, config) > MOST_WORK
        cases.append(Case("the problem itself", problem, "normal", config, long=is_long))
    elif not definition.runs_alone and (cut := _part(definition, problem, config, rules, problem_of)) is not None:
        part = part_of(definition, cut, problem)
        cases.append(Case("the problem in part", cut, "normal", config, long=True, part=part))
    return tuple(replace(case, whole=problem) for case in cases)


def judged_whole(definition: Definition, problem: FolderProblem, config: Config) -> bool:
    """Return whether a case launches the problem itself, with all of its blocks."""
    return cost(definition, problem, config) <= MOST_LONG_WORK or not free_axes(definition)


def _part(
    definition: Definition, problem: FolderProblem, config: Config, rules: Rules, problem_of: Problems
) -> FolderProblem | None:
    """Return the problem with axes shortened until a launch of all blocks is affordable, sums before outputs.

    Kernels whose blocks communicate are not judged at full size, where blocks run alone: only in this case do they
    count far over several axes.
    """
    kept = {name for item in definition.outputs for size in item.shape or () for name in size.names}
    sums = [axis for axis in free_axes(definition) if axis not in kept]
    return cut_until(
        definition, problem, lambda p: cost(definition, p, config) <= MOST_LONG_WORK, rules, problem_of, sums
    )


def _stated_cases(
    definition: Definition, problem: FolderProblem, config: Config, problem_of: Problems
) -> list[Case[FolderProblem]]:
    own = {axis: problem.axes[axis] for axis in definition.var_axes}
    stated = [(c, problem_of({**own, **_free_of(definition, c.axes)})) for c in definition.cases]
    return [Case(c.name, sizes, f"case {c.name}" if c.draws else c.pattern, config) for c, sizes in stated]


def _sizes(problem: FolderProblem) -> str:
    return str(problem).partition(":")[2] or "as it is"


def patterns(definition: Definition, problem: FolderProblem) -> tuple[str, ...]:
    """Return the draws that have an effect, given the inputs' dtypes and how they are drawn."""
    draws = definition.draws_for(problem)
    tensors = [item for item in definition.inputs if item.shape is not None]
    drawn = [(item, draws[item.name].kind if item.name in draws else "random") for item in tensors]
    floats = any(item.dtype in ("fp64", "fp32", "fp16", "bf16") and kind == "random" for item, kind in drawn)
    integers = any(
        "int" in item.dtype or item.dtype == "bool" for item, kind in drawn if kind in ("random", "integers")
    )
    wide = any(item.dtype in WIDE and kind == "random" for item, kind in drawn)
    return (
        *(FLOAT_PATTERNS if floats else ()),
        *((SPECIAL_PATTERN,) if floats and definition.tells_special_values else ()),
        *((INTEGER_PATTERN,) if integers else ()),
        *((WIDE_PATTERN,) if wide else ()),
    )


def _own_lengths(
    definition: Definition, problem: FolderProblem, config: Config, rules: Rules, problem_of: Problems
) -> Iterator[Case[FolderProblem]]:
    for extent in own_extents(definition, problem, config, rules, problem_of):
        is_long = cost(definition, extent.problem, config) > MOST_WORK
        yield Case(f"own {extent.axis}", extent.problem, "normal", config, is_long, extent.part)
        shaped = patterns(definition, problem)
        if other := next((pattern for pattern in ("large", INTEGER_PATTERN) if pattern in shaped), None):
            yield Case(f"own {extent.axis}, {other}", extent.problem, other, config, is_long, extent.part)


def _free_of(definition: Definition, axes: Mapping[str, int]) -> dict[str, int]:
    """Return the values that a stated case may change: those that the kernel's text does not contain."""
    return {axis: axes[axis] for axis in free_axes(definition) if axis in axes}


def _small_problems(
    definition: Definition, problem: FolderProblem, config: Config, rules: Rules, problem_of: Problems
) -> list[FolderProblem]:
    found: dict[FolderProblem, None] = {}
    for wanted in _wanted_sizes(definition, problem, config):
        if (small := _nearest(definition, problem, wanted, rules, problem_of)) is not None:
            found[small] = None
        if len(found) == MOST_SIZES:
            break
    return list(found) or [problem]


def _behind_tiles(
    definition: Definition, problem: FolderProblem, config: Config, rules: Rules, problem_of: Problems
) -> FolderProblem | None:
    """Return a problem that is longer than two tiles along each axis; None if it is invalid or expensive.

    Its values reach what threads and blocks process in later turns.
    """
    free = free_axes(definition)
    values = {axis: _around(found, config) for axis, found in tiles(definition, free, config).items()}
    wanted = {axis: min(values[axis][2], problem.axes[axis]) for axis in free if len(values[axis]) > 2}
    found = _nearest(definition, problem, wanted, rules, problem_of) if len(wanted) == len(free) else None
    return found if found is not None and cost(definition, found, config) <= MOST_WORK else None


def cheap_problems(
    definition: Definition, problem: FolderProblem, config: Config, problem_of: Problems
) -> list[FolderProblem]:
    """Return the small problems that are cheap; the first one if none is."""
    small = _small_problems(definition, problem, config, size_rules(definition, config), problem_of)
    return [p for p in small if cost(definition, p, config) <= MOST_WORK] or small[:1]


def _wanted_sizes(definition: Definition, problem: FolderProblem, config: Config) -> Iterator[dict[str, int]]:
    """Yield values for the free axes: 1, one below and above a tile, beyond two tiles, and the same for each knob.

    The axes run through their lists at different offsets, so that whole tiles of one meet tails of another.
    """
    free = free_axes(definition)
    values = {a: _around(found, config)[:MOST_SIZES] for a, found in tiles(definition, free, config).items()}
    for i in range(max(map(len, values.values()), default=0)):
        yield {a: min(values[a][(i + 2 * k) % len(values[a])], problem.axes[a]) for k, a in enumerate(free)}


def _around(found: list[int], config: Config) -> list[int]:
    knobs = sorted((v for v in config.values() if type(v) is int and 2 <= v <= LARGEST_KNOB), reverse=True)
    steps = [t for t in (*found, *(knobs or [32])) if t > 1]
    around = (v for n, t in enumerate(steps) for v in (t + 1, 2 * t + 2 + n % 2, t - 1, t))
    return list(dict.fromkeys([1, *around]))


def _nearest(
    definition: Definition, problem: FolderProblem, wanted: Mapping[str, int], rules: Rules, problem_of: Problems
) -> FolderProblem | None:
    """Return the wanted problem, shrunk to MOST_WORK and moved to sizes that all rules allow.

    None if no such problem is near.
    """
    given = {**{axis: problem.axes[axis] for axis in definition.var_axes}, **wanted}
    fixed = {axis for axis, _ in _equalities(definition, wanted)}
    while True:
        given = with_equalities(definition, given, wanted)
        found = _allowed(given, wanted, rules, problem_of)
        if found is None or work(definition, found) <= MOST_WORK:
            return found
        largest = max((axis for axis in wanted if axis not in fixed), key=lambda axis: given[axis], default=None)
        if largest is None or given[largest] == 1:
            return found
        given[largest] = max(1, given[largest] // 2)


def _allowed(
    given: dict[str, int], free: Mapping[str, int], rules: Rules, problem_of: Problems
) -> FolderProblem | None:
    """Return the problem, or the nearest allowed one that differs in one size.

    If there is none, all sizes are rounded up to multiples of one number.
    """

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


# Cells of a user's own kernel, from its grid and its problem, since nothing else is known of it.

_ENDS = {-1: "1 short of a tile's end", 0: "whole tiles", 1: "1 behind a tile's end"}


def cells(definition: Definition, problem: FolderProblem, config: Config, problem_of: Problems) -> frozenset[Cell]:
    """Return the cells of each free axis, and those of the draws.

    An axis has its own length, one element, and lengths around the ends of each tile into which the grid cuts it, if
    the problem's and the space's constraints admit such lengths.
    """
    rules = size_rules(definition, config)
    found = {Cell("extents", axis) for axis in free_axes(definition)}
    found |= {Cell("values", pattern) for pattern in ("normal", *patterns(definition, problem)) if not definition.cases}
    for axis, sizes in tiles(definition, free_axes(definition), config).items():
        for what, lengths in _lengths(sizes):
            if any(
                smallest_with(definition, problem, axis, length, rules, problem_of) is not None for length in lengths
            ):
                found.add(Cell("sizes", f"{axis}, {what}"))
    return frozenset(found)


def visited(definition: Definition, case: Case[FolderProblem]) -> frozenset[Cell]:
    """Return the cells that a case visits by its sizes."""
    if case.whole is None:
        return frozenset()
    found = set()
    for axis, sizes in tiles(definition, free_axes(definition), case.config).items():
        length, own = case.problem.axes[axis], case.whole.axes[axis]
        if length == own or (case.part is not None and case.part.startswith(f"{axis} ")):
            found.add(Cell("extents", axis))
        found |= {Cell("sizes", f"{axis}, {what}") for what in _visited(length, sizes)}
    return frozenset(found)


def _lengths(sizes: list[int]) -> Iterator[tuple[str, list[int]]]:
    """Yield the relations that a length may have to tiles, with lengths that have them."""
    yield "one alone", [1]
    for tile in sizes:
        for away, end in _ENDS.items():
            if abs(away) < tile:
                yield f"{end} of {tile}", [turn * tile + away for turn in (1, 2, 3) if turn * tile + away > 0]


def _visited(length: int, sizes: list[int]) -> Iterator[str]:
    if length == 1:
        yield "one alone"
    for tile in sizes:
        for away, end in _ENDS.items():
            if abs(away) < tile and length > away and (length - away) % tile == 0:
                yield f"{end} of {tile}"


# A folder's problem at its own lengths: one axis at a time, shortened if that takes too long.

Problems = Callable[[Mapping[str, int]], FolderProblem]
"""returns the problem with these values of the var axes; raises UsageError if there is none"""
SMALL = (3, 1, 2, 4, 8, 16, 32, 64, 128, 256)
"""lengths of the other axes, in the order in which they are tried"""
MOST_LONG_WORK = 1 << 24
"""cost limit of a case with the problem's own lengths, by `cost`: some seconds in the emulator"""
_THREAD = 8
"""cost of a thread in elements"""


@dataclass(frozen=True, slots=True)
class Extent:
    """A problem with the whole's own length along `axis`, and minimal others."""

    axis: str
    problem: FolderProblem
    part: str | None
    """the part of that length that it has if all of it takes too long"""


def free_axes(definition: Definition) -> list[str]:
    """Return the axes that may have other lengths than the problem's: those that the kernel's text does not contain."""
    return [axis for axis in definition.var_axes if axis not in definition.compile_time]


def elements(definition: Definition, problem: FolderProblem) -> int:
    """Return the number of elements of inputs and outputs."""
    axes = problem.axes
    shapes = [item.shape for item in (*definition.inputs, *definition.outputs) if item.shape is not None]
    return sum(prod(whole(size, axes) for size in shape) for shape in shapes)


def operations(definition: Definition, problem: FolderProblem) -> float:
    """Return the operations that the folder states; 0 if it states none."""
    return float(definition.flops.evaluate(problem.axes)) if definition.flops else 0.0


def work(definition: Definition, problem: FolderProblem) -> float:
    """Return approximately the least cost of a case: elements and a quarter of the operations."""
    return elements(definition, problem) + operations(definition, problem) / 4


def cost(definition: Definition, problem: FolderProblem, config: Config) -> float:
    """Return approximately the cost of a launch in the emulator: the work, and that of each thread."""
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

    If that is not affordable, it is the longest affordable one that leaves the same remainders.
    """
    for axis in free_axes(definition):
        own = problem.axes[axis]
        for length in (own, *shorter_lengths(own)):
            found = smallest_with(definition, problem, axis, length, rules, problem_of)
            if found is not None and cost(definition, found, config) <= MOST_LONG_WORK:
                yield Extent(axis, found, None if length == own else f"{axis} {length:,} of {own:,}")
                break


def shorter_lengths(length: int) -> Iterator[int]:
    """Yield shorter lengths, the longest first, that leave the same remainders modulo powers of two."""
    step = 1 << (length.bit_length() - 1)
    while step > 1:
        if step + length % step < length:
            yield step + length % step
        step //= 2


def smallest_with(
    definition: Definition, problem: FolderProblem, axis: str, length: int, rules: Rules, problem_of: Problems
) -> FolderProblem | None:
    """Return the first valid problem with that length of the axis: others short, or as few as possible at their own."""
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
    """Return the problem of these sizes, or None if it is invalid.

    Movable axes that a constraint `axis == expression` fixes are set first.
    """
    try:
        problem = problem_of(with_equalities(definition, given, movable))
    except UsageError:
        return None
    return problem if rules(problem.axes) else None


def with_equalities(definition: Definition, given: Mapping[str, int], movable: Mapping[str, int]) -> dict[str, int]:
    """Return sizes with those axes set that a constraint `axis == expression` fixes, as in FlashInfer-Trace."""
    sizes = dict(given)
    for axis, expression in _equalities(definition, movable):
        with suppress(UsageError):
            sizes[axis] = whole(expression, definition.sizes(sizes))
    return sizes


def _equalities(definition: Definition, movable: Mapping[str, int]) -> Iterator[tuple[str, Expression]]:
    """Yield each movable axis that a constraint fixes, with the expression that it equals."""
    for constraint in definition.constraints:
        sides = ((axis, equal) for axis, equal in _equal_sides(constraint) if axis in movable)
        yield from islice(sides, 1)


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

    Axes of `first` are shortened before others, and the longest first. None if no shorter problem is valid.
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
    """Return which of the whole problem's lengths a problem has; None for all."""
    lengths = [(axis, problem.axes[axis], whole_problem.axes[axis]) for axis in definition.var_axes]
    return ", ".join(f"{axis} {own:,} of {all_of:,}" for axis, own, all_of in lengths if own < all_of) or None


def small_problem(
    definition: Definition, problem: FolderProblem, least: int, rules: Rules, problem_of: Problems
) -> FolderProblem:
    """Return a problem whose free axes are all short, but at least `least`, or the problem itself if none is valid."""
    free = free_axes(definition)
    for length in sorted({size for size in SMALL if size >= least} | {least}):
        short = {axis: min(length, problem.axes[axis]) for axis in free}
        given = {**{axis: problem.axes[axis] for axis in definition.var_axes}, **short}
        found = attempt(given, definition, short, rules, problem_of)
        if found is not None:
            return found
    return problem


# Cases at full size for a folder's kernel: blocks of the problem itself, each run by itself.
#
# Stores of blocks are compared with the reference of the whole problem, or of a few places along independent axes.
# Where neither is affordable the problem is shortened.

LaunchOf = Callable[[FolderProblem], Launch]

MOST_ELEMENTS = 1 << 26
"""limit of the bytes of all tensors, up to which the float64 reference of a whole problem fits into a few gigabytes"""
MOST_OPERATIONS = 4e10
"""limit of the operations of a whole problem, which a core executes in some seconds"""
REAL_BYTES = 1 << 28
"""limit of the bytes of inputs that are drawn whole if they cannot be pooled"""
LEAST = 5
"""length of short axes, more than the few sampled places"""


@dataclass(frozen=True, slots=True)
class FolderFullCase:
    """Some blocks of a launch for `problem`, which is `whole` or a part of it.

    `small` is a problem with few blocks, whose launch shows whether a single block does what it should.
    """

    name: str
    problem: FolderProblem
    whole: FolderProblem
    config: Config = field(hash=False)
    small: FolderProblem
    small_launch: Launch
    part: str | None = None
    entry: str | None = None
    """the kernel that is run; None for the only one"""
    alone: bool = True
    """whether a right kernel's blocks do not need one another; else only what fails in blocks that do not is a fault"""
    compared: bool = True
    """whether what the blocks write is compared; else only their accesses are judged"""


def full_plan(
    definition: Definition, problem: FolderProblem, config: Config, launch_of: LaunchOf, problem_of: Problems
) -> list[tuple[FolderFullCase, Launch]]:
    """Return the problem itself, and a part of it for a reference that takes too long.

    Of kernels with scratch memory, of several, and of those that write only a part of an output the accesses alone are
    judged. There is none for a problem that a case launches whole.
    """
    if judged_whole(definition, problem, config):
        return []
    rules = size_rules(definition, config)
    if not definition.runs_alone:
        return _dependent_plan(definition, problem, config, launch_of, problem_of)
    small = small_problem(definition, problem, LEAST, rules, problem_of)
    of_small = (small, launch_of(small))
    plan = [(FolderFullCase("full grid", problem, problem, config, *of_small), launch_of(problem))]
    if not affordable(definition, problem):
        cut = cut_until(definition, problem, lambda p: affordable(definition, p), rules, problem_of)
        if cut is not None:
            part = part_of(definition, cut, problem)
            plan.append((FolderFullCase("full grid in part", cut, problem, config, *of_small, part), launch_of(cut)))
    return plan


def _dependent_plan(
    definition: Definition, problem: FolderProblem, config: Config, launch_of: LaunchOf, problem_of: Problems
) -> list[tuple[FolderFullCase, Launch]]:
    """Return the problem itself for each kernel, whose blocks may need one another."""
    small = max(cheap_problems(definition, problem, config, problem_of), key=lambda p: work(definition, p))
    own = definition.writes_whole and pools_inout(definition, problem)
    whole_launch, of_small = launch_of(problem), launch_of(small)
    launches = zip(whole_launch.kernels(definition.entry), of_small.kernels(definition.entry), strict=True)
    case = FolderFullCase(
        "full grid", problem, problem, config, small, of_small, alone=False,
        compared=own and not definition.scratch and not definition.then,
    )  # fmt: skip
    plan = [
        (replace(case, entry=entry, small_launch=small_launch), launch)
        for (entry, launch), (_, small_launch) in launches
    ]
    if own and whole_launch.then:
        plan.append((replace(case, name="full grid, all kernels", compared=True), whole_launch))
    return plan


def pools_inout(definition: Definition, problem: FolderProblem) -> bool:
    """Return whether in-out tensors are `random` and of one dtype, so that parts of them can be made."""
    draws = definition.draws_for(problem)
    items = [item for item in definition.inputs if item.name in definition.inout]
    is_random = all(item.name not in draws or draws[item.name].kind == "random" for item in items)
    return is_random and len({item.dtype for item in items}) <= 1


def affordable(definition: Definition, problem: FolderProblem) -> bool:
    """Return whether the reference can be run on the whole problem."""
    return (
        elements(definition, problem) <= MOST_ELEMENTS
        and operations(definition, problem) <= MOST_OPERATIONS
        and input_bytes(definition, problem) <= REAL_BYTES
    )


def blocks_to_draw(case: FolderFullCase, definition: Definition, launch: Launch, least: int) -> int:
    """Return how many blocks are drawn: more than `least` where they are small."""
    of_each = cost(definition, case.problem, case.config) / prod(launch.grid)
    return max(least, min(4 * least, int(MOST_LONG_WORK / 8 / of_each)))
