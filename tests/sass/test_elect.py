"""ELECT, which names one lane of those that execute."""

from __future__ import annotations

import numpy as np
import pytest

from evoengine.devices.base import TensorArgument
from evoengine.records import Launch, Source
from evoengine.sass.core import Program, run
from evoengine.sass.cubin import read_kernel
from evoengine.sass.launch import Geometry, prepare
from evoengine.stages.compile import compile_source
from tests.support.machine_code import ENTRY, LIMIT, require_tools

TEXT = """
extern "C" __global__ void kernel(int* out) {
    unsigned chosen;
    asm volatile("{\\n.reg .pred p;\\nelect.sync _|p, 0xffffffff;\\nselp.u32 %0, 1, 0, p;\\n}" : "=r"(chosen));
    out[threadIdx.x] = chosen;
}
"""


@pytest.mark.parametrize("members", ["PT", "~URZ"])
def test_one_lane_of_a_warp_is_elected_however_the_toolkit_writes_all_lanes(members):
    """Older ones write a mask in a uniform register, as in the binaries of FlashAttention-3's backward pass."""
    require_tools()
    binary = compile_source(Source(TEXT, ENTRY, Launch((1, 1, 1), 64, 0)), "sm_90a")
    (line,) = (one for one in binary.listing.splitlines() if "ELECT" in one)
    listing = binary.listing.replace(line, line.replace(", PT", f", {members}"))
    assert members in next(one for one in listing.splitlines() if "ELECT" in one)
    out = TensorArgument("out", np.full(64, -1, np.int32), output=True)
    launch = prepare(read_kernel(binary.cubin, ENTRY), Geometry((1, 1, 1), (64, 1, 1), 0), [out], 0)
    run(Program(listing, ENTRY), launch, limit=LIMIT)
    assert launch.results()["out"].reshape(2, 32).sum(1).tolist() == [1, 1]
