"""Predict a kernel's time on a chip: count its blocks, time one SM by the machine code, put the grid together.

    counts of some blocks ──▶ what the busiest SM gets ─┐
    a wave surveyed ──▶ what reaches L2 and DRAM ───────┴─▶ clocks of one SM ──▶ clocks of all its blocks ──▶ µs

No constant is fitted to one kernel. The range is the error of the kernel's class on measured kernels that chose none of
the model's constants: of validation.toml, which benchmarks/accuracy_page.py writes. It stands beside every prediction
of the class, wherever one is shown.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np

from evoengine.devices.base import KernelFailure
from evoengine.errors import UsageError
from evoengine.sass.chip import DEFAULT, Chip, Clock
from evoengine.sass.core import Program
from evoengine.sass.grid import Grid, Share, Work, busiest, count, grid_of
from evoengine.sass.launch import Launch
from evoengine.sass.memory import local_from_dram, traffic_of
from evoengine.sass.model import Residents, Timed, Traffic, rates, time_sm

MODEL_VERSION = 15
"""raised by hand whenever predictions move, as tests/sass/test_model_version.py demands"""

TIME_LIMIT = 300_000
"""warp instructions of an SM that are timed; the rest is extrapolated by its work"""
LONGEST_TIMED = 600_000
"""the same of tensor cores' kernels whose blocks are so long that less would not end the first of them"""
LONGEST_ALONE = 1_000_000
"""the same where several blocks of an SM begin together and none comes behind them: the last of them runs alone for a
while, which no rate that was timed before tells"""
WARM_UP = 0.15
"""share of the timed work after which the SM's rate is measured"""
FEWEST_NOTES = 12
LEAST_STORED = 0.25
"""of the sectors that go with the timed products; fewer do not tell what the rest of them takes"""
BUSY = 0.6
"""share of the time from which on a busy pipe bounds the kernel"""
GUESSED_USE = 0.6
"""of the tensor cores, by a kernel that has use for them: the clock at which its memory is timed first"""
COLUMNS = 8
"""of a wgmma of m64nNk16 that take a tensor core as long as an m16n8k16 could"""
CLOCK_MISSED, MEMORY_COUNTS = 0.04, 0.3
"""A kernel is timed again at the clock that came of it, where that is off by more than the former and the DRAM or the
L2 is busy for more than the latter."""


class Unpredictable(Exception):
    """The model cannot read the kernel or its launch; the message states why."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """Clocks of a whole launch, and microseconds at `ghz`.

    `time_us` lies, within the error of the kernel's class, from `low_us` to `high_us`.
    """

    time_us: float
    low_us: float
    high_us: float
    clocks: float
    ghz: float
    clock: Clock
    kernel_class: str
    bound: str
    """the busiest pipe or memory; `latency` where none is busy for most of the time"""
    shares: Mapping[str, float]
    """busy share of each pipe and memory, 0…1"""
    counts: Mapping[str, float]
    """per block"""
    blocks_per_sm: int
    waves: float
    roofline_us: float
    """the launch's lower bound by the data sheet; 0 where its work is not known"""
    timed: Timed | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class Context:
    """The constant inputs of the prediction of a launch."""

    program: Program
    launch: Launch
    chip: Chip
    grid: Grid
    resident: int
    work: Work
    traffic: list[Traffic]
    share: Share
    written_bytes: float
    """stored by all blocks for the DRAM, each byte once"""
    cold: bool

    @property
    def uses_tensor_cores(self) -> bool:
        return any(self.work.counts[name] > 0 for name in ("tensor_clock_columns", "hmma", "hmma_fp16"))


def predict(
    program: Program, launch: Launch, chip: Chip, flops: float = 0.0, min_dram_bytes: float = 0.0,
    clock: Clock = DEFAULT, cold: bool = True,
) -> Prediction:  # fmt: skip
    """Return the launch's time on the chip; never below the roofline of `flops` and `min_dram_bytes`, where known.

    `cold` says that nothing of the tensors is in the L2 before. Raises Unpredictable where an opcode is unknown, no
    block fits, or a block cannot run.
    """
    if program.unknown:
        raise Unpredictable(f"unknown opcodes: {', '.join(program.unknown)}")
    resident = blocks_resident(launch, chip)
    if not resident:
        raise Unpredictable(f"no block fits on an SM of {chip.key}")
    roofline_us = max(flops / _peak_flops(program, chip), min_dram_bytes / chip.dram) * 1e6
    try:
        context = context_of(program, launch, chip, resident, cold)
        return _at_a_clock(context, clock, roofline_us)
    except KernelFailure as failure:
        raise Unpredictable(str(failure)) from None


