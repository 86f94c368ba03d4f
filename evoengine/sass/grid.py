"""The blocks of a launch: their order, the length of each, and those that one SM gets.

Everything counts clusters, of one block where a kernel has no clusters.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from evoengine.devices.base import KernelFailure
from evoengine.sass.core import Program
from evoengine.sass.launch import Launch
from evoengine.sass.model import compared, count_block, count_lone_warp

WHOLE_LIMIT = 60_000_000
"""warp instructions of a cluster that are counted"""
EXTRAPOLATED = 6_000_000
"""the same of a longer one, whose end its loops tell; the work of one whose loops do not is not known"""
MOST_COUNTED = 5
"""clusters as long as that which are counted of a launch"""
UNLIKE = 0.02
"""difference in instructions between blocks of the grid's inside, from which on they are sampled one by one"""
SAMPLED, ROWS_SAMPLED = 8, 16
"""blocks counted where those of a row differ, and where rows do: more, as the longest come first of a part of the rows
at a time"""
MOST_PLACED = 20_000
"""clusters placed one by one; of more, a part of the rows on a part of the SMs stands for all"""
FEWEST_CROSSED, CROSSED = 4, 1.5
"""rows and columns of a grid, and the ratio of lengths of two clusters of a row or column, from which on both tell how
long a cluster is"""
SHORT = 50_000
"""warp instructions of blocks that are counted whole to see whether they differ; of longer ones one warp is"""
LONE, WHOLE = 1_000_000, 6_000_000
"""warp instructions, of one warp of each cluster and of whole ones, within which each length is counted"""
PROBED, TOO_MUCH = 3, 2
"""clusters that are counted first, each within so many times its part of what may be counted"""
MOST_KNOWN = 4096
"""clusters whose lengths are counted one by one"""
COUNTED_WHOLE = 5
"""clusters, from the shortest to the longest, whose counts stand for all where the length of each is known"""
BEGINNING = 8000
"""warp instructions of a cluster within which it must have compared what tells how long it is"""
DYNAMIC = 300_000
"""warp instructions: of persistent blocks no longer than this, three are counted to see whether they differ"""
MOST_SAMPLED = 16
"""of them, where they do, so that the last of 8192 clusters that have a tile more is found"""


