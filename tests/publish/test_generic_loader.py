"""What the loader of all exported kernels takes, launches and refuses, as a driver of our own notes it.

Tensors are torch's and CuPy's real ones, in host memory that is taken for a GPU's.
"""

from __future__ import annotations

import ctypes
import importlib
import inspect
import json
import struct
import sys
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch

from evoengine.devices.base import (
    ScalarArgument,
    ScratchParameter,
    StructArgument,
    TensorMapArgument,
    TensorParameter,
    is_passed,
)
from evoengine.devices.cuda import encode_tensor_map
from evoengine.gpu import find_gpu
from evoengine.paths import asset
from evoengine.publish.export import export, run_time_sizes
from evoengine.records import Binary, Candidate, KernelResources, Launch, NextKernel, Outcome, Source
from evoengine.space.space import load_space, space_from_text
from evoengine.workloads import parse_problem
from evoengine.workloads.base import Target, taken
from evoengine.workloads.folder import FolderWorkload
from tests.support.exported import exported_module
from tests.support.loader import SMS, on_gpu

RMS_NORM, GEMM = "rms_norm:rows6,hidden32,fp16", "gemm:m96,n64,k128,bf16"
WGMMA = {"family": "wgmma", "tile_m": 128, "tile_n": 64, "tile_k": 64}
PLAIN = {"family": "warp"}
LAUNCH = Launch((3, 2, 1), 256, 4096, (8, 1))
AXPY = {
    "name": "axpy", "entry": "axpy_kernel", "axes": {"n": {"type": "var"}},
    "inputs": {
        "in": {"shape": ["n"], "dtype": "float32"}, "alpha": {"shape": None, "dtype": "float32"},
        "keep": {"shape": ["n", 1], "dtype": "bool"}, "big": {"shape": None, "dtype": "int64"},
    },
    "outputs": {"out": {"shape": ["n"], "dtype": "float32"}, "count": {"shape": [], "dtype": "int64"}},
    "parameters": ["n", "out", "big", "in", "alpha", "count", "keep"],
    "reference": "def run(x, alpha, keep, big):\n    ...",
    "workloads": [{
        "axes": {"n": 40},
        "inputs": {"alpha": {"type": "scalar", "value": 0.1}, "big": {"type": "scalar", "value": 2**40}},
    }],
}  # fmt: skip
"""a kernel whose parameters come in no order of kinds and whose names Python keeps for itself"""


def target_of(problem: str) -> Target:
    return Target(*parse_problem(problem), find_gpu("h100"))


def size_of(parameter) -> int:
    """Bytes of a parameter, as C has it."""
    if isinstance(parameter, ScalarArgument):
        return parameter.value.nbytes
    if isinstance(parameter, StructArgument):
        return parameter.bytes
    return 8 if isinstance(parameter, TensorParameter | ScratchParameter) else 128


@pytest.fixture
def load(driver, tmp_path, monkeypatch):
    """Exports a kernel and imports the folder; the CPU is taken for GPU 0."""
    monkeypatch.syspath_prepend(tmp_path)

    def loaded(target, config=PLAIN, name="exported", cubin=b"\x7fELF", grids=None, then=(), space=None):
        parameters = target.workload.parameters(target.problem, config)
        launch = space.launch(config) if space else replace(LAUNCH, then=then)
        names = ("entry", "sizes"), ("second", "second_sizes")
        for (entry, _), (name_at, sizes_at) in zip(launch.kernels(target.workload.entry), names, strict=False):
            passed = [p for p in taken(target.workload, entry, parameters) if is_passed(p)]
            (ctypes.c_int * 32).in_dll(driver.library, sizes_at)[: len(passed)] = [*map(size_of, passed)]
            (ctypes.c_char * 32).in_dll(driver.library, name_at).value = entry.encode()
        source = Source("// text", target.workload.entry, launch)
        others = tuple(KernelResources(k.entry, 24, 0, 0, 0) for k in then)
        binary = Binary(cubin, "sm_90a", "-arch=sm_90a", "nvrtc 13.5", 168, 0, 0, 0, (), {}, 1.0, others=others)
        problem = str(target.problem)
        found = Candidate(3, 1, problem, "h100", config, Outcome.ESTIMATED, source=source, binary=binary)
        rules = run_time_sizes(found, target, space) if space else None
        export(found, target, tmp_path / name, grids=grids or {}, run_time=rules)
        importlib.invalidate_caches()
        module = importlib.import_module(f"{name}.{exported_module(tmp_path / name)}")
        monkeypatch.setattr(module._cuda.Torch, "gpu_index", lambda device: 0)
        monkeypatch.setattr(module._cuda.Torch, "stream", lambda gpu_index: 77)
        monkeypatch.setattr(module._cuda.Cupy, "stream", lambda gpu_index: 1000 + gpu_index)
        return module

    yield loaded
    for name in [name for name in sys.modules if name.startswith("exported")]:
        del sys.modules[name]


