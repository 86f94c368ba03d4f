"""Mutants of kernels, small faults at drawn places, which the gate must reject unless they are judged equivalent."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from evoengine.paths import asset
from evoengine.stages.compile import compile_source
from evoengine.stages.render import render
from tests.support.exhaustive import representatives
from tests.support.mutants import mutants
from tests.support.recorded_verdicts import recorded
from tests.support.subjects import find_subject, survives

SURVIVORS = Path(__file__).parents[2] / "benchmarks" / "mutation_survivors.toml"
NAMES = recorded()["verdicts"]  # which tests/stages/test_gate_version.py has of every family
CASES = [pytest.param(name, seed, id=f"{name}-{seed}") for name in NAMES for seed in (1, 2, 3)]


@pytest.mark.parametrize(("name", "seed"), representatives(CASES, "starter folder-2"))
def test_a_mutant_is_rejected_or_judged(tmp_path, name, seed):
    known = tomllib.loads(SURVIVORS.read_text("utf-8"))
    subject = find_subject(name, tmp_path)
    config, arch = subject.configuration(seed), subject.target.gpu.arch
    source = render(subject.target, subject.space, config, asset("templates"))
    made = list(mutants(source, arch, compile_source(source, arch), 4, seed))
    passed = [f"{name}: {m.text}" for m, binary in made if survives(subject, config, m, binary, seed)]
    assert len(made) == 4 and [mutant for mutant in passed if mutant not in known] == []
