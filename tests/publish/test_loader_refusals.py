"""GPUs, drivers and tensors that an exported kernel's loader refuses, each in a sentence."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.support.loader import (
    ALL_MAPS,
    CAPABILITY,
    PROBLEM,
    SHARED_PER_BLOCK,
    WGMMA,
    WMMA,
    cupy_tensors,
    strided,
    tensors,
)

# GPUs and drivers that cannot run it


@pytest.mark.parametrize(
    ("arch", "capability", "says"),
    [
        ("sm_90a", (8, 0), "compiled for sm_90a and this is sm_80; export one searched for this GPU"),
        ("sm_90a", (10, 0), "compiled for sm_90a and this is sm_100; export"),
        ("sm_100a", (10, 3), "compiled for sm_100a and this is sm_103; export"),
        ("sm_86", (8, 0), "compiled for sm_86 and this is sm_80; export"),
        ("sm_80", (9, 0), "compiled for sm_80 and this is sm_90; export"),
        ("sm_90a", (9, 0), r"cuModuleLoadData: refused \(209\)"),
        ("sm_80", (8, 6), r"cuModuleLoadData: refused \(209\)"),
    ],
)
def test_a_binary_of_another_architecture_is_named_as_such(driver, load, arch, capability, says):
    driver.set("load_code", 209)
    for number, value in zip(CAPABILITY, capability, strict=True):
        driver.set_attribute(0, number, value)
    with pytest.raises(RuntimeError, match=f"GPU 0 cannot run this kernel: .*{says}"):
        load(WGMMA, arch=arch).attention(*tensors())


def test_a_driver_older_than_the_compiler_is_named_as_such(driver, load):
    driver.set("load_code", 200)
    driver.set("version", 12040)
    with pytest.raises(RuntimeError, match="compiled by nvrtc 13.5 and the driver is for CUDA 12.4; update the"):
        load(WGMMA).attention(*tensors())


def test_a_driver_without_tensor_maps_is_named_as_such(driver, load, monkeypatch):
    module = load(WGMMA)
    functions = {name: getattr(driver.library, name) for name in module._cuda.ARGUMENTS if "Tensor" not in name}
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(**functions))
    with pytest.raises(RuntimeError, match="needs an NVIDIA driver for CUDA 12.0 or newer: .*cuTensorMapEncodeTiled"):
        module.attention(*tensors())


def test_a_machine_without_a_driver_is_named_as_such(load, monkeypatch):
    def missing(name):
        raise OSError(f"{name}: cannot open shared object file")

    module = load(WGMMA)
    monkeypatch.setattr(ctypes, "CDLL", missing)
    with pytest.raises(RuntimeError, match="needs an NVIDIA driver for CUDA 12.0 or newer: libcuda.so.1: cannot"):
        module.attention(*tensors())


def test_shared_memory_that_the_gpu_does_not_have_is_named(driver, load):
    driver.set_attribute(0, SHARED_PER_BLOCK, 99 * 1024)
    load(WMMA).attention(*tensors())
    with pytest.raises(RuntimeError, match="a block needs 102000 bytes of shared memory and can have 101376 there"):
        load(WMMA, static_shared=2000).attention(*tensors())


# gradients


@pytest.mark.parametrize("which", range(4))
def test_a_tensor_that_needs_a_gradient_is_refused_where_gradients_are_recorded(driver, load, which):
    module, given = load(WMMA), tensors()
    module.attention(*given)  # and no call that was remembered lets it pass
    given[which].requires_grad_()
    name = "q k v out".split()[which]
    remedy = rf"call it under torch.no_grad\(\) or pass {name}.detach\(\)"
    with pytest.raises(RuntimeError, match=f"{name} requires a gradient and .* no backward pass: {remedy}"):
        module.attention(*given)
    with torch.no_grad():
        module.attention(*given)
    with torch.inference_mode():
        module.attention(*given)
    module.attention(*(t.detach() for t in given))
    assert len(driver.launches()) == 4


def test_a_tensor_with_a_forward_mode_tangent_is_refused(driver, load):
    module, (q, k, v, out) = load(WMMA), tensors()
    with torch.autograd.forward_ad.dual_level():
        module.attention(q, k, v, out)
        dual = torch.autograd.forward_ad.make_dual(k, torch.ones_like(k))
        with torch.no_grad(), pytest.raises(RuntimeError, match=r"k has a tangent .* pass k.detach\(\)"):
            module.attention(q, dual, v, out)


# memory


def test_out_may_not_overlap_itself_or_the_inputs(driver, load):
    module = load(ALL_MAPS)
    q, k, v, out = tensors(batch=1, kv_heads=4)
    module.attention(q, k, k, out)
    for given, name in (((q, k, v, q), "q"), ((q, k, v, k), "k"), ((q, k, v, v), "v")):
        with pytest.raises(ValueError, match=f"out and {name} overlap in memory; out must have memory of its own"):
            module.attention(*given)
    memory = torch.zeros(2 * q.numel(), dtype=torch.bfloat16)
    first, second = memory[: q.numel()].view_as(q), memory[q.numel() :].view_as(q)
    module.attention(first, k, v, second)
    late = memory[q.numel() - 8 : 2 * q.numel() - 8].view_as(q)
    for given in ((first, k, v, late), (late, k, v, first)):
        with pytest.raises(ValueError, match="out and q overlap"):
            module.attention(*given)
    with pytest.raises(ValueError, match="out has strides of .* by which it overlaps itself: pass a contiguous out"):
        module.attention(q, k, v, strided((1, 4, 100, 64), (0, 3200, 64, 1)))


@pytest.mark.parametrize("which", range(4))
def test_a_tensor_that_starts_off_16_bytes_is_refused_by_name_each_time(load, which):
    module, given = load(WMMA), list(tensors())
    module.attention(*given)
    shape = given[which].shape
    given[which] = torch.zeros(given[which].numel() + 4, dtype=torch.bfloat16)[4:].view(shape)
    for _ in range(2):
        with pytest.raises(ValueError, match=f"{'q k v out'.split()[which]} does not start at a multiple of 16 bytes"):
            module.attention(*given)


# other tensors that it was not made for


def changed(which, tensor):
    given = list(tensors())
    given[which] = tensor
    return given


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ([t.half() for t in tensors()], "q is float16; this kernel was compiled for bfloat16"),
        (changed(2, tensors()[2].float()), "v is float32; this kernel was compiled for bfloat16"),
        (tensors(head_dim=32), "head_dim is 32; this kernel was compiled for 64"),
        (tensors(heads=3), "3 heads are not a multiple of 2 kv heads"),
        (tensors(kv_heads=0), "4 heads are not a multiple of 0 kv heads"),
        (tensors(seq_k=0), "k has no keys to attend to"),
        (tensors(seq_q=101), "causal with 101 queries and 100 keys leaves rows that see no key"),
        (changed(0, tensors()[0][0]), r"q has shape \(4, 100, 64\); \[batch, heads, seq, head_dim\] was expected"),
        (changed(1, tensors()[1][:1]), r"k has shape \(1, 2, 100, 64\); \(2, 2, 100, 64\) was expected"),
        (changed(2, tensors()[2][:, :, :99]), r"v has shape \(2, 2, 99, 64\); \(2, 2, 100, 64\) was expected"),
        (changed(3, tensors(seq_q=99)[3]), r"out has shape \(2, 4, 99, 64\); \(2, 4, 100, 64\) was expected"),
        (changed(2, tensors()[2].to("meta")), "v is on meta and q on cpu"),
    ],
)
def test_tensors_that_the_kernel_was_not_made_for_are_refused(load, given, says):
    with pytest.raises(ValueError, match=says):
        load(WMMA, problem=f"{PROBLEM},causal").attention(*given)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (tensors(head_dim=128), "head_dim is 128; this kernel was compiled for 192"),
        (tensors(head_dim=192), r"v has shape \(2, 2, 100, 192\); \(2, 2, 100, 128\) was expected"),
        ((*tensors(head_dim=192, head_dim_v=128)[:3], tensors(head_dim=192)[3]), r"out has shape .*; .* 128\) was"),
    ],
)
def test_rows_of_v_and_out_of_another_length_are_refused(load, given, says):
    with pytest.raises(ValueError, match=says):
        load(WGMMA, problem="b2,h4,s100,d192,dv128,bf16,kv2").attention(*given)


def test_a_grid_beyond_the_gpus_is_refused_in_words(load):
    one = torch.zeros(1, 1, 1, 64, dtype=torch.bfloat16)
    many = one.expand(70_000, 1, 1, 64).contiguous()
    with pytest.raises(ValueError, match=r"grid of \(1, 1, 70000\); a GPU has at most 65535 along y and z"):
        load(WMMA).attention(many, many, many)


def test_tensors_of_no_library_or_of_two_are_refused(load):
    module, (q, k, v, _) = load(WMMA, problem="b2,h4,s100,d64,fp16,kv2"), tensors()
    with pytest.raises(TypeError, match="must be torch's or CuPy's, not numpy.ndarray"):
        module.attention(q, np.zeros(k.shape, np.float16), v)
    arrays, memory = cupy_tensors()
    with pytest.raises(TypeError, match="all come from torch or all from CuPy"):
        module.attention(q, arrays[1], v)


def test_a_subclass_of_torchs_tensor_is_torchs(driver, load):
    class Own(torch.Tensor):
        pass

    q, k, v, out = tensors()
    load(WMMA).attention(q.as_subclass(Own), k, v, out)
    assert driver.launches()[0].pointers[0] == q.data_ptr()


def test_tensors_on_the_cpu_are_refused(load, monkeypatch):
    module = load(WMMA)
    monkeypatch.undo()
    with pytest.raises(ValueError, match="q is on cpu; this kernel runs on a CUDA GPU"):
        module.attention(*tensors())
