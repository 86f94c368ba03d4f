"""half and bfloat16 round as the hardware does: against NumPy's float16 and torch's bfloat16."""

import numpy as np
import pytest
import torch

PATTERNS = np.arange(65536, dtype=np.uint16)

TO_FLOAT = """
#include <cuda_fp16.h>
#include <cuda_bf16.h>
extern "C" __global__ void f(const unsigned short* bits, float* h, float* b) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    h[i] = __half2float(__ushort_as_half(bits[i]));
    b[i] = __bfloat162float(__ushort_as_bfloat16(bits[i]));
}
"""

FROM_FLOAT = """
#include <cuda_fp16.h>
#include <cuda_bf16.h>
extern "C" __global__ void f(const float* a, half* h, __nv_bfloat16* b) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    h[i] = __float2half_rn(a[i]);
    b[i] = __float2bfloat16_rn(a[i]);
}
"""

OPERATIONS = """
#include <cuda_fp16.h>
#include <cuda_bf16.h>
extern "C" __global__ void f(const TYPE* a, const TYPE* b, const TYPE* c, TYPE* o) {
    int n = gridDim.x * blockDim.x, i = blockIdx.x * blockDim.x + threadIdx.x;
    o[i] = a[i] + b[i];
    o[n + i] = __hsub(a[i], b[i]);
    o[2 * n + i] = a[i] * b[i];
    o[3 * n + i] = a[i] / b[i];
    o[4 * n + i] = __hfma(a[i], b[i], c[i]);
    TYPE2 pair = __hfma2(TYPE2(a[i], b[i]), TYPE2(b[i], c[i]), TYPE2(c[i], a[i]));
    o[5 * n + i] = pair.y;
    o[6 * n + i] = -__hmax(a[i], b[i]);
}
"""


def bfloat16(bits):
    return torch.from_numpy(bits.view(np.int16).copy()).view(torch.bfloat16)


def assert_same_bits(ours, theirs, nan):
    """Equal patterns, any NaN for any NaN."""
    np.testing.assert_array_equal(np.isnan(ours), nan)
    np.testing.assert_array_equal(ours.view(np.uint16)[~nan], theirs.view(np.uint16)[~nan])


def test_every_half_and_bfloat16_becomes_the_float_it_stands_for(emulate, floats):
    got = emulate(TO_FLOAT, PATTERNS, floats(65536), floats(65536), grid=(256, 1, 1), threads=256)
    np.testing.assert_array_equal(got["h"], PATTERNS.view(np.float16).astype(np.float32))
    np.testing.assert_array_equal(got["b"], bfloat16(PATTERNS).float().numpy())


