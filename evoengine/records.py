"""The records of the pipeline: Config → Source → Binary → Verdict → Measurement, collected in a Candidate.

All are frozen and independent of the code that creates them, which is in `evoengine.stages`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from enum import StrEnum
from typing import Any, NamedTuple

from evoengine.terms import FORMULA, model_of

Value = int | float | str | bool
Config = Mapping[str, Value]
"""One setting of the knobs: active knobs only, in the order the space declares them."""


def named(record: object, names: Iterable[str]) -> dict[str, Any]:
    """Return attributes of a record by their names, in this order."""
    return {name: getattr(record, name) for name in names}


def config_key(config: Config) -> str:
    """Return a configuration as canonical JSON: equal settings give equal keys in any order."""
    return json.dumps(dict(config), sort_keys=True, separators=(",", ":"))


class Outcome(StrEnum):
    """The stage at which a candidate ended, and how. Every candidate ends with exactly one outcome."""

    MEASURED = "measured"
    ESTIMATED = "estimated"
    RECORDED = "recorded"
    UNRANKED = "unranked"
    """correct, but without a figure: no GPU timed it, and its family states no cost for an estimate"""
    SCREENED = "screened"
    UNCOMPILABLE = "uncompilable"
    INCORRECT = "incorrect"
    CRASHED = "crashed"
    HUNG = "hung"
    DUPLICATE = "duplicate"
    SUSPECT = "suspect"
    UNFINISHED = "unfinished"
    """it passed the short cases and has a prediction, and the gate was not finished: not ranked, not exported, and its
    result is not reused"""
    KILLED = "killed"
    """it was in flight when the process of its search was killed: no verdict on the kernel, which is tried again"""
    INTERRUPTED = "interrupted"
    """it was in flight when its search was stopped: no verdict on the kernel either"""

    @property
    def judged(self) -> bool:
        """Return whether the outcome says something about the kernel rather than about its search."""
        return self not in (Outcome.KILLED, Outcome.INTERRUPTED)

    @property
    def ranked(self) -> bool:
        """Return whether the candidate is correct and has a figure by which it may be ranked."""
        return self in (Outcome.MEASURED, Outcome.ESTIMATED, Outcome.RECORDED)

    @property
    def has_figure(self) -> bool:
        """Return whether the candidate has a figure that a sampler may learn from, ranked or not."""
        return self.ranked or self is Outcome.UNFINISHED

    @property
    def correct(self) -> bool:
        """Return whether the candidate passed the whole gate."""
        return self.ranked or self is Outcome.UNRANKED

    @property
    def reusable(self) -> bool:
        """Return whether other searches may reuse the result."""
        return self.judged and self is not Outcome.UNFINISHED


class Kind(StrEnum):
    """Where a figure comes from, most trusted first. Kinds are never compared with one another."""

    MEASURED = "measured"
    RECORDED = "recorded"
    ESTIMATED = "estimated"


def precedence(kind: Kind, by_formula: bool = False, sustained: bool = False) -> int:
    """Return the rank of a figure's kind, smaller for more trusted.

    A candidate counts by the last of its figures of the smallest. Estimates by formula follow predictions; figures of
    back-to-back runs follow the others.
    """
    return 4 * tuple(Kind).index(kind) + 2 * by_formula + sustained


@dataclass(frozen=True, slots=True)
class Launch:
    """A launch geometry: blocks of the grid (x, y, z), threads per block, dynamic shared memory in bytes."""

    grid: tuple[int, int, int]
    threads: int
    shared_bytes: int
    block_yz: tuple[int, int] = (1, 1)
    """rows of threads along y and z; their product divides `threads`"""
    then: tuple[NextKernel, ...] = ()
    """further kernels of the same candidate, in stream order"""

    @property
    def block(self) -> tuple[int, int, int]:
        """Return the threads along x, y and z."""
        y, z = self.block_yz
        return self.threads // (y * z), y, z

    def kernels(self, entry: str) -> tuple[tuple[str, Launch], ...]:
        """Return the entry and the geometry of every kernel, in order, where the first is `entry`."""
        return (entry, replace(self, then=()) if self.then else self), *((k.entry, k.launch) for k in self.then)


@dataclass(frozen=True, slots=True)
class NextKernel:
    """A kernel that begins when its predecessors have ended."""

    entry: str
    launch: Launch


Plan = Sequence[tuple[Any, Launch]]
"""a workload's gate cases, of types of its own, each with the launch for its problem"""


