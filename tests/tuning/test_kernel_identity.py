"""Kernels of one name that differ in text or reference are kept apart, and what is exported is judged by its own."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from evoengine.errors import UsageError
from evoengine.paths import asset
from evoengine.records import EXECUTOR, Device, Kind, Measurement, Outcome
from evoengine.search.finishing import judge_export
from evoengine.search.identity import kernel_identity
from evoengine.stages.compile import compile_source
from evoengine.stages.render import render
from evoengine.tuning.best import find_best
from evoengine.tuning.comparison import compare_runs
from evoengine.tuning.exporting import export
from evoengine.tuning.measure import unmeasured_candidates
from evoengine.workloads.folder import load_folder
from tests.support.folders import SAXPY, SAXPY_CONFIG, SAXPY_KERNEL, load, saxpy
from tests.support.ledger_examples import a_verdict

OTHER_REFERENCE = "def run(x, y, a):\n    return a * x - y\n"
SUBTRACTS = SAXPY_KERNEL.replace("+ y[i]", "- y[i]")
GPU = "h100"


def searched(ledger, folder, us):
    """A run of the kernel as the folder has it now, with one candidate that was judged and predicted."""
    target, space = load(folder)
    run = ledger.start_run(
        gpu=GPU, problem=str(target.problem), device=Device("emulator"), space=space, sampler="random", seed=1,
        command="test", definition=target.workload.definition_text, kernel=kernel_identity(target.workload),
    )  # fmt: skip
    source = render(target, space, SAXPY_CONFIG, asset("templates"))
    trial = ledger.add_candidate(run, str(target.problem), GPU, SAXPY_CONFIG, (), "sampler", source)
    ledger.record_binary(trial, source, compile_source(source, "sm_90a"))
    figure = Measurement(Kind.ESTIMATED, "model for h100", 1.0, us, terms={"predicted": 1.0})
    verdicts = (replace(a_verdict(), device=EXECUTOR, gate_version=1), replace(a_verdict(), gate_version=1))
    ledger.finish(trial, Outcome.ESTIMATED, None, 0.5, "emulator", verdicts, figure)
    return trial


@pytest.mark.parametrize(
    "change", [{"reference": OTHER_REFERENCE}, {"kernel": SUBTRACTS}, {"tolerance": {"rtol": 1e-3}}],
    ids=["another reference", "another text", "another tolerance"],
)  # fmt: skip
def test_a_changed_kernel_is_ranked_apart_and_that_is_said(ledger, tmp_path, change):
    first = searched(ledger, saxpy(tmp_path), 1.0)
    second = searched(ledger, saxpy(tmp_path, **change), 9.0)
    found = find_best(ledger, "saxpy:n=4096", GPU, None)
    assert [c.trial for c in found.candidates] == [second]  # slower, but that of the last run
    [apart] = found.apart
    assert (apart.candidates, apart.last_run) == (1, ledger.candidate(first).run)
    assert "another text, definition or reference" in str(apart)
    assert not compare_runs(ledger, 1, 2).comparable


def test_of_a_changed_kernel_without_a_correct_candidate_it_is_said_too(ledger, tmp_path):
    first = searched(ledger, saxpy(tmp_path), 1.0)
    last = searched(ledger, saxpy(tmp_path, reference=OTHER_REFERENCE), 1.0)
    ledger.finish(last, Outcome.INCORRECT, "wrong", 0.5, "emulator")
    found = find_best(ledger, "saxpy:n=4096", GPU, None)
    assert [c.trial for c in found.candidates] == [first]
    [apart] = map(str, found.apart)
    assert (
        apart == "run 2 searched another text, definition or reference of the kernel, of which no candidate is ranked"
    )


def test_a_changed_space_is_the_same_kernel(tmp_path):
    folder = saxpy(tmp_path)
    before = kernel_identity(load_folder(folder))
    (folder / "space.toml").write_text((folder / "space.toml").read_text().replace("[1, 2, 4]", "[1, 2]"))
    (folder / "notes.txt").write_text("nothing")
    (folder / "out").mkdir()
    (folder / "out" / "kernel.cu").write_text("// an export")
    assert kernel_identity(load_folder(folder)) == before
    (folder / "header.cuh").write_text("// one that the kernel may include")
    assert kernel_identity(load_folder(folder)) != before


def test_figures_that_another_gate_judged_are_ranked_apart(ledger, tmp_path):
    folder = saxpy(tmp_path)
    first, second = searched(ledger, folder, 1.0), searched(ledger, folder, 9.0)
    verdict = replace(a_verdict(), gate_version=0)
    ledger.finish(first, Outcome.ESTIMATED, None, 0.5, "emulator", (verdict,))
    found = find_best(ledger, "saxpy:n=4096", GPU, None)
    assert [c.trial for c in found.candidates] == [second]
    assert "judged by a gate from before versions were kept" in str(found.apart[0])
    assert [c.trial for c in ledger.best("saxpy:n=4096", GPU, 9, run=ledger.candidate(first).run)] == [first]


def test_an_export_with_the_wrong_folder_is_refused_and_changes_nothing(ledger, tmp_path):
    trial = searched(ledger, saxpy(tmp_path / "a"), 1.0)
    wrong = saxpy(tmp_path / "b", reference=OTHER_REFERENCE)
    before = ledger.verdicts(trial)
    with pytest.raises(UsageError, match="has changed since run 1 \\(text, definition or reference"):
        export(tmp_path / "out", kernel=wrong, db=ledger.place)
    assert not (tmp_path / "out").exists()
    assert ledger.verdicts(trial) == before and ledger.candidate(trial).outcome is Outcome.ESTIMATED
    assert find_best(ledger, None, None, None, kernel=tmp_path / "a" / "saxpy").candidates[0].trial == trial


def test_an_export_is_judged_by_the_reference_that_its_run_had(ledger, tmp_path):
    """Whatever kernel of that name is known to the process, or was searched later."""
    trial = searched(ledger, saxpy(tmp_path), 1.0)
    searched(ledger, saxpy(tmp_path, reference=OTHER_REFERENCE, kernel=SUBTRACTS), 2.0)
    judged = judge_export(ledger, ledger.candidate(trial, with_cubin=True), 0)
    assert judged.correct, str(judged)


def test_only_the_last_runs_kernel_is_left_to_measure(ledger, tmp_path):
    searched(ledger, saxpy(tmp_path), 1.0)
    second = searched(ledger, saxpy(tmp_path, kernel=SUBTRACTS, reference=OTHER_REFERENCE), 2.0)
    assert [c.trial for c in unmeasured_candidates(ledger, "saxpy:n=4096", GPU)] == [second]


def test_a_definition_says_all_that_identifies_it(tmp_path):
    described = saxpy(tmp_path, description="for people", tags=["x"])
    assert json.loads((described / "problem.json").read_text())["tags"] == ["x"]
    plain = saxpy(tmp_path / "plain")
    assert kernel_identity(load_folder(described)) == kernel_identity(load_folder(plain))
    assert SAXPY["name"] == load_folder(plain).name
