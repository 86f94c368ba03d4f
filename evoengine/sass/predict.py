"""Predicts a kernel's time on a chip: blocks are counted, one SM is timed by the machine code, and the grid put together.

    counts of some blocks ──▶ work per block, share of the DRAM ──▶ clocks of one SM ──▶ waves, clock, launch ──▶ µs

No constant is fitted to a kernel. The figure has a range: for wgmma two hypotheses about what the tensor pipe leaves to
others bound it (see `overlaps`), elsewhere it is how far the model is off for two kernels of three.
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

COUNT_LIMIT = 400_000
"""warp instructions of a block that are counted"""
TIME_LIMIT = 400_000
"""warp instructions of an SM that are timed; what is beyond follows at the rate of the second half"""
UNLIKE = 0.02
"""difference in instructions between blocks of the grid's inside, from which on they are sampled one by one"""
SAMPLED = 8
"""blocks counted where blocks differ"""
MODEL_ERROR = 1.25
"""a factor that most predictions are within (benchmarks/model_accuracy.py)"""


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
    hypotheses: Mapping[str, float] = field(default_factory=dict)
    """of a wgmma kernel: µs by each"""
    timed: Timed | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class Work:
    """What the blocks of a grid do in the mean, and how unlike they are."""

    counts: Mapping[str, float]
    instructions: np.ndarray
    """of each block counted [n], in the order of the grid; of one where all are alike"""
    dram_share: float


def predict(program: Program, launch: Launch, chip: Chip, flops: float = 0.0, min_dram_bytes: float = 0.0) -> Prediction:
    """The launch's time on the chip; never below the roofline of `flops` and `min_dram_bytes`, where they are known.

    Raises Unpredictable where an opcode is unknown, no block fits, or a block cannot run.
    """
    if program.unknown:
        raise Unpredictable(f"unknown opcodes: {', '.join(program.unknown)}")
    resident = blocks_resident(launch, chip)
    if not resident:
        raise Unpredictable(f"no block fits on an SM of {chip.key}")
    try:
        work = count(program, launch, chip, resident)
        return _put_together(program, launch, chip, resident, work, max(flops / chip.peak_flops, min_dram_bytes / chip.dram) * 1e6)
    except KernelFailure as failure:
        raise Unpredictable(str(failure)) from None


# ── what blocks do ──────────────────────────────────────────────────────────────────────────────────────────────────


