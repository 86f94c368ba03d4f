"""Verdicts of the gate on right kernels and mutants, as they were recorded for a version of the gate.

python -m tests.support.recorded_verdicts       # records them again, once GATE_VERSION is raised
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from evoengine.paths import asset
from evoengine.records import GATE_VERSION, Binary, CompiledCandidate, Source, Verdict
from evoengine.search.evaluators import make_plans
from evoengine.stages.compile import compile_source
from evoengine.stages.gate import Judge, emulator, executor, judge_short
from evoengine.stages.render import render
from tests.support.mutants import mutants
from tests.support.subjects import Subject, subjects

FILE = Path(__file__).parents[1] / "stages" / "recorded_verdicts.json"
SEED = 5
MOST_MUTANTS = 4


def verdicts_of(subject: Subject) -> dict[str, Any]:
    """Return what both judges say of the short cases of a configuration, and of its mutants up to one refused."""
    config, arch = subject.configuration(SEED), subject.target.gpu.arch
    source = render(subject.target, subject.space, config, asset("templates"))
    binary = compile_source(source, arch)
    return {
        "executor": _judged(subject, source, executor(CompiledCandidate(0, source, binary))),
        "emulator": _judged(subject, source, emulator(source, arch)),
        "mutants": list(_of_mutants(subject, source, binary)),
    }


def _of_mutants(subject: Subject, source: Source, binary: Binary) -> Iterator[dict[str, Any]]:
    """Yield the verdicts on mutants as drawn, up to one refused; the emulator judges what the executor accepts."""
    arch = subject.target.gpu.arch
    for mutant, broken in mutants(source, arch, binary, MOST_MUTANTS, SEED):
        found = {"executor": _judged(subject, mutant.source, executor(CompiledCandidate(0, mutant.source, broken)))}
        if not found["executor"]["outcome"]:
            found["emulator"] = _judged(subject, mutant.source, emulator(mutant.source, arch))
        yield found
        if any(verdict["outcome"] for verdict in found.values()):
            return


def _judged(subject: Subject, source: Source, judge: Judge) -> dict[str, Any]:
    plans = make_plans(subject.space, subject.target, subject.configuration(SEED))
    return summary(judge_short(judge, subject.target.workload, plans, SEED))


def summary(verdict: Verdict) -> dict[str, Any]:
    """Return what a verdict rests on, without figures that depend on the machine."""
    return {
        "outcome": str(verdict.outcome) if verdict.outcome else None,
        "cases": [
            f"{c.name}: {c.problem}, seed {c.seed}, {'passed' if c.correct else 'failed'}" for c in verdict.cases
        ],
        "cells": dict(verdict.coverage.cells) if verdict.coverage else None,
        "visited": dict(verdict.coverage.visited) if verdict.coverage else None,
    }


def recorded() -> Mapping[str, Any]:
    found: Mapping[str, Any] = json.loads(FILE.read_text("utf-8"))
    return found


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        found = {subject.name: verdicts_of(subject) for subject in subjects(Path(folder))}
    FILE.write_text(json.dumps({"gate_version": GATE_VERSION, "verdicts": found}, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
