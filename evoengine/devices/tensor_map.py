"""Tensor maps, the 128 bytes by which TMA finds tiles: their rules, and what stands for one without a driver.

The rules are those of `cuTensorMapEncodeTiled` (CUDA Driver API, Tensor Map Object Management) for maps without
interleaving and with all element strides 1, which is what a dense tensor needs.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from evoengine.devices.base import KernelUnbuildable, TensorMapArgument

BYTES = 128
"""of a tensor map; it must lie at a multiple of 64, since CUDA 13.0 of 128"""
ALIGNMENT = 128

ELEMENTS = {
    "uint8": (1, 0, 0), "uint16": (2, 1, 1), "uint32": (4, 2, 2), "int32": (4, 3, 3), "uint64": (8, 4, 4),
    "int64": (8, 5, 5), "fp16": (2, 6, 6), "fp32": (4, 7, 7), "fp64": (8, 8, 9), "bf16": (2, 9, 10),
}  # fmt: skip # a table
"""dtype → bytes, CU_TENSOR_MAP_DATA_TYPE_*, the number of PTX's tensormap.replace"""
SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}
"""bytes → CU_TENSOR_MAP_SWIZZLE_*"""
FAR = 1 << 30
"""rows of a map of ragged rows, see `ragged`"""
WRAP_BYTES = 1 << 35
"""FAR of these are not a distance, as addresses have 64 bits"""


def ragged(name: str, tensor: str, dtype: str, width: int, box: tuple[int, int], swizzle: int) -> TensorMapArgument:
    """Return a map of a tensor [rows, width] by which each tile is cut off at a row that the kernel chooses.

    Its dims, outermost first, are [y, y, FAR, width]. Row r of n that end before row e of the tensor is at the
    coordinates (FAR, e, FAR - n + r): what FAR adds up to along two dims is 0 in 64 bits, and rows behind the n-th lie
    behind the map's end. `box` has rows and columns.
    """
    row, most = width * ELEMENTS[dtype][0], (1 << 31) - 1
    rows, columns = box
    strides = (row, row, WRAP_BYTES - row)
    return TensorMapArgument(
        name, tensor, dtype, (width, FAR, most, most), strides, (columns, rows, 1, 1), swizzle=swizzle
    )


_DESCRIPTION = struct.Struct("=QQ4Q5I5HBBH46x")


def describe(argument: TensorMapArgument, address: int, tensor: int = 0) -> bytes:
    """Return the 128 bytes that stand for a tensor map in the emulator, without a driver.

    Call `check` first. They hold the address, the number of the tensor among the arguments, 4 strides in bytes, 5 dims,
    5 box extents, the bytes of an element, the rank, and the swizzle in bytes, 16 if there is none.
    """

    def five(values: tuple[int, ...]) -> list[int]:
        return [*values, *[1] * (5 - len(values))]

    strides = five(argument.strides_bytes)[:4]
    element, rank = ELEMENTS[argument.dtype][0], len(argument.dims)
    shape = (*five(argument.dims), *five(argument.box))
    return _DESCRIPTION.pack(address + argument.offset, tensor, *strides, *shape, element, rank, argument.swizzle or 16)


_PACKED = struct.Struct("<QI4II5III68x")


def pack(argument: TensorMapArgument, address: int) -> bytes:
    """Return a tensor map's 128 bytes as machine code makes them by `tensormap.replace`. Call `check` first.

    They hold the address, a word of fields, 4 strides in units of 16 bytes and their upper halves in one word, 5 dims
    less one, and the box less one in bytes. What a driver puts into bits that no instruction replaces is left out.
    """
    rank = len(argument.dims)
    dims, box = ([n - 1 for n in of] + [0] * (5 - rank) for of in (argument.dims, argument.box))
    units = [stride // 16 for stride in argument.strides_bytes] + [0] * (5 - rank)
    upper = sum((unit >> 32 & 15) << 4 * n for n, unit in enumerate(units[:4]))
    fields = rank - 1 << 4 | ELEMENTS[argument.dtype][2] << 7 | SWIZZLES[argument.swizzle] << 13 | argument.nan << 15
    boxes = int.from_bytes(bytes(box[1:]), "little")
    strides = [unit & 0xFFFFFFFF for unit in units[:4]]
    return _PACKED.pack(address + argument.offset, fields, *strides, upper, *dims, box[0] << 24, boxes)


def check(argument: TensorMapArgument, tensor_bytes: int) -> None:
    """Raise KernelUnbuildable with the first rule that the map of a tensor of `tensor_bytes` violates."""
    for broken in _broken_rules(argument, tensor_bytes):
        raise KernelUnbuildable(f"tensor map {argument.name}: {broken}")


def _broken_rules(a: TensorMapArgument, tensor_bytes: int) -> Iterator[str]:
    rank = len(a.dims)
    if a.dtype not in ELEMENTS:
        yield f"dtype {a.dtype!r}, which must be one of {', '.join(ELEMENTS)}"
    if a.swizzle not in SWIZZLES:
        yield f"a swizzle of {a.swizzle} bytes, which must be 0, 32, 64 or 128"
    if not 1 <= rank <= 5 or len(a.box) != rank or len(a.strides_bytes) != rank - 1:
        found = f"{rank} dims, {len(a.box)} of the box and {len(a.strides_bytes)} strides"
        yield f"{found}: it takes n, n and n - 1, n from 1 to 5"
    for dim in a.dims:
        if not 1 <= dim < 2**32:
            yield f"a dim of {dim}, which must be 1 to 2^32 - 1"
    for stride in a.strides_bytes:
        if stride % 16 or not 0 <= stride < 2**40:
            yield f"a stride of {stride} bytes, which must be a multiple of 16 below 2^40"
    for extent in a.box:
        if not 1 <= extent <= 256:
            yield f"a box of {extent} elements along a dim, which must be 1 to 256"
    row = a.box[0] * ELEMENTS[a.dtype][0]
    if row % 16:
        yield f"a box of {row} bytes along the innermost dim, which must be a multiple of 16"
    # A narrower row is legal too; nothing says how it is laid out, so it is refused here.
    if a.swizzle and row != a.swizzle:
        yield f"a box of {row} bytes along the innermost dim, which must be the {a.swizzle} that are swizzled"
    if _is_ragged(a):
        return  # the kernel says where its rows end: each access is checked where it is made
    last = sum((dim - 1) * stride for dim, stride in zip(a.dims[1:], a.strides_bytes, strict=True))
    end = a.offset + last + a.dims[0] * ELEMENTS[a.dtype][0]
    if end > tensor_bytes:
        yield f"it reaches {end} bytes into tensor {a.tensor} of {tensor_bytes}"


def _is_ragged(a: TensorMapArgument) -> bool:
    if len(a.dims) != 4 or a.dims[1] != FAR:
        return False
    inner, outer, around = a.strides_bytes
    return inner == outer == WRAP_BYTES - around
