"""Read a cubin, the ELF file of machine code: what a kernel requires at launch.

The attributes of `.nv.info` (EIATTR_…) are those that `nvdisasm` lists by name. Each is a byte of format, a byte of
code, and two bytes: the value itself or the length of what follows.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from evoengine.errors import UsageError
from evoengine.sass import elf
from evoengine.sass.elf import Section, Symbol

RESERVED_SHARED = 1024
"""bytes of shared memory that the driver reserves at a block's start, from sm_90 on"""
PARAMETER_BANK = 0
CONSTANT_BANK = 3
SEGMENTS_AT, SEGMENT_GAP = 1 << 30, 1 << 20
"""first address, and bytes between sections, of device variables whose addresses stand in code"""
DEFAULT_STACK = 1024
"""bytes of a thread's stack, cudaLimitStackSize"""
LARGEST = 1 << 31
"""bytes that a section without contents, a frame or a block's shared memory may claim"""

_PARAM_CBANK, _KPARAM_INFO, _MAX_THREADS, _REQUIRED_THREADS = 0x0A, 0x17, 0x05, 0x10
_LARGE_KPARAM_INFO = 0x45  # of kernels whose parameters exceed 4 KB, with sizes in bytes
_FRAME_SIZE, _MIN_STACK_SIZE, _REGISTERS, _CLUSTER = 0x11, 0x12, 0x2F, 0x3D
_MBARRIERS, _BARRIERS, _CALL_STACK = 0x38, 0x4C, 0x1E
_BARRIERS_IN_FLAGS, _MOST_BARRIERS = (
    20,
    0x7F,
)  # SHF_BARRIERS, where an older ptxas says how many named barriers there are
_CODE, _BANK = ".text.", ".nv.constant"
"""what the names of sections with machine code, and of constant banks, begin with"""
_LONG = 4  # the format of an attribute whose value follows
_ADDRESS = 2  # R_CUDA_64, the kind of relocation that puts a symbol's whole address


@dataclass(frozen=True, slots=True)
class Segment:
    """A section of `__device__` variables: its size in bytes and its initial contents, zeros where they are empty."""

    name: str
    size: int
    data: bytes
    address: int | None = None
    """where it must lie, since the code has its address; None: anywhere"""


@dataclass(frozen=True, slots=True)
class Pointer:
    """8 bytes of a constant bank that hold an address within a segment."""

    bank: int
    offset: int
    segment: str
    place: int


@dataclass(frozen=True, slots=True)
class FunctionPointer:
    """8 bytes of a constant bank that hold the address of a function that is elsewhere, such as the driver's printf."""

    bank: int
    offset: int
    name: str


@dataclass(frozen=True, slots=True)
class Kernel:
    """Requirements of one entry point of a cubin. Sizes and offsets are in bytes."""

    entry: str
    arch: int
    """90 for sm_90a"""
    registers: int
    """per thread at launch"""
    shared_bytes: int
    """static, per block, without the driver's own"""
    local_bytes: int
    """stack per thread, including the functions it calls"""
    parameters_at: int
    """their offset in bank 0"""
    parameters: tuple[tuple[int, int], ...]
    """(offset in bank 0, size), in order"""
    banks: Mapping[int, bytes]
    """constant banks as the file has them; bank 0 is zeros up to the last parameter's end"""
    constants: Mapping[str, tuple[int, int]]
    """`__constant__` variable → (offset in bank 3, size)"""
    globals: tuple[Segment, ...]
    pointers: tuple[Pointer, ...]
    functions: tuple[FunctionPointer, ...]
    cluster: tuple[int, int, int]
    """blocks of a cluster; (1, 1, 1) without one, or where the launch says it"""
    barriers: int
    """named barriers of a block, which BAR names by number"""
    mbarriers: int | None
    """instructions that initialise an mbarrier; None where the binary does not state it"""
    max_threads: int | None
    """per block; None where the source sets no bound"""


