"""how figures were measured, and their times normalised by a baseline of the same rounds

Figures measured before get a policy that says it is unknown; estimates and what other tuners recorded have none.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"

UNKNOWN = {"launch": "unknown", "l2": "unknown", "clocks": "unknown", "batch": 0}


def upgrade() -> None:
    op.add_column("measurements", sa.Column("policy", sa.JSON(), nullable=True))
    op.add_column("measurements", sa.Column("normalised_us", sa.Double(), nullable=True))
    op.add_column("baselines", sa.Column("policy", sa.JSON(), nullable=True))
    measurements = sa.table("measurements", sa.column("kind"), sa.column("policy", sa.JSON()))
    op.execute(measurements.update().where(measurements.c.kind == "measured").values(policy=UNKNOWN))
    op.execute(sa.table("baselines", sa.column("policy", sa.JSON())).update().values(policy=UNKNOWN))
    with op.batch_alter_table("baselines") as table:
        table.alter_column("policy", existing_type=sa.JSON(), nullable=False)
