"""Import a Kernel Tuner script: its call of `tune_kernel` becomes a folder."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from evoengine.errors import UsageError
from evoengine.formats.device_text import HostLaunch, device_code, host_launch, instantiated, with_includes
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
from evoengine.space.expression import Expression
from evoengine.stages.render import without_own
from evoengine.workloads.folder_reader import DTYPES, require_name

_BLOCK_NAMES = ("block_size_x", "block_size_y", "block_size_z")
_DEFAULT_BLOCK = ("256", "1", "1")
_UNSIGNED = {"uint16": "int16", "uint32": "int32", "uint64": "int64"}
_NOT_TAKEN = ("metrics", "observers")
_LANGUAGES = ("CUDA", "CUPY", "NVCUDA", "HIP", "C")
"""languages whose kernels may be CUDA"""
_DEFINED = {"kernel_tuner": "1", "grid_size_x": "gridDim.x", "grid_size_y": "gridDim.y", "grid_size_z": "gridDim.z"}
"""macros that Kernel Tuner defines in addition to the parameters"""
_PRECISIONS = {"half": "float16", "__half": "float16", "float": "float32", "double": "float64"}


def import_script(
    script: Path, name: str, reference: str | None, entry: str | None, arguments: Sequence[str] = ()
) -> NewFolder:
    """Return the folder of a script that tunes one kernel, or of the kernel named `entry` of several.

    The script runs in a child process with a stand-in for kernel_tuner and with `arguments` after its name. The first
    of several calls for the same kernel is used. Raises UsageError.
    """
    calls = run_script("kernel-tuner", script, arguments=arguments)
    remarks: list[str] = []
    call = _chosen(script, calls, entry, remarks)
    kernel = _tuned(script, name, call, remarks)
    require_divisors(kernel)
    naive = _computes_answer(call, calls)
    if naive is not None and reference is None:
        kernel.answered_by = _answering(script, kernel, call, naive)
    remarks += [f"{key} of the call" for key in _NOT_TAKEN if call.get(key)]
    if kernel.answered_by is None and (call.get("answer") is not None or call.get("verify") is not None):
        remarks.append("the answer: arrays hold for the script's own inputs alone, a reference for all")
    return folder_of(kernel, reference)


def _tuned(script: Path, name: str, call: dict[str, Any], remarks: list[str]) -> TunedKernel:
    """Return the kernel of a call."""
    named = str(call.get("kernel_name"))
    knobs = _knobs(script, call, remarks)
    text, named = instantiated(_text(script, call), named, str(script))
    launch = host_launch(require_name(named, f"{script}: kernel_name", "a kernel"), text)
    own, entry = _of_one_precision(call.get("arguments") or [], knobs, remarks), named
    if launch is not None:
        entry = launch.kernel
        remarks.append(f"the host function {named}, which is what the script times: the folder has the kernel {entry}")
    text = device_code(text, remarks)
    if launch is not None:
        _host_knobs(launch, text, knobs, remarks)
    text = _with_options(call, _with_defines(call, text, knobs), knobs, remarks)
    declared = parameters_of(text, entry)
    given = _given(script, call, own, declared, launch)
    found = _arguments(script, call, given, declared, pointer_uses(text, entry), remarks)
    held = _mapping(call, "cmem_args")
    if launch is not None:
        held = {symbol: own[i] for symbol, i in launch.constants.items() if i < len(own)} | held
    constants, more = _constants(script, held, given, found)
    return TunedKernel(
        name=name,
        entry=entry,
        text=text,
        knobs=_with_block(call, text, knobs),
        arguments=[*found, *more],
        constants=constants,
        conditions=_conditions(call, remarks),
        block=_block(call, knobs),
        problem_size=_problem_size(call, remarks),
        grid_div=[_divisors(call, i, remarks) for i in range(3)],
        shared=_shared(call, remarks),
        remarks=remarks,
    )


def _chosen(script: Path, calls: list[dict[str, Any]], entry: str | None, remarks: list[str]) -> dict[str, Any]:
    """Return the call to use: one of tune_kernel, or else of run_kernel or PythonKernel."""
    tuned = [call for call in calls if call["by"] == "tune_kernel"]
    fitting = [call for call in tuned or calls if entry in (None, _plain_name(call))]
    fitting = fitting or [call for call in calls if entry == _plain_name(call)]
    named = ", ".join(f"{call.get('kernel_name')} at line {call['line']}" for call in tuned or calls)
    if not fitting:
        raise UsageError(f"{script} tunes no kernel {entry}; it tunes {named}")
    if len({str(call.get("kernel_name")) for call in fitting}) > 1:
        raise UsageError(
            f"{script} calls tune_kernel {len(tuned or calls)} times: {named}; choose one kernel with --entry"
        )
    call = fitting[0]
    language = str(call.get("lang") or "CUDA")
    if language.upper() not in _LANGUAGES:
        raise UsageError(f"{script} tunes a kernel in {language}; evoengine takes CUDA")
    if call.get("texmem_args"):
        raise UsageError(
            f"{script} passes textures (texmem_args), and CUDA has had no texture references since version 12; let the "
            "kernel read that array through a pointer to const"
        )
    if call["by"] != "tune_kernel":
        remarks.append(
            f"other values of the knobs: {call['by']} at line {call['line']} gives one of each; add yours to space.toml"
        )
    return call


def _plain_name(call: dict[str, Any]) -> str:
    return str(call.get("kernel_name")).partition("<")[0].strip()


def _text(script: Path, call: dict[str, Any]) -> str:
    """Return the kernel's text, which is given as text, as a file name or by a generator."""
    source, folder = call.get("kernel_source"), script.resolve().parent
    if isinstance(source, list) and source:
        source = source[0]  # the first file includes the others
    if isinstance(source, dict) and isinstance(source.get("text"), str):
        source = source["text"]
    if not isinstance(source, str):
        raise UsageError(
            f"{script} makes its kernel by a function that calculates with the values of its parameters; write the "
            "text of one configuration to a file and tune that"
        )
    if "\n" not in source and "{" not in source:
        file = inside(folder, source, f"kernel_source of {script}")
        return with_includes(read_text(file, "the kernel file"), file.parent, folder, str(file))
    return with_includes(source, folder, folder, str(script))


