"""Export a candidate as a folder: source, binary, metadata, and a loader that does not need evoengine.

A Triton configuration is exported as Python code, and as the entry of the cache of Triton's autotuner.

The loader's name is unique to the export: Python keeps one module per name, so two kernels of one name would collide.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Any

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
from evoengine.publish.readme import code, figure_section, gate_section, readme
from evoengine.records import Binary, Candidate, Source, Verdict
from evoengine.space.symbol import Symbol
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
    candidate: Candidate,
    target: Target,
    grids: Grids = MappingProxyType({}),
    run_time: Mapping[str, Any] | None = None,
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
    """Return what the loader checks of indices; nothing for a kernel without any."""
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
        "README.md": _readme(candidate, target, entry, found).encode(errors="backslashreplace"),
    }
    return files | ({entry.name: entry.text.encode()} if entry else {})


def _readme(candidate: Candidate, target: Target, entry: AutotuneEntry | None, config: str) -> str:
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
        "judged, `kernel.cubin` what Triton made of it. `sha256sum -c SHA256SUMS` checks the files.",
        "",
    ]
    if entry:
        lines += [
            "Triton's autotuner takes it without a change of the file, and without a benchmark, from its cache:",
            "",
            "```sh",
            f"mkdir -p ~/.triton/cache/{entry.key}",
            f"cp {entry.name} ~/.triton/cache/{entry.key}/",
            "TRITON_CACHE_AUTOTUNING=1 python …",
            "```",
            "",
            "The entry holds for this version of Triton, this text of the kernel and its list, and arguments for which",
            "the autotuner's key is the same. A cache elsewhere is the folder that TRITON_CACHE_DIR names.",
            "",
        ]
    for section in (
        figure_section(candidate.measurement),
        gate_section(candidate.binary_verdict, "The machine code, executed on the CPU:"),
    ):
        lines += [*section, ""]
    return "\n".join(lines)
