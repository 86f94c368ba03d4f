"""All that a trial's page shows, as JSON: the fields of a candidate in a list, and what is too long for one."""

from __future__ import annotations

from dataclasses import asdict

from evoengine.publish.export import case_list, figure_json
from evoengine.records import Candidate, Profile, Verdict
from evoengine.times import utc


def page_json(candidate: Candidate, profile: Profile | None) -> dict[str, object]:
    """Return the JSON of one trial. Fields are null if the candidate did not reach that stage; `figure` has the
    samples and the terms."""
    source, binary, figure = candidate.source, candidate.binary, candidate.measurement
    return candidate.to_json() | {
        "launch": source and {**asdict(source.launch), "entry": source.entry, "block": source.launch.block},
        "source_lines": source and len(source.text.splitlines()),
        "binary": binary and {
            "arch": binary.arch, "options": binary.options, "compiler": binary.compiler,
            "stack_bytes": binary.stack_bytes, "warnings": binary.warnings, "instructions": binary.mix,
            "other_kernels": [asdict(other) for other in binary.others],
        },
        "verdict": _verdict(candidate.verdict), "cases": case_list(candidate.verdict),
        "binary_verdict": _verdict(candidate.binary_verdict), "binary_cases": case_list(candidate.binary_verdict),
        "figure": figure and {**(figure_json(candidate) or {}), "suspect": figure.suspect},
        "profile": profile and asdict(profile), "evidence": candidate.evidence,
    }  # fmt: skip


def _verdict(verdict: Verdict | None) -> dict[str, object] | None:
    """Return the JSON of a verdict without its cases."""
    if verdict is None:
        return None
    outcome = str(verdict.outcome) if verdict.outcome else None
    found = {"correct": verdict.correct, "device": verdict.device, "outcome": outcome, "reason": verdict.reason}
    coverage = asdict(verdict.coverage) if verdict.coverage else None
    return found | {"coverage": coverage, "wall_ms": verdict.wall_ms, "taken_at": utc(verdict.taken_at)}
