"""The header of a C++ package launches a kernel that computes what it should, on the stand-in driver."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from evoengine import workloads
from evoengine.devices.base import TensorParameter
from evoengine.publish.export import export_files, run_time_sizes
from evoengine.publish.packages import package_files
from evoengine.records import Candidate, Outcome
from evoengine.sandbox.host_compiler import find_compiler
from evoengine.stages import compile as compiler
from evoengine.stages.verify import compare
from evoengine.workloads.base import Case
from evoengine.workloads.tensors import TORCH_DTYPES
from tests.fake_cuda.library import folder as stand_in
from tests.support.exhaustive import more

pytestmark = pytest.mark.stand_in
KERNELS = {
    "b1,h2,sq70,sk90,d64,fp16,causal": {"family": "wgmma", "load": "tma", "o_store": "tma", "schedule": "none"},
    "gemm:m70,n66,k96,fp16,bias_relu": {"family": "mma"},
    "gemm:m130,n72,k128,bf16": {"family": "wgmma"},
    "rms_norm:rows9,hidden512,bf16": {"family": "block"},
    "decode:b2,h2,s70,d64,fp16": {"family": "two_kernels"},
}
"""problem → what its kernel must have"""
WRAPPER = """
#include "packaged.hpp"
extern "C" int call(CUdeviceptr* t) try {{
    static packaged::Kernel kernel;
    kernel({tensors});
    return 0;
}} catch (const std::exception& error) {{
    std::fputs(error.what(), stderr);
    return 1;
}}
"""


def headers() -> Path:
    import nvidia

    found = [path for root in nvidia.__path__ for path in Path(root).glob("*/include/cuda.h")]
    if not found:
        pytest.skip("cuda.h is not installed (pip install 'evoengine[cuda13]')")
    return found[0].parent


def build(folder: Path, *sources: str, options: tuple[str, ...]) -> None:
    where = [f"-I{headers()}", f"-L{stand_in()}"]
    command = [find_compiler(), "-std=c++17", "-Wall", "-Wextra", "-Werror", *sources, *where, *options]
    subprocess.run(command, cwd=folder, check=True)


def packaged(gate, wanted, folder: Path, form: str = "cpp") -> None:
    config = gate.configuration(wanted)
    source = gate.source(config)
    binary = compiler.compile_source(source, "sm_90a")
    found = Candidate(1, 1, str(gate.problem), "h100", config, Outcome.ESTIMATED, source=source, binary=binary)
    files = export_files(found, gate.target, run_time=run_time_sizes(found, gate.target, gate.space))
    for name, data in package_files(form, files, "packaged").items():
        (folder / name).write_bytes(data)


def by_header(tensors: list[TensorParameter]) -> tuple[str, tuple[str, ...]]:
    """A wrapper's text, and options of the compiler."""
    return WRAPPER.format(tensors=", ".join(f"t[{i}]" for i in range(len(tensors)))), ()


def launched(folder: Path, problem: str, way=by_header, wrong: tuple[str, str] | None = None):
    """What a wrapper's call returned, and the verdict on the kernel's outputs.

    `wrong` is a text of the wrapper and what replaces it where it is there first.
    """
    from evoengine.devices.torch_gpu import gpu

    workload, parsed = workloads.parse_problem(problem)
    case = Case("by the header", parsed)
    drawn = workload.tensors().draw(case, seed=3)
    tensors = [p for p in workload.parameters(parsed, {"family": None}) if isinstance(p, TensorParameter)]
    on_device = {}
    for p in tensors:
        held = torch.full(p.shape, float("nan"), dtype=TORCH_DTYPES[p.dtype]) if p.output else drawn.inputs[p.name]
        on_device[p.name] = gpu().empty(tuple(held.shape), held.dtype).copy_(held)
    text, options = way(tensors)
    if wrong is not None:
        assert wrong[0] in text
        text = text.replace(*wrong, 1)
    (folder / "wrapper.cpp").write_text("#include <cstdio>\n" + text)
    options = ("-shared", "-fPIC", "-l:libcuda.so.1", "-Wl,--no-undefined", "-o", "wrapper.so", *options)
    build(folder, "wrapper.cpp", options=options)
    addresses = (ctypes.c_uint64 * len(tensors))(*(on_device[p.name].data_ptr() for p in tensors))
    code = ctypes.CDLL(str(folder / "wrapper.so")).call(addresses)
    return code, compare(workload, case, drawn, {p.name: on_device[p.name] for p in tensors if p.output}, 3)


