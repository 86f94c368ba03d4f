"""A chip's data for predictions: a GPU's data sheet (gpus.toml), its parts' rates (chips.toml), and their sources.

A prediction is at a clock: of an idle GPU, locked, or sustained at the power limit by back-to-back launches.
"""

from __future__ import annotations

import difflib
import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any

from evoengine.errors import UsageError
from evoengine.gpu import Gpu, find_gpu, known_gpus

FILE = Path(__file__).with_name("chips.toml")
STATUSES = ("published", "measured", "fitted", "inferred", "assumed")
HOPPER = 90

GUIDE = "the CUDA C++ Programming Guide's table for its compute capability"
WHITEPAPER = "NVIDIA's whitepaper of its architecture"
ENDED = "blocks that exit at once"
CHASE = "a pointer chase by one thread"
STREAM = "a kernel that streams from it on all SMs"
REPEATED = "a kernel that repeats the instruction, timed by clock64"


@dataclass(frozen=True, slots=True)
class Rate:
    """One entry of chips.toml, `source` written out."""

    value: float
    unit: str
    status: str
    source: str


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a rate would come from. GPUs below the compute capability `since` have no such part: their rate is 0."""

    text: str
    since: int = 0


NEEDED = {
    # clocks between two warp instructions of a sub-core
    "fma_interval": Origin(GUIDE),
    "imad_interval": Origin(GUIDE),
    "half_interval": Origin(GUIDE),
    "alu_interval": Origin(GUIDE),
    "fp64_interval": Origin(GUIDE),
    "mufu_interval": Origin(GUIDE),
    "uniform_interval": Origin(REPEATED),
    "hmma_interval": Origin(WHITEPAPER),  # m16n8k16 of halfs, accumulated in FP32
    "hmma_fp16_interval": Origin(WHITEPAPER),  # the same accumulated in FP16, and m16n8k32 of bytes
    "memory_interval": Origin(REPEATED),
    "sm_memory_interval": Origin(REPEATED),  # of the whole SM
    "memory_queue": Origin(REPEATED),  # clocks of work that may wait before memory instructions stop issuing
    # clocks until a result can be read, or until a warp goes on
    "mufu_latency": Origin(REPEATED),
    "hmma_latency": Origin(REPEATED),  # as long, its operands' registers cannot be written
    "uniform_latency": Origin(REPEATED),
    "indexed_uniform_latency": Origin(CHASE),  # of ULDC whose address is in a uniform register
    "constant_latency": Origin(REPEATED),
    "shuffle_latency": Origin(REPEATED),
    "redux_latency": Origin(REPEATED),
    "branch_clocks": Origin(REPEATED),
    "barrier_latency": Origin(REPEATED),  # from the last warp's arrival, as soon as it is taken
    "block_start": Origin(ENDED),  # from a block's end to the start of the one that takes its place
    "block_interval": Origin(ENDED),  # between two blocks that start on an SM
    # memory; latencies count from when the SM takes the request, that of shared memory from its last wavefront
    "lds_latency": Origin(CHASE),
    "wavefront_clocks": Origin(WHITEPAPER),
    "matrix_wavefront_clocks": Origin(REPEATED),  # of LDSM and STSM
    "l1_kb": Origin(WHITEPAPER),  # of an SM, shared memory included
    "l1_latency": Origin(CHASE),
    "l1_bytes_per_clock": Origin(WHITEPAPER),
    "l2_mb": Origin(WHITEPAPER),
    "l2_latency": Origin(CHASE),
    "l2_kept_share": Origin(STREAM),  # of the L2 that stays when as much again passes through it
    "l2_bytes_per_clock": Origin(STREAM),  # of an SM, with all at work on the same lines
    "l2_private_bytes_per_clock": Origin(STREAM),  # on lines of its own
    "l2_atomic_clocks": Origin(REPEATED),  # of a slice of the L2, for what a request changes in a sector
    "dram_latency": Origin(CHASE),
    "dram_efficiency": Origin(STREAM),
    "dram_loaded_delay": Origin(STREAM, HOPPER),  # of its latency, that is added where the DRAM is always busy
    "dram_turn_cost": Origin(STREAM),  # of a byte that is written in turn with loads, over one of the latter
    "launch_us": Origin("an empty kernel"),
    # Hopper
    "hmma_least": Origin(REPEATED, HOPPER),  # clocks that any mma.sync takes
    "membar_latency": Origin(REPEATED, HOPPER),  # of a fence at the scope of the GPU
    "membar_busy_latency": Origin(REPEATED, HOPPER),  # of one that begins while another of the SM is pending
    "cluster_blocks": Origin(REPEATED, HOPPER),  # of clusters that an SM holds at once
    "cluster_interval": Origin(ENDED, HOPPER),  # between two blocks that start on an SM, of clusters
    "cluster_barrier_latency": Origin(REPEATED, HOPPER),  # from the last arrival
    # shared memory of another block of the cluster: of a load, beyond its turn, and until an arrival there is seen
    "remote_latency": Origin(CHASE, HOPPER),
    "remote_arrival_latency": Origin(REPEATED, HOPPER),
    "remote_bytes_per_clock": Origin(STREAM, HOPPER),  # of an SM
    "torn_copy_clocks": Origin(REPEATED, HOPPER),  # of LDGSTS, more for a sector that lands in two pieces of 32 bytes
    "torn_copy_sectors": Origin(STREAM, HOPPER),  # that are fetched of the L2 for such a sector beyond itself
    # clocks for which copies can have a share of the L2 later that an SM left idle
    "l2_burst": Origin(STREAM, HOPPER),
    "block_drift": Origin(STREAM, HOPPER),  # of a block's clocks, by which SMs are apart once blocks have ended
    "copy_latency": Origin(CHASE, HOPPER),  # of LDGSTS, beyond a load's
    # of an SM, with all at work, for a sector: that a store fills, or does not, of an atomic, and of the copy engine's
    "l2_store_clocks": Origin(STREAM, HOPPER),
    "l2_partial_clocks": Origin(STREAM, HOPPER),
    "l2_reduce_clocks": Origin(STREAM, HOPPER),
    "l2_combine_clocks": Origin(STREAM, HOPPER),
    "imad_high_interval": Origin(REPEATED, HOPPER),
    "barrier_interval": Origin(REPEATED, HOPPER),  # between the arrivals of two of an SM's warps at barriers
    "wide_interval": Origin(REPEATED, HOPPER),  # of accesses of 16 bytes a lane; of narrower ones in proportion
    "conflict_latency": Origin(CHASE, HOPPER),  # of a wavefront of shared memory but the first, beside its clock
    "hgmma_clocks_per_column": Origin(WHITEPAPER, HOPPER),
    "hgmma_latency": Origin(REPEATED, HOPPER),  # from a wgmma's last clock to its end
    "hgmma_mufu_loss": Origin(REPEATED, HOPPER),  # of MUFU's rate, while wgmmas compute
    "hgmma_arithmetic_interval": Origin(REPEATED, HOPPER),  # of the other arithmetic pipes, while wgmmas compute
    # a sub-core's register file has a turn a clock: those of a wgmma for each clock, and of an FP32 instruction
    "hgmma_turns": Origin(REPEATED, HOPPER),
    "hgmma_fma_turns": Origin(REPEATED, HOPPER),
    "hgmma_queue": Origin(REPEATED, HOPPER),  # wgmmas that wait for the tensor cores
    "hgmma_issue": Origin(REPEATED, HOPPER),  # of the first seven; behind them with A in shared memory, in registers
    "hgmma_issue_shared": Origin(REPEATED, HOPPER),
    "hgmma_issue_registers": Origin(REPEATED, HOPPER),
    "mbarrier_latency": Origin(REPEATED, HOPPER),  # of a wait that need not wait
    "mbarrier_wake": Origin(REPEATED, HOPPER),  # from an arrival until a warp that waits goes on
    "l2_private_tma_bytes_per_clock": Origin(STREAM, HOPPER),
    "tma_latency": Origin("a TMA load timed by clock64", HOPPER),
    "tma_issue": Origin(REPEATED, HOPPER),
    "tma_bytes_per_clock": Origin(STREAM, HOPPER),
    "tma_in_flight_bytes": Origin(STREAM, HOPPER),
    "multicast_latency": Origin("a TMA load timed by clock64", HOPPER),
}


OPTIONAL = ("boost_ghz", "boost_tensor_ghz", "boost_full_ghz", "power_base", "power_knee", "l2_ghz")
"""of a GPU whose clock under load is known; see Chip.ghz and Chip.l2_clocks"""


@dataclass(frozen=True, slots=True)
class Chip:
    """`rates` has every name of NEEDED, in chips.toml's units."""

    gpu: Gpu
    rates: Mapping[str, float]
    stated: Mapping[str, Rate] = field(repr=False)

    @property
    def key(self) -> str:
        return self.gpu.key

    @property
    def sms(self) -> int:
        return self.gpu.sms

    @property
    def l2_kept_bytes(self) -> float:
        """Return the bytes of recent L2 traffic that are still there after as much has passed through."""
        return self.rates["l2_mb"] * 2**20 * self.rates["l2_kept_share"]

    @property
    def launch_us(self) -> float:
        return self.rates["launch_us"]

    @property
    def peak_flops(self) -> float:
        """Return the FLOP/s of the tensor cores by the data sheet."""
        return self.gpu.tensor_tflops * 1e12

    @property
    def dram(self) -> float:
        """Return the DRAM bandwidth in bytes/s by the data sheet."""
        return self.gpu.memory_gbs * 1e9

    def ghz(self, clock: Clock, tensor_use: float) -> float:
        """Return the clock where tensor cores are in use 0…1 of the time.

        Boost: with its tensor cores the GPU runs more slowly than its boost clock, at once and whatever power is left:
        from `boost_tensor_ghz` where they are hardly in use to `boost_full_ghz` where they always are. Sustained:
        power, which goes with the cube of the clock and with `power_base` and the tensor cores' use, stays what it is
        at the boost clock and the use `power_knee`. A GPU of which these are not known keeps its boost clock.
        """
        if clock.mhz:
            return clock.mhz / 1e3

        def stated(name: str, default: float) -> float:
            return self.stated[name].value if name in self.stated else default

        full = stated("boost_ghz", self.gpu.clock_ghz)
        little = stated("boost_tensor_ghz", full)
        boost = little - tensor_use * (little - stated("boost_full_ghz", full)) if tensor_use else full
        if clock.kind != SUSTAINED or "power_knee" not in self.stated:
            return boost
        base, knee = self.stated["power_base"].value, self.stated["power_knee"].value
        return float(min(boost, full * ((base + knee) / (base + tensor_use)) ** (1 / 3)))

    def l2_clocks(self, ghz: float) -> float:
        """Return a clock of the L2 over that of SMs at `ghz`, as a multiple of what it is at the boost clock.

        Rates of the L2 and beyond are stated at the boost clock. An L2 whose `l2_ghz` is known has a clock of its own.
        """
        return self.stated["boost_ghz"].value / ghz if "l2_ghz" in self.stated else 1.0

    def provenance(self, name: str) -> str:
        """Return value, unit, status and source of a rate, or of a figure of the data sheet, in one line."""
        name = _stands_for(name, self.stated)
        if name in self.stated:
            rate = self.stated[name]
            return f"{rate.value:g} {rate.unit}, {rate.status}: {rate.source}"
        if name in {f.name for f in fields(Gpu)}:
            return f"{getattr(self.gpu, name)}, published: NVIDIA's data sheet of the {self.gpu.name} (gpus.toml)"
        raise UsageError(f"{self.key} has no rate named {name}; known are {', '.join(self.stated)}")


