"""A candidate as a folder to ship: source, binary, metadata, and a loader that needs nothing of evoengine.

The folder is a Python package, so that its kernel is imported by the folder's name beside those of other folders.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from evoengine import __version__
from evoengine.devices.base import ConstantParameter, Parameter, ScalarArgument, TensorMapArgument, TensorParameter
from evoengine.errors import UsageError
from evoengine.records import Binary, Candidate, Source, Verdict
from evoengine.workloads.base import Target

LOADER = Path(__file__).with_name("loader.py")
"""for kernels that have none of their own"""
CUDA_LAUNCH = Path(__file__).with_name("cuda_launch.py")
"""what every loader needs beside it, as _cuda.py"""


def export(candidate: Candidate, target: Target, folder: Path) -> list[Path]:
    """Writes kernel.cu, kernel.cubin, kernel.json, NAME.py (the loader), _cuda.py and __init__.py; returns their paths.

    An __init__.py that is there already stays as it is. Raises UsageError where `folder` cannot be written.
    """
    kernel = target.workload.name
    source, binary = _compiled(candidate)
    contents = {
        "kernel.cu": source.text.encode(),
        "kernel.cubin": binary.cubin,
        "kernel.json": (json.dumps(describe(candidate, target), indent=2) + "\n").encode(),
        f"{kernel}.py": (target.workload.loader() or LOADER).read_bytes(),
        "_cuda.py": CUDA_LAUNCH.read_bytes(),
    }
    package = folder / "__init__.py"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, data in contents.items():
            (folder / name).write_bytes(data)
        if not package.exists():
            package.write_text(f'from .{kernel} import {kernel}\n\n__all__ = ["{kernel}"]\n')
    except OSError as error:
        raise UsageError(
            f"cannot write to {folder}: {error.strerror}; --export takes a folder that can be written"
        ) from error
    return [*(folder / name for name in contents), package]


def _compiled(candidate: Candidate) -> tuple[Source, Binary]:
    """Both are there: only a ranked candidate is exported."""
    assert candidate.source is not None and candidate.binary is not None
    return candidate.source, candidate.binary


def describe(candidate: Candidate, target: Target) -> dict[str, object]:
    """Launch geometry, resources, verdict and provenance: all that it takes to run the kernel and to check its
    claims."""
    source, binary = _compiled(candidate)
    launch = source.launch
    return {
        "kernel": target.workload.name,
        "entry": source.entry,
        "config": dict(candidate.config),
        "problem": target.problem.variables(),
        "parameters": [parameter_json(p) for p in target.workload.parameters(target.problem, candidate.config)],
        "launch": {
            "grid": list(launch.grid),
            "threads": launch.threads,
            "block": list(launch.block),
            "shared_bytes": launch.shared_bytes,
        },
        "resources": {
            "registers": binary.registers,
            "spill_bytes": binary.spill_bytes,
            "stack_bytes": binary.stack_bytes,
            "static_shared_bytes": binary.shared_bytes,
            "occupancy": candidate.occupancy,
            "instructions": dict(binary.mix),
            "warnings": list(binary.warnings),
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


def parameter_json(parameter: Parameter) -> dict[str, object]:
    """A parameter of the kernel as a loader needs it; of a tensor map the view that it is of the tensor."""
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
        return {"name": parameter.name, "dtype": parameter.dtype, "shape": shape, "output": parameter.output}
    assert isinstance(parameter, TensorMapArgument)
    return {name: list(v) if isinstance(v, tuple) else v for name, v in asdict(parameter).items()}


def verdict_json(verdict: Verdict | None) -> dict[str, object] | None:
    if verdict is None:
        return None
    return {
        "correct": verdict.correct,
        "device": verdict.device,
        "outcome": str(verdict.outcome) if verdict.outcome else None,
        "reason": verdict.reason,
        "max_abs_error": verdict.max_error,
        "cases": case_list(verdict),
    }


def case_list(verdict: Verdict | None) -> list[dict[str, object]]:
    """The gate's cases as JSON, in the order they ran."""
    return [asdict(case) for case in verdict.cases] if verdict else []


def figure_json(candidate: Candidate) -> dict[str, object] | None:
    m = candidate.measurement
    if m is None:
        return None
    return {
        "kind": str(m.kind), "device": m.device, "tflops": m.tflops, "median_us": m.median_us,
        "normalised_us": m.normalised_us, "samples_us": list(m.samples_us), "vs_baseline": m.vs_baseline,
        "vs_sdpa": m.vs_baseline,
        "policy": asdict(m.policy) if m.policy else None, "terms": dict(m.terms),
    }  # fmt: skip
