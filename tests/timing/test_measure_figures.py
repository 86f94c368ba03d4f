"""Baselines, repetitions, policies, sensors and finals on the stand-in driver: what the host decides from times.

Its figures say nothing of a GPU.
"""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from evoengine.records import Baseline, Outcome, RefusedBaseline
from evoengine.timing import clock
from evoengine.timing.figures import Subject, choose_policy, make_figure
from evoengine.timing.rounds import Rounds
from evoengine.timing.statistics import MIN_SAMPLES
from evoengine.workloads import find_workload
from evoengine.workloads.attention.problem import parse_problem
from evoengine.workloads.attention.tensors import AttentionTensors
from tests.support.libraries_path import libraries
from tests.timing.measuring import H100, PROBLEM, SDPA, contender, judge, target

pytestmark = pytest.mark.stand_in


def timed(found):
    return {b.name: b for b in found if isinstance(b, Baseline)}


def refused(found):
    return {b.name: b.reason for b in found if isinstance(b, RefusedBaseline)}


# ── baselines ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_backends_that_do_not_take_the_problem_are_left_out(stage):
    found = timed(stage.baselines(target(), 1))
    assert set(found) == {"FLASH_ATTENTION", "MATH"}
    assert all(b.device == "stand-in driver without a GPU" for b in found.values())
    assert found["MATH"].median_us == pytest.approx(900.0, rel=0.01)


def test_without_a_baseline_each_ones_reason_is_said(stage):
    failed = {"FLASH_ATTENTION": "FLASH_ATTENTION: an illegal memory access", "MATH": "MATH: no end after 10 s"}
    with pytest.raises(stage.NoBaseline) as caught:
        stage.baselines(target(), 1, failed)
    said = str(caught.value)
    assert all(sentence in said for sentence in failed.values())
    assert "CUDNN_ATTENTION: " in said and "EFFICIENT_ATTENTION: " in said  # which the stand-in's library refuses


def test_a_problem_that_no_library_supports_is_timed_beside_plain_torch(stage, monkeypatch):
    def refuse(self, name, problem, inputs):
        raise RuntimeError("torch has no such attention")

    monkeypatch.setattr(AttentionTensors, "baseline", refuse)
    assert list(timed(stage.baselines(target(), 1))) == ["plain torch"]
    monkeypatch.setattr(AttentionTensors, "baselines", lambda self, problem: ())
    assert list(timed(stage.baselines(target(), 1))) == ["plain torch"]


@pytest.mark.parametrize("flushes", [5, 20])
def test_a_library_slow_to_queue_is_timed_behind_a_longer_flush(stage, monkeypatch, flushes):
    from evoengine.devices import torch_gpu  # the stand-in's

    monkeypatch.setattr(torch_gpu, "HOST_US", flushes * 180.0)  # of which one takes 179
    found = timed(stage.baselines(target(), 1))
    assert set(found) == {"FLASH_ATTENTION", "MATH"}
    assert found["MATH"].median_us == pytest.approx(900.0, rel=0.01)


def test_without_a_repetition_that_counts_no_baseline_is_timed(stage, monkeypatch):
    from evoengine.devices import torch_gpu  # the stand-in's

    monkeypatch.setattr(torch_gpu, "HOST_US", 100 * 180.0)
    with pytest.raises(stage.NoBaseline, match="none of 300 repetitions counts: the CPU was not ahead of the GPU"):
        stage.baselines(target(), 1)


@pytest.mark.parametrize("without", [{}, {"MATH": "MATH: no end"}])
def test_a_backend_that_hangs_is_named_and_may_be_left_out(stage, clock, monkeypatch, without):
    from tests.fake_cuda import device

    monkeypatch.setitem(device.times, "SDPA MATH", float("inf"))
    if without:
        assert list(timed(stage.baselines(target(), 1, without))) == ["FLASH_ATTENTION"]
        return
    with pytest.raises(stage.BaselineFailed, match="^MATH: kernel SDPA MATH: no end after 0.2 s") as caught:
        stage.baselines(target(), 1)
    assert (caught.value.name, caught.value.outcome) == ("MATH", Outcome.HUNG)