def _stands_for(name: str, stated: Mapping[str, Rate]) -> str:
    """Return the rate that holds where `name` itself is not stated."""
    return "l2_bytes_per_clock" if name == "l2_private_bytes_per_clock" and name not in stated else name


def why_unmodelled(gpu: Gpu) -> str | None:
    """Return why the model has no rates of the GPU, as a sentence for the user; None where it has."""
    if gpu.key not in known_gpus():
        return f"the rates of {gpu.key}'s parts are not known, which is no GPU of evoengine's own"
    modelled = _read(FILE)["arch"]
    if f"sm_{gpu.capability}" not in modelled:
        return f"the model of machine code knows {', '.join(modelled)}, and {gpu.key} is {gpu.arch}"
    return None


@cache
def find_chip(key: str, file: Path = FILE) -> Chip:
    """Return the GPU of that name with its rates.

    Raises UsageError for an unknown GPU, a rate that is missing or malformed, and an architecture without an entry.
    """
    gpu = find_gpu(key)
    arch = f"sm_{gpu.capability}"
    table = _read(file)
    if arch not in table.get("arch", {}):
        raise UsageError(
            f"{file.name} has no [arch.{arch}], which {gpu.key} needs: add one with the rates that {GUIDE} and "
            f"{WHITEPAPER} give; there are {', '.join(table.get('arch', {})) or 'none'}"
        )
    own = table.get("gpu", {}).get(gpu.key, {})
    places = {"all": table.get("all", {}), f"arch.{arch}": table["arch"][arch], f"gpu.{gpu.key}": own}
    stated: dict[str, Rate] = {}
    for place, entries in places.items():
        for name, entry in entries.items():
            stated[name] = _rate(entry, f"{file.name}: {name} in [{place}]", name, table["sources"])
    rates = {name: _value(name, stated, gpu, file) for name in NEEDED}
    return Chip(gpu, rates, stated)


