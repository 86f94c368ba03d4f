"""Kernels that somebody brings in a folder, as plain CUDA with #define knobs: rendered, gated, and their faults
seen."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from evoengine.errors import UsageError
from evoengine.paths import asset
from evoengine.records import Outcome
from evoengine.sass.cubin import kernel_names
from evoengine.stages.compile import CompileFailed, compile_source
from evoengine.stages.render import fill, inert_knobs
from evoengine.tuning.boards import Choice
from evoengine.tuning.search import _announce
from tests.support.folders import (
    SAXPY,
    SAXPY_CONFIG,
    SAXPY_KERNEL,
    SAXPY_SPACE,
    gate,
    load,
    rendered,
    saxpy,
    write,
)  # fmt: skip

# A kernel in the style of the auto-tuners' benchmarks: two-dimensional blocks, tiles in shared memory, sizes and knobs
# as macros, and its filter in constant memory.
FILTER = """extern "C" {
#define height 512
#define width 512
#define radius 2
#ifndef block_size_x
    #define block_size_x 16
#endif
#ifndef block_size_y
    #define block_size_y 16
#endif
#ifndef tile_x
    #define tile_x 1
#endif
#if padded == 1
#define PITCH (block_size_x * tile_x + 2 * radius + 1)
#else
#define PITCH (block_size_x * tile_x + 2 * radius)
#endif

__constant__ float weights_in_constant_memory[25];

__global__ void filter(float* out, const float* in, const float* weights) {
    __shared__ float tile[block_size_y + 2 * radius][PITCH];
    const int x0 = blockIdx.x * block_size_x * tile_x, y0 = blockIdx.y * block_size_y;
    for (int y = threadIdx.y; y < block_size_y + 2 * radius; y += blockDim.y)
        for (int x = threadIdx.x; x < block_size_x * tile_x + 2 * radius; x += blockDim.x)
            if (y0 + y < height + 2 * radius && x0 + x < width + 2 * radius)
                tile[y][x] = in[(y0 + y) * (width + 2 * radius) + x0 + x];
    __syncthreads();
    for (int t = 0; t < tile_x; t++) {
        const int x = threadIdx.x + t * block_size_x;
        float sum = 0.0f;
        for (int i = 0; i <= 2 * radius; i++)
            for (int j = 0; j <= 2 * radius; j++)
                sum += tile[threadIdx.y + i][x + j] * weights_in_constant_memory[i * (2 * radius + 1) + j];
        if (y0 + threadIdx.y < height && x0 + x < width) out[(y0 + threadIdx.y) * width + x0 + x] = sum;
    }
}
}
"""
FILTER_PROBLEM = {
    "name": "filter",
    "axes": {
        "height": {"type": "var"}, "width": {"type": "var"}, "radius": {"type": "const", "value": 2},
        "padded_height": {"type": "expr", "expression": "height + 2 * radius"},
        "padded_width": {"type": "expr", "expression": "width + 2 * radius"}, "taps": {"type": "expr", "expression": "2 * radius + 1"},
    },
    "compile_time": ["height", "width"],
    "inputs": {
        "in": {"shape": ["padded_height", "padded_width"], "dtype": "float32"},
        "weights": {"shape": ["taps", "taps"], "dtype": "float32"},
    },
    "outputs": {"out": {"shape": ["height", "width"], "dtype": "float32"}},
    "parameters": ["out", "in", "weights"],
    "constants": {"weights_in_constant_memory": "weights"},
    "workloads": [{"axes": {"height": 45, "width": 70}}],
    "flops": "2 * height * width * taps * taps",
}  # fmt: skip
BY_TORCH = """from torch.nn.functional import conv2d

def run(image, weights):
    return conv2d(image[None, None], weights[None, None])[0, 0]
"""
BY_NUMPY = """import numpy as np

def run(image, weights):
    taps, (height, width) = len(weights), image.shape
    out = np.zeros((height - taps + 1, width - taps + 1), image.dtype)
    for i in range(taps):
        for j in range(taps):
            out += weights[i, j] * image[i : i + out.shape[0], j : j + out.shape[1]]
    return out
