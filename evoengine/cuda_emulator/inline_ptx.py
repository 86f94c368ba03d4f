"""One `asm` statement with PTX in it → calls of the functions in include/evo_emu/ptx.h.

    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(to), "l"(from));
    do { evo_emu::ptx::cp_async_cg_shared_global((to), (from), 16); } while (0);

Outputs that are not inputs too ("=f") hold nothing before the instruction: they are filled with NaN, behind copies of
the inputs, which may be the same variables.

The convention is the table: dots and `::` of the mnemonic become `_`, operands keep their order, and the set of known
instructions is whatever ptx*.h mark EVO_PTX.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

from evoengine.devices.base import KernelUnbuildable

INCLUDE = Path(__file__).with_name("include")

_FUNCTION = re.compile(r"^(?:template <[^>]*> )?EVO_PTX\b[^(]*?\b(\w+)\(", re.MULTILINE)
_STRING = re.compile(r'"((?:\\.|[^"\\])*)"', re.DOTALL)
_OPERAND = re.compile(r'\s*(?:\[\w+\]\s*)?"([^"]*)"\s*\((.*)\)\s*\Z', re.DOTALL)
_WITHOUT_EFFECT = re.compile(
    r"\.L2::(?:64B|128B|256B|cache_hint)\b|\.L1::\w+|::cta\b|\.tile\b|\.(?:release|acquire)\.(?:cta|cluster)\b"
)
_SIZE = re.compile(r"(?<=^wgmma_mma_async_sync_aligned_m64)n(\d+)(?=k(?:16|32)_)|(?<=^cp_async_bulk_tensor)_(\d)d(?=_)")
_INSTRUCTION = re.compile(r"(?:@(!?)\s*(\w+)\s+)?([a-z][\w.:]*)\s*(.*)\Z", re.DOTALL)
_ADDRESS = re.compile(r"\[\s*([%\w]+)\s*(?:\+\s*(-?\w+)\s*)?\]\Z")
_TILE = re.compile(r"\[\s*([%\w]+)\s*,\s*\{(.*)\}\s*\]\Z", re.DOTALL)
_FLOAT_BITS = re.compile(r"0[fF]([0-9a-fA-F]{8})\Z")
_LABEL = re.compile(r"\s*(\$?\w+)\s*:(?!:)")
_REGISTERS = re.compile(r"\.reg\s*\.(\w+)\s+(.*)\Z", re.DOTALL)
_REGISTERS_ANYWHERE = re.compile(r"\.reg\s[^;]*")
_REGISTER_TYPES = {
    "pred": "bool", "b16": "unsigned short", "u16": "unsigned short", "s16": "short", "b32": "unsigned",
    "u32": "unsigned", "s32": "int", "f32": "float", "b64": "unsigned long long", "u64": "unsigned long long",
    "s64": "long long", "f64": "double",
}  # fmt: skip # a table

_MEMORY = re.compile(r"(?:ld|st|atom|red|membar|fence)\.(?!async|bulk|matrix|proxy|mbarrier_init)")
_ORDERS = {
    "weak": "relaxed",
    "relaxed": "relaxed",
    "volatile": "relaxed",
    "mmio": "relaxed",
    "acquire": "acquire",
    "release": "release",
    "acq_rel": "acquire_release",
    "sc": "acquire_release",
}
_SCOPES = {"cta": "block", "cluster": "cluster", "gpu": "device", "gl": "device", "sys": "device"}
_MEMORY_TYPES = {
    "b8": "unsigned char", "u8": "unsigned char", "s8": "signed char", "b16": "unsigned short", "u16": "unsigned short",
    "s16": "short", "b32": "unsigned", "u32": "unsigned", "s32": "int", "f32": "float", "b64": "unsigned long long",
    "u64": "unsigned long long", "s64": "long long", "f64": "double",
}  # fmt: skip # a table
_OPERATIONS = frozenset({"add", "inc", "dec", "exch", "cas", "min", "max", "and", "or", "xor"})
_CACHE_HINTS = frozenset({"ca", "cg", "cs", "lu", "cv", "wb", "wt", "global", "generic", "v2", "v4"})

_INDICES = {"tid": "threadIdx", "ntid": "blockDim", "ctaid": "blockIdx", "nctaid": "gridDim"}
_SPECIAL_REGISTERS = {
    "%cluster_ctarank": "evo_emu::cluster_rank()", "%laneid": "evo_emu::lane()",
    **{f"%{register}.{axis}": f"{variable}.{axis}" for axis in "xyz" for register, variable in _INDICES.items()},
}  # fmt: skip # a table


class _Operand(NamedTuple):
    constraint: str
    expression: str


@cache
def known_instructions() -> frozenset[str]:
    return frozenset(
        name for path in INCLUDE.glob("evo_emu/ptx*.h") for name in _FUNCTION.findall(path.read_text("utf-8"))
    )


def to_cpp(body: str, masked: str, line: int) -> str:
    """Translate the contents of an `asm` statement's brackets to one C++ statement on one line, without its semicolon.

    `masked` is the body with literals blanked; `line` names the statement in errors. Raises KernelUnbuildable.
    """
    sections = _split(body, masked, ":")
    ptx = "".join(_unescape(s) for s in _STRING.findall(sections[0]))
    outputs, inputs = ([_operand(o, line) for o in _list(section)] for section in (*sections[1:3], "", "")[:2])
    prepared, operands = _prepare(outputs, inputs, in_place="wgmma.mma_async" in ptx)
    for name in re.findall(r"%([A-Za-z_$]\w*)", " ".join(_REGISTERS_ANYWHERE.findall(ptx))):
        ptx = re.sub(rf"%{re.escape(name)}\b", name, ptx)
    statements = _statements(ptx)
    labels = [m[1] for m in map(_LABEL.match, statements) if m]
    declared = f"__label__ {', '.join(labels)}; " if labels else ""
    code = " ".join(_statement(s, operands, line) for s in statements)
    return f"do {{ {declared}{prepared}{code} }} while (0)"


def _list(section: str) -> list[str]:
    masked = _STRING.sub(lambda m: '"' + " " * (len(m[0]) - 2) + '"', section)
    return [part for part in _split(section, masked, ",") if part.strip()]


def _split(text: str, masked: str, separator: str) -> list[str]:
    """Split at separators outside brackets and literals."""
    parts, depth, start = [], 0, 0
    for i, c in enumerate(masked):
        depth += (c in "([{") - (c in ")]}")
        if c == separator and depth == 0:
            parts.append(text[start:i])
            start = i + 1
    return [*parts, text[start:]]


def _operand(text: str, line: int) -> _Operand:
    match = _OPERAND.match(text)
    if not match:
        raise KernelUnbuildable(f"line {line}: the emulator cannot read the asm operand {text.strip()!r}")
    return _Operand(match[1], f"({' '.join(match[2].split())})")


def _prepare(outputs: list[_Operand], inputs: list[_Operand], in_place: bool) -> tuple[str, list[str]]:
    """Return the code before the instructions, and the operands as the instructions name them.

    With `in_place` the instruction reads its inputs later, where they are.
    """
    if not any(o.constraint.startswith("=") for o in outputs):
        return "", [o.expression for o in (*outputs, *inputs)]
    code, operands = "", []
    for i, o in enumerate(outputs):
        code += f"auto& evo_emu_o{i} = {o.expression}; "
        operands.append(f"evo_emu_o{i}")
    for i, o in enumerate(inputs):
        uncopied = o.constraint in ("n", "i") or (in_place and not o.constraint.isdigit())
        operands.append(o.expression if uncopied else f"evo_emu_i{i}")
        code += "" if uncopied else f"auto evo_emu_i{i} = {o.expression}; "
    written = [f"evo_emu_o{i}" for i, o in enumerate(outputs) if o.constraint.startswith("=")]
    code += f"evo_emu::poison({', '.join(written)}); "
    for i, o in enumerate(inputs):  # "0": the register of output 0
        code += f"evo_emu_o{o.constraint} = evo_emu_i{i}; " if o.constraint.isdigit() else ""
    return code, operands


def _unescape(literal: str) -> str:
    literal = re.sub(r"\\\r?\n", "", literal)
    literal = re.sub(r"(?<!%)%=", "", literal)  # a number of its own for each statement, whose labels are its own here
    return literal.replace("\\n", "\n").replace("\\t", "\t").replace("\\r", "").replace('\\"', '"').replace("%%", "%")


def _statements(ptx: str) -> list[str]:
    """Split PTX into instructions, labels, scope braces and directives."""
    ptx = re.sub(r"//[^\n]*|/\*.*?\*/", " ", ptx, flags=re.DOTALL)
    found = []
    while ptx := ptx.lstrip(" \t\n;"):
        label = _LABEL.match(ptx)
        end = 1 if ptx[0] in "{}" else label.end() if label else (ptx + ";").index(";")
        found.append(ptx[:end].strip())
        ptx = ptx[end:]
    return found


def _statement(text: str, operands: list[str], line: int) -> str:
    if text in "{}":
        return text
    if label := _LABEL.match(text):
        return f"{label[1]}:;"
    if registers := _REGISTERS.match(text):
        return _declare(registers[1], registers[2], line)
    match = _INSTRUCTION.match(text)
    if not match:
        raise KernelUnbuildable(f"line {line}: the emulator cannot read the PTX {text!r}")
    negated, predicate, mnemonic, rest = match.groups()
    arguments = [_argument(a.strip(), operands, line) for a in _split(rest, rest, ",") if a.strip()]
    code = f"goto {rest.strip()};" if mnemonic in ("bra", "bra.uni") else _call(mnemonic, arguments, line)
    return f"if ({negated}{predicate}) {code}" if predicate else code


def _declare(kind: str, names: str, line: int) -> str:
    if kind not in _REGISTER_TYPES:
        raise KernelUnbuildable(f"line {line}: the emulator knows no PTX register of type .{kind}")
    return f"{_REGISTER_TYPES[kind]} {', '.join(name.strip() for name in names.split(','))};"


def _call(mnemonic: str, arguments: list[str], line: int) -> str:
    if _MEMORY.match(mnemonic):
        return _memory_call(mnemonic, arguments, line)
    name = _WITHOUT_EFFECT.sub("", mnemonic).replace("::", "_").replace(".", "_")
    size = _SIZE.search(name)
    name = _SIZE.sub("", name)
    if name not in known_instructions():
        raise KernelUnbuildable(f"line {line}: the emulator does not know the PTX instruction {mnemonic}")
    if size:  # a template argument: columns of wgmma, dimensions of a tile
        name += f"<{size[1] or size[2]}>"
    return f"evo_emu::ptx::{name}({', '.join(arguments)});"


def _memory_call(mnemonic: str, arguments: list[str], line: int) -> str:
    """Translate a memory instruction with order, scope and type, which may be written in several orders."""
    kind, *parts = (
        re.sub(r"\.L[12]::[\w:]+", "", mnemonic)
        .replace("shared::cta", "shared")
        .replace("shared::cluster", "shared")
        .split(".")
    )
    order = next((_ORDERS[part] for part in parts if part in _ORDERS), None)
    scope = next((_SCOPES[part] for part in parts if part in _SCOPES), None)
    operation = next((part for part in parts if part in _OPERATIONS), None)
    ctype = next((_MEMORY_TYPES[part] for part in parts if part in _MEMORY_TYPES), None)
    known = _ORDERS.keys() | _SCOPES.keys() | _OPERATIONS | _MEMORY_TYPES.keys() | _CACHE_HINTS | {"shared", "nc"}
    name = "membar" if kind == "fence" else f"{kind}_{operation}" if operation else "ld_nc" if "nc" in parts else kind
    if name not in known_instructions() or not known.issuperset(parts) or not (ctype or name == "membar"):
        raise KernelUnbuildable(f"line {line}: the emulator does not know the PTX instruction {mnemonic}")
    strong = operation or (order and "weak" not in parts)
    scoped = f"evo_emu::Scope::{scope or 'device'}" if strong or name == "membar" else "evo_emu::Scope::weak"
    if name == "membar":
        return f"evo_emu::ptx::membar<{scoped}>();"
    shared = "true" if "shared" in parts else "false"
    types = f"evo_emu::Order::{order or 'relaxed'}, {scoped}, {ctype}, {shared}"
    return f"evo_emu::ptx::{name}<{types}>({', '.join(arguments)});"


def _argument(text: str, operands: list[str], line: int) -> str:
    if text.startswith("{") and text.endswith("}"):
        inside = [_argument(a.strip(), operands, line) for a in text[1:-1].split(",")]
        return f"evo_emu::registers({', '.join(inside)})"
    if text == "_":
        return "evo_emu::Ignored()"
    if "|" in text:
        return ", ".join(_argument(a.strip(), operands, line) for a in text.split("|"))
    if tile := _TILE.match(text):
        at = ", ".join(_argument(a.strip(), operands, line) for a in tile[2].split(","))
        return f"{_argument(tile[1], operands, line)}, evo_emu::coordinates({at})"
    if address := _ADDRESS.match(text):
        base = _argument(address[1], operands, line)
        return f"evo_emu::displaced({base}, {_argument(address[2], operands, line)})" if address[2] else base
    if text in _SPECIAL_REGISTERS:
        return _SPECIAL_REGISTERS[text]
    if text.startswith("%"):
        if not text[1:].isdigit():
            raise KernelUnbuildable(f"line {line}: the emulator knows no PTX register {text}")
        if int(text[1:]) >= len(operands):
            raise KernelUnbuildable(f"line {line}: the asm statement has no operand {text}")
        return operands[int(text[1:])]
    if bits := _FLOAT_BITS.match(text):
        return f"__uint_as_float(0x{bits[1]}u)"
    return text