@pytest.fixture
def installed(monkeypatch):
    """FlashAttention 2 and 3, of stand-ins, and FlashInfer, which takes no heads of 32."""
    with libraries(monkeypatch):
        yield


FA2, FA3 = "flash_attn 2.8.4 flash_attn_func", "flash_attn_interface 3.0.0 flash_attn_func"


def test_kernels_of_installed_packages_are_timed_too_and_the_fastest_counts(stage, installed, monkeypatch):
    from tests.fake_cuda import device

    monkeypatch.setitem(device.times, FA2, 250.0)
    monkeypatch.setitem(device.times, FA3, 150.0)
    found = timed(stage.baselines(target(), 1))
    assert list(found) == ["FLASH_ATTENTION", "MATH", FA2, FA3]
    assert found[FA3].median_us == pytest.approx(150.0, rel=0.01)
    _, figure = judge(stage, contender(2, 100.0), rival=found[FA3])
    assert figure.vs_baseline == pytest.approx(1.5, rel=0.02)


def test_a_package_with_wrong_values_or_that_refuses_is_left_out_with_the_reason(stage, installed, monkeypatch):
    import flash_attn
    import flash_attn_interface

    def refuse(*args, **kwargs):
        raise ValueError("needs sm_90a")

    right = flash_attn.flash_attn_func
    monkeypatch.setattr(flash_attn, "flash_attn_func", lambda *a, **k: right(*a, **k) + 0.01)
    monkeypatch.setattr(flash_attn_interface, "flash_attn_func", refuse)
    found = stage.baselines(target(), 1)
    assert list(timed(found)) == ["FLASH_ATTENTION", "MATH"]
    assert re.fullmatch(r"wrong values: error \S+ where \S+ is allowed", refused(found)[FA2])
    assert refused(found)[FA3] == "ValueError: needs sm_90a"
    assert "EFFICIENT_ATTENTION" in refused(found)  # which the stand-in's library refuses


def test_a_package_that_leaves_outputs_unwritten_is_left_out(stage, installed, monkeypatch):
    import flash_attn

    right = flash_attn.flash_attn_func
    monkeypatch.setattr(flash_attn, "flash_attn_func", lambda *a, **k: right(*a, **k).fill_(torch.nan))
    assert refused(stage.baselines(target(), 1))[FA2] == "wrong values: some outputs are NaN"


def test_packages_are_left_out_together_if_they_ended_the_process(stage, installed):
    found = stage.baselines(target(), 1, {"packages": "the process ended: SIGSEGV"})
    assert list(timed(found)) == ["FLASH_ATTENTION", "MATH"]
    assert refused(found)[FA2] == refused(found)[FA3] == "the process ended: SIGSEGV"


def test_packages_that_are_not_installed_are_not_named(stage):
    assert not [b.name for b in stage.baselines(target(), 1) if "flash_attn" in b.name]


def test_a_library_with_wrong_values_is_not_believed(stage, monkeypatch):
    right = AttentionTensors.baseline

    def wrong(self, name, problem, inputs):
        call = right(self, name, problem, inputs)
        return (lambda: call() * 1.1) if name == "FLASH_ATTENTION" else call

    monkeypatch.setattr(AttentionTensors, "baseline", wrong)
    found = stage.baselines(target(), 1)
    assert list(timed(found)) == ["MATH"]
    assert refused(found)["FLASH_ATTENTION"].startswith("wrong values: error")


# ── the clock ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_candidate_clearly_slower_than_the_incumbent_is_dropped_after_few_repetitions(stage):
    verdict, figure = judge(stage, contender(2, 500.0), incumbent=contender(1, 200.0))
    assert verdict.correct
    assert len(figure.samples_us) == figure.terms["dropped_after"] == 3
    assert figure.terms["incumbent"] == 1.0
    assert figure.terms["times_incumbent"] == pytest.approx(2.5, rel=0.02)


def test_a_candidate_about_as_fast_as_the_incumbent_is_timed_in_full(stage):
    _, figure = judge(stage, contender(2, 201.0), incumbent=contender(1, 200.0))
    assert "dropped_after" not in figure.terms
    assert len(figure.samples_us) >= MIN_SAMPLES


