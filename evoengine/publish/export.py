"""Export a candidate as a folder: source, binary, metadata, README.md, and a loader that does not need evoengine.

In README.md, text from a ledger, a file or a driver is put in code spans, where neither Markdown nor HTML is
interpreted. A Triton configuration is exported as Python code, and as the entry of the cache of Triton's autotuner.

The loader's name is unique to the export: Python keeps one module per name, so two kernels of one name would collide.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from evoengine import __version__
from evoengine.devices.base import (
    ConstantParameter,
    Parameter,
    PointerArgument,
    ScalarArgument,
    ScratchParameter,
    StructArgument,
    TensorMapArgument,
    TensorParameter,
)
from evoengine.publish.folder import write_folder
from evoengine.records import Binary, Candidate, Launch, Measurement, Source, Verdict
from evoengine.space.expression import Expression
from evoengine.space.space import SearchSpace
from evoengine.space.symbol import Symbol, Undecided, texts
from evoengine.terms import digits, range_us
from evoengine.text import rounded
from evoengine.workloads.base import Target
from evoengine.workloads.triton_kernel import AutotuneEntry, config_code

LOADER = Path(__file__).with_name("loader.py")
"""for workloads without a loader of their own"""
CUDA_LAUNCH = Path(__file__).with_name("cuda_launch.py")
"""shipped beside every loader as _cuda.py"""
LONGEST_NAME, DIGITS = 60, 12
"""characters of a module's name: of its problem, and of the SHA-256 of what the loader reads"""


Grids = Mapping[int, tuple[int, int, int]]
"""SMs of a GPU → the grid on it"""


def export(
    candidate: Candidate,
    target: Target,
    folder: Path,
    *,
    grids: Grids = MappingProxyType({}),
    run_time: Mapping[str, Any] | None = None,
    beside: Mapping[str, bytes] = MappingProxyType({}),
) -> list[Path]:
    """Write an export and return its paths.

    It has kernel.cu, kernel.cubin, kernel.json, the loader MODULE.py, _cuda.py, README.md, the files in `beside` and
    SHA256SUMS. Raises UsageError if `folder` contains files that no export wrote, or cannot be written.
    """
    return write_folder(folder, export_files(candidate, target, grids=grids, run_time=run_time, beside=beside))


def export_files(
    candidate: Candidate,
    target: Target,
    *,
    grids: Grids = MappingProxyType({}),
    run_time: Mapping[str, Any] | None = None,
    beside: Mapping[str, bytes] = MappingProxyType({}),
) -> dict[str, bytes]:
    """Return the files of an export without their checksums.

    `grids` holds the grids for GPUs with other numbers of SMs, if the launch depends on it; `run_time` what a loader
    needs to serve other sizes.
    """
    source, binary = _compiled(candidate)
    described = describe(candidate, target, grids, run_time)
    module = str(described["module"])
    contents = {
        "kernel.cu": source.text.encode(),
        "kernel.cubin": binary.cubin,
        "kernel.json": (json.dumps(described, indent=2) + "\n").encode(),
        f"{module}.py": (target.workload.loader() or LOADER).read_bytes(),
        "_cuda.py": CUDA_LAUNCH.read_bytes(),
        "README.md": readme(module, candidate, target, source, binary).encode(errors="backslashreplace"),
    }
    return {**contents, **beside}


def module_name(problem: str, identity: Mapping[str, object]) -> str:
    """Return the problem and a checksum of what runs as a Python name: gemm_m64_n64_k64_fp16_0123456789ab."""
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    words = "_".join(re.findall("[a-z0-9]+", problem.lower()))[:LONGEST_NAME].rstrip("_")
    name = f"{words}_{digest[:DIGITS]}"
    return name if name[0].isalpha() else f"k_{name}"


def _compiled(candidate: Candidate) -> tuple[Source, Binary]:
    """Return source and binary. Both exist, because only ranked candidates are exported."""
    assert candidate.source is not None and candidate.binary is not None
    return candidate.source, candidate.binary


