"""The model held against micro-benchmarks of tensor cores on an H100: what chose its rates comes out again."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import (
    hopper_arithmetic,
    hopper_bench,
    hopper_constants,
    hopper_contention,
    hopper_lines,
    hopper_memory,
    hopper_tensor,
)
from evoengine.accuracy.compilers import InstalledNvrtc
from evoengine.sass.listing import disassemble
from tests.support.machine_code import require_tools

RESULTS = Path(hopper_constants.__file__).parent / "results"
MEASURED = RESULTS / "h100-constants-2026-11-26.json.gz"
CONTENTION = RESULTS / "h100-contention-2026-11-26.json.gz"
GROUPS = {
    "wgmma": hopper_tensor.wgmma, "beside": hopper_tensor.beside, "tma": hopper_memory.tma,
    "arithmetic": hopper_arithmetic.arithmetic, "mixtures": hopper_contention.overlapped,
    "matrices": hopper_contention.matrices, "stores": hopper_lines.pieces,
}  # fmt: skip
"""benches of these are looked up by their name"""


OVERLAPPED = "2 warpgroups, each 8 x n128 ss over 144 instructions of ex2 2, fma 2, add 2, fmnmx 2, f2fp 1: a turn"


@pytest.fixture(scope="module")
def measured() -> dict[str, float]:
    benches = [b for file in (MEASURED, CONTENTION) for b in json.loads(gzip.decompress(file.read_bytes()))["benches"]]
    return {bench["name"]: bench["value"] for bench in benches if "value" in bench}


@pytest.mark.parametrize(
    ("group", "name", "within"),
    [
        ("wgmma", "n128 ss fp16, alone, from fence to wait", 0.02),
        ("wgmma", "n128 ss tf32 summed in f32, 2 warpgroups", 0.01),
        ("beside", "8 x n128 ss in one warpgroup, MUFU work of 0.75 of its clocks in another", 0.02),
        ("beside", "8 x n128 ss in one warpgroup, MUFU work of 1 of its clocks in another", 0.04),
        ("tma", "1 boxes of 8192 bytes in flight, 1 SMs, private lines, 0.1 MB", 0.03),
        ("tma", "8 boxes of 8192 bytes in flight, 132 SMs, private lines, 34.6 MB", 0.01),
        ("arithmetic", "f16_f32 interval, 4 warps a sub-core", 0.02),
        ("arithmetic", "imad_hi interval, 4 warps a sub-core", 0.02),
        ("matrices", "LDSM.x2 and MOVM, 8 warps: clocks of a sub-core for both", 0.02),
        ("matrices", "outer products of 8 x 8 from LDS, 256 threads: clocks of an FFMA", 0.06),
        ("stores", "stores of 4 bytes, 16 in a row, side by side, 1 SMs: clocks of an SM each", 0.05),
        ("stores", "stores of 16 bytes, 16 in a row, halves apart, 1 SMs: clocks of an SM each", 0.05),
        ("mixtures", OVERLAPPED, 0.05),
    ],
)
def test_what_an_h100_measured_is_predicted(group, name, within, measured):
    require_tools()
    bench = next(b for b in GROUPS[group]() if b.name == name)
    cubin = InstalledNvrtc().compile(bench.text, "sm_90a", ())
    predicted = hopper_bench.predicted(bench, cubin, disassemble(cubin))
    assert predicted == pytest.approx(measured[name], rel=within)


@pytest.mark.parametrize(("n", "within"), [(128, 0.2), (192, 0.2), (256, 0.2)])
def test_products_are_late_by_about_as_much_as_measured_where_others_add_and_multiply(n, within):
    require_tools()
    name = f"fma of 1 warps a sub-core beside n{n} ss"
    found = json.loads(gzip.decompress(MEASURED.read_bytes()))["benches"]
    about = next(bench for bench in found if bench["name"] == name)
    eight, alone = about["clocks of eight products"]["value"], 8 * n / 2
    late = about["value"] * 64 * (1 - alone / eight)  # of a turn of 64 FFMA: its clocks, less those of products done
    bench = next(b for b in hopper_tensor.beside() if b.name == name)
    cubin = InstalledNvrtc().compile(bench.text, "sm_90a", ())
    one = replace(bench, p=1, q=64, n=(0, 96), ops=1)  # p: products, q of their turns
    assert hopper_bench.predicted(one, cubin, disassemble(cubin)) == pytest.approx(late, rel=within)
