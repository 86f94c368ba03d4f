"""A launch is laid out as a GPU's driver does it: parameters, banks and tensors are where the machine code looks."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from evoengine.accuracy.compilers import InstalledNvrtc
from evoengine.devices.base import (
    KernelCrashed,
    KernelHung,
    KernelUnbuildable,
    ScalarArgument,
    StructArgument,
    TensorArgument,
    TensorMapArgument,
)
from evoengine.errors import UsageError
from evoengine.records import Launch
from evoengine.sass.core import Program, run
from evoengine.sass.cubin import read_kernel
from evoengine.sass.launch import DrawnArgument, Geometry, prepare
from evoengine.sass.listing import disassemble
from tests.support.exhaustive import more
from tests.support.machine_code import require_tools
from tests.support.sass_kernels import ALL_PARTS, COUNTS, compiled

ARCHS = ["sm_75", "sm_90a", *more(["sm_80", "sm_89"])]


def loaded(text, entry, arch="sm_80"):
    require_tools()
    binary = compiled(text, entry, arch)
    return Program(binary.listing, entry), read_kernel(binary.cubin, entry)


def executed(text, entry, launch, arguments, arch="sm_80", seed=1, **more):
    program, kernel = loaded(text, entry, arch)
    assert program.unknown == {}
    prepared = prepare(kernel, launch, arguments, seed, **more)
    run(program, prepared, limit=100_000)
    return prepared.results()


def counted(n=100, room=128):
    return [TensorArgument("out", np.full(room, -1, np.int32), output=True), ScalarArgument("n", np.int32(n))]


@pytest.mark.parametrize("arch", ARCHS)
def test_a_kernel_finds_its_grid_block_and_parameters(arch):
    found = executed(COUNTS, "counts", Launch((4, 1, 1), 32, 0), counted(), arch)["out"]
    assert found[:100].tolist() == [3 * i + 4 for i in range(100)]


def test_what_is_not_written_stays_as_it_was():
    found = executed(COUNTS, "counts", Launch((4, 1, 1), 32, 0), counted())["out"]
    assert found[100:].tolist() == [-1] * 28


def test_chosen_blocks_alone_can_be_executed():
    program, kernel = loaded(COUNTS, "counts")
    prepared = prepare(kernel, Launch((4, 1, 1), 32, 0), counted(), 1)
    run(program, prepared, blocks=[2])
    assert (np.flatnonzero(prepared.results()["out"] != -1) // 32).tolist() == [2] * 32


@pytest.mark.parametrize("arch", ARCHS)
def test_every_kind_of_memory_is_where_the_kernel_looks(arch):
    """Constants by name, device variables, static and dynamic shared memory, the stack, and parameters of all sizes."""
    rng = np.random.default_rng(3)
    data = rng.standard_normal(256).astype(np.float32)
    data[0] = 1.0
    n = 5
    three = StructArgument("three", 24, ((8, ScalarArgument("x[1]", np.int64(1000))),))
    arguments = [
        TensorArgument("out", np.zeros(128, np.float32), output=True), TensorArgument("in", data),
        ScalarArgument("n", np.int32(n)), three, ScalarArgument("c", np.int8(-7)),
        ScalarArgument("d", np.float64(0.25)),
    ]  # fmt: skip
    launch = Launch((2, 1, 1), 128, 512)
    constants = {"other": np.array([10, 20, 30], np.int32).tobytes()}
    found = executed(ALL_PARTS, "parts", launch, arguments, arch, constants=constants)["out"]
    expected = data[n] + 1 + 6 + 30 + 0 + 8 + 1000 - 7 + 0.25 + data[n * n]
    assert found == pytest.approx(np.full(128, expected), rel=1e-6)


def test_outputs_and_device_variables_lie_apart_at_drawn_addresses():
    _, kernel = loaded(ALL_PARTS, "second")
    places = set()
    for seed in range(20):
        arguments = [TensorArgument("out", np.zeros(3, np.float32), output=True)]
        found = sorted(prepare(kernel, Launch((1, 1, 1), 32, 0), arguments, seed).allocations, key=lambda a: a.address)
        assert len(found) == 3 and all(a.address % 256 == 0 and a.address > 2**32 for a in found)
        assert all(b.address - (a.address + a.bytes) > 2**20 for a, b in pairwise(found))
        places.add(tuple(a.name for a in found))
    assert len(places) > 1


@pytest.mark.parametrize("change", [-1, 3])
def test_access_beside_a_tensor_crashes_with_its_place(change):
    """The tensor ends where the 127th or its last element would be; a write past it is no write into another."""
    with pytest.raises(KernelCrashed, match="counts|block|warp"):
        executed(COUNTS, "counts", Launch((4, 1, 1), 32, 0), counted(n=128, room=128 - abs(change)))


def test_an_input_that_is_written_crashes():
    out = TensorArgument("out", np.zeros(128, np.int32))
    with pytest.raises(KernelCrashed, match="out"):
        executed(COUNTS, "counts", Launch((4, 1, 1), 32, 0), [out, ScalarArgument("n", np.int32(4))])


def test_a_block_that_never_ends_hangs():
    endless = 'extern "C" __global__ void endless(volatile int* out) { while (out[0] != 5); }'
    with pytest.raises(KernelHung):
        out = TensorArgument("out", np.zeros(8, np.int32), output=True)
        executed(endless, "endless", Launch((1, 1, 1), 32, 0), [out])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (counted()[:1], "kernel counts has 2 parameters; 1 were given"),
        ([counted()[0], ScalarArgument("n", np.int64(1))], "parameter n of kernel counts has 4 bytes; 8 were given"),
    ],
)
def test_arguments_that_do_not_fit_are_named(arguments, message):
    _, kernel = loaded(COUNTS, "counts")
    with pytest.raises(UsageError, match=message):
        prepare(kernel, Launch((1, 1, 1), 32, 0), arguments, 1)


def test_an_unknown_or_too_long_constant_is_named():
    _, kernel = loaded(ALL_PARTS, "second")
    arguments = [TensorArgument("out", np.zeros(3, np.float32), output=True)]
    for constants, message in [({"tables": b""}, "no __constant__ variable tables; it has table, other"),
                               ({"other": bytes(13)}, "__constant__ other has 12 bytes; 13 are too many")]:  # fmt: skip
        with pytest.raises(UsageError, match=message):
            prepare(kernel, Launch((1, 1, 1), 32, 0), arguments, 1, constants)


@pytest.mark.parametrize(
    ("launch", "message"),
    [
        (Launch((2, 1, 1), 256, 0), "256 threads per block; the binary was made for 128 at most"),
        (Launch((3, 1, 1), 128, 0), "no multiple of the cluster"),
    ],
)
def test_a_launch_that_a_driver_refuses_crashes(launch, message):
    _, kernel = loaded(ALL_PARTS, "parts", "sm_90a")
    with pytest.raises(KernelCrashed, match=message):
        prepare(kernel, launch, [], 1)


def test_a_block_of_more_registers_than_there_are_crashes():
    _, kernel = loaded(ALL_PARTS, "second")
    many = Geometry((1, 1, 1), (65536 // kernel.registers + 1, 1, 1))
    with pytest.raises(KernelCrashed, match="a block has 65536 at most"):
        prepare(kernel, many, [], 1)


TWO_TENSORS = """
extern "C" __global__ void two(float* out, const float* in, long long far) {
    out[far / 4 + threadIdx.x] = in[far + threadIdx.x] + in[far + (1 << 18) + threadIdx.x];
}
"""


def test_drawn_tensors_of_any_size_can_be_read_and_written():
    """Contents repeat after 2^20 bytes, 2^18 floats; 64 GiB are no memory, and what is written into them is dropped."""
    far = 3 * 2**32 + 7
    arguments = [
        DrawnArgument("out", 1 << 36, "fp32", output=True), DrawnArgument("in", 1 << 36, "fp32"),
        ScalarArgument("far", np.int64(far)),
    ]  # fmt: skip
    program, kernel = loaded(TWO_TENSORS, "two")
    prepared = prepare(kernel, Launch((1, 1, 1), 32, 0), arguments, 1)
    before = {a.name: a.held.copy() for a in prepared.allocations}
    run(program, prepared)
    assert all(np.array_equal(a.held, before[a.name]) for a in prepared.allocations)
    assert [a.held.nbytes for a in prepared.allocations] == [1 << 20] * 2


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
def test_drawn_values_are_normal(dtype):
    _, kernel = loaded(ALL_PARTS, "second")
    prepared = prepare(kernel, Launch((1, 1, 1), 32, 0), [DrawnArgument("out", 1 << 30, dtype, output=True)], 1)
    bits = next(a.held for a in prepared.allocations if a.name == "out")
    values = {
        "fp16": lambda: bits.view(np.float16).astype(np.float32),
        "bf16": lambda: (bits.view(np.uint16).astype(np.uint32) << 16).view(np.float32),
        "fp32": lambda: bits.view(np.float32),
    }[dtype]()  # fmt: skip
    assert abs(values.mean()) < 0.01 and values.std() == pytest.approx(1, abs=0.01)


def test_a_tensor_map_that_cannot_be_is_refused():
    kernel = 'extern "C" __global__ void f(float* q, const __grid_constant__ Map m, int* o) { *o = m.bytes[3]; }'
    text = f"struct alignas(64) Map {{ char bytes[128]; }};\n{kernel}"
    _, kernel = loaded(text, "f", "sm_90a")
    tensor = TensorArgument("q", np.zeros((8, 64), np.uint16))
    bad = TensorMapArgument("m", "q", "fp16", (64, 9), (128,), (64, 8), 128)
    out = TensorArgument("o", np.zeros(1, np.int32), output=True)
    with pytest.raises(KernelUnbuildable, match="tensor map m: it reaches"):
        prepare(kernel, Launch((1, 1, 1), 32, 0), [tensor, bad, out], 1)


def test_a_block_of_three_dimensions_reaches_the_machine_code():
    text = """
