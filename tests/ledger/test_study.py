"""The Optuna study beside the ledger shows what the ledger holds, to Optuna and to optuna-dashboard."""

from __future__ import annotations

import json
import shutil
import socket
import sqlite3
import subprocess
import sys
import urllib.request
from contextlib import closing
from pathlib import Path
from urllib.error import URLError

import optuna
import pytest
from optuna.artifacts import get_all_artifact_meta
from optuna.exceptions import StorageInternalError
from optuna.trial import TrialState
from optuna_dashboard._note import get_note_from_system_attrs
from sqlalchemy import Engine, event

from evoengine.errors import UsageError
from evoengine.ledger import database, runs
from evoengine.ledger.optuna import study as study_module
from evoengine.ledger.optuna.study import Projection, add_missing, artifact_store, optuna_storage, rebuild, study_note
from evoengine.ledger.store import open_ledger
from evoengine.lineage import Effect
from evoengine.records import KILLED, Kind, Outcome
from tests.support.ledger_examples import (
    CONFIG,
    DOMAINS,
    GPU,
    PROBLEM,
    a_figure,
    a_source,
    a_verdict,
    add_ranked,
    start_run,
)
from tests.support.waiting import wait_for

NAME = f"run 1 · {PROBLEM} · {GPU} · estimated TFLOPS"


def noted(study: optuna.Study, trial: int | None = None) -> str:
    """What optuna-dashboard shows as the note of the study or of one of its trials."""
    return get_note_from_system_attrs(study._storage.get_study_system_attrs(study._study_id), trial)["body"]


def add_rejected(ledger, run: int) -> int:
    trial = ledger.add_candidate(run, PROBLEM, GPU, CONFIG | {"tile_m": 128}, (1, 2), "crossover", a_source("wrong"))
    ledger.record_verdict(trial, a_verdict(Outcome.INCORRECT, max_error=0.5))
    ledger.finish(trial, Outcome.INCORRECT, "off by | 1", None, "emulator")
    return trial


@pytest.fixture(scope="module")
def empty_ledger_file(empty_ledger_file, tmp_path_factory):
    """With Optuna's tables, which take longer to make than all else that a test does."""
    path = Path(shutil.copy(empty_ledger_file, tmp_path_factory.mktemp("studies")))
    optuna_storage(f"sqlite:///{path}").engine.dispose()
    return path


@pytest.fixture
def new_file(empty_ledger_file, tmp_path):
    return lambda name: Path(shutil.copyfile(empty_ledger_file, tmp_path / name))


@pytest.fixture(scope="module")
def projected(empty_ledger_file, tmp_path_factory):
    """A ledger with a ranked and a rejected candidate, and their study."""
    path = tmp_path_factory.mktemp("projected") / "ledger.db"
    path.write_bytes(empty_ledger_file.read_bytes())
    with open_ledger(str(path), create=False) as ledger:
        run = start_run(ledger)
        trials = add_ranked(ledger, run, a_figure(42.5)), add_rejected(ledger, run)
        projection = Projection(optuna_storage(ledger.url), ledger, run, Kind.ESTIMATED, DOMAINS)
        for trial in trials:
            projection.add(trial)
        projection.complete()
        assert projection.missed == {}
        yield ledger


@pytest.fixture
def study(projected):
    return optuna.load_study(study_name=NAME, storage=projected.url)


# ── for Optuna ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_study_is_named_after_the_run_and_its_kind_of_figure(study):
    assert [direction.name for direction in study.directions] == ["MAXIMIZE"]
    assert study.metric_names == ["TFLOPS (estimated)"]
    assert len(study.trials) == 2


def test_a_ranked_candidate_is_a_complete_trial_with_its_figure_and_resources(study):
    trial = study.best_trial
    assert (trial.state, trial.value, trial.params) == (TrialState.COMPLETE, 42.5, CONFIG)
    assert {name: d.choices for name, d in trial.distributions.items()} == DOMAINS
    assert trial.user_attrs == {
        "trial": 1,
        "outcome": "estimated",
        "registers": 57,
        "spill_bytes": 12,
        "shared_bytes": 1024 + 4096,
        "occupancy": 0.25,
        "max_abs_error": 2.4e-4,
        "source_sha256": a_source().sha256,
        "operator": "sampler",
        "median_us": 25300.0,
        "kind": "estimated",
    }


def test_a_rejected_candidate_is_a_pruned_trial_without_a_value_and_with_its_reason(study):
    trial = study.trials[1]
    assert (trial.state, trial.value, trial.params["tile_m"]) == (TrialState.PRUNED, None, 128)
    shown = {name: trial.user_attrs[name] for name in ("outcome", "reason", "parents", "operator", "max_abs_error")}
    assert shown == {
        "outcome": "incorrect",
        "reason": "off by | 1",
        "parents": [1, 2],
        "operator": "crossover",
        "max_abs_error": 0.5,
    }


