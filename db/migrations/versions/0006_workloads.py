"""figures are held against any workload's baseline, and runs keep the definition of a kernel that somebody brought"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    with op.batch_alter_table("measurements") as table:
        table.alter_column("vs_sdpa", new_column_name="vs_baseline", existing_type=sa.Double())
    op.add_column("runs", sa.Column("definition", sa.Text(), nullable=True))
