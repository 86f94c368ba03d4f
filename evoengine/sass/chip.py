"""A chip as predictions need it: a GPU's data sheet (gpus.toml) and the rates of its parts (chips.toml), with where each
comes from."""

from __future__ import annotations

import difflib
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any

from evoengine.errors import UsageError
from evoengine.gpu import Gpu, find_gpu

FILE = Path(__file__).with_name("chips.toml")
STATUSES = ("published", "inferred", "assumed")
HOPPER = 90

GUIDE = "the CUDA C++ Programming Guide's table for its compute capability"
WHITEPAPER = "NVIDIA's whitepaper of its architecture"
CHASE = "a pointer chase by one thread"
STREAM = "a kernel that streams from it on all SMs"
REPEATED = "a kernel that repeats the instruction, timed by clock64"
PUBLISHED_TIMES = "published times of wgmma kernels beside their machine code"


@dataclass(frozen=True, slots=True)
class Rate:
    """One entry of chips.toml; `source` is written out."""

    value: float | tuple[float, ...]
    unit: str
    status: str
    source: str


def _from(origin: str, since: int = 0) -> Any:
    """A rate that would come from there; GPUs below the compute capability `since` have no such part: 0."""
    return field(metadata={"origin": origin, "since": since})


@dataclass(frozen=True, slots=True)
class Chip:
    """Latencies and occupancies in SM clocks, `per_clock` of arithmetic in warp instructions per clock of one of the four
    sub-cores, `bytes_per_clock` per SM. Limits, SMs, boost clock and DRAM bandwidth are those of `gpu`."""

    gpu: Gpu

    issue_per_clock: float = _from(REPEATED)
    fma_per_clock: float = _from(GUIDE)
    """FFMA, FADD, FMUL"""
    imad_per_clock: float = _from(GUIDE)
    alu_per_clock: float = _from(GUIDE)
    """integer addition, logic, shifts, comparison, minimum"""
    half_per_clock: float = _from(GUIDE)
    """HFMA2, HADD2, HMUL2"""
    fp64_per_clock: float = _from(GUIDE)
    mufu_per_clock: float = _from(GUIDE)
    convert_per_clock: float = _from(GUIDE)
    """I2F, F2I, F2F, which run where MUFU does"""
    shuffle_per_clock: float = _from(GUIDE)
    uniform_per_clock: float = _from(REPEATED)
    """the uniform datapath"""

    branch_clocks: float = _from(REPEATED)
    """until a warp issues again after a branch it took"""
    mufu_latency: float = _from(REPEATED)
    shuffle_latency: float = _from(REPEATED)
    constant_latency: float = _from(REPEATED)
    """LDC"""
    uniform_latency: float = _from(REPEATED)
    barrier_latency: float = _from(REPEATED)
    """from the last arrival until the warps go on"""

    memory_issue_clocks: float = _from(REPEATED)
    """between two memory instructions of a sub-core"""
    lsu_issue_clocks: float = _from(REPEATED)
    """between two memory instructions of an SM"""
    memory_queue_clocks: float = _from(REPEATED)
    """of work that may wait before a sub-core's memory instructions stop issuing"""
    shared_latency: float = _from(CHASE)
    """of shared memory, after its wavefronts"""
    shared_wavefront_clocks: float = _from(WHITEPAPER)
    """of each set of banks that a shared access needs"""
    l1_latency: float = _from(CHASE)
    """of a hit, after the LSU; l2_latency and dram_latency count from the same moment"""
    l2_latency: float = _from(CHASE)
    dram_latency: float = _from(CHASE)
    l1_bytes_per_clock: float = _from(WHITEPAPER)
    l2_bytes_per_clock: float = _from(STREAM)
    """with all SMs at work"""
    dram_efficiency: float = _from(STREAM)
    """what is reached of gpu.memory_gbs, 0…1"""
    l1_kb: float = _from(WHITEPAPER)
    """of an SM, shared memory included"""
    carveouts_kb: tuple[float, ...] = _from(GUIDE)
    """what of l1_kb can be made shared memory"""
    l2_mb: float = _from(WHITEPAPER)
    instruction_cache_kb: float = _from("a loop of growing length")

    launch_overhead_us: float = _from("an empty kernel")
    block_start_clocks: float = _from("blocks that exit at once")
    """from a block's end until another's first warp issues in its place"""
    warp_start_clocks: float = _from("blocks that exit at once")
    """from one warp of a starting block to the next"""

    hmma_f32_clocks: float = _from(WHITEPAPER)
    """of a sub-core's tensor core per m16n8k16 of halfs that accumulates in FP32"""
    hmma_f16_clocks: float = _from(WHITEPAPER)
    """the same, accumulating in FP16"""
    hgmma_clocks_per_column: float = _from(WHITEPAPER, since=HOPPER)
    """m64nNk16 takes N times this of each sub-core's tensor core"""
    hgmma_latency: float = _from(PUBLISHED_TIMES, since=HOPPER)
    """from the end of a product until its accumulators can be read"""
    hgmma_shared_bytes_per_clock: float = _from(PUBLISHED_TIMES, since=HOPPER)
    """at which products read operands in shared memory"""
    transaction_barrier_latency: float = _from(REPEATED, since=HOPPER)
    """SYNCS on an mbarrier"""
    cluster_latency: float = _from(CHASE, since=HOPPER)
    """of another block's shared memory"""
    tma_latency: float = _from("a TMA load timed by clock64", since=HOPPER)
    """what a TMA load takes longer than an ordinary one"""
    tma_bytes_per_clock: float = _from(STREAM, since=HOPPER)
    tma_issue_clocks: float = _from(REPEATED, since=HOPPER)
    """between two TMA instructions of an SM"""

    a_clock_ghz: float = _from(PUBLISHED_TIMES, since=HOPPER)
    """hypothesis A: tensor cores and MUFU exclude each other, at this clock"""
    b_clock_ghz: float = _from(PUBLISHED_TIMES, since=HOPPER)
    """hypothesis B: the clock at a tensor utilisation of `b_clock_knee`; it falls by `b_clock_slope` per utilisation"""
    b_clock_slope: float = _from(PUBLISHED_TIMES, since=HOPPER)
    b_clock_knee: float = _from(PUBLISHED_TIMES, since=HOPPER)
    b_issue_lost: float = _from(PUBLISHED_TIMES, since=HOPPER)
    """hypothesis B: share of other arithmetic issue that is lost while the tensor cores run, 0…1"""

    rates: Mapping[str, Rate] = field(repr=False, compare=False)

    def provenance(self, name: str) -> str:
        """Value, unit, status and source of a rate, or of a figure of the data sheet, in one line."""
        if name in self.rates:
            rate = self.rates[name]
            return f"{rate.value} {rate.unit}, {rate.status}: {rate.source}"
        if name in {f.name for f in fields(Gpu)}:
            return f"{getattr(self.gpu, name)}, published: NVIDIA's data sheet of the {self.gpu.name} (gpus.toml)"
        raise UsageError(f"{self.gpu.key} has no rate named {name}; known are {', '.join(RATES)}")