def _peak_flops(program: Program, chip: Chip) -> float:
    """Return the data sheet's FLOP/s of the fastest kind of product that the kernel has, at least that of halves."""
    return chip.peak_flops * max([1.0, *map(chip.gpu.product_rate, program.products)])


def blocks_resident(launch: Launch, chip: Chip) -> int:
    fit = chip.gpu.blocks_resident(math.prod(launch.threads), launch.registers, launch.shared_bytes)
    return min(fit, int(chip.rates["cluster_blocks"])) if math.prod(launch.cluster) > 1 else fit


def context_of(program: Program, launch: Launch, chip: Chip, resident: int, cold: bool) -> Context:
    grid = grid_of(launch)
    places = max(1, chip.sms // grid.together)
    at_once = places * resident
    work = count(program, launch, grid, at_once)
    traffic, written_bytes = traffic_of(program, launch, chip, grid, work, at_once, cold)
    share = busiest(grid, work, places, resident)
    return Context(program, launch, chip, grid, resident, work, traffic, share, written_bytes, cold)


# ── one SM ──────────────────────────────────────────────────────────────────────────────────────────────────────────

MEMORY_RATES = (
    "dram_bytes_per_clock", "l2_bytes_per_clock", "l2_private_bytes_per_clock", "l2_private_tma_bytes_per_clock",
)  # fmt: skip
STORE_CLOCKS = ("l2_store_clocks", "l2_partial_clocks")


@dataclass(frozen=True, slots=True)
class Run:
    """The SM that ends last: its clocks, and its timed part."""

    clocks: float
    timed: Timed
    shares: Mapping[str, float]


def time_busiest(c: Context, ghz: float, limit: int = TIME_LIMIT) -> Run:
    """Time the SM that ends last at a clock; `limit` in warp instructions, 0 for a run to its end."""
    numbers = rates(c.chip, c.resident * c.launch.shared_bytes, ghz)
    numbers["local_from_dram"] = local_from_dram(c.launch, c.chip, c.resident)
    # SMs with less work leave their share of the memory bandwidth to the others
    numbers |= {name: numbers[name] * c.share.excess for name in MEMORY_RATES}
    numbers |= {name: numbers[name] / c.share.excess for name in STORE_CLOCKS}
    stop = _stop(c, limit)
    chosen = _chosen(c, stop)
    blocks = [c.grid.block(cluster) for cluster in chosen]
    timed = time_sm(c.program, c.launch, numbers, Residents(c.resident, blocks, stop, c.traffic))
    clocks = timed.values["clocks"] + _rest(c, timed, len(chosen))
    shares = _shares(timed, c.grid.together)
    if c.cold:  # what the L2 holds at the end is not written; otherwise it had to write as much for the launch before
        left = min(c.written_bytes / c.chip.sms, numbers["l2_written_bytes"])
        clocks -= shares["dram"] * left / numbers["dram_bytes_per_clock"]
    return Run(clocks, timed, shares)


def _stop(c: Context, limit: int) -> int:
    """Return the warp instructions after which timing stops; 0 for a run to its end."""
    if c.uses_tensor_cores and limit:
        return int(max(limit, min(LONGEST_TIMED, 1.1 * c.resident * c.work.mean)))
    given = len(c.share.clusters)
    alone = 1 < given <= c.resident and given * c.work.mean < LONGEST_ALONE
    return 0 if alone else limit


def _chosen(c: Context, limit: int) -> Sequence[int]:
    """Return the SM's clusters that are timed: all, or as many as the limit allows, spread over its list.

    What is left out are whole rounds of resident clusters, so that as many run together at the end as of all.
    """
    given = c.share.clusters
    fits = int(limit / max(1.0, c.work.mean)) if limit else len(given)
    fits = max(2 * c.resident + len(given) % c.resident, fits - (fits - len(given)) % c.resident)
    if fits >= len(given):
        return given
    if c.work.alike:
        return given[:fits]
    if not c.work.known:
        return [given[int((n + 0.5) * len(given) / fits)] for n in range(fits)]
    behind = np.cumsum(c.work.instructions[given])  # a cluster of every so much work, so that no long one is missed
    places = np.searchsorted(behind, (np.arange(fits) + 0.5) * behind[-1] / fits)
    return [given[int(place)] for place in np.unique(places)]


def _rest(c: Context, timed: Timed, chosen: int) -> float:
    """Return the clocks of that part of the SM's work which was not timed, at the rate of the timed part.

    Work is counted in clocks of tensor cores and in stored sectors, which mark the ends of tiles, since warps that poll
    a barrier issue instructions for as long as they wait. For a kernel without tensor-core work it is counted in
    instructions.
    """
    given = c.share.clusters
    lengths = c.work.instructions
    clusters = len(given) if c.work.alike else float(lengths[list(given)].sum()) / c.work.mean
    counts, values = c.work.counts, timed.values
    rate = c.chip.rates
    tensor = (
        counts["tensor_clock_columns"] / 4 * rate["hgmma_clocks_per_column"]
        + counts["hmma"] / 4 * rate["hmma_interval"]
        + counts["hmma_fp16"] / 4 * rate["hmma_fp16_interval"]
    )
    if tensor and values["tensor_work"]:
        totals = {"tensor_work": tensor, "stored": counts["sectors_stored"] + counts["tensor_sectors_stored"]}
        if values["stored"] * tensor < LEAST_STORED * values["tensor_work"] * totals["stored"]:
            totals.pop("stored")
    else:
        totals = {"issued": counts["instructions"]}
    left = {name: max(0.0, clusters * each - values[name]) for name, each in totals.items()}
    main = next(iter(left))
    if left[main] < 1e-3 * clusters * totals[main]:
        return 0.0
    per_unit = _rates_of(timed, list(totals), chosen - c.resident if chosen < len(given) else chosen, c.grid.together)
    return sum(per_unit[name] * amount for name, amount in left.items())


def _rates_of(timed: Timed, names: Sequence[str], full: int, together: int) -> dict[str, float]:
    """Return the clocks for each unit of work, by least squares over the notes of the steady state.

    It lasts from the end of the warm-up to the end of the `full`-th cluster, after which fewer clusters are left than
    fit. All notes are used where that leaves too few.
    """
    notes = timed.progress
    main = notes[names[0]]
    steady = (main >= WARM_UP * main[-1]) & (notes["ended"] <= full * together)
    if steady.sum() < FEWEST_NOTES:
        steady = np.full(main.shape, True)
    clocks = notes["clocks"][steady]
    columns = [notes[name][steady] for name in names]
    overall = (clocks[-1] - clocks[0]) / max(1.0, columns[0][-1] - columns[0][0])
    if len(columns) == 1 or columns[1][-1] == columns[1][0]:
        return {names[0]: float(overall)} | dict.fromkeys(names[1:], 0.0)
    matrix = np.stack([np.ones(clocks.shape), *columns], axis=1)
    _, first, second = np.linalg.lstsq(matrix, clocks, rcond=None)[0]
    if first <= 0 or second < 0:
        return {names[0]: float(overall), names[1]: 0.0}
    return {names[0]: float(first), names[1]: float(second)}


def _shares(timed: Timed, sms: int) -> dict[str, float]:
    clocks = max(1.0, timed.values["clocks"]) * sms
    of_parts = {name: timed.values[name] / clocks / 4 for name in ("issue", "fma", "alu", "mufu", "tensor", "uniform")}
    of_sm = {name: timed.values[name] / clocks for name in ("shared", "l2", "dram")}
    return {name: min(1.0, share) for name, share in (of_parts | of_sm).items()}


# ── the clock ───────────────────────────────────────────────────────────────────────────────────────────────────────


def tensor_use(c: Context, run: Run) -> float:
    """Return what the tensor cores do over what they could, which mma.sync does not reach on Hopper."""
    per_column = c.chip.rates["hgmma_clocks_per_column"]
    alone = bool(per_column) and not c.work.counts["tensor_clock_columns"]
    return run.shares["tensor"] * (COLUMNS * per_column / c.chip.rates["hmma_interval"] if alone else 1.0)


def _at_a_clock(c: Context, clock: Clock, roofline_us: float) -> Prediction:
    ghz = c.chip.ghz(clock, GUESSED_USE if c.uses_tensor_cores else 0.0)
    run = time_busiest(c, ghz)
    settled = c.chip.ghz(clock, tensor_use(c, run))
    if abs(settled / ghz - 1) > CLOCK_MISSED and max(run.shares["dram"], run.shares["l2"]) > MEMORY_COUNTS:
        run = time_busiest(c, settled)
        settled = c.chip.ghz(clock, tensor_use(c, run))
    time_us = run.clocks / settled / 1e3 + c.chip.launch_us
    kernel_class = class_of(c.work.counts, run.shares)
    factor = error_of(kernel_class).factor
    busiest_pipe = max(run.shares, key=run.shares.__getitem__)

    def possible(us: float) -> float:
        return float(max(us, roofline_us))

    return Prediction(
        time_us=possible(time_us),
        low_us=possible(time_us / factor),
        high_us=possible(time_us * factor),
        clocks=run.clocks,
        ghz=settled,
        clock=clock,
        kernel_class=kernel_class,
        bound=busiest_pipe if run.shares[busiest_pipe] > BUSY else "latency",
        shares=run.shares,
        counts=c.work.counts,
        blocks_per_sm=c.resident,
        waves=c.grid.clusters / (max(1, c.chip.sms // c.grid.together) * c.resident),
        roofline_us=roofline_us,
        timed=run.timed,
    )


VALIDATION = Path(__file__).with_name("validation.toml")
CLASSES = ("wgmma with softmax", "wgmma", "mma.sync", "memory", "scalar")
WHERE_UNKNOWN = 2.0
"""factor of a class without measured times"""
MEMORY_BOUND = 0.6
"""busy share of the DRAM from which on a kernel counts as memory-bound"""
_FIGURES = {"n": int, "mean_error": float, "factor": float, "data": str}


@dataclass(frozen=True, slots=True)
class ClassError:
    """The error of predictions of one class against measured times."""

    name: str
    n: int = 0
    mean_error: float = 0.0
    """mean of |predicted / measured - 1|"""
    factor: float = WHERE_UNKNOWN
    """nine of ten measured times lie within this factor of the predicted one"""
    data: str = ""
    """which kernels, on which GPUs"""

    def __str__(self) -> str:
        if not self.n:
            return f"no {self.name} kernel was held against a GPU: the error is not known"
        return (
            f"{self.name} kernels: mean error {self.mean_error:.0%}, nine of ten within {self.factor:.2f}×, by "
            f"{self.n:,} measured times ({self.data})"
        )


def class_of(counts: Mapping[str, float], shares: Mapping[str, float]) -> str:
    """Return the class of a kernel by what a block executes and by the busy shares of pipes and memories."""
    if counts["tensor_clock_columns"]:
        return "wgmma with softmax" if counts["mufu"] > counts["tensor"] else "wgmma"
    if shares["dram"] > MEMORY_BOUND:
        return "memory"
    return "mma.sync" if counts["hmma"] + counts["hmma_fp16"] else "scalar"


@cache
def read_errors(file: Path = VALIDATION) -> Mapping[str, ClassError]:
    """Return the errors by class. Raises UsageError naming what is missing or malformed."""
    table = tomllib.loads(file.read_text("utf-8"))
    errors = {}
    for name, figures in table.items():
        where = f"{file.name}: [{name}]"
        if name not in CLASSES:
            raise UsageError(f"{where} is no class of kernels; known are {', '.join(CLASSES)}")
        if not isinstance(figures, dict) or {n: type(v) for n, v in figures.items()} != _FIGURES:
            raise UsageError(f"{where} must have {', '.join(_FIGURES)}, as benchmarks/accuracy_page.py writes them")
        if figures["n"] < 1 or figures["factor"] < 1 or figures["mean_error"] < 0:
            raise UsageError(f"{where} must have n and factor of at least 1, and no mean_error below 0")
        errors[name] = ClassError(name, **figures)
    return errors


def error_of(kernel_class: str) -> ClassError:
    return read_errors().get(kernel_class, ClassError(kernel_class))
