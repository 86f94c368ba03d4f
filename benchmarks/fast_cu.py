"""The ten wgmma GEMM kernels of fast.cu (Pranjal Shankhdhar, MIT, commit 38eb642) as launches for the model.

A folder holds them as examples/matmul/matmul_N.cuh of that commit. They are compiled as they stand, but for what stops
the installed compiler: headers of the host, host functions behind the kernel, tensor maps passed by pointer, and shared
memory that is aligned to 128 bytes, where a swizzle of 128 bytes needs 1024.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from evoengine.accuracy.compilers import InstalledNvrtc, compile_and_list
from evoengine.devices.base import ScalarArgument, TensorMapArgument
from evoengine.errors import UsageError
from evoengine.sass.core import Program
from evoengine.sass.cubin import Kernel, kernel_names, read_kernel
from evoengine.sass.launch import DrawnArgument, Geometry, Launch, prepare

ARCH = "sm_90a"
PERSISTENT_BLOCKS = 128
DEPTH = 64
"""columns of A and B in a tile, a swizzled row of 128 bytes"""
SPACE_LENGTH = 128
"""tiles at most of a block of the kernel that walks along a Hilbert curve"""


@dataclass(frozen=True, slots=True)
class Variant:
    """How a kernel is instantiated and launched: template arguments, tile, threads, tiles of A and B that it holds."""

    instance: str
    rows: int
    columns: int
    threads: int
    stages: int
    """0 where shared memory is static"""
    persistent: bool = False


_LARGE = Variant("128,256,64,384,3,128,2,1", 128, 256, 384, 3, persistent=True)
VARIANTS = {
    2: Variant("64,64,64,64,64,16,128", 64, 64, 128, 0),
    3: Variant("128,128,64,128,false", 128, 128, 128, 1),
    4: Variant("128,128,64,256,5", 128, 128, 256, 5),
    5: Variant("128,256,64,384,3", 128, 256, 384, 3),
    6: Variant("128,256,64,384,3,128", 128, 256, 384, 3, persistent=True),
    7: Variant("128,256,64,384,3,128", 128, 256, 384, 3, persistent=True),
    **dict.fromkeys((8, 9, 10, 11), _LARGE),
}
PREAMBLE = """
#include <cuda/barrier>
#include <cuda_bf16.h>
#define assert(x) ((void)0)
typedef __nv_bfloat16 bf16;
#define CEIL_DIV(M, N) (((M) + (N)-1) / (N))
struct alignas(64) CUtensorMap_st { unsigned long long opaque[16]; };
typedef CUtensorMap_st CUtensorMap;
enum CUresult { CUDA_SUCCESS };
enum { CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
       CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE };
template <class... T> CUresult cuTensorMapEncodeTiled(T...);
template <class... T> void cudaMalloc(T...);
template <class... T> void cudaMemcpy(T...);
"""


def number_of(source: str) -> int | None:
    """Return N of matmul_N.cuh; None of another file."""
    found = re.search(r"matmul_(\d+)\.cuh", source)
    return int(found[1]) if found else None


def text(file: Path, number: int) -> str:
    """Return the kernel's text as the installed compiler takes it."""
    source = file.read_text()
    # the host's part begins with a helper of the Hilbert curve, or with the launch
    source = source[: min(source.find(mark) for mark in ("// Rotate/flip", "void runKernel") if mark in source)]
    source = re.sub(r"const CUtensorMap\* (tensorMap[AB])", r"const __grid_constant__ CUtensorMap \1", source)
    if number <= 5:
        source = re.sub(r"(global_to_shared\([^;]*?), (tensorMap[AB])", r"\1, &\2", source)
    source = source.replace("__align__(128) uint8_t smem", "__align__(1024) uint8_t smem")
    source = source.replace(
        "extern __shared__ SMem<BM, BN, BK> s;",
        "extern __shared__ __align__(1024) uint8_t smem[]; "
        "SMem<BM, BN, BK> &s = *reinterpret_cast<SMem<BM, BN, BK>*>(smem);",
    )
    if number == 2:
        source = source.replace("alignas(128)", "alignas(1024)")
    qualifiers = r"(?:__launch_bounds__\(NUM_THREADS\))?\s*(?:__cluster_dims__\([^)]*\))?"
    signature = re.search(rf"void\s+{qualifiers}\s*(matmulKernel{number}\(.*?\)) \{{", source)
    if signature is None:
        raise UsageError(f"{file} has no kernel matmulKernel{number}")
    name = f"matmulKernel{number}"
    instance = signature[1].replace(name, f"{name}<{VARIANTS[number].instance}>", 1)
    return f"{PREAMBLE}{source.replace('__host__ ', '')}template __global__ void {instance};\n}}\n"