def describe(
    candidate: Candidate, target: Target, grids: Grids = MappingProxyType({}), run_time: Mapping[str, Any] | None = None
) -> dict[str, object]:
    """Return launch geometry, resources, verdict and provenance.

    They are all that it takes to run the kernel and to check its claims.
    """
    source, binary = _compiled(candidate)
    run = {**_loader_identity(candidate, target, grids), **({"run_time": run_time} if run_time else {})}
    return {
        "module": module_name(str(target.problem), run),
        **run,
        "resources": {
            "registers": binary.registers,
            "spill_bytes": binary.spill_bytes,
            "stack_bytes": binary.stack_bytes,
            "static_shared_bytes": binary.shared_bytes,
            "occupancy": candidate.occupancy,
            "instructions": dict(binary.mix),
            "warnings": list(binary.warnings),
            "other_kernels": [asdict(other) for other in binary.others],
        },
        "verdict": verdict_json(candidate.verdict),
        "binary_verdict": verdict_json(candidate.binary_verdict),
        "figure": figure_json(candidate),
        "provenance": {
            "evoengine": __version__,
            "trial": candidate.trial,
            "run": candidate.run,
            "imported_from": candidate.imported_from,
            "gpu": candidate.gpu,
            "arch": binary.arch,
            "options": binary.options,
            "compiler": binary.compiler,
            "source_sha256": source.sha256,
        },
    }


def _loader_identity(candidate: Candidate, target: Target, grids: Grids) -> dict[str, object]:
    """Return everything that a loader reads. Two kernels that agree in all of it are the same kernel."""
    source, binary = _compiled(candidate)
    launch = source.launch
    return {
        "kernel": target.workload.name,
        "entry": source.entry,
        "config": dict(candidate.config),
        "problem": target.problem.variables(),
        "parameters": [
            parameter_json(p) | ({} if _is_taken(target, source, p) else {"passed": False})
            for p in target.workload.parameters(target.problem, candidate.config)
        ],
        "launch": {
            "grid": list(launch.grid),
            "threads": launch.threads,
            "block": list(launch.block),
            "shared_bytes": launch.shared_bytes,
            "grid_by_sms": {str(sms): "x".join(map(str, grid)) for sms, grid in grids.items()},
            **_several(target, source, binary),
        },
        **_bounds(target),
        "cubin_sha256": hashlib.sha256(binary.cubin).hexdigest(),
    }


def _bounds(target: Target) -> dict[str, object]:
    """Return the bounds of indices that the loader checks; nothing for a kernel without any."""
    bounds = target.workload.index_bounds(target.problem)
    return {"bounds": [{k: v for k, v in asdict(bound).items() if v is not None} for bound in bounds]} if bounds else {}


def _is_taken(target: Target, source: Source, parameter: Parameter) -> bool:
    """Return whether some kernel takes the parameter itself; else only its tensor maps and structs point to it."""
    taken_by = [target.workload.kernel_parameters(entry) for entry, _ in source.launch.kernels(source.entry)]
    is_constant = isinstance(parameter, ConstantParameter)
    return is_constant or any(names is None or parameter.name in names for names in taken_by)


def _several(target: Target, source: Source, binary: Binary) -> dict[str, object]:
    """Return the kernels after the first, and the parameters of the first; nothing for a single kernel."""
    launch, parameters_of = source.launch, target.workload.kernel_parameters
    if not launch.then:
        return {}
    then = [
        {
            "entry": k.entry,
            "grid": list(k.launch.grid),
            "threads": k.launch.threads,
            "block": list(k.launch.block),
            "shared_bytes": k.launch.shared_bytes,
            "static_shared_bytes": binary.of_kernel(k.entry).shared_bytes,
            "parameters": parameters_of(k.entry),
        }
        for k in launch.then
    ]
    return {"parameters": parameters_of(source.entry), "then": then}


