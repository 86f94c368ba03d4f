"""how many rows of threads a block has along y and z

The blocks of earlier candidates were one row along x.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    op.add_column("candidates", sa.Column("block_y", sa.Integer(), nullable=True))
    op.add_column("candidates", sa.Column("block_z", sa.Integer(), nullable=True))
    candidates = sa.table("candidates", sa.column("threads"), sa.column("block_y"), sa.column("block_z"))
    op.execute(candidates.update().where(candidates.c.threads.is_not(None)).values(block_y=1, block_z=1))
