"""The GPU's measuring with the CPU in the GPU's place: everything but CUDA itself is real, the clock is simulated."""

from __future__ import annotations

import contextlib
import statistics
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from evoengine.devices.base import KernelCrashed, KernelHung
from evoengine.devices.nvml import Reading, Sensors
from evoengine.errors import MachineError
from evoengine.gpu import find_gpu
from evoengine.problem import parse_problem
from evoengine.records import Binary, Contender, Launch, Outcome, Rejection, Source
from evoengine.stages import measure as stage
from evoengine.stages.pipeline import measure_task
from evoengine.stages.statistics import FEWEST
from evoengine.stages.timing import Dropped, Rounds
from evoengine.workloads import find_tensors, find_workload

PROBLEM = parse_problem("b2,h4,s64,d32,fp16,causal,kv2")
H100 = find_gpu("h100")
LAUNCH = Launch((1, 1, 1), 32, 0)
TENSORS = find_tensors("attention")


class FakeGpu:
    """What the stage asks of torch.cuda; time passes as the kernels say."""

    def __init__(self, seed=0):
        self.now, self.rng = 0.0, np.random.default_rng(seed)
        self.sdpa_runs = 0

    def spend(self, us):
        self.now += us * (1 + 0.003 * abs(self.rng.normal()))

    def event(self, enable_timing=False):
        gpu, at = self, []
        return SimpleNamespace(
            record=lambda: at.append(gpu.now), query=lambda: True, at=at,
            elapsed_time=lambda end: (end.at[-1] - at[-1]) / 1e3,
        )  # fmt: skip


@pytest.fixture
def gpu(monkeypatch):
    gpu = FakeGpu()
    cuda = torch.cuda
    monkeypatch.setattr(stage, "DEVICE", "cpu")
    monkeypatch.setattr(stage, "FLUSH_BYTES", 1 << 10)
    monkeypatch.setattr(cuda, "Event", gpu.event)
    monkeypatch.setattr(cuda, "get_device_name", lambda: "NVIDIA Fake")
    monkeypatch.setattr(cuda, "get_device_properties", lambda _: SimpleNamespace(L2_cache_size=64))
    monkeypatch.setattr(cuda, "mem_get_info", lambda: (2**30, 2**31))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a")
    monkeypatch.setattr(stage, "open_sensors", lambda uuid: f"none on {uuid}")
    monkeypatch.setattr(stage, "CudaKernel", lambda binary, entry, launch: Kernel(gpu, binary, entry))
    monkeypatch.setattr(stage.Bench, "work", lambda bench, kernel, launch: lambda: kernel.compute(bench))
    sdpa = stage.scaled_dot_product_attention

    def timed_sdpa(*args, **kwargs):
        gpu.spend(300.0)
        gpu.sdpa_runs += 1
        return sdpa(*args, **kwargs) if gpu.sdpa_runs <= 4 else None

    monkeypatch.setattr(stage, "scaled_dot_product_attention", timed_sdpa)
    stage._bench.cache_clear()
    yield gpu
    stage._bench.cache_clear()


class Kernel:
    """Attention on the CPU; what is wrong with it and how long it takes stands in its binary."""

    def __init__(self, gpu, binary, entry):
        self.gpu, self.entry, self.runs, self.results = gpu, entry, 0, {}
        self.us, self.fault = float(binary.options), binary.compiler

    def compute(self, bench):
        self.runs += 1
        self.gpu.spend(self.us)
        inputs = float(bench._inputs["q"].double().sum())
        if inputs not in self.results:
            self.results[inputs] = TENSORS.reference(bench._problem, bench._inputs).half()
        expected = self.results[inputs].clone()
        if self.fault == "forgets the last row":
            expected[:, :, -1] = float("nan")
        if self.fault == "wrong when warm" and self.runs > 5:
            expected *= 1.1
        if self.fault == "hangs":
            raise KernelHung("kernel attention: no end after 10 s on the GPU")
        bench._out.copy_(expected)

    def run(self, launch, arguments, seed):
        """A gate case from host memory, as `CudaKernel.run`."""
        a = {argument.name: argument for argument in arguments}
        found = {n: a[n].data.copy() for n in "qkv"}
        q, k, v = (TENSORS.from_bits(PROBLEM, found[n]) for n in "qkv")
        (batch, heads, seq_q, _), (_, kv_heads, seq_k, _) = q.shape, k.shape
        problem = replace(PROBLEM, batch=batch, heads=heads, kv_heads=kv_heads, seq_q=seq_q, seq_k=seq_k)
        out = TENSORS.reference(problem, {"q": q, "k": k, "v": v}).half()
        return found | {"o": TENSORS.bits(out * 2 if self.fault == "wrong" else out)}