def verdict(folder: Path, problem: str, way=by_header):
    code, found = launched(folder, problem, way)
    assert code == 0
    return found


@pytest.mark.parametrize("problem", [*list(KERNELS)[:2], *more(list(KERNELS)[2:])])
def test_the_header_passes_what_the_kernel_takes(kernel_gate, tmp_path, problem):
    packaged(kernel_gate(problem), KERNELS[problem], tmp_path)
    found = verdict(tmp_path, problem)
    assert found.correct, found.reason


def test_machine_code_that_was_changed_is_refused_by_cmake(kernel_gate, tmp_path):
    cmake = shutil.which("cmake") or pytest.skip("CMake is not installed")
    packaged(kernel_gate(next(iter(KERNELS))), KERNELS[next(iter(KERNELS))], tmp_path)
    with (tmp_path / "kernel_cubin.inc").open("a") as file:
        file.write("0,\n")
    done = subprocess.run([cmake, "-B", tmp_path / "build", tmp_path], capture_output=True, text=True)
    assert done.returncode != 0 and "kernel_cubin.inc is not the file that was packaged" in done.stderr


def test_a_parameter_that_is_not_the_kernel_s_shows(kernel_gate, tmp_path):
    problem = "gemm:m70,n66,k96,fp16,bias_relu"
    packaged(kernel_gate(problem), KERNELS[problem], tmp_path)
    header = tmp_path / "packaged.hpp"
    text = header.read_text()
    assert "int32_t k = static_cast<std::int32_t>(sizes.k);" in text
    header.write_text(text.replace("static_cast<std::int32_t>(sizes.k);", "64;"))
    assert not verdict(tmp_path, problem).correct


SIZED = "gemm:m2100,n2056,k520,bf16", {"schedule": "persistent", "cluster": "2x1"}


def by_sizes(m, n, k):
    def way(tensors):
        text, options = by_header(tensors)
        return text.replace(");\n    return", f", nullptr, {{{m}, {n}, {k}}});\n    return", 1), options

    return way


def test_the_header_serves_a_smaller_problem_and_refuses_what_was_not_verified(kernel_gate, tmp_path, capfd):
    tuned, wanted = SIZED
    packaged(kernel_gate(tuned), wanted, tmp_path)
    found = verdict(tmp_path, "gemm:m130,n72,k128,bf16", by_sizes(130, 72, 128))
    assert found.correct, found.reason
    for number, (sizes, says) in enumerate(
        [
            ((2101, 72, 128), "m must be from 1 to 2100, the sizes that this kernel was verified for"),
            ((130, 70, 128), "this kernel needs n % 8 == 0: TMA requires rows in memory that are multiples of 16"),
        ]
    ):
        other = tmp_path / str(number)
        shutil.copytree(tmp_path, other, ignore=shutil.ignore_patterns("[0-9]"))
        code, _ = launched(other, "gemm:m130,n72,k128,bf16", by_sizes(*sizes))
        assert code == 1 and says in capfd.readouterr().err


def test_the_example_compiles_without_a_warning(kernel_gate, tmp_path):
    problem = next(iter(KERNELS))
    packaged(kernel_gate(problem), KERNELS[problem], tmp_path)
    build(tmp_path, "main.cpp", options=("-c", "-o", "main.o"))
