"""the time and place by which each candidate is ranked

They follow from the figures and are made after the upgrade. Schemas 0009 to 0011 kept less of them.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"


def upgrade() -> None:
    op.execute("DROP TABLE IF EXISTS standings")
    op.execute("DROP TABLE IF EXISTS rankings")
    op.create_table(
        "rankings",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("problem", sa.Text(), nullable=False),
        sa.Column("gpu", sa.Text(), nullable=False),
        sa.Column("kernel", sa.String(64), nullable=False),
        sa.Column("precedence", sa.Integer(), nullable=False),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("device", sa.Text(), nullable=False),
        sa.Column("policy", sa.Text(), nullable=False),
        sa.Column("gate_version", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_rankings"),
        sa.UniqueConstraint(
            "problem", "gpu", "kernel", "precedence", "device", "policy", "gate_version", name="uq_rankings"
        ),
    )
    op.create_table(
        "standings",
        sa.Column("candidate_id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("ranking_id", sa.Integer(), nullable=False),
        sa.Column("run_id", sa.Integer(), nullable=False),
        sa.Column("figure_id", sa.Integer(), nullable=False),
        sa.Column("us", sa.Double(), nullable=False),
        sa.Column("final_of_run", sa.Double(), nullable=True),
        sa.Column("final_place", sa.Double(), nullable=True),
        sa.Column("counted_us", sa.Double(), nullable=False),
        sa.Column("place", sa.Integer(), nullable=False),
        sa.Column("run_counted_us", sa.Double(), nullable=False),
        sa.Column("run_place", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(["candidate_id"], ["candidates.id"], name="fk_standings_candidate_id"),
        sa.ForeignKeyConstraint(["ranking_id"], ["rankings.id"], name="fk_standings_ranking_id"),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name="fk_standings_run_id"),
        sa.PrimaryKeyConstraint("candidate_id", name="pk_standings"),
    )
    for columns in (
        ["ranking_id", "counted_us", "place", "us"],
        ["run_id", "ranking_id", "run_counted_us", "run_place", "us"],
        ["ranking_id", "figure_id"],
    ):
        op.create_index(f"ix_standings_{'_'.join(columns)}", "standings", columns)
    adjusted = sa.text("final_of_run IS NOT NULL OR counted_us <> us OR run_counted_us <> us")
    op.create_index(
        "ix_standings_adjusted", "standings", ["ranking_id"], sqlite_where=adjusted, postgresql_where=adjusted
    )
