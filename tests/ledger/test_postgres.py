"""The same ledger in a real PostgreSQL server, started on this machine for the tests."""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
import tempfile
from contextlib import closing
from datetime import timedelta
from pathlib import Path

import optuna
import pytest
from sqlalchemy import create_engine, text

from evoengine.errors import MachineError, NothingFound, UsageError
from evoengine.ledger.heartbeat import KILLED_AFTER_SECONDS
from evoengine.ledger.models import Base, HeartbeatRow
from evoengine.ledger.runs import KILLED, RUNNING
from evoengine.ledger.store import open_ledger
from evoengine.ledger.study import Projection, optuna_storage
from evoengine.records import Kind, Outcome
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


def find_binaries() -> Path | None:
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    on_path = shutil.which("initdb")
    return found[-1].parent if found else Path(on_path).parent if on_path else None


def unprivileged() -> dict[str, object]:
    """The server refuses to run as root; the package brings a user for it."""
    if os.geteuid():
        return {}
    try:
        user = pwd.getpwnam("postgres")
    except KeyError:
        pytest.skip("PostgreSQL does not run as root and there is no user postgres")
    return {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}


@pytest.fixture(scope="module")
def server():
    """URL of a new server's database, without its name."""
    pytest.importorskip("psycopg", reason="psycopg is not installed")
    binaries = find_binaries()
    if binaries is None:
        pytest.skip("there is no PostgreSQL server on this machine (initdb not found)")
    with closing(socket.create_server(("127.0.0.1", 0))) as free:
        port = free.getsockname()[1]
    account = unprivileged()
    with tempfile.TemporaryDirectory(prefix="evoengine-postgres-") as folder:
        if account:
            os.chown(folder, account["user"], account["group"])

        def call(program: str, *arguments: str) -> None:
            command = [binaries / program, "-D", f"{folder}/data", *arguments]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=folder, **account)

        call("initdb", "--username=evo", "--auth=trust", "--no-sync", "--encoding=UTF8", "--locale=C")
        options = f"-h 127.0.0.1 -p {port} -k {folder} -c fsync=off"
        call("pg_ctl", "--wait", "--log", f"{folder}/log", "-o", options, "start")
        try:
            yield f"postgresql://evo@127.0.0.1:{port}"
        finally:
            call("pg_ctl", "--wait", "--mode=immediate", "stop")


@pytest.fixture
def database(server, request):
    """URL of a new, empty database."""
    name = f"t{abs(hash(request.node.name))}"
    engine = create_engine(f"{server.replace('://', '+psycopg://')}/postgres", isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.execute(text(f"CREATE DATABASE {name}"))
    engine.dispose()
    return f"{server}/{name}"


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


def test_errors_that_are_not_numbers_fit_into_its_json(database):
    with open_ledger(database, create=True) as ledger:
        trial = ledger.add_candidate(start_run(ledger), PROBLEM, GPU, CONFIG, (), None)
        verdict = a_verdict(Outcome.INCORRECT, max_error=float("inf"))
        ledger.record_verdict(trial, verdict)
        assert ledger.candidate(trial).verdict == verdict


def test_what_an_interrupted_run_left_is_adopted(database):
    with open_ledger(database, create=True) as ledger:
        first = start_run(ledger)
        trial = ledger.add_candidate(first, PROBLEM, GPU, CONFIG, (), None)
        ledger.finish_run(first, "interrupted")
        second = start_run(ledger)
        assert [c.trial for c in ledger.unfinished(GPU, PROBLEM)] == [trial]
        assert ledger.adopt([trial], second) == [trial]
        assert ledger.adopt([trial], first) == []


def test_a_run_whose_beat_stopped_is_taken_over_and_its_late_writes_are_refused(database):
    with open_ledger(database, create=True) as paused, open_ledger(database, create=False) as other:
        first = start_run(paused)
        trial = paused.add_candidate(first, PROBLEM, GPU, CONFIG, (), None)
        start_run(other)
        assert other.unfinished(GPU, PROBLEM) == []  # the first one beats
        with other._writing() as session:
            session.get_one(HeartbeatRow, first).beat_at -= timedelta(seconds=KILLED_AFTER_SECONDS + 1)
        third = start_run(other)
        assert [r.status for r in other.runs()] == [KILLED, RUNNING, RUNNING]
        assert other.adopt([trial], third) == [trial]
        with pytest.raises(MachineError, match=f"took run {first} for killed"):
            paused.finish(trial, Outcome.CRASHED, "late", None, None)
        assert other.candidate(trial).outcome is None


def test_a_damaged_value_is_named(database):
    with open_ledger(database, create=True) as ledger:
        trial = add_ranked(ledger, start_run(ledger), a_figure(42.0))
        with ledger._writing() as session:
            session.execute(text("UPDATE measurements SET median_us = median_us + 1"))
        for read in (lambda: ledger.candidate(trial), lambda: ledger.best(PROBLEM, GPU, 1)):
            with pytest.raises(MachineError, match="median_us of row 1 of the table measurements is not what was"):
                read()


def test_the_study_lies_beside_the_ledger_and_migrations_equal_models(database, tmp_path, monkeypatch):
    monkeypatch.setattr("evoengine.ledger.study.default_database", lambda: f"sqlite:///{tmp_path}/evoengine.db")
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


def test_another_programs_database_is_refused(database):
    engine = create_engine(database.replace("://", "+psycopg://"))
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE invoices (id integer)"))
    engine.dispose()
    with pytest.raises(UsageError, match="another program's database .it holds invoices"):
        open_ledger(database, create=True)