def parameter_json(parameter: Parameter) -> dict[str, object]:
    """Return a parameter of the kernel as the loader reads it; a tensor map includes its view of the tensor."""
    if isinstance(parameter, ScalarArgument):
        return {"name": parameter.name, "scalar": str(parameter.value.dtype), "value": parameter.value.item()}
    if isinstance(parameter, ConstantParameter):
        return {
            "name": parameter.name,
            "dtype": parameter.dtype,
            "shape": list(parameter.shape),
            "constant": parameter.contents,
        }
    if isinstance(parameter, TensorParameter):
        shape = list(parameter.shape)
        inout = {"inout": True} if parameter.inout else {}
        return {"name": parameter.name, "dtype": parameter.dtype, "shape": shape, "output": parameter.output, **inout}
    if isinstance(parameter, StructArgument):
        return {"name": parameter.name, "struct": parameter.bytes, "parts": [*map(_part_json, parameter.parts)]}
    if isinstance(parameter, ScratchParameter):
        return {"name": parameter.name, "scratch": parameter.bytes, "zeroed": parameter.zeroed}
    assert isinstance(parameter, TensorMapArgument)
    return {name: list(v) if isinstance(v, tuple) else v for name, v in asdict(parameter).items()}


def _part_json(part: tuple[int, object]) -> dict[str, object]:
    """Return a part of a struct: a pointer, a tensor map, or bytes in hexadecimal."""
    at, value = part
    if isinstance(value, PointerArgument):
        return {"at": at, "pointer": value.memory, "offset": value.offset}
    if isinstance(value, TensorMapArgument):
        return {"at": at, "map": parameter_json(value)}
    assert isinstance(value, ScalarArgument)
    if isinstance(value.value, Symbol):
        return {"at": at, "scalar": value.value.dtype, "value": value.value}
    return {"at": at, "hex": value.value.tobytes().hex()}


def verdict_json(verdict: Verdict | None) -> dict[str, object] | None:
    if verdict is None:
        return None
    return {
        "correct": None if verdict.abstained else verdict.correct,
        "gate_version": verdict.gate_version,
        "whole": verdict.whole,
        "coverage": asdict(verdict.coverage) if verdict.coverage else None,
        "device": verdict.device,
        "outcome": str(verdict.outcome) if verdict.outcome else None,
        "reason": verdict.reason,
        "max_abs_error": verdict.max_error,
        "cases": case_list(verdict),
    }


def case_list(verdict: Verdict | None) -> list[dict[str, object]]:
    """Return the gate's cases as JSON in the order they ran."""
    return [asdict(case) for case in verdict.cases] if verdict else []


def figure_json(candidate: Candidate) -> dict[str, object] | None:
    m = candidate.measurement
    if m is None:
        return None
    return {
        "kind": str(m.kind),
        "device": m.device,
        "tflops": m.tflops,
        "median_us": m.median_us,
        "normalised_us": m.normalised_us,
        "samples_us": list(m.samples_us),
        "vs_baseline": m.vs_baseline,
        "vs_sdpa": m.vs_baseline,
        "policy": asdict(m.policy) if m.policy else None,
        "terms": dict(m.terms),
    }


CONFIG = '''"""The configuration of kernel {kernel} that evoengine found for {problem} on {gpu}."""

import triton

CONFIG = {code}
'''


def triton_files(candidate: Candidate, target: Target, entry: AutotuneEntry | None) -> dict[str, bytes]:
    """Return the files of an export: kernel.py, kernel.cubin, kernel.json, config.py, README.md, and the cache's entry.

    Without an `entry` the last is left out.
    """
    source, binary = candidate.source, candidate.binary
    assert source is not None and binary is not None  # only ranked candidates are exported
    found = config_code(candidate.config)
    config = CONFIG.format(kernel=target.workload.name, problem=target.problem, gpu=target.gpu.key, code=found)
    described = {
        **describe(candidate, target),
        "triton": {"config": found, "autotune_cache_key": entry.key if entry else None},
    }
    files = {
        "kernel.py": source.text.encode(),
        "kernel.cubin": binary.cubin,
        "kernel.json": (json.dumps(described, indent=2) + "\n").encode(),
        "config.py": config.encode(),
        "README.md": _triton_readme(candidate, target, entry, found).encode(errors="backslashreplace"),
    }
    return files | ({entry.name: entry.text.encode()} if entry else {})