@pytest.fixture
def rms_norm(load):
    return load(target_of(RMS_NORM)).rms_norm


def given(driver, index: int = -1, form: str = "5Qif") -> tuple:
    """The parameters of a launch, as struct reads them."""
    raw = ((ctypes.c_char * 512) * 4096).in_dll(driver.library, "given")
    launches = driver.get("launches")
    return struct.unpack_from("=" + form, bytes(raw[range(launches)[index]]))


def pointers(tensors) -> tuple[int, ...]:
    return tuple(t.data_ptr() for t in tensors)


def inputs(rows=6, hidden=32):
    return torch.zeros(rows, hidden, dtype=torch.float16), torch.zeros(rows, hidden).half(), torch.zeros(hidden).half()


# what is launched


def test_the_kernel_gets_its_tensors_and_scalars_and_the_search_s_launch(driver, rms_norm):
    x, residual, weight = inputs()
    y, residual_out = rms_norm(x, residual, weight)
    assert given(driver) == (*pointers((x, residual, weight, y, residual_out)), 6, np.float32(1e-6))
    (found,) = driver.launches()
    assert (found.grid, found.block, found.shared, found.stream) == ((3, 2, 1), (32, 8, 1), 4096, 77)
    for out in (y, residual_out):
        assert (out.shape, out.dtype, out.is_contiguous()) == ((6, 32), torch.float16, True)


def test_tensor_maps_are_those_of_the_search(driver, load):
    target = target_of(GEMM)
    gemm = load(target, WGMMA).gemm
    a, b, bias = (torch.zeros(*shape, dtype=torch.bfloat16) for shape in ((96, 128), (128, 64), (64,)))
    c = gemm(a, b, bias)
    assert isinstance(c, torch.Tensor) and c.shape == (96, 64) and c.dtype == torch.bfloat16
    *scalars, map_a, map_b = given(driver, form="4Q3i128s128s")
    assert tuple(scalars) == (*pointers((a, b, bias, c)), 96, 64, 128)
    wanted = [p for p in target.workload.parameters(target.problem, WGMMA) if isinstance(p, TensorMapArgument)]
    assert [map_a, map_b] == [encode_tensor_map(wanted[0], a.data_ptr()), encode_tensor_map(wanted[1], b.data_ptr())]


@pytest.mark.parametrize("zeroed", [True, False])
def test_kernels_behind_the_first_share_its_scratch_memory(driver, load, zeroed):
    definition = {
        "name": "split", "axes": {"n": {"type": "var"}}, "inputs": {"x": {"shape": ["n"], "dtype": "float32"}},
        "outputs": {"y": {"shape": [1], "dtype": "float32"}},
        "scratch": {"partial": {"shape": ["n"], "dtype": "float32", "zeroed": zeroed}},
        "parameters": ["x", "partial", "n"], "kernels": {"combine": ["y", "n", "partial"]},
        "reference": "def run(x):\n    ...", "workloads": [{"axes": {"n": 40}}],
    }  # fmt: skip
    workload = FolderWorkload("split", json.dumps(definition))
    then = (NextKernel("combine", Launch((5, 1, 1), 64, 4096)),)
    split = load(Target(workload, workload.parse("n=40"), find_gpu("h100")), {"family": "split"}, then=then).split
    x = torch.ones(40)
    y = split(x)
    first, second = driver.launches()
    assert (first.grid, second.grid, second.block) == ((3, 2, 1), (5, 1, 1), (64, 1, 1))
    of_x, scratch, n = given(driver, 0, "2Qi")
    assert (of_x, n) == (x.data_ptr(), 40)
    assert given(driver, 1, "QiQ") == (y.data_ptr(), 40, scratch) and scratch not in (x.data_ptr(), y.data_ptr())
    with pytest.raises(TypeError, match="it has no partial"):
        split(x, partial=x)


@pytest.mark.parametrize("passed", [True, False], ids=["also a parameter", "in constant memory alone"])
def test_an_input_in_constant_memory_is_copied_there_before_the_launch(driver, load, passed):
    definition = {
        "name": "taps", "axes": {"n": {"type": "var"}}, "constants": {"w": "weights"},
        "inputs": {
            "x": {"shape": ["n"], "dtype": "float32"},
            "weights": {"shape": [4], "dtype": "float32"},
        },
        "outputs": {"y": {"shape": ["n"], "dtype": "float32"}},
        "parameters": ["x", *(["weights"] if passed else []), "y"],
        "reference": "def run(x, weights):\n    ...",
        "workloads": [{"axes": {"n": 40}}],
    }  # fmt: skip
    workload = FolderWorkload("taps", json.dumps(definition))
    taps = load(Target(workload, workload.parse("n=40"), find_gpu("h100"))).taps
    x, weights = torch.zeros(40), torch.tensor([1.0, 2.0, 3.0, 4.0])
    y = taps(x, weights)
    held = bytes((ctypes.c_char * 64).in_dll(driver.library, "constant"))
    assert struct.unpack("4f", held[:16]) == (1.0, 2.0, 3.0, 4.0) and not any(held[16:])
    assert given(driver, form="3Q" if passed else "2Q") == pointers((x, weights, y) if passed else (x, y))
    with pytest.raises(TypeError, match="weights is missing"):
        taps(x)


