"""Import T1, the auto-tuners' common description of a tuning problem (FAIR benchmark suite, "TuningSchema" 1.0)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from evoengine.errors import UsageError
from evoengine.formats.device_text import device_code, with_includes
from evoengine.formats.folder import NewFolder, inside, read_json, read_text
from evoengine.formats.pointer_use import Use, pointer_uses
from evoengine.formats.tuned_kernel import (
    LARGEST,
    Argument,
    NotLiteral,
    TunedKernel,
    folder_of,
    knob_values,
    parameters_of,
    require_divisors,
    values_of,
)
from evoengine.workloads.folder_reader import require_name

_TYPES = {
    "half": "float16", "float": "float32", "double": "float64", "bool": "bool", "int8": "int8", "uint8": "uint8",
    "int16": "int16", "uint16": "int16", "int32": "int32", "uint32": "int32", "int64": "int64", "uint64": "int64",
    "char": "int8", "uchar": "uint8", "short": "int16", "ushort": "int16", "int": "int32", "uint": "int32",
    "long": "int64", "ulong": "int64",
}  # fmt: skip # a table
"""T1 type → dtype; unsigned types become signed ones of the same size"""
_DIRECTIONS = ("X", "Y", "Z")


def import_t1(file: Path, name: str, reference: str | None) -> NewFolder:
    """Return the folder of a T1 file and of the kernel file in the same folder.

    Raises UsageError if the file describes no CUDA kernel.
    """
    data = read_json(file, "the T1 file")
    spec = data.get("KernelSpecification") if isinstance(data, dict) else None
    space = data.get("ConfigurationSpace") if isinstance(data, dict) else None
    if not isinstance(spec, dict) or not isinstance(space, dict):
        raise UsageError(f"{file} is no T1 file: it needs ConfigurationSpace and KernelSpecification")
    if str(spec.get("Language", "CUDA")).upper() != "CUDA":
        raise UsageError(f"{file} describes a kernel in {spec['Language']}; evoengine takes CUDA")
    entry = require_name(spec.get("KernelName"), f"{file}: KernelName", "a kernel")
    remarks: list[str] = []
    source = inside(file.parent, spec.get("KernelFile"), f"KernelFile of {file}")
    text = with_includes(read_text(source, "the kernel file"), source.parent, file.parent.resolve(), str(source))
    text = device_code(text, remarks)
    knobs = _knobs(file, space, spec, remarks)
    arguments = _arguments(file, spec, knobs, text, entry, remarks)
    kernel = TunedKernel(
        name=name,
        entry=entry,
        text=text,
        knobs=knobs,
        arguments=arguments,
        conditions=[str(c.get("Expression", c)) if isinstance(c, dict) else str(c) for c in _list(space, "Conditions")],
        block=_sizes(spec.get("LocalSize")),
        problem_size=_sizes(spec.get("GlobalSize")),
        shared=str(spec.get("SharedMemory") or 0),
        constants={a.name: a.name for a in arguments if not a.is_parameter} | _copies(spec, text, arguments),
        remarks=remarks,
    )
    _grid(spec, kernel)
    require_divisors(kernel)
    remarks += [f"{key}: {_short(spec[key])}" for key in ("SimulationInput", "ReferenceArguments") if spec.get(key)]
    remarks += [f"{key} of the file" for key in ("Search", "Budget") if data.get(key)]
    return folder_of(kernel, reference)


def _list(owner: dict[str, Any], key: str) -> list[Any]:
    found = owner.get(key) or []
    return found if isinstance(found, list) else [found]


def _short(value: Any) -> str:
    return " ".join(str(value).split())[:60]


def _knobs(file: Path, space: dict[str, Any], spec: dict[str, Any], remarks: list[str]) -> dict[str, list[Any]]:
    """Return the tuning parameters, and the compiler's -DNAME=value as knobs with one value."""
    knobs: dict[str, list[Any]] = {}
    for entry in _list(space, "TuningParameters"):
        if not isinstance(entry, dict):
            raise UsageError(f"{file}: TuningParameters must hold objects with Name, Type and Values")
        knob = require_name(entry.get("Name"), f"{file}: TuningParameters", "a knob")
        values = entry.get("Values")
        found = knob_values(knob, values if isinstance(values, str) else repr(values), remarks)
        if entry.get("Type") == "bool":
            found = [bool(v) for v in found]
        if found:
            knobs[knob] = found
    for option in _list(spec, "CompilerOptions"):
        flag, equals, value = str(option).removeprefix("-D").partition("=")
        if str(option).startswith("-D") and equals and flag.isidentifier():
            knobs.setdefault(flag, knob_values(flag, value, remarks) or [value])
        else:
            remarks.append(f"the compiler option {option}")
    if not knobs:
        raise UsageError(f"{file} has no tuning parameters that can be read; there is nothing to tune")
    return knobs