def whole_image(image: bytes) -> bytes:
    """Return the complete cubin: CuPy 14.2 omits its last byte, a zero; the ELF header states the length."""
    head = elf.header(image)
    sections_end = head.sections_at + head.section_count * head.section_bytes
    programs_end = head.programs_at + head.program_count * head.program_bytes
    return image + b"\0" if max(sections_end, programs_end) == len(image) + 1 else image


def kernel_names(cubin: bytes) -> list[str]:
    """Return the names of the kernels in a cubin; the machine code of each is in a section `.text.NAME`."""
    return [s.name.removeprefix(_CODE) for s in elf.sections(cubin) if s.name.startswith(_CODE)]


def read_kernels(cubin: bytes) -> list[Kernel]:
    """Read all kernels of a cubin, in their order; functions that only kernels call are none."""
    read = _Reader(cubin)
    return [read.kernel(name) for name in read.names if f"{_BANK}{PARAMETER_BANK}.{name}" in read.by_name]


def read_kernel(cubin: bytes, entry: str) -> Kernel:
    """Read the kernel `entry` of a cubin. Raises UsageError where the cubin is damaged or has no such kernel."""
    read = _Reader(cubin)
    if entry not in read.names:
        raise UsageError(f"the binary has no kernel {entry}: it has {', '.join(read.names) or 'none'}")
    return read.kernel(entry)


class _Reader:
    """The sections and symbols of one cubin."""

    def __init__(self, cubin: bytes) -> None:
        self._arch, self._sections = elf.header(cubin).arch, elf.sections(cubin)
        self._symbols = elf.symbols(self._sections)
        self.by_name = {section.name: section for section in self._sections}
        self.names = [name.removeprefix(_CODE) for name in self.by_name if name.startswith(_CODE)]
        self._of_symbols = _of_symbols(_attributes(self.by_name.get(".nv.info")), self._symbols)

    def kernel(self, entry: str) -> Kernel:
        own = _attributes(self.by_name.get(f".nv.info.{entry}"))
        of_entry = self._of_symbols.get(entry, {})
        if _REGISTERS not in of_entry:
            raise UsageError(f"the binary is no cubin: it does not say how many registers kernel {entry} takes")
        banks = _banks(self.by_name, entry)
        if PARAMETER_BANK not in banks:
            raise UsageError(f"the binary is no cubin: kernel {entry} has no section {_BANK}{PARAMETER_BANK}.{entry}")
        return Kernel(
            entry=entry,
            arch=self._arch,
            registers=of_entry[_REGISTERS],
            shared_bytes=_shared_bytes(self.by_name.get(f".nv.shared.{entry}"), self._arch),
            local_bytes=_bounded(
                max(of_entry.get(_FRAME_SIZE, 0), of_entry.get(_MIN_STACK_SIZE, 0), self._least_stack(entry, own)),
                "a stack frame",
            ),
            parameters_at=(base := _parameters_at(own)),
            parameters=_parameters(own, base, len(banks[PARAMETER_BANK])),
            banks=banks,
            constants=_constants(self._sections, self._symbols, len(banks.get(CONSTANT_BANK, b""))),
            globals=tuple(placed_segments(self._sections)),
            pointers=tuple(_pointers(self._sections, self._symbols, entry, banks)),
            functions=tuple(_functions(self._sections, self._symbols, entry, banks)),
            cluster=next((_three(value) for value in own.get(_CLUSTER, ())), (1, 1, 1)),
            barriers=_barriers(own, self.by_name[f"{_CODE}{entry}"]),
            mbarriers=next((_number(value) for value in own.get(_MBARRIERS, ())), None),
            max_threads=_max_threads(own),
        )

    def _least_stack(self, entry: str, own: Mapping[int, list[bytes]]) -> int:
        """Return the driver's default for a kernel of which nobody knows how deep its own functions call each other."""
        prefix, internal = f"${entry}$", f"${entry}$__"
        calls = any(s.name.startswith(prefix) and not s.name.startswith(internal) for s in self._symbols)
        return DEFAULT_STACK if calls and _CALL_STACK in own else 0


