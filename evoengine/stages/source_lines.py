"""Lines of the source text for addresses of machine code.

A candidate's binary has no line table: it would treble its size in the ledger. Where a message names addresses, the
source is compiled again with `-lineinfo`, which changes no instruction, and nvdisasm prints the lines.
"""

from __future__ import annotations

import re

from evoengine.errors import MachineError, UsageError
from evoengine.records import Binary, Source
from evoengine.sass import elf
from evoengine.sass.listing import line_table
from evoengine.sass.source_lines import names_an_instruction, with_source_lines
from evoengine.stages.compile import CompileFailed, compile_with_lines

_KERNEL = re.compile(r"^kernel (\w+),")


def name_source_lines(message: str, source: Source, binary: Binary) -> str:
    """Return an executor's message with `(FILE:LINE)` behind each instruction's address, as in `at 0x2180 (a.cu:18)`.

    Of a function that was inlined the line of its call is named too. The message is returned as it is where it names no
    instruction, or where the source does not compile to the same machine code again.
    """
    if not names_an_instruction(message):
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
    return with_source_lines(message, lines, f"{source.entry}.cu")


def _code(cubin: bytes, entry: str) -> bytes | None:
    return next((s.data for s in elf.sections(cubin) if s.name == f".text.{entry}"), None)
