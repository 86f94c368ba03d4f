"""The executor gives the bits that an H100 gave.

data/h100_bits.npz has kernels of benchmarks/hardware_probes.py with a part of their inputs, and what they left in
memory as measured on an H100 (SXM, driver 580.159.04), 2026-11-26. Of elementwise instructions it has 32 inputs, first
of all those in which the executor erred then; of matrix products the sets of inputs that cancel or have special values.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evoengine.devices.base import ScalarArgument, TensorArgument
from evoengine.sass.core import Program, run
from evoengine.sass.cubin import read_kernel
from evoengine.sass.launch import Geometry, HostMemory, prepare
from evoengine.sass.listing import disassemble
from tests.support.machine_code import require_tools

FILE = Path(__file__).parent / "data" / "h100_bits.npz"
ENTRY = "kernel"


@cache
def measured() -> dict[str, np.ndarray]:
    with np.load(FILE) as found:
        return dict(found)


CASES: list[dict[str, Any]] = json.loads(measured()["index"].tobytes())


def executed(number: int, arch: int = 90) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return what the GPU and what the executor, as a GPU of compute capability `arch`, left in each output."""
    require_tools()
    case, data = CASES[number], measured()
    memory: dict[str, Any] = {}
    for name, role in case["roles"].items():
        stored = data[f"{number}|{name}"]
        before = data.get(f"{number}|{name}.before", np.full_like(stored, 0xFF))
        memory[name] = TensorArgument(name, stored) if role == "in" else HostMemory(name, before.copy())
    arguments = [memory[a["buffer"]] if "buffer" in a else scalar(a["scalar"]) for a in case["arguments"]]
    cubin = data[case["cubin"]].tobytes()
    geometry = Geometry(tuple(case["grid"]), tuple(case["block"]), case["shared"])
    launch = prepare(read_kernel(cubin, ENTRY), geometry, arguments, seed=1)
    launch.structure.arch = arch
    program = Program(disassemble(cubin), ENTRY)
    assert not program.unknown
    run(program, launch)
    outputs = [name for name, role in case["roles"].items() if role != "in"]
    return {n: data[f"{number}|{n}"] for n in outputs}, {n: memory[n].data for n in outputs}


def scalar(text: str) -> ScalarArgument:
    value = bytes.fromhex(text)
    return ScalarArgument("scalar", np.frombuffer(value, f"<u{len(value)}")[0])


@pytest.mark.parametrize("number", range(len(CASES)), ids=[case["id"] for case in CASES])
def test_the_executor_gives_the_bits_that_an_h100_gave(number):
    gpu, executor = executed(number)
    for name, bits in gpu.items():
        np.testing.assert_array_equal(executor[name], bits, err_msg=name)


def test_products_keep_a_bit_more_than_those_of_older_gpus():
    number = next(n for n, case in enumerate(CASES) if case["id"] == "mma m16n8k16 f32.f16.f16")
    gpu, older = executed(number, arch=80)
    assert (gpu["o"] != older["o"]).any()
