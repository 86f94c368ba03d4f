"""Between the records of the road and the rows of the tables, both ways, losing nothing."""

from __future__ import annotations

import hashlib
import json
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from functools import lru_cache
from itertools import islice
from typing import Any, TypedDict, TypeVar, cast

from sqlalchemy import Connection, bindparam, select, text
from sqlalchemy.orm import Session, joinedload, selectinload
from sqlalchemy.orm.interfaces import ORMOption

from evoengine.ledger.integrity import Damaged, RowReader, insert_new
from evoengine.ledger.tables import (
    Base,
    BaselineRow,
    BinaryRow,
    CandidateRow,
    DeviceRow,
    MachineCodeRow,
    MeasurementRow,
    ProfileRow,
    RunRow,
    SourceRow,
    VerdictRow,
)
from evoengine.records import (
    EMULATOR,
    EXECUTOR,
    L2,
    UNKNOWN_POLICY,
    AnyBaseline,
    Baseline,
    Binary,
    Candidate,
    CaseResult,
    Clocks,
    Coverage,
    Device,
    KernelResources,
    Kind,
    Launch,
    LaunchMode,
    Measurement,
    NextKernel,
    Outcome,
    Policy,
    Profile,
    RefusedBaseline,
    Run,
    Source,
    Verdict,
    precedence,
)

BATCH = 1000
"""rows that are read or written together"""
Reading = Callable[[], AbstractContextManager[Session]]
"""begins a transaction that reads"""
T = TypeVar("T")
KINDS: Mapping[str, Kind] = {str(kind): kind for kind in Kind}
_BINARY_COLUMNS = tuple(name for name in Binary.__slots__ if name not in ("listing", "others", "launch"))
"""a listing is made from the cubin when it is needed"""
OF_SOURCE = "source_sha256 entry grid_x grid_y grid_z threads block_y block_z shared_bytes next_kernels".split()
"""columns of a candidate's row that its source fills"""
_ERRORS = ("max_error", "mean_error", "allowed")


def batches(values: Iterable[T], size: int | None = None) -> Iterator[list[T]]:
    """Yield the values in their order, at most `size` together, BATCH where it is not given."""
    left = iter(values)
    while some := list(islice(left, size or BATCH)):
        yield some


def to_json_number(value: float | None) -> float | str | None:
    """Return the number as JSON, which has no NaN and no infinity: those become "nan", "inf" and "-inf"."""
    return value if value is None or math.isfinite(value) else str(float(value))


def from_json_number(value: float | str | None) -> float | None:
    return float(value) if isinstance(value, str) else value


def numbers_to_json(values: Iterable[float]) -> list[object]:
    return [to_json_number(v) for v in values]


def numbers_from_json(values: Iterable[Any]) -> tuple[float, ...]:
    return tuple(float(v) for v in values)


_BINARY = select(BinaryRow.id).where(
    BinaryRow.source_sha256 == bindparam("source_sha256"),
    BinaryRow.options == bindparam("options"),
    BinaryRow.arch == bindparam("arch"),
    BinaryRow.compiler == bindparam("compiler"),
)


def get_or_create_binary(connection: Connection, source: Source, binary: Binary) -> int:
    """Return the number of what that compiler made of that source; one that is there already is kept."""
    values = named(binary, _BINARY_COLUMNS)
    key = {"source_sha256": source.sha256} | {name: values.pop(name) for name in ("options", "arch", "compiler")}
    values |= {"warnings": list(binary.warnings), "mix": dict(binary.mix)}
    values["other_kernels"] = [asdict(other) for other in binary.others] or None
    cubin = values.pop("cubin")
    values["cubin_sha256"] = hashlib.sha256(cubin).hexdigest()
    if cubin:
        insert_new(connection, MachineCodeRow, {"sha256": values["cubin_sha256"], "packed": zlib.compress(cubin)})
    made = insert_new(connection, BinaryRow, key | values)
    return int(made) if made is not None else connection.scalars(_BINARY, key).one()


