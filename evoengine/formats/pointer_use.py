"""Determine from a kernel's text which of its pointers it writes and reads, without compiling it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_ALIAS = re.compile(r"\b(?:auto|[\w:]+)\s*(?:const\s*)?\*+\s*(?:const\s+|__restrict__\s+)*(\w+)\s*=([^;]*);")
_ASSIGNED = r"\s*(?:=(?!=)|[-+*/%&|^]=|<<=|>>=|\+\+|--)"
_CALL = re.compile(r"\b(\w+)\s*(?:<[^;<>(){}]*>\s*)?\(")
_NO_CALLS = frozenset("if for while switch return sizeof reinterpret_cast static_cast const_cast assert".split())
DEPTH = 8
"""limit of nested calls that are followed"""


class Use(NamedTuple):
    written: bool
    read: bool


def pointer_uses(text: str, entry: str) -> list[Use] | None:
    """Return how the kernel uses each of its parameters, in order; None if the text has no such function."""
    code = _COMMENT.sub(" ", text)
    found = _function(code, entry)
    if found is None:
        return None
    parameters, body = found
    return [_use(code, body, name, 0) for name in parameters]


def _function(code: str, name: str) -> tuple[list[str], str] | None:
    """Return the names of a function's parameters, and its body."""
    for match in re.finditer(rf"\b{re.escape(name)}\s*\(", code):
        end = _closing(code, match.end() - 1)
        opening = re.compile(r"\s*\{").match(code, end + 1)
        if opening:
            listed = _split(code[match.end() : end])
            names = [re.search(r"(\w+)\s*(?:\[[^\]]*\]\s*)*$", part) for part in listed]
            return [n[1] if n else "" for n in names], code[opening.end() : _closing(code, opening.end() - 1)]
    return None


def _use(code: str, body: str, name: str, depth: int) -> Use:
    """Return whether a pointer, or one derived from it, is written and read in a body."""
    if not name or depth > DEPTH:
        return Use(False, bool(name))
    names, grown = {name}, True
    while grown:
        made = {m[1] for m in _ALIAS.finditer(body) if names & set(re.findall(r"\w+", m[2]))}
        grown = not made <= names
        names |= made
    written = read = False
    handed = [span for span, function, _ in _calls(body) if _is_followed(code, function)]
    for one in names:
        for place in re.finditer(rf"(?<![\w.>]){re.escape(one)}\b", body):
            wrote, alone = _stored(body, place.start(), place.end())
            written |= wrote
            is_handed = any(a <= place.start() < b for a, b in handed) and body[place.end() :].lstrip()[:1] != "["
            read |= not (wrote and alone) and not is_handed and not _is_declared(body, place.start(), place.end())
    for _, function, arguments in _calls(body):
        at = [i for i, argument in enumerate(arguments) if names & set(re.findall(r"\w+", _outside_indices(argument)))]
        for i in at if not _is_value(arguments, at, names) else ():
            inner = _of_call(code, function, arguments, i, depth)
            written, read = written or inner.written, read or inner.read
    return Use(written, read)


def _outside_indices(argument: str) -> str:
    """Return an argument without its indices: `&count[image[i]]` passes on count, and an element of image."""
    while (shorter := re.sub(r"\[[^\[\]]*\]", "\v", argument)) != argument:
        argument = shorter
    return argument.replace("\v", "[]")


def _is_value(arguments: list[str], at: list[int], names: set[str]) -> bool:
    """Return whether a call receives only elements of the pointer, not the pointer itself."""
    return all(
        "&" not in arguments[i]
        and all(re.search(rf"\b{n}\s*\[", arguments[i]) for n in names if n in re.findall(r"\w+", arguments[i]))
        for i in at
    )


def _is_followed(code: str, function: str) -> bool:
    """Return whether `_of_call` knows what a call does with a pointer."""
    return function.startswith(("atomic", "__st", "store")) or _function(code, function) is not None


def _of_call(code: str, function: str, arguments: list[str], i: int, depth: int) -> Use:
    if function.startswith("atomic"):
        return Use(i == 0, True)
    if function.startswith(("__st", "store")) and i == 0:
        return Use(True, False)
    inner = _function(code, function)
    if inner is None or i >= len(inner[0]):
        return Use(False, True)
    return _use(code, inner[1], inner[0][i], depth + 1)