@pytest.mark.parametrize("low", [0x0000, 0x0FFF, 0x1000, 0x1001, 0x3000, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
def test_floats_round_to_nearest_even_at_every_upper_half(emulate, low):
    a = (PATTERNS.astype(np.uint32) << 16 | low).view(np.float32)
    out = (np.zeros(65536, np.float16), np.zeros(65536, np.uint16))
    got = emulate(FROM_FLOAT, a, *out, grid=(256, 1, 1), threads=256)
    with np.errstate(over="ignore"):
        assert_same_bits(got["h"], a.astype(np.float16), np.isnan(a))
    theirs = torch.from_numpy(a.copy()).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    np.testing.assert_array_equal(got["b"][~np.isnan(a)], theirs[~np.isnan(a)])
    assert bfloat16(got["b"]).isnan()[torch.from_numpy(np.isnan(a))].all()


def exact(a, b, c):
    """The seven results of OPERATIONS in float64, where sums and products of 16-bit floats are exact or nearly so."""
    with np.errstate(all="ignore"):
        return np.stack([a + b, a - b, a * b, a / b, a * b + c, b * c + a, -np.fmax(a, b)])


def test_half_arithmetic_rounds_every_result(emulate):
    bits = np.random.default_rng(1).integers(0, 65536, (3, 16384), dtype=np.uint16)
    a, b, c = bits.view(np.float16)
    text = OPERATIONS.replace("TYPE", "half")
    o = emulate(text, a, b, c, np.zeros((7, 16384), np.float16), grid=(64, 1, 1), threads=256)["o"]
    right = exact(*bits.view(np.float16).astype(np.float64))
    with np.errstate(over="ignore"):
        assert_same_bits(o, right.astype(np.float16), np.isnan(right))


def to_bfloat16(values):
    """float64 → the nearest bfloat16, ties to even, in one rounding (torch rounds to float first)."""
    bits = np.ascontiguousarray(values).view(np.uint64)
    dropped = np.uint64(52 - 7)
    half = (np.uint64(1) << (dropped - np.uint64(1))) - np.uint64(1)
    kept = (bits + half + (bits >> dropped & np.uint64(1))) >> dropped << dropped
    return (kept.view(np.float64).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def test_bfloat16_arithmetic_rounds_every_result(emulate):
    rng = np.random.default_rng(2)
    spread = rng.standard_normal((3, 16384)) * 10.0 ** rng.integers(-3, 4, (3, 16384))
    bits = to_bfloat16(spread)
    text = OPERATIONS.replace("TYPE2", "__nv_bfloat162").replace("TYPE", "__nv_bfloat16")
    o = emulate(text, *bits, np.zeros((7, 16384), np.uint16), grid=(64, 1, 1), threads=256)["o"]
    right = to_bfloat16(exact(*bfloat16(bits).double().numpy()))
    np.testing.assert_array_equal(o, right)


def test_an_uninitialised_local_is_nothing_one_can_take_for_zero(emulate, floats):
    text = """
#include <cuda_fp16.h>
extern "C" __global__ void f(float* o) {
    half h[4];
    float v[4];
    o[threadIdx.x] = threadIdx.x < 16 ? __half2float(h[threadIdx.x % 4]) : v[threadIdx.x % 4];
}
"""
    o = emulate(text, floats(32))["o"]
    assert np.isnan(o[:16]).all()
    assert not (np.abs(o[16:]) < 1e38).any()


def test_float_functions_are_those_of_the_host(emulate):
    text = """
extern "C" __global__ void f(const float* a, float* o) {
    float x = a[threadIdx.x], e;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(x));
    float all[] = {e, exp2f(x), expf(x), __expf(x), fmaxf(x, 1.0f), fminf(x, 1.0f), rsqrtf(x * x + 1.0f), __frcp_rn(x),
                   fmaf(x, x, 1.0f), max(x, 2.0f), min(x, 2.0f), __fdividef(x, 3.0f), __ldg(a + threadIdx.x),
                   __uint_as_float(__float_as_uint(x)), __int_as_float(0x7f800000), float(max(3, 4) + min(3u, 4u))};
    for (int i = 0; i < 16; ++i) o[i * 32 + threadIdx.x] = all[i];
}
"""
    x = np.linspace(-8, 8, 32, dtype=np.float32)
    o = emulate(text, x, np.zeros((16, 32), np.float32))["o"]
    one, two = np.float32(1), np.float32(2)
    right = [
        np.exp2(x), np.exp2(x), np.exp(x), np.exp(x), np.maximum(x, one), np.minimum(x, one), 1 / np.sqrt(x * x + one),
        one / x, x * x + one, np.maximum(x, two), np.minimum(x, two), x / np.float32(3), x, x,
        np.full(32, np.inf), np.full(32, 7),
    ]  # fmt: skip
    np.testing.assert_allclose(o, np.stack(right), rtol=3e-7)


def test_ex2_ftz_flushes_results_below_the_least_normal_number(emulate, floats):
    text = """
extern "C" __global__ void f(const float* a, float* o) {
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(o[threadIdx.x]) : "f"(a[threadIdx.x]));
    asm("ex2.approx.f32 %0, %1;" : "=f"(o[2 + threadIdx.x]) : "f"(a[threadIdx.x]));
}
"""
    o = emulate(text, np.array([-126, -130], np.float32), floats(4), threads=2)["o"]
    assert o.tolist() == [2.0**-126, 0, 2.0**-126, 2.0**-130]
