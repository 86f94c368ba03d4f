"""Single edits of a listing's control words that take away a wait which the instruction behind it needs.

What is needed is told from the listing's text alone, by rules that share nothing with the executor's: the first
register of a result, and the first instruction behind it that waits and names this register as a source.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from evoengine.sass.listing import ListedInstruction, instructions, labels

NO_SCOREBOARD = 7
FIXED = {"FFMA", "FADD", "FMUL", "IADD3", "LOP3", "IMAD", "SHF", "LEA", "FMNMX", "IMNMX", "HFMA2", "HADD2", "HMUL2"}
"""opcodes whose result is there after at least four clocks"""
LOADS = {"LDG", "LDS", "LD", "LDL", "LDSM", "SHFL", "MUFU", "S2R"}
JUMPS = {"BRA", "EXIT", "CALL", "RET", "BRX", "JMP", "BSYNC", "WARPSYNC", "BREAK"}
_REGISTER = re.compile(r"\bR\d+\b")


class Edit(NamedTuple):
    kind: str
    """mask: the wait is dropped; scoreboard: it is never set; stall: one clock"""
    address: int
    keep: int
    """mask of the bits of the second word that stay"""
    put: int
    """bits that are set instead"""


def edits(listing: str, entry: str) -> Iterator[Edit]:
    """Yield all edits of a kernel whose need the text shows."""
    code, targets = instructions(listing, entry), set(labels(listing, entry).values())
    for place, producer in enumerate(code):
        result = _result(producer)
        if result is None:
            continue
        opcode = producer.opcode.partition(".")[0]
        if opcode in LOADS and producer.write_barrier != NO_SCOREBOARD:
            consumer = _only_waiter(code[place + 1 : place + 100], targets, producer)
            if consumer and result in _sources(consumer):
                bit = 52 + producer.write_barrier
                yield Edit("mask", consumer.address, ~(1 << bit), 0)
                yield Edit("scoreboard", producer.address, ~(7 << 46), NO_SCOREBOARD << 46)
        elif opcode in FIXED and producer.stall >= 4 and place + 1 < len(code):
            consumer = code[place + 1]
            if consumer.address not in targets and result in _sources(consumer):
                yield Edit("stall", producer.address, ~(15 << 41), 1 << 41)


def edited(listing: str, entry: str, edit: Edit) -> str:
    """Return the listing with the edit of one control word."""
    start = listing.index(f"\n.text.{entry}:")
    word = re.compile(rf"/\*{edit.address:04x}\*/[^\n]*\n\s*/\* 0x([0-9a-f]{{16}}) \*/").search(listing, start)
    if word is None:
        raise ValueError(f"kernel {entry} has no instruction at {edit.address:#x}")
    value = int(word[1], 16) & edit.keep & 2**64 - 1 | edit.put
    return f"{listing[: word.start(1)]}{value:016x}{listing[word.end(1) :]}"


def _operands(instruction: ListedInstruction) -> list[str]:
    return instruction.text.partition(instruction.opcode)[2].split(",")


def _result(instruction: ListedInstruction) -> str | None:
    """Return the first register that an instruction writes whether or not a predicate holds."""
    if instruction.guard:
        return None
    operands = [o for o in _operands(instruction) if not re.fullmatch(r"\s*U?P[T\d]\s*", o)]
    found = re.fullmatch(r"\s*(R\d+)\s*", operands[0]) if operands else None
    return found[1] if found else None


def _sources(instruction: ListedInstruction) -> set[str]:
    """Return registers that an instruction reads for certain; none of one under a predicate."""
    if instruction.guard:
        return set()
    return set(_REGISTER.findall(",".join(_operands(instruction)[1:])))


def _only_waiter(
    behind: list[ListedInstruction], targets: set[int], producer: ListedInstruction
) -> ListedInstruction | None:
    """Return the first instruction that waits for the producer's scoreboard, where no other wait may stand in for it:
    none for another scoreboard, and no jump, lies between or in it."""
    for instruction in behind:
        if instruction.address in targets or instruction.opcode.partition(".")[0] in JUMPS:
            return None
        if instruction.wait_mask == 1 << producer.write_barrier:
            return instruction
        if instruction.wait_mask or producer.write_barrier in (instruction.write_barrier, instruction.read_barrier):
            return None
    return None