def _stored(body: str, start: int, end: int) -> tuple[bool, bool]:
    """Return whether an element is stored to, and whether it is stored to without being read."""
    behind, before = end, body[:start].rstrip()
    while (bracket := re.compile(r"\s*\[").match(body, behind)) is not None:
        behind = _closing(body, bracket.end() - 1) + 1
    is_element = behind > end
    while (member := re.compile(r"\s*\.\s*\w+").match(body, behind)) is not None:
        behind = member.end()
    if not is_element and (opening := _enclosing(body, start)) is not None and body[:opening].rstrip().endswith("*"):
        behind, is_element = _closing(body, opening) + 1, True  # *(p + i)
    elif not is_element and before.endswith("*") and re.search(r"(?:^|[;{}(=])\s*\*+$", before):
        is_element = True  # *p
    elif not is_element and (opening := _cast(body, start)) is not None:
        behind, is_element = opening, True  # reinterpret_cast<T*>(p)[i]
    if not is_element:
        return False, False
    assigned = re.compile(_ASSIGNED).match(body, behind)
    incremented = re.search(r"(?:\+\+|--)$", before) is not None
    if assigned is None:
        return incremented, False
    return True, assigned[0].strip() == "="


def _cast(body: str, start: int) -> int | None:
    """Return the position after the element of a cast pointer: `((T*)p)[i]`, `reinterpret_cast<T*>(p + k)[i]`."""
    opening = _enclosing(body, start)
    if opening is None:
        return None
    behind = _closing(body, opening) + 1
    if body[behind : behind + 1] == ")":
        behind += 1
    bracket = re.compile(r"\s*\[").match(body, behind)
    if bracket is not None:
        return _closing(body, bracket.end() - 1) + 1
    star = re.search(r"\*\s*(?:reinterpret_cast\s*<[^<>]*>\s*)?$", body[:opening])
    return behind if star else None


def _enclosing(body: str, start: int) -> int | None:
    """Return the position of the innermost open bracket `(` at a position, within its statement."""
    depth = 0
    for at in range(start - 1, -1, -1):
        if body[at] in ";{}":
            return None
        depth += (body[at] in ")]") - (body[at] in "([")
        if depth < 0:
            return at if body[at] == "(" else None
    return None


def _is_declared(body: str, start: int, end: int) -> bool:
    """Return whether the name occurs in the declaration of a pointer, as its name or in its initial value."""
    if re.match(r"\s*=(?!=)", body[end:]) and re.search(r"[\w>]\s*\*+\s*(?:const\s+|__restrict__\s+)*$", body[:start]):
        return True
    statement = body[max(body.rfind(c, 0, start) for c in ";{}") + 1 : start]
    return re.search(r"\*+\s*(?:const\s+|__restrict__\s+)*\w+\s*=[^=\[]*$", statement) is not None


def _calls(body: str) -> Iterator[tuple[tuple[int, int], str, list[str]]]:
    """Yield the position of the arguments of each call, the function's name, and the arguments."""
    for match in _CALL.finditer(body):
        if match[1] not in _NO_CALLS:
            end = _closing(body, match.end() - 1)
            yield (match.end(), end), match[1], _split(body[match.end() : end])


def _split(text: str) -> list[str]:
    """Split a text at the commas outside brackets."""
    parts, depth, start = [], 0, 0
    for at, c in enumerate(text):
        depth += (c in "([{<") - (c in ")]}>" and text[at - 1 : at] != "-")
        if c == "," and depth <= 0:
            parts.append(text[start:at])
            start = at + 1
    return [part.strip() for part in [*parts, text[start:]] if part.strip()]


def _closing(text: str, opening: int) -> int:
    """Return the position of the bracket that closes the one at `opening`; the end of the text if there is none."""
    depth = 0
    for at in range(opening, len(text)):
        depth += (text[at] in "([{") - (text[at] in ")]}")
        if depth == 0:
            return at
    return len(text) - 1