def contender(trial, us, fault="", registers=96):
    binary = Binary(b"", "sm_90a", str(us), fault, registers, 0, 0, 0, (), {}, 1.0)
    return Contender(trial, Source(f"// {trial}", "attention", LAUNCH), binary)


def judge(candidate, incumbent=None, seed=5):
    plan = [(case, LAUNCH) for case in find_workload("attention").cases(PROBLEM, {})[:3]]
    return stage.measure("attention", candidate, plan, PROBLEM, H100, seed, incumbent, "MATH")


def test_a_good_candidate_passes_the_gate_before_and_after_it_is_timed(gpu):
    verdict, figure = judge(contender(1, 200.0))
    assert verdict.correct
    names = [c.name for c in verdict.cases]
    assert names.index("full problem") < names.index("full problem after timing")
    assert len({c.seed for c in verdict.cases if c.name.startswith("full")}) == 2
    assert figure.median_us == pytest.approx(200.0, rel=0.01)
    assert figure.vs_sdpa == pytest.approx(1.5, rel=0.01)
    assert figure.tflops == pytest.approx(find_workload("attention").flops(PROBLEM) / figure.median_us / 1e6)
    assert len(figure.samples_us) >= FEWEST
    assert figure.terms["peak_tflops_percent"] == pytest.approx(100 * figure.tflops / H100.tensor_tflops)
    assert figure.terms["peak_gbs_percent"] > 0


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("wrong", "error"),
        ("forgets the last row", "full problem: 256 of 16384 outputs are NaN"),
        ("wrong when warm", "full problem after timing: error"),
    ],
)
def test_a_wrong_candidate_has_no_figure(gpu, fault, said):
    verdict, figure = judge(contender(1, 200.0, fault))
    assert verdict.outcome is Outcome.INCORRECT and figure is None
    assert said in verdict.reason


def test_a_candidate_that_hangs_at_full_size_raises(gpu):
    with pytest.raises(KernelHung, match="no end"):
        judge(contender(1, 200.0, "hangs"))


@pytest.mark.parametrize(
    ("failure", "outcome"),
    [(KernelCrashed("kernel attention: an illegal address"), Outcome.CRASHED), (KernelHung("no end"), Outcome.HUNG)],
)
def test_a_failure_in_a_gate_case_is_a_rejection_so_that_the_runner_is_replaced(gpu, monkeypatch, failure, outcome):
    def broken(kernel, launch, arguments, seed):
        raise failure

    monkeypatch.setattr(Kernel, "run", broken)
    plan = [(find_workload("attention").cases(PROBLEM, {})[0], LAUNCH)]
    ended = measure_task("attention", contender(1, 200.0), plan, PROBLEM, H100, 5, None, "MATH")
    assert isinstance(ended, Rejection) and ended.outcome is outcome
    assert str(failure) in ended.reason


def test_a_cuda_error_is_a_crash_in_the_gpus_words(gpu, monkeypatch):
    class Lost(RuntimeError):
        pass

    def broken(bench, kernel, launch):
        raise Lost("CUDA error: an illegal memory access was encountered\nCompile with TORCH_USE_CUDA_DSA")

    monkeypatch.setattr(stage, "CUDA_ERRORS", (Lost,))
    monkeypatch.setattr(stage.Bench, "work", broken)
    with pytest.raises(KernelCrashed, match="^kernel attention: CUDA error: an illegal memory access was encountered$"):
        judge(contender(1, 200.0))


def test_a_candidate_plainly_slower_than_the_incumbent_is_dropped_after_few_repetitions(gpu):
    verdict, figure = judge(contender(2, 500.0), incumbent=contender(1, 200.0))
    assert verdict.correct
    assert len(figure.samples_us) == figure.terms["dropped_after"] == 3
    assert figure.terms["incumbent"] == 1.0
    assert figure.terms["times_incumbent"] == pytest.approx(2.5, rel=0.02)


def test_a_candidate_about_as_fast_as_the_incumbent_is_timed_in_full(gpu):
    _, figure = judge(contender(2, 201.0), incumbent=contender(1, 200.0))
    assert "dropped_after" not in figure.terms
    assert len(figure.samples_us) >= FEWEST


def test_the_l2_is_flushed_before_every_repetition(gpu):
    bench = stage._bench("attention", PROBLEM)
    clock = bench.clock(lambda: gpu.spend(float(bench._flush.sum() == 0) * 500), "x")
    bench._flush.fill_(1)
    assert clock() > 400


class Stream:
    current = None

    def __init__(self, name):
        self.name, self.waited_for = name, []

    def wait_stream(self, other):
        self.waited_for.append(other.name)

    @contextlib.contextmanager
    def enter(self):
        before, Stream.current = Stream.current, self
        yield
        Stream.current = before


