"""Lines of the source text for addresses of machine code.

A candidate's binary has no line table: it would treble its size in the ledger. Where a message names addresses, the
source is compiled again with `-lineinfo`, which changes no instruction, and nvdisasm prints the lines.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from evoengine.errors import MachineError, UsageError
from evoengine.records import Binary, Source
from evoengine.sass import elf
from evoengine.sass.listing import line_table
from evoengine.stages.compile import CompileFailed, compile_with_lines

_INSTRUCTION = re.compile(r"(?:(?<=` )|(?<=, )|^)at 0x([0-9a-f]+)\b")
_KERNEL = re.compile(r"^kernel (\w+),")


def name_source_lines(message: str, source: Source, binary: Binary) -> str:
    """Return an executor's message with `(FILE:LINE)` behind each instruction's address, as in `at 0x2180 (a.cu:18)`.

    Of a function that was inlined the line of its call is named too. The message is returned as it is where it names no
    instruction, or where the source does not compile to the same machine code again.
    """
    if not _INSTRUCTION.search(message):
        return message
    kernel = _KERNEL.match(message)
    entry = kernel[1] if kernel else source.entry
    try:
        cubin = compile_with_lines(source, binary.arch)
        if _code(cubin, entry) != _code(binary.cubin, entry):
            return message
        lines = line_table(cubin, entry)
    except (CompileFailed, MachineError, UsageError):
        return message

    def named(found: re.Match[str]) -> str:
        frames = lines.get(int(found[1], 16), [])
        return f"{found[0]} ({_place(frames, source.entry)})" if frames else found[0]

    return _INSTRUCTION.sub(named, message)


def _code(cubin: bytes, entry: str) -> bytes | None:
    return next((s.data for s in elf.sections(cubin) if s.name == f".text.{entry}"), None)


def _place(frames: Sequence[tuple[str, int]], entry: str) -> str:
    """Name the innermost line of the kernel's own text, and the line of the kernel that calls that function."""
    own = [line for file, line in frames if file == f"{entry}.cu"]
    if not own:
        return ":".join(map(str, frames[0]))
    return f"{entry}.cu:{own[0]}" + (f", called in line {own[-1]}" if own[-1] != own[0] else "")
