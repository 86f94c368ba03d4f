"""The lineage shows the path from a start point, and which changes of knobs paid."""

from __future__ import annotations

import pytest

from evoengine.lineage import changes, effects, path
from evoengine.records import Candidate, Kind, Measurement, Outcome


def made(trial, median_us, parents=(), kind=Kind.MEASURED, **config) -> Candidate:
    figure = Measurement(kind, "gpu", 1e3 / median_us, median_us) if median_us else None
    outcome = Outcome(str(kind)) if median_us else Outcome.INCORRECT
    return Candidate(trial, 1, "p", "h100", config, outcome, parents=tuple(parents), measurement=figure)


FAMILY = {
    c.trial: c
    for c in (
        made(1, 100.0, tile=64, pad=0),
        made(2, 80.0, [1], tile=128, pad=0),
        made(3, 200.0, tile=32, pad=8),
        made(4, 50.0, [3, 2], tile=128, pad=8),
        made(5, None, [4], tile=256, pad=8),
        made(6, 40.0, [4], kind=Kind.ESTIMATED, tile=64, pad=8),
    )
}


def test_the_path_leads_from_the_start_over_the_faster_parents():
    steps = path(4, FAMILY)
    assert [s.candidate.trial for s in steps] == [1, 2, 4]
    assert [s.gain for s in steps] == [None, pytest.approx(1.25), pytest.approx(1.6)]
    assert steps[2].changes == (("pad", 0, 8),)


def test_a_rejected_child_and_another_kind_of_figure_have_no_gain():
    assert path(5, FAMILY)[-1].gain is None
    assert path(6, FAMILY)[-1].gain is None


def test_a_knob_that_appears_or_goes_is_a_change():
    assert changes({"a": 1, "b": 2}, {"a": 1, "c": 3}) == (("b", 2, None), ("c", None, 3))


def test_effects_count_the_steps_that_made_a_change():
    found = {e.change: e for e in effects(FAMILY.values())}
    assert found["pad", 0, 8].median_gain == pytest.approx(1.6)
    assert (found["tile", 64, 128].steps, found["tile", 64, 128].alone, found["tile", 64, 128].better) == (1, 1, 1)
    assert ("tile", 128, 256) not in found  # the child was rejected: it says nothing of speed


def test_a_circle_of_parents_ends():
    known = {1: made(1, 10.0, [2], a=1), 2: made(2, 5.0, [1], a=2)}
    assert len(path(1, known)) == 2