@cache
def compiled(file: Path, number: int) -> tuple[Program, Kernel]:
    """Raise CompileFailed with the compiler's line where it rejects the text."""
    found = compile_and_list(InstalledNvrtc(), text(file, number), ARCH, ("-default-device",))
    entry = kernel_names(found.cubin)[0]
    return Program(found.listing, entry), read_kernel(found.cubin, entry)


def launch(file: Path, number: int, size: int) -> tuple[Program, Launch]:
    """Return the program and its launch for C = A · B of size³; raises CompileFailed, and UsageError for another
    kernel."""
    if number not in VARIANTS:
        raise UsageError(f"{file.name} is none of the kernels {', '.join(map(str, VARIANTS))}")
    program, kernel = compiled(file, number)
    v = VARIANTS[number]
    a, b = (DrawnArgument(name, 2 * size * size, "bf16") for name in "AB")
    c = DrawnArgument("C", 2 * size * size, "bf16", output=True)
    sizes = [ScalarArgument(name, np.int32(size)) for name in "MNK"]
    maps = [_map(number, "A", size, v.rows, DEPTH), _map(number, "B", size, v.columns, DEPTH)]
    shared = 2 * DEPTH * (v.rows + v.columns) * v.stages
    if number <= 9:
        arguments, mapped = [*sizes, c, *maps], [a, b]
    else:
        arguments, mapped = [*sizes, _map(number, "C", size, v.columns, v.rows, 0), *maps], [a, b, c]
        shared += 2 * v.rows * v.columns + 16 * v.stages
    if number == 3:  # times of its phases, which it writes where it is asked to
        arguments.append(DrawnArgument("DB", 4 * 6 * 65536, "int32", output=True))
    if number == 11:
        space = hilbert_space(size // v.rows // 2, size // v.columns, PERSISTENT_BLOCKS // 2)
        arguments.append(DrawnArgument("space", space.nbytes, "int32", contents=space))
        shared += 4 * SPACE_LENGTH
    blocks = PERSISTENT_BLOCKS if v.persistent else (size // v.rows) * (size // v.columns)
    geometry = Geometry((blocks, 1, 1), (v.threads, 1, 1), -(-shared // 128) * 128)
    return program, prepare(kernel, geometry, arguments, 0, mapped=mapped)


def _map(number: int, tensor: str, size: int, box_rows: int, box_columns: int, swizzle: int = 128) -> TensorMapArgument:
    name = f"map{tensor}"
    if number <= 6:
        return TensorMapArgument(name, tensor, "bf16", (size, size), (2 * size,), (box_columns, box_rows), swizzle)
    dims, strides, box = (64, size, size // 64), (2 * size, 128), (64, box_rows, box_columns // 64)
    if number == 7:
        dims, strides, box = (*dims, 1, 1), (*strides, 0, 0), (*box, 1, 1)
    return TensorMapArgument(name, tensor, "bf16", dims, strides, box, swizzle)


# ── the order of tiles along a Hilbert curve ────────────────────────────────────────────────────────────────────────


def hilbert_space(rows: int, columns: int, clusters: int) -> np.ndarray:
    """Return the tiles of each cluster in its order [clusters, SPACE_LENGTH]: row and column in 16 bits each, -1 behind
    the last."""
    side = 1 << (max(rows, columns) - 1).bit_length()
    cells = (_cell(side, step) for step in range(side * side))
    tiles = [(x << 16) | y for x, y in cells if x < rows and y < columns]
    space = np.full((clusters, SPACE_LENGTH), -1, np.int32)
    for n, tile in enumerate(tiles):
        space[n % clusters, n // clusters] = tile
    return space


def _cell(side: int, step: int) -> tuple[int, int]:
    """Return the step-th cell of the Hilbert curve of a square."""
    x, y, scale = 0, 0, 1
    while scale < side:
        right = 1 & (step // 2)
        up = 1 & (step ^ right)
        if not up:
            if right:
                x, y = scale - 1 - x, scale - 1 - y
            x, y = y, x
        x, y = x + scale * right, y + scale * up
        step //= 4
        scale *= 2
    return x, y