def _sizes(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [str(value.get(d, 1)) for d in _DIRECTIONS]
    if isinstance(value, list):
        return [*map(str, value), "1", "1"][:3]
    return ["1" if value is None else str(value), "1", "1"]


def _grid(spec: dict[str, Any], kernel: TunedKernel) -> None:
    """Set the grid: ProblemSize divided by GridDiv if the file states them, otherwise GlobalSize.

    GlobalSize counts blocks for CUDA and threads for OpenCL.
    """
    divisors = [[str(d) for d in _list(spec, f"GridDiv{d}")] for d in _DIRECTIONS]
    if any(divisors) and spec.get("ProblemSize") is not None:
        kernel.problem_size, kernel.grid_div = _sizes(spec["ProblemSize"]), divisors
    elif spec.get("GlobalSizeType") in ("OpenCL", "Vulkan"):
        kernel.grid_div = [[size] for size in kernel.block]


def _arguments(
    file: Path, spec: dict[str, Any], knobs: Mapping[str, Sequence[Any]], text: str, entry: str, remarks: list[str]
) -> list[Argument]:
    declared, uses = parameters_of(text, entry), pointer_uses(text, entry)
    found: list[Argument] = []
    constants: list[Argument] = []
    for given in _list(spec, "Arguments"):
        if not isinstance(given, dict):
            raise UsageError(f"{file}: Arguments must hold objects with Type and MemoryType")
        if given.get("MemoryType") == "Symbol":
            symbol = require_name(given.get("Name"), f"{file}: Arguments", "a __constant__ variable")
            constant = _argument(file, spec, knobs, given, symbol, None, remarks)
            constants.append(replace(constant, output=False, is_parameter=False))
            continue
        if given.get("MemoryType") == "Local":
            remarks.append(f"the argument {given.get('Name')} in local memory: write its size as shared in space.toml")
            continue
        name = declared[len(found)].name if len(found) < len(declared) else str(given.get("Name"))
        use = uses[len(found)] if uses and len(found) < len(uses) else None
        found.append(
            _argument(file, spec, knobs, given, require_name(name, f"{file}: Arguments", "an argument"), use, remarks)
        )
    if len(found) != len(declared):
        raise UsageError(f"{file} gives {len(found)} arguments, and {entry} takes {len(declared)}")
    if not any(argument.output for argument in found):
        raise UsageError(f"{file} says of no argument that the kernel writes it (AccessType WriteOnly or ReadWrite)")
    return found + constants


def _copies(spec: dict[str, Any], text: str, arguments: Sequence[Argument]) -> dict[str, str]:
    """Return the text's `__constant__` variables that contain an argument with MemType Constant."""
    given = [g for g in _list(spec, "Arguments") if g.get("MemoryType") not in ("Symbol", "Local")]
    found = {}
    for entry, argument in zip(given, arguments, strict=False):
        symbol = str(entry.get("Name"))
        declared = re.search(rf"__constant__[^;(){{}}]*\b{re.escape(symbol)}\b", text)
        if entry.get("MemType") == "Constant" and argument.size is not None and declared:
            found[symbol] = argument.name
    return found


def _with_sizes(text: str, spec: dict[str, Any], knobs: Mapping[str, Sequence[Any]]) -> str:
    """Return a size with ProblemSize[0], max(knob) and min(knob) replaced by their values in the file.

    A knob alone stands for its largest value.
    """
    for knob, values in knobs.items():
        numbers = [int(v) for v in values if isinstance(v, int | float)]
        if numbers:
            text = re.sub(rf"\bmin\s*\(\s*{knob}\s*\)", str(min(numbers)), text)
            text = re.sub(rf"\bmax\s*\(\s*{knob}\s*\)|\b{knob}\b", str(max(numbers)), text)
    sizes = _sizes(spec.get("ProblemSize"))
    indexed = re.sub(r"\bProblemSize\s*\[\s*([012])\s*\]", lambda found: f"({sizes[int(found[1])]})", text)
    return re.sub(r"\bProblemSize\b(?!\s*\[)", f"({sizes[0]})", indexed)


def _evaluated(text: str, spec: dict[str, Any], knobs: Mapping[str, Sequence[Any]]) -> int | float | None:
    """Return what an expression of ProblemSize and knobs is; None where it is not a finite number."""
    try:
        (found,) = values_of(_with_sizes(text, spec, knobs))
        return found if isinstance(found, int | float) and abs(found) <= LARGEST else None
    except (NotLiteral, ValueError):
        return None


def _argument(
    file: Path,
    spec: dict[str, Any],
    knobs: Mapping[str, Sequence[Any]],
    given: dict[str, Any],
    name: str,
    use: Use | None,
    remarks: list[str],
) -> Argument:
    stated = str(given.get("Type"))
    base = stated if stated in _TYPES else stated.rstrip("0123456789")
    if base not in _TYPES:
        raise UsageError(
            f"{file}: the argument {name} has the type {given.get('Type')!r}; known are {', '.join(_TYPES)}"
        )
    width = int(stated.removeprefix(base) or 1)
    fill = given.get("FillValue")
    if isinstance(fill, str):
        given = {**given, "FillValue": _evaluated(fill, spec, knobs)}
        if given["FillValue"] is None:
            remarks.append(f"the FillValue {_short(fill)} of {name}, which is not a number")
    if given.get("MemoryType") == "Scalar":
        return Argument(name, _TYPES[base], None, value=_number(given, 0))
    number = _evaluated(str(given.get("Size")), spec, knobs)
    if number is None:
        raise UsageError(f"{file}: the argument {name} has the Size {given.get('Size')!r}, which is not a number")
    size = int(number)
    access = given.get("AccessType")
    written = access in ("WriteOnly", "ReadWrite")
    if use is not None and use.written != written:
        says = "writes it" if use.written else "does not write it"
        remarks.append(f"that {name} is {access}: the kernel's text {says}")
        written = use.written
    read = access == "ReadWrite" if use is None else use.read
    draw = _draw(given, base, name, remarks)
    return Argument(name, _TYPES[base], size * width, output=written, inout=written and read, draw=draw)


def _draw(given: dict[str, Any], base: str, name: str, remarks: list[str]) -> dict[str, Any]:
    """Return the draw for `Constant`, and for `Random`, which is uniform below FillValue.

    Files of values are not imported.
    """
    fill, value = given.get("FillType", "Random"), _number(given, 1)
    if fill == "Constant":
        return {"type": "constant", "value": value}
    if fill != "Random":
        remarks.append(f"the contents of {name} by {fill}: they are drawn at random")
    if base not in ("half", "float", "double"):
        return {"type": "integers", "low": 0, "high": max(2, int(value))}
    return {"type": "uniform", "low": 0, "high": value} if value > 0 else {"type": "random"}


def _number(given: dict[str, Any], default: int) -> int | float:
    """Return the FillValue if it is a number, else the default."""
    value = given.get("FillValue", default)
    return value if isinstance(value, int | float) and abs(value) <= LARGEST else default
