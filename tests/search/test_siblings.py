"""A search on a GPU begins with what another GPU of its architecture measured fast."""

from __future__ import annotations

from dataclasses import replace

from evoengine.gpu import find_gpu
from evoengine.ledger.runs import Device
from evoengine.search.coordinator import Coordinator
from evoengine.search.evaluators import GpuEvaluator
from evoengine.search.neighbours import sibling_prior
from evoengine.search.samplers.prior import MIN_MEASURED
from tests.support import faulty_device
from tests.support.numbered_search import DEVICE, GPU, PROBLEM, TARGET

SIBLING, STRANGER = find_gpu("h200"), find_gpu("a100")
NUMBERS = range(MIN_MEASURED + 4)


def test_a_sibling_gives_its_times_and_other_architectures_and_problems_none(numbered):
    coordinator = numbered.coordinator(NUMBERS)
    coordinator.search()
    space, ledger = coordinator.setting.space, numbered.ledger
    prior = sibling_prior(ledger, space, str(PROBLEM), SIBLING)
    assert len(prior) == len(NUMBERS) and all({"family": "numbered", "number": n} in prior for n in NUMBERS)
    assert not sibling_prior(ledger, space, str(PROBLEM), STRANGER)
    assert not sibling_prior(ledger, space, str(PROBLEM), GPU), "its own figures are no prior"
    assert not sibling_prior(ledger, space, "attention:b1,h1,s128,d32,fp16", SIBLING)


def test_a_few_figures_are_not_enough(numbered):
    coordinator = numbered.coordinator(range(MIN_MEASURED - 1))
    coordinator.search()
    assert not sibling_prior(numbered.ledger, coordinator.setting.space, str(PROBLEM), SIBLING)


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
    numbers = [c.config["number"] for c in tried if c.operator == "prior"]
    assert len(numbers) >= 3 and numbers == sorted(numbers, reverse=True)[: len(numbers)]
    assert numbers[0] >= max(NUMBERS) - 2, "after the start points of the ledger"
