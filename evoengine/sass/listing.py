"""Machine code as text: `nvdisasm`'s listing of a binary, and its instructions one by one with their control fields.

A listing may be linked as a driver does it, for the executor: a relocated immediate `32@lo(name)` of a device variable
becomes its address, and functions in sections of their own are listed with the kernel that calls them.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import tempfile
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from evoengine.cuda_files import disassembler
from evoengine.errors import MachineError, UsageError
from evoengine.sandbox.host_compiler import building, cache_folder, prune
from evoengine.sandbox.machine import require_own_end
from evoengine.sass import elf
from evoengine.sass.cubin import placed_segments

# Without its analysis of the data flow, which only names the targets of indirect branches: a third of its time.
OPTIONS = ("-c", "-hex", "-ndf")
MALLOC = f"glibc.malloc.hugetlb=1:glibc.malloc.top_pad={64 << 20}"
"""nvdisasm builds the same tables at each start, for which it takes most of its time and of its memory: in huge pages
where the kernel has them, and asked for at once, the start takes a tenth to a fifth less"""
NO_TOOL = "nvdisasm was not found, which reads machine code: pip install nvidia-cuda-nvdisasm"
SECONDS = 60
"""time limit; even a short listing takes a third of a second, so listings are cached"""
KEPT = 4096
"""limit of cached listings, some 30 KB each; a new one removes the least recently used eighth beyond it"""

_LINE = re.compile(
    r"^\s*/\*(?P<address>[0-9a-f]+)\*/\s+(?P<text>(?:@(?P<guard>!?U?P[T\d]+)\s+)?(?P<opcode>[A-Z][\w.]*)[^;]*);"
    r"\s*/\* 0x(?P<low>[0-9a-f]{16}) \*/\s*/\* 0x(?P<high>[0-9a-f]{16}) \*/",
    re.MULTILINE,
)
_LABEL_OR_ADDRESS = re.compile(r"^(?:(?P<label>\.L_\w+):|\s*/\*(?P<address>[0-9a-f]{4,})\*/\s+\S)", re.MULTILINE)
_NEXT_SECTION = "\n//--"
_FRAME_OR_ADDRESS = re.compile(
    r'^(?:\s*//## File "(?P<file>[^"\n]*)", line (?P<line>\d+)|\s*/\*(?P<address>[0-9a-f]{4,})\*/\s+\S)', re.MULTILINE
)
_OPCODE = re.compile(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P[T\d]+\s+)?([A-Z][A-Z0-9_]*)([\w.]*)", re.MULTILINE | re.ASCII)
_OF_PRODUCTS = ("SP", "TF32")
"""modifiers by which products of the same opcode differ in their rate"""


@dataclass(frozen=True, slots=True)
class ListedInstruction:
    """One instruction and what the assembler wrote beside it.

    The control fields are bits 41–61 of the second 64-bit word (maxas and CuAssembler describe them): clocks that the
    warp stalls after it, whether another warp should be next, the scoreboards that it sets when its result
    is there and when its sources are read (7: none), those it waits for (a bit each), and the sources it keeps for the
    next instruction (a bit each).
    """

    address: int
    """bytes from the kernel's start"""
    guard: str
    """P0, !P0, !UP1; empty where it always executes"""
    opcode: str
    """with its modifiers"""
    text: str
    stall: int
    yields: bool
    write_barrier: int
    read_barrier: int
    wait_mask: int
    reuse: int


def disassemble(cubin: bytes, entry: str = "") -> str:
    """Return what `nvdisasm -c -hex -ndf` prints, cached for the user.

    Of the kernel `entry` alone where one is named, since binaries of libraries have hundreds. Raises MachineError where
    the tool is missing, UsageError where it refuses the bytes or takes longer than SECONDS, or where the binary has no
    such kernel.
    """
    only = ("-fun", str(_index_of(cubin, entry))) if entry else ()
    tool = disassembler()
    if tool is None:
        raise MachineError(NO_TOOL)
    try:
        folder = cache_folder("listings")
    except MachineError:  # a read-only home, for example: the cache only saves time
        return _printed(tool, cubin, only)
    kept = folder / f"{_key(tool, cubin, only)[:32]}.z"
    with suppress(OSError, zlib.error):  # none is kept, or a machine that lost power kept a part
        return _read_kept(kept)
    listing = _printed(tool, cubin, only)
    with suppress(OSError):
        _keep(listing, kept)
    return listing


