"""What SQL finds fastest is what the plain ranking of all figures says, whatever was written in whatever order."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from sqlalchemy import select, text

from evoengine.errors import MachineError
from evoengine.ledger import checking, figures
from evoengine.ledger.figures import read_order
from evoengine.ledger.models import CandidateRow, MeasurementRow
from evoengine.ledger.ranking import Figure, ranked
from evoengine.ledger.rows import to_measurement
from evoengine.ledger.standings import check_standings, rebuild
from evoengine.ledger.store import Ledger, open_ledger
from evoengine.records import Kind, Outcome
from tests.support.exhaustive import each_nth, more
from tests.support.ledger_examples import (
    CONFIG,
    GPU,
    POLICY,
    PREDICTED,
    PROBLEM,
    SUSTAINED,
    a_figure,
    a_source,
    a_verdict,
    add_ranked,
    start_run,
)

POLICIES = (POLICY, POLICY, POLICY, SUSTAINED, replace(POLICY, batch=1))
TRIALS, WRITES = 24, 50


def specified(ledger: Ledger, top: int, run: int | None) -> list[int]:
    """By all figures of all candidates, in Python."""
    with ledger._reading() as session:
        rows = session.scalars(select(MeasurementRow).order_by(MeasurementRow.id)).all()
        taken = [(row.id, row.candidate_id, to_measurement(row)) for row in rows]
        kernels = {c.id: c.source_sha256 or c.config_key for c in session.scalars(select(CandidateRow))}
    candidates = {c.trial: c for c in ledger.candidates(run=run, problem=PROBLEM, gpu=GPU)}
    stands = {
        n for n, c in candidates.items() if c.outcome and c.outcome.ranked and (not c.verdict or c.verdict.correct)
    }
    order = ranked(
        Figure(number, trial, m.kind, m.compared_us, m.suspect, m.terms, m.device, candidates[trial].run, m.policy)
        for number, trial, m in taken
        if trial in stands
    )
    firsts: dict[str, int] = {}
    for trial in order:
        firsts.setdefault(kernels[trial], trial)
    return list(firsts.values())[:top]


def drawn_figure(rng: random.Random, kinds: tuple[Kind, ...]):
    kind = rng.choice(kinds)
    figure = a_figure(rng.choice((1.0, 2.0, 3.0, rng.uniform(1, 3))), kind, rng.choice((None,) * 6 + ("too fast",)))
    device = rng.choice(("NVIDIA H200", "NVIDIA H200", "NVIDIA H100"))
    terms = PREDICTED if kind is Kind.ESTIMATED and rng.random() < 0.5 else {}
    policy = rng.choice(POLICIES) if kind is Kind.MEASURED else None
    normalised = figure.median_us * 1.01 if rng.random() < 0.3 else None
    return replace(figure, device=device, terms=terms, policy=policy, normalised_us=normalised)


def hold_finals(rng: random.Random, ledger: Ledger, trials: list[int], final_of: float) -> None:
    for place, trial in enumerate(rng.sample(trials, 4), 1):
        terms = {"place": float(place), "final_of_run": final_of}
        ledger.record_measurement(trial, replace(a_figure(rng.uniform(1, 3), Kind.MEASURED), terms=terms))


def fill(rng: random.Random, ledger: Ledger, kinds: tuple[Kind, ...]) -> list[int]:
    """A ledger of a few runs, as searches, measurements, finals and second verdicts leave them; its runs."""
    runs = [start_run(ledger) for _ in range(3)]
    trials = [
        ledger.add_candidate(rng.choice(runs), PROBLEM, GPU, CONFIG | {"tile_m": number}, (), None)
        for number in range(TRIALS)
    ]
    for trial in trials:
        if rng.random() < 0.7:
            ledger.record_source(trial, a_source(f"kernel{rng.randrange(TRIALS)}"))
    for _ in range(WRITES):
        trial = rng.choice(trials)
        act = rng.random()
        if act < 0.55:
            ledger.record_measurement(trial, drawn_figure(rng, kinds))
        elif act < 0.62:
            ledger.record_verdict(trial, a_verdict(rng.choice((None, None, Outcome.INCORRECT))))
        elif act < 0.66:
            hold_finals(rng, ledger, trials, rng.choice((1.0, 2.0, 3.0, -1.0)))
        else:
            outcome = rng.choice((Outcome.MEASURED, Outcome.ESTIMATED, Outcome.RECORDED, Outcome.SUSPECT))
            ledger.finish(trial, outcome, None, None, None)
    return runs


KINDS = {
    "all kinds": tuple(Kind),
    "measured": (Kind.MEASURED,),
    "estimated": (Kind.ESTIMATED,),
    "recorded": (Kind.RECORDED, Kind.ESTIMATED),
}


@pytest.mark.parametrize("seed", each_nth(3, range(3)))
@pytest.mark.parametrize("kinds", [*KINDS][:2] + more([*KINDS][2:]))
def test_the_fastest_are_those_of_the_plain_ranking(ledger, monkeypatch, kinds, seed):
    monkeypatch.setattr(figures, "FIRST_FASTEST", 1)
    runs = fill(random.Random(f"{kinds} {seed}"), ledger, KINDS[kinds])
    found = 0
    with ledger._reading() as session:
        check_standings(session)
        for run in (None, *runs):
            for top in (1, 2, 3, 5, 99):
                order = read_order(session, PROBLEM, GPU, top, run)
                assert order == specified(ledger, top, run), (run, top)
                found += len(order)
    assert found > 5


def test_what_stands_can_be_made_again(ledger):
    fill(random.Random(1), ledger, tuple(Kind))
    with ledger._writing() as session:
        before = session.execute(text("SELECT * FROM standings ORDER BY candidate_id")).all()
        session.execute(text("DELETE FROM standings"))
        rebuild(session)
        assert session.execute(text("SELECT * FROM standings ORDER BY candidate_id")).all() == before != []


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE standings SET us = us / 2 WHERE candidate_id = 1",
        "DELETE FROM standings WHERE candidate_id = 2",
        "UPDATE standings SET ranking_id = 2 WHERE candidate_id = 1",
        "UPDATE rankings SET device = 'NVIDIA H201' WHERE id = 1",
        "UPDATE standings SET is_final = 1",
    ],
)
def test_a_standing_that_does_not_follow_from_the_figures_is_named(ledger, monkeypatch, change):
    run = start_run(ledger)
    for tflops in (1.0, 2.0):
        add_ranked(ledger, run, a_figure(tflops, Kind.MEASURED), name=f"kernel{tflops}")
    add_ranked(ledger, run, a_figure(3.0))
    with ledger._writing() as session:
        session.execute(text(change))
    with pytest.raises(MachineError, match="is damaged: figure_id of row . of the table standings"):
        open_ledger(ledger.place, create=False)


def test_a_large_ledger_is_looked_through_where_its_rows_are_read(ledger, monkeypatch):
    monkeypatch.setattr(checking, "CHECKED_TRIALS", 0)
    run = start_run(ledger)
    trials = [add_ranked(ledger, run, a_figure(tflops), name=f"kernel{tflops}") for tflops in (1.0, 2.0)]
    changes = {
        "standings SET us = us / 2 WHERE candidate_id = 1": "us of row 1 of the table standings",
        "measurements SET median_us = 1.0 WHERE candidate_id = 1": "row 1 of the table measurements",
        "candidates SET config_key = 'other' WHERE id = 2": "row 2 of the table candidates",
    }
    for change, named in changes.items():
        with ledger._writing() as session:
            session.execute(text(f"UPDATE {change}"))
        with open_ledger(ledger.place, create=False) as opened, pytest.raises(MachineError, match=named):
            opened.best(PROBLEM, GPU, 1)
        with ledger._writing() as session:
            session.execute(text("UPDATE measurements SET median_us = 25300.0 * 42.5 WHERE candidate_id = 1"))
            session.execute(text("UPDATE candidates SET config_key = (SELECT config_key FROM candidates WHERE id = 1)"))
            rebuild(session)
    assert [c.trial for c in ledger.best(PROBLEM, GPU, 2)] == trials[::-1]
