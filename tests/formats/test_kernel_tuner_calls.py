"""What Kernel Tuner's calls may hold beside a text and arrays: each is taken as the tuner means it, or refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from evoengine.errors import UsageError
from evoengine.formats.device_text import device_code, host_launch, instantiated, with_includes
from evoengine.formats.folder import NewFolder, write_folder
from evoengine.formats.importers import make_folder
from tests.support.folders import gate, load

ADD = """__global__ void add(float* c, float* a, float* b, int n) {
    int i = blockIdx.x * block_size_x + threadIdx.x;
    if (i < n) c[i] = a[i] + b[i];
}
"""
CALL = 'tune_kernel("add", TEXT, n, [c, a, b, n], {"block_size_x": [64, 128]})'
SCRIPT = """
import numpy as np
import pycuda.driver as drv
from kernel_tuner import run_kernel, tune_kernel
from kernel_tuner.accuracy import TunablePrecision
from kernel_tuner.kernelbuilder import PythonKernel

n = np.int32(3000)
c, a, b = (np.random.randn(n).astype(np.float32) for _ in range(3))
flags = drv.host_alloc_flags.PORTABLE | drv.host_alloc_flags.DEVICEMAP
TEXT = '''
{text}'''
{call}
"""


def imported(folder: Path, call: str = CALL, text: str = ADD, entry: str | None = None) -> NewFolder:
    (folder / "tune.py").write_text(SCRIPT.format(call=call, text=text))
    return make_folder("add", f"kernel-tuner:{folder / 'tune.py'}", entry=entry)


def passes(folder: Path, made: NewFolder, **config: object) -> bool:
    write_folder(made, folder / "add")
    return gate(folder / "add", {"family": "add", "block_size_x": 64, **config}).correct


@pytest.mark.parametrize(
    "call, text",
    {
        "TEXT.replace('block_size_x', str(p['block_size_x']))": ADD,
        "TEXT % p['block_size_x']": ADD.replace("block_size_x", "%s"),
    }.items(),
)
def test_a_generator_that_only_puts_values_into_a_text_gives_the_text_with_names(tmp_path, call, text):
    made = imported(tmp_path, CALL.replace("TEXT", f"lambda p: {call}"), text)
    assert "blockIdx.x * block_size_x + threadIdx.x" in made.kernel
    assert not any("function" in remark for remark in made.remarks)


@pytest.mark.parametrize("value", ["2 * p['block_size_x'] // 2", "max(p['block_size_x'], 65)", "len(str(p))"])
def test_a_generator_that_calculates_is_refused(tmp_path, value):
    call = CALL.replace("TEXT", f"lambda p: TEXT.replace('block_size_x', str({value}))")
    with pytest.raises(UsageError, match="a function that calculates with the values of its parameters; write the"):
        imported(tmp_path, call)


SECOND = """results, _ = tune_kernel("add", TEXT, n, [c, a, b, n], {"block_size_x": [64, 128]})
blocks = np.int32(np.ceil(n / util.get_best_config(results, "time")["block_size_x"]))
tune_kernel("added", TEXT, 1, [np.zeros(1, np.float32), np.zeros(47, np.float32), blocks], {"block_size_x": [64]})
"""
ADDED = """__global__ void added(float* sum, float* parts, int blocks) {
    if (threadIdx.x) return;
    float all = 0;
    for (int i = 0; i < blocks; ++i) all += parts[i];
    *sum = all;
}
"""


def test_a_second_kernel_has_sizes_by_the_best_configuration_of_the_first_and_draws_what_that_one_fills(tmp_path):
    made = imported(tmp_path, f"from kernel_tuner import util\n{SECOND}", ADD + ADDED, entry="added")
    assert made.problem["inputs"]["parts"]["shape"] == ["blocks"]
    assert made.problem["workloads"][0]["axes"] == {"blocks": 47}
    assert "the zeros of parts, which the kernel only reads: it is drawn at random" in made.remarks
    assert passes(tmp_path, made)
    wrong = made.kernel.replace("i < blocks", "i < blocks - (blocks > 40)")
    (tmp_path / "add/add.cu").write_text(wrong)
    assert not gate(tmp_path / "add", {"family": "add", "block_size_x": 64}).correct


def test_a_kernel_that_a_script_runs_once_has_knobs_of_one_value(tmp_path):
    made = imported(tmp_path, "PythonKernel('add', TEXT, n, [c, a, b, n], {'block_size_x': 64})(c, a, b, n)[0] / 0")
    assert "block_size_x = [64]" in made.space
    assert any("other values of the knobs: PythonKernel at line" in remark for remark in made.remarks)
    tuned = imported(tmp_path, f"run_kernel('other', TEXT, n, [c], {{}})\n{CALL}")
    assert tuned.problem["entry"] == "add"


NAIVE = ADD.replace("add", "naive").replace("a[i] + b[i]", "b[i] + a[i]")


def test_a_kernel_by_which_the_script_makes_its_answer_is_the_reference(tmp_path):
    run = "answer = run_kernel('naive', TEXT, n, [c, a, b, n], {'block_size_x': 32})\n"
    call = run + CALL.replace("}", "}, answer=[answer[0], None, None, None]")
    made = imported(tmp_path, call, NAIVE + ADD)
    reference = made.problem["reference"]
    assert (reference["entry"], reference["threads"], reference["grid"][0]) == (
        "naive",
        ["32", "1", "1"],
        "ceil_div(n, (32))",
    )
    assert passes(tmp_path, made)
    wrong = (tmp_path / "add/reference.cu").read_text().replace("b[i] + a[i]", "b[i] - a[i]")
    (tmp_path / "add/reference.cu").write_text(wrong)
    assert not gate(tmp_path / "add", {"family": "add", "block_size_x": 64}).correct
    other = imported(tmp_path, call.replace("answer[0], None", "c, None"), NAIVE + ADD)
    assert other.problem["reference"]["entry"] == "add"


STREAMED = """#include <stdio.h>
#include <vector>
#include "kernel.cu"
#define DEVICE __device__ inline
DEVICE float twice(float x) { return 2.0f * x; }
struct Pair { float first() { return 1.0f; } };
extern "C" float timed(float* h_c, float* unused, float* h_a, int n) {
    float *d_c, *d_a;
    cudaMalloc(&d_a, n * 4);
    cudaMemcpyAsync(d_a, h_a, n * 4, cudaMemcpyHostToDevice, stream[0]);
    cudaMemcpyToSymbol(factors, unused, 16);
    for (int k = 0; k < num_streams; k++) scale<<<grid, threads, 0, stream[k]>>>(d_c + k * n, d_a, n);
    cudaMemcpy(h_c, d_c, n * 4, cudaMemcpyDeviceToHost);
    return printf("}");
}
int main() { return 0; }
"""
SCALE = """__constant__ float factors[4];
__global__ void scale(float* out, float* in, int n) {
    int i = blockIdx.x * block_size_x + threadIdx.x;
    if (i < n) out[i] = factors[1] * in[i];
}
"""


def test_of_a_host_function_the_kernel_is_taken_with_what_it_gets(tmp_path):
    """The function copies arguments to the device and to constant memory under other names, in its own order."""
    (tmp_path / "host.cu").write_text(STREAMED)
    (tmp_path / "kernel.cu").write_text(SCALE)
    call = (
        "factors = np.arange(4).astype(np.float32)\n"
        "tune_kernel('timed', ['host.cu', 'kernel.cu'], n, [c, factors, a, n],"
        " {'block_size_x': [64, 128], 'num_streams': [2, 1]}, grid_div_x=['block_size_x', 'num_streams'], lang='C')"
    )
    made = imported(tmp_path, call)
    assert made.problem["parameters"] == ["out", "in", "n"] and made.problem["constants"] == {"factors": "factors"}
    assert "num_streams = [1]" in made.space
    assert "what the host runs: timed, main" in made.remarks
    assert "DEVICE float twice" in made.kernel and "float first()" in made.kernel and "cudaMalloc" not in made.kernel
    assert passes(tmp_path, made, num_streams=1)


def test_a_host_function_whose_arguments_cannot_be_followed_is_refused(tmp_path):
    text = SCALE + "void timed(float* x, int n) { float* y = make(x); scale<<<1, 64>>>(y, y, n); }\n"
    with pytest.raises(UsageError, match=r"a function of the host, whose text does not show which of them scale takes"):
        imported(tmp_path, "tune_kernel('timed', TEXT, n, [a, n], {'block_size_x': [64]})", text)


def test_a_template_kernel_becomes_the_instance_that_is_tuned(tmp_path):
    text = ADD.replace("__global__", "template <typename T, int BLOCK = 8, bool CHECK = true>\n__global__").replace(
        "float", "T").replace("block_size_x", "BLOCK").replace("if (", "if (CHECK && ")  # fmt: skip
    made = imported(tmp_path, CALL.replace('"add"', '"add<float, block_size_x>"'), text)
    assert "using T = float; constexpr int BLOCK = block_size_x; constexpr bool CHECK = true;" in made.kernel
    assert passes(tmp_path, made)


@pytest.mark.parametrize(
    "name, complaint",
    [
        ("add<>", "the template parameter `typename T` of add has no type or value in add<>"),
        ("sub<float>", "has no template kernel sub"),
        ("add<float", "cannot name a kernel"),
    ],
)
def test_a_template_that_is_none_is_refused(tmp_path, name, complaint):
    text = ADD.replace("__global__", "template <typename T>\n__global__")
    with pytest.raises(UsageError) as error:
        imported(tmp_path, CALL.replace('"add"', f'"{name}"'), text)
    assert complaint in str(error.value) and "\n" not in str(error.value)


def test_an_array_whose_type_is_tuned_has_the_first_type(tmp_path):
    text = ADD.replace("__global__", "template <typename T>\n__global__").replace("float", "T")
    arrays = ", ".join(f"TunablePrecision('real', {name}.astype(np.float64))" for name in "cab")
    call = (
        CALL.replace('"add"', '"add<real>"').replace("c, a, b", arrays).replace("{", "{'real': ['float', 'double'], ")
    )
    made = imported(tmp_path, call, text)
    assert {item["dtype"] for name, item in made.problem["inputs"].items() if name != "n"} == {"float32"}
    assert any("types other than float for real" in remark for remark in made.remarks)


COUNT = """__global__ void count(const unsigned char* image, unsigned* bins, long long n) {
    for (long long i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
        atomicAdd(&bins[image[i] % BINS], 1u);
}
"""
COUNTING = """
image, bins = np.random.randint(0, 256, n).astype(np.uint8), np.zeros(64, np.uint32)
options = ["-DBINS=64", "-std=c++20", "--use_fast_math"]
parameters = {"block_size_x": [64], "blocks": [2, 4]}
arguments = [image, bins, np.int64(n)]
tune_kernel("count", TEXT, "blocks", arguments, parameters, grid_div_x=[], compiler_options=options)
"""


def test_sizes_of_64_bits_bytes_and_options_of_the_compiler_are_taken(tmp_path):
    made = imported(tmp_path, COUNTING, COUNT)
    assert made.problem["axes"]["n"] == {"type": "var", "dtype": "int64"}
    assert made.problem["inout"] == ["bins"]
    assert made.problem["workloads"][0]["inputs"]["image"] == {"type": "integers", "low": 0, "high": 256}
    assert made.kernel.startswith("// --std=c++20\n#define BINS 64\n")
    assert "the compiler option --use_fast_math" in made.remarks
    assert passes(tmp_path, made, blocks=2)


def test_sizes_of_a_launch_are_those_of_the_tuner(tmp_path):
    """Along y a block divides the grid by default, a size that is not tuned is defined, and functions are formulas."""
    text = ADD.replace("block_size_x", "(block_size_x * wide * kernel_tuner * block_size_z)").replace(
        "{\n", "{\n    extern __shared__ float more[];\n", 1
    )
    call = (
        'tune_kernel("add", TEXT, lambda p: (n * 2, 8), [c, a, b, n], {"block_size_x": [64], "block_size_y": [2, 4]},'
        " grid_div_x=lambda p: p['block_size_x'] / 32, smem_args={'size': lambda p: 4 * p['block_size_x']},"
        " defines={'wide': lambda p: p['block_size_x'] // 64, 'block_size_x': 'block_size_x'}, restrictions=None)"
    )
    made = imported(tmp_path, call, text)
    write_folder(made, tmp_path / "add")
    config = {"family": "add", "block_size_x": 64, "block_size_y": 4, "block_size_z": 1}
    launch = load(tmp_path / "add")[1].launch(config)
    assert (launch.grid, launch.threads, launch.shared_bytes) == ((3000, 2, 1), 256, 256)
    assert "#define kernel_tuner 1\n#define wide (block_size_x / 64)\n" in made.kernel


def test_offsets_and_indices_are_drawn_as_the_script_has_them(tmp_path):
    text = """__global__ void spmv(float* y, int* rows, int* cols, float* values, float* x, int n) {
        int i = blockIdx.x * block_size_x + threadIdx.x;
        float sum = 0.0f;
        if (i < n) {
            for (int j = rows[i]; j < rows[i + 1]; j++) sum += values[j] * x[cols[j]];
            y[i] = sum;
        }
    }"""
    call = (
        "rows = np.concatenate([[0], np.sort(np.random.randint(0, 9000, n - 1)), [9000]]).astype(np.int32)\n"
        "cols = np.append(np.random.randint(0, n, 8998), [0, n - 1]).astype(np.int32)\n"
        "args = [c, rows, cols, np.random.randn(9000).astype(np.float32), a, n]\n"
        "tune_kernel('spmv', TEXT, n, args, {'block_size_x': [64, 128]})"
    )
    made = imported(tmp_path, call, text)
    inputs, draws = made.problem["inputs"], made.problem["workloads"][0]["inputs"]
    assert inputs["rows"]["shape"] == ["n + 1"] and inputs["values"]["shape"] == ["rows_end"]
    assert draws["rows"] == {"type": "indptr", "total": "rows_end"}
    assert draws["cols"] == {"type": "integers", "low": 0, "high": "n"}
    assert passes(tmp_path, made)


@pytest.mark.parametrize(
    "call, complaint",
    [
        (CALL.replace("}", "}, texmem_args={'tex': a}"), "passes textures (texmem_args), and CUDA has had no texture"),
        (CALL.replace("}", "}, lang='OpenCL'"), "tunes a kernel in OpenCL; evoengine takes CUDA"),
        (CALL.replace("[c", "[c[:0]"), "the argument c is an array of no elements; where its size is calculated"),
        (
            CALL.replace("}", "}, defines={'x': lambda p: open(p)}"),
            "the value of 'x' in defines is not text, number or",
        ),
        (CALL.replace("TEXT", "'#include \"../up.cuh\"\\n' + TEXT"), "an include of"),
    ],
)
def test_what_cannot_be_taken_is_refused_in_one_sentence(tmp_path, call, complaint):
    with pytest.raises(UsageError) as error:
        imported(tmp_path, call)
    assert complaint in str(error.value) and "\n" not in str(error.value)


def test_files_beside_a_kernel_take_the_place_of_their_includes(tmp_path):
    (tmp_path / "once.cuh").write_text('#pragma once\n#include "deep.cuh"\nint once;\n')
    (tmp_path / "deep.cuh").write_text("int deep;\n")
    text = '#include "once.cuh"\n// #include "none.cuh"\n#include <cuda_fp16.h>\n#include "once.cuh"\n'
    found = with_includes(text, tmp_path, tmp_path, "it")
    assert found.count("int deep;") == found.count("int once;") == 1 and "#include <cuda_fp16.h>" in found


@pytest.mark.parametrize(
    "files, complaint",
    [
        ({"a.cuh": '#include "a.cuh"\n'}, "includes a.cuh within itself"),
        ({"a.cuh": '#include "b.cuh"\n', "b.cuh": '#include "a.cuh"\n'}, "within itself"),
        ({"a.cuh": '#include "b.cuh"\n' * 600, "b.cuh": '#include "c.cuh"\n' * 600, "c.cuh": "int x;\n" * 90}, "MiB"),
        ({}, "includes a file that is not beside it"),
        ({"a.cuh": b"\xff"}, "it is not UTF-8 text"),
    ],
)
def test_includes_that_do_not_end_are_refused(tmp_path, files, complaint):
    for name, text in files.items():
        (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UsageError, match=complaint):
        with_includes('#include "a.cuh"\n', tmp_path, tmp_path, "it")


def test_headers_of_cub_are_named_one_by_one_and_those_of_hip_are_dropped():
    remarks: list[str] = []
    text = (
        '#include <cub/cub.cuh>\n#include "hip/hip_runtime.h"\n#include <hip/hip_fp16.h>\n'
        "cub::BlockReduce<int, 8> x; cub::WarpScan<int> y;\n"
    )
    found = device_code(text, remarks)
    assert re.findall("include (.*)", found) == ["<cub/block/block_reduce.cuh>", "<cub/warp/warp_scan.cuh>"]
    assert remarks == ["the include <hip/hip_fp16.h>, which NVRTC does not have"]


@pytest.mark.parametrize(
    "text", ["void f() {", "}}} void f() { g<<<1, 2>>>(", "template <", "#define X {\nint f() {\n"]
)
def test_text_with_unbalanced_brackets_is_left_alone(text):
    assert device_code(text, []) == text
    host_launch("f", text)
    instantiated(text, "f", "it")
