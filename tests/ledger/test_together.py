"""What a search writes at one time is one transaction: whole or not there, and lost for no fault beside it."""

from __future__ import annotations

from contextlib import closing

import pytest

from evoengine.errors import MachineError
from evoengine.ledger import store
from evoengine.ledger.store import open_ledger
from evoengine.records import Outcome
from tests.support.ledger_examples import CONFIG, GPU, PROBLEM, a_figure, a_verdict, start_run


@pytest.fixture
def other(ledger):
    """The same ledger, as another process has it."""
    with closing(open_ledger(ledger.place, create=False)) as other:
        yield other


def add(ledger, run):
    return ledger.add_candidate(run, PROBLEM, GPU, CONFIG, (), None)


def finish(ledger, trial):
    ledger.finish(trial, Outcome.ESTIMATED, None, None, "emulator", (a_verdict(),), a_figure(4.0))


def outcomes(ledger):
    return [candidate.outcome for candidate in ledger.candidates()]


def test_it_is_read_here_at_once_and_elsewhere_when_it_is_whole(ledger, other):
    run = start_run(ledger)
    with ledger.database.together():
        finish(ledger, add(ledger, run))
        second = add(ledger, run)
        assert outcomes(ledger) == [Outcome.ESTIMATED, None]
        assert ledger.candidate(second).config == CONFIG
        assert outcomes(other) == []
    assert outcomes(other) == [Outcome.ESTIMATED, None]


def test_where_nothing_is_written_nobody_is_held_off(ledger, other):
    run = start_run(ledger)
    with ledger.database.together():
        assert outcomes(ledger) == []
        add(other, run)
        assert len(outcomes(ledger)) == 1


def test_what_fails_beside_it_takes_nothing_back(ledger, other):
    run = start_run(ledger)
    with pytest.raises(MachineError, match="no compiler"), ledger.database.together():
        finish(ledger, add(ledger, run))
        raise MachineError("no compiler")
    assert outcomes(other) == [Outcome.ESTIMATED]


def test_what_the_database_refuses_is_a_sentence(ledger, other):
    run = start_run(ledger)
    with pytest.raises(MachineError, match="cannot be used: FOREIGN KEY"), ledger.database.together():
        add(ledger, run)
        add(ledger, run + 1)
    assert outcomes(other) == []


def test_where_a_write_fails_none_of_it_is_there_and_later_ones_stand_alone(ledger, other, monkeypatch):
    run = start_run(ledger)
    before = add(ledger, run)
    finish(ledger, before)
    with monkeypatch.context() as broken, pytest.raises(KeyError), ledger.database.together():
        finish(ledger, add(ledger, run))
        broken.setattr(store, "end_claims", lambda *_: {}["gone"])
        finish(ledger, add(ledger, run))
    assert outcomes(other) == [Outcome.ESTIMATED]
    assert ledger.database.finished == [before]
    add(ledger, run)
    assert outcomes(other) == [Outcome.ESTIMATED, None]


def test_a_failed_write_that_nobody_speaks_of_ends_it_all_the_same(ledger, other, monkeypatch):
    run = start_run(ledger)
    with pytest.raises(MachineError, match="the same transaction"), ledger.database.together():
        with monkeypatch.context() as broken, pytest.raises(KeyError):
            broken.setattr(store, "update_standing", lambda *_: {}["gone"])
            finish(ledger, add(ledger, run))
        with pytest.raises(MachineError, match="the same transaction"):
            add(ledger, run)
    assert outcomes(other) == []
