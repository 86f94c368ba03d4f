"""What an exported kernel's loader asks of the driver and what it refuses, told by a driver of our own (driver.c).

Tensors are torch's and CuPy's real ones, in host memory that is taken for a GPU's.
"""

from __future__ import annotations

import ctypes
import importlib
import itertools
import math
import shutil
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import cupy
import numpy as np
import pytest
import torch

from evoengine.devices import cuda_api, tensor_map
from evoengine.devices.base import ScalarArgument, TensorArgument, TensorMapArgument
from evoengine.devices.emulator.build import build
from evoengine.devices.emulator.run import run
from evoengine.host_compiler import find_compiler
from evoengine.publish.export import export
from evoengine.records import Binary, Candidate, Launch, Outcome, Source
from evoengine.workloads import find_workload
from evoengine.workloads.attention.problem import parse_problem
from evoengine.workloads.base import Case
from tests.conftest import attention_target

PROBLEM = "b2,h4,s100,d64,bf16,kv2"
WMMA = {"family": "wmma", "tile_m": 64, "tile_n": 64}
WGMMA = {"family": "wgmma", "tile_m": 128, "tile_n": 96, "load": "tma", "o_store": "direct"}
ALL_MAPS = WGMMA | {"o_store": "tma"}
STATIC = WGMMA | {"schedule": "static"}
LAUNCH = struct.Struct("=4QQ6i3i3iii16s512s")
SMS, CAPABILITY, SHARED_PER_BLOCK = 16, (75, 76), 97
"""numbers of the driver's attributes"""


