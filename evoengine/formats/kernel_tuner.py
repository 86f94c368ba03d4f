"""Import a Kernel Tuner script: its call of `tune_kernel` becomes a folder."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from evoengine.errors import UsageError
from evoengine.formats.folder import NewFolder, inside, read_text, run_script
from evoengine.formats.pointer_use import Use, pointer_uses
from evoengine.formats.tuned_kernel import (
    Argument,
    Parameter,
    TunedKernel,
    folder_of,
    one_type,
    parameters_of,
    require_divisors,
)
from evoengine.workloads.folder_reader import DTYPES, require_name

_BLOCK_NAMES = ("block_size_x", "block_size_y", "block_size_z")
_DEFAULT_BLOCK = ("256", "1", "1")
_UNSIGNED = {"uint16": "int16", "uint32": "int32", "uint64": "int64"}
_NOT_TAKEN = ("smem_args", "texmem_args", "compiler_options", "metrics", "observers")


def import_script(
    script: Path, name: str, reference: str | None, entry: str | None, arguments: Sequence[str] = ()
) -> NewFolder:
    """Return the folder of a script that tunes one kernel, or of the kernel named `entry` of several.

    The script runs in a child process with a stand-in for kernel_tuner, with `arguments` behind its name. Of several
    calls for the same kernel the first is taken. Raises UsageError.
    """
    call = _chosen(script, run_script("kernel-tuner", script, arguments=arguments), entry)
    remarks: list[str] = []
    named = require_name(call.get("kernel_name"), f"{script}: kernel_name", "a kernel")
    text = _text(script, call)
    kernel_entry = _launched_by(named, text, remarks)
    knobs = _knobs(script, call, remarks)
    given = _arguments(script, call, parameters_of(text, kernel_entry), pointer_uses(text, kernel_entry), remarks)
    constants, more = _constants(script, call, given)
    kernel = TunedKernel(
        name=name,
        entry=kernel_entry,
        text=text,
        knobs=knobs,
        arguments=[*given, *more],
        constants=constants,
        conditions=_conditions(call, remarks),
        block=_block(call, knobs),
        problem_size=_problem_size(call, remarks),
        grid_div=[_divisors(call, i, remarks) for i in range(3)],
        remarks=remarks,
    )
    require_divisors(kernel)
    remarks += [f"{key} of the call" for key in _NOT_TAKEN if call.get(key)]
    if call.get("answer") is not None or call.get("verify") is not None:
        remarks.append("the answer: arrays hold for the script's own inputs alone, a reference for all")
    return folder_of(kernel, reference)


def _chosen(script: Path, calls: list[dict[str, Any]], entry: str | None) -> dict[str, Any]:
    fitting = [call for call in calls if entry in (None, call.get("kernel_name"))]
    named = ", ".join(f"{call.get('kernel_name')} at line {call['line']}" for call in calls)
    if not fitting:
        raise UsageError(f"{script} tunes no kernel {entry}; it tunes {named}")
    if len({str(call.get("kernel_name")) for call in fitting}) > 1:
        raise UsageError(f"{script} calls tune_kernel {len(calls)} times: {named}; choose one kernel with --entry")
    return fitting[0]


def _text(script: Path, call: dict[str, Any]) -> str:
    """Return the kernel's text, given as text or as the name of a file beside the script."""
    source = call.get("kernel_source")
    if isinstance(source, list) and source:
        return "\n".join(_text(script, {**call, "kernel_source": one}) for one in source)
    if not isinstance(source, str):
        raise UsageError(
            f"{script} makes its kernel by a function; write the text of one configuration to a file and tune that"
        )
    if "\n" in source or "{" in source:
        return source
    return read_text(inside(script.resolve().parent, source, f"kernel_source of {script}"), "the kernel file")


def _launched_by(name: str, text: str, remarks: list[str]) -> str:
    """Return the kernel that a host function of the text launches, where `name` is such a function; else `name`."""
    body = re.search(rf"\b{re.escape(name)}\s*\([^;{{}}]*\)\s*\{{(.*)", text, re.DOTALL)
    launched = re.search(r"\b(\w+)\s*<<<", body[1]) if body else None
    if launched is None or re.search(rf"__global__[^;{{}}]*\b{re.escape(name)}\s*\(", text):
        return name
    remarks.append(f"the host function {name}, which is what the script times: the folder has the kernel {launched[1]}")
    return launched[1]


def _mapping(call: dict[str, Any], key: str) -> dict[str, Any]:
    given = call.get(key)
    return given if isinstance(given, dict) else {}


def _knobs(script: Path, call: dict[str, Any], remarks: list[str]) -> dict[str, list[Any]]:
    knobs: dict[str, list[Any]] = {}
    for knob, listed in _mapping(call, "tune_params").items():
        require_name(knob, f"{script}: tune_params", "a knob")
        values = listed if isinstance(listed, list) else []
        plain = [v["value"] if isinstance(v, dict) and "value" in v else v for v in values]
        if (
            plain
            and all(isinstance(v, bool | int | float | str) for v in plain)
            and len({*map(type, one_type(plain))}) == 1
        ):
            knobs[knob] = list(dict.fromkeys(one_type(plain)))
        else:
            remarks.append(f"the knob {knob}, whose values are no numbers, texts or truth values of one type")
    if not knobs:
        raise UsageError(f"{script} gives tune_kernel no parameters that can be taken; there is nothing to tune")
    return knobs