def _barriers(attributes: Mapping[int, list[bytes]], code: Section) -> int:
    declared = next((value[0] for value in attributes.get(_BARRIERS, ()) if value), None)
    return code.flags >> _BARRIERS_IN_FLAGS & _MOST_BARRIERS if declared is None else declared


def _attributes(section: Section | None) -> dict[int, list[bytes]]:
    found: dict[int, list[bytes]] = {}
    if section is None:
        return found
    data, at = section.data, 0
    while at + 4 <= len(data):
        form, code, length = struct.unpack_from("<BBH", data, at)
        if form == _LONG:
            value = data[at + 4 : at + 4 + length]
            at += 4 + (length + 3) // 4 * 4
        else:
            value = data[at + 2 : at + 4]
            at += 4
        if form not in (1, 2, 3, _LONG) or (form == _LONG and len(value) < length):
            raise UsageError(f"the binary is no cubin: section {section.name} breaks off in attribute {code:#x}")
        found.setdefault(code, []).append(value)
    return found


def _number(value: bytes) -> int:
    return int.from_bytes(value, "little")


def _words(value: bytes, count: int) -> tuple[int, ...]:
    if len(value) < 4 * count:
        raise UsageError(f"the binary is no cubin: an attribute has {len(value)} bytes where it takes {4 * count}")
    return struct.unpack_from(f"<{count}I", value)


def _three(value: bytes) -> tuple[int, int, int]:
    x, y, z = _words(value, 3)
    if not 1 <= x * y * z <= 16 * 1024:
        raise UsageError(f"the binary is no cubin: it has a cluster or block of {x} × {y} × {z}")
    return x, y, z


def _of_symbols(attributes: Mapping[int, list[bytes]], symbols: list[Symbol]) -> dict[str, dict[int, int]]:
    """Return symbol → the attributes that name it, of those in `.nv.info` that name one."""
    found: dict[str, dict[int, int]] = {}
    for code in (_REGISTERS, _FRAME_SIZE, _MIN_STACK_SIZE):
        for value in attributes.get(code, ()):
            symbol, number = _words(value, 2)
            if symbol < len(symbols):
                found.setdefault(symbols[symbol].name, {})[code] = number
    return found


def _bounded(size: int, what: str) -> int:
    if size > LARGEST:
        raise UsageError(f"the binary asks for {what} of {size} bytes; {LARGEST} at most are possible")
    return size


def _shared_bytes(section: Section | None, arch: int) -> int:
    size = _bounded(section.size, "shared memory") if section else 0
    return max(size - RESERVED_SHARED, 0) if arch >= 90 else size


def _banks(by_name: Mapping[str, Section], entry: str) -> dict[int, bytes]:
    """Return the constant banks; bank N is the section `.nv.constantN.ENTRY`, else `.nv.constantN`."""
    names = {bank: (f".nv.constant{bank}.{entry}", f".nv.constant{bank}") for bank in range(8)}
    found = {bank: next((by_name[name] for name in both if name in by_name), None) for bank, both in names.items()}
    return {bank: section.data for bank, section in found.items() if section}


def _parameters_at(own: Mapping[int, list[bytes]]) -> int:
    return next((_words(value, 2)[1] for value in own.get(_PARAM_CBANK, ())), 0) & 0xFFFF


