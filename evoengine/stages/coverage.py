"""Measure which cells of a configuration the gate's cases visit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Set

import numpy as np

from evoengine.devices.base import VisitKind
from evoengine.records import Coverage, Launch
from evoengine.workloads.base import AnyCase, AnyWorkload, Drawn
from evoengine.workloads.coverage import COUNTED, Cell


class CoverageLog:
    """Collects the cells that the cases of one plan visit, all of one problem and configuration."""

    def __init__(self, workload: AnyWorkload) -> None:
        self._workload, self._tensors = workload, workload.tensors()
        self._cells: frozenset[Cell] = frozenset()
        self._visited: set[Cell] = set()
        self._votes: frozenset[Cell] = frozenset()
        self._counted = False

    def add(self, case: AnyCase, launch: Launch, visits: np.ndarray, drawn: Drawn) -> None:
        """Add a case that was launched, by the device's count of visits and the inputs that it got."""
        if case.whole is None:
            return
        self._cells = self._cells or self._workload.cells(case.whole, case.config)
        self._counted |= bool(len(visits)) or not any(cell.kind in COUNTED for cell in self._cells)
        if not any(cell.kind == "votes" for cell in self._cells - self._votes):
            self._see_votes(visits)
        self._visited |= self._workload.visited(case, launch, visits)
        self._visited |= self._tensors.shown(case, drawn)

    def _see_votes(self, visits: np.ndarray) -> None:
        """Take every vote that some warp made for two cells, true and false, where the workload knows of none."""
        sites = dict(_votes_by_site(visits))
        self._votes |= {Cell("votes", f"at {site}, {sign}") for site in sites for sign in ("true", "false")}
        self._cells |= self._votes
        for site, at in sites.items():
            if at["true"].any():
                self._visited.add(Cell("votes", f"at {site}, true"))
            if (at["count"] > at["true"]).any():
                self._visited.add(Cell("votes", f"at {site}, false"))

    def result(self) -> Coverage | None:
        """Return the coverage.

        None for a workload without cells, and where some need a count that the device does not keep.
        """
        return coverage_of(self._cells, self._visited) if self._counted and self._cells else None


def _votes_by_site(visits: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    votes = visits[visits["kind"] == VisitKind.VOTE]
    for site in np.unique(votes["site"]):
        yield int(site), votes[votes["site"] == site]


def coverage_of(cells: frozenset[Cell], visited: set[Cell]) -> Coverage:
    """Return how many cells of each kind there are and were visited, and the names of all others."""
    missing = sorted(cells - visited)
    counts, left = Counter(cell.kind for cell in cells), Counter(cell.kind for cell in missing)
    kinds = sorted(counts)
    return Coverage(
        {kind: counts[kind] for kind in kinds},
        {kind: counts[kind] - left[kind] for kind in kinds},
        tuple(map(str, missing)),
    )


def joined(first: Coverage | None, second: Coverage | None) -> Coverage | None:
    """Return the coverage of two plans of one configuration together, each with all of its missing cells."""
    if first is None or second is None:
        return first or second
    both = set(first.missing) & set(second.missing)
    left = Counter(cell.partition(": ")[0] for cell in both)
    missing = tuple(cell for cell in first.missing if cell in both)
    return Coverage(first.cells, {kind: count - left[kind] for kind, count in first.cells.items()}, missing)


def without_missing(coverage: Coverage | None, cells: Set[Cell]) -> Coverage | None:
    """Return the coverage without those of its missing cells that are among `cells`."""
    if coverage is None:
        return None
    names = set(map(str, cells)) & set(coverage.missing)
    counts = Counter(name.partition(": ")[0] for name in names)
    return Coverage(
        {kind: count - counts[kind] for kind, count in coverage.cells.items()},
        coverage.visited,
        tuple(cell for cell in coverage.missing if cell not in names),
    )
