"""What the model makes of mma.sync kernels: matrix loads have a rate of their own."""

from __future__ import annotations

from dataclasses import replace

import pytest

from evoengine.devices.base import TensorParameter
from evoengine.sass.chip import find_chip
from evoengine.sass.core import Program
from evoengine.sass.cubin import read_kernel
from evoengine.sass.launch import DrawnArgument, prepare
from evoengine.sass.predict import predict
from evoengine.stages.compile import compile_source
from tests.support.kernel_gate import KernelGate
from tests.support.machine_code import require_tools

START = {"family": "mma", "stages": 1, "tile_m": 128, "tile_n": 64, "warps": 4}


@pytest.fixture(scope="module")
def time_with():
    """Microseconds predicted on an A100 with some rates replaced: one block on each SM, one warp on each sub-core."""
    require_tools()
    gate = KernelGate("b1,h27,s512,d128,fp16", "a100")
    config = gate.start(START)
    source = gate.source(config)
    binary = compile_source(source, "sm_80")
    program, chip = Program(binary.listing, source.entry), find_chip("a100")
    arguments = [
        DrawnArgument(p.name, p.bytes, p.dtype, p.output) if isinstance(p, TensorParameter) else p
        for p in gate.target.workload.parameters(gate.problem, config)
    ]
    launch = prepare(read_kernel(binary.cubin, source.entry), source.launch, arguments, seed=0)
    return lambda **rates: predict(program, launch, replace(chip, rates={**chip.rates, **rates})).time_us


def test_slower_matrix_loads_make_the_kernel_slower(time_with):
    assert time_with(matrix_wavefront_clocks=3.0) > 1.2 * time_with()


def test_other_loads_from_shared_memory_are_few_in_it(time_with):
    assert time_with(wavefront_clocks=3.0) == pytest.approx(time_with(), rel=0.05)