class Driver:
    """The library, with its counters and settings as attributes, and what it was asked to launch."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        for gpu, (sms, shared) in enumerate([(132, 232448), (114, 232448)]):
            self.set_attribute(gpu, SMS, sms)
            self.set_attribute(gpu, CAPABILITY[0], 9)
            self.set_attribute(gpu, SHARED_PER_BLOCK, shared)

    def get(self, name: str) -> int:
        return ctypes.c_int.in_dll(self.library, name).value

    def set(self, name: str, value: int) -> None:
        ctypes.c_int.in_dll(self.library, name).value = value

    def set_attribute(self, gpu: int, number: int, value: int) -> None:
        ((ctypes.c_int * 128) * 2).in_dll(self.library, "attributes")[gpu][number] = value

    def launches(self) -> list[SimpleNamespace]:
        raw = bytes((ctypes.c_char * (LAUNCH.size * self.get("launches"))).in_dll(self.library, "seen"))
        return [self._launch(found) for found in LAUNCH.iter_unpack(raw)]

    def _launch(self, found: tuple) -> SimpleNamespace:
        maps = [found[20][i : i + 128] for i in range(0, 128 * self.get("maps"), 128)]
        return SimpleNamespace(
            pointers=found[:4], stream=found[4], scalars=found[5:11], grid=found[11:14], block=found[14:17],
            shared=found[17], gpu=found[18], image=found[19].rstrip(b"\0"), maps=maps,
        )  # fmt: skip


@pytest.fixture(scope="session")
def built(tmp_path_factory) -> Path:
    library = tmp_path_factory.mktemp("driver") / "driver.so"
    text = Path(__file__).with_name("driver.c")
    subprocess.run([find_compiler(), "-shared", "-fPIC", "-xc", str(text), "-o", str(library)], check=True)
    return library


@pytest.fixture
def driver(built, tmp_path, monkeypatch) -> Iterator[Driver]:
    """A fresh one: a copy of the file is a library of its own."""
    library = ctypes.CDLL(shutil.copy(built, tmp_path / "driver.so"))
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    remembered = (cuda_api.library, cuda_api._function)
    for function in remembered:
        function.cache_clear()
    yield Driver(library)
    for function in remembered:  # or other tests would meet it
        function.cache_clear()


@pytest.fixture
def load(driver, tmp_path, monkeypatch):
    """Exports a candidate and imports the folder; the CPU is taken for GPU 0."""
    numbers = itertools.count()
    monkeypatch.syspath_prepend(tmp_path)

    def loaded(config, problem=PROBLEM, name=None, arch="sm_90a", cubin=b"\x7fELF", static_shared=0):
        name = name or f"exported_{next(numbers)}"
        source = Source("// text", "attention", Launch((1, 4, 2), 384, 100_000))
        binary = Binary(cubin, arch, f"-arch={arch}", "nvrtc 13.5", 168, 0, 0, static_shared, (), {}, 1.0)
        target = attention_target(problem)
        text = str(target.problem)
        found = Candidate(3, 1, text, "h100", config, Outcome.ESTIMATED, source=source, binary=binary)
        export(found, target, tmp_path / name)
        importlib.invalidate_caches()
        module = importlib.import_module(f"{name}.attention")
        monkeypatch.setattr(module._cuda.Torch, "gpu_index", lambda device: 0)
        monkeypatch.setattr(module._cuda.Torch, "stream", lambda gpu_index: 0)
        monkeypatch.setattr(module._cuda.Cupy, "stream", lambda gpu_index: 1000 + gpu_index)
        driver.set("scalars", 6 if config.get("schedule") == "static" else 5)
        driver.set("maps", len(module.MAPPED))
        return module

    yield loaded
    for name in [name for name in sys.modules if name.startswith("exported_")]:
        del sys.modules[name]


def tensors(batch=2, heads=4, kv_heads=2, seq_q=100, seq_k=100, head_dim=64):
    q = torch.zeros(batch, heads, seq_q, head_dim, dtype=torch.bfloat16)
    k = torch.zeros(batch, kv_heads, seq_k, head_dim, dtype=torch.bfloat16)
    return q, k, k.clone(), q.clone()


def on_gpu(gpu: int, shape) -> tuple[cupy.ndarray, np.ndarray]:
    """A CuPy array that says it is on that GPU, and the host memory that it lies in."""
    memory = np.zeros(2 * math.prod(shape) + 16, np.uint8)
    start = memory.ctypes.data + -memory.ctypes.data % 16
    pointer = cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(start, memory.nbytes - 16, memory, gpu), 0)
    return cupy.ndarray(shape, np.float16, pointer), memory


def cupy_tensors(gpu: int = 0):
    made = [on_gpu(gpu, (2, heads, 100, 64)) for heads in (4, 2, 2, 4)]
    return [array for array, _ in made], [memory for _, memory in made]


def parameters_of(kind: type, problem, config):
    return [p for p in find_workload("attention").parameters(problem, config) if isinstance(p, kind)]


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
    assert found.maps == [tensor_map.encode(argument, pointers[argument.tensor]) for argument in wanted]


def test_out_is_new_contiguous_memory_where_none_is_given(driver, load):
    q, k, v, _ = tensors(batch=1)
    q = q.transpose(1, 2).contiguous().transpose(1, 2)
    out = load(ALL_MAPS).attention(q, k, v)
    assert out.shape == q.shape and out.dtype == q.dtype and out.is_contiguous()
    assert driver.launches()[0].pointers[3] == out.data_ptr()


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


def test_what_is_remembered_is_bounded(driver, load):
    module = load(WGMMA)
    many = torch.zeros(module.CACHED + 50, 1, 1, 16, 64, dtype=torch.bfloat16)
    out = torch.zeros_like(many[0])
    for q in many:
        module.attention(q, many[0], many[0], out)
    assert module._cuda.tensor_map.cache_info().currsize == module._cuda.parameters.cache_info().currsize == module.CACHED
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
    (first, keep_first), (second, keep_second) = cupy_tensors(0), cupy_tensors(1)
    for given in (first, second, first, second):
        module.attention(*given)
    found = driver.launches()
    assert [(launch.gpu, launch.grid[0], launch.stream) for launch in found] == [(0, 3, 1000), (1, 5, 1001)] * 2
    assert driver.get("loaded") == 2
    assert found[1].pointers == tuple(array.data.ptr for array in second)
    with pytest.raises(ValueError, match="k is on GPU 1 and q on GPU 0"):
        module.attention(first[0], *second[1:])


# two exports in one process


def test_two_exports_are_imported_by_their_folders_and_share_nothing(driver, load):
    load(WMMA, name="exported_d64", cubin=b"sixty-four")
    load(WMMA, problem="b2,h4,s100,d128,bf16", name="exported_d128", cubin=b"twice that")
    d64, d128 = (importlib.import_module(name).attention for name in ("exported_d64", "exported_d128"))
    d64(*tensors())
    d128(*tensors(head_dim=128, kv_heads=4))
    d64(*tensors())
    assert [found.image for found in driver.launches()] == [b"sixty-four", b"twice that", b"sixty-four"]
    assert {"exported_d64.attention", "exported_d128.attention"} <= set(sys.modules)
    assert sys.modules["exported_d64.attention"]._gpu is not sys.modules["exported_d128.attention"]._gpu
    assert "attention" not in sys.modules
    with pytest.raises(ValueError, match="head_dim is 128; this kernel was compiled for 64"):
        d64(*tensors(head_dim=128, kv_heads=4))


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


# strides


def strided(shape, strides, offset=0):
    room = 1 + offset + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    return torch.zeros(room, dtype=torch.bfloat16).as_strided(shape, strides, offset)


FOLLOWED = {
    "seq before heads, one batch entry": ((1, 4, 100, 64), (0, 64, 256, 1), (512, 128)),
    "seq before heads, one head": ((2, 1, 100, 64), (6400, 64, 64, 1), (128, 12800)),
    "rows padded": ((2, 4, 100, 64), (28800, 7200, 72, 1), (144, 14400)),
    "longer rows' sequence cut": ((2, 4, 100, 64), (32768, 8192, 64, 1), (128, 16384)),
    "one of q, k and v packed": ((1, 4, 100, 64), (0, 64, 768, 1), (1536, 128)),
    "strides of single elements say nothing": ((1, 1, 1, 64), (7, 3, 5, 1), (128, 128)),
    "one row of each head": ((2, 4, 1, 64), (256, 64, 9, 1), (128, 128)),
}


@pytest.mark.parametrize("name", FOLLOWED)
def test_strides_that_a_tensor_map_can_follow_reach_it(driver, load, name):
    shape, strides, (row, head) = FOLLOWED[name]
    _, heads, seq, _ = shape
    q = strided(shape, strides)
    k, v, out = torch.zeros(shape, dtype=torch.bfloat16), strided(shape, strides), strided(shape, strides)
    load(ALL_MAPS).attention(q, k, v, out)
    (found,) = driver.launches()
    maps = [struct.unpack_from("=6Q", m) for m in found.maps]
    dense = (k.data_ptr(), 64, seq, shape[0] * heads, 128, 128 * seq)
    wanted = [(t.data_ptr(), 64, seq, shape[0] * heads, row, head) for t in (q, v, out)]
    assert maps == [wanted[0], dense, *wanted[1:]]


def test_a_kernel_finds_its_tensors_by_their_maps_alone(driver, load, attention_gate):
    """The maps that the driver was asked for, given to the emulator; NaN lies between what it may read and write."""
    gate = attention_gate("b1,h4,s150,d64,fp16,kv2")
    problem, config = gate.problem, gate.start({"load": "tma"}) | {"o_store": "tma"}
    own = find_workload("attention").tensors()
    drawn = own.draw(Case("strided", problem), seed=5)
    memory = {"out": torch.full((150, 5, 64), math.nan, dtype=torch.float16)}
    for name, tensor in drawn.inputs.items():
        memory[name] = torch.full((150, tensor.shape[1] + 1, 64), math.nan, dtype=torch.float16)
        memory[name][:, :-1] = tensor[0].transpose(0, 1)
    views = {name: tensor[None, :, :-1].transpose(1, 2) for name, tensor in memory.items()}
    load(config, problem=str(problem)).attention(**views)

    maps = [struct.unpack_from("=16Q", m) for m in driver.launches()[0].maps]
    described = [
        replace(argument, dims=found[1:4], strides_bytes=found[4:6], box=found[6:9])
        for argument, found in zip(parameters_of(TensorMapArgument, problem, config), maps, strict=True)
    ]
    arguments = [TensorArgument(name, memory[name].view(torch.uint16).numpy()) for name in "qkv"]
    arguments += [TensorArgument("o", memory["out"].view(torch.uint16).numpy(), output=True)]
    arguments += [*parameters_of(ScalarArgument, problem, config), *described]
    source = gate.source(config)
    done = run(build(source), source.entry, gate.space.launch(config, problem), arguments, 3, 60.0)
    out = torch.from_numpy(done["o"]).view(torch.float16).view(150, 5, 64)
    expected = own.reference(problem, drawn.expected)["o"][0].transpose(0, 1)
    assert (out[:, :4].double() - expected).abs().max() < 1e-3
    assert out[:, 4].isnan().all()


REFUSED = {
    "seq before heads, several batch entries": ((2, 4, 100, 64), (25600, 64, 256, 1)),
    "head_dim not innermost": ((1, 4, 100, 64), (0, 6400, 1, 100)),
    "every second element": ((1, 4, 100, 64), (0, 12800, 128, 2)),
    "rows 4 bytes off": ((1, 4, 100, 64), (0, 6600, 66, 1)),
    "heads 4 bytes off": ((1, 4, 100, 64), (0, 6402, 64, 1)),
    "one head expanded": ((1, 4, 100, 64), (0, 0, 64, 1)),
    "one row expanded": ((1, 4, 100, 64), (0, 6400, 0, 1)),
    "one batch entry expanded": ((2, 4, 100, 64), (0, 6400, 64, 1)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_strides_that_no_tensor_map_follows_are_refused_with_the_remedy(driver, load, name):
    shape, strides = REFUSED[name]
    q = torch.zeros(shape, dtype=torch.bfloat16)
    module = load(ALL_MAPS)
    with pytest.raises(ValueError, match=r"k has strides .* can follow .* 4 heads apart: pass k.contiguous\(\)"):
        module.attention(q, strided(shape, strides), q, q.clone())
    with pytest.raises(ValueError, match="out has strides of .* can follow .*: pass a contiguous out"):
        module.attention(q, q, q, strided(shape, strides))
    module.attention(q, strided(shape, strides).contiguous(), q)
    assert len(driver.launches()) == 1


@pytest.mark.parametrize("config", [WMMA, WGMMA])
def test_a_kernel_takes_strides_only_of_what_it_moves_by_tensor_maps(driver, load, config):
    module = load(config)
    dense, view = torch.zeros(1, 4, 100, 64, dtype=torch.bfloat16), strided((1, 4, 100, 64), (0, 64, 256, 1))
    with pytest.raises(ValueError, match="out is not contiguous, as this kernel needs it: pass a contiguous out"):
        module.attention(dense, dense, dense, view)
    if config is WMMA:
        with pytest.raises(ValueError, match=r"v is not contiguous, as this kernel needs it: pass v.contiguous\(\)"):
            module.attention(dense, dense, view)
    else:
        module.attention(view, view, view)


def test_cupy_strides_are_bytes_and_the_remedy_is_cupys(driver, load):
    module = load(ALL_MAPS, problem="b1,h4,s100,d64,fp16")
    flat, memory = on_gpu(0, (1, 100, 4, 64))
    out, keep = on_gpu(0, (1, 4, 100, 64))
    view = flat.transpose(0, 2, 1, 3)
    module.attention(view, view, view, out)
    assert struct.unpack_from("=6Q", driver.launches()[0].maps[0])[1:] == (64, 100, 4, 512, 128)
    with pytest.raises(ValueError, match=r"q has strides .*: pass cupy.ascontiguousarray\(q\)"):
        module.attention(out[:, :, ::-1], view, view, out)


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
        (tensors(heads=3), "3 heads are no multiple of 2 kv heads"),
        (tensors(kv_heads=0), "4 heads are no multiple of 0 kv heads"),
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
