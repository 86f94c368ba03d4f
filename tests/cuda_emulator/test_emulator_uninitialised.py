"""What a kernel has not set is NaN in every floating type, and so is what inline PTX is only to write."""

import re

import numpy as np

HEADERS = "#include <cuda_bf16.h>\n#include <cuda_fp16.h>\n#include <mma.h>\n"
KERNEL = (
    HEADERS
    + """
struct Sums { float row_max, row_sum[9]; };
struct Nested { Sums sums[2]; half2 pair; };
struct Built { float set, never; half also[5]; __device__ Built(float x) : set(x) {} };
template <int N> struct Vector { unsigned word[N]; };
extern "C" __global__ void f(float* o, int zero) {
    BODY
}
"""
)
CASES = [
    ("float x;", "x"),
    ("float x[64];", "x[zero + 63]"),
    ("half x;", "__half2float(x)"),
    ("__nv_bfloat16 x;", "__bfloat162float(x)"),
    ("half x[40];", "__half2float(x[zero + 3])"),
    ("__nv_bfloat16 x[40];", "__bfloat162float(x[zero + 2])"),
    ("__nv_bfloat162 x;", "__bfloat1622float2(x).y"),
    ("unsigned x;", "__int_as_float(x)"),
    ("unsigned x;", "__bfloat1622float2(*reinterpret_cast<__nv_bfloat162*>(&x)).x"),
    ("Vector<8> x;", "__half22float2(*reinterpret_cast<half2*>(&x.word[zero + 5])).x"),
    ("float4 x;", "x.z"),
    ("double x;", "(float)x"),
    ("Sums s;", "s.row_max"),
    ("Sums s[3];", "s[zero + 2].row_sum[zero + 8]"),
    ("Nested n;", "n.sums[zero].row_max"),
    ("Nested n;", "__half2float(n.pair.x)"),
    ("Built b(1.0f);", "b.never"),
    ("Built b(1.0f);", "__half2float(b.also[zero + 4])"),
    ("nvcuda::wmma::fragment<nvcuda::wmma::accumulator, 16, 16, 16, float> c;", "c.x[zero + 7]"),
    ("nvcuda::wmma::fragment<nvcuda::wmma::accumulator, 16, 16, 16, half> c[2];", "__half2float(c[zero].x[zero + 1])"),
]


def read_each(emulate, floats, cases):
    """What each of them is read as, by all lanes. All variables are of one scope: none lies where another has been."""
    body = ""
    for i, (declared, read) in enumerate(cases):
        line = f"{declared} o[{32 * i} + threadIdx.x] = {read};\n    "
        body += re.sub(r"(?<![.\w])[xysnbc]\b", rf"\g<0>_{i}", line)
    return emulate(KERNEL.replace("BODY", body), floats(len(cases), 32), np.int32(0))["o"]


def test_what_is_never_set_is_nan(emulate, floats):
    is_nan = np.isnan(read_each(emulate, floats, CASES)).all(axis=1)
    assert [case for case, nan in zip(CASES, is_nan, strict=True) if not nan] == []


def test_a_constructor_still_sets_what_it_sets(emulate, floats):
    assert (read_each(emulate, floats, [("Built b(3.0f); static_assert(sizeof b == 20);", "b.set")]) == 3).all()


def test_a_whole_number_never_set_is_far_from_any_index(emulate, floats):
    assert (read_each(emulate, floats, [("int x; unsigned y;", "fminf(fabsf(x), y)")]) > 1e5).all()


PTX = [
    ('asm volatile("" : "=f"(y));', np.nan),
    ('asm volatile("" : "+f"(y));', 5),
    ('asm volatile("" : "=f"(y) : "0"(x));', 3),
    ('asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));', 8),
    ('asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(y));', 32),  # read before it is written
    ('asm("ex2.approx.ftz.f32 %0, %0;" : "=f"(y));', np.nan),
    ('asm("ex2.approx.ftz.f32 %0, %0;" : "+f"(y));', 32),
    ('float* p = &y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(*p++) : "f"(x)); y += p - &y - 1;', 8),
]
"""inline PTX that may set y, of 5, with an x of 3; and what y is then"""


def test_an_output_of_ptx_that_is_no_input_holds_nothing_before(emulate, floats):
    body = "".join(
        f"    {{ float x = 3, y = 5; {asm} o[{32 * i} + threadIdx.x] = y; }}\n" for i, (asm, _) in enumerate(PTX)
    )
    o = emulate(f'extern "C" __global__ void f(float* o) {{\n{body}}}\n', floats(len(PTX), 32))["o"]
    for seen, (asm, expected) in zip(o, PTX, strict=True):
        np.testing.assert_array_equal(seen, np.full(32, expected, np.float32), err_msg=asm)