def to_binary(row: BinaryRow, with_cubin: bool) -> Binary:
    """Return the binary. Its cubin is empty where it is not asked for, was pruned or stayed in another ledger."""
    code = row.machine_code if with_cubin else None
    cubin = unpacked(code.packed, MachineCodeRow, code.sha256) if code else b""
    plain = named(row, (n for n in _BINARY_COLUMNS if n not in ("cubin", "warnings")))
    others = tuple(KernelResources(**other) for other in row.other_kernels or ())
    return Binary(cubin=cubin, warnings=tuple(row.warnings), others=others, **plain)


def unpacked(packed: object, row: type[Base], sha256: str) -> bytes:
    """Unpack stored bytes.

    Raises Damaged where they are not those that were stored: nobody may load, run or export them.
    """
    reader = zlib.decompressobj()
    try:
        stored = reader.decompress(packed) if isinstance(packed, bytes) else None
    except zlib.error:
        stored = None
    if stored is None or reader.unused_data or hashlib.sha256(stored).hexdigest() != sha256:
        raise Damaged(row.__tablename__, sha256, "packed")
    return stored


_SOURCE = text(
    "INSERT INTO sources (sha256, packed) VALUES (:sha256, :packed)"
    " ON CONFLICT (sha256) DO UPDATE SET packed = excluded.packed WHERE sources.packed IS NULL"
)


def get_or_create_source(connection: Connection, source: Source) -> dict[str, object]:
    """Keep the text, once, also where it had been pruned; return what the candidate's row says of the source."""
    connection.execute(_SOURCE, {"sha256": source.sha256, "packed": zlib.compress(source.text.encode())})
    launch = source.launch
    values = source.sha256, source.entry, *launch.grid, launch.threads, *launch.block_yz, launch.shared_bytes
    behind = [next_kernel_json(kernel) for kernel in launch.then] or None
    return dict(zip(OF_SOURCE, (*values, behind), strict=True))


def next_kernel_json(kernel: NextKernel) -> dict[str, object]:
    """Return a kernel behind the first as `read_next_kernel` reads it."""
    launch = kernel.launch
    return {
        "entry": kernel.entry,
        "grid": list(launch.grid),
        "threads": launch.threads,
        "block_yz": list(launch.block_yz),
        "shared_bytes": launch.shared_bytes,
    }


def read_next_kernel(stored: Mapping[str, Any]) -> NextKernel:
    """Read a kernel behind the first. Raises KeyError and TypeError if a part is missing or is not a list."""
    launch = Launch(tuple(stored["grid"]), stored["threads"], stored["shared_bytes"], tuple(stored["block_yz"]))
    return NextKernel(stored["entry"], launch)


def named(record: object, names: Iterable[str]) -> dict[str, Any]:
    """Return what a record and its row have under the same names, and as the same values."""
    return {name: getattr(record, name) for name in names}


_VERDICT = ("device", "reason", "wall_ms", "gate_version")


def verdict_values(verdict: Verdict) -> dict[str, object]:
    cases = [asdict(case) for case in verdict.cases]
    for case in cases:
        case.update({name: to_json_number(case[name]) for name in _ERRORS})
    return named(verdict, _VERDICT) | {
        "outcome": str(verdict.outcome) if verdict.outcome else None,
        "cases": cases,
        "coverage": asdict(verdict.coverage) if verdict.coverage else None,
        "short_only": None if verdict.whole else 1,
    }


def to_verdict(row: VerdictRow) -> Verdict:
    return Verdict(
        outcome=Outcome(row.outcome) if row.outcome else None,
        cases=tuple(map(_to_case, row.cases)),
        coverage=Coverage(**row.coverage | {"missing": tuple(row.coverage["missing"])}) if row.coverage else None,
        whole=not row.short_only,
        **named(row, (*_VERDICT, "taken_at")),
    )


class LastVerdicts(TypedDict):
    """By the names of a Candidate's fields."""

    verdict: Verdict | None
    binary_verdict: Verdict | None


