"""The JSON of a trial's page, of GPUs and of workloads. Field names are an interface (docs/compatibility.md)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from evoengine.errors import MachineError
from evoengine.gpu import Gpu
from evoengine.publish.export import case_list, figure_json
from evoengine.records import Candidate, Profile, Verdict
from evoengine.times import utc
from evoengine.tuning.boards import Fitting
from evoengine.workloads import workloads
from evoengine.workloads.base import AnyWorkload


def page_json(candidate: Candidate, profile: Profile | None) -> dict[str, object]:
    """Return the JSON of one trial.

    Fields are null if the candidate did not reach that stage; `figure` has the samples and the terms.
    """
    source, binary, figure = candidate.source, candidate.binary, candidate.measurement
    return candidate.to_json() | {
        "launch": source and {**asdict(source.launch), "entry": source.entry, "block": source.launch.block},
        "source_lines": source and len(source.text.splitlines()),
        "binary": binary
        and {
            "arch": binary.arch,
            "options": binary.options,
            "compiler": binary.compiler,
            "stack_bytes": binary.stack_bytes,
            "warnings": binary.warnings,
            "instructions": binary.mix,
            "other_kernels": [asdict(other) for other in binary.others],
        },
        "verdict": _verdict(candidate.verdict),
        "cases": case_list(candidate.verdict),
        "binary_verdict": _verdict(candidate.binary_verdict),
        "binary_cases": case_list(candidate.binary_verdict),
        "figure": figure and {**(figure_json(candidate) or {}), "suspect": figure.suspect},
        "profile": profile and asdict(profile),
        "evidence": candidate.evidence,
    }


def _verdict(verdict: Verdict | None) -> dict[str, object] | None:
    """Return the JSON of a verdict without its cases."""
    if verdict is None:
        return None
    outcome = str(verdict.outcome) if verdict.outcome else None
    found = {"correct": verdict.correct, "device": verdict.device, "outcome": outcome, "reason": verdict.reason}
    coverage = asdict(verdict.coverage) if verdict.coverage else None
    return found | {"coverage": coverage, "wall_ms": verdict.wall_ms, "taken_at": utc(verdict.taken_at)}


def gpu_json(
    gpu: Gpu, fitting: Sequence[Fitting], unmodelled: str | None, compiled: Sequence[int] | None
) -> dict[str, Any]:
    """Return the JSON of a GPU: sizes in bytes, clock in GHz, peaks in TFLOPS and GB/s.

    `compiles` is null without a compiler.
    """
    fields = {name.removeprefix("gpu."): value for name, value in gpu.variables().items()}
    return fields | {
        "families": {f.workload: list(f.families) for f in fitting},
        "left_out": {f.workload: dict(f.left_out) for f in fitting if f.left_out},
        "compiles": None if compiled is None else gpu.capability in compiled,
        "predicted_by": "formula" if unmodelled else "model",
    }


def compilable() -> Sequence[int] | None:
    """Return the compute capabilities that NVRTC supports; None without NVRTC."""
    from evoengine.stages.toolchain import compiled_capabilities

    try:
        return compiled_capabilities()
    except MachineError:
        return None


def problems_json() -> list[dict[str, str]]:
    return [{"workload": w.name, "grammar": w.grammar, "example": example(w)} for w in workloads().values()]


def example(workload: AnyWorkload) -> str:
    return str(workload.parse(workload.example))
