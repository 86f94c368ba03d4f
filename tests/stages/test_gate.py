"""In a search one judge runs what one suffices for: the machine code's, or the text's where that cannot be executed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from evoengine.paths import asset
from evoengine.records import EMULATOR, EXECUTOR, CompiledCandidate
from evoengine.search.evaluators import make_plans
from evoengine.stages.compile import compile_source
from evoengine.stages.gate import Judges
from evoengine.stages.render import render
from tests.support.kernel_gate import attention_space, attention_target

PROBLEM = "b3,h4,s70,d32,fp16"
EVERY_HEAD = "own heads and batch"
OF_HEAD, OF_ANOTHER = "kv_head = head / (heads / kv_heads);", "kv_head = head / (heads / kv_heads) - (head == 11);"


@pytest.fixture(scope="module")
def space():
    return attention_space(PROBLEM)


def judges(space, old: str = "", new: str = "", failed: str | None = None) -> Judges:
    """Those of a kernel of the mma family, `new` in place of `old`."""
    target, config = attention_target(PROBLEM), next(c for c in space.starts if c["family"] == "mma")
    source = render(target, space, config, asset("templates"))
    assert old in source.text, f"the template has no {old!r} any more"
    source = replace(source, text=source.text.replace(old, new) if old else source.text)
    contender = CompiledCandidate(0, source, compile_source(source, target.gpu.arch), config)
    return Judges(target.workload, contender, make_plans(space, target, config), 7, failed)


def names(verdict) -> list[str]:
    return [case.name for case in verdict.cases]


def test_the_case_of_every_head_is_run_by_the_machine_code_alone(space):
    machine_code, text = judges(space).judge_rest(()).verdicts
    assert (machine_code.device, text.device) == (EXECUTOR, EMULATOR)
    assert machine_code.correct and text.correct
    assert EVERY_HEAD in names(machine_code) and EVERY_HEAD not in names(text)
    assert "long" in names(machine_code) and "long" in names(text)


def test_its_cell_is_counted_where_it_was_run_and_missing_nowhere(space):
    machine_code, text = (verdict.coverage for verdict in judges(space).judge_rest(()).verdicts)
    assert machine_code.missing == text.missing == ()
    assert machine_code.cells["extents"] == text.cells["extents"] + 1
    assert (machine_code.visited, text.visited) == (machine_code.cells, text.cells)


def test_what_nothing_is_known_of_passes_every_case_by_both_judges(space):
    """Such as an export, which takes no verdict of a search over."""
    machine_code, text = judges(space).judge_whole().verdicts
    assert names(machine_code) == names(text) and EVERY_HEAD in names(text)
    assert machine_code.coverage.missing == text.coverage.missing == ()


def test_the_text_alone_is_put_through_it_where_machine_code_cannot_be_executed(space):
    abstained, text = judges(space, failed="killed by SIGSEGV").judge_rest(()).verdicts
    assert abstained.abstained and not text.abstained
    assert EVERY_HEAD in names(text) and text.coverage.missing == ()


@pytest.mark.parametrize(("failed", "device"), [(None, EXECUTOR), ("killed by SIGSEGV", EMULATOR)])
def test_a_kernel_that_is_wrong_of_one_head_alone_is_refuted(space, failed, device):
    wrong = judges(space, OF_HEAD, OF_ANOTHER, failed).judge_rest(()).wrong
    assert wrong.device == device and wrong.reason.startswith(f"{EVERY_HEAD}: ")
