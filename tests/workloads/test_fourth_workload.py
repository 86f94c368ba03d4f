"""A workload that a program registers is searched, gated and exported; no file of the package is touched."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import evoengine
from evoengine.errors import UsageError
from evoengine.records import Outcome
from evoengine.workloads import parse_problem
from tests.support.scale_workload import KERNEL, PROBLEM, Scale, registered, searched

PACKAGE = Path(evoengine.__file__).parent
CONFIG = {"family": "scale", "threads_x": 64, "per_thread": 2}


@pytest.fixture
def workload(tmp_path):
    with registered(tmp_path / "own") as workload:
        yield workload


def test_the_package_has_no_such_workload(tmp_path):
    assert not (PACKAGE / "workloads" / "scale").exists()
    with pytest.raises(UsageError, match="there is no workload 'scale'"):
        parse_problem(PROBLEM)


def test_its_problems_are_read_once_it_is_registered(workload):
    assert parse_problem(PROBLEM) == (workload, workload.parse("n5000"))


def test_one_that_was_edited_takes_the_place_of_the_one_before(workload):
    edited = Scale(Path("/elsewhere"))
    evoengine.register(edited)
    assert parse_problem(PROBLEM)[0] == edited


def test_a_name_of_evoengines_own_is_refused(tmp_path):
    class Taken(Scale):
        name = "gemm"

    with pytest.raises(UsageError, match="there is a workload gemm already"):
        evoengine.register(Taken(tmp_path))


def test_a_search_finds_correct_kernels_of_it(tmp_path_factory):
    _, result = searched(tmp_path_factory)
    assert len(result.best) == 2
    assert {c.outcome for c in result.best} == {Outcome.ESTIMATED}
    assert {c.problem for c in result.best} == {PROBLEM}


def test_the_best_one_is_exported_with_a_loader_of_its_name(tmp_path_factory, workload, tmp_path):
    db, result = searched(tmp_path_factory)
    written = evoengine.export(tmp_path / "out", db=str(db))
    described = json.loads((tmp_path / "out" / "kernel.json").read_text())
    assert described["module"].startswith("scale_")
    assert {"kernel.cubin", "kernel.json", f"{described['module']}.py"} <= {path.name for path in written}
    assert described["config"] == result.best[0].config
    assert [p["name"] for p in described["parameters"]] == ["x", "y", "a", "n"]
    assert described["binary_verdict"]["correct"] is True


def test_its_cases_refuse_a_kernel_that_is_wrong(workload):
    assert "if (i < n)" in KERNEL
    (workload.folder / "scale.cu.j2").write_text(KERNEL.replace("if (i < n)", "if (i < n - 1)"))
    found = evoengine.verify(CONFIG, PROBLEM, device="emulator", seed=1)
    assert not found.correct and found.candidate.outcome is Outcome.INCORRECT
