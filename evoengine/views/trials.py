"""The JSON and CSV of trials and lineages. Field names are an interface (docs/compatibility.md)."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields, is_dataclass
from datetime import datetime
from typing import Any, cast

from typing_extensions import TypedDict

from evoengine.errors import UsageError
from evoengine.lineage import Step
from evoengine.publish.export import figure_json
from evoengine.records import (
    AnyBaseline,
    Candidate,
    CaseResult,
    Config,
    Coverage,
    KernelResources,
    Kind,
    Measurement,
    NextKernel,
    Outcome,
    Policy,
    Profile,
    RefusedBaseline,
    Value,
    Verdict,
)
from evoengine.terms import bound, clock, kernel_class, model_of, model_version, peak_percent, range_us, utilisation
from evoengine.text import plain
from evoengine.views import SCHEMA, AnswerView, fields_of, utc
from evoengine.workloads import parse_problem


class SustainedView(TypedDict):
    """A figure of back-to-back runs, with the clock in MHz and the power in W that it was taken at."""

    tflops: float | None
    median_us: float
    policy: Policy | None
    sm_mhz: float | None
    watts: float | None


class JudgedConfigView(TypedDict):
    """A configuration and its results. A field is null if the configuration did not reach that stage."""

    problem: str
    gpu: str
    config: Config
    outcome: Outcome | None
    reason: str | None
    device: str | None
    created_at: datetime | None
    finished_at: datetime | None
    imported_from: str | None
    source_sha256: str | None
    registers: int | None
    spill_bytes: int | None
    shared_bytes: int | None
    occupancy: float | None
    compile_ms: float | None
    correct: bool | None
    gate_version: int | None
    binary_correct: bool | None
    max_abs_error: float | None
    tflops: float | None
    tflops_kind: Kind | None
    median_us: float | None
    normalised_us: float | None
    samples: int | None
    taken_at: datetime | None
    peak_percent: float | None
    vs_baseline: float | None
    vs_sdpa: float | None
    policy: Policy | None
    range_us: Sequence[float] | None
    bound: str | None
    utilisation: Mapping[str, float] | None
    model: str | None
    model_version: int | None
    clock: str | None
    kernel_class: str | None
    sustained: SustainedView | None
    parents: Sequence[int]
    operator: str | None
    retry_of: int | None
    taken_from: int | None


class TrialView(JudgedConfigView):
    """One trial of a run."""

    trial: int
    run: int


class OneTrialView(TrialView, AnswerView):
    """Describe what `evoengine best --json` prints."""


class TrialsView(AnswerView):
    """Describe what `evoengine history --json` prints."""

    trials: Sequence[TrialView]


class LaunchGeometryView(TypedDict):
    """Blocks of the grid and threads of a block along x, y and z; dynamic shared memory in bytes."""

    grid: tuple[int, int, int]
    threads: int
    shared_bytes: int
    block_yz: tuple[int, int]
    then: Sequence[NextKernel]
    entry: str
    block: tuple[int, int, int]


class CompiledView(TypedDict):
    """The machine code of a trial; `instructions` counts those of each opcode."""

    arch: str
    options: str
    compiler: str
    stack_bytes: int
    warnings: Sequence[str]
    instructions: Mapping[str, int]
    other_kernels: Sequence[KernelResources]


class JudgementView(TypedDict):
    """A verdict without its cases."""

    correct: bool
    device: str
    outcome: Outcome | None
    reason: str | None
    coverage: Coverage | None
    wall_ms: float
    taken_at: datetime | None


class FigureView(TypedDict):
    """A figure with its samples in µs and the terms of its prediction by name."""

    kind: Kind
    device: str
    tflops: float | None
    median_us: float
    normalised_us: float | None
    samples_us: Sequence[float]
    vs_baseline: float | None
    vs_sdpa: float | None
    policy: Policy | None
    terms: Mapping[str, float]
    suspect: str | None


class ProfileView(TypedDict):
    """What limits a candidate; `figures` by name with their unit."""

    tool: str
    device: str
    figures: Mapping[str, float]
    remarks: Sequence[str]


class TimedBaselineView(TypedDict):
    """A library's kernel with its figure."""

    name: str
    device: str
    median_us: float | None
    tflops: float | None
    samples_us: Sequence[float]
    policy: Policy | None


class BaselineView(TimedBaselineView):
    """Describe a library's kernel. One that was not timed has a reason, and neither time nor TFLOPS."""

    reason: str | None


class TrialPageView(OneTrialView):
    """Describe what `evoengine show --json` prints."""

    launch: LaunchGeometryView | None
    source_lines: int | None
    binary: CompiledView | None
    verdict: JudgementView | None
    cases: Sequence[CaseResult]
    binary_verdict: JudgementView | None
    binary_cases: Sequence[CaseResult]
    figure: FigureView | None
    memory_gbs: float | None
    """rate at which the problem's tensors, each read or written once, pass the memory; null if unknown"""
    profile: ProfileView | None
    evidence: Mapping[str, Any] | None
    baselines: Sequence[BaselineView]
    """those of the candidate's run"""


