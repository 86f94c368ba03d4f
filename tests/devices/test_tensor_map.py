"""What reaches the driver when a tensor map is encoded, told by a driver of our own that writes its arguments down."""

from __future__ import annotations

import ctypes
import struct
import subprocess
from dataclasses import replace

import pytest

from evoengine.devices import cuda_api, tensor_map
from evoengine.devices.base import KernelUnbuildable, TensorMapArgument
from evoengine.devices.cuda import encode_tensor_map
from evoengine.errors import MachineError
from evoengine.sandbox.host_compiler import find_compiler

DRIVER = """
#include <stdint.h>
#include <string.h>
int cuTensorMapEncodeTiled(void* map, int type, uint32_t rank, void* address, const uint64_t* dims,
                           const uint64_t* strides, const uint32_t* box, const uint32_t* steps, int interleave,
                           int swizzle, int l2, int fill) {
    if ((uintptr_t)map % 128 || (uintptr_t)address % 16) return 1;
    struct {
        uint64_t address, dims[3], strides[2];
        uint32_t type, rank, box[3], steps[3], interleave, swizzle, fill;
    } seen =
        {(uint64_t)address, {dims[0], dims[1], dims[2]}, {strides[0], strides[1]}, (uint32_t)type, rank,
         {box[0], box[1], box[2]}, {steps[0], steps[1], steps[2]}, (uint32_t)interleave,
         (uint32_t)swizzle, (uint32_t)fill};
    memset(map, 0, 128);
    memcpy(map, &seen, sizeof seen);
    return 0;
}
int cuGetErrorName(int code, const char** name) { *name = "CUDA_ERROR_INVALID_VALUE"; return 0; }
int cuGetErrorString(int code, const char** text) { *text = "invalid argument"; return 0; }
"""
MAP = TensorMapArgument("map_k", "k", "bf16", (128, 2048, 6), (256, 256 * 2048), (64, 96, 1), 128)


@pytest.fixture
def driver(tmp_path, monkeypatch):
    library = tmp_path / "driver.so"
    command = [find_compiler(), "-shared", "-fPIC", "-xc", "-", "-o", str(library)]
    subprocess.run(command, input=DRIVER, text=True, check=True)
    monkeypatch.setattr(cuda_api, "library", lambda: ctypes.CDLL(str(library)))
    cuda_api._function.cache_clear()
    yield
    cuda_api._function.cache_clear()


def test_the_driver_is_told_the_tensor_the_box_and_the_swizzle(driver):
    seen = struct.unpack_from("=6Q11I", encode_tensor_map(MAP, 0x7F0000001000))
    assert seen[:6] == (0x7F0000001000, 128, 2048, 6, 256, 256 * 2048)
    assert seen[6:] == (9, 3, 64, 96, 1, 1, 1, 1, 0, 3, 0)


def test_what_the_driver_refuses_is_told_with_its_code(driver):
    with pytest.raises(KernelUnbuildable, match="map map_k: invalid argument .*, 1, from cuTensorMapEncodeTiled"):
        encode_tensor_map(MAP, 0x7F0000001008)


def test_a_machine_without_a_driver_is_told_what_is_missing(monkeypatch):
    def missing():
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(cuda_api, "library", missing)
    cuda_api._function.cache_clear()
    with pytest.raises(MachineError, match="this machine has no CUDA driver: libcuda.so.1"):
        encode_tensor_map(MAP, 0x7F0000001000)


@pytest.mark.gpu
def test_the_real_driver_takes_what_the_rules_allow():
    import torch

    from evoengine.devices.torch_gpu import gpu

    tensor = gpu().empty((6, 2048, 128), torch.bfloat16)
    tensor_map.check(MAP, tensor.nbytes)
    plain = TensorMapArgument("map_k", "k", "bf16", MAP.dims, MAP.strides_bytes, MAP.box, 0)
    one, other = (encode_tensor_map(m, tensor.data_ptr()) for m in (MAP, plain))
    assert len(one) == len(other) == 128 and one != other


def test_a_map_of_ragged_rows_ends_where_the_kernel_says():
    """Row r of n before row e is at the coordinates (FAR, e, FAR - n + r), in addresses of 64 bits."""
    found = tensor_map.ragged("map_k", "k", "bf16", 512, (128, 64), 128)
    tensor_map.check(found, 1024 * 300)
    row, end, size = 7, 130, 30
    at = (0, tensor_map.FAR - size + row, end, tensor_map.FAR)
    assert all(0 <= x < dim for x, dim in zip(at, found.dims, strict=True))
    reached = sum(x * stride for x, stride in zip(at[1:], found.strides_bytes, strict=True)) % 2**64
    assert reached == (end - size + row) * 1024
    assert tensor_map.FAR - size + size == found.dims[1], "the row behind the last is outside"


def test_a_map_of_other_strides_that_reaches_as_far_is_refused():
    found = tensor_map.ragged("map_k", "k", "bf16", 512, (128, 64), 128)
    other = replace(found, strides_bytes=(1024, 2048, found.strides_bytes[2]))
    with pytest.raises(KernelUnbuildable, match="bytes into tensor k of 307200"):
        tensor_map.check(other, 1024 * 300)
