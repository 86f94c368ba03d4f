"""The driver's functions through ctypes, on the stand-in driver: what is loaded, launched and given back."""

from __future__ import annotations

import gc
import subprocess
import sys

import numpy as np
import pytest

from evoengine.devices import cuda_api
from evoengine.devices.cuda_api import CudaError, Event, Graph, Module, Parameters
from evoengine.records import Launch, Source

stand_in = pytest.mark.stand_in
TEXT = """
extern "C" __global__ void __launch_bounds__(256) add(const float* a, float* b, int n, char c) { b[n] = a[0] + c; }
"""
STRUCT = """
struct alignas(64) Map { char bytes[128]; };
extern "C" __global__ void add(const __grid_constant__ Map m, int* o) { *o = m.bytes[5]; }
"""


@pytest.fixture(scope="module")
def cubin():
    from evoengine.stages.compile import compile_source

    return compile_source(Source(TEXT, "add", Launch((1, 1, 1), 32, 0)), "sm_90a").cubin


@pytest.fixture
def launches(monkeypatch):
    """Every launch that the driver hands on, as it received it."""
    from tests.fake_cuda import device

    cuda_api.use_primary_context()
    device.install()
    device.reset()
    seen = []

    def program(given):
        seen.append(given)
        return 0

    monkeypatch.setitem(device.programs, "add", program)
    monkeypatch.setitem(device.times, "add", 100.0)
    yield seen
    gc.collect()
    device.reset()


def parameters():
    return Parameters([np.uint64(0x7000), np.uint64(0x8000), np.int32(-5), np.int8(3)])


def test_importing_it_needs_no_driver_and_loads_none():
    script = "from evoengine.devices import cuda_api; assert 'libcuda' not in open('/proc/self/maps').read()"
    subprocess.run([sys.executable, "-c", script], check=True)


@stand_in
def test_a_launch_brings_geometry_and_just_the_bytes_of_each_parameter(cubin, launches):
    Module(cubin).function("add").launch((3, 2, 1), (32, 2, 4), 1024, parameters())
    [given] = launches
    assert (given.entry, given.launch) == ("add", Launch((3, 2, 1), 256, 1024, (2, 4)))
    assert given.launch.block == (32, 2, 4)
    assert given.image == cubin
    assert [int.from_bytes(p, "little", signed=True) for p in given.parameters] == [0x7000, 0x8000, -5, 3]
    assert [len(p) for p in given.parameters] == [8, 8, 4, 1]


@stand_in
def test_a_struct_travels_by_value(launches):
    from evoengine.stages.compile import compile_source

    source = Source(STRUCT, "add", Launch((1, 1, 1), 32, 0))
    whole = bytes(range(128))
    function = Module(compile_source(source, "sm_90a").cubin).function("add")
    function.launch((1, 1, 1), (32, 1, 1), 0, Parameters([whole, np.uint64(0)]))
    assert launches[0].parameters[0] == whole


@stand_in
def test_a_module_is_unloaded_when_it_and_its_functions_are_dropped(cubin, launches):
    from tests.fake_cuda.device import live

    before = live("module")
    module = Module(cubin)
    function = module.function("add")
    del module
    gc.collect()
    assert live("module") == before + 1
    function.launch((1, 1, 1), (32, 1, 1), 0, parameters())
    del function
    gc.collect()
    assert live("module") == before


@stand_in
def test_a_graph_keeps_its_kernels_and_replays_them(cubin, launches):
    from tests.fake_cuda.device import live

    before = live("module"), live("executable graph")
    function, packed = Module(cubin).function("add"), parameters()

    def recorded(function):
        return Graph(lambda stream: function.launch((1, 1, 1), (32, 1, 1), 0, packed, stream))

    graph = recorded(function)
    del function
    gc.collect()
    assert launches == []  # captured, not run
    start, end = Event(), Event()
    start.record()
    graph.launch()
    graph.launch()
    end.record()
    while not end.query():
        pass
    assert len(launches) == 2
    assert start.elapsed_us(end) == pytest.approx(200.0, rel=0.05)
    del graph
    gc.collect()
    assert (live("module"), live("executable graph")) == before
    assert live("graph") == live("stream") == 0