def _triton_readme(candidate: Candidate, target: Target, entry: AutotuneEntry | None, config: str) -> str:
    host = target.workload.host
    assert host is not None  # it is a Triton kernel
    lines = [
        f"# A configuration of {code(host.kernel)}",
        "",
        f"Found by evoengine {__version__} for {code(target.problem)} on the {code(target.gpu.name)}: trial "
        f"{candidate.trial} of run {candidate.run}.",
        "",
        "```python",
        config,
        "```",
        "",
        "`config.py` has it as `CONFIG`, for the list of `@triton.autotune`. `kernel.py` is the file with which it was",
        "judged, `kernel.cubin` the binary that Triton compiled. `sha256sum -c SHA256SUMS` checks the files.",
        "",
    ]
    if entry:
        lines += [
            "Triton's autotuner takes it from its cache, without changing the file and without a benchmark:",
            "",
            "```sh",
            f"mkdir -p ~/.triton/cache/{entry.key}",
            f"cp {entry.name} ~/.triton/cache/{entry.key}/",
            "TRITON_CACHE_AUTOTUNING=1 python …",
            "```",
            "",
            "The entry is valid for this version of Triton, this text of the kernel and its list, and arguments with",
            "the same autotuner key. TRITON_CACHE_DIR names another cache folder.",
            "",
        ]
    for section in (
        figure_section(candidate.measurement),
        gate_section(candidate.binary_verdict, "The machine code, executed on the CPU:"),
    ):
        lines += [*section, ""]
    return "\n".join(lines)


# ── README.md ─────────────────────────────────────────────────────────────────────────────────────────────────────────


LONGEST = 400
"""characters of one value"""
_KINDS = {
    "measured": "measured on the GPU below",
    "recorded": "recorded by another tuner, not by evoengine",
    "estimated": "predicted without a GPU",
}


def code(value: object) -> str:
    """Return a value as a code span on one line, with characters that do not print escaped."""
    text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(value))
    text = text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"
    ticks = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    room = " " if not text or text[0] in " `" or text[-1] in " `" else ""
    return f"{ticks}{room}{text}{room}{ticks}"


def readme(module: str, candidate: Candidate, target: Target, source: Source, binary: Binary) -> str:
    """Return the page as Markdown. `module` is the loader's name without `.py`."""
    sections = (
        _title(module, target, candidate),
        _usage(module, target, candidate),
        _provenance(candidate, target, source, binary),
        figure_section(candidate.measurement),
        gate_section(candidate.verdict, "The gate, on"),
        gate_section(candidate.binary_verdict, "The machine code, executed on the CPU:"),
        _licence(target),
    )
    return "\n\n".join("\n".join(section) for section in map(list, sections) if section) + "\n"


def _title(module: str, target: Target, candidate: Candidate) -> Iterator[str]:
    yield f"# {module}"
    yield ""
    yield f"A CUDA kernel for {code(target.problem)}, found by evoengine {__version__} for the {code(target.gpu.name)}."
    yield "Inference only: it has no backward pass. `sha256sum -c SHA256SUMS` checks the files."


def _usage(module: str, target: Target, candidate: Candidate) -> Iterator[str]:
    name = target.workload.name.replace("-", "_")
    inputs, outputs = _tensors(target, candidate)
    yield "## Use"
    yield ""
    yield "It needs torch or CuPy and an NVIDIA driver, but not evoengine. With this folder on Python's path:"
    yield ""
    yield "```python"
    yield f"from {module} import {name}"
    yield ""
    yield f"help({name})"
    yield f"{', '.join(outputs) or 'out'} = {name}({', '.join(inputs)})"
    yield "```"
    yield ""
    yield "Under torch call it within `torch.no_grad()`. Ship the complete folder and keep the loader's name, which is"
    yield "unique to this export, so that each import gets its own kernel. The folder may have any name."


def _tensors(target: Target, candidate: Candidate) -> tuple[list[str], list[str]]:
    parameters: tuple[Parameter, ...] = tuple(target.workload.parameters(target.problem, candidate.config))
    tensors = [p for p in parameters if isinstance(p, TensorParameter)]
    constants = [p.contents for p in parameters if isinstance(p, ConstantParameter)]
    inputs = [p.name for p in tensors if not p.output or p.inout]
    return list(dict.fromkeys([*inputs, *constants])), [p.name for p in tensors if p.output]


