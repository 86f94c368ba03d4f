"""GATE_VERSION is raised whenever verdicts move: they are compared with those recorded for the version."""

from __future__ import annotations

import pytest

from evoengine.records import GATE_VERSION
from tests.support.exhaustive import representatives
from tests.support.recorded_verdicts import recorded, verdicts_of
from tests.support.subjects import find_subject, subjects

REMEDY = "verdicts have moved: raise GATE_VERSION and run python -m tests.support.recorded_verdicts"
NAMES = [pytest.param(name, id=name) for name in recorded()["verdicts"]]


def test_the_records_are_of_this_version():
    assert recorded()["gate_version"] == GATE_VERSION, REMEDY


def test_every_family_has_a_record(tmp_path):
    assert [subject.name for subject in subjects(tmp_path)] == list(recorded()["verdicts"])


def test_a_mutant_of_every_family_is_refused():
    """One that a judge accepts says nothing of the gate's rules: the next is drawn, and all are recorded."""
    last = {name: found["mutants"][-1] for name, found in recorded()["verdicts"].items()}
    assert [name for name, judges in last.items() if not any(v["outcome"] for v in judges.values())] == []


@pytest.mark.parametrize("name", representatives(NAMES, "gemm/mma", "starter folder"))
def test_verdicts_are_those_of_the_version(tmp_path, name):
    subject = find_subject(name, tmp_path)
    assert verdicts_of(subject) == recorded()["verdicts"][name], REMEDY


def test_a_rule_that_moves_is_seen(tmp_path, monkeypatch):
    """Without a second launch, or with another tolerance, the records of the version do not hold."""
    subject = find_subject("starter folder", tmp_path)
    workload = type(subject.target.workload)
    cases = workload.cases
    monkeypatch.setattr(workload, "cases", lambda *arguments: cases(*arguments)[1:])
    assert verdicts_of(subject) != recorded()["verdicts"]["starter folder"]
