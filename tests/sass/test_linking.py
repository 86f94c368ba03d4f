"""Addresses that a driver puts into code: of device variables, and of functions in sections of their own."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import pytest

from evoengine.cuda_files import assembler
from evoengine.devices.base import TensorArgument
from evoengine.sass.core import Program, run
from evoengine.sass.cubin import read_kernel
from evoengine.sass.launch import Geometry, prepare
from evoengine.sass.listing import disassemble, linked_listing
from tests.support.machine_code import require_tools

# relocatable code, as nvcc -rdc makes it: the function is called, and the table addressed, by relocations
PTX = """
.version 8.0
.target sm_90
.address_size 64
.global .align 4 .b8 table[16] = {1, 0, 0, 0, 20, 0, 0, 0, 44, 1, 0, 0, 160, 15, 0, 0};
.func (.param .b32 result) tripled(.param .b32 x) {
  .reg .b32 %r<3>;
  ld.param.b32 %r1, [x]; mul.lo.s32 %r2, %r1, 3; st.param.b32 [result], %r2; ret;
}
.visible .entry chosen(.param .u64 out) {
  .reg .b32 %r<5>; .reg .b64 %rd<8>;
  mov.u32 %r1, %tid.x; and.b32 %r2, %r1, 3; mul.wide.u32 %rd1, %r2, 4;
  mov.u64 %rd2, table; add.s64 %rd3, %rd2, %rd1; ld.global.u32 %r3, [%rd3];
  { .param .b32 a; .param .b32 b; st.param.b32 [a], %r3; call.uni (b), tripled, (a); ld.param.b32 %r4, [b]; }
  ld.param.u64 %rd4, [out]; cvta.to.global.u64 %rd5, %rd4; mul.wide.u32 %rd6, %r1, 4; add.s64 %rd7, %rd5, %rd6;
  st.global.u32 [%rd7], %r4; ret;
}
"""


@pytest.fixture
def cubin(tmp_path: Path) -> bytes:
    require_tools()
    tool = assembler()
    if tool is None:
        pytest.skip("needs ptxas")
    (tmp_path / "k.ptx").write_text(PTX)
    made = tmp_path / "k.cubin"
    subprocess.run([tool, "-c", "-arch=sm_90", "-o", made, tmp_path / "k.ptx"], check=True)
    return made.read_bytes()


def test_code_gets_the_addresses_of_tables_and_functions(cubin):
    assert Program(disassemble(cubin), "chosen").unknown
    kernel, program = read_kernel(cubin, "chosen"), Program(linked_listing(cubin, "chosen"), "chosen")
    assert not program.unknown
    out = TensorArgument("out", np.empty(32, np.int32), output=True)
    launch = prepare(kernel, Geometry((1, 1, 1), (32, 1, 1)), [out], 0)
    run(program, launch)
    assert launch.results()["out"].tolist() == [3, 60, 900, 12000] * 8