def test_a_trial_lasts_from_when_the_candidate_was_started_to_when_it_was_finished(projected, study):
    for trial in study.trials:
        candidate = projected.candidate(trial.user_attrs["trial"])
        assert trial.datetime_start.timestamp() == candidate.created_at.timestamp()
        assert trial.datetime_complete.timestamp() == candidate.finished_at.timestamp()


def test_the_source_is_an_artifact_of_its_trial(projected, study):
    [meta] = get_all_artifact_meta(study.trials[0], storage=study._storage)
    assert meta.filename == "trial-1.cu"
    with artifact_store(projected.url).open_reader(meta.artifact_id) as file:
        assert file.read().decode() == a_source().text


def test_figures_of_another_kind_are_not_in_the_study(ledger):
    run = start_run(ledger)
    trial = add_ranked(ledger, run, a_figure(42.0))
    ledger.record_measurement(trial, a_figure(4.0, Kind.MEASURED))
    ledger.finish(trial, Outcome.MEASURED, None, 0.25, "NVIDIA H200")
    only_estimated = add_ranked(ledger, run, a_figure(50.0))
    storage = optuna_storage(ledger.url)
    for kind, values in ((Kind.ESTIMATED, [42.0, 50.0]), (Kind.MEASURED, [4.0, None])):
        projection = rebuild(storage, ledger, run, kind, DOMAINS)
        trials = optuna.load_study(study_name=projection.name, storage=storage).trials
        assert [t.user_attrs["trial"] for t in trials] == [trial, only_estimated]
        assert [t.value for t in trials] == values


def test_a_suspect_figure_is_no_value(ledger):
    run = start_run(ledger)
    for outcome in (Outcome.SUSPECT, Outcome.ESTIMATED):
        trial = add_ranked(ledger, run, a_figure(9000.0, suspect="above the roofline"))
        ledger.finish(trial, outcome, None, None, None)
    name = rebuild(optuna_storage(ledger.url), ledger, run, Kind.ESTIMATED, DOMAINS).name
    assert [t.value for t in optuna.load_study(study_name=name, storage=ledger.url).trials] == [None, None]


def test_a_rebuilt_study_equals_the_one_written_along_the_way(projected, study):
    def told(trials):
        return [(t.state, t.value, t.params, t.distributions, t.user_attrs, t.datetime_start) for t in trials]

    before = told(study.trials)
    rebuild(optuna_storage(projected.url), projected, 1, Kind.ESTIMATED, DOMAINS)
    assert told(optuna.load_study(study_name=NAME, storage=projected.url).trials) == before


def test_a_trial_says_what_was_changed_and_what_it_gained(ledger):
    run = start_run(ledger)
    parent = add_ranked(ledger, run, a_figure(40.0))
    child = add_ranked(ledger, run, a_figure(50.0), {**CONFIG, "tile_m": 128}, parents=(parent,))
    projection = rebuild(optuna_storage(ledger.url), ledger, run, Kind.ESTIMATED, DOMAINS)
    study = optuna.load_study(study_name=projection.name, storage=ledger.url)
    assert study.trials[child - 1].user_attrs["changed"] == f"tile_m 64→128: +25.0% over #{parent}"
    assert "changed" not in study.trials[parent - 1].user_attrs


def test_the_studys_note_says_which_changes_paid(ledger):
    run = start_run(ledger)
    parent = add_ranked(ledger, run, a_figure(40.0))
    add_ranked(ledger, run, a_figure(50.0), {**CONFIG, "tile_m": 128}, parents=(parent,))
    projection = rebuild(optuna_storage(ledger.url), ledger, run, Kind.ESTIMATED, DOMAINS)
    body = noted(optuna.load_study(study_name=projection.name, storage=ledger.url))
    assert "| tile\\_m 64→128 | 1 | 1 | 1 | +25.0% |" in body


def test_a_note_of_very_many_changes_fits_one_attribute_and_says_how_many_it_leaves_out():
    many = [Effect(("a_knob_of_a_long_name", n, n + 1), 1, 1, 1, 1.5) for n in range(100)]
    body = study_note(many)
    assert len(body) <= 2045
    assert "80 more: evoengine report" in body


# ── what cannot be projected ────────────────────────────────────────────────────────────────────────────────────────


