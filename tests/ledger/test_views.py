"""The views show what the commands show; `test_postgres.py` says the same of PostgreSQL."""

from __future__ import annotations

import re

import pytest
from sqlalchemy import inspect

from evoengine.ledger.store import open_ledger
from evoengine.records import Outcome
from tests.ledger.views import (
    check_documented_queries,
    check_figures_and_cases,
    check_list,
    check_ranking,
    check_runs,
    fill,
    rows,
)
from tests.support.documents import ROOT
from tests.support.ledger_examples import a_figure, add_ranked, start_run


@pytest.mark.parametrize("seed", range(4))
def test_the_ranking_is_that_of_best(ledger, seed):
    fill(ledger, seed)
    check_ranking(ledger)


def test_rankings_are_of_many_kinds(new_file):
    """What was drawn has finals held here and elsewhere that decide, and estimates by formula behind predictions."""
    kinds, finals, places = set(), set(), set()
    for seed in range(3, 8):
        with open_ledger(str(new_file(f"{seed}.db")), create=False) as ledger:
            fill(ledger, seed)
            shown = rows(ledger, "SELECT * FROM best_trials WHERE preference = 1 ORDER BY place")
            kinds |= {row["kind"] for row in shown}
            by_time = [row["trial"] for row in sorted(shown, key=lambda row: row["compared_us"])]
            places.add([row["trial"] for row in shown] == by_time)
            finals |= {c.measurement.terms.get("final_of_run", 0) for c in ledger.candidates() if c.measurement}
    assert kinds == {"measured", "recorded", "estimated"} and finals >= {-2, -1, 0, 1, 2} and places == {True, False}


def test_trials_runs_figures_and_cases_are_those_of_the_ledger(ledger):
    fill(ledger, 3)
    add_ranked(ledger, start_run(ledger), a_figure(40.0), {"family": "mma"})
    check_list(ledger)
    check_runs(ledger)
    check_figures_and_cases(ledger)


def test_an_empty_run_has_a_row(ledger):
    start_run(ledger)
    (row,) = rows(ledger, "SELECT * FROM run_summaries")
    assert (row["trials"], row["correct"], row["pending"], row["measured_us"]) == (0, 0, 0, None)


def test_a_wrong_ranking_is_seen(ledger):
    fill(ledger, 0)
    first = ledger.best(ledger.runs()[0].problem, "h100", 1)[0].trial
    ledger.finish(first, Outcome.INCORRECT, None, None, None)
    best, ledger.best = ledger.best, lambda *_: [c for c in candidates if c.trial]
    candidates = best(ledger.runs()[0].problem, "h100", 1000)[::-1]
    with pytest.raises(AssertionError):
        check_ranking(ledger)


def test_the_documented_queries_have_answers(ledger):
    fill(ledger, 5)
    check_documented_queries(ledger)


def test_every_view_is_documented_with_all_its_columns(ledger):
    page = (ROOT / "docs" / "ledger.md").read_text()
    views = inspect(ledger.database.engine).get_view_names()
    held = {view: {c["name"] for c in inspect(ledger.database.engine).get_columns(view)} for view in views}
    documented = {
        row.split("`")[1]: set(re.findall("`([a-z_0-9]+)`", re.sub(r"\([^)]*\)", "", row.split("|")[3])))
        for row in page.splitlines()
        if row.startswith("| `") and row.split("`")[1] in views
    }
    assert documented == held and len(views) == 5