class VerifiedView(JudgedConfigView, AnswerView):
    """Describe what `evoengine verify --json` prints; `trial` and `run` are null because no ledger is involved."""

    trial: None
    run: None
    seed: int
    cases: Sequence[CaseResult]
    binary_cases: Sequence[CaseResult]
    binary_remark: str | None


class LineageStepView(TypedDict):
    """A step of a lineage; `changes` has the parent's value and the child's of each knob, null where it is inactive."""

    trial: int
    parent: int | None
    operator: str | None
    changes: Mapping[str, tuple[Value | None, Value | None]]
    gain: float | None


class LineageView(AnswerView):
    """Describe what `evoengine show --lineage --json` prints."""

    lineage: Sequence[LineageStepView]


class ProfilePageView(ProfileView, AnswerView):
    """Describe what `evoengine profile --json` prints."""

    trial: int


def trial_json(candidate: Candidate) -> TrialView:
    return {"trial": candidate.trial, "run": candidate.run, **_judged(candidate)}


def _judged(c: Candidate) -> JudgedConfigView:
    source, binary, figure = c.source, c.binary, c.measurement
    terms = figure.terms if figure else {}
    estimated = figure is not None and figure.kind is Kind.ESTIMATED
    vs_baseline = figure.vs_baseline if figure else None
    return {
        "problem": c.problem,
        "gpu": c.gpu,
        "config": dict(c.config),
        "outcome": c.outcome,
        "reason": c.reason,
        "device": c.device,
        "created_at": c.created_at,
        "finished_at": c.finished_at,
        "imported_from": c.imported_from,
        "source_sha256": source.sha256 if source else None,
        "registers": binary.registers if binary else None,
        "spill_bytes": binary.spill_bytes if binary else None,
        "shared_bytes": c.shared_bytes,
        "occupancy": c.occupancy,
        "compile_ms": binary.compile_ms if binary else None,
        "correct": c.correct,
        "gate_version": c.gate_version,
        "binary_correct": c.binary_verdict.correct if c.binary_verdict else None,
        "max_abs_error": max((v.max_error for v in c.verdicts if v.max_error is not None), default=None),
        "tflops": figure.tflops if figure else None,
        "tflops_kind": figure.kind if figure else None,
        "median_us": figure.median_us if figure else None,
        "normalised_us": figure.normalised_us if figure else None,
        "samples": len(figure.samples_us) if figure else None,
        "taken_at": figure.taken_at if figure else None,
        "peak_percent": peak_percent(figure.terms, figure.compared_us) if figure else None,
        "vs_baseline": vs_baseline,
        "vs_sdpa": vs_baseline,
        "policy": figure.policy if figure else None,
        "range_us": range_us(terms),
        "bound": bound(terms),
        "utilisation": utilisation(terms),
        "model": model_of(terms) if estimated else None,
        "model_version": model_version(terms) if estimated else None,
        "clock": clock(terms),
        "kernel_class": kernel_class(terms),
        "sustained": _sustained(c.sustained) if c.sustained else None,
        "parents": c.parents,
        "operator": c.operator,
        "retry_of": c.retry_of,
        "taken_from": c.taken_from,
    }


def one_trial_json(candidate: Candidate) -> OneTrialView:
    return {"schema": SCHEMA, **trial_json(candidate)}


def _sustained(figure: Measurement) -> SustainedView:
    terms = figure.terms
    return {
        "tflops": figure.tflops,
        "median_us": figure.median_us,
        "policy": figure.policy,
        "sm_mhz": terms.get("sm_mhz"),
        "watts": terms.get("watts"),
    }


def memory_gbs(c: Candidate) -> float | None:
    """Return the least traffic of the problem over the time; None without a figure, or for a kernel not built in."""
    if c.measurement is None:
        return None
    try:
        workload, problem = parse_problem(c.problem)
    except UsageError:
        return None
    return workload.min_dram_bytes(problem) / c.measurement.compared_us / 1e3


def page_json(c: Candidate, profile: Profile | None, baselines: Sequence[AnyBaseline]) -> TrialPageView:
    """Return all that is known of one trial; `figure` has the samples and the terms."""
    return {
        **one_trial_json(c),
        "launch": _launch(c),
        "source_lines": len(c.source.text.splitlines()) if c.source else None,
        "binary": _compiled(c),
        "verdict": _judgement(c.verdict),
        "cases": c.verdict.cases if c.verdict else (),
        "binary_verdict": _judgement(c.binary_verdict),
        "binary_cases": c.binary_verdict.cases if c.binary_verdict else (),
        "figure": _figure(c),
        "memory_gbs": memory_gbs(c),
        "profile": fields_of(profile, ProfileView) if profile else None,
        "evidence": c.evidence,
        "baselines": [baseline_json(b) for b in baselines],
    }


def verified_json(c: Candidate, seed: int, correct: bool, remark: str | None) -> VerifiedView:
    return {
        "schema": SCHEMA,
        "trial": None,
        "run": None,
        **_judged(c),
        "correct": correct,
        "seed": seed,
        "cases": c.verdict.cases if c.verdict else (),
        "binary_cases": c.binary_verdict.cases if c.binary_verdict else (),
        "binary_remark": remark,
    }


