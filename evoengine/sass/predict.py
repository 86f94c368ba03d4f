"""Predicts a kernel's time on a chip: blocks are counted, one SM is timed by its machine code, waves are put together.

    counts of some blocks ──▶ work per block, share of the DRAM ──▶ clocks of one SM ──▶ waves, clock, launch ──▶ µs

No constant is fitted to a kernel. The figure has a range: for wgmma two hypotheses about what the tensor pipe leaves to
others bound it (see `overlaps`), elsewhere MODEL_ERROR does.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from evoengine.devices.base import KernelFailure
from evoengine.sass.chip import Chip
from evoengine.sass.core import Program
from evoengine.sass.launch import Launch
from evoengine.sass.model import Overlap, Residents, Timed, count_block, footprint, rates, time_sm

MODEL_VERSION = 1
"""raised by hand when a prediction may change; a test over recorded predictions holds it"""
WHOLE_LIMIT = 20_000_000
"""warp instructions of a block that are counted"""
PERSISTENT = 300_000
"""the same: a block that does more, in a grid of one wave, is taken for a persistent one"""
FOOTPRINT_LIMIT = 100_000
"""the same of blocks whose lines of global memory are compared"""
TIME_LIMIT = 300_000
WGMMA_TIME_LIMIT = 200_000
"""warp instructions of an SM that are timed, the latter under each of two hypotheses; the rest follows at the second
half's rate"""
UNLIKE = 0.02
"""difference in instructions between blocks of the grid's inside, from which on they are sampled one by one"""
SAMPLED, ROWS_SAMPLED = 8, 16
"""blocks counted where those of a row differ, and where rows do: more, as longest come first of a part of the rows at a
time"""
BUSY = 0.6
"""of the time: a pipe that is busy for more bounds the kernel"""
MOST_PLACED = 20_000
"""clusters placed one by one; of more, a part of the rows on a part of the SMs stands for all"""
MODEL_ERROR = 1.25
"""a factor that 78 % of the predictions for recorded kernels are within; 98 % are within 2 (see Model in
benchmarks/NOTES.md)"""


class Unpredictable(Exception):
    """The model cannot read the kernel or its launch; the message says why."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """Microseconds for a whole launch, from `low_us` to `high_us`; `time_us` is what to rank by."""

    time_us: float
    low_us: float
    high_us: float
    bound: str
    """the busiest pipe or memory; `latency` where none is busy for most of the time"""
    shares: Mapping[str, float]
    """busy share of each pipe and memory, 0…1"""
    counts: Mapping[str, float]
    """per block"""
    clocks: float
    blocks_per_sm: int
    waves: float
    roofline_us: float
    """what the launch takes at the least, by the data sheet; 0 where its work is not known"""
    hypotheses: Mapping[str, float] = field(default_factory=dict)
    """of a wgmma kernel: µs by each"""
    timed: Timed | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class Work:
    """What the blocks of a grid do in the mean, and how unlike they are."""

    counts: Mapping[str, float]
    instructions: np.ndarray
    """of each block counted [n], from the first column of a row to its last; of one where all are alike"""
    by_row: bool
    """whether they are of one column instead, from the first row to the last"""
    dram_share: float


def predict(
    program: Program, launch: Launch, chip: Chip, flops: float = 0.0, min_dram_bytes: float = 0.0
) -> Prediction:
    """The launch's time on the chip; never below the roofline of `flops` and `min_dram_bytes`, where they are known.

    Raises Unpredictable where an opcode is unknown, no block fits, or a block cannot run.
    """
    if program.unknown:
        raise Unpredictable(f"unknown opcodes: {', '.join(program.unknown)}")
    resident = blocks_resident(launch, chip)
    if not resident:
        raise Unpredictable(f"no block fits on an SM of {chip.key}")
    roofline_us = max(flops / chip.peak_flops, min_dram_bytes / chip.dram) * 1e6
    try:
        work = count(program, launch, chip, resident)
        return _put_together(program, launch, chip, resident, work, roofline_us)
    except KernelFailure as failure:
        raise Unpredictable(str(failure)) from None


# ── what blocks do ──────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Grid:
    """A grid in clusters, of one block each where there are no others: columns along x, rows along y and z."""

    columns: int
    rows: int
    width: int
    """blocks of a cluster along x"""

    def block(self, column: int, row: int) -> int:
        """The number in the grid of a cluster's first block."""
        return (row * self.columns + column) * self.width

    @property
    def clusters(self) -> int:
        return self.columns * self.rows

    @property
    def middle(self) -> tuple[int, int]:
        return (self.columns - 1) // 2, (self.rows - 1) // 2


