"""Kernels of others become one text each, of which nothing but what the host runs is left out."""

from __future__ import annotations

import pytest

from benchmarks.foreign_kernels import FLASHINFER, THUNDERKITTENS, standing_alone, without_host, write
from evoengine.devices.base import StructArgument
from evoengine.errors import UsageError
from evoengine.workloads.folder import load_folder


def test_headers_of_a_checkout_stand_in_the_place_of_their_includes(tmp_path):
    (tmp_path / "include/deep").mkdir(parents=True)
    (tmp_path / "include/once.h").write_text('#pragma once\n#include "deep/each.h"\nint once;\n')
    (tmp_path / "include/guarded.h").write_text("#ifndef GUARD\n#define GUARD\nint guarded;\n#endif\n")
    (tmp_path / "include/deep/each.h").write_text('#include "../guarded.h"\n#include <cuda_bf16.h>\nint each;\n')
    text = '#include "once.h"\n#include "deep/each.h"\n#include "once.h"\n#include "elsewhere.h"\n'
    found = standing_alone(text, tmp_path, [tmp_path / "include"])
    assert [found.count(word) for word in ("int once;", "int guarded;", "int each;", "<cuda_bf16.h>")] == [1, 1, 2, 2]
    assert '"elsewhere.h"' in found and "once.h" not in found


def test_functions_of_the_host_are_left_out_and_nothing_else():
    device = "template <int N>\n__global__ void kernel(float* x) { if (N) { x[0] = 1; } }\n"
    host = "template <int N>\ncudaError_t launch(float* x) { for (;;) { kernel<N><<<1, 1>>>(x); } return {}; }"
    assert without_host(f"{device}{host}\n{device}").split() == f"{device}{device}".split()


@pytest.mark.parametrize(
    ("foreign", "sizes"),
    [(THUNDERKITTENS, "m=64,n=256,k=64"), (FLASHINFER, "batch=4,pages=3,kv_heads=1")],
    ids=["thunderkittens", "flashinfer"],
)
def test_what_the_folders_say_is_read_and_sizes_that_a_kernel_does_not_take_are_refused(tmp_path, foreign, sizes):
    workload = load_folder(write(foreign, tmp_path, "// the text is not looked at here\n"))
    (struct,) = foreign.problem["structs"].values()
    passed = workload.parameters(workload.parse(workload.example), {})[0]
    assert isinstance(passed, StructArgument) and passed.bytes == struct["bytes"]
    with pytest.raises(UsageError, match="breaks the constraint"):
        workload.parse(f"{foreign.problem['name']}:{sizes}")