def axpy_tensors():
    return torch.zeros(40), torch.zeros(40, 1, dtype=torch.bool)


def test_parameters_keep_the_kernel_s_own_order_whatever_they_are(driver, load):
    workload = FolderWorkload("axpy", json.dumps(AXPY))
    axpy = load(Target(workload, workload.parse("n=40"), find_gpu("h100"))).axpy
    x, keep = axpy_tensors()
    out, count = axpy(x, keep)
    assert (out.dtype, count.dtype, count.shape) == (torch.float32, torch.int64, ())
    n, found_out, big, found_x, alpha, found_count, found_keep = given(driver, form="iQqQfQQ")
    assert (n, big, alpha) == (40, 2**40, np.float32(0.1))
    assert (found_out, found_x, found_count, found_keep) == pointers((out, x, count, keep))


# how it is called


def test_inputs_may_be_named_and_outputs_given(driver, rms_norm):
    x, residual, weight = inputs()
    y, summed = torch.zeros_like(x), torch.zeros_like(x)
    assert rms_norm(x, weight=weight, residual=residual, y=y)[0] is y
    assert given(driver)[:4] == pointers((x, residual, weight, y))
    for outputs in ({"residual_out": summed, "y": y}, {"out": (y, summed)}, {"out": [y, summed]}):
        found = rms_norm(x, residual, weight, **outputs)
        assert found[0] is y and found[1] is summed
        assert given(driver)[3:5] == pointers((y, summed))
    assert rms_norm(x, residual, weight, out=None)[0] is not y


def test_one_output_is_given_as_out(load):
    gemm = load(target_of(GEMM), WGMMA).gemm
    a, b, bias, c = (torch.zeros(*shape, dtype=torch.bfloat16) for shape in ((96, 128), (128, 64), (64,), (96, 64)))
    assert gemm(a, b, bias, out=c) is c
    assert gemm(a, b, bias, c=c) is c


def test_out_is_the_tensor_of_that_name_where_there_is_one(driver, load):
    workload = FolderWorkload("axpy", json.dumps(AXPY))
    axpy = load(Target(workload, workload.parse("n=40"), find_gpu("h100"))).axpy
    x, keep = axpy_tensors()
    mine = torch.ones(40)
    out, count = axpy(keep=keep, out=mine, **{"in": x})
    assert out is mine and count is not mine
    assert given(driver, form="iQqQ")[1::2] == pointers((mine, x))


def test_help_names_tensors_dtypes_and_shapes(rms_norm):
    text = inspect.getdoc(rms_norm)
    assert rms_norm.__name__ == "rms_norm"
    assert "weight: fp16 [32]) → y: fp16 [6, 32], residual_out: fp16 [6, 32]" in text


# what is remembered, threads and GPUs


def test_a_call_like_one_before_asks_the_driver_for_its_context_and_the_launch_alone(driver, load):
    module = load(target_of(GEMM), WGMMA)
    tensors = [torch.zeros(*shape, dtype=torch.bfloat16) for shape in ((96, 128), (128, 64), (64,))]
    out = module.gemm(*tensors)
    module.gemm(*tensors, out=out)
    driver.library.cuCtxSetCurrent(ctypes.c_void_p(module._gpu(0).context))  # as any thread that has used CUDA
    before = driver.get("calls")
    for _ in range(10):
        module.gemm(*tensors, out=out)
    assert driver.get("calls") - before == 2 * 10
    assert (driver.get("loaded"), driver.get("encoded")) == (1, 2)


