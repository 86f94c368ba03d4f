"""Between the records of the road and the rows of the tables, both ways, losing nothing."""

from __future__ import annotations

import hashlib
import json
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, fields, is_dataclass
from enum import Enum
from functools import cache, lru_cache
from itertools import islice
from types import NoneType, UnionType
from typing import Any, TypedDict, TypeVar, cast, get_args, get_origin, get_type_hints

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
    UNKNOWN_POLICY,
    AnyBaseline,
    Baseline,
    Binary,
    Candidate,
    Device,
    KernelResources,
    Kind,
    Launch,
    Measurement,
    NextKernel,
    Outcome,
    Policy,
    Profile,
    RefusedBaseline,
    Run,
    Source,
    Verdict,
    named,
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


def batches(values: Iterable[T], size: int | None = None) -> Iterator[list[T]]:
    """Yield the values in their order, at most `size` together, BATCH where it is not given."""
    left = iter(values)
    while some := list(islice(left, size or BATCH)):
        yield some


# ── records as columns and as JSON ────────────────────────────────────────────────────────────────────────────────────


def to_json(value: object) -> Any:
    """Return a value as JSON, which has no NaN and no infinity: those become "nan", "inf" and "-inf"."""
    if isinstance(value, Enum):
        return str(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else str(float(value))
    if isinstance(value, Mapping):
        return {name: to_json(of_name) for name, of_name in value.items()}
    if isinstance(value, (tuple, list)):
        return list(map(to_json, value))
    if is_dataclass(value):
        return {field.name: to_json(getattr(value, field.name)) for field in fields(value)}
    return value


@cache
def json_reader(kind: Any) -> Callable[[Any], Any]:
    """Return what reads a value of the type `kind` from what `to_json` makes of it.

    The function raises KeyError, TypeError or ValueError if a part is missing, unknown or of another type.
    """
    origin, parts = get_origin(kind), [part for part in get_args(kind) if part is not NoneType]
    if origin is UnionType and len(parts) == 1:
        read = json_reader(parts[0])
        return lambda value: None if value is None else read(value)
    if origin is tuple:
        item = json_reader(parts[0])
        return lambda value: tuple(map(item, value))
    if origin is Mapping:
        of_name = json_reader(parts[1])
        return lambda value: {name: of_name(part) for name, part in value.items()}
    if isinstance(kind, type) and is_dataclass(kind):
        hints = get_type_hints(kind)
        made: Callable[..., Any] = kind
        return lambda value: made(**{name: json_reader(hints[name])(part) for name, part in value.items()})
    return kind if kind is float or (isinstance(kind, type) and issubclass(kind, Enum)) else lambda value: value


ROW_OF: Mapping[type, type[Base]] = {
    Verdict: VerdictRow,
    Measurement: MeasurementRow,
    Baseline: BaselineRow,
    RefusedBaseline: BaselineRow,
    Profile: ProfileRow,
}
"""records of which a row has a column for each field of its name"""


@cache
def _columns(kind: Any) -> dict[str, Callable[[Any], Any]]:
    """Return what reads each column of a record's row. A number that is not in JSON is kept as it is."""
    hints = get_type_hints(kind)
    shared = [name for name in hints if name in ROW_OF[kind].__table__.columns]
    plain = (float, float | None)
    return {name: (lambda v: v) if hints[name] in plain else json_reader(hints[name]) for name in shared}


def record_values(record: Verdict | Measurement | AnyBaseline | Profile) -> dict[str, object]:
    """Return the columns of a record's row, without the time at which it was taken."""
    kind: Any = type(record)
    values = {name: getattr(record, name) for name in _columns(kind) if name != "taken_at"}
    values = {name: value if isinstance(value, float) else to_json(value) for name, value in values.items()}
    if isinstance(record, Verdict):
        values["short_only"] = None if record.whole else 1
    if isinstance(record, RefusedBaseline):
        values |= {"samples_us": [], "policy": to_json(UNKNOWN_POLICY)}
    return values


def to_record(kind: type[T], row: Any) -> T:
    """Return the record of a row, or of what has its columns as attributes; see `json_reader` for errors."""
    columns: Mapping[str, Callable[[Any], Any]] = _columns(cast(Any, kind))
    values = {name: read(getattr(row, name)) for name, read in columns.items()}
    return kind(**values, **({"whole": not row.short_only} if kind is Verdict else {}))


def to_baseline(row: Any) -> AnyBaseline:
    """Return the record of a baseline that was timed, or of one that was refused; see `to_record`."""
    return to_record(Baseline, row) if row.reason is None else to_record(RefusedBaseline, row)


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
    policy: Policy | None = json_reader(Policy | None)(values)
    return policy


def most_trusted(figures: Sequence[Measurement]) -> Measurement | None:
    """Return the last of the most trusted kind. `figures` come oldest first."""
    return min(reversed(figures), key=lambda m: m.precedence, default=None)


def last_sustained(figures: Sequence[Measurement]) -> Measurement | None:
    """Return the last figure of back-to-back runs. `figures` come oldest first."""
    return next((m for m in reversed(figures) if m.is_sustained), None)


def most_trusted_kind(figures: Iterable[Measurement]) -> Kind:
    """Return the most trusted kind of several figures; of none, the kind that claims least."""
    return min((m.kind for m in figures), key=precedence, default=Kind.ESTIMATED)


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
    figures = [to_record(Measurement, m) for m in row.measurements]
    return Candidate(
        trial=row.id,
        run=row.run_id,
        outcome=Outcome(row.outcome) if row.outcome else None,
        source=_to_source(row),
        binary=to_binary(row.binary, with_cubin) if row.binary else None,
        **last_verdicts([to_record(Verdict, v) for v in row.verdicts]),
        measurement=most_trusted(figures),
        parents=tuple(row.parents),
        sustained=last_sustained(figures),
        imported_from=row.run.imported_from,
        **named(row, _CANDIDATE),
    )


def _require_named_rows(row: CandidateRow) -> None:
    """Raise Damaged where its source or its binary is missing: it would look like one that never had it."""
    rows = {"source_sha256": (row.source_sha256, row.source), "binary_id": (row.binary_id, row.binary)}
    for column, (name, found) in rows.items():
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
