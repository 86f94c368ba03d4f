"""what a verdict belongs to: the kernel that a folder brings, the gate's version; several kernels; unfinished ones"""

from __future__ import annotations

import hashlib
import json

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"


def upgrade() -> None:
    op.add_column("runs", sa.Column("kernel", sa.String(64), nullable=True))
    op.add_column("candidates", sa.Column("gate_version", sa.Integer(), nullable=True))
    op.add_column("candidates", sa.Column("next_kernels", sa.JSON(), nullable=True))
    op.add_column("binaries", sa.Column("other_kernels", sa.JSON(), nullable=True))
    op.add_column("verdicts", sa.Column("coverage", sa.JSON(), nullable=True))
    op.add_column("verdicts", sa.Column("gate_version", sa.Integer(), nullable=True))
    op.add_column("verdicts", sa.Column("short_only", sa.Integer(), nullable=True))
    _name_kernels()


def _name_kernels() -> None:
    """Name the kernel of each run whose definition is kept by that alone: the text of its files is not known."""
    connection = op.get_bind()
    runs = sa.table("runs", sa.column("id"), sa.column("definition"), sa.column("kernel"), sa.column("checksums"))
    for run, definition in connection.execute(sa.select(runs.c.id, runs.c.definition)).all():
        if definition is not None:
            kernel = hashlib.sha256(json.dumps(_stated(definition), sort_keys=True).encode()).hexdigest()
            connection.execute(runs.update().where(runs.c.id == run).values(kernel=kernel))


def _stated(definition: str) -> object:
    try:
        stated = json.loads(definition)
    except ValueError:
        return definition
    return {k: v for k, v in stated.items() if k != "space"} if isinstance(stated, dict) else stated
