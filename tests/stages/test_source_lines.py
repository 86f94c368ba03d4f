"""What the executor says of an instruction names the line of the source, without a line table in the binary."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from evoengine.devices.base import KernelCall, KernelCrashed, TensorArgument
from evoengine.records import CompiledCandidate, Launch, Source
from evoengine.stages import gate
from evoengine.stages.compile import compile_source, name_source_lines
from tests.support.exhaustive import more

LINES = [
    "__device__ int over_block(int value) {",
    "    __shared__ int held[128];",
    "    held[threadIdx.x] = value;",  # 3: written again, while others still read what the first call left
    "    __syncthreads();",
    "    return held[127 - threadIdx.x];",  # 5
    "}",
    'extern "C" __global__ void kernel(const int* a, int* o) {',
    "    int once = over_block(a[threadIdx.x]);",  # 8
    "    o[threadIdx.x] = over_block(once + 1);",  # 9
    "}",
]
SOURCE = Source("\n".join(LINES), "kernel", Launch((1, 1, 1), 128, 0))
PLACES = {"kernel.cu:3, called in line 9", "kernel.cu:5, called in line 8"}


@pytest.fixture(scope="module", params=["sm_90a", *more(["sm_75", "sm_80", "sm_89"])])
def binary(request):
    return compile_source(SOURCE, request.param)


def test_a_race_names_the_lines_of_both_places(binary):
    contender = CompiledCandidate(1, SOURCE, binary)
    arguments = [
        TensorArgument("a", np.zeros(128, np.int32)),
        TensorArgument("o", np.zeros(128, np.int32), output=True),
    ]
    with pytest.raises(KernelCrashed, match="nothing orders the two") as failure:
        gate.executor(contender).run([[KernelCall("kernel", SOURCE.launch, arguments)]], 0)
    assert set(re.findall(r"at 0x[0-9a-f]+ \(([^)]+)\)", str(failure.value))) == PLACES


def test_a_message_without_an_instruction_is_left_alone(binary):
    for message in ("out: 3 of 4 elements are wrong", "lane 0: load of 4 bytes at 0x10 of 8"):
        assert name_source_lines(message, SOURCE, binary) == message


def test_lines_of_other_machine_code_are_not_named(binary):
    message = "kernel kernel, block (0, 0, 0), warp 1, at 0x50: LDS R0, [R1]: lane 0 reads"
    assert "(kernel.cu:" in name_source_lines(message, SOURCE, binary)
    other = replace(SOURCE, text=SOURCE.text.replace("once + 1", "once * 3"))
    assert name_source_lines(message, other, binary) == message
    assert name_source_lines(message, replace(SOURCE, text="#error gone"), binary) == message


def test_an_instruction_of_a_header_is_named_by_the_line_that_calls_it():
    text = """#include <cuda_fp16.h>
extern "C" __global__ void kernel(__half* a) {
    a[0] = hsin(a[1]);
}
"""
    source = Source(text, "kernel", Launch((1, 1, 1), 32, 0))
    binary = compile_source(source, "sm_90a")
    message = ", ".join(f"at {at:#x}" for at in range(0, 0x100, 16))
    named = re.findall(r"\((.+?)\)", name_source_lines(message, source, binary))
    assert set(named) <= {f"kernel.cu:{n}" for n in (2, 3, 4)} and named.count("kernel.cu:3") > 8