PENDING = "pending"
"""what a trial without an outcome is called: its search is still running, or was lost"""

DEATHS = "deaths"
"""of the evidence of an outcome: the processes that died before it was given. Another search does not take it over"""


class Plans(NamedTuple):
    """The gate's cases of a configuration."""

    short: Plan
    """run for every candidate"""
    long: Plan = ()
    """run for candidates that may be ranked"""
    full: Plan = ()
    """the same, at full size: blocks of the problem itself. A GPU runs the whole problem instead"""


@dataclass(frozen=True, slots=True)
class Rejection:
    """A stage's rejection: how the candidate ends, and why."""

    outcome: Outcome
    reason: str
    baseline: str | None = None
    """the library's kernel that failed, if it was not a candidate"""
    verdict: Verdict | None = None
    """the gate's findings before the candidate crashed or hung"""
    evidence: Mapping[str, Any] | None = field(default=None, compare=False)
    """for a process that died or reached a limit: `deaths`, or the `limit`, as JSON values"""


@dataclass(frozen=True, slots=True)
class Source:
    """A rendered kernel: CUDA text that stands alone, its entry point, and its launch."""

    text: str
    entry: str
    launch: Launch

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Binary:
    """The compiler's result for a source, and its report."""

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
    """SASS opcode (HMMA, HMMA.TF32, LDSM, MUFU, …) → instructions in the kernel's text; empty if there is no
    disassembler"""
    compile_ms: float
    listing: str = field(default="", repr=False, compare=False)
    """the machine code as `nvdisasm -c -hex` prints it; empty if it was read back, or no disassembler is at hand"""
    others: tuple[KernelResources, ...] = ()
    """resources of the kernels after the first, in stream order"""
    launch: Launch | None = field(default=None, compare=False)
    """the launch, where the source does not state it; None if it does, and where the binary was read back"""

    def of_kernel(self, entry: str) -> Binary:
        """Return the binary with the resources of its kernel `entry`; those of the first unless it is one behind it."""
        other = next((k for k in self.others if k.entry == entry), None)
        sizes = ("registers", "spill_bytes", "stack_bytes", "shared_bytes")
        return replace(self, **named(other, sizes)) if other else self


@dataclass(frozen=True, slots=True)
class KernelResources:
    """Resources of one kernel of a binary, by the names and in the units of Binary."""

    entry: str
    registers: int
    spill_bytes: int
    stack_bytes: int
    shared_bytes: int


@dataclass(frozen=True, slots=True)
class CaseResult:
    """One case of the gate: its problem and seed, the error of the result and the allowed error."""

    name: str
    problem: str
    seed: int
    correct: bool
    max_error: float | None
    """largest absolute difference from the float64 reference; None if there is no result to compare"""
    mean_error: float | None
    allowed: float | None
    reason: str | None = None
    part: str | None = None
    """the judged part of a problem that is too large to be judged whole, such as "36 of 2,048 blocks"; else None"""

    @property
    def error_ratio(self) -> float | None:
        """Return the largest error over what is allowed, at most 1 where it is correct; None if one is unknown."""
        return self.max_error / self.allowed if self.max_error is not None and self.allowed else None


PROPOSAL = "proposal"
"""operator of a candidate whose text was proposed, and is not what its configuration renders"""

GATE_VERSION = 15
"""of the rules and cases that verdicts are reached by: raised by hand when a verdict may change. A test over recorded
verdicts holds it. Candidates of unlike versions are ranked apart, and their results are not reused"""


@dataclass(frozen=True, slots=True)
class Coverage:
    """Cells of a configuration that the gate's cases visited, by kind of cell.

    A cell is one combination of what a kernel may do unlike elsewhere: a warp, a phase of its pipeline, the first or
    last step, a remainder. The workload derives them from the configuration; devices count the visits.
    """

    cells: Mapping[str, int]
    visited: Mapping[str, int]
    missing: tuple[str, ...] = ()
    """the cells that no case visited, as text, "KIND: WHAT"; a reader may keep the first of them"""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of the correctness gate on one device. `outcome` is None if the candidate passed."""

    device: str
    outcome: Outcome | None
    reason: str | None
    cases: tuple[CaseResult, ...]
    wall_ms: float
    taken_at: datetime | None = field(default=None, compare=False, repr=False)
    coverage: Coverage | None = None
    """None for a device that does not count visits"""
    gate_version: int | None = None
    """None for verdicts from before versions were stored"""
    whole: bool = True
    """whether all of the gate's cases for the device were run, or only the short ones"""

    @property
    def correct(self) -> bool:
        return self.outcome is None

    @property
    def abstained(self) -> bool:
        """Return whether the device could not judge the candidate; `reason` states why."""
        return self.correct and not self.cases and self.reason is not None

    @property
    def max_error(self) -> float | None:
        return max((c.max_error for c in self.cases if c.max_error is not None), default=None)

    @property
    def error_ratio(self) -> float | None:
        """Return the largest of its cases' errors over what each allows."""
        return max((c.error_ratio for c in self.cases if c.error_ratio is not None), default=None)


