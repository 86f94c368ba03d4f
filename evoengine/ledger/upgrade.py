"""Bring a ledger of an older schema to the present one, in one transaction.

Most of a change follows from the tables as `tables.py` declares them: Alembic compares the database with them, and adds
and drops what differs. Written here is what no comparison tells: what was renamed, and what new columns hold in rows of
before. A step names the schema that it came with, and is taken by ledgers of earlier ones.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any
from zlib import crc32

from sqlalchemy import (
    JSON,
    Column,
    Connection,
    LargeBinary,
    String,
    Table,
    bindparam,
    column,
    insert,
    inspect,
    select,
    table,
    text,
    update,
)

from evoengine.ledger import chains
from evoengine.ledger.checksums import RowReader, checked_columns, row_checksum
from evoengine.ledger.tables import VERSION_TABLE, Base, MachineCodeRow
from evoengine.passwords import hide_passwords
from evoengine.records import UNKNOWN_POLICY

if TYPE_CHECKING:
    # slow to import, and a database whose schema is this evoengine's does without
    from alembic.migration import MigrationContext
    from alembic.operations import Operations

REVISIONS = [f"{number:04}" for number in range(1, 13)]
"""of the schema, oldest first"""
UNKNOWN = json.dumps(asdict(UNKNOWN_POLICY))
"""of figures from before schema 0005"""
Step = str | Callable[["Operations"], None]
"""in SQL that both databases take, or a function"""
BATCH = 1000
"""rows whose checksums are written together"""


def migrate(connection: Connection) -> None:
    """Bring the tables to the newest schema, with what follows from one schema to the next.

    Views and standings are left to the caller: they follow from the tables.
    """
    # slow to import
    from alembic.autogenerate import produce_migrations
    from alembic.operations import Operations

    held: str = connection.scalars(text(f"SELECT version_num FROM {VERSION_TABLE}")).one()
    context = alembic_context(connection)
    op = Operations(context)
    _take(BEFORE, held, op)
    proposed = produce_migrations(context, Base.metadata).upgrade_ops
    for change in proposed.ops if proposed else ():
        for part in getattr(change, "ops", [change]):
            op.invoke(part)
    _take(AFTER, held, op)
    connection.execute(text(f"UPDATE {VERSION_TABLE} SET version_num = :newest"), {"newest": REVISIONS[-1]})


def alembic_context(connection: Connection) -> MigrationContext:
    """Return what Alembic compares a database by: the ledger's tables, and none of Optuna's beside them."""
    from alembic.migration import MigrationContext

    def is_ours(name: str | None, kind: str, parents: object) -> bool:
        return kind != "table" or name in Base.metadata.tables

    return MigrationContext.configure(connection, opts={"include_name": is_ours})


def _take(steps: Sequence[tuple[str, Step]], held: str, op: Operations) -> None:
    for came_with, step in steps:
        if held < came_with and isinstance(step, str):
            op.execute(step)
        elif held < came_with and not isinstance(step, str):
            step(op)


# ── before the tables are compared ──────────────────────────────────────────────────────────────────────────────────


def _allow_figures_without_tflops(op: Operations) -> None:
    with op.batch_alter_table("measurements") as measurements:
        measurements.alter_column("tflops", nullable=True)


def _name_policies_of_baselines(op: Operations) -> None:
    op.add_column("baselines", Column("policy", JSON()))
    op.execute(f"UPDATE baselines SET policy = '{UNKNOWN}'")
    with op.batch_alter_table("baselines") as baselines:
        baselines.alter_column("policy", existing_type=JSON(), nullable=False)


def _hash_cubins(op: Operations) -> None:
    op.add_column("binaries", Column("cubin_sha256", String(64), nullable=False, server_default=""))
    connection, binaries = op.get_bind(), table("binaries", *map(column, ("id", "cubin", "cubin_sha256")))
    for number in connection.scalars(select(binaries.c.id)).all():
        of_this = binaries.c.id == number
        cubin = connection.scalars(select(binaries.c.cubin).where(of_this)).one()
        sha256 = hashlib.sha256(cubin).hexdigest()
        connection.execute(update(binaries).where(of_this).values(cubin_sha256=sha256))


def _compress_texts_and_cubins(op: Operations) -> None:
    connection = op.get_bind()
    op.add_column("sources", Column("packed", LargeBinary()))
    sources = table("sources", column("sha256"), column("text"), column("packed", LargeBinary()))
    for sha256 in connection.scalars(select(sources.c.sha256)).all():
        of_this = sources.c.sha256 == sha256
        packed = zlib.compress(connection.scalars(select(sources.c.text).where(of_this)).one().encode())
        connection.execute(update(sources).where(of_this).values(packed=packed))
    _table_of(MachineCodeRow).create(connection)
    binaries = table("binaries", column("id"), column("cubin_sha256"), column("cubin"))
    known: set[str] = set()
    for number, sha256 in connection.execute(select(binaries.c.id, binaries.c.cubin_sha256)).all():
        cubin = connection.scalar(select(binaries.c.cubin).where(binaries.c.id == number))
        if cubin and sha256 not in known:
            known.add(sha256)
            connection.execute(insert(MachineCodeRow).values(sha256=sha256, packed=zlib.compress(cubin)))


def _rename_checksums(op: Operations) -> None:
    if any(found["name"] == "checksums" for found in inspect(op.get_bind()).get_columns("devices")):
        for name in SUMMED:
            op.execute(f"ALTER TABLE {name} RENAME COLUMN checksums TO checksum")


# ── after the tables were changed ───────────────────────────────────────────────────────────────────────────────────


def _hide_passwords(op: Operations) -> None:
    connection, runs = op.get_bind(), table("runs", column("id"), column("command"))
    for run, command in connection.execute(select(runs.c.id, runs.c.command)).all():
        connection.execute(update(runs).where(runs.c.id == run).values(command=hide_passwords(command)))


def _name_kernels(op: Operations) -> None:
    """Name the kernel of each run whose definition is kept by that alone: the text of its files is not known."""
    connection, runs = op.get_bind(), table("runs", *map(column, ("id", "definition", "kernel")))
    for run, definition in connection.execute(select(runs.c.id, runs.c.definition)).all():
        if definition is not None:
            kernel = hashlib.sha256(json.dumps(_stated(definition), sort_keys=True).encode()).hexdigest()
            connection.execute(update(runs).where(runs.c.id == run).values(kernel=kernel))


def _stated(definition: str) -> object:
    try:
        stated = json.loads(definition)
    except ValueError:
        return definition
    return {k: v for k, v in stated.items() if k != "space"} if isinstance(stated, dict) else stated


def _sum_rows_and_begin_chains(op: Operations) -> None:
    """Give each row one checksum in the place of one for each column, and note which rows there are.

    A row that is not what its checksums of before say stays damaged: it gets none. Rows of before schema 0008 had none,
    and are taken as they are.
    """
    rows: dict[str, type[Base]] = {mapper.class_.__tablename__: mapper.class_ for mapper in Base.registry.mappers}
    for name, columns in SUMMED.items():
        _restate(op.get_bind(), rows[name], columns.split())
    chains.begin_all(op.get_bind(), chains.UPGRADED)


def _restate(connection: Connection, row: type[Base], before: list[str]) -> None:
    rows, names = _table_of(row), tuple(checked_columns(row))
    selected = select(*RowReader(row, ()).columns).order_by(rows.c.id).limit(BATCH)
    change = update(rows).where(rows.c.id == bindparam("number")).values(checksum=bindparam("new"))
    last = 0
    while found := connection.execute(selected.where(rows.c.id > last)).all():
        changes: list[dict[str, Any]] = []
        for number, sums, *values in found:
            held = dict(zip(names, values, strict=True))
            changes.append({"number": number, "new": _restated(row, held, sums, before)})
        connection.execute(change, changes)
        last = found[-1][0]


def _restated(row: type[Base], held: dict[str, Any], sums: str | None, before: list[str]) -> str | None:
    expected = ((name, (sums or "")[n * WIDTH : (n + 1) * WIDTH]) for n, name in enumerate(before))
    if any(total and total != _sum_of_column(held[name], name) for name, total in expected):
        return None
    try:
        return row_checksum(row, held)
    except (TypeError, ValueError, AttributeError):  # of a value of another type
        return None


def _sum_of_column(value: object, name: str) -> str:
    if value is None or value != value:
        stored = b"\0"
    elif name.endswith("_at"):
        at = datetime.fromisoformat(value).replace(tzinfo=UTC) if isinstance(value, str) else value
        stored = at.astimezone(UTC).isoformat().encode() if isinstance(at, datetime) else b""
    elif isinstance(value, str):
        stored = value.encode(errors="surrogatepass")
    else:
        stored = repr(value).encode()
    return f"{crc32(stored):08x}"


WIDTH = 8
"""hexadecimal digits of the checksum of one column, of which a row of schemas 0008 to 0010 has one after the other"""
SUMMED = {
    "devices": "name uuid arch driver versions",
    "runs": "started_at finished_at status gpu problem device_id space_name space_sha256 space_text definition sampler "
    "objectives seed version host pid command gpu_definition imported_from trials seconds conditions",
    "binaries": "source_sha256 options arch compiler cubin_sha256 registers spill_bytes stack_bytes shared_bytes "
    "warnings mix compile_ms",
    "candidates": "run_id problem gpu config config_key parents operator created_at finished_at outcome reason device "
    "occupancy source_sha256 entry grid_x grid_y grid_z threads block_y block_z shared_bytes binary_id retry_of "
    "taken_from",
    "verdicts": "candidate_id device outcome reason cases wall_ms taken_at",
    "measurements": "candidate_id kind device tflops median_us samples_us vs_baseline terms suspect policy "
    "normalised_us taken_at",
    "baselines": "run_id name device median_us tflops samples_us policy taken_at",
    "profiles": "candidate_id tool device figures remarks taken_at",
}
"""table → the columns that those are of, in their order; what came later is taken as it is"""

BEFORE: list[tuple[str, Step]] = [
    ("0004", _allow_figures_without_tflops),
    ("0005", _name_policies_of_baselines),
    ("0006", "ALTER TABLE measurements RENAME COLUMN vs_sdpa TO vs_baseline"),
    ("0008", _hash_cubins),
    ("0009", _compress_texts_and_cubins),
    ("0011", _rename_checksums),
    ("0012", "DROP TABLE IF EXISTS standings"),
    ("0012", "DROP TABLE IF EXISTS rankings"),
]
"""schema that a step came with, and the step"""
AFTER: list[tuple[str, Step]] = [
    ("0005", f"UPDATE measurements SET policy = '{UNKNOWN}' WHERE kind = 'measured'"),
    ("0007", "UPDATE candidates SET block_y = 1, block_z = 1 WHERE threads IS NOT NULL"),
    ("0008", _hide_passwords),
    ("0010", _name_kernels),
    ("0011", _sum_rows_and_begin_chains),
]


def _table_of(row: type[Base]) -> Table:
    assert isinstance(row.__table__, Table)
    return row.__table__
