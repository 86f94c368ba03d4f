"""Trials that finish together are written into the study together."""

from __future__ import annotations

from types import SimpleNamespace

import optuna

from evoengine.ledger.optuna import study as study_module
from evoengine.ledger.optuna.study import Projection, optuna_storage
from evoengine.records import Kind
from tests.support.ledger_examples import DOMAINS, a_figure, add_ranked, start_run


def numbers_and_trials(projection):
    study = optuna.load_study(study_name=projection.name, storage=projection._storage)
    return [(t.number, t.user_attrs["trial"]) for t in study.get_trials()]


def add_several(ledger, run, count):
    return [add_ranked(ledger, run, a_figure(float(n + 1)), name=f"kernel{n}") for n in range(count)]


def test_trials_that_finish_within_a_moment_are_written_together(ledger, monkeypatch):
    now = 1000.0
    monkeypatch.setattr(study_module, "time", SimpleNamespace(monotonic=lambda: now))
    run = start_run(ledger)
    first, *others = add_several(ledger, run, 4)
    projection = Projection(optuna_storage(ledger.url), ledger, run, Kind.ESTIMATED, DOMAINS)
    projection.add(first)
    for trial in others:
        projection.add(trial)
    assert numbers_and_trials(projection) == [(0, first)]
    now += study_module.BATCH_SECONDS
    projection.write_due()
    assert numbers_and_trials(projection) == list(enumerate([first, *others]))


def test_two_writers_of_one_study_number_its_trials_once(ledger, monkeypatch):
    monkeypatch.setattr(study_module, "BATCH_SECONDS", 0.0)
    run = start_run(ledger)
    trials = add_several(ledger, run, 4)
    storage = optuna_storage(ledger.url)
    writers = [Projection(storage, ledger, run, Kind.ESTIMATED, DOMAINS) for _ in range(2)]
    for number, trial in enumerate(trials):
        writers[number % 2].add(trial)
    assert numbers_and_trials(writers[0]) == list(enumerate(trials))


def test_one_trial_that_cannot_be_shown_hides_no_other(ledger, monkeypatch):
    run = start_run(ledger)
    first, second, third = add_several(ledger, run, 3)
    projection = Projection(optuna_storage(ledger.url), ledger, run, Kind.ESTIMATED, DOMAINS)
    shown = study_module.read_study_trials

    def fail(reading, trials, *arguments):
        if second in trials:
            raise ValueError("it has no figure")
        return shown(reading, trials, *arguments)

    monkeypatch.setattr(study_module, "read_study_trials", fail)
    projection.complete()
    assert projection.missed == {second: "ValueError: it has no figure"}
    assert numbers_and_trials(projection) == [(0, first), (1, third)]
