"""The nouns of the road: Config → Source → Binary → Verdict → Measurement, gathered in a Candidate.

All are frozen and know nothing of one another's makers; the verbs live in `evoengine.stages`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

Value = int | float | str | bool
Config = Mapping[str, Value]
"""One setting of the knobs: active knobs only, in the order the space declares them."""


def config_key(config: Config) -> str:
    """A configuration as canonical JSON: equal settings give equal keys, whatever the order."""
    return json.dumps(dict(config), sort_keys=True, separators=(",", ":"))


class Outcome(StrEnum):
    """How far a candidate came, and why no further. Every candidate ends with exactly one."""

    MEASURED = "measured"
    ESTIMATED = "estimated"
    RECORDED = "recorded"
    SCREENED = "screened"
    UNCOMPILABLE = "uncompilable"
    INCORRECT = "incorrect"
    CRASHED = "crashed"
    HUNG = "hung"
    DUPLICATE = "duplicate"
    SUSPECT = "suspect"

    @property
    def ranked(self) -> bool:
        """Whether the candidate is correct and carries a figure it may be ranked by."""
        return self in (Outcome.MEASURED, Outcome.ESTIMATED, Outcome.RECORDED)


class Kind(StrEnum):
    """Where a figure comes from. Kinds are never compared with one another."""

    MEASURED = "measured"
    RECORDED = "recorded"
    ESTIMATED = "estimated"


@dataclass(frozen=True, slots=True)
class Launch:
    """A launch geometry: blocks of the grid (x, y, z), threads per block, dynamic shared memory in bytes."""

    grid: tuple[int, int, int]
    threads: int
    shared_bytes: int


Plan = Sequence[tuple[object, Launch]]
"""a workload's gate cases, each with the launch for its problem"""


@dataclass(frozen=True, slots=True)
class Rejection:
    """A stage's no: how the candidate ends, and why."""

    outcome: Outcome
    reason: str
    baseline: str | None = None
    """the library's kernel that failed, where it was one and no candidate"""


@dataclass(frozen=True, slots=True)
class Source:
    """A rendered kernel: CUDA text that stands alone, its entry point, and the launch for the problem it was made for."""

    text: str
    entry: str
    launch: Launch

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Binary:
    """What the compiler made of a source, and what it said about it."""

    cubin: bytes
    arch: str
    options: str
    compiler: str
    registers: int
    """per thread"""
    spill_bytes: int
    """spill stores plus spill loads, bytes per thread"""
    stack_bytes: int
    shared_bytes: int
    """static shared memory, bytes per block"""
    warnings: tuple[str, ...]
    mix: Mapping[str, int]
    """SASS opcode (HMMA, LDSM, MUFU, …) → instructions in the text of the kernel; empty where no disassembler is at hand"""
    compile_ms: float


@dataclass(frozen=True, slots=True)
class CaseResult:
    """One case of the gate: what was tried, with which seed, how far off the result was and how far it may be."""

    name: str
    problem: str
    seed: int
    correct: bool
    max_error: float | None
    """largest absolute difference from the float64 reference; None where there is no result to compare"""
    mean_error: float | None
    allowed: float | None
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the correctness gate found on one device. `outcome` is None where the candidate passed."""

    device: str
    outcome: Outcome | None
    reason: str | None
    cases: tuple[CaseResult, ...]
    wall_ms: float

    @property
    def correct(self) -> bool:
        return self.outcome is None

    @property
    def max_error(self) -> float | None:
        return max((c.max_error for c in self.cases if c.max_error is not None), default=None)


@dataclass(frozen=True, slots=True)
class Measurement:
    """A figure with its kind. Samples are microseconds, in the order they were taken; an estimate has none."""

    kind: Kind
    device: str
    tflops: float | None
    """None where the operations are unknown, as in a file that another tuner recorded"""
    median_us: float
    samples_us: tuple[float, ...] = ()
    vs_sdpa: float | None = None
    """the fastest baseline's time over this one's: above 1 is faster than it"""
    terms: Mapping[str, float] = field(default_factory=dict)
    """what an estimate is made of, or what was observed beside a measurement (clocks, temperature)"""
    suspect: str | None = None
    """why the figure cannot be believed; None where it can"""


@dataclass(frozen=True, slots=True)
class Baseline:
    """A library's kernel timed in the same process as the candidates."""

    name: str
    device: str
    median_us: float
    tflops: float
    samples_us: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Contender:
    """A compiled candidate as it travels to the device that judges it."""

    trial: int
    source: Source
    binary: Binary
    config: Config = field(default_factory=dict, hash=False)
    """what its further arguments hang on, tensor maps for one"""


@dataclass(frozen=True, slots=True)
class Finals:
    """The best candidates timed against each other: trials best first, each with its new figure.

    `tied` cannot be told from the fastest; the first of `order` is the one of them with the fewest registers.
    """

    order: tuple[int, ...]
    tied: tuple[int, ...]
    figures: Mapping[int, Measurement]


@dataclass(frozen=True, slots=True)
class Profile:
    """What limits a candidate, by a profiler on a GPU or from its binary; `tool` says which."""

    tool: str
    device: str
    figures: Mapping[str, float]
    """name with its unit → value, in the order to be shown"""
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Candidate:
    """One trial of one run, as far as it came."""

    trial: int
    run: int
    problem: str
    gpu: str
    config: Config
    outcome: Outcome | None = None
    reason: str | None = None
    device: str | None = None
    source: Source | None = None
    binary: Binary | None = None
    verdict: Verdict | None = None
    measurement: Measurement | None = None
    occupancy: float | None = None
    parents: tuple[int, ...] = ()
    operator: str | None = None

    def to_json(self) -> dict[str, object]:
        """The public JSON of a candidate. Field names are an interface: people script against them."""
        source, binary, verdict, figure = self.source, self.binary, self.verdict, self.measurement
        return {
            "trial": self.trial,
            "run": self.run,
            "outcome": str(self.outcome) if self.outcome else None,
            "reason": self.reason,
            "config": dict(self.config),
            "problem": self.problem,
            "gpu": self.gpu,
            "device": self.device,
            "source_sha256": source.sha256 if source else None,
            "registers": binary.registers if binary else None,
            "spill_bytes": binary.spill_bytes if binary else None,
            "shared_bytes": source.launch.shared_bytes + (binary.shared_bytes if binary else 0) if source else None,
            "occupancy": self.occupancy,
            "correct": verdict.correct if verdict else None,
            "max_abs_error": verdict.max_error if verdict else None,
            "tflops": figure.tflops if figure else None,
            "tflops_kind": str(figure.kind) if figure else None,
            "median_us": figure.median_us if figure else None,
            "samples": len(figure.samples_us) if figure else None,
            "vs_sdpa": figure.vs_sdpa if figure else None,
            "parents": list(self.parents),
            "operator": self.operator,
            "compile_ms": binary.compile_ms if binary else None,
        }
