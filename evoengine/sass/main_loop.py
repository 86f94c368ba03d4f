"""The main loop of a wgmma kernel in its listing: the instructions of a step, and where it waits for products.

listing ──▶ basic blocks ──▶ loops (back edges) ──▶ the innermost ones around wgmma ──▶ why_slow
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from evoengine.sass.listing import ListedInstruction, instructions, labels

GROUP_PRODUCTS = ("HGMMA", "QGMMA", "IGMMA")
"""opcodes of wgmma: of halves and floats, of FP8, of integers of one byte"""
MIN_OVERLAPPED_MAXIMA = 0.2
"""minimum share of a step's row maxima that must precede the wait for an overlapping product. The six binaries of
FlashAttention-3 have 26 to 100 %; where the compiler moves the wait there are none"""
MAX_MOVED = 0.75
"""limit of a step's R2UR per product, beyond which operand addresses are moved from vector registers at every step"""
WIDE_FENCES = ("MEMBAR.ALL.GPU", "MEMBAR.SC.GPU", "MEMBAR.ALL.SYS", "MEMBAR.SC.SYS", "MEMBAR.SC.VC", "MEMBAR.ALL.VC")

_TARGET = re.compile(r"`\((\.L_\w+)\)")
_PENDING = re.compile(r"gsb0, (0x[0-9a-f]+)")
_ENDS = ("EXIT", "RET", "BRX", "JMX", "BPT")


@dataclass(frozen=True, slots=True)
class MainLoop:
    """An innermost loop around products; `step` has its instructions in an order in which a warp can execute them.

    Where the loop branches, both ways are among them. `path` is the shortest way round: without masks, and without what
    is repeated until a barrier lets the warp go on.
    """

    step: Sequence[ListedInstruction]
    path: Sequence[ListedInstruction]

    def count(self, opcode: str) -> int:
        """Return how many instructions of a step have this opcode, modifiers aside."""
        return count_opcode(self.step, opcode)

    @property
    def fences(self) -> Sequence[ListedInstruction]:
        """Return the instructions that wait until the thread's memory accesses are visible beyond its block."""
        return [i for i in self.step if i.opcode.startswith(WIDE_FENCES)]

    @property
    def overlapped_maxima(self) -> tuple[int, int] | None:
        """Return the number of row maxima (FMNMX, VIMNMX) before the wait for a product in flight, and of all.

        None where no product is left in flight, or where there are no maxima, and so no softmax.
        """
        maxima = [n for n, i in enumerate(self.step) if i.opcode.startswith(("FMNMX", "VIMNMX"))]
        left = next((n for n, i in enumerate(self.step) if _products_left(i)), None)
        if left is None or not maxima:
            return None
        ended = next((n for n, i in enumerate(self.step) if n > left and _products_left(i) == 0), len(self.step))
        return sum(left < n < ended for n in maxima), len(maxima)


def count_opcode(instructions: Sequence[ListedInstruction], opcode: str) -> int:
    return sum(i.opcode.partition(".")[0] == opcode for i in instructions)


def stall_sum(instructions: Sequence[ListedInstruction]) -> int:
    """Return the clocks that one warp alone would take, by the stall counts."""
    return sum(max(1, i.stall) for i in instructions)


def _products_left(instruction: ListedInstruction) -> int | None:
    """Return how many wgmma groups a wait leaves in flight; None for any other instruction."""
    found = _PENDING.search(instruction.text) if instruction.opcode.startswith("WARPGROUP.DEPBAR") else None
    return int(found[1], 16) if found else None


def why_slow(listing: str, entry: str) -> str | None:
    """Return what in a main loop of the kernel `entry` defeats the purpose of its source, or None."""
    for loop in main_loops(listing, entry):
        if loop.fences:
            return (
                f"{loop.fences[0].opcode} in the main loop: each step waits until the whole GPU sees the warp's memory "
                "accesses; an mbarrier in another block of the cluster takes a plain arrive"
            )
        overlapped = loop.overlapped_maxima
        if overlapped is not None and overlapped[0] < MIN_OVERLAPPED_MAXIMA * overlapped[1]:
            return (
                f"the compiler waits for a product in flight before {overlapped[1] - overlapped[0]} of the "
                f"{overlapped[1]} row maxima that should overlap it; a branch or a loop before the wait holds it there"
            )
        products = next(opcode for opcode in GROUP_PRODUCTS if loop.count(opcode))
        if loop.count("R2UR") > MAX_MOVED * loop.count(products):
            return (
                f"{loop.count('R2UR')} R2UR beside {loop.count(products)} {products} in a step of the main loop: what "
                "the products' addresses depend on is not known to be the same in all lanes; __shfl_sync makes it so"
            )
    return None


