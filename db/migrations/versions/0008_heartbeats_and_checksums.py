"""searches show that they live, and what is stored can be checked: cubins by SHA-256, rows by CRC-32

Rows of before have no checksums: nobody can tell whether they are still as they were written. Passwords that their
commands hold are hidden.
"""

from __future__ import annotations

import hashlib

import sqlalchemy as sa
from alembic import op

from evoengine.passwords import hide_passwords

revision = "0008"
down_revision = "0007"

CHECKED = ("devices", "runs", "binaries", "candidates", "verdicts", "measurements", "baselines", "profiles")


def upgrade() -> None:
    for table in CHECKED:
        op.add_column(table, sa.Column("checksums", sa.Text(), nullable=True))
    op.add_column("runs", sa.Column("imported_from", sa.Text(), nullable=True))
    op.add_column("runs", sa.Column("gpu_definition", sa.JSON(), nullable=True))
    op.create_table(
        "heartbeats",
        sa.Column("run_id", sa.Integer(), nullable=False),
        sa.Column("fence", sa.Integer(), nullable=False),
        sa.Column("beat_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name="fk_heartbeats_run_id"),
        sa.PrimaryKeyConstraint("run_id", name="pk_heartbeats"),
    )
    # SQLite adds no column that must not be null without a default; the empty text is no binary's checksum
    op.add_column("binaries", sa.Column("cubin_sha256", sa.String(64), nullable=False, server_default=""))
    _fill_cubin_sha256(op.get_bind())
    _hide_passwords(op.get_bind())


def _fill_cubin_sha256(connection: sa.Connection) -> None:
    binaries = sa.table("binaries", sa.column("id"), sa.column("cubin"), sa.column("cubin_sha256"))
    for number in connection.scalars(sa.select(binaries.c.id)).all():
        of_this = binaries.c.id == number
        cubin = connection.scalar(sa.select(binaries.c.cubin).where(of_this))
        checksum = hashlib.sha256(cubin).hexdigest()
        connection.execute(binaries.update().where(of_this).values(cubin_sha256=checksum))


def _hide_passwords(connection: sa.Connection) -> None:
    runs = sa.table("runs", sa.column("id"), sa.column("command"))
    for number, command in connection.execute(sa.select(runs.c.id, runs.c.command)).all():
        connection.execute(runs.update().where(runs.c.id == number).values(command=hide_passwords(command)))