def test_threads_that_launch_at_once_do_not_mix_their_parameters(driver, rms_norm):
    driver.set("microseconds", 200)  # in which the others may run before the driver reads the parameters
    sets = [(*inputs(), torch.zeros(6, 32).half(), torch.zeros(6, 32).half()) for _ in range(4)]

    def launch(tensors):
        for _ in range(50):
            rms_norm(*tensors[:3], out=tensors[3:])

    threads = [threading.Thread(target=launch, args=(tensors,)) for tensors in sets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = [given(driver, i)[:5] for i in range(driver.get("launches"))]
    assert len(found) == 200 and set(found) == {pointers(tensors) for tensors in sets}


def cupy_inputs(gpu: int):
    made = [on_gpu(gpu, shape) for shape in ((6, 32), (6, 32), (32,), (6, 32), (6, 32))]
    return [array for array, _ in made], [memory for _, memory in made]


def test_cupy_s_arrays_run_on_their_gpu_s_current_stream(driver, rms_norm):
    (first, _keep_first), (second, _keep_second) = cupy_inputs(0), cupy_inputs(1)
    for arrays in (first, second, second):
        assert rms_norm(*arrays[:3], out=tuple(arrays[3:]))[1] is arrays[4]
    assert [(found.gpu, found.stream) for found in driver.launches()] == [(0, 1000), (1, 1001), (1, 1001)]
    assert driver.get("loaded") == 2
    assert given(driver)[:5] == tuple(array.data.ptr for array in second)
    with pytest.raises(ValueError, match="weight is on GPU 1 and x on GPU 0"):
        rms_norm(*first[:2], second[2], out=tuple(first[3:]))


def test_a_dtype_that_cupy_does_not_have_is_one_sentence(load):
    definition = {
        "name": "narrow", "axes": {"n": {"type": "const", "value": 32}},
        "inputs": {"x": {"shape": ["n"], "dtype": "float16"}}, "outputs": {"y": {"shape": ["n"], "dtype": "bfloat16"}},
        "reference": "def run(x):\n    ...",
    }  # fmt: skip
    workload = FolderWorkload("narrow", json.dumps(definition))
    narrow = load(Target(workload, workload.parse(""), find_gpu("h100"))).narrow
    array, memory = on_gpu(0, (32,))
    with pytest.raises(ValueError, match="writes bfloat16, which this CuPy does not have: pass torch's tensors"):
        narrow(array)
    rms_norm = load(target_of("rms_norm:rows6,hidden32,bf16"), name="exported_2").rms_norm
    arrays, memory = cupy_inputs(0)
    with pytest.raises(ValueError, match="x is float16; this kernel was compiled for bfloat16"):
        rms_norm(*arrays[:3])


# sizes that are known as the kernel runs


def space_of(target, text=None):
    if text is None:
        return load_space(asset("search_spaces") / f"{target.workload.name}.toml", target.problem, target.gpu)
    return space_from_text(text, "space.toml", target.problem, target.gpu)


def test_a_product_serves_smaller_sizes_with_their_own_maps_sizes_and_grid(driver, load):
    target = target_of("gemm:m4096,n4096,k4096,bf16")
    space = space_of(target)
    config = next(c for c in space.starts if c.get("schedule") == "persistent" and c["cluster"] == "2x1")
    gemm = load(target, config, space=space).gemm
    smaller = target_of("gemm:m1000,n2064,k200,bf16")
    a, b, bias = (torch.zeros(shape, dtype=torch.bfloat16) for shape in ((1000, 200), (200, 2064), (2064,)))
    c = gemm(a, b, bias)
    assert c.shape == (1000, 2064)
    *scalars, map_a, map_b, map_c = given(driver, form="4Q3i128s128s128s")
    assert tuple(scalars) == (*pointers((a, b, bias, c)), 1000, 2064, 200)
    wanted = [p for p in target.workload.parameters(smaller.problem, config) if isinstance(p, TensorMapArgument)]
    maps = [encode_tensor_map(m, t.data_ptr()) for m, t in zip(wanted, (a, b, c), strict=True)]
    assert [map_a, map_b, map_c] == maps
    assert driver.launches()[-1].grid == space.launch(config, smaller.problem).grid == (72, 1, 1)
    driver.set_attribute(0, SMS, 20)
    small_gpu = load(target, config, "exported_on_less", space=space).gemm
    small_gpu(a, b, bias)
    assert driver.launches()[-1].grid == (18, 1, 1)  # 36 pairs of tiles in 4 rounds of 10 pairs of SMs


@pytest.mark.parametrize(
    ("shapes", "says"),
    [
        (((4100, 64), (64, 64), (64,)), "m is 4100; this kernel was verified for sizes from 1 to 4096"),
        (((0, 64), (64, 64), (64,)), "m is 0; this kernel was verified for sizes from 1 to 4096"),
        (
            ((8, 64), (64, 60), (60,)),
            "m=8, n=60, k=64 break n % 8 == 0, which this kernel needs: TMA requires rows of C that",
        ),
        (
            ((8, 20), (20, 64), (64,)),
            "m=8, n=64, k=20 break k % 8 == 0, which this kernel needs: TMA requires rows of A and",
        ),
        (((8, 64), (72, 64), (64,)), "b has shape (72, 64); with m=8, n=64, k=64 it must be (64, 64)"),
        (((8, 64), (64,), (64,)), "b has shape (64,); with m=8, n=64, k=64 it must be (64, 64)"),
    ],
)
def test_sizes_that_were_not_verified_are_refused_with_what_would_be_right(driver, load, shapes, says):
    target = target_of("gemm:m4096,n4096,k4096,bf16")
    space = space_of(target)
    config = next(c for c in space.starts if c["family"] == "wgmma")
    gemm = load(target, config, space=space).gemm
    with pytest.raises(ValueError) as refused:
        gemm(*(torch.zeros(shape, dtype=torch.bfloat16) for shape in shapes))
    assert str(refused.value).startswith(says) and driver.launches() == []


def test_help_says_which_sizes_are_served(load):
    target = target_of("gemm:m4096,n4096,k4096,bf16")
    space = space_of(target)
    text = inspect.getdoc(load(target, space.starts[0], space=space).gemm)
    assert "a: bf16 [m, k], b: bf16 [k, n], bias: bf16 [n]) → c: bf16 [m, n]" in text
    assert "It serves m up to 4096, n up to 4096 and k up to 4096, where n % 8 == 0 and k % 8 == 0." in text


SIZED = {
    "name": "own",
    "axes": {
        "n": {"type": "var"}, "w": {"type": "var"}, "fixed": {"type": "var"},
        "half": {"type": "expr", "expression": "min(n, 64) // 2"},
    },
    "compile_time": ["fixed"], "constraints": ["n % 2 == 0"],
    "inputs": {
        "x": {"shape": ["n * 16 + 8", "fixed"], "dtype": "float32"}, "mark": {"shape": ["w + 3"], "dtype": "int8"},
    },
    "outputs": {"y": {"shape": ["half if w > 1 else n"], "dtype": "float32"}},
    "scratch": {"partial": {"shape": ["n", "TILE"], "dtype": "float32", "zeroed": True}},
    "tensor_maps": {"map_x": {"tensor": "x", "dims": ["fixed", "n"], "box": ["fixed", "TILE"], "offset": "16 * n"}},
    "structs": {"params": {"bytes": 32, "at": {
        "0": "partial", "8": "w", "12": {"int32": "3 * n"}, "16": {"pointer": "x", "offset": "4 * n"},
        "24": {"float32": 0.5},
    }}},
    "parameters": ["x", "mark", "y", "params", "map_x"],
    "reference": "def run(x, mark):\n    ...",
    "workloads": [{"axes": {"n": 400, "w": 90, "fixed": 8}}],
}  # fmt: skip
SIZED_SPACE = """kernel = "own"
[knobs]
TILE = [4, 8]
[[constraint]]
expr = "n > 100"
why = "of speed alone, which cases of the gate break"
[launch]
threads = [32, "2 if TILE == 4 else w // 3", 1]
grid = ["ceil_div(n, TILE)", "max(1, min(w, 4 * gpu.sms))", 1]
shared = 0
"""


def own_kernel(load, tile):
    workload = FolderWorkload("own", json.dumps(SIZED | {"space": SIZED_SPACE}))
    target = Target(workload, workload.parse("n=400,w=90,fixed=8"), find_gpu("h100"))
    space = space_of(target, SIZED_SPACE)
    return load(target, next(c for c in space.enumerate() if c["TILE"] == tile), space=space).own


def test_a_kernel_of_one_s_own_gets_maps_structs_scratch_and_grid_by_its_sizes(driver, load):
    own = own_kernel(load, 4)
    x, mark = torch.zeros(50 * 16 + 8, 8), torch.zeros(7, dtype=torch.int8)
    y = own(x, mark)
    assert y.shape == (25,)  # w is 4, n is 50, found from n * 16 + 8
    *tensors, struct_bytes, map_x = given(driver, form="3Q32s128s")
    assert tuple(tensors) == pointers((x, mark, y))
    scratch, w, thrice, into_x, half = struct.unpack("QiiQf4x", struct_bytes)
    assert (w, thrice, into_x, half) == (4, 150, x.data_ptr() + 200, 0.5) and scratch not in tensors
    wanted = TensorMapArgument("map_x", "x", "fp32", (8, 50), (32,), (8, 4), 0, offset=800)
    assert map_x == encode_tensor_map(wanted, x.data_ptr())
    found = driver.launches()[-1]
    assert (found.grid, found.block) == ((13, 4, 1), (32, 2, 1))
    y = own(x, mark[:4])
    assert y.shape == (50,) and driver.launches()[-1].grid == (13, 1, 1)


def test_sizes_may_be_given_by_name_where_no_shape_tells_them(driver, load):
    definition = {
        "name": "flat", "axes": {"rows": {"type": "var"}, "cols": {"type": "var"}},
        "inputs": {"x": {"shape": ["rows * cols"], "dtype": "float32"}},
        "outputs": {"y": {"shape": ["rows"], "dtype": "float32"}},
        "reference": "def run(x):\n    ...", "workloads": [{"axes": {"rows": 64, "cols": 32}}],
    }  # fmt: skip
    space_text = 'kernel = "flat"\n[knobs]\nT = [32]\n[launch]\nthreads = "T"\ngrid = ["rows", 1, 1]\nshared = 0\n'
    workload = FolderWorkload("flat", json.dumps(definition | {"space": space_text}))
    target = Target(workload, workload.parse("rows=64,cols=32"), find_gpu("h100"))
    space = space_of(target, space_text)
    flat = load(target, next(space.enumerate()), space=space).flat
    assert flat(torch.zeros(64 * 32)).shape == (64,)
    y = flat(torch.zeros(12), rows=4)
    assert y.shape == (4,) and given(driver, form="2Q2i")[2:] == (4, 3) and driver.launches()[-1].grid == (4, 1, 1)
    for wrong, says in [
        ({}, "x has shape (12,); with rows=64, cols=32 it must be (2048,)"),
        ({"rows": 5}, "x has shape (12,); with rows=5, cols=32 it must be (160,)"),
        ({"rows": 2.5}, "rows is 2.5; this kernel was verified for sizes from 1 to 64"),
    ]:
        with pytest.raises(ValueError) as refused:
            flat(torch.zeros(12), **wrong)
        assert str(refused.value) == says


def test_what_a_kernel_was_compiled_for_stays(load):
    own = own_kernel(load, 8)
    with pytest.raises(ValueError, match="break w // 3 == 30, which this kernel needs: it was compiled for 960"):
        own(torch.zeros(50 * 16 + 8, 8), torch.zeros(7, dtype=torch.int8))
    with pytest.raises(ValueError, match="break n % 2 == 0, which this kernel needs: a constraint of problem.json"):
        own(torch.zeros(51 * 16 + 8, 8), torch.zeros(93, dtype=torch.int8))
    with pytest.raises(ValueError, match=r"x has shape \(808, 4\); with n=50, w=90 it must be \(808, 8\)"):
        own(torch.zeros(808, 4), torch.zeros(93, dtype=torch.int8))


def test_a_problem_whose_parameters_are_no_expressions_of_its_sizes_serves_them_alone(load, monkeypatch):
    target = target_of("gemm:m256,n256,k256,bf16")
    space = space_of(target)
    found = Candidate(3, 1, str(target.problem), "h100", space.starts[-1], Outcome.ESTIMATED)
    assert run_time_sizes(found, target, space)["axes"] == {"m": 256, "n": 256, "k": 256}
    own = type(target.workload).parameters

    def of_a_size(self, problem, config):
        first, *others = own(self, problem, config)
        return (replace(first, shape=(256, *first.shape[1:])) if problem.m != 1 else first, *others)

    def that_compares(self, problem, config):
        return own(self, problem, config)[problem.m < 100 :]

    for wrong in (of_a_size, that_compares):
        with monkeypatch.context() as changed:
            changed.setattr(type(target.workload), "parameters", wrong)
            assert run_time_sizes(found, target, space) is None


# two kernels in one process


def test_a_gpu_with_other_sms_gets_the_grid_of_the_searchs_rule_there(driver, load):
    """As a kernel whose launch rule names gpu.sms needs it; others have the search's grid on every GPU."""
    module = load(target_of(RMS_NORM), grids={114: (228, 1, 1), 132: (264, 1, 1)})
    driver.set_attribute(0, SMS, 114)
    module.rms_norm(*inputs())
    assert driver.launches()[0].grid == (228, 1, 1)


@pytest.mark.parametrize("grids", [{}, {132: (264, 1, 1)}])
def test_a_number_of_sms_without_a_rule_gets_the_grid_of_the_search(driver, load, grids):
    driver.set_attribute(0, SMS, 114)
    load(target_of(RMS_NORM), grids=grids).rms_norm(*inputs())
    assert driver.launches()[0].grid == LAUNCH.grid


# what is refused

X, RESIDUAL, WEIGHT = inputs()
OUT = torch.zeros(6, 32).half()
ROOM = torch.zeros(400).half()
TURNED = torch.zeros(32, 6).half().T
BAD_TENSORS = {
    "shape": ((X[:5], RESIDUAL, WEIGHT), {}, r"x has shape \(5, 32\); this kernel was compiled for \(6, 32\)"),
    "rank": ((X, RESIDUAL, WEIGHT[None]), {}, r"weight has shape \(1, 32\); this kernel was compiled for \(32,\)"),
    "dtype": ((X, RESIDUAL.float(), WEIGHT), {}, "residual is float32; this kernel was compiled for float16"),
    "output's shape": ((X, RESIDUAL, WEIGHT), {"y": WEIGHT}, r"y has shape \(32,\); .* compiled for \(6, 32\)"),
    "device": ((X, RESIDUAL.to("meta"), WEIGHT), {}, "residual is on meta and x on cpu"),
    "strides": ((X, TURNED, WEIGHT), {}, "residual is not contiguous, as .*: pass residual.contiguous"),
    "output's strides": ((X, RESIDUAL, WEIGHT), {"y": TURNED}, "y is not contiguous, .*: pass a contiguous y"),
    "expanded": ((X, torch.zeros(1, 32).half().expand(6, 32), WEIGHT), {}, "residual is not contiguous"),
    "alignment": ((X, RESIDUAL, ROOM[1:33]), {}, "weight does not start at a multiple of 16 bytes"),
    "output over input": ((X, RESIDUAL, WEIGHT), {"y": X}, "y and x overlap in memory; y must have memory of its own"),
    "output partly over input": (
        (ROOM[:192].view(6, 32), RESIDUAL, WEIGHT), {"y": ROOM[184:376].view(6, 32)}, "y and x overlap in memory"
    ),
    "output over output": ((X, RESIDUAL, WEIGHT), {"out": (OUT, OUT)}, "y and residual_out overlap in memory"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_TENSORS)
def test_tensors_that_the_kernel_was_not_made_for_are_refused(driver, rms_norm, name):
    tensors, named, says = BAD_TENSORS[name]
    with pytest.raises(ValueError, match=says):
        rms_norm(*tensors, **named)
    assert driver.launches() == []


DECODE = "decode:b2,h4,kv2,s40,d64,fp16,page16"
TABLES = {
    "none": ([40, 17], [[5, 0, 3], [4, 1, 99]], None),
    "a page behind the pool": ([40, 17], [[5, 0, 6], [4, 1, 0]], r"block_table\[0, 2\] is 6; it must be from 0 to 5"),
    "a page before it": ([40, 17], [[5, 0, 3], [4, -1, 0]], r"block_table\[1, 1\] is -1; it must be from 0 to 5"),
    "a length beyond the cache": ([41, 17], [[5, 0, 3], [4, 1, 0]], r"lengths\[0\] is 41; it must be from 0 to 40"),
    "a negative length": ([40, -1], [[5, 0, 3], [4, 1, 0]], r"lengths\[1\] is -1; it must be from 0 to 40"),
}


@pytest.mark.parametrize("fault", TABLES)
def test_a_block_table_that_leads_out_of_the_pool_is_refused_by_its_place(driver, load, fault):
    lengths, table, says = TABLES[fault]
    decode = load(target_of(DECODE), {"family": "last_block", "splits": 1}).decode
    cache = torch.zeros(6, 16, 2, 64).half()
    given = (
        torch.zeros(2, 1, 4, 64).half(),
        cache,
        cache.clone(),
        torch.tensor(table).int(),
        torch.tensor(lengths).int(),
    )
    if says is None:
        decode(*given)
    else:
        with pytest.raises(ValueError, match=says):
            decode(*given)
        decode(*given, check_indices=False)
    assert len(driver.launches()) == 1


ENDS = {
    "none": ([3, 3, 8], None),
    "rows behind the last group": ([3, 3, 7], None),
    "a group of fewer than no rows": ([3, 2, 8], r"ends\[1\] is 2, less than the 3 before it; it must not fall"),
    "a group behind A": ([3, 3, 9], r"ends\[2\] is 9; it must be from 0 to 8"),
    "a group before A": ([-1, 3, 8], r"ends\[0\] is -1; it must be from 0 to 8"),
}


@pytest.mark.parametrize("fault", ENDS)
def test_groups_that_do_not_follow_one_another_within_a_are_refused_by_their_place(driver, load, fault):
    ends, says = ENDS[fault]
    gemm = load(target_of("grouped-gemm:rows=3+0+5,n16,k32,bf16"), {"family": "mma", "tile_m": 64})
    given = (torch.zeros(8, 32).bfloat16(), torch.zeros(3, 32, 16).bfloat16(), torch.tensor(ends).int())
    call = gemm.grouped_gemm
    if says is None:
        call(*given)
    else:
        with pytest.raises(ValueError, match=says):
            call(*given)
        call(*given, check_indices=False)
    assert len(driver.launches()) == 1


def test_what_those_refusals_border_on_is_taken(driver, rms_norm):
    """Inputs that are one, neighbours in memory, and strides of dims of one element."""
    room = torch.zeros(6 * 32 * 2).half()
    rms_norm(X, X, WEIGHT)
    rms_norm(room[:192].view(6, 32), RESIDUAL, WEIGHT, y=room[192:].view(6, 32))
    assert len(driver.launches()) == 2


def test_strides_of_a_single_element_say_nothing(driver, load):
    rms_norm = load(target_of("rms_norm:rows1,hidden32,fp16")).rms_norm
    rms_norm(X[:1].as_strided((1, 32), (7, 1)), RESIDUAL[:1], WEIGHT)
    assert len(driver.launches()) == 1


BAD_CALLS = {
    "missing": ((X, RESIDUAL), {}, "writes y and residual_out: weight is missing"),
    "None": ((X, None, WEIGHT), {}, "residual is missing"),
    "an output by position": ((X, RESIDUAL, WEIGHT, OUT), {}, "outputs are given by name, and 4 tensors came"),
    "unknown": ((X, RESIDUAL, WEIGHT), {"bias": X}, "rms_norm takes x, residual and weight .*: it has no bias"),
    "twice": ((X, RESIDUAL, WEIGHT), {"x": X}, "x was given twice"),
    "output twice": ((X, RESIDUAL, WEIGHT), {"y": OUT, "out": (OUT, OUT)}, "y was given twice"),
    "too few of out": ((X, RESIDUAL, WEIGHT), {"out": OUT}, "out must be 2 tensors, and was 1"),
    "no tensor": ((X, RESIDUAL, 1.0), {}, "must be torch's or CuPy's, not builtins.float"),
    "NumPy's": ((X.numpy(), RESIDUAL, WEIGHT), {}, "weight, y and residual_out must be torch's or CuPy's, not numpy"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_CALLS)
def test_calls_that_do_not_fit_are_refused_in_words(driver, rms_norm, name):
    tensors, named, says = BAD_CALLS[name]
    with pytest.raises(TypeError, match=says):
        rms_norm(*tensors, **named)
    assert driver.launches() == []


def test_tensors_of_two_libraries_are_refused(rms_norm):
    arrays, memory = cupy_inputs(0)
    with pytest.raises(TypeError, match="all come from torch or all from CuPy"):
        rms_norm(X, arrays[1], WEIGHT)


def test_tensors_on_the_cpu_are_refused(load, monkeypatch):
    module = load(target_of(RMS_NORM))
    monkeypatch.undo()
    with pytest.raises(ValueError, match="x is on cpu; this kernel runs on a CUDA GPU"):
        module.rms_norm(X, RESIDUAL, WEIGHT)


def test_a_tensor_that_needs_a_gradient_is_refused_by_name(driver, rms_norm):
    weight = WEIGHT.clone().requires_grad_()
    with pytest.raises(RuntimeError, match=r"weight requires a gradient .* pass weight.detach\(\)"):
        rms_norm(X, RESIDUAL, weight)
    with torch.no_grad():
        rms_norm(X, RESIDUAL, weight)
    assert len(driver.launches()) == 1


OWN = {
    "name": "own",
    "axes": {"n": {"type": "var"}},
    "inputs": {"x": {"shape": ["n"], "dtype": "float32"}, "y": {"shape": ["n"], "dtype": "float32"}},
    "inout": ["y"],
    "outputs": {"z": {"shape": ["n"], "dtype": "float32"}},
    "tensor_maps": {
        "source": {"tensor": "x", "dims": ["n - 4", 1], "strides": ["4 * n"], "box": [32, 1], "offset": 16}
    },
    "structs": {
        "p": {"bytes": 32, "at": {"0": "y", "8": {"pointer": "z", "offset": 4}, "16": {"float32": 0.5}, "24": "n"}}
    },
    "parameters": ["source", "p"],
    "reference": "def run(x, y):\n    return y, x\n",
    "workloads": [{"axes": {"n": 64}}],
    "constraints": ["n % 64 == 0"],
    "space": 'kernel = "own"\n[knobs]\nT = [64]\n[launch]\nthreads = "T"\ngrid = ["n", 1, 1]\nshared = 0\n',
}


def test_structs_maps_and_tensors_in_place_reach_the_kernel(load, driver):
    workload = FolderWorkload("own", json.dumps(OWN))
    module = load(Target(workload, workload.parse("n=64"), find_gpu("h100")), {"T": 64})
    x, y = torch.zeros(64), torch.zeros(64)
    same, z = module.own(x, y)
    assert same is y and z.shape == (64,)
    at_x, columns, at_y, at_z, half, n = given(driver, form="QQ112xQQf4xi4x")
    assert (at_x, columns) == (x.data_ptr() + 16, 60)
    assert (at_y, at_z, half, n) == (y.data_ptr(), z.data_ptr() + 4, 0.5, 64)
    with pytest.raises(TypeError, match="y is missing"):
        module.own(x)
    into = torch.zeros(64)
    assert module.own(x, y, out=into)[1] is into