def _parameters(own: Mapping[int, list[bytes]], base: int, bank_bytes: int) -> tuple[tuple[int, int], ...]:
    found = {}
    for value in own.get(_KPARAM_INFO, ()):
        _, ordinal_and_offset, layout = _words(value, 3)
        found[ordinal_and_offset & 0xFFFF] = (base + (ordinal_and_offset >> 16), layout >> 18)
    for value in own.get(_LARGE_KPARAM_INFO, ()):
        _, ordinal_and_offset, size = _words(value, 3)
        found[ordinal_and_offset & 0xFFFF] = (base + (ordinal_and_offset >> 16), size)
    for ordinal, (offset, size) in found.items():
        if offset + size > bank_bytes:
            raise UsageError(
                f"the binary is no cubin: parameter {ordinal} ends at byte {offset + size} of a bank of {bank_bytes}"
            )
    return tuple(found[ordinal] for ordinal in sorted(found))


def _constants(sections: list[Section], symbols: list[Symbol], bank_bytes: int) -> dict[str, tuple[int, int]]:
    bank = f".nv.constant{CONSTANT_BANK}"
    held = {s.name: (s.value, s.size) for s in symbols if s.size and _section_of(sections, s).name == bank}
    for name, (offset, size) in held.items():
        if offset + size > bank_bytes:
            raise UsageError(f"the binary is no cubin: {name} ends at byte {offset + size} of a bank of {bank_bytes}")
    return held


def _section_of(sections: list[Section], symbol: Symbol) -> Section:
    """Return the section that holds a symbol; the nameless section 0 for a symbol that lies in none."""
    return sections[symbol.section if symbol.section < len(sections) else 0]


def placed_segments(sections: list[Section]) -> Iterator[Segment]:
    """Yield the device variables' sections, which have an address where relocations of code may ask for it."""
    in_code = any(s.name.startswith((".rel.text.", ".rela.text.")) and s.size for s in sections)
    address = SEGMENTS_AT
    for section in sections:
        if section.name in (".nv.global", ".nv.global.init"):
            size = _bounded(section.size, "device variables")
            yield Segment(section.name, size, section.data, address if in_code else None)
            address += size + -size % SEGMENT_GAP + SEGMENT_GAP


def _pointers(
    sections: list[Section], symbols: list[Symbol], entry: str, banks: Mapping[int, bytes]
) -> Iterator[Pointer]:
    """Yield the places in banks that hold addresses of device variables."""
    segments = {segment.name for segment in placed_segments(sections)}
    for bank, relocation, symbol in _relocated(sections, symbols, entry, banks):
        target = _section_of(sections, symbol).name
        if target in segments:
            addend = relocation.addend
            if addend is None:
                addend = _number(banks[bank][relocation.offset : relocation.offset + 8])
            yield Pointer(bank, relocation.offset, target, symbol.value + addend)


def _functions(
    sections: list[Section], symbols: list[Symbol], entry: str, banks: Mapping[int, bytes]
) -> Iterator[FunctionPointer]:
    """Yield the places in banks that hold addresses of what the file does not define."""
    for bank, relocation, symbol in _relocated(sections, symbols, entry, banks):
        if not symbol.section:
            yield FunctionPointer(bank, relocation.offset, symbol.name)


def _relocated(
    sections: list[Section], symbols: list[Symbol], entry: str, banks: Mapping[int, bytes]
) -> Iterator[tuple[int, elf.Relocation, Symbol]]:
    """Yield the places in banks that hold whole addresses: bank, relocation, symbol; other relocations are ignored."""
    for bank, data in banks.items():
        for name in (f".nv.constant{bank}.{entry}", f".nv.constant{bank}"):
            for relocation in elf.relocations(sections, name):
                if relocation.symbol >= len(symbols) or relocation.offset + 8 > len(data):
                    raise UsageError(f"the binary is no cubin: a relocation of {name} lies outside of it")
                if relocation.kind == _ADDRESS:
                    yield bank, relocation, symbols[relocation.symbol]


def _max_threads(own: Mapping[int, list[bytes]]) -> int | None:
    for code in (_REQUIRED_THREADS, _MAX_THREADS):
        for value in own.get(code, ()):
            x, y, z = _three(value)
            return x * y * z
    return None