def main_loops(listing: str, entry: str) -> list[MainLoop]:
    """Return the innermost loops around wgmma of the kernel `entry`. Raises UsageError if it is not listed."""
    blocks = _blocks(instructions(listing, entry), labels(listing, entry))
    order = _order(blocks)
    products = {n for n, block in enumerate(blocks) if _multiplies(block)}
    around = {head: body for head, body in _loops(blocks, order).items() if body & products}
    innermost = {head: body for head, body in around.items() if not any(other < body for other in around.values())}

    def listed(numbers: Sequence[int]) -> list[ListedInstruction]:
        return [i for n in numbers for i in blocks[n].instructions]

    return [
        MainLoop(listed([n for n in order if n in body]), listed(_shortest(blocks, order, head, body)))
        for head, body in innermost.items()
    ]


# ── control flow ────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class _Block:
    instructions: Sequence[ListedInstruction]
    successors: Sequence[int]


def _blocks(code: Sequence[ListedInstruction], places: Mapping[str, int]) -> list[_Block]:
    """Return the basic blocks in the order of the listing, each with the numbers of its successors."""
    targets = [_target(i, places) for i in code]
    starts = {0} | {n + 1 for n, i in enumerate(code) if targets[n] is not None or _ends(i)}
    index = {i.address: n for n, i in enumerate(code)}
    starts |= {index[t] for t in targets if t is not None and t in index}
    firsts = sorted(n for n in starts if n < len(code))
    number = {code[first].address: n for n, first in enumerate(firsts)}
    found = []
    for n, first in enumerate(firsts):
        end = firsts[n + 1] if n + 1 < len(firsts) else len(code)
        last, target = code[end - 1], targets[end - 1]
        following = [number[target]] if target in number else []
        falls_through = not (_ends(last) or (target is not None and not _conditional(last)))
        found.append(_Block(code[first:end], following + [n + 1] * (falls_through and n + 1 < len(firsts))))
    return found


def _multiplies(block: _Block) -> bool:
    return any(count_opcode(block.instructions, opcode) for opcode in GROUP_PRODUCTS)


def _target(instruction: ListedInstruction, places: Mapping[str, int]) -> int | None:
    """Return the address to which a branch may go. BSSY and the like only name where lanes reconverge."""
    found = _TARGET.search(instruction.text) if instruction.opcode.partition(".")[0] in ("BRA", "JMP") else None
    return places.get(found[1]) if found else None


def _conditional(branch: ListedInstruction) -> bool:
    """Return whether a branch has a guard, or a predicate among its operands (BRA.DIV UR4, `(.L_x_3))."""
    operands = branch.text.partition(branch.opcode)[2]
    return branch.guard not in ("", "PT", "UPT") or "," in operands


def _ends(instruction: ListedInstruction) -> bool:
    return instruction.opcode.startswith(_ENDS) and instruction.guard in ("", "PT", "UPT")


def _order(blocks: Sequence[_Block]) -> list[int]:
    """Return the reachable blocks in reverse postorder: each before its successors, back edges apart."""
    order, seen = [], {0}
    stack = [(0, iter(blocks[0].successors))] if blocks else []
    while stack:
        node, rest = stack[-1]
        following = next((n for n in rest if n not in seen), None)
        if following is None:
            order.append(node)
            stack.pop()
        else:
            seen.add(following)
            stack.append((following, iter(blocks[following].successors)))
    return order[::-1]


def _shortest(blocks: Sequence[_Block], order: Sequence[int], head: int, body: set[int]) -> list[int]:
    """Return the blocks of the path from the loop's head back to it with the fewest instructions."""
    length, before = {head: len(blocks[head].instructions)}, {}
    for n in order:
        for following in blocks[n].successors if n in length else ():
            reached = length[n] + len(blocks[following].instructions)
            if following in body and following != head and reached < length.get(following, reached + 1):
                length[following], before[following] = reached, n
    way = [min((n for n in length if head in blocks[n].successors), key=lambda n: length[n])]
    while way[-1] != head:
        way.append(before[way[-1]])
    return way[::-1]


def _loops(blocks: Sequence[_Block], order: Sequence[int]) -> dict[int, set[int]]:
    """Return the natural loops by their heads, those with the same head merged.

    See Aho, Lam, Sethi, Ullman, "Compilers", section 9.6.
    """
    before: dict[int, list[int]] = {n: [] for n in order}
    for n in order:
        for following in blocks[n].successors:
            before[following].append(n)
    dominators = _dominators(before, order)
    bodies: dict[int, set[int]] = {}
    for n in order:
        for head in blocks[n].successors:
            if head not in dominators[n]:
                continue
            body = bodies.setdefault(head, {head})
            waiting = [n]
            while waiting:
                one = waiting.pop()
                if one not in body:
                    body.add(one)
                    waiting += before[one]
    return bodies


def _dominators(before: Mapping[int, Sequence[int]], order: Sequence[int]) -> dict[int, set[int]]:
    """Return the dominators of each block: those on every path to it, itself included."""
    found = {n: set(order) for n in order}
    found[order[0]] = {order[0]}
    changed = True
    while changed:
        changed = False
        for n in order[1:]:
            common = set.intersection(*(found[b] for b in before[n])) | {n}
            if common != found[n]:
                found[n], changed = common, True
    return found
