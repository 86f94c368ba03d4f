"""Finals decide between those that took part; kinds are never mixed; what came later competes by its figure."""

from __future__ import annotations

from dataclasses import replace

from evoengine.ledger.ranking import Figure, ranked
from evoengine.records import UNKNOWN_POLICY, Kind
from tests.support.ledger_examples import POLICY, SUSTAINED


def single(number, trial, tflops, kind=Kind.MEASURED, suspect=None):
    return Figure(number, trial, kind, 1e6 / tflops, suspect, {})


def final(number, trial, tflops, place, run=1, of_trial=1):
    terms = {"final_of_run": float(run), "place": float(place)}
    return Figure(number, trial, Kind.MEASURED, 1e6 / tflops, None, terms, run=of_trial)


def test_without_finals_the_figures_decide():
    assert ranked([single(1, 1, 10.0), single(2, 2, 30.0), single(3, 3, 20.0)]) == [2, 3, 1]


def test_finalists_keep_their_places_even_where_one_of_fewer_registers_is_a_little_slower():
    assert ranked([single(1, 1, 10.0), single(2, 2, 11.0), final(3, 1, 10.5, 2), final(4, 2, 10.4, 1)]) == [2, 1]


def test_what_was_timed_alone_before_the_finals_is_behind_them():
    assert ranked([single(1, 1, 99.0), single(2, 2, 100.0), final(3, 2, 95.0, 1)]) == [2, 1]


def test_what_was_timed_alone_after_the_finals_competes_by_its_figure():
    finals = [final(1, 1, 95.0, 1), final(2, 2, 90.0, 2)]
    assert ranked([*finals, single(3, 3, 120.0)]) == [3, 1, 2]
    assert ranked([*finals, single(3, 3, 92.0)]) == [1, 3, 2]
    assert ranked([*finals, single(3, 3, 80.0)]) == [1, 2, 3]


def test_the_last_finals_supersede_those_before():
    first = [final(1, 1, 95.0, 1, run=1), final(2, 2, 94.0, 2, run=1)]
    assert ranked([*first, single(3, 3, 97.0), final(4, 3, 93.0, 1, run=2), final(5, 1, 92.0, 2, run=2)]) == [3, 1, 2]


def test_a_finalist_timed_again_alone_competes_by_its_last_figure():
    assert ranked([final(1, 1, 95.0, 1), final(2, 2, 90.0, 2), single(3, 1, 85.0)]) == [2, 1]


def test_finals_held_in_another_ledger_decide_between_trials_of_their_own_run_alone():
    own = [single(1, 1, 80.0), single(2, 2, 99.0)]
    alone = replace(single(3, 3, 90.0), run=7)
    brought = [final(4, 4, 60.0, 2, run=-1, of_trial=7), final(5, 5, 59.0, 1, run=-1, of_trial=7)]
    assert ranked([*own, alone, *brought]) == [2, 1, 5, 4, 3]


def test_finals_held_here_have_the_last_word_on_what_was_brought_before():
    brought = [final(1, 1, 70.0, 2, run=-1, of_trial=7), final(2, 2, 99.0, 1, run=-1, of_trial=7)]
    assert ranked([*brought, final(3, 3, 80.0, 1, run=8), final(4, 4, 75.0, 2, run=8)]) == [3, 4, 2, 1]


def test_kinds_are_not_mixed_and_the_suspect_is_left_out():
    estimated, measured = single(1, 1, 500.0, Kind.ESTIMATED), single(2, 2, 20.0)
    assert ranked([estimated, measured, single(3, 3, 900.0, suspect="above the roofline")]) == [2]
    assert ranked([estimated]) == [1]
    assert ranked([]) == []


def test_figures_of_the_device_that_timed_last_are_not_ranked_with_those_of_another():
    def on(device, number, trial, tflops):
        return Figure(number, trial, Kind.MEASURED, 1e6 / tflops, None, {}, device)

    h100, h200 = on("NVIDIA H100", 1, 1, 500.0), on("NVIDIA H200", 2, 2, 480.0)
    assert ranked([h100, h200, on("NVIDIA H200", 3, 3, 490.0)]) == [3, 2]
    assert ranked([h200, on("NVIDIA H100", 3, 1, 500.0)]) == [1]


def by(policy, number, trial, tflops, device=""):
    return Figure(number, trial, Kind.MEASURED, 1e6 / tflops, None, {}, device, policy=policy)


def test_figures_of_the_last_policy_are_not_ranked_with_those_of_another():
    """A kernel that takes 330 µs with a cold L2 and 8 µs with a warm one would win over all by its way to be
    measured."""
    streamed = replace(POLICY, launch="stream")
    batched = replace(POLICY, batch=1)
    for other in (streamed, batched, UNKNOWN_POLICY):
        assert ranked([by(other, 1, 1, 900.0), by(POLICY, 2, 2, 20.0), by(POLICY, 3, 3, 30.0)]) == [3, 2]
        assert ranked([by(POLICY, 1, 2, 20.0), by(POLICY, 2, 3, 30.0), by(other, 3, 1, 900.0)]) == [1]


def test_sustained_figures_stand_beside_the_others_whenever_they_were_taken():
    figures = [by(POLICY, 1, 1, 20.0), by(POLICY, 2, 2, 30.0), by(SUSTAINED, 3, 1, 900.0), by(SUSTAINED, 4, 2, 10.0)]
    assert ranked(figures) == [2, 1]
    assert ranked(figures[2:]) == [1, 2]


def estimated(number, trial, tflops, predicted):
    device = "model for h100" if predicted else "estimate for h100"
    return Figure(number, trial, Kind.ESTIMATED, 1e6 / tflops, None, {"predicted": float(predicted)}, device)


def test_estimates_by_formula_are_behind_all_predictions_in_an_order_of_their_own():
    by_formula = [estimated(1, 1, 631.0, False), estimated(4, 4, 700.0, False)]
    predicted = [estimated(2, 2, 400.0, True), estimated(3, 3, 450.0, True)]
    assert ranked([*by_formula, *predicted]) == ranked([*predicted, *by_formula]) == [3, 2, 4, 1]
    assert ranked(by_formula) == [4, 1]


def test_figures_from_before_predictions_were_made_are_by_formula():
    assert ranked([single(1, 1, 631.0, Kind.ESTIMATED), estimated(2, 2, 400.0, True)]) == [2, 1]


def test_a_candidate_counts_by_its_prediction_whenever_the_formula_was_asked():
    assert ranked([estimated(1, 1, 400.0, True), estimated(2, 2, 350.0, True), estimated(3, 1, 100.0, False)]) == [1, 2]


def test_a_measured_figure_leaves_estimates_of_either_model_out():
    assert ranked([estimated(1, 1, 400.0, True), estimated(2, 2, 631.0, False), single(3, 3, 20.0)]) == [3]
