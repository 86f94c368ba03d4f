"""A run goes out as a valid T4 file and comes back whole."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from evoengine.publish.t4 import INVALIDITY, from_t4, to_t4
from evoengine.records import Candidate, Kind, Outcome
from tests.ledger.examples import CONFIG, GPU, PROBLEM, a_binary, a_figure, a_source, a_verdict


def examples() -> list[Candidate]:
    """One of each stage a candidate may end at."""
    whole = {"source": a_source(), "binary": a_binary(), "verdict": a_verdict(), "measurement": a_figure(10.87, Kind.MEASURED)}
    return [
        Candidate(1, 1, PROBLEM, GPU, CONFIG, Outcome.MEASURED, None, "NVIDIA H200", **whole, occupancy=0.25, operator="start"),
        Candidate(2, 1, PROBLEM, GPU, CONFIG, Outcome.INCORRECT, "wrong", "emulator", a_source(), a_binary(), a_verdict(Outcome.INCORRECT), parents=(1,), operator="mutation"),
        Candidate(3, 1, PROBLEM, GPU, CONFIG, Outcome.UNCOMPILABLE, "line 3", source=a_source()),
        Candidate(4, 1, PROBLEM, GPU, CONFIG, Outcome.RECORDED, measurement=a_figure(1.0, Kind.RECORDED)),
    ]  # fmt: skip

T4_INVALIDITY = {"timeout", "compile", "runtime", "correctness", "constraints", "correct"}


@pytest.fixture
def exported():
    return to_t4(examples(), "NVIDIA H100 80GB HBM3", "2026-11-21T12:00:00+00:00")


def test_a_round_trip_loses_nothing(exported):
    assert from_t4(json.loads(json.dumps(exported))) == examples()


def test_what_the_schema_requires_is_there(exported):
    """The required fields and enumerations of schema 1.1.0, stated here on their own."""
    assert exported["metadata"]["timeunit"] in ("nanoseconds", "microseconds", "milliseconds", "seconds")
    assert exported["metadata"]["compute_api"] == "CUDA"
    for result in exported["results"]:
        assert {"configuration", "times", "invalidity", "correctness"} <= result.keys()
        assert result["invalidity"] in T4_INVALIDITY
        assert result["correctness"] in (0, 1)
        assert all({"name", "value", "unit"} == m.keys() for m in result["measurements"])
        assert all(isinstance(t, float | int | list) for t in result["times"].values())


def test_every_outcome_has_its_place():
    assert INVALIDITY.keys() == set(Outcome)
    assert set(INVALIDITY.values()) <= T4_INVALIDITY


def test_unfinished_candidates_are_left_out(exported):
    unfinished = replace(examples()[0], outcome=None)
    assert to_t4([unfinished], "gpu", "")["results"] == []


def test_another_tuners_file_is_told_apart(exported):
    for result in exported["results"]:
        del result["evoengine"]
    assert from_t4(exported) is None