EXECUTOR, EMULATOR = "executor", "emulator"
"""devices of verdicts without a GPU: by executing machine code, and by executing source text"""


@dataclass(frozen=True, slots=True)
class Judged:
    """The verdicts on a candidate by the judges without a GPU, one of each that ran."""

    verdicts: tuple[Verdict, ...]

    @property
    def correct(self) -> bool:
        return self.wrong is None

    @property
    def wrong(self) -> Verdict | None:
        return next((v for v in self.verdicts if not v.correct), None)

    @property
    def whole(self) -> bool:
        """Return whether both judges have judged the candidate to the end, as far as they can."""
        return len(self.verdicts) == 2 and all(v.whole for v in self.verdicts)

    @property
    def alone(self) -> str | None:
        """Return why only one judge judged; None if neither abstained."""
        return next((v.reason for v in self.verdicts if v.abstained), None)

    @property
    def why_wrong(self) -> str | None:
        """Return the reason of the refuting verdict; None if there is none."""
        wrong = self.wrong
        if wrong is None:
            return None
        return f"machine code: {wrong.reason}" if wrong.device == EXECUTOR else wrong.reason

    def __str__(self) -> str:
        what = {EXECUTOR: "machine code", EMULATOR: "text"}
        if wrong := self.wrong:
            return f"its {what[wrong.device]} is {wrong.outcome}, {wrong.reason}"
        judging = [v for v in self.verdicts if not v.abstained]
        done = " and ".join(f"its {what[v.device]} on {len(v.cases)} cases" for v in judging)
        parts = dict.fromkeys(f"{c.name} ({c.part})" for v in judging for c in v.cases if c.part)
        in_part = f"; judged in part: {', '.join(parts)}" if parts else ""
        return f"correct: the gate ran {done}{in_part}{f'; {self.alone}' if self.alone else ''}"


class LaunchMode(StrEnum):
    """How timed kernels are launched."""

    STREAM = "stream"
    GRAPH = "graph"
    UNKNOWN = "unknown"


class L2(StrEnum):
    """Whether a timed kernel finds its inputs in the L2."""

    COLD = "cold"
    WARM = "warm"
    UNKNOWN = "unknown"


class Clocks(StrEnum):
    """Whether the GPU rests between repetitions, or runs back to back until its power limit holds the clocks."""

    BOOST = "boost"
    SUSTAINED = "sustained"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Policy:
    """How a figure was measured; figures of different policies are never compared."""

    launch: LaunchMode
    l2: L2
    clocks: Clocks
    batch: int = 1
    """launches that were timed together; 0 where unknown"""

    @property
    def is_sustained(self) -> bool:
        """Return whether the kernel ran back to back."""
        return self.clocks is Clocks.SUSTAINED

    def __str__(self) -> str:
        if self == UNKNOWN_POLICY:
            return "policy unknown"
        batches = f", batches of {self.batch}" if self.batch > 1 else ""
        return f"{self.launch}, {self.l2} L2, {self.clocks} clocks{batches}"


UNKNOWN_POLICY = Policy(LaunchMode.UNKNOWN, L2.UNKNOWN, Clocks.UNKNOWN, 0)
"""of figures measured before policies were recorded"""


