"""NVRTC makes a whole binary without a GPU, and its report is read out right."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from evoengine import cuda_files
from evoengine.cuda_files import disassembler, wheel_folders
from evoengine.errors import MachineError
from evoengine.records import Launch, Source
from evoengine.sandbox.machine import why_unfit
from evoengine.sass import listing
from evoengine.sass.cubin import kernel_names, whole_image
from evoengine.stages import compile as compile_stage
from evoengine.stages import toolchain
from evoengine.stages.compile import CompileFailed, compile_source, read_report
from evoengine.stages.toolchain import include_folders

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


@pytest.mark.parametrize(
    ("value", "header"), [("INFINITY", "math.h"), ("FLT_MAX", "float.h"), ("INT_MAX", "limits.h"), ("mine", None)]
)
def test_a_name_of_the_c_library_is_given_with_the_header_that_has_it(value, header):
    text = f'extern "C" __global__ void product(float* c) {{ c[0] = {value}; }}\n'
    with pytest.raises(CompileFailed, match=f'identifier "{value}" is undefined') as failure:
        compile_source(source(text), "sm_90a")
    assert str(failure.value).endswith(f"; #include <{header}>, which NVRTC does not include by itself") == bool(header)
    if header:
        assert compile_source(source(f"#include <{header}>\n{text}"), "sm_90a").registers


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


def test_an_architecture_that_this_nvrtc_does_not_know_fails_every_candidate():
    with pytest.raises(MachineError, match="gpu-architecture"):
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


def test_the_only_kernel_of_a_name_is_found_without_extern_c():
    """C++ mangles its name; the binary has the plain one, under which a device looks."""
    assert kernel_names(compile_source(source(MMA.replace('extern "C" ', "")), "sm_90a").cubin) == ["product"]


CONCEPT = """template <class T> concept Small = sizeof(T) < 8;
template <Small T> __device__ T twice(T x) { return 2 * x; }
extern "C" __global__ void product(float* x) { x[0] = twice(x[0]); }
"""


def test_a_line_of_the_text_chooses_the_language():
    with pytest.raises(CompileFailed):
        compile_source(source(CONCEPT), "sm_90a")
    found = compile_source(source(f"// --std=c++20\n{CONCEPT}"), "sm_90a")
    assert "--std=c++20" in found.options.split() and "--std=c++17" not in found.options
    assert compile_stage.options("sm_90a", "// --std=c++20 -lineinfo") == compile_stage.options("sm_90a")


def test_two_kernels_of_a_name_are_refused_with_the_remedy():
    text = MMA.replace('extern "C" ', "") + "\n__global__ void product(int) {}\n"
    with pytest.raises(CompileFailed, match="2 of them are instances or overloads of product: leave one"):
        compile_source(source(text), "sm_90a")


def test_a_kernel_of_another_name_is_refused():
    with pytest.raises(CompileFailed, match="no kernel named product: it has other;"):
        compile_source(source(MMA.replace("product(", "other(")), "sm_90a")


def test_a_source_without_a_kernel_is_refused():
    with pytest.raises(CompileFailed, match="no kernel named product: it has no kernel at all"):
        compile_source(source('extern "C" __device__ int product(int x) { return x + 1; }'), "sm_90a")


def test_a_second_kernel_beside_the_entry_does_no_harm():
    beside = compile_source(source(MMA + 'extern "C" __global__ void second(int* x) { *x = 1; }'), "sm_90a")
    assert sorted(kernel_names(beside.cubin)) == ["product", "second"]


# ── whose fault it is ───────────────────────────────────────────────────────────────────────────────────────────────

GOOD = '#include <cuda_fp16.h>\nextern "C" __global__ void k(__half* x) {}\n'


def compiled(text: str):
    return compile_source(Source(text, "k", Launch((1, 1, 1), 32, 0)), "sm_90a")


def test_headers_that_vanish_are_the_machines_fault(monkeypatch, tmp_path):
    monkeypatch.setattr(compile_stage, "include_folders", lambda: (tmp_path,))
    with pytest.raises(MachineError, match=r"not even an empty kernel can be compiled: .*cuda_fp16\.h"):
        compiled(GOOD)


def test_a_header_with_damage_within_is_the_machines_fault_though_the_error_has_a_place(monkeypatch, tmp_path):
    (tmp_path / "cuda_fp16.h").write_text("\x01\x01\n")
    monkeypatch.setattr(compile_stage, "include_folders", lambda: (tmp_path, *include_folders()))
    with pytest.raises(MachineError, match=r"not even an empty kernel can be compiled: .*cuda_fp16\.h\(1\): error"):
        compiled(GOOD)


def test_an_error_that_the_candidate_causes_in_a_header_is_its_own():
    with pytest.raises(CompileFailed, match=r"cuda_fp16\.\S+\(\d+\): error"):
        compiled("#define __half 1\n" + GOOD)


@pytest.fixture(scope="module")
def library() -> Path:
    return next(each for f in wheel_folders() for each in sorted((f / "lib").glob("libnvrtc-builtins*.so*")))


def cut(whole: bytes) -> bytes:
    return whole[:-10_000]


def with_no_program(whole: bytes) -> bytes:
    return b"no library at all"


@pytest.mark.parametrize(
    ("damage", "said"), [(cut, r"is damaged: it has [\d,]+ of [\d,]+ bytes"), (with_no_program, "is not a library")]
)
def test_a_compiler_that_is_not_whole_is_named_before_it_is_loaded(library, tmp_path, monkeypatch, damage, said):
    """The system's loader would take a cut one, and SIGBUS then ends the process."""
    folder = tmp_path / "lib"
    folder.mkdir()
    shutil.copy(library, folder)
    monkeypatch.setattr(cuda_files, "wheel_folders", lambda: [tmp_path])
    assert cuda_files.broken_compiler() is None
    assert why_unfit() is None
    (folder / library.name).write_bytes(damage(library.read_bytes()))
    with pytest.raises(MachineError, match=f"NVRTC cannot be used .*{library.name} {said}.*pip install"):
        toolchain.nvrtc.__wrapped__()
    assert re.fullmatch(f"this machine failed: .*{library.name} {said}", why_unfit())


