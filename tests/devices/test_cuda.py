"""A real GPU: its ways to fail become reasons, its runner is replaced, and its timings hold together."""

from __future__ import annotations

import statistics
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from evoengine.devices.base import ConstantArgument, KernelCall, KernelCrashed, TensorArgument
from evoengine.devices.cuda import CudaKernel
from evoengine.devices.driver import find_driver, resolve_gpu
from evoengine.errors import MachineError
from evoengine.gpu import known_gpus
from evoengine.paths import asset
from evoengine.records import Baseline, Binary, CompiledCandidate, Launch, Outcome, Rejection, Source
from evoengine.sandbox.worker_process import WorkerLimits
from evoengine.sandbox.workers import WorkerPool
from evoengine.search.evaluators import GpuEvaluator, Job, Plans, found_baselines, gate_plan
from evoengine.stages.compile import compile_source
from evoengine.stages.render import render
from evoengine.timing.statistics import MIN_SAMPLES
from evoengine.workloads import find_workload
from evoengine.workloads.attention.problem import parse_problem
from evoengine.workloads.base import Target
from tests.support.exhaustive import more
from tests.support.kernel_gate import attention_space
from tests.support.stand_in import on_stand_in, visible_devices

pytestmark = pytest.mark.gpu
TEXT = "b1,h2,s128,d64,fp16" if on_stand_in() else "b2,h8,s512,d64,fp16"
PROBLEM = parse_problem(TEXT)
SIGNATURE = """
#include <cuda_fp16.h>
extern "C" __global__ void attention(const half* q, const half* k, const half* v, half* o, int heads, int kv_heads,
                                     int seq_q, int seq_k, float scale) {{ {body} }}
"""
FAULTS = {
    "illegal address": ("o[1ll << 40] = __float2half(1.0f);", Outcome.CRASHED, "illegal"),
    "trap": ('asm volatile("trap;");', Outcome.CRASHED, ""),
    "misaligned": ("*(volatile int*)((char*)o + 1) = 1;", Outcome.CRASHED, "misaligned"),
    "endless loop": ("while (true) *(volatile int*)o = 1;", Outcome.HUNG, "no end after"),
    "never written": ("", Outcome.INCORRECT, "never written"),
    "writes its input": ("((half*)q)[0] = __float2half(7.0f); o[0] = q[0];", Outcome.INCORRECT, ""),
    "out of bounds by a little": ("o[-1] = __float2half(1.0f);", Outcome.CRASHED, "before the start of o"),
}


@cache
def device():
    return find_driver()[1][0]


@cache
def gpu():
    arch = next(g for g in known_gpus().values() if g.arch.startswith(f"sm_{device().capability}"))
    return resolve_gpu(device(), arch)


def target() -> Target:
    return Target(find_workload("attention"), PROBLEM, gpu())


def faulty(body: str) -> Job:
    source = Source(SIGNATURE.format(body=body), "attention", Launch((1, 1, 1), 32, 0))
    case = find_workload("attention").cases(PROBLEM, {})[2]
    plans = Plans([(case, source.launch)], [])
    return Job(CompiledCandidate(1, source, compile_source(source, gpu().arch)), plans, {}, 1)


def correct(index=0) -> Job:
    return job_of(attention_space(TEXT, gpu().key).starts[index], index + 1)


def job_of(config, trial=1) -> Job:
    """With all of the gate's cases on a GPU, with three on the stand-in, where the emulator runs them."""
    space = attention_space(TEXT, gpu().key)
    source = render(target(), space, config, asset("templates"))
    plan = gate_plan(space, target(), config)
    plan = plan[:3] if on_stand_in() else plan
    return Job(CompiledCandidate(trial, source, compile_source(source, gpu().arch), config), Plans(plan, []), {}, 7)


def start_of(family, **changes):
    """The family's first start point, changed; a knob changed to None is left out."""
    start = next(c for c in attention_space(TEXT, gpu().key).starts if c["family"] == family)
    return {knob: value for knob, value in {**start, **changes}.items() if value is not None}


KERNELS = {
    "scalar": ("scalar", {}),
    "wmma": ("wmma", {}),
    "mma": ("mma", {}),
    "mma, Q in registers, padded": ("mma", {"q_in": "registers", "layout": "pad", "tile_n": 64, "stages": 2}),
    "wgmma": ("wgmma", {}),
    "wgmma, tiles by cp.async": ("wgmma", {"load": "cp_async", "cluster": None}),
    "wgmma, P in shared memory": ("wgmma", {"p_in": "shared"}),
    "wgmma, O stored directly": ("wgmma", {"o_store": "direct"}),
    "wgmma, O stored by TMA": ("wgmma", {"o_store": "tma"}),
    "wgmma, no overlap": ("wgmma", {"overlap": False}),
    "wgmma, no turns": ("wgmma", {"ping_pong": False}),
    "wgmma, exp2 in part on the FMA pipe": ("wgmma", {"exp2_on_fma": 0.5, "rescale_above": 8}),
    "wgmma, blocks that go round": ("wgmma", {"schedule": "static"}),
    "wgmma, K and V shared by two blocks": ("wgmma", {"cluster": 2}),
    "wgmma, one consumer, two blocks": ("wgmma", {"tile_m": 64, "ping_pong": None, "min_blocks": 2}),
}
"""one kernel for each piece that may be wrong on its own"""


@pytest.fixture(scope="module")
def judge():
    judge = GpuEvaluator(target(), device(), 1)
    judge.first_baselines = [b for b in found_baselines(judge.baselines()) if isinstance(b, Baseline)]
    yield judge
    judge.close()


