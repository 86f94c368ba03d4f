"""What is shown as ranked, or shipped, has passed both judges to the end: machine code and text."""

from __future__ import annotations

from dataclasses import replace

import pytest

from evoengine.errors import MachineError
from evoengine.paths import asset
from evoengine.records import EMULATOR, EXECUTOR, GATE_VERSION, Kind, Outcome, Rejection, Verdict
from evoengine.sandbox.worker_process import COMPILER_LIMITS
from evoengine.sandbox.workers import WorkerPool
from evoengine.search import finishing
from evoengine.search.evaluators import CpuEvaluator
from evoengine.search.finishing import Finisher, is_judged, is_whole, judge_export, record_verdicts
from evoengine.stages.compile import compile_source
from evoengine.stages.render import render
from tests.support.kernel_gate import attention_space, attention_target
from tests.support.ledger_examples import a_figure, a_verdict, start_run

SMALL, GPU = "b1,h2,s128,d32,fp16", "h100"
TARGET = attention_target(SMALL, GPU)
PROBLEM = TARGET.problem
GOOD = ("", "")
WRONG_SCALE = ("scale * LOG2_E", "scale")
OUT_OF_BOUNDS = ("if (row >= work.rows) break;", "if (row > work.rows) break;")


@pytest.fixture(scope="module")
def space():
    return attention_space(SMALL)


@pytest.fixture(scope="module")
def workers():
    pool = WorkerPool(1, COMPILER_LIMITS)
    yield pool
    pool.close()


def short(device=EXECUTOR):
    return replace(a_verdict(), device=device, gate_version=GATE_VERSION, whole=False)


def add(ledger, run, space, tflops, fault=GOOD, kind=Kind.ESTIMATED, outcome=Outcome.UNFINISHED, verdicts=None):
    """A candidate of the mma family whose short cases passed, its source with the fault compiled."""
    config = next(c for c in space.starts if c["family"] == "mma")
    source = render(TARGET, space, config, asset("templates"))
    assert fault[0] in source.text, f"the template has no {fault[0]!r} any more"
    source = replace(source, text=f"{source.text.replace(*fault) if fault[0] else source.text}\n// {tflops}\n")
    trial = ledger.add_candidate(run, str(PROBLEM), GPU, config, (), "sampler", source)
    ledger.record_binary(trial, source, compile_source(source, "sm_90a"))
    ledger.record_measurement(trial, a_figure(tflops, kind))
    verdicts = (short(),) if verdicts is None else verdicts
    ledger.finish(trial, outcome, None, 0.25, EXECUTOR, verdicts)
    return trial


def started(ledger, space):
    return start_run(ledger, problem=str(PROBLEM), space=space)


def finisher(ledger, run, space, workers, may_go_on=lambda: True, judged=lambda before, outcome: None):
    judge = CpuEvaluator(TARGET)
    return Finisher(
        ledger, run, TARGET, 5, judge, workers, may_go_on, lambda stage: None, judged, {run: space}
    )  # fmt: skip


def test_an_unfinished_candidate_is_not_ranked(ledger, space):
    add(ledger, started(ledger, space), space, 90.0)
    assert ledger.best(str(PROBLEM), GPU, top=9) == []


def test_what_would_be_shown_is_judged_until_the_ranking_stands(ledger, space, workers, monkeypatch):
    """Two of the first are wrong: those that come after them are judged in their place."""
    monkeypatch.setattr(finishing, "DISPLAYED_RANKS", 1)
    run = started(ledger, space)
    scaled, crashing = add(ledger, run, space, 90.0, WRONG_SCALE), add(ledger, run, space, 80.0, OUT_OF_BOUNDS)
    good, behind = add(ledger, run, space, 70.0), add(ledger, run, space, 60.0)
    told = []
    said = finisher(
        ledger, run, space, workers, judged=lambda c, o: told.append((c.trial, c.outcome, o))
    ).finish_ranking()
    assert [line.partition(":")[0] for line in said] == [f"#{scaled}", f"#{crashing}"]
    assert "incorrect" in said[0] and "crashed" in said[1]
    found = [ledger.candidate(trial) for trial in (scaled, crashing, good, behind)]
    outcomes = [Outcome.INCORRECT, Outcome.CRASHED, Outcome.ESTIMATED, Outcome.UNFINISHED]
    assert [c.outcome for c in found] == outcomes
    assert [c.trial for c in ledger.best(str(PROBLEM), GPU, top=9)] == [good]
    assert told == [(t, Outcome.UNFINISHED, o) for t, o in zip((scaled, crashing, good), outcomes, strict=False)]
    assert is_whole(ledger.verdicts(good)) and not is_whole(ledger.verdicts(behind))
    assert [c.correct for c in found] == [False, False, True, None]