def _provenance(candidate: Candidate, target: Target, source: Source, binary: Binary) -> Iterator[str]:
    launch = source.launch
    yield "## Where it comes from"
    yield ""
    yield f"- trial {candidate.trial} of run {candidate.run}, exported by evoengine {__version__}"
    if candidate.imported_from is not None:
        yield f"- the run was imported from {code(candidate.imported_from)}; binary and verdict were made here"
    yield f"- problem: {code(target.problem)}"
    yield f"- GPU: {code(target.gpu.key)}, {code(target.gpu.name)}, {code(binary.arch)}, {target.gpu.sms} SMs"
    yield f"- configuration: {code(json.dumps(dict(candidate.config)))}"
    for entry, own in launch.kernels(source.entry):
        of = f"launch of {code(entry)}" if launch.then else "launch"
        yield f"- {of}: grid {own.grid}, block {own.block}, {own.shared_bytes:,} bytes of dynamic shared memory"
    yield f"- resources: {binary.registers} registers, {binary.spill_bytes} bytes spilled"
    for other in binary.others:
        yield f"- resources of {code(other.entry)}: {other.registers} registers, {other.spill_bytes} bytes spilled"
    for parameter in target.workload.parameters(target.problem, candidate.config):
        if isinstance(parameter, ScratchParameter):
            zeroed = (
                ", which the loader zeroes before each call; the time below does not include that" * parameter.zeroed
            )
            yield f"- scratch memory: {code(parameter.name)}, {parameter.bytes:,} bytes{zeroed}"
    yield f"- compiler: {code(binary.compiler)}, options {code(binary.options)}"
    yield f"- source: SHA-256 {code(source.sha256)}"


def figure_section(figure: Measurement | None) -> Iterator[str]:
    """Yield the lines of the section about the time."""
    yield "## Time"
    yield ""
    if figure is None:
        yield "There is none."
        return
    ends = range_us(figure.terms)
    shown = digits(figure.compared_us, ends)
    speed = f", {rounded(figure.tflops, shown)} TFLOPS" if figure.tflops is not None else ""
    yield f"{rounded(figure.compared_us, shown)} µs{speed}: **{figure.kind}**, {_KINDS[str(figure.kind)]}."
    yield ""
    yield f"- by: {code(figure.device)}"
    if figure.policy:
        yield f"- how: {code(figure.policy)}, {len(figure.samples_us)} samples"
    if figure.vs_baseline is not None:
        yield f"- {figure.vs_baseline:.3g} times as fast as the fastest baseline of its run"
    if ends:
        yield f"- the model's range: {rounded(ends[0], shown)} to {rounded(ends[1], shown)} µs"
    if figure.suspect:
        yield f"- suspect: {code(figure.suspect)}"


def gate_section(verdict: Verdict | None, title: str) -> Iterator[str]:
    """Yield the lines of the section about a verdict; none without one."""
    if verdict is None:
        return
    found = "not judged" if verdict.abstained else "correct" if verdict.correct else "not correct"
    yield f"## {title} {code(verdict.device)}: {found}"
    yield ""
    if verdict.abstained:
        yield f"- {code(verdict.reason)}"
    for case in verdict.cases:
        error = "no result" if case.max_error is None else f"largest error {case.max_error:.3g}"
        allowed = "" if case.allowed is None else f", allowed {case.allowed:.3g}"
        passed = "passed" if case.correct else "failed"
        of = f", {code(case.part)}" if case.part else ""
        yield f"- {code(case.name)} on {code(case.problem)}{of}, seed {case.seed}: {passed}, {error}{allowed}"
    if not verdict.correct:
        yield f"- {code(verdict.outcome)}: {code(verdict.reason)}"


def _licence(target: Target) -> Iterator[str]:
    own = target.workload.definition_text is not None
    kernel = (
        "`kernel.cu` and `kernel.cubin` are made from a user's own kernel, under its author's licence."
        if own
        else "`kernel.cu` and `kernel.cubin` are made from evoengine's templates, under the same licence."
    )
    yield "## Licence"
    yield ""
    yield f"The loader and `_cuda.py` are evoengine's, under the Apache License 2.0. {kernel}"


