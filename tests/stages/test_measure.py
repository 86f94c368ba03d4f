"""Measuring on the stand-in driver: all of the host's code is real; kernels are Python, and time passes as they say.

What it shows is how the host times, checks and decides, never how fast a kernel is or what a GPU does.
"""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import re
import statistics
from dataclasses import replace

import numpy as np
import pytest
import torch

from evoengine.errors import MachineError
from evoengine.gpu import find_gpu
from evoengine.records import L2, Baseline, Clocks, LaunchMode, Outcome, Policy, Rejection
from evoengine.stages.policy import choose_policy
from evoengine.stages.figures import Subject, make_figure
from evoengine.stages.statistics import FEWEST
from evoengine.stages.timing import Rounds
from evoengine.workloads import find_workload
from evoengine.workloads.attention.problem import AttentionProblem, parse_problem
from evoengine.workloads.base import Target

pytestmark = pytest.mark.stand_in
PROBLEM = parse_problem("b2,h8,s64,d32,fp16,causal,kv2")
H100 = find_gpu("h100")
US = {"SDPA FLASH_ATTENTION": 300.0, "SDPA MATH": 900.0}


@pytest.fixture(autouse=True)
def stage(monkeypatch):
    """The stage with a bench of its own."""
    from evoengine.stages import measure
    from tests.fake_cuda import device

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f")
    monkeypatch.setattr(device, "times", dict(US))
    measure._bench.cache_clear()
    device.reset()
    yield measure
    measure._bench.cache_clear()
    device.reset()


@pytest.fixture
def clock(monkeypatch):
    """How long a repetition may take is cut short for kernels that never end."""
    from evoengine.devices import base
    from evoengine.stages import bench

    monkeypatch.setattr(bench, "launch_seconds", lambda flops: 0.2)
    monkeypatch.setattr(base, "LAUNCH_SECONDS", 0.2)


def contender(trial, us, change=None):
    from tests.fake_cuda.programs import contender as made

    return made(PROBLEM, trial, us, change)


def target(problem: AttentionProblem | None = None) -> Target:
    return Target(find_workload("attention"), problem or PROBLEM, H100)


STREAM = Policy(LaunchMode.STREAM, L2.COLD, Clocks.BOOST)
SDPA = Baseline("FLASH_ATTENTION", "stand-in", 300.0, 1.0, (), STREAM)


def judge(stage, candidate, incumbent=None, seed=5, rival=SDPA):
    plan = [(case, candidate.source.launch) for case in find_workload("attention").cases(PROBLEM, {})[:3]]
    return stage.measure(target(), candidate, plan, seed, incumbent, rival)


def test_a_good_candidate_passes_the_gate_before_and_after_it_is_timed(stage):
    verdict, figure = judge(stage, contender(1, 200.0))
    assert verdict.correct
    names = [c.name for c in verdict.cases]
    assert names.index("full problem") < names.index("full problem after timing")
    assert "full problem, all rows" in names
    assert len({c.seed for c in verdict.cases if c.name.startswith("full")}) == 2
    assert figure.median_us == pytest.approx(200.0, rel=0.01) == statistics.median(figure.samples_us)
    assert figure.vs_baseline == pytest.approx(1.5, rel=0.01)
    assert figure.tflops == pytest.approx(find_workload("attention").flops(PROBLEM) / figure.compared_us / 1e6)
    assert figure.policy == STREAM
    assert len(figure.samples_us) >= FEWEST
    assert figure.terms["peak_tflops_percent"] == pytest.approx(100 * figure.tflops / H100.tensor_tflops)
    assert figure.terms["peak_gbs_percent"] > 0


def test_no_figure_of_the_stand_in_can_be_taken_for_a_gpus(stage):
    verdict, figure = judge(stage, contender(1, 200.0))
    assert figure.device == verdict.device == "stand-in driver without a GPU"


# ── the check of whole outputs ──────────────────────────────────────────────────────────────────────────────────────

FULL = PROBLEM.batch * PROBLEM.heads * PROBLEM.seq_q * PROBLEM.head_dim


def at_full_size(change):
    """The fault shows at the full problem alone, as one that the gate's small cases cannot have."""

    def changed(out, launch):
        if out.numel() == FULL:
            return change(out)

    return changed


def zero_but_two_heads(out):
    first, last = out[0, 0].clone(), out[-1, -1].clone()
    out.zero_()
    out[0, 0], out[-1, -1] = first, last


