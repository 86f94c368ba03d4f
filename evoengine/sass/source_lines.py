"""Source lines in the executor's messages, which name instructions by their addresses."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

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