@dataclass(frozen=True, slots=True)
class Grid:
    """A grid in clusters of `width` (x, y, z) blocks: `size` clusters along x, y, z, launched x first."""

    blocks: tuple[int, int, int]
    width: tuple[int, int, int]

    @property
    def size(self) -> tuple[int, int, int]:
        x, y, z = (n // w for n, w in zip(self.blocks, self.width, strict=True))
        return x, y, z

    @property
    def columns(self) -> int:
        return self.size[0]

    @property
    def rows(self) -> int:
        """Return the number of clusters along y and z."""
        return self.size[1] * self.size[2]

    @property
    def clusters(self) -> int:
        return math.prod(self.size)

    @property
    def together(self) -> int:
        """Return the number of blocks of a cluster."""
        return math.prod(self.width)

    @property
    def middle(self) -> tuple[int, int]:
        return (self.columns - 1) // 2, (self.rows - 1) // 2

    def block(self, cluster: int) -> int:
        """Return the number in the grid of a cluster's first block."""
        x, y, z = (
            cluster % self.size[0],
            cluster // self.size[0] % self.size[1],
            cluster // self.size[0] // self.size[1],
        )
        columns, rows, _ = self.blocks
        return ((z * self.width[2]) * rows + y * self.width[1]) * columns + x * self.width[0]

    def at(self, column: int, row: int) -> int:
        """Return the cluster's number."""
        return row * self.columns + column


def grid_of(launch: Launch) -> Grid:
    return Grid(launch.grid, launch.cluster)


# ── how long blocks are ─────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Work:
    """What the clusters of a grid do: mean `counts` per cluster, and the instructions of each [clusters].

    `instructions` has a single element where all clusters are alike.
    """

    counts: Mapping[str, float]
    instructions: np.ndarray
    known: bool = False
    """whether the length of each was counted, or told by what it compares"""

    @property
    def alike(self) -> bool:
        return self.instructions.size == 1

    @property
    def mean(self) -> float:
        return self.counts["instructions"]


def count(program: Program, launch: Launch, grid: Grid, at_once: int) -> Work:
    """Count clusters of the grid's inside and edges, weighted by how many there are of each.

    `at_once` run on the GPU together. Raises KernelFailure where one cannot run, or is too long to be counted.
    """
    left = MOST_COUNTED * WHOLE_LIMIT

    def of(cluster: int) -> Mapping[str, float]:
        nonlocal left
        most = min(left, WHOLE_LIMIT)
        block = grid.block(cluster)
        counts = count_block(program, launch, block, max(1, min(most, EXTRAPOLATED) // grid.together))
        if not counts["complete"] and counts["end"] <= most:
            counts = count_block(program, launch, block, max(1, most // grid.together))
        left -= int(counts["instructions"])
        if not counts["complete"] and not counts["end"]:
            raise KernelFailure(
                f"more than {most:,} warp instructions of block {block} and no end: "
                "its work is not known, so no time can be predicted"
            )
        return counts if counts["complete"] else _extrapolated(counts)

    if launch.unequal_indices and (work := _each_by_itself(program, launch, grid, of)):
        return work
    if grid.clusters <= at_once:
        return _of_one_wave(grid, of(0), of)
    column, row = grid.middle
    inside = of(grid.at(column, row))

    last_warp = math.ceil(math.prod(launch.threads) / 32) - 1

    def like_inside(cluster: int, last: bool = False) -> bool:
        if SHORT < inside["instructions"] <= WHOLE_LIMIT:
            try:
                warp, expected = (last_warp, "of_last_warps") if last else (0, "of_first_warps")
                return _near(inside[expected], count_lone_warp(program, launch, grid.block(cluster), warp, WHOLE_LIMIT))
            except KernelFailure:  # warps that wait for each other's work
                pass
        return _alike(inside, of(cluster))

    other_row = int(0.382 * grid.rows)  # at no edge, and no simple fraction, after which an order may repeat
    rows_differ = grid.rows >= ROWS_SAMPLED and not like_inside(grid.at(column, other_row))
    columns_differ = not rows_differ and grid.columns > 2 and not like_inside(0)
    crossed = (rows_differ or columns_differ) and _is_crossed(program, launch, grid, rows_differ)
    if crossed and (work := _each_by_itself(program, launch, grid, of)):
        return work
    if rows_differ:
        rows = np.unique(((np.arange(ROWS_SAMPLED) + 0.5) * grid.rows / ROWS_SAMPLED).astype(int))
        sampled = [of(grid.at(column, int(r))) for r in rows]
        along, known = _between(program, launch, grid, [grid.at(column, r) for r in range(grid.rows)], rows, sampled)
        return Work(_of_lengths(sampled, along), np.repeat(along, grid.columns), known)
    if columns_differ:
        columns = _spread_out(grid.columns, ROWS_SAMPLED if grid.rows == 1 else SAMPLED)
        sampled = [of(grid.at(int(c), row)) for c in columns]
        along, known = _between(program, launch, grid, [grid.at(c, row) for c in range(grid.columns)], columns, sampled)
        return Work(_of_lengths(sampled, along), np.tile(along, grid.rows), known)
    if like_inside(grid.clusters - 1, last=True):  # where a tensor's end cuts a block, it cuts its last warp
        return _all_alike(inside)
    edges = _edges(grid)
    return _all_alike(_mean([of(grid.at(x, y)) for x, y, _ in edges], [weight for _, _, weight in edges]))


def _extrapolated(counts: Mapping[str, float]) -> Mapping[str, float]:
    """Return the counts of a block to its end, which its loops tell, from those of its beginning."""
    factor = counts["end"] / counts["instructions"]
    return {name: count * factor for name, count in counts.items() if name != "end"}


def _is_crossed(program: Program, launch: Launch, grid: Grid, rows_differ: bool) -> bool:
    """Return whether a cluster's length depends on both its row and its column, as in half of a matrix.

    `rows_differ` says which of the two it was taken to depend on. One warp of some clusters inside the grid is counted;
    where it waits for others, nothing is known and the result is False.
    """

    def lone(column: int, row: int) -> int:
        return count_lone_warp(program, launch, grid.block(grid.at(column, row)), 0, SHORT)

    column, row = grid.middle
    plane = grid.size[1] if grid.size[1] >= FEWEST_CROSSED else grid.rows
    if min(grid.columns, plane) < FEWEST_CROSSED:
        return False
    first = grid.rows // 2 // plane * plane
    try:
        for x, y in itertools.product(*((size // 4, 3 * size // 4) for size in (grid.columns, plane))):
            r = first + y
            one, other = lone(x, r), lone(column, r) if rows_differ else lone(x, row)
            if max(one, other) > CROSSED * min(one, other):
                return True
    except KernelFailure:
        pass
    return False


def _each_by_itself(
    program: Program, launch: Launch, grid: Grid, of: Callable[[int], Mapping[str, float]]
) -> Work | None:
    """Return the work of clusters of which each was counted; None where they are alike or too long for that.

    Where indices say how long clusters are, one may be many times as long as its neighbours, so nothing is interpolated
    between them. One warp of each is counted where it runs alone, as whole clusters take several times as long.
    """

    def lone(warp: int) -> Callable[[int, int], int]:
        return lambda cluster, left: count_lone_warp(program, launch, grid.block(cluster), warp, left)

    def whole(cluster: int, left: int) -> int:
        return int(count_block(program, launch, grid.block(cluster), left)["instructions"])

    last_warp = math.ceil(math.prod(launch.threads) / 32) - 1
    for counted, limit in ((lone(0), LONE), (lone(last_warp), LONE), (whole, WHOLE)):
        try:
            lengths = _lengths(grid, counted, limit)
        except KernelFailure:  # a warp that waits for what others do, or reads it
            continue
        if lengths is None:
            return None
        if _near(float(lengths.min()), float(lengths.max())):
            continue
        order = np.argsort(lengths, kind="stable")
        chosen = order[np.linspace(0, len(order) - 1, COUNTED_WHOLE).round().astype(int)]
        known, first = np.unique(lengths[chosen], return_index=True)
        sampled = [of(int(cluster)) for cluster in chosen[first]]
        each = {name: np.interp(lengths, known, [c[name] for c in sampled]) for name in sampled[0]}
        return Work({name: float(of_all.mean()) for name, of_all in each.items()}, each["instructions"], known=True)
    return None


def _between(
    program: Program, launch: Launch, grid: Grid, clusters: Sequence[int], places: np.ndarray,
    sampled: Sequence[Mapping[str, float]],
) -> tuple[np.ndarray, bool]:  # fmt: skip
    """Return the instructions of each of `clusters`, and whether they are known; those at `places` were counted.

    What a comparison of integers compares when a cluster first comes to it tells how long the cluster is, if it does so
    of all that were counted: most often it is the end of the main loop. Where none does, lengths are interpolated.
    """
    lengths = np.array([c["instructions"] for c in sampled])
    told = _told(program, launch, [grid.block(c) for c in clusters], places, lengths)
    return (np.interp(np.arange(len(clusters)), places, lengths), False) if told is None else (told, True)


def _told(
    program: Program, launch: Launch, blocks: Sequence[int], places: np.ndarray, lengths: np.ndarray
) -> np.ndarray | None:
    """Return the instructions of each of `blocks` by what one comparison compares; None where none tells.

    `lengths` are those of the blocks at `places`.
    """
    if len(blocks) > MOST_KNOWN:
        return None
    try:
        one, other, after = np.moveaxis(compared(program, launch, [blocks[n] for n in places], BEGINNING), 2, 0)
        told = [
            (float(after[:, at].max()), at, weights, float(slope), float(offset))
            for at in np.flatnonzero(~np.isnan(after).any(axis=0))
            for weights in ((1, 0), (0, 1), (-1, 1))
            if np.ptp(values := weights[0] * one[:, at] + weights[1] * other[:, at]) > 0
            for slope, offset in [np.polyfit(values, lengths, 1)]
            if np.abs(slope * values + offset - lengths).max() <= UNLIKE * lengths.mean()
        ]
        if not told:
            return None
        after_most, at, weights, slope, offset = min(told)
        one, other, _ = compared(program, launch, blocks, int(2 * after_most), int(at)).T
    except KernelFailure:
        return None
    found = slope * (weights[0] * one + weights[1] * other) + offset
    return None if np.isnan(found).any() else np.maximum(found, 1.0)


def _of_lengths(sampled: Sequence[Mapping[str, float]], lengths: np.ndarray) -> dict[str, float]:
    """Return the mean counts of clusters of these lengths, in instructions, from those of some of them."""
    known, first = np.unique([c["instructions"] for c in sampled], return_index=True)
    return {name: float(np.interp(lengths, known, [sampled[n][name] for n in first]).mean()) for name in sampled[0]}


def _lengths(grid: Grid, counted: Callable[[int, int], int], left: int) -> np.ndarray | None:
    """Return the instructions [clusters] that `counted` finds of each cluster, given how many are left of `left`.

    An axis of the grid counts where lengths differ along the line through the middle. Returns None where that takes
    more instructions, or lengths of more than MOST_KNOWN clusters.
    """
    known: dict[tuple[int, ...], int] = {}

    def lengths(axes: Sequence[Sequence[int]]) -> np.ndarray | None:
        nonlocal left
        places = list(itertools.product(*axes)) if math.prod(map(len, axes)) <= MOST_KNOWN else []
        unknown = [place for place in places if place not in known]
        probed = unknown[:: max(1, len(unknown) // PROBED)][:PROBED]
        enough = int(TOO_MUCH * left * PROBED / max(1, len(unknown)))
        for number, (x, y, z) in enumerate([*probed, *(place for place in unknown if place not in probed)]):
            most = min(left, enough) if number < len(probed) else left
            known[x, y, z] = counted((z * grid.size[1] + y) * grid.size[0] + x, most)
            left -= known[x, y, z]
            if known[x, y, z] >= most or left <= 0:
                return None
        return np.array([known[place] for place in places], float) if places else None

    middle = [range((size - 1) // 2, (size - 1) // 2 + 1) for size in grid.size]
    axes = list(middle)
    for axis, size in enumerate(grid.size):
        line = lengths([*middle[:axis], range(size), *middle[axis + 1 :]])
        if line is None:
            return None
        if not _near(float(line.min()), float(line.max())):
            axes[axis] = range(size)
    found = lengths(axes)
    if found is None:
        return None
    x, y, z = map(len, axes)
    return np.broadcast_to(found.reshape(x, y, z).T, grid.size[::-1]).reshape(-1)


def _of_one_wave(grid: Grid, first: Mapping[str, float], of: Callable[[int], Mapping[str, float]]) -> Work:
    """Return the work of a grid that runs as one wave.

    Its first cluster is taken for all of them, unless clusters are short and differ. Persistent ones differ by a tile
    from some cluster on, and the last may have none. So the interval whose ends differ most is bisected, up to
    `MOST_SAMPLED` clusters.
    """
    if first["instructions"] > DYNAMIC or grid.clusters < 3:
        return _all_alike(first)
    sampled = {0: first} | {place: of(place) for place in (grid.clusters // 2, grid.clusters - 1)}
    while len(sampled) < MOST_SAMPLED and (between := _most_unlike(sampled)):
        sampled[between] = of(between)
    if all(_alike(first, other) for other in sampled.values()):
        return _all_alike(first)
    places = sorted(sampled)
    lengths = [sampled[place]["instructions"] for place in places]
    along = np.interp(np.arange(grid.clusters), places, lengths)
    return Work(_of_lengths([sampled[place] for place in places], along), along)


def _most_unlike(sampled: Mapping[int, Mapping[str, float]]) -> int | None:
    """Return the cluster midway between the two neighbors that differ most; None where all that differ adjoin."""
    apart = [
        (abs(sampled[low]["instructions"] - sampled[high]["instructions"]), (low + high) // 2)
        for low, high in itertools.pairwise(sorted(sampled))
        if high - low > 1 and not _alike(sampled[low], sampled[high])
    ]
    return max(apart)[1] if apart else None


def _all_alike(counts: Mapping[str, float]) -> Work:
    return Work(counts, np.array([counts["instructions"]]))


def _spread_out(size: int, samples: int) -> np.ndarray:
    """Return irregularly spaced indices from the first to the last, so that no periodic order is aliased."""
    golden = np.sort(np.modf(np.arange(1, samples - 1) * 0.6180339887498949)[0])
    return np.unique(np.concatenate([[0], np.round(golden * (size - 1)), [size - 1]]).astype(int))


def _edges(grid: Grid) -> list[tuple[int, int, float]]:
    """Return the interior, last column, last row and corner: a cluster of each, and how many it represents."""
    (column, row), (columns, rows) = grid.middle, (grid.columns, grid.rows)
    across = [(column, columns - 1), (columns - 1, 1)] if columns > 1 else [(0, 1)]
    down = [(row, rows - 1), (rows - 1, 1)] if rows > 1 else [(0, 1)]
    return [(x, y, float(n * m)) for x, n in across for y, m in down]


def _alike(one: Mapping[str, float], other: Mapping[str, float]) -> bool:
    return _near(one["instructions"], other["instructions"])


def _near(expected: float, found: float) -> bool:
    return abs(found - expected) <= UNLIKE * expected


def _mean(counts: Sequence[Mapping[str, float]], weights: Sequence[float] | None = None) -> dict[str, float]:
    return {name: float(np.average([c[name] for c in counts], weights=weights)) for name in counts[0]}


# ── which of them an SM gets ────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Share:
    """The clusters of the SM that ends last, in order, and their instructions over those of the mean SM."""

    clusters: Sequence[int]
    excess: float


def busiest(grid: Grid, work: Work, places: int, resident: int) -> Share:
    """Return what the busiest of `places` groups of SMs gets, each of which holds `resident` clusters at once.

    Hardware hands clusters out in their order: to each place in turn at first, then to whichever is free.
    """
    fair = grid.clusters / places
    if work.alike:
        most = math.ceil(fair)
        # one of the inside, as clusters of the last column or row have less to do, and are few; of a grid that runs at
        # once the first, which is handed as much as any
        first = min(places, grid.clusters) // 2 if grid.clusters > places else 0
        given = range(first, first + most * places, places)
        if most > MOST_PLACED:  # of which a few are timed
            return Share(given, most / fair)
        return Share([min(cluster, grid.clusters - 1) for cluster in given], most / fair)
    part = max(1, math.ceil(grid.clusters / MOST_PLACED))
    lengths = work.instructions[::part]
    slots = max(1, round(places / part)) * resident
    ends = [(0.0, slot) for slot in range(slots)]
    gets: list[list[int]] = [[] for _ in range(slots // resident)]
    for n, length in enumerate(lengths):
        free, slot = ends[0]
        heapq.heapreplace(ends, (free + float(length), slot))
        gets[slot % len(gets)].append(n * part)
    _, last = max(ends)
    chosen = gets[last % len(gets)]
    total = float(work.instructions[chosen].sum())
    return Share(chosen, total / (work.mean * fair))
