"""Objectives are read by name, and the Pareto front holds just what nothing beats."""

from __future__ import annotations

from dataclasses import replace

import pytest

from evoengine.errors import UsageError
from evoengine.objectives import (
    OBJECTIVES,
    front,
    objective_values,
    parse_objectives,
    sampler_values,
    stored_objectives,
)
from evoengine.records import Binary, Candidate, Kind, Launch, Measurement, Outcome, Source


def candidate(trial: int, tflops: float, registers: int, outcome: Outcome = Outcome.MEASURED) -> Candidate:
    binary = Binary(b"", "", "", "", registers, 0, 0, 0, (), {}, 0.0)
    figure = Measurement(Kind.MEASURED, "gpu", tflops, 1e3 / tflops)
    source = Source("", "k", Launch((1, 1, 1), 32, 4096))
    return Candidate(trial, 1, "p", "h100", {}, outcome, source=source, binary=binary, measurement=figure)


def test_objectives_are_read_by_name_in_order():
    assert [o.name for o in parse_objectives("tflops, registers")] == ["tflops", "registers"]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("fast", "known objectives are tflops, registers, shared_bytes"),
        ("speed", "known objectives are tflops, registers, shared_bytes"),
        ("tflops,tflops", "twice"),
        ("registers", "leaves out"),
        ("", "''"),
    ],
)
def test_a_wrong_objective_is_one_sentence(text, names):
    with pytest.raises(UsageError, match=names):
        parse_objectives(text)


def test_the_front_holds_what_nothing_beats():
    figures = [(100, 200), (90, 100), (80, 150), (90, 100), (10, 32)]
    given = [candidate(trial, tflops, registers) for trial, (tflops, registers) in enumerate(figures, 1)]
    assert [c.trial for c in front(given, parse_objectives("tflops,registers"))] == [1, 2, 5]


def test_with_one_objective_the_front_is_the_best():
    given = [candidate(1, 50, 10), candidate(2, 100, 200)]
    assert [c.trial for c in front(given, parse_objectives("tflops"))] == [2]


def test_rejected_candidates_are_on_no_front():
    assert front([candidate(1, 100, 10, Outcome.INCORRECT)], parse_objectives("tflops,registers")) == []


def test_a_penalty_is_worse_than_any_real_value():
    values = objective_values(candidate(1, 0.001, 255), stored_objectives("tflops,speed,registers,shared_bytes"))
    for value, objective in zip(values, OBJECTIVES.values(), strict=True):
        assert value > objective.penalty if objective.direction == "maximize" else value < objective.penalty


def estimate(tflops: float, predicted: float) -> Candidate:
    figure = Measurement(Kind.ESTIMATED, "model", tflops, 1e3 / tflops, terms={"predicted": predicted})
    return replace(candidate(1, tflops, 64, Outcome.ESTIMATED), measurement=figure)


def test_a_sampler_is_told_less_of_any_estimate_by_formula_than_of_the_slowest_prediction():
    aims = parse_objectives("tflops,registers")
    slow_formula, fast_formula, prediction = (
        sampler_values(estimate(*of), aims) for of in ((100, 0), (900, 0), (0.01, 1))
    )
    assert OBJECTIVES["tflops"].penalty < slow_formula[0] < fast_formula[0] < prediction[0]
    assert slow_formula[1] == prediction[1] == 64.0


def test_a_sampler_is_told_predicted_and_measured_speeds_as_they_are():
    aims = parse_objectives("tflops")
    for of in (estimate(400.0, 1.0), candidate(1, 400.0, 64)):
        assert sampler_values(of, aims) == objective_values(of, aims) == (400.0,)
    assert sampler_values(candidate(1, 400.0, 64, Outcome.INCORRECT), aims) is None