def _keep(listing: str, kept: Path) -> None:
    with building(kept.parent) as scratch:
        (scratch / "listing").write_bytes(zlib.compress(listing.encode(), 1))
        os.replace(scratch / "listing", kept)
    prune(kept.parent, "*.z", KEPT)


def _index_of(cubin: bytes, entry: str) -> int:
    """Return the kernel's index in the table of symbols, by which nvdisasm knows it."""
    names = [symbol.name for symbol in elf.symbols(elf.sections(cubin))]
    if entry not in names:
        raise UsageError(f"the binary has no kernel {entry}")
    return names.index(entry)


def _key(tool: str, cubin: bytes, only: Sequence[str]) -> str:
    digest = hashlib.sha256("\0".join((_contents(tool, os.stat(tool).st_mtime_ns), *OPTIONS, *only)).encode())
    digest.update(cubin)
    return digest.hexdigest()


@cache
def _contents(tool: str, modified: int) -> str:
    """Return a digest of the tool, which is the same in each environment that has this version."""
    return hashlib.sha256(Path(tool).read_bytes()).hexdigest()


def _read_kept(kept: Path) -> str:
    listing = zlib.decompress(kept.read_bytes()).decode()
    os.utime(kept)
    return listing


def line_table(cubin: bytes, entry: str) -> dict[int, list[tuple[str, int]]]:
    """Return the source lines of each instruction of a kernel compiled with `-lineinfo`, by its address.

    They are (file name, line) of the innermost function first, then of the calls that it was inlined through. Raises as
    `disassemble` does.
    """
    tool = disassembler()
    if tool is None:
        raise MachineError(NO_TOOL)
    found: dict[int, list[tuple[str, int]]] = {}
    frames: list[tuple[str, int]] = []
    complete = False
    for match in _FRAME_OR_ADDRESS.finditer(_printed(tool, cubin, ("-gi", "-fun", str(_index_of(cubin, entry))))):
        if match["address"]:
            found[int(match["address"], 16)] = frames
            complete = True
            continue
        frames = [] if complete else frames
        frames = [*frames, (os.path.basename(match["file"]), int(match["line"]))]
        complete = False
    return found


def _printed(tool: str, cubin: bytes, only: Sequence[str]) -> str:
    with tempfile.TemporaryDirectory(prefix="evoengine-") as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        command = [tool, *OPTIONS, *only, str(path)]
        try:
            done = subprocess.run(
                command,
                capture_output=True,
                encoding="utf-8",
                errors="replace",
                timeout=SECONDS,
                check=False,
                env={"GLIBC_TUNABLES": MALLOC, **os.environ},
            )
        except subprocess.TimeoutExpired:
            raise UsageError(f"nvdisasm took longer than {SECONDS} s for a binary of {len(cubin):,} bytes") from None
    require_own_end(tool, done.returncode)
    if done.returncode:
        said = done.stderr.strip().splitlines()
        raise UsageError(f"nvdisasm cannot read the binary: {said[0] if said else f'exit code {done.returncode}'}")
    return done.stdout


def instruction_mix(listing: str) -> dict[str, int]:
    """Return how often each opcode occurs in a listing: `FFMA`, `HMMA`, and `HMMA.TF32`, `HMMA.SP` of such products."""
    return dict(sorted(Counter(_named(*found) for found in _OPCODE.findall(listing)).items()))


def _named(opcode: str, modifiers: str) -> str:
    if not opcode.endswith("MMA"):
        return opcode
    return ".".join((opcode, *(name for name in _OF_PRODUCTS if name in modifiers.split("."))))


def instructions(listing: str, entry: str) -> list[ListedInstruction]:
    """Return the instructions of the kernel `entry`, in order. Raises UsageError where it is not listed."""
    return [_instruction(match) for match in _LINE.finditer(section(listing, entry))]


