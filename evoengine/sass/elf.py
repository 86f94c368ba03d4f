"""Sections, symbols and relocations of a 64-bit little-endian ELF file, by the ELF-64 specification.

Every offset and length is checked: bytes that are no such file, or end too early, raise UsageError.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

from evoengine.errors import UsageError

NOBITS = frozenset((8, *(0x70000000 + n for n in (0x7, 0x9, 0xA, 0x15))))
"""kinds of sections that have a size and no contents in the file; the latter are CUDA's, of relocatable objects"""

_MAGIC = b"\x7fELF\x02\x01"
_HEADER = struct.Struct("<8xB9xH28xI2xHHHHH")  # byte 8: the ABI's version, 18: machine; from 48: flags, sizes, counts
_TABLES = struct.Struct("<32xQQ")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_RELA, _RELA_KIND = struct.Struct("<QIIq"), 4
_REL, _REL_KIND = struct.Struct("<QII"), 9


class Header(NamedTuple):
    abi: int
    machine: int
    flags: int
    program_count: int
    program_bytes: int
    section_count: int
    section_bytes: int
    names: int
    """index of the section that holds the names of sections"""
    programs_at: int
    sections_at: int

    @property
    def arch(self) -> int:
        """Return a cubin's compute capability: the flags' lowest byte, or the next one from ABI version 8 on."""
        return self.flags >> (8 if self.abi >= 8 else 0) & 0xFF


class Section(NamedTuple):
    name: str
    kind: int
    flags: int
    size: int
    link: int
    info: int
    data: bytes
    """empty for NOBITS"""


class Symbol(NamedTuple):
    name: str
    section: int
    """its index; 0 where it is defined nowhere"""
    value: int
    """bytes from the section's start"""
    size: int


class Relocation(NamedTuple):
    offset: int
    kind: int
    symbol: int
    addend: int | None
    """None where it is stored in the place that is relocated"""


def header(image: bytes | memoryview) -> Header:
    """Read the file header. Raises UsageError where the bytes are no 64-bit little-endian ELF file."""
    if bytes(image[: len(_MAGIC)]) != _MAGIC:
        raise UsageError(f"the binary is no cubin: it begins with {image[:6].hex() or 'nothing'}")
    abi, machine, flags, program_bytes, programs, section_bytes, count, names = _unpack(_HEADER, image, 0, "header")
    programs_at, sections_at = _unpack(_TABLES, image, 0, "header")
    return Header(abi, machine, flags, programs, program_bytes, count, section_bytes, names, programs_at, sections_at)


def sections(image: bytes) -> list[Section]:
    rows, names = _table(image)
    held = (b"" if row[1] in NOBITS else _contents(image, row) for row in rows)
    return [
        Section(_name(names, row[0]), row[1], row[2], row[5], row[6], row[7], data)
        for row, data in zip(rows, held, strict=True)
    ]


def named(image: memoryview, name: str) -> Iterator[memoryview]:
    """Yield the contents of the sections of a name, and read no others: libraries have gigabytes."""
    rows, names = _table(image)
    for row in rows:
        if row[1] not in NOBITS and _name(names, row[0]) == name:
            yield image[row[4] : _end(image, row)]


def _table(image: bytes | memoryview) -> tuple[list[tuple[int, ...]], bytes]:
    """Return the headers of sections and the sections' names."""
    head = header(image)
    starts = (head.sections_at + i * head.section_bytes for i in range(head.section_count))
    rows = [_unpack(_SECTION, image, start, "sections") for start in starts]
    if head.names >= len(rows):
        raise UsageError(f"the binary is no cubin: its names are in section {head.names} of {len(rows)}")
    return rows, _contents(image, rows[head.names])


def symbols(found: list[Section]) -> list[Symbol]:
    table = next((s for s in found if s.name == ".symtab"), None)
    if table is None:
        return []
    if table.link >= len(found):
        raise UsageError(f"the binary is no cubin: its symbols' names are in section {table.link} of {len(found)}")
    names = found[table.link].data
    rows = _SYMBOL.iter_unpack(_whole_rows(table.data, _SYMBOL))
    return [Symbol(_name(names, name), section, value, size) for name, _, _, section, value, size in rows]


def relocations(found: list[Section], name: str) -> Iterator[Relocation]:
    """Yield the relocations of the section of that name."""
    for section in found:
        if section.kind == _RELA_KIND and section.name == f".rela{name}":
            for offset, kind, symbol, addend in _RELA.iter_unpack(_whole_rows(section.data, _RELA)):
                yield Relocation(offset, kind, symbol, addend)
        elif section.kind == _REL_KIND and section.name == f".rel{name}":
            for offset, kind, symbol in _REL.iter_unpack(_whole_rows(section.data, _REL)):
                yield Relocation(offset, kind, symbol, None)


def _unpack(layout: struct.Struct, image: bytes | memoryview, at: int, what: str) -> tuple[int, ...]:
    if at + layout.size > len(image):
        raise UsageError(f"the binary is cut off: it ends at byte {len(image)}, within its {what}")
    return layout.unpack_from(image, at)


def _contents(image: bytes | memoryview, row: tuple[int, ...]) -> bytes:
    return bytes(image[row[4] : _end(image, row)])


def _end(image: bytes | memoryview, row: tuple[int, ...]) -> int:
    """Return where a section's contents end."""
    end = row[4] + row[5]
    if end > len(image):
        raise UsageError(f"the binary is cut off: a section ends at byte {end} of {len(image)}")
    return end


def _whole_rows(data: bytes, layout: struct.Struct) -> bytes:
    return data[: len(data) - len(data) % layout.size]


def _name(names: bytes, start: int) -> str:
    end = names.find(b"\0", start)
    if start >= len(names) or end < 0:
        raise UsageError(f"the binary is no cubin: a name begins at byte {start} of {len(names)}")
    return names[start:end].decode(errors="replace")
