"""Mutants of a kernel's text: one small fault each, at a place drawn by seed.

The operators are those of careless edits: a barrier, fence or wait dropped, a term dropped, an integer off by one, a
comparison off by one, and a statement that is skipped by one warp, lane, block or loop step. They know C++ well enough
to find places, and nothing of any template; what does not compile, or compiles to the machine code of the original, is
no mutant.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from evoengine.records import Binary, Source
from evoengine.stages.compile import CompileFailed, compile_source

SYNCHRONISES = re.compile(r"sync|fence|wait|arrive|commit|release|barrier|await|drain", re.IGNORECASE)
_CALL = re.compile(
    r"(?<=[;{})])(\s*)((?:[\w.]+(?:::|->|\.))*[A-Za-z_]\w*(?:<[^;<>]*>)?\((?:[^;{}]|\{[^;{}]*\})*\)\s*;)"
)
_STATEMENT = re.compile(
    r"(?<=[;{})])(\s*)((?:\*?[A-Za-z_][\w.\->\[\]]*(?:\([^;{}()]*\))?(?:\[[^;{}]*?\])*)\s*(?:[-+*|^]?=)[^=;{}][^;{}]*;)"
)
_INTEGER = re.compile(r"(?<![\w.\"%])(\d{1,4})(?![\w.\"])")
_RELATION = re.compile(r"(?<=[\w)\]] )(<=|>=|<|>|==|!=)(?= [\w(\-])")
_TERM = re.compile(r"(?<=[\w)\]])( [-+*] )([A-Za-z_][\w.]*(?:\[[^\[\];]*\])?|\d+)(?=[\s;,)\]])")
_LOOP = re.compile(r"\bfor \((?:int|unsigned)(?: int)? (\w+) = [^;]*; [^;]*; [^{;]*\)")
_FLIPPED = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "=="}
_DECLARES = re.compile(
    r"^\s*(?:const|constexpr|static|unsigned|int|float|double|bool|auto|long|T|half|return|using|typedef)\b"
)


class Site(NamedTuple):
    """A place in a text and what stands there instead in a mutant."""

    start: int
    end: int
    now: str


@dataclass(frozen=True)
class Mutant:
    operator: str
    line: int
    """of the original text, from 1"""
    was: str
    now: str
    source: Source

    def __str__(self) -> str:
        return f"{self.text} (line {self.line})"

    @property
    def text(self) -> str:
        """The fault without its line, which every change above it moves."""
        return f"{self.operator}: {_short(self.was)} → {_short(self.now)}"


def _short(text: str) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= 70 else f"{flat[:67]}…"


def masked(text: str) -> str:
    """Return the text with comments, literals and preprocessor lines blanked, of the same length."""
    pattern = r"//[^\n]*|/\*.*?\*/|\"(?:[^\"\\\n]|\\.)*\"|'(?:[^'\\\n]|\\.)*'|^[ \t]*#(?:[^\n\\]|\\.)*"
    return re.sub(pattern, lambda m: re.sub(r"[^\n]", " ", m[0]), text, flags=re.DOTALL | re.MULTILINE)


def _bodies(code: str) -> list[tuple[int, int]]:
    """Return where functions have their bodies: braces behind a closing bracket, and all that is in them."""
    found: list[tuple[int, int]] = []
    stack: list[bool] = []
    start = 0
    for brace in re.finditer(r"[{}]", code):
        if brace[0] == "{":
            head = code[max(0, brace.start() - 400) : brace.start()].rstrip()
            nested = any(stack)
            if not nested:
                start = brace.end()
            stack.append(nested or re.search(r"\)(?:\s*const)?$|\bnoexcept$", head) is not None)
        elif stack and stack.pop() and not any(stack):
            found.append((start, brace.start()))
    return found


def drop_synchronisation(text: str, code: str, rng: random.Random) -> Iterator[Site]:
    for call in _CALL.finditer(code):
        name = call[2].split("(")[0]
        if SYNCHRONISES.search(name):
            yield Site(call.start(2), call.end(2), ";")


def drop_term(text: str, code: str, rng: random.Random) -> Iterator[Site]:
    for term in _TERM.finditer(code):
        yield Site(term.start(), term.end(), "")


def off_by_one(text: str, code: str, rng: random.Random) -> Iterator[Site]:
    for number in _INTEGER.finditer(code):
        value = int(number[1]) + rng.choice((-1, 1))
        yield Site(number.start(), number.end(), str(value))


def relation(text: str, code: str, rng: random.Random) -> Iterator[Site]:
    for found in _RELATION.finditer(code):
        yield Site(found.start(), found.end(), _FLIPPED[found[1]])


def skip_at_a_place(text: str, code: str, rng: random.Random) -> Iterator[Site]:
    """Skip a statement in one warp, lane, block or step of the loop around it."""
    for pattern in (_STATEMENT, _CALL):
        for found in pattern.finditer(code):
            own = text[found.start(2) : found.end(2)]
            if _DECLARES.match(own) or ("=" in own.split("(")[0] and re.match(r"^\w+\s+\w+", own)):
                continue
            yield Site(found.start(2), found.end(2), f"if (!({_place(code, found.start(2), rng)})) {{ {own} }}")


def _place(code: str, at: int, rng: random.Random) -> str:
    warps = rng.randrange(4)
    places = [
        f"threadIdx.x / 32 == {warps}", f"threadIdx.x % 32 == {rng.randrange(32)}",
        "blockIdx.x + 1 == gridDim.x", "blockIdx.y + 1 == gridDim.y && gridDim.y > 1", "blockIdx.x == 1",
    ]  # fmt: skip
    loops = [
        m
        for m in _LOOP.finditer(code, max(0, at - 2000), at)
        if code[m.end() : at].count("}") <= code[m.end() : at].count("{")
    ]
    if loops and code[loops[-1].end() : at].count("{") > code[loops[-1].end() : at].count("}") - 1:
        places += [f"{loops[-1][1]} == {rng.randrange(6)}"] * 3
    return rng.choice(places)


OPERATORS: dict[str, Callable[[str, str, random.Random], Iterator[Site]]] = {
    "synchronisation dropped": drop_synchronisation,
    "term dropped": drop_term,
    "off by one": off_by_one,
    "comparison": relation,
    "skipped at a place": skip_at_a_place,
}


def sites(text: str, rng: random.Random) -> dict[str, list[Site]]:
    """Return the places for each operator, in the bodies of functions alone."""
    code = masked(text)
    bodies = _bodies(code)

    def inside(site: Site) -> bool:
        return any(start <= site.start and site.end <= end for start, end in bodies)

    return {name: [s for s in operator(text, code, rng) if inside(s)] for name, operator in OPERATORS.items()}


def mutants(source: Source, arch: str, original: Binary, count: int, seed: int) -> Iterator[tuple[Mutant, Binary]]:
    """Yield `count` mutants that compile to other machine code than the original, operators in turn."""
    rng = random.Random(seed)
    left = {name: rng.sample(found, len(found)) for name, found in sites(source.text, rng).items() if found}
    made = 0
    while made < count and any(left.values()):
        for name in list(left):
            if made == count or not left[name]:
                continue
            site = left[name].pop()
            mutant = _mutant(source, name, site)
            try:
                binary = compile_source(mutant.source, arch)
            except CompileFailed:
                continue
            if _code(binary) != _code(original):
                made += 1
                yield mutant, binary


def _mutant(source: Source, operator: str, site: Site) -> Mutant:
    text = source.text[: site.start] + site.now + source.text[site.end :]
    line = source.text.count("\n", 0, site.start) + 1
    start, end = max(0, site.start - 30), min(len(source.text), site.end + 30)
    was, now = source.text[start:end], source.text[start : site.start] + site.now + source.text[site.end : end]
    return Mutant(operator, line, was, now, Source(text, source.entry, source.launch))


def _code(binary: Binary) -> str:
    """Return the instructions of a listing: without addresses of lines, which comments move."""
    return "\n".join(line for line in binary.listing.splitlines() if "/*" in line)
