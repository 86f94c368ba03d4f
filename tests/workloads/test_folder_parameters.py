"""What a folder's kernel may take beside tensors and numbers, each held by a right kernel and by a planted fault."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from evoengine.records import CompiledCandidate, Verdict
from evoengine.search.evaluators import make_plans
from evoengine.stages.compile import compile_source
from evoengine.stages.gate import emulator, executor, judge_whole
from evoengine.stages.predict import predict_binary
from evoengine.stages.render import render
from evoengine.workloads.base import Case
from evoengine.workloads.folder import load_folder
from tests.support.folders import asset, load, write

JUDGES = ("executor", "emulator")
N = {"n": {"type": "var"}}
SPACE = """kernel = "NAME"
[knobs]
THREADS = [64, 128]
[launch]
threads = "THREADS"
grid = ["ceil_div(n, THREADS)", 1, 1]
shared = 0
"""


def folder(tmp_path: Path, kernel: str, name: str = "own", space: str = SPACE, **problem: Any) -> Path:
    own: dict[str, Any] = {"name": name, "axes": N, "workloads": [{"axes": {"n": 1000}}], **problem}
    return write(tmp_path, own, space.replace("NAME", name), kernel)


def judged(path: Path, judge: str) -> Verdict:
    target, space = load(path)
    config = {"family": target.workload.name, "THREADS": 64}
    assert space.why_invalid(config) is None
    source, plans = render(target, space, config, asset("templates")), make_plans(space, target, config)
    if judge == "emulator":
        return judge_whole(emulator(source, target.gpu.arch), target.workload, plans, 7)
    binary = compile_source(source, target.gpu.arch)
    return judge_whole(executor(CompiledCandidate(0, source, binary)), target.workload, plans, 7)


# --- in-out tensors

INOUT = {
    "inputs": {"x": {"shape": ["n"], "dtype": "float32"}, "y": {"shape": ["n"], "dtype": "float32"}},
    "inout": ["y"],
    "reference": "def run(x, y):\n    y[::2] += 2 * x[::2]\n    return y\n",
}
ADD = """extern "C" __global__ void own(const float* x, float* y, int n) {
    int i = blockIdx.x * THREADS + threadIdx.x;
    if (i < n && i % 2 == 0) y[i] += 2 * x[i];
}
"""


@pytest.mark.parametrize("judge", JUDGES)
def test_a_kernel_may_overwrite_its_input_and_leave_some_of_it(tmp_path, judge):
    assert judged(folder(tmp_path, ADD, **INOUT), judge).correct


@pytest.mark.parametrize("judge", JUDGES)
@pytest.mark.parametrize(
    "right, wrong", [("y[i] +=", "y[i] ="), ("i % 2 == 0", "true")], ids=["forgets what was there", "changes the rest"]
)
def test_a_fault_in_place_is_seen(tmp_path, judge, right, wrong):
    verdict = judged(folder(tmp_path, ADD.replace(right, wrong), **INOUT), judge)
    assert not verdict.correct and verdict.reason and "error" in verdict.reason


# --- outputs that are written in part

BORDER = {
    "axes": {"n": {"type": "var"}, "m": {"type": "var"}},
    "workloads": [{"axes": {"n": 300, "m": 70}}],
    "inputs": {"x": {"shape": ["m", "n"], "dtype": "float32"}},
    "outputs": {"y": {"shape": ["m", "n"], "dtype": "float32", "writes": ["1:m - 1", "1:n - 1"]}},
    "constraints": ["n >= 3", "m >= 3"],
    "reference": "def run(x):\n"
    "    y = x.clone()\n"
    "    y[1:-1, 1:-1] = x[:-2, 1:-1] + x[2:, 1:-1] + x[1:-1, :-2] + x[1:-1, 2:]\n"
    "    return y\n",
}
STENCIL = """extern "C" __global__ void own(const float* x, float* y, int n, int m) {
    int i = blockIdx.x * THREADS + threadIdx.x, j = blockIdx.y;
    if (i > 0 && j > 0 && i < n - 1 && j < m - 1)
        y[j * n + i] = x[(j - 1) * n + i] + x[(j + 1) * n + i] + x[j * n + i - 1] + x[j * n + i + 1];
}
"""
ROWS = SPACE.replace('"ceil_div(n, THREADS)", 1', '"ceil_div(n, THREADS)", "m"')


@pytest.mark.parametrize("judge", JUDGES)
def test_a_kernel_may_write_a_part_of_its_output(tmp_path, judge):
    assert judged(folder(tmp_path, STENCIL, space=ROWS, **BORDER), judge).correct


@pytest.mark.parametrize("judge", JUDGES)
@pytest.mark.parametrize(
    "right, wrong, said",
    [
        ("i > 0 &&", "i > 0 && i != 2 &&", "outputs were never written"),
        ("i < n - 1", "i < n", "the kernel wrote y["),
        ("(j - 1) * n + i]", "j * n + i]", "error"),
    ],
)
def test_what_is_left_out_written_besides_or_wrong_is_seen(tmp_path, judge, right, wrong, said):
    kernel = STENCIL.replace(right, wrong).replace("x[j * n + i + 1]", "(i < n - 1 ? x[j * n + i + 1] : 0)")
    verdict = judged(folder(tmp_path, kernel, space=ROWS, **BORDER), judge)
    assert not verdict.correct and verdict.reason and said in verdict.reason


# --- tensor maps and structs

COPY = {
    "inputs": {"x": {"shape": ["n"], "dtype": "float32"}},
    "outputs": {"y": {"shape": ["n"], "dtype": "float32"}},
    "tensor_maps": {"source": {"tensor": "x", "dims": ["n"], "box": ["THREADS"]}},
    "parameters": ["source", "y", "n"],
    "reference": "def run(x):\n    return 2 * x\n",
}
LOAD = """#include <cuda.h>
template <int COUNT> __global__ void own(const __grid_constant__ CUtensorMap source, float* y, int n) {
    __shared__ alignas(128) float tile[COUNT];
    __shared__ alignas(8) unsigned long long barrier;
    unsigned at = (unsigned)__cvta_generic_to_shared(&barrier), to = (unsigned)__cvta_generic_to_shared(tile);
    if (threadIdx.x == 0) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(at) : "memory");
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(at), "r"(4 * COUNT) : "memory");
        asm volatile("cp.async.bulk.tensor.1d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3}], [%2];"
                     :: "r"(to), "l"((unsigned long long)&source), "r"(at), "r"((int)blockIdx.x * COUNT) : "memory");
    }
    __syncthreads();
    unsigned done = 0;
    while (!done)
        asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], 0; selp.u32 %0, 1, 0, p; }"
                     : "=r"(done) : "r"(at) : "memory");
    int i = blockIdx.x * COUNT + threadIdx.x;
    if (i < n) y[i] = 2 * tile[threadIdx.x];
}
template __global__ void own<THREADS>(const __grid_constant__ CUtensorMap, float*, int);
"""


def test_a_tensor_that_only_a_map_views_reaches_an_instance_of_a_template(tmp_path):
    assert judged(folder(tmp_path, LOAD, **COPY), "executor").correct


def test_a_box_that_is_not_what_the_kernel_waits_for_is_seen(tmp_path):
    wrong = {**COPY, "tensor_maps": {"source": {"tensor": "x", "dims": ["n"], "box": [32]}}}
    verdict = judged(folder(tmp_path, LOAD, **wrong), "executor")
    assert not verdict.correct


def test_a_map_that_reaches_beyond_its_tensor_is_refused_by_the_rule(tmp_path):
    wrong = {**COPY, "tensor_maps": {"source": {"tensor": "x", "dims": ["n + 1"], "box": ["THREADS"]}}}
    verdict = judged(folder(tmp_path, LOAD, **wrong), "executor")
    assert verdict.reason and "tensor map source: it reaches" in verdict.reason


STRUCT = {
    "inputs": {
        "x": {"shape": ["n"], "dtype": "float32"},
        "scale": {"shape": None, "dtype": "float64"},
    },
    "outputs": {"y": {"shape": ["n"], "dtype": "float32"}},
    "structs": {
        "p": {
            "bytes": 40,
            "at": {"0": "x", "8": "y", "16": "scale", "24": {"uint8": 3}, "28": "n", "32": {"int64": "THREADS"}},
        }
    },
    "parameters": ["p"],
    "workloads": [{"axes": {"n": 1000}, "inputs": {"scale": {"type": "scalar", "value": 0.25}}}],
    "reference": "def run(x, scale):\n    return 3 * scale * x\n",
}
PACKED = """struct Params { const float* x; float* y; double scale; unsigned char times; int n; long long threads; };
extern "C" __global__ void own(const __grid_constant__ Params p) {
    long long i = blockIdx.x * p.threads + threadIdx.x;
    if (i < p.n) p.y[i] = p.times * (float)p.scale * p.x[i];
}
"""


@pytest.mark.parametrize("judge", JUDGES)
def test_a_kernel_may_take_a_struct_of_pointers_and_numbers(tmp_path, judge):
    assert judged(folder(tmp_path, PACKED, **STRUCT), judge).correct


@pytest.mark.parametrize("judge", JUDGES)
def test_a_struct_of_another_size_is_refused(tmp_path, judge):
    wrong = {**STRUCT, "structs": {"p": {**STRUCT["structs"]["p"], "bytes": 48}}}
    verdict = judged(folder(tmp_path, PACKED, **wrong), judge)
    assert not verdict.correct and verdict.reason and "48" in verdict.reason


# --- scratch memory that is too small


@pytest.mark.parametrize("judge", JUDGES)
def test_a_kernel_that_overruns_its_scratch_is_told_the_place_and_the_block(tmp_path, judge):
    kernel = """extern "C" __global__ void own(const float* x, float* partial, float* y, int n) {
    int i = blockIdx.x * THREADS + threadIdx.x;
    partial[i] = i < n ? x[i] : 0;
    if (i < n) y[i] = partial[i];
}
"""
    rest: dict[str, Any] = {
        "inputs": {"x": {"shape": ["n"], "dtype": "float32"}},
        "outputs": {"y": {"shape": ["n"], "dtype": "float32"}},
        "parameters": ["x", "partial", "y", "n"],
        "reference": "def run(x):\n    return x.clone()\n",
    }
    whole = {"partial": {"shape": ["round_up(n, THREADS)"], "dtype": "float32"}}
    short = {"partial": {"shape": ["n"], "dtype": "float32"}}
    assert judged(folder(tmp_path / "whole", kernel, scratch=whole, **rest), judge).correct
    verdict = judged(folder(tmp_path / "short", kernel, scratch=short, **rest), judge)
    assert not verdict.correct and verdict.reason and "partial" in verdict.reason and "block (" in verdict.reason


# --- draws of indices


def drawn(
    tmp_path: Path, draw: dict[str, Any], shape: list[str], pattern: str = "normal", **problem: Any
) -> torch.Tensor:
    path = folder(
        tmp_path,
        "",
        inputs={"x": {"shape": ["n"], "dtype": "float32"}, "i": {"shape": shape, "dtype": "int32"}},
        outputs={"y": {"shape": ["n"], "dtype": "float32"}},
        reference="def run(x, i):\n    return x\n",
        workloads=[{"axes": {"n": 20}, "inputs": {"i": draw}}],
        **problem,
    )
    workload = load_folder(path)
    case = Case("one", workload.parse("n=20"), pattern, {"THREADS": 64})
    return workload.tensors().draw(case, 3).inputs["i"]


def test_offsets_ascend_from_zero_to_their_total_with_segments_of_some_length(tmp_path):
    found = drawn(tmp_path, {"type": "indptr", "total": "10 * n", "least": 2}, ["n + 1"])
    assert found[0] == 0 and found[-1] == 200 and found.diff().min() >= 2 and len(found.diff().unique()) > 3
    most = drawn(tmp_path / "ends", {"type": "indptr", "total": "10 * n"}, ["n + 1"], "ends")
    assert sorted(most.diff().tolist()) == [0] * 19 + [200]


def over(tmp_path, total: str, pattern: str = "normal", over: str = "i") -> tuple[Any, Any]:
    """Draw offsets `i` that end at n, and `j` over them."""
    offsets = {"shape": ["n // 4"], "dtype": "int32"}
    path = folder(
        tmp_path,
        "",
        inputs={"x": {"shape": ["n"], "dtype": "float32"}, "i": offsets, "j": offsets},
        outputs={"y": {"shape": ["n"], "dtype": "float32"}},
        reference="def run(x, i, j):\n    return x\n",
        workloads=[{"axes": {"n": 20}, "inputs": {
            "i": {"type": "indptr", "total": "n"}, "j": {"type": "indptr", "total": total, "over": over},
        }}],
    )  # fmt: skip
    workload = load_folder(path)
    found = workload.tensors()
    inputs = found.draw(Case("one", workload.parse("n=20"), pattern, {"THREADS": 64}), 3).inputs
    assert found.draw_some(Case("one", workload.parse("n=20"), pattern), 3, ["i"])["j"].equal(inputs["j"])
    return inputs["i"], inputs["j"]


@pytest.mark.parametrize("pattern", ["normal", "ends"])
def test_offsets_over_others_have_segments_at_least_as_long(tmp_path, pattern):
    i, j = over(tmp_path, "3 * n", pattern)
    more = j.diff() - i.diff()
    assert j[-1] == 60 and more.min() >= 0 and more.sum() == 40


def test_offsets_over_what_comes_later_or_does_not_fit_are_refused(tmp_path):
    from evoengine.errors import UsageError

    for name in ("x", "j", "none"):
        with pytest.raises(
            UsageError, match=f"is over '{name}', which is not an input before j of its shape and dtype"
        ):
            over(tmp_path / name, "3 * n", over=name)
    with pytest.raises(UsageError, match="segments of 0 at least, and those of i, which are more than 10 for own:n=20"):
        over(tmp_path, "n // 2")


def test_offsets_that_do_not_fit_are_refused(tmp_path):
    from evoengine.errors import UsageError

    with pytest.raises(UsageError, match="20 segments of 2 at least, which are more than 20 for own:n=20"):
        drawn(tmp_path, {"type": "indptr", "total": "n", "least": 2}, ["n + 1"])


def test_a_permutation_holds_each_integer_once(tmp_path):
    whole = drawn(tmp_path, {"type": "permutation"}, ["n"])
    assert sorted(whole.tolist()) == list(range(20)) and whole.tolist() != list(range(20))
    some = drawn(tmp_path / "some", {"type": "permutation", "high": 1000}, ["n"])
    assert len(set(some.tolist())) == 20 and max(some) < 1000


def test_a_function_of_the_folder_makes_an_input_from_axes_and_knobs(tmp_path):
    text = "import numpy as np\ndef order(axes, knobs):\n    return np.arange(axes['n'])[::-1] * knobs['THREADS']\n"
    found = drawn(tmp_path, {"type": "made", "by": "order"}, ["n"], makers=text)
    assert found.tolist() == [64 * i for i in reversed(range(20))]


def test_a_function_that_raises_or_makes_another_shape_is_named(tmp_path):
    from evoengine.errors import UsageError

    with pytest.raises(UsageError, match="order of makers, which makes i, raises for own:n=20: line 2: KeyError: 'm'"):
        drawn(
            tmp_path, {"type": "made", "by": "order"}, ["n"], makers="def order(axes, knobs):\n    return axes['m']\n"
        )
    with pytest.raises(UsageError, match=r"order of makers, which makes i, returns \(3,\) for own:n=20"):
        drawn(
            tmp_path / "shape",
            {"type": "made", "by": "order"},
            ["n"],
            makers="import torch\ndef order(axes, knobs):\n    return torch.zeros(3)\n",
        )


GATHER = {
    "axes": {"n": {"type": "var"}, "rows": {"type": "var"}},
    "inputs": {"x": {"shape": ["rows"], "dtype": "float32"}, "i": {"shape": ["n"], "dtype": "int32"}},
    "outputs": {"y": {"shape": ["n"], "dtype": "float32"}},
    "reference": "def run(x, i):\n    return x[i.long()]\n",
    "bytes": "12 * n",
}


def test_a_prediction_reads_by_the_indices_that_are_drawn(tmp_path):
    kernel = """extern "C" __global__ void own(const float* x, const int* i, float* y, int n, int rows) {
    int at = blockIdx.x * THREADS + threadIdx.x;
    if (at < n) y[at] = x[i[at]];
}
"""
    times = {}
    for name, draw in {"drawn": {"type": "integers", "low": 0, "high": "rows"}, "in order": {"type": "arange"}}.items():
        problem = {**GATHER, "workloads": [{"axes": {"n": 2**22, "rows": 2**26}, "inputs": {"i": draw}}]}
        target, space = load(folder(tmp_path / name.replace(" ", ""), kernel, **problem))
        config = {"family": "own", "THREADS": 128}
        source = render(target, space, config, asset("templates"))
        contender = CompiledCandidate(0, source, compile_source(source, target.gpu.arch), config)
        times[name] = predict_binary(target, contender).time_us
    assert times["drawn"] > 2 * times["in order"]


# --- files of the folder


def test_files_of_the_folder_are_put_where_the_kernel_includes_them(tmp_path):
    own = folder(
        tmp_path,
        '#include "parts/twice.cuh"\n#include "parts/twice.cuh"\n'
        'extern "C" __global__ void own(const float* x, float* y, int n) {\n'
        "    int i = blockIdx.x * THREADS + threadIdx.x;\n    if (i < n) y[i] = twice(x[i]);\n}\n",
        inputs={"x": {"shape": ["n"], "dtype": "float32"}},
        outputs={"y": {"shape": ["n"], "dtype": "float32"}},
        reference="def run(x):\n    return 2 * x\n",
    )
    (own / "parts").mkdir()
    (own / "parts/twice.cuh").write_text(
        '#pragma once\n#include "two.cuh"\n__device__ float twice(float x) { return TWO * x; }\n'
    )
    (own / "parts/two.cuh").write_text("#define TWO 2\n")
    assert judged(own, "executor").correct
    (own / "parts/two.cuh").unlink()
    target, space = load(own)
    text = render(target, space, {"family": "own", "THREADS": 64}, asset("templates")).text
    assert '#include "two.cuh"' in text


def test_two_instances_of_an_entry_are_one_too_many(tmp_path):
    more = LOAD + "template __global__ void own<2 * THREADS>(const __grid_constant__ CUtensorMap, float*, int);\n"
    from evoengine.stages.compile import CompileFailed

    with pytest.raises(CompileFailed, match="2 of them are instances or overloads of own: leave one"):
        judged(folder(tmp_path, more, **COPY), "executor")