@stand_in
def test_a_kernel_that_was_unloaded_while_its_graph_lives_fails(cubin, launches):
    """What keeping it prevents."""
    module = Module(cubin)
    function, packed = module.function("add"), parameters()
    graph = Graph(lambda stream: function.launch((1, 1, 1), (32, 1, 1), 0, packed, stream))
    cuda_api.call("cuModuleUnload", module.handle)
    graph.launch()
    with pytest.raises(CudaError, match="unspecified launch failure"):
        Event()


@stand_in
def test_errors_carry_the_drivers_code_name_and_text(cubin, launches):
    with pytest.raises(CudaError) as caught:
        Module(b"no binary").function("add")
    error = caught.value
    assert (error.code, error.name, error.text) == (200, "CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid")
    assert error.call == "cuModuleLoadData" and not error.out_of_memory
    said = r"named symbol not found \(CUDA_ERROR_NOT_FOUND, 500, from cuModuleGetFunction\)"
    with pytest.raises(CudaError, match=said):
        Module(cubin).function("subtract")


@stand_in
def test_out_of_memory_is_known_as_such(cubin, launches, monkeypatch):
    monkeypatch.setenv("FAKE_CUDA_FAIL", "cuModuleLoadData:2:1")
    with pytest.raises(CudaError) as caught:
        Module(cubin)
    assert caught.value.out_of_memory


LIMITS = {
    "no blocks": ((0, 1, 1), (32, 1, 1), 0, 1),
    "a grid too high": ((1, 65536, 1), (32, 1, 1), 0, 1),
    "more threads than its launch bounds": ((1, 1, 1), (288, 1, 1), 0, 1),
    "more shared memory than was opted in to": ((1, 1, 1), (32, 1, 1), 49153, 1),
}


@stand_in
@pytest.mark.parametrize("name", LIMITS)
def test_a_launch_beyond_a_limit_is_refused(cubin, launches, name):
    grid, block, shared, code = LIMITS[name]
    with pytest.raises(CudaError) as caught:
        Module(cubin).function("add").launch(grid, block, shared, parameters())
    assert caught.value.code == code and launches == []


@stand_in
def test_shared_memory_beyond_48_kib_is_opted_in_to(cubin, launches):
    function = Module(cubin).function("add")
    function.allow_shared(232448)
    function.launch((1, 1, 1), (32, 1, 1), 232448, parameters())
    assert launches[0].launch.shared_bytes == 232448
    with pytest.raises(CudaError):
        function.allow_shared(232449)


@stand_in
def test_after_a_failed_kernel_every_call_says_so(cubin, launches, monkeypatch):
    from tests.fake_cuda import device

    monkeypatch.setitem(device.programs, "add", lambda given: 700)
    Module(cubin).function("add").launch((1, 1, 1), (32, 1, 1), 0, parameters())
    with pytest.raises(CudaError, match="an illegal memory access was encountered"):
        cuda_api.memory_info()


@stand_in
def test_an_event_is_done_when_what_was_queued_before_it_is(cubin, launches, monkeypatch):
    from tests.fake_cuda import device

    function, first, last = Module(cubin).function("add"), Event(), Event()
    function.launch((1, 1, 1), (32, 1, 1), 0, parameters())
    first.record()
    assert not first.query() and first.query()
    monkeypatch.setitem(device.times, "add", float("inf"))
    function.launch((1, 1, 1), (32, 1, 1), 0, parameters())
    last.record()
    assert not any(last.query() for _ in range(50))
    cuda_api.keep_handles()  # unloading the module would wait for ever


@stand_in
def test_a_runner_loads_no_cupy():
    """So that no setting of CuPy's, as of its default stream, can reach what is timed."""
    script = "import sys, evoengine.timing.measure; assert not [m for m in sys.modules if m.startswith('cupy')]"
    subprocess.run([sys.executable, "-c", script], check=True)