def test_the_l2_is_flushed_before_every_repetition(stage):
    clock = stage._bench(target()).clock
    clock._flush[:64] = 1
    seen = []
    clock.once(lambda: seen.append(int(clock._flush[:64].sum())), "x")
    assert seen == [0]


def test_a_quick_kernel_is_replayed_from_a_graph_and_a_slow_one_is_not(stage):
    from tests.fake_cuda.device import live

    bench = stage._bench(target())
    kept = []
    for trial, us, graphs in ((1, 40.0, 2), (2, 160.0, 0)):
        made, before, policy = contender(trial, us), live("executable graph"), choose_policy(us)
        kept.append(bench.kernel(stage._load(made), made, policy))
        assert live("executable graph") - before == graphs  # one for each set of inputs
        assert kept[-1].repeat(0).microseconds == pytest.approx(us, rel=0.03)


def test_how_long_a_launch_may_take_grows_with_its_work():
    from evoengine.devices.base import LAUNCH_SECONDS, launch_seconds

    flops = find_workload("attention").flops
    assert launch_seconds(flops(PROBLEM)) == pytest.approx(LAUNCH_SECONDS, rel=0.01)
    # at 128k tokens a kernel that does one TFLOPS takes over two minutes
    long = flops(parse_problem("b1,h16,s131072,d128,bf16"))
    assert launch_seconds(long) > long / 1e12 > 120


# ── finals, figures, sensors ────────────────────────────────────────────────────────────────────────────────────────


def test_finals_rank_by_the_same_rounds(stage, monkeypatch):
    # thousands of launches back to back follow the rounds, which are another test's
    monkeypatch.setattr(clock, "SETTLING_US", 0.0)
    monkeypatch.setattr(clock, "COUNTED_US", 2e4)
    contenders = [contender(trial, us) for trial, us in ((1, 230.0), (2, 200.0), (3, 260.0))]
    finals = stage.finals(target(), contenders, 3, SDPA)
    assert finals.order == (2, 1, 3)
    assert {len(f.samples_us) for f in finals.figures.values()} == {len(finals.figures[1].samples_us)}
    assert finals.figures[3].vs_baseline == pytest.approx(300 / 260, rel=0.01)


def test_a_figure_above_the_roofline_is_suspect(stage):
    _, figure = judge(stage, contender(1, 101.0))
    assert figure.suspect is None
    slow = replace(H100, tensor_tflops=figure.tflops / 2, name="NVIDIA Slow")
    rounds = Rounds({"candidate": list(figure.samples_us)})
    assert (
        "that NVIDIA Slow can do"
        in make_figure(Subject(replace(target(), gpu=slow), SDPA), rounds, "candidate", {"HMMA": 8}).suspect
    )
    narrow = replace(H100, memory_gbs=1e-3)
    assert "can read" in make_figure(Subject(replace(target(), gpu=narrow), SDPA), rounds, "candidate", {}).suspect


def test_clocks_are_logged(stage):
    _, figure = judge(stage, contender(1, 200.0))
    assert (figure.terms["sm_mhz"], figure.terms["temperature_c"]) == (1980.0, 60.0)
    assert figure.terms["throttled"] == 0


def test_throttled_rounds_are_dropped(stage, monkeypatch):
    from tests.fake_cuda.device import now

    monkeypatch.setenv("FAKE_CUDA_THROTTLE", f"{now() + 24e3}:{now() + 60e3}:2.0")
    _, figure = judge(stage, contender(1, 200.0))
    assert figure.terms["throttled"] == 1.0, "after the first pause the GPU has recovered"
    assert figure.terms["sm_mhz_lowest"] == 1980.0
    assert max(figure.samples_us) == pytest.approx(200.0, rel=0.02)


def test_a_gpu_that_only_throttles_makes_the_candidate_suspect(stage, monkeypatch):
    monkeypatch.setenv("FAKE_CUDA_THROTTLE", "0:1e12:2.0")
    ended = judge(stage, contender(1, 200.0))
    assert ended.outcome is Outcome.SUSPECT and ended.verdict.correct
    assert re.search("none of [0-9]+ repetitions counts: throttled", ended.reason)


