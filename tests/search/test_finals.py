"""What finals leave in a ledger and say to a person, whatever timed them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from evoengine.ledger.store import open_ledger
from evoengine.records import Finals, Kind, Outcome, Rejection
from evoengine.search.finishing import record_finals
from tests.support.ledger_examples import GPU, PROBLEM, SUSTAINED, a_figure, add_ranked, start_run


@pytest.fixture
def ledger(tmp_path):
    """Three trials, timed alone: the first looked fastest."""
    with open_ledger(str(tmp_path / "evo.db"), create=True) as ledger:
        run = start_run(ledger)
        for trial in (1, 2, 3):
            assert add_ranked(ledger, run, a_figure(100.0 - trial, Kind.MEASURED), name=f"k{trial}") == trial
        yield ledger


def finals(order, **more):
    figures = {trial: a_figure(90.0 - place, Kind.MEASURED) for place, trial in enumerate(order)}
    return Finals(tuple(order), more.pop("tied", ()), figures, **more)


def ranked(ledger):
    return [c.trial for c in ledger.best(PROBLEM, GPU, top=9)]


def test_places_of_the_finals_rank_and_the_lead_over_the_second_is_said_and_kept(ledger):
    said = record_finals(ledger, 1, finals([3, 1, 2], lead=(0.995, 0.993, 0.997)))
    assert ranked(ledger) == [3, 1, 2]
    assert said == ["#3 against #1 in the same rounds: -0.50 % of time (95 % interval -0.70 to -0.30 %)"]
    terms = ledger.candidate(3).measurement.terms
    assert [terms[n] for n in ("over_second", "over_second_low", "over_second_high")] == [0.995, 0.993, 0.997]
    assert "over_second" not in ledger.candidate(1).measurement.terms


def test_the_same_and_the_not_distinguished_are_said_each_in_its_words(ledger):
    same, undecided = record_finals(ledger, 1, finals([2, 1, 3], tied=(1, 2), open=(3,)))
    assert same == "#2 is the same as #1 within 0.25 %; of these it has the fewest registers"
    assert undecided == "the fastest was not distinguished from #3 in the time of the finals"


def test_whose_output_was_wrong_in_a_repetition_is_incorrect_and_no_longer_ranked(ledger):
    said = record_finals(ledger, 1, finals([3, 2], wrong={1: "repetition 17: 64 of 8192 outputs are NaN"}))
    assert "#1 was wrong while it was timed in finals, repetition 17: 64 of 8192 outputs are NaN" in said[0]
    assert ranked(ledger) == [3, 2]
    refuted = ledger.candidate(1)
    assert refuted.outcome is Outcome.INCORRECT and "repetition 17" in refuted.reason


def test_sustained_figures_are_kept_beside_those_that_rank(ledger):
    sustained = {t: replace(a_figure(tflops, Kind.MEASURED), policy=SUSTAINED) for t, tflops in ((1, 70.0), (3, 60.0))}
    record_finals(ledger, 1, finals([3, 1, 2], sustained=sustained))
    assert ranked(ledger) == [3, 1, 2]
    assert [ledger.candidate(t).measurement.tflops for t in (3, 1, 2)] == [90.0, 89.0, 88.0]
    assert [c and c.tflops for c in (ledger.candidate(t).sustained for t in (3, 1, 2))] == [60.0, 70.0, None]


def test_finals_in_which_all_were_wrong_leave_nothing_ranked(ledger):
    record_finals(ledger, 1, finals([], wrong=dict.fromkeys((1, 2, 3), "repetition 3: off")))
    assert ranked(ledger) == []


def test_finals_that_could_not_be_held_leave_single_timings(ledger):
    [said] = record_finals(ledger, 1, Rejection(Outcome.CRASHED, "an illegal address"))
    assert "an illegal address" in said and ranked(ledger) == [1, 2, 3]