def _of_one_precision(given: list[Any], knobs: dict[str, list[Any]], remarks: list[str]) -> list[Any]:
    """Return the arguments with arrays of a tuned type (TunablePrecision) fixed to the first type."""
    found = []
    for argument in given:
        knob = argument.get("precision") if isinstance(argument, dict) else None
        if knob in knobs and (dtype := _PRECISIONS.get(str(knobs[knob][0]))):
            if len(knobs[knob]) > 1:
                remarks.append(f"types other than {knobs[knob][0]} for {knob}: a folder's tensors have one type each")
                knobs[knob] = knobs[knob][:1]
            argument = {**argument, "array": dtype}
        found.append(argument)
    return found


def _host_knobs(launch: HostLaunch, device: str, knobs: dict[str, list[Any]], remarks: list[str]) -> None:
    """Fix the parameters that only the host function reads, such as a number of streams; to 1 if that is a value."""
    read = re.sub(r"^[ \t]*#[ \t]*(?:ifndef|define)[ \t]+\w+", "", device, flags=re.MULTILINE)
    of_host = set(re.findall(r"\w+", launch.body)) - {*re.findall(r"\w+", read), *_BLOCK_NAMES}
    for knob in [knob for knob in knobs if knob in of_host]:
        knobs[knob] = [1] if 1 in knobs[knob] else knobs[knob][:1]
        remarks.append(f"the knob {knob}, which only the host reads: it is {knobs[knob][0]}")