def test_what_cannot_be_projected_is_told_and_stops_nothing_and_a_rebuild_mends_it(ledger):
    run = start_run(ledger)
    good, strange = add_ranked(ledger, run, a_figure(1.0)), add_ranked(ledger, run, a_figure(2.0), {"tile_m": 48})
    storage = optuna_storage(ledger.url)
    projection = Projection(storage, ledger, run, Kind.ESTIMATED, DOMAINS)
    projection.add(strange)
    projection.add(good)
    projection.complete()
    assert list(projection.missed) == [strange]
    assert "48" in projection.missed[strange]
    repaired = rebuild(storage, ledger, run, Kind.ESTIMATED, DOMAINS | {"tile_m": (32, 48, 64, 128)})
    assert repaired.missed == {}
    assert len(optuna.load_study(study_name=repaired.name, storage=storage).trials) == 2


def test_a_storage_that_fails_stops_nothing(ledger):
    run = start_run(ledger)
    trial = add_ranked(ledger, run, a_figure(1.0))
    projection = Projection(optuna_storage(ledger.url), ledger, run, Kind.ESTIMATED, DOMAINS)
    with closing(sqlite3.connect(ledger.place)) as plain:
        plain.execute("DROP TABLE trial_user_attributes")
    projection.add(trial)
    assert list(projection.missed) == [trial]
    assert ledger.candidate(trial).outcome is Outcome.ESTIMATED


def test_a_storage_that_failed_is_not_asked_again(ledger, monkeypatch):
    run = start_run(ledger)
    trials = [add_ranked(ledger, run, a_figure(float(n)), name=f"kernel{n}") for n in range(3)]
    storage = optuna_storage(ledger.url)
    projection = Projection(storage, ledger, run, Kind.ESTIMATED, DOMAINS)
    tried = []

    def fail(*arguments):
        tried.append(arguments)
        raise StorageInternalError("the study cannot be written\nbecause")

    monkeypatch.setattr(study_module, "insert_trials", fail)
    monkeypatch.setattr(study_module, "BATCH_SECONDS", 0.0)
    for trial in trials:
        projection.add(trial)
    assert len(tried) == 1
    assert set(projection.missed.values()) == {"StorageInternalError: the study cannot be written because"}
    assert list(projection.missed) == trials


@pytest.mark.parametrize("written", [0, 2])
def test_the_next_search_adds_what_a_killed_one_left_out_of_its_study(ledger, written, monkeypatch):
    monkeypatch.setattr(study_module, "BATCH_SECONDS", 0.0)
    run = start_run(ledger)
    figures = [a_figure(float(n), Kind.ESTIMATED) for n in range(1, 5)]
    trials = [add_ranked(ledger, run, figure, name=f"kernel{n}") for n, figure in enumerate(figures)]
    storage = optuna_storage(ledger.url)
    projection = Projection(storage, ledger, run, Kind.ESTIMATED, DOMAINS)
    for trial in trials[:written]:
        projection.add(trial)
    assert add_missing(storage, ledger) == {}  # the search is running, and adds its own
    ledger.finish_run(run, KILLED)
    assert add_missing(storage, ledger) == {}
    study = optuna.load_study(study_name=projection.name, storage=storage)
    assert [t.user_attrs["trial"] for t in study.trials] == trials
    assert [t.values for t in study.trials] == [[f.tflops] for f in figures]
    add_missing(storage, ledger)
    assert len(study.trials) == 4


def test_a_knob_without_a_domain_stops_nothing(ledger):
    run = start_run(ledger)
    trial = add_ranked(ledger, run, a_figure(1.0), {"swizzle": 3})
    projection = Projection(optuna_storage(ledger.url), ledger, run, Kind.ESTIMATED, DOMAINS)
    projection.add(trial)
    assert "swizzle" in projection.missed[trial]


