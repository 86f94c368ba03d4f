"""Cells of a configuration: distinct behaviours of its kernel, each of which some case of the gate must visit.

Workloads derive cells from a configuration. The cells that a plan visits are measured: from a device's counts of visits
together with the sizes of the cases, and from the drawn values.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from evoengine.devices.base import VisitKind

PASSES = ("first", "second", "third")
"""passes over a pipeline's buffers; in the third the barriers' phases equal those of the first"""
COUNTED = ("steps", "votes")
"""kinds of cells whose visits a device must count"""
NEAR = 3
"""distance from the end of a tile, in elements, within which each length may expose another fault"""
MANY = 36
"""number of groups of rows or sequences, more than the lanes of a warp examine at once"""
SUMMED_ROWS = 32
"""rows above which sums of all errors are judged: with 32 columns each, their root mean square scatters by 2 %"""
ROUNDINGS = f"roundings of {SUMMED_ROWS} rows and more, whose sums are judged"
GUARD = 3
"""rows, or pages of a pool, that belong to no group or sequence, in each of those cases"""


class Cell(NamedTuple):
    kind: str
    what: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.what}"


def own_tail(length: int, tile: int, unit: int = 1) -> int:
    """Return the remainder that a length leaves for its last tile.

    If there is none, return about a third of a tile in whole units.
    """
    return length % tile or -(-(tile // 3 + 1) // unit) * unit


def remainder_cells(axis: str, tile: int, own: int, unit: int = 1, near: int = NEAR) -> Iterator[Cell]:
    """Yield the cells of an axis that is cut into tiles.

    They are lengths that end with a tile, up to `near` units before or after its end, or with the problem's own tail,
    and a single unit. Lengths are multiples of `unit`. Remainders that a tile cannot have are not cells.
    """
    yield Cell(axis, "one alone")
    for away in range(-near, near + 1):
        if abs(away) * unit < tile:
            yield Cell(axis, _end(away))
    yield Cell(axis, _tail(own, tile, unit))


def visited_remainders(axis: str, length: int, tile: int, own: int, unit: int = 1) -> Iterator[Cell]:
    """Yield the remainder cells that a length visits."""
    if length == unit:
        yield Cell(axis, "one alone")
    for away in range(-NEAR, NEAR + 1):
        if length > max(0, away * unit) and (length - away * unit) % tile == 0 and abs(away) * unit < tile:
            yield Cell(axis, _end(away))
    if length % tile == own_tail(own, tile, unit) % tile:
        yield Cell(axis, _tail(own, tile, unit))


def _tail(own: int, tile: int, unit: int) -> str:
    return f"{own_tail(own, tile, unit)} in the last tile"


def _end(away: int) -> str:
    return "whole tiles" if not away else f"{abs(away)} {'short of' if away < 0 else 'behind'} a tile's end"


def pipeline_cells(parts: Sequence[str], buffers: int) -> Iterator[Cell]:
    """Yield each part of a tile (rows of a warp, its columns) in each buffer at each pass, and a last step in each."""
    for part in parts:
        for buffer in range(buffers):
            for turn in PASSES:
                yield Cell("steps", f"{part}, buffer {buffer}, {turn} pass")
    for buffer in range(buffers):
        yield Cell("steps", f"the last in buffer {buffer}")


def visited_steps(parts: Iterable[str], buffers: int, steps: int | Sequence[int]) -> Iterator[Cell]:
    """Yield the pipeline cells that a block with these parts visits in so many steps, or in those of these numbers."""
    parts, numbers = list(parts), range(steps) if isinstance(steps, int) else steps
    if not numbers or not parts:
        return
    for step in numbers:
        if step >= len(PASSES) * buffers:
            break
        for part in parts:
            yield Cell("steps", f"{part}, buffer {step % buffers}, {PASSES[step // buffers]} pass")
    yield Cell("steps", f"the last in buffer {numbers[-1] % buffers}")


def visits_by_block(visits: np.ndarray, kind: VisitKind, warps: Sequence[int]) -> dict[int, int]:
    """Return for each block the lowest number of visits of those warps to any site of a kind."""
    of_kind = visits[visits["kind"] == kind]
    found: dict[int, int] = {}
    for block in np.unique(visits["block"]):
        own = of_kind[of_kind["block"] == block]
        counts = [int(own["count"][own["warp"] == warp].sum()) for warp in warps]
        found[int(block)] = min(counts)
    return found


def vote_cells(warps: Iterable[int]) -> Iterator[Cell]:
    """Yield a vote of each warp that is true, and one that is false."""
    for warp in warps:
        yield from (Cell("votes", f"warp {warp}, {sign}") for sign in ("true", "false"))


def visited_votes(visits: np.ndarray) -> Iterator[Cell]:
    """Yield the vote cells that a device counted."""
    votes = visits[visits["kind"] == VisitKind.VOTE]
    for vote in votes:
        if vote["true"]:
            yield Cell("votes", f"warp {vote['warp']}, true")
        if vote["count"] > vote["true"]:
            yield Cell("votes", f"warp {vote['warp']}, false")
