"""A run as a FAIR T4 results file, the auto-tuners' common format, and back.

T4 says what was tried, how it ended and how long it ran (schema: AutoTuningAssociation/autotuning_methodology,
schemas/T4.json, version 1.1.0). What it has no place for — the space and the baselines of the run; source, binary,
verdict, every figure and the lineage of each result — stands beside it under `evoengine`, so that reading the file back
loses nothing.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Any

from evoengine import __version__
from evoengine.ledger.rows import (
    baseline_values,
    measurement_values,
    most_trusted,
    to_baseline,
    to_measurement,
    to_verdict,
    verdict_values,
)
from evoengine.ledger.runs import Device, Run
from evoengine.records import Baseline, Binary, Candidate, Launch, Measurement, Outcome, Source

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
_OF_RUN = ("gpu", "problem", "sampler", "seed", "objectives", "command")
_OF_CANDIDATE = ("trial", "run", "problem", "gpu", "reason", "device", "occupancy", "operator")

Figures = Mapping[int, Sequence[Measurement]]
"""trial → every figure that was taken of it, oldest first"""


@dataclass(frozen=True, slots=True)
class Exported:
    """What `to_t4` has written of a run of evoengine's."""

    described: Mapping[str, Any]
    """gpu, problem, device, space, sampler, seed, objectives and command, as `Ledger.start_run` takes them"""
    baselines: Sequence[Baseline]
    candidates: Sequence[Candidate]
    figures: Figures


def to_t4(
    run: Run, candidates: Sequence[Candidate], figures: Figures, baselines: Sequence[Baseline]
) -> dict[str, Any]:
    """The run's finished candidates, cubins included."""
    return {
        "schema_version": SCHEMA_VERSION,
        "metadata": {
            "compute_api": "CUDA",
            "device": run.device.name,
            "autotuner": "evoengine",
            "autotuner_version": __version__,
            "timestamp": run.started_at.isoformat(),
            "timeunit": TIME_UNIT,
            "evoengine": {name: getattr(run, name) for name in _OF_RUN}
            | {
                "device": asdict(run.device),
                "space": {"name": run.space_name, "text": run.space_text, "sha256": run.space_sha256},
                "baselines": [baseline_values(b) for b in baselines],
            },
        },
        "results": [_result(c, figures.get(c.trial, ())) for c in candidates if c.outcome],
    }


def from_t4(data: Mapping[str, Any]) -> Exported | None:
    """What `to_t4` wrote, or None where another tuner wrote the file."""
    metadata, results = data.get("metadata"), data.get("results")
    described = metadata.get("evoengine") if isinstance(metadata, dict) else None
    if not described or not results:
        return None
    baselines = [to_baseline(SimpleNamespace(**b)) for b in described["baselines"]]
    origin = {"device": Device(**described["device"]), "space": SimpleNamespace(**described["space"])}
    figures, candidates = {}, []
    for own in (r["evoengine"] for r in results):
        figures[own["trial"]] = [to_measurement(SimpleNamespace(**m)) for m in own["measurements"]]
        candidates.append(_candidate(own, figures[own["trial"]]))
    return Exported({name: described[name] for name in _OF_RUN} | origin, baselines, candidates, figures)


def _result(c: Candidate, figures: Sequence[Measurement]) -> dict[str, Any]:
    times: dict[str, Any] = {}
    if c.binary:
        times["compilation_time"] = c.binary.compile_ms * 1e3
    if c.verdict:
        times["validation"] = c.verdict.wall_ms * 1e3
    measured: list[dict[str, Any]] = []
    if c.measurement:
        times["runtimes"] = list(c.measurement.samples_us)
        measured = [{"name": "time", "value": c.measurement.median_us, "unit": ""}]
        if c.measurement.tflops is not None:
            measured.append({"name": "TFLOPS", "value": c.measurement.tflops, "unit": "TFLOPS"})
    if c.binary:
        measured.append({"name": "registers", "value": c.binary.registers, "unit": ""})
    return {
        "configuration": dict(c.config),
        "objectives": ["time"],
        "times": times,
        "invalidity": INVALIDITY[c.outcome],
        "correctness": int(INVALIDITY[c.outcome] == "correct"),
        "measurements": measured,
        "evoengine": _whole(c, figures),
    }


def _whole(c: Candidate, figures: Sequence[Measurement]) -> dict[str, Any]:
    return {name: getattr(c, name) for name in _OF_CANDIDATE} | {
        "config": dict(c.config),
        "outcome": str(c.outcome),
        "parents": list(c.parents),
        "source": c.source and asdict(c.source),
        "binary": c.binary and asdict(c.binary) | {"cubin": base64.b64encode(c.binary.cubin).decode()},
        "verdict": c.verdict and verdict_values(c.verdict),
        "measurements": [measurement_values(m) for m in figures],
    }


def _candidate(d: Mapping[str, Any], figures: Sequence[Measurement]) -> Candidate:
    source, binary, verdict = (d[name] for name in ("source", "binary", "verdict"))
    return Candidate(
        **{name: d[name] for name in (*_OF_CANDIDATE, "config")},
        outcome=Outcome(d["outcome"]),
        parents=tuple(d["parents"]),
        source=source and Source(source["text"], source["entry"], _launch(source["launch"])),
        binary=binary and Binary(**{**binary, "cubin": base64.b64decode(binary["cubin"]), "warnings": tuple(binary["warnings"])}),
        verdict=verdict and to_verdict(SimpleNamespace(**verdict)),
        measurement=most_trusted(figures),
    )  # fmt: skip


def _launch(d: Mapping[str, Any]) -> Launch:
    return Launch(tuple(d["grid"]), d["threads"], d["shared_bytes"])