def _value(name: str, stated: Mapping[str, Rate], gpu: Gpu, file: Path) -> float:
    name = _stands_for(name, stated)
    if name in stated:
        return stated[name].value
    if gpu.capability < NEEDED[name].since:
        return 0.0
    raise UsageError(
        f"{file.name} has no {name} for {gpu.key}: add it to [all], [arch.sm_{gpu.capability}] or [gpu.{gpu.key}]; "
        f"it would come from {NEEDED[name].text}"
    )


@cache
def _read(file: Path) -> dict[str, Any]:
    try:
        table = tomllib.loads(file.read_text("utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read {file}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{file} is not a TOML file: {error}") from None
    if not isinstance(table.get("sources"), dict):
        raise UsageError(f"{file} has no [sources], which names where rates come from")
    return table


def _rate(entry: object, where: str, name: str, sources: Mapping[str, str]) -> Rate:
    if name not in NEEDED and name not in OPTIONAL:
        near = difflib.get_close_matches(name, (*NEEDED, *OPTIONAL), n=1)
        raise UsageError(f"{where} is no rate that a prediction knows" + (f"; did you mean {near[0]}?" if near else ""))
    if not isinstance(entry, list) or len(entry) != 4:
        raise UsageError(f'{where} must be [value, "unit", "status", "source"]')
    value, unit, status, source = entry
    if status not in STATUSES:
        raise UsageError(f"{where} has the status {status!r}; it is one of {', '.join(STATUSES)}")
    if source not in sources:
        raise UsageError(f"{where} names the source {source!r}, which [sources] does not have")
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise UsageError(f"{where} is {value!r}; it must be a number above 0")
    return Rate(float(value), str(unit), status, sources[source])


BOOST, SUSTAINED = "boost", "sustained"
_LOCKED = re.compile(r"locked:(\d+)")
LOWEST_MHZ, HIGHEST_MHZ = 100, 5000


@dataclass(frozen=True, slots=True)
class Clock:
    """`kind` is boost, sustained or locked, the latter with its MHz."""

    kind: str
    mhz: int = 0

    def __str__(self) -> str:
        return f"locked:{self.mhz}" if self.mhz else self.kind

    @classmethod
    def parse(cls, text: str) -> Clock:
        """Raise UsageError for what is none of boost, sustained and locked:MHZ."""
        if text in (BOOST, SUSTAINED):
            return cls(text)
        locked = _LOCKED.fullmatch(text)
        if not locked or not LOWEST_MHZ <= int(locked[1]) <= HIGHEST_MHZ:
            known = f"boost, sustained, or locked:MHZ from {LOWEST_MHZ} to {HIGHEST_MHZ}"
            raise UsageError(f"unknown clock {text!r}: it is {known}, as in locked:1500")
        return cls("locked", int(locked[1]))


DEFAULT = Clock(BOOST)
"""what figures are ranked by on a GPU: it rests between repetitions, and rounds in which it throttled are dropped"""
