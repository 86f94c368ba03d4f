"""The benchmark of the families: what counts as found, and that a family left without a candidate is told."""

from __future__ import annotations

import json

import pytest

from benchmarks import families as benchmark
from benchmarks.families import Found, Search

SMALL = "b1,h2,s128,d64,fp16"


def candidate(family: str, correct: bool | None, tflops: float | None, model: str = "sm") -> dict:
    return {"config": {"family": family}, "correct": correct, "tflops": tflops, "model": model}


def test_a_family_counts_by_its_correct_candidates_and_shows_the_best_of_those():
    history = [
        candidate("mma", True, 250.0),
        candidate("mma", True, 900.0, "formula"),  # which a prediction goes before
        candidate("mma", True, 300.0),
        candidate("mma", False, None),  # incorrect
        candidate("wgmma", None, None),  # never reached the gate
    ]
    assert benchmark.by_family(history, ["mma", "wgmma", "scalar"]) == {
        "mma": Found(4, 3, 300.0),
        "wgmma": Found(1, 0, None),
        "scalar": Found(0, 0, None),
    }


@pytest.mark.parametrize(("seconds", "correct", "good"), [(299.0, 1, True), (301.0, 1, False), (299.0, 0, False)])
def test_a_search_is_good_that_found_every_family_in_time(seconds, correct, good):
    families = {"mma": Found(4, 4, 1.0), "wgmma": Found(4, correct, None)}
    assert Search(SMALL, seconds, 8, families).good is good


@pytest.mark.exhaustive
def test_families_that_a_search_did_not_reach_are_shown_and_make_it_fail(tmp_path, capsys):
    """A search of two trials tries a start point of each of two families."""
    out = tmp_path / "out.json"
    arguments = ["--gpu", "l4", "--problems", SMALL, "--trials", "2", "--json", str(out)]
    assert benchmark.main(arguments) == 1
    [found] = json.loads(out.read_text())
    assert list(found["families"]) == ["scalar", "wmma", "mma"], "an L4 has no wgmma"
    assert found["trials"] == 2
    assert [found["families"][name]["correct"] for name in ("wmma", "scalar")] == [1, 1]
    assert found["families"]["mma"] == {"trials": 0, "correct": 0, "best": None, "by_formula": False}
    shown = capsys.readouterr().out
    assert "1 of 1" in shown and "0 of 0" in shown and "est." in shown


def test_a_problem_that_cannot_be_is_refused_before_any_search(capsys):
    assert benchmark.main(["--problems", SMALL, "b1,h2,s128,d77,fp16"]) == 2
    assert "32, 64, 96, 128, 192, 256" in capsys.readouterr().err