def last_verdicts(verdicts: Sequence[Verdict]) -> LastVerdicts:
    """Return a candidate's last verdicts, a GPU's before the emulator's, and the executor's.

    `verdicts` come oldest first.
    """
    by_binary = [v for v in verdicts if v.device == EXECUTOR]
    by_text = [v for v in verdicts if v.device == EMULATOR]
    others = [v for v in verdicts if v.device not in (EXECUTOR, EMULATOR)] or by_text
    return {"verdict": others[-1] if others else None, "binary_verdict": by_binary[-1] if by_binary else None}


def _to_case(case: dict[str, Any]) -> CaseResult:
    for name in _ERRORS:
        case[name] = from_json_number(case[name])
    return CaseResult(**case)


_MEASUREMENT = ("device", "tflops", "median_us", "vs_baseline", "suspect", "normalised_us")


def measurement_values(measurement: Measurement) -> dict[str, object]:
    return named(measurement, _MEASUREMENT) | {
        "kind": str(measurement.kind),
        "policy": measurement.policy and asdict(measurement.policy),
        "samples_us": numbers_to_json(measurement.samples_us),
        "terms": {name: to_json_number(v) for name, v in measurement.terms.items()},
    }


def to_measurement(row: MeasurementRow) -> Measurement:
    return Measurement(
        kind=Kind(row.kind),
        samples_us=numbers_from_json(row.samples_us),
        terms={name: float(v) for name, v in row.terms.items()},
        policy=None if row.policy is None else to_policy(row.policy),
        **named(row, (*_MEASUREMENT, "taken_at")),
    )


def to_policy(values: Mapping[str, Any]) -> Policy:
    """Read a policy. Raises KeyError or ValueError if a part is missing or unknown."""
    return Policy(LaunchMode(values["launch"]), L2(values["l2"]), Clocks(values["clocks"]), values["batch"])


FIGURES = RowReader(
    MeasurementRow, "candidate_id kind device tflops median_us vs_baseline suspect normalised_us policy terms".split()
)
TERMS = ("predicted", "roofline_us", "peak_tflops_percent", "peak_gbs_percent")
"""those that a row of a list shows something of: which model made an estimate, and how near the peak it is"""
_NO_TERMS: Mapping[str, float] = {}


def read_figure(row: Sequence[Any], names: Sequence[str] = TERMS) -> tuple[int, int, Measurement]:
    """Read the columns of `FIGURES`: number, trial, and the measurement without samples, with terms of these names.

    Raises Damaged where the row is not what was written.
    """
    number, trial, kind, device, tflops, us, vs_baseline, suspect, normalised_us, policy, terms = FIGURES.read(row)
    stated = _read_terms(terms, names), suspect, _read_policy(policy), normalised_us
    return number, trial, Measurement(KINDS[kind], device, tflops, us, (), vs_baseline, *stated)


def _read_terms(text: str, names: Sequence[str]) -> Mapping[str, float]:
    """Read the terms of these names; a text that has none of them is not decoded."""
    if not any(name in text for name in names):
        return _NO_TERMS
    terms = json.loads(text)
    return {name: float(terms[name]) for name in names if name in terms}


@lru_cache(maxsize=1024)
def _read_policy(text: str | None) -> Policy | None:
    """Read a policy. A ledger has few of them, and a figure each."""
    values = None if text is None else json.loads(text)
    return None if values is None else to_policy(values)


def most_trusted(figures: Sequence[Measurement]) -> Measurement | None:
    """Return the last of the most trusted kind. `figures` come oldest first."""
    return min(reversed(figures), key=lambda m: m.precedence, default=None)


def last_sustained(figures: Sequence[Measurement]) -> Measurement | None:
    """Return the last figure of back-to-back runs. `figures` come oldest first."""
    return next((m for m in reversed(figures) if m.is_sustained), None)


def most_trusted_kind(figures: Iterable[Measurement]) -> Kind:
    """Return the most trusted kind of several figures; of none, the kind that claims least."""
    return min((m.kind for m in figures), key=precedence, default=Kind.ESTIMATED)


_BASELINE = ("name", "device", "median_us", "tflops")


