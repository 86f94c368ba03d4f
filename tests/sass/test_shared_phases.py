"""What accesses of 8 and 16 bytes a lane cost: the banks serve a warp in phases of half and quarter warps.

A quarter warp that asks for 128 bytes takes one clock, whatever other quarters ask for; two are served together where
lanes ask for the same in pairs.
"""

from __future__ import annotations

import pytest

from evoengine.accuracy.compilers import InstalledNvrtc
from evoengine.sass.chip import find_chip
from evoengine.sass.core import Program
from evoengine.sass.cubin import read_kernel
from evoengine.sass.launch import DrawnArgument, Geometry, prepare
from evoengine.sass.listing import disassemble
from evoengine.sass.model import count_block
from evoengine.sass.predict import predict
from tests.support.machine_code import require_tools

KERNEL = """
extern "C" __global__ void reads(float* out) {{
  __shared__ {dtype} held[1024];
  for (int i = threadIdx.x; i < 1024; i += 32) held[i] = {dtype}{{}};
  __syncthreads();
  int lane = threadIdx.x;
  float sum = 0;
  #pragma unroll 1
  for (int round = 0; round < {rounds}; round++) {{
    {dtype} got = held[({index} + round) & 1023];
    sum += {sum};
  }}
  out[lane] = sum;
}}
"""
ROUNDS = 64
SUMS = {"float": "got", "float2": "got.x + got.y", "float4": "got.x + got.y + got.z + got.w"}


def launch_of(dtype: str, index: str):
    require_tools()
    text = KERNEL.format(dtype=dtype, index=index, rounds=ROUNDS, sum=SUMS[dtype])
    cubin = InstalledNvrtc().compile(text, "sm_86", ())
    kernel = read_kernel(cubin, "reads")
    launch = prepare(kernel, Geometry((1, 1, 1), (32, 1, 1)), [DrawnArgument("out", 128, "fp32", True)], 0)
    return Program(disassemble(cubin), "reads"), launch


def wavefronts(dtype: str, index: str) -> float:
    """Return those of one load, by what `index` adds to reads that all lanes do at one place."""
    counted = [count_block(*launch_of(dtype, i), 0, 10**6)["wavefronts"] for i in (index, "0")]
    one_place = {"float": 1, "float2": 1, "float4": 2}[dtype]
    return (counted[0] - counted[1]) / ROUNDS + one_place


@pytest.mark.parametrize(
    ("dtype", "index", "expected"),
    [
        ("float", "lane", 1),
        ("float", "2 * lane", 2),
        ("float2", "lane", 2),
        ("float2", "lane / 2", 1),
        ("float4", "lane", 4),
        ("float4", "lane % 8", 4),
        ("float4", "lane / 8", 2),
        ("float4", "4 * (lane % 8)", 16),
    ],
)
def test_wavefronts_of_a_load_by_what_its_lanes_ask_for(dtype, index, expected):
    assert wavefronts(dtype, index) == pytest.approx(expected, abs=0.2)


def test_wide_loads_of_a_column_take_as_long_as_the_narrow_loads_they_stand_for():
    chip = find_chip("rtx3090")
    columns = (("float", "16 * (lane % 8)"), ("float4", "4 * (lane % 8)"))
    narrow, wide = (predict(*launch_of(dtype, index), chip).clocks for dtype, index in columns)
    assert wide > 1.2 * narrow
