"""Cases at full size for a folder's kernel: blocks of the problem itself, each run by itself.

Stores of blocks are compared with the reference of the whole problem, or of a few places along independent axes. Where
neither is affordable the problem is shortened.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod

from evoengine.records import Config, Launch
from evoengine.workloads.folder_cases import judged_whole
from evoengine.workloads.folder_definition import Definition, FolderProblem
from evoengine.workloads.folder_extents import (
    MOST_WORK,
    Problems,
    cost,
    cut_until,
    elements,
    input_bytes,
    operations,
    part_of,
    small_problem,
)
from evoengine.workloads.folder_space import size_rules

LaunchOf = Callable[[FolderProblem], Launch]

MOST_ELEMENTS = 1 << 26
"""of all tensors, such that the reference of a whole problem fits into a few gigabytes in float64"""
MOST_OPERATIONS = 4e10
"""of a whole problem, which a core executes in some seconds"""
REAL_BYTES = 1 << 28
"""limit of inputs that are drawn whole where they cannot be pooled"""
LEAST = 5
"""the length of short axes, more than the few sampled places"""


@dataclass(frozen=True, slots=True)
class FolderFullCase:
    """Some blocks of a launch for `problem`, which is `whole` or a part of it.

    `small` is a problem with few blocks, whose launch shows whether a block by itself writes anything at all.
    """

    name: str
    problem: FolderProblem
    whole: FolderProblem
    config: Config = field(hash=False)
    small: FolderProblem
    small_launch: Launch
    part: str | None = None


def full_plan(
    definition: Definition, problem: FolderProblem, config: Config, launch_of: LaunchOf, problem_of: Problems
) -> list[tuple[FolderFullCase, Launch]]:
    """Return the problem itself, and a part of it for a reference that takes too long.

    A kernel with scratch memory has none: its blocks talk, so that one alone is nothing. Nor is there any for a problem
    that a case launches whole.
    """
    if definition.scratch or judged_whole(definition, problem, config):
        return []
    rules = size_rules(definition, config)
    small = small_problem(definition, problem, LEAST, rules, problem_of)
    of_small = (small, launch_of(small))
    plan = [(FolderFullCase("full grid", problem, problem, config, *of_small), launch_of(problem))]
    if not affordable(definition, problem):
        cut = cut_until(definition, problem, lambda p: affordable(definition, p), rules, problem_of)
        if cut is not None:
            part = part_of(definition, cut, problem)
            plan.append((FolderFullCase("full grid in part", cut, problem, config, *of_small, part), launch_of(cut)))
    return plan


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
    return max(least, min(4 * least, int(MOST_WORK / 8 / of_each)))
