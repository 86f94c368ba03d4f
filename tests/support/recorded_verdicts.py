"""Verdicts of the gate on right kernels and mutants, as they were recorded for a version of the gate.

python -m tests.support.recorded_verdicts       # records them again, once GATE_VERSION is raised
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from evoengine.paths import asset
from evoengine.records import GATE_VERSION, CompiledCandidate, Source, Verdict
from evoengine.search.evaluators import make_plans
from evoengine.stages.compile import compile_source
from evoengine.stages.gate import Judge, emulator, executor, judge_short
from evoengine.stages.render import render
from tests.support.mutants import mutants
from tests.support.subjects import Subject, subjects

FILE = Path(__file__).parents[1] / "stages" / "recorded_verdicts.json"
SEED = 5


def verdicts_of(subject: Subject) -> dict[str, Any]:
    """Return what both judges say of a configuration's short cases, and the executor of a mutant's."""
    config, arch = subject.configuration(SEED), subject.target.gpu.arch
    source = render(subject.target, subject.space, config, asset("templates"))
    binary = compile_source(source, arch)
    mutant, broken = next(mutants(source, arch, binary, 1, SEED))
    return {
        "executor": _judged(subject, source, executor(CompiledCandidate(0, source, binary))),
        "emulator": _judged(subject, source, emulator(source, arch)),
        "mutant": _judged(subject, mutant.source, executor(CompiledCandidate(0, mutant.source, broken))),
    }


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