def baseline_values(baseline: AnyBaseline) -> dict[str, object]:
    if isinstance(baseline, RefusedBaseline):
        untimed: dict[str, object] = {"samples_us": [], "policy": asdict(UNKNOWN_POLICY)}
        return untimed | named(baseline, ("name", "device", "reason"))
    stated = {"samples_us": numbers_to_json(baseline.samples_us), "policy": asdict(baseline.policy)}
    return named(baseline, _BASELINE) | stated


def to_baseline(row: BaselineRow) -> AnyBaseline:
    if row.reason is not None:
        return RefusedBaseline(row.name, row.device, row.reason, row.taken_at)
    samples, policy = numbers_from_json(row.samples_us), to_policy(row.policy)
    return Baseline(samples_us=samples, policy=policy, **named(row, (*_BASELINE, "taken_at")))


def profile_values(profile: Profile) -> dict[str, object]:
    figures = {name: to_json_number(value) for name, value in profile.figures.items()}
    return {"tool": profile.tool, "device": profile.device, "figures": figures, "remarks": list(profile.remarks)}


def to_profile(row: ProfileRow) -> Profile:
    figures = {name: float(value) for name, value in row.figures.items()}
    return Profile(row.tool, row.device, figures, tuple(row.remarks), row.taken_at)


_CANDIDATE = (
    "problem gpu config reason device occupancy operator retry_of taken_from evidence gate_version created_at"
    " finished_at"
).split()


def load_options(with_cubin: bool) -> tuple[ORMOption, ...]:
    """Load what `to_candidate` reads of many rows at once."""
    binary = joinedload(CandidateRow.binary)
    return (
        selectinload(CandidateRow.run),
        joinedload(CandidateRow.source),
        binary.joinedload(BinaryRow.machine_code) if with_cubin else binary,
        selectinload(CandidateRow.verdicts),
        selectinload(CandidateRow.measurements),
    )


def to_candidate(row: CandidateRow, with_cubin: bool) -> Candidate:
    """Return the candidate with its last verdict and the last figure of its most trusted kind.

    It has no source where that was pruned.
    """
    _require_named_rows(row)
    figures = [to_measurement(m) for m in row.measurements]
    return Candidate(
        trial=row.id,
        run=row.run_id,
        outcome=Outcome(row.outcome) if row.outcome else None,
        source=_to_source(row),
        binary=to_binary(row.binary, with_cubin) if row.binary else None,
        **last_verdicts([to_verdict(v) for v in row.verdicts]),
        measurement=most_trusted(figures),
        parents=tuple(row.parents),
        sustained=last_sustained(figures),
        imported_from=row.run.imported_from,
        **named(row, _CANDIDATE),
    )


def _require_named_rows(row: CandidateRow) -> None:
    """Raise Damaged where its source or its binary is missing: it would look like one that never had it."""
    named = {"source_sha256": (row.source_sha256, row.source), "binary_id": (row.binary_id, row.binary)}
    for column, (name, found) in named.items():
        if name is not None and found is None:
            raise Damaged(CandidateRow.__tablename__, row.id, column)


def _to_source(row: CandidateRow) -> Source | None:
    if row.source is None or row.source.packed is None:
        return None
    # set together with the source
    grid = cast(tuple[int, int, int], (row.grid_x, row.grid_y, row.grid_z))
    block_yz = cast(tuple[int, int], (row.block_y, row.block_z))
    then = tuple(map(read_next_kernel, row.next_kernels or ()))
    launch = Launch(grid, cast(int, row.threads), cast(int, row.shared_bytes), block_yz, then)
    text = unpacked(row.source.packed, SourceRow, row.source.sha256).decode()
    return Source(text, cast(str, row.entry), launch)


def to_run(row: RunRow) -> Run:
    device = Device(**named(row.device, Device.__slots__))
    return Run(device=device, **named(row, (name for name in Run.__slots__ if name != "device")))


def device_row(session: Session, device: Device) -> DeviceRow:
    """Return the row of just this device, or a new one."""
    same = {"name": device.name, "uuid": device.uuid, "arch": device.arch, "driver": device.driver}
    versions = dict(device.versions)
    known = session.scalars(select(DeviceRow).filter_by(**same))
    return next((row for row in known if row.versions == versions), None) or DeviceRow(**same, versions=versions)