# ── sizes that are known at run time ────────────────────────────────────────────────────────────────────────────────


# Parameters and launch become expressions of the axes that a loader reads at run time. An export serves the sizes that
# the gate's cases of its configuration cover: up to its own size along each axis, the multiples that all cases share,
# and the constraints of its space that no case breaks.

RunTime = Mapping[str, Any]
"""`axes`: name → largest size; `requires`: expressions that sizes must fulfil, with reasons; `parameters`: those of the
kernel with expressions in the place of numbers; `grids`: of its kernels, in order"""


def run_time_sizes(candidate: Candidate, target: Target, space: SearchSpace) -> RunTime | None:
    """Return what a loader needs to serve other sizes; None if the kernel is for one size only."""
    workload, config = target.workload, candidate.config
    problem = workload.at_run_time(target.problem)
    if problem is None:
        return None
    largest = target.problem.variables()
    axes = {name: int(largest[name]) for name, value in problem.variables().items() if _is_axis(name, value)}
    try:
        parameters = texts([parameter_json(p) for p in workload.parameters(problem, config)])
        launch = space.sized_launch(config, problem)
    except Undecided:
        return None
    judged = [target.problem, *(case.problem for case in workload.cases(target.problem, config))]
    sizes = [{name: int(known.variables()[name]) for name in axes} for known in judged]
    requires = [*_multiples(sizes), *workload.size_rules(problem), *space.size_rules(config, problem, judged)]
    requires += _same_launch(launch, space.launch(config))
    rules = [{"expression": text, "why": why} for text, why in dict(requires).items()]
    grids = [texts(rule.grid) for _, rule in launch.kernels("")]
    found = {"axes": axes, "requires": rules, "parameters": parameters, "grids": grids}
    for known, at in zip(judged, sizes, strict=True):
        expected = texts([parameter_json(p) for p in workload.parameters(known, config)])
        if _evaluated(parameters, at) != expected:
            return None
    return found if axes else None


def _is_axis(name: str, value: object) -> bool:
    return isinstance(value, Symbol) and str(value) == name


def _multiples(sizes: Sequence[Mapping[str, int]]) -> list[tuple[str, str]]:
    """Return the common divisors of all sizes of the gate's cases as rules."""
    common = {name: math.gcd(*(at[name] for at in sizes)) for name in sizes[0]}
    return [
        (f"{name} % {unit} == 0", f"it was verified for multiples of {unit}")
        for name, unit in common.items()
        if unit > 1
    ]


def _same_launch(by_size: Launch, own: Launch) -> list[tuple[str, str]]:
    """Return rules that threads per block and shared memory stay as compiled."""
    found = []
    for (_, rule), (_, launch) in zip(by_size.kernels(""), own.kernels(""), strict=True):
        pairs = [*zip(rule.block, launch.block, strict=True), (rule.shared_bytes, launch.shared_bytes)]
        why = f"it was compiled for {launch.threads} threads and {launch.shared_bytes} bytes of shared memory a block"
        found += [(f"{text} == {number}", why) for text, number in pairs if isinstance(text, Symbol)]
    return found


_SIZES = frozenset({"shape", "value", "dims", "strides_bytes", "box", "swizzle", "offset", "scratch"})
"""names of numbers in kernel.json that may be expressions"""


def _evaluated(value: Any, at: Mapping[str, int], name: str = "") -> Any:
    """Return parameters with numbers in the place of expressions, as they are for one size."""
    if isinstance(value, Mapping):
        found = {key: _evaluated(part, at, key) for key, part in value.items()}
        if "at" in found and "scalar" in found:  # of a struct
            return {"at": found["at"], "hex": np.dtype(found["scalar"]).type(found["value"]).tobytes().hex()}
        return found
    if isinstance(value, list):
        return [_evaluated(part, at, name) for part in value]
    return Expression.parse(value, "kernel.json").evaluate(at) if name in _SIZES and isinstance(value, str) else value
