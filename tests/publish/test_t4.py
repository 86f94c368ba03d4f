"""A run goes out as a valid T4 file and comes back whole."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime

import pytest

from evoengine.ledger.runs import Device, Run
from evoengine.ledger.store import open_ledger
from evoengine.publish.t4 import INVALIDITY, from_t4, to_t4
from evoengine.records import Baseline, Candidate, Kind, Outcome
from tests.ledger.examples import CONFIG, GPU, PROBLEM, SPACE, a_binary, a_figure, a_source, a_verdict

DEVICE = Device("NVIDIA H100 80GB HBM3", "GPU-1", "sm_90", "CUDA 13.0", {"torch": "2.9"})
RUN = Run(
    7, datetime(2026, 11, 21, tzinfo=UTC), None, "all trials done", GPU, PROBLEM, DEVICE, SPACE.name, SPACE.sha256, SPACE.text,
    "evolution", "tflops,registers", 3, "0.1.0", "here", 1, "evoengine search",
)  # fmt: skip
BASELINES = [Baseline("MATH", DEVICE.name, 900.0, 305.0, (900.0, float("inf")))]


def examples() -> list[Candidate]:
    """One of each stage a candidate may end at."""
    whole = {"source": a_source(), "binary": a_binary(), "verdict": a_verdict(), "measurement": a_figure(10.87, Kind.MEASURED)}
    return [
        Candidate(1, 1, PROBLEM, GPU, CONFIG, Outcome.MEASURED, None, "NVIDIA H200", **whole, occupancy=0.25, operator="start"),
        Candidate(2, 1, PROBLEM, GPU, CONFIG, Outcome.INCORRECT, "wrong", "emulator", a_source(), a_binary(), a_verdict(Outcome.INCORRECT), parents=(1,), operator="mutation"),
        Candidate(3, 1, PROBLEM, GPU, CONFIG, Outcome.UNCOMPILABLE, "line 3", source=a_source()),
        Candidate(4, 1, PROBLEM, GPU, CONFIG, Outcome.RECORDED, measurement=a_figure(1.0, Kind.RECORDED)),
    ]  # fmt: skip


def figures() -> dict[int, list]:
    """An estimate came before the measurement, and a repetition of it had no interval yet."""
    measured = replace(examples()[0].measurement, terms={"interval_percent": float("inf"), "final_of_run": 7.0, "place": 1.0})
    return {1: [a_figure(9.0), measured], 2: [], 3: [], 4: [examples()[3].measurement]}


T4_INVALIDITY = {"timeout", "compile", "runtime", "correctness", "constraints", "correct"}


@pytest.fixture
def exported():
    return to_t4(RUN, examples(), figures(), BASELINES)


def test_a_round_trip_loses_nothing(exported):
    back = from_t4(json.loads(json.dumps(exported, allow_nan=False)))
    first, *others = examples()
    assert back.candidates == [replace(first, measurement=figures()[1][-1]), *others]
    assert (back.figures, back.baselines) == (figures(), BASELINES)
    space = back.described.pop("space")
    assert (space.name, space.text, space.sha256) == (SPACE.name, SPACE.text, SPACE.sha256)
    assert back.described == {
        "gpu": GPU, "problem": PROBLEM, "device": DEVICE, "sampler": "evolution", "seed": 3, "objectives": "tflops,registers",
        "command": "evoengine search",
    }  # fmt: skip


def test_what_comes_in_ranks_as_it_did_and_finals_are_those_of_the_run_it_becomes(exported, tmp_path):
    back = from_t4(exported)
    with open_ledger(str(tmp_path / "evo.db"), create=True) as ledger:
        run = ledger.start_run(**back.described)
        [trial, *_] = ledger.import_candidates(run, back.candidates, back.figures)
        estimate, measured = ledger.measurements(trial)
        assert (estimate.kind, measured.kind) == (Kind.ESTIMATED, Kind.MEASURED)
        assert measured.terms == figures()[1][-1].terms | {"final_of_run": run}
        assert [c.trial for c in ledger.best(PROBLEM, GPU, top=3)] == [trial]


def test_what_the_schema_requires_is_there(exported):
    """The required fields and enumerations of schema 1.1.0, stated here on their own."""
    assert exported["metadata"]["timeunit"] in ("nanoseconds", "microseconds", "milliseconds", "seconds")
    assert exported["metadata"]["compute_api"] == "CUDA"
    for result in exported["results"]:
        assert {"configuration", "times", "invalidity", "correctness"} <= result.keys()
        assert result["invalidity"] in T4_INVALIDITY
        assert result["correctness"] == (result["invalidity"] == "correct")
        assert all({"name", "value", "unit"} == m.keys() for m in result["measurements"])
        assert all(isinstance(t, float | int | list) for t in result["times"].values())


def test_every_outcome_has_its_place():
    assert INVALIDITY.keys() == set(Outcome)
    assert set(INVALIDITY.values()) <= T4_INVALIDITY


def test_unfinished_candidates_are_left_out(exported):
    unfinished = replace(examples()[0], outcome=None)
    assert to_t4(RUN, [unfinished], figures(), [])["results"] == []


def test_another_tuners_file_is_told_apart(exported):
    del exported["metadata"]["evoengine"]
    assert from_t4(exported) is None
