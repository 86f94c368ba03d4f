"""Machine code inside of other files: fatbins, and the objects and libraries that hold them.

A library's section `.nv_fatbin` is a row of containers: 16 bytes of header, then entries, each a header and a payload
that is padded to 8 bytes and perhaps compressed, as LZ4's block format or by Zstandard. The layout is that of
`fatbinary` from CUDA 11 to 13.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from importlib import import_module
from typing import Any

from evoengine.errors import MachineError, UsageError
from evoengine.sass import elf

LARGEST_IMAGE = 1 << 28
"""bytes of one unpacked entry"""
LARGEST_IN_ALL = 1 << 33
"""bytes of all unpacked entries of a file"""
SECTIONS = (".nv_fatbin", "__nv_relfatbin")
ARCH_CODE = 190
"""the ELF machine of a cubin, EM_CUDA"""

_MAGIC = struct.pack("<I", 0xBA55ED50)
_CONTAINER = struct.Struct("<IHHQ")
_ENTRY = struct.Struct("<HHIQIIHHIIIQQQ")
_LZ4, _ZSTD = 0x2000, 0x8000
_LARGEST_WINDOW = 27  # log2 of bytes


class Kind(IntEnum):
    """The kind of a fatbin's entry."""

    PTX = 1
    CUBIN = 2


@dataclass(frozen=True, slots=True)
class Image:
    """An entry of a fatbin, or a cubin by itself."""

    kind: Kind
    arch: int
    """90 for sm_90 and sm_90a"""
    packed: bytes
    size: int
    """bytes, unpacked"""
    packing: int = 0

    def unpack(self) -> bytes:
        """Return the cubin or the PTX. Raises UsageError where it is damaged, MachineError where nothing unpacks it."""
        if self.packing & _LZ4:
            return unpack_lz4(self.packed, self.size)
        if self.packing & _ZSTD:
            return _unpack_zstd(self.packed, self.size)
        return self.packed


def images(data: memoryview) -> Iterator[Image]:
    """Yield the images of a cubin, a fatbin, or an object or library that holds fatbins, in their order.

    Raises UsageError for bytes that are none of these, or claim sizes that no machine code has.
    """
    if bytes(data[: len(_MAGIC)]) == _MAGIC:
        yield from _of_containers(data)
        return
    if bytes(data[:4]) != b"\x7fELF":
        raise UsageError(
            f"it is no cubin, no fatbin and no library: it begins with {data[:6].hex() or 'nothing'}, and a cubin or a "
            "library with 7f454c46, a fatbin with 50ed55ba"
        )
    if elf.header(data).machine == ARCH_CODE:
        yield Image(Kind.CUBIN, elf.header(data).arch, bytes(data), len(data))
        return
    # the second has what is not linked yet: in a library, the parts of what the first has
    held = next((found for name in SECTIONS if (found := list(elf.named(data, name)))), [])
    if not held:
        raise UsageError(f"it is an ELF file without CUDA code: it has none of the sections {' and '.join(SECTIONS)}")
    unpacked = 0
    for section in held:
        for image in _of_containers(section):
            unpacked += image.size
            if unpacked > LARGEST_IN_ALL:
                raise UsageError(f"its images have more than {LARGEST_IN_ALL >> 30} GiB when they are unpacked")
            yield image


def _of_containers(data: memoryview) -> Iterator[Image]:
    """Yield the entries of containers, between which there may be zeros."""
    at = 0
    while at + _CONTAINER.size <= len(data):
        magic, _, header, size = _CONTAINER.unpack_from(data, at)
        if not magic:
            at += 8
            continue
        end = at + header + size
        if bytes(data[at : at + 4]) != _MAGIC or header < _CONTAINER.size or end > len(data):
            raise UsageError(f"a fatbin is damaged: no container of at most {len(data) - at} bytes begins at byte {at}")
        yield from _entries(data, at + header, end)
        at = end + -end % 8


def _entries(data: memoryview, at: int, end: int) -> Iterator[Image]:
    while at + _ENTRY.size <= end:
        kind, _, header, padded, packed, _, _, _, arch, _, _, flags, _, size = _ENTRY.unpack_from(data, at)
        start = at + header
        if header < _ENTRY.size or start + padded > end or packed > padded:
            raise UsageError(f"a fatbin is damaged: its entry at byte {at} ends behind its container")
        compressed = flags & (_LZ4 | _ZSTD)
        if compressed and size > LARGEST_IMAGE:
            raise UsageError(
                f"a fatbin has an image of {size} bytes when it is unpacked; {LARGEST_IMAGE} at most are read"
            )
        payload = bytes(data[start : start + (packed if compressed else padded)])
        if kind in (Kind.PTX, Kind.CUBIN):
            yield Image(Kind(kind), arch, payload, size if compressed else padded, compressed)
        at = start + padded


def unpack_lz4(packed: bytes, size: int) -> bytes:
    """Return the `size` bytes that a block of LZ4 holds. Raises UsageError where it holds others."""
    out, at = bytearray(), 0
    try:
        while at < len(packed) and len(out) <= size:
            token = packed[at]
            at += 1
            literals = token >> 4
            if literals == 15:
                literals, at = _longer(packed, literals, at)
            out += packed[at : at + literals]
            at += literals
            if at >= len(packed):
                break
            distance = packed[at] | packed[at + 1] << 8
            at += 2
            length = token & 15
            if length == 15:
                length, at = _longer(packed, length, at)
            length += 4
            start = len(out) - distance
            if start < 0 or not distance or len(out) + length > size:
                break
            if distance >= length:
                out += out[start : start + length]
            else:
                out += (out[start:] * (length // distance + 1))[:length]
    except IndexError:
        pass  # it ends within a sequence; the length tells
    if len(out) != size:
        raise UsageError(f"an image in LZ4 is damaged: it does not unpack to its {size} bytes")
    return bytes(out)


def _longer(packed: bytes, length: int, at: int) -> tuple[int, int]:
    """Return a length whose nibble is full with what follows, and where that ends."""
    while True:
        more = packed[at]
        at += 1
        length += more
        if more != 255:
            return length, at


def _unpack_zstd(packed: bytes, size: int) -> bytes:
    zstd = _zstd()
    options = {zstd.DecompressionParameter.window_log_max: _LARGEST_WINDOW}
    try:
        found: bytes = zstd.ZstdDecompressor(options=options).decompress(packed, size + 1)
    except zstd.ZstdError as error:
        raise UsageError(f"an image in Zstandard is damaged: {error}") from None
    if len(found) != size:
        raise UsageError(f"an image in Zstandard is damaged: it does not unpack to its {size} bytes")
    return found


def _zstd() -> Any:
    """Return Python's own module, of 3.14, or its backport."""
    for name in ("compression.zstd", "backports.zstd"):
        try:
            return import_module(name)
        except ModuleNotFoundError:
            continue
    raise MachineError("the file is compressed by Zstandard: pip install 'evoengine[cubins]'")
