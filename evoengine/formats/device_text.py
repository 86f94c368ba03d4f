"""Convert the CUDA files that other tuners pass to nvcc into the text that NVRTC compiles.

Includes are replaced by the files, host functions and host headers are removed, and a template kernel is replaced by
the instance that is tuned.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from evoengine.cuda_emulator.declarations import (
    PREPROCESSOR,
    blank_comments,
    closing_bracket,
    is_namespace_head,
    mask,
    split_declarators,
)
from evoengine.cuda_emulator.preprocessing import LINE, STANDARD
from evoengine.devices.base import KernelUnbuildable
from evoengine.errors import UsageError
from evoengine.formats.folder import inside, read_text
from evoengine.stages.includes import C_HEADERS
from evoengine.stages.toolchain import include_folders

MOST_CHARS = 1 << 20
"""limit of a text with its includes, that of a rendered kernel"""
DEEPEST = 16
"""limit of nested includes"""
_LONGEST_NAME = 200
"""limit of the name of an included file"""

# Includes


def with_includes(text: str, folder: Path, root: Path, what: str) -> str:
    """Return the text of `what` with its includes replaced by files of `folder`.

    Raises UsageError if a file in quotes is neither in the folder nor one of CUDA's headers, if it is outside `root` or
    includes itself, or if the result is too long.
    """
    return _with_includes(text, folder, root, what, (), set())


def _with_includes(text: str, folder: Path, root: Path, what: str, around: tuple[Path, ...], once: set[Path]) -> str:
    parts, end = [], 0
    for line in LINE.finditer(blank_comments(text)):
        name = line[1] or line[2]
        if len(name) > _LONGEST_NAME or (_is_known(name) if line[2] else not (folder / name).is_file()):
            continue
        file = inside(root, str(folder / name), f"an include of {what}")
        if file in around or len(around) == DEEPEST:
            raise UsageError(f"{what} includes {name} within itself; put the text of both into one file")
        header = "" if file in once else read_text(file, f"{what} includes a file that is not beside it:")
        if re.search(r"^[ \t]*#[ \t]*pragma[ \t]+once\b", header, re.MULTILINE):
            once.add(file)
        inner = _with_includes(header, file.parent, root, str(file), (*around, file), once)
        parts += [text[end : line.start()], inner]
        end = line.end()
        if sum(map(len, parts)) > MOST_CHARS:
            raise UsageError(f"{what} is larger than {MOST_CHARS >> 20} MiB with its includes; no kernel needs to be")
    return "".join([*parts, text[end:]])


_HIP = "hip/hip_runtime.h"
"""headers that HIP's compiler needs and that NVRTC does not"""


def _is_known(name: str) -> bool:
    return name == _HIP or name in C_HEADERS or any((folder / name).is_file() for folder in include_folders())


# What the host runs


def device_code(text: str, remarks: list[str]) -> str:
    """Return the text without host functions and headers, and with cub's headers one by one.

    Remarks name the removed parts. Line numbers are kept.
    """
    masked = mask(text)
    functions = list(_host_functions(masked))
    for function in reversed(functions):
        removed = text[function.start : function.end]
        text = text[: function.start] + "\n" * removed.count("\n") + text[function.end :]
    if functions:
        remarks.append(f"what the host runs: {', '.join(function.name for function in functions)}")
    return _with_cuda_headers(text, remarks)


class _HostFunction(NamedTuple):
    name: str
    start: int
    end: int


_ATTRIBUTES = frozenset({"__global__", "__device__", "constexpr", "consteval"})
_BODY = re.compile(r"\)\s*(?:const\b|noexcept\b|->[\w:<>*&\s]+)?\s*\Z")
_NAMED = re.compile(r"(\w+)\s*\(")


def _host_functions(masked: str) -> Iterator[_HostFunction]:
    """Yield the functions that device code cannot call; none if brackets are unbalanced, as by branches of #if."""
    of_device = {
        *_ATTRIBUTES,
        *(m[1] for m in re.finditer(r"#[ \t]*define[ \t]+(\w+)([^\n]*)", masked) if _ATTRIBUTES & set(m[2].split())),
    }
    code = PREPROCESSOR.sub(lambda m: re.sub(r"[^\n]", " ", m[0]), masked)
    found: list[_HostFunction] = []
    start = at = 0
    try:
        while (mark := re.compile(r"[;{}]").search(code, at)) is not None:
            at = mark.end()
            head = code[start : mark.start()]
            if mark[0] != "{" or is_namespace_head(head):
                start = at
                continue
            at = closing_bracket(code, mark.start()) + 1
            named = _NAMED.search(head)
            if named and _BODY.search(head) and "=" not in head[: named.start()]:
                if not of_device & set(re.findall(r"\w+", head)):
                    begin = start + len(head) - len(head.lstrip())
                    found.append(_HostFunction(named[1], begin, at))
                start = at
    except KernelUnbuildable:
        return
    yield from found


_CUB = re.compile(r"\bcub\s*::\s*(Block|Warp)([A-Z]\w*)")


def _with_cuda_headers(text: str, remarks: list[str]) -> str:
    primitives = {f"cub/{where.lower()}/{where.lower()}{_snake(what)}.cuh" for where, what in _CUB.findall(mask(text))}

    def chosen(line: re.Match[str]) -> str:
        name = line[1] or line[2]
        if name == "cub/cub.cuh":
            return "".join(f"#include <{header}>\n" for header in sorted(primitives)).rstrip("\n")
        if name == _HIP:
            return ""
        if name in STANDARD or _is_known(name) or line[2]:
            return line[0]
        remarks.append(f"the include <{name}>, which NVRTC does not have")
        return ""

    return LINE.sub(chosen, text)