def count(program: Program, launch: Launch, chip: Chip, resident: int) -> Work:
    """Counts blocks of the grid's inside and edges, weighted by how many there are of each."""
    def of(x: int, y: int) -> Mapping[str, float]:
        return count_block(program, launch, y * launch.grid[0] + x, COUNT_LIMIT)

    columns, rows = launch.grid[0], launch.grid[1] * launch.grid[2]
    inside, first = of((columns - 1) // 2, (rows - 1) // 2), of(0, 0)
    if not _alike(inside, first) and columns > 2:
        xs = np.unique(np.linspace(0, columns - 1, SAMPLED).round().astype(int))
        sampled = [of(int(x), (rows - 1) // 2) for x in xs]
        counts = _mean(sampled, [1.0] * len(sampled))
        instructions = np.array([c["instructions"] for c in sampled])
    else:
        classes = _edges(columns, rows)
        sampled = [of(x, y) for x, y, _ in classes]
        counts = _mean(sampled, [weight for _, _, weight in classes])
        instructions = np.array([counts["instructions"]])
    return Work(counts, instructions, _dram_share(program, launch, chip, resident, counts, inside))


def _edges(columns: int, rows: int) -> list[tuple[int, int, float]]:
    """Interior, last column, last row and corner: a block of each, and how many blocks it stands for."""
    xs = [((columns - 1) // 2, columns - 1), (columns - 1, 1)] if columns > 1 else [(0, 1)]
    ys = [((rows - 1) // 2, rows - 1), (rows - 1, 1)] if rows > 1 else [(0, 1)]
    return [(x, y, float(n * m)) for x, n in xs for y, m in ys]


def _alike(one: Mapping[str, float], other: Mapping[str, float]) -> bool:
    return abs(one["instructions"] - other["instructions"]) <= UNLIKE * one["instructions"]


def _mean(counts: Sequence[Mapping[str, float]], weights: Sequence[float]) -> dict[str, float]:
    return {name: float(np.average([c[name] for c in counts], weights=weights)) for name in counts[0]}


def _dram_share(
    program: Program, launch: Launch, chip: Chip, resident: int, counts: Mapping[str, float], inside: Mapping[str, float]
) -> float:
    """Of the bytes that blocks ask for, those that come from the DRAM: what a wave of blocks touches together, once.

    How much of it two neighbours share is seen by running a block and its neighbours in x and y.
    """
    columns, rows = launch.grid[0], launch.grid[1] * launch.grid[2]
    x, y = (columns - 1) // 2, (rows - 1) // 2
    neighbours = [y * columns + x, y * columns + min(x + 1, columns - 1), min(y + 1, rows - 1) * columns + x]
    lines = footprint(program, launch, neighbours, COUNT_LIMIT)
    asked = 32 * (counts["sectors_loaded"] + counts["sectors_stored"]) + counts["tensor_bytes_loaded"] + counts["tensor_bytes_stored"]
    blocks = columns * rows
    wave = min(resident * chip.sms, blocks)
    across, down = min(wave, columns), math.ceil(wave / columns)
    unseen = 1.0 if inside["complete"] else max(1.0, inside["instructions"] / COUNT_LIMIT)
    total = 0.0
    for (own, beside, below), size in zip(lines, launch.allocation_bytes, strict=True):
        if not own:
            continue
        apart_x = 1 - beside / own if columns > 1 else 0.0
        apart_y = 1 - below / own if rows > 1 else 0.0
        of_wave = own * 128 * unseen * (1 + (across - 1) * apart_x) * (1 + (down - 1) * apart_y)
        traffic = of_wave * blocks / wave
        total += min(traffic, size) if size <= chip.l2_bytes / 2 else traffic
    return min(1.0, total / max(1.0, asked * blocks))


# ── one SM, and the grid ────────────────────────────────────────────────────────────────────────────────────────────


def blocks_resident(launch: Launch, chip: Chip) -> int:
    return chip.gpu.blocks_resident(math.prod(launch.threads), launch.registers, launch.shared_bytes)


def _put_together(
    program: Program, launch: Launch, chip: Chip, resident: int, work: Work, roofline_us: float
) -> Prediction:
    cluster = math.prod(launch.cluster)
    blocks = math.prod(launch.grid)
    per_sm = math.ceil(blocks / (chip.sms // cluster * cluster))
    order = [_inner(_spread(n + 1, blocks), launch.grid) for n in range(per_sm)]
    residents = Residents(resident, order, TIME_LIMIT, work.dram_share)
    wgmma = work.counts["tensor_clock_columns"] > 0
    found: dict[str, tuple[float, float, Timed]] = {}
    for name, overlap in (overlaps(chip) if wgmma else {"": Overlap()}).items():
        timed = time_sm(program, launch, rates(chip, resident * launch.shared_bytes), residents, overlap)
        clocks = _whole(timed, per_sm * cluster * work.counts["instructions"] / cluster, work, blocks, chip, resident)
        ghz = chip.clock_under(name, timed.values["tensor"] / max(1.0, 4 * cluster * timed.values["clocks"]))
        found[name] = max(clocks / ghz / 1e3 + chip.launch_us, roofline_us), clocks, timed
    times = {name: time for name, (time, _, _) in found.items()}
    time_us = math.exp(np.mean(np.log(list(times.values()))))
    timed = found[min(found)][2]
    shares = _shares(timed, cluster)
    busiest = max(shares, key=shares.__getitem__)
    low = max(roofline_us, min(times.values()) if wgmma else time_us / MODEL_ERROR)
    return Prediction(
        time_us, low, max(times.values()) if wgmma else time_us * MODEL_ERROR,
        busiest if shares[busiest] > 0.6 else "latency", shares, work.counts, found[min(found)][1], resident,
        blocks / (chip.sms * resident), times if wgmma else {}, timed,
    )  # fmt: skip


def overlaps(chip: Chip) -> dict[str, Overlap]:
    """Two that fit published figures of wgmma kernels: tensor pipe and MUFU exclude each other, or most other arithmetic is
not issued while the tensor pipe runs."""
    return {"A": Overlap(tensor_excludes_mufu=True), "B": Overlap(issue_lost=chip.rates["b_issue_lost"])}


def _whole(timed: Timed, instructions: float, work: Work, blocks: int, chip: Chip, resident: int) -> float:
    """Clocks of the SM that ends last: what was timed, and the rest at the rate of its second half."""
    values = timed.values
    clocks = values["clocks"]
    if not values["finished"]:
        rest = max(0.0, instructions - values["issued"])
        clocks += rest * values["late_clocks"] / max(1.0, values["late_issued"])
    return clocks * _imbalance(work.instructions, blocks, chip.sms * resident)


def _imbalance(instructions: np.ndarray, blocks: int, slots: int) -> float:
    """The time until the last slot is free over that of slots all equally busy, blocks given out in their order."""
    if len(instructions) == 1:
        return 1.0
    columns = np.interp(np.linspace(0, len(instructions) - 1, min(blocks, 4096)), np.arange(len(instructions)), instructions)
    free = [0.0] * min(slots, len(columns))
    for work in columns:
        heapq.heapreplace(free, free[0] + work)
    return max(free) / max(1e-9, math.ceil(len(columns) / len(free)) * columns.mean())


def _spread(n: int, blocks: int) -> int:
    """The n-th of numbers that cover the grid evenly from the first ones on (multiples of the golden ratio)."""
    return int(math.modf((n + 0.5) * 0.6180339887498949)[0] * blocks)


def _inner(block: int, grid: Sequence[int]) -> int:
    """The block, or its neighbour where it lies in the last column or row: those are less work, and few."""
    x, y, rest = block % grid[0], block // grid[0] % grid[1], block // (grid[0] * grid[1])
    if grid[0] > 1 and x == grid[0] - 1:
        x -= 1
    if grid[1] > 1 and y == grid[1] - 1:
        y -= 1
    return (rest * grid[1] + y) * grid[0] + x


def _shares(timed: Timed, sms: int) -> dict[str, float]:
    clocks = max(1.0, timed.values["clocks"]) * sms
    of_parts = {name: timed.values[name] / clocks / 4 for name in ("issue", "fma", "alu", "mufu", "tensor", "uniform")}
    of_sm = {name: timed.values[name] / clocks for name in ("shared", "l2", "dram")}
    return {name: min(1.0, share) for name, share in (of_parts | of_sm).items()}
