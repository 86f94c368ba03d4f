"""figures whose operations nobody counted, as other tuners record them"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    with op.batch_alter_table("measurements") as table:
        table.alter_column("tflops", existing_type=sa.Double(), nullable=True)
