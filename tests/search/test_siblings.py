"""A search on a GPU is guided by what other GPUs and problems measured of the same kernel."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from evoengine.gpu import Gpu, find_gpu
from evoengine.ledger.store import Ledger
from evoengine.records import Device, config_key
from evoengine.search.coordinator import Coordinator
from evoengine.search.evaluators import GpuEvaluator
from evoengine.search.neighbours import known_figures, match_figures
from evoengine.search.recorded import RecordedSpace
from evoengine.search.samplers.prior import MIN_MEASURED, Prior
from evoengine.space.definition import Knob
from evoengine.workloads import parse_problem
from tests.support import faulty_device
from tests.support.numbered_search import DEVICE, GPU, PROBLEM, TARGET

SIBLING, STRANGER = find_gpu("h200"), find_gpu("a100")
NUMBERS = range(MIN_MEASURED + 4)


def figures_for(coordinator: Coordinator, ledger: Ledger, gpu: Gpu, problem: str = str(PROBLEM)) -> Prior:
    target = replace(TARGET, gpu=gpu, problem=parse_problem(problem)[1])
    return known_figures(ledger, replace(coordinator.setting, target=target))[0]


def test_every_other_gpu_and_problem_that_measured_the_kernel_is_a_source(numbered):
    coordinator = numbered.coordinator(NUMBERS)
    coordinator.search()
    for gpu in (SIBLING, STRANGER):
        found = figures_for(coordinator, numbered.ledger, gpu)
        assert found.sources == (GPU.key,)
        assert len(found) == len(NUMBERS) and all({"family": "numbered", "number": n} in found for n in NUMBERS)
    assert not figures_for(coordinator, numbered.ledger, GPU).sources, "its own figures are no prior"
    other = "attention:b1,h1,s128,d32,fp16"
    assert figures_for(coordinator, numbered.ledger, GPU, other).sources == (f"{GPU.key} · {PROBLEM}",)


def test_a_few_figures_are_not_enough(numbered):
    coordinator = numbered.coordinator(range(MIN_MEASURED - 1))
    coordinator.search()
    assert not figures_for(coordinator, numbered.ledger, SIBLING).sources


ROWS = np.array([*np.ndindex(3, 2)], np.int16)
SPACE = RecordedSpace(
    Path("one.json"), None, (Knob("a", (1, 2, 4)), Knob("b", (0, 1))), ROWS, np.ones(6), np.empty(0), np.zeros(6, int),
    {}, 0,
)  # fmt: skip


def test_a_knob_that_the_space_lacks_is_left_out_and_the_fastest_of_its_values_counts():
    found = match_figures(SPACE, [({"a": a, "b": 0, "pad": pad}, 10.0 * a + pad) for a in (1, 2) for pad in (3, 1)])
    assert [*found.us.values()] == [({"a": 1, "b": 0}, 11.0), ({"a": 2, "b": 0}, 21.0)]
    assert found.said == ["this space has no knob pad"]


def test_a_knob_that_the_figures_lack_may_have_any_value():
    found = match_figures(SPACE, [({"a": 4}, 7.0)])
    assert [*found.us.values()] == [({"a": 4, "b": 0}, 7.0), ({"a": 4, "b": 1}, 7.0)]
    assert found.said == ["they have no knob b"]


def test_values_that_the_space_lacks_are_counted_and_left_out():
    found = match_figures(SPACE, [({"a": a, "b": 1}, 5.0) for a in (1, 2, 8)])
    assert len(found.us) == 2 and found.said == ["1 of 3 are not in this space"]


def test_of_contradicting_figures_of_one_configuration_the_fastest_counts_and_it_is_said():
    found = match_figures(SPACE, [({"a": 1, "b": 1}, us) for us in (9.0, 5.0)] + [({"a": 2, "b": 1}, 5.0)])
    assert found.us[config_key({"a": 1, "b": 1})][1] == 5.0
    assert found.said == ["1 configurations have contradicting ones; the fastest count"]


def test_where_each_has_a_knob_that_the_other_lacks_nothing_is_matched_which_is_said_of_kernels_that_may_be_alike():
    found = match_figures(SPACE, [({"a": 1, "c": 2}, 5.0)])
    assert not found.us and found.said == ["not used: they have no knob b, and this space has no knob c"]
    assert match_figures(SPACE, [({"c": 2, "d": 1}, 5.0)]).said == []


def test_a_search_tries_first_what_was_fastest_on_a_sibling(numbered):
    numbered.coordinator(NUMBERS).search()
    setting, _ = numbered.begin(NUMBERS, trials=5, jobs=1)
    setting = replace(setting, target=replace(TARGET, gpu=SIBLING), sampler="evolution")
    run = numbered.ledger.start_run(
        gpu=SIBLING.key, problem=str(PROBLEM), device=Device("faulty"), space=setting.space, sampler="evolution",
        seed=1, command="test",
    )  # fmt: skip
    judge = GpuEvaluator(replace(TARGET, gpu=SIBLING), DEVICE, 1, faulty_device)
    silent = lambda _: None  # noqa: E731
    Coordinator(setting, numbered.ledger, run, judge, silent, silent, faulty_device.compile_task).search()
    tried = [c for c in numbered.ledger.candidates(run=run)]
    numbers = [c.config["number"] for c in tried if c.operator == f"prior led by {GPU.key}"]
    assert len(numbers) >= 3 and numbers == sorted(numbers, reverse=True)[: len(numbers)]
    assert numbers[0] >= max(NUMBERS) - 2, "after the start points of the ledger"
