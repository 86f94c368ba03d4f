"""What an exported kernel's loader asks of the driver, as a driver of our own (loader_driver.c) notes it.

Tensors are torch's and CuPy's real ones, in host memory that is taken for a GPU's.
"""

from __future__ import annotations

import ctypes
import math
import struct
import threading

import pytest
import torch

from evoengine.devices.base import TensorMapArgument
from evoengine.devices.cuda import encode_tensor_map
from evoengine.publish import export as exporting
from evoengine.workloads.attention.problem import parse_problem
from tests.support.loader import ALL_MAPS, PROBLEM, SMS, STATIC, WGMMA, WMMA, cupy_tensors, parameters_of, tensors

# what is launched

CONFIGS = {
    "no tensor maps": WMMA,
    "tensor maps to load by": WGMMA,
    "one to store by too": ALL_MAPS,
    "boxes of half a tile": WGMMA | {"schedule": "none", "cluster": 2},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_the_kernel_is_launched_with_what_the_search_launched_it_with(driver, load, name):
    config, given = CONFIGS[name], tensors()
    assert load(config).attention(*given) is given[3]
    (found,) = driver.launches()
    assert found.pointers == tuple(t.data_ptr() for t in given)
    assert found.scalars[:4] == (4, 2, 100, 100)
    assert struct.unpack("f", struct.pack("i", found.scalars[4]))[0] == pytest.approx(1 / math.sqrt(64))
    blocks = 2 if "cluster" in config else -(-100 // config["tile_m"])
    assert (found.grid, found.block, found.shared) == ((blocks, 4, 2), (384, 1, 1), 100_000)
    wanted = parameters_of(TensorMapArgument, parse_problem(PROBLEM), config)
    pointers = dict(zip("qkvo", found.pointers, strict=True))
    assert found.maps == [encode_tensor_map(argument, pointers[argument.tensor]) for argument in wanted]


def test_out_is_new_contiguous_memory_where_none_is_given(driver, load):
    q, k, v, _ = tensors(batch=1)
    q = q.transpose(1, 2).contiguous().transpose(1, 2)
    out = load(ALL_MAPS).attention(q, k, v)
    assert out.shape == q.shape and out.dtype == q.dtype and out.is_contiguous()
    assert driver.launches()[0].pointers[3] == out.data_ptr()


def test_rows_of_v_and_out_may_be_others_than_those_of_q_and_k(driver, load):
    problem = "b2,h4,s100,d192,dv128,bf16,kv2"
    given = tensors(head_dim=192, head_dim_v=128)
    out = load(ALL_MAPS, problem).attention(*given[:3])
    assert out.shape == (2, 4, 100, 128) and out.dtype == torch.bfloat16
    (found,) = driver.launches()
    assert struct.unpack("f", struct.pack("i", found.scalars[4]))[0] == pytest.approx(1 / math.sqrt(192))
    wanted = parameters_of(TensorMapArgument, parse_problem(problem), ALL_MAPS)
    pointers = dict(zip("qkvo", found.pointers, strict=True))
    assert found.maps == [encode_tensor_map(argument, pointers[argument.tensor]) for argument in wanted]


@pytest.mark.parametrize(("sms", "resident", "grid"), [(3, 2, 6), (5, 1, 5), (132, 2, 8)])
def test_a_persistent_kernel_fills_the_gpu_that_it_meets_and_no_more_than_the_work(driver, load, sms, resident, grid):
    driver.set_attribute(0, SMS, sms)
    driver.set("resident", resident)
    load(STATIC).attention(*tensors())
    (found,) = driver.launches()
    assert found.grid == (grid, 1, 1)
    assert found.scalars[:5] == (2, 4, 2, 100, 100)


def test_a_persistent_kernel_of_clusters_gets_whole_ones(driver, load):
    driver.set_attribute(0, SMS, 7)
    module = load(STATIC | {"cluster": 2})
    module.attention(*tensors())
    module.attention(*tensors(batch=1, heads=1, kv_heads=1))
    assert [found.grid for found in driver.launches()] == [(6, 1, 1), (2, 1, 1)]


def test_longest_first_counts_heads_before_tiles_of_rows(driver, load):
    load(WGMMA | {"schedule": "longest_first"}).attention(*tensors(seq_q=300, seq_k=300))
    (found,) = driver.launches()
    assert found.grid == (8, 3, 1) and found.scalars[:4] == (4, 2, 300, 300)


@pytest.mark.parametrize("empty", [{"batch": 0}, {"heads": 0}, {"seq_q": 0}])
def test_nothing_is_launched_where_there_is_nothing_to_compute(driver, load, empty):
    load(WMMA).attention(*tensors(**empty))
    assert driver.launches() == []


# what is done once


def test_a_call_like_one_before_asks_the_driver_for_its_context_and_the_launch_alone(driver, load):
    module, given = load(ALL_MAPS), tensors()
    module.attention(*given)
    driver.library.cuCtxSetCurrent(ctypes.c_void_p(module._gpu(0).context))  # as any thread that has used CUDA
    before = driver.get("calls")
    for _ in range(10):
        module.attention(*given)
    assert driver.get("calls") - before == 2 * 10
    assert (driver.get("loaded"), driver.get("encoded")) == (1, 4)


def test_a_map_is_encoded_again_for_another_pointer_shape_or_stride_alone(driver, load):
    module = load(WGMMA)
    q, k, v, out = tensors(batch=1)
    apart = torch.zeros(1, 2, 128, 64, dtype=torch.bfloat16)[:, :, :100]
    steps = [(q, k, v), (q, k, v), (q.clone(), k, v), (q, k[:, :, :60], v[:, :, :60]), (q, k, apart), (q, k, apart)]
    counts = []
    for given in steps:
        module.attention(*given, out)
        counts.append(driver.get("encoded"))
    assert counts == [3, 3, 4, 6, 7, 7]


def test_what_is_remembered_is_bounded(driver, load, tmp_path, monkeypatch):
    text = exporting.CUDA_LAUNCH.read_text()
    small = tmp_path / "cuda_launch.py"  # a thousand launches would show no more
    small.write_text(text.replace("CACHED = 1024", "CACHED = 40"))
    monkeypatch.setattr(exporting, "CUDA_LAUNCH", small)
    module = load(WGMMA)
    assert module.CACHED == 40
    many = torch.zeros(module.CACHED + 50, 1, 1, 16, 64, dtype=torch.bfloat16)
    out = torch.zeros_like(many[0])
    for q in many:
        module.attention(q, many[0], many[0], out)
    assert (
        module._cuda.tensor_map.cache_info().currsize == module._cuda.parameters.cache_info().currsize == module.CACHED
    )
    for seq in range(1, module.CACHED + 50):
        module.attention(*tensors(1, 1, 1, seq, 1))
    assert module._plan.cache_info().currsize == module.CACHED
    module.attention(many[0], many[0], many[0], out)
    assert driver.launches()[-1].maps[0][:8] == struct.pack("Q", many[0].data_ptr())


# threads and GPUs


def test_a_thread_that_has_not_touched_cuda_yet_can_launch_and_is_left_so(driver, load):
    module, given, found = load(WGMMA), tensors(), []

    def launch():
        module.attention(*given)
        found.append(driver.library.current_gpu())

    for _ in range(2):
        thread = threading.Thread(target=launch)
        thread.start()
        thread.join()
    assert found == [-2, -2] and len(driver.launches()) == 2


def test_a_context_that_was_current_is_current_again_after_errors_too(driver, load):
    driver.library.enter_foreign_context()
    module = load(WGMMA)
    module.attention(*tensors())
    assert driver.library.current_gpu() == -1
    driver.set("encode_code", 1)
    with pytest.raises(RuntimeError, match="cuTensorMapEncodeTiled: refused"):
        module.attention(*tensors(seq_q=7))
    assert driver.library.current_gpu() == -1


def test_threads_that_launch_at_once_do_not_mix_their_parameters(driver, load):
    driver.set("microseconds", 200)  # in which the others may run before the driver reads the parameters
    module = load(ALL_MAPS)
    sets = [tensors() for _ in range(4)]
    module.attention(*sets[0])

    def launch(given):
        for _ in range(50):
            module.attention(*given)

    threads = [threading.Thread(target=launch, args=(given,)) for given in sets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = driver.launches()
    pointers = {tuple(t.data_ptr() for t in given) for given in sets}
    assert len(found) == 201 and {launch.pointers for launch in found} == pointers
    for launch in found:
        assert [struct.unpack_from("Q", m)[0] for m in launch.maps] == list(launch.pointers)


def test_each_gpu_loads_the_kernel_once_and_gets_its_own_grid(driver, load):
    module = load(STATIC, problem="b2,h4,s100,d64,fp16,kv2")
    for gpu, sms in ((0, 3), (1, 5)):
        driver.set_attribute(gpu, SMS, sms)
    (first, _keep_first), (second, _keep_second) = cupy_tensors(0), cupy_tensors(1)
    for given in (first, second, first, second):
        module.attention(*given)
    found = driver.launches()
    assert [(launch.gpu, launch.grid[0], launch.stream) for launch in found] == [(0, 3, 1000), (1, 5, 1001)] * 2
    assert driver.get("loaded") == 2
    assert found[1].pointers == tuple(array.data.ptr for array in second)
    with pytest.raises(ValueError, match="k is on GPU 1 and q on GPU 0"):
        module.attention(first[0], *second[1:])
