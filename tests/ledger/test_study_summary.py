"""A large study has a summary of the trials that matter; optuna-dashboard serves both, as it is."""

from __future__ import annotations

import json
import logging
import sqlite3
from contextlib import closing
from types import SimpleNamespace

import optuna
import pytest
from optuna.trial import create_trial
from optuna_dashboard import wsgi

from evoengine.cli.dashboard import LogOnce
from evoengine.ledger.optuna.study import (
    SUMMARY,
    SUMMARY_TRIALS,
    artifact_store,
    choose_trials,
    optuna_storage,
    rebuild,
    study_faults,
    summarise_large_studies,
)
from evoengine.ledger.store import open_ledger
from evoengine.records import Kind
from tests.support.ledger_examples import CONFIG, DOMAINS, GPU, PROBLEM, a_figure, add_ranked, start_run

NAME = f"run 1 · {PROBLEM} · {GPU} · estimated TFLOPS"


def trial(number: int, us: float, *parents: int):
    return SimpleNamespace(trial=number, parents=parents, measurement=SimpleNamespace(rank_key=(False, us)))


def test_a_summary_has_the_fastest_what_led_to_them_and_a_part_of_the_rest():
    trials = [
        trial(n, 5000.0 - n if n % 50 == 0 else 9000.0 + n % 7, *((n - 1,) if n % 50 == 0 else ())) for n in range(5000)
    ]
    chosen = choose_trials(trials, range(5000))
    fastest = sorted(trials, key=lambda t: t.measurement.rank_key)[: SUMMARY_TRIALS // 2]
    leading = [n for n in range(0, 5000, 50)]
    assert {t.trial for t in fastest} | set(leading) | {n - 1 for n in leading[1:]} <= set(chosen)
    assert chosen == sorted(chosen) and SUMMARY_TRIALS // 2 < len(chosen) <= SUMMARY_TRIALS
    rest = [n for n in chosen if n % 50 not in (0, 49)]
    assert rest[0] < 50 and rest[-1] > 4900


def test_trials_that_failed_are_in_a_summary_too_and_a_small_study_is_whole():
    assert choose_trials([trial(3, 1.0)], range(10)) == list(range(10))
    assert len(choose_trials([], range(5000))) == SUMMARY_TRIALS


@pytest.fixture
def projected(tmp_path):
    """A study of nine trials."""
    with open_ledger(str(tmp_path / "evo.db"), create=True) as ledger:
        run = start_run(ledger)
        for n in range(9):
            add_ranked(ledger, run, a_figure(40.0 + n), {**CONFIG, "tile_m": (32, 64, 128)[n % 3]}, name=f"k{n}")
        ledger.finish_run(run, "all trials done")
        rebuild(optuna_storage(ledger.url), ledger, run, Kind.ESTIMATED, DOMAINS)
        yield ledger


def test_a_large_study_gets_a_summary_beside_it_and_another_when_it_is_asked_for_again(projected):
    storage = optuna_storage(projected.url)
    for _ in range(2):
        assert summarise_large_studies(storage, projected, 5) == [NAME + SUMMARY]
        names = optuna.get_all_study_names(storage)
        assert sorted(names) == [NAME, NAME + SUMMARY]
        whole, summary = (optuna.load_study(study_name=name, storage=storage) for name in (NAME, NAME + SUMMARY))
        assert len(whole.trials) == 9 and len(summary.trials) <= 5
        assert summary.best_trial.user_attrs["trial"] == whole.best_trial.user_attrs["trial"] == 9
    assert study_faults(storage, projected) == []


def test_a_study_that_is_not_large_gets_none(projected):
    assert summarise_large_studies(optuna_storage(projected.url), projected, 9) == []


def fetch(app, path: str) -> tuple[str, bytes]:
    told: list[str] = []
    environ = {"REQUEST_METHOD": "GET", "PATH_INFO": path, "QUERY_STRING": "", "wsgi.url_scheme": "http"}
    body = b"".join(app(environ, lambda status, headers, exc_info=None: told.append(status)))
    return told[0], body


def test_optuna_dashboard_serves_a_summary_from_the_ledgers_file(projected):
    summarise_large_studies(optuna_storage(projected.url), projected, 5)
    app = wsgi(projected.url if "://" in projected.url else f"sqlite:///{projected.url}")  # as its own command does
    studies = {s["study_name"]: s["study_id"] for s in json.loads(fetch(app, "/api/studies")[1])["study_summaries"]}
    shown = json.loads(fetch(app, f"/api/studies/{studies[NAME + SUMMARY]}")[1])
    assert 0 < len(shown["trials"]) <= 5


@pytest.mark.parametrize(
    "damage",
    ["UPDATE trial_user_attributes SET value_json = '{broken'", "UPDATE trial_params SET distribution_json = '[]'"],
)
def test_a_damaged_study_is_one_line_with_a_remedy_however_often_the_page_asks(tmp_path, damage):
    url = f"sqlite:///{tmp_path}/evo.db"
    study = optuna.create_study(storage=optuna_storage(url))
    tile = optuna.distributions.CategoricalDistribution((64, 128))
    study.add_trial(create_trial(values=[1.0], params={"tile": 64}, distributions={"tile": tile}, user_attrs={"a": 1}))
    with closing(sqlite3.connect(tmp_path / "evo.db")) as connection, connection:
        assert connection.execute(damage).rowcount
    said, logger = [], logging.getLogger("optuna_dashboard")
    complaints = LogOnce(said.append, "make it again")
    logger.addHandler(complaints)
    try:
        app = wsgi(optuna_storage(url), artifact_store=artifact_store(url))
        for _ in range(2):
            assert fetch(app, "/api/studies/1")[0].startswith("500")
    finally:
        logger.removeHandler(complaints)
    (line,) = said
    assert line.startswith("a study cannot be shown: ") and line.endswith("; make it again") and "\n" not in line
