"""Convert a run to a FAIR T4 results file, the auto-tuners' common format, and back.

T4 states configurations, outcomes and times (schema: AutoTuningAssociation/autotuning_methodology, schemas/T4.json,
version 1.1.0). What it has no fields for — the space and the baselines of the run; source, binary, verdicts, figures,
profiles and lineage of each result, with their dates — is under `evoengine`, so that reading the file back loses only
the process that searched, and the machine code.

T4's `time` is that of an execution. A prediction is called `estimated time`, which other tools ignore.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from datetime import datetime
from types import SimpleNamespace
from typing import Any, TypeVar

from evoengine.gpu import known_gpus
from evoengine.ledger.rows import (
    json_reader,
    last_sustained,
    last_verdicts,
    most_trusted,
    most_trusted_kind,
    record_values,
    to_baseline,
    to_record,
)
from evoengine.ledger.transfer import CandidateHistory, RunHistory
from evoengine.publish.imported import validate_run
from evoengine.records import (
    RUNNING,
    UNKNOWN_POLICY,
    AnyBaseline,
    Binary,
    Candidate,
    Device,
    Kind,
    Measurement,
    Outcome,
    Profile,
    Run,
    Source,
    Verdict,
)
from evoengine.text import hide_passwords

SCHEMA_VERSION = "1.1.0"
TIME_UNIT = "microseconds"
INVALIDITY = {
    Outcome.MEASURED: "correct",
    Outcome.ESTIMATED: "correct",
    Outcome.RECORDED: "correct",
    Outcome.UNRANKED: "correct",
    Outcome.SCREENED: "constraints",
    Outcome.UNCOMPILABLE: "compile",
    Outcome.INCORRECT: "correctness",
    Outcome.SUSPECT: "correctness",
    Outcome.CRASHED: "runtime",
    Outcome.HUNG: "timeout",
    Outcome.DUPLICATE: "constraints",
}
NOT_HERE = "exported while it ran"
_OF_RUN = ("gpu", "problem", "sampler", "seed", "objectives", "command")
_OF_CANDIDATE = ("trial", "run", "problem", "gpu", "reason", "device", "occupancy", "operator")

_OLD_BASELINE = {"policy": asdict(UNKNOWN_POLICY), "reason": None}
"""fields that baselines lack which were stored before policies, or which were timed"""
_OLD_VERDICT = {"coverage": None, "gate_version": None, "short_only": None}
"""fields that verdicts lack which were stored before versions of the gate"""

Dated = TypeVar("Dated", AnyBaseline, Verdict, Measurement, Profile)


def to_t4(history: RunHistory) -> dict[str, Any]:
    """Return the run with its finished candidates, cubins included."""
    run, records = history.run, list(history.candidates)
    kind = most_trusted_kind(figure for record in records for figure in record.figures)
    return {
        "schema_version": SCHEMA_VERSION,
        "metadata": {
            "compute_api": "CUDA",
            "device": run.device.name,
            "autotuner": "evoengine",
            "autotuner_version": run.version,
            "timestamp": run.started_at.isoformat(),
            "timeunit": TIME_UNIT,
            "evoengine": {name: getattr(run, name) for name in _OF_RUN}
            | {"command": hide_passwords(run.command)}  # of before ledgers held none
            | {
                "finished_at": _text(run.finished_at),
                # elsewhere it does not run, and nobody there can ask its process
                "status": NOT_HERE if run.status == RUNNING else run.status,
                "device": asdict(run.device),
                "gpu_definition": run.gpu_definition,
                "kernel": run.kernel,
                "space": {"name": run.space_name, "text": run.space_text, "sha256": run.space_sha256},
                "baselines": _with_dates(history.baselines),
            },
        },
        "results": [_result(record, kind) for record in records],
    }


def from_t4(data: Mapping[str, Any]) -> RunHistory | None:
    """Read what `to_t4` wrote; return None for a file of another tuner. The run gets this process's host and pid.

    Raises AttributeError, KeyError, OverflowError, TypeError or ValueError if a part is missing or wrong; nothing of it
    may then reach a ledger.
    """
    metadata, results = data.get("metadata"), data.get("results")
    if not isinstance(metadata, dict) or not metadata.get("evoengine") or not results:
        return None
    described = metadata["evoengine"]
    # Python reads NaN and half a surrogate pair, but no ledger takes them
    json.dumps(data, allow_nan=False, ensure_ascii=False).encode()
    space = described["space"]
    run = Run(
        id=0,
        started_at=datetime.fromisoformat(metadata["timestamp"]),
        finished_at=_moment(described, "finished_at"),
        status=_status(described),
        device=Device(**described["device"]),
        space_name=space["name"],
        space_sha256=space["sha256"],
        space_text=space["text"],
        version=metadata["autotuner_version"],
        host=socket.gethostname(),
        pid=os.getpid(),
        gpu_definition=_board(described),
        kernel=described.get("kernel"),
        **{name: described[name] for name in _OF_RUN},
    )
    baselines = [to_baseline(_row(_OLD_BASELINE | b)) for b in described["baselines"]]
    history = RunHistory(run, baselines, [_record(r["evoengine"]) for r in results])
    validate_run(history)
    return history


def _board(described: Mapping[str, Any]) -> Any:
    """Read a GPU that a file described to the search; built-in GPUs are known here."""
    return None if described["gpu"] in known_gpus() else described.get("gpu_definition")


def _status(described: Mapping[str, Any]) -> str:
    """Return the status of an imported run, which no process of this ledger works on, whatever the file says."""
    status: str = described.get("status", "imported")
    return NOT_HERE if status == RUNNING else status


def _text(moment: datetime | None) -> str | None:
    return moment.isoformat() if moment else None


def _moment(d: Mapping[str, Any], name: str) -> datetime | None:
    """Return a time; None if it is missing, as in files written before it was stored."""
    return datetime.fromisoformat(d[name]) if d.get(name) else None


def _with_dates(found: Iterable[Dated]) -> list[dict[str, object]]:
    return [record_values(each) | {"taken_at": _text(each.taken_at)} for each in found]


def _from_dated(kind: type[Dated], found: Iterable[Mapping[str, Any]]) -> list[Dated]:
    return [to_record(kind, _row(d)) for d in found]


def _row(d: Mapping[str, Any]) -> SimpleNamespace:
    """Return what a row of the ledger would have as attributes."""
    return SimpleNamespace(**{**d, "taken_at": _moment(d, "taken_at")})


def _result(record: CandidateHistory, kind: Kind) -> dict[str, Any]:
    """Return the JSON of a candidate. `kind` is the kind of figures of its run, for a candidate without one."""
    c = record.candidate
    assert c.outcome is not None  # a history has finished candidates alone
    times: dict[str, Any] = {}
    if c.binary:
        times["compilation_time"] = c.binary.compile_ms * 1e3
    if c.verdict:
        times["validation"] = c.verdict.wall_ms * 1e3
    measured: list[dict[str, Any]] = []
    figure = c.measurement
    by = f"{Kind.ESTIMATED} " if (figure.kind if figure else kind) is Kind.ESTIMATED else ""
    if figure:
        if figure.samples_us:
            times["runtimes"] = list(figure.samples_us)
        measured = [{"name": f"{by}time", "value": figure.median_us, "unit": ""}]
        if figure.tflops is not None:
            measured.append({"name": f"{by}TFLOPS", "value": figure.tflops, "unit": "TFLOPS"})
    if c.binary:
        measured.append({"name": "registers", "value": c.binary.registers, "unit": ""})
    return {
        "configuration": dict(c.config),
        "objectives": [f"{by}time"],
        "times": times,
        "invalidity": INVALIDITY[c.outcome],
        "correctness": int(INVALIDITY[c.outcome] == "correct"),
        "measurements": measured,
        "evoengine": _whole(record),
    }


def _whole(record: CandidateHistory) -> dict[str, Any]:
    c = record.candidate
    return {name: getattr(c, name) for name in _OF_CANDIDATE} | {
        "config": dict(c.config),
        "outcome": str(c.outcome),
        "parents": list(c.parents),
        "source": c.source and asdict(c.source),
        # whose source was pruned, nobody can make it again
        "binary": _binary_values(c.binary) if c.source and c.binary else None,
        "created_at": _text(c.created_at),
        "finished_at": _text(c.finished_at),
        "verdicts": _with_dates(record.verdicts),
        "measurements": _with_dates(record.figures),
        "profiles": _with_dates(record.profiles),
    }


def _binary_values(binary: Binary) -> dict[str, Any]:
    """Return all fields but the machine code, which must be compiled again from the source."""
    return {name: value for name, value in asdict(binary).items() if name not in ("cubin", "listing")}


def _record(d: Mapping[str, Any]) -> CandidateHistory:
    # before all verdicts were kept, there was the last one as `verdict`
    verdicts = d["verdicts"] if "verdicts" in d else [v for v in [d["verdict"]] if v]
    verdicts = _from_dated(Verdict, [_OLD_VERDICT | v for v in verdicts])
    versions = [verdict.gate_version for verdict in verdicts if verdict.gate_version is not None]
    figures = _from_dated(Measurement, [_figure(m) for m in d["measurements"]])
    candidate = Candidate(
        **{name: d[name] for name in (*_OF_CANDIDATE, "config")},
        outcome=Outcome(d["outcome"]),
        parents=tuple(d["parents"]),
        source=json_reader(Source | None)(d["source"]),
        binary=json_reader(Binary | None)(d["binary"] and {**d["binary"], "cubin": b""}),  # older files contain it
        **last_verdicts(verdicts),
        measurement=most_trusted(figures),
        sustained=last_sustained(figures),
        gate_version=min(versions, default=None),
        created_at=_moment(d, "created_at"),
        finished_at=_moment(d, "finished_at"),
    )
    return CandidateHistory(candidate, verdicts, figures, _from_dated(Profile, d.get("profiles", ())))


def _figure(d: Mapping[str, Any]) -> dict[str, Any]:
    """Read a figure, with values for fields that older files lack."""
    policy = asdict(UNKNOWN_POLICY) if d["kind"] == Kind.MEASURED else None
    found = {"policy": policy, "normalised_us": None, **d}
    return found if "vs_baseline" in found else found | {"vs_baseline": found["vs_sdpa"]}
