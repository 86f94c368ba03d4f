"""A search waits for a database that is away; what is lost for good is told at once."""

from __future__ import annotations

import os
import sqlite3
import threading
from contextlib import closing

import pytest

from evoengine.errors import MachineError, UsageError
from evoengine.ledger import database
from evoengine.ledger import transactions as patience
from evoengine.ledger.store import open_ledger
from evoengine.ledger.transactions import Patience, Unavailable
from evoengine.records import Outcome
from tests.support.ledger_examples import CONFIG, GPU, PROBLEM, a_figure, a_verdict, start_run


@pytest.fixture
def busy(ledger, monkeypatch):
    """The ledger with a trial in flight, which another program locks until the event is set."""
    ledger.close()
    monkeypatch.setattr(database, "BUSY_SECONDS", 0.05)
    monkeypatch.setattr(patience, "RETRY_SECONDS", 0.02)
    with open_ledger(ledger.place, create=False) as waiting:
        trial = waiting.add_candidate(start_run(waiting), PROBLEM, GPU, CONFIG, (), None)
        locked, let_go = threading.Event(), threading.Event()

        def lock():
            with closing(sqlite3.connect(ledger.place, timeout=30)) as other:
                other.execute("BEGIN IMMEDIATE")
                locked.set()
                let_go.wait(60)
                other.rollback()

        thread = threading.Thread(target=lock)
        thread.start()
        locked.wait(60)
        yield waiting, trial, let_go
        let_go.set()
        thread.join()


def test_a_search_waits_for_who_locked_the_file_and_says_so_once(busy):
    ledger, trial, let_go = busy
    said = []

    def note(line):
        said.append(line)
        let_go.set()

    ledger.database.patience = Patience(note)
    ledger.finish(trial, Outcome.ESTIMATED, None, 0.25, "emulator", (a_verdict(),), a_figure(4.0))
    assert ledger.measurements(trial) == [a_figure(4.0)]
    waits, goes_on = said
    assert "has been locked by another writer" in waits and "this search waits, 10 minutes at most" in waits
    assert "the search goes on" in goes_on


def test_it_does_not_wait_for_ever(busy, monkeypatch):
    ledger, trial, _ = busy
    monkeypatch.setattr(patience, "WAIT_SECONDS", 0.2)
    ledger.database.patience = Patience(lambda line: None)
    with pytest.raises(Unavailable, match="has been locked by another writer"):
        ledger.record_verdict(trial, a_verdict())


def test_without_patience_who_asks_is_told_at_once(busy):
    ledger, trial, _ = busy
    with pytest.raises(UsageError, match="has been locked by another writer"):
        ledger.record_verdict(trial, a_verdict())


def test_nobody_waits_for_a_ledger_that_was_deleted(ledger):
    run, said = start_run(ledger), []
    ledger.database.patience = Patience(said.append)
    os.remove(ledger.place)
    with pytest.raises(MachineError, match="was deleted while it was in use"):
        ledger.add_candidate(run, PROBLEM, GPU, CONFIG, (), None)
    assert said == []


def test_a_server_that_takes_no_connection_is_unavailable_to_who_reads_and_writes():
    url = database.parse_url("postgresql://nobody@127.0.0.1:1/nothing")
    away = patience.Database(url, database.make_engine(url))
    with pytest.raises(Unavailable, match="cannot be used"), away.reading():
        pass
    with pytest.raises(Unavailable, match="cannot be used"), away.writing():
        pass
