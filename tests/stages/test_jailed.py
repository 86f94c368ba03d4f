"""Of a proposal no stage reads text or machine code in its own process, and each answers as it does of any other."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from evoengine import workloads
from evoengine.errors import MachineError
from evoengine.gpu import find_gpu
from evoengine.paths import asset
from evoengine.records import EXECUTOR, CompiledCandidate, Outcome
from evoengine.sandbox import jail
from evoengine.search.evaluators import make_plans
from evoengine.stages import compile as compiling
from evoengine.stages import gate, predict, profile
from evoengine.stages.gate import Judges
from evoengine.stages.predict import predict_figure
from evoengine.stages.profile import profile_without_gpu
from evoengine.stages.render import render
from evoengine.workloads.base import Target
from tests.support.kernel_gate import space_of

pytestmark = pytest.mark.skipif(jail.why_no_jail() is not None, reason=str(jail.why_no_jail()))

PROBLEM = "rms_norm:rows9,hidden64,fp16"


@cache
def target() -> Target:
    return Target(*workloads.parse_problem(PROBLEM), find_gpu("h100"))


@cache
def contender(mark: str, old: str = "", new: str = "") -> CompiledCandidate:
    space = space_of(PROBLEM)
    source = render(target(), space, space.starts[0], asset("templates"))
    assert old in source.text
    source = replace(source, text=mark + source.text.replace(old, new))
    return CompiledCandidate(0, source, compiling.compile_source(source, "sm_90a"), space.starts[0])


def judged(candidate: CompiledCandidate):
    """The verdict on its machine code."""
    plans = make_plans(space_of(PROBLEM), target(), candidate.config)
    return Judges(target().workload, candidate, plans, 7)._to_the_end(EXECUTOR, None, first=True)


def without_times(verdict):
    return replace(verdict, wall_ms=0.0)


def without_listing(candidate: CompiledCandidate) -> CompiledCandidate:
    """As it is read back from a ledger."""
    return replace(candidate, binary=replace(candidate.binary, listing=""))


def test_the_stages_answer_as_outside():
    inside, outside = contender(jail.MARK), contender("")
    assert (inside.binary.cubin, inside.binary.listing) == (outside.binary.cubin, outside.binary.listing)
    assert judged(outside).correct and without_times(judged(inside)) == without_times(judged(outside))
    assert predict_figure(target(), inside, {}) == predict_figure(target(), outside, {})
    assert profile_without_gpu(target(), inside) == profile_without_gpu(target(), outside)


def test_a_wrong_one_is_refused_with_the_line_of_its_text():
    wrong = contender(jail.MARK, "rsqrtf", "sqrtf")
    assert judged(wrong).outcome is Outcome.INCORRECT
    beyond = contender(jail.MARK, "write_run(residual_out + at, sum);", "write_run(residual_out + at + 65536, sum);")
    verdict = judged(beyond)
    assert verdict.outcome is Outcome.CRASHED and ".cu:" in verdict.reason


@pytest.fixture
def blind(monkeypatch):
    """A process in which whatever reads a text or machine code fails."""

    contender("")  # is cached, and compiled in this process

    def fail(*args, **kwargs):
        raise AssertionError("read outside of the jail")

    for module, name in (
        (compiling, "_run_nvrtc"),
        (compiling, "disassemble"),
        (compiling, "line_table"),
        (gate.core, "Program"),
        (predict, "Program"),
        (profile, "Program"),
    ):
        monkeypatch.setattr(module, name, fail)


def test_nothing_reads_a_proposal_in_this_process(blind):
    marked = without_listing(contender.__wrapped__(jail.MARK))
    assert judged(marked).correct
    assert predict_figure(target(), marked, {}).by_model
    assert profile_without_gpu(target(), marked).tool == "model"


def test_that_is_seen_of_a_text_without_the_mark(blind):
    plain = contender("")
    for stage in (
        lambda: contender.__wrapped__(""),
        lambda: judged(plain),
        lambda: predict_figure(target(), plain, {}),
        lambda: profile_without_gpu(target(), plain),
    ):
        with pytest.raises(AssertionError, match="outside of the jail"):
            stage()


def test_without_a_jail_no_stage_goes_on(monkeypatch, tmp_path):
    marked = contender(jail.MARK)
    monkeypatch.setenv("PATH", str(tmp_path))
    jail.why_no_jail.cache_clear()
    try:
        for stage in (
            lambda: contender.__wrapped__(jail.MARK),
            lambda: judged(marked),
            lambda: predict_figure(target(), marked, {}),
            lambda: profile_without_gpu(target(), marked),
        ):
            with pytest.raises(MachineError, match="install bubblewrap"):
                stage()
    finally:
        monkeypatch.undo()
        jail.why_no_jail.cache_clear()
