"""first schema"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    op.create_table(
        "devices",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("uuid", sa.Text()),
        sa.Column("arch", sa.Text()),
        sa.Column("driver", sa.Text()),
        sa.Column("versions", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_devices"),
    )
    op.create_table(
        "sources",
        sa.Column("sha256", sa.String(length=64), nullable=False),
        sa.Column("text", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("sha256", name="pk_sources"),
    )
    op.create_table(
        "binaries",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("source_sha256", sa.String(length=64), nullable=False),
        sa.Column("options", sa.Text(), nullable=False),
        sa.Column("arch", sa.Text(), nullable=False),
        sa.Column("compiler", sa.Text(), nullable=False),
        sa.Column("cubin", sa.LargeBinary(), nullable=False),
        sa.Column("registers", sa.Integer(), nullable=False),
        sa.Column("spill_bytes", sa.Integer(), nullable=False),
        sa.Column("stack_bytes", sa.Integer(), nullable=False),
        sa.Column("shared_bytes", sa.Integer(), nullable=False),
        sa.Column("warnings", sa.JSON(), nullable=False),
        sa.Column("mix", sa.JSON(), nullable=False),
        sa.Column("compile_ms", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["source_sha256"], ["sources.sha256"], name="fk_binaries_source_sha256"),
        sa.PrimaryKeyConstraint("id", name="pk_binaries"),
        sa.UniqueConstraint(
            "source_sha256", "options", "arch", "compiler", name="uq_binaries_source_sha256_options_arch_compiler"
        ),
    )
    op.create_table(
        "runs",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("finished_at", sa.DateTime(timezone=True)),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("gpu", sa.Text(), nullable=False),
        sa.Column("problem", sa.Text(), nullable=False),
        sa.Column("device_id", sa.Integer(), nullable=False),
        sa.Column("space_name", sa.Text(), nullable=False),
        sa.Column("space_sha256", sa.String(length=64), nullable=False),
        sa.Column("space_text", sa.Text(), nullable=False),
        sa.Column("sampler", sa.Text(), nullable=False),
        sa.Column("seed", sa.BigInteger(), nullable=False),
        sa.Column("version", sa.Text(), nullable=False),
        sa.Column("host", sa.Text(), nullable=False),
        sa.Column("pid", sa.Integer(), nullable=False),
        sa.Column("command", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["device_id"], ["devices.id"], name="fk_runs_device_id"),
        sa.PrimaryKeyConstraint("id", name="pk_runs"),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "baselines",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("run_id", sa.Integer(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("device", sa.Text(), nullable=False),
        sa.Column("median_us", sa.Double(), nullable=False),
        sa.Column("tflops", sa.Double(), nullable=False),
        sa.Column("samples_us", sa.JSON(), nullable=False),
        sa.Column("taken_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name="fk_baselines_run_id"),
        sa.PrimaryKeyConstraint("id", name="pk_baselines"),
    )
    op.create_index("ix_baselines_run_id", "baselines", ["run_id"])
    op.create_table(
        "candidates",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("run_id", sa.Integer(), nullable=False),
        sa.Column("problem", sa.Text(), nullable=False),
        sa.Column("gpu", sa.Text(), nullable=False),
        sa.Column("config", sa.JSON(), nullable=False),
        sa.Column("config_key", sa.Text(), nullable=False),
        sa.Column("parents", sa.JSON(), nullable=False),
        sa.Column("operator", sa.Text()),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("finished_at", sa.DateTime(timezone=True)),
        sa.Column("outcome", sa.String(length=16)),
        sa.Column("reason", sa.Text()),
        sa.Column("device", sa.Text()),
        sa.Column("occupancy", sa.Double()),
        sa.Column("source_sha256", sa.String(length=64)),
        sa.Column("entry", sa.Text()),
        sa.Column("grid_x", sa.Integer()),
        sa.Column("grid_y", sa.Integer()),
        sa.Column("grid_z", sa.Integer()),
        sa.Column("threads", sa.Integer()),
        sa.Column("shared_bytes", sa.Integer()),
        sa.Column("binary_id", sa.Integer()),
        sa.ForeignKeyConstraint(["binary_id"], ["binaries.id"], name="fk_candidates_binary_id"),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name="fk_candidates_run_id"),
        sa.ForeignKeyConstraint(["source_sha256"], ["sources.sha256"], name="fk_candidates_source_sha256"),
        sa.PrimaryKeyConstraint("id", name="pk_candidates"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_candidates_binary_id", "candidates", ["binary_id"])
    op.create_index("ix_candidates_gpu_problem", "candidates", ["gpu", "problem"])
    op.create_index("ix_candidates_run_id", "candidates", ["run_id"])
    op.create_index("ix_candidates_source_sha256", "candidates", ["source_sha256"])
    op.create_table(
        "measurements",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("candidate_id", sa.Integer(), nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("device", sa.Text(), nullable=False),
        sa.Column("tflops", sa.Double(), nullable=False),
        sa.Column("median_us", sa.Double(), nullable=False),
        sa.Column("samples_us", sa.JSON(), nullable=False),
        sa.Column("vs_sdpa", sa.Double()),
        sa.Column("terms", sa.JSON(), nullable=False),
        sa.Column("suspect", sa.Text()),
        sa.Column("taken_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["candidate_id"], ["candidates.id"], name="fk_measurements_candidate_id"),
        sa.PrimaryKeyConstraint("id", name="pk_measurements"),
    )
    op.create_index("ix_measurements_candidate_id", "measurements", ["candidate_id"])
    op.create_table(
        "verdicts",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("candidate_id", sa.Integer(), nullable=False),
        sa.Column("device", sa.Text(), nullable=False),
        sa.Column("outcome", sa.String(length=16)),
        sa.Column("reason", sa.Text()),
        sa.Column("cases", sa.JSON(), nullable=False),
        sa.Column("wall_ms", sa.Double(), nullable=False),
        sa.Column("taken_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["candidate_id"], ["candidates.id"], name="fk_verdicts_candidate_id"),
        sa.PrimaryKeyConstraint("id", name="pk_verdicts"),
    )
    op.create_index("ix_verdicts_candidate_id", "verdicts", ["candidate_id"])
