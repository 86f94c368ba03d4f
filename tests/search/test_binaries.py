"""What a person will use is executed first: a winner or an export whose machine code is wrong does not stand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from evoengine.errors import MachineError
from evoengine.ledger.store import open_ledger
from evoengine.paths import asset
from evoengine.records import EXECUTOR, Kind, Outcome
from evoengine.search import binaries
from evoengine.search.binaries import check_export, check_winner
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


@pytest.fixture
def ledger(tmp_path):
    with open_ledger(str(tmp_path / "evo.db"), create=True) as ledger:
        yield ledger


def add(ledger, run, space, tflops, fault=GOOD, kind=Kind.ESTIMATED):
    """A candidate of the mma family that the gate passed, its source with the fault compiled."""
    config = next(c for c in space.starts if c["family"] == "mma")
    source = render(TARGET, space, config, asset("templates"))
    assert fault[0] in source.text, f"the template has no {fault[0]!r} any more"
    source = replace(source, text=f"{source.text.replace(*fault) if fault[0] else source.text}\n// {tflops}\n")
    trial = ledger.add_candidate(run, str(PROBLEM), GPU, config, (), "sampler")
    ledger.record_source(trial, source)
    ledger.record_binary(trial, source, compile_source(source, "sm_90a"))
    ledger.record_verdict(trial, a_verdict())
    ledger.record_measurement(trial, a_figure(tflops, kind))
    ledger.finish(trial, Outcome(str(kind)), None, 0.25, "emulator")
    return trial


def started(ledger, space):
    return start_run(ledger, problem=str(PROBLEM), space=space)


def checked(ledger, run, space):
    return check_winner(ledger, run, TARGET, space, seed=5)


def test_a_winner_whose_machine_code_is_wrong_gives_way_to_the_next(ledger, space):
    run = started(ledger, space)
    scaled, crashing = add(ledger, run, space, 90.0, WRONG_SCALE), add(ledger, run, space, 80.0, OUT_OF_BOUNDS)
    good = add(ledger, run, space, 70.0)
    said = checked(ledger, run, space)
    assert [line.partition(":")[0] for line in said] == [f"#{scaled}", f"#{crashing}", f"#{good}"]
    assert "incorrect" in said[0] and "crashed" in said[1] and said[2].endswith("cases and is correct")
    found = [ledger.candidate(trial) for trial in (scaled, crashing, good)]
    assert [c.outcome for c in found] == [Outcome.INCORRECT, Outcome.CRASHED, Outcome.ESTIMATED]
    assert [c.device for c in found] == [EXECUTOR, EXECUTOR, "emulator"]
    assert all(c.reason.startswith("machine code: ") for c in found[:2])
    assert [c.trial for c in ledger.best(str(PROBLEM), GPU, top=9)] == [good]
    for candidate, right in zip(found, (False, False, True), strict=True):  # beside the verdict on the source
        assert (candidate.verdict.device, candidate.verdict.correct) == ("emulator", True)
        assert (candidate.binary_verdict.device, candidate.binary_verdict.correct) == (EXECUTOR, right)
        assert candidate.binary_verdict.cases
        assert (candidate.to_json()["correct"], candidate.to_json()["binary_correct"]) == (right, right)


def test_what_cannot_be_executed_stays_and_is_said(ledger, space, monkeypatch):
    run = started(ledger, space)
    good = add(ledger, run, space, 70.0)

    def missing():
        raise MachineError("no C++ compiler found: install one")

    monkeypatch.setattr(binaries, "build_model", missing)
    why = "no C++ compiler found: install one"
    assert checked(ledger, run, space) == [f"#{good}: its machine code was not executed: {why}"]
    candidate = ledger.candidate(good)
    assert (candidate.outcome, candidate.binary_verdict) == (Outcome.ESTIMATED, None)
    assert candidate.to_json()["binary_correct"] is None


def test_an_export_that_a_gpu_measured_is_refuted_without_taking_its_outcome(ledger, space):
    """A GPU ran it: that figure stays in the ledger, and what executing it found stands beside it."""
    run = started(ledger, space)
    trial = add(ledger, run, space, 90.0, WRONG_SCALE, Kind.MEASURED)
    assert check_export(ledger, ledger.candidate(trial, with_cubin=True)).refuted
    candidate = ledger.candidate(trial)
    assert candidate.outcome is Outcome.MEASURED
    assert candidate.refuted


def test_a_broken_image_is_not_executed(ledger, space):
    run = started(ledger, space)
    candidate = ledger.candidate(add(ledger, run, space, 70.0), with_cubin=True)
    check = check_export(ledger, replace(candidate, binary=replace(candidate.binary, cubin=b"nonsense")))
    assert check.verdict is None and "no cubin" in check.why_not
    assert ledger.candidate(candidate.trial).binary_verdict is None