def test_a_measurement_is_precise_logged_and_below_the_roofline(judge):
    """The first candidate of these tests: one slower than the best so far is dropped after three repetitions."""
    (verdict,), figure, *_ = judge.submit(correct(), None).result()
    assert {c.name for c in verdict.cases} >= {"full problem", "full problem after timing"}
    assert len(figure.samples_us) >= MIN_SAMPLES
    assert figure.vs_baseline > 0 and figure.suspect is None
    assert 0 < figure.terms["peak_tflops_percent"] < 100
    assert figure.median_us == pytest.approx(statistics.median(figure.samples_us))


FAST = ("wgmma, O stored by TMA",)
FAST_FAULTS = ("trap",)


@pytest.mark.parametrize("name", [*FAST, *more(name for name in KERNELS if name not in FAST)])
def test_each_way_to_load_multiply_and_store_is_correct_on_the_gpu(judge, name):
    family, changes = KERNELS[name]
    if family == "wgmma" and gpu().arch != "sm_90a":
        pytest.skip("wgmma is an instruction of Hopper alone")
    result = judge.submit(job_of(start_of(family, **changes)), None).result()
    assert not isinstance(result, Rejection), result.reason
    assert result.verdicts[0].correct, result.verdicts[0].reason
    assert result.figure.tflops > 0


@pytest.mark.parametrize("name", [*FAST_FAULTS, *more(name for name in FAULTS if name not in FAST_FAULTS)])
def test_a_fault_becomes_an_outcome_in_the_gpus_own_words_and_the_next_candidate_is_fine(judge, name):
    body, outcome, words = FAULTS[name]
    result = judge.submit(faulty(body), None).result()
    ended = result if isinstance(result, Rejection) else result.verdicts[0]
    assert ended.outcome is outcome
    assert words in ended.reason and ended.reason
    (verdict,), figure, *_ = judge.submit(correct(), None).result()
    assert verdict.correct and figure.tflops > 0


def test_every_backend_that_takes_the_problem_is_a_baseline(judge):
    names = {b.name for b in judge.first_baselines}
    assert {"FLASH_ATTENTION", "MATH"} <= names
    assert all(len(b.samples_us) >= MIN_SAMPLES and b.tflops < gpu().tensor_tflops for b in judge.first_baselines)


@pytest.mark.exhaustive
def test_the_same_kernel_twice_gives_the_same_time_within_two_percent(judge):
    medians = [judge.submit(correct(), None).result()[1].median_us for _ in range(2)]
    assert max(medians) / min(medians) < 1.02


@pytest.mark.exhaustive
def test_finals_rank_kernels_against_each_other(judge):
    contenders = [correct(0).contender, correct(1).contender]
    finals = judge.finals(contenders).result()
    assert sorted(finals.order) == [1, 2]
    assert all(f.vs_baseline > 0 for f in finals.figures.values())


def test_a_binary_that_the_gpu_does_not_take_is_said_to_be_so(judge):
    job = correct()
    binary = Binary(b"no binary", *(getattr(job.contender.binary, n) for n in Binary.__slots__[1:]))
    broken = Job(CompiledCandidate(9, job.contender.source, binary), job.plans, {}, 1)
    result = judge.submit(broken, None).result()
    assert result.outcome is Outcome.UNCOMPILABLE
    assert "the GPU cannot run the binary: device kernel image is invalid" in result.reason


@pytest.mark.exhaustive  # tests/fake_cuda/test_first_contact.py meets the same by the command line
def test_a_problem_beyond_the_gpus_memory_names_the_bytes_needed_and_there():
    problem = parse_problem("b4096,h64,s16384,d128,fp16")
    huge = GpuEvaluator(replace(target(), problem=problem), device(), 1)
    try:
        with pytest.raises(MachineError, match=r"needs [\d,]+ bytes of GPU memory .* and [\d,]+ of [\d,]+ are free"):
            found_baselines(huge.baselines())
    finally:
        huge.close()


def test_the_runner_sees_only_its_gpu():
    pool = WorkerPool(
        1, WorkerLimits(memory_bytes=None, environment={"CUDA_VISIBLE_DEVICES": device().uuid}, forked=False)
    )
    try:
        assert pool.submit(visible_devices, on_crash=Outcome.CRASHED, returns=int).result() == 1
    finally:
        pool.close()


DOUBLED = """
__constant__ float unused[2] = {8.0f, 9.0f};
__constant__ float factors[4];
extern "C" __global__ void doubled(float* out) { out[threadIdx.x] = 2.0f * factors[threadIdx.x] + unused[1]; }
"""


def test_a_kernel_reads_its_constant_variables_as_they_were_filled_last():
    source = Source(DOUBLED, "doubled", Launch((1, 1, 1), 4, 0))
    kernel = CudaKernel(compile_source(source, gpu().arch), "doubled", source.launch)
    out = TensorArgument("out", np.zeros(4, np.float32), output=True)
    for factors in ([1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]):
        found = kernel.run(
            KernelCall("doubled", source.launch, [out, ConstantArgument("factors", np.array(factors, np.float32))]), 1
        )
        assert found["out"].tolist() == [2 * f + 9 for f in factors]


def test_a_constant_variable_that_the_kernel_has_not_is_no_crash_of_the_process():
    source = Source(DOUBLED, "doubled", Launch((1, 1, 1), 4, 0))
    kernel = CudaKernel(compile_source(source, gpu().arch), "doubled", source.launch)
    out = TensorArgument("out", np.zeros(4, np.float32), output=True)
    with pytest.raises(KernelCrashed, match="NOT_FOUND"):
        kernel.run(KernelCall("doubled", source.launch, [out, ConstantArgument("absent", np.ones(1, np.float32))]), 1)
