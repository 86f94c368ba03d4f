"""GEMM kernels of waynehacking8/blackwell-tensorcore-kernels on an H100, beside the model; a part of ladders.py.

Set `ncu`: cycles by Nsight Compute at 8192³, of the WMMA and the CUTLASS kernel, at the clock that it reported. Set
`h100 simt`: the naive and the tiled fp32 kernel at three sizes, not locked; they have no use for the tensor cores, so
that no constant of the sustained clock was chosen on them.

CUTLASS's headers may be of another version than the author's. The kernel's name is to the letter the one that he
profiled.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.published import FAILURES, Missed, check_commit, compiled, predicted, read_times
from evoengine.accuracy.page import Row
from evoengine.devices.base import ScalarArgument, StructArgument, TensorMapArgument
from evoengine.sass.chip import SUSTAINED, Clock
from evoengine.sass.cubin import kernel_names
from evoengine.sass.launch import DrawnArgument, Geometry
from evoengine.sass.predict import Prediction

NCU = Clock("locked", 1460)
"""the SM's clock that NCU reported beside the cycles"""
NCU_SIZE = 8192
SIMT = {"naive": 16, "tiled": 32}
"""kernel → rows and columns of its blocks"""
SMS, CLUSTERS = 132, 66


def rows(data: Path, checkout: Path, nvcc: Path, cutlass: Path | None) -> Iterator[Row | Missed | str]:
    times = read_times(data, "wayne_ncu_cycles.csv")
    check_commit(checkout, times[0]["commit"])
    for given in times:
        name, measured_us = given["kernel"], float(given["cycles"]) / (NCU.mhz or 1)
        if name == "wmma":
            yield _row("ncu", name, NCU_SIZE, measured_us, lambda: wmma(checkout, nvcc))
        elif name == "cutlass_sm90" and cutlass:
            yield _row("ncu", name, NCU_SIZE, measured_us, lambda: cutlass_sm90(checkout, nvcc, cutlass))
        else:
            why = "name --cutlass" if name == "cutlass_sm90" else "a library's"
            yield f"ncu {name}: {int(given['cycles']):,} cycles, {why}"
    with (checkout / "results" / "bench_sm90a.csv").open(newline="") as file:
        for given in csv.DictReader(file):
            if (name := given["kernel"]) in SIMT:
                size = int(given["M"])
                how = partial(simt, checkout, nvcc, name, size)
                yield _row("h100 simt", name, size, 1e3 * float(given["ms"]), how)


def _row(of_set: str, name: str, size: int, measured_us: float, how: Callable[[], Prediction]) -> Row | Missed:
    try:
        p = how()
    except FAILURES as error:
        return Missed(f"{of_set} {name} {size}^3: {error}")
    return Row(of_set, name, f"{size}^3", "h100", str(p.clock), measured_us, p.time_us, p.kernel_class, p.bound)


def simt(checkout: Path, nvcc: Path, name: str, size: int) -> Prediction:
    cubin = compiled(nvcc, f'#include "{checkout}/src/gemm_{name}.cu"\n', "sm_90", (f"-I{checkout / 'include'}",))
    matrices = [DrawnArgument(matrix, 4 * size**2, "fp32", matrix == "C") for matrix in "ABC"]
    sizes = [ScalarArgument(letter, np.int32(size)) for letter in "MNK"]
    tile = SIMT[name]
    geometry = Geometry((size // tile, size // tile, 1), (tile, tile, 1), 0)
    return predicted(cubin, "h100", Clock(SUSTAINED), 2.0 * size**3, geometry, [*matrices, *sizes])


def wmma(checkout: Path, nvcc: Path) -> Prediction:
    """Predict gemm_wmma_t<128, 128, 3> as src/gemm_wmma.cu launches it: tiles of 128×128×32 in three stages."""
    cubin = compiled(nvcc, f'#include "{checkout}/src/gemm_wmma.cu"\n', "sm_90", (f"-I{checkout / 'include'}",))
    entry = next(name for name in kernel_names(cubin) if "gemm_wmma_tILi128ELi128ELi3E" in name)
    halves = [DrawnArgument(name, 2 * NCU_SIZE**2, "fp16") for name in "AB"]
    sums = DrawnArgument("C", 4 * NCU_SIZE**2, "fp32", True)
    sizes = [ScalarArgument(name, np.int32(NCU_SIZE)) for name in "MNK"]
    geometry = Geometry((NCU_SIZE // 128, NCU_SIZE // 128, 1), (512, 1, 1), 3 * 2 * 32 * (128 + 128))
    return predicted(cubin, "h100", NCU, 2.0 * NCU_SIZE**3, geometry, [*halves, sums, *sizes], entry)


def cutlass_sm90(checkout: Path, nvcc: Path, headers: Path, size: int = NCU_SIZE, clock: Clock = NCU) -> Prediction:
    """Predict the kernel of src/cutlass_sm90.cu: tiles of 128×256×64 in clusters of two, persistent. `size` is a power
    of two from 2048 on."""
    folders = [checkout / "include", headers, headers.parent / "tools" / "util" / "include"]
    options = ("-std=c++17", "--expt-relaxed-constexpr", *(f"-I{folder}" for folder in folders))
    cubin = compiled(nvcc, f'#include "{checkout}/src/cutlass_sm90.cu"\n', "sm_90a", options)
    entry = next(name for name in kernel_names(cubin) if "device_kernel" in name)
    tiles = size // 128 * (size // 256)
    geometry = Geometry((2, min(CLUSTERS, tiles // 2), 1), (384, 1, 1), 196_864, (2, 1, 1))
    return predicted(cubin, "h100", clock, 2.0 * size**3, geometry, [_cutlass_parameters(size, tiles)], entry)


def _cutlass_parameters(size: int, tiles: int) -> StructArgument:
    """Return GemmKernel::Params as a program that fills it has it, at the offsets that it prints.

    From 896 on stands the scheduler: divisors with the shift (of powers of two) or multiplier to divide by them.
    """
    halves = [DrawnArgument(name, 2 * size**2, "fp16") for name in "AB"]
    sums = DrawnArgument("C", 4 * size**2, "fp32", True)
    boxes = {"A": (64, 128, 1), "B": (64, 32, 1)}
    maps = [
        TensorMapArgument(f"map_{name}", name, "fp16", (size, size, 1), (2 * size, 2 * size**2), box, 128)
        for name, box in boxes.items()
    ]
    rows, columns = size // 256, size // 256  # in clusters of 2 × 1 tiles
    numbers = {
        4: np.int32([size, size, size, 1]),
        640: np.int32([49_152, 16_384, 32_768]),  # bytes of a stage, of A and of B
        768: np.float32([1, 0]),
        816: np.int64([size]),
        840: np.int64([size]),
        860: np.int32([SMS, CLUSTERS]),
        896: np.int64([1, 0, 2, 1]),
        928: np.int64([tiles, 0, tiles.bit_length() - 1]),
        952: np.int64([columns, 0, columns.bit_length() - 1]),
        976: np.int64([tiles]),
        984: np.int32([0, 1, rows, columns, 1, 2, 1]),
    }
    parts = [(at, ScalarArgument(f"at {at}", np.void(values.tobytes()))) for at, values in numbers.items()]
    in_padding = [(32, halves[0]), (40, halves[1])]  # what the maps are views of
    return StructArgument(
        "params", 1024, (*parts, *in_padding, (128, maps[0]), (384, maps[1]), (808, sums), (832, sums))
    )