RATES = {f.name: f.metadata for f in fields(Chip) if "origin" in f.metadata}


@cache
def find_chip(key: str, file: Path = FILE) -> Chip:
    """The GPU of that name with its rates; raises UsageError for an unknown GPU, a rate that is missing or malformed,
    and an architecture without an entry."""
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
    found: dict[str, Rate] = {}
    for place, entries in places.items():
        for name, entry in entries.items():
            found[name] = _rate(entry, f"{file.name}: {name} in [{place}]", name, table["sources"])
    values = {name: _value(name, found, gpu, file) for name in RATES}
    return Chip(gpu=gpu, rates=found, **values)


def _value(name: str, found: Mapping[str, Rate], gpu: Gpu, file: Path) -> float | tuple[float, ...]:
    if name in found:
        return found[name].value
    if gpu.capability < RATES[name]["since"]:
        return 0.0
    raise UsageError(
        f"{file.name} has no {name} for {gpu.key}: add it to [all], [arch.sm_{gpu.capability}] or [gpu.{gpu.key}]; "
        f"it would come from {RATES[name]['origin']}"
    )


def _read(file: Path) -> dict[str, Any]:
    try:
        table = tomllib.loads(file.read_text())
    except OSError as error:
        raise UsageError(f"cannot read {file}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{file} is not a TOML file: {error}") from None
    if not isinstance(table.get("sources"), dict):
        raise UsageError(f"{file} has no [sources], which names where rates come from")
    return table


def _rate(entry: object, where: str, name: str, sources: Mapping[str, str]) -> Rate:
    if name not in RATES:
        near = difflib.get_close_matches(name, RATES, n=1)
        raise UsageError(f"{where} is no rate that a prediction knows" + (f"; did you mean {near[0]}?" if near else ""))
    if not isinstance(entry, list) or len(entry) != 4:
        raise UsageError(f'{where} must be [value, "unit", "status", "source"]')
    value, unit, status, source = entry
    if status not in STATUSES:
        raise UsageError(f"{where} has the status {status!r}; it is one of {', '.join(STATUSES)}")
    if source not in sources:
        raise UsageError(f"{where} names the source {source!r}, which [sources] does not have")
    several = name == "carveouts_kb"
    numbers = value if several and isinstance(value, list) else [value]
    if not all(_is_rate(v, several) for v in numbers):
        raise UsageError(f"{where} is {value!r}; it must be " + ("a list of sizes" if several else "a number above 0"))
    return Rate(tuple(map(float, numbers)) if several else float(value), str(unit), status, sources[source])


def _is_rate(value: object, may_be_zero: bool) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return False
    return value > 0 or (may_be_zero and value == 0)
