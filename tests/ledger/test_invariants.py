"""What must hold between the rows of a trial: `db check` names each trial that breaks it, and such a trial is not
exported, also where each row for itself is as it was written."""

from __future__ import annotations

import pytest
from sqlalchemy import text

from evoengine.errors import MachineError
from evoengine.ledger.check import INVARIANTS, require_proven, violated
from evoengine.ledger.store import Ledger
from evoengine.records import Outcome
from tests.support.ledger_examples import CONFIG, GPU, PROBLEM, a_figure, a_source, a_verdict, add_ranked, start_run
from tests.support.vouch import vouch

BREAKS = {
    "a correct trial passed the gate, case by case": [
        "UPDATE verdicts SET cases = '[]' WHERE candidate_id = 1",
        "UPDATE verdicts SET short_only = 1 WHERE candidate_id = 1",
        "UPDATE verdicts SET outcome = 'incorrect' WHERE candidate_id = 1",
        "UPDATE verdicts SET candidate_id = 2 WHERE candidate_id = 1",
    ],
    "a ranked trial has a figure of the kind that its outcome names": [
        "UPDATE measurements SET kind = 'measured' WHERE candidate_id = 1",
        "UPDATE candidates SET outcome = 'measured' WHERE id = 1",
    ],
    "an incorrect trial has a verdict that says so": ["UPDATE verdicts SET outcome = NULL WHERE candidate_id = 3"],
    "a trial whose end was taken over has the source of the trial that it names, which evaluated it": [
        "UPDATE candidates SET taken_from = 1 WHERE id = 2",
        "UPDATE candidates SET taken_from = 5 WHERE id = 6",
    ],
    "a trial that tries another one again has its configuration, and that one was cut short": [
        "UPDATE candidates SET retry_of = 1 WHERE id = 5",
    ],
    "a trial has the binary of its own source": ["UPDATE candidates SET binary_id = 2 WHERE id = 1"],
    "a duplicate comes after a trial of its run with the same source": [
        "UPDATE candidates SET source_sha256 = (SELECT source_sha256 FROM candidates WHERE id = 6) WHERE id = 4",
    ],
    "a trial with an outcome says when it ended": ["UPDATE candidates SET finished_at = NULL WHERE id = 1"],
}
"""invariant → changes, each of which breaks it"""


@pytest.fixture
def sound(ledger: Ledger) -> Ledger:
    """Trials 1 and 2 are ranked, 3 is incorrect, 4 a duplicate of 1, 5 took 1 over, and 6 is of a run of its own."""
    run = start_run(ledger)
    add_ranked(ledger, run, a_figure(10.0))
    add_ranked(ledger, run, a_figure(11.0), CONFIG | {"tile_m": 32}, "second")
    wrong = ledger.add_candidate(run, PROBLEM, GPU, CONFIG, (), None)
    double = ledger.add_candidate(run, PROBLEM, GPU, CONFIG, (), None, a_source("kernel"))
    ledger.finish(wrong, Outcome.INCORRECT, "off by 1", None, "emulator", (a_verdict(Outcome.INCORRECT),))
    ledger.finish(double, Outcome.DUPLICATE, "renders the same source as trial 1", None, None)
    add_ranked(ledger, run, a_figure(10.0), name="kernel")
    with ledger.database.writing() as session:
        session.execute(text("UPDATE candidates SET taken_from = 1 WHERE id = 5"))
        vouch(session.connection())
    add_ranked(ledger, start_run(ledger), a_figure(9.0), name="third")
    assert broken(ledger) == []
    return ledger


def broken(ledger: Ledger, trial: int | None = None) -> list[str]:
    with ledger.database.reading() as session:
        return list(violated(session, trial))


def test_each_invariant_is_broken_here():
    assert BREAKS.keys() == {invariant.holds for invariant in INVARIANTS}


@pytest.mark.parametrize(
    ("holds", "change"), [(holds, change) for holds, changes in BREAKS.items() for change in changes]
)
def test_a_trial_that_breaks_it_is_named_and_not_exported(sound, holds, change):
    with sound.database.writing() as session:
        assert session.execute(text(change)).rowcount == 1
        vouch(session.connection())
    found = [said for said in broken(sound) if said.endswith(holds)]
    assert len(found) == 1, broken(sound)
    trial = int(found[0].split()[1])
    assert broken(sound, trial) != []
    with pytest.raises(MachineError, match=f"trial {trial} violates an invariant"):
        require_proven(sound, trial)


def test_a_trial_whose_origin_is_not_there_is_named_unless_evoengine_removed_it(sound):
    with sound.database.writing() as session:
        session.execute(text("UPDATE candidates SET taken_from = 77 WHERE id = 5"))
        vouch(session.connection())
    assert broken(sound) == ["trial 5 reuses the outcome of trial 77, which is missing and was not removed"]


def test_a_removed_origin_is_no_fault(sound):
    later = start_run(sound)
    taken = add_ranked(sound, later, a_figure(10.0), name="kernel")
    with sound.database.writing() as session:
        session.execute(text(f"UPDATE candidates SET taken_from = 1 WHERE id = {taken}"))
        vouch(session.connection())
    for run in (1, 2, later):
        sound.finish_run(run, "all trials done")
    sound.remove_runs([1])
    assert broken(sound) == []
