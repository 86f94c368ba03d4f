"""Which families a search walks through: those the GPU can run, or those asked for by name."""

from __future__ import annotations

import json

from evoengine.cli.setup import first_of_each_family
from tests.conftest import attention_space

SMALL = "b1,h2,s128,d32,fp16"


def test_a_family_that_the_gpu_cannot_run_is_left_out_with_one_line_that_says_why(evoengine, tmp_path):
    arguments = ("--gpu", "l4", "--problem", SMALL, "--trials", 1, "--device", "emulator", "--db", tmp_path / "x.db")
    done = evoengine("search", *arguments)
    assert done.returncode == 0, done.stderr
    [said] = [line for line in done.stderr.splitlines() if "wgmma" in line]
    assert said == "left out: family wgmma: wgmma is an instruction of Hopper (sm_90a) alone (`gpu.capability == 90`)"
    assert "3 families" in done.stderr


def test_a_family_asked_for_by_name_is_the_only_one_tried(evoengine, tmp_path):
    arguments = ("--problem", SMALL, "--trials", 3, "--device", "emulator", "--db", tmp_path / "x.db")
    done = evoengine("search", "--family", "mma", *arguments)
    assert done.returncode == 0, done.stderr
    assert "1 family" in done.stderr and "left out" not in done.stderr
    found = json.loads(evoengine("history", "--json", "--db", tmp_path / "x.db").stdout)
    assert [c["config"]["family"] for c in found] == ["mma"] * 3
    assert all(c["correct"] for c in found)


def test_the_trial_rendering_takes_start_points_and_walks_the_space_only_for_families_without_one(monkeypatch):
    space, walked = attention_space(), []
    enumerate_ = type(space).enumerate
    monkeypatch.setattr(type(space), "enumerate", lambda self: (walked.append(c) or c for c in enumerate_(self)))
    assert {c["family"] for c in first_of_each_family(space)} == {"scalar", "wmma", "mma", "wgmma"}
    assert walked == []
    space.starts = [c for c in space.starts if c["family"] != "scalar"]
    assert {c["family"] for c in first_of_each_family(space)} == {"scalar", "wmma", "mma", "wgmma"}
    assert len(walked) == 1