@dataclass(frozen=True, slots=True)
class Measurement:
    """A figure with its kind. Samples are microseconds, in the order they were taken; an estimate has none."""

    kind: Kind
    device: str
    tflops: float | None
    """by `compared_us`; None if the operations are unknown, as in another tuner's file"""
    median_us: float
    samples_us: tuple[float, ...] = ()
    vs_baseline: float | None = None
    """the fastest baseline's time over this one's: above 1 is faster than it"""
    terms: Mapping[str, float] = field(default_factory=dict)
    """components of an estimate, or observations during a measurement (clocks, temperature)"""
    suspect: str | None = None
    """why the figure cannot be trusted; None if it can"""
    policy: Policy | None = None
    """None if nothing ran here: for an estimate, or another tuner's record"""
    normalised_us: float | None = None
    """the paired ratio to the baseline of the same rounds, times its long-run median; None if none ran beside it"""
    taken_at: datetime | None = field(default=None, compare=False, repr=False)
    """when a ledger stored it"""

    @property
    def compared_us(self) -> float:
        """Return the time by which figures of different moments are ranked."""
        return self.median_us if self.normalised_us is None else self.normalised_us

    @property
    def by_formula(self) -> bool:
        """Return whether this is an estimate that was not predicted from machine code."""
        return self.kind is Kind.ESTIMATED and model_of(self.terms) == FORMULA

    @property
    def precedence(self) -> int:
        return precedence(self.kind, self.by_formula, self.is_sustained)

    @property
    def rank_key(self) -> tuple[bool, float]:
        """Return the sort key of comparable figures, smaller for better.

        Estimates by formula follow all predictions.
        """
        return self.by_formula, self.compared_us

    def comparable(self, other: Measurement) -> bool:
        return (self.kind, self.device, self.policy) == (other.kind, other.device, other.policy)

    @property
    def is_sustained(self) -> bool:
        return self.policy is not None and self.policy.is_sustained


@dataclass(frozen=True, slots=True)
class Baseline:
    """A library's kernel timed in the same process as the candidates."""

    name: str
    device: str
    median_us: float
    tflops: float
    samples_us: tuple[float, ...]
    policy: Policy = UNKNOWN_POLICY
    taken_at: datetime | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class RefusedBaseline:
    """A library's kernel that was not timed, with the reason: it refused the problem, failed or was incorrect."""

    name: str
    device: str
    reason: str
    taken_at: datetime | None = field(default=None, compare=False, repr=False)


AnyBaseline = Baseline | RefusedBaseline


@dataclass(frozen=True, slots=True)
class CompiledCandidate:
    """A compiled candidate as it is sent to the device that judges it."""

    trial: int
    source: Source
    binary: Binary
    config: Config = field(default_factory=dict, hash=False)
    """on which its further arguments depend, such as tensor maps"""


@dataclass(frozen=True, slots=True)
class Profile:
    """What limits a candidate, by a profiler on a GPU or from its binary; `tool` states which."""

    tool: str
    device: str
    figures: Mapping[str, float]
    """name with its unit → value, in display order"""
    remarks: tuple[str, ...] = ()
    taken_at: datetime | None = field(default=None, compare=False, repr=False)


LED_BY = " led by "
"""joins the operator of a proposal that followed figures of elsewhere with their sources (see `trusted_sources`)"""


def trusted_sources(operator: str | None) -> tuple[str, ...]:
    """Return the sources that a proposal followed, by its operator."""
    return tuple(filter(None, (operator or "").partition(LED_BY)[2].split(", ")))


