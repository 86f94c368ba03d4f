"""What is read of kernels and device variables in a text, and of whether its blocks share memory."""

import pytest

from evoengine.cuda_emulator.declarations import find_device_variables, find_kernels, mask, shares_memory
from evoengine.cuda_emulator.translate import translate
from evoengine.devices.base import KernelUnbuildable
from tests.support.exhaustive import more

KERNELS = """
#define UNUSED __global__ void not_this(int* a) {}
template <int N> __global__ void nor_this(float* a) {}
__global__ void __launch_bounds__(64, 4) declared_only(float* a);
extern "C" __global__ void __launch_bounds__(f(1, 2), N + 1)
first(const float* a, int (*b)(int)) { if (a) { b(1); } }
extern "C" {
__cluster_dims__(2, 1, 1) __global__ static void
    second() {}
}
namespace n { __global__ void __launch_bounds__(128) third(int x) { /* } */ } }
"""


def kernels(text):
    return find_kernels(mask(text))


def test_every_kernel_is_read_with_its_bounds_and_cluster():
    found = kernels(KERNELS)
    assert [k.name for k in found] == ["first", "second", "third"]
    assert [k.least_blocks for k in found] == ["(N + 1)", "1", "1"]
    assert [k.cluster for k in found] == [1, 2, 1]
    assert [KERNELS[k.body : k.end] for k in found] == ["{ if (a) { b(1); } }", "{}", "{ /* } */ }"]


def test_each_is_described_to_the_runtime_behind_its_body_and_owns_the_shared_variables_in_it():
    text = 'extern "C" __global__ void f() { __shared__ int a; }\n__device__ void g() { __shared__ int b; }'
    translated = translate(text)
    assert "} EVO_EMU_ENTRY(f, 1, 1, 1)\n" in translated
    assert '(1), 1>("a"' in translated and '(1), 0>("b"' in translated


@pytest.mark.parametrize("dims", ["1, 2, 1", "N, 1, 1"])
def test_a_cluster_that_the_emulator_cannot_run_is_named_with_its_line(dims):
    with pytest.raises(KernelUnbuildable, match=rf"line 2: __cluster_dims__\({dims}\), where the emulator requires"):
        kernels(f"\n__global__ void __cluster_dims__({dims}) f() {{}}")


def test_variables_of_the_device_are_those_that_kernels_may_write():
    text = (
        "__device__ unsigned count = 0, more[4][N];\n"
        "static __device__ __align__(16) Parts<int, 2> parts{1, {2}};\n"
        "__device__ const float table[] = {1, 2};\n__device__ constexpr int size = 4;\n__constant__ int c;\n"
        "__device__ float f(float x) { return x; }\ntemplate <class T> __device__ inline T g();\n"
        "extern __device__ int elsewhere;\n"
    )
    found = find_device_variables(mask(text))
    assert [v.names for v in found] == [["count", "more"], ["parts"]]
    assert [text[v.end - 1] for v in found] == [";", ";"]
    assert "EVO_EMU_DEVICE(count) EVO_EMU_DEVICE(more)" in translate(text)


@pytest.mark.parametrize(
    "statement",
    [
        "atomicAdd(a, 1);", "__threadfence();", "volatile int* p = a;", "while (!*(volatile int*)a);",
        "__nanosleep(9);", "cuda::atomic_ref<int> r(*a);", "cuda::std::atomic<int>* r;",
        *more(['asm volatile("red.global.add.u32 [%0], 1;" :: "l"(a));', 'asm("atom.global.inc.u32 %0, [%1], 2;" : …);',
               'asm volatile("ld.acquire.gpu.u32 %0, [%1];" : …);', 'asm volatile("st.release.gpu.u32 [%0], 1;" : …);',
               'asm("ld.global.relaxed.sys.v2.u32 …");', 'asm volatile("fence.acq_rel.gpu;");', 'asm("membar.gl;");']),
    ],
)  # fmt: skip
def test_a_kernel_whose_blocks_may_talk_is_recognised(statement):
    kernel = 'extern "C" __global__ void f(int* a) { STATEMENT }'
    assert shares_memory(kernel.replace("STATEMENT", statement))
    assert not shares_memory(kernel.replace("STATEMENT", f"// {statement}\n"))
    for plain in ('asm volatile("bar.sync 0;");', 'asm volatile("fence.proxy.async;");', "__syncthreads();"):
        assert not shares_memory(kernel.replace("STATEMENT", plain))
    assert shares_memory(kernel + kernel.replace(" f(", " g("))
    assert shares_memory("__device__ int count;" + kernel)


@pytest.mark.parametrize(
    "problem",
    [
        "b16,h16,s2048,d64,fp16",
        *more(["gemm:m64,n64,k64,fp16", "rms_norm:rows64,hidden64,fp16", "convolution:w64,h64,fw3,fh3"]),
    ],
)
def test_the_shipped_families_share_none(kernel_gate, problem):
    gate = kernel_gate(problem)
    for config in gate.draw(40, seed=2):
        text = gate.source(config).text
        assert not shares_memory(text)