def test_where_the_cpu_was_not_ahead_the_repetition_does_not_count(stage, monkeypatch):
    monkeypatch.setenv("FAKE_CUDA_LAUNCH_US", "20000")  # longer than the longest flush
    ended = judge(stage, contender(1, 200.0))
    assert "none of 300 repetitions counts: the CPU was not ahead of the GPU" in ended.reason


def test_a_figure_is_scaled_by_the_baseline_of_the_same_rounds(stage):
    """While it was timed all was a tenth slower than over the long run."""
    rival = replace(SDPA, median_us=300.0 / 1.1)
    _, figure = judge(stage, contender(1, 200.0), rival=rival)
    assert figure.median_us == pytest.approx(200.0, rel=0.01)
    assert figure.normalised_us == figure.compared_us == pytest.approx(200.0 / 1.1, rel=0.01)


# ── policies ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("us", "policy"), [(300.0, "stream, cold L2, boost clocks"), (60.0, "graph, cold L2, boost clocks, batches of 2"),
                       (7.0, "graph, cold L2, boost clocks, batches of 16")],
)  # fmt: skip
def test_the_fastest_baseline_decides_how_all_kernels_of_a_problem_are_timed(stage, monkeypatch, us, policy):
    from tests.fake_cuda import device

    monkeypatch.setattr(device, "times", {"SDPA FLASH_ATTENTION": us, "SDPA MATH": 900.0})
    found = list(timed(stage.baselines(target(), 1)).values())
    assert {str(b.policy) for b in found} == {policy}
    assert min(b.median_us for b in found) == pytest.approx(us, rel=0.03)
    fastest = min(found, key=lambda b: b.median_us)
    _, figure = judge(stage, contender(1, us / 1.5), rival=fastest)
    assert str(figure.policy) == policy
    assert figure.vs_baseline == pytest.approx(1.5, rel=0.05)


def test_each_launch_of_a_batch_has_inputs_of_its_own(stage):
    """Or the second would find them in the L2."""
    bench = stage._bench(target())
    bench.baseline("FLASH_ATTENTION", choose_policy(7.0))
    for copies in bench._sets:
        assert len({copy["q"].data_ptr() for copy in copies}) == 16
        assert all(torch.equal(copy[n], copies[0][n]) for copy in copies for n in "qkv")
    bench.refresh(9)
    assert all(torch.equal(copy["k"], copies[0]["k"]) for copies in bench._sets for copy in copies)
    assert not torch.equal(bench._sets[0][0]["q"], bench._sets[1][0]["q"])


def test_a_process_that_takes_over_from_a_broken_one_times_whole_batches_too(stage):
    """It was not there when the baselines were timed."""
    policy = choose_policy(7.0)
    _, figure = judge(stage, contender(1, 7.0), rival=replace(SDPA, policy=policy))
    assert policy.batch == 16
    assert figure.median_us == pytest.approx(7.0, rel=0.03)


def test_finalists_are_run_back_to_back_too(stage):
    slow = replace(SDPA, median_us=30_000.0)
    found = stage.finals(target(), [contender(1, 23_000.0), contender(2, 20_000.0)], 3, slow)
    assert set(found.sustained) == {1, 2}
    figure = found.sustained[2]
    assert str(figure.policy) == "stream, warm L2, sustained clocks"
    assert sum(figure.samples_us) * 2 >= 1e6  # a sample is the mean of two launches
    assert figure.median_us == pytest.approx(20_000.0, rel=0.01)
    assert {"sm_mhz", "watts"} <= figure.terms.keys()


def test_a_finalist_that_is_wrong_is_out_and_the_others_are_ranked(stage):
    def change(out, launch):
        if launch > 15:
            out.zero_()

    found = stage.finals(target(), [contender(1, 23_000.0), contender(2, 20_000.0, change)], 3, SDPA)
    assert found.order == (1,) and set(found.wrong) == {2}
    assert "rows differ from SDPA's" in found.wrong[2]
