"""What an evaluation depends on decides its key, and nothing else does."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks import instant
from evoengine.objectives import parse_objectives
from evoengine.records import Device
from evoengine.search import identity
from evoengine.search.evaluators import make_plans
from evoengine.search.identity import Identity, environment, templates_digest
from evoengine.space.space import load_space
from evoengine.stages.render import fill, render
from evoengine.workloads import parse_problem

H200 = Device("NVIDIA H200", "GPU-1", "sm_90", "CUDA 13.0", {"torch": "2.8", "power limit": "700 W"})


@pytest.fixture
def setting(tmp_path):
    return instant.make_setting(tmp_path, 20, 20, 1, "random", 2)


def key(setting, device=H200, predicted=True):
    config = next(setting.space.enumerate())
    source = render(setting.target, setting.space, config, setting.templates, fill)
    plans = make_plans(setting.space, setting.target, config)
    return Identity(setting, environment(setting, device, predicted)).key(source, config, plans)


def of_space(setting, old, new):
    path = setting.templates / "other.toml"
    path.write_text(setting.space.text.replace(old, new))
    return replace(setting, space=load_space(path, setting.target.problem, setting.target.gpu))


SAME = {
    "another seed": lambda s: replace(s, seed=2),
    "more trials": lambda s: replace(s, trials=90, seconds=5.0, jobs=7),
    "another sampler": lambda s: replace(s, sampler="tpe"),
    "other objectives": lambda s: replace(s, objectives=parse_objectives("tflops,registers")),
    "more values in the space": lambda s: of_space(s, "8, 9]", "8, 9, 10]"),
}


@pytest.mark.parametrize("change", SAME)
def test_what_a_search_aims_at_and_how_it_gets_there_changes_no_key(setting, change):
    assert key(SAME[change](setting)) == key(setting)


def test_nor_does_another_board_of_the_kind(setting):
    assert key(setting, replace(H200, uuid="GPU-2")) == key(setting)


def edit(setting):
    (setting.templates / "attention" / "numbered.cu.j2").write_text("// edited {{ digit_of_10 }} {{ digit_of_1 }}\n")
    return setting


OTHER = {
    "an edited template": edit,
    "another launch": lambda s: of_space(s, "threads = 32", "threads = 64"),
    "another launch of the gate's cases alone": lambda s: of_space(s, "grid = [1,", "grid = ['ceil_div(seq_q, 64)',"),
    "another cost": lambda s: of_space(s, "mufu = 1000", "mufu = 2000"),
    "another problem": lambda s: replace(s, target=replace(s.target, problem=parse_problem("b1,h1,s128,d32,fp16")[1])),
    "timed": lambda s: replace(s, timed=True),
}  # fmt: skip


@pytest.mark.parametrize("change", OTHER)
def test_another_kernel_or_another_question_has_another_key(setting, change):
    before = key(setting)
    assert key(OTHER[change](setting)) != before


@pytest.mark.parametrize(
    "changed",
    [{"name": "NVIDIA H100"}, {"driver": "CUDA 13.1"}, {"versions": {"torch": "2.8", "power limit": "500 W"}}],
)
def test_another_environment_has_another_key(setting, changed):
    assert key(setting, replace(H200, **changed)) != key(setting)


def test_so_has_another_gate_model_or_compiler(setting, monkeypatch):
    before = key(setting)
    assert key(setting, predicted=False) != before
    monkeypatch.setattr(identity, "compiler_version", lambda: "nvrtc 99.0")
    assert key(setting) != before
    monkeypatch.undo()
    for version in ("GATE_VERSION", "MODEL_VERSION"):
        monkeypatch.setattr(identity, version, 1_000_000)
        assert key(setting) != before
        monkeypatch.undo()


def test_the_templates_digest_knows_every_file_that_a_kernel_may_be_made_of(setting):
    before = templates_digest(setting)
    (setting.templates / "attention" / "notes.txt").write_text("nothing")
    assert templates_digest(setting) == before
    (setting.templates / "attention" / "header.cuh").write_text("// a header\n")
    assert templates_digest(setting) != before
