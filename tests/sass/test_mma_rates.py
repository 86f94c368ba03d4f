"""What the model makes of mma.sync kernels: matrix loads have a rate of their own."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from evoengine.devices.base import ScalarArgument, TensorParameter
from evoengine.records import Launch, Source
from evoengine.sass.chip import find_chip
from evoengine.sass.core import Program
from evoengine.sass.cubin import read_kernel
from evoengine.sass.launch import DrawnArgument, prepare
from evoengine.sass.predict import predict
from evoengine.stages.compile import compile_source
from tests.support.exhaustive import more
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


# ── kinds of products ───────────────────────────────────────────────────────────────────────────────────────────────

KINDS = {
    "f32.f16.f16.f32": ("m16n8k16", "float", 4, 4, 2),
    "f16.f16.f16.f16": ("m16n8k16", "unsigned", 2, 4, 2),
    "f32.tf32.tf32.f32": ("m16n8k8", "float", 4, 4, 2),
    "s32.s8.s8.s32": ("m16n8k32", "int", 4, 4, 2),
    "half the depth f32.f16.f16.f32": ("m16n8k8", "float", 4, 2, 1),
}
"""types → shape, type and registers of the sums, registers of both operands"""
PEAKS = {
    "rtx3090": (71, 142, 35.6, 284, 71),  # NVIDIA, Ampere GA102 whitepaper, table 3, dense
    "rtx4070ti": (80.2, 160.4, 40.1, 320.7, 80.2),  # Ada whitepaper, appendix, by its SMs and clock
    "a100": (312, 312, 156, 624, 312),  # A100 whitepaper, table 1, dense
    "a6000": (154.8, 154.8, 77.4, 309.7, 154.8),  # RTX A6000 datasheet
}
"""TFLOPS and TOPS by kind, on the data sheet"""
CHAINS, STEPS, BLOCKS = 4, 512, 528


@pytest.mark.parametrize("gpu", ["rtx3090", *more(name for name in PEAKS if name != "rtx3090")])
@pytest.mark.parametrize("kind", range(len(KINDS)), ids=KINDS)
def test_each_kind_of_product_reaches_the_rate_of_the_data_sheet(kind, gpu):
    require_tools()
    types, (shape, sum_type, sums, left, right) = list(KINDS.items())[kind]
    chip = find_chip(gpu)
    letter = "f" if sum_type == "float" else "r"
    numbers = iter(range(sums + left + right))
    out, one, two = ("{" + ", ".join(f"%{next(numbers)}" for _ in range(count)) + "}" for count in (sums, left, right))
    instruction = f"mma.sync.aligned.{shape}.row.col.{types.split()[-1]} {out}, {one}, {two}, {out};"
    operands = ", ".join(f'"r"(a[{i}])' for i in range(left + right))
    results = [", ".join(f'"+{letter}"(c[{n}][{i}])' for i in range(sums)) for n in range(CHAINS)]
    products = "".join(f'asm volatile("{instruction}" : {of_chain} : {operands});\n' for of_chain in results)
    source = Source(
        f"""extern "C" __global__ void multiply({sum_type}* o, int steps) {{
            {sum_type} c[{CHAINS}][{sums}] = {{}}; unsigned a[6] = {{threadIdx.x, 1, 2, 3, 4, 5}};
            for (int i = 0; i < steps; i++) {{ {products} }}
            for (int i = 0; i < {CHAINS * sums}; i++) o[blockIdx.x * 256 + threadIdx.x] += c[i / {sums}][i % {sums}];
        }}""",
        "multiply", Launch((BLOCKS, 1, 1), 256, 0),
    )  # fmt: skip
    binary = compile_source(source, chip.gpu.arch)
    arguments = [DrawnArgument("o", 4 * 256 * BLOCKS, "fp32", True), ScalarArgument("steps", np.int32(STEPS))]
    launch = prepare(read_kernel(binary.cubin, "multiply"), source.launch, arguments, 0)
    m, n, k = map(int, re.findall(r"\d+", shape))
    operations = 2 * m * n * k * CHAINS * STEPS * 8 * BLOCKS
    found = predict(Program(binary.listing, "multiply"), launch, chip, flops=operations)
    full_waves = BLOCKS / (chip.sms * -(-BLOCKS // chip.sms))
    assert operations / found.time_us / 1e6 == pytest.approx(PEAKS[gpu][kind] * full_waves, rel=0.1)


@pytest.mark.parametrize(
    ("shape", "types", "peak"),
    [("m64n8k16", "f32.f16.f16", 989.4), ("m64n8k32", "f32.e4m3.e4m3", 1978.8), ("m64n8k32", "s32.s8.s8", 1978.8)],
)
def test_a_wgmma_is_held_to_the_peak_of_its_type(shape, types, peak):
    require_tools()
    sum_type, scales = ("int", "") if types.startswith("s32") else ("float", ", 1, 1" + ", 0, 0" * ("f16" in types))
    letter = "r" if sum_type == "int" else "f"
    sums = ", ".join(f'"+{letter}"(d[{i}])' for i in range(4))
    asm = f"wgmma.mma_async.sync.aligned.{shape}.{types} {{%0, %1, %2, %3}}, %4, %5, 1{scales};"
    source = Source(
        f"""extern "C" __global__ void multiply({sum_type}* o) {{
            __shared__ __align__(1024) uint4 held[256];
            for (int i = threadIdx.x; i < 256; i += 128) held[i] = make_uint4(0, 0, 0, 0);
            __syncthreads();
            unsigned long long tile = (unsigned long long)(__cvta_generic_to_shared(held) >> 4) | 1ull << 62;
            {sum_type} d[4] = {{}};
            asm volatile("wgmma.fence.sync.aligned;");
            asm volatile("{asm}" : {sums} : "l"(tile), "l"(tile));
            asm volatile("wgmma.commit_group.sync.aligned;\\nwgmma.wait_group.sync.aligned 0;" : {sums});
            for (int i = 0; i < 4; i++) o[4 * threadIdx.x + i] = d[i];
        }}""",
        "multiply", Launch((132, 1, 1), 128, 0),
    )  # fmt: skip
    binary = compile_source(source, "sm_90a")
    launch = prepare(read_kernel(binary.cubin, "multiply"), source.launch, [DrawnArgument("o", 2048, "fp32", True)], 0)
    found = predict(Program(binary.listing, "multiply"), launch, find_chip("h100"), flops=1e15)
    assert found.roofline_us == found.time_us == pytest.approx(1e9 / peak, rel=1e-3)
