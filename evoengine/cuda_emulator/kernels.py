"""The kernels and `__device__` variables that a text defines, and whether blocks may talk to one another in it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from evoengine.cuda_emulator.declarations import (
    ALIGNMENT,
    PREPROCESSOR,
    blank_comments,
    mask,
    read_declarators,
    split_declarators,
)
from evoengine.devices.base import KernelUnbuildable

_WORD_AND_BRACKET = re.compile(r"(\w+)\s*\(")
_ATTRIBUTES = frozenset(
    "__launch_bounds__ __cluster_dims__ __maxnreg__ __block_size__ __attribute__ __align__ alignas __declspec".split()
)
_BOUNDARY = re.compile(r'[;{}]|\bextern\s*"[^"]*"\s*\{')
_TEMPLATE = re.compile(r"\btemplate\s*<")
_LAUNCH_BOUNDS = re.compile(r"\b__launch_bounds__\s*\(")
_CLUSTER = re.compile(r"\b__cluster_dims__\s*\(([^()]*)\)")

_DEVICE_VARIABLE = re.compile(r"\b__device__\b([^;{}()]*)([;={])")
_CONSTANT = re.compile(r"\b(?:const|constexpr|__constant__|extern)\b")

_SHARES_MEMORY = re.compile(
    r"\batomic\w*|\b__threadfence\w*|\b__nv_atomic\w*|\bcuda\s*::\s*(?:std\s*::\s*)?atomic|"
    r"\bvolatile\b|\b__nanosleep\b"
)
_ASM_QUALIFIER = re.compile(r"\b(?:asm|__asm__|__asm)\b\s*(?:volatile|__volatile__)\b")
_SHARES_MEMORY_IN_PTX = re.compile(
    r"\b(?:atom|red|membar|multimem)\.|\bfence\.(?:sc|acq_rel|acquire|release)\b|"
    r"\b(?:ld|st)\.[\w.:]*\b(?:relaxed|acquire|release|volatile|mmio)\b"
)
_LITERAL = re.compile(r'"(?:\\.|[^"\\\n])*"')


class KernelDefinition(NamedTuple):
    """A `__global__` function with its body; positions are in the text."""

    name: str
    least_blocks: str
    """blocks per multiprocessor that `__launch_bounds__` asks for, in the text's own words; "1" where it does not"""
    cluster: int
    """blocks of a cluster, along x"""
    body: int
    end: int
    """behind the closing brace"""


class DeviceVariables(NamedTuple):
    """Variables of one declaration that kernels may write."""

    names: list[str]
    end: int
    """behind its semicolon"""


def find_kernels(masked: str) -> list[KernelDefinition]:
    """Return the kernels of a text in order. Literals and comments are blank in `masked`.

    Templates and definitions inside macros are ignored. Raises KernelUnbuildable for a cluster that the emulator cannot
    run.
    """
    code = _without_directives(masked)
    return [found for mark in re.finditer(r"\b__global__\b", code) if (found := _definition(code, mark.start()))]


def find_device_variables(masked: str) -> list[DeviceVariables]:
    """Return the declarations of non-constant `__device__` variables in order."""
    code = _without_directives(masked)
    plain = ALIGNMENT.sub(lambda m: " " * len(m[0]), code)
    found = []
    for match in _DEVICE_VARIABLE.finditer(plain):
        start = max((m.end() for m in _BOUNDARY.finditer(plain, 0, match.start())), default=0)
        declared = read_declarators(",".join(part.split("=")[0] for part in split_declarators(match[1])))
        if not declared or _CONSTANT.search(plain, start, match.end(1)):
            continue
        end = match.end()
        while match[2] != ";" and end < len(plain) and plain[end - 1] != ";":
            end = closing_bracket(plain, end) + 1 if plain[end] in "([{" else end + 1
        found.append(DeviceVariables([name for name, _ in declared[1]], end))
    return found


def _without_directives(masked: str) -> str:
    return PREPROCESSOR.sub(lambda m: re.sub(r"[^\n]", " ", m[0]), masked)


def shares_memory(text: str) -> bool:
    """Return whether blocks of the text's kernels may communicate.

    They may by atomics, fences, volatile or strong accesses, device variables, or from kernel to kernel.
    """
    masked = mask(text)
    if len(find_kernels(masked)) > 1 or find_device_variables(masked):
        return True
    if _SHARES_MEMORY.search(_ASM_QUALIFIER.sub("asm", masked)):
        return True
    return any(_SHARES_MEMORY_IN_PTX.search(literal[0]) for literal in _LITERAL.finditer(blank_comments(text)))


def _definition(code: str, at: int) -> KernelDefinition | None:
    start = max((m.end() for m in _BOUNDARY.finditer(code, 0, at)), default=0)
    if _TEMPLATE.search(code, start, at):
        return None
    for name, opening in _calls(code, at):
        if name in _ATTRIBUTES:
            continue
        behind = re.compile(r"\s*\{").match(code, closing_bracket(code, opening) + 1)
        if not behind:
            return None
        declaration = code[start:opening]
        body = behind.end() - 1
        return KernelDefinition(
            name, _least_blocks(declaration), _cluster(code, declaration, start), body, closing_bracket(code, body) + 1
        )
    return None


def _calls(code: str, at: int) -> Iterator[tuple[str, int]]:
    """Name and opening bracket of whatever looks like a call from there on, at the outermost level."""
    while (match := _WORD_AND_BRACKET.search(code, at)) and not _BOUNDARY.search(code, at, match.start()):
        yield match[1], match.end() - 1
        at = closing_bracket(code, match.end() - 1) + 1


def _least_blocks(declaration: str) -> str:
    match = _LAUNCH_BOUNDS.search(declaration)
    if not match:
        return "1"
    bounds = split_declarators(declaration[match.end() : closing_bracket(declaration, match.end() - 1)])
    return f"({' '.join(bounds[1].split())})" if len(bounds) > 1 else "1"


def _cluster(code: str, declaration: str, start: int) -> int:
    match = _CLUSTER.search(declaration)
    if not match:
        return 1
    x, *others = (part.strip() for part in match[1].split(","))
    if not x.isdigit() or any(other != "1" for other in others):
        line = code.count("\n", 0, start + match.start()) + 1
        raise KernelUnbuildable(f"line {line}: __cluster_dims__({match[1]}), where the emulator wants (number, 1, 1)")
    return int(x)


def closing_bracket(masked: str, opening: int) -> int:
    """Return the position of the bracket that closes the one at `opening`. Raises KernelUnbuildable if none does."""
    depth = 0
    for i in range(opening, len(masked)):
        depth += (masked[i] in "([{") - (masked[i] in ")]}")
        if depth == 0:
            return i
    line = masked.count("\n", 0, opening) + 1
    raise KernelUnbuildable(f"line {line}: a bracket that is never closed")
