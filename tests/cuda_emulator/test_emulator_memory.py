"""Addresses: what lies outside of its tensor or of shared memory is caught and named; what was never written is NaN."""

import numpy as np
import pytest

from evoengine.devices.base import KernelCrashed

SEEDS = (0, 1)
PLACE = r"kernel f, block \(0,0,0\), thread 5"

ONE_ACCESS = """
#include <cuda_fp16.h>
extern "C" __global__ void f(const half* k, half* o, int index) {
    if (threadIdx.x == 5) ACCESS;
}
"""
READ = ONE_ACCESS.replace("ACCESS", "o[0] = k[index]")
WRITE = ONE_ACCESS.replace("ACCESS", "o[index] = k[0]")


def halves(n):
    return np.ones(n, np.float16)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_first_and_the_last_element_may_be_read_and_written(emulate, seed):
    for index in (0, 63):
        emulate(READ, halves(64), halves(64), np.int32(index), seed=seed)
        emulate(WRITE, halves(64), halves(64), np.int32(index), seed=seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_read_far_past_the_end_is_named_with_its_distance(emulate, seed):
    with pytest.raises(KernelCrashed, match=f"out-of-bounds read of k: 400000 bytes past its end, {PLACE}"):
        emulate(READ, halves(64), halves(64), np.int32(200064), seed=seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_read_far_before_the_start_is_named_with_its_distance(emulate, seed):
    with pytest.raises(KernelCrashed, match=f"out-of-bounds read of k: 20000 bytes before its start, {PLACE}"):
        emulate(READ, halves(64), halves(64), np.int32(-10000), seed=seed)


def test_a_read_just_outside_is_caught_by_the_seed_that_puts_the_guard_there(emulate):
    with pytest.raises(KernelCrashed, match=f"read of k: 0 bytes past its end, {PLACE}"):
        emulate(READ, halves(64), halves(64), np.int32(64), seed=0)
    with pytest.raises(KernelCrashed, match=f"read of k: 2 bytes before its start, {PLACE}"):
        emulate(READ, halves(64), halves(64), np.int32(-1), seed=1)


def test_a_read_just_outside_that_no_guard_catches_is_nan(emulate):
    assert np.isnan(emulate(READ, halves(64), halves(64), np.int32(-1), seed=0)["o"][0])
    assert np.isnan(emulate(READ, halves(64), halves(64), np.int32(64), seed=1)["o"][0])


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("index", "where"), [(64, "0 bytes past its end"), (-1, "[12] bytes before its start")])
def test_a_write_just_outside_is_caught_by_every_seed(emulate, index, where, seed):
    with pytest.raises(KernelCrashed, match=f"out-of-bounds write of o: {where}, kernel f"):
        emulate(WRITE, halves(64), halves(64), np.int32(index), seed=seed)


def test_a_write_to_an_input_is_caught(emulate):
    text = ONE_ACCESS.replace("ACCESS", "const_cast<half*>(k)[index] = o[0]")
    with pytest.raises(KernelCrashed, match=f"write to read-only input k at byte 14, {PLACE}"):
        emulate(text, halves(64), halves(64), np.int32(7))


def test_an_address_that_belongs_to_nothing_is_named(emulate):
    text = ONE_ACCESS.replace("ACCESS", "o[0] = *(const half*)(size_t)index")
    with pytest.raises(KernelCrashed, match=f"read of address 0x10, which belongs to no tensor.*, {PLACE}"):
        emulate(text, halves(64), halves(64), np.int32(16))


DYNAMIC = """
extern "C" __global__ void f(float* o, int index) {
    extern __shared__ __align__(16) float smem[];
    if (threadIdx.x == 5) ACCESS;
}
"""


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("index", [25000, 25003, 26000, 300000, -100000])
def test_a_write_outside_of_dynamic_shared_memory_is_named_with_its_thread(emulate, floats, seed, index):
    message = f"out-of-bounds write to shared memory at offset {4 * index} of 100000, {PLACE}"
    with pytest.raises(KernelCrashed, match=message):
        emulate(DYNAMIC.replace("ACCESS", "smem[index] = 1"), floats(1), np.int32(index), shared=100000, seed=seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_write_just_before_dynamic_shared_memory_is_caught(emulate, floats, seed):
    with pytest.raises(KernelCrashed, match=r"out-of-bounds write to shared memory at offset -4 of 100000, kernel f"):
        emulate(DYNAMIC.replace("ACCESS", "smem[index] = 1"), floats(1), np.int32(-1), shared=100000, seed=seed)


def test_a_read_beyond_dynamic_shared_memory_is_caught_or_nan(emulate, floats):
    text = DYNAMIC.replace("ACCESS", "o[0] = smem[index]")
    with pytest.raises(KernelCrashed, match="out-of-bounds read of shared memory at offset 1024 of 1024"):
        emulate(text, floats(1), np.int32(256), shared=1024, seed=0)
    assert np.isnan(emulate(text, floats(1), np.int32(256), shared=1024, seed=1)["o"][0])


def test_a_kernel_launched_without_shared_memory_has_none(emulate, floats):
    with pytest.raises(KernelCrashed, match="out-of-bounds write to shared memory at offset 0 of 0"):
        emulate(DYNAMIC.replace("ACCESS", "smem[index] = 1"), floats(1), np.int32(0))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_write_beyond_a_static_shared_variable_is_named_with_it(emulate, floats, seed):
    text = """
extern "C" __global__ void f(float* o, int index) {
    __shared__ float before[40];
    __shared__ float tile[40];
    float* p = tile;
    if (threadIdx.x == 5) p[index] = before[0];
}
"""
    message = f"out-of-bounds write to shared variable tile at offset 160 of 160, {PLACE}"
    with pytest.raises(KernelCrashed, match=message):
        emulate(text, floats(1), np.int32(40), seed=seed)


def test_an_index_beyond_a_local_array_is_named_with_its_line(emulate, floats):
    text = """
extern "C" __global__ void f(float* o, int index) {
    float row[8] = {};
    if (threadIdx.x == 5) row[index] = 1;
    o[0] = row[threadIdx.x % 8];
}
"""
    emulate(text, floats(1), np.int32(7))
    with pytest.raises(KernelCrashed, match=rf"index 8 out of bounds of 'float ?\[8\]' at line 4, {PLACE}"):
        emulate(text, floats(1), np.int32(8))


MISALIGNED = """
extern "C" __global__ void f(const float* a, float* o, int offset) {
    if (threadIdx.x == 5)
        *reinterpret_cast<float4*>(o) = *reinterpret_cast<const float4*>(a + offset);
}
"""


def test_a_vector_access_must_be_aligned_to_its_size(emulate, floats):
    a = np.arange(64, dtype=np.float32)
    np.testing.assert_array_equal(emulate(MISALIGNED, a, floats(4), np.int32(4))["o"], a[4:8])
    # Clang leaves copies of whole structures unchecked; then the CPU's own fault tells.
    checked = "misaligned access to .*float4.* at line 4: the address is 8 bytes past a multiple of 16"
    message = f"({checked}|misaligned vector access, or .*), {PLACE}"
    with pytest.raises(KernelCrashed, match=message):
        emulate(MISALIGNED, a, floats(4), np.int32(2))


@pytest.mark.parametrize("declaration", ["__shared__ TYPE tile[32];", "extern __shared__ TYPE tile[];"])
@pytest.mark.parametrize("name", ["float", "half", "__nv_bfloat16"])
def test_shared_memory_that_was_never_written_is_nan_in_every_block(emulate, floats, declaration, name):
    text = f"""
#include <cuda_fp16.h>
#include <cuda_bf16.h>
extern "C" __global__ void f(float* o) {{
    {declaration.replace("TYPE", name)}
    o[blockIdx.x * 32 + threadIdx.x] = float(tile[threadIdx.x]);
    tile[threadIdx.x] = 1.0f;
}}
"""
    o = emulate(text, floats(64), grid=(2, 1, 1), shared=128)["o"]
    assert np.isnan(o).all()


def test_two_instances_of_a_template_have_their_own_shared_variables(emulate, floats):
    text = """
template <int n> __device__ float put(float v) {
    __shared__ float tile[32];
    float before = tile[threadIdx.x];
    tile[threadIdx.x] = v;
    return before;
}
extern "C" __global__ void f(float* o) {
    put<1>(3);
    o[threadIdx.x] = put<2>(4);
    o[32 + threadIdx.x] = put<1>(5);
}
"""
    o = emulate(text, floats(64))["o"]
    assert np.isnan(o[:32]).all()
    assert (o[32:] == 3).all()


def test_a_thread_with_too_much_local_memory_is_told_of_its_stack(emulate, floats):
    text = """
__device__ __noinline__ float deep(float* o, int n) {
    volatile float row[256];
    row[n % 256] = n;
    return n ? deep(o, n - 1) + row[n % 256] : 0;
}
extern "C" __global__ void f(float* o, int n) { o[0] = deep(o, n); }
"""
    emulate(text, floats(1), np.int32(10))
    with pytest.raises(KernelCrashed, match="stack overflow: more than 256 KiB of local memory in a thread, kernel f"):
        emulate(text, floats(1), np.int32(100000))


def test_shared_addresses_round_trip_and_foreign_ones_are_refused(emulate, floats):
    text = """
extern "C" __global__ void f(float* o, int which) {
    extern __shared__ float smem[];
    __shared__ float tile[32];
    unsigned dynamic = (unsigned)__cvta_generic_to_shared(smem + threadIdx.x);
    unsigned fixed = (unsigned)__cvta_generic_to_shared(which ? (void*)o : (void*)(tile + threadIdx.x));
    *(float*)__cvta_shared_to_generic(fixed) = dynamic;
    o[threadIdx.x] = tile[threadIdx.x];
}
"""
    o = emulate(text, floats(32), np.int32(0), shared=128)["o"]
    np.testing.assert_array_equal(o, 128 + 4 * np.arange(32))  # behind the static variable
    with pytest.raises(KernelCrashed, match="__cvta_generic_to_shared of an address that is not in shared memory"):
        emulate(text, floats(32), np.int32(1), shared=128)
