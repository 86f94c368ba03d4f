"""Functions that are not inlined, pointers to them, and what the driver provides: printf and assert."""

from __future__ import annotations

import numpy as np
import pytest

from evoengine.devices.base import KernelCrashed, TensorArgument
from evoengine.sass import core
from evoengine.sass.launch import Geometry, prepare
from tests.support.machine_code import SOME_ARCHS, compiled_kernels

TEXT = r"""
__device__ __noinline__ int fibonacci(int n) { return n < 2 ? n : fibonacci(n - 1) + fibonacci(n - 2); }
extern "C" __global__ void recursive(const int* in, int* out) { out[threadIdx.x] = fibonacci(in[threadIdx.x]); }

__device__ __noinline__ int next(int x) { return x + 1; }
__device__ __noinline__ int twice(int x) { return x * 2; }
__device__ int (*const functions[])(int) = {next, twice};
extern "C" __global__ void pointed(const int* in, int* out) {
  out[threadIdx.x] = functions[in[threadIdx.x] & 1](threadIdx.x);
}
extern "C" __global__ void printing(const int* in, int* out) {
  if (threadIdx.x == in[0]) printf("%s %d: %5.2f|%-6lld|%*x|%c %u%% %p\n", "thread", threadIdx.x, in[1] / 4.0f,
                                   -12345678901LL, 6, 255, 'z', ~0u, (void*)0x10);
  out[threadIdx.x] = 7;
}
extern "C" __global__ void asserting(const int* in, int* out) {
  if (in[threadIdx.x] == 5) __assertfail("in[i] != 5", "some.cu", 17u, "asserting", (size_t)1);
  out[threadIdx.x] = in[threadIdx.x];
}
extern "C" __global__ void allocating(const int* in, int* out) { out[threadIdx.x] = malloc(in[threadIdx.x] + 8) != 0; }
"""


def ran(entry: str, arch: str, values: np.ndarray) -> np.ndarray:
    kernel, program = compiled_kernels(TEXT, arch)[entry]
    arguments = [TensorArgument("in", values), TensorArgument("out", np.empty(32, np.int32), output=True)]
    launch = prepare(kernel, Geometry((1, 1, 1), (32, 1, 1)), arguments, 0)
    core.run(program, launch)
    return launch.results()["out"]


@pytest.mark.parametrize("arch", SOME_ARCHS)
def test_a_function_calls_itself_to_another_depth_in_each_lane(arch):
    numbers = [0, 1]
    while len(numbers) < 12:
        numbers.append(numbers[-1] + numbers[-2])
    values = np.arange(32, dtype=np.int32) % 12
    assert ran("recursive", arch, values).tolist() == [numbers[n] for n in values]


@pytest.mark.parametrize("arch", SOME_ARCHS)
def test_lanes_call_different_functions_by_pointers(arch):
    values = np.arange(32, dtype=np.int32) // 3
    expected = [2 * i if values[i] & 1 else i + 1 for i in range(32)]
    assert ran("pointed", arch, values).tolist() == expected


@pytest.mark.parametrize("arch", SOME_ARCHS)
def test_printf_formats_as_c_does(arch):
    values = np.full(32, 9, np.int32)
    values[0] = 3
    assert (ran("printing", arch, values) == 7).all()
    assert core.printed() == "thread 3:  2.25|-12345678901|    ff|z 4294967295% 0x10\n"
    assert (ran("recursive", arch, np.zeros(32, np.int32)) == 0).all() and core.printed() == ""


@pytest.mark.parametrize("arch", SOME_ARCHS)
def test_an_assertion_that_fails_says_what_and_where(arch):
    values = np.arange(32, dtype=np.int32) + 8
    assert (ran("asserting", arch, values) == values).all()
    values[11] = 5
    with pytest.raises(KernelCrashed, match=r"lane 11: some.cu:17: asserting: assertion `in\[i\] != 5` failed"):
        ran("asserting", arch, values)


def test_what_the_driver_provides_and_the_executor_does_not_is_an_error():
    with pytest.raises(KernelCrashed, match="a call of an address that has no function: CALL.ABS"):
        ran("allocating", "sm_90a", np.zeros(32, np.int32))
