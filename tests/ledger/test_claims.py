"""Each key is evaluated by one trial; others wait for it, or take over what it came to."""

from __future__ import annotations

import sys
from contextlib import closing

import pytest

from evoengine.cli.main import main
from evoengine.ledger import runs
from evoengine.ledger.check import find_faults, repair_ledger
from evoengine.ledger.claims import Claim
from evoengine.ledger.store import open_ledger
from evoengine.records import Kind, Outcome
from evoengine.views.trials import trial_json
from tests.ledger.test_processes import stand_still
from tests.support.ledger_examples import CONFIG, GPU, PROBLEM, a_binary, a_figure, a_source, a_verdict, start_run

KEY = "4" * 64


def add(ledger, run, again=False):
    return ledger.add_claiming((run, PROBLEM, GPU, CONFIG, (), None, a_source(), None), KEY, again)


def evaluate(ledger, trial, figure=None, outcome=Outcome.ESTIMATED, reason=None):
    ledger.record_binary(trial, a_source(), a_binary())
    ledger.finish(trial, outcome, reason, 0.25, "emulator", (a_verdict(),), figure)


@pytest.fixture
def known(ledger):
    """A run and a trial that has been evaluated."""
    run = start_run(ledger)
    trial, claim = add(ledger, run)
    assert claim == Claim(trial, False)
    evaluate(ledger, trial, a_figure(4.0))
    return run, trial


def test_what_is_known_is_taken_over_with_the_times_it_was_taken_at(ledger, known):
    _, first = known
    trial, claim = add(ledger, start_run(ledger))
    assert claim == Claim(first, True)
    assert ledger.claims.take_over(KEY, first, trial, timed=False) is Outcome.ESTIMATED
    one, other = ledger.candidate(first), ledger.candidate(trial)
    assert (other.measurement, other.verdict, other.binary) == (one.measurement, one.verdict, one.binary)
    assert (other.measurement.taken_at, other.verdict.taken_at) == (one.measurement.taken_at, one.verdict.taken_at)
    assert (other.taken_from, other.occupancy, other.device) == (first, 0.25, "emulator")
    assert trial_json(other)["taken_from"] == first and trial_json(one)["taken_from"] is None
    assert len(ledger.best(PROBLEM, GPU, 9)) == 1  # one kernel, whoever found it


def test_what_another_search_has_under_way_is_awaited(ledger):
    first, _ = add(ledger, start_run(ledger))
    with closing(open_ledger(ledger.place, create=False)) as other:
        trial, claim = add(other, start_run(other))
        assert claim == Claim(first, False)
        assert other.claims.decided([first]) == set()
        evaluate(ledger, first, a_figure(4.0))
        assert other.claims.decided([first]) == {first}
        assert other.claims.claim(KEY, trial) == Claim(first, True)


def test_the_claim_of_a_search_that_was_killed_is_the_next_ones_and_its_late_result_is_refused(ledger, monkeypatch):
    monkeypatch.setattr(runs, "LOOK_AGAIN_SECONDS", 0.0)
    run = start_run(ledger)
    first, _ = add(ledger, run)
    with closing(open_ledger(ledger.place, create=False)) as other:
        trial, _ = add(other, start_run(other))
        stand_still(ledger.place, run)
        assert other.look_for_killed() == []
        assert other.claims.decided([first]) == {first}
        assert other.claims.claim(KEY, trial) == Claim(trial, False)
        with pytest.raises(Exception, match="considered run 1 killed"):
            evaluate(ledger, first, a_figure(1.0))
        evaluate(other, trial, a_figure(4.0))
        assert add(other, start_run(other))[1] == Claim(trial, True)


@pytest.mark.parametrize("outcome", [Outcome.INCORRECT, Outcome.UNCOMPILABLE, Outcome.CRASHED, Outcome.HUNG])
def test_rejections_are_known_too(ledger, outcome):
    first, _ = add(ledger, start_run(ledger))
    ledger.finish(first, outcome, "why", None, "emulator", (a_verdict(outcome),))
    trial, claim = add(ledger, start_run(ledger))
    assert claim.known and ledger.claims.take_over(KEY, first, trial, timed=False) is outcome
    assert ledger.candidate(trial).reason == "why"


def test_what_was_interrupted_is_evaluated_by_who_comes_next(ledger):
    run = start_run(ledger)
    add(ledger, run)
    ledger.finish_run(run, "interrupted")
    trial, claim = add(ledger, start_run(ledger))
    assert claim == Claim(trial, False)


def test_again_takes_the_claim_of_what_is_known(ledger, known):
    trial, claim = add(ledger, known[0], again=True)
    assert claim == Claim(trial, False)
    evaluate(ledger, trial, a_figure(5.0))
    assert add(ledger, known[0])[1] == Claim(trial, True)


def test_a_figure_that_a_gpu_measured_later_is_none_of_what_the_emulator_knows(ledger, known):
    run, first = known
    ledger.finish(first, Outcome.MEASURED, None, 0.25, "NVIDIA H200", (), a_figure(9.0, Kind.MEASURED))
    trial, claim = add(ledger, run)
    assert claim.known and ledger.claims.take_over(KEY, first, trial, timed=False) is Outcome.ESTIMATED
    assert ledger.measurements(trial) == [a_figure(4.0)]


