"""Which families a search walks through: those the GPU can run, or those asked for by name."""

from __future__ import annotations

import json

import pytest

from evoengine.tuning.setup import first_of_each_family
from tests.cli.conftest import SMALL
from tests.support.kernel_gate import attention_space
from tests.support.spaces import launches

AT_ONCE = ("--problem", SMALL, "--minutes", 1e-9, "--jobs", 1, "--device", "emulator")
"""of a search that ends before its first candidate"""


def test_a_family_that_the_gpu_cannot_run_is_left_out_with_one_line_that_says_why(evoengine, tmp_path):
    done = evoengine("search", "--gpu", "l4", *AT_ONCE, "--db", tmp_path / "x.db")
    assert "time is up" in done.stderr
    [said] = [line for line in done.stderr.splitlines() if "wgmma" in line]
    assert said == "left out: family wgmma: wgmma is an instruction of Hopper (sm_90a) alone (`gpu.capability == 90`)"
    assert "3 families" in done.stderr


def test_a_family_asked_for_by_name_is_the_only_one_searched(evoengine, tmp_path):
    done = evoengine("search", "--family", "mma", *AT_ONCE, "--db", tmp_path / "x.db")
    assert "1 family" in done.stderr and "left out" not in done.stderr


@pytest.mark.exhaustive
def test_every_candidate_of_a_search_is_of_the_family_asked_for(evoengine, tmp_path):
    arguments = ("--problem", SMALL, "--trials", 2, "--jobs", 1, "--device", "emulator", "--db", tmp_path / "x.db")
    done = evoengine("search", "--family", "mma", *arguments)
    assert done.returncode == 0, done.stderr
    found = json.loads(evoengine("history", "--json", "--db", tmp_path / "x.db").stdout)["trials"]
    assert [c["config"]["family"] for c in found] == ["mma"] * 2
    assert all(c["correct"] for c in found)


def test_each_family_is_tried_by_its_start_point_without_a_walk_through_the_space(monkeypatch):
    space = attention_space()
    monkeypatch.setattr(space, "decode", lambda row: pytest.fail("the space is walked"))
    assert {c["family"] for c in first_of_each_family(space)} == set(space.families)


def test_a_family_without_a_start_point_is_tried_by_the_first_of_its_configurations(load):
    space = load('kernel = "k"\n[knobs]\nfamily = ["a", "b"]\nn = [1, 2]\n' + launches("a", "b"))
    assert first_of_each_family(space) == [{"family": "a", "n": 1}, {"family": "b", "n": 1}]