def _launch(c: Candidate) -> LaunchGeometryView | None:
    if c.source is None:
        return None
    launch = c.source.launch
    return {
        "grid": launch.grid,
        "threads": launch.threads,
        "shared_bytes": launch.shared_bytes,
        "block_yz": launch.block_yz,
        "then": launch.then,
        "entry": c.source.entry,
        "block": launch.block,
    }


def _compiled(c: Candidate) -> CompiledView | None:
    if c.binary is None:
        return None
    return {
        "arch": c.binary.arch,
        "options": c.binary.options,
        "compiler": c.binary.compiler,
        "stack_bytes": c.binary.stack_bytes,
        "warnings": c.binary.warnings,
        "instructions": c.binary.mix,
        "other_kernels": c.binary.others,
    }


def _judgement(verdict: Verdict | None) -> JudgementView | None:
    return fields_of(verdict, JudgementView) if verdict else None


def _figure(c: Candidate) -> FigureView | None:
    """Return the figure as an exported kernel states it, and why it is suspect."""
    found = figure_json(c)
    return cast("FigureView", {**found, "suspect": c.ranked_by.suspect}) if found else None


def lineage_json(steps: Iterable[Step]) -> LineageView:
    return {"schema": SCHEMA, "lineage": lineage_steps(steps)}


def lineage_steps(steps: Iterable[Step]) -> Sequence[LineageStepView]:
    return [
        {
            "trial": made.candidate.trial,
            "parent": made.parent.trial if made.parent else None,
            "operator": made.candidate.operator,
            "changes": {knob: (old, new) for knob, old, new in made.changes},
            "gain": made.gain,
        }
        for made in steps
    ]


def profile_json(trial: int, profile: Profile) -> ProfilePageView:
    return {"schema": SCHEMA, "trial": trial, **fields_of(profile, ProfileView)}


# Trials as CSV: the fields of their JSON, flattened, and escaped so that a spreadsheet runs no formula.

FORMULA_STARTS = ("=", "+", "-", "@", "＝", "＋", "－", "＠")
"""characters that start a formula in a spreadsheet"""
_POLICY = tuple(f.name for f in fields(Policy))
_SUSTAINED = ("tflops", "median_us", *(f"policy.{name}" for name in _POLICY), "sm_mhz", "watts")
NESTED: Mapping[str, Sequence[str]] = {"policy": _POLICY, "sustained": _SUSTAINED, "range_us": ("low", "high")}
"""fields that hold others → those, a column each"""


def csv_lines(candidates: Iterable[Candidate], knobs: Sequence[str]) -> Iterator[str]:
    """Yield a line of column names, then a line per candidate. `knobs` are all knobs of their configurations.

    A field that is null in JSON is empty. The items of a list are separated by blanks. Text is on one line, as returned
    by `plain`, and is prefixed with an apostrophe if a spreadsheet would read it as a formula.
    """
    columns: list[str] | None = None
    for candidate in candidates:
        row = _flat(trial_json(candidate), knobs)
        if columns is None:
            columns = list(row)
            yield _line(list(map(_cell, columns)))
        yield _line([_cell(row[name]) for name in columns])


def _flat(found: Mapping[str, Any], knobs: Sequence[str]) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for name, value in found.items():
        if name == "config":
            row |= {f"config.{knob}": value.get(knob) for knob in knobs}
        elif name in NESTED:
            row |= dict.fromkeys(f"{name}.{inner}" for inner in NESTED[name]) | dict(_inner(name, _unpacked(value)))
        else:
            row[name] = value
    return row


def _inner(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the values of a field with the names of their columns."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            found = _unpacked(item)
            yield from _inner(f"{name}.{key}", found) if isinstance(found, Mapping) else [(f"{name}.{key}", found)]
    elif value is not None:
        yield from zip((f"{name}.{inner}" for inner in NESTED[name]), value, strict=True)


def _unpacked(value: Any) -> Any:
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value


def _cell(value: Any) -> str | int | float:
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return value
    if isinstance(value, datetime):
        return str(utc(value))
    if isinstance(value, Mapping):
        value = [f"{name}={item}" for name, item in value.items()]
    is_list = isinstance(value, Sequence) and not isinstance(value, str)
    text = plain(" ".join(map(str, value)) if is_list else str(value))
    return f"'{text}" if text.startswith(FORMULA_STARTS) else text


def _line(cells: Sequence[str | int | float]) -> str:
    """Return one line of CSV.

    Text is quoted, because a reader that splits at another character must not find a formula behind one.
    """
    written = io.StringIO()
    csv.writer(written, quoting=csv.QUOTE_NONNUMERIC).writerow(cells)
    return written.getvalue()


def baseline_json(b: AnyBaseline) -> BaselineView:
    if isinstance(b, RefusedBaseline):
        untimed: TimedBaselineView = {
            "name": b.name,
            "device": b.device,
            "median_us": None,
            "tflops": None,
            "samples_us": (),
            "policy": None,
        }
        return {**untimed, "reason": b.reason}
    return {**fields_of(b, TimedBaselineView), "reason": None}
