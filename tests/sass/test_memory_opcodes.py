"""Memory in machine code: widths and spaces of loads and stores, atomics, and what is out of bounds."""

from __future__ import annotations

import numpy as np
import pytest

from evoengine.devices.base import KernelCrashed
from tests.support.exhaustive import each_nth, more
from tests.support.machine_code import SOME_ARCHS, execute

KERNEL = 'extern "C" __global__ void kernel'
every_arch = pytest.mark.parametrize("arch", SOME_ARCHS)


@every_arch
def test_widths_of_global_and_shared_memory(arch):
    text = (
        "struct alignas(16) Pair { long long x, y; };"
        + KERNEL
        + """(const unsigned char* a, long long* out) {
      extern __shared__ __align__(16) unsigned char s[];
      int i = threadIdx.x;
      ((uint4*)s)[i] = ((const uint4*)a)[i];
      __syncthreads();
      int j = i ^ 5;
      out[i] = ((const signed char*)a)[3 * i] + ((signed char*)s)[i * 7] * 256;
      out[32 + i] = a[3 * i] + s[i * 7] * 256;
      out[64 + i] = ((const short*)a)[i + 9] + ((short*)s)[j] * 65536LL;
      out[96 + i] = ((const unsigned short*)a)[i + 9] + ((unsigned short*)s)[j] * 65536LL;
      out[128 + i] = ((const long long*)a)[j] ^ ((long long*)s)[i];
      Pair p = ((const Pair*)a)[j], q = ((Pair*)s)[j];
      out[160 + i] = p.x + q.y;
      __syncthreads();
      s[i] = a[i] + 1;
      ((short*)s)[200 + i] = (short)out[64 + j];
      ((double*)s)[30 + i % 2] = 2.5;
      __syncthreads();
      out[192 + i] = s[j] + ((short*)s)[200 + j] + (long long)((double*)s)[31];
    }"""
    )
    a = np.random.default_rng(0).integers(0, 256, 512).astype(np.uint8)
    out = execute(text, arch, {"a": a}, {"out": (np.int64, (7, 32))}, shared_bytes=512)["out"]
    i = np.arange(32)
    j = i ^ 5
    signed, short, long = a.view(np.int8).astype(np.int64), a.view(np.int16).astype(np.int64), a.view(np.int64)
    np.testing.assert_array_equal(out[0], signed[3 * i] + signed[7 * i] * 256)
    np.testing.assert_array_equal(out[1], a.astype(np.int64)[3 * i] + a[7 * i].astype(np.int64) * 256)
    np.testing.assert_array_equal(out[2], short[i + 9] + short[j] * 65536)
    np.testing.assert_array_equal(out[3], (short[i + 9] & 0xFFFF) + (short[j] & 0xFFFF) * 65536)
    np.testing.assert_array_equal(out[4], long[j] ^ long[i])
    np.testing.assert_array_equal(out[5], long[2 * j] + long[2 * j + 1])
    np.testing.assert_array_equal(out[6], (a[j].astype(np.int64) + 1) % 256 + out[2].astype(np.int16) + 2)


@every_arch
def test_local_arrays_and_generic_pointers(arch):
    text = (
        "__constant__ int table[4] = {11, 22, 33, 44};"
        + KERNEL
        + """(const int* a, int* out) {
      __shared__ int s[32];
      int i = threadIdx.x, mine[24];
      for (int k = 0; k < 24; ++k) mine[k] = a[i] * k;
      for (int k = 0; k < 24; ++k) mine[(k * 7 + i) % 24] += mine[(k * 5 + a[i]) % 24];
      s[i] = a[i] + 100;
      __syncthreads();
      const int* from = i % 3 == 0 ? &s[31 - i] : i % 3 == 1 ? &mine[i % 24] : &a[31 - i];
      out[i] = *(volatile const int*)from;
      out[32 + i] = table[i & 3];
      int* to = i & 1 ? &s[i] : &mine[(a[i] + 3) % 24];
      *(volatile int*)to = 1000 + i;
      __syncthreads();
      out[64 + i] = s[i];
      out[96 + i] = mine[(a[i] + 3) % 24];
    }"""
    )
    a = np.random.default_rng(1).integers(0, 50, 32).astype(np.int32)
    out = execute(text, arch, {"a": a}, {"out": (np.int32, (4, 32))})["out"]
    i = np.arange(32)
    local = a[:, None] * np.arange(24)
    for k in range(24):
        local[i, (k * 7 + i) % 24] += local[i, (k * 5 + a) % 24]
    np.testing.assert_array_equal(out[0], np.choose(i % 3, [a[31 - i] + 100, local[i, i % 24], a[31 - i]]))
    np.testing.assert_array_equal(out[1], np.take([11, 22, 33, 44], i & 3))
    np.testing.assert_array_equal(out[2], np.where(i & 1, 1000 + i, a + 100))
    np.testing.assert_array_equal(out[3], np.where(i & 1, local[i, (a + 3) % 24], 1000 + i))


