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

from evoengine.devices import cuda_api
from evoengine.errors import MachineError
from evoengine.records import Outcome, Rejection
from evoengine.timing.statistics import MIN_SAMPLES
from evoengine.workloads import find_workload
from evoengine.workloads.attention.problem import parse_problem
from evoengine.workloads.base import Case
from tests.support.exhaustive import more
from tests.timing.measuring import FULL, H100, PROBLEM, SDPA, STREAM, at_full_size, contender, judge, target

pytestmark = pytest.mark.stand_in


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
    assert len(figure.samples_us) >= MIN_SAMPLES
    assert figure.terms["peak_tflops_percent"] == pytest.approx(100 * figure.tflops / H100.tensor_tflops)
    assert figure.terms["peak_gbs_percent"] > 0


def test_no_figure_of_the_stand_in_can_be_taken_for_a_gpus(stage):
    verdict, figure = judge(stage, contender(1, 200.0))
    assert figure.device == verdict.device == "stand-in driver without a GPU"


def test_candidates_that_come_pickled_one_by_one_share_the_problems_memory(stage):
    """A worker unpickles the target with every candidate; a bench for each filled an H100 after some hundred."""
    free = []
    for trial in (1, 2, 3):
        again = pickle.loads(pickle.dumps(target()))
        assert judge(stage, contender(trial, 200.0), of=again)[0].correct
        gc.collect()
        free.append(cuda_api.memory_info()[0])
    assert free[0] == free[1] == free[2]


def test_the_memory_of_a_target_is_given_back_for_the_next(stage):
    judge(stage, contender(1, 200.0))
    gc.collect()
    free, _ = cuda_api.memory_info()
    stage.forget()
    gc.collect()
    assert cuda_api.memory_info()[0] > free


# ── the check of whole outputs ──────────────────────────────────────────────────────────────────────────────────────


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
    from evoengine.timing.bench import Bench
    from evoengine.workloads.attention import tensors as attention_tensors

    wrong = contender(1, 200.0, at_full_size(zero_but_two_heads))
    first_and_last = [(0, 0, range(64)), (1, 7, range(64))]

    def samples(tensors, problem, inputs, seed):
        return [attention_tensors._sample(problem, inputs, *place) for place in first_and_last]

    monkeypatch.setattr(attention_tensors.AttentionTensors, "samples", samples)
    found = judge(stage, wrong)[0].reason
    assert found.startswith("full problem, all rows: 896 of 1024 rows differ from SDPA's")

    def again(bench, name, seed, allowed):
        sample = samples(None, PROBLEM, bench._sets[0][0], seed)[0]
        return bench._compare(Case(name, sample.problem), sample.inputs, sample.take(bench._results()), seed)

    monkeypatch.setattr(Bench, "_compare_whole", again)
    monkeypatch.setattr(Bench, "output_check", lambda bench, checked: None)
    assert judge(stage, wrong)[0].correct


@pytest.mark.parametrize(("off", "wrong_rows"), [(2e-6, 0), (2e-5, 1)])
def test_a_row_whose_terms_cancel_may_differ_by_their_rounding(off, wrong_rows):
    """As of dQ of a causal mask, whose first row is 0: an H100's kernels left 4e-7 of it, SDPA 1e-7."""
    from evoengine.timing.bench import _worst_row

    theirs = torch.full((8, 64), 0.5, dtype=torch.float16)
    theirs[0] = 1e-7
    ours = theirs.clone()
    ours[0] += off
    assert _worst_row(ours, theirs, 0.01, "SDPA").wrong_rows == wrong_rows


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


@pytest.mark.parametrize("seed", [0, *more(range(1, 5))])
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


@pytest.mark.parametrize("seed", [0, *more(range(1, 5))])
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
    assert ended.reason.startswith("kernel attention: no end after 0.2 s")


def test_a_cuda_error_at_full_size_is_a_crash_in_the_drivers_words(stage):
    ended = rejected(judge(stage, contender(1, 200.0, at_full_size(lambda out: 700))), Outcome.CRASHED)
    assert ended.reason.startswith("kernel attention: an illegal memory access was encountered")


def test_a_failure_in_a_gate_case_is_a_rejection_so_that_the_runner_is_replaced(stage):
    from evoengine.stages.tasks import measure_task

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
    judge(stage, made)
    usual = len(device.released) - before
    with failing(call, code=2, count=1):
        verdict, figure = judge(stage, made)
    assert verdict.correct and figure.tflops > 0
    assert len(device.released) == before + 2 * usual + 1


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
    said = r"s2048,d64,fp16 needs [\d,]{12,} bytes of GPU memory, and [\d,]+ of 85,899,345,920 are free"
    with pytest.raises(MachineError, match=said):
        stage.baselines(target(parse_problem("b8,h16,s2048,d64,fp16")), 1)


def test_memory_that_a_killed_runner_still_holds_is_waited_for(stage, monkeypatch):
    """On an H100 a search's runner found 1.7 of 85 GB free, most likely while its predecessor's was being freed."""
    from evoengine.devices.torch_gpu import gpu
    from evoengine.timing.clock import flush_bytes

    monkeypatch.setenv("FAKE_CUDA_OTHERS_BYTES", str((80 << 30) - flush_bytes()))
    rest, rests = gpu().rest, []

    def until_freed(seconds):
        rests.append(seconds)
        if len(rests) == 5:
            monkeypatch.delenv("FAKE_CUDA_OTHERS_BYTES")
        rest(seconds)

    monkeypatch.setattr(gpu(), "rest", until_freed)
    assert stage.baselines(target(parse_problem("b1,h2,s256,d64,fp16")), 1)
    assert len(rests) >= 5


def test_the_memory_that_is_asked_for_covers_drawing_and_checking(stage):
    from evoengine.timing.bench import needed_bytes

    long = parse_problem("b1,h2,s131072,d128,bf16")
    # three float64 matrices of the scores that are held at once, beside all inputs and outputs and the flush
    assert needed_bytes(target(long)) > 3 * 8 * (1 << 28) + 4 * 2 * 2 * 131072 * 128 + (512 << 20)


@pytest.mark.exhaustive
def test_modules_are_unloaded_and_graphs_keep_theirs_until_they_go(stage):
    from tests.fake_cuda.device import live

    gc.collect()
    kinds = ("module", "event", "executable graph")
    before, events, graphs = map(live, kinds)  # what was kept of kernels that never ended is there
    for trial in range(4):
        verdict, figure = judge(stage, contender(trial, 50.0), contender(9, 50.0))  # quick: replayed from graphs
        assert verdict.correct and figure.median_us == pytest.approx(50.0, rel=0.03)
    gc.collect()
    assert live("module") == before
    assert live("executable graph") <= graphs + 1 and live("event") == events  # SDPA's may stay


def test_a_captured_kernel_outlives_whoever_loaded_it(stage):
    bench = stage._bench(target())
    made = contender(1, 50.0)
    replay = bench._work(stage._load(made), made, bench._sets[0], "captured").captured()
    gc.collect()
    assert bench.clock.once(replay, "captured").microseconds == pytest.approx(50.0, rel=0.03)


def test_the_process_for_profilers_launches_a_candidate_once_on_the_full_problem(stage, tmp_path):
    from evoengine.timing import launch_once

    seen = []
    made = contender(1, 200.0, lambda out, launch: seen.append(out.numel()) or 0)
    job = tmp_path / "job.pickle"
    job.write_bytes(pickle.dumps((target(), made)))
    launch_once.main(job)
    assert seen == [FULL]


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