def _conditions(call: dict[str, Any], remarks: list[str]) -> list[str]:
    given = call.get("restrictions") or []
    found = []
    for condition in given if isinstance(given, list) else [given]:
        if isinstance(condition, str):
            found.append(condition)
        else:
            what = condition.get("function", "") if isinstance(condition, dict) else condition
            remarks.append(f"the restriction {what}, a function: write it as a [[constraint]] of space.toml")
    return found


def _block(call: dict[str, Any], knobs: dict[str, list[Any]]) -> list[str]:
    names = call.get("block_size_names") or _BLOCK_NAMES
    return [
        name if name in knobs else default for name, default in zip([*names, "", ""][:3], _DEFAULT_BLOCK, strict=True)
    ]


def _problem_size(call: dict[str, Any], remarks: list[str]) -> list[str]:
    size = call.get("problem_size")
    sizes = size if isinstance(size, list) else [size]
    plain = [s["value"] if isinstance(s, dict) and "value" in s else s for s in sizes]
    if not all(isinstance(s, int | str) for s in plain):
        remarks.append("the problem size, which is a function; space.toml has a grid of 1 in its place")
        return ["1", "1", "1"]
    return [*map(str, plain), "1", "1"][:3]


def _divisors(call: dict[str, Any], i: int, remarks: list[str]) -> list[str]:
    """Return the divisors of the grid; along x, Kernel Tuner's default is the size of a block."""
    key = f"grid_div_{'xyz'[i]}"
    given = call.get(key)
    if given is None:
        return ["block_size_x"] if i == 0 and "block_size_x" in (call.get("tune_params") or {}) else []
    if isinstance(given, dict):
        remarks.append(f"{key}, which is a function: {given.get('function', '')}")
        return []
    return [str(divisor) for divisor in (given if isinstance(given, list) else [given])]


def _arguments(
    script: Path, call: dict[str, Any], declared: list[Parameter], uses: list[Use] | None, remarks: list[str]
) -> list[Argument]:
    given = call.get("arguments") or []
    if len(given) != len(declared):
        raise UsageError(f"{script} gives {len(given)} arguments, and {call['kernel_name']} takes {len(declared)}")
    arrays = [isinstance(g, dict) and "array" in g for g in given]
    if uses is None or not any(use.written and array for use, array in zip(uses, arrays, strict=True)):
        answer = call.get("answer")
        stated = answer if isinstance(answer, list) and len(answer) == len(given) else None
        uses = [
            Use(array and (stated[i] is not None if stated else not parameter.is_const), not array)
            for i, (parameter, array) in enumerate(zip(declared, arrays, strict=True))
        ]
        names = ", ".join(p.name for p, use in zip(declared, uses, strict=True) if use.written)
        by = "by the script's answer" if stated else "those without const"
        remarks.append(f"which arguments the kernel writes: its text does not show it, so {by}: {names}")
    found = [
        replace(_argument(script, g, p.name, use.written and array), inout=use.written and use.read)
        for g, p, use, array in zip(given, declared, uses, arrays, strict=True)
    ]
    if not any(argument.output for argument in found):
        raise UsageError(f"{script} does not say what the kernel writes; give tune_kernel an answer")
    return found


def _constants(script: Path, call: dict[str, Any], arguments: list[Argument]) -> tuple[dict[str, str], list[Argument]]:
    """Return what __constant__ variables hold (cmem_args): an argument's own array, or another input."""
    given_arrays = zip(call.get("arguments") or [], arguments, strict=True)
    names = {g.get("identity"): a.name for g, a in given_arrays if isinstance(g, dict) and "array" in g}
    constants: dict[str, str] = {}
    more: list[Argument] = []
    for symbol, given in _mapping(call, "cmem_args").items():
        require_name(symbol, f"{script}: cmem_args", "a __constant__ variable")
        same = names.get(given.get("identity")) if isinstance(given, dict) else None
        constants[symbol] = same or symbol
        if same is None:
            more.append(replace(_argument(script, given, symbol, output=False), is_parameter=False))
    return constants, more


def _argument(script: Path, given: Any, name: str, output: bool) -> Argument:
    kind = given.get("array") or given.get("scalar") if isinstance(given, dict) else None
    dtype = _UNSIGNED.get(str(kind), str(kind))
    if dtype not in DTYPES:
        raise UsageError(f"{script}: the argument {name} is no NumPy array or number of {', '.join(DTYPES)}")
    if "scalar" in given:
        return Argument(name, dtype, None, value=given["value"])
    draw: dict[str, Any] = {"type": "random"}
    if given["constant"] is not None:
        draw = {"type": "constant", "value": given["constant"]}
    elif dtype.startswith("int"):
        draw = {"type": "integers", "low": int(given["low"]), "high": int(given["high"]) + 1}
    elif given["low"] >= 0:
        draw = {"type": "uniform", "low": given["low"], "high": given["high"]}
    return Argument(name, dtype, given["size"], output=output, draw=draw)
