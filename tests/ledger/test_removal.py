"""A run is taken out with all that is its own, and nothing that is another's."""

from __future__ import annotations

import optuna
import pytest
from sqlalchemy import text

from evoengine.errors import UsageError
from evoengine.ledger.optuna.study import Projection, optuna_storage
from evoengine.ledger.store import Ledger
from evoengine.ledger.tables import Base
from evoengine.records import Baseline, Kind, Profile
from tests.support.ledger_examples import DOMAINS, GPU, POLICY, PROBLEM, a_figure, add_ranked, start_run

OF_NO_RUN = ("devices", "commits", "tokens", "jobs", "job_events", "executors", "tuner_cache")
OURS = [table for table in Base.metadata.tables if table not in OF_NO_RUN]


def rows(ledger: Ledger, *tables: str) -> dict[str, int]:
    with ledger.database.reading() as session:
        return {name: session.scalar(text(f"SELECT count(*) FROM {name}")) for name in tables}


def a_run(ledger: Ledger, *names: str, **changes: object) -> tuple[int, list[int]]:
    """A run that has ended, with a trial of each of these kernels."""
    run = start_run(ledger, **changes)
    ledger.record_baseline(run, Baseline("library", "NVIDIA H200", 800.0, 600.0, (800.0,), POLICY))
    trials = [add_ranked(ledger, run, a_figure(100.0 + n), name=name) for n, name in enumerate(names)]
    for name, trial in zip(names, trials, strict=True):
        ledger.claims.claim(name, trial)
    for trial in trials:
        ledger.record_profile(trial, Profile("tool", "NVIDIA H200", {"figure": 1.0}))
    ledger.finish_run(run, "budget reached")
    return run, trials


def test_a_removed_run_leaves_nothing_behind(ledger):
    run, _ = a_run(ledger, "one", "two")
    assert all(count for name, count in rows(ledger, *OURS).items() if name != "heartbeats"), rows(ledger, *OURS)
    ledger.remove_runs([run])
    left = {name: count for name, count in rows(ledger, *OURS, "devices").items() if count}
    assert left == {"chains": 1, "links": 2}  # of the ledger: the run, and that it was removed


def test_what_another_run_uses_stays(ledger):
    first, _ = a_run(ledger, "shared", "own")
    second, kept = a_run(ledger, "shared", "other")
    before = [ledger.candidate(trial, with_cubin=True) for trial in kept]
    ledger.remove_runs([first])
    assert [ledger.candidate(trial, with_cubin=True) for trial in kept] == before
    assert rows(ledger, "sources", "binaries", "runs", "baselines") == {
        "sources": 2, "binaries": 2, "runs": 1, "baselines": 1,
    }  # fmt: skip
    assert [c.trial for c in ledger.best(PROBLEM, GPU, top=9)] == kept[::-1]
    with ledger.database.reading() as session:
        assert session.execute(text("PRAGMA foreign_key_check")).all() == []


def test_numbers_are_not_given_again(ledger):
    run, trials = a_run(ledger, "one", "two")
    ledger.remove_runs([run])
    new_run, new_trials = a_run(ledger, "one")
    assert new_run > run and min(new_trials) > max(trials)


def test_a_child_of_a_removed_trial_begins_its_lineage(ledger):
    run, [parent] = a_run(ledger, "parent")
    child = add_ranked(ledger, start_run(ledger), a_figure(200.0), name="child", parents=(parent,))
    assert sorted(ledger.ancestors(child)) == [parent, child]
    ledger.finish_run(run + 1, "budget reached")
    ledger.remove_runs([run])
    assert list(ledger.ancestors(child)) == [child]


def test_of_several_runs_all_go_or_none(ledger):
    run, _ = a_run(ledger, "one")
    before = rows(ledger, *OURS)
    with pytest.raises(UsageError, match="no run 7: its runs are numbered 1 to 1"):
        ledger.remove_runs([run, 7])
    assert rows(ledger, *OURS) == before


def test_a_run_that_is_going_on_stays(ledger):
    ended, _ = a_run(ledger, "one")
    elsewhere, _ = a_run(ledger, "two", gpu="a100")
    going_on = start_run(ledger)
    with pytest.raises(UsageError, match=f"run {going_on} is still going on"):
        ledger.remove_runs([going_on])
    with pytest.raises(UsageError, match=f"run {ended} cannot be removed while run {going_on} works"):
        ledger.remove_runs([ended])
    ledger.remove_runs([elsewhere])
    ledger.finish_run(going_on, "budget reached")
    ledger.remove_runs([ended, going_on])


def test_its_studies_go_with_it(ledger):
    storage = optuna_storage(ledger.url)
    runs = [a_run(ledger, f"kernel_{n}") for n in range(11)]
    for run, [trial] in (runs[0], runs[10]):
        projection = Projection(storage, ledger, run, Kind.ESTIMATED, DOMAINS)
        projection.add(trial)
        assert projection.missed == {}
    ledger.remove_runs([1])
    assert [s.study_name.partition(" ·")[0] for s in optuna.get_all_study_summaries(optuna_storage(ledger.url))] == [
        "run 11"
    ]
    counted = rows(ledger, "trials", "trial_params", "trial_values", "study_directions", "study_system_attributes")
    assert counted["trials"] == counted["trial_values"] == counted["study_directions"] == 1