def forget_the_last_row(out):
    out[:, :, -1] = float("nan")


def swap_two_rows(out):
    out[0, 5, [40, 41]] = out[0, 5, [41, 40]]


def another_heads_output(out):
    out[1, 3] = out[1, 2]


def one_row_of_zeros(out):
    out[1, 6, 63] = 0.0


def five_percent_off(out):
    out[1, 4] *= 1.05


WRONG = {
    "all heads but the first and the last are zero": zero_but_two_heads,
    "a row is never written": forget_the_last_row,
    "two rows of one head are exchanged": swap_two_rows,
    "a head has its neighbour's output": another_heads_output,
    "one row is zero": one_row_of_zeros,
    "one head is five percent too large": five_percent_off,
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_anywhere_at_full_size_is_found(stage, name):
    verdict, figure = judge(stage, contender(1, 200.0, at_full_size(WRONG[name])))
    assert verdict.outcome is Outcome.INCORRECT and figure is None
    assert verdict.reason.startswith("full problem")


def test_the_samples_alone_do_not_find_it_but_the_comparison_of_all_rows_does(stage, monkeypatch):
    from evoengine.stages.bench import Bench
    from evoengine.workloads.attention import tensors as attention_tensors

    wrong = contender(1, 200.0, at_full_size(zero_but_two_heads))
    first_and_last = [(0, 0, range(64)), (1, 7, range(64))]

    def samples(tensors, problem, inputs, seed):
        return [attention_tensors._sample(problem, inputs, *place) for place in first_and_last]

    monkeypatch.setattr(attention_tensors.AttentionTensors, "samples", samples)
    found = judge(stage, wrong)[0].reason
    assert found.startswith("full problem, all rows: 896 of 1024 rows differ from SDPA's")

    def again(bench, name, seed, allowed):
        return bench._compare(name, seed, samples(None, PROBLEM, bench._sets[0][0], seed)[0])

    monkeypatch.setattr(Bench, "_compare_whole", again)
    monkeypatch.setattr(Bench, "output_check", lambda bench, checked: None)
    assert judge(stage, wrong)[0].correct


@pytest.mark.parametrize("text", ["b1,h2,sq96,sk160,d64,bf16,causal", "b2,h2,s128,d32,bf16", "b1,h3,s1,d64,fp16"])
def test_right_outputs_of_other_shapes_pass(stage, monkeypatch, text):
    monkeypatch.setitem(globals(), "PROBLEM", parse_problem(text))
    verdict, figure = judge(stage, contender(1, 200.0))
    assert verdict.correct and figure.tflops > 0, verdict.reason


def test_a_kernel_that_goes_wrong_when_warm_has_no_figure(stage):
    """Three gate cases, the check and its warm-up of two sets come before what counts."""

    def change(out, launch):
        if launch > 12:
            out.mul_(1.1)

    verdict, figure = judge(stage, contender(1, 200.0, change))
    assert re.match("full problem while timed: repetition [0-9]+: 1024 of 1024 rows differ", verdict.reason)
    assert figure is None


# ── what a kernel keeps from one repetition to the next ─────────────────────────────────────────────────────────────


def repetition_of(verdict):
    return int(re.match(r"full problem while timed: repetition (\d+)", verdict.reason)[1])


@pytest.mark.parametrize("seed", range(5))
def test_a_kernel_that_idles_once_it_is_timed_is_caught_within_20_repetitions(stage, seed):
    def change(out, launch):
        if launch > 15:
            out.fill_(float("nan"))  # as the host left it

    verdict, figure = judge(stage, contender(1, 200.0, change), seed=seed)
    assert figure is None and repetition_of(verdict) <= 20
    assert "outputs are NaN or were never written" in verdict.reason


def test_a_result_kept_for_fewer_repetitions_is_caught_after_them(stage):
    def change(out, launch):
        if launch > 15:
            out.copy_(kept.setdefault("first", out.clone()))

    kept = {}
    verdict, figure = judge(stage, contender(1, 200.0, change))
    assert figure is None and verdict.outcome is Outcome.INCORRECT


@pytest.mark.parametrize("seed", range(5))
def test_a_result_kept_from_before_is_caught_within_20_repetitions(stage, seed):
    """Of a kernel whose times scatter so much that it is repeated that often; see below for the others."""
    kept, rng = [], np.random.default_rng(seed)

    def us_with_noise():
        return 200.0 * (1 + 0.05 * rng.random())

    def change(out, launch):
        if launch > 15:
            kept.append(out.clone()) if not kept else out.copy_(kept[0])

    verdict, figure = judge(stage, contender(1, us_with_noise, change), seed=seed)
    assert figure is None and repetition_of(verdict) <= 20
    assert "rows differ from SDPA's" in verdict.reason


# ── crashes, hangs, memory ──────────────────────────────────────────────────────────────────────────────────────────


def rejected(ended, outcome):
    """What came before is kept, with the case in which the kernel failed."""
    assert isinstance(ended, Rejection) and ended.outcome is ended.verdict.outcome is outcome
    *before, last = ended.verdict.cases
    assert len(before) == 3 and all(case.correct for case in before)
    assert (last.name, last.correct, last.reason) == ("full problem", False, ended.reason)
    return ended


def test_a_candidate_that_hangs_at_full_size_is_rejected_with_what_the_gate_had_found(stage, clock):
    ended = rejected(judge(stage, contender(1, 200.0, at_full_size(lambda out: -1))), Outcome.HUNG)
    assert ended.reason.startswith("kernel attention_1: no end after 0.2 s")


def test_a_cuda_error_at_full_size_is_a_crash_in_the_drivers_words(stage):
    ended = rejected(judge(stage, contender(1, 200.0, at_full_size(lambda out: 700))), Outcome.CRASHED)
    assert ended.reason.startswith("kernel attention_1: an illegal memory access was encountered")


def test_a_failure_in_a_gate_case_is_a_rejection_so_that_the_runner_is_replaced(stage):
    from evoengine.stages.pipeline import measure_task

    broken = contender(1, 200.0, lambda out, launch: 700)
    plan = [(find_workload("attention").cases(PROBLEM, {})[0], broken.source.launch)]
    ended = measure_task(target(), broken, plan, 5, None, SDPA)
    assert isinstance(ended, Rejection) and ended.outcome is Outcome.CRASHED
    assert "illegal memory access" in ended.reason
    assert [case.correct for case in ended.verdict.cases] == [False]


@pytest.mark.parametrize("call", ["cuModuleLoadData", "cuLaunchKernel"])
def test_a_driver_out_of_memory_is_asked_again_without_what_torch_keeps(stage, call):
    from tests.fake_cuda import device

    made = contender(1, 200.0)
    before = len(device.released)
    with failing(call, code=2, count=1):
        verdict, figure = judge(stage, made)
    assert verdict.correct and figure.tflops > 0
    assert len(device.released) == before + 1


@pytest.mark.parametrize("call", ["cuModuleLoadData", "cuLaunchKernel"])
def test_a_driver_that_stays_out_of_memory_is_the_machines_fault_and_no_candidates(stage, call):
    made = contender(1, 200.0)
    with failing(call, code=2, count=99), pytest.raises(MachineError, match="the GPU is out of memory: [\\d,]+ of"):
        judge(stage, made)


@pytest.mark.parametrize("code", [3, 214, 802])
def test_a_machine_that_cannot_load_kernels_does_not_make_them_uncompilable(stage, code):
    made = contender(1, 200.0)
    with failing("cuModuleLoadData", code, count=99), pytest.raises(MachineError, match="the GPU cannot load a kernel"):
        judge(stage, made)


def test_a_binary_for_another_gpu_is_refused_as_such(stage):
    from evoengine.stages.compile import compile_source

    made = contender(1, 200.0)
    other = replace(made, binary=compile_source(made.source, "sm_80"))
    ended = judge(stage, other)
    assert (ended.outcome, ended.verdict) == (Outcome.UNCOMPILABLE, None)
    assert "the GPU cannot run the binary: no kernel image is available" in ended.reason


def test_more_shared_memory_than_the_gpu_has_is_the_binarys_fault(stage):
    made = contender(1, 200.0)
    greedy = replace(made, source=replace(made.source, launch=replace(made.source.launch, shared_bytes=300_000)))
    ended = judge(stage, greedy)
    assert ended.outcome is Outcome.UNCOMPILABLE and "invalid argument" in ended.reason


def test_torch_out_of_memory_is_the_machines_fault(stage, monkeypatch):
    stage._bench(target())
    monkeypatch.setenv("FAKE_CUDA_OTHERS_BYTES", str(80 << 30))
    with pytest.raises(MachineError, match="the GPU ran out of memory on attention:b2,h8,s64"):
        judge(stage, contender(1, 200.0))


def test_a_problem_that_does_not_fit_names_the_bytes_needed_and_there(stage, monkeypatch):
    monkeypatch.setenv("FAKE_CUDA_OTHERS_BYTES", str(79 << 30))
    said = r"s2048,d64,fp16 needs [\d,]{12,} bytes of GPU memory to be timed and [\d,]+ of 85,899,345,920 are free"
    with pytest.raises(MachineError, match=said):
        stage.baselines(target(parse_problem("b8,h16,s2048,d64,fp16")), 1)


def test_the_memory_that_is_asked_for_covers_drawing_and_checking(stage):
    from evoengine.stages.bench import needed_bytes

    long = parse_problem("b1,h2,s131072,d128,bf16")
    # three float64 matrices of the scores that are held at once, beside all inputs and outputs and the flush
    assert needed_bytes(target(long)) > 3 * 8 * (1 << 28) + 4 * 2 * 2 * 131072 * 128 + (512 << 20)


def test_modules_are_unloaded_and_graphs_keep_theirs_until_they_go(stage):
    from tests.fake_cuda.device import live

    gc.collect()
    before = live("module")
    for trial in range(4):
        verdict, figure = judge(stage, contender(trial, 50.0), contender(9, 50.0))  # quick: replayed from graphs
        assert verdict.correct and figure.median_us == pytest.approx(50.0, rel=0.03)
    gc.collect()
    assert live("module") == before
    assert live("executable graph") <= 1 and live("event") == 0  # SDPA's may stay


def test_a_captured_kernel_outlives_whoever_loaded_it(stage):
    bench = stage._bench(target())
    made = contender(1, 50.0)
    replay = bench._work(stage._load(made), made, bench._sets[0], "captured").captured()
    gc.collect()
    assert bench.clock.once(replay, "captured").microseconds == pytest.approx(50.0, rel=0.03)


def test_the_process_for_profilers_launches_a_candidate_once_on_the_full_problem(stage, tmp_path):
    from evoengine.stages import launch_once

    seen = []
    made = contender(1, 200.0, lambda out, launch: seen.append(out.numel()) or 0)
    job = tmp_path / "job.pickle"
    job.write_bytes(pickle.dumps((target(), made)))
    launch_once.main(job)
    assert seen == [FULL]


# ── baselines ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_backends_that_do_not_take_the_problem_are_left_out(stage):
    found = {b.name: b for b in stage.baselines(target(), 1)}
    assert set(found) == {"FLASH_ATTENTION", "MATH"}
    assert all(b.device == "stand-in driver without a GPU" for b in found.values())
    assert found["MATH"].median_us == pytest.approx(900.0, rel=0.01)


@pytest.mark.parametrize("without", [(), ("MATH",)])
def test_a_backend_that_hangs_is_named_and_may_be_left_out(stage, clock, monkeypatch, without):
    from tests.fake_cuda import device

    monkeypatch.setitem(device.times, "SDPA MATH", float("inf"))
    if without:
        assert [b.name for b in stage.baselines(target(), 1, without)] == ["FLASH_ATTENTION"]
        return
    with pytest.raises(stage.BaselineFailed, match="^MATH: kernel SDPA MATH: no end after 0.2 s") as caught:
        stage.baselines(target(), 1)
    assert (caught.value.name, caught.value.outcome) == ("MATH", Outcome.HUNG)


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
    assert len(figure.samples_us) >= FEWEST


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


def test_finals_rank_by_the_same_rounds(stage):
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
    assert "that NVIDIA Slow can do" in make_figure(Subject(replace(target(), gpu=slow), SDPA), rounds, "candidate").suspect
    narrow = replace(H100, memory_gbs=1e-3)
    assert "can read" in make_figure(Subject(replace(target(), gpu=narrow), SDPA), rounds, "candidate").suspect


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
    monkeypatch.setenv("FAKE_CUDA_LAUNCH_US", "1000")  # longer than the flush
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
    found = stage.baselines(target(), 1)
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


@contextlib.contextmanager
def failing(call, code, count):
    """The next `count` calls of that driver function fail."""
    from tests.fake_cuda import device

    device.reset()
    os.environ["FAKE_CUDA_FAIL"] = f"{call}:{code}:{count}"
    try:
        yield
    finally:
        del os.environ["FAKE_CUDA_FAIL"]
