"""NVRTC makes a whole binary without a GPU, and its report is read out right."""

from __future__ import annotations

import subprocess

import pytest

from evoengine.cuda_files import disassembler
from evoengine.records import Launch, Source
from evoengine.sass.cubin import kernel_names, whole_image
from evoengine.stages.compile import CompileFailed, compile_source, read_report

MMA = r"""
#include <cuda_fp16.h>
#include <mma.h>
using namespace nvcuda;
extern "C" __global__ void __launch_bounds__(32) product(const half* a, const half* b, float* c) {
    __shared__ float staged[64];
    wmma::fragment<wmma::matrix_a, 16, 16, 16, half, wmma::row_major> fa;
    wmma::fragment<wmma::matrix_b, 16, 16, 16, half, wmma::col_major> fb;
    wmma::fragment<wmma::accumulator, 16, 16, 16, float> fc;
    wmma::fill_fragment(fc, 0.0f);
    wmma::load_matrix_sync(fa, a, 16);
    wmma::load_matrix_sync(fb, b, 16);
    wmma::mma_sync(fc, fa, fb, fc);
    staged[threadIdx.x] = exp2f(fc.x[0]);
    __syncthreads();
    c[threadIdx.x] = staged[threadIdx.x ^ 1];
}
"""
SPILLING = r"""
extern "C" __global__ void __launch_bounds__(1024, 2) product(const float* a, float* c, int n) {
    float held[96];
    #pragma unroll
    for (int i = 0; i < 96; ++i) held[i] = a[i * n + threadIdx.x];
    for (int j = 0; j < n; ++j)
        #pragma unroll
        for (int i = 0; i < 96; ++i) held[i] = held[i] * held[(i + 7) % 96] + a[j];
    float sum = 0;
    #pragma unroll
    for (int i = 0; i < 96; ++i) sum += held[i];
    c[threadIdx.x] = sum;
}
"""


def source(text: str) -> Source:
    return Source(text, "product", Launch((1, 1, 1), 32, 0))


@pytest.fixture(scope="module")
def mma():
    return compile_source(source(MMA), "sm_90a")


def test_a_binary_states_its_resources(mma):
    assert mma.registers > 0
    assert mma.shared_bytes == 64 * 4
    assert (mma.spill_bytes, mma.stack_bytes, mma.warnings) == (0, 0, ())
    assert (mma.arch, mma.options) == ("sm_90a", "-arch=sm_90a --std=c++17 --ptxas-options=-v")
    assert mma.compiler.startswith("nvrtc ")


def test_the_instruction_mix_counts_what_the_kernel_does(mma):
    assert mma.mix["HMMA"] == 1  # the half of the product that no thread reads, x[1] and beyond, is compiled away
    assert mma.mix["MUFU"] == 1
    assert mma.mix["BAR"] == 1


def test_the_image_is_whole(mma, tmp_path):
    """CuPy hands it out a byte short; the disassembler refuses such an image."""
    whole, short = tmp_path / "whole.cubin", tmp_path / "short.cubin"
    whole.write_bytes(mma.cubin)
    short.write_bytes(mma.cubin[:-1])
    assert subprocess.run([disassembler(), str(whole)], capture_output=True).returncode == 0
    assert subprocess.run([disassembler(), str(short)], capture_output=True).returncode != 0


def test_an_image_that_is_whole_already_is_left_alone(mma):
    assert whole_image(mma.cubin) == mma.cubin
    assert whole_image(mma.cubin[:-1]) == mma.cubin


def test_spills_are_counted():
    spilling = compile_source(source(SPILLING), "sm_80")
    assert spilling.spill_bytes > 0
    assert spilling.stack_bytes > 0
    assert spilling.registers == 32


def test_an_error_is_named_with_its_line():
    with pytest.raises(CompileFailed, match=r"product\.cu\(14\).*staged_"):
        compile_source(source(MMA.replace("staged[threadIdx.x] =", "staged_[threadIdx.x] =")), "sm_90a")


def test_an_unknown_architecture_is_refused():
    with pytest.raises(CompileFailed, match="gpu-architecture"):
        compile_source(source(MMA), "sm_12345")


def test_ptxas_remarks_on_wgmma_and_setmaxnreg_are_kept():
    log = "\n".join(
        [
            "ptxas info    : (C7508) Potential Performance Loss: 'setmaxnreg' ignored to maintain minimum register "
            "requirements.",
            "ptxas warning : Value of threads per SM for entry product is out of range. .minnctapersm will be ignored",
            "ptxas info    : Compiling entry function 'product' for 'sm_90a'",
            "ptxas info    : Function properties for product",
            "ptxas         .     16 bytes stack frame, 8 bytes spill stores, 4 bytes spill loads",
            "ptxas info    : Used 168 registers, used 1 barriers, 16 bytes smem",
        ]
    )
    report = read_report(log, "product")
    assert [w.split()[0] for w in report["warnings"]] == ["(C7508)", "Value"]
    names = ("registers", "spill_bytes", "stack_bytes", "shared_bytes")
    assert [report[name] for name in names] == [168, 12, 16, 16]


def test_a_log_without_a_report_is_no_binary():
    with pytest.raises(CompileFailed, match="registers of product"):
        read_report("ptxas info : 0 bytes gmem", "product")


def test_a_binary_names_its_kernels(mma):
    assert kernel_names(mma.cubin) == ["product"]


def test_a_kernel_without_extern_c_is_refused_with_the_remedy():
    """Its name in the binary is the mangled one, under which no device looks."""
    with pytest.raises(CompileFailed, match=r'no kernel named product: it has _Z7product\S+; .*extern "C" __global__'):
        compile_source(source(MMA.replace('extern "C" ', "")), "sm_90a")


def test_a_kernel_of_another_name_is_refused():
    with pytest.raises(CompileFailed, match="no kernel named product: it has other;"):
        compile_source(source(MMA.replace("product(", "other(")), "sm_90a")


def test_a_source_without_a_kernel_is_refused():
    with pytest.raises(CompileFailed, match="no kernel named product: it has no kernel at all"):
        compile_source(source('extern "C" __device__ int product(int x) { return x + 1; }'), "sm_90a")


def test_a_second_kernel_beside_the_entry_does_no_harm():
    beside = compile_source(source(MMA + 'extern "C" __global__ void second(int* x) { *x = 1; }'), "sm_90a")
    assert sorted(kernel_names(beside.cubin)) == ["product", "second"]
