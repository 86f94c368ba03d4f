"""The same ledger in a real PostgreSQL server, started on this machine for the tests."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections import Counter
from dataclasses import replace
from datetime import timedelta
from functools import partial

import optuna
import psycopg
import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.dialects.postgresql.psycopg import PGDialect_psycopg

from benchmarks.instant import microseconds, number_of
from benchmarks.ledger_scale import make_ledger
from benchmarks.server_ledger import copy_ledger
from evoengine.errors import MachineError, NothingFound, UsageError
from evoengine.ledger import runs
from evoengine.ledger import transactions as commits
from evoengine.ledger.check import find_faults
from evoengine.ledger.database import parse_url
from evoengine.ledger.optuna.study import Projection, optuna_storage
from evoengine.ledger.read import Last, Wanted
from evoengine.ledger.runs import KILLED_AFTER_SECONDS
from evoengine.ledger.store import open_ledger
from evoengine.ledger.tables import Base, HeartbeatRow
from evoengine.ledger.transactions import Commits, Patience, Unavailable, was_made
from evoengine.publish.report.overview import read_effects, read_overview
from evoengine.records import KILLED, PENDING, RUNNING, Kind, Outcome
from evoengine.space.expression import Where
from evoengine.tuning.comparison import compare_runs
from evoengine.tuning.report import write_report
from evoengine.views.trials import trial_json
from tests.ledger.frozen.freeze import MEASURED, SLOWER
from tests.ledger.ledger_schema import fill_with_frozen, made_both_ways
from tests.ledger.views import (
    check_documented_queries,
    check_figures_and_cases,
    check_list,
    check_ranking,
    check_runs,
    fill,
)
from tests.support.ledger_examples import (
    CONFIG,
    DOMAINS,
    GPU,
    PROBLEM,
    a_binary,
    a_figure,
    a_source,
    a_verdict,
    add_ranked,
    differences,
    start_run,
)
from tests.support.postgres import Missing, running_server
from tests.support.waiting import wait_for


@pytest.fixture(scope="module")
def server():
    pytest.importorskip("psycopg", reason="psycopg is not installed")
    try:
        with running_server() as server:
            yield server
    except Missing as missing:
        pytest.skip(str(missing))


@pytest.fixture
def database(server, request):
    """URL of a new, empty database."""
    return server.new_database(f"t{abs(hash(request.node.name))}")


def test_a_ledger_in_postgresql_gives_back_what_was_written(database):
    with pytest.raises(NothingFound, match="no ledger at"):
        open_ledger(database, create=False)
    with open_ledger(database, create=True) as ledger:
        run = start_run(ledger, seed=2**40)
        trial = add_ranked(ledger, run, a_figure(42.0))
        measured = add_ranked(ledger, run, a_figure(4.0, Kind.MEASURED), name="second")
        ledger.finish_run(run, "all trials done")
    with open_ledger(database, create=False) as ledger:
        candidate = ledger.candidate(trial, with_cubin=True)
        assert (candidate.source, candidate.binary) == (a_source(), a_binary())
        assert (candidate.verdict, candidate.measurement) == (a_verdict(), a_figure(42.0))
        assert (candidate.config, candidate.outcome) == (CONFIG, Outcome.ESTIMATED)
        assert [c.trial for c in ledger.best(PROBLEM, GPU, 10)] == [measured]
        assert ledger.find_binary(a_source().sha256, a_binary().options, "sm_90a", "NVRTC 13.0") == a_binary()
        [described] = ledger.runs()
        assert (described.status, described.seed) == ("all trials done", 2**40)
        assert described.finished_at >= described.started_at


def test_a_new_ledger_has_the_schema_that_an_upgrade_makes(database):
    at_once, migrated = made_both_ways(database)
    assert at_once == migrated


@pytest.mark.parametrize("revision", ["0001", "0008"])
def test_a_frozen_ledger_on_a_server_is_upgraded_and_keeps_what_it_holds(database, revision):
    engine = create_engine(parse_url(database))
    fill_with_frozen(engine, revision)
    engine.dispose()
    with open_ledger(database, create=False) as ledger:
        assert differences(ledger, Base.metadata) == [] and find_faults(ledger, lambda stage: None) == []
        measured = ledger.candidate(MEASURED)
        assert [c.trial for c in ledger.best(measured.problem, "h100", 9)] == [MEASURED, SLOWER]
        assert (measured.measurement.median_us, measured.source.launch.block_yz) == (5.0, (1, 1))


def test_errors_that_are_not_numbers_fit_into_its_json(database):
    with open_ledger(database, create=True) as ledger:
        trial = ledger.add_candidate(start_run(ledger), PROBLEM, GPU, CONFIG, (), None)
        verdict = a_verdict(Outcome.INCORRECT, max_error=float("inf"))
        ledger.record_verdict(trial, verdict)
        assert ledger.candidate(trial).verdict == verdict


def test_what_an_interrupted_run_left_is_tried_again(database):
    with open_ledger(database, create=True) as ledger:
        run = start_run(ledger)
        trial = ledger.add_candidate(run, PROBLEM, GPU, CONFIG, (), None)
        ledger.finish_run(run, "interrupted")
        assert ledger.left_over(run) == {trial: 0}
        assert ledger.resume_run(run, 60, None) is not None
        assert ledger.resume_run(run, 60, None) is None


def test_a_run_whose_beat_stopped_is_taken_over_and_its_late_writes_are_refused(database, monkeypatch):
    monkeypatch.setattr(runs, "LOOK_AGAIN_SECONDS", 0.0)
    with open_ledger(database, create=True) as paused, open_ledger(database, create=False) as other:
        first = start_run(paused)
        trial = paused.add_candidate(first, PROBLEM, GPU, CONFIG, (), None)
        start_run(other)
        assert other.candidate(trial).outcome is None  # the first one beats
        with other.database.writing() as session:
            session.get_one(HeartbeatRow, first).beat_at -= timedelta(seconds=KILLED_AFTER_SECONDS + 1)
        start_run(other)
        assert [r.status for r in other.runs()] == [KILLED, RUNNING, RUNNING]
        with pytest.raises(MachineError, match=f"considered run {first} killed"):
            paused.finish(trial, Outcome.CRASHED, "late", None, None)
        assert other.candidate(trial).outcome is Outcome.KILLED


def test_a_damaged_value_is_named(database):
    with open_ledger(database, create=True) as ledger:
        trial = add_ranked(ledger, start_run(ledger), a_figure(42.0))
        with ledger.database.writing() as session:
            session.execute(text("UPDATE measurements SET median_us = median_us + 1"))
        for read in (lambda: ledger.candidate(trial), lambda: ledger.best(PROBLEM, GPU, 1)):
            with pytest.raises(MachineError, match="row 1 of the table measurements is not what was"):
                read()


def test_the_study_lies_beside_the_ledger_and_tables_equal_models(database, tmp_path, monkeypatch):
    monkeypatch.setattr("evoengine.ledger.optuna.study.default_database", lambda: f"sqlite:///{tmp_path}/evoengine.db")
    with open_ledger(database, create=True) as ledger:
        run = start_run(ledger)
        trial = add_ranked(ledger, run, a_figure(42.0))
        storage = optuna_storage(ledger.url)
        projection = Projection(storage, ledger, run, Kind.ESTIMATED, DOMAINS)
        projection.add(trial)
        assert projection.missed == {}
        assert optuna.load_study(study_name=projection.name, storage=storage).best_value == 42.0
        assert differences(ledger, Base.metadata) == []
        storage.engine.dispose()


def test_finals_count_as_they_are_recorded(database):
    first, second = ({"final_of_run": 1.0, "place": place} for place in (1.0, 2.0))
    with open_ledger(database, create=True) as ledger:
        run = start_run(ledger)
        alone, slow, fast = (
            add_ranked(ledger, run, a_figure(tflops, Kind.MEASURED), name=str(tflops)) for tflops in (9.0, 7.0, 8.0)
        )
        for trial, terms in ((slow, first), (fast, second)):
            ledger.record_measurement(trial, replace(a_figure(8.5, Kind.MEASURED), terms=terms))
            check_ranking(ledger)
        assert [c.trial for c in ledger.best(PROBLEM, GPU, 3)] == [slow, fast, alone]


def test_views_show_what_commands_show(database):
    with open_ledger(database, create=True) as ledger:
        fill(ledger, 2)
        check_ranking(ledger)
        check_list(ledger)
        check_runs(ledger)
        check_figures_and_cases(ledger)
        check_documented_queries(ledger)


def test_the_last_trials_are_found_by_what_they_are_and_by_their_knobs(database):
    with open_ledger(database, create=True) as ledger:
        fill(ledger, 2)
        trials = list(ledger.trials())
        matching = [t.trial for t in trials if t.config["family"] == "mma" and t.outcome is None]
        wanted = Wanted(gpu=GPU, outcomes=(PENDING,), families=("mma",))
        assert ledger.lists.matching(wanted) == matching != []
        last = ledger.lists.last_matching(Wanted(condition=Where("vector >= 2")), 3)
        assert last == Last([t.trial for t in trials if t.config["vector"] >= 2][-3:], None)
        assert ledger.lists.last_matching(Wanted(), 5).earlier == len(trials) - 5
        assert ledger.lists.missing_knobs(Wanted(), ("vector", "vectr")) == (["vectr"], ["family", "n", "vector"])
        outcomes, families = ledger.lists.endings(Wanted())
        assert (sum(outcomes.values()), families) == (len(trials), ["mma", "wmma"])
        assert [t.trial for t in ledger.lists.listed(matching)] == matching


def test_runs_are_compared_and_a_page_of_charts_is_written(database, tmp_path):
    with open_ledger(database, create=True) as ledger:
        fill(ledger, 2)
        trials = list(ledger.trials())
        found = compare_runs(ledger, 1, 2)
        assert sum(found.trials) == len(trials) and found.comparable and found.standings
        overview = read_overview(ledger, PROBLEM, GPU)
        assert overview.total == sum(overview.outcomes.values()) == len(trials) == len(overview.trials)
        assert overview.finalists and set(overview.cases) == {"ragged"}
        assert read_effects(ledger, PROBLEM, GPU).ranked == sum(bool(t.outcome and t.outcome.ranked) for t in trials)
    write_report(tmp_path / "report.html", db=database)
    assert "<h2>Finalists</h2>" in (tmp_path / "report.html").read_text()


def test_another_programs_database_is_refused(database):
    engine = create_engine(database.replace("://", "+psycopg://"))
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE invoices (id integer)"))
    engine.dispose()
    with pytest.raises(UsageError, match="another program's database .it holds invoices"):
        open_ledger(database, create=True)


# ── a server that goes away ─────────────────────────────────────────────────────────────────────────────────────────


def test_a_search_waits_for_a_server_that_restarts_and_says_so_once(server, database):
    said = []
    with open_ledger(database, create=True) as ledger:
        run = start_run(ledger)
        first = add_ranked(ledger, run, a_figure(1.0), name="before")
        ledger.database.patience = Patience(said.append)
        server.stop()
        back = threading.Timer(1.5, server.start)
        back.start()
        second = add_ranked(ledger, run, a_figure(2.0), name="after")
        back.join()
        assert [c.trial for c in ledger.best(PROBLEM, GPU, 9)] == [second, first]
        assert len(ledger.measurements(second)) == 1
    waits, goes_on = said
    assert "this search waits, 10 minutes at most" in waits and goes_on.startswith("the ledger is back after")


def test_who_has_no_patience_is_told_at_once(server, database):
    with open_ledger(database, create=True) as ledger:
        run = start_run(ledger)
        server.stop()
        try:
            with pytest.raises(UsageError, match="cannot be used: .*check the server"):
                ledger.finish_run(run, "ended")
        finally:
            server.start()


@pytest.mark.parametrize("made", [True, False])
def test_a_transaction_whose_connection_is_lost_while_it_is_committed_is_made_once(server, database, monkeypatch, made):
    """The connection is lost before or after the server has got the word."""
    with open_ledger(database, create=True) as ledger:
        ledger.database.patience = Patience(lambda line: None)
        trial = ledger.add_candidate(start_run(ledger), PROBLEM, GPU, CONFIG, (), None)
        commit, lost = PGDialect_psycopg.do_commit, []

        def lose(self, connection):
            if lost:
                return commit(self, connection)
            lost.append(True)
            if made:
                connection.commit()
            connection.dbapi_connection.close()
            raise psycopg.OperationalError("the connection is lost")

        monkeypatch.setattr(PGDialect_psycopg, "do_commit", lose)
        ledger.record_measurement(trial, a_figure(3.0))
        assert lost and len(ledger.measurements(trial)) == 1


SEARCH = [sys.executable, "-m", "benchmarks.instant"]


@pytest.mark.exhaustive
def test_two_coordinators_of_which_one_is_killed_while_the_server_restarts_evaluate_each_kernel_once(
    server, database, tmp_path
):
    """Both search the same 60 configurations. What the killed one had in flight is tried again by the other."""
    log = tmp_path / "log"
    log.touch()
    command = [*SEARCH, database, "--size", "60", "--trials", "60", "--milliseconds", "40", "--log", str(log)]

    def evaluated():
        return [int(line) for line in log.read_text().split()]

    start = partial(subprocess.Popen, stdout=subprocess.PIPE, text=True)
    with start([*command, "--seed", "1"]) as first, start([*command, "--seed", "2"]) as second:
        wait_for(lambda: len(evaluated()) >= 15)
        first.kill()
        server.stop()
        server.start()
        said = second.communicate()[0]
    assert second.returncode == 0, said
    assert "the ledger is back after" in said and "60 trials" in said.splitlines()[-1]
    again = subprocess.run([*command, "--seed", "1"], capture_output=True, text=True)
    assert again.returncode == 0 and "resuming run" in again.stdout, (again.stdout, again.stderr)
    with open_ledger(database, create=False) as ledger:
        runs = {run.id: run.seed for run in ledger.runs()}
        assert sorted(runs.values()) == [1, 2] and {run.status for run in ledger.runs()} == {"all trials done"}
        for run in runs:
            judged = [c for c in ledger.candidates(run=run) if c.outcome.judged]
            assert {c.outcome for c in judged} == {Outcome.ESTIMATED}
            assert sorted(number_of(c.config) for c in judged) == list(range(60))
            assert all(c.measurement.median_us == microseconds(number_of(c.config)) for c in judged)
        own = [c for c in ledger.candidates() if c.outcome.judged and c.taken_from is None]
        assert sorted(number_of(c.config) for c in own) == list(range(60))
        killed = [number_of(c.config) for c in ledger.candidates() if c.outcome is Outcome.KILLED]
        twice = sorted(number for number, times in Counter(evaluated()).items() if times > 1)
        assert set(twice) <= set(killed) and max(Counter(evaluated()).values()) <= 2


def test_a_ledger_of_a_file_is_read_the_same_after_it_was_copied_to_a_server(database, tmp_path):
    make_ledger(tmp_path / "made.db", 60)
    copy_ledger(tmp_path / "made.db", database)
    with open_ledger(str(tmp_path / "made.db"), create=False) as file, open_ledger(database, create=False) as server:
        assert [trial_json(c) for c in server.candidates()] == [trial_json(c) for c in file.candidates()]
        assert find_faults(server, lambda stage: None) == []
        run = start_run(server)
        assert server.add_candidate(run, PROBLEM, GPU, CONFIG, (), None) == 61


# ── a connection that is lost while a transaction is committed ──────────────────────────────────────────────────────


@pytest.fixture
def ledger(database):
    with open_ledger(database, create=True) as ledger:
        yield ledger


def noted(ledger, own):
    with ledger.database.engine.begin() as connection:
        return own.note(connection)


def asked(ledger, mark):
    with ledger.database.engine.begin() as connection:
        return was_made(connection, mark)


def test_one_that_was_committed_was_made_and_one_that_was_taken_back_was_not(ledger):
    own = Commits()
    first = noted(ledger, own)
    assert asked(ledger, first)
    with ledger.database.engine.connect() as connection:
        second = own.note(connection)
        connection.rollback()
    assert asked(ledger, second) is False and asked(ledger, first)
    third = noted(ledger, own)
    assert asked(ledger, third) and not asked(ledger, second)


def test_one_that_was_lost_was_not_made_whatever_others_commit_after_it(ledger):
    own, other = Commits(), Commits()
    with ledger.database.engine.connect() as connection:
        mark = own.note(connection)
        process = connection.scalar(text("SELECT pg_backend_pid()"))
        with ledger.database.engine.connect() as killer:
            killer.execute(text("SELECT pg_terminate_backend(:process)"), {"process": process})
        connection.invalidate()
    for _ in range(3):
        noted(ledger, other)
    assert asked(ledger, mark) is False


def test_one_that_is_still_under_way_is_neither_yet_and_a_search_waits_for_it(ledger, monkeypatch):
    monkeypatch.setattr(commits, "_WAIT", text("SET LOCAL lock_timeout = '200ms'"))
    own = Commits()
    with ledger.database.engine.connect() as connection:
        mark = own.note(connection)
        assert asked(ledger, mark) is None
        with pytest.raises(Unavailable, match="is still at the last transaction"):
            ledger.database._was_made(mark)
        connection.commit()
    assert ledger.database._was_made(mark) is True


def test_marks_of_a_week_ago_go_when_another_writer_comes(ledger):
    old, new = Commits(), Commits()
    noted(ledger, old)
    with ledger.database.engine.begin() as connection:
        connection.execute(text("UPDATE commits SET at = at - INTERVAL '8 days'"))
    mark = noted(ledger, new)
    with ledger.database.engine.connect() as connection:
        assert connection.scalars(text("SELECT writer FROM commits")).all() == [mark[0]]


def test_a_deleted_row_is_named(database):
    with open_ledger(database, create=True) as ledger:
        add_ranked(ledger, start_run(ledger), a_figure(42.0))
        assert find_faults(ledger, lambda stage: None) == []
        with ledger.database.writing() as session:
            session.execute(text("DELETE FROM verdicts"))
        fault, *_ = find_faults(ledger, lambda stage: None)
        assert fault.what == "row 1 of the table verdicts was deleted: the chain of run 1 lists it"
