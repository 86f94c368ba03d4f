"""Validate an imported run before a ledger stores it: its file is untrusted.

Types are those of the records' own annotations. Numbers must also fit their columns and meanings, names must be names,
and parts must agree with each other. Figures beyond the GPU's limits are marked as suspect.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import is_dataclass, replace
from datetime import datetime
from functools import cache
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from evoengine.gpu_file import stored_fields
from evoengine.ledger.rows import last_sustained, most_trusted
from evoengine.ledger.transfer import CandidateHistory, RunHistory
from evoengine.objectives import OBJECTIVES
from evoengine.records import (
    Baseline,
    Binary,
    Candidate,
    CaseResult,
    KernelResources,
    Kind,
    Launch,
    Measurement,
    NextKernel,
    Outcome,
    Profile,
    Run,
    Source,
    Verdict,
)
from evoengine.sandbox.untrusted import LARGEST_TEXT, require_text
from evoengine.terms import FORMULA, bound, model_of, range_us, utilisation
from evoengine.text import printable
from evoengine.timing.figures import above_roofline
from evoengine.workloads.base import Target

_Rule = tuple[Callable[[Any], bool], str]
"""whether a value is valid, and what would be"""
INT64, INT32 = 2**63, 2**31
LONGEST_NAME, LONGEST_KEY = 1000, 200
"""characters of a name, and of a key of which other names are composed"""

_NAME: _Rule = (lambda v: len(v) <= LONGEST_NAME, f"a text of at most {LONGEST_NAME:,} characters")
_KEY: _Rule = (lambda v: 0 < len(v) <= LONGEST_KEY, f"a text of 1 to {LONGEST_KEY} characters")
_LONG: _Rule = (lambda v: len(v) <= LARGEST_TEXT, f"a text of at most {LARGEST_TEXT >> 20} MiB")
_COUNT: _Rule = (lambda v: 0 <= v < INT64, "an integer from 0 to 2^63 - 1")
_COUNT32: _Rule = (lambda v: 0 <= v < INT32, "an integer from 0 to 2^31 - 1")
_POSITIVE32: _Rule = (lambda v: 1 <= v < INT32, "an integer from 1 to 2^31 - 1")
_AMOUNT: _Rule = (lambda v: 0 <= v < math.inf, "a finite number that is not below 0")
_TIME: _Rule = (lambda v: 0 < v < math.inf, "a finite time above 0")
_SAMPLE: _Rule = (lambda v: v >= 0, "a time that is not below 0")
_ANY: _Rule = (lambda v: True, "a number")
_MOMENT: _Rule = (lambda v: v.tzinfo is not None and 1970 <= v.year < 2200, "a time with its zone, from 1970 to 2199")
_SHA256: _Rule = (lambda v: re.fullmatch(r"(?:[0-9a-f]{64})?", v) is not None, "64 hexadecimal digits, or empty")
_ENTRY: _Rule = (lambda v: re.fullmatch(r"[A-Za-z_]\w{0,254}", v, re.ASCII) is not None, "the name of a function in C")
_ARCH: _Rule = (lambda v: re.fullmatch(r"sm_\d{2,3}[af]?", v, re.ASCII) is not None, "an architecture, such as sm_90a")

_RULES: dict[tuple[type, str], _Rule] = {
    (Run, "gpu"): _KEY,
    (Run, "problem"): _KEY,
    (Run, "space_text"): _LONG,
    (Run, "space_sha256"): _SHA256,
    (Run, "kernel"): _SHA256,
    (Run, "command"): _LONG,
    (Run, "objectives"): (
        lambda v: set(v.split(",")) <= OBJECTIVES.keys() and len(set(v.split(","))) == len(v.split(",")),
        f"a list of {', '.join(OBJECTIVES)}, each once, with commas",
    ),
    (Candidate, "trial"): (lambda v: 1 <= v < INT64, "an integer from 1 to 2^63 - 1"),
    (Candidate, "reason"): _LONG,
    (Candidate, "occupancy"): (lambda v: 0 <= v <= 1, "a share from 0 to 1"),
    (Source, "text"): _LONG,
    (Source, "entry"): _ENTRY,
    (NextKernel, "entry"): _ENTRY,
    (KernelResources, "entry"): _ENTRY,
    (Launch, "grid"): _POSITIVE32,
    (Launch, "threads"): _POSITIVE32,
    (Launch, "block_yz"): _POSITIVE32,
    (Launch, "shared_bytes"): _COUNT32,
    (Binary, "arch"): _ARCH,
    (Binary, "warnings"): _LONG,
    (Verdict, "outcome"): (lambda v: not v.correct, "none, or how a candidate fails"),
    (Verdict, "reason"): _LONG,
    (CaseResult, "reason"): _LONG,
    (Measurement, "median_us"): _TIME,
    (Measurement, "normalised_us"): _TIME,
    (Measurement, "samples_us"): _SAMPLE,
    (Measurement, "suspect"): _LONG,
    (Measurement, "terms"): _ANY,
    (Baseline, "median_us"): _TIME,
    (Baseline, "samples_us"): _SAMPLE,
    (Profile, "figures"): _ANY,
    (Profile, "remarks"): _LONG,
}
_RULES |= {
    (of, name): _COUNT32
    for of in (Binary, KernelResources)
    for name in ("registers", "spill_bytes", "stack_bytes", "shared_bytes")
}
_RULES |= {(CaseResult, name): _ANY for name in ("max_error", "mean_error", "allowed")}
_BY_TYPE: dict[type, _Rule] = {str: _NAME, int: _COUNT, float: _AMOUNT, datetime: _MOMENT}
_fields: Callable[[Any], dict[str, Any]] = cache(get_type_hints)


def validate_run(history: RunHistory) -> None:
    """Raise TypeError or ValueError with a sentence if a part of the run is invalid.

    It may have the wrong type, be out of range or contradict another part.
    """
    _conforms(history, RunHistory)
    _require(history.run, "the run")
    _require_board(history.run)
    for baseline in history.baselines:
        _require(baseline, f"the baseline {baseline.name!r:.60}")
    before: set[int] = set()
    records = list(history.candidates)
    numbers = {record.candidate.trial for record in records}
    for record in records:
        trial = record.candidate.trial
        _require(record, f"trial {trial}")
        _require_candidate(record, history.run)
        if trial in before:
            raise ValueError(f"trial {trial} occurs twice; numbers must be unique")
        for parent in record.candidate.parents:
            if parent in numbers and parent not in before:
                raise ValueError(f"trial {trial} has the parent {parent}, which does not precede it")
        before.add(trial)


def mark_suspect(history: RunHistory, target: Target) -> RunHistory:
    """Return the run with every figure marked that exceeds the target GPU's limits.

    A candidate ranked by such a figure becomes suspect.
    """
    return replace(history, candidates=[_with_suspicion(record, target) for record in history.candidates])


def _with_suspicion(record: CandidateHistory, target: Target) -> CandidateHistory:
    binary = record.candidate.binary
    mix = binary.mix if binary else {}
    figures = [replace(f, suspect=f.suspect or _suspicion(f, target, mix)) for f in record.figures]
    ranked_by = most_trusted(figures)
    c = replace(record.candidate, measurement=ranked_by, sustained=last_sustained(figures))
    if ranked_by and ranked_by.suspect and c.outcome and c.outcome.ranked:
        c = replace(c, outcome=Outcome.SUSPECT, reason=ranked_by.suspect)
    return replace(record, candidate=c, figures=figures)


def _suspicion(figure: Measurement, target: Target, mix: Mapping[str, int]) -> str | None:
    least_us = min(figure.median_us, figure.compared_us)
    tflops = max(target.flops / least_us / 1e6, figure.tflops or 0.0)
    gbs = target.min_dram_bytes / least_us / 1e3
    return above_roofline(tflops, gbs, target.gpu, mix, figure.terms if figure.kind is Kind.MEASURED else {})


# ── one value ───────────────────────────────────────────────────────────────────────────────────────────────────────


def _conforms(value: Any, declared: Any) -> bool:
    """Return whether a value has the declared type. Raises TypeError that names the field of a record that does not."""
    kind, parts = get_origin(declared) or declared, get_args(declared)
    if kind is UnionType:
        return any(_conforms(value, part) for part in parts)
    if kind in (int, float):
        number = isinstance(value, int if kind is int else int | float) and not isinstance(value, bool)
        return number and (isinstance(value, float) or value.bit_length() <= 64)
    if not isinstance(value, kind):
        return False
    if is_dataclass(declared):
        for name, of_field in _fields(declared).items():
            if not _conforms(getattr(value, name), of_field):
                raise TypeError(f"{name} must be {of_field}, not {_shown(getattr(value, name))}")
    if kind is tuple and parts[-1] is not ...:
        return len(value) == len(parts) and all(map(_conforms, value, parts))
    if issubclass(kind, Mapping):
        return all(_conforms(k, parts[0]) and _conforms(v, parts[1]) for k, v in value.items())
    return not parts or all(_conforms(each, parts[0]) for each in value)


def _require(value: Any, where: str) -> None:
    """Require that every number and text of a record, and of the records in it, is valid."""
    for record in _records(value):
        for name in _fields(type(record)):
            found = getattr(record, name)
            if (type(record), name) == (Candidate, "config"):
                _require_config(found, where)
                continue
            for leaf in _leaves(found):
                right, words = _RULES.get((type(record), name)) or _BY_TYPE.get(type(leaf)) or _ANY
                if isinstance(found, Mapping) and isinstance(leaf, str):
                    right, words = _KEY  # of terms, mixes and versions
                if isinstance(leaf, str):
                    require_text(leaf)
                if not right(leaf):
                    raise ValueError(f"{where}: {name} is {_shown(leaf)}; it must be {words}")


def _require_config(config: Mapping[str, Any], where: str) -> None:
    for name, value in config.items():
        for text in (name, value):
            if isinstance(text, str):
                require_text(text)
        named, valued = _KEY[0](name), is_knob_value(value)
        if not named or not valued:
            raise ValueError(f"{where}: the knob {name!r:.60} has the value {_shown(value)}; it must be {KNOB_VALUE}")


KNOB_VALUE = f"a finite number, an integer below 2^63 or a text of at most {LONGEST_NAME:,} characters"


def is_knob_value(value: object) -> bool:
    """Return whether a ledger, a file and a sampler can hold the value."""
    if isinstance(value, int):
        return abs(value) < INT64
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, str) and len(value) <= LONGEST_NAME


def _records(value: Any) -> Iterator[Any]:
    if is_dataclass(value):
        yield value
        children: Any = [getattr(value, name) for name in _fields(type(value))]
    else:
        children = value
    for child in children:
        if is_dataclass(child) or isinstance(child, tuple | list):
            yield from _records(child)


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        yield from value
        value = tuple(value.values())
    if isinstance(value, tuple | list):
        for each in value:
            yield from _leaves(each)
    elif value is not None and not is_dataclass(value):
        yield value


def _shown(value: object) -> str:
    return printable(repr(value), 60)


# ── consistency between parts ───────────────────────────────────────────────────────────────────────────────────────


def _require_board(run: Run) -> None:
    """Raise UsageError if the run's description of a GPU is invalid."""
    if run.gpu_definition is not None:
        key = stored_fields(run.gpu_definition, "the run's description of its GPU").key
        if key != run.gpu:
            raise ValueError(f"the run is on {_shown(run.gpu)}, but describes the GPU {_shown(key)}")