def test_a_candidate_whose_judge_is_killed_by_others_stays_as_it_was(ledger, space):
    """Unlike one that takes its judge's process down."""
    run = started(ledger, space)
    ends = {Outcome.KILLED: Outcome.UNFINISHED, Outcome.CRASHED: Outcome.CRASHED}
    for how, after in ends.items():
        trial = add(ledger, run, space, 90.0)
        assert record_verdicts(ledger, ledger.candidate(trial), Rejection(how, "the worker process died")) is after
        assert ledger.candidate(trial).outcome is after


def test_short_cases_that_passed_are_not_run_again(ledger, space, workers):
    run = started(ledger, space)
    trial = add(ledger, run, space, 70.0)
    finisher(ledger, run, space, workers).finish_ranking()
    by_binary = next(v for v in ledger.verdicts(trial) if v.device == EXECUTOR and v.whole)
    assert by_binary.cases[: len(short().cases)] == short().cases


def test_verdicts_of_another_version_of_the_gate_do_not_count(ledger, space, workers):
    run = started(ledger, space)
    old = tuple(replace(a_verdict(), device=device, gate_version=0) for device in (EXECUTOR, EMULATOR))
    trial = add(ledger, run, space, 70.0, verdicts=old, outcome=Outcome.ESTIMATED)
    assert not is_whole(ledger.verdicts(trial)) and is_judged(ledger.verdicts(trial))
    finisher(ledger, run, space, workers).finish_ranking()
    assert is_whole(ledger.verdicts(trial)) and ledger.candidate(trial).outcome is Outcome.ESTIMATED


def test_where_time_is_up_what_is_left_is_said_and_stays_unranked(ledger, space, workers):
    run = started(ledger, space)
    trial = add(ledger, run, space, 70.0)
    said = finisher(ledger, run, space, workers, may_go_on=lambda: False).finish_ranking()
    assert said == ["1 candidate is not ranked, as the gate was not finished in time"]
    assert ledger.candidate(trial).outcome is Outcome.UNFINISHED


def test_a_finalist_that_the_machine_code_refutes_leaves_the_ranking_and_keeps_its_figure(ledger, space, workers):
    run = started(ledger, space)
    wrong = add(ledger, run, space, 90.0, WRONG_SCALE, Kind.MEASURED, Outcome.MEASURED, (a_verdict(),))
    good = add(ledger, run, space, 80.0, GOOD, Kind.MEASURED, Outcome.MEASURED, (a_verdict(),))
    said = finisher(ledger, run, space, workers).finish_finalists(8)
    assert [line.partition(":")[0] for line in said] == [f"#{wrong}"]
    assert ledger.candidate(wrong).outcome is Outcome.INCORRECT
    assert [m.kind for m in ledger.measurements(wrong)] == [Kind.MEASURED]
    assert [c.trial for c in ledger.best(str(PROBLEM), GPU, top=9)] == [good]
    assert is_whole(ledger.verdicts(good)) and ledger.candidate(good).outcome is Outcome.MEASURED


# ── one judge alone ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_where_the_machine_code_cannot_be_read_the_text_decides_and_the_reason_is_kept(ledger, space):
    run = started(ledger, space)
    candidate = ledger.candidate(add(ledger, run, space, 70.0), with_cubin=True)
    found = judge_export(ledger, replace(candidate, binary=replace(candidate.binary, cubin=b"nonsense")), 0)
    assert found.correct and found.whole and "no cubin" in found.alone
    by_binary, by_text = found.verdicts
    assert by_binary.abstained and not by_binary.cases and by_text.cases
    candidate = ledger.candidate(candidate.trial)
    assert candidate.outcome is Outcome.ESTIMATED and "its machine code was not executed" in candidate.reason
    assert is_judged(ledger.verdicts(candidate.trial)) and not is_whole(ledger.verdicts(candidate.trial))


def test_what_neither_can_judge_is_not_exported(ledger, space):
    run = started(ledger, space)
    candidate = ledger.candidate(add(ledger, run, space, 70.0), with_cubin=True)
    source = replace(candidate.source, text='extern "C" __global__ void attention() { no such thing }')
    unreadable = replace(candidate, source=source, binary=replace(candidate.binary, cubin=b"nonsense"))
    with pytest.raises(MachineError, match="cannot be judged here: .*no cubin.*; its text was not executed"):
        judge_export(ledger, unreadable, 0)


def test_an_abstention_is_no_verdict_of_correctness():
    abstained = Verdict(EXECUTOR, None, "its machine code was not executed: sm_100", (), 0.0)
    assert abstained.abstained and not is_judged([abstained])
    assert not is_whole([abstained, replace(a_verdict(), device=EMULATOR)])
