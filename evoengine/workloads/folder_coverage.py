"""Cells of a user's own kernel, from its grid and its problem, since nothing else is known of it."""

from __future__ import annotations

from collections.abc import Iterator

from evoengine.records import Config
from evoengine.workloads.base import Case
from evoengine.workloads.coverage import Cell
from evoengine.workloads.folder_cases import patterns
from evoengine.workloads.folder_definition import Definition, FolderProblem
from evoengine.workloads.folder_extents import Problems, free_axes, smallest_with
from evoengine.workloads.folder_space import size_rules, tiles

_ENDS = {-1: "1 short of a tile's end", 0: "whole tiles", 1: "1 behind a tile's end"}


def cells(definition: Definition, problem: FolderProblem, config: Config, problem_of: Problems) -> frozenset[Cell]:
    """Return the cells of each free axis, and those of the draws.

    An axis has its own length, one element, and lengths about the ends of each tile into which the grid cuts it, where
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
    """Yield what a length may be against tiles, with lengths that are so."""
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