def grid_of(launch: Launch) -> Grid:
    """Raises Unpredictable where clusters are more than one block high."""
    width, high, deep = launch.cluster
    if high * deep != 1:
        raise Unpredictable(f"clusters of {launch.cluster} blocks; the model knows those along x")
    return Grid(launch.grid[0] // width, launch.grid[1] * launch.grid[2], width)


def count(program: Program, launch: Launch, chip: Chip, resident: int) -> Work:
    """Counts blocks of the grid's inside and edges, weighted by how many there are of each."""
    grid = grid_of(launch)

    def of(column: int, row: int) -> Mapping[str, float]:
        return count_block(program, launch, grid.block(column, row), WHOLE_LIMIT)

    first = of(0, 0)
    one_wave = grid.clusters <= chip.sms // grid.width * resident
    if one_wave and first["instructions"] > PERSISTENT:  # the first block has as much to do as any
        return _work(program, launch, chip, resident, [first])
    inside, last = of(*grid.middle), of(grid.columns - 1, grid.rows - 1)
    column = grid.middle[0]
    other_row = int(0.382 * grid.rows)  # at no edge, and no simple fraction, after which an order may repeat
    if grid.rows >= ROWS_SAMPLED and not _alike(inside, of(column, other_row)):
        rows = ((np.arange(ROWS_SAMPLED) + 0.5) * grid.rows / ROWS_SAMPLED).astype(int)
        found = [of(column, int(row)) for row in np.unique(rows)]
        return _work(program, launch, chip, resident, found, by_row=True)
    if not _alike(inside, first) and grid.columns > 2:
        columns = np.unique(np.linspace(0, grid.columns - 1, SAMPLED).round().astype(int))
        return _work(program, launch, chip, resident, [of(int(column), grid.middle[1]) for column in columns])
    if _alike(inside, last):
        return _work(program, launch, chip, resident, [inside])
    edges = _edges(grid)
    mean = _mean([of(x, y) for x, y, _ in edges], [weight for _, _, weight in edges])
    return _work(program, launch, chip, resident, [mean])


def _work(
    program: Program, launch: Launch, chip: Chip, resident: int, sampled: Sequence[Mapping[str, float]],
    by_row: bool = False,
) -> Work:  # fmt: skip
    """Of blocks that stand for equally many each."""
    counts = _mean(sampled, [1.0] * len(sampled))
    instructions = np.array([c["instructions"] for c in sampled])
    return Work(counts, instructions, by_row, _dram_share(program, launch, chip, resident, counts))


def _edges(grid: Grid) -> list[tuple[int, int, float]]:
    """Interior, last column, last row and corner: one of each, and how many it stands for."""
    (column, row), (columns, rows) = grid.middle, (grid.columns, grid.rows)
    across = [(column, columns - 1), (columns - 1, 1)] if columns > 1 else [(0, 1)]
    down = [(row, rows - 1), (rows - 1, 1)] if rows > 1 else [(0, 1)]
    return [(x, y, float(n * m)) for x, n in across for y, m in down]


def _alike(one: Mapping[str, float], other: Mapping[str, float]) -> bool:
    return abs(one["instructions"] - other["instructions"]) <= UNLIKE * one["instructions"]


def _mean(counts: Sequence[Mapping[str, float]], weights: Sequence[float]) -> dict[str, float]:
    return {name: float(np.average([c[name] for c in counts], weights=weights)) for name in counts[0]}


def _dram_share(program: Program, launch: Launch, chip: Chip, resident: int, counts: Mapping[str, float]) -> float:
    """Of the bytes that blocks ask for, those that come from the DRAM: what a wave of blocks touches together, once.

    How much of it two neighbours share is seen by running a block and its neighbours in x and y.
    """
    grid = grid_of(launch)
    (x, y), columns, rows = grid.middle, grid.columns, grid.rows
    neighbours = [grid.block(x, y), grid.block(min(x + 1, columns - 1), y), grid.block(x, min(y + 1, rows - 1))]
    lines = footprint(program, launch, neighbours, FOOTPRINT_LIMIT)
    sectors = counts["sectors_loaded"] + counts["sectors_stored"]
    boxes = counts["tensor_bytes_loaded"] + counts["tensor_bytes_stored"]
    asked = (32 * sectors + boxes) * grid.clusters
    wave = max(1, min(resident * chip.sms // grid.width, grid.clusters))
    across, down = min(wave, columns), math.ceil(wave / columns)
    unseen = max(1.0, counts["instructions"] / FOOTPRINT_LIMIT)
    total = 0.0
    for (own, beside, below), size in zip(lines, launch.allocation_bytes, strict=True):
        if not own:
            continue
        apart_x = 1 - beside / own if columns > 1 else 0.0
        apart_y = 1 - below / own if rows > 1 else 0.0
        of_wave = own * 128 * unseen * (1 + (across - 1) * apart_x) * (1 + (down - 1) * apart_y)
        traffic = of_wave * grid.clusters / wave
        total += min(traffic, size) if size <= chip.l2_bytes / 2 else traffic
    return min(1.0, total / max(1.0, asked))


# ── one SM, and the grid ────────────────────────────────────────────────────────────────────────────────────────────


def blocks_resident(launch: Launch, chip: Chip) -> int:
    return chip.gpu.blocks_resident(math.prod(launch.threads), launch.registers, launch.shared_bytes)


@dataclass(frozen=True, slots=True)
class _Run:
    """One SM under one hypothesis: µs of the whole launch, clocks of the SM that ends last, and what was timed."""

    time_us: float
    clocks: float
    timed: Timed


def _put_together(
    program: Program, launch: Launch, chip: Chip, resident: int, work: Work, roofline_us: float
) -> Prediction:
    grid = grid_of(launch)
    wgmma = work.counts["tensor_clock_columns"] > 0
    per_sm = math.ceil(grid.clusters / (chip.sms // grid.width))
    order = [_inner(_spread(n + 1, grid.clusters), grid) for n in range(per_sm)]
    limit = (TIME_LIMIT if not wgmma else WGMMA_TIME_LIMIT) * grid.width
    residents = Residents(resident, order, limit, work.dram_share)
    numbers = rates(chip, resident * launch.shared_bytes)

    def run(name: str, overlap: Overlap) -> _Run:
        timed = time_sm(program, launch, numbers, residents, overlap)
        clocks = _whole(timed, per_sm * work.counts["instructions"])
        clocks *= _imbalance(work, grid, chip.sms // grid.width, resident)
        ghz = chip.clock_under(name, _shares(timed, grid.width)["tensor"])
        return _Run(clocks / ghz / 1e3 + chip.launch_us, clocks, timed)

    runs = {name: run(name, overlap) for name, overlap in (overlaps(chip) if wgmma else {"": Overlap()}).items()}
    times = {name: r.time_us for name, r in runs.items()}
    time_us = math.exp(np.mean(np.log(list(times.values()))))
    low, high = (min(times.values()), max(times.values())) if wgmma else (time_us / MODEL_ERROR, time_us * MODEL_ERROR)

    def possible(us: float) -> float:
        return float(max(us, roofline_us))

    first = runs[min(runs)]
    shares = _shares(first.timed, grid.width)
    busiest = max(shares, key=shares.__getitem__)
    return Prediction(
        time_us=possible(time_us),
        low_us=possible(low),
        high_us=possible(high),
        bound=busiest if shares[busiest] > BUSY else "latency",
        shares=shares,
        counts=work.counts,
        clocks=first.clocks,
        blocks_per_sm=resident,
        waves=grid.clusters / (chip.sms // grid.width * resident),
        roofline_us=roofline_us,
        hypotheses={name: possible(us) for name, us in times.items()} if wgmma else {},
        timed=first.timed,
    )


def overlaps(chip: Chip) -> dict[str, Overlap]:
    """Two that fit published figures of wgmma kernels.

    A: tensor pipe and MUFU exclude each other. B: most other arithmetic is not issued while the tensor pipe runs.
    """
    return {"A": Overlap(tensor_excludes_mufu=True), "B": Overlap(issue_lost=chip.rates["b_issue_lost"])}


def _whole(timed: Timed, instructions: float) -> float:
    """Clocks until the SM has issued so many instructions: those timed, then the rest at the second half's rate."""
    values = timed.values
    if values["finished"]:
        return values["clocks"]
    rest = max(0.0, instructions - values["issued"])
    return values["clocks"] + rest * values["late_clocks"] / max(1.0, values["late_issued"])


def _imbalance(done: Work, grid: Grid, sms: int, resident: int) -> float:
    """Where clusters of a row are unlike, or rows: the time until the last SM is through, over that of one with as many
    clusters as any SM gets, all of mean length.

    Each place on an SM takes the next cluster of the grid when it is free.
    """
    if len(done.instructions) == 1:
        return 1.0
    along, across = (grid.rows, grid.columns) if done.by_row else (grid.columns, grid.rows)
    unlike = np.interp(np.arange(along), np.linspace(0, along - 1, len(done.instructions)), done.instructions)
    repeated = min(across, max(1, MOST_PLACED // along))
    order = np.repeat(unlike, repeated) if done.by_row else np.tile(unlike, repeated)
    free = [0.0] * max(1, min(sms * resident * repeated // across, order.size))
    for work in order:
        heapq.heapreplace(free, free[0] + work)
    fair = float(order.sum()) / len(free)
    return max(free) / fair * (grid.clusters / sms) / math.ceil(grid.clusters / sms)


def _spread(n: int, blocks: int) -> int:
    """The n-th of numbers that cover the grid evenly from the first ones on (multiples of the golden ratio)."""
    return int(math.modf((n + 0.5) * 0.6180339887498949)[0] * blocks)


def _inner(cluster: int, grid: Grid) -> int:
    """The first block of a cluster, or of its neighbour where it lies in the last column or row: those are less work,
    and few."""
    column, row = cluster % grid.columns, cluster // grid.columns
    return grid.block(min(column, max(0, grid.columns - 2)), min(row, max(0, grid.rows - 2)))


def _shares(timed: Timed, sms: int) -> dict[str, float]:
    clocks = max(1.0, timed.values["clocks"]) * sms
    of_parts = {name: timed.values[name] / clocks / 4 for name in ("issue", "fma", "alu", "mufu", "tensor", "uniform")}
    of_sm = {name: timed.values[name] / clocks for name in ("shared", "l2", "dram")}
    return {name: min(1.0, share) for name, share in (of_parts | of_sm).items()}