def _with_defines(call: dict[str, Any], text: str, knobs: Mapping[str, Sequence[Any]]) -> str:
    """Return the text after the macros that the tuner defines: those of `defines`, and its own if they are used."""
    used = set(re.findall(r"[A-Za-z_]\w*", text))
    lines = [f"#define {macro} {value}" for macro, value in _DEFINED.items() if macro in used and macro not in knobs]
    for macro, value in _mapping(call, "defines").items():
        value = value.get("formula") if isinstance(value, dict) and "formula" in value else _plain(value)
        if not macro.isidentifier() or not isinstance(value, str | int | float) or "\n" in str(value):
            raise UsageError(f"the value of {macro[:80]!r} in defines is not text, number or formula of the parameters")
        if macro != str(value):
            lines.append(f"#define {macro} {_as_c(value)}")
    return "\n".join([*lines, text])


def _with_options(call: dict[str, Any], text: str, knobs: Mapping[str, Sequence[Any]], remarks: list[str]) -> str:
    """Return the text with the macros (-D) and the language (-std) of compiler_options; remarks name the others."""
    given = call.get("compiler_options") or []
    for option in map(str, given if isinstance(given, list) else [given]):
        macro = re.fullmatch(r"-D\s*([A-Za-z_]\w*)(?:=(.*))?", option)
        standard = re.fullmatch(r"-{1,2}std=(c\+\+(?:14|17|20))", option)
        if macro and macro[1] not in knobs:
            text = f"#define {macro[1]} {macro[2] or 1}\n{without_own(text, [macro[1]])}"
        elif standard:
            text = f"// --std={standard[1]}\n{text}"
        elif not option.startswith("-I"):
            remarks.append(f"the compiler option {option}")
    return text


def _as_c(value: str | int | float) -> str:
    """Return a value as the text of a macro; C divides integers by /."""
    if isinstance(value, bool):
        return str(int(value))
    return re.sub(r"//", "/", f"({value})" if isinstance(value, str) and " " in value.strip() else str(value))