def test_a_figure_that_came_later_is_not_of_the_evaluation_that_was_claimed(ledger):
    """Of another driver, or of finals."""
    run = start_run(ledger)
    first, _ = add(ledger, run)
    evaluate(ledger, first, a_figure(4.0, Kind.MEASURED), Outcome.MEASURED)
    ledger.record_measurement(first, a_figure(5.0, Kind.MEASURED))
    trial, _ = add(ledger, run)
    assert ledger.claims.take_over(KEY, first, trial, timed=True) is Outcome.MEASURED
    assert ledger.measurements(trial) == [a_figure(4.0, Kind.MEASURED)]


def test_what_was_found_wrong_later_is_wrong(ledger, known):
    run, first = known
    ledger.record_verdict(first, a_verdict(Outcome.INCORRECT))
    ledger.finish(first, Outcome.INCORRECT, "its machine code is wrong", 0.25, "emulator")
    trial, _ = add(ledger, run)
    assert ledger.claims.take_over(KEY, first, trial, timed=False) is Outcome.INCORRECT
    assert not ledger.candidate(trial).verdict.correct


def test_nothing_is_known_of_a_run_that_was_removed(ledger, known):
    ledger.finish_run(known[0], "all trials done")
    ledger.remove_runs([known[0]])
    trial, claim = add(ledger, start_run(ledger))
    assert claim == Claim(trial, False)


DIED = "the worker process died (SIGKILL)"
ALONE = {
    "deaths": [{"how": "SIGKILL", "alone": alone, "seconds": 0.1, "oom_kills": 0} for alone in (False, True, True)]
}


def crash(ledger, trial, evidence=None, outcome=Outcome.CRASHED, reason=DIED):
    ledger.finish(trial, outcome, reason, None, None, evidence=evidence)


def test_how_a_trial_ended_whose_worker_died_is_taken_over_by_nobody(ledger):
    first, _ = add(ledger, start_run(ledger))
    crash(ledger, first, ALONE)
    assert ledger.candidate(first).evidence == ALONE
    trial, claim = add(ledger, start_run(ledger))
    assert claim == Claim(trial, False)
    crash(ledger, trial, {"limit": "180 s"}, Outcome.HUNG, "no end after 180 s")
    assert add(ledger, start_run(ledger))[1] == Claim(trial, True)  # a limit says something of the kernel


def test_what_three_kills_of_its_search_condemned_is_taken_back_and_evaluated_again(ledger):
    """As evoengine up to 0.1.0 wrote it."""
    condemned, _ = add(ledger, start_run(ledger))
    reason = "its search was killed 3 times while it was under way"
    deaths = [{"how": "its search was killed", "alone": n > 0} for n in range(3)]
    ledger.finish(condemned, Outcome.CRASHED, reason, None, None, evidence={"deaths": deaths})
    (fault,) = find_faults(ledger, lambda stage: None)
    assert fault.what == f"trial {condemned}: rejected because one process died, whoever had ended it"
    repair_ledger(ledger, lambda line: None)
    assert find_faults(ledger, lambda stage: None) == []
    assert (ledger.candidate(condemned).outcome, ledger.candidate(condemned).reason) == (Outcome.KILLED, reason)
    trial, claim = add(ledger, start_run(ledger))
    assert claim == Claim(trial, False)


def test_what_one_death_condemned_is_found_taken_back_and_evaluated_again(ledger, known):
    """As evoengine up to 0.1.0 wrote it, with those that took it over."""
    _, sound = known
    other = "5" * 64

    def claim_other():
        new = start_run(ledger), PROBLEM, GPU, CONFIG, (), None, a_source("k"), None
        return ledger.add_claiming(new, other, False)

    first, _ = claim_other()
    crash(ledger, first, outcome=Outcome.UNCOMPILABLE)
    second, claim = claim_other()
    assert claim == Claim(first, True)
    ledger.claims.take_over(other, first, second, timed=False)
    (fault,) = find_faults(ledger, lambda stage: None)
    assert (fault.what, fault.repairable) == (
        f"trials {first} to {second}: rejected because one process died, whoever had ended it", True,
    )  # fmt: skip
    repair_ledger(ledger, lambda line: None)
    assert find_faults(ledger, lambda stage: None) == []
    assert [ledger.candidate(t).outcome for t in (first, second)] == [Outcome.KILLED] * 2
    assert ledger.candidate(first).reason == f"{DIED}: it did not die twice with nothing beside it"
    assert ledger.candidate(sound).outcome is Outcome.ESTIMATED
    trial, claim = claim_other()
    assert claim == Claim(trial, False)


def test_a_claim_is_revoked_by_either_trial_that_has_the_end(ledger, known, evoengine_in_process):
    _, first = known
    second, _ = add(ledger, start_run(ledger))
    ledger.claims.take_over(KEY, first, second, timed=False)
    assert "the next search that reaches the kernel of trial 2 evaluates it" in evoengine_in_process("2")
    trial, claim = add(ledger, start_run(ledger))
    assert claim == Claim(trial, False)
    assert "no search would have reused the outcome of trial 1" in evoengine_in_process("1")
    assert "trial 3 is in flight" in evoengine_in_process("3", code=2)
    assert "there is no trial 77" in evoengine_in_process("77", code=2)


@pytest.fixture
def evoengine_in_process(ledger, capsys, monkeypatch):
    """Calls `evoengine claims revoke TRIAL`; what it printed."""

    def call(trial, code=0):
        monkeypatch.setattr(sys, "argv", ["evoengine", "claims", "revoke", trial, "--db", ledger.place])
        assert main() == code
        printed = capsys.readouterr()
        return printed.out + printed.err

    return call