ATOMICS = (
    """
#include <cuda_fp16.h>
"""
    + KERNEL
    + """(const int* a, int* out, int* old, long long* wide, float* floats, double* doubles, __half2* halves) {
  __shared__ int s[8];
  __shared__ float sf;
  int i = blockIdx.x * blockDim.x + threadIdx.x, x = a[i];
  if (i == 0) {
    int start[12] = {0, 100000, -100000, 0, 0, -1, 0, 0, 0, 5, 0, 0};
    for (int k = 0; k < 12; ++k) out[k] = start[k];
    wide[0] = 0; wide[1] = 1LL << 40; floats[0] = 0; doubles[0] = 0; halves[0] = __floats2half2_rn(0, 0);
  }
  if (threadIdx.x < 8) s[threadIdx.x] = threadIdx.x == 1 ? 1000000 : 0;
  if (threadIdx.x == 0) sf = 0;
  __syncthreads();
  old[i] = atomicAdd(&out[0], 1);
  atomicMin(&out[1], x);
  atomicMax(&out[2], x);
  atomicInc((unsigned*)&out[3], 20);
  atomicDec((unsigned*)&out[4], 20);
  atomicAnd(&out[5], x | 0xff);
  atomicOr(&out[6], x & 0xff00);
  atomicXor(&out[7], x);
  atomicMax((unsigned*)&out[8], (unsigned)x);
  atomicCAS(&out[9], 5, x);
  if (threadIdx.x == 3) out[10] = atomicExch(&out[11], 77);
  atomicAdd((unsigned long long*)&wide[0], (unsigned long long)(long long)x);
  atomicMin(&wide[1], (long long)x << 34);
  atomicAdd(&floats[0], (float)x);
  atomicAdd(&doubles[0], x * 0.5);
  atomicAdd(&halves[0], __floats2half2_rn(1, 2));
  old[64 + i] = atomicAdd(&s[0], 1);
  atomicMin(&s[1], x);
  atomicMax(&s[2], x);
  atomicOr(&s[3], x & 0xffff);
  atomicAdd(&sf, (float)x);
  old[128 + i] = atomicCAS(&s[4], 0, i + 1);
  for (int done = 0; !done;) {
    int seen = *(volatile int*)&s[5];
    done = atomicCAS(&s[5], seen, seen + x) == seen;
  }
  atomicAdd(&s[6], x);
  __syncthreads();
  if (threadIdx.x < 7) out[12 + threadIdx.x] = s[threadIdx.x];
  if (threadIdx.x == 7) out[19] = (int)sf;
}"""
)


@every_arch
def test_atomics(arch):
    n = 64
    a = np.random.default_rng(2).integers(-400, 400, n).astype(np.int32)
    outputs = {
        "out": (np.int32, (20,)), "old": (np.int32, (3, n)), "wide": (np.int64, (2,)), "floats": (np.float32, (1,)),
        "doubles": (np.float64, (1,)), "halves": (np.float16, (2,)),
    }  # fmt: skip
    got = execute(ATOMICS, arch, {"a": a}, outputs, threads=n)
    out, old = got["out"], got["old"]
    either = np.bitwise_or.reduce
    expected = [
        n, a.min(), a.max(), n % 21, -n % 21, np.bitwise_and.reduce(a | 0xFF), either(a & 0xFF00),
        np.bitwise_xor.reduce(a), a.view(np.uint32).max().view(np.int32),
    ]  # fmt: skip
    np.testing.assert_array_equal(out[:9], expected)
    assert out[9] in a and out[10] == 0 and out[11] == 77
    first = out[12 + 4]
    assert sorted(old[0]) == sorted(old[1]) == list(range(n))
    assert list(old[2]) == [0 if thread + 1 == first else first for thread in range(n)]
    shared = [n, a.min(), max(a.max(), 0), either(a & 0xFFFF), first, a.sum(), a.sum(), a.sum()]
    np.testing.assert_array_equal(out[12:], shared)
    np.testing.assert_array_equal(got["wide"], [a.sum(), int(a.min()) << 34])
    assert (got["floats"][0], got["doubles"][0]) == (a.sum(), a.sum() / 2)
    np.testing.assert_array_equal(got["halves"], [n, 2 * n])


def test_atomic_sums_of_floats_side_by_side():
    text = """
extern "C" __global__ void kernel(const float4* a, float4* old, float4* four, float2* two) {
  const int i = threadIdx.x;
  if (i == 0) four[0] = make_float4(0, 1, 2, 3), two[0] = make_float2(4, 5);
  __syncthreads();
  old[i] = atomicAdd(four, a[i]);
  if (i % 3) atomicAdd(two, make_float2(a[i].x, a[i].w));
}"""
    a = np.random.default_rng(0).integers(-9, 9, (32, 4)).astype(np.float32)
    shapes = {"old": (32, 4), "four": (4,), "two": (2,)}
    found = execute(text, "sm_90a", {"a": a}, {name: (np.float32, shape) for name, shape in shapes.items()})
    before = np.arange(4) + np.vstack([np.zeros(4), a.cumsum(0)[:-1]])
    np.testing.assert_array_equal(found["old"], before)  # one lane after the other
    np.testing.assert_array_equal(found["four"], np.arange(4) + a.sum(0))
    np.testing.assert_array_equal(found["two"], np.array([4, 5]) + a[np.arange(32) % 3 != 0][:, [0, 3]].sum(0))


OUTSIDE = {
    "out[threadIdx.x + 33] = 1": "outside all tensors; 132 bytes into out, which has 128",
    "out[0] = a[1 << 20]": "outside all tensors",
    "((int*)a)[threadIdx.x] = 1": "a store to a, which is an input",
    "out[0] = *(const int*)((const char*)a + 2)": "misaligned access of 4 bytes",
    "s[threadIdx.x * 3] = 1; __syncthreads(); out[0] = s[a[0]]": "outside of",
}


@pytest.mark.parametrize("arch", ["sm_90a", *more(["sm_80"])])
@pytest.mark.parametrize("statement", each_nth(2, OUTSIDE))
def test_an_access_that_no_tensor_holds_is_named(statement, arch):
    text = KERNEL + "(const int* a, int* out) { extern __shared__ int s[]; " + statement + "; }"
    with pytest.raises(KernelCrashed, match=r"block \(0, 0, 0\), warp 0, at 0x") as crash:
        execute(text, arch, {"a": np.zeros(32, np.int32)}, {"out": (np.int32, (32,))}, shared_bytes=128)
    assert OUTSIDE[statement] in str(crash.value)