def test_a_database_locked_for_too_long_is_refused_at_the_start(ledger, monkeypatch):
    monkeypatch.setattr(database, "BUSY_SECONDS", 0.1)
    run, storage = start_run(ledger), optuna_storage(ledger.url)
    with closing(sqlite3.connect(ledger.place)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(UsageError, match="locked by another writer"):
            Projection(storage, ledger, run, Kind.ESTIMATED, DOMAINS)


def test_studies_of_another_optunas_schema_are_refused_with_the_remedy(ledger):
    optuna_storage(ledger.url)
    with closing(sqlite3.connect(ledger.place)) as plain:
        plain.execute("UPDATE alembic_version SET version_num = 'v2.6.0.a'")
        plain.commit()
    with pytest.raises(UsageError, match="older Optuna than .* run optuna storage upgrade"):
        optuna_storage(ledger.url)


def test_optunas_connections_wait_for_the_ledgers_writers(ledger):
    storage = optuna_storage(ledger.url)
    with storage.engine.connect() as connection:
        pragmas = ("journal_mode", "synchronous", "busy_timeout")
        found = [connection.exec_driver_sql(f"PRAGMA {pragma}").scalar() for pragma in pragmas]
    assert found == ["wal", 1, 30000]


def test_projecting_a_trial_takes_no_more_queries_the_more_there_are(ledger, monkeypatch):
    monkeypatch.setattr(runs, "BEAT_SECONDS", 600.0)  # whose queries are none of these
    run = start_run(ledger)
    projection = Projection(optuna_storage(ledger.url), ledger, run, Kind.ESTIMATED, DOMAINS)
    queries: list[str] = []
    counts = []

    def count(connection, cursor, statement, *rest):
        queries.append(statement)

    event.listen(Engine, "before_cursor_execute", count)
    try:
        for i in range(12):
            trial = add_ranked(ledger, run, a_figure(1.0), name=f"kernel_{i}")
            queries.clear()
            projection.add(trial)
            counts.append(len(queries))
    finally:
        event.remove(Engine, "before_cursor_execute", count)
    assert counts[1] == counts[-1]


# ── for optuna-dashboard ────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def dashboard(projected):
    """The real server on a free port of this machine; gives a function that fetches a path."""
    with closing(socket.create_server(("127.0.0.1", 0))) as free:
        port = free.getsockname()[1]
    program = Path(sys.executable).with_name("optuna-dashboard")
    folder = Path(projected.place).parent / "artifacts"
    command = [program, projected.url, "--host", "127.0.0.1", "--port", str(port), "--artifact-dir", folder]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def fetch(path: str) -> bytes:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=30) as answer:
            return answer.read()

    try:
        wait_until_it_answers(server, fetch)
        yield fetch
    finally:
        server.terminate()
        server.wait()


def wait_until_it_answers(server: subprocess.Popen, fetch) -> None:
    def answers() -> bool:
        assert server.poll() is None, "optuna-dashboard ended before it answered"
        try:
            return bool(fetch("/api/meta"))
        except URLError:
            return False

    wait_for(answers)


@pytest.fixture
def shown(dashboard):
    """The study as the dashboard's web API gives it."""
    [summary] = json.loads(dashboard("/api/studies"))["study_summaries"]
    assert summary["study_name"] == NAME
    return json.loads(dashboard(f"/api/studies/{summary['study_id']}?after=0")) | {"id": summary["study_id"]}


def test_the_dashboard_shows_parameters_value_registers_spills_and_outcome(shown):
    ranked, rejected = shown["trials"]
    assert (ranked["state"], ranked["values"]) == ("Complete", [42.5])
    assert {p["name"]: p["param_external_value"] for p in ranked["params"]} == {k: str(v) for k, v in CONFIG.items()}
    attributes = {a["key"]: a["value"] for a in ranked["user_attrs"]}
    names = ("trial", "outcome", "registers", "spill_bytes", "kind")
    assert [attributes[name] for name in names] == ["1", "estimated", "57", "12", "estimated"]
    assert rejected["state"] == "Pruned"
    assert "off by | 1" in {a["value"] for a in rejected["user_attrs"]}


def test_the_dashboard_shows_the_objective_by_its_name(shown):
    assert shown["objective_names"] == ["TFLOPS (estimated)"]


def test_the_dashboard_serves_the_source(dashboard, shown):
    trial = shown["trials"][0]
    [artifact] = trial["artifacts"]
    served = dashboard(f"/artifacts/{shown['id']}/{trial['trial_id']}/{artifact['artifact_id']}")
    assert served.decode() == a_source().text


def test_studies_that_a_killed_process_left_half_made_are_made_whole(tmp_path):
    """Optuna makes its tables one by one, and says last of which schema they are."""
    path = str(tmp_path / "evo.db")
    with open_ledger(path, create=True) as ledger:
        optuna_storage(ledger.url)
    for left_out in (["alembic_version"], ["alembic_version", "version_info"], ["alembic_version", "trial_params"]):
        with closing(sqlite3.connect(path)) as connection:
            for name in left_out:
                connection.execute(f"DROP TABLE {name}")
        with open_ledger(path, create=False) as ledger:
            assert optuna_storage(ledger.url).get_all_studies() == []
            run = start_run(ledger)
            Projection(optuna_storage(ledger.url), ledger, run, Kind.MEASURED, DOMAINS).add(
                add_ranked(ledger, run, a_figure(1.0))
            )
            ledger.finish_run(run, "all trials done")
            ledger.remove_runs([run])
