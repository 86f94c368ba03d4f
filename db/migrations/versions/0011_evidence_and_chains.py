"""evidence of outcomes, one checksum for each row, and chains that note every row of a run

A row that is not what its checksums of before say stays damaged: it gets none. Rows of before schema 0008 had none, and
are taken as they are. Chains begin with what the ledger holds now.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any
from zlib import crc32

import sqlalchemy as sa
from alembic import op

from evoengine.ledger import chains

revision = "0011"
down_revision = "0010"

BATCH = 1000
WIDTH = 8
"""hexadecimal digits of the checksum of one column, of which a row had one after the other"""
TIME = "%Y-%m-%d %H:%M:%S.%f"
COLUMNS = {
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
"""table → the columns that schema 0009 had checksums of, in their order; what came later is taken as it is"""


def upgrade() -> None:
    op.add_column("candidates", sa.Column("evidence", sa.JSON(), nullable=True))
    connection = op.get_bind()
    for table, columns in COLUMNS.items():
        op.execute(f"ALTER TABLE {table} RENAME COLUMN checksums TO checksum")
        _restate(connection, table, columns.split())
    op.create_table(
        "chains",
        sa.Column("run_id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("links", sa.Integer(), nullable=False),
        sa.Column("sum", sa.String(8), nullable=False),
        sa.PrimaryKeyConstraint("run_id", name="pk_chains"),
    )
    op.create_table(
        "links",
        sa.Column("run_id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("number", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("what", sa.String(16), nullable=False),
        sa.Column("rows", sa.Text(), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("sum", sa.String(8), nullable=False),
        sa.PrimaryKeyConstraint("run_id", "number", name="pk_links"),
    )
    chains.begin_all(connection, chains.UPGRADED)


def _restate(connection: sa.Connection, name: str, before: list[str]) -> None:
    """One checksum in the place of one for each column."""
    inspected = {column["name"]: column["type"] for column in sa.inspect(connection).get_columns(name)}
    columns = sorted(column for column in inspected if column not in ("id", "checksum"))
    table = sa.table(name, sa.column("id"), sa.column("checksum"), *map(sa.column, columns))
    selected = [
        sa.cast(table.c[column], sa.Text()) if isinstance(inspected[column], sa.JSON) else table.c[column]
        for column in columns
    ]
    to_stored = {column: _converter(kind) for column, kind in inspected.items()}
    change = table.update().where(table.c.id == sa.bindparam("number")).values(checksum=sa.bindparam("new"))
    last = 0
    while rows := connection.execute(
        sa.select(table.c.id, table.c.checksum, *selected).where(table.c.id > last).order_by(table.c.id).limit(BATCH)
    ).all():
        changes = []
        for number, sums, *values in rows:
            held = dict(zip(columns, values, strict=True))
            changes.append(
                {"number": number, "new": _new_sum(held, to_stored) if _is_sound(held, sums, before) else None}
            )
        connection.execute(change, changes)
        last = rows[-1][0]


def _is_sound(held: dict[str, Any], sums: str | None, before: list[str]) -> bool:
    expected = ((name, (sums or "")[n * WIDTH : (n + 1) * WIDTH]) for n, name in enumerate(before))
    return all(not total or total == _old_sum(held[name], name) for name, total in expected)


def _old_sum(value: object, name: str) -> str:
    if value is None or value != value:
        stored = b"\0"
    elif name.endswith("_at"):
        at = datetime.fromisoformat(value).replace(tzinfo=UTC) if isinstance(value, str) else value
        stored = at.astimezone(UTC).isoformat().encode()
    elif isinstance(value, str):
        stored = value.encode(errors="surrogatepass")
    else:
        stored = repr(value).encode()
    return f"{crc32(stored):08x}"


def _new_sum(held: dict[str, Any], to_stored: dict[str, Callable[[Any], object]]) -> str:
    stored = [(name, to_stored[name](value)) for name, value in held.items() if value is not None and value == value]
    return f"{crc32(repr(stored).encode()):08x}"


def _time(value: datetime | str) -> str:
    if isinstance(value, str):
        return value if "." in value else f"{value}.000000"
    return value.astimezone(UTC).strftime(TIME)


def _converter(kind: object) -> Callable[[Any], object]:
    if isinstance(kind, sa.Float):
        return lambda value: float(value) + 0.0
    if isinstance(kind, sa.DateTime):
        return _time
    if isinstance(kind, sa.JSON):
        return lambda value: value if isinstance(value, str) else json.dumps(value)
    return lambda value: value