@pytest.mark.parametrize(
    ("version", "options"), [((12, 8), ()), ((12, 9), ("--no-cache",)), ((13, 0), ("--no-cache",))]
)
def test_nvrtc_does_not_answer_from_its_cache(monkeypatch, version, options):
    """What an H100's driver had cached came without ptxas' report, so that the second compilation failed."""
    monkeypatch.setattr(toolchain, "nvrtc", lambda: SimpleNamespace(getVersion=lambda: version))
    assert toolchain.uncached() == options


def test_nothing_is_broken_where_there_is_no_compiler(tmp_path, monkeypatch):
    monkeypatch.setattr(cuda_files, "wheel_folders", lambda: [tmp_path])
    monkeypatch.setattr(cuda_files, "toolkit", lambda: tmp_path)
    assert cuda_files.broken_compiler() is None


def test_a_disassembler_that_fails_is_the_machines_fault(monkeypatch, tmp_path):
    broken = tmp_path / "nvdisasm"
    broken.write_text("#!/bin/sh\necho no space >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr(listing, "disassembler", lambda: str(broken))
    with pytest.raises(MachineError, match="not even an empty kernel can be compiled: nvdisasm cannot .* no space"):
        compiled(GOOD)


def test_one_that_fails_once_costs_nothing(monkeypatch, tmp_path):
    once = tmp_path / "nvdisasm"
    once.write_text(f"#!/bin/sh\n[ -e {tmp_path}/x ] || {{ touch {tmp_path}/x; exit 1; }}\nexec {disassembler()} $*\n")
    once.chmod(0o755)
    monkeypatch.setattr(listing, "disassembler", lambda: str(once))
    assert compiled(GOOD).listing


def test_a_header_that_is_not_there_is_the_candidates_fault():
    with pytest.raises(CompileFailed, match="nothing_of_the_sort.h"):
        compiled('#include "nothing_of_the_sort.h"\n' + GOOD)


def test_a_macro_bomb_is_refused_by_the_limit_of_memory(monkeypatch):
    monkeypatch.setattr(compile_stage, "COMPILE_BYTES", 256 << 20)
    lines = ["#define A0 x[0]+x[1]", *(f"#define A{i} " + "+".join([f"A{i - 1}"] * 10) for i in range(1, 9))]
    bomb = "\n".join([*lines, 'extern "C" __global__ void k(int* x) { x[7] = A8; }\n'])
    with pytest.raises(CompileFailed, match=r"memory \(0.25 GiB is the limit\)"):
        compiled(bomb)
