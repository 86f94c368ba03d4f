"""Floats, halves, doubles and conversions in machine code: kernels that NVRTC compiles give what NumPy gives."""

from __future__ import annotations

import numpy as np
import pytest

from evoengine.records import Launch, Source
from evoengine.stages.compile import compile_source
from tests.support.exhaustive import more
from tests.support.machine_code import ENTRY, SOME_ARCHS, elementwise, execute

N = 256
HALVES = "#include <cuda_fp16.h>\n#include <cuda_bf16.h>"


def floats(seed, dtype=np.float32):
    """Of many magnitudes, with zeros, subnormals, infinities and NaN among them."""
    random = np.random.default_rng(seed)
    info = np.finfo(dtype)
    values = random.standard_normal(N) * 2.0 ** random.integers(info.minexp // 2 - 8, info.maxexp // 2, N)
    values[:64] = random.standard_normal(64) * 4
    edges = [0.0, -0.0, 1.0, -1.0, 0.5, 2.5, -1.5, np.inf, -np.inf, np.nan]
    edges += [info.tiny, info.tiny / 8, info.max, -info.max]
    values[: len(edges)] = edges
    random.shuffle(values)
    with np.errstate(all="ignore"):
        return values.astype(dtype)


def moderate(seed, low=-4.0, high=4.0, dtype=np.float32):
    return np.random.default_rng(seed).uniform(low, high, N).astype(dtype)


def results(expressions, arguments, result, arch, before=""):
    """(C text, got, expected) of each; `arguments`: name → (C type, array); `result`: C type and NumPy dtype."""
    text = elementwise({name: kind for name, (kind, _) in arguments.items()}, result[0], list(expressions), before)
    inputs = {name: data for name, (_, data) in arguments.items()}
    got = execute(text, arch, inputs, {"out": (result[1], (len(expressions), N))}, threads=128, grid=2)["out"]
    with np.errstate(all="ignore"):
        for row, (expression, function) in zip(got, expressions.items(), strict=True):
            yield expression, row, np.broadcast_to(np.asarray(function(*inputs.values())), N).astype(result[1])


def check_exact(expressions, arguments, result, arch, before="", only=None):
    """Of all expressions, or of those in `only`: one kernel serves for values that not all of them are defined for."""
    for expression, got, expected in results(expressions, arguments, result, arch, before):
        if only is not None and expression not in only:
            continue
        np.testing.assert_array_equal(got, expected, err_msg=expression)
        if np.issubdtype(got.dtype, np.floating):
            numbers = ~np.isnan(expected)
            np.testing.assert_array_equal(np.signbit(got[numbers]), np.signbit(expected[numbers]), err_msg=expression)


def rounded(exact, towards):
    """The function's result, which a long double holds exactly or closely, as a float32 rounded `towards`."""

    def function(*arrays):
        value = exact(*(a.astype(np.longdouble) for a in arrays))
        near = value.astype(np.float32)
        if towards == "zero":
            wrong = np.abs(near) > np.abs(value)
            return np.where(wrong, np.nextafter(near, np.float32(0)), near)
        wrong = near > value if towards == "down" else near < value
        limit = np.float32(-np.inf if towards == "down" else np.inf)
        return np.where(wrong, np.nextafter(near, limit), near)

    return function


def fused(a, b, c):
    return a.astype(np.longdouble) * b + c


EXACT = {
    "a + b": lambda a, b, c: a + b,
    "a - b": lambda a, b, c: a - b,
    "a * b": lambda a, b, c: a * b,
    "a / b": lambda a, b, c: a / b,
    "1.0f / a": lambda a, b, c: np.float32(1) / a,
    "sqrtf(a)": lambda a, b, c: np.sqrt(a),
    "fmaf(a, b, c)": fused,
    "fmaf(-a, b, 1.5f)": lambda a, b, c: fused(-a, b, np.float32(1.5)),
    "fminf(a, b)": lambda a, b, c: np.fmin(a, b),
    "fmaxf(a, fabsf(b))": lambda a, b, c: np.fmax(a, abs(b)),
    "rintf(a)": lambda a, b, c: np.rint(a),
    "floorf(a)": lambda a, b, c: np.floor(a),
    "ceilf(a)": lambda a, b, c: np.ceil(a),
    "truncf(a)": lambda a, b, c: np.trunc(a),
    "copysignf(a, b)": lambda a, b, c: np.copysign(a, b),
    "fmodf(a, b)": lambda a, b, c: np.fmod(a, b),
    "a > b ? a : c": lambda a, b, c: np.where(a > b, a, c),
    "(a < b) + 2.0f * (a <= b) + 4.0f * (a == b) + 8.0f * (a != b)":
        lambda a, b, c: (a < b) + 2.0 * (a <= b) + 4 * (a == b) + 8 * (a != b),
    "!(a < b) + 2.0f * !(a >= b)": lambda a, b, c: 1.0 * ~(a < b) + 2 * ~(a >= b),
    "isnan(a) + 2.0f * isinf(a)": lambda a, b, c: np.isnan(a) + 2.0 * np.isinf(a),
    "scalbnf(a, 3)": lambda a, b, c: a * np.float32(8),
}  # fmt: skip


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", *more(["sm_89", "sm_90a"])])
def test_floats(arch):
    arguments = {name: ("float", floats(seed)) for seed, name in enumerate("abc")}
    check_exact(EXACT, arguments, ("float", np.float32), arch)


ROUNDED = {
    "__fadd_rd(a, b)": rounded(lambda a, b, c: a + b, "down"),
    "__fadd_ru(a, b)": rounded(lambda a, b, c: a + b, "up"),
    "__fadd_rz(a, b)": rounded(lambda a, b, c: a + b, "zero"),
    "__fmul_rd(a, b)": rounded(lambda a, b, c: a * b, "down"),
    "__fmul_ru(a, b)": rounded(lambda a, b, c: a * b, "up"),
    "__fmul_rz(a, b)": rounded(lambda a, b, c: a * b, "zero"),
    "__fmaf_rd(a, b, c)": rounded(lambda a, b, c: a * b + c, "down"),
    "__fmaf_ru(a, b, c)": rounded(lambda a, b, c: a * b + c, "up"),
    "__fmaf_rz(a, b, c)": rounded(lambda a, b, c: a * b + c, "zero"),
    "__fdiv_rd(a, b)": rounded(lambda a, b, c: a / b, "down"),
    "__fsqrt_ru(fabsf(a))": rounded(lambda a, b, c: np.sqrt(abs(a)), "up"),
    "__saturatef(a)": lambda a, b, c: np.clip(a, 0, 1),
}


@pytest.mark.parametrize("arch", SOME_ARCHS)
def test_rounding(arch):
    arguments = {name: ("float", moderate(seed)) for seed, name in enumerate("abc")}
    check_exact(ROUNDED, arguments, ("float", np.float32), arch)


APPROXIMATE = {
    "expf(a)": (lambda a, b: np.exp(a), 3e-7),
    "exp2f(a)": (lambda a, b: np.exp2(a), 3e-7),
    "logf(b)": (lambda a, b: np.log(b), 3e-7),
    "log2f(b)": (lambda a, b: np.log2(b), 3e-7),
    "sinf(a)": (lambda a, b: np.sin(a), 3e-7),
    "cosf(a * 1000.0f)": (lambda a, b: np.cos((a.astype(np.float32) * np.float32(1000)).astype(np.float64)), 3e-7),
    "tanhf(a)": (lambda a, b: np.tanh(a), 3e-7),
    "powf(b, a)": (lambda a, b: np.power(b, a), 3e-6),
    "rsqrtf(b)": (lambda a, b: 1 / np.sqrt(b), 3e-7),
    "atan2f(a, b)": (lambda a, b: np.arctan2(a, b), 4e-7),
    "cbrtf(b)": (lambda a, b: np.cbrt(b), 3e-7),
    "__expf(a)": (lambda a, b: np.exp(a), 1e-6),
    "__fdividef(a, b)": (lambda a, b: a / b, 1e-6),
    "__sinf(a)": (lambda a, b: np.sin(a), 1e-6),
}


@pytest.mark.parametrize("arch", SOME_ARCHS)
def test_functions(arch):
    arguments = {"a": ("float", moderate(1)), "b": ("float", moderate(2, 0.01, 20.0))}
    inputs = [data.astype(np.float64) for _, data in arguments.values()]
    expressions = {text: function for text, (function, _) in APPROXIMATE.items()}
    for expression, got, _ in results(expressions, arguments, ("float", np.float32), arch):
        function, tolerance = APPROXIMATE[expression]
        np.testing.assert_allclose(got, function(*inputs), rtol=tolerance, atol=tolerance, err_msg=expression)


DOUBLES = {
    "a + b": lambda a, b, c: a + b,
    "a * b": lambda a, b, c: a * b,
    "a / b": lambda a, b, c: a / b,
    "sqrt(fabs(a))": lambda a, b, c: np.sqrt(abs(a)),
    "a * 1.5 - 0.25": lambda a, b, c: a.astype(np.longdouble) * 1.5 - 0.25,
    "fmin(a, b)": lambda a, b, c: np.fmin(a, b),
    "a > b ? -a : c": lambda a, b, c: np.where(a > b, -a, c),
    "floor(a)": lambda a, b, c: np.floor(a),
    "rint(a)": lambda a, b, c: np.rint(a),
    "(double)(float)a": lambda a, b, c: a.astype(np.float32),
    "(double)(int)(a * 0.001)": lambda a, b, c: np.trunc(a * 0.001) + 0.0,
    "(double)(long long)(a * 1e6)": lambda a, b, c: np.trunc(a * 1e6) + 0.0,
}


@pytest.mark.parametrize("arch", SOME_ARCHS)
def test_doubles(arch):
    arguments = {name: ("double", moderate(seed, -1e3, 1e3, np.float64)) for seed, name in enumerate("abc")}
    check_exact(DOUBLES, arguments, ("double", np.float64), arch)
    extremes = {name: ("double", floats(seed, np.float64)) for seed, name in enumerate("abc")}
    ordinary = ("a + b", "a * b", "a / b", "sqrt(fabs(a))", "fmin(a, b)", "floor(a)")
    check_exact(DOUBLES, extremes, ("double", np.float64), arch, only=ordinary)


FROM_FLOAT = {
    "(long long)(int)a": lambda a: np.clip(np.trunc(np.nan_to_num(a.astype(np.float64))), -(2**31), 2**31 - 1),
    "__float2int_rn(a)": lambda a: np.rint(a),
    "__float2int_rz(a)": lambda a: np.trunc(a),
    "__float2int_rd(a)": lambda a: np.floor(a),
    "__float2int_ru(a)": lambda a: np.ceil(a),
    "(long long)(unsigned)fabsf(a)": lambda a: np.trunc(abs(a)),
    "(long long)(a * 1e9f)": lambda a: np.trunc((a * np.float32(1e9)).astype(np.float64)),
    "(long long)(short)(int)a": lambda a: np.trunc(a),
    "(long long)(unsigned long long)(fabsf(a) * 1e15f)":
        lambda a: np.trunc((abs(a) * np.float32(1e15)).astype(np.float64)).astype(np.uint64),
}  # fmt: skip


@pytest.mark.parametrize("arch", SOME_ARCHS)
def test_floats_become_integers(arch):
    check_exact(FROM_FLOAT, {"a": ("float", moderate(3, -1e3, 1e3))}, ("long long", np.int64), arch)
    values = np.resize(np.array([3e9, -3e9, np.inf, -np.inf, np.nan, -0.0], np.float32), N)
    check_exact(FROM_FLOAT, {"a": ("float", values)}, ("long long", np.int64), arch, only=("(long long)(int)a",))


FROM_INTEGER = {
    "(float)a": lambda a, b: a.astype(np.float32),
    "(float)(unsigned)a": lambda a, b: a.view(np.uint32).astype(np.float32),
    "__int2float_rz(a)": rounded(lambda a, b: a, "zero"),
    "__int2float_ru(a)": rounded(lambda a, b: a, "up"),
    "(float)b": lambda a, b: b.astype(np.float32),
    "(float)(unsigned long long)b": lambda a, b: b.view(np.uint64).astype(np.float32),
    "(float)(signed char)a": lambda a, b: a.astype(np.int8),
    "(float)(unsigned short)(a >> 3)": lambda a, b: (a >> 3).astype(np.uint16),
    "(float)((unsigned char*)&a)[2]": lambda a, b: (a >> 16).astype(np.uint8),
    "(float)((double)a * 0.1)": lambda a, b: a * 0.1,
    "(float)((double)b)": lambda a, b: b.astype(np.float64),
}


@pytest.mark.parametrize("arch", SOME_ARCHS)
def test_integers_become_floats(arch):
    random = np.random.default_rng(9)
    a = (random.integers(-(2**31), 2**31, N) >> random.integers(0, 31, N)).astype(np.int32)
    b = random.integers(-(2**63), 2**63, N, np.int64) >> random.integers(0, 63, N)
    check_exact(FROM_INTEGER, {"a": ("int", a), "b": ("long long", b)}, ("float", np.float32), arch)


def half_fused(a, b, c):
    return (a.astype(np.float64) * b + c).astype(np.float16)


HALF = {
    "a + b": lambda a, b, c: a + b,
    "a * b": lambda a, b, c: a * b,
    "__hfma(a, b, c)": half_fused,
    "a / b": lambda a, b, c: a / b,
    "__hmin(a, b)": lambda a, b, c: np.fmin(a, b),
    "__hmax(a, __hneg(b))": lambda a, b, c: np.fmax(a, -b),
    "a > b ? a : c": lambda a, b, c: np.where(a > b, a, c),
    "__float2half(__half2float(a) * 3.0f)": lambda a, b, c: a.astype(np.float32) * 3,
    "hrint(a)": lambda a, b, c: np.rint(a),
    "hfloor(a)": lambda a, b, c: np.floor(a),
    "__int2half_rn(__half2int_rz(a))": lambda a, b, c: np.trunc(a) + np.float16(0),
    "__float2half_rz(__half2float(a) * 1.001f)":
        lambda a, b, c: half_toward_zero(a.astype(np.float32) * np.float32(1.001)),
    "__hfma(a, __float2half(0.1f), __float2half(-2.0f))":
        lambda a, b, c: half_fused(a, np.float16(0.1), np.float16(-2)),
    "__low2half(__hadd2(__halves2half2(a, b), __halves2half2(c, c)))": lambda a, b, c: a + c,
    "__high2half(__hmul2(__halves2half2(a, b), __lowhigh2highlow(__halves2half2(c, a))))": lambda a, b, c: b * c,
    "__hgt2(__halves2half2(a, b), __halves2half2(c, c)).y": lambda a, b, c: 1.0 * (b > c),
    "__hfma_relu(a, b, c)": lambda a, b, c: np.maximum(half_fused(a, b, c), np.float16(0)),
}  # fmt: skip


def half_toward_zero(x):
    near = x.astype(np.float16)
    return np.where(abs(near.astype(np.float32)) > abs(x), np.nextafter(near, np.float16(0)), near)


@pytest.mark.parametrize("arch", SOME_ARCHS)
def test_halves(arch):
    expressions = {k: f for k, f in HALF.items() if arch != "sm_75" or "relu" not in k}
    small = {name: ("half", moderate(seed, -8, 8, np.float16)) for seed, name in enumerate("abc")}
    check_exact(expressions, small, ("half", np.float16), arch, HALVES)
    extremes = {name: ("half", floats(seed, np.float16)) for seed, name in enumerate("abc")}
    ordinary = ("a + b", "a * b", "__hfma(a, b, c)", "__hmin(a, b)", "a > b ? a : c")
    check_exact(expressions, extremes, ("half", np.float16), arch, HALVES, only=ordinary)


def bfloat(x):
    """To the nearest bfloat, as float32."""
    bits = np.asarray(x, np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16 << 16).astype(np.uint32).view(np.float32)


BFLOAT = {
    "a + b": lambda a, b, c: a + b,
    "a * b": lambda a, b, c: a * b,
    "__hfma(a, b, c)": lambda a, b, c: a.astype(np.float64) * b + c,
    "__hmax(a, b)": lambda a, b, c: np.maximum(a, b),
    "a < b ? b : c": lambda a, b, c: np.where(a < b, b, c),
    "__float2bfloat16(__bfloat162float(a) * 1.7f)": lambda a, b, c: a * np.float32(1.7),
    "__high2bfloat16(__hmul2(__halves2bfloat162(a, b), __halves2bfloat162(c, c)))": lambda a, b, c: b * c,
    "__float22bfloat162_rn(make_float2(__bfloat162float(a) / 3, __bfloat162float(b))).x":
        lambda a, b, c: a / np.float32(3),
}  # fmt: skip


@pytest.mark.parametrize("arch", ["sm_90a", *more(["sm_80", "sm_89"])])  # sm_75 has no arithmetic on bfloats
def test_bfloats(arch):
    values = {name: bfloat(moderate(seed, -8, 8)) for seed, name in enumerate("abc")}
    arguments = {name: ("__nv_bfloat16", (x.view(np.uint32) >> 16).astype(np.uint16)) for name, x in values.items()}
    references = {
        text: lambda *_, f=function: bfloat(f(*values.values())).view(np.uint32) >> 16
        for text, function in BFLOAT.items()
    }
    check_exact(references, arguments, ("__nv_bfloat16", np.uint16), arch, HALVES)


SCALED = {
    "a * b * 8.0f": ("M8", 8.0),
    "a * b * 4.0f": ("M4", 4.0),
    "a * b * 0.5f": ("D2", 0.5),
    "a * b * 0.125f": ("D8", 0.125),
}


@pytest.mark.parametrize("arch", ["sm_75", *more(["sm_90a"])])
@pytest.mark.parametrize("expression", SCALED)
def test_products_times_a_power_of_two_are_rounded_once(expression, arch):
    modifier, factor = SCALED[expression]
    a, b = floats(1), floats(2)
    text = elementwise({"a": "float", "b": "float"}, "float", [expression])
    assert f"FMUL.{modifier} " in compile_source(Source(text, ENTRY, Launch((1, 1, 1), 32, 0)), arch).listing
    got = execute(text, arch, {"a": a, "b": b}, {"out": (np.float32, (1, N))}, threads=128, grid=2)["out"][0]
    with np.errstate(all="ignore"):
        exact = a.astype(np.longdouble) * b.astype(np.longdouble) * factor
        np.testing.assert_array_equal(got, exact.astype(np.float32))


def test_pairs_of_halves_become_bytes_as_their_floats_do():
    text = f"""{HALVES}
extern "C" __global__ void {ENTRY}(const __half2* a, unsigned short* out) {{
  const __half2 x = a[threadIdx.x];
  const unsigned pair = *reinterpret_cast<const unsigned*>(&x);
  const float low = __low2float(x), high = __high2float(x);
  unsigned short* own = out + 4 * threadIdx.x;
  asm("cvt.rn.satfinite.e4m3x2.f16x2 %0, %1;" : "=h"(own[0]) : "r"(pair));
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(own[1]) : "f"(high), "f"(low));
  asm("cvt.rn.satfinite.e5m2x2.f16x2 %0, %1;" : "=h"(own[2]) : "r"(pair));
  asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(own[3]) : "f"(high), "f"(low));
}}"""
    a = floats(5, np.float16)
    out = execute(text, "sm_90a", {"a": a}, {"out": (np.uint16, (N // 2, 4))}, N // 2)["out"]
    np.testing.assert_array_equal(out[:, 0], out[:, 1])
    np.testing.assert_array_equal(out[:, 2], out[:, 3])
    assert len(np.unique(out)) > N // 4


def test_a_conversion_reads_no_more_of_the_last_parameter_than_it_has(execute):
    """A remainder converts the divisor to a float; behind it the constant bank has no more bytes."""
    text = """extern "C" __global__ void remainders(unsigned* o, unsigned n) {
        o[threadIdx.x] = threadIdx.x * 77u % n;
    }"""
    found = execute(text, np.zeros(32, np.uint32), np.uint32(13), arch="sm_86")
    np.testing.assert_array_equal(found["o"], np.arange(32) * 77 % 13)
