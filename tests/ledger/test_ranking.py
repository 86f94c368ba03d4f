"""Finals decide between those that took part; kinds are never mixed; what came later competes by its figure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

import pytest
from sqlalchemy import text

from evoengine.errors import MachineError
from evoengine.ledger import check
from evoengine.ledger.ranking import check_standings, read_order, rebuild
from evoengine.ledger.store import Ledger, open_ledger
from evoengine.records import UNKNOWN_POLICY, Kind, Measurement, Outcome, Policy
from tests.support.ledger_examples import (
    CONFIG,
    GPU,
    POLICY,
    PROBLEM,
    SUSTAINED,
    a_binary,
    a_figure,
    a_verdict,
    add_ranked,
    start_run,
)


@dataclass(frozen=True)
class Figure:
    number: int
    trial: int
    kind: Kind
    us: float
    suspect: str | None
    terms: dict[str, float]
    run: int = 1
    device: str = "NVIDIA H200"
    policy: Policy | None = POLICY


def single(number, trial, tflops, kind=Kind.MEASURED, suspect=None):
    return Figure(number, trial, kind, 1e6 / tflops, suspect, {})


def final(number, trial, tflops, place, run=1, of_trial=1):
    terms = {"final_of_run": float(run), "place": float(place)}
    return Figure(number, trial, Kind.MEASURED, 1e6 / tflops, None, terms, run=of_trial)


def write(ledger: Ledger, figures: list[Figure]) -> None:
    """Trials of these numbers in runs of theirs, with the figures in the order of their numbers."""
    runs = {figure.trial: figure.run for figure in figures}
    for _ in range(max(runs.values())):
        start_run(ledger)
    for trial in range(1, max(runs) + 1):
        ledger.add_candidate(runs.get(trial, 1), PROBLEM, GPU, CONFIG | {"tile_m": trial}, (), None)
        ledger.finish(trial, Outcome.MEASURED, None, None, None)
    for f in sorted(figures, key=lambda figure: figure.number):
        policy = f.policy if f.kind is Kind.MEASURED else None
        ledger.record_measurement(
            f.trial, Measurement(f.kind, f.device, None, f.us, terms=f.terms, suspect=f.suspect, policy=policy)
        )


def order(ledger: Ledger, run: int | None = None) -> list[int]:
    """Return the ranking as it was kept up to date, which has to be the one that is computed from the figures."""
    with ledger.database.writing() as session:
        check_standings(session)
        kept = read_order(session, PROBLEM, GPU, 99, run)
        rebuild(session)
        assert read_order(session, PROBLEM, GPU, 99, run) == kept
    return kept


@pytest.fixture
def ranked(new_file: Callable[[str], Path]) -> Iterator[Callable[[list[Figure]], list[int]]]:
    """Gives the order of a ledger in which the figures were recorded."""
    names = count()

    def rank(figures: list[Figure]) -> list[int]:
        with open_ledger(str(new_file(f"{next(names)}.db")), create=False) as ledger:
            if figures:
                write(ledger, figures)
            return order(ledger)

    return rank


def test_without_finals_the_figures_decide(ranked):
    assert ranked([single(1, 1, 10.0), single(2, 2, 30.0), single(3, 3, 20.0)]) == [2, 3, 1]


def test_finalists_keep_their_places_even_where_one_of_fewer_registers_is_a_little_slower(ranked):
    assert ranked([single(1, 1, 10.0), single(2, 2, 11.0), final(3, 1, 10.5, 2), final(4, 2, 10.4, 1)]) == [2, 1]


def test_what_was_timed_alone_before_the_finals_is_behind_them(ranked):
    assert ranked([single(1, 1, 99.0), single(2, 2, 100.0), final(3, 2, 95.0, 1)]) == [2, 1]


def test_what_was_timed_alone_after_the_finals_competes_by_its_figure(ranked):
    finals = [final(1, 1, 95.0, 1), final(2, 2, 90.0, 2)]
    assert ranked([*finals, single(3, 3, 120.0)]) == [3, 1, 2]
    assert ranked([*finals, single(3, 3, 92.0)]) == [1, 3, 2]
    assert ranked([*finals, single(3, 3, 80.0)]) == [1, 2, 3]


def test_the_last_finals_supersede_those_before(ranked):
    first = [final(1, 1, 95.0, 1, run=1), final(2, 2, 94.0, 2, run=1)]
    assert ranked([*first, single(3, 3, 97.0), final(4, 3, 93.0, 1, run=2), final(5, 1, 92.0, 2, run=2)]) == [3, 1, 2]


def test_a_finalist_timed_again_alone_competes_by_its_last_figure(ranked):
    assert ranked([final(1, 1, 95.0, 1), final(2, 2, 90.0, 2), single(3, 1, 85.0)]) == [2, 1]


def test_finals_held_in_another_ledger_decide_between_trials_of_their_own_run_alone(ranked):
    own = [single(1, 1, 80.0), single(2, 2, 99.0)]
    alone = replace(single(3, 3, 90.0), run=7)
    brought = [final(4, 4, 60.0, 2, run=-1, of_trial=7), final(5, 5, 59.0, 1, run=-1, of_trial=7)]
    assert ranked([*own, alone, *brought]) == [2, 1, 5, 4, 3]


def test_finals_held_here_have_the_last_word_on_what_was_brought_before(ranked):
    brought = [final(1, 1, 70.0, 2, run=-1, of_trial=7), final(2, 2, 99.0, 1, run=-1, of_trial=7)]
    assert ranked([*brought, final(3, 3, 80.0, 1, run=8), final(4, 4, 75.0, 2, run=8)]) == [3, 4, 2, 1]


def test_kinds_are_not_mixed_and_the_suspect_is_left_out(ranked):
    estimated, measured = single(1, 1, 500.0, Kind.ESTIMATED), single(2, 2, 20.0)
    assert ranked([estimated, measured, single(3, 3, 900.0, suspect="above the roofline")]) == [2]
    assert ranked([estimated]) == [1]
    assert ranked([]) == []


@pytest.mark.parametrize(
    ("us", "registers", "shared", "expected"),
    [
        ((100.0, 101.9, 101.0, 110.0), (90, 80, 85, 40), (0, 0, 0, 0), [2, 1, 3, 4]),
        ((100.0, 102.1), (90, 80), (0, 0), [1, 2]),
        ((100.0, 101.0, 101.0), (90, 90, 90), (0, 0, 0), [1, 2, 3]),
        ((100.0, 101.0, 101.0), (90, 80, 80), (0, 0, 0), [2, 1, 3]),
        ((100.0, 101.0, 101.0), (90, 80, 80), (0, 2048, 1024), [3, 1, 2]),
    ],
)
def test_of_predictions_closer_than_their_order_can_be_told_the_fewest_registers_are_first(
    new_file, us, registers, shared, expected
):
    with open_ledger(str(new_file("close.db")), create=False) as ledger:
        run = start_run(ledger)
        for n, time in enumerate(us):
            binary = a_binary(registers=registers[n], shared_bytes=shared[n])
            add_ranked(ledger, run, replace(a_figure(1.0), median_us=time), name=f"kernel_{n}", binary=binary)
        assert order(ledger) == order(ledger, run) == expected
        assert [c.trial for c in ledger.best(PROBLEM, GPU, top=1)] == expected[:1]


def test_of_measured_times_the_fastest_is_first_whatever_its_registers(new_file):
    with open_ledger(str(new_file("close.db")), create=False) as ledger:
        run = start_run(ledger)
        for n, (time, held) in enumerate(((100.0, 90), (100.1, 40))):
            figure = replace(a_figure(1.0, Kind.MEASURED), median_us=time)
            add_ranked(ledger, run, figure, name=f"kernel_{n}", binary=a_binary(registers=held))
        assert order(ledger) == [1, 2]


def test_figures_of_the_device_that_timed_last_are_not_ranked_with_those_of_another(ranked):
    def on(device, number, trial, tflops):
        return replace(single(number, trial, tflops), device=device)

    h100, h200 = on("NVIDIA H100", 1, 1, 500.0), on("NVIDIA H200", 2, 2, 480.0)
    assert ranked([h100, h200, on("NVIDIA H200", 3, 3, 490.0)]) == [3, 2]
    assert ranked([h200, on("NVIDIA H100", 3, 1, 500.0)]) == [1]


def by(policy, number, trial, tflops, device="NVIDIA H200"):
    return replace(single(number, trial, tflops), device=device, policy=policy)


def test_figures_of_the_last_policy_are_not_ranked_with_those_of_another(ranked):
    """A kernel that takes 330 µs with a cold L2 and 8 µs with a warm one would win over all by its way to be
    measured."""
    streamed = replace(POLICY, launch="stream")
    batched = replace(POLICY, batch=1)
    for other in (streamed, batched, UNKNOWN_POLICY):
        assert ranked([by(other, 1, 1, 900.0), by(POLICY, 2, 2, 20.0), by(POLICY, 3, 3, 30.0)]) == [3, 2]
        assert ranked([by(POLICY, 1, 2, 20.0), by(POLICY, 2, 3, 30.0), by(other, 3, 1, 900.0)]) == [1]


def test_sustained_figures_stand_beside_the_others_whenever_they_were_taken(ranked):
    figures = [by(POLICY, 1, 1, 20.0), by(POLICY, 2, 2, 30.0), by(SUSTAINED, 3, 1, 900.0), by(SUSTAINED, 4, 2, 10.0)]
    assert ranked(figures) == [2, 1]
    assert ranked(figures[2:]) == [1, 2]


def estimated(number, trial, tflops, predicted):
    device = "model for h100" if predicted else "estimate for h100"
    return replace(single(number, trial, tflops, Kind.ESTIMATED), device=device, terms={"predicted": float(predicted)})


def test_estimates_by_formula_are_behind_all_predictions_in_an_order_of_their_own(ranked):
    by_formula = [estimated(1, 1, 631.0, False), estimated(4, 4, 700.0, False)]
    predicted = [estimated(2, 2, 400.0, True), estimated(3, 3, 450.0, True)]
    assert ranked([*by_formula, *predicted]) == ranked([*predicted, *by_formula]) == [3, 2, 4, 1]
    assert ranked(by_formula) == [4, 1]


def test_figures_from_before_predictions_were_made_are_by_formula(ranked):
    assert ranked([single(1, 1, 631.0, Kind.ESTIMATED), estimated(2, 2, 400.0, True)]) == [2, 1]


def test_a_candidate_counts_by_its_prediction_whenever_the_formula_was_asked(ranked):
    assert ranked([estimated(1, 1, 400.0, True), estimated(2, 2, 350.0, True), estimated(3, 1, 100.0, False)]) == [1, 2]


def test_a_measured_figure_leaves_estimates_of_either_model_out(ranked):
    assert ranked([estimated(1, 1, 400.0, True), estimated(2, 2, 631.0, False), single(3, 3, 20.0)]) == [3]


# ── what is written in another order ────────────────────────────────────────────────────────────────────────────────


def test_finals_of_one_run_decide_among_its_trials_whatever_finals_came_later(ledger):
    first = [single(1, 1, 100.0), single(2, 2, 90.0), final(3, 2, 95.0, 1)]
    write(ledger, [*first, replace(single(4, 3, 80.0), run=2), final(5, 3, 97.0, 1, run=2, of_trial=2)])
    assert (order(ledger), order(ledger, 1), order(ledger, 2)) == ([3, 1, 2], [2, 1], [3])


def test_a_finalist_that_a_later_verdict_refutes_is_out_and_its_finals_hold_without_it(ledger):
    write(ledger, [single(1, 1, 99.0), final(2, 2, 95.0, 1), final(3, 3, 90.0, 2)])
    assert order(ledger) == [2, 3, 1]
    ledger.record_verdict(3, a_verdict(Outcome.INCORRECT))
    assert order(ledger) == [2, 1]
    ledger.record_verdict(2, a_verdict(Outcome.INCORRECT))
    assert order(ledger) == [1]
    ledger.record_verdict(3, a_verdict(None))
    assert order(ledger) == [3, 1]


def test_a_figure_that_stands_after_finals_and_was_taken_before_is_behind_them(ledger):
    write(ledger, [single(1, 1, 99.0), final(2, 2, 95.0, 1)])
    ledger.record_verdict(1, a_verdict(Outcome.INCORRECT))
    ledger.record_verdict(1, a_verdict(None))
    assert order(ledger) == [2, 1]


def test_what_only_removed_trials_won_decides_no_more(ledger):
    late = [replace(single(3, 3, 10.0), run=2), final(4, 3, 96.0, 1, run=2, of_trial=2)]
    write(ledger, [single(1, 1, 99.0), single(2, 2, 97.0), *late])
    assert order(ledger) == [3, 1, 2]
    for run in (1, 2):
        ledger.finish_run(run, "all trials done")
    ledger.remove_runs([2])
    assert order(ledger) == [1, 2]


# ── what does not follow from the figures ───────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE standings SET us = us / 2 WHERE candidate_id = 1",
        "DELETE FROM standings WHERE candidate_id = 2",
        "UPDATE standings SET ranking_id = 2 WHERE candidate_id = 1",
        "UPDATE rankings SET device = 'NVIDIA H201' WHERE id = 1",
        "UPDATE standings SET final_of_run = 1, final_place = 1",
        "UPDATE standings SET counted_us = us / 2 WHERE candidate_id = 1",
        "UPDATE standings SET run_counted_us = us * 2 WHERE candidate_id = 2",
        "UPDATE standings SET place = 1 WHERE candidate_id = 2",
    ],
)
def test_a_standing_that_does_not_follow_from_the_figures_is_named(ledger, monkeypatch, change):
    run = start_run(ledger)
    for tflops in (1.0, 2.0):
        add_ranked(ledger, run, a_figure(tflops, Kind.MEASURED), name=f"kernel{tflops}")
    add_ranked(ledger, run, a_figure(3.0))
    with ledger.database.writing() as session:
        session.execute(text(change))
    with pytest.raises(MachineError, match="is damaged: [a-z_]* of row . of the table standings"):
        open_ledger(ledger.place, create=False)


def test_a_large_ledger_is_looked_through_where_its_rows_are_read(ledger, monkeypatch):
    monkeypatch.setattr(check, "CHECKED_TRIALS", 0)
    run = start_run(ledger)
    trials = [add_ranked(ledger, run, a_figure(tflops), name=f"kernel{tflops}") for tflops in (1.0, 2.0)]
    changes = {
        "standings SET us = us / 2 WHERE candidate_id = 1": "us of row 1 of the table standings",
        "measurements SET median_us = 1.0 WHERE candidate_id = 1": "row 1 of the table measurements",
        "candidates SET config_key = 'other' WHERE id = 2": "row 2 of the table candidates",
    }
    for change, named in changes.items():
        with ledger.database.writing() as session:
            session.execute(text(f"UPDATE {change}"))
        with open_ledger(ledger.place, create=False) as opened, pytest.raises(MachineError, match=named):
            opened.best(PROBLEM, GPU, 2)
        with ledger.database.writing() as session:
            session.execute(text("UPDATE measurements SET median_us = 25300.0 * 42.5 WHERE candidate_id = 1"))
            session.execute(text("UPDATE candidates SET config_key = (SELECT config_key FROM candidates WHERE id = 1)"))
            rebuild(session)
    assert [c.trial for c in ledger.best(PROBLEM, GPU, 2)] == trials[::-1]