def _snake(name: str) -> str:
    return re.sub(r"([A-Z])", lambda c: f"_{c[1].lower()}", name)


# Templates

_INSTANCE = re.compile(r"\s*(\w+)\s*<(.*)>\s*", re.DOTALL)
_PARAMETER = re.compile(r"(typename|class|[\w:\s]*\w)\s+(\w+)\s*(?:=\s*(.+))?", re.DOTALL)


def instantiated(text: str, name: str, what: str) -> tuple[str, str]:
    """Return the text with the template `name<arguments>` as a plain kernel, and its plain name.

    Each template parameter becomes a type or a constant of the text. Raises UsageError if the text has no such
    template, or if a parameter is neither a type nor a value.
    """
    instance = _INSTANCE.fullmatch(name)
    if instance is None:
        return text, name
    entry, given = instance[1], [part.strip() for part in split_declarators(instance[2])]
    code = PREPROCESSOR.sub(lambda m: re.sub(r"[^\n]", " ", m[0]), mask(text))
    head = re.search(rf"\btemplate\s*<([^{{}};]*)>(?=[^;{{}}<>]*__global__[^;{{}}]*?\b{re.escape(entry)}\s*\()", code)
    if head is None:
        raise UsageError(f"{what} has no template kernel {entry}; give its text to tune_kernel")
    declared = [part.strip() for part in split_declarators(text[head.start(1) : head.end(1)])]
    lines = []
    for i, part in enumerate(declared):
        parameter = _PARAMETER.fullmatch(part)
        value = given[i] if i < len(given) else parameter[3] if parameter else None
        if parameter is None or not value or "..." in part:
            raise UsageError(f"{what}: the template parameter `{part}` of {entry} has no type or value in {name}")
        if parameter[2] != value:
            is_type = parameter[1] in ("typename", "class")
            lines.append(
                f"using {parameter[2]} = {value};" if is_type else f"constexpr {parameter[1]} {parameter[2]} = {value};"
            )
    return f"{text[: head.start()]}{' '.join(lines)}\n{text[head.end() :]}", entry


# A kernel that a function of the host launches


class HostLaunch(NamedTuple):
    """A launch by a host function: its kernel, and the parameters of the function that are its arguments."""

    kernel: str
    arguments: list[int | None]
    """for each argument of the kernel, the position of a parameter of the function; None if unknown"""
    constants: dict[str, int]
    """`__constant__` variable → position of the parameter whose contents it holds"""
    body: str


_COPIED = re.compile(
    r"\b(?:cuda|hip)(?:Memcpy(?!To|From)\w*|HostGetDevicePointer)\s*\(\s*(?:\([^()]*\)\s*)?&?\s*(\w+)[^,;]*,\s*&?\s*(\w+)"
)
_ASSIGNED = re.compile(r"\b([A-Za-z_]\w*)\s*=\s*(?:\([^()]*\)\s*)?([A-Za-z_]\w*)\s*;")
_TO_SYMBOL = re.compile(r"\b(?:cuda|hip)MemcpyToSymbol\w*\s*\(\s*(?:\w+\s*\(\s*)?(\w+)\s*\)?\s*,\s*&?\s*(\w+)")
_LAUNCH = re.compile(r"\b(\w+)\s*(?:<[^;<>(){}]*>\s*)?<<<")


def host_launch(name: str, text: str) -> HostLaunch | None:
    """Return the launch in the host function `name`; None if `name` is a kernel or launches none."""
    code = PREPROCESSOR.sub(lambda m: re.sub(r"[^\n]", " ", m[0]), mask(text))
    if re.search(rf"__global__[^;{{}}]*\b{re.escape(name)}\s*\(", code):
        return None
    for head in re.finditer(rf"\b{re.escape(name)}\s*\(([^;{{}}]*)\)\s*\{{", code):
        try:
            body = code[head.end() : closing_bracket(code, head.end() - 1)]
            launch = _LAUNCH.search(body)
            opening = body.find("(", body.find(">>>", launch.end())) if launch else -1
            if launch is None or opening < 0:
                continue
            given = split_declarators(body[opening + 1 : closing_bracket(body, opening)])
        except KernelUnbuildable:
            continue
        own = [re.findall(r"\w+", part)[-1] for part in split_declarators(head[1]) if re.search(r"\w", part)]
        places = {word: i for i, parameter in enumerate(own) for word in _same_as(parameter, own, body)}
        constants = {symbol: places[source] for symbol, source in _TO_SYMBOL.findall(body) if source in places}
        arguments = [next((places[w] for w in re.findall(r"\w+", part) if w in places), None) for part in given]
        return HostLaunch(launch[1], arguments, constants, body)
    return None


def _same_as(parameter: str, parameters: list[str], body: str) -> set[str]:
    """Return the names that hold the same as a parameter: assigned, or copied to or from the device."""
    pairs = [*_COPIED.findall(body), *_ASSIGNED.findall(body)]
    found, grown = {parameter}, True
    while grown:
        more = {one for pair in pairs if found & {*pair} for one in pair} - found
        grown, found = bool(more), found | more
    return found if found & {*parameters} == {parameter} else {parameter}
