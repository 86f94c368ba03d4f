"""A library for TVM-FFI launches a kernel that computes what it should, on the stand-in driver."""

from __future__ import annotations

from pathlib import Path

import pytest

from evoengine.devices.base import TensorParameter
from tests.fake_cuda.test_cpp_package import KERNELS, launched, packaged, verdict
from tests.support.exhaustive import more

pytestmark = pytest.mark.stand_in
libinfo = pytest.importorskip("tvm_ffi.libinfo", reason="apache-tvm-ffi is not installed")
THROUGH_TVM_FFI = """
#include "module.cpp"
extern "C" int call(CUdeviceptr* t) try {{
{tensors}
    packaged::run({names});
    return 0;
}} catch (const tvm::ffi::Error& error) {{
    std::fputs(error.message().c_str(), stderr);
    return 1;
}}
"""
WRONG = {
    "another device": ("{kDLCUDA, 0}", "{kDLCPU, 0}", "q is not on the GPU of the other tensors"),
    "another dtype": ("{kDLFloat, 16, 1}", "{kDLBfloat, 16, 1}", "q has another dtype"),
    "another shape": ("{1, 2, 70, 64}", "{1, 2, 64, 70}", "q is not contiguous in the shape"),
    "other strides": ("nullptr, 0}", "other_strides, 0}", "q is not contiguous in the shape"),
    "an odd address": ("(void*)(t[0] + 0)", "(void*)(t[0] + 2)", "q is not at an address"),
}
"""what is wrong of a tensor → the text of the wrapper, what replaces it for the first tensor, what is said"""


def by_tvm_ffi(tensors: list[TensorParameter]) -> tuple[str, tuple[str, ...]]:
    kinds = {"fp16": "{kDLFloat, 16, 1}", "bf16": "{kDLBfloat, 16, 1}", "int32": "{kDLInt, 32, 1}"}
    lines = [f"    std::int64_t other_strides[] = {{{', '.join('1' * len(tensors[0].shape))}}};"]
    for i, p in enumerate(tensors):
        lines.append(f"    std::int64_t shape{i}[] = {{{', '.join(map(str, p.shape))}}};")
        lines.append(
            f"    DLTensor d{i}{{(void*)(t[{i}] + 0), {{kDLCUDA, 0}}, {len(p.shape)}, {kinds[p.dtype]}, shape{i}, "
            "nullptr, 0};"
        )
    names = ", ".join(f"tvm::ffi::TensorView(&d{i})" for i in range(len(tensors)))
    library = Path(libinfo.find_libtvm_ffi())
    where = [f"-isystem{path}" for path in (libinfo.find_include_path(), libinfo.find_dlpack_include_path())]
    options = (*where, f"-L{library.parent}", "-ltvm_ffi", f"-Wl,-rpath,{library.parent}", "-Wno-unused-variable")
    return THROUGH_TVM_FFI.format(tensors="\n".join(lines), names=names), options


@pytest.mark.parametrize("problem", [*list(KERNELS)[:1], *more(list(KERNELS)[1:])])
def test_the_function_of_tvm_ffi_passes_what_the_kernel_takes(kernel_gate, tmp_path, problem):
    packaged(kernel_gate(problem), KERNELS[problem], tmp_path, "tvm-ffi")
    found = verdict(tmp_path, problem, by_tvm_ffi)
    assert found.correct, found.reason


@pytest.mark.parametrize("fault", [*list(WRONG)[:1], *more(list(WRONG)[1:])])
def test_the_function_of_tvm_ffi_refuses_other_tensors(kernel_gate, tmp_path, capfd, fault):
    problem = next(iter(KERNELS))
    packaged(kernel_gate(problem), KERNELS[problem], tmp_path, "tvm-ffi")
    code, found = launched(tmp_path, problem, by_tvm_ffi, WRONG[fault][:2])
    assert code == 1 and not found.correct  # nothing was launched
    assert WRONG[fault][2] in capfd.readouterr().err
