"""runs keep what they aimed at"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    op.add_column("runs", sa.Column("objectives", sa.Text(), nullable=False, server_default="tflops"))
