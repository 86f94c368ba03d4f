"""What an exported kernel's loader asks of the driver, told by a driver of our own that writes its arguments down."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import math
import struct
import subprocess
import threading

import pytest
import torch

from evoengine.devices import tensor_map
from evoengine.devices.emulator.build import find_compiler
from evoengine.problem import parse_problem
from evoengine.publish.export import export
from evoengine.records import Binary, Candidate, Launch, Outcome, Source
from evoengine.workloads import find_tensors

DRIVER = """
#include <stdint.h>
#include <string.h>
static _Thread_local int entered;
static int encoded;
struct { uint64_t pointers[4]; int32_t sizes[4]; float scale; uint32_t geometry[7], attribute, maps; char rest[40]; } seen;
char map[4][128];
int cuCtxGetCurrent(void** context) { *context = entered ? &entered : 0; return 0; }
int cuDeviceGet(int* device, int index) { *device = 70 + index; return 0; }
int cuDevicePrimaryCtxRetain(void** context, int device) { *context = &entered; return device == 70 ? 0 : 101; }
int cuCtxSetCurrent(void* context) { entered = context != 0; return 0; }
int cuModuleLoadData(void** module, const char* image) { *module = &encoded; return entered ? image[0] != 127 : 201; }
int cuModuleGetFunction(void** f, void* module, const char* name) { *f = &seen; return strcmp(name, "attention"); }
int cuFuncSetAttribute(void* f, int attribute, int value) { seen.attribute = value; return attribute != 8; }
int cuGetErrorString(int code, const char** text) { *text = "invalid device context"; return 0; }
int cuTensorMapEncodeTiled(char* to, int type, uint32_t rank, void* address, const uint64_t* dims,
                           const uint64_t* strides, const uint32_t* box, const uint32_t* steps, int interleave,
                           int swizzle, int l2, int fill) {
    uint64_t found[] = {(uint64_t)address, dims[0], dims[1], dims[2], strides[0], strides[1], box[0], box[1], box[2],
                        steps[0], steps[1], steps[2], type, interleave, swizzle, l2 << 8 | fill};
    memcpy(to, found, 128);
    ++encoded;
    return (uintptr_t)to % 128 ? 1 : 0;
}
int cuLaunchKernel(void* f, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned by, unsigned bz,
                   unsigned shared, void* stream, void** parameters, void** extra) {
    if (!entered) return 201;
    if (f != &seen || stream || extra) return 1;
    for (int i = 0; i < 4; ++i) memcpy(&seen.pointers[i], parameters[i], 8), memcpy(&seen.sizes[i], parameters[4 + i], 4);
    memcpy(&seen.scale, parameters[8], 4);
    uint32_t geometry[] = {x, y, z, threads, by, bz, shared};
    memcpy(seen.geometry, geometry, sizeof geometry);
    seen.maps = encoded;
    for (; encoded; --encoded) memcpy(map[encoded - 1], parameters[8 + encoded], 128);
    return 0;
}
"""
PROBLEM = parse_problem("b2,h4,s100,d64,bf16,kv2")
WGMMA = {"family": "wgmma", "tile_m": 128, "tile_n": 96, "load": "tma", "o_store": "direct"}


@pytest.fixture
def driver(tmp_path, monkeypatch):
    library = tmp_path / "driver.so"
    command = [find_compiler(), "-shared", "-fPIC", "-xc", "-", "-o", str(library)]
    subprocess.run(command, input=DRIVER, text=True, check=True)
    loaded = ctypes.CDLL(str(library))
    monkeypatch.setattr(ctypes, "CDLL", lambda name: loaded)
    return loaded


def load(config, folder, monkeypatch):
    """The loader of an exported candidate, with tensors of the CPU taken for those of a GPU."""
    source = Source("// text", "attention", Launch((1, 4, 2), 384, 100_000))
    binary = Binary(b"\x7fELF", "sm_90a", "-arch=sm_90a", "nvrtc 13.5", 168, 0, 0, 0, (), {}, 1.0)
    candidate = Candidate(3, 1, str(PROBLEM), "h100", config, Outcome.ESTIMATED, source=source, binary=binary)
    export(candidate, folder)
    spec = importlib.util.spec_from_file_location("exported_attention", folder / "attention.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "_device", lambda tensor: contextlib.nullcontext())
    monkeypatch.setattr(module, "_device_index", lambda tensor: 0)
    monkeypatch.setattr(module, "_stream", lambda tensor: 0)
    return module


def tensors():
    q = torch.zeros(2, 4, 100, 64, dtype=torch.bfloat16)
    k = torch.zeros(2, 2, 100, 64, dtype=torch.bfloat16)
    return {"q": q, "k": k, "v": k.clone(), "o": q.clone()}


CONFIGS = {
    "no tensor maps": {"family": "wmma", "tile_m": 64, "tile_n": 64},
    "tensor maps to load by": WGMMA,
    "one to store by too": WGMMA | {"o_store": "tma"},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_the_kernel_is_launched_with_what_the_search_launched_it_with(driver, tmp_path, monkeypatch, name):
    config = CONFIGS[name]
    given = tensors()
    load(config, tmp_path, monkeypatch).attention(given["q"], given["k"], given["v"], given["o"])
    found = struct.unpack_from("=4Q4if9I", bytes((ctypes.c_char * 128).in_dll(driver, "seen")))
    assert found[:4] == tuple(t.data_ptr() for t in given.values())
    assert found[4:8] == (4, 2, 100, 100) and found[8] == pytest.approx(1 / math.sqrt(64))
    assert found[9:16] == (-(-100 // config["tile_m"]), 4, 2, 384, 1, 1, 100_000)
    assert found[16] == 100_000
    wanted = find_tensors("attention").tensor_maps(PROBLEM, config)
    maps = bytes((ctypes.c_char * 512).in_dll(driver, "map"))
    assert found[17] == len(wanted)
    for i, argument in enumerate(wanted):
        assert maps[128 * i : 128 * (i + 1)] == tensor_map.encode(argument, given[argument.tensor].data_ptr())


def test_a_thread_that_has_not_touched_cuda_yet_can_launch_too(driver, tmp_path, monkeypatch):
    given = tensors()
    module = load(WGMMA, tmp_path, monkeypatch)
    failures = []

    def launch():
        try:
            module.attention(given["q"], given["k"], given["v"])
        except RuntimeError as error:
            failures.append(str(error))

    for _ in range(2):
        thread = threading.Thread(target=launch)
        thread.start()
        thread.join()
    assert failures == []