def _with_block(call: dict[str, Any], text: str, knobs: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Return the knobs and the sizes of a block that the text uses and the script does not tune."""
    used = set(re.findall(r"[A-Za-z_]\w*", text))
    own = {m[1] for m in re.finditer(r"^[ \t]*#[ \t]*define[ \t]+(\w+)", text, re.MULTILINE)}
    names = call.get("block_size_names") or _BLOCK_NAMES
    more = {n: [int(d)] for n, d in zip(names, _DEFAULT_BLOCK, strict=False) if n in used - own and n not in knobs}
    return {**knobs, **more}


def _plain(value: Any) -> Any:
    """Return the number of a NumPy scalar, and any other value unchanged."""
    return value["value"] if isinstance(value, dict) and "scalar" in value else value


def _floored(text: str) -> str:
    """Return an expression of integers whose divisions are rounded down, as the tuner rounds the whole expression."""
    return text if "//" in text else text.replace("/", "//")


def _formula(given: dict[str, Any], of_sizes: bool = True) -> list[str] | None:
    """Return the formulas of a function of the script, if they give its values wherever it was tried.

    Formulas of sizes are integers.
    """
    written = given.get("formula")
    values = given.get("values")
    if written is None or not isinstance(values, list) or not values:
        return None
    texts = [str(text) for text in (written if isinstance(written, list) else [written])]
    texts = [_floored(text) if of_sizes else text for text in texts]
    try:
        formulas = [Expression.parse(text, "it") for text in texts]
        for configuration, value in values:
            wanted = [_plain(v) for v in (value if isinstance(value, list) else [value])]
            named = {name: _plain(v) for name, v in configuration.items()}
            if [formula.evaluate(named) for formula in formulas] != wanted:
                return None
    except (UsageError, TypeError):
        return None
    return texts


def _mapping(call: dict[str, Any], key: str) -> dict[str, Any]:
    given = call.get(key)
    return given if isinstance(given, dict) else {}


def _knobs(script: Path, call: dict[str, Any], remarks: list[str]) -> dict[str, list[Any]]:
    knobs: dict[str, list[Any]] = {}
    for knob, listed in _mapping(call, "tune_params").items():
        require_name(knob, f"{script}: tune_params", "a knob")
        values = listed if isinstance(listed, list) else []
        plain = [_plain(v) for v in values]
        if (
            plain
            and all(isinstance(v, bool | int | float | str) for v in plain)
            and len({*map(type, one_type(plain))}) == 1
        ):
            knobs[knob] = list(dict.fromkeys(one_type(plain)))
        else:
            remarks.append(f"the knob {knob}, whose values are not numbers, texts or truth values of one type")
    if not knobs and call["by"] != "tune_kernel":
        return {_BLOCK_NAMES[0]: [int(_DEFAULT_BLOCK[0])]}
    if not knobs:
        raise UsageError(f"{script} gives tune_kernel no parameters that can be taken; there is nothing to tune")
    return knobs


def _conditions(call: dict[str, Any], remarks: list[str]) -> list[str]:
    given = call.get("restrictions") or []
    found = []
    for condition in given if isinstance(given, list) else [given]:
        if isinstance(condition, str):
            found.append(condition)
        elif isinstance(condition, dict) and (written := _formula(condition, of_sizes=False)) and len(written) == 1:
            found += written
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
    if isinstance(size, dict) and "function" in size:
        size = _formula(size) or size
    plain = [_plain(s) for s in (size if isinstance(size, list) else [size])]
    if not all(isinstance(s, int | str) for s in plain):
        remarks.append("the problem size, which is a function; space.toml has a grid of 1 in its place")
        return ["1", "1", "1"]
    return [*map(str, plain), "1", "1"][:3]


def _divisors(call: dict[str, Any], i: int, remarks: list[str]) -> list[str]:
    """Return the divisors of the grid along x, y or z; Kernel Tuner's default is the size of a block."""
    key, given = f"grid_div_{'xyz'[i]}", call.get(f"grid_div_{'xyz'[i]}")
    if given is None:
        default = [*(call.get("block_size_names") or _BLOCK_NAMES), "", ""][i]
        return [default] if default in (call.get("tune_params") or {}) else []
    found = []
    for divisor in given if isinstance(given, list) else [given]:
        if isinstance(divisor, dict) and "function" in divisor:
            written = _formula(divisor)
            if written is None or len(written) != 1:
                remarks.append(f"{key}, which is a function: {divisor['function']}")
                continue
            divisor = written[0]
        found.append(_floored(str(_plain(divisor))))
    return found


def _shared(call: dict[str, Any], remarks: list[str]) -> str:
    """Return the bytes of dynamic shared memory."""
    size = _mapping(call, "smem_args").get("size", 0)
    written = _formula(size) if isinstance(size, dict) and "function" in size else [_plain(size)]
    if written is None or len(written) != 1 or not isinstance(written[0], int | str):
        remarks.append("the size of shared memory (smem_args), which is a function: write it as shared in space.toml")
        return "0"
    return str(written[0])


def _given(
    script: Path, call: dict[str, Any], given: list[Any], declared: list[Parameter], launch: HostLaunch | None
) -> list[Any]:
    """Return the script's arguments for the kernel's parameters. Raises UsageError if they cannot be determined."""
    if launch is not None:
        seen = [i for i in launch.arguments if i is not None and i < len(given)]
        if len(seen) != len(declared):
            raise UsageError(
                f"{script} gives {len(given)} arguments to {call['kernel_name']}, a function of the host, whose text "
                f"does not show which of them {launch.kernel} takes as its {len(declared)}; tune that kernel itself"
            )
        return [given[i] for i in seen]
    if len(given) != len(declared):
        raise UsageError(f"{script} gives {len(given)} arguments, and {call['kernel_name']} takes {len(declared)}")
    return given


def _arguments(
    script: Path,
    call: dict[str, Any],
    given: list[Any],
    declared: list[Parameter],
    uses: list[Use] | None,
    remarks: list[str],
) -> list[Argument]:
    """Return the kernel's arguments; the text determines which of them it writes."""
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
    return [_filled(argument, remarks) for argument in found]


def _filled(argument: Argument, remarks: list[str]) -> Argument:
    """Return the argument with a random draw if the kernel only reads it and the script passes zeros.

    In the script another kernel fills such memory; with zeros alone most wrong kernels would pass.
    """
    is_zero = argument.draw.get("type") == "constant" and argument.draw["value"] == 0
    if argument.output or argument.size is None or not argument.dtype.startswith("float") or not is_zero:
        return argument
    remarks.append(f"the zeros of {argument.name}, which the kernel only reads: it is drawn at random")
    return replace(argument, draw={"type": "random"})


def _constants(
    script: Path, held: Mapping[str, Any], given: list[Any], arguments: list[Argument]
) -> tuple[dict[str, str], list[Argument]]:
    """Return the contents of `__constant__` variables by name: an argument's own array, or another input."""
    names = {
        g.get("identity"): a.name for g, a in zip(given, arguments, strict=True) if isinstance(g, dict) and "array" in g
    }
    constants: dict[str, str] = {}
    more: list[Argument] = []
    for symbol, array in held.items():
        require_name(symbol, f"{script}: cmem_args", "a __constant__ variable")
        same = names.get(array.get("identity")) if isinstance(array, dict) else None
        constants[symbol] = same or symbol
        if same is None:
            more.append(replace(_argument(script, array, symbol, output=False), is_parameter=False))
    return constants, more


def _argument(script: Path, given: Any, name: str, output: bool) -> Argument:
    kind = given.get("array") or given.get("scalar") if isinstance(given, dict) else None
    dtype = _UNSIGNED.get(str(kind), str(kind))
    if dtype not in DTYPES:
        raise UsageError(f"{script}: the argument {name} is no NumPy array or number of {', '.join(DTYPES)}")
    if "scalar" in given:
        return Argument(name, dtype, None, value=given["value"])
    if given["size"] < 1:
        raise UsageError(
            f"{script}: the argument {name} is an array of no elements; where its size is calculated, NumPy's integers "
            "of 32 bits may overflow, so calculate with int(...)"
        )
    draw: dict[str, Any] = {"type": "random"}
    if given["constant"] is not None:
        draw = {"type": "constant", "value": given["constant"]}
    elif given["offsets"]:
        draw = {"type": "indptr", "total": int(given["high"])}
    elif dtype.startswith(("int", "uint")):
        draw = {"type": "integers", "low": int(given["low"]), "high": int(given["high"]) + 1}
    elif given["low"] >= 0:
        draw = {"type": "uniform", "low": given["low"], "high": given["high"]}
    return Argument(name, dtype, given["size"], output=output, draw=draw)


# A kernel that the script runs to get its answer


def _computes_answer(call: dict[str, Any], calls: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the call of run_kernel whose results are the answer."""
    answer = call.get("answer")
    held = {a.get("identity") for a in answer if isinstance(a, dict)} if isinstance(answer, list) else set()
    return next((one for one in calls if one["by"] == "run_kernel" and held & {*one.get("results", [])}), None)


def _answering(script: Path, kernel: TunedKernel, call: dict[str, Any], naive: dict[str, Any]) -> TunedKernel | None:
    """Return the kernel of that call with arguments named as in the tuned kernel; None if they differ."""
    try:
        found = _tuned(script, kernel.name, naive, [])
        require_divisors(found)
    except UsageError:
        return None
    by_identity = {
        g.get("identity"): a.name
        for g, a in zip(call.get("arguments") or [], kernel.arguments, strict=False)
        if isinstance(g, dict) and "array" in g
    }
    named = []
    for given, argument in zip(naive.get("arguments") or [], found.arguments, strict=False):
        same = by_identity.get(given.get("identity")) if isinstance(given, dict) and "array" in given else None
        scalars = {a.name for a in kernel.arguments if a.size is None and a.value == argument.value}
        name = same or (argument.name if argument.name in scalars else min(scalars, default=None))
        if name is None or (argument.size is None) != (same is None):
            return None
        named.append(replace(argument, name=name))
    return replace(found, arguments=named) if not found.constants else None