extern "C" __global__ void f(int* o) {
    int rank = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
    o[rank] = threadIdx.x + 10 * threadIdx.y + 100 * threadIdx.z;
}"""
    out = TensorArgument("o", np.zeros(40, np.int32), output=True)
    got = executed(text, "f", Launch((1, 1, 1), 40, 0, (2, 4)), [out])["o"]
    rank = np.arange(40)
    np.testing.assert_array_equal(got, rank % 5 + 10 * (rank // 5 % 2) + 100 * (rank // 10))


CLUSTER_SIZES = """
extern "C" __global__ void sizes(unsigned* o) {
  unsigned x, y, z, number, rank, has;
  asm("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(x));
  asm("mov.u32 %0, %%cluster_nctaid.y;" : "=r"(y));
  asm("mov.u32 %0, %%cluster_nctaid.z;" : "=r"(z));
  asm("mov.u32 %0, %%clusterid.x;" : "=r"(number));
  asm("mov.u32 %0, %%cluster_ctaid.x;" : "=r"(rank));
  asm("{.reg .pred p; mov.pred p, %%is_explicit_cluster; selp.u32 %0, 1, 0, p;}" : "=r"(has));
  unsigned* own = o + 6 * (blockIdx.x + gridDim.x * blockIdx.y);
  own[0] = x, own[1] = y, own[2] = z, own[3] = number, own[4] = rank, own[5] = has;
}
"""


@pytest.mark.parametrize("cluster", [(2, 3, 1), (1, 1, 1)])
def test_a_kernel_reads_the_clusters_that_its_host_chose(cluster):
    """CUTLASS's kernels declare no clusters: the launch says how many blocks each has."""
    require_tools()
    cubin = InstalledNvrtc().compile(CLUSTER_SIZES, "sm_90a", ())
    out = TensorArgument("o", np.zeros(6 * 18, np.uint32), True)
    launch = prepare(read_kernel(cubin, "sizes"), Geometry((6, 3, 1), (1, 1, 1), 0, cluster), [out], 0)
    run(Program(disassemble(cubin), "sizes"), launch)
    blocks = [(n % 6 // cluster[0], n % 6 % cluster[0]) for n in range(18)]
    expected = [(*cluster, number, rank, cluster != (1, 1, 1)) for number, rank in blocks]
    np.testing.assert_array_equal(launch.results()["o"].reshape(-1, 6), expected)
