"""A run as a FAIR T4 results file, the auto-tuners' common format, and back.

T4 says what was tried, how it ended and how long it ran (schema: AutoTuningAssociation/autotuning_methodology,
schemas/T4.json, version 1.1.0). What it has no place for — source, binary, verdict, lineage — stands beside it in each
result under `evoengine`, so that reading the file back loses nothing.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from evoengine import __version__
from evoengine.records import (
    Binary,
    Candidate,
    CaseResult,
    Kind,
    Launch,
    Measurement,
    Outcome,
    Source,
    Verdict,
)

SCHEMA_VERSION = "1.1.0"
TIME_UNIT = "microseconds"
INVALIDITY = {
    Outcome.MEASURED: "correct",
    Outcome.ESTIMATED: "correct",
    Outcome.RECORDED: "correct",
    Outcome.SCREENED: "constraints",
    Outcome.UNCOMPILABLE: "compile",
    Outcome.INCORRECT: "correctness",
    Outcome.SUSPECT: "correctness",
    Outcome.CRASHED: "runtime",
    Outcome.HUNG: "timeout",
    Outcome.DUPLICATE: "constraints",
}


def to_t4(candidates: Sequence[Candidate], device: str, started: str) -> dict[str, Any]:
    """The finished candidates of a run; `device` is what judged them, `started` an ISO 8601 time."""
    return {
        "schema_version": SCHEMA_VERSION,
        "metadata": {
            "compute_api": "CUDA",
            "device": device,
            "autotuner": "evoengine",
            "autotuner_version": __version__,
            "timestamp": started,
            "timeunit": TIME_UNIT,
        },
        "results": [_result(c) for c in candidates if c.outcome],
    }


def from_t4(data: Mapping[str, Any]) -> list[Candidate] | None:
    """The candidates of a file that `to_t4` made, or None where another tuner did."""
    results = data.get("results", [])
    if not results or any("evoengine" not in r for r in results):
        return None
    return [_candidate(r["evoengine"]) for r in results]


def _result(c: Candidate) -> dict[str, Any]:
    times: dict[str, Any] = {}
    if c.binary:
        times["compilation_time"] = c.binary.compile_ms * 1e3
    if c.verdict:
        times["validation"] = c.verdict.wall_ms * 1e3
    measured: list[dict[str, Any]] = []
    if c.measurement:
        times["runtimes"] = list(c.measurement.samples_us)
        measured = [
            {"name": "time", "value": c.measurement.median_us, "unit": ""},
        ]
        if c.measurement.tflops is not None:
            measured.append({"name": "TFLOPS", "value": c.measurement.tflops, "unit": "TFLOPS"})
    if c.binary:
        measured.append({"name": "registers", "value": c.binary.registers, "unit": ""})
    return {
        "configuration": dict(c.config),
        "objectives": ["time"],
        "times": times,
        "invalidity": INVALIDITY[c.outcome],
        "correctness": int(bool(c.verdict and c.verdict.correct)),
        "measurements": measured,
        "evoengine": _whole(c),
    }


def _whole(c: Candidate) -> dict[str, Any]:
    found = asdict(c)
    if c.binary:
        found["binary"]["cubin"] = base64.b64encode(c.binary.cubin).decode()
    return json.loads(json.dumps(found))


def _candidate(d: Mapping[str, Any]) -> Candidate:
    source, binary, verdict, figure = (d[name] for name in ("source", "binary", "verdict", "measurement"))
    return Candidate(
        **{name: d[name] for name in ("trial", "run", "problem", "gpu", "config", "reason", "device", "occupancy", "operator")},
        outcome=Outcome(d["outcome"]),
        parents=tuple(d["parents"]),
        source=source and Source(source["text"], source["entry"], _launch(source["launch"])),
        binary=binary and Binary(**{**binary, "cubin": base64.b64decode(binary["cubin"]), "warnings": tuple(binary["warnings"])}),
        verdict=verdict and _verdict(verdict),
        measurement=figure and Measurement(**{**figure, "kind": Kind(figure["kind"]), "samples_us": tuple(figure["samples_us"])}),
    )  # fmt: skip


def _launch(d: Mapping[str, Any]) -> Launch:
    return Launch(tuple(d["grid"]), d["threads"], d["shared_bytes"])


def _verdict(d: Mapping[str, Any]) -> Verdict:
    outcome = Outcome(d["outcome"]) if d["outcome"] else None
    return Verdict(**{**d, "outcome": outcome, "cases": tuple(CaseResult(**case) for case in d["cases"])})