@dataclass(frozen=True, slots=True, repr=False)
class Candidate:
    """One trial of one run, as far as it came; `imported_from` says where the run did, None of what was found here."""

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
    """the last one on a GPU or in the emulator"""
    binary_verdict: Verdict | None = None
    """the last one by executing its machine code"""
    measurement: Measurement | None = None
    """the figure by which it is ranked"""
    occupancy: float | None = None
    parents: tuple[int, ...] = ()
    operator: str | None = None
    sustained: Measurement | None = None
    """its last figure of back-to-back runs, as finalists have one"""
    imported_from: str | None = None
    retry_of: int | None = None
    """the trial with the same configuration that was in flight when its search was killed or stopped"""
    taken_from: int | None = None
    """the earlier trial whose outcome, verdicts and figures these are; None of what was evaluated itself"""
    evidence: Mapping[str, Any] | None = None
    """of an outcome that a dead process or a limit led to, as a Rejection has it"""
    gate_version: int | None = None
    """of the gate that the outcome rests on; None of what was judged before versions were kept"""
    created_at: datetime | None = field(default=None, compare=False, repr=False)
    finished_at: datetime | None = field(default=None, compare=False, repr=False)

    def __repr__(self) -> str:
        """Return a line: sources, verdicts and samples would fill screens."""
        ended = str(self.outcome or "pending")
        figure = f" {self.measurement.compared_us:.4g} µs" if self.measurement else ""
        return f"Candidate(trial {self.trial} of run {self.run}: {ended}{figure}, {dict(self.config)})"

    @property
    def verdicts(self) -> tuple[Verdict, ...]:
        """Return the last verdicts: by a GPU or the emulator, and on the machine code."""
        return tuple(v for v in (self.verdict, self.binary_verdict) if v is not None)

    @property
    def correct(self) -> bool | None:
        """Return whether the candidate passed the whole gate; None if no gate has judged it to the end."""
        if not all(v.correct for v in self.verdicts):
            return False
        if self.outcome is Outcome.UNFINISHED:
            return None
        return True if any(v.whole and not v.abstained for v in self.verdicts) else None

    @property
    def refuted(self) -> bool:
        """Return whether the machine code gave a wrong result, or none, where the source gave a right one."""
        return self.binary_verdict is not None and not self.binary_verdict.correct

    @property
    def ranked_by(self) -> Measurement:
        """Return the figure; only a candidate that is ranked or unfinished has one."""
        assert self.measurement is not None
        return self.measurement

    @property
    def contender(self) -> CompiledCandidate:
        """Return what a device receives of the candidate; only a compiled candidate has it."""
        assert self.source is not None and self.binary is not None
        return CompiledCandidate(self.trial, self.source, self.binary, self.config)

    @property
    def shared_bytes(self) -> int | None:
        """Return dynamic and static shared memory in bytes per block; None before rendering."""
        if self.source is None:
            return None
        return self.source.launch.shared_bytes + (self.binary.shared_bytes if self.binary else 0)


REPR_CANDIDATES = 10
"""number of candidates that `repr` of a result shows"""


def listed(candidates: Sequence[Candidate]) -> str:
    """Return candidates for the `repr` of a result, one on a line; further ones are counted."""
    lines = [f"\n  {candidate!r}" for candidate in candidates[:REPR_CANDIDATES]]
    more = len(candidates) - len(lines)
    return ("".join(lines) or "no candidate") + (f"\n  and {more} more" if more else "")


@dataclass(frozen=True, slots=True)
class Finals:
    """The best candidates timed against each other: trials best first, each with its new figure.

    `tied` are the fastest and its equals, fewest registers first in `order`; `open` was not shown to be slower.
    """

    order: tuple[int, ...]
    tied: tuple[int, ...]
    figures: Mapping[int, Measurement]
    open: tuple[int, ...] = ()
    lead: tuple[float, float, float] | None = None
    """the winner's time over the second one's, from the same rounds, with the ends of its interval"""
    sustained: Mapping[int, Measurement] = field(default_factory=dict)
    """additional figures, of kernels run back to back"""
    wrong: Mapping[int, str] = field(default_factory=dict)
    """trial with a wrong output in a repetition → which, and how; it has no figure and no place"""


RUNNING = "running"
KILLED = "killed"
"""the status of a run whose process no longer beats and has not stated how its search ended"""


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU or an emulator, which judges the candidates of a run."""

    name: str
    uuid: str | None = None
    arch: str | None = None
    driver: str | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    """versions by library, and the GPU's settings that a figure depends on: its power limit, whether MIG is on"""


@dataclass(frozen=True, slots=True)
class Run:
    id: int
    started_at: datetime
    finished_at: datetime | None
    status: str
    """`RUNNING`, `KILLED`, or how the search said it ended"""
    gpu: str
    problem: str
    device: Device
    space_name: str
    space_sha256: str
    space_text: str
    sampler: str
    objectives: str
    """names of objectives, comma-separated"""
    seed: int
    version: str
    """of evoengine"""
    host: str
    pid: int
    command: str
    definition: str | None = None
    """the problem.json of a user's own kernel, else None"""
    trials: int | None = None
    """the number that was asked for; None if the run is not a search"""
    seconds: float | None = None
    """time limit; None if there is none"""
    conditions: Mapping[str, Any] | None = None
    """values that must be the same for the run to continue, in addition to these fields"""
    imported_from: str | None = None
    """where an imported run came from, as text; None for a run of this ledger"""
    gpu_definition: dict[str, str | int | float] | None = None
    """the fields of a GPU that a file described, else None"""
    kernel: str | None = None
    """SHA-256 of the reference, definition and text of a user's own kernel; None for workloads that come with
    evoengine. Runs that differ in it are ranked separately"""
