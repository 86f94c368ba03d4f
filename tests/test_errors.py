"""Hints can be pasted, and a name that was mistyped finds its nearest."""

from __future__ import annotations

import shlex

import pytest

from evoengine.errors import UsageError, did_you_mean, hint, nearest_folder
from evoengine.gpu import find_gpu
from evoengine.objectives import parse_objectives
from evoengine.tuning.search import SearchOptions
from evoengine.tuning.tune import tune
from evoengine.workloads import find_workload


@pytest.mark.parametrize("name", ["evo.db", "my runs/evo.db", "it's.db", "a;b.db", "$HOME.db", "*.db", "ü.db"])
def test_a_hint_is_read_by_a_shell_as_it_was_meant(name):
    words = shlex.split(hint("best", "--export", "out/", db=name, kernel=None))
    assert words == ["evoengine", "best", "--export", "out/", "--db", name]


def test_a_hint_holds_no_password():
    assert hint("best", db="postgresql://user:secret@host/evo") == "evoengine best --db postgresql://user@host/evo"


@pytest.mark.parametrize(("name", "known", "said"), [
    ("serch", ["search", "best"], "; did you mean search?"),
    ("H100X", ["h100", "l4"], "; did you mean h100?"),
    ("zzz", ["search"], ""),
    ("a", [], ""),
])  # fmt: skip
def test_the_nearest_name_is_offered_where_there_is_one(name, known, said):
    assert did_you_mean(name, known) == said


def test_the_nearest_folder_is_one_that_is_there(tmp_path):
    (tmp_path / "runs").mkdir()
    (tmp_path / "rusn").touch()
    assert nearest_folder(tmp_path / "rns") == "; did you mean runs?"
    assert nearest_folder(tmp_path / "none" / "rns") == ""


@pytest.mark.parametrize(
    ("call", "meant"),
    [
        (lambda: find_gpu("h10"), "h100"),
        (lambda: find_workload("atention"), "attention"),
        (lambda: parse_objectives("tflops,registres"), "registers"),
        (lambda: SearchOptions(sampler="randm"), "random"),
        (lambda: SearchOptions(device="cdua"), "cuda"),
        (lambda: tune(trails=3), "trials"),
    ],
)
def test_a_mistyped_name_is_told_which_was_meant_from_python_too(call, meant):
    with pytest.raises(UsageError, match=f"did you mean {meant}?"):
        call()
