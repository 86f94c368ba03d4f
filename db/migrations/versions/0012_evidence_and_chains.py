"""evidence of outcomes that a dead process or a limit led to"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0009"


def upgrade() -> None:
    op.add_column("candidates", sa.Column("evidence", sa.JSON(), nullable=True))
