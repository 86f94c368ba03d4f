"""What a kernel has not set is NaN in every floating type, and so is what inline PTX is only to write."""

import numpy as np
import pytest

HEADERS = "#include <cuda_bf16.h>\n#include <cuda_fp16.h>\n#include <mma.h>\n"
KERNEL = (
    HEADERS
    + """
struct Sums { float row_max, row_sum[9]; };
struct Nested { Sums sums[2]; half2 pair; };
struct Built { float set, never; half also[5]; __device__ Built(float x) : set(x) {} };
template <int N> struct Vector { unsigned word[N]; };
extern "C" __global__ void f(float* o, int zero) {
    DECLARED
    o[threadIdx.x] = READ;
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


@pytest.mark.parametrize(("declared", "read"), CASES)
def test_what_is_never_set_is_nan(emulate, floats, declared, read):
    o = emulate(KERNEL.replace("DECLARED", declared).replace("READ", read), floats(32), np.int32(0))["o"]
    assert np.isnan(o).all()


def test_a_constructor_still_sets_what_it_sets(emulate, floats):
    text = KERNEL.replace("DECLARED", "Built b(3.0f); static_assert(sizeof b == 20);").replace("READ", "b.set")
    assert (emulate(text, floats(32), np.int32(0))["o"] == 3).all()


def test_a_whole_number_never_set_is_far_from_any_index(emulate, floats):
    text = KERNEL.replace("DECLARED", "int x; unsigned y;").replace("READ", "fminf(fabsf(x), y)")
    assert (emulate(text, floats(32), np.int32(0))["o"] > 1e5).all()


PTX = 'extern "C" __global__ void f(float* o) {\n    float x = 3, y = 5;\n    ASM\n    o[threadIdx.x] = RESULT;\n}\n'


def result(emulate, floats, asm, read):
    return emulate(PTX.replace("ASM", asm).replace("RESULT", read), floats(32))["o"]


@pytest.mark.parametrize(
    ("asm", "expected"),
    [
        ('asm volatile("" : "=f"(y));', np.nan),
        ('asm volatile("" : "+f"(y));', 5),
        ('asm volatile("" : "=f"(y) : "0"(x));', 3),
        ('asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));', 8),
        ('asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(y));', 32),  # read before it is written
        ('asm("ex2.approx.ftz.f32 %0, %0;" : "=f"(y));', np.nan),
        ('asm("ex2.approx.ftz.f32 %0, %0;" : "+f"(y));', 32),
        ('float* p = &y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(*p++) : "f"(x)); y += p - &y - 1;', 8),
    ],
)
def test_an_output_of_ptx_that_is_no_input_holds_nothing_before(emulate, floats, asm, expected):
    np.testing.assert_array_equal(result(emulate, floats, asm, "y"), np.full(32, expected, np.float32))
