"""a run keeps the GPU that a file described, so that later commands know its limits"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"


def upgrade() -> None:
    op.add_column("runs", sa.Column("gpu_definition", sa.JSON(), nullable=True))