def _require_candidate(record: CandidateHistory, run: Run) -> None:
    c = record.candidate
    where = f"trial {c.trial}"
    if (c.problem, c.gpu) != (run.problem, run.gpu):
        raise ValueError(f"{where} is of {_shown(c.problem)} on {_shown(c.gpu)}, unlike its run")
    if c.binary and not c.source:
        raise ValueError(f"{where} has a binary but no source")
    for _, launch in c.source.launch.kernels(c.source.entry) if c.source else ():
        if launch.threads % math.prod(launch.block_yz):
            raise ValueError(f"{where}: the launch has {launch.threads} threads, which its rows do not divide")
    kinds = {str(figure.kind) for figure in record.figures}
    if c.outcome and c.outcome.ranked and str(c.outcome) not in kinds:
        raise ValueError(f"{where} ended as {c.outcome} and has no such figure")
    for figure in record.figures:
        _require_figure(figure, where)


def _require_figure(figure: Measurement, where: str) -> None:
    terms = figure.terms
    if ("place" in terms) != ("final_of_run" in terms):
        raise ValueError(f"{where}: a figure has one of place and final_of_run; finals give both")
    for name in ("place", "final_of_run", "incumbent", "dropped_after"):
        if name in terms and not math.isfinite(terms[name]):
            raise ValueError(f"{where}: {name} is {terms[name]}; it must be a finite number")
    if figure.kind is Kind.ESTIMATED and model_of(terms) != FORMULA:
        shares = utilisation(terms)
        stated = {"low_us", "high_us", "roofline_us", "waves", "blocks_per_sm"} <= terms.keys()
        if not (stated and range_us(terms) and bound(terms) and shares and all(map(math.isfinite, terms.values()))):
            raise ValueError(f"{where}: a prediction must state its range, its bound and the use of each pipe")
