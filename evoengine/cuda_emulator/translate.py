"""CUDA C++ as NVRTC takes it → C++20 as the host compiler takes it, line for line.

Three things have no C++ counterpart that a header could supply: inline PTX, `__shared__` variables and
`extern __shared__` arrays. They are rewritten in place, what has no value is filled (declarations.py), and behind each
kernel it is described to the runtime (kernels.py); everything else is the work of `include/`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from evoengine.cuda_emulator import declarations, inline_ptx
from evoengine.cuda_emulator.declarations import (
    ALIGNMENT,
    DeviceVariables,
    KernelDefinition,
    closing_bracket,
    find_device_variables,
    find_kernels,
    is_namespace_head,
    mask,
    read_declarators,
)
from evoengine.cuda_emulator.preprocessing import for_host
from evoengine.devices.base import KernelUnbuildable

_ASM = re.compile(r"\b(?:asm|__asm__|__asm)\b\s*(?:(?:volatile|__volatile__)\b\s*)?\(")
_SHARED = re.compile(
    r"(?:\b(?:__align__|alignas)\s*\([^;{}]*?\)\s*|\b(?:extern|static|volatile)\s+)*\b__shared__\b[^;{}]*;"
)
_SHARED_CLASS = re.compile(
    r"(?:\b(?:__align__|alignas)\s*\([^;{}]*?\)\s*)?\b__shared__\s+(?:(?:__align__|alignas)\s*\([^;{}]*?\)\s*)?"
    r"(struct|union)\b\s*(\w*)\s*\{"
)
_LINKAGE = re.compile(r'\bextern\s*"C"\s*\Z')
_CONSTANT = re.compile(r"\b__constant__\b([^;{}]*)[;{]")
_MAP_BY_VALUE = re.compile(r"(__grid_constant__\s+(?:const\s+)?)?\b(?:CUtensorMap|TensorMap)\s+(\w+)\s*[,)]")
_OUTSIDE = "line {line}: a __shared__ variable outside of a function; declare it in the kernel"


@dataclass(frozen=True, slots=True)
class _Edit:
    start: int
    end: int
    text: str


def translate(text: str) -> str:
    """Translate a CUDA text to C++20 with every line at its place.

    Raises KernelUnbuildable that names the line for unknown PTX and for declarations that cannot be parsed.
    """
    masked = mask(text)
    kernels = find_kernels(masked)
    for by_value in _MAP_BY_VALUE.finditer(masked):
        if not by_value[1]:  # the compiler takes it, and TMA is given the address of a copy that it cannot read
            line = _line(text, by_value.start())
            rule = "must be a const __grid_constant__ parameter"
            raise KernelUnbuildable(f"line {line}: tensor map {by_value[2]} {rule}")
    edits = [_asm_edit(text, masked, m) for m in _ASM.finditer(masked)]
    for m in _SHARED.finditer(masked):
        edits.append(_shared_edit(text, masked, m, _owner(kernels, m.start())))
    for m in _SHARED_CLASS.finditer(masked):
        edits += _shared_class_edits(text, masked, m, _owner(kernels, m.start()))
    edits += [_Edit(at, at, added) for at, added in declarations.poison_insertions(masked)]
    edits += [_entry_edit(kernel, number) for number, kernel in enumerate(kernels, 1)]
    edits += [_device_edit(variables) for variables in find_device_variables(masked)]
    for edit in sorted(edits, key=lambda e: e.start, reverse=True):
        line_ends = "".join(re.findall(r"\\?\n", text[edit.start : edit.end]))
        text = text[: edit.start] + edit.text + line_ends + text[edit.end :]
    return for_host(text)


def constant_names(text: str) -> list[str]:
    """Return the `__constant__` variables at namespace scope, which a host finds by their unmangled names."""
    masked = mask(text)
    found: list[str] = []
    for match in _CONSTANT.finditer(masked):
        declared = read_declarators(ALIGNMENT.sub(" ", match[1]).split("=")[0])
        if declared and all(_LINKAGE.search(opening) for opening in _scope_openings(text, masked, match.start())):
            found += [name for name, _ in declared[1]]
    return found


def _line(text: str, position: int) -> int:
    return text.count("\n", 0, position) + 1


def _asm_edit(text: str, masked: str, match: re.Match[str]) -> _Edit:
    end = closing_bracket(masked, match.end() - 1)
    code = inline_ptx.to_cpp(text[match.end() : end], masked[match.end() : end], _line(text, match.start()))
    return _Edit(match.start(), end + 1, code)


def _entry_edit(kernel: KernelDefinition, number: int) -> _Edit:
    described = f" EVO_EMU_ENTRY({kernel.name}, {kernel.least_blocks}, {kernel.cluster}, {number})"
    return _Edit(kernel.end, kernel.end, described)


def _device_edit(variables: DeviceVariables) -> _Edit:
    described = "".join(f" EVO_EMU_DEVICE({name})" for name in variables.names)
    return _Edit(variables.end, variables.end, described)


def _owner(kernels: list[KernelDefinition], position: int) -> int:
    """Return the number of the kernel whose body contains the position; 0 outside all kernels."""
    return next((number for number, k in enumerate(kernels, 1) if k.body < position < k.end), 0)


def _shared_edit(text: str, masked: str, match: re.Match[str], owner: int) -> _Edit:
    line = _line(text, match.start())
    declaration = masked[match.start() : match.end() - 1]
    aligned = ALIGNMENT.search(declaration)
    alignment = aligned[1].strip() if aligned else "1"
    bare = ALIGNMENT.sub(" ", declaration)
    dynamic = re.search(r"\bextern\b", bare) is not None
    bare = re.sub(r"\b(?:extern|static|__shared__)\b", " ", bare)
    at_namespace = _at_namespace_scope(text, masked, match.start())
    found = read_declarators(bare)
    if not found:
        raise KernelUnbuildable(f"line {line}: the emulator cannot read this __shared__ declaration")
    base, declarators = found
    if dynamic:
        code = "".join(_dynamic(base, name, alignment, at_namespace, owner) for name, _ in declarators)
        return _Edit(match.start(), match.end(), code)
    if at_namespace:
        raise KernelUnbuildable(_OUTSIDE.format(line=line))
    code = "".join(_variable(f"__typeof__({base}{dims})", name, alignment, owner) for name, dims in declarators)
    return _Edit(match.start(), match.end(), code)


def _shared_class_edits(text: str, masked: str, match: re.Match[str], owner: int) -> list[_Edit]:
    """Translate `__shared__ union { … } name;` to the union followed by a variable of it."""
    line = _line(text, match.start())
    end = closing_bracket(masked, match.end() - 1)
    declared = re.compile(r"\s*(\w+)\s*;").match(masked, end + 1)
    if not declared:
        raise KernelUnbuildable(f"line {line}: the emulator requires one name after __shared__ {match[1]} {{…}}")
    if _at_namespace_scope(text, masked, match.start()):
        raise KernelUnbuildable(_OUTSIDE.format(line=line))
    aligned = ALIGNMENT.search(match[0])
    name = match[2] or f"evo_emu_shared_{line}"
    variable = f"; {_variable(name, declared[1], aligned[1].strip() if aligned else '1', owner)}"
    opening = _Edit(match.start(), match.end(), f"{match[1]} {name} {{")
    return [opening, _Edit(end + 1, declared.end(), variable)]


def _variable(type_name: str, name: str, alignment: str, owner: int) -> str:
    shared = f"evo_emu::shared_variable<{type_name}, ({alignment}), {owner}>"
    return f'auto& {name} = {shared}("{name}", []{{}});'


def _dynamic(base: str, name: str, alignment: str, at_namespace: bool, owner: int) -> str:
    # at namespace scope a reference: the window is mapped only after static initialisation
    kind = f"static {base}* const&" if at_namespace else f"{base}* const"
    return f"{kind} {name} = evo_emu::dynamic_array<{base}, ({alignment}), {owner}>();"


def _at_namespace_scope(text: str, masked: str, position: int) -> bool:
    return all(is_namespace_head(opening) for opening in _scope_openings(text, masked, position))


def _scope_openings(text: str, masked: str, position: int) -> list[str]:
    """Return the text before each brace that is open at the position."""
    openings: list[str] = []
    for brace in re.finditer(r"[{}]", masked[:position]):
        if brace[0] == "{":
            openings.append(text[max(0, brace.start() - 200) : brace.start()])
        else:
            del openings[-1:]
    return openings