"""
FILTER_SPACE = """kernel = "filter"
[knobs]
block_size_x = [8, 16, 32]
block_size_y = [2, 4, 8]
tile_x = [1, 2, 3]
padded = [false, true]
[launch]
threads = ["block_size_x", "block_size_y", 1]
grid = ["ceil_div(width, block_size_x * tile_x)", "ceil_div(height, block_size_y)", 1]
shared = 0
"""
FILTER_CONFIG = {
    "family": "filter", "block_size_x": 16, "block_size_y": 4, "tile_x": 2, "padded": True,
}  # fmt: skip


@pytest.mark.parametrize("reference", [BY_TORCH, BY_NUMPY], ids=["torch", "numpy"])
def test_a_plain_kernel_of_the_tuners_kind_is_gated_against_a_reference(tmp_path, reference):
    folder = write(tmp_path, FILTER_PROBLEM | {"reference": reference}, FILTER_SPACE, FILTER)
    verdict = gate(folder, FILTER_CONFIG)
    assert verdict.correct, verdict.reason
    assert all(case.problem == "filter:height=45,width=70" for case in verdict.cases)


@pytest.mark.parametrize(
    "right, wrong",
    [
        ("i <= 2 * radius", "i < 2 * radius"),
        ("    __syncthreads();\n", ""),
        ("x0 + x < width) out", "x0 + x < width - 1) out"),
        ("+ t * block_size_x", "+ t * block_size_x + (t == 1)"),
        ("sum += tile", "sum += (i == 2 && j == 2 ? 1.001f : 1.0f) * tile"),
    ],
    ids=["a row short", "no barrier", "last column", "shifted tile", "a weight one part in a thousand off"],
)
def test_a_fault_planted_in_it_is_seen(tmp_path, right, wrong):
    assert right in FILTER
    folder = write(tmp_path, FILTER_PROBLEM | {"reference": BY_TORCH}, FILTER_SPACE, FILTER.replace(right, wrong))
    found = gate(folder, FILTER_CONFIG)
    assert getattr(found, "outcome", None) in (Outcome.INCORRECT, Outcome.CRASHED)


def test_a_constant_variable_that_nothing_fills_is_seen(tmp_path):
    folder = write(tmp_path, FILTER_PROBLEM | {"reference": BY_TORCH, "constants": {}}, FILTER_SPACE, FILTER)
    assert gate(folder, FILTER_CONFIG).outcome is Outcome.INCORRECT


def test_a_plain_kernel_with_free_sizes_meets_tails(tmp_path):
    assert gate(saxpy(tmp_path), SAXPY_CONFIG).correct
    tail_lost = SAXPY_KERNEL.replace("if (i < n)", "if (i < n / 4 * 4)")
    wrong = gate(saxpy(tmp_path / "wrong", kernel=tail_lost), SAXPY_CONFIG)
    assert wrong.outcome is Outcome.INCORRECT
    only_whole = gate(saxpy(tmp_path / "whole", kernel=tail_lost, constraints=["n % 4 == 0"]), SAXPY_CONFIG)
    assert only_whole.correct


def test_knobs_take_the_place_of_the_files_own_values_whatever_their_form(tmp_path):
    text = rendered(saxpy(tmp_path), SAXPY_CONFIG).text
    assert "#define per_thread 2\n" in text and "#define per_thread 8" not in text
    assert "#define block_size_x 64\n" in text
    before, after = text.split("#line 1\n")
    assert len(after.splitlines()) == len(SAXPY_KERNEL.splitlines())


@pytest.mark.parametrize(
    "spelled", ["#define per_thread 8", "  #  define per_thread \\\n  8", "#undef per_thread\n#define per_thread (4+4)"]
)
def test_a_definition_is_left_out_in_every_spelling(tmp_path, spelled):
    kernel = SAXPY_KERNEL.replace("#define per_thread 8", spelled)
    assert kernel.count("per_thread") >= 3
    assert gate(saxpy(tmp_path, kernel=kernel), SAXPY_CONFIG).correct


def test_a_macro_with_arguments_of_a_longer_name_stays(tmp_path):
    kernel = SAXPY_KERNEL.replace(
        "#define per_thread 8", "#define per_thread 8\n#define per_thread_of(k) ((k) * per_thread)"
    )
    text = rendered(saxpy(tmp_path, kernel=kernel), SAXPY_CONFIG).text
    assert "#define per_thread_of(k) ((k) * per_thread)" in text


def test_a_knob_that_the_kernel_ignores_is_named(tmp_path):
    space_text = SAXPY_SPACE.replace("[launch]", "unused = [1, 2]\n[launch]")
    target, space = load(saxpy(tmp_path, space=space_text))
    configs = [SAXPY_CONFIG | {"unused": 1}]
    assert inert_knobs(target, space, configs, asset("templates")) == ("unused",)
    commented = saxpy(tmp_path / "commented", kernel=SAXPY_KERNEL + "// unused\n", space=space_text)
    assert inert_knobs(*load(commented), configs, asset("templates")) == ("unused",)


def test_a_search_names_it_where_the_space_has_no_start_points(tmp_path):
    target, space = load(saxpy(tmp_path, space=SAXPY_SPACE.replace("[launch]", "unused = [1, 2]\n[launch]")))
    assert space.starts == ()
    setting = SimpleNamespace(
        target=target,
        space=space,
        templates=asset("templates"),
        sampler="evolution",
        seed=1,
        jobs=1,
        timed=False,
        fill=fill,
    )
    said: list[str] = []
    _announce(setting, Choice(setting.target.gpu), None, None, "ledger", 1, said.append)
    assert [line.split()[1] for line in said if line.startswith("inert: ")] == ["unused"]


def test_a_template_that_ignores_every_knob_is_named_for_all_of_them(tmp_path):
    kernel = 'extern "C" __global__ void saxpy(const float* x, const float* y, float a, float* out, int n) {}\n'
    fixed = SAXPY_SPACE.replace('threads = "block_size_x"', "threads = 64").replace("block_size_x * per_thread", "64")
    folder = write(tmp_path, SAXPY, fixed, kernel, file="saxpy.cu.j2")
    assert inert_knobs(*load(folder), [SAXPY_CONFIG], asset("templates")) == ("block_size_x", "per_thread")


def test_a_knob_of_the_launch_alone_makes_another_kernel(tmp_path):
    kernel = SAXPY_KERNEL.replace("block_size_x", "blockDim.x").replace(
        "#ifndef blockDim.x\n#define blockDim.x 256\n#endif\n", ""
    )
    folder = saxpy(tmp_path, kernel=kernel)
    small, large = (rendered(folder, {**SAXPY_CONFIG, "block_size_x": n}) for n in (32, 128))
    assert small.text != large.text
    assert inert_knobs(*load(folder), [SAXPY_CONFIG], asset("templates")) == ()


def test_both_a_template_and_a_plain_file_are_one_too_many(tmp_path):
    folder = saxpy(tmp_path)
    (folder / "saxpy.cu.j2").write_text(SAXPY_KERNEL)
    with pytest.raises(UsageError, match=r"there are both .*saxpy\.cu and saxpy\.cu\.j2"):
        rendered(folder, SAXPY_CONFIG)


def test_a_folder_without_a_kernel_says_what_it_looked_for(tmp_path):
    folder = saxpy(tmp_path)
    (folder / "saxpy.cu").unlink()
    with pytest.raises(UsageError, match=r"there is no template .*saxpy\.cu\.j2"):
        rendered(folder, SAXPY_CONFIG)


def test_an_entry_without_extern_c_is_found_by_the_name_that_cpp_gives_it(tmp_path):
    source = rendered(saxpy(tmp_path, kernel=SAXPY_KERNEL.replace('extern "C" ', "")), SAXPY_CONFIG)
    assert kernel_names(compile_source(source, "sm_90a").cubin) == ["saxpy"]


def test_an_entry_that_is_not_there_fails_as_it_is_compiled(tmp_path):
    source = rendered(saxpy(tmp_path, kernel=SAXPY_KERNEL.replace("saxpy", "other")), SAXPY_CONFIG)
    with pytest.raises(CompileFailed) as error:
        compile_source(source, "sm_90a")
    assert "has no kernel named saxpy: it has other" in str(error.value)


def test_a_space_of_one_family_needs_no_name_for_it(tmp_path):
    _, space = load(saxpy(tmp_path))
    assert space.families == ("saxpy",)
    assert len(space) == 9
    assert space.contains(SAXPY_CONFIG)