def labels(listing: str, entry: str) -> dict[str, int]:
    """Return the branch targets of the kernel: label → address of the next instruction. Raises as `instructions`."""
    found: dict[str, int] = {}
    waiting: list[str] = []
    for match in _LABEL_OR_ADDRESS.finditer(section(listing, entry)):
        if match["label"]:
            waiting.append(match["label"])
            continue
        found |= dict.fromkeys(waiting, int(match["address"], 16))
        waiting = []
    return found


def section(listing: str, entry: str) -> str:
    """Return what a listing has of the kernel `entry`; UsageError where it has none."""
    _, heading, behind = f"\n{listing}".partition(f"\n.text.{entry}:\n")
    if not heading:
        raise UsageError(f"the listing has no kernel {entry}")
    return behind.partition(_NEXT_SECTION)[0]


def _instruction(match: re.Match[str]) -> ListedInstruction:
    control = int(match["high"], 16) >> 41
    return ListedInstruction(
        address=int(match["address"], 16),
        guard=match["guard"] or "",
        opcode=match["opcode"],
        text=match["text"].strip(),
        stall=control & 0xF,
        yields=not control >> 4 & 1,
        write_barrier=control >> 5 & 7,
        read_barrier=control >> 8 & 7,
        wait_mask=control >> 11 & 0x3F,
        reuse=control >> 17 & 0xF,
    )


# Source lines in the executor's messages, which name instructions by their addresses.

_INSTRUCTION = re.compile(r"(?:(?<=` )|(?<=, )|^)at 0x([0-9a-f]+)\b")


def names_an_instruction(message: str) -> bool:
    return _INSTRUCTION.search(message) is not None


def with_source_lines(message: str, lines: Mapping[int, Sequence[tuple[str, int]]], own_file: str) -> str:
    """Return the message with `(FILE:LINE)` behind each instruction's address, as in `at 0x2180 (a.cu:18)`.

    `lines` are those of `listing.line_table`; `own_file` is the name of the kernel's own file, whose innermost line
    counts. Of a function that was inlined the line of its call is named too.
    """

    def named(found: re.Match[str]) -> str:
        frames = lines.get(int(found[1], 16), [])
        return f"{found[0]} ({_place(frames, own_file)})" if frames else found[0]

    return _INSTRUCTION.sub(named, message)


def _place(frames: Sequence[tuple[str, int]], own_file: str) -> str:
    own = [line for file, line in frames if file == own_file]
    if not own:
        return ":".join(map(str, frames[0]))
    return f"{own_file}:{own[0]}" + (f", called in line {own[-1]}" if own[-1] != own[0] else "")


_RELOCATED = re.compile(r"(32@(?:lo|hi))\(\(?([^\s()]+)(?: \+ (0x[0-9a-f]+|\d+))?\)?\)")
_CALLED = re.compile(r"\bCALL\.[\w.]+ `\(([^)]+)\)")


def linked_listing(cubin: bytes, entry: str) -> str:
    """Return the listing of a kernel, and of the functions that it calls, with the addresses of device variables.

    Raises as `disassemble` does.
    """
    listing = disassemble(cubin, entry)
    return with_addresses(disassemble(cubin) if calls_others(listing) else listing, cubin)


def calls_others(listing: str) -> bool:
    """Return whether functions are called that the listing does not have."""
    return any(f"\n{name}:\n" not in listing for name in _CALLED.findall(listing))


def with_addresses(listing: str, cubin: bytes) -> str:
    """Return a listing of the cubin with the addresses of device variables."""
    if "32@" not in listing:
        return listing
    addresses = _addresses(cubin)

    def resolved(found: re.Match[str]) -> str:
        if found[2] not in addresses:
            return found[0]
        return f"{found[1]}({addresses[found[2]] + int(found[3] or '0', 0):#x})"

    return _RELOCATED.sub(resolved, listing)


def _addresses(cubin: bytes) -> dict[str, int]:
    """Return the device variables' addresses by name."""
    sections = elf.sections(cubin)
    placed = {segment.name: segment.address for segment in placed_segments(sections)}
    found = {}
    for symbol in elf.symbols(sections):
        name = sections[symbol.section].name if symbol.section < len(sections) else ""
        if (base := placed.get(name)) is not None:
            found[symbol.name] = base + symbol.value
    return found