def test_a_quick_kernel_is_replayed_from_a_graph_and_a_slow_one_is_not(gpu, monkeypatch):
    here, side, runs, captured = Stream("default"), Stream("side"), [], []
    monkeypatch.setattr(torch.cuda, "Stream", lambda: side)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: Stream.current)
    monkeypatch.setattr(torch.cuda, "stream", Stream.enter)
    monkeypatch.setattr(Stream, "current", here)

    @contextlib.contextmanager
    def capture(graph, stream):
        captured.append(graph)
        with stream.enter():
            yield

    def quick():
        runs.append(Stream.current.name + " captured" * len(captured))
        gpu.spend(60.0)

    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=lambda: gpu.spend(40.0)))
    monkeypatch.setattr(torch.cuda, "graph", capture)
    bench = stage._bench("attention", PROBLEM)
    assert bench.clock(quick, "quick")() == pytest.approx(40.0, rel=0.02)
    assert runs[-3:] == ["default", "side", "side captured"]  # PyTorch wants it warmed up where it is captured
    assert side.waited_for == ["default"] and here.waited_for == ["side"]
    assert bench.clock(lambda: gpu.spend(160.0), "slow")() == pytest.approx(160.0, rel=0.02)
    assert len(captured) == 1


def test_backends_that_do_not_take_the_problem_are_left_out(gpu):
    found = stage.baselines("attention", PROBLEM, 1)
    names = [b.name for b in found]
    assert "MATH" in names and "CUDNN_ATTENTION" not in names
    assert all(b.device == "NVIDIA Fake" and b.median_us == pytest.approx(300, rel=0.01) for b in found)


def test_finals_rank_by_the_same_rounds_and_a_tie_goes_to_fewer_registers(gpu):
    asked = ((1, 200.0, 168), (2, 200.05, 90), (3, 260.0, 32))
    contenders = [contender(trial, us, registers=registers) for trial, us, registers in asked]
    finals = stage.finals("attention", contenders, PROBLEM, H100, 3, "MATH")
    assert finals.order == (2, 1, 3)
    assert set(finals.tied) == {1, 2}
    counts = {trial: len(figure.samples_us) for trial, figure in finals.figures.items()}
    assert counts[3] < counts[1] == counts[2]  # what is clearly slower is retired early
    assert finals.lead[1] <= 1 <= finals.lead[2]
    assert finals.figures[3].vs_sdpa == pytest.approx(300 / 260, rel=0.01)


def test_a_figure_above_the_roofline_is_suspect(gpu):
    _, figure = judge(contender(1, 101.0))
    assert figure.suspect is None
    slow = replace(H100, tensor_tflops=figure.tflops / 2, name="NVIDIA Slow")
    rounds = Rounds({"candidate": list(figure.samples_us)})
    assert "that NVIDIA Slow can do" in stage._figure(rounds, "candidate", False, PROBLEM, slow).suspect
    narrow = replace(H100, memory_gbs=1e-3)
    assert "can read" in stage._figure(rounds, "candidate", False, PROBLEM, narrow).suspect


def test_clocks_are_logged_and_throttled_rounds_dropped(gpu, monkeypatch):
    readings = iter([Reading(1900, 60.0, ("power cap",)), Reading(600, 91.0, ("hardware slowdown",), True)] * 500)
    sensors = Sensors.__new__(Sensors)
    monkeypatch.setattr(Sensors, "read", lambda self: next(readings))
    monkeypatch.setattr(stage, "open_sensors", lambda uuid: sensors)
    _, figure = judge(contender(1, 200.0))
    assert (figure.terms["sm_mhz"], figure.terms["temperature_c"]) == (1900.0, 60.0)
    assert figure.terms["throttled"] == len(figure.samples_us) - 1
    assert figure.terms["power_capped"] == len(figure.samples_us)


def test_a_gpu_that_only_throttles_makes_the_candidate_suspect(gpu):
    with pytest.raises(stage.KernelThrottled, match="all of 300 repetitions") as caught:
        dropped = Counter({Dropped.THROTTLED: 300})
        stage._figure(Rounds({"candidate": []}, dropped=dropped), "candidate", True, PROBLEM, H100)
    assert caught.value.outcome is Outcome.SUSPECT


def test_a_problem_that_does_not_fit_names_the_bytes_needed_and_there(gpu):
    with pytest.raises(MachineError, match=r"needs [\d,]{13,} bytes .* 1,073,741,824 of 2,147,483,648 are free"):
        stage.baselines("attention", parse_problem("b64,h64,s16384,d128,fp16"), 1)


def test_medians_are_over_what_was_kept(gpu):
    _, figure = judge(contender(1, 150.0))
    assert figure.median_us == statistics.median(figure.samples_us)
