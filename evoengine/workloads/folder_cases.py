"""The gate's cases of a folder's workload.

They are its own, or small problems set against the configuration's knobs, and the problem's own lengths.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from evoengine.errors import UsageError
from evoengine.records import Config
from evoengine.workloads.base import Case
from evoengine.workloads.folder_definition import Definition, FolderProblem
from evoengine.workloads.folder_extents import MOST_WORK as MOST_LONG_WORK
from evoengine.workloads.folder_extents import (
    Problems,
    cost,
    cut_until,
    free_axes,
    own_extents,
    part_of,
    with_equalities,
    work,
)
from evoengine.workloads.folder_space import Rules, size_rules, tiles

MOST_SIZES = 8
"""number of small problems of different sizes"""
LARGEST_KNOB = 256
"""largest knob that may be a tile: twice as many rows would make the gate slow"""
MOST_WORK = 1 << 20
"""elements of a case's tensors plus a quarter of its operations: tens of milliseconds in the emulator"""
FLOAT_PATTERNS = ("zeros", "one-hot", "large", "negative")
"""patterns that replace the draw of `random` floating-point inputs"""
INTEGER_PATTERN = "ends"
"""the pattern that takes integers from the ends of their ranges, and equal or nearly equal booleans"""
NEARBY = 128
"""distance from a size within which its nearest allowed one is searched"""
MULTIPLES = (2, 4, 8, 16, 32, 64, 128, 256)
"""multiples to which all sizes are rounded up where no single change is enough"""


def gate_cases(
    definition: Definition, problem: FolderProblem, config: Config, problem_of: Problems
) -> tuple[Case[FolderProblem], ...]:
    """Return the folder's cases where it states any, else cases chosen by size.

    These are sizes around those of tiles, draws that show what others hide, and the problem's own length along each
    axis. Where there is time, the problem itself is among them. Axes that the text of the kernel contains keep the
    problem's values. Sizes respect the problem's constraints, and those of the search space that state by `%` which
    sizes a configuration supports.
    """
    rules = size_rules(definition, config)
    if definition.cases:
        cases = _stated_cases(definition, problem, config, problem_of)
    else:
        small = _small_problems(definition, problem, config, rules, problem_of)
        cheap = [p for p in small if cost(definition, p, config) <= MOST_WORK] or small[:1]
        largest = max(cheap, key=lambda p: work(definition, p))
        cases = [Case(_sizes(p), p, "normal", config) for p in small]
        cases += [Case(pattern, largest, pattern, config) for pattern in patterns(definition, problem)]
        cases += _own_lengths(definition, problem, config, rules, problem_of)
    if judged_whole(definition, problem, config) and all(case.problem != problem for case in cases):
        is_long = cost(definition, problem, config) > MOST_WORK
        cases.append(Case("the problem itself", problem, "normal", config, long=is_long))
    elif definition.scratch and (cut := _part(definition, problem, config, rules, problem_of)) is not None:
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

    Kernels whose blocks talk are not judged at full size, where blocks run alone: what they count over several axes
    goes far in this case alone.
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
    """Return the draws that change something: of the inputs' dtypes and of how they are drawn."""
    draws = definition.draws_for(problem)
    tensors = [item for item in definition.inputs if item.shape is not None]
    drawn = [(item, draws[item.name].kind if item.name in draws else "random") for item in tensors]
    floats = any(item.dtype in ("fp64", "fp32", "fp16", "bf16") and kind == "random" for item, kind in drawn)
    integers = any(
        "int" in item.dtype or item.dtype == "bool" for item, kind in drawn if kind in ("random", "integers")
    )
    return (*(FLOAT_PATTERNS if floats else ()), *((INTEGER_PATTERN,) if integers else ()))


def _own_lengths(
    definition: Definition, problem: FolderProblem, config: Config, rules: Rules, problem_of: Problems
) -> Iterator[Case[FolderProblem]]:
    for extent in own_extents(definition, problem, config, rules, problem_of):
        is_long = cost(definition, extent.problem, config) > MOST_WORK
        yield Case(f"own {extent.axis}", extent.problem, "normal", config, is_long, extent.part)
        if "large" in patterns(definition, problem):
            yield Case(f"own {extent.axis}, large", extent.problem, "large", config, is_long, extent.part)


def _free_of(definition: Definition, axes: Mapping[str, int]) -> dict[str, int]:
    """Return the values that a stated case may change: not those that the kernel's text holds."""
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


def _wanted_sizes(definition: Definition, problem: FolderProblem, config: Config) -> Iterator[dict[str, int]]:
    """Yield values for the free axes: 1, one below and one above a tile, past two of it, the same of each knob.

    The axes run through their lists at different offsets, so that whole tiles of one meet tails of another.
    """
    free = free_axes(definition)
    values = {a: _around(found, config)[:MOST_SIZES] for a, found in tiles(definition, free, config).items()}
    for i in range(max(map(len, values.values()), default=0)):
        yield {a: min(values[a][(i + 2 * k) % len(values[a])], problem.axes[a]) for k, a in enumerate(free)}


def _around(found: list[int], config: Config) -> list[int]:
    knobs = sorted((v for v in config.values() if type(v) is int and 2 <= v <= LARGEST_KNOB), reverse=True)
    steps = [t for t in (*found, *(knobs or [32])) if t > 1]
    return list(dict.fromkeys([1, *(v for t in steps for v in (t + 1, 2 * t + 3, t - 1, t))]))


def _nearest(
    definition: Definition, problem: FolderProblem, wanted: Mapping[str, int], rules: Rules, problem_of: Problems
) -> FolderProblem | None:
    """Return the wanted problem, shrunk to MOST_WORK and moved to sizes that all rules allow.

    None where no such problem is near.
    """
    given = {**{axis: problem.axes[axis] for axis in definition.var_axes}, **wanted}
    while True:
        given = with_equalities(definition, given, wanted)
        found = _allowed(given, wanted, rules, problem_of)
        if found is None or work(definition, found) <= MOST_WORK:
            return found
        largest = max(wanted, key=lambda axis: given[axis], default=None)
        if largest is None or given[largest] == 1:
            return found
        given[largest] = max(1, given[largest] // 2)


def _allowed(
    given: dict[str, int], free: Mapping[str, int], rules: Rules, problem_of: Problems
) -> FolderProblem | None:
    """Return the problem, or the nearest allowed one that differs in one size.

    Where there is none, all sizes are rounded up to multiples of one number.
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
